"""What kernels are given on a card in place of views: addresses of the caller's tensors, shapes of their own.

No card is needed: handles point anywhere, and the launches record what they were given.
"""

import ctypes
import threading
import time

import pretended_card
import pytest
import torch

from qla_jit import Workspace, backward, chunk_gated_delta_rule, dispatch, handles, launch, op, validate, workspace
from qla_jit.config import BACKWARD, SPLIT_KERNELS
from qla_jit.handles import Block, PerThread, TensorHandle, handle
from qla_jit.numerics import make_inputs

CUDA = torch.device("cuda", 1)


def content(argument: ctypes.c_void_p) -> dict:
    """The fields of a handle's struct, as the host code of a kernel reads them."""
    x = handles._DLTensor.from_address(argument.value)
    shape = tuple(x.shape[: x.ndim])
    assert x.byte_offset == 0 and x.lanes == 1
    assert tuple(x.strides[: x.ndim]) == torch.empty(shape, device="meta").stride()
    dtypes = {(2, 32): torch.float32, (2, 16): torch.float16, (4, 16): torch.bfloat16, (0, 32): torch.int32}
    return {
        "address": x.data,
        "shape": shape,
        "dtype": dtypes[x.kind, x.bits],
        "device": (x.device_type, x.device_index),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_a_handle_is_a_tensor_of_its_shape_at_the_address_it_was_given(dtype):
    place = TensorHandle((6, 4), dtype, CUDA)
    x, y = torch.zeros(2, 3, 4, dtype=dtype), torch.zeros(24, dtype=dtype)
    for tensor in (x, y, x):
        expected = {"address": tensor.data_ptr(), "shape": (6, 4), "dtype": dtype, "device": (2, 1)}
        assert content(place(tensor)) == expected
    assert content(place.at(4096))["address"] == 4096


def test_elsewhere_a_handle_is_a_view():
    x = torch.arange(6.0).view(1, 2, 3)
    seen = handle((2, 3), torch.float32, x.device)(x)
    assert seen.shape == (2, 3) and seen.data_ptr() == x.data_ptr()


LAYOUT = (((3, 5), torch.bfloat16), ((), torch.float32), ((2, 64), torch.int32))


def test_the_tensors_of_a_block_lie_apart_within_it(monkeypatch):
    monkeypatch.setattr(handles, "_has_handles", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    block = Block(LAYOUT, torch.device("cpu"))
    memory, arguments = block.allocate()
    assert memory.numel() == workspace.num_bytes(LAYOUT)
    found = [content(argument) for argument in arguments]
    assert [(x["shape"], x["dtype"]) for x in found] == list(LAYOUT)
    starts = [x["address"] - memory.data_ptr() for x in found]
    assert starts == [0, 256, 512] == workspace.offsets(LAYOUT)


def test_a_block_elsewhere_is_carved():
    memory, parts = Block(LAYOUT, torch.device("cpu")).allocate()
    assert [(tuple(x.shape), x.dtype) for x in parts] == list(LAYOUT)
    assert [x.data_ptr() - memory.data_ptr() for x in parts] == workspace.offsets(LAYOUT)


def test_each_thread_has_its_own():
    made = []
    place = PerThread(lambda: made.append(threading.get_ident()) or made[-1])
    assert place.value == place.value == threading.get_ident()
    other = threading.Thread(target=lambda: made.append(place.value))
    other.start()
    other.join()
    assert made[1] == made[2] != made[0]


@pytest.fixture
def launches(monkeypatch):
    """(kernel, {argument: what it was given}) per launch of a pretended card, whose tensors are on the CPU."""
    seen = []

    def load(artifact):
        name = artifact.spec.problem.kernel

        def entry(*given):
            read = lambda x: content(x) if isinstance(x, ctypes.c_void_p) else x
            seen.append((name, {key: read(x) for key, x in zip(launch.ARGUMENTS[name], given, strict=True)}))

        return entry

    pretended_card.pretend(monkeypatch, load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(handles, "_has_handles", lambda device: True)
    yield seen
    pretended_card.forget_operators()


def check(launches, tokens: dict, dims: dict):
    """Every launch has a tensor of torch's, which tells the stream, and the caller's tensors at their addresses."""
    for kernel, given in launches:
        assert any(isinstance(x, torch.Tensor) for x in given.values()), kernel
        for name in set(tokens) & set(given):
            x = given[name]
            assert x["address"] == tokens[name].data_ptr(), (kernel, name)
            assert x["shape"] == dims[name] and x["dtype"] == tokens[name].dtype, (kernel, name)


def inputs(lengths, heads, value_heads, batch=None):
    x = make_inputs(lengths, heads, value_heads, 128, 128)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), x.tokens))
    if batch is not None:
        tokens = {name: t.view(batch, -1, *t.shape[2:]) for name, t in tokens.items()}
    total = sum(lengths)
    rows = {"q": heads, "k": heads, "v": value_heads}
    dims = {name: (total, n, 128) for name, n in rows.items()} | {name: (total, value_heads) for name in ("g", "beta")}
    return x, tokens, dims


