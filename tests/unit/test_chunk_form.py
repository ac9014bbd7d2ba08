"""The PyTorch chunk form: values, gradients, ragged edges, memory and speed."""

import time

import pytest
import torch

from qla_jit import chunk_form as module
from qla_jit.chunk_form import chunk_form
from qla_jit.numerics import make_inputs, relative_error
from qla_jit.reference import recurrent_reference

RAGGED = (0, 1, 63, 64, 65, 0, 2, 130, 31, 0)


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("group", [1, 4])
def test_float64_inputs_give_the_recurrence_to_rounding(gates, chunk_size, group):
    x = make_inputs(RAGGED, 2, 2 * group, 16, 8, dtype=torch.float64, gates=gates)
    kwargs = dict(scale=0.7, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    want_o, want_s = recurrent_reference(*x.tokens, **kwargs)
    o, s = chunk_form(*x.tokens, **kwargs, chunk_size=chunk_size)
    assert o.dtype == s.dtype == torch.float64
    assert relative_error(o, want_o) < 1e-12 and relative_error(s, want_s) < 1e-12


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-3), (torch.float16, 3e-4), (torch.float32, 2e-6)])
@pytest.mark.parametrize("gates", ["none", "violent"])
def test_errors_are_one_rounding_of_the_output(dtype, limit, gates):
    x = make_inputs((300, 5), 1, 2, 64, 64, dtype=dtype, gates=gates)
    kwargs = dict(initial_state=x.initial_state, cu_seqlens=x.cu_host)
    want_o, want_s = recurrent_reference(*x.tokens, **kwargs)
    o, s = chunk_form(*x.tokens, **kwargs)
    assert o.dtype == dtype and s.dtype == torch.float32
    assert relative_error(o, want_o) < limit and relative_error(s, want_s) < 2e-6


@pytest.mark.parametrize(("correlation", "beta"), [(1.0, 1.0), (0.9, 1.99), (0.0, 0.0)])
def test_hard_keys_stay_accurate_in_fp32(correlation, beta):
    x = make_inputs((200,), 1, 1, 64, 64, torch.float32, gates="none", key_correlation=correlation, beta=beta)
    want_o, want_s = recurrent_reference(*x.tokens, initial_state=x.initial_state)
    o, s = chunk_form(*x.tokens, initial_state=x.initial_state)
    assert relative_error(o, want_o) < 2e-5 and relative_error(s, want_s) < 2e-5


def test_operand_rounding_costs_what_a_16_bit_kernel_costs():
    x = make_inputs((400,), 1, 2, gates="none")
    want, _ = recurrent_reference(*x.tokens)
    error = relative_error(chunk_form(*x.tokens, operand_dtype=torch.bfloat16)[0], want)
    assert 1.5 * relative_error(chunk_form(*x.tokens)[0], want) < error < 6e-3


@pytest.mark.parametrize("gates", ["mild", "violent"])
def test_gradients_are_those_of_the_recurrence(gates):
    x = make_inputs((17, 0, 1, 33), 1, 2, 8, 6, dtype=torch.float64, gates=gates)
    grads = []
    for form, extra in ((recurrent_reference, {}), (chunk_form, {"chunk_size": 16})):
        leaves = [t.detach().double().requires_grad_() for t in (*x.tokens, x.initial_state)]
        o, s = form(*leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_host, **extra)
        grads.append(torch.autograd.grad(o.square().sum() + s.sin().sum(), leaves))
    for got, want in zip(*grads[::-1]):
        assert want.abs().max() > 0 and relative_error(got, want) < 1e-9


def test_gradients_reach_16_bit_leaves_finite():
    x = make_inputs((70, 3), 1, 1, 16, 16, gates="violent")
    leaves = [t.detach().requires_grad_() for t in (*x.tokens, x.initial_state)]
    o, s = chunk_form(*leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_host)
    (o.float().sum() + s.sum()).backward()
    for leaf in leaves:
        assert leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all() and leaf.grad.abs().max() > 0


