"""The algebra of splitting, in float64: split equals unsplit, and a window never errs by more than its bound."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from qla_jit.chunk_form import chunk_form
from qla_jit.numerics import make_inputs, relative_error
from qla_jit.ragged import chunk_slots
from qla_jit.reference import (
    chunk_reference,
    kkt_inverse_reference,
    recurrent_reference,
    segment_correct_reference,
    segment_state_reference,
    warmup_chunks_reference,
)
from qla_jit.segments import cut

CHUNK = 16
EDGES = (0, 1, 15, 16, 17, 0, 130, 64, 0)
EXACT = 1e-10


def inputs(lengths=EDGES, **kwargs):
    return make_inputs(lengths, 2, 4, 16, 8, dtype=torch.float64, **kwargs)


def random_gates(x, seed):
    """Every (sequence, head) with a decay of its own, from e^-1e-4 to e^-20 a token; a quarter has none."""
    gen = torch.Generator().manual_seed(seed)
    sizes = (torch.rand(len(x.cu_host) - 1, x.g.shape[2], generator=gen) * 12.2 - 9.2).exp()
    sizes[torch.rand(sizes.shape, generator=gen) < 0.25] = 0.0
    of_token = torch.repeat_interleave(sizes, torch.diff(x.cu_seqlens.long()), 0)
    return -of_token[None].double() * torch.rand(x.g.shape, generator=gen, dtype=torch.float64)


def split(x, segments, initial_state, known=False, warmup=None, v_first=False, g=None):
    """(o, final of the forward, start states, final of the scan), through segments as the kernels do it."""
    g = x.g if g is None else g
    given = initial_state if known else None
    ends = segment_state_reference(x.k, x.v, g, x.beta, segments, given, warmup, v_first)
    starts, scanned = segment_correct_reference(*ends, segments, initial_state, v_first)
    o, final = chunk_reference(
        x.q, x.k, x.v, g, x.beta, initial_state=starts, cu_seqlens=segments.bounds, state_v_first=v_first, chunk_size=16
    )
    return o, final[list(segments.lasts)], starts, scanned


@pytest.mark.parametrize("seed", range(24))
def test_split_is_unsplit_on_random_batches(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, CHUNK, draw.randrange(260)]) for _ in range(draw.randrange(1, 6))]
    x = inputs(
        lengths,
        seed=seed,
        gates=draw.choice(["none", "mild", "violent", "bench"]),
        key_correlation=draw.choice([0.0, 0.5, 0.99, 1.0]),
        beta=draw.choice([None, 0.0, 1.0, 1.5, 2.0]),
    )
    initial = draw.choice([None, 10.0]) and 10.0 * x.initial_state
    v_first = draw.random() < 0.5
    given = initial.mT if v_first and initial is not None else initial
    want_o, want_s = recurrent_reference(*x.tokens, None, given, x.cu_host, v_first)
    segments = cut(lengths, CHUNK, draw.choice([1, 2, 3, 5, 17, None]))
    known = initial is not None and draw.random() < 0.5
    o, final, starts, scanned = split(x, segments, given, known, v_first=v_first)
    assert relative_error(o, want_o) < EXACT
    assert relative_error(final, want_s) < EXACT and relative_error(scanned, want_s) < EXACT
    assert starts.shape == (len(segments), *want_s.shape[1:])


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("gates", ["none", "violent"])
def test_start_states_are_the_states_of_the_recurrence(limit, gates):
    x = inputs(gates=gates, beta=1.9, key_correlation=0.5)
    segments = cut(EDGES, CHUNK, limit)
    *_, starts, _ = split(x, segments, x.initial_state)
    for s, n in enumerate(segments.sequences):
        rows = slice(x.cu_host[n], segments.bounds[s])
        _, want = recurrent_reference(*(t[:, rows] for t in x.tokens), initial_state=x.initial_state[n : n + 1])
        assert relative_error(starts[s], want[0]) < EXACT


def test_an_exact_warmup_and_known_first_states_change_nothing():
    x = inputs(gates="violent")
    segments = cut(EDGES, CHUNK, 2)
    warmup = warmup_chunks_reference(x.g, segments, None)
    assert warmup.tolist() == [[first] * 4 for first in segments.first_chunks]
    want = split(x, segments, x.initial_state)
    for got, exact in zip(split(x, segments, x.initial_state, True, warmup), want):
        assert relative_error(got, exact) < EXACT


def test_known_first_segments_and_windows_have_no_transfer_matrix_and_the_others_do():
    x = inputs((200, 40, 0), gates="bench", seed=3)
    g = torch.where(x.g == 0, 0.0, x.g - 0.2)
    segments = cut((200, 40, 0), CHUNK, 3)
    warmup = warmup_chunks_reference(g, segments, 1e-3)
    _, m = segment_state_reference(x.k, x.v, g, x.beta, segments, x.initial_state, warmup)
    seen = set()
    for s in range(len(segments)):
        for head in range(4):
            if segments.has_successor(s):
                needed = s > 0 and not segments.window_holds(s + 1, int(warmup[s + 1, head]))
                assert bool(m[s, head].any()) == needed
                seen.add(needed)
    assert seen == {True, False}


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
def test_transfer_matrix_is_the_product_of_chunk_matrices(gates):
    x = inputs((96, 40), gates=gates, beta=1.7)
    segments = cut((96, 40), CHUNK, 2)
    _, m = segment_state_reference(x.k, x.v, x.g, x.beta, segments)
    a = kkt_inverse_reference(x.k, x.beta, segments.bounds, CHUNK)
    chunks = chunk_slots(segments.bounds, CHUNK)
    for s in range(len(segments)):
        want = torch.eye(16, dtype=torch.float64).expand(4, 16, 16)
        for slot, first, end in chunks:
            if segments.bounds[s] <= first < segments.bounds[s + 1]:
                k = x.k[0, first:end].repeat_interleave(2, 1).transpose(0, 1)
                decay = x.g[0, first:end].double().sum(0).exp()[:, None, None]
                want = decay * (want - k.mT @ (a[slot, :, : end - first, : end - first] @ (k @ want)))
        assert relative_error(m[s], want) < EXACT


def test_v_first_states_and_transfer_matrices_are_transposed():
    x = inputs()
    segments = cut(EDGES, CHUNK, 2)
    plain = segment_state_reference(x.k, x.v, x.g, x.beta, segments, x.initial_state)
    v_first = segment_state_reference(x.k, x.v, x.g, x.beta, segments, x.initial_state.mT, state_v_first=True)
    for want, got in zip(plain, v_first):
        assert torch.equal(got, want.mT) and got.is_contiguous()
    want = segment_correct_reference(*plain, segments, x.initial_state)
    got = segment_correct_reference(*v_first, segments, x.initial_state.mT, state_v_first=True)
    assert all(torch.equal(b, a.mT) for a, b in zip(want, got))


def test_empty_sequences_map_their_state_to_itself():
    x = inputs((0, 5, 0))
    segments = cut((0, 5, 0), CHUNK, 1)
    states, transfers = segment_state_reference(x.k, x.v, x.g, x.beta, segments)
    assert not states[[0, 2]].any() and torch.equal(transfers[0, 0], torch.eye(16, dtype=torch.float64))
    starts, finals = segment_correct_reference(states, transfers, segments, x.initial_state)
    assert torch.equal(starts, x.initial_state.double()) and torch.equal(finals[[0, 2]], starts[[0, 2]])
    none = make_inputs((), 1, 2, 16, 8, torch.float64)
    states, transfers = segment_state_reference(none.k, none.v, none.g, none.beta, cut((), CHUNK, 1))
    assert states.shape == (0, 2, 16, 8) and transfers.shape == (0, 2, 16, 16)
    assert segment_correct_reference(states, transfers, cut((), CHUNK, 1))[1].shape == (0, 2, 16, 8)


def test_a_batch_is_its_sequences_laid_end_to_end():
    x = inputs((40, 40, 40))
    segments = cut((40, 40, 40), CHUNK, 1)
    rows = [t.reshape(3, 40, *t.shape[2:]) for t in (x.k, x.v, x.g, x.beta)]
    want = segment_state_reference(x.k, x.v, x.g, x.beta, segments)
    assert all(torch.equal(a, b) for a, b in zip(want, segment_state_reference(*rows, segments)))
    warmup = warmup_chunks_reference(x.g, segments, 0.9)
    assert torch.equal(warmup, warmup_chunks_reference(rows[2], segments, 0.9))


def test_gradients_of_the_split_are_those_of_the_recurrence():
    x = inputs((50, 0, 33))
    segments = cut((50, 0, 33), CHUNK, 1)
    leaves = [t.detach().double().requires_grad_() for t in (*x.tokens, x.initial_state)]
    q, k, v, g, beta, initial = leaves
    starts, _ = segment_correct_reference(*segment_state_reference(k, v, g, beta, segments), segments, initial)
    o, s = chunk_reference(q, k, v, g, beta, initial_state=starts, cu_seqlens=segments.bounds, chunk_size=CHUNK)
    loss = o.square().sum() + s[list(segments.lasts)].sin().sum()
    got = torch.autograd.grad(loss, leaves)
    o, s = recurrent_reference(*leaves[:5], initial_state=initial, cu_seqlens=x.cu_host)
    want = torch.autograd.grad(o.square().sum() + s.sin().sum(), leaves)
    assert all(relative_error(a, b) < 1e-9 for a, b in zip(got, want))


def test_warmup_counts_are_the_fewest_that_meet_the_bound():
    x = inputs((300, 17, 0, 150), seed=5)
    g = random_gates(x, 5)
    segments = cut((300, 17, 0, 150), CHUNK, 2)
    for tolerance in (0.5, 1e-4, 1e-30):
        counts = warmup_chunks_reference(g, segments, tolerance)
        assert counts.dtype == torch.int64 and counts.shape == (len(segments), 4)
        for s, before in enumerate(segments.first_chunks):
            for head in range(4):
                start, count = segments.bounds[s], int(counts[s, head])
                decay = [g[0, start - c * CHUNK : start, head].sum().item() for c in range(before + 1)]
                enough = [c for c, total in enumerate(decay) if total <= math.log(tolerance)]
                assert count == min(enough, default=before)


def test_warmup_counts_grow_as_the_tolerance_shrinks_and_exact_is_all():
    x = inputs((400, 31, 200), seed=6)
    g = random_gates(x, 6)
    segments = cut((400, 31, 200), CHUNK, 3)
    tolerances = [1.0, 0.99, 0.1, 1e-2, 1e-4, math.exp(-10), 1e-8, 1e-300, 0.0, None]
    counts = [warmup_chunks_reference(g, segments, tolerance) for tolerance in tolerances]
    for looser, tighter in zip(counts, counts[1:]):
        assert (looser <= tighter).all()
    assert (counts[0] < counts[-1]).any()
    assert counts[-1].tolist() == [[first] * 4 for first in segments.first_chunks]


def test_heads_without_decay_never_have_a_window():
    x = inputs((300,), gates="none")
    segments = cut((300,), CHUNK, 2)
    warmup = warmup_chunks_reference(x.g, segments, 1e-4)
    assert not any(segments.window_holds(s, int(c)) for s, row in enumerate(warmup) for c in row)


def chunk_states(x, k, g, initial):
    """The states between the chunks of each sequence, ``[chunks, HV, K, V]`` each, the initial one first."""
    *_, kept = chunk_form(
        x.q, k, x.v, g, x.beta, initial_state=initial, cu_seqlens=x.cu_host, chunk_size=CHUNK, checkpoint_every=CHUNK
    )
    lengths = [end - start for start, end in zip(x.cu_host, x.cu_host[1:])]
    rows = kept.split([length // CHUNK for length in lengths])
    return [torch.cat([first[None], of_sequence]) for first, of_sequence in zip(initial.double(), rows)]


def window_errors(x, k, g, segments, initial, tolerance, excess=0.0):
    """Of all windows that hold: the error of the start state, the state before the window, the window's decay."""
    warmup = warmup_chunks_reference(g, segments, tolerance, excess)
    windowed, _ = segment_state_reference(k, x.v, g, x.beta, segments, initial, warmup)
    states = chunk_states(x, k, g, initial)
    errors, befores, decays = [], [], []
    for s, n in enumerate(segments.sequences):
        for head, count in enumerate(warmup[s].tolist()):
            if segments.window_holds(s, count):
                first, start = segments.first_chunks[s], segments.bounds[s]
                errors.append(windowed[s - 1, head] - states[n][first, head])
                befores.append(states[n][first - count, head])
                decays.append(g[0, start - count * CHUNK : start, head].double().sum().exp())
    return torch.stack(errors), torch.stack(befores), torch.stack(decays)


