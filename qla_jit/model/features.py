"""What the time of a launch depends on: chunks on the busiest SM (depth) and on all of them (share), and CTAs.

A kernel that walks sequences chunk by chunk (`SEQUENTIAL_KERNELS`) has a chain of work per (sequence, value head),
those of a split (`split_items`) one per (segment, value head); the others do every chunk by itself.  Chains run on the
SMs as `makespan` has it, the longest first.  `segment_state` is launched for all segments of cut sequences, and most of
its CTAs find nothing to do: those count as CTAs, and not as chains.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config import SPLIT_BACKWARD_KERNELS, SPLIT_KERNELS, Problem
from ..errors import ConfigError
from ..schedule import Schedule
from ..segments import least_segment_chunks
from ..workload import DECAYING_PERCENT, Workload
from .makespan import makespan

SEQUENTIAL_KERNELS = ("fused_forward", "recompute_state", "backward_state")
#: Kernels of a split that run every segment, with the chunks ahead of it; those that walk the segments of a sequence.
WALK_SEGMENTS = ("segment_forward", "segment_recompute", "segment_backward")
WALK_SEQUENCES = ("segment_correct", "segment_gradient_correct")
_SEGMENTED = (*SPLIT_KERNELS, *SPLIT_BACKWARD_KERNELS)
#: Value heads that forget, and what their gates sum to over 64 tokens, where nothing is known of a call's gates: those
#: that are measured by default, logsigmoid of a standard normal over 16 (its mean is −0.806) on 75 % of the heads.
EXPECTED_WINDOW_SHARE = DECAYING_PERCENT / 100
EXPECTED_DECAY = 0.806 / 16 * 64
#: The tolerance of windows that kernels are measured with, and the chunks that one takes then.
MEASURED_TOLERANCE = 1e-5
MEASURED_WARMUP_CHUNKS = 4
#: What a chain of `segment_state`, which asks for windows, fills its pipeline and rounds D in two terms, takes besides
#: its chunks, as chunks.  Of 0 to 12, what describes sweeps on an H200 best; the other kernels need none.
STATE_STARTUP_CHUNKS = 4
#: Distinct sequence lengths, in chunks, that are told apart; of more, near ones count as their mean.
MOST_LENGTHS = 24


@dataclass(frozen=True)
class Split:
    """How a batch is split.  segment_chunks: the longest segment.  window_share: of the value heads, in [0, 1], those
    whose gates decay so that windows hold.  warmup_chunks: what such a head runs ahead of a segment."""

    segment_chunks: int
    window_share: float = EXPECTED_WINDOW_SHARE
    warmup_chunks: int = MEASURED_WARMUP_CHUNKS

    @classmethod
    def of(cls, workload: Workload) -> Split | None:
        """The split that a workload asks for; None where it cuts nothing."""
        if workload.segment_chunks is None:
            return None
        return cls(workload.segment_chunks, workload.decaying_percent / 100)


@dataclass(frozen=True)
class SplitItems:
    """Chains of a split batch as {length: how many}, for all value heads but one CTA each.

    forward: of segments, with the chunks ahead of them, in chunks.  values, keys: of segments that another follows from
    an unknown start, for the columns of V, and of K where their own start is unknown too, in chunks.  correct: of
    sequences, in segments that the scan walks.  asked: (segment, value head) pairs of cut sequences, which the kernels
    that look for windows are launched for.  A backward, which walks from the other end, has as many of each.
    """

    forward: Mapping[int, int]
    values: Mapping[int, int]
    keys: Mapping[int, int]
    correct: Mapping[int, int]
    asked: int


def ctas_per_head(schedule: Schedule) -> int:
    """CTAs that share one (sequence, value head)."""
    return schedule.params().get("dv_split", 1)


def windowed_heads(num_value_heads: int, share: float) -> int:
    """Value heads whose windows hold, of a share of all; rounded up, as the measured gates are."""
    return math.ceil(share * num_value_heads - 1e-9)


def expected_warmup_chunks(tolerance: float) -> int:
    """Chunks of 64 tokens by which gates of `EXPECTED_DECAY` reach ``tolerance``, in (0, 1)."""
    return max(1, math.ceil(-math.log(tolerance) / EXPECTED_DECAY))


def chunk_counts(lengths: Sequence[int], chunk_size: int) -> dict[int, int]:
    """{chunks: sequences} of sequences of ``lengths`` tokens, without empty ones.

    Where more than `MOST_LENGTHS` differ, those within a quarter of an octave count as their mean; the longest stays.
    """
    last = chunk_size - 1
    counts = Counter([(length + last) // chunk_size for length in lengths])
    counts.pop(0, None)
    return _merged(counts) if len(counts) > MOST_LENGTHS else dict(counts)


def _merged(counts: Mapping[int, int]) -> dict[int, int]:
    longest = max(counts)
    works, numbers = {}, {}  # by the first length of a group, the longest by itself as 0
    for chunks, number in counts.items():
        drop = max(0, chunks.bit_length() - 3)  # bits below a quarter of an octave
        group = chunks >> drop << drop if chunks < longest else 0
        if group in works:
            works[group] += chunks * number
            numbers[group] += number
        else:
            works[group], numbers[group] = chunks * number, number
    merged: dict[int, int] = {}
    for group, number in numbers.items():
        chunks = round(works[group] / number)
        merged[chunks] = merged.get(chunks, 0) + number
    return merged


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
    asked = 0
    for chunks, sequences in counts.items():
        parts = segments_of(chunks, limit, least)
        if parts <= 1:
            forward[chunks] = forward.get(chunks, 0) + sequences * heads
            continue
        asked += parts * sequences * heads
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
    return SplitItems(forward, values, keys, correct, asked)


def segments_of(chunks: int, segment_chunks: int, least: int) -> int:
    """How many segments `segments.cut` makes of a sequence of ``chunks``; arguments as of `split_items`."""
    return 1 if chunks <= segment_chunks else max(1, min(-(-chunks // segment_chunks), chunks // least))


def longest_segment(chunks: int, segment_chunks: int, least: int) -> int:
    """Chunks of the longest segment of a sequence of ``chunks``; arguments as of `split_items`."""
    return -(-chunks // segments_of(chunks, segment_chunks, least))


def chains(problem: Problem, items: SplitItems) -> Mapping[int, int]:
    """{length: how many} of a kernel of a split, before `shares` of a schedule; for `segment_state` per column."""
    if problem.kernel in WALK_SEGMENTS:
        return items.forward
    if problem.kernel in WALK_SEQUENCES:
        return items.correct
    if problem.kernel == "segment_gradient":
        return items.values
    columns: dict[int, int] = {}
    for of_segments, dim in ((items.values, problem.head_dim_v), (items.keys, problem.head_dim_k)):
        for chunks, number in of_segments.items():
            length = chunks + STATE_STARTUP_CHUNKS
            columns[length] = columns.get(length, 0) + number * dim
    return columns


def launched(problem: Problem, items: SplitItems, found: Mapping[int, int]) -> int:
    """What a kernel of a split is launched for, before `shares`: its chains, but of those that look for windows all
    segments of cut sequences, of `segment_state` all their columns, with something to do or not.  found: `chains`."""
    if problem.kernel == "segment_state":
        return items.asked * (problem.head_dim_v + problem.head_dim_k)
    return items.asked if problem.kernel == "segment_gradient" else sum(found.values())


def shares(problem: Problem, schedule: Schedule) -> tuple[int, int]:
    """(a, b): a kernel that walks chains has a CTAs for every b of `chains`."""
    if problem.kernel in WALK_SEQUENCES:
        return problem.head_dim_v // 64, 1
    if problem.kernel == "segment_state":
        return 1, schedule.params().get("columns", problem.head_dim_v)
    return ctas_per_head(schedule), 1


def shared(found: Mapping[int, int], by: tuple[int, int]) -> list[tuple[int, int]]:
    """(length, CTAs) of ``found`` chains with as many CTAs as ``by`` (of `shares`) says."""
    times, among = by
    return [(length, number * times // among) for length, number in found.items()]


def steps(
    problem: Problem, schedule: Schedule, lengths: Sequence[int], sm_count: int, split: Split | None = None
) -> float:
    """Chunks on the busiest SM; for `segment_correct` segments.  split: for the kernels of a split, which need it.

    Raises ConfigError where a kernel of a split is given none.
    """
    if problem.kernel in _SEGMENTED or problem.kernel in SEQUENTIAL_KERNELS:
        return makespan(kernel_groups(problem, schedule, lengths, split), sm_count)
    return separate_steps(problem, schedule, num_ctas(problem, schedule, lengths), sm_count)


def even_share(
    problem: Problem, schedule: Schedule, lengths: Sequence[int], sm_count: int, split: Split | None = None
) -> float:
    """Chunks of an SM if all had as many, of a kernel that walks chains; 0 for the others.  split: as of `steps`."""
    if problem.kernel not in (*_SEGMENTED, *SEQUENTIAL_KERNELS):
        return 0.0
    return sum([length * number for length, number in kernel_groups(problem, schedule, lengths, split)]) / sm_count


def num_ctas(problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None = None) -> int:
    """CTAs as cost models count them, see `launched`.  split, errors: as of `steps`."""
    if problem.kernel in _SEGMENTED:
        items = _items(problem, lengths, split)
        times, among = shares(problem, schedule)
        return launched(problem, items, chains(problem, items)) * times // among
    return num_busy_ctas(problem, schedule, lengths)


def num_busy_ctas(problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None = None) -> int:
    """CTAs that have work to do.  split, errors: as of `steps`."""
    if problem.kernel in _SEGMENTED or problem.kernel in SEQUENTIAL_KERNELS:
        return sum([number for _, number in kernel_groups(problem, schedule, lengths, split)])
    chunks = sum([-(-length // problem.chunk_size) for length in lengths])
    return separate_ctas(problem, schedule, chunks)


def separate_ctas(problem: Problem, schedule: Schedule, chunks: int) -> int:
    """CTAs of a kernel that does every one of ``chunks`` by itself."""
    return -(-chunks * problem.num_value_heads // _chunks_per_cta(problem, schedule))


def separate_steps(problem: Problem, schedule: Schedule, ctas: int, sm_count: int) -> float:
    """Chunks of one head on the busiest SM, of such a kernel."""
    return float(_chunks_per_cta(problem, schedule) * -(-ctas // sm_count))


def kernel_groups(
    problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None = None
) -> list[tuple[int, int]]:
    """(length of a chain, CTAs that walk one) of a kernel with chains.  split, errors: as of `steps`."""
    if problem.kernel in SEQUENTIAL_KERNELS:
        counts = chunk_counts(lengths, problem.chunk_size)
        found = {chunks: number * problem.num_value_heads for chunks, number in counts.items()}
    else:
        found = chains(problem, _items(problem, lengths, split))
    return shared(found, shares(problem, schedule))


def _items(problem: Problem, lengths: Sequence[int], split: Split | None) -> SplitItems:
    if split is None:
        raise ConfigError(
            f"`split` must be given for {problem.kernel}, which only runs where sequences are cut; name the segment "
            "length, as in the workload 1x32768/16."
        )
    counts = chunk_counts(lengths, problem.chunk_size)
    return split_items(counts, problem.num_value_heads, least_segment_chunks(problem), split)


def _chunks_per_cta(problem: Problem, schedule: Schedule) -> int:
    """Chunks of one value head that a CTA of a kernel without chains does."""
    params = schedule.params()
    if problem.kernel == "backward_grad":  # all value heads of a key head
        return params.get("chunks_per_cta", 1) * problem.group_size
    return params.get("value_heads_per_cta", 1)
