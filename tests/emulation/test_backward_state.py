"""The two state kernels of the backward, emulated: every edge of a chunk, any decay, both layouts."""

import pytest
import torch
from emulator import kernel

from qla_jit import harness, launch
from qla_jit.config import OpConfig
from qla_jit.registry import select
from qla_jit.spec import KernelSpec

KERNELS = ("recompute_state", "backward_state")


def emulated(problem, **changes):
    schedule = select(problem).default(problem).replace(**changes)
    run = kernel(KernelSpec(problem, schedule))
    return lambda *given: run(seed=1, **dict(zip(launch.ARGUMENTS[problem.kernel], given, strict=True)))


@pytest.mark.parametrize(("gates", "lengths"), [("none", (65, 0, 130)), ("bench", (1, 64)), ("violent", (127, 3))])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_matches_float64(name, gates, lengths):
    problem = OpConfig(1, 2, 64, 64).problem(name)
    case = harness.make_case(problem, lengths, 2, "cpu", gates=gates)
    case.poison()
    case.launch(emulated(problem))
    assert case.error() < case.tolerance


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (OpConfig(1, 2, dtype="float16", state_v_first=True), {}),
        (OpConfig(1, 1, 128, 128), {"dv_split": 2, "registers": "40/168/240"}),
        (OpConfig(1, 1, 64, 256, state_dtype="bfloat16"), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KERNELS)
def test_layouts_and_splits_match_float64(name, config, changes):
    problem = config.problem(name)
    case = harness.make_case(problem, (70,), 3, "cpu", gates="bench")
    case.poison()
    case.launch(emulated(problem, **changes))
    assert case.error() < case.tolerance


@pytest.mark.parametrize("name", KERNELS)
def test_rows_past_the_end_do_not_come_through(name):
    """Tokens behind a tail belong to another sequence, or to nobody, and may hold anything."""
    problem = OpConfig(1, 1, 64, 64).problem(name)
    case = harness.make_case(problem, (40, 70), 4, "cpu")
    case.poison()
    want = case.wanted
    for tensor in ("k", "v", "q", "do"):
        if tensor in case.tensors:
            case.tensors[tensor][40:] = float("nan")
    case.tensors["bounds"] = torch.tensor([0, 40], dtype=torch.int32)
    names = ("initial", "dfinal", "dinitial")
    case.tensors |= {name: case.tensors[name][:1].contiguous() for name in names if name in case.tensors}
    case.launch(emulated(problem))
    for name_of, reference in want.items():
        rows = slice(0, 40) if name_of in ("effects", "dv") else slice(0, 1)
        got = case.tensors[name_of][rows].double()
        assert (got - reference[rows]).norm() <= case.tolerance * reference[rows].norm(), name_of
