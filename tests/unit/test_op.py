"""`compile` and `CompiledOp` without a card: kernels chosen, strict mode, order and arguments of launches."""

from types import SimpleNamespace

import pytest
import torch

from qla_jit import Workspace, launch, op, workspace_bytes
from qla_jit.activation import Activation
from qla_jit.config import FORWARD_KERNELS, OpConfig
from qla_jit.db import BestRow, Database, Environment
from qla_jit.errors import KernelMissingError
from qla_jit.registry import digest, select

CONFIG = OpConfig(2, 4, 64, 128)


@pytest.fixture
def db(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as database:
        yield database


@pytest.fixture
def launches(monkeypatch):
    """Kernels that record their arguments instead of running."""
    seen = []

    def ensure(spec, store):
        return SimpleNamespace(spec=spec, report={"registers": 1})

    def load(artifact):
        return lambda *args: seen.append((artifact.spec.problem.kernel, args))

    monkeypatch.setattr(op.build, "ensure", ensure)
    monkeypatch.setattr(op.runtime, "load", load)
    return seen


def tokens(total, config=CONFIG):
    h, hv, dtype = config.num_heads, config.num_value_heads, torch.bfloat16
    q, k = (torch.randn(total, h, config.head_dim_k).to(dtype) for _ in range(2))
    v = torch.randn(total, hv, config.head_dim_v).to(dtype)
    return q, k, v, torch.zeros(total, hv), torch.ones(total, hv)


def test_kernels_run_in_the_order_of_their_data(db, launches):
    compiled = op.compile(CONFIG, db=db)
    compiled(*tokens(70), torch.tensor([0, 5, 70], dtype=torch.int32))
    assert [name for name, _ in launches] == list(FORWARD_KERNELS)
    for name, args in launches:
        assert len(args) == len(launch.ARGUMENTS[name])


@pytest.mark.parametrize("shared", [False, True])
def test_activated_inputs_go_from_the_first_kernel_to_the_others(db, launches, shared):
    config = OpConfig(2, 4, 64, 128, activation=True, gate_dtype="bfloat16")
    compiled, workspace = op.compile(config, db=db), Workspace() if shared else None
    q, k, v, g, beta = tokens(70)
    bounds = torch.tensor([0, 5, 70], dtype=torch.int32)
    activation = Activation(normalize=True, a_log=torch.zeros(4))
    logits = torch.empty(g.numel() + 8, dtype=torch.bfloat16)[1 : 1 + g.numel()].view_as(g).copy_(g)
    assert logits.data_ptr() % 16
    compiled(q, k, v, logits, beta, bounds, workspace=workspace, activation=activation)
    assert [name for name, _ in launches] == ["input_activation", *FORWARD_KERNELS]
    first, inverse, forward = (dict(zip(launch.ARGUMENTS[name], args, strict=True)) for name, args in launches)
    assert (first["qk_mode"], first["g_mode"], first["beta_mode"]) == (1, 2, 0)
    assert first["g"].data_ptr() % 16 == 0 and torch.equal(first["g"], logits)
    assert first["q"] is q and first["k_out"].shape == k.shape and first["k_out"].dtype == k.dtype
    assert first["g_out"].shape == g.shape and first["g_out"].dtype == torch.float32
    assert forward["q"] is first["q_out"] and forward["k"] is inverse["k"] is first["k_out"]
    assert inverse["g"] is first["g_out"] and inverse["beta"] is beta and forward["v"] is v
    written = [first["q_out"], first["k_out"], first["g_out"], inverse["a"], inverse["log_gates"]]
    ends = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in written)
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:]))
    if shared:
        assert workspace.nbytes <= workspace_bytes(config, 70, 2)
    launches.clear()
    compiled(*tokens(70), bounds, workspace=workspace)
    assert [name for name, _ in launches] == list(FORWARD_KERNELS)


def test_workspace_has_a_slot_per_chunk_and_states_the_layout_of_the_config(db, launches):
    config = OpConfig(2, 4, 64, 128, state_v_first=True, state_dtype="bfloat16")
    compiled = op.compile(config, db=db)
    o, final = compiled(*tokens(70), torch.tensor([0, 5, 70], dtype=torch.int32), output_final_state=True)
    given = dict(zip(launch.ARGUMENTS["fused_forward"], launches[-1][1]))
    assert given["a"].shape == (70 // 64 + 2, 4, 64, 64)
    assert given["log_gates"].shape == (3, 4, 64) and given["log_gates"].dtype == torch.float32
    assert final.shape == (2, 4, 128, 64) and final.dtype == torch.bfloat16 and final is given["final"]
    assert o.shape == (70, 4, 128) and o is given["o"]
    assert (given["has_initial"], given["has_final"]) == (0, 1)
    assert given["scale"] == pytest.approx(64**-0.5)


def test_absent_states_cost_one_placeholder_per_device(db, launches):
    compiled = op.compile(CONFIG, db=db)
    bounds = torch.tensor([0, 70], dtype=torch.int32)
    for _ in range(2):
        assert compiled(*tokens(70), bounds)[1] is None
    states = {id(t) for name, args in launches if name == "fused_forward" for t in args[6:8]}
    assert len(states) == 1


def test_several_tuned_schedules_are_loaded_and_lengths_choose_between_them(db, launches, monkeypatch):
    problem = CONFIG.problem("fused_forward")
    whole = select(problem).default(problem)
    halves = whole.replace(dv_split=2, registers="40/168/240")
    card = Environment("card", "sm90", 132, "1", "13.0", "0.1", "2.0")
    for workload, schedule, us, default_us in (("1024x80", whole, 112.0, 112.0), ("1x8192", halves, 200.0, 300.0)):
        db.store.put_best(BestRow(problem, workload, schedule, us, default_us, digest(schedule.template), card, 5))
    monkeypatch.setattr(op.torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(op.runtime, "load", lambda artifact: lambda *args: launches.append(artifact.spec.schedule))
    compiled = op.compile(CONFIG, db=db)
    assert set(compiled.variants) == {whole, halves}
    assert len(op.select_kernels(CONFIG, db).specs) == 3  # all that such a config can launch
    assert len(compiled.report()) == 3
    for lengths, wanted in (([64], halves), ([64] * 100, whole)):
        cu = [0]
        for length in lengths:
            cu.append(cu[-1] + length)
        compiled(*tokens(cu[-1]), torch.tensor(cu, dtype=torch.int32), cu_host=tuple(cu))
        assert launches[-1] == wanted


def test_schedules_given_by_the_caller_replace_the_lookup(db, launches):
    problem = CONFIG.problem("kkt_inverse")
    chosen = select(problem).default(problem).replace(value_heads_per_cta=1)
    compiled = op.compile(CONFIG, db=db, schedules={"kkt_inverse": chosen})
    assert compiled.kernels["kkt_inverse"].spec.schedule == chosen
    assert compiled.kernels["kkt_inverse"].match is None
    assert compiled.kernels["fused_forward"].match.kind in ("default", "nearest", "exact", "stale")


def test_strict_mode_names_the_missing_kernel_and_compiles_nothing(db, monkeypatch, tmp_path):
    monkeypatch.setattr(op.build, "ensure", lambda *a: pytest.fail("compiled in strict mode"))
    with pytest.raises(KernelMissingError, match="strict mode.*kkt_inverse"):
        op.compile(CONFIG, db=db, store=op.ArtifactStore(tmp_path / "kernels"), strict=True)


def test_chunk_64_is_used_where_nothing_is_tuned(db, launches):
    for arch in ("sm90", "sm120"):
        assert op.compile(OpConfig(2, 4, arch=arch), db=db).chunk_size == 64
