import json
import subprocess
import sys

import pytest
from tuning_fakes import (
    FakeEvaluator,
    add_rows_of_a_gone_kernel,
    best,
    fake_template,
    point,
    problem,
    trial,
    use_templates,
    with_a_gone_kernel,
)

from qla_jit import cli
from qla_jit.db import Database, jsonl
from qla_jit.tune import commands, inspect_commands
from qla_jit.tune.doctor import Finding
from qla_jit.tune.sweep import Plan, run_sweep

ENVELOPE = {"format": "qla-tune", "version": 1, "ok": True}
BASE = ["--arch", "sm90", "--head-dim", "128", "--heads", "16:64", "--kernels", "fused_forward", "--workload", "8192x4"]


@pytest.fixture(autouse=True)
def templates(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture()
def recording(tmp_path):
    path = tmp_path / "sweep.jsonl"
    recorder = jsonl.Recorder(path)
    with Database(tmp_path / "recorded.sqlite", shipped=False) as db:
        run_sweep(Plan((problem(),), ("8192x4",)), FakeEvaluator({point(1, 1): "crashed"}), db, recorder=recorder)
    recorder.close()
    return path


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def test_replayed_run_prints_json_stores_the_row_and_draws(recording, tmp_path, capsys):
    files = ["--picture", tmp_path / "p.png", "--record", tmp_path / "r.jsonl"]
    code = call(*BASE, "--replay", recording, "--json", *files)
    out = capsys.readouterr()
    report = json.loads(out.out)
    assert code == 0
    assert report["units"][0]["statuses"] == {"ok": 59, "crashed": 1}
    assert report["units"][0]["best"]["gain"] == pytest.approx(1.46)
    assert report["units"][0]["infeasible"] == {"sum_is_even": 60}
    assert (tmp_path / "p.png").stat().st_size > 10_000
    assert len(jsonl.read(tmp_path / "r.jsonl").trials) == 64
    assert Database(tmp_path / "user.sqlite", shipped=False).lookup(problem()).schedule == point(2, 4, "r")
    assert "60 trials" in out.err


def test_options_without_a_verb_mean_run(recording, capsys):
    assert call(*BASE, "--replay", recording) == 0
    assert call("run", *BASE, "--replay", recording) == 0
    assert "fused_forward" in capsys.readouterr().out


def test_without_gpu_the_error_names_what_works(capsys, monkeypatch):
    monkeypatch.setattr(commands, "has_gpu", lambda: False)
    assert call(*BASE, "--budget", "5") == 2
    err = capsys.readouterr().err
    assert "--replay" in err and "--compile-only" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--heads", "16"], None),
        (["--heads", "16:x"], "--heads"),
        (["--heads", "16:65"], "num_value_heads % num_heads == 0"),
        (["--head-dim", "96"], "head_dim_k in"),
        (["--kernels", "fused_forward,novel"], "novel"),
        (["--workload", "8192y4"], "8192y4"),
        (["--arch", "sm42"], "sm42"),
        (["--replay", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--heads", "8:32"], "must be recorded"),
    ],
)
def test_bad_arguments_state_invariant_and_value(arguments, named, recording, capsys):
    code = call(*BASE, "--replay", recording, *arguments)
    err = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in err
    assert named is None or named in err


def test_show_says_where_each_schedule_comes_from(tmp_path, capsys):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        db.store.put_best(best(problem_=problem(8, 32)))
    assert call("show", "--heads", "8:32,16:64,1:1", "--kernels", "fused_forward", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["kind"], r["distance"]) for r in rows] == [("exact", 0.0), ("nearest", 1.0), ("default", 0.0)]
    assert call("show", "--heads", "16:64", "--kernels", "fused_forward") == 0
    assert "nearest row of the user database" in capsys.readouterr().out


def test_export_and_import_round_trip(recording, tmp_path, capsys):
    call(*BASE, "--replay", recording)
    assert call("export", tmp_path / "a.jsonl") == 0
    assert call("import", tmp_path / "a.jsonl", "--db", tmp_path / "b.sqlite") == 0
    assert call("export", tmp_path / "b.jsonl", "--db", tmp_path / "b.sqlite") == 0
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert len(jsonl.read(tmp_path / "a.jsonl").trials) == 64


