"""Splits on the card: kernels against float64, the operator against the whole batch, windows against their bound."""

import pytest
import torch

from qla_jit import build, dispatch, harness, launch, registry, runtime
from qla_jit.artifacts import ArtifactStore
from qla_jit.config import SPLIT_KERNELS, OpConfig
from qla_jit.numerics import GPU_TOLERANCE, make_inputs, relative_error
from qla_jit.op import Checkpoints
from qla_jit.reference import chunk_reference, warmup_chunks_reference
from qla_jit.spec import KernelSpec

pytestmark = pytest.mark.gpu

CONFIGS = (
    OpConfig(2, 8),
    OpConfig(2, 4, 64, 128),
    OpConfig(2, 4, 128, 64, state_v_first=True),
    OpConfig(2, 2, 64, 64, state_dtype="bfloat16"),
    OpConfig(2, 8, dtype="float16"),
    OpConfig(2, 4, 128, 256),
)
LENGTHS = ((1100,), (2300, 64, 0, 70, 1700), (64, 6000, 1), (64 * 24, 64 * 16))


def load(name, problem):
    template = registry.get_template(name)
    return runtime.load(build.ensure(KernelSpec(problem, template.default(problem)), ArtifactStore()))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kernel", SPLIT_KERNELS)
def test_kernel_matches_float64(kernel, config):
    problem = config.problem(kernel)
    entry = load(f"{kernel}_sm90", problem)
    for seed, lengths in enumerate(LENGTHS):
        for gates in ("none", "bench", "violent"):
            for window in ("exact", 1e-5):
                case = harness.make_case(problem, lengths, seed, gates=gates, segment_chunks=9, window=window)
                case.poison()
                case.launch(entry)
                assert case.error() <= case.tolerance, (lengths, gates, window)


def run(config, x, segment_chunks, window="exact", initial=None, **more):
    """(o, final state, checkpoints or None); whole sequences if segment_chunks is None."""
    op = dispatch.compiled(config)
    forward = None if segment_chunks is None else op.split(x.cu_host, segment_chunks, x.q.device, window)
    o, final = op(
        x.q[0], x.k[0], x.v[0], x.g[0], x.beta[0], x.cu_seqlens, initial_state=initial, output_final_state=True,
        cu_host=x.cu_host, forward=forward, **more,
    )  # fmt: skip
    return o, final


@pytest.mark.parametrize("gates", ["none", "mild", "bench", "violent"])
@pytest.mark.parametrize("config", (CONFIGS[0], CONFIGS[4]), ids=str)
def test_a_split_batch_is_the_recurrence_and_rounds_like_a_whole_one(config, gates):
    dtype = launch.torch_dtype(config.dtype)
    for seed, lengths in enumerate(LENGTHS):
        x = make_inputs(
            lengths, config.num_heads, config.num_value_heads, dtype=dtype, device="cuda", seed=seed, gates=gates
        )
        want_o, want_state = chunk_reference(*x.tokens, initial_state=x.initial_state, cu_seqlens=x.cu_host)
        whole = run(config, x, None, initial=x.initial_state)
        for window in ("exact", 1e-4):
            for segment_chunks in (8, 11, 40):
                if dispatch.compiled(config).split(x.cu_host, segment_chunks, x.q.device, window) is None:
                    continue
                o, state = run(config, x, segment_chunks, window, x.initial_state)
                for got, uncut, want in ((o, whole[0], want_o[0]), (state, whole[1], want_state)):
                    error = relative_error(got, want)
                    assert error < GPU_TOLERANCE[dtype]
                    assert error < 1.25 * relative_error(uncut, want) + 2e-4, (lengths, window, segment_chunks)


