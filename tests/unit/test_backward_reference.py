"""The chunk form of the backward equals autograd of the forward, gradient by gradient, in float64."""

import pytest
import torch

from qla_jit.backward_reference import backward_grad_reference, backward_reference, recompute_state_reference
from qla_jit.numerics import make_inputs, relative_error
from qla_jit.ragged import chunk_slots
from qla_jit.reference import chunk_reference

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
TOLERANCE = 1e-11


def problem(lengths, heads, gates, seed=0, dims=(16, 24)):
    """Float64 inputs, with exact zeros and ones in beta, and gradients of both outputs."""
    inputs = make_inputs(lengths, *heads, *dims, dtype=torch.float64, gates=gates, seed=seed)
    gen = torch.Generator().manual_seed(seed + 100)
    beta = inputs.beta.double()
    beta[:, ::7], beta[:, 3::11] = 0.0, 1.0
    tokens = (inputs.q, inputs.k, inputs.v, inputs.g.double(), beta)
    do = torch.randn(inputs.v.shape, generator=gen, dtype=torch.float64)
    dfinal = torch.randn(inputs.initial_state.shape, generator=gen, dtype=torch.float64)
    return inputs, tokens, inputs.initial_state.double(), do, dfinal


def autograd(inputs, tokens, initial, do, dfinal, v_first, chunk_size):
    leaves = [x.detach().clone().requires_grad_() for x in (*tokens, initial)]
    out, final = chunk_reference(*leaves[:5], inputs.scale, leaves[5], inputs.cu_host, v_first, chunk_size=chunk_size)
    return torch.autograd.grad([out, final], leaves, [do, dfinal])


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
@pytest.mark.parametrize("heads, chunk_size, v_first", [((1, 1), 16, True), ((2, 4), 64, False), ((1, 3), 64, True)])
def test_the_three_kernels_one_after_another_equal_autograd(gates, heads, chunk_size, v_first):
    inputs, tokens, initial, do, dfinal = problem((130, 1, 0, 64, 15), heads, gates)
    if v_first:
        initial, dfinal = initial.mT.contiguous(), dfinal.mT.contiguous()
    wanted = autograd(inputs, tokens, initial, do, dfinal, v_first, chunk_size)
    found = backward_reference(*tokens, do, inputs.scale, initial, dfinal, inputs.cu_host, v_first, chunk_size)
    for name, got, want in zip(NAMES, found, wanted):
        assert relative_error(got, want) < TOLERANCE, name


def test_no_state_and_no_gradient_of_one_are_zeros():
    inputs, tokens, initial, do, dfinal = problem((40, 9), (1, 2), "mild")
    zeros = torch.zeros_like(initial)
    given = backward_reference(*tokens, do, inputs.scale, zeros, zeros, inputs.cu_host, chunk_size=16)
    absent = backward_reference(*tokens, do, inputs.scale, cu_seqlens=inputs.cu_host, chunk_size=16)
    assert all(map(torch.equal, given, absent))


def test_batches_of_equal_length_are_sequences_end_to_end():
    inputs, tokens, initial, do, dfinal = problem((24, 24), (1, 2), "mild")
    packed = backward_reference(*tokens, do, inputs.scale, initial, dfinal, inputs.cu_host, chunk_size=16)
    batched = backward_reference(
        *(x.view(2, 24, *x.shape[2:]) for x in (*tokens, do)), inputs.scale, initial, dfinal, chunk_size=16
    )
    for one, other in zip(packed, batched):
        assert torch.equal(one, other.reshape(one.shape))


def test_strong_decay_does_not_cancel():
    """One token that forgets everything among mild ones: in fp32 gates, not just in float64."""
    inputs, tokens, initial, do, dfinal = problem((100,), (1, 2), "mild", seed=3)
    tokens[3][0, 37] = -60.0
    wanted = autograd(inputs, tokens, initial, do, dfinal, False, 64)
    found = backward_reference(*tokens, do, inputs.scale, initial, dfinal, inputs.cu_host)
    for name, got, want in zip(NAMES, found, wanted):
        assert relative_error(got, want) < TOLERANCE, name


def test_states_are_those_before_each_chunk_in_its_slot():
    inputs, tokens, initial, *_ = problem((40, 0, 9), (1, 2), "mild")
    q, k, v, g, beta = tokens
    states, effects = recompute_state_reference(k, v, g, beta, initial, inputs.cu_host, chunk_size=16)
    assert effects.shape == v.shape
    slots = chunk_slots(inputs.cu_host, 16)
    assert [slot for slot, *_ in slots] == [0, 1, 2, 4]
    assert torch.equal(states[0], initial[0].mT) and torch.equal(states[4], initial[2].mT)
    assert not states[3].any()
    piece = [x[:, :32] for x in tokens]
    _, after = chunk_reference(*piece, inputs.scale, initial[:1], chunk_size=16)
    torch.testing.assert_close(states[2], after[0].mT)


def test_each_chunk_stands_alone():
    """What is in the rows of one sequence does not reach the gradients of another."""
    inputs, tokens, initial, do, dfinal = problem((20, 20), (1, 1), "mild")
    q, k, v, g, beta = tokens
    states, effects = recompute_state_reference(k, v, g, beta, initial, inputs.cu_host, chunk_size=16)
    arguments = (q, k, g, beta, states, effects, torch.zeros_like(states), v, do)
    before = backward_grad_reference(*arguments, cu_seqlens=inputs.cu_host, chunk_size=16)
    do[:, 20:] = float("nan")
    after = backward_grad_reference(*arguments, cu_seqlens=inputs.cu_host, chunk_size=16)
    assert all(torch.equal(one[:, :20], other[:, :20]) for one, other in zip(before, after))
