"""Every template on the card, one kernel at a time, against float64: edge lengths, any decay, repeated."""

import pytest
import torch

from qla_jit import build, harness, registry, runtime
from qla_jit.artifacts import ArtifactStore
from qla_jit.config import SPLIT_KERNELS, UNCHUNKED_KERNELS, OpConfig
from qla_jit.spec import KernelSpec

pytestmark = pytest.mark.gpu

LENGTHS = ((1,), (63,), (64,), (65,), (256,), (5, 0, 200, 64, 0, 1000), (0, 1, 2, 3, 64, 0))
CONFIGS = (
    OpConfig(2, 8),
    OpConfig(2, 4, 64, 128),
    OpConfig(2, 4, 128, 64, state_v_first=True),
    OpConfig(2, 2, 64, 64, state_dtype="bfloat16"),
    OpConfig(2, 8, dtype="float16"),
    OpConfig(2, 4, 128, 256),
)


ACTIVATIONS = (
    OpConfig(2, 8),
    OpConfig(3, 9, 64, gate_dtype="bfloat16", beta_dtype="bfloat16"),
    OpConfig(1, 1, dtype="float16", gate_dtype="float16"),
    OpConfig(16, 48, beta_dtype="bfloat16"),
)


def configs(kernel):
    return {"fused_forward": CONFIGS, "input_activation": ACTIVATIONS}.get(kernel, CONFIGS[:2])


def kernels():
    """(template name, problem) of every template that runs on Hopper, the portable ones at both chunk sizes."""
    for template in registry.templates().values():
        if template.kernel not in harness.KERNELS:
            continue
        for config in configs(template.kernel):
            for chunk_size in (64,) if template.kernel in UNCHUNKED_KERNELS else (64, 32):
                problem = config.problem(template.kernel, chunk_size)
                if "sm90" in template.archs and template.unsupported(problem) is None:
                    yield pytest.param(template.name, problem, id=f"{template.name}-{config}-{chunk_size}")


def load(name, problem):
    template = registry.get_template(name)
    spec = KernelSpec(problem, template.default(problem))
    return runtime.load(build.ensure(spec, ArtifactStore()))


@pytest.mark.parametrize(("name", "problem"), tuple(kernels()))
def test_kernel_matches_float64_on_edge_lengths_and_any_decay(name, problem):
    kernel = load(name, problem)
    for seed, lengths in enumerate(LENGTHS):
        for gates in ("none", "mild", "violent"):
            case = harness.make_case(problem, lengths, seed, gates=gates)
            case.poison()
            case.launch(kernel)
            assert case.error() <= case.tolerance, (lengths, gates)


REPEATED = (
    *((name, OpConfig(16, 64), (1000, 64, 2048, 37), {}) for name in ("input_activation", "kkt_inverse_sm90")),
    ("fused_forward_sm90", OpConfig(16, 64), (1000, 64, 2048, 37), {}),
    *((f"{kernel}_sm90", OpConfig(2, 8), (9000, 64, 3000), {"segment_chunks": 10}) for kernel in SPLIT_KERNELS),
)


@pytest.mark.parametrize(("name", "config", "lengths", "asked"), REPEATED, ids=[name for name, *_ in REPEATED])
def test_two_hundred_runs_are_bitwise_equal(name, config, lengths, asked):
    problem = config.problem(registry.get_template(name).kernel)
    kernel, case = load(name, problem), harness.make_case(problem, lengths, seed=3, **asked)

    def run():
        case.poison()
        case.launch(kernel)
        return case.written()

    first = run()
    for _ in range(200):
        assert all(torch.equal(first[name], x) for name, x in run().items())


@pytest.mark.parametrize("config", (CONFIGS[0], CONFIGS[2], CONFIGS[3]), ids=str)
@pytest.mark.parametrize("name", ["fused_forward_sm90", "fused_forward_mma"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_checkpoints_are_the_states_after_whole_intervals(name, config, chunks):
    problem = config.problem("fused_forward")
    kernel = load(name, problem)
    for seed, lengths in enumerate(LENGTHS):
        case = harness.make_case(problem, lengths, seed, gates="bench", chunks_per_checkpoint=chunks)
        case.poison()
        case.launch(kernel)
        assert case.error() <= case.tolerance, lengths


def test_correlated_keys_stay_within_twice_the_random_error():
    problem = OpConfig(2, 8).problem("kkt_inverse")
    kernel = load("kkt_inverse_sm90", problem)
    case = harness.make_case(problem, (640, 100), seed=5, key_correlation=0.95)
    case.poison()
    case.launch(kernel)
    assert case.error() <= 2 * case.tolerance
