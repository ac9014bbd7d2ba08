"""The references agree with each other and with hand-written loops; the kernels' two-step form is the same function."""

import math

import pytest
import torch

from qla_jit.numerics import make_inputs, relative_error
from qla_jit.ragged import chunk_slots, num_slots
from qla_jit.reference import (
    chunk_reference,
    gate_scan_reference,
    input_activation_reference,
    kkt_inverse_reference,
    recurrent_reference,
)

LENGTHS = (0, 1, 15, 16, 17, 0, 40, 0)
EXACT = 1e-12


def inputs(lengths=LENGTHS, **kwargs):
    return make_inputs(lengths, 2, 4, 16, 8, dtype=torch.float64, **kwargs)


def naive(x):
    """One token of one head at a time, written from the definition."""
    o, final = torch.zeros_like(x.v), x.initial_state.double().clone()
    for n, (start, end) in enumerate(zip(x.cu_host, x.cu_host[1:])):
        for h in range(x.v.shape[2]):
            s, kh = final[n, h], h // (x.v.shape[2] // x.k.shape[2])
            for t in range(start, end):
                k, v, b, a = x.k[0, t, kh], x.v[0, t, h], x.beta[0, t, h].double(), x.g[0, t, h].double().exp()
                s = a * (s - b * torch.outer(k, k @ s)) + b * torch.outer(k, v)
                o[0, t, h] = x.scale * (x.q[0, t, kh] @ s)
            final[n, h] = s
    return o, final


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
def test_recurrence_is_the_definition(gates):
    x = inputs(gates=gates)
    want_o, want_s = naive(x)
    o, s = recurrent_reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    assert o.dtype == s.dtype == torch.float64
    assert relative_error(o, want_o) < EXACT and relative_error(s, want_s) < EXACT


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunk_form_is_the_recurrence(gates, chunk_size):
    x = inputs((0, 1, 63, 64, 65, 0, 130), gates=gates, seed=1)
    kwargs = dict(scale=0.3, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    want_o, want_s = recurrent_reference(*x.tokens, **kwargs)
    o, s = chunk_reference(*x.tokens, **kwargs, chunk_size=chunk_size)
    assert relative_error(o, want_o) < EXACT and relative_error(s, want_s) < EXACT


def test_a_batch_is_its_sequences_laid_end_to_end():
    x = inputs((20, 20, 20))
    want_o, want_s = recurrent_reference(*x.tokens, cu_seqlens=x.cu_host)
    rows = [t.reshape(3, 20, *t.shape[2:]) for t in x.tokens]
    for reference in (recurrent_reference, chunk_reference):
        o, s = reference(*rows)
        assert o.shape == (3, 20, 4, 8)
        assert relative_error(o.reshape(want_o.shape), want_o) < EXACT and relative_error(s, want_s) < EXACT


@pytest.mark.parametrize("reference", [recurrent_reference, chunk_reference])
def test_v_first_states_are_transposed(reference):
    x = inputs()
    o, s = reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    o_t, s_t = reference(*x.tokens, initial_state=x.initial_state.mT, cu_seqlens=x.cu_host, state_v_first=True)
    assert torch.equal(o, o_t) and torch.equal(s, s_t.mT)


def test_empty_sequences_keep_their_state_and_rows_past_the_end_are_zero():
    x = inputs()
    cu = (*x.cu_host[:-2], x.cu_host[-2] - 5, x.cu_host[-2] - 5)
    o, s = recurrent_reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=cu)
    assert torch.equal(s[[0, 5, 7]], x.initial_state[[0, 5, 7]].double())
    assert o[0, -5:].abs().max() == 0 and o[0, -6].abs().min() > 0


def test_gradients_of_both_forms_agree():
    x = inputs((3, 0, 20, 16))
    grads = []
    for reference, extra in ((recurrent_reference, {}), (chunk_reference, {"chunk_size": 16})):
        leaves = [t.detach().double().requires_grad_() for t in (*x.tokens, x.initial_state)]
        o, s = reference(*leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_host, **extra)
        grads.append(torch.autograd.grad(o.square().sum() + s.sin().sum(), leaves))
    for got, want in zip(*grads):
        assert want.abs().max() > 0 and relative_error(got, want) < 1e-10


