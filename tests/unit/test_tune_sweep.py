import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tuning_fakes import (
    DIGEST,
    ENVIRONMENT,
    FakeEvaluator,
    best,
    fake_template,
    point,
    problem,
    script,
    trial,
    use_templates,
)

from qla_jit.db import Database, jsonl
from qla_jit.db.jsonl import Recorder
from qla_jit.errors import ConfigError, DatabaseError, ReplayMissError
from qla_jit.tune.picture import draw
from qla_jit.tune.replay import ReplayEvaluator
from qla_jit.tune.space import enumerate_space
from qla_jit.tune.sweep import Plan, run_sweep
from qla_jit.tune.unit import Report, Unit
from qla_jit.tune.worker import WorkerLostError

HERE = str(Path(__file__).parent)
PLAN = Plan((problem(),), ("8192x4",))


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    use_templates(monkeypatch, fake_template())


@pytest.fixture()
def db(tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as database:
        yield database


def test_exhaustive_sweep_stores_every_trial_and_the_best_row_that_compile_then_finds(db):
    evaluator = FakeEvaluator()
    report = run_sweep(PLAN, evaluator, db)
    assert (report.stopped, report.units[0].strategy, len(evaluator.asked)) == ("", "exhaustive", 60)
    assert len([t for t in db.trials() if t.phase == "search"]) == 60
    match = db.lookup(problem())
    assert (match.kind, match.schedule, match.row.trials) == ("exact", point(2, 4, "r"), 60)
    assert match.row.gain == pytest.approx(146 / 100)
    assert len(evaluator.raced[0]) == 4


def test_default_that_is_as_fast_as_any_stays(db):
    run_sweep(PLAN, FakeEvaluator(times=lambda s: 100.0), db)
    assert db.lookup(problem()).schedule == point()
    assert db.lookup(problem()).row.gain == 1.0


def test_failing_winner_is_never_chosen(db):
    run_sweep(PLAN, FakeEvaluator({point(2, 4, "r"): "wrong", point(2, 4, "q"): "run_timeout"}), db)
    assert db.lookup(problem()).schedule == point(2, 4, "s")


def test_resumed_sweep_asks_only_for_what_is_missing(db):
    first = FakeEvaluator(stop_after=25)
    assert run_sweep(PLAN, first, db).stopped == "interrupted"
    assert len(db.trials()) == 25
    second = FakeEvaluator()
    report = run_sweep(PLAN, second, db)
    assert (report.units[0].resumed, len(second.asked), len(report.trials)) == (25, 35, 35)
    assert not set(first.asked) & set(second.asked)
    assert db.lookup(problem()).schedule == point(2, 4, "r")


def test_trials_of_an_older_template_or_another_card_are_measured_again(db):
    db.store.add_trial(trial(template_digest="old"))
    other = trial().environment.__class__(**{**ENVIRONMENT.as_dict(), "gpu": "Other"})
    db.store.add_trial(trial(environment=other))
    evaluator = FakeEvaluator()
    run_sweep(PLAN, evaluator, db)
    assert len(evaluator.asked) == 60


@pytest.mark.wall_clock
def test_budget_ends_the_sweep_and_is_shared_by_the_problems(db):
    problems = tuple(problem(h, 64) for h in (16, 32, 64))
    started = time.monotonic()
    report = run_sweep(Plan(problems, ("8192x4",), budget_s=3.0), FakeEvaluator(delay_s=0.04), db)
    assert 2.0 < time.monotonic() - started < 6.0
    assert report.stopped == "budget"
    assert all(3 < len(unit.trials) < 60 for unit in report.units)
    assert all(unit.row for unit in report.units)


def test_trial_limit_chooses_tpe_and_counts_resumed_trials(db):
    plan = Plan((problem(),), ("8192x4",), max_trials=20)
    report = run_sweep(plan, FakeEvaluator(), db)
    assert (report.units[0].strategy, len(report.trials)) == ("tpe", 20)
    assert run_sweep(plan, FakeEvaluator(), db).trials == []


def test_sweep_tries_what_won_on_the_nearest_tuned_problem_right_after_the_default(db):
    db.store.put_best(best(point(2, 4, "r"), problem_=problem(16, 32)))
    evaluator = FakeEvaluator()
    run_sweep(Plan((problem(),), ("8192x4",), max_trials=2), evaluator, db)
    assert evaluator.asked == [point(), point(2, 4, "r")]


def test_several_workloads_give_a_row_each_and_one_for_all(db):
    report = run_sweep(Plan((problem(),), ("8192x4", "1x8192")), FakeEvaluator(), db)
    assert [row.workload for row in db.store.best_rows()] == ["*", "1x8192", "8192x4"]
    assert db.lookup(problem()).row.workload == "*"
    assert report.overall[0].schedule == point(2, 4, "r")


def test_lost_worker_stops_with_its_reason_and_keeps_the_trials(db):
    class Dying(FakeEvaluator):
        def evaluate(self, *arguments, **options):
            if len(self.asked) == 7:
                raise WorkerLostError("card fell off the bus")
            return super().evaluate(*arguments, **options)

    report = run_sweep(PLAN, Dying(), db)
    assert report.stopped == "card fell off the bus"
    assert len(db.trials()) == 7


def test_plan_for_another_arch_is_refused_before_any_trial(db, monkeypatch):
    use_templates(monkeypatch, fake_template(archs=("sm90", "sm120")))
    evaluator = FakeEvaluator()
    with pytest.raises(ConfigError, match="arch == 'sm90'.*sm120"):
        run_sweep(Plan((problem(arch="sm120"),), ("8192x4",)), evaluator, db)
    assert evaluator.asked == []


def test_recorded_sweep_replays_to_the_same_row_and_the_same_trials(db, tmp_path):
    path = tmp_path / "sweep.jsonl"
    recorder = Recorder(path)
    run_sweep(PLAN, FakeEvaluator({point(1, 1, "p"): "crashed"}), db, recorder=recorder)
    recorder.close()
    with Database(tmp_path / "replayed.sqlite", shipped=False) as replayed:
        report = run_sweep(PLAN, ReplayEvaluator.from_file(path), replayed)
        assert report.units[0].statuses == {"ok": 59, "crashed": 1}
        assert {t.uid for t in replayed.trials()} == {t.uid for t in db.trials()}
        assert replayed.lookup(problem()).schedule == db.lookup(problem()).schedule == point(2, 4, "r")


def test_replay_never_guesses_a_point(tmp_path):
    evaluator = ReplayEvaluator([trial(point(0, 0))], "tape")
    assert evaluator.evaluate(problem(), "8192x4", point(0, 0)).median_us == 100.0
    with pytest.raises(ReplayMissError, match="tape has none; record it"):
        evaluator.evaluate(problem(), "8192x4", point(0, 2))
    with pytest.raises(ReplayMissError, match="holds only"):
        run_sweep(Plan((problem(),), ("1x64",)), evaluator, Database(tmp_path / "x.sqlite", shipped=False))


def test_replay_of_an_empty_recording_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text(jsonl.dumps())
    with pytest.raises(DatabaseError, match="has none"):
        ReplayEvaluator.from_file(path)


SWEEP = f"""
    import sys
    sys.path.insert(0, {HERE!r})
    import tuning_fakes as fakes
    from qla_jit import registry
    from qla_jit.db import Database
    from qla_jit.tune import sweep
    named = {{"fake": fakes.fake_template()}}
    registry.templates = lambda: named
    registry.digest = sweep.digest = lambda name: fakes.DIGEST

    class Printing(sweep.Listener):
        def trial_done(self, unit, trial, queued):
            print(trial.schedule, flush=True)

    plan = sweep.Plan((fakes.problem(),), ("8192x4",))
    evaluator = fakes.FakeEvaluator(delay_s=float(sys.argv[2]))
    report = sweep.run_sweep(plan, evaluator, Database(sys.argv[1], shipped=False), Printing())
    print("stopped:", report.stopped)
"""


def test_kill_9_of_a_sweep_loses_at_most_the_trial_in_flight_and_the_next_run_goes_on(tmp_path):
    path, code = tmp_path / "t.sqlite", script(tmp_path, "sweep.py", SWEEP)
    process = subprocess.Popen([sys.executable, code, str(path), "0.02"], stdout=subprocess.PIPE, text=True)
    seen = [process.stdout.readline() for _ in range(10)]
    process.send_signal(signal.SIGKILL)
    seen += process.stdout.read().splitlines()
    process.wait()
    stored = Database(path, shipped=False).trials()
    assert len(seen) <= len(stored) <= len(seen) + 1
    done = subprocess.run([sys.executable, code, str(path), "0"], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 60 - len(stored) + 1
    assert len([t for t in Database(path, shipped=False).trials() if t.phase == "search"]) == 60


def test_two_sweeps_on_one_database_lose_nothing(tmp_path):
    path, code = tmp_path / "t.sqlite", script(tmp_path, "sweep.py", SWEEP)
    both = [subprocess.Popen([sys.executable, code, str(path), "0.001"], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    database = Database(path, shipped=False)
    assert {t.schedule for t in database.trials()} >= {point(2, 4, "r"), point()}
    assert len([t for t in database.trials() if t.phase == "search"]) >= 60
    assert database.lookup(problem()).schedule == point(2, 4, "r")


def test_ctrl_c_stops_cleanly_with_everything_stored(tmp_path):
    path, code = tmp_path / "t.sqlite", script(tmp_path, "sweep.py", SWEEP)
    # Sixty trials of 0.3 s: even on a busy machine the signal comes long before the last.  A shell's background jobs
    # inherit SIGINT as ignored, and so would Python.
    process = subprocess.Popen(
        [sys.executable, code, str(path), "0.3"], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    seen = [process.stdout.readline() for _ in range(5)]
    os.kill(process.pid, signal.SIGINT)
    rest = process.stdout.read().splitlines()
    assert process.wait() == 0
    assert rest[-1] == "stopped: interrupted"
    assert len(Database(path, shipped=False).trials()) == len(seen) + len(rest) - 1


def test_picture_shows_every_panel(db, tmp_path):
    statuses = ("wrong", "crashed", "run_timeout", "ok", "nonfinite")
    failing = {point(1, 1, c): status for c, status in zip("pqrst", statuses)}
    report = run_sweep(Plan((problem(), problem(8, 32)), ("8192x4", "1x8192")), FakeEvaluator(failing), db)
    path = draw(report.units, tmp_path / "sweep.png", "title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_picture_of_a_sweep_without_trials_is_still_a_picture(db, tmp_path):
    report = run_sweep(PLAN, FakeEvaluator(stop_after=0), db)
    assert draw(report.units, tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_digest_of_a_row_is_the_template_source_it_was_measured_with(db):
    run_sweep(PLAN, FakeEvaluator(), db)
    assert {row.template_digest for row in db.store.best_rows()} == {DIGEST}


def test_rates_count_from_when_the_cards_were_ready():
    unit = Unit(enumerate_space(problem()), "8192x4", trials=[trial(point(n, 0, "p")) for n in range(3)])
    report = Report([unit], seconds=16.0, startup_s=6.0, cards=2)
    assert report.trials_per_minute == 18.0
    busy_s = sum(t.times.verify_s + t.times.measure_s for t in unit.trials)
    assert busy_s > 0 and report.measuring_share == pytest.approx(busy_s / 20.0)
    assert Report([unit]).trials_per_minute is None and Report([unit]).measuring_share is None
