"""The public operator on CPU tensors: FLA's meaning of every argument, and what is refused."""

import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import qla_jit
from qla_jit import api, chunk_gated_delta_rule, validate
from qla_jit.activation import CAST
from qla_jit.errors import GradientError, InputError, UnsupportedError
from qla_jit.numerics import make_inputs, relative_error
from qla_jit.reference import recurrent_reference


def small(lengths=(70, 0, 5), dtype=torch.float32, **kwargs):
    return make_inputs(lengths, 2, 4, 16, 8, dtype=dtype, **kwargs)


def test_matches_the_recurrence_and_returns_the_state_only_on_request():
    x = small()
    want_o, want_s = recurrent_reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    kwargs = dict(initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)
    o, s = chunk_gated_delta_rule(*x.tokens, **kwargs, output_final_state=True)
    assert relative_error(o, want_o) < 1e-6 and relative_error(s, want_s) < 1e-6
    o, s = chunk_gated_delta_rule(*x.tokens, **kwargs)
    assert relative_error(o, want_o) < 1e-6 and s is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_o_has_the_dtype_of_q_and_states_are_fp32(dtype):
    o, s = chunk_gated_delta_rule(*small(dtype=dtype).tokens, output_final_state=True)
    assert o.dtype == dtype and s.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    _, s = chunk_gated_delta_rule(*small(dtype=dtype).tokens, output_final_state=True, state_dtype=torch.bfloat16)
    assert s.dtype == torch.bfloat16


def test_scale_defaults_to_the_inverse_root_of_head_dim_k():
    x = small()
    o, _ = chunk_gated_delta_rule(*x.tokens)
    quarter, _ = chunk_gated_delta_rule(*x.tokens, scale=0.25)
    double, _ = chunk_gated_delta_rule(*x.tokens, 0.5)
    assert torch.equal(o, quarter) and relative_error(double, 2 * o) < 1e-6


