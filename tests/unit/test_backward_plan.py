"""The plan of a backward, without a card: from which rows, what it chooses, and what is launched then."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qla_jit import backward, launch, op, split_models
from qla_jit.backward import CompiledBackward, Walks, compile_backward
from qla_jit.config import BACKWARD, BACKWARD_KERNELS, CHECKED_SPLITS, SAME_PROGRAM, OpConfig
from qla_jit.db import BestRow, CostModel, Database, Environment, jsonl, layers
from qla_jit.db.lookup import family
from qla_jit.model.features import Split, num_ctas, steps
from qla_jit.planned import describe
from qla_jit.registry import digest, select
from qla_jit.split_backward import SplitBackward
from qla_jit.split_models import SplitModels
from qla_jit.split_plan import plan_split

SWEEP = Path(__file__).resolve().parents[2] / "docs" / "perf" / "backward_sweep_h200.jsonl"
SMS = 132
CARD = Environment("card", "sm90", SMS, "1", "13.0", "0.1", "2.0")
CPU = torch.device("cpu")
CU = (0, 32768)
TIMES = {
    "kkt_inverse": (1.2, 0.02, 4.0),
    "recompute_state": (1.8, 0.05, 8.0),
    "backward_state": (2.4, 0.05, 9.0),
    "segment_state": (1.35, 0.05, 8.0),
    "segment_correct": (0.7, 0.02, 5.0),
    "backward_grad": (1.0, 0.02, 6.0),
}
#: Of `backward_state` by two CTAs a head.
HALVES = (2.2, 0.06, 9.0)


def default(problem):
    return select(problem).default(problem)


HALVES_SCHEDULE = default(OpConfig(2, 8).problem("backward_state")).replace(dv_split=2, registers="40/216/240")


@pytest.fixture
def stored(tmp_path):
    """A row and a cost model of the default of every kernel measured by itself, at 2/8 heads, and of halves."""
    config, rows, fits = OpConfig(2, 8), [], []
    measured = [(config.problem(kernel), default(config.problem(kernel)), times) for kernel, times in TIMES.items()]
    for problem, schedule, coefficients in (*measured, (config.problem("backward_state"), HALVES_SCHEDULE, HALVES)):
        kernel, source = problem.kernel, digest(schedule.template)
        workload = "1x32768" + "/16" * (kernel in ("segment_state", "segment_correct"))
        rows.append(BestRow(problem, workload, schedule, 100.0, 100.0, source, CARD, 10))
        fits.append(CostModel(family(problem), schedule, "work", coefficients, 24, 0.02, 0.05, "f", source, CARD))
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        db.store.add(best=rows, fits=fits)
        yield db


@pytest.fixture
def launches(monkeypatch):
    """Kernels that record their names instead of running; 132 SMs."""
    seen = []
    load = lambda artifact: lambda *args: seen.append((artifact.spec.problem.kernel, artifact.spec.schedule, args))
    monkeypatch.setattr(op.build, "ensure", lambda spec, store: SimpleNamespace(spec=spec, report={}))
    monkeypatch.setattr(op.runtime, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=SMS))
    return seen


def models(db, *heads):
    return SplitModels.of(OpConfig(*heads), db, kernels=BACKWARD)


def times_of(kernel, schedule):
    """Coefficients of what is stored for a kernel, or for the one whose program it runs."""
    kernel = SAME_PROGRAM.get(kernel, kernel)
    return HALVES if (kernel, schedule.params().get("dv_split")) == ("backward_state", 2) else TIMES[kernel]


def test_segments_run_what_a_card_has_checked_at_the_times_of_the_same_program(stored):
    found = models(stored, 2, 8)
    assert found.can_split and len(found.options["backward_state"]) == 2
    for kernel in SAME_PROGRAM:
        assert found.options[kernel]
        for option in found.options[kernel]:
            assert option.schedule.params().get("dv_split") in CHECKED_SPLITS.get(kernel, (None,))
            assert (option.us_per_step, option.us_per_cta) == times_of(kernel, option.schedule)[:2]


def test_shares_that_no_card_has_checked_are_left_out(stored, monkeypatch):
    monkeypatch.setattr(split_models, "CHECKED_SPLITS", dict.fromkeys(CHECKED_SPLITS, (2,)))
    options = models(stored, 2, 8).options
    assert {o.schedule.params()["dv_split"] for o in options["segment_backward"]} == {2}
    assert not options["segment_recompute"]  # the walk that is stored gives a head one CTA


def test_registers_are_those_of_the_program_but_where_the_default_shares_the_heads_alike(stored):
    config = OpConfig(2, 8)
    measured = {s["dv_split"]: s["registers"] for s in (default(config.problem("backward_state")), HALVES_SCHEDULE)}
    for kernel in ("segment_backward", "segment_gradient"):
        own, options = default(config.problem(kernel)), models(stored, 2, 8).options[kernel]
        assert {o.schedule["dv_split"] for o in options} == set(measured) == {1, 2}
        for option in options:
            share = option.schedule["dv_split"]
            wanted = own["registers"] if share == own["dv_split"] else measured[share]
            assert option.schedule["registers"] == wanted


def test_one_long_sequence_on_few_heads_is_split_and_a_full_card_is_not(stored):
    plan = plan_split(models(stored, 2, 8), [32768], SMS)
    assert plan.segment_chunks is not None
    assert list(plan.schedules) == [*BACKWARD.before, *BACKWARD.split, *BACKWARD.after]
    assert plan.chosen.total_us == pytest.approx(sum(plan.predicted_us.values()))
    full = plan_split(models(stored, 16, 64), [8192] * 8, SMS)
    assert full.segment_chunks is None
    assert list(full.schedules) == [*BACKWARD.before, *BACKWARD.whole, *BACKWARD.after]
    assert "backward_grad" in describe(plan) and "segment_gradient_correct" in describe(plan)


def test_the_prediction_is_that_of_the_features(stored):
    found = models(stored, 2, 8)
    for plan in (plan_split(found, [32768, 500], SMS), plan_split(found, [900], SMS)):
        cut = None if plan.segment_chunks is None else Split(plan.segment_chunks, 0.0, 0)
        for kernel, schedule, time_us in plan.chosen.kernels:
            problem, (a, b, c) = found.problems[kernel], times_of(kernel, schedule)
            split = cut if kernel in BACKWARD.split else None
            want = a * steps(problem, schedule, [32768, 500] if cut else [900], SMS, split)
            want += b * num_ctas(problem, schedule, [32768, 500] if cut else [900], split)
            assert time_us == pytest.approx(want + (c if kernel == "kkt_inverse" else 0.0)), kernel


def test_without_a_model_of_the_walks_nothing_is_split(tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        found = models(db, 2, 8)
    assert not found.can_split and plan_split(found, [32768], SMS).segment_chunks is None


def test_a_backward_is_planned_once_per_content_and_only_where_it_may(stored, launches, monkeypatch):
    compiled = compile_backward(OpConfig(2, 8), stored)
    found = compiled.choose(CU, CPU, True)
    assert isinstance(found, SplitBackward) and found.segments.is_cut
    assert compiled.choose(CU, CPU, True) is found
    assert compiled.choose(CU, CPU, True, 1e-4) is not found
    for given in ((CU, CPU), (None, CPU, True), ((0, 900), CPU, True)):
        assert isinstance(compiled.choose(*given), Walks)
    monkeypatch.setattr(backward.device_indices, "is_capturing", lambda device: True)
    assert compiled.choose(CU, CPU, True) is found
    assert isinstance(compiled.choose((0, 30000), CPU, True), Walks)


def test_a_split_backward_launches_its_kernels_in_order(stored, launches):
    compiled = compile_backward(OpConfig(2, 8), stored)
    tokens = CU[-1]
    q, k = (torch.zeros(tokens, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(tokens, 8, 128, dtype=torch.bfloat16)
    g, beta = torch.zeros(tokens, 8), torch.ones(tokens, 8)
    bounds = torch.tensor(CU, dtype=torch.int32)
    for walks, middle in ((compiled.choose(CU, CPU, True), BACKWARD.split), (None, BACKWARD.whole)):
        launches.clear()
        compiled(q, k, v, g, beta, bounds, 1.0, v, walks=walks)
        assert [name for name, _, _ in launches] == [*BACKWARD.before, *middle, *BACKWARD.after]
        for name, _, given in launches:
            assert len(given) == len(launch.ARGUMENTS[name])


def test_explain_says_what_is_chosen(stored, launches):
    compiled = compile_backward(OpConfig(2, 8), stored)
    assert compiled.explain([32768], sm_count=SMS).startswith("segments of at most")
    given = {name: default(OpConfig(2, 8).problem(name)) for name in backward.KERNELS}
    assert "the caller gave" in compile_backward(OpConfig(2, 8), stored, schedules=given).explain([32768])


def test_it_takes_given_entries_alone():
    compiled = CompiledBackward(OpConfig(1, 1, 64, 64), dict.fromkeys(backward.KERNELS))
    assert isinstance(compiled.choose(CU, CPU, True), Walks)


def test_no_shipped_schedule_of_the_backward_spills():
    """Neither a best row nor what a plan may choose by its cost model, by what each kernel had when it was measured."""
    shipped = layers.shipped("sm90")
    chosen = {
        (one.problem.kernel, one.schedule)
        for one in (*shipped.best, *shipped.fits)
        if one.problem.kernel in BACKWARD_KERNELS and one.schedule is not None
    }
    found = {}
    for trial in jsonl.loads(SWEEP.read_text(encoding="utf-8"), str(SWEEP)).trials:
        found.setdefault((trial.problem.kernel, trial.schedule), set()).add(trial.local_bytes)
    assert len(chosen) > 40 and all(found[one] == {0} for one in chosen)
