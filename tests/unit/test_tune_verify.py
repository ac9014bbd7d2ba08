import contextlib
import json
import sys

import pytest
from test_tune_processes import COMPILER, WORKER
from tuning_fakes import (
    ENVIRONMENT,
    FakeEvaluator,
    best,
    fake_template,
    point,
    problem,
    script,
    time_us,
    trial,
    use_templates,
)

from qla_jit import cli
from qla_jit.db import Database, jsonl
from qla_jit.db.records import Environment
from qla_jit.tune import verify_commands
from qla_jit.tune.compile_pool import CompilePool
from qla_jit.tune.evaluate import LiveEvaluator
from qla_jit.tune.verify_rows import verify_rows, workloads_of
from qla_jit.tune.worker import Worker, WorkerLostError

WON = point(2, 4, "r")  # 100 us
OTHER_CARD = Environment(**{**ENVIRONMENT.as_dict(), "gpu": "Other"})


@pytest.fixture(autouse=True)
def templates(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))
    monkeypatch.setenv("COLUMNS", "250")


class Racing(FakeEvaluator):
    """Races as its `statuses` say; ``scale`` makes the card of today slower."""

    def __init__(self, statuses=None, scale=1.0, raises=None):
        super().__init__(statuses, times=lambda s: scale * time_us(s))
        self.raises = raises or {}

    def race(self, problem, workload, schedules, rounds):
        if workload in self.raises:
            raise self.raises[workload]
        self.raced.append((workload, list(schedules), rounds))
        states = [(s, self._statuses.get(s, "ok")) for s in schedules]
        return [trial(s, state, self._times(s), problem, workload, phase="final") for s, state in states]


def checked(*rows, evaluator=None, **options):
    named = [("user", row) for row in rows]
    return verify_rows(named, named, evaluator or Racing(), **options)


@pytest.mark.parametrize(
    ("median", "status", "is_ok"),
    [(100.0, "ok", True), (91.0, "ok", True), (90.0, "slower", False), (112.0, "faster", True), (109.0, "ok", True)],
)
def test_time_is_compared_with_the_rows_within_a_tolerance(median, status, is_ok):
    found = checked(best(WON, median=median))
    (check,) = found.checks
    assert (check.status, found.ok) == (status, is_ok)
    assert check.ratio == pytest.approx(100.0 / median) and check.median_us == 100.0
    assert check.error == 1e-3
    assert (status == "ok") == (check.reason == "")
    assert checked(best(WON, median=median), tolerance=0.2).checks[0].status == "ok"


@pytest.mark.parametrize("status", ["wrong", "nonfinite", "crashed", "compile_error", "run_timeout", "launch_error"])
def test_kernel_that_fails_is_a_problem_with_its_reason(status):
    found = checked(best(WON), best(point(2, 2, "r"), problem_=problem(8, 32)), evaluator=Racing({WON: status}))
    assert [c.status for c in found.checks] == ["failed", "slower"]
    assert f"{status} on 8192x4: because {status}" in found.checks[0].reason
    assert not found.ok


def test_row_over_all_workloads_is_compared_on_their_geometric_mean_and_shares_trials():
    rows = [best(WON, workload=w, median=100.0) for w in ("*", "8192x4", "1x8192")]
    evaluator = Racing()
    found = checked(*rows, evaluator=evaluator, rounds=3)
    assert [c.status for c in found.checks] == ["ok", "ok", "ok"]
    assert [t.workload for t in found.checks[0].trials] == ["1x8192", "8192x4"]
    assert found.checks[0].median_us == pytest.approx(100.0)
    assert [(w, rounds) for w, _, rounds in evaluator.raced] == [("1x8192", 3), ("8192x4", 3)]
    alone = checked(rows[0])
    assert (alone.checks[0].status, alone.ok) == ("unusable", False)


def test_workloads_of_a_row_over_all_are_those_of_its_own_sweep():
    rows = [("user", best(workload=w)) for w in ("*", "a", "b")]
    rows += [("shipped", best(workload="c")), ("user", best(workload="d", template_digest="e" * 64))]
    assert workloads_of(rows[0][1], "user", rows) == ["a", "b"]
    assert workloads_of(rows[1][1], "user", rows) == ["a"]


def test_row_of_another_card_is_checked_but_not_compared():
    found = checked(best(WON, median=1.0, environment=OTHER_CARD))
    (check,) = found.checks
    assert (check.status, check.ratio, check.median_us) == ("ok", None, 100.0)
    assert "row is of Other" in check.reason and found.ok


def test_stale_row_is_checked_with_todays_source_and_marked():
    (check,) = checked(best(WON, median=100.0, template_digest="e" * 64)).checks
    assert (check.status, check.stale) == ("ok", True)