def test_l2norm_has_fla_s_epsilon():
    x = small()
    q, k = 0.003 * x.q, 0.5 * x.k  # small enough for the epsilon to show
    o, _ = chunk_gated_delta_rule(q, k, x.v, x.g, x.beta, use_qk_l2norm_in_kernel=True)
    qn, kn = (t.double() / (t.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    want, _ = recurrent_reference(qn, kn, x.v, x.g, x.beta)
    bare, _ = recurrent_reference(F.normalize(q.double(), dim=-1), kn, x.v, x.g, x.beta)
    assert relative_error(o, want) < 1e-6 < 1e-2 < relative_error(bare, want)


def test_beta_logits_and_negative_eigenvalues():
    x = small()
    logits = torch.logit(x.beta)
    o, _ = chunk_gated_delta_rule(*x.tokens[:4], logits, use_beta_sigmoid_in_kernel=True)
    assert relative_error(o, recurrent_reference(*x.tokens)[0]) < 1e-6
    o, _ = chunk_gated_delta_rule(*x.tokens[:4], logits, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    assert relative_error(o, recurrent_reference(*x.tokens[:4], 2 * x.beta)[0]) < 1e-6
    with pytest.raises(InputError, match="use_beta_sigmoid_in_kernel"):
        chunk_gated_delta_rule(*x.tokens, allow_neg_eigval=True)


@pytest.mark.parametrize("biased", [False, True])
def test_gate_activation(biased):
    x = small()
    raw, a_log, bias = torch.randn_like(x.g), torch.linspace(-2, 1, 4), torch.linspace(-1, 2, 4) if biased else None
    kwargs = dict(use_gate_in_kernel=True, A_log=a_log, dt_bias=bias)
    o, _ = chunk_gated_delta_rule(x.q, x.k, x.v, raw, x.beta, **kwargs)
    g = -a_log.double().exp() * (1 + (raw.double() + (bias.double() if biased else 0)).exp()).log()
    assert relative_error(o, recurrent_reference(x.q, x.k, x.v, g, x.beta)[0]) < 1e-6
    ignored, _ = chunk_gated_delta_rule(*x.tokens, A_log=a_log, dt_bias=bias)
    assert torch.equal(ignored, chunk_gated_delta_rule(*x.tokens)[0])


def test_gate_parameters_are_checked():
    x = small()
    for kwargs in (dict(), dict(A_log=torch.zeros(2)), dict(A_log=torch.zeros(4), dt_bias=torch.zeros(1))):
        with pytest.raises(InputError, match="A_log|dt_bias"):
            chunk_gated_delta_rule(*x.tokens, use_gate_in_kernel=True, **kwargs)


def test_gradients_flow_through_every_activation():
    x = small((20, 3), dtype=torch.float64)
    leaves = [t.double().requires_grad_() for t in (*x.tokens, x.initial_state, torch.zeros(4), torch.ones(4))]
    q, k, v, g, beta, state, a_log, bias = leaves
    flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True)
    o, s = chunk_gated_delta_rule(
        q, k, v, g, beta, None, state, True, cu_seqlens=x.cu_seqlens, A_log=a_log, dt_bias=bias, **flags
    )
    got = torch.autograd.grad(o.square().sum() + s.sin().sum(), leaves)
    qn, kn = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    gate = -a_log.exp() * F.softplus(g + bias)
    o, s = recurrent_reference(qn, kn, v, gate, beta.sigmoid(), None, state, x.cu_host)
    want = torch.autograd.grad(o.square().sum() + s.sin().sum(), leaves)
    for a, b in zip(got, want):
        assert b.abs().max() > 0 and relative_error(a, b) < 1e-9


def test_out_is_written_and_refused_with_gradients():
    x = small()
    out = torch.full_like(x.v, float("nan"))
    o, _ = chunk_gated_delta_rule(*x.tokens, out=out)
    assert o is out and torch.equal(out, chunk_gated_delta_rule(*x.tokens)[0])
    with pytest.raises(GradientError, match="out is None"):
        chunk_gated_delta_rule(x.q.requires_grad_(), *x.tokens[1:], out=out)
    with torch.no_grad():
        chunk_gated_delta_rule(*x.tokens, out=out)


def test_states_written_in_place_are_refused_with_gradients():
    x = small((70, 5))
    tokens, rows = (x.q.requires_grad_(), *x.tokens[1:]), torch.tensor([1, 0])
    for name, kwargs in (
        ("final_state_out", dict(final_state_out=torch.empty_like(x.initial_state))),
        ("state_indices", dict(initial_state=x.initial_state, state_indices=rows)),
    ):
        kwargs |= dict(cu_seqlens=x.cu_seqlens, output_final_state=True)
        with pytest.raises(GradientError, match=f"{name} is None"):
            chunk_gated_delta_rule(*tokens, **kwargs)
        with torch.no_grad():
            chunk_gated_delta_rule(*tokens, **kwargs)


def test_rows_outside_the_pool_are_refused():
    x = small((70, 5))
    with pytest.raises(InputError, match="row 2 of a pool of 2 states"):
        chunk_gated_delta_rule(
            *x.tokens, cu_seqlens=x.cu_seqlens, initial_state=x.initial_state, state_indices=torch.tensor([0, 2])
        )


def test_gradients_flow_through_checkpoints():
    x = small((130, 3), dtype=torch.float64)
    leaves = [t.double().requires_grad_() for t in (*x.tokens, x.initial_state)]
    *_, checkpoints = chunk_gated_delta_rule(
        *leaves[:5], initial_state=leaves[5], cu_seqlens=x.cu_seqlens, checkpoint_every=64
    )
    got = torch.autograd.grad(checkpoints.sin().sum(), leaves, allow_unused=True)
    total = 0
    for end in (64, 128):
        _, s = recurrent_reference(*(t[:, :end] for t in leaves[:5]), initial_state=leaves[5][:1])
        total = total + s.sin().sum()
    want = torch.autograd.grad(total, leaves, allow_unused=True)
    for a, b in zip(got[1:], want[1:]):  # no state depends on q
        assert b.abs().max() > 0 and relative_error(a, b) < 1e-9


def test_padding_past_the_last_sequence_is_zero_and_harmless():
    x = small((40, 24))
    want_o, want_s = chunk_gated_delta_rule(*x.tokens, cu_seqlens=x.cu_seqlens, output_final_state=True)
    padded = [torch.cat([t, torch.full_like(t[:, :9], float("nan"))], 1) for t in x.tokens]
    o, s = chunk_gated_delta_rule(*padded, cu_seqlens=x.cu_seqlens, output_final_state=True)
    assert torch.equal(o[:, :64], want_o) and torch.equal(s, want_s)
    assert o.shape[1] == 73 and not o[:, 64:].any()


def test_no_tokens_at_all():
    x = small((0, 0))
    o, s = chunk_gated_delta_rule(
        *x.tokens, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens
    )
    assert o.shape == (1, 0, 4, 8) and torch.equal(s, x.initial_state)
    o, s = chunk_gated_delta_rule(*(t.expand(3, *t.shape[1:]) for t in x.tokens), output_final_state=True)
    assert o.shape == (3, 0, 4, 8) and s.shape == (3, 4, 16, 8) and not s.any()


def test_chunk_size_and_splits_are_hints():
    x = small()
    want, _ = chunk_gated_delta_rule(*x.tokens)
    for kwargs in (dict(chunk_size=16), dict(auto_cp=False), dict(window=1e-4), dict(chunk_indices=torch.zeros(2, 2))):
        assert relative_error(chunk_gated_delta_rule(*x.tokens, **kwargs)[0], want) < 1e-6


def test_old_and_unknown_keywords():
    x = small((20,))
    with pytest.warns(DeprecationWarning, match="state_v_first") as record:
        _, s = chunk_gated_delta_rule(*x.tokens, output_final_state=True, transpose_state_layout=True)
    assert record[0].filename == __file__
    assert torch.equal(s, chunk_gated_delta_rule(*x.tokens, output_final_state=True, state_v_first=True)[1])
    assert s.shape == (1, 4, 8, 16)
    with pytest.raises(InputError, match="transpose_state_layout"):
        chunk_gated_delta_rule(*x.tokens, state_v_first=True, transpose_state_layout=True)
    with pytest.raises(InputError, match="head_first"):
        chunk_gated_delta_rule(*x.tokens, head_first=False)
    with pytest.raises(TypeError, match="initial_sate"):
        chunk_gated_delta_rule(*x.tokens, initial_sate=x.initial_state)
    with pytest.raises(UnsupportedError, match="cp_context"):
        chunk_gated_delta_rule(*x.tokens, cp_context=object())
    with pytest.raises(InputError, match="backward"):
        chunk_gated_delta_rule(*x.tokens, backward="triton")


def test_the_cpu_path_needs_no_compiler():
    """Importing the operator and running it on the CPU loads neither TileLang, Optuna nor the CUDA dispatch."""
    code = (
        "import sys, torch, qla_jit\n"
        "x = [torch.zeros(1, 3, 1, 8)] * 3 + [torch.zeros(1, 3, 1)] * 2\n"
        "qla_jit.chunk_gated_delta_rule(*x)\n"
        "loaded = {'tilelang', 'optuna', 'qla_jit.dispatch'} & set(sys.modules)\n"
        "assert not loaded and not torch.cuda.is_initialized(), loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert qla_jit.chunk_gated_delta_rule is chunk_gated_delta_rule


@pytest.fixture
def launched(monkeypatch):
    """What reaches the kernels of a pretended card: fake tensors, and a dispatch that records its arguments."""
    calls = []

    def forward_cuda(call, *tensors):
        calls.append((call, *tensors))
        return tensors[2], None

    monkeypatch.setattr(api, "_forward_cuda", lambda: forward_cuda)
    monkeypatch.setattr(validate, "ALIGNMENT_BYTES", 1)  # fake tensors have no address
    with FakeTensorMode():
        yield calls


def on_card(dtype=torch.float32, **changes):
    def zeros(*shape, dtype=torch.bfloat16):
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    given = dict(q=zeros(1, 9, 2, 64), k=zeros(1, 9, 2, 64), v=zeros(1, 9, 4, 128))
    return given | dict(g=zeros(1, 9, 4, dtype=dtype), beta=zeros(1, 9, 4, dtype=dtype)) | changes


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_kernels_see_one_state_dtype_and_are_told_to_cast_gates(launched):
    state = torch.zeros(1, 4, 64, 128, dtype=torch.bfloat16, device="cuda")
    given = on_card(torch.bfloat16)
    chunk_gated_delta_rule(**given, initial_state=state)
    chunk_gated_delta_rule(**given, initial_state=state, state_dtype=torch.bfloat16)
    dtypes = (torch.float32, torch.bfloat16)
    for (call, q, _, _, g, beta, _, initial, *rest), dtype in zip(launched, dtypes, strict=True):
        assert all(x is given[name] for name, x in (("q", q), ("g", g), ("beta", beta)))
        assert rest == [None] * 4 + [CAST]
        assert initial.dtype == call.state_dtype == dtype


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_kernels_are_told_what_to_do_to_the_inputs_and_do_it(launched):
    """No PyTorch function touches q and k, nor g and beta unless they are strided or float64."""
    rates = torch.zeros(4, dtype=torch.bfloat16, device="cuda")
    flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    chunk_gated_delta_rule(**on_card(), **flags, use_gate_in_kernel=True, A_log=rates, dt_bias=rates)
    chunk_gated_delta_rule(**on_card())
    chunk_gated_delta_rule(**on_card(torch.float64))
    strided = torch.empty_strided((1, 9, 4), (72, 8, 2), dtype=torch.bfloat16, device="cuda")
    chunk_gated_delta_rule(**on_card(g=strided), use_beta_sigmoid_in_kernel=True)
    (all_asked, plain, wide, sigmoid), gates = [c[-1] for c in launched], [c[4] for c in launched]
    assert (all_asked.normalize, all_asked.beta_scale) == (True, 2)
    assert all_asked.a_log is rates and all_asked.dt_bias is rates
    assert plain is wide is None and (sigmoid.normalize, sigmoid.beta_scale, sigmoid.a_log) == (False, 1, None)
    assert all(g.dtype == torch.float32 and g.is_contiguous() for g in gates)


@pytest.fixture
def differentiated():
    """Calls that reach the node of PyTorch's graph, by their arguments."""
    with mock.patch("qla_jit.autograd.chunk_gated_delta_rule_cuda", return_value=("o", None)) as node:
        yield node


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_gradient_of_a_gate_parameter_goes_through_the_activation(launched, differentiated):
    rates = torch.zeros(4, device="cuda", requires_grad=True)
    chunk_gated_delta_rule(**on_card(), A_log=rates)  # not used
    with torch.no_grad():
        chunk_gated_delta_rule(**on_card(), use_gate_in_kernel=True, A_log=rates)
    assert [call[-1] is None for call in launched] == [True, False] and not differentiated.called
    activated = tuple(on_card()[name] for name in ("q", "k", "g", "beta"))  # a graph of fake tensors needs a card
    with mock.patch("qla_jit.api.Activation.apply", return_value=activated) as apply:
        chunk_gated_delta_rule(**on_card(), use_gate_in_kernel=True, A_log=rates)
    _, q, k, _, g, beta, *_ = differentiated.call_args.args
    assert apply.called and all(a is b for a, b in zip((q, k, g, beta), activated)) and len(launched) == 2


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_a_gradient_on_a_card_takes_the_node_of_the_graph(launched, differentiated, name):
    given = on_card(initial_state=torch.zeros(1, 4, 64, 128, device="cuda"))
    given[name].requires_grad_()
    chunk_gated_delta_rule(**given)
    assert not launched
    _, q, k, v, g, beta, cu_seqlens, initial = differentiated.call_args.args
    assert cu_seqlens is None
    found = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial)
    assert [key for key, x in found.items() if x.requires_grad] == [name]
    with torch.no_grad():
        chunk_gated_delta_rule(**given)
    assert len(launched) == 1


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_gradients_of_beta_up_to_two_know_no_window(launched, differentiated):
    given = on_card()
    given["v"].requires_grad_()
    activated = tuple(given[name] for name in ("q", "k", "g", "beta"))
    for more, window in ((dict(), 1e-4), (dict(allow_neg_eigval=True), "exact")):
        with mock.patch("qla_jit.api.Activation.apply", return_value=activated):
            chunk_gated_delta_rule(**given, use_beta_sigmoid_in_kernel=True, **more)
        assert differentiated.call_args.args[0].window == window


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_gradients_with_checkpoints_are_refused_on_a_card(launched):
    given = on_card()
    given["q"].requires_grad_()
    with pytest.raises(GradientError, match="checkpoint_every is None"):
        chunk_gated_delta_rule(**given, cu_seqlens_cpu=None, checkpoint_every=64)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_a_card_is_not_asked_for_empty_batches_or_chunk_form_gradients(launched):
    cu = torch.zeros(3, dtype=torch.int32, device="cuda")
    given = on_card()
    given["v"].requires_grad_()
    with mock.patch("qla_jit.api.chunk_form", return_value=("o", "state")) as form:
        assert chunk_gated_delta_rule(**on_card(), cu_seqlens=cu, cu_seqlens_cpu=[0, 0, 0]) == ("o", None)
        assert chunk_gated_delta_rule(**given, backward="chunk_form", output_final_state=True) == ("o", "state")
        assert form.call_count == 2 and not launched
        chunk_gated_delta_rule(**on_card(), backward="chunk_form")
        assert form.call_count == 2 and len(launched) == 1
