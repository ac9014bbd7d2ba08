"""A split batch through its real kernels, on the CPU: `CompiledOp` with entries that are emulated."""

import functools
from types import SimpleNamespace

import pytest
import torch
from emulator import kernel

from qla_jit import launch
from qla_jit.config import FORWARD_KERNELS, OpConfig
from qla_jit.numerics import GPU_TOLERANCE, make_inputs, relative_error
from qla_jit.op import Checkpoints, CompiledOp
from qla_jit.reference import recurrent_reference
from qla_jit.registry import select
from qla_jit.spec import KernelSpec
from qla_jit.workspace import Workspace


@functools.cache
def emulated(config: OpConfig, seed: int = 0) -> CompiledOp:
    """The operator with kernels that run on CPU tensors; refuses nothing, like the compiled ones."""

    def compiled(name):
        problem = config.problem(name)
        spec = KernelSpec(problem, select(problem).default(problem))
        run = kernel(spec)
        entry = lambda *given: run(seed=seed, **dict(zip(launch.ARGUMENTS[name], given, strict=True)))
        return SimpleNamespace(spec=spec, entry=entry)

    kernels = {name: compiled(name) for name in FORWARD_KERNELS}
    return CompiledOp(config, 64, kernels, load_split=lambda name, schedule: compiled(name))


def run(op: CompiledOp, x, segment_chunks, window="exact", initial=None, **more):
    """(o, final state) of the operator, whole if segment_chunks is None."""
    forward = None
    if segment_chunks is not None:
        forward = op.split(x.cu_host, segment_chunks, torch.device("cpu"), window)
        assert forward.segments.is_cut
    return op(
        x.q[0], x.k[0], x.v[0], x.g[0], x.beta[0], x.cu_seqlens, initial_state=initial, output_final_state=True,
        forward=forward, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gates", "heads", "window"), [("none", 2, "exact"), ("bench", 4, 1e-4), ("violent", 2, 1e-4), ("mild", 1, "exact")]
)
def test_a_split_batch_is_the_recurrence(gates, heads, window):
    config = OpConfig(1, heads, head_dim_k=64, head_dim_v=64)
    x = make_inputs((800, 0, 70), 1, heads, 64, 64, gates=gates, seed=3)
    op = emulated(config)
    want_o, want_state = recurrent_reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
    o, state = run(op, x, 5, window, x.initial_state)
    assert relative_error(o, want_o[0]) < GPU_TOLERANCE[torch.bfloat16]
    assert relative_error(state, want_state) < GPU_TOLERANCE[torch.bfloat16]


def test_a_split_rounds_no_worse_than_a_whole_batch():
    config = OpConfig(1, 1, head_dim_k=64, head_dim_v=64)
    x = make_inputs((1100,), 1, 1, 64, 64, gates="none", key_correlation=0.7, seed=6)
    want_o, want_state = recurrent_reference(*x.tokens, initial_state=x.initial_state)
    errors = []
    for segment_chunks in (None, 4):
        o, state = run(emulated(config), x, segment_chunks, "exact", x.initial_state)
        errors.append((relative_error(o, want_o[0]), relative_error(state, want_state)))
    for whole, cut in zip(*errors):
        assert cut < 1.25 * whole


def test_checkpoints_pools_and_workspaces_are_those_of_the_whole_batch():
    """With the last CTA first: a last segment then ends, and writes its pool row, before the first one starts."""
    config = OpConfig(1, 2, head_dim_k=64, head_dim_v=128, state_v_first=True)
    lengths, every = (500, 0, 330), 192
    x = make_inputs(lengths, 1, 2, 64, 128, gates="bench", seed=4)
    op, found = emulated(config, seed=1), []
    counts = [length // every for length in lengths]
    for segment_chunks in (None, 3):
        pool = torch.full((5, 2, 128, 64), 7.0)
        rows = torch.tensor([4, -1, 1], dtype=torch.int32)
        pool[[4, 1]] = x.initial_state.mT[[0, 2]]
        states = torch.full((sum(counts), 2, 128, 64), float("nan"))
        checkpoints = Checkpoints(every, states, torch.tensor([0, counts[0], counts[0]], dtype=torch.int32))
        more = dict(state_rows=rows, checkpoints=checkpoints, workspace=Workspace())
        o, final = run(op, x, segment_chunks, "exact", pool, **more)
        assert final is pool and (pool[[0, 2, 3]] == 7.0).all()
        found.append((o, pool, states))
    for whole, cut in zip(*found):
        assert relative_error(cut, whole) < GPU_TOLERANCE[torch.bfloat16]


def test_a_segment_gives_the_same_bits_alone_and_in_any_batch():
    config = OpConfig(1, 2, head_dim_k=64, head_dim_v=64)
    both = make_inputs((330, 600), 1, 2, 64, 64, gates="bench", seed=5)
    rows = slice(330, 930)
    alone = SimpleNamespace(
        **{name: getattr(both, name)[:, rows] for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.tensor([0, 600], dtype=torch.int32), cu_host=(0, 600),
    )  # fmt: skip
    op = emulated(config)
    o, state = run(op, both, 4, 1e-3, both.initial_state)
    o_alone, state_alone = run(op, alone, 4, 1e-3, both.initial_state[1:])
    assert torch.equal(o[rows], o_alone) and torch.equal(state[1:], state_alone)
