"""One contract, two implementations: the public operator on CPU tensors and on CUDA tensors.

Every case is compared with the float64 token recurrence of the very inputs the implementation saw.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from qla_jit import Workspace, chunk_gated_delta_rule, device_indices, validate
from qla_jit.chunk_form import chunk_form
from qla_jit.errors import GradientError
from qla_jit.numerics import GPU_TOLERANCE, Inputs, make_inputs, relative_error, tolerance
from qla_jit.reference import recurrent_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

#: What one rounding of o to its dtype, or of the state to bf16, may cost the CPU's fp32 arithmetic.
CPU_TOLERANCE = {BF16: 2.5e-3, FP16: 4e-4, FP32: 1e-5}


@dataclass(frozen=True)
class Key:
    """What kernels are compiled for; there are few of these on purpose."""

    dtype: torch.dtype
    head_dim_k: int
    head_dim_v: int
    num_heads: int
    num_value_heads: int
    state_dtype: torch.dtype
    state_v_first: bool

    def __str__(self) -> str:
        names = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
        layout = "vk" if self.state_v_first else "kv"
        dims = f"{self.head_dim_k}x{self.head_dim_v}-{self.num_heads}of{self.num_value_heads}"
        return f"{names[self.dtype]}-{dims}-{names[self.state_dtype]}{layout}"


KEYS = (
    Key(BF16, 128, 128, 1, 1, FP32, False),
    Key(BF16, 128, 128, 2, 4, FP32, False),
    Key(BF16, 128, 128, 1, 4, FP32, True),
    Key(BF16, 128, 128, 2, 4, BF16, False),
    Key(BF16, 64, 64, 1, 2, FP32, False),
    Key(BF16, 64, 128, 2, 2, FP32, True),
    Key(BF16, 128, 64, 1, 4, BF16, True),
    Key(FP16, 128, 128, 2, 4, FP32, False),
    Key(FP16, 64, 64, 1, 1, FP32, True),
    Key(FP16, 64, 128, 1, 2, BF16, False),
)
LENGTHS = {
    "one": (1,),
    "short": (63,),
    "chunk": (64,),
    "over": (65,),
    "ragged": (5, 130, 64, 1, 77),
    "empties": (0, 3, 0, 0, 66, 0),
    "chunks": (320,),
}
GATES = ("none", "mild", "violent")
CASES = [
    (key, name, GATES[(i + j) % 3], (i // 3 + j) % 2 == 0)
    for i, key in enumerate(KEYS)
    for j, name in enumerate(LENGTHS)
]
KEY = KEYS[1]


def inputs(key: Key, lengths, device: str, **kwargs) -> Inputs:
    return make_inputs(
        lengths, key.num_heads, key.num_value_heads, key.head_dim_k, key.head_dim_v, key.dtype, device, **kwargs
    )


def stored_state(key: Key, x: Inputs) -> torch.Tensor:
    """The initial state as the key stores it."""
    state = x.initial_state.mT.contiguous() if key.state_v_first else x.initial_state
    return state.to(key.state_dtype)


def run(key: Key, x: Inputs, initial=None, **kwargs):
    state_dtype = None if key.state_dtype == FP32 else key.state_dtype
    given = dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host) | kwargs
    return chunk_gated_delta_rule(
        *x.tokens, initial_state=initial, output_final_state=True, state_v_first=key.state_v_first,
        state_dtype=state_dtype, **given,
    )  # fmt: skip


def assert_contract(key: Key, x: Inputs, got, initial=None, hard=False):
    """hard: inputs on which every 16-bit computation loses digits, so that a card is held to a 16-bit peer instead."""
    o, state = got
    want_o, want_state = recurrent_reference(
        *x.tokens, initial_state=initial, cu_seqlens=x.cu_host, state_v_first=key.state_v_first
    )
    assert o.dtype == key.dtype and state.dtype == key.state_dtype and o.shape == x.v.shape
    limits = [CPU_TOLERANCE[key.dtype], CPU_TOLERANCE[key.state_dtype]]
    if o.is_cuda:
        limits = [GPU_TOLERANCE[key.dtype], GPU_TOLERANCE[key.dtype] + CPU_TOLERANCE[key.state_dtype]]
        if hard:
            peer = chunk_form(
                *x.tokens, initial_state=initial, cu_seqlens=x.cu_host, state_v_first=key.state_v_first,
                operand_dtype=key.dtype,
            )  # fmt: skip
            limits = [tolerance(p, w, key.dtype) for p, w in zip(peer, (want_o, want_state))]
    errors = relative_error(o, want_o), relative_error(state, want_state)
    assert errors[0] < limits[0] and errors[1] < limits[1], f"(o, state) errors {errors}, limits {limits}"


def test_cases_cover_every_pair():
    for first, second in itertools.combinations(range(4), 2):
        axes = (KEYS, tuple(LENGTHS), GATES, (False, True))
        seen = {(case[first], case[second]) for case in CASES}
        assert seen == set(itertools.product(axes[first], axes[second]))
    assert len(KEYS) == len(set(KEYS)) <= 12


@pytest.mark.parametrize(
    ("key", "name", "gates", "has_initial"),
    CASES,
    ids=[f"{key}-{name}-{gates}-{'state' if s else 'zero'}" for key, name, gates, s in CASES],
)
def test_matches_the_token_recurrence(device, key, name, gates, has_initial):
    x = inputs(key, LENGTHS[name], device, gates=gates)
    initial = stored_state(key, x) if has_initial else None
    assert_contract(key, x, run(key, x, initial), initial)


@pytest.mark.parametrize(("correlation", "beta"), [(0.9, None), (0.0, 0.0), (0.5, 1.0)])
def test_hard_keys_and_extreme_betas(device, correlation, beta):
    x = inputs(KEY, (200,), device, key_correlation=correlation, beta=beta)
    initial = stored_state(KEY, x)
    assert_contract(KEY, x, run(KEY, x, initial), initial, hard=True)


def test_nothing_in_nothing_out(device):
    """β = 0 and no initial state: exactly zero, not almost."""
    x = inputs(KEY, (70, 5), device, beta=0.0)
    o, state = run(KEY, x)
    assert not o.any() and not state.any()


def test_a_narrow_initial_state_is_widened(device):
    x = inputs(KEY, (70, 5), device)
    for dtype in (BF16, FP16):
        initial = x.initial_state.to(dtype)
        assert_contract(KEY, x, run(KEY, x, initial), initial)


def test_a_batch_is_its_sequences_laid_end_to_end(device):
    x = inputs(KEY, (70, 70, 70), device)
    want_o, want_state = run(KEY, x, x.initial_state)
    rows = [t.reshape(3, 70, *t.shape[2:]) for t in x.tokens]
    o, state = chunk_gated_delta_rule(*rows, initial_state=x.initial_state, output_final_state=True)
    assert torch.equal(o.reshape(want_o.shape), want_o) and torch.equal(state, want_state)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("with_host", [False, True])
def test_every_way_to_pass_lengths_gives_the_same_bits(device, dtype, with_host):
    x = inputs(KEY, LENGTHS["ragged"], device)
    want_o, want_state = run(KEY, x)
    host = torch.tensor(x.cu_host) if with_host else None
    o, state = run(KEY, x, cu_seqlens=x.cu_seqlens.to(dtype), cu_seqlens_cpu=host)
    assert torch.equal(o, want_o) and torch.equal(state, want_state)


def test_gates_and_betas_of_any_dtype_and_stride(device):
    """Models slice them out of one projection."""
    x = inputs(KEY, LENGTHS["ragged"], device)
    both = torch.stack([x.g, x.beta], -1)
    want_o, want_state = run(KEY, x)
    o, state = run(KEY, replace(x, g=both[..., 0], beta=both[..., 1]))
    assert torch.equal(o, want_o) and torch.equal(state, want_state)
    narrow = replace(x, g=x.g.to(BF16), beta=x.beta.to(FP16))
    assert_contract(KEY, narrow, run(KEY, narrow))


def test_out_receives_o(device):
    x = inputs(KEY, LENGTHS["ragged"], device)
    out = torch.full_like(x.v, float("nan"))
    o, _ = run(KEY, x, out=out)
    assert o.data_ptr() == out.data_ptr() and torch.equal(out, run(KEY, x)[0])


def test_final_state_out_receives_the_state_and_may_be_the_initial_one(device):
    x = inputs(KEY, LENGTHS["ragged"], device)
    want_o, want_state = run(KEY, x, x.initial_state)
    place = torch.full_like(x.initial_state, float("nan"))
    o, state = run(KEY, x, x.initial_state, final_state_out=place)
    assert state is place and torch.equal(o, want_o) and torch.equal(state, want_state)
    place = x.initial_state.clone()
    o, state = run(KEY, x, place, final_state_out=place, workspace=Workspace())
    assert state is place and torch.equal(o, want_o) and torch.equal(state, want_state)


POOL_KEYS = (KEYS[1], KEYS[2], KEYS[3], KEYS[6], KEYS[9])


@pytest.mark.parametrize("key", POOL_KEYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_pool_is_read_and_written_at_the_rows_of_the_sequences(device, key, dtype):
    """Rows in any order; a negative one starts from zero and writes nothing; other rows keep their bits."""
    x = inputs(key, (70, 5, 0, 130, 64, 0), device)
    rows = torch.tensor([6, -1, 2, 0, -7, -1], dtype=dtype, device=device)
    states = stored_state(key, x)
    states[rows < 0] = 0
    want_o, want_state = run(key, x, states)
    pool = torch.full((8, *states.shape[1:]), float("nan"), dtype=states.dtype, device=device)
    pool[rows[rows >= 0].long()] = states[rows >= 0]
    read_only = pool.clone()
    o, none = chunk_gated_delta_rule(
        *x.tokens, initial_state=read_only, state_indices=rows, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host,
        state_v_first=key.state_v_first,
    )  # fmt: skip
    assert none is None and torch.equal(o, want_o) and torch.equal(read_only.isnan(), pool.isnan())
    assert torch.equal(read_only.nan_to_num(), pool.nan_to_num())
    o, state = run(key, x, pool, state_indices=rows)
    assert state is pool and torch.equal(o, want_o)
    assert torch.equal(pool[[6, 2, 0]], want_state[[0, 2, 3]])
    assert pool[[1, 3, 4, 5, 7]].isnan().all()


def test_a_pool_without_tokens_is_left_as_it_is(device):
    x = inputs(KEY, (0, 0), device)
    pool = torch.randn(3, *x.initial_state.shape[1:], device=device)
    before = pool.clone()
    o, state = run(KEY, x, pool, state_indices=torch.tensor([2, -1], device=device))
    assert o.shape == x.v.shape and state is pool and torch.equal(pool, before)


@pytest.mark.parametrize("key", POOL_KEYS, ids=str)
@pytest.mark.parametrize("every", [64, 128, 1024])
def test_checkpoints_are_the_states_after_whole_intervals(device, key, every):
    lengths = (70, 0, 330, 63, 64, 256, 1)
    x = inputs(key, lengths, device)
    initial = stored_state(key, x)
    o, state, checkpoints = run(key, x, initial, checkpoint_every=every)
    want_o, want_state = run(key, x, initial)
    assert torch.equal(o, want_o) and torch.equal(state, want_state)
    want = []
    for n, length in enumerate(lengths):
        for end in range(every, length + 1, every):
            cut = [t[:, x.cu_host[n] : x.cu_host[n] + end] for t in x.tokens]
            want.append(recurrent_reference(*cut, initial_state=initial[n : n + 1], state_v_first=key.state_v_first)[1])
    assert checkpoints.shape == (len(want), *state.shape[1:]) and checkpoints.dtype == key.state_dtype
    if want:
        limit = CPU_TOLERANCE[key.state_dtype] + (GPU_TOLERANCE[key.dtype] if o.is_cuda else 0)
        assert relative_error(checkpoints, torch.cat(want)) < limit


def test_checkpoints_of_a_dense_batch_need_no_lengths(device):
    x = inputs(KEY, (130, 130), device)
    rows = [t.reshape(2, 130, *t.shape[2:]) for t in x.tokens]
    *_, want = run(KEY, x, checkpoint_every=64)
    o, state, checkpoints = chunk_gated_delta_rule(*rows, checkpoint_every=64)
    assert state is None and checkpoints.shape[0] == 4 and torch.equal(checkpoints, want)


def test_no_tokens(device):
    x = inputs(KEY, (0, 0), device)
    o, state = run(KEY, x, x.initial_state)
    assert o.shape == x.v.shape and torch.equal(state, x.initial_state)
    assert state.data_ptr() != x.initial_state.data_ptr()


def test_padding_rows_are_zero(device):
    x = inputs(KEY, (70, 5, 30), device)
    cu = x.cu_host[:-1]
    o, state = run(KEY, x, cu_seqlens=x.cu_seqlens[:-1], cu_seqlens_cpu=cu)
    want_o, want_state = recurrent_reference(*x.tokens, cu_seqlens=cu)
    limit = (GPU_TOLERANCE if o.is_cuda else CPU_TOLERANCE)[KEY.dtype]
    assert not o[:, cu[-1] :].any()
    assert relative_error(o, want_o) < limit and relative_error(state, want_state) < limit


@pytest.mark.parametrize("sequence", [0, 1, 2, 3])
def test_nan_stays_in_its_sequence(device, sequence):
    x = inputs(KEY, (70, 30, 65, 3), device)
    want_o, want_state = run(KEY, x, x.initial_state)
    rows = torch.zeros(x.v.shape[1], dtype=torch.bool, device=device)
    rows[x.cu_host[sequence] : x.cu_host[sequence + 1]] = True
    for t in x.tokens:
        t[:, rows] = float("nan")
    o, state = run(KEY, x, x.initial_state)
    others = [n for n in range(4) if n != sequence]
    assert torch.equal(o[:, ~rows], want_o[:, ~rows]) and torch.equal(state[others], want_state[others])


def test_a_nan_state_stays_in_its_sequence(device):
    x = inputs(KEY, (70, 30, 65), device)
    want_o, want_state = run(KEY, x, x.initial_state)
    x.initial_state[1] = float("nan")
    o, state = run(KEY, x, x.initial_state)
    assert torch.equal(o[:, :70], want_o[:, :70]) and torch.equal(o[:, 100:], want_o[:, 100:])
    assert torch.equal(state[[0, 2]], want_state[[0, 2]]) and state[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ragged", "chunks"])
def test_200_runs_give_the_same_bits(name):
    x = inputs(KEY, LENGTHS[name] * 8, "cuda")
    want_o, want_state = (t.clone() for t in run(KEY, x, x.initial_state))
    for _ in range(200):
        o, state = run(KEY, x, x.initial_state)
        assert torch.equal(o, want_o) and torch.equal(state, want_state)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ["dense", "int32", "int64"])
def test_a_graph_owns_what_it_reads(lengths):
    """Pool, checkpoints and workspace in a graph, on new data, after everything that is cached has been evicted."""
    x, later = (inputs(KEY, (130, 130, 130), "cuda", seed=seed) for seed in (1, 2))
    rows, pool = torch.tensor([2, -1, 0], device="cuda"), x.initial_state.clone()
    given = dict(initial_state=pool, state_indices=rows, output_final_state=True, checkpoint_every=64)
    if lengths == "dense":
        tokens = [t.view(3, 130, *t.shape[2:]) for t in x.tokens]
    else:
        tokens = list(x.tokens)
        given |= dict(cu_seqlens=x.cu_seqlens.to(getattr(torch, lengths)), cu_seqlens_cpu=x.cu_host)

    workspace, side = Workspace(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chunk_gated_delta_rule(*tokens, **given, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chunk_gated_delta_rule(*tokens, **given, workspace=workspace)

    for t, new in zip((*x.tokens, pool), (*later.tokens, later.initial_state)):
        t.copy_(new)
    want = chunk_gated_delta_rule(*tokens, **given | dict(initial_state=pool.clone()))
    device_indices._kept.clear()
    validate._calls.clear()
    for _ in range(100):
        torch.full((64,), -1, dtype=torch.int32, device="cuda")
    for _ in range(2):
        pool.copy_(later.initial_state)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.gpu
def test_streams_do_not_read_what_another_one_has_yet_to_write():
    x = inputs(KEY, (70, 70, 70), "cuda")
    want = run(KEY, x, x.initial_state)
    device_indices._kept.clear()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)  # a tenth of a second, before anything that this stream makes
        run(KEY, x, x.initial_state, cu_seqlens=x.cu_seqlens.long())
    with torch.cuda.stream(second):
        got = run(KEY, x, x.initial_state, cu_seqlens=x.cu_seqlens.long())
    second.synchronize()
    assert not first.query()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("backward", ["kernel", "chunk_form"])
def test_gradients_on_a_card_are_those_of_the_cpu(backward):
    grads = {}
    for place in ("cuda", "cpu"):
        x = inputs(KEY, (70, 5), place)
        heads = KEY.num_value_heads
        a_log = torch.linspace(-2, 0.5, heads, device=place)
        leaves = [t.requires_grad_() for t in (*x.tokens, x.initial_state, a_log)]
        o, state = chunk_gated_delta_rule(
            *leaves[:5], initial_state=leaves[5], output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, A_log=leaves[6], cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=x.cu_host,
            backward=backward,
        )  # fmt: skip
        grads[place] = torch.autograd.grad(o.float().square().sum() + state.square().sum(), leaves)
    for got, want in zip(grads["cuda"], grads["cpu"]):
        assert got.dtype == want.dtype and relative_error(got.cpu(), want) < 3e-2


@pytest.mark.gpu
def test_gradients_that_no_kernel_computes_are_refused():
    x = make_inputs((70,), 2, 4, 128, 256, device="cuda")
    x.v.requires_grad_()
    with pytest.raises(GradientError, match='backward="chunk_form"'):
        chunk_gated_delta_rule(*x.tokens)
    x = inputs(KEY, (70,), "cuda")
    x.v.requires_grad_()
    o, _ = chunk_gated_delta_rule(*x.tokens)
    (once,) = torch.autograd.grad(o.float().square().sum(), x.v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.float().sum().backward()
