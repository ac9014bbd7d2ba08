"""`CompiledOp` and batches that are cut, without a card: what is launched, what is kept, what is refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from qla_jit.templates.segments_sm90 import TURN_FIELDS

from qla_jit import Workspace, dispatch, launch, op, split, workspace_bytes
from qla_jit.config import SPLIT_KERNELS, OpConfig
from qla_jit.db import open_db
from qla_jit.errors import InputError, UnsupportedError
from qla_jit.registry import select
from qla_jit.segments import cut
from qla_jit.split import EXACT, SegmentTables, SplitForward, log_tolerance

CONFIG = OpConfig(2, 4, 64, 64)
CPU = torch.device("cpu")
LENGTHS = (1300, 64)
CU = (0, 1300, 1364)


@pytest.fixture
def launches(monkeypatch):
    """Kernels that record their arguments instead of running; 132 SMs."""
    seen = []
    load = lambda artifact: lambda *args: seen.append((artifact.spec.problem.kernel, args))
    monkeypatch.setattr(op.build, "ensure", lambda spec, store: SimpleNamespace(spec=spec, report={}))
    monkeypatch.setattr(op.runtime, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return seen


@pytest.fixture
def compiled(tmp_path, launches):
    with open_db(tmp_path / "user.sqlite") as db:
        return op.compile(CONFIG, db=db)


@pytest.fixture
def planned(compiled, monkeypatch):
    """An operator whose models cut all into segments of five chunks, but order more than 20 sequences; counts plans."""
    schedules = {name: select(CONFIG.problem(name)).default(CONFIG.problem(name)) for name in SPLIT_KERNELS}
    calls = []

    def plan_split(models, lengths, sm_count, window, window_share):
        calls.append((tuple(lengths), sm_count, window, window_share))
        is_ordered = len(lengths) > 20
        chosen = SimpleNamespace(is_ordered=is_ordered)
        return SimpleNamespace(chosen=chosen, segment_chunks=None if is_ordered else 5, schedules=schedules)

    monkeypatch.setattr(op, "plan_split", plan_split)
    compiled._models = SimpleNamespace(can_split=True)
    compiled.plans = calls
    return compiled


def tokens(total):
    q, k = (torch.randn(total, 2, 64).bfloat16() for _ in range(2))
    return q, k, torch.randn(total, 4, 64).bfloat16(), torch.zeros(total, 4), torch.ones(total, 4)


def test_the_kernels_of_a_split_run_in_order_and_pass_their_scratch_on(compiled, launches):
    forward = compiled.split(CU, 5, CPU, 1e-3)
    workspace = Workspace()
    o, _ = compiled(
        *tokens(1364), torch.tensor(CU, dtype=torch.int32), cu_host=CU, forward=forward, workspace=workspace
    )
    assert [name for name, _ in launches] == ["kkt_inverse", *SPLIT_KERNELS]
    given = {name: dict(zip(launch.ARGUMENTS[name], args, strict=True)) for name, args in launches}
    table, turns = given["segment_forward"]["segments"], given["segment_state"]["turns"]
    assert table is given["segment_correct"]["segments"]
    assert table.dtype == torch.int32 and table.tolist() == [list(row) for row in forward.segments.table()]
    assert turns.dtype == torch.int32 and turns.tolist() == [list(row) for row in forward.segments.turn_table()]
    assert turns.shape == (5, TURN_FIELDS)
    assert given["segment_correct"]["first_segments"].tolist() == [0, 5, 6]
    assert given["segment_correct"]["cut_sequences"].tolist() == forward.segments.corrected_sequences() == [0]
    for name in ("starts", "decays"):
        first = given["segment_state"][name]
        assert first.shape == (len(forward.segments), 4) and first is given["segment_correct"][name]
    assert given["segment_forward"]["starts"] is given["segment_state"]["starts"]
    assert all(of["o"] is o for name, of in given.items() if name in SPLIT_KERNELS)
    assert given["segment_state"]["log_tolerance"] == log_tolerance(1e-3)
    assert workspace.nbytes <= workspace_bytes(CONFIG, 1364, 2)


def test_a_split_is_planned_once_per_content_and_only_where_it_may(planned):
    found = planned.choose(CU, CPU, True, 1e-3)
    assert isinstance(found, SplitForward) and found.segments.chunks == (5, 4, 4, 4, 4, 1)
    assert planned.choose(CU, CPU, True, 1e-3) is found
    assert planned.plans == [(LENGTHS, 132, 1e-3, None)]
    assert planned.choose(CU, CPU, True, 1e-3, 0.5) is found and planned.plans.pop() == (LENGTHS, 132, 1e-3, 0.5)
    assert planned.choose(CU, CPU, True, EXACT) is not found and len(planned.plans) == 2
    assert not isinstance(planned.choose(CU, CPU), SplitForward)
    assert not isinstance(planned.choose(None, CPU, True), SplitForward)
    short = (0, 100)
    assert not isinstance(planned.choose(short, CPU, True), SplitForward)  # nothing to cut there


def test_a_graph_capture_splits_only_what_was_planned_before(planned, monkeypatch):
    known = planned.choose(CU, CPU, True)
    monkeypatch.setattr(op.device_indices, "is_capturing", lambda device: True)
    assert planned.choose(CU, CPU, True) is known
    assert not isinstance(planned.choose((0, 1300), CPU, True), SplitForward)
    monkeypatch.undo()
    assert isinstance(planned._chosen[CU, CPU, (EXACT, None)], SplitForward)


def test_a_cut_for_the_first_time_within_a_capture_is_refused(compiled, monkeypatch):
    monkeypatch.setattr(op.device_indices, "is_capturing", lambda device: True)
    with pytest.raises(InputError, match="call once with these lengths before the capture"):
        compiled.split(CU, 5, CPU)


def test_ordered_sequences_launch_the_forward_of_a_split_alone_long_ones_first(planned, launches):
    lengths = [64 * n for n in range(1, 23)]
    bounds = (0, *itertools.accumulate(lengths))
    forward = planned.choose(bounds, CPU, True, 1e-3)
    assert isinstance(forward, SplitForward) and not forward.segments.is_cut
    planned(*tokens(sum(lengths)), torch.tensor(bounds, dtype=torch.int32), forward=forward)
    assert [name for name, _ in launches] == ["kkt_inverse", "segment_forward"]
    table = dict(zip(launch.ARGUMENTS["segment_forward"], launches[1][1]))["segments"]
    assert table[:, 3].tolist() == list(range(21, -1, -1))


def test_two_segments_launch_no_correction(compiled, launches):
    compiled(*tokens(700), torch.tensor([0, 700], dtype=torch.int32), forward=compiled.split((0, 700), 6, CPU))
    assert [name for name, _ in launches] == ["kkt_inverse", "segment_state", "segment_forward"]


def test_tables_of_a_captured_split_stay(monkeypatch):
    """A graph reads them in every replay, whatever is forgotten here meanwhile."""
    tables = SegmentTables(cut([1300], 64, 5), CPU)
    monkeypatch.setattr(SegmentTables, "_captured", [])
    tables._memory = SimpleNamespace(is_cuda=True, device=CPU, record_stream=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    tables.use()
    assert SegmentTables._captured == []
    monkeypatch.setattr(split, "current_stream", lambda device: None)
    for _ in range(2):
        tables.use()
    assert SegmentTables._captured == [tables]


def test_the_allocator_hears_once_of_every_stream_that_reads_the_tables(monkeypatch):
    tables, told = SegmentTables(cut([1300], 64, 5), CPU), []
    tables._memory = SimpleNamespace(is_cuda=True, device=CPU, record_stream=told.append)
    for stream in (7, 8, 7, 0, 8, 0):
        monkeypatch.setattr(split, "current_stream", lambda device, stream=stream: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        tables.use()
    assert told == [7, 8, 0]


def test_nothing_is_split_without_models_of_every_kernel(compiled):
    assert compiled._models is not None and not compiled._models.can_split
    assert not isinstance(compiled.choose(CU, CPU, True), SplitForward)
    assert "no cost models" in compiled.explain(LENGTHS)


def test_explain_needs_the_databases_schedules(tmp_path, launches):
    problem = CONFIG.problem("fused_forward")
    with open_db(tmp_path / "user.sqlite") as db:
        given = op.compile(CONFIG, db=db, schedules={"fused_forward": select(problem).default(problem)})
    assert "the caller gave the schedules" in given.explain(LENGTHS)


def test_a_cut_that_cuts_nothing_is_none_and_smaller_chunks_are_refused(compiled):
    assert compiled.split((0, 300), 4, CPU) is None
    compiled._load_split = None
    with pytest.raises(UnsupportedError, match="chunk_size == 64"):
        compiled.load_split(
            "segment_state", select(CONFIG.problem("kkt_inverse")).default(CONFIG.problem("kkt_inverse"))
        )


def test_outputs_that_share_memory_with_inputs_are_seen():
    v = torch.zeros(4, 8)
    assert dispatch._shares_memory(v[1:], torch.zeros(3), v) and not dispatch._shares_memory(v, v.clone())
