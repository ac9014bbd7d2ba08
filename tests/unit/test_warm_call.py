"""Repeated calls on a pretended card: CPU tensors take the way of CUDA tensors, to kernels that record arguments."""

import dataclasses

import pretended_card
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qla_jit import (
    Workspace,
    chunk_gated_delta_rule,
    device_indices,
    dispatch,
    launch,
    library,
    op,
    validate,
    workspace,
)
from qla_jit.config import SPLIT_KERNELS
from qla_jit.errors import InputError, UnsupportedError
from qla_jit.numerics import make_inputs

H, HV, K, V = 2, 4, 64, 128


@pytest.fixture
def launches(monkeypatch):
    """What each kernel was given, by name of the kernel and the argument."""
    seen = []

    def load(artifact):
        name = artifact.spec.problem.kernel
        return lambda *args: seen.append((name, dict(zip(launch.ARGUMENTS[name], args, strict=True))))

    pretended_card.pretend(monkeypatch, load)
    yield seen
    pretended_card.forget_operators()


def fused(launches) -> dict:
    return [given for name, given in launches if name == "fused_forward"][-1]


def call(lengths=(70, 5, 130), batch=None, **kwargs):
    """Arguments of a ragged call, or of a dense one of ``batch`` sequences of 70 tokens."""
    x = make_inputs(lengths if batch is None else (70,) * batch, H, HV, K, V)
    tokens = [t if batch is None else t.view(batch, 70, *t.shape[2:]) for t in x.tokens]
    given = dict(zip(("q", "k", "v", "g", "beta"), tokens)) | dict(output_final_state=True)
    if batch is None:
        given |= dict(cu_seqlens=x.cu_seqlens, cu_seqlens_cpu=list(x.cu_host))
    return given | kwargs


def count(monkeypatch, module, name):
    """How often a function ran."""
    calls, real = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(name) or real(*args, **kwargs))
    return calls


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_only_the_first_call_of_a_signature_pays_for_checks_and_choices(launches, monkeypatch, batch):
    checks = count(monkeypatch, validate, "_check_all")
    configs = count(monkeypatch, dispatch, "config_of")
    choices = count(monkeypatch, op.CompiledOp, "choose")
    for _ in range(3):
        chunk_gated_delta_rule(**call(batch=batch))
    assert (len(checks), len(configs), len(choices)) == (1, 1, 1)
    assert len(launches) == 6
    chunk_gated_delta_rule(**call((70, 6, 129)))
    assert len(checks) == 2


def test_a_warmed_signature_lets_no_malformed_call_through(launches):
    """Every flag and tensor that the checks refuse is refused after an equal-looking good call, too."""
    every, pool = 64, torch.zeros(5, HV, K, V)
    good = call(
        scale=1.0, auto_cp=True, checkpoint_every=every, initial_state=pool, state_indices=torch.tensor([0, 1, 4])
    )
    chunk_gated_delta_rule(**good)
    launches.clear()
    bad = {
        "auto_cp": 1,
        "checkpoint_every": 64.0,
        "scale": torch.tensor(1.0),
        "q": good["q"][..., :32],
        "k": good["k"].float(),
        "g": good["g"][:, :-1],
        "beta": None,
        "initial_state": pool.mT,
        "state_indices": torch.tensor([0, 1]),
        "state_dtype": torch.bfloat16,
        "final_state_out": torch.empty(3, HV, K, V),
        "out": torch.empty_like(good["v"], dtype=torch.float32),
        "cu_seqlens_cpu": [0, 70, 76, 205],
        "workspace": "mine",
    }
    for name, value in bad.items():
        for _ in range(2):
            with pytest.raises((InputError, UnsupportedError)):
                chunk_gated_delta_rule(**good | {name: value})
        chunk_gated_delta_rule(**good)
    assert len(launches) == 2 * len(bad)


