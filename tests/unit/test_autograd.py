"""The node of PyTorch's graph on a pretended card, whose kernels are the chunk form and its gradients."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from qla_jit import api, chunk_gated_delta_rule, dispatch, validate
from qla_jit.backward import Gradients
from qla_jit.chunk_form import chunk_form
from qla_jit.numerics import make_inputs

pytestmark = pytest.mark.usefixtures("one_thread")

H, HV, K, V = 2, 8, 16, 32


@pytest.fixture
def card(monkeypatch):
    """Calls of the backward, each with the initial state's gradient as it was asked for."""
    asked = []

    def forward_cuda(call, q, k, v, g, beta, cu_seqlens, initial_state, *rest):
        o, final = chunk_form(q, k, v, g, beta, call.scale, initial_state, call.cu_host)
        return o, final if call.output_final_state else None

    def backward_cuda(call, q, k, v, g, beta, bounds, initial_state, do, dfinal, needs_dinitial):
        asked.append(needs_dinitial)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta, initial_state) if x is not None]
        with torch.enable_grad():
            outputs = forward_cuda(call, *leaves[:5], None, *leaves[5:] or [None])
        outputs, given = zip(*((o, d) for o, d in zip(outputs, (do, dfinal)) if d is not None))
        found = torch.autograd.grad(outputs, leaves, given, allow_unused=True, materialize_grads=True)
        return Gradients(*found[:5], found[5] if needs_dinitial else None)

    monkeypatch.setattr(api, "_forward_cuda", lambda: forward_cuda)
    monkeypatch.setattr(dispatch, "forward_cuda", forward_cuda)
    monkeypatch.setattr(dispatch, "backward_cuda", backward_cuda)
    monkeypatch.setattr(dispatch, "planned_backward", lambda call: None)
    monkeypatch.setattr(validate.Call, "runs_kernels", property(lambda call: not call.is_empty))
    monkeypatch.setattr(validate, "_calls", {})
    return asked


def problem(lengths=(70, 0, 5)):
    x = make_inputs(lengths, H, HV, K, V, seed=1)
    leaves = [t.requires_grad_() for t in (*x.tokens, x.initial_state)]

    def call(*given, **kwargs):
        state = given[5] if given[5:] else None
        return chunk_gated_delta_rule(
            *given[:5], initial_state=state, output_final_state=True, cu_seqlens=x.cu_seqlens, **kwargs
        )

    return leaves, call


def gradients(outputs, leaves):
    return torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])


def test_any_subset_of_inputs_may_require_a_gradient(card):
    leaves, call = problem((5, 0, 2))
    every = gradients(call(*leaves), leaves)
    for wanted in itertools.product((False, True), repeat=6):
        if any(wanted):
            given = [x.detach().requires_grad_(w) for x, w in zip(leaves, wanted)]
            found = gradients(call(*given), [x for x, w in zip(given, wanted) if w])
            assert all(torch.equal(a, b) for a, b in zip(found, itertools.compress(every, wanted), strict=True))
            assert card[-1] == wanted[5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_are_the_inputs_and_as_many_bytes_as_the_module_says(card, dtype):
    """2 V + 4 K / R + 8 bytes per token and value head, and the state; what the caller has already is not copied."""
    leaves, call = problem((128,))
    leaves[3:5] = (x.detach().to(dtype).requires_grad_() for x in leaves[3:5])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        call(*leaves[:5])
    of_tokens = [x for x in saved if x.shape[:2] == (1, 128)]
    size = sum(x.numel() * x.element_size() for x in of_tokens)
    assert size == 128 * HV * (2 * V + 4 * K / (HV // H) + 8)
    assert sum(x.numel() * x.element_size() for x in saved) - size == 2 * 4  # the lengths
    ours = {x.data_ptr() for x in leaves}
    assert sum(x.data_ptr() in ours for x in of_tokens) == (5 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_call_saves_no_more_and_gives_the_same_bits(card, use_reentrant):
    leaves, call = problem()
    plain = call(*leaves)
    outputs = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    found = []
    for results in (plain, outputs):
        for x in leaves:
            x.grad = None
        torch.autograd.backward(results, [torch.ones_like(o) for o in results])
        found.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found)) and len(card) == 2


def test_autocast_gives_kernels_16_bit_operands_and_callers_gradients_in_their_dtype(card):
    leaves, call = problem()
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = call(*wide)
    assert [o.dtype for o in outputs] == [torch.bfloat16, torch.float32]
    for a, b in zip(gradients(outputs, wide), gradients(call(*leaves), leaves)):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_a_second_derivative_is_refused(card):
    leaves, call = problem()
    (once,) = torch.autograd.grad(call(*leaves)[0].float().square().sum(), leaves[2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_inputs_changed_before_the_backward_are_noticed(card):
    leaves, call = problem()
    o, _ = call(*leaves)
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.float().sum().backward()