def test_slots_never_collide_and_always_fit():
    gen = torch.Generator().manual_seed(0)
    for chunk in (1, 32, 64):
        for _ in range(200):
            lengths = torch.randint(0, 200, (int(torch.randint(1, 9, (1,), generator=gen)),), generator=gen).tolist()
            cu = [0]
            for length in lengths:
                cu.append(cu[-1] + length)
            slots = [slot for slot, _, _ in chunk_slots(cu, chunk)]
            assert len(slots) == len(set(slots)) == sum(-(-length // chunk) for length in lengths)
            assert all(0 <= slot < num_slots(cu[-1], len(lengths), chunk) for slot in slots)


def test_kkt_inverse_inverts_and_is_zero_where_tokens_are_absent():
    x, chunk = inputs(), 16
    a = kkt_inverse_reference(x.k, x.beta, x.cu_host, chunk)
    assert a.shape == (num_slots(x.cu_host[-1], len(LENGTHS), chunk), 4, chunk, chunk)
    for slot, first, end in chunk_slots(x.cu_host, chunk):
        c = end - first
        for h in range(4):
            k, b = x.k[0, first:end, h // 2], x.beta[0, first:end, h].double()
            left = torch.eye(c, dtype=torch.float64) + (b[:, None] * (k @ k.T)).tril(-1)
            assert relative_error(left @ a[slot, h, :c, :c], b.diag()) < EXACT
        assert a[slot, :, c:].abs().sum() == 0 and a[slot, :, :, c:].abs().sum() == 0


def test_activations_are_their_definitions_and_leave_alone_what_is_not_asked_for():
    x = inputs()
    g, beta, rates, bias = 30 * x.g, torch.logit(x.beta), torch.linspace(-2, 1, 4), torch.linspace(-40, 40, 4)
    q, k, gates, betas = input_activation_reference(3 * x.q, 1e-3 * x.k, g, beta, True, rates, bias, 2.0)
    assert relative_error(q, x.q) < 1e-6 and relative_error(k, x.k / math.sqrt(2)) < 1e-6
    softplus = torch.nn.functional.softplus(g.double() + bias, threshold=100)
    assert relative_error(gates, -rates.double().exp() * softplus) < EXACT
    assert relative_error(betas, 2 * x.beta) < 1e-6
    given = (x.q, x.k, g, beta)
    assert all(torch.equal(a, b.double()) for a, b in zip(input_activation_reference(*given), given))


def test_gate_scan_sums_within_chunks_and_repeats_the_last_value():
    x, chunk = inputs(), 16
    scan = gate_scan_reference(x.g, x.cu_host, chunk)
    for slot, first, end in chunk_slots(x.cu_host, chunk):
        total = torch.zeros(4, dtype=torch.float64)
        for i in range(chunk):
            if first + i < end:
                total = total + x.g[0, first + i].double()
            torch.testing.assert_close(torch.exp2(scan[slot, :, i]), total.exp(), rtol=1e-12, atol=0)
    assert math.isclose(scan[chunk_slots(x.cu_host, chunk)[0][0], 0, 0].item() * math.log(2), x.g[0, 0, 0].item())


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 1.9])
def test_two_step_form_of_the_kernels_is_the_recurrence(gates, beta):
    """B = tril(Q Kᵀ) Ã and X = diag(γ_C/γ) Ãᵀ K turn (6), (8), (9) into products with Y alone."""
    x, chunk = inputs((1, 16, 17, 0, 40), gates=gates, beta=beta), 16
    want_o, want_s = recurrent_reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    a = kkt_inverse_reference(x.k, x.beta, x.cu_host, chunk)
    scan = gate_scan_reference(x.g, x.cu_host, chunk)
    state, o = x.initial_state.double().clone(), torch.zeros_like(want_o)
    for slot, first, end in chunk_slots(x.cu_host, chunk):
        n, c = next(n for n in range(5) if x.cu_host[n] <= first < x.cu_host[n + 1]), end - first
        q, k = (t[0, first:end].repeat_interleave(2, 1).transpose(0, 1) for t in (x.q, x.k))
        v, s, ac, gc = x.v[0, first:end].transpose(0, 1), state[n], a[slot, :, :c, :c], scan[slot, :, :c]
        gamma, last = torch.exp2(gc)[..., None], scan[slot, :, -1:]
        decay = torch.exp2((gc[:, :, None] - gc[:, None, :]).tril()).tril()
        y = v - gamma * (k @ s)
        b = (q @ k.mT).tril() @ ac
        xt = torch.exp2(last - gc)[..., None] * (ac.mT @ k)
        o[0, first:end] = (x.scale * (gamma * (q @ s) + (b * decay) @ y)).transpose(0, 1)
        state[n] = torch.exp2(last)[..., None] * s + xt.mT @ y
    assert relative_error(o, want_o) < EXACT and relative_error(state, want_s) < EXACT
