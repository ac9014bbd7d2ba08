import io
import warnings

import pytest
from rich.console import Console
from tuning_fakes import DIGEST, best, fake_template, point, problem, trial, use_templates

from qla_jit.artifacts import LIBRARY, ArtifactStore
from qla_jit.build import flags
from qla_jit.db import Database
from qla_jit.spec import KernelSpec
from qla_jit.tune.explain import explain
from qla_jit.tune.explain_output import explanation_json, print_explanation

OLD = {"template_digest": "e" * 64}


@pytest.fixture(autouse=True)
def templates(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture()
def db(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as opened:
        yield opened


def text_of(found) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_explanation(found, console)
    return console.file.getvalue()


def test_default_is_explained_by_what_the_rules_leave(db):
    found = explain(db, problem())
    assert (found.match.kind, found.runners_up, found.passed_over) == ("default", [], [])
    assert (found.points, found.rejected) == (60, {"sum_is_even": 60})
    text = text_of(found)
    assert "nothing tuned" in text and "60 feasible points of 120" in text and "60 sum_is_even" in text


def test_runners_up_come_from_the_rows_own_sweep_and_races_count_more_than_searches(db):
    won, second, slow = point(2, 4, "r"), point(2, 2, "r"), point(0, 0)
    db.store.add(
        best=[best(won)],
        trials=[
            trial(won, median=90.0),
            trial(second, median=85.0, local_bytes=16),
            trial(slow, median=200.0),
            trial(point(1, 1), "wrong"),
            trial(won, median=80.0, phase="final"),
            trial(second, median=84.0, phase="final", local_bytes=16),
            trial(point(3, 3), median=10.0, workload="1x8192"),  # another workload
            trial(point(3, 1), median=10.0, **OLD),  # another source
        ],
    )
    found = explain(db, problem())
    assert [(r.schedule, r.time_us, r.ratio) for r in found.runners_up] == [
        (won, 80.0, 1.0),
        (second, 84.0, 1.05),
        (slow, 200.0, 2.5),
    ]
    assert found.runners_up[1].local_bytes == 16
    assert (found.statuses, found.spilling) == ({"ok": 3, "wrong": 1}, 1)
    text = text_of(found)
    assert "exact row of the user database" in text and "1.050" in text and "3 ok, 1 wrong; 1 of them use" in text


def test_row_over_all_workloads_races_on_their_geometric_mean(db):
    won, other = point(2, 4, "r"), point(2, 2, "r")
    times = {("8192x4", won): 100.0, ("1x8192", won): 25.0, ("8192x4", other): 50.0, ("1x8192", other): 98.0}
    trials = [trial(s, median=m, workload=w) for (w, s), m in times.items()]
    trials.append(trial(point(0, 0), median=1.0))  # ran on one workload only: no rival
    db.store.add(best=[best(won, workload=w) for w in ("*", "8192x4", "1x8192")], trials=trials)
    found = explain(db, problem())
    assert found.match.row.workload == "*" and found.workloads == ["1x8192", "8192x4"]
    assert [(r.schedule, r.time_us) for r in found.runners_up] == [
        (won, pytest.approx(50.0)),
        (other, pytest.approx(70.0)),
    ]
    assert "geometric mean over 1x8192, 8192x4" in text_of(found)
    assert explain(db, problem(), "8192x4").workloads == ["8192x4"]


def test_row_that_cannot_run_is_passed_over_with_the_rule_and_the_next_answers_follow(db):
    broken = point(1, 2, "r")
    nearest = best(point(2, 2, "q"), problem_=problem(8, 32))
    farther = best(point(2, 2, "s"), problem_=problem(4, 16))
    db.store.add(best=[best(broken), best(broken, workload="1x8192"), nearest, farther])
    found = explain(db, problem())
    assert (found.match.kind, found.match.row) == ("nearest", nearest)
    (passed,) = found.passed_over
    assert (passed.rows, passed.nearest.schedule, passed.reason) == (2, broken, "sum_is_even: a + b = 3")
    assert [m.row for m in found.others] == [farther]
    text = text_of(found)
    assert "passed over: 2 rows" in text and "sum_is_even: a + b = 3" in text and "distance 1.00" in text


def test_stale_row_is_told_once_with_the_command_that_mends_it(db):
    db.store.add(best=[best(**OLD)], trials=[trial(point(2, 4, "r"), median=80.0, **OLD)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = explain(db, problem())
    assert found.match.kind == "stale" and found.runners_up[0].time_us == 80.0
    assert "measure it again: qla-tune --arch sm90 --kernels fused_forward --heads 16:64" in text_of(found)


def test_trials_behind_a_shipped_row_are_those_of_the_shipped_sweeps(tmp_path, monkeypatch):
    row = best()
    monkeypatch.setattr("qla_jit.db.layers.Database.best_rows", lambda self, arch: [("shipped", row)])
    recorded = [trial(row.schedule, median=80.0), trial(point(0, 0), median=100.0), trial(problem_=problem(8, 32))]
    with Database(tmp_path / "user.sqlite") as opened:
        found = explain(opened, problem(), recorded=lambda arch: recorded if arch == "sm90" else [])
    assert found.match.layer == "shipped"
    assert [r.time_us for r in found.runners_up] == [80.0, 100.0]


def test_row_without_trials_says_where_to_get_them(db):
    db.store.add(best=[best()])
    found = explain(db, problem())
    assert found.runners_up == [] and "no trials behind this row" in text_of(found)


def test_compiled_kernel_tells_its_registers_and_spills(db, tmp_path):
    db.store.add(best=[best()])
    spec = KernelSpec(problem(), best().schedule)
    store = ArtifactStore(tmp_path / "cache")
    report = {"registers": 168, "spill_bytes": 24, "local_bytes": 24, "smem_bytes": 2048}
    store.publish(spec, flags(spec), {LIBRARY: b"library"}, report)
    found = explain(db, problem(), store=store)
    assert found.static["compiled"]["spill_bytes"] == 24
    assert "24 B spilled" in text_of(found)
    values = explanation_json(found)
    assert values["why"]["static"]["compiled"]["registers"] == 168


def test_values_for_programs_hold_everything(db):
    db.store.add(best=[best()], trials=[trial(best().schedule, median=80.0), trial(point(0, 0), "crashed")])
    values = explanation_json(explain(db, problem()))
    assert values["kind"] == "exact" and values["row"]["template_digest"] == DIGEST
    why = values["why"]
    assert why["trials"] == {"statuses": {"ok": 1, "crashed": 1}, "with_local_memory": 0}
    assert why["runners_up"][0]["schedule"] == best().schedule.as_dict()
    assert why["static"]["threads"] == 128 and why["static"]["compiled"] is None
