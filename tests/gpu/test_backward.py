"""Gradients on the card: all six against float64, per head, from no decay to violent decay, repeated, with padding."""

import functools

import pytest
import torch
import torch.utils.checkpoint

from qla_jit import autograd, build, chunk_gated_delta_rule, dispatch, launch, runtime, split_models
from qla_jit.artifacts import ArtifactStore
from qla_jit.backward import compile_backward
from qla_jit.chunk_form import chunk_form
from qla_jit.config import CHECKED_SPLITS, OpConfig
from qla_jit.db.layers import shipped_rows
from qla_jit.numerics import make_inputs, relative_error
from qla_jit.reference import chunk_reference
from qla_jit.registry import select
from qla_jit.spec import KernelSpec
from qla_jit.split import cut_batch
from qla_jit.split_backward import KERNELS as SPLIT_KERNELS
from qla_jit.split_backward import SplitBackward
from qla_jit.validate import validate

pytestmark = pytest.mark.gpu

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
LENGTHS = ((1,), (63, 0, 64), (65, 127, 1), (1000, 5), (256, 256))
#: Key and value heads whose backward has rows in the shipped database, and so a plan that may split.
TUNED_HEADS = sorted(
    {
        (r.problem.num_heads, r.problem.num_value_heads)
        for r in shipped_rows("sm90")
        if r.problem.kernel == "backward_state"
    }
)
#: Mean log decay of a token, by value head, as of A_log 0 … 16 and beyond.
DECAYS = (0.0, 0.01, 0.1, 1.0, 16.0, 400.0)


def gradients(x, do, dfinal, v_first=False):
    """The kernels' (o, final state, six gradients), through autograd."""
    leaves = [t.detach().clone().requires_grad_() for t in (*x.tokens, x.initial_state)]
    states = leaves[5].mT.contiguous() if v_first else leaves[5]
    host = torch.tensor(x.cu_host)
    call = validate(*leaves[:5], None, states, True, v_first, x.cu_seqlens, host)
    o, final = autograd.chunk_gated_delta_rule_cuda(call, *leaves[:5], x.cu_seqlens, states)
    given = dfinal.mT if v_first else dfinal
    return o, final, torch.autograd.grad((o, final), leaves, (do, given))


def wanted(x, do, dfinal):
    leaves = [t.detach().double().requires_grad_() for t in (*x.tokens, x.initial_state)]
    o, final = chunk_reference(*leaves[:5], x.scale, leaves[5], cu_seqlens=x.cu_host)
    return torch.autograd.grad((o, final), leaves, (do.double(), dfinal.double()))


def case(lengths, heads, value_heads, dim_k=128, dim_v=128, dtype=torch.bfloat16, seed=0, **kwargs):
    x = make_inputs(lengths, heads, value_heads, dim_k, dim_v, dtype=dtype, device="cuda", seed=seed, **kwargs)
    gen = torch.Generator("cuda").manual_seed(seed + 1)
    do = torch.randn(x.v.shape, generator=gen, device="cuda").to(dtype)
    return x, do, torch.randn(x.initial_state.shape, generator=gen, device="cuda")


def peer(x, do, dfinal):
    """The gradients of PyTorch's chunk form with operands rounded as the kernels round theirs."""
    leaves = [t.detach().clone().requires_grad_() for t in (*x.tokens, x.initial_state)]
    o, final = chunk_form(*leaves[:5], x.scale, leaves[5], cu_seqlens=x.cu_host, operand_dtype=x.q.dtype)
    return torch.autograd.grad((o, final), leaves, (do, dfinal))


def assert_close(got, x, do, dfinal):
    """Per tensor, and per value head (key head for q and k): a head that is wrong must not hide in the others.

    What rounding explains is right: 1.5 times what it does to the chunk form in PyTorch, and at least `LIMITS`.
    """
    want, others = wanted(x, do, dfinal), None
    for i, (name, a, b) in enumerate(zip(NAMES, got, want)):
        assert a.isfinite().all(), name
        limit = LIMITS[name]
        if relative_error(a, b) >= limit:
            others = others or peer(x, do, dfinal)
            limit = max(limit, 1.5 * relative_error(others[i], b))
        assert relative_error(a, b) < limit, (name, relative_error(a, b))
        axis = 1 if name == "initial_state" else 2
        for head, (one, other) in enumerate(zip(a.unbind(axis), b.unbind(axis))):
            size = max(other.norm(), b.norm() / b.shape[axis] ** 0.5)  # a head whose gradient is 0 by chance may err
            assert (one - other).norm() < 3 * limit * size, (name, head)


