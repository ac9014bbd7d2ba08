import json

import pytest
from tuning_fakes import FakeEvaluator, best, fake_template, point, problem, time_us, trial, use_templates

from qla_jit import cli
from qla_jit.db import Database, jsonl
from qla_jit.db.lookup import ranked
from qla_jit.errors import ConfigError, ReplayMissError
from qla_jit.tune import replay as recordings
from qla_jit.tune.replay import ReplayEvaluator
from qla_jit.tune.replay_study import replay, run_seed, trials_of
from qla_jit.tune.sweep import Plan, run_sweep


@pytest.fixture(autouse=True)
def templates(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture()
def recording(tmp_path):
    path = tmp_path / "sweep.jsonl"
    recorder = jsonl.Recorder(path)
    with Database(tmp_path / "recorded.sqlite", shipped=False) as db:
        run_sweep(
            Plan((problem(),), ("8192x4", "1x8192")), FakeEvaluator({point(2, 4, "r"): "wrong"}), db, recorder=recorder
        )
    recorder.close()
    return path


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


@pytest.mark.parametrize(
    ("text", "points", "count"), [("25%", 60, 15), ("25%", 3, 1), ("100%", 7, 7), ("12", 60, 12), ("99", 60, 60)]
)
def test_budget_is_a_share_of_the_points_or_a_number(text, points, count):
    assert trials_of(text, points) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "0%", "101%", "a", "1.5", "nan%", "inf%"])
def test_budget_that_is_neither_is_refused(text):
    with pytest.raises(ConfigError, match="--budget"):
        trials_of(text, 60)


def test_whole_budget_finds_the_best_that_ran_and_a_wrong_point_is_none(recording):
    evaluator = ReplayEvaluator.from_file(recording)
    for strategy in ("auto", "random", "tpe"):
        found = replay(evaluator, problem(), "8192x4", strategy, range(3), "100%")
        assert (found.hits, found.median_loss, found.worst_loss) == (1.0, 0.0, 0.0)
        assert found.best.median_us == 103.0 and found.best.schedule != point(2, 4, "r")
        assert found.default.schedule == point(0, 0, "p")
        assert {run.trials for run in found.runs} == {60}


def test_small_budget_reports_the_loss_of_each_seed_and_repeats(recording):
    evaluator = ReplayEvaluator.from_file(recording)
    found = replay(evaluator, problem(), "8192x4", "random", range(5), "3")
    assert [run.seed for run in found.runs] == [0, 1, 2, 3, 4] and {run.trials for run in found.runs} == {3}
    for run in found.runs:
        assert run.loss == pytest.approx(time_us(run.found.schedule) / 103.0 - 1)
        assert (run.trials_to_near is None) == (run.loss > 0.02)
    assert found == replay(evaluator, problem(), "8192x4", "random", range(5), "3")
    only_default = replay(evaluator, problem(), "8192x4", budget="1")
    assert only_default.runs[0].found.schedule == point(0, 0, "p")


def test_losses_are_those_of_the_best_point_after_each_trial():
    class InOrder:
        points = iter([point(3, 1), point(0, 0), point(2, 4, "r"), point(0, 2)])

        def ask(self):
            return next(self.points, None)

        def tell(self, trial):
            pass

    trials = [trial(p, median=time_us(p)) for p in (point(0, 0), point(2, 4, "r"), point(0, 2))]
    evaluator = ReplayEvaluator([trial(point(3, 1), "wrong"), *trials])
    run = run_seed(InOrder(), evaluator, problem(), "8192x4", 100.0, budget=9)
    assert run.losses == pytest.approx((float("inf"), 0.46, 0.0, 0.0))
    assert (run.trials, run.loss, run.trials_to_near, run.found.schedule) == (4, 0.0, 3, point(2, 4, "r"))


def test_neighbours_are_tried_right_after_the_default(recording):
    row = best(point(2, 2, "r"), problem_=problem(8, 32))
    near = ranked(problem(), [("user", row)])
    found = replay(ReplayEvaluator.from_file(recording), problem(), "8192x4", "tpe", (0,), "2", near)
    assert found.runs[0].found.schedule == point(2, 2, "r")


