"""`backward_grad` on the emulator: every gradient by itself against float64, and nothing else written or read."""

import dataclasses
import re

import pytest
import torch
from emulator import EmulationError, Program

from qla_jit import backward_harness, build, harness, launch
from qla_jit.config import OpConfig
from qla_jit.harness import Case
from qla_jit.numerics import GPU_TOLERANCE, make_inputs, relative_error
from qla_jit.ragged import chunk_slots
from qla_jit.registry import select
from qla_jit.spec import KernelSpec

LENGTHS = (130, 1, 0, 64)
WIDE = OpConfig(2, 4)
NARROW = OpConfig(1, 4, head_dim_k=64, head_dim_v=64, dtype="float16")
MIXED = OpConfig(2, 2, head_dim_k=128, head_dim_v=64)


def spec_of(config, **parameters):
    problem = config.problem("backward_grad")
    return KernelSpec(problem, select(problem).default(problem).replace(**parameters))


def errors(kernel, case, seed=0):
    """Relative error of every output on poisoned memory."""
    case.poison()
    case.launch(lambda *arguments: kernel(seed=seed, **dict(zip(launch.ARGUMENTS["backward_grad"], arguments))))
    return {name: relative_error(case.tensors[name], want) for name, want in case.wanted.items()}


def right(kernel, case, seed=0):
    return all(error < case.tolerance for error in errors(kernel, case, seed).values())


SPECS = {
    "128 dims, two heads of a group": spec_of(WIDE),
    "64 dims, four heads, fp16": spec_of(NARROW),
    "64 values, one head, one stage": spec_of(MIXED, chunks_per_cta=4, stages_kq=1, stages_e=1, stages_do=1),
}


@pytest.mark.parametrize("gates", ["none", "mild", "violent"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients(compiled, name, gates):
    case = harness.make_case(SPECS[name].problem, LENGTHS, 1, "cpu", gates)
    assert right(compiled(SPECS[name]), case, seed=len(gates))


def test_rings_come_round(compiled):
    spec = SPECS["64 values, one head, one stage"]
    assert right(compiled(spec), harness.make_case(spec.problem, (250, 70), 2, "cpu"))


def with_beta(spec, lengths, change):
    """A case whose beta is what ``change`` makes of it, in place."""
    problem = spec.problem
    inputs = make_inputs(
        lengths, problem.num_heads, problem.num_value_heads, problem.head_dim_k, problem.head_dim_v,
        dtype=launch.torch_dtype(problem.dtype),
    )  # fmt: skip
    beta = inputs.beta.clone()
    change(beta[0])
    inputs = dataclasses.replace(inputs, beta=beta)
    owned = torch.tensor([slot for slot, _, _ in chunk_slots(inputs.cu_host, problem.chunk_size)])
    tensors, reference = backward_harness.backward_grad_tensors(problem, inputs, owned)
    return Case(problem, tensors, reference, owned, GPU_TOLERANCE[inputs.k.dtype])


def test_beta_of_exactly_zero_and_one(compiled):
    def change(beta):
        beta[::3], beta[1::5] = 0.0, 1.0

    spec = SPECS["64 dims, four heads, fp16"]
    case = with_beta(spec, (80,), change)
    assert right(compiled(spec), case)
    unwritten = case.tensors["beta"] == 0.0
    assert unwritten.any() and case.tensors["dbeta"][unwritten].abs().min() > 0.0


def test_beta_of_zero_everywhere_has_a_gradient(compiled):
    spec = SPECS["64 dims, four heads, fp16"]
    found = errors(compiled(spec), with_beta(spec, (66,), lambda beta: beta.zero_()))
    assert all(error < GPU_TOLERANCE[torch.float16] for error in found.values())


def test_rows_past_the_end_may_hold_anything(compiled):
    """A sequence of NaN between two others: their partial chunks read its rows, and theirs lie next to its."""
    spec = SPECS["128 dims, two heads of a group"]
    case = harness.make_case(spec.problem, (70, 60, 3), 3, "cpu")
    wanted = case.wanted  # made of the numbers that the others keep
    for name in ("q", "k", "beta", "effects", "dv", "do"):
        case.tensors[name] = case.tensors[name].clone()
        case.tensors[name][70:130] = float("nan")
    errors(compiled(spec), case)
    for name, want in wanted.items():
        for kept in (slice(0, 70), slice(130, 133)):
            assert relative_error(case.tensors[name][kept], want[kept]) < 2 * case.tolerance, name


def test_bits_do_not_depend_on_the_order_of_threads_or_on_the_cut_into_ctas(compiled):
    case = harness.make_case(WIDE.problem("backward_grad"), (130, 7), 4, "cpu")
    found = []
    for seed, parameters in enumerate(({}, {}, {"chunks_per_cta": 1, "stages_kq": 1})):
        errors(compiled(spec_of(WIDE, **parameters)), case, seed)
        found.append([case.tensors[name].clone() for name in launch.OUTPUTS["backward_grad"]])
    assert all(torch.equal(one, other) for later in found[1:] for one, other in zip(found[0], later))


def test_batch_without_a_chunk_writes_nothing(compiled):
    spec = SPECS["64 dims, four heads, fp16"]
    case = harness.make_case(spec.problem, (70,), 5, "cpu")
    case.tensors["bounds"] = torch.zeros(2, dtype=torch.int32)
    errors(compiled(spec), case)
    assert all(case.tensors[name].isnan().all() for name in launch.OUTPUTS["backward_grad"])


def test_tensor_of_the_wrong_shape_is_named(compiled):
    spec = SPECS["64 dims, four heads, fp16"]
    case = harness.make_case(spec.problem, (70,), 5, "cpu")
    case.tensors["dstates"] = case.tensors["dstates"][..., :-1]
    with pytest.raises(EmulationError, match="dstates must be"):
        compiled(spec)(**case.tensors)


@pytest.mark.parametrize(
    "line",
    [
        r"tile_free\[7\]\.wait\([^;]*;",
        r"dp_free\[0\]\.wait\([^;]*;",
        r"sums_full\[[^;]*\.wait\([^;]*;",
        r"w_full\[0\]\.wait\([^;]*;",
    ],
)
def test_gradients_without_one_of_their_waits_are_caught(compiled, cache, line):
    spec = SPECS["64 dims, four heads, fp16"]
    kernel, text = compiled(spec), build.lower(spec, compile_device=False).source
    assert re.search(line, text)
    wrong = dataclasses.replace(kernel, program=Program(re.sub(line, ";", text, count=1), kernel.plan.kernel, cache))
    with pytest.raises(EmulationError, match="data race|deadlock|more than .* arrivals"):
        errors(wrong, harness.make_case(spec.problem, (130,), 0, "cpu"))
