"""The whole backward through its real kernels, emulated, against PyTorch's autograd of the float64 reference."""

import functools

import pytest
import torch
from emulator import kernel

from qla_jit import launch
from qla_jit.backward import KERNELS, CompiledBackward
from qla_jit.config import OpConfig
from qla_jit.numerics import make_inputs, relative_error
from qla_jit.reference import chunk_reference
from qla_jit.registry import select
from qla_jit.spec import KernelSpec
from qla_jit.split import cut_batch
from qla_jit.split_backward import KERNELS as SPLIT_KERNELS
from qla_jit.split_backward import SplitBackward

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
#: Relative; of g and beta more, which are differences of sums.
LIMITS = dict.fromkeys(NAMES, 6e-3) | {"g": 1.5e-2, "beta": 8e-3}


@functools.cache
def entries(config: OpConfig, names: tuple[str, ...], seed: int = 0, dv_split: int = 1) -> dict:
    """dv_split: CTAs that share a head, of the kernels that walk chunks with both operands and state."""

    def entry(name):
        problem = config.problem(name)
        schedule = select(problem).default(problem)
        if dv_split > 1 and "dv_split" in schedule.params():
            schedule = schedule.replace(dv_split=dv_split, registers="40/168/240")
        run = kernel(KernelSpec(problem, schedule))
        return lambda *given: run(seed=seed, **dict(zip(launch.ARGUMENTS[name], given, strict=True)))

    return {name: entry(name) for name in names}


def emulated(config: OpConfig) -> CompiledBackward:
    return CompiledBackward(config, entries(config, KERNELS))


def wanted(x, do, dfinal, initial):
    leaves = [t.detach().double().requires_grad_() for t in (*x.tokens, x.initial_state)]
    o, final = chunk_reference(
        *leaves[:5], x.scale, leaves[5] if initial else None, cu_seqlens=x.cu_host, chunk_size=64
    )
    loss = (o * do.double()).sum()
    if dfinal is not None:
        loss = loss + (final * dfinal.double()).sum()
    return torch.autograd.grad(loss, leaves if initial else leaves[:5])


@pytest.mark.parametrize(
    ("gates", "lengths", "group", "states"),
    [
        ("none", (70, 0, 64), 2, True),
        ("bench", (150,), 4, True),
        ("violent", (1, 65), 1, True),
        ("mild", (80,), 2, False),
    ],
)
def test_all_gradients_are_those_of_the_recurrence(gates, lengths, group, states):
    config = OpConfig(1, group, 64, 64)
    x = make_inputs(lengths, 1, group, 64, 64, gates=gates, seed=7)
    gen = torch.Generator().manual_seed(8)
    do = torch.randn(x.v.shape, generator=gen).bfloat16()
    dfinal = torch.randn(x.initial_state.shape, generator=gen) if states else None
    initial = x.initial_state if states else None
    got = emulated(config)(
        x.q[0], x.k[0], x.v[0], x.g[0], x.beta[0], x.cu_seqlens, x.scale, do[0], initial, dfinal, states
    )
    want = wanted(x, do, dfinal, states)
    for name, a, b in zip(NAMES, got, want):
        b = b[0] if name != "initial_state" else b
        assert relative_error(a, b) < LIMITS[name], name
    assert states or got.initial_state is None


@pytest.mark.parametrize(
    ("gates", "heads", "window", "states", "seed", "dim_v"),
    [
        ("none", 2, "exact", True, 1, 64),
        ("bench", 4, 1e-4, True, 0, 64),
        ("violent", 2, 1e-4, True, 2, 64),
        ("mild", 1, "exact", False, 1, 64),
        ("bench", 1, 1e-4, True, 1, 128),  # two CTAs a head
    ],
)
def test_a_split_backward_gives_the_gradients_of_the_recurrence(gates, heads, window, states, seed, dim_v):
    config = OpConfig(1, heads, 64, dim_v)
    lengths = (0, 800, 40)
    x = make_inputs(lengths, 1, heads, 64, dim_v, gates=gates, seed=9)
    gen = torch.Generator().manual_seed(10)
    do = torch.randn(x.v.shape, generator=gen).bfloat16()
    dfinal = torch.randn(x.initial_state.shape, generator=gen) if states else None
    initial = x.initial_state if states else None
    segments = cut_batch(config.problem("segment_backward"), lengths, 4)
    found = entries(config, SPLIT_KERNELS, seed, dim_v // 64)
    split = SplitBackward(found, segments, heads, window, torch.device("cpu"))
    got = emulated(config)(
        x.q[0], x.k[0], x.v[0], x.g[0], x.beta[0], x.cu_seqlens, x.scale, do[0], initial, dfinal, states, split
    )
    for name, a, b in zip(NAMES, got, wanted(x, do, dfinal, states)):
        b = b[0] if name != "initial_state" else b
        assert relative_error(a, b) < LIMITS[name], name
