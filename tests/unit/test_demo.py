"""The demo without a GPU, on a small synthetic recording made here; the numbers in it mean nothing."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tuning_fakes import ENVIRONMENT, FakeEvaluator, problem, trial

from qla_jit import toolchain
from qla_jit.db import jsonl, open_db
from qla_jit.db.records import BestRow
from qla_jit.demo import __main__ as command
from qla_jit.demo import layer, peers, stages
from qla_jit.errors import QlaError, UnsupportedError
from qla_jit.op import select_kernels
from qla_jit.registry import digest
from qla_jit.tune.space import enumerate_space, plan_problems

CONFIG = layer.layer_config("sm90")
POINTS = 3  # of each kernel's space, the default first


def recorded_trials():
    for asked in plan_problems([CONFIG]):
        for i, point in enumerate(enumerate_space(asked).points[:POINTS]):
            for workload in ("8192x4", "1x8192"):
                yield trial(
                    point, median=100.0 - i, problem_=asked, workload=workload, template_digest=digest(point.template)
                )


@pytest.fixture()
def recording(tmp_path):
    path = tmp_path / "recorded.jsonl"
    path.write_text(jsonl.dumps(trials=recorded_trials()))
    return path


@pytest.fixture(autouse=True)
def no_gpu_and_small_batches(monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "has_gpu", lambda: False)
    monkeypatch.setattr(layer, "CPU_SHAPES", ("1x65", "1x1"))
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))
    monkeypatch.setenv("QLA_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture()
def no_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "current", lambda: toolchain.Toolchain("0.1.15", None))


def test_without_gpu_and_compiler_it_replays_runs_on_the_cpu_and_draws(recording, no_compiler, tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "out"), "--recording", str(recording)]) == 0
    said = capsys.readouterr().out
    picture = tmp_path / "out" / "sweep.png"
    assert said.rstrip().endswith(f"picture: {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert str(ENVIRONMENT) in said, "the card that was measured must be named"
    assert "nvcc must be present" in said and "still work" in said
    assert "1x65, µs" in said


def test_replayed_rows_stay_out_of_the_users_database(recording, no_compiler, tmp_path):
    command.main(["--out", str(tmp_path / "out"), "--recording", str(recording)])
    assert not (tmp_path / "user.sqlite").exists()
    assert (tmp_path / "out" / stages.REPLAY_DATABASE).exists()


def test_second_run_replays_everything_again(recording, no_compiler, tmp_path, capsys):
    for _ in range(2):
        command.main(["--out", str(tmp_path / "out"), "--recording", str(recording)])
    assert capsys.readouterr().out.count(f"{POINTS}/{POINTS} ({POINTS} ok)") == 2 * 2 * len(plan_problems([CONFIG]))


@pytest.mark.parametrize("foreign", [trial(problem_=problem(2, 8)), trial()], ids=["other_heads", "other_template"])
def test_without_a_recording_of_the_layer_it_says_so_and_goes_on(foreign, no_compiler, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(jsonl.dumps(trials=[foreign]))
    assert command.main(["--out", str(tmp_path / "out"), "--recording", str(other)]) == 0
    said = capsys.readouterr().out
    assert "recorded sweep of heads 16:64" in said and "qla-tune --record" in said
    assert "largest error" in said and "picture" not in said


def test_missing_recording_is_an_error_with_its_path(no_compiler, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path), "--recording", str(tmp_path / "absent.jsonl")])
    assert stopped.value.code == 2
    assert "absent.jsonl" in capsys.readouterr().err


@pytest.mark.codegen
@pytest.mark.skipif(toolchain.current().nvcc is None, reason="needs nvcc")
def test_winners_of_the_replay_are_cross_compiled_and_reported(recording, tmp_path, capsys):
    winners = {p.kernel: enumerate_space(p).points[:POINTS][-1] for p in plan_problems([CONFIG])}
    assert command.main(["--out", str(tmp_path / "out"), "--recording", str(recording)]) == 0
    said = capsys.readouterr().out
    for kernel, winner in winners.items():
        assert f"{kernel}: ok in" in said
        assert str(winner) in said
    libraries = list((tmp_path / "kernels").glob("[!.]*/*/kernel.so"))
    with open_db(tmp_path / "out" / stages.REPLAY_DATABASE) as db:
        assert len(libraries) == len(select_kernels(CONFIG, db).specs) > len(winners)  # with all that plans may choose


@pytest.fixture()
def fake_card(monkeypatch):
    """A live machine whose card, compiler and timings are stand-ins; returns the evaluators that were made."""
    made = []

    def evaluator(pool, worker):
        made.append(FakeEvaluator(times=lambda schedule: 50.0))
        return made[-1]

    op = SimpleNamespace(config=CONFIG, report=lambda: [])
    monkeypatch.setattr(stages, "look_around", lambda: stages.Machine("sm90", True))
    monkeypatch.setattr(stages, "CompilePool", lambda: None)
    monkeypatch.setattr(stages, "Worker", lambda device: None)
    monkeypatch.setattr(stages, "LiveEvaluator", evaluator)
    monkeypatch.setattr(stages, "build_kernels", lambda *_: op)
    monkeypatch.setattr(layer, "measure", lambda shape, device, make_call: layer.Row(shape, 12.5, 0.003, device))
    monkeypatch.setattr(peers, "is_installed", lambda name: name == "fla")
    monkeypatch.setattr(peers, "measure_peer", lambda name, shapes: ([layer.Row(shapes[0], 99.5, 0.004)], "failed: x"))
    return made


def test_live_sweep_fills_the_users_database_and_every_peer_gets_a_line(fake_card, tmp_path, capsys):
    assert command.main(["--out", str(tmp_path / "out"), "--budget", "60"]) == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith(str(tmp_path / "out" / "sweep.png"))
    assert not (tmp_path / "out" / stages.REPLAY_DATABASE).exists()
    with open_db(tmp_path / "user.sqlite") as database:
        stored = {row.problem for kind, row in database.best_rows("sm90") if kind == "user"}
    assert stored == set(plan_problems([CONFIG]))
    lines = [line for line in said.splitlines() if "│" in line]
    absent = {"flash_qla": "not installed", "flashinfer": "not installed"}
    for name, cell in {"qla_jit": "12.5", "fla": "99.5", **absent}.items():
        assert any(name in line and cell in line for line in lines), said
    assert "8192x4, µs" in said and "failed: x" in said


def test_interrupted_live_sweep_is_drawn_and_ends_with_130(fake_card, monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "LiveEvaluator", lambda pool, worker: FakeEvaluator(stop_after=5, times=lambda s: 50.0))
    assert command.main(["--out", str(tmp_path / "out")]) == 130
    assert (tmp_path / "out" / "sweep.png").exists()
    with open_db(tmp_path / "user.sqlite") as database:
        assert len(database.trials()) == 5


def test_card_of_an_unknown_family_is_named_and_the_recorded_line_runs(monkeypatch):
    def detect():
        raise UnsupportedError("a compute capability of ... must be present, but the card has (7, 0)")

    monkeypatch.setattr(stages, "has_gpu", lambda: True)
    monkeypatch.setattr("qla_jit.arch.detect", detect)
    machine = stages.look_around()
    assert (machine.arch, machine.is_live) == (None, False)
    assert "(7, 0)" in machine.notes[0]


def test_error_of_a_wrong_output_is_seen():
    x = layer.inputs_of("1x65", "cpu")
    o, final = layer.qla_jit_call(x)()
    assert layer.error_of(x, o, final) < 1e-5
    assert layer.error_of(x, 1.01 * o, final) == pytest.approx(0.01, rel=0.01)
    assert layer.error_of(x, o, 1.01 * final) == pytest.approx(0.01, rel=0.01)


def test_peer_that_is_not_installed_gets_a_line(monkeypatch, capsys):
    monkeypatch.setattr(peers, "is_installed", lambda name: False)
    found = stages.run_peers(("1x1",), stages.Console())
    assert found == {name: ([], "not installed") for name in ("fla", "flash_qla", "flashinfer")}


def fake_peer(monkeypatch, tmp_path, body: str) -> None:
    path = tmp_path / "peer.py"
    path.write_text(body)
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **kw: real([sys.executable, str(path)], **kw))


ROW = 'ROW {"shape": "1x1", "time_us": 2.5, "error": 0.004, "note": ""}'


def test_peer_that_dies_keeps_the_rows_it_gave_and_its_last_words(monkeypatch, tmp_path):
    fake_peer(monkeypatch, tmp_path, f"print('noise')\nprint({ROW!r}, flush=True)\nraise RuntimeError('lost the card')")
    rows, reason = peers.measure_peer("fla", ("1x1", "1x2"))
    assert rows == [layer.Row("1x1", 2.5, 0.004)]
    assert reason == "failed: RuntimeError: lost the card"


def test_peer_that_hangs_is_stopped_and_keeps_its_rows(monkeypatch, tmp_path):
    fake_peer(monkeypatch, tmp_path, f"import time\nprint({ROW!r}, flush=True)\ntime.sleep(60)")
    rows, reason = peers.measure_peer("fla", ("1x1", "1x2"), timeout_s=1.0)
    assert rows == [layer.Row("1x1", 2.5, 0.004)]
    assert reason == "not done after 1 s"


def test_line_per_implementation_shows_what_is_missing_and_why():
    rows = [layer.Row("1x1", 2.5, 0.004, "no CUDA graph (RuntimeError)")]
    table = stages.layer_table("t", ("1x1", "1x2"), {"fla": (rows, "failed: x"), "flash_qla": ([], "not installed")})
    cells = [list(column.cells) for column in table.columns]
    assert cells == [
        ["fla", "flash_qla"], ["2.5", "-"], ["-", "-"], ["4.0e-03", "-"],
        ["no CUDA graph (RuntimeError); failed: x", "not installed"],
    ]  # fmt: skip


def test_broken_cache_folder_ends_with_the_message_and_code_2(recording, monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise QlaError("`x` must hold, but got y; do z.")

    monkeypatch.setattr(stages, "build_kernels", fail)
    monkeypatch.setattr(toolchain, "current", lambda: toolchain.Toolchain("0.1.15", "13.0.0", shutil.which("true")))
    with pytest.raises(SystemExit) as stopped:
        command.main(["--out", str(tmp_path / "out"), "--recording", str(recording)])
    assert stopped.value.code == 2
    assert "QlaError: `x` must hold" in capsys.readouterr().err


def test_row_of_the_database_names_what_was_recorded(recording, tmp_path):
    _, database = stages.sweep_recorded(CONFIG, [recording], 60.0, tmp_path, stages.Console(quiet=True))
    with database:
        rows = [row for layer_name, row in database.best_rows("sm90") if layer_name == "user"]
    assert all(isinstance(row, BestRow) and row.environment == ENVIRONMENT for row in rows)
    assert len(rows) == 3 * len(plan_problems([CONFIG]))  # two workloads and both together
