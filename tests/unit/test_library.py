"""`torch.compile` of the operator, on the CPU: one graph, equal results and gradients, shapes known while tracing."""

import pytest
import torch

from qla_jit import chunk_gated_delta_rule
from qla_jit.errors import UnsupportedError
from qla_jit.numerics import make_inputs, relative_error

compile_ = torch.compile(dynamic=False, fullgraph=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def inputs(lengths=(70, 0, 9), dtype=torch.float32, v_first=False):
    x = make_inputs(lengths, 2, 4, 64, 32, dtype=dtype, seed=3)
    state = x.initial_state.mT.contiguous() if v_first else x.initial_state
    return [t.requires_grad_() for t in (*x.tokens, state)], x


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        dict(),
        dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
        dict(use_gate_in_kernel=True, A_log=torch.linspace(-2, 0, 4), dt_bias=torch.linspace(-1, 1, 4)),
    ],
)
def test_a_compiled_call_and_its_gradients_are_those_of_an_eager_one(asked, v_first):
    leaves, x = inputs(v_first=v_first)

    def call(q, k, v, g, beta, state):
        o, final = chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, state_v_first=v_first,
            cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host, **asked,
        )  # fmt: skip
        return o * 2, final

    results = []
    for run in (call, compile_(call)):
        o, final = run(*leaves)
        results.append((o, final, *torch.autograd.grad(o.square().sum() + final.sin().sum(), leaves)))
    for eager, compiled in zip(*results):
        assert eager.dtype == compiled.dtype and relative_error(compiled, eager.double()) < 1e-5


def test_a_compiled_call_without_states_has_none():
    leaves, _ = inputs((50,))

    def call(q, k, v, g, beta):
        o, final = chunk_gated_delta_rule(q, k, v, g, beta)
        assert final is None
        return o

    for tokens in (leaves[:5], [t.detach() for t in leaves[:5]]):
        assert relative_error(compile_(call)(*tokens), call(*tokens).double()) < 1e-6
    (compiled,) = torch.autograd.grad(compile_(call)(*leaves[:5]).sum(), leaves[:1])
    (eager,) = torch.autograd.grad(call(*leaves[:5]).sum(), leaves[:1])
    assert relative_error(compiled, eager.double()) < 1e-5


def test_a_compiled_call_under_autocast_is_that_of_cast_operands():
    leaves, x = inputs()
    step = lambda *given: chunk_gated_delta_rule(*given[:5], initial_state=given[5], cu_seqlens=x.cu_seqlens)[0]

    def whole(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return step(*given)

    want = step(*(t.bfloat16() for t in leaves[:3]), *leaves[3:])
    wanted = torch.autograd.grad(want.float().square().sum(), leaves)
    for around, call in ((True, step), (False, whole)):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            o = compile_(call)(*leaves)
        assert torch.equal(o, want)
        found = torch.autograd.grad(o.float().square().sum(), leaves)
        assert all(a.dtype == b.dtype and relative_error(a, b.double()) < 1e-2 for a, b in zip(found, wanted))


def test_the_operators_of_the_library_keep_pytorchs_rules():
    from qla_jit import library

    leaves, x = inputs()
    options = None, True, False, None, True, 1e-4, None
    given = *leaves, x.cu_seqlens, torch.tensor(x.cu_host, dtype=torch.int32), *options
    torch.library.opcheck(library.forward, given)
    torch.library.opcheck(library.forward, (*leaves[:5], None, None, None, 0.1, False, True, None, False, 0.0, None))


@pytest.mark.parametrize("name", ["out", "backward"])
def test_what_a_node_of_a_graph_cannot_do_is_refused(monkeypatch, name):
    leaves, x = inputs()
    given = {"out": torch.empty_like(x.v), "backward": "chunk_form"}
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match=f"`{name}` must not be given inside torch.compile"):
        chunk_gated_delta_rule(*leaves[:5], **{name: given[name]})
