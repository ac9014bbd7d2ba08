"""Activations in PyTorch, and the arguments by which the kernel is told to do the same, on CPU tensors."""

import itertools

import pytest
import torch

from qla_jit import launch
from qla_jit.activation import CAST, Activation, ActivationKernel, Modes
from qla_jit.config import GATE_DTYPES, OpConfig
from qla_jit.numerics import relative_error
from qla_jit.reference import input_activation_reference

HEADS, VALUE_HEADS, DIM, TOKENS = 2, 6, 64, 5


def inputs(g_dtype=torch.float32, beta_dtype=torch.float32, dtype=torch.bfloat16):
    gen = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(TOKENS, HEADS, DIM, generator=gen) for _ in range(2))
    g, beta = (5 * torch.randn(TOKENS, VALUE_HEADS, generator=gen) for _ in range(2))
    return q.to(dtype), k.to(dtype), g.to(g_dtype), beta.to(beta_dtype)


def rates(dtype=torch.float32):
    return torch.linspace(-2, 1, VALUE_HEADS).to(dtype)


def bias(dtype=torch.float32):
    return torch.linspace(-3, 25, VALUE_HEADS).to(dtype)


def wanted(activation, tensors):
    return input_activation_reference(
        *tensors, activation.normalize, activation.a_log, activation.dt_bias, activation.beta_scale
    )


class Told:
    """A kernel that does what its arguments say, in float64, and keeps them."""

    def __init__(self, **config):
        problem = OpConfig(HEADS, VALUE_HEADS, DIM, **config).problem("input_activation")
        self.kernel = ActivationKernel(problem, self.entry)

    def entry(self, *arguments):
        x = self.given = dict(zip(launch.ARGUMENTS["input_activation"], arguments, strict=True))
        rate = {1: x["a_log"], 2: x["a_log_half"]}.get(x["a_log_mode"])
        shift = {1: x["dt_bias"], 2: x["dt_bias_half"]}.get(x["dt_bias_mode"])
        assert (rate is not None) == (x["g_mode"] == 2)
        beta_scale = x["beta_mode"] - 1 or None if x["beta_mode"] else None
        made = input_activation_reference(
            x["q"], x["k"], x["g"], x["beta"], bool(x["qk_mode"]), rate, shift, beta_scale
        )
        for name, value in zip(("q", "k", "g", "beta"), made):
            if x["qk_mode" if name in "qk" else f"{name}_mode"]:
                x[f"{name}_out"].copy_(value)

    def __call__(self, activation, q, k, g, beta):
        modes = Modes.of(activation, g.dtype, beta.dtype)
        written = [torch.empty(shape, dtype=dtype) for shape, dtype in self.kernel.outputs(modes, len(q))]
        return self.kernel(activation, modes, written, q, k, g, beta, q.device)


ASKED = [
    Activation(normalize, beta_scale, rates() if gate else None, bias() if gate == "biased" else None)
    for normalize, beta_scale, gate in itertools.product((False, True), (None, 1, 2), (None, "plain", "biased"))
]


def name_of(activation: Activation) -> str:
    asked = {"norm": activation.normalize, f"{activation.beta_scale}sigmoid": activation.beta_scale}
    asked |= {"gate": activation.a_log is not None, "biased": activation.dt_bias is not None}
    return "-".join(name for name, flag in asked.items() if flag) or "cast"


