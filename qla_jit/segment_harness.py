"""Cases of the kernels of a split sequence for `harness`: what they leave in rows of `o`, packed and unpacked.

The layout is that of `templates.segments_sm90`; here it is written out once more, by element, so that a kernel and its
check do not share an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .config import Problem
from .reference import segment_correct_reference, segment_state_reference, warmup_chunks_reference
from .segments import Segments
from .split import EXACT, cut_batch, log_tolerance
from .templates.segments_sm90 import deviation_tile

NO_CODE = -99  # where kernels must not look: whole sequences have no code


@functools.cache
def _accumulator_order(dim_k: int) -> torch.Tensor:
    """[64, K] int64: where a state group has element (column of V, row of K), in floats, side by side over threads."""
    row, column = torch.arange(64)[:, None], torch.arange(dim_k)[None, :]
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    value = column // 8 * 4 + row % 16 // 8 * 2 + column % 2  # of the thread's
    return (value // 4 * 128 + thread) * 4 + value % 4


def _panel(o: torch.Tensor, first: int, rows: int, head: int, panel: int) -> torch.Tensor:
    return o[first : first + rows, head, panel * 64 : panel * 64 + 64]


def write_state(o: torch.Tensor, token: int, head: int, state: torch.Tensor) -> None:
    """Put the start state ``[K, V]`` of the segment that starts at ``token`` into o ``[T, HV, V]``."""
    dim_k, dim_v = state.shape
    order = _accumulator_order(dim_k).to(o.device)
    for panel in range(dim_v // 64):
        floats = torch.empty(64 * dim_k, dtype=torch.float32, device=o.device)
        floats[order] = state[:, panel * 64 : panel * 64 + 64].T.float()
        _panel(o, token, 2 * dim_k, head, panel).copy_(floats.view(o.dtype).view(2 * dim_k, 64))


def read_state(o: torch.Tensor, token: int, head: int, dim_k: int) -> torch.Tensor:
    """``[K, V]`` fp32: the inverse of `write_state`."""
    order = _accumulator_order(dim_k).to(o.device)
    panels = [
        _panel(o, token, 2 * dim_k, head, panel).contiguous().view(torch.float32).flatten()[order]
        for panel in range(o.shape[-1] // 64)
    ]
    return torch.cat(panels).T


def _tiles(problem: Problem, o: torch.Tensor, token: int, head: int) -> list[torch.Tensor]:
    """Views of the tiles of D of the segment that starts at ``token``: the rounded ones, then what those lost."""
    places = [deviation_tile(problem, index) for index in range(2 * problem.head_dim_k // 64)]
    return [_panel(o, token + row, problem.head_dim_k, head, panel) for row, panel in places]


def write_deviation(problem: Problem, o: torch.Tensor, token: int, head: int, deviation: torch.Tensor) -> None:
    """Put D = M − γ I ``[K, K]`` of the segment that starts at ``token`` into o, rounded and what rounding lost."""
    tiles, turned = _tiles(problem, o, token, head), deviation.T
    rounded = turned.to(o.dtype)
    for number, part in enumerate((rounded, (turned - rounded.to(turned.dtype)).to(o.dtype))):
        for column, of_columns in enumerate(part.split(64, 1)):
            tiles[number * len(tiles) // 2 + column].copy_(of_columns)


def read_deviation(problem: Problem, o: torch.Tensor, token: int, head: int) -> torch.Tensor:
    """``[K, K]`` fp32: the inverse of `write_deviation`."""
    tiles = [tile.float() for tile in _tiles(problem, o, token, head)]
    half = len(tiles) // 2
    return (torch.cat(tiles[:half], 1) + torch.cat(tiles[half:], 1)).T


class SplitCase:
    """What the reference says about one cut of a batch: starts, states, transfer matrices; float64, made at first need.

    inputs: of `numerics.make_inputs`.  segment_chunks, window: of the cut; None cuts as finely as can be.
    """

    def __init__(self, problem: Problem, inputs, initial, segment_chunks: int | None, window: str | float):
        lengths = [end - start for start, end in zip(inputs.cu_host, inputs.cu_host[1:])]
        self.problem, self.inputs, self._initial = problem, inputs, initial
        self.segments: Segments = cut_batch(problem, lengths, segment_chunks or 1)
        self.window = window
        tolerance = None if window == EXACT else window
        self._warmup = warmup_chunks_reference(inputs.g, self.segments, tolerance)
        self.starts = self.segments.starts(problem.num_value_heads, self._warmup.tolist())
        self.items = sorted(self.segments.state_items(self.starts))
        # As kernels have them: the initial state of a cut sequence passes through o too, and whole ones have no code.
        self.cut_firsts = [first for first in self.segments.firsts[:-1] if self.segments.has_successor(first)]
        self.turns = sorted(self.segments.turns())
        self.codes = [
            [-1 if s in self.cut_firsts else start if s in self.turns else NO_CODE for start in row]
            for s, row in enumerate(self.starts)
        ]

    @functools.cached_property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(S*, M) of every segment from a zero start."""
        x = self.inputs
        return segment_state_reference(x.k, x.v, x.g, x.beta, self.segments)

    @functools.cached_property
    def start_states(self) -> torch.Tensor:
        """The state that every segment starts from ``[segments, HV, K, V]``, windows taken as the kernels take them."""
        x = self.inputs
        left = segment_state_reference(x.k, x.v, x.g, x.beta, self.segments, self._initial, self._warmup)
        return segment_correct_reference(*left, self.segments, self._initial)[0]

    def left_states(self) -> torch.Tensor:
        """What `segment_state` leaves of each item: a start state where its own start was known, else S*."""
        found = [
            self.plain[0][item.segment, item.head] if item.transfer else self.start_states[item.segment + 1, item.head]
            for item in self.items
        ]
        return torch.stack(found)

    @property
    def transfers(self) -> list:
        """Items that need a transfer matrix."""
        return [item for item in self.items if item.transfer]

    def decay(self, segment: int, head: int) -> torch.Tensor:
        """γ of a segment."""
        bounds = self.segments.bounds
        return self.inputs.g[0, bounds[segment] : bounds[segment + 1], head].double().sum().exp()

    def deviation(self, segment: int, head: int) -> torch.Tensor:
        """D = M − γ I of a segment ``[K, K]``."""
        m = self.plain[1][segment, head]
        return m - self.decay(segment, head) * torch.eye(m.shape[0], dtype=m.dtype, device=m.device)

    def token(self, segment: int) -> int:
        """First token of a segment."""
        return self.segments.bounds[segment]

    def tensors(self, device: torch.device) -> dict[str, object]:
        """Arguments that only the kernels of a split take."""
        heads = self.problem.num_value_heads
        decays = torch.full((len(self.segments), heads), float("nan"), device=device)
        for item in self.transfers:
            decays[item.segment, item.head] = self.decay(item.segment, item.head).log2()
        return {
            "segments": torch.tensor(self.segments.table(), dtype=torch.int32, device=device),
            "first_segments": torch.tensor(self.segments.firsts, dtype=torch.int32, device=device),
            "turns": torch.tensor(self.segments.turns(), dtype=torch.int32, device=device),
            "cut_sequences": torch.tensor(self.segments.corrected_sequences(), dtype=torch.int32, device=device),
            "starts": torch.tensor(self.codes, dtype=torch.int32, device=device),
            "decays": decays,
            "log_tolerance": log_tolerance(self.window),
            "for_backward": 0,
        }