class Allocations(TorchDispatchMode):
    """Names of the operations that make memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [None, 3])
def test_a_warmed_call_makes_a_view_per_tensor_and_its_results_only(launches, batch):
    given = call(batch=batch)
    chunk_gated_delta_rule(**given)
    with Operations() as seen:
        chunk_gated_delta_rule(**given)
    made = ["aten.empty_like.default", "aten.new_empty.default"]  # o and the final state
    assert sorted(seen.names) == [*made, *["aten.view.default"] * 6]


def test_small_intermediates_are_those_of_the_last_call_and_large_ones_are_not_kept(launches, monkeypatch):
    def taken() -> tuple[torch.Tensor, torch.Tensor]:
        chunk_gated_delta_rule(**call())
        return tuple(fused(launches)[name] for name in ("a", "log_gates"))

    assert all(x is y for x, y in zip(taken(), taken(), strict=True))
    bytes_taken = next(iter(workspace._kept.workspaces.values())).nbytes
    for limit, is_kept in ((bytes_taken, True), (bytes_taken - 1, False)):
        monkeypatch.setattr(op, "MAX_KEPT_BYTES", limit)
        monkeypatch.setattr(validate, "_calls", {})
        dispatch.compiled.cache_clear()
        assert all((x is y) == is_kept for x, y in zip(taken(), taken(), strict=True))


def test_a_graph_has_intermediates_of_its_own(launches, monkeypatch):
    chunk_gated_delta_rule(**call())
    kept = fused(launches)["a"]
    monkeypatch.setattr(device_indices, "is_capturing", lambda device: True)
    chunk_gated_delta_rule(**call())
    captured = fused(launches)["a"]
    assert captured.shape == kept.shape and captured.data_ptr() != kept.data_ptr()


def test_a_node_of_a_traced_graph_leaves_no_intermediates(launches):
    """PyTorch may run it in a memory pool of its graphs, and refuses what is left there."""
    x = call(batch=1)
    tokens = [x[name] for name in ("q", "k", "v", "g", "beta")]
    library.forward(*tokens, None, None, None, None, True, False, None, True, 0.0, None)
    assert len(launches) == 2 and not workspace._kept.workspaces
    chunk_gated_delta_rule(**x)
    assert workspace._kept.workspaces


def test_a_call_whose_window_was_replaced_chooses_for_itself(launches, monkeypatch):
    windows, real = [], op.CompiledOp.choose
    monkeypatch.setattr(op.CompiledOp, "choose", lambda self, *args: windows.append(args[3]) or real(self, *args))
    chunk_gated_delta_rule(**call(window=1e-3))
    (known,) = validate._calls.values()
    for window in (1e-3, "exact", "exact"):
        dispatch._prepared(dataclasses.replace(known, window=window), None, None)
    assert windows == [1e-3, "exact"]


def test_a_split_is_not_written_over_its_inputs(launches):
    """Its states pass through rows of o before the last token of v is read."""
    x = make_inputs((8192,), 2, 8, 128, 128)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), x.tokens))
    whole, split = ["kkt_inverse", "fused_forward"], ["kkt_inverse", *SPLIT_KERNELS]
    for out, wanted in ((None, split), (x.v, whole), (torch.empty_like(x.v), split), (x.v, whole)):
        launches.clear()
        o, _ = chunk_gated_delta_rule(**tokens, out=out)
        assert [name for name, _ in launches] == wanted
        assert out is None or o is out


def test_with_workspace_and_outputs_given_nothing_is_allocated(launches):
    given = call(initial_state=torch.zeros(3, HV, K, V))
    given |= dict(out=torch.empty_like(given["v"]), final_state_out=torch.empty(3, HV, K, V), workspace=Workspace())
    chunk_gated_delta_rule(**given)
    before = fused(launches)
    with Allocations() as seen:
        o, final = chunk_gated_delta_rule(**given)
    assert not seen.names
    assert o is given["out"] and final is given["final_state_out"] is fused(launches)["final"]
    for name in ("a", "log_gates"):
        assert fused(launches)[name] is before[name]
    with Allocations() as seen:
        chunk_gated_delta_rule(**call(initial_state=torch.zeros(3, HV, K, V)) | dict(workspace=given["workspace"]))
    assert [name for name in seen.names if "empty" in name] == ["aten.empty_like.default"] * 2  # o and the final state


@pytest.mark.parametrize("asked", [False, True])
def test_activations_are_one_launch_and_their_results_are_in_the_workspace(launches, asked):
    """Asked for or not, 16-bit gates are made fp32 by the kernel; no PyTorch function runs."""
    given = call(initial_state=torch.zeros(3, HV, K, V))
    given |= dict(out=torch.empty_like(given["v"]), final_state_out=torch.empty(3, HV, K, V), workspace=Workspace())
    given |= {name: given[name].bfloat16() for name in ("q", "k", "v", "g", "beta", "out")}
    parameters = dict(A_log=torch.zeros(HV), dt_bias=torch.zeros(HV, dtype=torch.bfloat16))
    names = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel")
    given |= dict.fromkeys(names, True) | parameters if asked else {}
    chunk_gated_delta_rule(**given)
    launches.clear()
    with Allocations() as seen:
        chunk_gated_delta_rule(**given)
    assert not seen.names
    assert [name for name, _ in launches] == ["input_activation", "kkt_inverse", "fused_forward"]
    first, inverse, forward = (arguments for _, arguments in launches)
    assert [first[f"{name}_mode"] for name in ("qk", "g", "beta")] == ([1, 2, 2] if asked else [0, 1, 1])
    assert inverse["g"] is first["g_out"] and inverse["beta"] is first["beta_out"]
    assert forward["q"] is first["q_out"] and forward["k"] is first["k_out"]
    assert (first["q_out"] is first["q"]) == (not asked)
    assert first["g_out"].dtype == first["beta_out"].dtype == torch.float32
    if asked:
        assert first["a_log"] is parameters["A_log"] and first["dt_bias_half"] is parameters["dt_bias"]


def test_final_states_may_be_written_over_the_initial_ones(launches):
    state = torch.zeros(3, HV, K, V)
    _, final = chunk_gated_delta_rule(**call(initial_state=state, final_state_out=state))
    assert final is state is fused(launches)["initial"] is fused(launches)["final"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("output", [True, False])
def test_a_pool_goes_to_the_kernel_with_its_rows(launches, dtype, output):
    pool, rows = torch.zeros(7, HV, K, V, dtype=torch.bfloat16), torch.tensor([5, -1, 0], dtype=dtype)
    given = call(initial_state=pool, state_indices=rows, output_final_state=output)
    _, final = chunk_gated_delta_rule(**given)
    seen = fused(launches)
    assert seen["initial"] is pool and seen["has_initial"] == 1 and seen["has_final"] == int(output)
    assert seen["state_rows"].dtype == torch.int32 and seen["state_rows"].tolist() == [5, -1, 0]
    assert (final is pool is seen["final"]) if output else final is None


def test_without_a_pool_states_lie_in_the_order_of_the_sequences(launches):
    _, final = chunk_gated_delta_rule(**call())
    assert fused(launches)["state_rows"].tolist() == [0, 1, 2] and final.shape == (3, HV, K, V)


def test_checkpoints_have_a_row_per_whole_interval(launches):
    o, final, checkpoints = chunk_gated_delta_rule(**call((70, 300, 5, 128), checkpoint_every=128))
    seen = fused(launches)
    assert checkpoints is seen["checkpoints"] and checkpoints.shape == (3, HV, K, V)
    assert seen["checkpoint_rows"].tolist() == [0, 0, 2, 2] and seen["chunks_per_checkpoint"] == 2
    *_, checkpoints = chunk_gated_delta_rule(**call((70, 300), checkpoint_every=512, state_v_first=True))
    assert checkpoints.shape == (0, HV, V, K) and fused(launches)["chunks_per_checkpoint"] == 0
    *_, checkpoints = chunk_gated_delta_rule(**call(batch=3, checkpoint_every=64, state_dtype=torch.bfloat16))
    assert checkpoints.shape == (3, HV, K, V) and checkpoints.dtype == torch.bfloat16
    assert fused(launches)["checkpoint_rows"].tolist() == [0, 1, 2]
