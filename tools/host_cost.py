#!/usr/bin/env python3
"""Host time of a warmed call above its launches: everything runs but the kernels, which are replaced by nothing.

    python tools/host_cost.py [--calls 100] [--json]
    python tools/host_cost.py --launches [--heads 2:8] [--lengths 1024*8]      (on a card)
    python tools/host_cost.py --backward [--heads 2:8] [--lengths 1024*8]
    python tools/host_cost.py --plans

On a card tensors, allocations and streams are those of the card; elsewhere CPU tensors take the same way.  Prints the
least over rounds of the mean time of a call in microseconds, and its number of launches, per signature: whatever else
a host does only adds to the time.  With --launches the kernels run, in bursts short enough that no launch waits for the
card, and the parts of a call are timed one by one.  --backward: when each launch of a backward starts and returns, as
medians of lone calls of `torch.autograd.grad`; on a card with the kernels, behind a write to 256 MB.  --plans: what a
plan takes whose lengths were not planned before.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import statistics
import time
from types import SimpleNamespace

import torch

from qla_jit import Workspace, chunk_gated_delta_rule, dispatch, handles, op, open_db, validate
from qla_jit.config import BACKWARD, FORWARD, OpConfig
from qla_jit.numerics import make_inputs
from qla_jit.segments import DEFAULT_WINDOW
from qla_jit.split_models import SplitModels
from qla_jit.split_plan import plan_split
from qla_jit.workload import lengths_of

ROUNDS = 300
BURSTS, BURST = 60, 40  # the card queues far more than these launches
HEADS = (16, 64, 128, 128)
LENGTHS = (100, 28, 128)
HEADS_TO_SPLIT = (2, 8, 128, 128)
LENGTHS_TO_SPLIT = (8192,)
LONE_CALLS = 41
FLUSH_BYTES = 256 << 20
#: Sequences that new plans are timed for.
PLANNED = {
    "1,000 sequences": [1 + 7919 * i % 2000 for i in range(1000)],
    "40 sequences": [700 + 37 * i for i in range(40)],
    "two long ones": [4096, 28672],
    "a long one": [32768],
}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h

launches = itertools.count()


def without_kernels(on_card: bool) -> None:
    """Replace building, loading and launching for the rest of the process."""
    op.build.ensure = lambda spec, store: SimpleNamespace(spec=spec, report={})
    op.runtime.load = lambda artifact: lambda *arguments: next(launches)
    if not on_card:
        # As on a card, memory that is freed is used again instead of given back to the system.
        for option, value in ((M_TRIM_THRESHOLD, 2**30), (M_MMAP_MAX, 0)):
            ctypes.CDLL(None).mallopt(option, value)
        dispatch._arch_name = lambda index: "sm90"
        dispatch._has_several_cards = lambda: False
        handles._has_handles = lambda device: True
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
        validate.Call.runs_kernels = property(lambda call: not call.is_empty)


def signatures(device: str) -> dict[str, dict]:
    """Keyword arguments of the calls that are timed."""
    x = make_inputs(LENGTHS, *HEADS, device=device)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), x.tokens))
    host = torch.tensor(x.cu_host, dtype=torch.int32)
    ragged = tokens | dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=host)
    states = ragged | dict(initial_state=x.initial_state, output_final_state=True)
    rows = torch.tensor([1, 0, 2], dtype=torch.int32, device=device)
    outputs = dict(out=torch.empty_like(x.v), final_state_out=torch.empty_like(x.initial_state))
    y = make_inputs(LENGTHS_TO_SPLIT, *HEADS_TO_SPLIT, device=device)
    long = dict(zip(("q", "k", "v", "g", "beta"), y.tokens))
    long_ragged = long | dict(cu_seqlens=y.cu_seqlens, cu_seqlens_cpu=torch.tensor(y.cu_host, dtype=torch.int32))
    return {
        "dense": tokens,
        "ragged, states": states,
        "ragged int64, states": states | dict(cu_seqlens=x.cu_seqlens.long(), cu_seqlens_cpu=host.long()),
        "ragged, pool": states | dict(state_indices=rows),
        "ragged, nothing allocated": states | outputs | dict(workspace=Workspace()),
        "dense, split": long,
        "ragged, states, split": long_ragged | dict(initial_state=y.initial_state, output_final_state=True),
        "ragged, states, whole": long_ragged
        | dict(initial_state=y.initial_state, output_final_state=True, auto_cp=False),
    }


def host_us(kwargs: dict, calls: int) -> float:
    """Least over rounds of the mean host time of a warmed call."""
    times = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(calls):
                chunk_gated_delta_rule(**kwargs)
            times.append((time.perf_counter() - began) / calls)
    return min(times) * 1e6


def num_launches(kwargs: dict) -> int:
    """Kernels that a warmed call launches; the first call is made here."""
    with torch.no_grad():
        chunk_gated_delta_rule(**kwargs)
        before = next(launches)
        chunk_gated_delta_rule(**kwargs)
    return next(launches) - before - 1


def launch_parts(heads: tuple[int, int], lengths: list[int]) -> dict[str, float]:
    """Host microseconds of a whole call, of its launches, and of an allocation, with the kernels running.

    "forward" is one launch, or those of a split.
    """
    x = make_inputs(lengths, *heads, device="cuda")
    call = dict(zip(("q", "k", "v", "g", "beta"), x.tokens)) | dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host)
    chunk_gated_delta_rule(**call)
    _, prepared = dispatch._prepared(next(iter(validate._calls.values())), None, None)
    given: dict[str, tuple] = {}
    entries = {"kkt_inverse": prepared.kkt_inverse, "forward": prepared.forward}
    spies = {name: lambda *arguments, name=name: given.update({name: arguments}) for name in entries}
    tokens = [t[0] for t in x.tokens]
    dataclasses.replace(prepared, **spies)(*tokens, x.cu_seqlens)
    parts = {
        "chunk_gated_delta_rule": lambda: chunk_gated_delta_rule(**call),
        "its PreparedCall": lambda: prepared(*tokens, x.cu_seqlens),
        **{name: lambda name=name: entries[name](*given[name]) for name in entries},
        "torch.empty": lambda: torch.empty((100, 8, 64, 64), dtype=torch.bfloat16, device="cuda"),
        "torch.empty_like": lambda: torch.empty_like(x.v),
        "a view": lambda: x.q.view(x.q.shape[1], *x.q.shape[2:]),
    }
    with torch.no_grad():
        return {name: burst_us(part) for name, part in parts.items()}


def backward_moments(heads: tuple[int, int], lengths: list[int]) -> dict[str, float]:
    """Microseconds after the call of a backward, by what happens then."""
    moments, load, on_card = [], op.runtime.load, torch.cuda.is_available()

    def timed(artifact):
        kernel, entry = artifact.spec.problem.kernel, load(artifact)

        def launch(*arguments):
            moments.append((f"{kernel} starts", time.perf_counter()))
            entry(*arguments)
            moments.append((f"{kernel} returns", time.perf_counter()))

        return launch

    op.runtime.load = timed
    device = "cuda" if on_card else "cpu"
    x = make_inputs(lengths, *heads, device=device, gates="bench")
    leaves = [t.requires_grad_() for t in (*x.tokens, x.initial_state)]
    outputs = chunk_gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], output_final_state=True, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host
    )
    given = [torch.ones_like(t) for t in outputs]
    flush = torch.empty(FLUSH_BYTES if on_card else 0, dtype=torch.uint8, device=device)
    found: dict[str, list[float]] = {}
    for _ in range(LONE_CALLS):
        moments.clear()
        flush.zero_()
        began = time.perf_counter()
        torch.autograd.grad(outputs, leaves, given, retain_graph=True)
        moments.append(("the call returns", time.perf_counter()))
        if on_card:
            torch.cuda.synchronize()
        for name, moment in moments:
            found.setdefault(name, []).append((moment - began) * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def plan_us(heads: tuple[int, int]) -> dict[str, float]:
    """Median microseconds of a new plan, by the lengths and by what is known of the gates."""
    db, found = open_db(), {}
    for name, kernels in (("forward", FORWARD), ("backward", BACKWARD)):
        models = SplitModels.of(OpConfig(*heads, arch="sm90"), db, kernels=kernels)
        for share in (None, 0.75):
            for batch, lengths in PLANNED.items():
                times = []
                for _ in range(LONE_CALLS):
                    began = time.perf_counter()
                    plan_split(models, lengths, 132, DEFAULT_WINDOW, share)
                    times.append(time.perf_counter() - began)
                told = "the share unknown" if share is None else "told the share"
                found[f"{name}, {batch}, {told}"] = statistics.median(times) * 1e6
    return found


def burst_us(part) -> float:
    """Median over bursts of the mean host time until a call returns."""
    times = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(BURST):
            part()
        times.append((time.perf_counter() - began) / BURST)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=100, help="calls per round")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--launches", action="store_true", help="time the parts of a call with the kernels running")
    parser.add_argument("--backward", action="store_true", help="when the launches of a backward start and return")
    parser.add_argument("--plans", action="store_true", help="what new plans take")
    parser.add_argument("--heads", default="2:8", help="q/k heads : value heads")
    parser.add_argument("--lengths", default="1024*8", help="a workload, as of qla-tune")
    options = parser.parse_args()
    on_card = torch.cuda.is_available()
    heads = tuple(int(number) for number in options.heads.split(":"))
    parts: dict[str, float] = {}
    if options.launches:
        if not on_card:
            parser.error("--launches needs a CUDA card, and torch.cuda.is_available() is False")
        parts = launch_parts(heads, lengths_of(options.lengths))
    elif options.backward:
        if not on_card:
            without_kernels(on_card)
        parts = backward_moments(heads, lengths_of(options.lengths))
    elif options.plans:
        parts = plan_us(heads)
    for name, part_us in parts.items():
        row = {"part": name, "host_us": round(part_us, 2)}
        print(json.dumps(row) if options.json else f"{part_us:8.2f} us  {name}")
    if parts:
        return
    without_kernels(on_card)
    for name, kwargs in signatures("cuda" if on_card else "cpu").items():
        row = {"signature": name, "launches": num_launches(kwargs)}
        row |= {"host_us": round(host_us(kwargs, options.calls), 2), "cuda": on_card}
        print(json.dumps(row) if options.json else f"{row['host_us']:8.2f} us  {row['launches']} launches  {name}")


if __name__ == "__main__":
    main()
