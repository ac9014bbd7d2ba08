"""What the time of a launch depends on: chunks on the busiest SM (depth), and CTAs.

A kernel that walks sequences chunk by chunk (`fused_forward`) has a chain of work per (sequence, value head), those of
a split (`split_items`) one per (segment, value head); the others do every chunk by itself.  Chains run on the SMs as
`makespan` has it, the longest first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..config import SPLIT_KERNELS, Problem
from ..errors import ConfigError
from ..schedule import Schedule
from ..templates.segments_sm90 import least_segment_tokens
from .makespan import makespan

SEQUENTIAL_KERNELS = ("fused_forward",)
#: Value heads that forget, and chunks that a window then takes, where a call says nothing about its gates: those of the
#: gates that are measured by default.
EXPECTED_WINDOW_SHARE = 0.75
EXPECTED_WARMUP_CHUNKS = 4
#: Distinct sequence lengths, in chunks, that are told apart; of more, near ones count as their mean.
MOST_LENGTHS = 24


@dataclass(frozen=True)
class Split:
    """How a batch is split.  segment_chunks: the longest segment.  window_share: of the value heads, in [0, 1], those
    whose gates decay so that windows hold.  warmup_chunks: what such a head runs ahead of a segment."""

    segment_chunks: int
    window_share: float = EXPECTED_WINDOW_SHARE
    warmup_chunks: int = EXPECTED_WARMUP_CHUNKS


@dataclass(frozen=True)
class SplitItems:
    """Chains of a split batch as {length: how many}, for all value heads but one CTA each.

    forward: of segments, with the chunks ahead of them, in chunks.  values, keys: of segments that another follows from
    an unknown start, for the columns of V, and of K where their own start is unknown too, in chunks.  correct: of
    sequences, in segments that the scan walks.
    """

    forward: Mapping[int, int]
    values: Mapping[int, int]
    keys: Mapping[int, int]
    correct: Mapping[int, int]


def ctas_per_head(schedule: Schedule) -> int:
    """CTAs that share one (sequence, value head)."""
    return schedule.params().get("dv_split", 1)


def windowed_heads(num_value_heads: int, share: float) -> int:
    """Value heads whose windows hold, of a share of all; rounded up, as the measured gates are."""
    return math.ceil(share * num_value_heads - 1e-9)


def least_segment_chunks(problem: Problem) -> int:
    """Chunks that a segment of a cut sequence has at least; as `split.least_segment_chunks`, without torch."""
    return -(-least_segment_tokens(problem) // problem.chunk_size)


def chunk_counts(lengths: Sequence[int], chunk_size: int) -> dict[int, int]:
    """{chunks: sequences} of sequences of ``lengths`` tokens, without empty ones.

    Of more than `MOST_LENGTHS` counts, those within a quarter of an octave are taken for their mean; the largest stays.
    """
    chunks = [-(-length // chunk_size) for length in lengths]
    counts = Counter(chunks)
    empty = counts.pop(0, 0)
    return dict(counts) if len(counts) <= MOST_LENGTHS else _merged(sorted(chunks)[empty:])


def _merged(ordered: Sequence[int]) -> dict[int, int]:
    sums = [0, *accumulate(ordered)]
    longest, first, merged = bisect_left(ordered, ordered[-1]), 0, Counter()
    while first < longest:
        width = 1 << max(0, ordered[first].bit_length() - 3)  # a quarter of its octave
        end = bisect_left(ordered, ordered[first] // width * width + width, first, longest)
        merged[round((sums[end] - sums[first]) / (end - first))] += end - first
        first = end
    merged[ordered[-1]] += len(ordered) - longest
    return dict(merged)


def split_items(counts: Mapping[int, int], heads: int, least: int, split: Split) -> SplitItems:
    """The chains of a batch of ``counts`` (of `chunk_counts`) whose sequences are cut as `segments.cut` cuts them.

    heads: value heads.  least: chunks that every segment of a cut sequence has.  A window that would not fit into every
    segment of a sequence counts as none.
    """
    limit, warmup = split.segment_chunks, split.warmup_chunks
    decaying = windowed_heads(heads, split.window_share)
    forward: dict[int, int] = {}
    values: dict[int, int] = {}
    keys: dict[int, int] = {}
    correct: dict[int, int] = {}
    for chunks, sequences in counts.items():
        parts = 1 if chunks <= limit else min(-(-chunks // limit), chunks // least)
        if parts <= 1:
            forward[chunks] = forward.get(chunks, 0) + sequences * heads
            continue
        short, longer = divmod(chunks, parts)  # so many segments have a chunk more
        first = short + 1 if longer else short
        windowed = decaying * sequences if warmup < short else 0
        exact = heads * sequences - windowed
        forward[first] = forward.get(first, 0) + heads * sequences
        for size, number in ((short + 1, longer - 1), (short, parts - longer if longer else parts - 1)):
            if number > 0:
                if exact:
                    forward[size] = forward.get(size, 0) + exact * number
                if windowed:
                    forward[size + warmup] = forward.get(size + warmup, 0) + windowed * number
        if exact:  # the last segment, a short one, leaves nothing; of the first no start is unknown
            values[first] = values.get(first, 0) + exact
            for size, number in ((short + 1, longer - 1), (short, parts - longer - 1 if longer else parts - 2)):
                if number > 0:
                    values[size] = values.get(size, 0) + exact * number
                    keys[size] = keys.get(size, 0) + exact * number
            if parts > 2:
                correct[parts - 2] = correct.get(parts - 2, 0) + exact
    return SplitItems(forward, values, keys, correct)


def split_groups(problem: Problem, schedule: Schedule, items: SplitItems) -> list[tuple[int, int]]:
    """(length, CTAs) of the CTAs of a kernel of a split that have work."""
    if problem.kernel == "segment_forward":
        return _times(items.forward, ctas_per_head(schedule))
    if problem.kernel == "segment_correct":
        return _times(items.correct, problem.head_dim_v // 64)
    columns = schedule.params().get("columns", problem.head_dim_v)
    groups = {length: number * (problem.head_dim_v // columns) for length, number in items.values.items()}
    for length, number in items.keys.items():
        groups[length] = groups.get(length, 0) + number * (problem.head_dim_k // columns)
    return list(groups.items())


def _times(items: Mapping[int, int], ctas: int) -> list[tuple[int, int]]:
    return [(length, number * ctas) for length, number in items.items()]


def steps(
    problem: Problem, schedule: Schedule, lengths: Sequence[int], sm_count: int, split: Split | None = None
) -> float:
    """Chunks on the busiest SM; for `segment_correct` segments.  split: for the kernels of a split, which need it.

    Raises ConfigError where a kernel of a split is given none.
    """
    if problem.kernel in SPLIT_KERNELS or problem.kernel in SEQUENTIAL_KERNELS:
        return makespan(_groups(problem, schedule, lengths, split), sm_count)
    return float(_heads_per_cta(schedule) * -(-num_ctas(problem, schedule, lengths) // sm_count))


def num_ctas(problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None = None) -> int:
    """CTAs that have work to do.  split, errors: as of `steps`."""
    if problem.kernel in SPLIT_KERNELS or problem.kernel in SEQUENTIAL_KERNELS:
        return sum_counts(_groups(problem, schedule, lengths, split))
    chunks = sum([-(-length // problem.chunk_size) for length in lengths])
    return -(-chunks * problem.num_value_heads // _heads_per_cta(schedule))


def sum_counts(groups: Iterable[tuple[int, int]]) -> int:
    """CTAs of (length, CTAs) groups."""
    return sum([number for _, number in groups])


def _groups(problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None) -> list[tuple[int, int]]:
    counts = chunk_counts(lengths, problem.chunk_size)
    if problem.kernel in SEQUENTIAL_KERNELS:
        return _times(counts, problem.num_value_heads * ctas_per_head(schedule))
    if split is None:
        raise ConfigError(
            f"`split` must be given for {problem.kernel}, which only runs where sequences are cut; name the segment "
            "length, as in the workload 1x32768/16."
        )
    items = split_items(counts, problem.num_value_heads, least_segment_chunks(problem), split)
    return split_groups(problem, schedule, items)


def _heads_per_cta(schedule: Schedule) -> int:
    return schedule.params().get("value_heads_per_cta", 1)
