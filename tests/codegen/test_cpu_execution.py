"""Portable templates, executed on the CPU against the float64 recurrence: arithmetic and indexing, without a GPU."""

import functools

import pytest
import torch
from cpu import TOLERANCE, CpuKernel, make_case

from qla_jit import registry
from qla_jit.config import OpConfig
from qla_jit.launch import ARGUMENTS
from qla_jit.reference import input_activation_reference
from qla_jit.resources import is_feasible

pytest.importorskip("tilelang")

LENGTHS = ([], [0], [1], [63], [64], [65], [0, 0, 5, 0], [130, 1, 0, 64, 63, 3, 0])
GATES = ("none", "mild", "violent")
#: head dims, heads, chunk size, v_first: every dim, every group shape, both chunk sizes, both layouts.
FORWARDS = (
    ((64, 64), (1, 1), 64, False),
    ((128, 64), (2, 4), 32, True),
    ((64, 128), (1, 3), 64, True),
    ((128, 128), (2, 2), 32, False),
)
#: head dims, heads: tails of a CTA's rows, every group shape, gates that are fewer than threads.
ACTIVATIONS = (((64, 64), (2, 2)), ((128, 64), (1, 3)), ((128, 64), (2, 8)), ((64, 64), (3, 6)))
INVERSES = (((64, 64), (2, 2), 64), ((128, 64), (1, 3), 64), ((128, 64), (2, 4), 32))


@functools.cache
def kernel(name: str, dims, heads, chunk_size: int = 64, v_first: bool = False) -> CpuKernel:
    """Compiled once for all lengths and gates; templates for sm120 are the portable ones."""
    template = registry.get_template(name)
    config = OpConfig(*heads, head_dim_k=dims[0], head_dim_v=dims[1], state_v_first=v_first, arch="sm120")
    problem = config.problem(template.kernel, chunk_size)
    assert is_feasible(problem, template.default(problem))
    return CpuKernel(problem, template.default(problem))


def cases(name: str, shapes):
    return pytest.mark.parametrize("shape", [(name, *shape) for shape in shapes], ids=str)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("gates", GATES)
@cases("fused_forward_mma", FORWARDS)
def test_fused_forward_matches_the_recurrence(shape, gates, lengths):
    forward = kernel(*shape)
    case = make_case(forward.problem, lengths, seed=len(lengths), gates=gates)
    assert forward.error(case) <= TOLERANCE


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("gates", GATES)
@cases("kkt_inverse_mma", INVERSES)
def test_inverse_and_gates_match_the_triangular_solve_and_the_cumulative_sum(shape, gates, lengths):
    inverse = kernel(*shape)
    assert inverse.error(make_case(inverse.problem, lengths, seed=1, gates=gates)) <= TOLERANCE


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("gates", GATES)
@cases("input_activation", ACTIVATIONS)
def test_activations_match_their_definitions(shape, gates, lengths):
    activation = kernel(*shape)
    assert activation.error(make_case(activation.problem, lengths, seed=2, gates=gates)) <= TOLERANCE


#: Modes of the kernel, and what the reference is told: each alone, then all, with every kind of parameter.
MODES = (
    ({"qk_mode": 1}, {"normalize": True}),
    ({"g_mode": 1}, {}),
    ({"beta_mode": 1}, {}),
    ({"beta_mode": 2}, {"beta_scale": 1.0}),
    ({"beta_mode": 3}, {"beta_scale": 2.0}),
    ({"g_mode": 2, "a_log_mode": 1}, {"a_log": "a_log"}),
    ({"g_mode": 2, "a_log_mode": 1, "dt_bias_mode": 2}, {"a_log": "a_log", "dt_bias": "dt_bias_half"}),
    ({"g_mode": 2, "a_log_mode": 2, "dt_bias_mode": 1}, {"a_log": "a_log_half", "dt_bias": "dt_bias"}),
    ({"qk_mode": 1, "g_mode": 1, "beta_mode": 2}, {"normalize": True, "beta_scale": 1.0}),
)


@pytest.mark.parametrize(("modes", "asked"), MODES, ids=[str(modes) for modes, _ in MODES])
def test_only_what_is_asked_for_is_read_and_written(modes, asked):
    activation = kernel("input_activation", *ACTIVATIONS[2])
    case = make_case(activation.problem, [70], seed=8, gates="mild")
    tensors = case.tensors
    tensors.update(a_log_half=tensors["a_log"] + 0.5, dt_bias_half=tensors["dt_bias"] - 0.25)
    wanted = input_activation_reference(
        *(tensors[name] for name in ("q", "k", "g", "beta")),
        **{name: tensors[x] if isinstance(x, str) else x for name, x in asked.items()},
    )
    tensors.update({name: 0 for name in ARGUMENTS["input_activation"] if name.endswith("_mode")} | modes)
    for name in {"a_log", "dt_bias", "a_log_half", "dt_bias_half"} - set(asked.values()):
        tensors[name].fill_(float("nan"))
    activation.error(case)
    for name, want in zip(("q", "k", "g", "beta"), wanted):
        got, mode = tensors[f"{name}_out"], "qk_mode" if name in "qk" else f"{name}_mode"
        if mode in modes:
            torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-30)
        else:
            assert got.isnan().all()


