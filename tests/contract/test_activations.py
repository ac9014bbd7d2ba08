"""What the operator does to its inputs when asked to, on CPU tensors and on CUDA tensors, against float64."""

import itertools

import pytest
import torch

from qla_jit import Workspace, chunk_gated_delta_rule
from qla_jit.numerics import GPU_TOLERANCE, make_inputs, relative_error
from qla_jit.reference import input_activation_reference, recurrent_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (5, 130, 0, 64, 1, 77)
#: One rounding of q, of k and of o.
CPU_TOLERANCE = {BF16: 6e-3, FP16: 1e-3, FP32: 1e-5}

ASKED = tuple(itertools.product((False, True), (None, 1, 2), (None, "plain", "biased")))
#: (dtype of q, of g, of beta, of A_log, of dt_bias): every value of each, parameters in q's dtype and in others.
DTYPES = (
    (BF16, FP32, FP32, FP32, FP32),
    (BF16, BF16, BF16, BF16, BF16),
    (BF16, BF16, BF16, FP32, BF16),
    (FP16, FP16, FP32, FP16, FP32),
    (FP16, FP32, BF16, BF16, FP16),
)


def raw(device, heads=(2, 6), dims=(64, 64), dtype=BF16, g_dtype=FP32, beta_dtype=FP32):
    """Inputs as a projection gives them: rows of any length, logits of either sign; and the lengths."""
    x = make_inputs(LENGTHS, *heads, *dims, dtype=dtype, device=device)
    gen = torch.Generator().manual_seed(1)
    scale, g, beta = (torch.randn(1, x.cu_host[-1], n, generator=gen).to(device) for n in (1, heads[1], heads[1]))
    q, k = ((t * scale[..., None].exp()).to(dtype) for t in (x.q, x.k))
    return (q, k, x.v, (4 * g - 2).to(g_dtype), beta.to(beta_dtype)), x.cu_seqlens, x.cu_host


def parameters(heads, device, a_log_dtype=FP32, dt_bias_dtype=FP32):
    return (
        torch.linspace(-3, 0.5, heads, device=device).to(a_log_dtype),
        torch.linspace(-2, 3, heads, device=device).to(dt_bias_dtype),
    )


def check(tokens, cu, host, normalize=True, beta_scale=1, a_log=None, dt_bias=None, **kwargs):
    """The operator against the reference; unnormalised keys and bare logits are not asked for."""
    q, k, v, g, beta = tokens
    if not normalize:
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    if beta_scale is None:
        beta = beta.float().sigmoid().to(beta.dtype)
    if a_log is None:
        g = torch.nn.functional.logsigmoid(g.float()).to(g.dtype)
    made = input_activation_reference(q, k, g, beta, normalize, a_log, dt_bias, beta_scale)
    want_o, want_state = recurrent_reference(*made[:2], v, *made[2:], cu_seqlens=host)
    o, state = chunk_gated_delta_rule(
        q, k, v, g, beta, output_final_state=True, cu_seqlens=cu, cu_seqlens_cpu=host,
        use_qk_l2norm_in_kernel=normalize, use_beta_sigmoid_in_kernel=beta_scale is not None,
        allow_neg_eigval=beta_scale == 2, use_gate_in_kernel=a_log is not None, A_log=a_log, dt_bias=dt_bias, **kwargs,
    )  # fmt: skip
    limit = CPU_TOLERANCE[q.dtype] + (GPU_TOLERANCE[q.dtype] if q.is_cuda else 0)
    assert relative_error(o, want_o) < limit and relative_error(state, want_state) < limit
    return o, state


@pytest.mark.parametrize(("normalize", "beta_scale", "gate"), ASKED)
def test_every_combination_of_what_may_be_asked_for(device, normalize, beta_scale, gate):
    tokens, cu, host = raw(device)
    a_log, dt_bias = parameters(6, device)
    check(tokens, cu, host, normalize, beta_scale, a_log if gate else None, dt_bias if gate == "biased" else None)


@pytest.mark.parametrize(("dtype", "g_dtype", "beta_dtype", "a_log_dtype", "dt_bias_dtype"), DTYPES)
@pytest.mark.parametrize("asked", [False, True])
def test_every_dtype_of_what_comes_in(device, dtype, g_dtype, beta_dtype, a_log_dtype, dt_bias_dtype, asked):
    tokens, cu, host = raw(device, dtype=dtype, g_dtype=g_dtype, beta_dtype=beta_dtype)
    a_log, dt_bias = parameters(6, device, a_log_dtype, dt_bias_dtype)
    if asked:
        check(tokens, cu, host, True, 2, a_log, dt_bias)
    else:
        check(tokens, cu, host, False, None)


@pytest.mark.parametrize(("heads", "dims"), [((1, 1), (128, 128)), ((3, 9), (128, 64)), ((2, 8), (64, 128))])
def test_every_shape_of_heads(device, heads, dims):
    check(*raw(device, heads, dims), True, 1, *parameters(heads[1], device))


def test_a_workspace_holds_the_activated_inputs_and_inputs_are_not_changed(device):
    tokens, cu, host = raw(device, g_dtype=BF16, beta_dtype=BF16)
    before = [x.clone() for x in tokens]
    given = (tokens, cu, host, True, 2, *parameters(6, device))
    want_o, want_state = check(*given)
    workspace = Workspace()
    for _ in range(2):
        o, state = check(*given, workspace=workspace)
        assert torch.equal(o, want_o) and torch.equal(state, want_state)
    assert all(torch.equal(a, b) for a, b in zip(before, tokens))


def test_strided_and_unaligned_gates(device):
    (q, k, v, g, beta), cu, host = raw(device, g_dtype=BF16, beta_dtype=BF16)
    a_log, dt_bias = parameters(6, device)
    want_o, want_state = check((q, k, v, g, beta), cu, host, True, 1, a_log, dt_bias)
    both = torch.stack([g, beta], -1)
    for strided in ((both[..., 0], both[..., 1]), tuple(_shifted(x) for x in (g, beta))):
        o, state = check((q, k, v, *strided), cu, host, True, 1, _shifted(a_log), _shifted(dt_bias))
        assert torch.equal(o, want_o) and torch.equal(state, want_state)


def _shifted(x):
    """The same numbers, an element past an aligned address."""
    buffer = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return buffer[1:].view(x.shape).copy_(x)


@pytest.mark.gpu
def test_activations_replay_in_a_graph():
    tokens, cu, host = raw("cuda", g_dtype=BF16)
    a_log, dt_bias = parameters(6, "cuda")

    def run():
        return chunk_gated_delta_rule(
            *tokens, output_final_state=True, cu_seqlens=cu, cu_seqlens_cpu=host, use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias,
        )  # fmt: skip

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = run()
    for x, value in zip((*tokens, a_log, dt_bias), (*raw("cuda", g_dtype=BF16)[0], a_log - 0.5, dt_bias + 1)):
        x.copy_(value.roll(1, 1) if x.dim() > 1 else value)
    graph.replay()
    want_o, want_state = run()
    assert torch.equal(o, want_o) and torch.equal(state, want_state)