def test_row_that_no_kernel_answers_is_unusable_and_measured_nowhere():
    evaluator = Racing()
    found = checked(best(point(template="gone")), best(point(1, 2, "r")), evaluator=evaluator)
    assert [c.status for c in found.checks] == ["unusable", "unusable"]
    assert "no template gone" in found.checks[0].reason and "sum_is_even" in found.checks[1].reason
    assert evaluator.raced == [] and not found.ok


def test_rest_is_unchecked_after_the_budget_an_interrupt_or_a_lost_card():
    rows = [best(WON, workload=w, median=100.0) for w in ("a", "b", "c")]
    lost = WorkerLostError("no card")
    for evaluator, options, stopped in (
        (Racing(), {"budget_s": 0.0}, "budget"),
        (Racing(raises={"b": KeyboardInterrupt()}), {}, "interrupted"),
        (Racing(raises={"b": lost}), {}, "no card"),
    ):
        found = checked(*rows, evaluator=evaluator, **options)
        done = 0 if stopped == "budget" else 1
        assert [c.status for c in found.checks] == ["ok"] * done + ["unchecked"] * (3 - done)
        assert (found.stopped, found.ok) == (stopped, False)


def test_real_processes_that_hang_crash_or_fail_leave_the_other_rows_checked(tmp_path, monkeypatch):
    use_templates(monkeypatch, fake_template(choices=(tuple(range(4)), tuple(range(5)), ("p", "u"))))
    compiler = [sys.executable, script(tmp_path, "compiler.py", COMPILER), str(tmp_path / "orphan")]
    worker = Worker(command=[sys.executable, script(tmp_path, "worker.py", WORKER)], deadlines={"verify": 1.0})
    outcomes = {
        point(2, 4, "p"): "ok",
        point(1, 1, "p"): "failed run_timeout",
        point(1, 3, "p"): "failed crashed",
        point(2, 0, "p"): "failed crashed",
        point(2, 2, "p"): "failed launch_error",
        point(3, 1, "p"): "failed wrong",
        point(2, 4, "u"): "failed compile_error",
        point(0, 4, "p"): "slower",
    }
    rows = [("user", best(schedule, workload=f"1x{i + 1}", median=100.0)) for i, schedule in enumerate(outcomes)]
    with contextlib.closing(LiveEvaluator(CompilePool(2, timeout_s=5.0, command=compiler), worker)) as evaluator:
        found = verify_rows(rows, rows, evaluator, rounds=2)
    told = [f"{c.status} {c.trials[0].status}" if c.status == "failed" else c.status for c in found.checks]
    assert told == list(outcomes.values())
    assert "no such instruction" in found.checks[6].reason
    assert len(found.checks[0].trials[0].samples_us) == 6  # two rounds


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


@pytest.fixture()
def rows(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        db.store.add(
            best=[
                best(WON, median=100.0),
                best(point(2, 2, "r"), problem_=problem(8, 32), median=110.0),
                best(WON, problem_=problem(4, 16), median=50.0),
            ]
        )


def test_verb_prints_every_row_and_its_exit_code_says_whether_all_is_well(rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify_commands, "make_evaluator", lambda *a: Racing())
    arguments = ["verify", "--layer", "user"]
    assert call(*arguments, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["statuses"] == {"ok": 2, "slower": 1} and told["ok"] is False
    slow = next(row for row in told["rows"] if row["status"] == "slower")
    assert (slow["row"]["problem"]["num_heads"], slow["ratio"]) == (4, 2.0)
    record = tmp_path / "r.jsonl"
    assert call(*arguments, "--heads", "16:64,8:32", "--workload", "8192x4", "--record", record) == 0
    captured = capsys.readouterr()
    assert "fused_forward 16:64 8192x4" in captured.out and "2 rows: 2 ok" in captured.err
    assert [t.phase for t in jsonl.read(record).trials] == ["final", "final"]
    assert call(*arguments, "--tolerance", "1.5") == 0


def test_interrupted_verb_exits_130_with_what_was_checked(rows, monkeypatch, capsys):
    monkeypatch.setattr(verify_commands, "make_evaluator", lambda *a: Racing(raises={"8192x4": KeyboardInterrupt()}))
    assert call("verify", "--layer", "user", "--json") == 130
    assert json.loads(capsys.readouterr().out)["stopped"] == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--layer", "mine"], "mine"), (["--heads", "1:1"], "a row to check must be stored")],
)
def test_bad_arguments_state_what_is_wrong(arguments, named, rows, monkeypatch, capsys):
    monkeypatch.setattr(verify_commands, "make_evaluator", lambda *a: Racing())
    assert call("verify", *arguments) == 2
    assert named in (err := capsys.readouterr().err) and "Traceback" not in err


def test_without_a_card_the_error_names_what_works(monkeypatch, capsys):
    monkeypatch.setattr(verify_commands, "has_gpu", lambda: False)
    assert call("verify") == 2
    assert "qla-tune doctor" in capsys.readouterr().err
