"""Cases of the kernels of a split sequence for `harness`: what they leave in rows of `o`, packed and unpacked.

The layout is that of `templates.segments_sm90`; here it is written out once more, by element, so that a kernel and its
check do not share an error.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from .config import Problem
from .reference import segment_correct_reference, segment_state_reference, warmup_chunks_reference
from .segments import Segments
from .split import EXACT, cut_batch, log_tolerance
from .templates.segments_sm90 import TURN_FIELDS, deviation_tile

NO_CODE = -99  # where kernels must not look: whole sequences have no code


@functools.cache
def _accumulator_order(dim_k: int) -> torch.Tensor:
    """[64, K] int64: where a state group has element (column of V, row of K), in floats, side by side over threads."""
    row, column = torch.arange(64)[:, None], torch.arange(dim_k)[None, :]
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    value = column // 8 * 4 + row % 16 // 8 * 2 + column % 2  # of the thread's
    return (value // 4 * 128 + thread) * 4 + value % 4


def _panel(o: torch.Tensor, first: int, rows: int, heads: torch.Tensor, panel: int) -> torch.Tensor:
    """Rows of one 64-column panel, ``[heads, rows, 64]``: a copy."""
    return o[first : first + rows, heads, panel * 64 : panel * 64 + 64].transpose(0, 1)


def _set_panel(o: torch.Tensor, first: int, heads: torch.Tensor, panel: int, values: torch.Tensor) -> None:
    """Put ``[heads, rows, 64]`` where `_panel` finds it."""
    o[first : first + values.shape[1], heads, panel * 64 : panel * 64 + 64] = values.transpose(0, 1)


def write_states(o: torch.Tensor, token: int, heads: torch.Tensor, states: torch.Tensor) -> None:
    """Put start states ``[heads, K, V]`` of the segment that starts at ``token`` into o ``[T, HV, V]``."""
    dim_k, dim_v = states.shape[1:]
    order = _accumulator_order(dim_k).flatten().to(o.device)
    for panel in range(dim_v // 64):
        floats = torch.empty(len(heads), 64 * dim_k, dtype=torch.float32, device=o.device)
        floats[:, order] = states[..., panel * 64 : panel * 64 + 64].mT.float().flatten(1)
        _set_panel(o, token, heads, panel, floats.view(o.dtype).view(-1, 2 * dim_k, 64))


def read_states(o: torch.Tensor, token: int, heads: torch.Tensor, dim_k: int) -> torch.Tensor:
    """``[heads, K, V]`` fp32: the inverse of `write_states`."""
    order = _accumulator_order(dim_k).flatten().to(o.device)
    panels = [
        _panel(o, token, 2 * dim_k, heads, panel).contiguous().view(torch.float32).flatten(1)[:, order]
        for panel in range(o.shape[-1] // 64)
    ]
    return torch.cat([panel.view(-1, 64, dim_k) for panel in panels], 1).mT


def _places(problem: Problem) -> list[tuple[int, int]]:
    """(row, panel) of the tiles of D of a segment: the rounded ones, then what those lost."""
    return [deviation_tile(problem, index) for index in range(2 * problem.head_dim_k // 64)]


def write_deviations(
    problem: Problem, o: torch.Tensor, token: int, heads: torch.Tensor, deviations: torch.Tensor
) -> None:
    """Put D = M − γ I ``[heads, K, K]`` of the segment that starts at ``token`` into o: rounded, and what that lost."""
    turned = deviations.mT
    rounded = turned.to(o.dtype)
    lost = (turned - rounded.to(turned.dtype)).to(o.dtype)
    tiles = (tile for part in (rounded, lost) for tile in part.split(64, -1))
    for (row, panel), tile in zip(_places(problem), tiles):
        _set_panel(o, token + row, heads, panel, tile)


def read_deviations(problem: Problem, o: torch.Tensor, token: int, heads: torch.Tensor) -> torch.Tensor:
    """``[heads, K, K]`` fp32: the inverse of `write_deviations`."""
    dim_k = problem.head_dim_k
    tiles = [_panel(o, token + row, dim_k, heads, panel).float() for row, panel in _places(problem)]
    half = len(tiles) // 2
    return (torch.cat(tiles[:half], -1) + torch.cat(tiles[half:], -1)).mT


@dataclass(frozen=True)
class Pairs:
    """Some (segment, head) pairs, segment by segment: indices into ``[segments, HV, ...]``, and heads per segment."""

    segments: torch.Tensor
    heads: torch.Tensor
    by_segment: list[tuple[int, torch.Tensor]]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]], device: torch.device) -> Pairs:
        ordered = sorted(pairs)
        index = torch.tensor(ordered, dtype=torch.int64, device=device).view(-1, 2)
        grouped = itertools.groupby(ordered, key=itemgetter(0))
        by_segment = [(s, torch.tensor([head for _, head in of], device=device)) for s, of in grouped]
        return cls(index[:, 0], index[:, 1], by_segment)

    def __len__(self) -> int:
        return len(self.heads)

    def take(self, table: torch.Tensor) -> torch.Tensor:
        """The pairs' entries of ``[segments, HV, ...]``."""
        return table[self.segments, self.heads]

    def gather(self, read: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """``read(segment, heads)`` of every segment, in the order of `take`."""
        return torch.cat([read(segment, heads) for segment, heads in self.by_segment])


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
        items = self.segments.state_items(self.starts)
        pairs = functools.partial(Pairs.of, device=inputs.g.device)
        self.items = pairs((item.segment, item.head) for item in items)
        self.transfers = pairs((item.segment, item.head) for item in items if item.transfer)  # these need D
        self.unknown = pairs(_negative(self.starts))
        # As kernels have them: the initial state of a cut sequence passes through o too, and whole ones have no code.
        self.cut_firsts = [first for first in self.segments.firsts[:-1] if self.segments.has_successor(first)]
        self.turns = sorted(self.segments.turns())
        self.codes = [
            [-1 if s in self.cut_firsts else start if s in self.turns else NO_CODE for start in row]
            for s, row in enumerate(self.starts)
        ]
        self.initial = pairs(itertools.product(self.cut_firsts, range(problem.num_value_heads)))
        # Where the forward finds a state in o; whole sequences have none there.
        self.started = pairs(_negative([row if s in self.turns else [0] for s, row in enumerate(self.codes)]))

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

    @functools.cached_property
    def left_states(self) -> torch.Tensor:
        """What `segment_state` leaves of each item: a start state where its own start was known, else S*."""
        transfer = self.plain[0].new_zeros(self.plain[0].shape[:2], dtype=torch.bool)
        transfer[self.transfers.segments, self.transfers.heads] = True
        left = self.plain[0].clone()
        left[:-1] = torch.where(transfer[:-1, :, None, None], left[:-1], self.start_states[1:])
        return self.items.take(left)

    @functools.cached_property
    def decays(self) -> torch.Tensor:
        """γ of every segment ``[segments, HV]`` float64."""
        lengths = [end - start for start, end in zip(self.segments.bounds, self.segments.bounds[1:])]
        return torch.stack([part.sum(0) for part in self.inputs.g[0].double().split(lengths)]).exp()

    @functools.cached_property
    def deviations(self) -> torch.Tensor:
        """D = M − γ I of the items that need it ``[items, K, K]``."""
        m = self.transfers.take(self.plain[1])
        identity = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
        return m - self.transfers.take(self.decays)[:, None, None] * identity

    def token(self, segment: int) -> int:
        """First token of a segment."""
        return self.segments.bounds[segment]

    def tensors(self, device: torch.device) -> dict[str, object]:
        """Arguments that only the kernels of a split take."""
        heads = self.problem.num_value_heads
        decays = torch.full((len(self.segments), heads), float("nan"), device=device)
        wanted = self.transfers
        decays[wanted.segments, wanted.heads] = wanted.take(self.decays).log2().float()
        return {
            "segments": torch.tensor(self.segments.table(), dtype=torch.int32, device=device),
            "first_segments": torch.tensor(self.segments.firsts, dtype=torch.int32, device=device),
            "turns": torch.tensor(self.segments.turn_table(), dtype=torch.int32, device=device).view(-1, TURN_FIELDS),
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
    if case.initial:
        found["initial_states"] = case.initial.gather(
            lambda s, heads: read_states(o, case.token(s), heads, problem.head_dim_k)
        )
    if case.items:
        found["left_states"] = case.items.gather(
            lambda s, heads: read_states(o, case.token(s + 1), heads, problem.head_dim_k)
        )
    if case.transfers:
        found["deviations"] = case.transfers.gather(lambda s, heads: read_deviations(problem, o, case.token(s), heads))
        found["decays"] = case.transfers.take(tensors["decays"]).exp2()
    return found


def state_wanted(case: SplitCase) -> dict[str, torch.Tensor]:
    """Float64: start codes; initial states of cut sequences; states, D and γ of the items that make them."""
    codes = [case.codes[segment] for segment in case.turns]
    found = {
        "starts": torch.tensor(codes, dtype=torch.float64, device=case.inputs.g.device).view(-1, len(case.starts[0]))
    }
    if case.initial:
        found["initial_states"] = case.initial.take(case.start_states)
    if case.items:
        found["left_states"] = case.left_states
    if case.transfers:
        found["deviations"] = case.deviations
        found["decays"] = case.transfers.take(case.decays)
    return found


def write_uncorrected(case: SplitCase, tensors: dict) -> None:
    """Put into o what `segment_correct` reads: all states left, and D of the segments that it corrects by."""
    if not case.items:
        return
    o = tensors["o"]
    left = case.left_states.split([len(heads) for _, heads in case.items.by_segment])
    for (segment, heads), states in zip(case.items.by_segment, left):
        write_states(o, case.token(segment + 1), heads, states)
    if case.transfers:
        of_segment = case.deviations.split([len(heads) for _, heads in case.transfers.by_segment])
        for (segment, heads), deviations in zip(case.transfers.by_segment, of_segment):
            write_deviations(case.problem, o, case.token(segment), heads, deviations)


def write_starts(case: SplitCase, tensors: dict) -> None:
    """Put into o what `segment_forward` reads there: initial states, and start states that the correction made."""
    for segment, heads in case.started.by_segment:
        write_states(tensors["o"], case.token(segment), heads, case.start_states[segment, heads])


def corrected(case: SplitCase, tensors: dict) -> dict[str, torch.Tensor]:
    """The start states that `segment_correct` left."""
    if not case.unknown:
        return {}
    read = lambda s, heads: read_states(tensors["o"], case.token(s), heads, case.problem.head_dim_k)
    return {"start_states": case.unknown.gather(read)}


def corrected_wanted(case: SplitCase) -> dict[str, torch.Tensor]:
    """Float64 start states that only the correction knows."""
    return {"start_states": case.unknown.take(case.start_states)} if case.unknown else {}


def _negative(starts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(segment, head) of every start that is known to nobody before the correction."""
    return [(s, head) for s, of_heads in enumerate(starts) for head, start in enumerate(of_heads) if start < 0]