def test_logits_without_end_give_the_limits():
    activation = kernel("input_activation", *ACTIVATIONS[0])
    case = make_case(activation.problem, [4], seed=9, gates="none")
    logits = torch.tensor([-float("inf"), -200.0, 200.0, float("nan")])[:, None]
    for name in ("g", "beta"):
        case.tensors[name] = logits.expand(4, 2).contiguous()
    case.tensors["q"][0] = 0
    case.tensors.update(dt_bias_mode=0)
    activation.error(case)
    rates = case.tensors["a_log"].exp()
    torch.testing.assert_close(case.tensors["g_out"][:3], torch.stack([0 * rates, 0 * rates, -200 * rates]))
    assert case.tensors["beta_out"][:3].tolist() == [[0, 0], [0, 0], [2, 2]]
    assert case.tensors["g_out"][3].isnan().all() and case.tensors["beta_out"][3].isnan().all()
    assert not case.tensors["q_out"][0].any() and case.tensors["q_out"].isfinite().all()


@pytest.mark.parametrize("shape", FORWARDS[:2], ids=str)
def test_absent_states_are_neither_read_nor_written(shape):
    forward = kernel("fused_forward_mma", *shape)
    case = make_case(forward.problem, [65, 0, 3], seed=3, gates="mild")
    assert case.wanted["o"].isfinite().all()  # made before the state is changed
    case.tensors["initial"].zero_()
    assert forward.error(case) > TOLERANCE
    with_zeros = case.tensors["o"].clone()

    case = make_case(forward.problem, [65, 0, 3], seed=3, gates="mild")
    case.tensors.update(has_initial=0, has_final=0)
    assert case.wanted["o"].isfinite().all()
    case.tensors["initial"].fill_(float("nan"))
    forward.error(case)
    assert torch.equal(case.tensors["o"], with_zeros)
    assert case.tensors["final"].isnan().all()


@pytest.mark.parametrize("chunks", [1, 2])
def test_checkpoints_are_the_states_after_whole_intervals(chunks):
    forward = kernel("fused_forward_mma", *FORWARDS[0])
    case = make_case(forward.problem, [200, 0, 64, 300, 5], seed=6, gates="mild", chunks_per_checkpoint=chunks)
    every = chunks * forward.problem.chunk_size
    assert len(case.wanted["checkpoints"]) == sum(n // every for n in (200, 0, 64, 300, 5))
    assert forward.error(case) <= TOLERANCE


def test_a_negative_row_is_a_sequence_without_a_state():
    forward = kernel("fused_forward_mma", *FORWARDS[0])
    case = make_case(forward.problem, [65, 70], seed=7, gates="mild")
    assert case.wanted["o"].isfinite().all()
    case.tensors["state_rows"][0] = -1
    forward.error(case)
    assert case.tensors["final"][1].isnan().all()  # where the first sequence's state would have been
    torch.testing.assert_close(case.tensors["o"][65:].double(), case.wanted["o"][65:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(case.tensors["o"][:65].double(), case.wanted["o"][:65], rtol=1e-4, atol=1e-4)


def test_tokens_of_other_sequences_never_leak():
    """NaN in one sequence stays there, though partial chunks of its neighbours read past their end."""
    forward = kernel("fused_forward_mma", *FORWARDS[0])
    case = make_case(forward.problem, [65, 70, 3], seed=4, gates="mild")
    assert case.wanted["o"].isfinite().all()
    for name in ("q", "k", "v"):
        case.tensors[name][65:135] = float("nan")
    assert forward.error(case) == float("inf")
    out, final = case.tensors["o"], case.tensors["final"]
    assert out[65:135].isnan().all() and final[1].isnan().all()  # the middle one is in the middle row
    for kept in (slice(0, 65), slice(135, 138)):
        torch.testing.assert_close(out[kept].double(), case.wanted["o"][kept], rtol=1e-4, atol=1e-4)
    assert final[[0, 2]].isfinite().all()


def test_a_wrong_kernel_is_noticed():
    """The comparison itself: a state scaled by 1.0001 is out of tolerance."""
    forward = kernel("fused_forward_mma", *FORWARDS[0])
    case = make_case(forward.problem, [65], seed=5, gates="mild")
    assert case.wanted["o"].isfinite().all()
    case.tensors["initial"] *= 1.0001
    assert TOLERANCE < forward.error(case) < 1e-3