#: Of g more: its gradient is a difference of sums, of which one is a product of two states in 16 bits.
LIMITS = dict.fromkeys(NAMES, 6e-3) | {"g": 2e-2, "beta": 8e-3}


@pytest.mark.parametrize("gates", ["none", "mild", "bench", "violent"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_all_gradients_match_float64(lengths, group, gates):
    x, do, dfinal = case(lengths, 2, 2 * group, seed=group, gates=gates)
    *_, got = gradients(x, do, dfinal)
    assert_close(got, x, do, dfinal)


@pytest.mark.parametrize(
    "config",
    [
        OpConfig(2, 4, 64, 64),
        OpConfig(2, 4, 128, 64),
        OpConfig(1, 2, 64, 128),
        OpConfig(2, 4, state_v_first=True),
        OpConfig(2, 4, dtype="float16"),
    ],
    ids=str,
)
def test_other_shapes_layouts_and_dtypes_match_float64(config):
    dtype = launch.torch_dtype(config.dtype)
    x, do, dfinal = case(
        (130, 300),
        config.num_heads,
        config.num_value_heads,
        config.head_dim_k,
        config.head_dim_v,
        dtype,
        3,
        gates="bench",
    )
    *_, got = gradients(x, do, dfinal, config.state_v_first)
    assert_close(got, x, do, dfinal)


def test_every_decay_in_one_call_and_betas_of_zero_and_one():
    x, do, dfinal = case((700,), 2, 12, seed=5)
    sizes = torch.tensor(DECAYS * 2, device="cuda")
    noise = torch.randn(x.g.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(6))
    x.g.copy_(-sizes * torch.nn.functional.softplus(noise - 1))
    x.g[:, 100, 1] = -1e4
    x.beta[:, ::7] = 0.0
    x.beta[:, 3::7] = 1.0
    *_, got = gradients(x, do, dfinal)
    assert_close(got, x, do, dfinal)


def test_rows_past_the_last_sequence_get_no_gradient_and_give_none():
    x, do, dfinal = case((100, 50), 2, 4, seed=7)
    want = wanted(x, do, dfinal)
    pad = lambda t: torch.cat([t, torch.full_like(t[:, :40], float("nan"))], 1)
    padded = type(x)(*(pad(t) for t in x.tokens), x.initial_state, x.cu_seqlens, x.cu_host, x.scale)
    *_, got = gradients(padded, pad(do), dfinal)
    for name, a, b in zip(NAMES, got, want):
        if name != "initial_state":
            assert not a[:, 150:].any()
            a = a[:, :150]
        assert relative_error(a, b) < LIMITS[name], name


def test_two_hundred_backwards_are_bitwise_equal():
    x, do, dfinal = case((1000, 64, 37), 4, 16, seed=8, gates="bench")
    *_, first = gradients(x, do, dfinal)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(x, do, dfinal)[2]))


def test_outputs_are_those_without_gradients():
    x, do, dfinal = case((300, 70), 2, 4, seed=9)
    o, final, _ = gradients(x, do, dfinal)
    with torch.no_grad():
        want = chunk_gated_delta_rule(
            *x.tokens, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
            cu_seqlens_cpu=x.cu_host,
        )  # fmt: skip
    assert torch.equal(o, want[0]) and torch.equal(final, want[1])


def test_a_gradient_of_either_output_alone():
    x, do, dfinal = case((200,), 2, 4, seed=10)
    zero_o, zero_state = torch.zeros_like(do), torch.zeros_like(dfinal)
    for gradient_o, gradient_state in ((do, zero_state), (zero_o, dfinal)):
        want = wanted(x, gradient_o, gradient_state)
        *_, got = gradients(x, gradient_o, gradient_state)
        for name, a, b in zip(NAMES, got, want):
            assert relative_error(a, b) < 1.5 * LIMITS[name] or not b.any(), name