def window_case(seed, beta):
    """A random ragged batch, its gates, a cut, a tolerance and initial states."""
    draw = random.Random(seed)
    lengths = [draw.randrange(16, 1500) for _ in range(12)] + [0, 1]
    x = make_inputs(lengths, 4, 8, 16, 8, torch.float64, seed=seed, beta=beta, key_correlation=draw.choice([0, 0.7]))
    tolerance = draw.choice([0.3, 1e-2, 1e-4, math.exp(-10)])
    return x, random_gates(x, seed), cut(lengths, CHUNK, draw.choice([2, 3, 5])), tolerance


@pytest.mark.parametrize("beta", [None, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_windowed_starts_never_err_by_more_than_the_bound(seed, beta):
    x, g, segments, tolerance = window_case(seed, beta)
    k = F.normalize(x.k, dim=-1)  # to float64: with β = 2 the bound is sharp
    errors, befores, decays = window_errors(x, k, g, segments, 100.0 * x.initial_state, tolerance)
    assert len(errors) > 200 and (decays <= tolerance).all()
    for norm in (lambda m: torch.linalg.matrix_norm(m), lambda m: torch.linalg.matrix_norm(m, 2)):
        assert (norm(errors) <= decays * norm(befores) * (1 + 1e-12) + 1e-13 * (1 + norm(befores))).all()
    ratios = (errors.norm(dim=(1, 2)) / (decays * befores.norm(dim=(1, 2))))[decays > 1e-10]
    assert ratios.max() > (0.99 if beta == 2.0 else 1e-3)


def test_keys_longer_than_one_need_the_excess_where_beta_nears_two():
    tolerance = 1e-3
    x = make_inputs((480,), 4, 8, 16, 8, torch.float64, beta=2.0)
    g = torch.full(x.g.shape, math.log(tolerance) / (2 * CHUNK) * (1 + 1e-9), dtype=torch.float64)  # two chunks: just
    k = x.k * (1 + 2.0**-8)  # the most that rounding a normalised key to bf16 can do
    excess = 2 * (1 + 2.0**-8) ** 2 - 2
    segments = cut((480,), CHUNK, 3)
    for allowed in (0.0, excess):
        errors, befores, _ = window_errors(x, k, g, segments, x.initial_state, tolerance, allowed)
        held = errors.norm(dim=(1, 2)) <= tolerance * befores.norm(dim=(1, 2)) * (1 + 1e-6)
        assert held.all() == (allowed > 0)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
def test_a_windowed_split_errs_by_the_tolerance_of_the_largest_state(tolerance):
    x = inputs((700, 30, 0, 1, 500), seed=8)
    g = random_gates(x, 8)
    segments = cut((700, 30, 0, 1, 500), CHUNK, 3)
    warmup = warmup_chunks_reference(g, segments, tolerance)
    *_, starts, finals = split(x, segments, x.initial_state, True, warmup, g=g)
    *_, want_starts, want_finals = split(x, segments, x.initial_state, g=g)
    largest = torch.stack([s.norm(dim=(2, 3)).amax(0) for s in chunk_states(x, x.k, g, x.initial_state)])
    errors = (starts - want_starts).norm(dim=(2, 3))
    assert (errors <= tolerance * largest[list(segments.sequences)] + 1e-12).all() and errors.max() > 0
    assert ((finals - want_finals).norm(dim=(2, 3)) <= tolerance * largest + 1e-12).all()


@pytest.mark.parametrize("tolerance", [None, 1e-9])
def test_the_kernels_items_give_every_segment_its_start(tolerance):
    """Items start from what is known; the correction works in place; windowed segments run chunks ahead from zero."""
    lengths = (0, 400, 16, 1, 100, 230)
    x = inputs(lengths, seed=4, beta=1.5)
    g = random_gates(x, 4)
    segments = cut(lengths, CHUNK, 3)
    kinds = segments.starts(4, warmup_chunks_reference(g, segments, tolerance).tolist())
    items = segments.state_items(kinds)
    assert len({item.transfer for item in items}) == 2

    def run(segment, head, state):
        """(o of the segment, state it leaves), from ``state`` or from zero as many chunks ahead as its window asks."""
        ahead = max(kinds[segment][head], 0) * CHUNK
        rows = slice(segments.bounds[segment] - ahead, segments.bounds[segment + 1])
        one = slice(head, head + 1)
        tokens = x.q[:, rows, head // 2 : head // 2 + 1], x.k[:, rows, head // 2 : head // 2 + 1]
        tokens += tuple(t[:, rows, one] for t in (x.v, g, x.beta))
        state = state if ahead == 0 else torch.zeros_like(state)
        o, left = chunk_reference(*tokens, initial_state=state[None, None], chunk_size=CHUNK)
        return o[0, ahead:, 0], left[0, 0]

    states = torch.full((len(segments), 4, 16, 8), math.nan, dtype=torch.float64)
    states[list(segments.firsts[:-1])] = x.initial_state.double()
    _, m = segment_state_reference(x.k, x.v, g, x.beta, segments)
    for segment, head, chunks, transfer in items:
        assert chunks == segments.chunks[segment] + max(kinds[segment][head], 0)
        start = torch.zeros(16, 8, dtype=torch.float64) if transfer else states[segment, head]
        states[segment + 1, head] = run(segment, head, start)[1]
    for segment, head, _, transfer in sorted(items):
        if transfer:
            states[segment + 1, head] += m[segment, head] @ states[segment, head]
    want_o, want_s = recurrent_reference(x.q, x.k, x.v, g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    limit = EXACT if tolerance is None else 1e-7
    for segment in range(len(segments)):
        rows = slice(segments.bounds[segment], segments.bounds[segment + 1])
        for head in range(4):
            o, left = run(segment, head, states[segment, head])
            assert relative_error(o, want_o[0, rows, head]) < limit
            if segment in segments.lasts:
                assert relative_error(left, want_s[segments.sequences[segment], head]) < limit


def test_a_known_start_survives_the_window_of_another_head():
    """The first segment of a head whose window holds runs from zero; of the others, from the initial state."""
    x = inputs((96,), seed=2)
    g = torch.zeros_like(x.g).double()
    g[..., 0] = -1.0
    segments = cut((96,), CHUNK, 3)
    warmup = warmup_chunks_reference(g, segments, 1e-4)
    assert warmup[1].tolist() == [1, 3, 3, 3]
    states, _ = segment_state_reference(x.k, x.v, g, x.beta, segments, 100.0 * x.initial_state, warmup)
    want = chunk_states(x, x.k, g, 100.0 * x.initial_state)[0][3]
    assert relative_error(states[0, 1:], want[1:]) < EXACT and 0 < relative_error(states[0, 0], want[0]) < 1e-3