@pytest.mark.parametrize("activation", ASKED, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_pytorch_matches_the_reference(activation, dtype):
    tensors = inputs(dtype, dtype, dtype)
    limits = {torch.bfloat16: 3e-3, torch.float32: 2e-7, torch.float64: 1e-7}  # parameters are fp32
    for got, want, given in zip(activation.apply(*tensors), wanted(activation, tensors), tensors):
        wide = torch.promote_types(dtype, torch.float32)
        assert got.dtype in (given.dtype, wide) and relative_error(got, want) < limits[dtype]


@pytest.mark.parametrize("activation", ASKED, ids=name_of)
@pytest.mark.parametrize("g_dtype", GATE_DTYPES)
@pytest.mark.parametrize("beta_dtype", GATE_DTYPES)
def test_kernel_is_told_what_is_asked_for_and_what_is_not_fp32(activation, g_dtype, beta_dtype):
    told = Told(gate_dtype=g_dtype, beta_dtype=beta_dtype)
    tensors = inputs(launch.torch_dtype(g_dtype), launch.torch_dtype(beta_dtype))
    q, k, g, beta = told(activation, *tensors)
    assert (q.dtype, k.dtype, g.dtype, beta.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    for got, want, limit in zip((q, k, g, beta), wanted(activation, tensors), (3e-3, 3e-3, 1e-7, 1e-7)):
        assert relative_error(got, want) < limit
    for name, given, got in zip(("q", "k", "g", "beta"), tensors, (q, k, g, beta)):
        mode = told.given["qk_mode" if name in "qk" else f"{name}_mode"]
        assert (got is given) == (mode == 0)  # what is not asked for is passed on, not copied


def test_nothing_to_do_is_known_without_a_launch():
    assert not any(Modes.of(CAST, torch.float32, torch.float32))
    assert Modes.of(CAST, torch.bfloat16, torch.float16) == (0, 1, 1)
    assert Told().kernel.outputs(Modes(0, 0, 0), TOKENS) == ()


@pytest.mark.parametrize("a_log_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dt_bias_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_parameters_of_the_gates_may_have_any_dtype(a_log_dtype, dt_bias_dtype):
    """q's dtype and fp32 are read as they are; others are cast first."""
    activation = Activation(a_log=rates(a_log_dtype), dt_bias=None if dt_bias_dtype is None else bias(dt_bias_dtype))
    told, tensors = Told(), inputs()
    assert relative_error(told(activation, *tensors)[2], wanted(activation, tensors)[2]) < 1e-7
    for name, x in (("a_log", activation.a_log), ("dt_bias", activation.dt_bias)):
        if x is not None and x.dtype == torch.float32:
            assert told.given[name] is x
        if x is not None and x.dtype == torch.bfloat16:
            assert told.given[f"{name}_half"] is x


def test_a_parameter_in_the_middle_of_others_is_aligned_first():
    told, given = Told(), inputs()
    parameter = torch.zeros(VALUE_HEADS + 2)[1:-1].copy_(rates())
    assert parameter.data_ptr() % 16
    got = told(Activation(a_log=parameter), *given)[2]
    assert told.given["a_log"].data_ptr() % 16 == 0
    assert torch.equal(got, told(Activation(a_log=rates()), *given)[2])


def test_absent_parameters_cost_one_pair_per_device():
    told = Told()
    told(CAST, *inputs())
    first = [told.given[name] for name in ("a_log", "dt_bias", "a_log_half", "dt_bias_half")]
    told(CAST, *inputs())
    assert all(told.given[name] is x for name, x in zip(("a_log", "dt_bias", "a_log_half", "dt_bias_half"), first))
    assert [x.dtype for x in first] == [torch.float32] * 2 + [torch.bfloat16] * 2


def test_a_parameter_of_the_gates_may_need_a_gradient():
    assert not Activation(a_log=rates()).requires_grad and not CAST.requires_grad
    assert Activation(a_log=rates().requires_grad_()).requires_grad
    assert Activation(a_log=rates(), dt_bias=bias().requires_grad_()).requires_grad


def test_gradients_of_the_norm_are_those_of_float64_and_can_be_differentiated():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0] *= 1e-4  # of the size of what is added under the root
    x.requires_grad_()
    norm = lambda x: Activation(normalize=True).apply(x, x, x, x)[0]
    torch.autograd.gradcheck(norm, x, eps=1e-7)
    torch.autograd.gradgradcheck(norm, x[1:].detach().requires_grad_())


def test_the_norm_keeps_its_input_and_no_fp32_copy():
    x = torch.randn(2, 3, 8).bfloat16().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        q, *_ = Activation(normalize=True).apply(x, x.detach(), x.detach(), x.detach())
    assert saved == [x.data_ptr()] and q.dtype == torch.bfloat16
