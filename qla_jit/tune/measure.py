"""Verifies and times one kernel on the GPU; runs inside the worker process.

Three seeds guard against a kernel that is right by accident: two before the timing, and one whose data replaces the
inputs under the very graph that was timed.  Outputs are NaN before each check, so whatever is not written is seen.
Timing: the launch is captured into a CUDA graph, and before each replay a buffer larger than the L2 cache is
overwritten, because a layer's weights pass through the cache between two calls of a real model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..config import SPLIT_KERNELS, Problem
from ..segments import least_segment_chunks
from .clocks import Clocks

FLUSH_BYTES = 256 << 20
MIN_SAMPLES = 5
SAMPLING_S = 1.0  # a slow kernel gets fewer samples rather than more time
#: Checked besides the workload itself: one token, around one chunk, and a tail.
EDGE_LENGTHS = (1, 63, 64, 65, 130, 257)
EDGE_GATES = ("none", "violent")  # the workload itself has mild decay on most heads and none on the others


def edge_lengths(problem: Problem) -> tuple[int, ...]:
    """`EDGE_LENGTHS`; for the kernels of a split, on sequences cut as finely as can be: one chunk, too short to be cut,
    two segments with a last one that is not whole and with one that is, and four, of which the last is one token more.
    """
    if problem.kernel not in SPLIT_KERNELS:
        return EDGE_LENGTHS
    least = least_segment_chunks(problem) * problem.chunk_size
    return 1, 2 * least - problem.chunk_size, 2 * least - 1, 2 * least, 4 * least + 1


@dataclass
class Measurement:
    """What the worker answers: status and reason, times in µs, the largest relative error seen, seconds spent, and the
    clocks while it was timed."""

    status: str = "ok"
    reason: str = ""
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    verify_s: float = 0.0
    measure_s: float = 0.0
    sm_mhz: int | None = None
    memory_mhz: int | None = None


class Bench:
    """The cases of one (problem, lengths): fresh data per seed, and one set of tensors that kernels run on."""

    def __init__(self, device: str, make_case: Callable | None = None):
        if make_case is None:
            from ..harness import make_case
        self._make_case = make_case
        self._device = device
        self._key: object = None
        self._cases: dict = {}
        self._arenas: dict = {}
        self._flush = None

    def case(self, problem: Problem, lengths: Sequence[int], seed: int, gates: str = "bench", **cut):
        """A cached case; another problem frees the previous ones.  cut: further arguments of `harness.make_case`."""
        if self._key != problem:
            self._key, self._cases, self._arenas = problem, {}, {}
        key = (tuple(lengths), seed, gates, *cut.items())
        if key not in self._cases:
            self._cases[key] = self._make_case(problem, lengths, seed, self._device, gates=gates, **cut)
        return self._cases[key]

    def arena(self, source, lengths: Sequence[int], **cut):
        """The one set of tensors that kernels run on, of the shapes of ``source``, a case of the problem at hand."""
        key = (tuple(lengths), *cut.items())
        if key not in self._arenas:
            self._arenas[key] = source.copy()
        return self._arenas[key]

    def forget(self) -> None:
        """Free all tensors, after running out of memory."""
        self._key, self._cases, self._arenas, self._flush = None, {}, {}, None

    def flush(self) -> None:
        import torch

        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self._device)
        self._flush.zero_()


def measure(
    bench: Bench,
    kernel,
    problem: Problem,
    lengths: Sequence[int],
    seed: int,
    samples: int,
    verify: bool,
    stage: Callable[[str], None],
    observe: Callable[[], Clocks] = Clocks,
    asked: Mapping[str, object] | None = None,
) -> Measurement:
    """Verify (unless it was verified before in this sweep), time, and verify the timed graph on fresh data.

    asked: what the workload says beyond its lengths, `Workload.case`.
    """
    found = Measurement()
    stage("data")
    seeds = (seed, seed + 1, seed + 2)
    asked = asked or {}
    data = [bench.case(problem, lengths, s, **asked) for s in (seeds if verify else seeds[:1])]
    arena = bench.arena(data[0], lengths, **asked)
    stage("verify")
    started = time.perf_counter()
    if verify:
        edges = {gates: bench.case(problem, edge_lengths(problem), seed, gates) for gates in EDGE_GATES}
        checks = [
            *((f"edge lengths, {gates} decay", case, None) for gates, case in edges.items()),
            (f"seed {seed}", arena, data[0]),
            (f"seed {seed + 1}", arena, data[1]),
        ]
        for name, case, source in checks:
            if not _is_right(found, name, case, source, lambda case=case: case.launch(kernel)):
                found.verify_s = time.perf_counter() - started
                return found
    else:
        arena.refill(data[0])
    found.verify_s = time.perf_counter() - started

    stage("measure")
    started = time.perf_counter()
    graph = _captured(arena, kernel)
    taken, clocks = _timed(bench, graph, samples, observe)
    found.sm_mhz, found.memory_mhz = clocks.sm_mhz, clocks.memory_mhz
    found.measure_s = time.perf_counter() - started

    if verify:
        stage("recheck")
        started = time.perf_counter()
        right = _is_right(found, f"graph replay, seed {seed + 2}", arena, data[2], graph.replay)
        found.verify_s += time.perf_counter() - started
        if not right:
            return found
    found.samples_us = taken
    return found


def _is_right(found: Measurement, name: str, case, source, launch: Callable[[], None]) -> bool:
    import torch

    if source is not None:
        case.refill(source)
    case.poison()
    launch()
    torch.cuda.synchronize()
    error, tolerance = float(case.error()), float(case.tolerance)
    if not math.isfinite(error):
        found.status, found.reason, found.error = "nonfinite", f"{name}: output holds NaN or infinity", None
        return False
    found.error = max(error, found.error or 0.0)
    if error > tolerance:
        found.status, found.reason = "wrong", f"{name}: relative error {error:.3g} > tolerance {tolerance:.3g}"
        return False
    return True


def _captured(case, kernel):
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # PyTorch wants one ordinary launch on a side stream before a capture
        case.launch(kernel)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.launch(kernel)
    torch.cuda.synchronize()
    return graph


def _timed(bench: Bench, graph, samples: int, observe: Callable[[], Clocks]) -> tuple[tuple[float, ...], Clocks]:
    import torch

    def once() -> tuple:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        bench.flush()
        start.record()
        graph.replay()
        end.record()
        return start, end

    for _ in range(3):
        warm = once()
    torch.cuda.synchronize()
    one_s = warm[0].elapsed_time(warm[1]) / 1e3
    count = max(MIN_SAMPLES, min(samples, int(SAMPLING_S / max(one_s, 1e-9))))
    events = [once() for _ in range(count)]
    clocks = observe()  # while the card still works on what was queued
    torch.cuda.synchronize()
    return tuple(round(start.elapsed_time(end) * 1e3, 3) for start, end in events), clocks
