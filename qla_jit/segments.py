"""How sequences are cut into segments that run in parallel, and the work that this makes.

A segment is a run of whole chunks of one sequence, but for the sequence's last, which ends where the sequence does.
Chunk boundaries are therefore those of the uncut batch, and so are the slots of what is kept per chunk: kernels are
told of a segment by a row of ``Segments.table``, beside the cumulative lengths of the sequences.

A function of host lengths alone; the cut of a sequence depends on no other sequence of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .config import Problem
from .errors import InputError
from .templates.segments_sm90 import least_segment_tokens

#: What a split may forget unasked: states that gates have since scaled to this share of their norm.  A product with the
#: state rounds it to bf16, which is up to 2⁻⁹ of each element.
DEFAULT_WINDOW = 1e-4
#: The window that forgets nothing.
EXACT = "exact"


class StateItem(NamedTuple):
    """Work before the correction: a segment for one value head, ``chunks`` chunks with those of its window ahead.

    transfer: the start state is not known, so the segment's transfer matrix is needed as well.
    """

    segment: int
    head: int
    chunks: int
    transfer: bool


@dataclass(frozen=True)
class Segments:
    """The segments of a batch, those of one sequence together; every sequence has at least one, an empty one too.

    sequences: the sequence of each segment.  first_chunks: its first chunk, counted from the sequence's start.
    chunks: how many it has (0 in an empty sequence).  bounds: cumulative lengths in tokens, one more than segments.
    firsts: the first segment of each sequence, and the number of segments at the end.
    """

    chunk_size: int
    sequences: tuple[int, ...]
    first_chunks: tuple[int, ...]
    chunks: tuple[int, ...]
    bounds: tuple[int, ...]
    firsts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def lasts(self) -> tuple[int, ...]:
        """The last segment of each sequence: its end state is the sequence's."""
        return tuple(first - 1 for first in self.firsts[1:])

    @property
    def is_cut(self) -> bool:
        """Whether any sequence has more than one segment."""
        return len(self) > len(self.firsts) - 1

    def has_successor(self, segment: int) -> bool:
        """Whether another segment of the same sequence starts where this one ends."""
        return segment + 1 < len(self) and self.first_chunks[segment + 1] > 0

    def window_holds(self, segment: int, warmup: int) -> bool:
        """Whether ``warmup`` chunks before ``segment``, run from zero, stand for everything before it.

        Not in a first segment, whose start is known; not where ``warmup`` reaches the sequence's start, whose state is
        known; not where it leaves the segment before, the only one that runs them.
        """
        return warmup < self.first_chunks[segment] and warmup <= self.chunks[segment - 1]

    def start(self, segment: int, warmup: int | None = None) -> int:
        """Where a segment starts for a head: -1 from a state that only the correction knows, 0 from the initial state,
        else from zero, so many chunks ahead.  warmup: the head's count of chunks before the segment; None for all."""
        if self.first_chunks[segment] == 0:
            return 0
        return warmup if warmup is not None and self.window_holds(segment, warmup) else -1

    def starts(self, num_heads: int, warmup: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
        """`start` of every segment and head; warmup: ``[segments][value heads]``, None where nothing may be dropped."""
        of_segment = [[None] * num_heads] * len(self) if warmup is None else warmup
        return [[self.start(segment, count) for count in counts] for segment, counts in enumerate(of_segment)]

    def state_items(self, starts: Sequence[Sequence[int]], transfer_cost: float = 1.0) -> list[StateItem]:
        """The work before the correction, long items first: of segments whose successor starts from its result.

        starts: as of the method of this name.  transfer_cost: time of a chunk with its transfer matrix over that of one
        without.
        """
        items = []
        for segment, chunks in enumerate(self.chunks):
            if not self.has_successor(segment):
                continue
            for head, start in enumerate(starts[segment]):
                if starts[segment + 1][head] < 0:
                    items.append(StateItem(segment, head, chunks + max(start, 0), start < 0))
        return sorted(items, key=lambda item: -item.chunks * (transfer_cost if item.transfer else 1.0))

    def forward_order(self) -> list[int]:
        """Segments in the order in which the forward starts them: long ones first."""
        return sorted(range(len(self)), key=lambda segment: -self.chunks[segment])

    def table(self) -> list[tuple[int, int, int, int]]:
        """What kernels read, a row per segment: sequence, first chunk, chunks, and the segment of the row's turn."""
        return list(zip(self.sequences, self.first_chunks, self.chunks, self.forward_order()))

    def turns(self) -> list[int]:
        """Segments of cut sequences, in the order of `forward_order`: those that have anything to do with others."""
        return [s for s in self.forward_order() if self.first_chunks[s] > 0 or self.has_successor(s)]

    def turn_table(self) -> list[tuple[int, ...]]:
        """What kernels read of `turns`, a row each: see ``TURN_FIELDS`` in `templates.segments_sm90`."""
        rows = []
        for s in self.turns():
            n, first, last = self.sequences[s], self.firsts[self.sequences[s]], self.firsts[self.sequences[s] + 1] - 1
            before = self.chunks[s - 1] if s > first else 0
            after = self.chunks[s + 1] if s < last else 0
            of_sequence = self.first_chunks[last] + self.chunks[last]
            rows.append((s, n, self.first_chunks[s], self.chunks[s], self.bounds[first], before, after, of_sequence))
        return rows

    def corrected_sequences(self) -> list[int]:
        """Sequences of three segments or more: the second starts from what a known first one leaves."""
        return [n for n, (first, end) in enumerate(zip(self.firsts, self.firsts[1:])) if end - first > 2]


def least_segment_chunks(problem: Problem) -> int:
    """Chunks that a segment of a cut sequence must have, so that the states that pass fit into its rows of `o`."""
    return -(-least_segment_tokens(problem) // problem.chunk_size)


def cut(lengths: Sequence[int], chunk_size: int, segment_chunks: int | None, unit: int = 1, least: int = 1) -> Segments:
    """Cut sequences of ``lengths`` tokens into as few segments of at most ``segment_chunks`` chunks as there can be.

    Segments of one sequence are as equal as whole units of ``unit`` chunks allow, longer ones first.  None cuts
    nothing.  unit: what every segment but a last must be a multiple of, for example the chunks between checkpoints; a
    segment has at least one.  least: chunks that every segment of a cut sequence has, more than ``segment_chunks`` if
    need be.  Raises InputError unless all three are at least 1.
    """
    if min(unit, least) < 1 or (segment_chunks is not None and segment_chunks < 1):
        raise InputError(
            f"`segment_chunks >= 1`, `unit >= 1` and `least >= 1` must hold, but got segment_chunks={segment_chunks}, "
            f"unit={unit} and least={least}; pass segment_chunks=None to cut nothing."
        )
    limit = math.inf if segment_chunks is None else unit * max(1, segment_chunks // unit)
    sequences, first_chunks, chunks, tokens, firsts = [], [], [], [], [0]
    for n, length in enumerate(lengths):
        total, first = -(-length // chunk_size), 0
        if total > limit:
            units = -(-total // unit)
            parts = max(1, min(-(-total // limit), units // -(-least // unit)))
            share, longer = divmod(units, parts)
            for part in range(parts - 1):
                size = unit * (share + (part < longer))
                sequences.append(n)
                first_chunks.append(first)
                chunks.append(size)
                tokens.append(size * chunk_size)
                first += size
        sequences.append(n)
        first_chunks.append(first)
        chunks.append(total - first)
        tokens.append(length - first * chunk_size)
        firsts.append(len(sequences))
    bounds = accumulate(tokens, initial=0)
    return Segments(chunk_size, tuple(sequences), tuple(first_chunks), tuple(chunks), tuple(bounds), tuple(firsts))
