"""What training does with the operator, on CPU tensors and on CUDA tensors: autocast, checkpointing, parts of a graph.

That gradients are right is tested elsewhere; here they must be the same bits whichever way they are asked for.
"""

import itertools

import pytest
import torch
import training_processes
from torch.utils.checkpoint import checkpoint
from training_processes import train_lm

from qla_jit import chunk_gated_delta_rule
from qla_jit.numerics import make_inputs, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (70, 0, 5)
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True)


def problem(device, dtype=BF16):
    """Six leaves, and the call that they are for."""
    x = make_inputs(LENGTHS, 2, 4, dtype=dtype, device=device, seed=1)

    def call(q, k, v, g, beta, state, **kwargs):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=x.cu_seqlens,
            cu_seqlens_cpu=x.cu_host, **kwargs,
        )  # fmt: skip

    return [t.requires_grad_() for t in (*x.tokens, x.initial_state)], call


def gradients(outputs, leaves):
    """By `backward`, for a reentrant checkpoint knows no `grad`."""
    for x in leaves:
        x.grad = None
    gen = torch.Generator().manual_seed(2)
    torch.autograd.backward(outputs, [torch.randn(t.shape, generator=gen).to(t) for t in outputs])
    return [x.grad for x in leaves]


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("flags", [dict(), FLAGS], ids=["plain", "flags"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("given", [(FP32, FP32, FP32), (FP32, BF16, FP16), (BF16, BF16, BF16)], ids=str)
def test_autocast_casts_q_k_and_v_and_nothing_else(device, given, dtype, flags):
    leaves, call = problem(device, FP32)
    leaves = [x.detach().to(d).requires_grad_() for x, d in zip(leaves, given + (FP32, BF16, FP32))]
    if flags:
        flags = flags | dict(A_log=torch.linspace(-2, 0.5, 4, device=device, requires_grad=True))
        leaves.append(flags["A_log"])
    with torch.autocast(device, dtype):
        outputs = call(*leaves[:6], **flags)
    got = gradients(outputs, leaves)
    by_hand = call(*(x.to(dtype) for x in leaves[:3]), *leaves[3:6], **flags)
    assert [o.dtype for o in outputs] == [dtype, FP32]
    assert_same_bits(outputs, by_hand)
    assert_same_bits(got, gradients(by_hand, leaves))
    assert [x.dtype for x in got] == [x.dtype for x in leaves]


def test_autocast_leaves_chunk_form_products_in_fp32(device):
    leaves, call = problem(device)
    with torch.autocast(device, BF16):
        outputs = call(*leaves, backward="chunk_form")
    want = call(*leaves, backward="chunk_form")
    assert_same_bits(outputs, want)


def test_autocast_without_gradients(device):
    leaves, call = problem(device, FP32)
    with torch.no_grad():
        with torch.autocast(device, BF16):
            outputs = call(*leaves)
        assert_same_bits(outputs, call(*(x.to(BF16) for x in leaves[:3]), *leaves[3:]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_bits(device, use_reentrant):
    leaves, call = problem(device)
    plain = call(*leaves)
    outputs = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    assert_same_bits(outputs, plain)
    assert_same_bits(gradients(outputs, leaves), gradients(plain, leaves))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_of_a_call_with_flags(device, use_reentrant):
    """A reentrant checkpoint runs first without a graph, hence on a card with `input_activation`, which may round q
    and k elsewhere than PyTorch does; the gradients are those of the second run."""
    leaves, call = problem(device)
    leaves.append(torch.linspace(-2, 0.5, 4, device=device, requires_grad=True))
    step = lambda *given: call(*given[:6], **FLAGS, A_log=given[6])
    plain = step(*leaves)
    outputs = checkpoint(step, *leaves, use_reentrant=use_reentrant)
    assert_same_bits(gradients(outputs, leaves), gradients(plain, leaves))
    if use_reentrant and device == "cuda":
        assert all(relative_error(a, b) < 5e-3 for a, b in zip(outputs, plain))
    else:
        assert_same_bits(outputs, plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_under_autocast_gives_the_same_bits(device, use_reentrant):
    leaves, call = problem(device, FP32)
    with torch.autocast(device, BF16):
        plain = call(*leaves)
        outputs = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    assert_same_bits(gradients(outputs, leaves), gradients(plain, leaves))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("index", range(6), ids=("q", "k", "v", "g", "beta", "state"))
def test_one_input_or_all_but_one_may_require_a_gradient(device, index, alone):
    leaves, call = problem(device)
    outputs = call(*leaves)
    every = gradients(outputs, leaves)
    wanted = [(i == index) == alone for i in range(6)]
    given = [x.detach().requires_grad_(w) for x, w in zip(leaves, wanted)]
    of_leaves = call(*given)[: 1 + any(wanted[1:])]  # no state depends on q
    found = gradients(of_leaves, list(itertools.compress(given, wanted)))
    assert_same_bits(found, itertools.compress(every, wanted))


def test_a_graph_can_be_walked_twice_and_gradients_may_be_expanded(device):
    leaves, call = problem(device)
    o, final = call(*leaves)
    ones = torch.autograd.grad((o, final), leaves, (torch.ones_like(o), torch.ones_like(final)), retain_graph=True)
    assert_same_bits(torch.autograd.grad(o.sum() + final.sum(), leaves), ones)  # strides of 0


def test_gradients_accumulate_over_calls(device):
    leaves, call = problem(device)
    call(*leaves)[0].float().square().sum().backward()
    once = [x.grad.clone() for x in leaves]
    call(*leaves)[0].float().square().sum().backward()
    assert_same_bits([x.grad for x in leaves], [2 * x for x in once])


def test_a_model_under_autocast_needs_no_casts_of_its_own(device):
    """Its layers hand over q, k and v in the dtypes that autocast left them in."""
    operator = lambda q, k, v, g, beta, batch: chunk_gated_delta_rule(
        q, k, v, g, beta, cu_seqlens=batch.bounds, cu_seqlens_cpu=batch.lengths
    )[0].float()
    batch = training_processes.batch_of(0, device)
    losses = []
    for run_operator, autocasts in ((operator, True), (train_lm.by_reference, False)):
        torch.manual_seed(0)
        model = train_lm.LanguageModel(training_processes.SIZES, run_operator).to(device)
        with torch.autocast(device, BF16, enabled=autocasts):
            losses.append(model(batch))
        losses[-1].mean().backward()
        assert all(x.grad.isfinite().all() for x in model.parameters())
    assert relative_error(*losses) < 2e-2