def test_missing_point_is_an_error_never_a_guess(recording):
    kept = [t for t in jsonl.read(recording).trials if t.schedule != point(1, 3, "s")]
    evaluator = ReplayEvaluator(kept)
    with pytest.raises(ReplayMissError, match="a=1, b=3, c=s"):
        replay(evaluator, problem(), "8192x4", "random", (0,), "100%", current=True)
    found = replay(evaluator, problem(), "8192x4", "random", (0,), "100%")
    assert (found.points, found.unrecorded, found.gone) == (59, 1, 0)


def test_points_that_are_none_any_more_can_still_be_replayed(recording, monkeypatch):
    use_templates(monkeypatch, fake_template(choices=((5, 6), (0, 2), ("p",))))
    found = replay(ReplayEvaluator.from_file(recording), problem(), "8192x4", "random", (0,), "100%")
    assert (found.points, found.gone, found.runs[0].loss) == (60, 60, 0.0)
    assert found.default.schedule == point(0, 0, "p")  # the first that was recorded


def test_recording_in_which_nothing_ran_is_refused():
    evaluator = ReplayEvaluator([trial(status="wrong")])
    with pytest.raises(ReplayMissError, match="none of 1 did"):
        replay(evaluator, problem(), "8192x4")


def test_seed_that_finds_nothing_has_no_loss():
    evaluator = ReplayEvaluator([trial(status="wrong"), trial(point(2, 4, "r"), median=50.0)])
    found = replay(evaluator, problem(), "8192x4", "random", (0,), "1")
    assert (found.runs[0].found, found.runs[0].loss, found.median_loss, found.worst_loss, found.hits) == (None,) * 4 + (
        0,
    )


def test_verb_prints_a_table_or_json(recording, capsys):
    arguments = ["replay", recording, "--workload", "8192x4", "--seeds", 4, "--seed", 10, "--budget", "50%"]
    assert call(*arguments, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["verb"], told["ok"], told["strategy"]) == ("qla-tune", "replay", True, "auto")
    (unit,) = told["units"]
    assert (unit["points"], unit["budget"], unit["best_us"], unit["default_us"]) == (60, 30, 103.0, 146.0)
    assert [run["seed"] for run in unit["runs"]] == [10, 11, 12, 13]
    assert unit["problem"]["num_heads"] == 16 and unit["strategy"] == "tpe"
    assert call(*arguments) == 0
    captured = capsys.readouterr()
    assert "fused_forward 16:64 8192x4" in captured.out and "4 runs ended within 2 %" in captured.err


def test_verb_takes_neighbours_from_the_database(recording, tmp_path, capsys):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        db.store.add(best=[best(point(2, 2, "r"), problem_=problem(8, 32)), best(point(2, 4, "q"))])
    arguments = ["replay", recording, "--workload", "8192x4", "--budget", 2, "--json"]
    assert call(*arguments, "--near", "--strategy", "tpe") == 0
    (unit,) = json.loads(capsys.readouterr().out)["units"]
    assert unit["runs"][0]["schedule"]["params"] == {"a": 2, "b": 2, "c": "r"}  # not the problem's own row


def test_shipped_sweeps_are_what_is_replayed_when_none_is_named(monkeypatch, capsys):
    monkeypatch.undo()  # the real templates
    names = [path.name for path in recordings.shipped_sweeps()]
    assert len(names) == 8 and "sm90_16_64.jsonl" in names
    assert call("replay", "--heads", "16:64", "--kernels", "fused_forward", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["units"]) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--strategy", "guess"], "guess"),
        (["--budget", "0"], "--budget"),
        (["--workload", "1x1"], "1x1"),
        (["--heads", "1:1"], "1:1"),
        (["--kernels", "novel"], "novel"),
        (["/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_bad_arguments_state_what_is_wrong(arguments, named, recording, capsys):
    assert call("replay", recording, *arguments) == 2
    assert named in (err := capsys.readouterr().err) and "Traceback" not in err
