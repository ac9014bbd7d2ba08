"""How sequences are cut: whole chunks, few and even segments, every token once; and the work items of a cut."""

import random

import pytest
from qla_jit.templates.segments_sm90 import (
    OF_AFTER,
    OF_BEFORE,
    OF_CHUNKS,
    OF_COUNT,
    OF_FIRST,
    OF_SEGMENT,
    OF_SEQUENCE,
    OF_TOKEN,
    TURN_FIELDS,
)

from qla_jit.errors import InputError
from qla_jit.ragged import chunk_slots, num_checkpoints, num_slots
from qla_jit.segments import cut


def random_lengths(seed):
    draw = random.Random(seed)
    return [draw.choice([0, 1, 15, 16, 17, draw.randrange(2000)]) for _ in range(draw.randrange(12))]


def cases():
    for seed in range(200):
        draw = random.Random(-seed - 1)
        yield random_lengths(seed), draw.choice([1, 2, 3, 7, 40, None]), draw.choice([1, 1, 2, 5])


def test_segments_cover_every_sequence_in_whole_chunks():
    for lengths, limit, unit in cases():
        s = cut(lengths, 16, limit, unit)
        assert len(s) == len(s.first_chunks) == len(s.chunks) == len(s.bounds) - 1 and s.bounds[0] == 0
        assert s.firsts[-1] == len(s) and s.bounds[-1] == sum(lengths)
        start = 0
        for n, length in enumerate(lengths):
            of_n = range(s.firsts[n], s.firsts[n + 1])
            assert len(of_n) >= 1 and {s.sequences[i] for i in of_n} == {n}
            for i in of_n:
                assert s.bounds[i] == start + 16 * s.first_chunks[i]
                tokens = s.bounds[i + 1] - s.bounds[i]
                assert s.chunks[i] == -(-tokens // 16)
                last = i == s.lasts[n]
                assert s.has_successor(i) != last
                if not last:
                    assert tokens == 16 * s.chunks[i] > 0 and s.chunks[i] % unit == 0
                    assert s.first_chunks[i] + s.chunks[i] == s.first_chunks[i + 1]
            start += length
            assert s.bounds[s.firsts[n + 1]] == start


def test_segments_are_as_few_as_the_limit_allows_and_even():
    for lengths, limit, unit in cases():
        s = cut(lengths, 16, limit, unit)
        for n, length in enumerate(lengths):
            chunks = s.chunks[s.firsts[n] : s.firsts[n + 1]]
            if limit is None:
                assert len(chunks) == 1
                continue
            longest = max(1, limit // unit) * unit
            assert max(chunks) <= longest
            assert len(chunks) == max(1, -(-sum(chunks) // longest))
            assert list(chunks) == sorted(chunks, reverse=True)
            assert max(chunks) - min(chunks) <= 2 * unit - 1 and sum(chunks) == -(-length // 16)


def test_the_cut_of_a_sequence_depends_on_no_other():
    lengths = [700, 0, 33, 1999]
    s = cut(lengths, 16, 9)
    for n, length in enumerate(lengths):
        assert s.chunks[s.firsts[n] : s.firsts[n + 1]] == cut([length], 16, 9).chunks


def test_segments_have_the_chunks_of_the_uncut_batch_in_slots_of_their_own():
    for lengths, limit, unit in cases():
        s, uncut = cut(lengths, 16, limit, unit), cut(lengths, 16, None)
        slots = chunk_slots(s.bounds, 16)
        assert [(a, b) for _, a, b in slots] == [(a, b) for _, a, b in chunk_slots(uncut.bounds, 16)]
        assert len({slot for slot, _, _ in slots}) == len(slots)
        assert all(slot < num_slots(sum(lengths), len(s), 16) for slot, _, _ in slots)


def test_units_keep_the_rows_of_checkpoints():
    for lengths, limit, unit in cases():
        s, uncut = cut(lengths, 16, limit, unit), cut(lengths, 16, None)
        assert num_checkpoints(s.bounds, 16 * unit) == num_checkpoints(uncut.bounds, 16 * unit)


def test_nothing_to_cut():
    assert cut([], 64, 4).bounds == (0,) and len(cut([], 64, 4)) == 0 and not cut([], 64, 4).is_cut
    s = cut([0, 0], 64, 4)
    assert s.bounds == (0, 0, 0) and s.chunks == (0, 0) and not s.is_cut and not s.state_items(s.starts(8))
    assert not cut([256, 1], 64, 4).is_cut and cut([257, 1], 64, 4).is_cut
    assert not cut([10**6], 64, None).is_cut


@pytest.mark.parametrize(("limit", "unit", "least"), [(0, 1, 1), (-1, 1, 1), (4, 0, 1), (4, 1, 0)])
def test_numbers_below_one_are_refused(limit, unit, least):
    with pytest.raises(InputError, match=f"segment_chunks={limit}, unit={unit} and least={least}"):
        cut([100], 64, limit, unit, least)


def test_only_segments_between_a_first_and_a_last_need_a_transfer_matrix():
    s = cut([16 * 8, 16, 0, 16 * 4], 16, 2)
    assert s.firsts == (0, 4, 5, 6, 8)
    assert [i for i in range(len(s)) if s.has_successor(i)] == [0, 1, 2, 6]
    items = s.state_items(s.starts(1))
    assert {i.segment: i.transfer for i in items} == {0: False, 1: True, 2: True, 6: False}


def test_a_window_holds_where_it_fits_the_segment_before():
    s = cut([16 * 12], 16, 3)
    assert s.first_chunks == (0, 3, 6, 9)
    assert not s.window_holds(0, 0)  # a first segment's start is known
    assert s.window_holds(1, 2) and not s.window_holds(1, 3)  # three chunks before it are all there are
    assert s.window_holds(2, 3) and not s.window_holds(2, 4)
    shorter = cut([16 * 8], 16, 3)
    assert shorter.chunks == (3, 3, 2) and shorter.window_holds(2, 3)  # the segment before is what counts
    assert [s.start(0, 0), s.start(2), s.start(2, 3), s.start(2, 4)] == [0, -1, 3, -1]


def test_state_items_are_long_first_and_start_ahead_where_a_window_holds():
    s = cut([16 * 12, 16 * 9], 16, 4)
    assert s.chunks == (4, 4, 4, 3, 3, 3)
    assert s.starts(2) == [[0, 0], [-1, -1], [-1, -1]] * 2
    items = s.state_items(s.starts(2))
    assert {(i.segment, i.head) for i in items} == {(n, h) for n in (0, 1, 3, 4) for h in (0, 1)}
    assert [i.chunks for i in items] == [4] * 4 + [3] * 4
    assert all(i.transfer == (i.segment in (1, 4)) for i in items)
    assert [i.segment for i in s.state_items(s.starts(1), transfer_cost=1.5)] == [1, 4, 0, 3]
    starts = s.starts(2, [[0, 0], [1, 4], [5, 8], [0, 0], [3, 1], [6, 3]])
    assert starts == [[0, 0], [1, -1], [-1, -1], [0, 0], [-1, 1], [-1, 3]]
    items = {(i.segment, i.head): (i.chunks, i.transfer) for i in s.state_items(starts)}
    assert items == {
        (0, 1): (4, False),  # of head 0 the next segment starts from its window
        **{(1, 0): (5, False), (1, 1): (4, True)},  # from its window, and from an unknown state
        (3, 0): (3, False),
        (4, 0): (3, True),
    }


def test_a_cut_sequence_has_no_segment_below_the_least():
    for least in (1, 3, 8):
        for limit in (1, 4, 9, 100):
            for chunks in range(1, 40):
                s = cut([16 * chunks - 5], 16, limit, least=least)
                assert not s.is_cut or min(s.chunks) >= least
                assert len(s) == max(1, min(-(-chunks // limit), chunks // least))


def test_only_cut_sequences_take_turns_and_only_three_segments_need_a_correction():
    s = cut([16 * 2, 16 * 11, 5, 0, 16 * 8], 16, 4)
    assert s.firsts == (0, 1, 4, 5, 6, 8)
    assert s.turns() == [1, 2, 6, 7, 3] and s.corrected_sequences() == [1]
    assert cut([64, 0], 16, 4).turns() == [] and cut([16 * 8], 16, 4).corrected_sequences() == []


def rows_of_turns(lengths, limit, unit):
    """{segment: its row of the turn table}, field by field, from the lengths and every sequence's cut alone."""
    rows, segment = {}, 0
    for n, length in enumerate(lengths):
        sizes = cut([length], 16, limit, unit).chunks
        for i, size in enumerate(sizes):
            row = {
                OF_SEGMENT: segment,
                OF_SEQUENCE: n,
                OF_FIRST: sum(sizes[:i]),
                OF_COUNT: size,
                OF_TOKEN: sum(lengths[:n]),
                OF_BEFORE: sum(sizes[:i][-1:]),
                OF_AFTER: sum(sizes[i + 1 :][:1]),
                OF_CHUNKS: -(-length // 16),
            }
            if len(sizes) > 1:
                rows[segment] = [row[field] for field in range(TURN_FIELDS)]
            segment += 1
    return rows


def test_the_turn_table_tells_all_about_segments_of_cut_sequences():
    s = cut([16 * 2, 16 * 11, 5, 0, 16 * 8 - 3], 16, 4)
    assert s.turn_table() == [
        (1, 1, 0, 4, 32, 0, 4, 11),
        (2, 1, 4, 4, 32, 4, 3, 11),
        (6, 4, 0, 4, 213, 0, 4, 8),
        (7, 4, 4, 4, 213, 4, 0, 8),
        (3, 1, 8, 3, 32, 4, 0, 11),
    ]
    assert cut([64, 0], 16, 4).turn_table() == [] and cut([], 16, 4).turn_table() == []


def test_turn_tables_of_random_batches():
    for lengths, limit, unit in cases():
        s, rows = cut(lengths, 16, limit, unit), rows_of_turns(lengths, limit, unit)
        table = s.turn_table()
        assert [row[OF_SEGMENT] for row in table] == s.turns() and set(s.turns()) == set(rows)
        assert [list(row) for row in table] == [rows[segment] for segment in s.turns()]


def test_the_table_lists_every_segment_and_gives_each_its_turn():
    s = cut([16 * 2, 16 * 11, 5], 16, 4)
    assert s.table() == [(0, 0, 2, 1), (1, 0, 4, 2), (1, 4, 4, 3), (1, 8, 3, 0), (2, 0, 1, 4)]
    assert sorted(row[3] for row in s.table()) == list(range(len(s)))


def test_forward_order_is_long_first_and_stable():
    s = cut([16 * 2, 16 * 12, 5, 16 * 4], 16, 4)
    assert s.chunks == (2, 4, 4, 4, 1, 4)
    assert s.forward_order() == [1, 2, 3, 5, 0, 4]