def test_states_in_place_and_checkpoints_are_those_of_the_whole_batch():
    config, lengths, every = OpConfig(2, 8), (4000, 0, 64, 2500), 320
    x = make_inputs(lengths, 2, 8, device="cuda", gates="bench", seed=1)
    counts = [length // every for length in lengths]
    rows = torch.tensor([3, -1, 0, 1], dtype=torch.int32, device="cuda")
    first_rows = torch.tensor([0, *torch.tensor(counts).cumsum(0)[:-1]], dtype=torch.int32, device="cuda")
    found = []
    for segment_chunks in (None, 8, 13):
        pool = torch.full((5, 8, 128, 128), 3.0, device="cuda")
        pool[[3, 0, 1]] = x.initial_state[[0, 2, 3]]
        states = torch.full((sum(counts), 8, 128, 128), float("nan"), device="cuda")
        o, _ = run(
            config,
            x,
            segment_chunks,
            "exact",
            pool,
            state_rows=rows,
            checkpoints=Checkpoints(every, states, first_rows),
        )
        assert (pool[[2, 4]] == 3.0).all()
        found.append((o, pool, states))
    for cut in found[1:]:
        for got, want in zip(cut, found[0]):
            assert relative_error(got, want) < GPU_TOLERANCE[torch.bfloat16]


def test_a_sequence_gives_the_same_bits_alone_and_in_any_batch():
    config = OpConfig(2, 8)
    lengths = (700, 5000, 64, 3333)
    x = make_inputs(lengths, 2, 8, device="cuda", gates="bench", seed=2)
    o, state = run(config, x, 9, 1e-3, x.initial_state)
    for n, (start, end) in enumerate(zip(x.cu_host, x.cu_host[1:])):
        alone = type(x)(
            *(t[:, start:end] for t in x.tokens), x.initial_state[n : n + 1],
            torch.tensor([0, end - start], dtype=torch.int32, device="cuda"), (0, end - start), x.scale,
        )  # fmt: skip
        is_cut = dispatch.compiled(config).split(alone.cu_host, 9, x.q.device, 1e-3) is not None
        o_alone, state_alone = run(config, alone, 9 if is_cut else None, 1e-3, x.initial_state[n : n + 1])
        if is_cut:
            assert torch.equal(o[start:end], o_alone) and torch.equal(state[n : n + 1], state_alone)


def test_whole_sequences_with_the_long_ones_first_give_the_bits_of_the_batch_order():
    config = OpConfig(2, 8)
    lengths = (64, 0, 700, 1, 3000, 65, *range(100, 300, 9), 4000)
    x = make_inputs(lengths, 2, 8, device="cuda", gates="bench", seed=5)
    op = dispatch.compiled(config)
    params = op.kernels["fused_forward"].spec.schedule.params()
    schedule = (
        registry.get_template("segment_forward_sm90").default(config.problem("segment_forward")).replace(**params)
    )
    forward = op.ordered(x.cu_host, x.q.device, schedule)
    assert not forward.segments.is_cut
    tokens = [t[0] for t in x.tokens]
    more = dict(initial_state=x.initial_state, output_final_state=True)
    want = op(*tokens, x.cu_seqlens, forward=op.kernels["fused_forward"].entry, **more)
    for got, one in zip(op(*tokens, x.cu_seqlens, forward=forward, **more), want):
        assert torch.equal(got, one)


def test_a_captured_split_replays_on_new_data():
    config = OpConfig(2, 8)
    x, y = (make_inputs((5000, 900), 2, 8, device="cuda", gates="bench", seed=seed) for seed in (3, 4))
    want = [t.clone() for t in run(config, y, 8, 1e-4, y.initial_state)]
    run(config, x, 8, 1e-4, x.initial_state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(config, x, 8, 1e-4, x.initial_state)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        getattr(x, name).copy_(getattr(y, name))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("tolerance", [0.3, 0.03])
def test_windows_err_by_less_than_their_bound_on_ten_thousand_pairs(tolerance):
    """Last segments that start from their windows: the final state against that of the whole batch."""
    config, sequences, heads = OpConfig(16, 64), 40, 64
    lengths = [64 * 18] * sequences
    pairs = 0
    for seed in range(8):
        x = make_inputs(lengths, 16, heads, device="cuda", seed=seed)
        gen = torch.Generator("cuda").manual_seed(seed)
        sizes = torch.rand(sequences, 1, heads, generator=gen, device="cuda").mul(9.0).sub(7.0).exp()
        sizes[torch.rand(sizes.shape, generator=gen, device="cuda") < 0.1] = 0.0
        x.g[0] = (-sizes * torch.rand(sequences, 1152, heads, generator=gen, device="cuda")).flatten(0, 1)
        op = dispatch.compiled(config)
        split = op.split(x.cu_host, 9, x.q.device, tolerance)
        warmup = warmup_chunks_reference(x.g.cpu(), split.segments, tolerance)
        states = torch.empty(sequences * 18, heads, 128, 128, device="cuda")
        rows = torch.arange(0, sequences * 18, 18, dtype=torch.int32, device="cuda")
        _, want = run(config, x, None, initial=x.initial_state, checkpoints=Checkpoints(64, states, rows))
        _, got = run(config, x, 9, tolerance, x.initial_state)
        errors = (got - want).norm(dim=(2, 3)).cpu()
        sizes_of = want.norm(dim=(2, 3)).cpu()
        states = states.unflatten(0, (sequences, 18)).norm(dim=(3, 4)).cpu()  # after chunk c
        for n in range(sequences):
            for head in range(heads):
                count = int(warmup[2 * n + 1, head])
                if split.segments.window_holds(2 * n + 1, count):
                    before = states[n, 9 - count - 1, head]
                    assert errors[n, head] <= tolerance * before + GPU_TOLERANCE[torch.bfloat16] * sizes_of[n, head]
                    pairs += 1
    assert pairs > 10_000