@pytest.mark.parametrize(("lengths", "batch"), [((70, 5, 130), None), ((70, 70), 2)])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_forward_points_at_the_callers_tensors(launches, monkeypatch, lengths, batch, keeps):
    if not keeps:
        monkeypatch.setattr(op, "MAX_KEPT_BYTES", 0)
    x, tokens, dims = inputs(lengths, 2, 4, batch)
    ragged = {} if batch else dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=list(x.cu_host))
    for workspace_ in (None, Workspace()):
        o, _ = chunk_gated_delta_rule(**tokens, **ragged, workspace=workspace_)
        check(launches[-2:], tokens | {"o": o}, dims | {"o": dims["v"]})
    assert [name for name, _ in launches] == ["kkt_inverse", "fused_forward"] * 2
    for (_, inverse), (_, forward) in zip(launches[::2], launches[1::2]):
        for name in ("a", "log_gates"):
            assert inverse[name] is forward[name] or inverse[name] == forward[name]


def test_an_activation_points_at_them_too_and_later_kernels_at_what_it_wrote(launches, monkeypatch):
    monkeypatch.setattr(op, "MAX_KEPT_BYTES", 0)
    _, tokens, dims = inputs((70, 5, 130), 2, 4)
    tokens |= {name: tokens[name].bfloat16() for name in ("g", "beta")}
    o, _ = chunk_gated_delta_rule(**tokens, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    (_, first), (_, inverse), (_, forward) = launches
    check(launches[:1], tokens, dims)
    check(launches[2:], {"v": tokens["v"], "o": o}, dims | {"o": dims["v"]})
    assert forward["q"] == first["q_out"] and forward["k"] == inverse["k"] == first["k_out"]
    assert inverse["g"] == first["g_out"] and inverse["beta"] == first["beta_out"]
    assert first["g_out"]["dtype"] == torch.float32 and first["q_out"]["dtype"] == torch.bfloat16


@pytest.mark.parametrize(("lengths", "is_split"), [((8192, 900), True), ((300, 70), False)])
def test_forward_and_backward_of_a_step_point_at_them(launches, lengths, is_split):
    x, tokens, dims = inputs(lengths, 2, 8)
    leaves = {name: t.requires_grad_() for name, t in tokens.items()}
    state = x.initial_state.requires_grad_()
    o, final = chunk_gated_delta_rule(
        **leaves, initial_state=state, output_final_state=True, cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=list(x.cu_host)
    )
    check(launches, leaves, dims)
    launches.clear()
    do, dfinal = torch.ones_like(o), torch.ones_like(final)
    found = torch.autograd.grad([o, final], [*leaves.values(), state], [do, dfinal])
    names = [name for name, _ in launches]
    assert names == [*BACKWARD.before, *(BACKWARD.split if is_split else BACKWARD.whole), *BACKWARD.after]
    got = dict(zip((f"d{name}" for name in leaves), found))
    check(launches, leaves | got | {"do": do}, dims | {f"d{name}": dims[name] for name in leaves} | {"do": dims["v"]})
    of_kernel = dict(launches)
    for name in ("states", "effects", "dstates", "dv"):
        users = [given[name] for kernel, given in launches if name in given]
        assert len(users) >= 2 and all(user == users[0] for user in users), name
    assert of_kernel["backward_grad"]["states"]["address"] != of_kernel["backward_grad"]["dstates"]["address"]
    assert found[5].shape == state.shape


def test_a_split_forward_has_a_tensor_of_torchs_in_every_launch(launches):
    x, tokens, dims = inputs((8192,), 2, 8)
    o, _ = chunk_gated_delta_rule(**tokens)
    assert [name for name, _ in launches] == ["kkt_inverse", *SPLIT_KERNELS]
    check(launches, tokens | {"o": o}, dims | {"o": dims["v"]})


def test_the_backward_by_itself_takes_tokens_laid_end_to_end(launches):
    x, tokens, dims = inputs((300, 70), 2, 8)
    compiled = backward.compile_backward(dispatch.config_of(validate.validate(*x.tokens)))
    flat = {name: t[0] for name, t in tokens.items()}
    found = compiled(*flat.values(), x.cu_seqlens, x.scale, flat["v"])
    check(launches, flat, dims)
    assert [g.shape for g in found[:5]] == [t.shape for t in flat.values()]


def test_threads_that_share_an_operator_launch_on_their_own_tensors(launches, monkeypatch):
    """Launches let other threads run: what one thread set must not be what another's kernel reads."""
    told, barrier = [], threading.Barrier(4)

    def load(artifact):
        name = artifact.spec.problem.kernel

        def entry(*given):
            time.sleep(0.002)  # every thread has set its addresses by now
            read = dict(zip(launch.ARGUMENTS[name], given, strict=True))
            told.append((threading.get_ident(), content(read["k"])["address"]))

        return entry

    monkeypatch.setattr(op.runtime, "load", load)
    wanted = []

    def run():
        _, tokens, _ = inputs((70, 5, 130), 2, 4)
        tokens = {name: x.clone() for name, x in tokens.items()}
        wanted.append((threading.get_ident(), tokens["k"].data_ptr()))
        barrier.wait()
        for _ in range(5):
            chunk_gated_delta_rule(**tokens)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 4 * 5 * 2 and set(told) == set(wanted)