def test_a_call_in_a_compiled_graph_and_under_checkpointing_gives_the_bits_of_an_eager_one():
    x, do, dfinal = case((300, 64), 2, 4, seed=12, gates="bench")
    leaves = [t.detach().clone().requires_grad_() for t in (*x.tokens, x.initial_state)]
    host = torch.tensor(x.cu_host, dtype=torch.int32)

    def step(q, k, v, g, beta, state):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=x.cu_seqlens,
            cu_seqlens_cpu=host,
        )  # fmt: skip

    checkpointed = functools.partial(torch.utils.checkpoint.checkpoint, step, use_reentrant=False)
    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager"), checkpointed):
        outputs = run(*leaves)
        found.append((*outputs, *torch.autograd.grad(outputs, leaves, (do, dfinal))))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_the_backward_is_compiled_once_per_config():
    config = OpConfig(2, 4)
    assert dispatch.compiled_backward(config) is dispatch.compiled_backward(config)


@pytest.mark.parametrize("window", ["exact", 1e-4])
@pytest.mark.parametrize("gates", ["none", "bench", "violent"])
def test_a_split_backward_matches_float64_and_repeats_its_bits(gates, window):
    config, lengths = OpConfig(2, 8), (3000, 64, 0, 1700)
    x, do, dfinal = case(lengths, 2, 8, seed=11, gates=gates)
    entries = {}
    for name in SPLIT_KERNELS:
        problem = config.problem(name)
        spec = KernelSpec(problem, select(problem).default(problem))
        entries[name] = runtime.load(build.ensure(spec, ArtifactStore()))
    segments = cut_batch(config.problem("segment_backward"), lengths, 9)
    split = SplitBackward(entries, segments, 8, window, x.q.device)
    tokens = [t[0] for t in x.tokens]

    def run():
        return dispatch.compiled_backward(config)(
            *tokens, x.cu_seqlens, x.scale, do[0], x.initial_state, dfinal, True, split
        )

    first = run()
    want = [t if name == "initial_state" else t[0] for name, t in zip(NAMES, wanted(x, do, dfinal))]
    for name, a, b in zip(NAMES, first, want):
        assert a.isfinite().all() and relative_error(a, b) < LIMITS[name], name
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


@pytest.mark.parametrize("heads", [(2, 8), (4, 16)], ids=str)
def test_a_planned_split_matches_float64_and_repeats_its_bits_a_thousand_times(heads):
    x, do, dfinal = case((8192, 900), *heads, seed=13, gates="bench")
    call = validate(*x.tokens, None, x.initial_state, True, False, x.cu_seqlens, torch.tensor(x.cu_host))
    assert isinstance(dispatch.planned_backward(call).walks, SplitBackward)
    *_, first = gradients(x, do, dfinal)
    assert_close(first, x, do, dfinal)
    for _ in range(1000):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(x, do, dfinal)[2]))


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("heads", TUNED_HEADS, ids=str)
def test_every_share_of_the_heads_in_a_split_matches_float64(heads, share, monkeypatch):
    """What passes here may stand in `CHECKED_SPLITS`."""
    lengths = (4000, 64, 2100)
    x, do, dfinal = case(lengths, *heads, seed=14, gates="bench")
    monkeypatch.setattr(split_models, "CHECKED_SPLITS", dict.fromkeys(CHECKED_SPLITS, (share,)))
    operator = compile_backward(OpConfig(*heads))
    schedules = {name: options[0].schedule for name, options in operator._models.options.items()}
    assert {schedules[name]["dv_split"] for name in CHECKED_SPLITS} == {share}
    split = operator.split(lengths, 10, x.q.device, 1e-4, schedules)
    tokens = [t[0] for t in x.tokens]
    want = [t if name == "initial_state" else t[0] for name, t in zip(NAMES, wanted(x, do, dfinal))]
    run = lambda: operator(*tokens, x.cu_seqlens, x.scale, do[0], x.initial_state, dfinal, True, split)
    first = run()
    for name, a, b in zip(NAMES, first, want):
        assert a.isfinite().all() and relative_error(a, b) < LIMITS[name], name
    for _ in range(1000):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))
