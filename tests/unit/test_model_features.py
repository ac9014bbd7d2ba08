"""Depth and CTAs of the kernels against the chains of a real cut, item by item, placed one after the other."""

import heapq
import random
from collections import Counter

import pytest

from qla_jit.config import SPLIT_KERNELS, OpConfig
from qla_jit.errors import ConfigError
from qla_jit.model.features import (
    STATE_STARTUP_CHUNKS,
    Split,
    chunk_counts,
    num_busy_ctas,
    num_ctas,
    split_items,
    steps,
    windowed_heads,
)
from qla_jit.registry import select
from qla_jit.segments import cut, least_segment_chunks

SMS = 132
STARTUP = STATE_STARTUP_CHUNKS


def problems(dim_k=128, dim_v=128, heads=(2, 8)):
    config = OpConfig(*heads, dim_k, dim_v)
    return {kernel: config.problem(kernel) for kernel in SPLIT_KERNELS}


def default(problem):
    return select(problem).default(problem)


def cut_of(problem, lengths, split):
    return cut(lengths, 64, split.segment_chunks, least=least_segment_chunks(problem))


def chains(problem, schedule, s, split):
    """The length of every CTA that has work, from the segments of the batch themselves."""
    heads, warmup = problem.num_value_heads, split.warmup_chunks
    decaying = windowed_heads(heads, split.window_share)
    starts = s.starts(heads, [[warmup] * decaying + [None] * (heads - decaying)] * len(s))
    if problem.kernel == "segment_forward":
        of_heads = [n + max(start, 0) for n, row in zip(s.chunks, starts) for start in row if n]
        return of_heads * schedule["dv_split"]
    items = s.state_items(starts)
    if problem.kernel == "segment_state":
        values, keys = problem.head_dim_v // schedule["columns"], problem.head_dim_k // schedule["columns"]
        return [item.chunks + STARTUP for item in items for _ in range(values + keys * item.transfer)]
    scans = Counter((s.sequences[item.segment], item.head) for item in items if item.transfer)
    return list(scans.values()) * (problem.head_dim_v // 64)


def launched(problem, schedule, s):
    """CTAs of `segment_state`: column parts of every segment that takes a turn, for every head."""
    parts = (problem.head_dim_v + problem.head_dim_k) // schedule["columns"]
    return len(s.turns()) * problem.num_value_heads * parts


def simulated(found, machines):
    loads = [0] * machines
    for length in sorted(found, reverse=True):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads)


def batches():
    for seed in range(60):
        draw = random.Random(seed)
        lengths = [draw.choice([0, 1, 700, 1024, draw.randrange(40_000)]) for _ in range(draw.randint(1, 9))]
        yield (
            lengths,
            Split(draw.choice([4, 8, 13, 16, 64]), draw.choice([0.0, 0.5, 0.75, 1.0]), draw.choice([1, 4, 9])),
        )


@pytest.mark.parametrize("dims", [(128, 128), (64, 128), (128, 256)])
@pytest.mark.parametrize("kernel", SPLIT_KERNELS)
def test_split_kernels_have_the_chains_of_the_cut(kernel, dims):
    problem = problems(*dims)[kernel]
    schedule = default(problem)
    for lengths, split in batches():
        if split.warmup_chunks >= least_segment_chunks(problem):
            continue
        s = cut_of(problem, lengths, split)
        found = chains(problem, schedule, s, split)
        ctas = launched(problem, schedule, s) if kernel == "segment_state" else len(found)
        assert num_busy_ctas(problem, schedule, lengths, split) == len(found), (lengths, split)
        assert num_ctas(problem, schedule, lengths, split) == ctas, (lengths, split)
        depth = steps(problem, schedule, lengths, SMS, split)
        assert depth == pytest.approx(simulated(found, SMS), rel=1 / 64), (lengths, split)


def test_one_long_sequence_in_one_wave():
    state, correct, forward = problems().values()
    split = Split(32, 0.75, 4)  # 16 segments of 32 chunks; 2 of 8 heads are exact
    assert steps(state, default(state), [32768], SMS, split) == 32 + STARTUP
    assert num_busy_ctas(state, default(state), [32768], split) == 2 * (15 + 14)  # V of 15 segments, keys of 14
    assert num_ctas(state, default(state), [32768], split) == 8 * 16 * 2  # V and keys of every head and segment
    assert (
        steps(correct, default(correct), [32768], SMS, split),
        num_ctas(correct, default(correct), [32768], split),
    ) == (14, 4)
    assert steps(forward, default(forward), [32768], SMS, split) == 36


