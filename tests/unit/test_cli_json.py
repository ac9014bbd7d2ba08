"""One schema for ``--json`` of every verb: format, version, verb, ok, then its own keys; and shell completion."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tuning_fakes import FakeEvaluator, best, fake_template, point, problem, trial, use_templates

from qla_jit import cli
from qla_jit.db import Database, jsonl
from qla_jit.tune import commands, verify_commands
from qla_jit.tune.sweep import Plan, run_sweep

BASE = ["--heads", "16:64", "--kernels", "fused_forward", "--workload", "8192x4"]


@pytest.fixture(autouse=True)
def templates(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))


@pytest.fixture()
def recording(tmp_path):
    path = tmp_path / "sweep.jsonl"
    recorder = jsonl.Recorder(path)
    with Database(tmp_path / "recorded.sqlite", shipped=False) as db:
        run_sweep(Plan((problem(),), ("8192x4",)), FakeEvaluator(), db, recorder=recorder)
    recorder.close()
    return path


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def arguments_of(verb: str, recording, tmp_path) -> list:
    """Arguments with which a verb works, after a run."""
    return {
        "run": [*BASE, "--replay", recording],
        "resume": [],
        "show": BASE,
        "doctor": [],
        "export": [tmp_path / "out.jsonl"],
        "import": [recording],
        "merge": [recording, "--into", tmp_path / "into.sqlite"],
        "fit": [],
        "report": ["--out", tmp_path / "out.html"],
        "replay": [recording],
        "verify": ["--kernels", "fused_forward"],
    }[verb]


def documented(verb: str) -> set[str]:
    """The keys that docs/tuning.md names for a verb, outside of brackets."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "tuning.md").read_text()
    section = text[text.index("## `--json`") : text.index("## How good the search is")]
    lines = [line for line in section.splitlines() if re.match(rf"\| (`\w+`, )?`{verb}`", line)]
    assert len(lines) == 1
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", lines[0].split("|")[2])))


VERBS = sorted(typer.main.get_command(commands.app).commands)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_prints_one_object_with_the_same_first_keys(verb, recording, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify_commands, "make_evaluator", lambda *a: FakeEvaluator())
    assert call("run", *BASE, "--replay", recording) == 0
    capsys.readouterr()
    code = call(verb, *arguments_of(verb, recording, tmp_path), "--json")
    told = json.loads(capsys.readouterr().out)
    assert list(told)[:4] == ["format", "version", "verb", "ok"]
    assert (told["format"], told["version"], told["verb"]) == ("qla-tune", 1, verb)
    assert told["ok"] == (code == 0)
    assert set(told) - {"format", "version", "verb", "ok"} == documented(verb)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["show", "--arch", "sm42"], "UnsupportedError"),
        (["--heads", "1"], "UnsupportedError"),
        (["import", "/nowhere.jsonl"], "DatabaseError"),
        (["replay", "/nowhere.jsonl"], "DatabaseError"),
        (["resume"], "DatabaseError"),
        (["export"], "ConfigError"),
    ],
)
def test_an_error_is_told_in_the_same_object(arguments, kind, monkeypatch, capsys):
    monkeypatch.setattr(commands, "has_gpu", lambda: False)
    assert call(*arguments, "--json") == 2
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    verb = "run" if arguments[0].startswith("-") else arguments[0]
    assert (told["format"], told["verb"], told["ok"], told["error"]["type"]) == ("qla-tune", verb, False, kind)
    assert told["error"]["message"] in captured.err and "Traceback" not in captured.err


def test_sweep_in_which_nothing_ran_is_not_ok(monkeypatch, capsys):
    every = {s: "wrong" for s in (point(a, b, c) for a in range(4) for b in range(5) for c in "pqrstu")}
    monkeypatch.setattr(commands, "_evaluator", lambda *a, **k: FakeEvaluator(every))
    assert call(*BASE, "--json") == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_show_tells_why(tmp_path, capsys):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        db.store.add(best=[best(point(2, 4, "r"))], trials=[trial(point(2, 4, "r"), median=80.0)])
    assert call("show", *BASE[:4], "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["kind"] == "exact" and row["why"]["space"] == {"points": 60, "rejected": {"sum_is_even": 60}}
    assert row["why"]["runners_up"][0]["schedule"]["params"] == {"a": 2, "b": 4, "c": "r"}


def complete(words: str, position: int, **more) -> list[str]:
    environment = {
        **os.environ,
        "_QLA_TUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(position),
    }
    done = subprocess.run(
        [sys.executable, "-m", "qla_jit.cli"], capture_output=True, text=True, env={**environment, **more}, timeout=60
    )
    assert "Traceback" not in done.stderr
    return done.stdout.split()


def test_completion_knows_verbs_options_and_values():
    assert set(complete("qla-tune ", 1)) == set(VERBS)
    assert set(complete("qla-tune re", 1)) == {"report", "replay", "resume"}
    assert "--brief" in complete("qla-tune show --", 2)
    assert complete("qla-tune show --arch sm9", 3) == ["sm90"]
    assert complete("qla-tune run --kernels kk", 3) == ["kkt_inverse"]


def test_completion_without_a_verb_is_that_of_run():
    assert complete("qla-tune --max", 1) == ["--max-trials"]
    assert complete("qla-tune --arch sm9", 2) == ["sm90"]
    assert "--install-completion" in complete("qla-tune --install-completion", 1)
    line = complete(
        "",
        0,
        _QLA_TUNE_COMPLETE="complete_fish",
        _TYPER_COMPLETE_ARGS="qla-tune --max",
        _TYPER_COMPLETE_FISH_ACTION="get-args",
    )
    assert any("--max-trials" in word for word in line)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_script_for_bash_completes_in_bash(tmp_path):
    program = tmp_path / "qla-tune"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m qla_jit.cli "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**environment, "_QLA_TUNE_COMPLETE": "source_bash"}
    ).stdout
    asked = "COMP_WORDS=(qla-tune rep); COMP_CWORD=1; _qla_tune_completion qla-tune; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, env=environment)
    assert set(done.stdout.split()) == {"report", "replay"}
