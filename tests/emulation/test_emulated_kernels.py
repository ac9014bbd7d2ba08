"""Generated kernels on the emulator against the float64 references, as `tests/gpu` does on a card.

Every run also looks for races, for accesses outside of tensors, and for waits that never end.
"""

import dataclasses
import re

import pytest
import torch
from emulator import EmulationError, Program

from qla_jit import build, harness, launch
from qla_jit.config import OpConfig
from qla_jit.registry import candidates
from qla_jit.spec import KernelSpec

LENGTHS = (130, 1, 64, 0)
SMALL = OpConfig(2, 4)
HALF = OpConfig(2, 4, dtype="float16", state_v_first=True)
NARROW = OpConfig(1, 2, head_dim_k=64, head_dim_v=64)


def spec_of(config, kernel, template, **parameters):
    problem = config.problem(kernel)
    (found,) = (t for t in candidates(problem) if t.name == template)
    return KernelSpec(problem, found.default(problem).replace(**parameters))


def run(kernel, case, seed):
    """The error of a launch on poisoned outputs."""
    case.poison()
    case.launch(lambda *arguments: kernel(seed=seed, **dict(zip(launch.ARGUMENTS[case.problem.kernel], arguments))))
    return case.error()


KKT = {
    "kkt_inverse": spec_of(SMALL, "kkt_inverse", "kkt_inverse_sm90"),
    "kkt_inverse of fp16": spec_of(HALF, "kkt_inverse", "kkt_inverse_sm90"),
    "kkt_inverse with mma": spec_of(NARROW, "kkt_inverse", "kkt_inverse_mma"),
}
FORWARD = {
    "forward": spec_of(SMALL, "fused_forward", "fused_forward_sm90"),
    "forward of fp16": spec_of(HALF, "fused_forward", "fused_forward_sm90"),
    "forward, d_v split": spec_of(SMALL, "fused_forward", "fused_forward_sm90", dv_split=2),
    "forward, one X stage": spec_of(SMALL, "fused_forward", "fused_forward_sm90", stages_xb=1),
    "forward of 64 dims": spec_of(NARROW, "fused_forward", "fused_forward_sm90"),
    "forward with mma": spec_of(NARROW, "fused_forward", "fused_forward_mma", copies="async"),
}


@pytest.mark.parametrize("gates, correlation", [("none", 0.0), ("violent", 0.9)])
@pytest.mark.parametrize("name", KKT)
def test_inverse(compiled, name, gates, correlation):
    for seed in range(3):
        case = harness.make_case(KKT[name].problem, LENGTHS, seed, "cpu", gates, correlation)
        assert run(compiled(KKT[name]), case, seed) < case.tolerance


@pytest.mark.parametrize("gates", ["none", "violent"])
@pytest.mark.parametrize("name", FORWARD)
def test_forward(compiled, name, gates):
    for seed in range(2):
        case = harness.make_case(FORWARD[name].problem, LENGTHS, seed, "cpu", gates, chunks_per_checkpoint=seed)
        assert run(compiled(FORWARD[name]), case, seed) < case.tolerance


def test_forward_uses_every_stage_twice(compiled):
    spec = FORWARD["forward of 64 dims"]
    case = harness.make_case(spec.problem, (430, 257), 1, "cpu", chunks_per_checkpoint=2)
    assert run(compiled(spec), case, 5) < case.tolerance


def test_forward_without_states_starts_at_zero_and_writes_none(compiled):
    kernel, case = compiled(FORWARD["forward"]), harness.make_case(FORWARD["forward"].problem, LENGTHS, 1, "cpu")
    case.tensors["initial"].zero_()
    run(kernel, case, 0)
    from_zeros = case.tensors["o"].clone()
    case.tensors["initial"].fill_(float("nan"))
    case.tensors |= {"has_initial": 0, "has_final": 0}
    run(kernel, case, 1)
    assert torch.equal(case.tensors["o"], from_zeros)
    assert case.tensors["final"].isnan().all()


def test_sequence_without_a_state_row_starts_at_zero_and_leaves_the_pool(compiled):
    kernel, case = compiled(FORWARD["forward"]), harness.make_case(FORWARD["forward"].problem, LENGTHS, 1, "cpu")
    row = case.tensors["state_rows"][0].item()
    case.tensors["initial"][row] = 0
    run(kernel, case, 0)
    o, final = case.tensors["o"].clone(), case.tensors["final"].clone()
    case.tensors["initial"][row] = float("nan")
    case.tensors["state_rows"][0] = -1
    run(kernel, case, 1)
    assert torch.equal(case.tensors["o"], o)
    assert case.tensors["final"][row].isnan().all()
    final[row] = case.tensors["final"][row]
    assert torch.equal(case.tensors["final"].nan_to_num(7.0), final.nan_to_num(7.0))


def test_states_are_replaced_in_place(compiled):
    kernel, case = compiled(FORWARD["forward"]), harness.make_case(FORWARD["forward"].problem, LENGTHS, 2, "cpu")
    case.poison()
    case.tensors["final"] = case.tensors["initial"]
    kernel(**case.tensors)
    assert case.error() < case.tolerance


def test_input_activation(compiled):
    config = dataclasses.replace(SMALL, activation=True, gate_dtype="bfloat16")
    spec = spec_of(config, "input_activation", "input_activation")
    case = harness.make_case(spec.problem, LENGTHS, 1, "cpu")
    assert run(compiled(spec), case, 0) < case.tolerance


@pytest.mark.parametrize(
    "line, said",
    [
        (r"loaded\[0\]\.wait\(0\);", "data race"),
        (r"tl::wait_wgmma<0>\(\);", "data race|did not wait"),
        (r"__syncwarp\(\);  // the scratch has been read", "data race"),
        (r"tl::fence_proxy_async\(\);(?=\n    __syncwarp)", "without a proxy fence"),
        (r"loaded\[0\]\.arrive\(\);", "deadlock"),
        (r"tl::tma_store_wait<0, true>\(\);", "data race|wait for its tensor stores"),
    ],
)
def test_inverse_without_one_of_its_steps_is_caught(compiled, cache, line, said):
    spec = KKT["kkt_inverse"]
    right = compiled(spec)
    text = build.lower(spec, compile_device=False).source
    assert re.search(line, text)
    wrong = dataclasses.replace(right, program=Program(re.sub(line, ";", text, count=1), right.plan.kernel, cache))
    with pytest.raises(EmulationError, match=said):
        run(wrong, harness.make_case(spec.problem, LENGTHS, 0, "cpu"), 0)


def test_tensor_of_the_wrong_shape_is_named(compiled):
    spec = KKT["kkt_inverse"]
    case = harness.make_case(spec.problem, LENGTHS, 0, "cpu")
    case.tensors["beta"] = case.tensors["beta"][:-1]
    with pytest.raises(EmulationError, match="beta must be"):
        compiled(spec)(**case.tensors)