def test_a_narrower_state_cta_is_two_as_many():
    state = problems()["segment_state"]
    half = default(state).replace(columns=64)
    split = Split(32, 0.0)
    for count in (num_busy_ctas, num_ctas):
        assert count(state, half, [32768], split) == 2 * count(state, default(state), [32768], split)


def test_state_ctas_are_those_of_cut_sequences_alone():
    state = problems()["segment_state"]
    split = Split(32, 0.75)
    alone = num_ctas(state, default(state), [32768], split)
    assert num_ctas(state, default(state), [32768, 0, 2048, 1], split) == alone  # 32 chunks are one segment
    assert num_ctas(state, default(state), [2048, 0], split) == 0


def test_no_fewer_state_ctas_are_launched_where_more_heads_have_windows():
    state = problems()["segment_state"]
    shares = [Split(32, share) for share in (0.0, 0.5, 1.0)]
    assert [num_busy_ctas(state, default(state), [32768], split) for split in shares] == [8 * 29, 4 * 29, 0]
    assert [num_ctas(state, default(state), [32768], split) for split in shares] == [8 * 16 * 2] * 3


def test_without_exact_heads_there_is_nothing_to_correct():
    for kernel in ("segment_state", "segment_correct"):
        problem = problems()[kernel]
        assert steps(problem, default(problem), [32768], SMS, Split(16, 1.0)) == 0
        assert num_busy_ctas(problem, default(problem), [32768], Split(16, 1.0)) == 0


def test_a_window_longer_than_a_segment_counts_as_none():
    state = problems()["segment_state"]
    assert num_busy_ctas(state, default(state), [32768], Split(8, 1.0, warmup_chunks=8)) > 0


@pytest.mark.parametrize(
    ("heads", "share", "windowed"), [(8, 0.75, 6), (6, 0.75, 5), (8, 0.0, 0), (8, 1.0, 8), (10, 0.7, 7)]
)
def test_windowed_heads_are_rounded_up_as_the_measured_gates_are(heads, share, windowed):
    assert windowed_heads(heads, share) == windowed


def test_split_kernels_without_a_split_are_refused():
    forward = problems()["segment_forward"]
    with pytest.raises(ConfigError, match="`split` must be given for segment_forward"):
        steps(forward, default(forward), [32768], SMS)
    for count in (num_busy_ctas, num_ctas):
        with pytest.raises(ConfigError, match="`split` must be given for segment_forward"):
            count(forward, default(forward), [32768])


@pytest.mark.parametrize(("dims", "chunks"), [((128, 128), 8), ((64, 64), 4), ((128, 256), 6), ((64, 256), 3)])
def test_least_segment_has_rows_for_its_start_and_its_transfer_matrix(dims, chunks):
    """Rows of o: 2 K for the state, K for every V / 64 of the 2 K / 64 tiles of D."""
    for problem in problems(*dims).values():
        assert least_segment_chunks(problem) == chunks


def test_many_lengths_are_merged_without_losing_the_longest_or_the_work():
    draw = random.Random(0)
    lengths = [0, *(draw.randrange(65536) for _ in range(1000)), 262144]
    counts = chunk_counts(lengths, 64)
    chunks = [-(-n // 64) for n in lengths]
    assert len(counts) <= 40 and max(counts) == 4096
    assert sum(counts.values()) == sum(n > 0 for n in chunks)
    assert sum(n * count for n, count in counts.items()) == pytest.approx(sum(chunks), rel=1e-3)


def test_few_lengths_are_kept():
    assert chunk_counts([64, 65, 0, 1, 128], 64) == {1: 2, 2: 2}
    assert split_items(chunk_counts([0, 0], 64), 8, 8, Split(16)).forward == {}


def test_kernels_of_the_backward_walk_chains_or_do_every_chunk_of_a_key_head_by_itself():
    config, lengths = OpConfig(2, 8), [640, 320]
    for name in ("recompute_state", "backward_state"):
        problem = config.problem(name)
        assert (steps(problem, default(problem), lengths, 132), num_ctas(problem, default(problem), lengths)) == (
            10,
            16,
        )
        halves = default(problem).replace(dv_split=2, registers="40/168/240")
        assert num_ctas(problem, halves, lengths) == 32
    problem = config.problem("backward_grad")
    schedule = default(problem).replace(chunks_per_cta=2)
    assert num_ctas(problem, schedule, lengths) == 15 * 2 // 2  # chunks times key heads, two chunks each
    assert steps(problem, schedule, lengths, 132) == 2 * 4  # of the four value heads of a key head