def test_v_first_states_are_transposed_and_contiguous():
    x = make_inputs(RAGGED, 1, 2, 16, 8, torch.float32)
    o, s = chunk_form(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    o_t, s_t = chunk_form(*x.tokens, initial_state=x.initial_state.mT, cu_seqlens=x.cu_host, state_v_first=True)
    assert relative_error(o, o_t) < 1e-6 and relative_error(s, s_t.mT) < 1e-6 and s_t.is_contiguous()


def test_final_states_are_new_memory_in_the_dtype_asked_for():
    x = make_inputs((0, 0), 1, 1, 16, 8)
    _, s = chunk_form(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    assert torch.equal(s, x.initial_state) and s.data_ptr() != x.initial_state.data_ptr()
    _, half = chunk_form(*x.tokens, cu_seqlens=x.cu_host, state_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and not half.any()


def test_no_sequences_and_no_tokens():
    x = make_inputs((), 1, 2, 16, 8)
    o, s = chunk_form(*x.tokens, cu_seqlens=(0,))
    assert o.shape == (1, 0, 2, 8) and s.shape == (0, 2, 16, 8)
    empty = [t.reshape(0, 5, *t.shape[2:]) for t in x.tokens]
    o, s = chunk_form(*empty)
    assert o.shape == (0, 5, 2, 8) and s.shape == (0, 2, 16, 8)


def test_nan_stays_in_its_sequence():
    x = make_inputs((70, 30, 65), 1, 2, 16, 8, torch.float32)
    want_o, want_s = chunk_form(*x.tokens, cu_seqlens=x.cu_host)
    for t in x.tokens:
        t[0, 70:100] = float("nan")
    o, s = chunk_form(*x.tokens, cu_seqlens=x.cu_host)
    assert torch.equal(o[0, :70], want_o[0, :70]) and torch.equal(o[0, 100:], want_o[0, 100:])
    assert torch.equal(s[[0, 2]], want_s[[0, 2]]) and s[1].isnan().all()


def test_groups_bound_padding_and_states():
    cu = [0]
    for n in range(3000):
        cu.append(cu[-1] + n % 7 + (500 if n % 1000 == 0 else 0))
    states = 128 * 128 * 8
    groups = list(module._groups(cu, 64, states))
    assert sorted(n for names, _ in groups for n in names) == list(range(3000))
    for names, chunk in groups:
        assert len(names) * states <= module._GROUP_ELEMENTS
        for n in names:
            length = cu[n + 1] - cu[n]
            assert -(-length // chunk) * chunk < length + max(length, 64 * (length > 32), 1)


def test_a_bound_of_one_sequence_changes_nothing(monkeypatch):
    x = make_inputs(RAGGED, 1, 2, 16, 8, torch.float64)
    want_o, want_s = chunk_form(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    monkeypatch.setattr(module, "_GROUP_ELEMENTS", 1)
    o, s = chunk_form(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    assert relative_error(o, want_o) < 1e-14 and relative_error(s, want_s) < 1e-14


@pytest.mark.wall_clock
def test_4096_tokens_of_8_heads_take_less_than_two_seconds():
    x = make_inputs((4096,), 2, 8, gates="bench")
    times = []
    with torch.no_grad():
        for _ in range(3):
            start = time.perf_counter()
            chunk_form(*x.tokens, initial_state=x.initial_state)
            times.append(time.perf_counter() - start)
    assert min(times) < 2.0


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
@pytest.mark.parametrize("segment_chunks", [1, 2, 5, 100])
def test_segments_side_by_side_give_the_recurrence(gates, segment_chunks):
    lengths = (*RAGGED, 300)
    x = make_inputs(lengths, 2, 4, 16, 8, torch.float64, gates=gates, beta=1.9, key_correlation=0.5)
    kwargs = dict(scale=0.7, initial_state=x.initial_state.mT, cu_seqlens=x.cu_host, state_v_first=True)
    want_o, want_s = recurrent_reference(*x.tokens, **kwargs)
    o, s = chunk_form(*x.tokens, **kwargs, chunk_size=16, segment_chunks=segment_chunks)
    assert s.shape == want_s.shape and s.is_contiguous()
    assert relative_error(o, want_o) < 1e-12 and relative_error(s, want_s) < 1e-12


def test_segments_of_a_dense_batch_in_16_bits_keep_the_accuracy_and_the_dtypes():
    x = make_inputs((300, 300), 1, 2, 64, 64, gates="bench")
    rows = [t.view(2, 300, *t.shape[2:]) for t in x.tokens]
    want_o, want_s = recurrent_reference(*rows)
    o, s = chunk_form(*rows, segment_chunks=2, state_dtype=torch.bfloat16)
    assert o.dtype == s.dtype == torch.bfloat16 and o.shape == (2, 300, 2, 64)
    assert relative_error(o, want_o) < 2e-3 and relative_error(s, want_s) < 3e-3
    _, s = chunk_form(*rows, segment_chunks=2)
    assert relative_error(s, want_s) < 2e-6
    assert relative_error(chunk_form(*rows, segment_chunks=2, operand_dtype=torch.bfloat16)[0], want_o) < 6e-3


@pytest.mark.parametrize("segment_chunks", [1, 3, 4, 7])
def test_segments_leave_the_same_checkpoints(segment_chunks):
    x = make_inputs(RAGGED, 1, 2, 16, 8, torch.float64)
    kwargs = dict(initial_state=x.initial_state, cu_seqlens=x.cu_host, chunk_size=8, checkpoint_every=24)
    for got, want in zip(
        chunk_form(*x.tokens, **kwargs, segment_chunks=segment_chunks), chunk_form(*x.tokens, **kwargs)
    ):
        assert got.shape == want.shape and relative_error(got, want) < 1e-12


def test_rows_past_the_end_and_nan_of_a_neighbour_stay_out_of_segments():
    x = make_inputs((70, 30, 65), 1, 2, 16, 8, torch.float64)
    for t in x.tokens:
        t[0, 70:100] = float("nan")
    cu = (0, 70, 100, 160)
    want_o, want_s = chunk_form(*x.tokens, cu_seqlens=cu, chunk_size=16)
    o, s = chunk_form(*x.tokens, cu_seqlens=cu, chunk_size=16, segment_chunks=1)
    for rows in (slice(70), slice(100, None)):
        assert relative_error(o[:, rows], want_o[:, rows]) < 1e-12
    assert not o[:, 160:].any() and relative_error(s[[0, 2]], want_s[[0, 2]]) < 1e-12


def test_gradients_through_segments_are_those_of_the_recurrence():
    x = make_inputs((40, 0, 17), 1, 2, 8, 6, dtype=torch.float64)
    grads = []
    for form, extra in ((recurrent_reference, {}), (chunk_form, {"chunk_size": 8, "segment_chunks": 2})):
        leaves = [t.detach().double().requires_grad_() for t in (*x.tokens, x.initial_state)]
        o, s = form(*leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_host, **extra)
        grads.append(torch.autograd.grad(o.square().sum() + s.sin().sum(), leaves))
    for got, want in zip(*grads[::-1]):
        assert relative_error(got, want) < 1e-9


def test_nothing_long_enough_to_cut_is_the_plain_form():
    x = make_inputs(RAGGED, 1, 2, 16, 8)
    want = chunk_form(*x.tokens, cu_seqlens=x.cu_host)
    assert all(torch.equal(a, b) for a, b in zip(want, chunk_form(*x.tokens, cu_seqlens=x.cu_host, segment_chunks=3)))