def test_database_of_another_program_is_an_error_without_traceback(tmp_path, capsys):
    (tmp_path / "user.sqlite").write_bytes(b"something else entirely" * 50)
    assert call("show", "--heads", "16:64", "--kernels", "fused_forward") == 2
    assert "user.sqlite" in capsys.readouterr().err


def test_missing_extra_names_the_command_that_installs_it(monkeypatch, capsys):
    find = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    assert call("show") == 2
    assert "optuna" in (err := capsys.readouterr().err) and "pip install 'qla-jit[tune]'" in err


def test_sweep_in_which_nothing_runs_fails(tmp_path, monkeypatch, capsys):
    every = {s: "wrong" for s in (point(a, b, c) for a in range(4) for b in range(5) for c in "pqrstu")}
    monkeypatch.setattr(commands, "_evaluator", lambda *a: FakeEvaluator(every))
    assert call(*BASE) == 1
    assert "no schedule ran" in capsys.readouterr().err


def test_interrupted_run_reports_and_exits_130(monkeypatch, capsys):
    monkeypatch.setattr(commands, "_evaluator", lambda *a: FakeEvaluator(stop_after=9))
    assert call(*BASE) == 130
    err = capsys.readouterr().err
    assert "9 trials" in err and "run the same command again" in err


def test_resume_goes_on_where_a_stopped_run_was_and_with_its_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "_evaluator", lambda *a: FakeEvaluator(stop_after=9))
    db = tmp_path / "other file.sqlite"
    options = ["--seed", "5", "--max-trials", "20", "--device", "1", "--jobs", "3", "--record", tmp_path / "r.jsonl"]
    assert call(*BASE, *options, "--db", db) == 130
    assert f"qla-tune resume --db '{db}'" in capsys.readouterr().err
    asked = []
    monkeypatch.setattr(commands, "_evaluator", lambda *a: (asked.append(a), FakeEvaluator())[1])
    assert call("resume", "--db", db, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert asked == [(None, 3, (1,), 5, True)]
    assert [(u["trials"], u["resumed"], u["workload"]) for u in report["units"]] == [(20, 9, "8192x4")]
    search = [t for t in jsonl.read(tmp_path / "r.jsonl").trials if t.phase == "search"]
    assert len({t.schedule for t in search}) == len(search) == 20


def test_no_filter_reaches_the_evaluator_and_is_kept_for_resume(monkeypatch):
    asked = []
    monkeypatch.setattr(commands, "_evaluator", lambda *a: (asked.append(a[-1]), FakeEvaluator(stop_after=3))[1])
    assert call(*BASE, "--no-filter") == 130
    call("resume")
    assert asked == [False, False]
    call(*BASE)
    assert asked[-1] is True


def test_hosts_that_share_a_storage_replay_a_recording_once(recording, tmp_path, capsys):
    shared = ["--replay", recording, "--storage", f"sqlite:///{tmp_path}/study.sqlite", "--json"]
    assert call(*BASE, *shared, "--db", tmp_path / "a.sqlite") == 0
    (first,) = json.loads(capsys.readouterr().out)["units"]
    assert call(*BASE, *shared, "--db", tmp_path / "b.sqlite") == 0
    (second,) = json.loads(capsys.readouterr().out)["units"]
    assert (first["trials"], first["elsewhere"], second["trials"], second["elsewhere"]) == (60, 0, 60, 60)
    assert second["best"]["schedule"] == first["best"]["schedule"] == point(2, 4, "r").as_dict()
    assert call("resume", "--db", tmp_path / "b.sqlite", "--json") == 0
    assert json.loads(capsys.readouterr().out)["units"][0]["resumed"] == 60


def test_storage_without_a_server_or_a_driver_is_explained(recording, capsys):
    for url, said in (("nonsense", "postgresql+psycopg://"), ("sqlite:////no/such/folder/x.sqlite", "must answer")):
        assert call(*BASE, "--replay", recording, "--storage", url) == 2
        assert said in (err := capsys.readouterr().err) and "Traceback" not in err


@pytest.mark.parametrize("devices", ["", "0,x", "0,0", "-1"])
def test_devices_that_cannot_be_read_are_refused(recording, capsys, devices):
    assert call(*BASE, "--replay", recording, f"--devices={devices}") == 2
    assert "write 0,1" in capsys.readouterr().err


def test_a_process_per_device_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(commands, "has_gpu", lambda: True)
    monkeypatch.setattr(commands, "CompilePool", lambda jobs: None)
    monkeypatch.setattr(commands, "Worker", lambda device: device)
    monkeypatch.setattr(
        commands, "LiveEvaluator", lambda pool, workers, seed, **options: (made.append(workers), FakeEvaluator())[1]
    )
    assert call(*BASE, "--devices", "2,0", "--max-trials", "3") == 0
    assert made == [[2, 0]]


def test_resume_finds_the_files_of_a_run_from_another_folder(recording, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(*BASE, "--replay", recording.name, "--picture", "p.png") == 0
    (tmp_path / "p.png").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call("resume") == 0
    assert (tmp_path / "p.png").exists()


def test_resume_without_a_sweep_is_an_error_without_traceback(capsys):
    assert call("resume") == 2
    err = capsys.readouterr().err
    assert "user.sqlite" in err and "start one" in err and "Traceback" not in err


def test_what_moves_records_says_how_many_rows_of_a_gone_kernel_it_left_out(tmp_path, capsys):
    file, old = tmp_path / "a.jsonl", add_rows_of_a_gone_kernel(tmp_path / "old.sqlite")
    file.write_text(with_a_gone_kernel(jsonl.dumps([best()], [trial()])))
    said = "left out: {} rows of gone, a kernel that this version does not have"
    assert call("import", file) == 0
    assert said.format(2) in capsys.readouterr().err
    assert call("merge", file, old, "--into", tmp_path / "into.sqlite") == 0
    assert said.format(5) in capsys.readouterr().err
    assert call("export", "--db", old) == 0
    captured = capsys.readouterr()
    assert said.format(3) in captured.err and captured.out == jsonl.dumps()


def test_merge_unites_files_and_says_what_it_did(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(jsonl.dumps([best(median=50.0)], [trial()]))
    with Database(tmp_path / "b.sqlite", shipped=False) as db:
        db.store.add(trials=[trial(), trial(created="b")], best=[best(median=60.0), best(workload="*")])
    into = tmp_path / "into.sqlite"
    assert call("merge", tmp_path / "a.jsonl", tmp_path / "b.sqlite", "--into", into, "--json") == 0
    counts = {"trials_read": 3, "trials_new": 2, "best_new": 2, "best_replaced": 0, "best_kept": 0}
    told = json.loads(capsys.readouterr().out)
    assert told == {**ENVELOPE, "verb": "merge", **counts, "fits_new": 0, "left_out": {}, "db": str(into)}
    rows = Database(into, shipped=False).best_rows("sm90")
    assert [(row.workload, row.median_us) for _, row in rows] == [("*", 80.0), ("8192x4", 50.0)]
    assert call("merge", tmp_path / "a.jsonl", tmp_path / "none.jsonl", "--into", into) == 2
    assert "none.jsonl" in (err := capsys.readouterr().err) and "Traceback" not in err


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("note", 0), ("missing", 1), ("stale", 1), ("broken", 1)])
def test_doctor_exits_1_for_problems_alone_and_prints_what_mends_them(verdict, code, monkeypatch, capsys):
    finding = Finding("thing", verdict, "[/x] found", "do this", {"count": 3})
    monkeypatch.setattr(inspect_commands, "examine", lambda db, store: [Finding("other", "ok", "1"), finding])
    assert call("doctor", "--json") == code
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["findings"][1]) == (code == 0, finding.as_dict())
    assert call("doctor") == code
    out = capsys.readouterr().out
    assert "[/x] found" in out and ("do this" in out) == (code == 1)


def test_import_of_the_package_and_of_the_entry_point_loads_no_tuner():
    code = (
        "import sys, qla_jit, qla_jit.cli;"
        "heavy = ('optuna', 'tilelang', 'typer', 'rich', 'matplotlib', 'sqlite_utils', 'torch');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