def state_outputs(case: SplitCase, tensors: dict) -> dict[str, torch.Tensor]:
    """What `segment_state` left, as `state_wanted` has it."""
    o, problem = tensors["o"], case.problem
    found = {"starts": tensors["starts"][case.turns].double()}
    if case.cut_firsts:
        found["initial_states"] = torch.stack(
            [read_state(o, case.token(s), h, problem.head_dim_k) for s, h in _heads_of(case, case.cut_firsts)]
        )
    if case.items:
        found["left_states"] = torch.stack(
            [read_state(o, case.token(i.segment + 1), i.head, problem.head_dim_k) for i in case.items]
        )
    if case.transfers:
        found["deviations"] = torch.stack(
            [read_deviation(problem, o, case.token(i.segment), i.head) for i in case.transfers]
        )
        found["decays"] = torch.stack([tensors["decays"][i.segment, i.head].exp2() for i in case.transfers])
    return found


def state_wanted(case: SplitCase) -> dict[str, torch.Tensor]:
    """Float64: start codes; initial states of cut sequences; states, D and γ of the items that make them."""
    codes = [case.codes[segment] for segment in case.turns]
    found = {
        "starts": torch.tensor(codes, dtype=torch.float64, device=case.inputs.g.device).view(-1, len(case.starts[0]))
    }
    if case.cut_firsts:
        found["initial_states"] = torch.stack([case.start_states[s, h] for s, h in _heads_of(case, case.cut_firsts)])
    if case.items:
        found["left_states"] = case.left_states()
    if case.transfers:
        found["deviations"] = torch.stack([case.deviation(i.segment, i.head) for i in case.transfers])
        found["decays"] = torch.stack([case.decay(i.segment, i.head) for i in case.transfers])
    return found


def write_uncorrected(case: SplitCase, tensors: dict) -> None:
    """Put into o what `segment_correct` reads: all states left, and D of the segments that it corrects by."""
    for item, state in zip(case.items, case.left_states() if case.items else ()):
        write_state(tensors["o"], case.token(item.segment + 1), item.head, state)
    for item in case.transfers:
        write_deviation(
            case.problem, tensors["o"], case.token(item.segment), item.head, case.deviation(item.segment, item.head)
        )


def write_starts(case: SplitCase, tensors: dict) -> None:
    """Put into o what `segment_forward` reads there: initial states, and start states that the correction made."""
    for segment, head in _unknown([row if s in case.turns else [0] for s, row in enumerate(case.codes)]):
        write_state(tensors["o"], case.token(segment), head, case.start_states[segment, head])


def corrected(case: SplitCase, tensors: dict) -> dict[str, torch.Tensor]:
    """The start states that `segment_correct` left."""
    found = [
        read_state(tensors["o"], case.token(segment), head, case.problem.head_dim_k)
        for segment, head in _unknown(case.starts)
    ]
    return {"start_states": torch.stack(found)} if found else {}


def corrected_wanted(case: SplitCase) -> dict[str, torch.Tensor]:
    """Float64 start states that only the correction knows."""
    found = [case.start_states[segment, head] for segment, head in _unknown(case.starts)]
    return {"start_states": torch.stack(found)} if found else {}


def _heads_of(case: SplitCase, segments: Sequence[int]) -> list[tuple[int, int]]:
    return [(segment, head) for segment in segments for head in range(case.problem.num_value_heads)]


def _unknown(starts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(s, head) for s, of_heads in enumerate(starts) for head, start in enumerate(of_heads) if start < 0]
