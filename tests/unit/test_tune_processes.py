"""The processes of a sweep, each misbehaving for real: hang, crash, garbage, kill, orphaned compilers."""

import os
import subprocess
import sys
import time

import pytest
from tuning_fakes import ENVIRONMENT, fake_template, point, problem, script, use_templates

from qla_jit.db import Database
from qla_jit.errors import CompilerMissingError
from qla_jit.spec import KernelSpec
from qla_jit.tune.channel import Channel, ChannelError
from qla_jit.tune.compile_pool import CompilePool
from qla_jit.tune.evaluate import LiveEvaluator, OutOfTimeError
from qla_jit.tune.sweep import Plan, run_sweep
from qla_jit.tune.worker import Worker, WorkerLostError

COMPILER = """
    import json, os, subprocess, sys, time
    from qla_jit.tune.child import serve

    def handle(request, reply):
        c = request["schedule"]["params"]["c"]
        print("noise on stdout")
        reply.stage("compile")
        if c == "s":
            child = subprocess.Popen(["sleep", "600"])
            open(sys.argv[1], "w").write(str(child.pid))
            time.sleep(600)
        if c == "t":
            os._exit(9)
        if c == "u":
            reply.result(status="compile_error", reason="no such instruction")
            return
        if c == "missing":
            reply.result(status="compiler_missing", reason="no nvcc here")
            return
        report = {"registers": 168, "smem_bytes": 2048, "local_bytes": 0, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
        reply.result(status="ok", path="/artifact", report=report, source_sha256=json.dumps(request["schedule"]))

    serve(dict, handle)
"""
WORKER = f"""
    import os, sys, time
    from qla_jit.tune.child import serve

    def handle(request, reply):
        if request["op"] == "probe":
            reply.result(status="ok")
            return
        params = request["schedule"]["params"]
        print("a kernel printed this")
        reply.stage("verify")
        a, b = params["a"], params["b"]
        if (a, b) == (1, 1):
            time.sleep(600)
        if (a, b) == (1, 3):
            os.kill(os.getpid(), 11)
        if (a, b) == (2, 0):
            reply._descriptor and os.write(reply._descriptor, b"\\x00garbage\\n")
            return
        if (a, b) == (2, 2):
            reply.result(status="launch_error", reason="illegal address", sticky=True)
            sys.exit(70)
        if (a, b) == (3, 1):
            reply.result(status="wrong", reason="seed 0: relative error 0.5 > tolerance 0.006", error=0.5)
            return
        if (a, b) == (3, 3):
            reply.result(status="ok", samples_us=[float("nan")])
            return
        time_us = 100.0 + 10 * abs(a - 2) + 5 * abs(b - 4)
        reply.result(status="ok", samples_us=[time_us] * 3, error=1e-3, verify_s=0.01, measure_s=0.02, sticky=False)

    serve(lambda: {{"environment": {ENVIRONMENT.as_dict()!r}}}, handle)
"""


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    choices = (tuple(range(4)), tuple(range(5)), ("p", "s", "t", "u", "missing"))
    use_templates(monkeypatch, fake_template(choices=choices))


@pytest.fixture()
def pool(tmp_path):
    command = [sys.executable, script(tmp_path, "compiler.py", COMPILER), str(tmp_path / "orphan")]
    with CompilePool(2, timeout_s=2.0, command=command) as pool:
        yield pool


def worker_of(tmp_path, text=WORKER, **options):
    return Worker(command=[sys.executable, script(tmp_path, "worker.py", text)], **options)


def spec(*params):
    return KernelSpec(problem(), point(*params))


def is_running(pid):
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")


def test_compiler_sees_no_gpu_and_its_prints_do_not_disturb(pool):
    compiled = pool.submit(spec(0, 0, "p")).result(20)
    assert (compiled.status, compiled.path) == ("ok", "/artifact")
    assert compiled.report["gpus"] == ""
    assert compiled.seconds > 0


def test_timeout_kills_the_compiler_with_its_children_and_spares_the_others(pool, tmp_path):
    hanging = pool.submit(spec(0, 0, "s"))
    others = [pool.submit(spec(a, a, "p")) for a in range(4)]
    assert [f.result(20).status for f in others] == ["ok"] * 4
    compiled = hanging.result(20)
    assert compiled.status == "compile_timeout"
    assert "2 s in stage compile" in compiled.reason
    assert not is_running((tmp_path / "orphan").read_text())


def test_compiler_that_dies_or_fails_is_a_status_with_its_reason(pool):
    died, failed = pool.submit(spec(0, 0, "t")).result(20), pool.submit(spec(0, 0, "u")).result(20)
    assert (died.status, "exit code 9" in died.reason) == ("crashed", True)
    assert (failed.status, failed.reason) == ("compile_error", "no such instruction")
    assert pool.submit(spec(2, 2, "p")).result(20).status == "ok"


def test_missing_compiler_is_an_error_not_a_status(pool):
    with pytest.raises(CompilerMissingError, match="no nvcc here"):
        pool.submit(spec(0, 0, "missing")).result(20)


def test_equal_kernels_are_compiled_once(pool):
    assert pool.submit(spec(0, 0, "p")) is pool.submit(spec(0, 0, "p"), urgent=True)


def test_closing_the_pool_does_not_wait_for_a_hanging_compiler(tmp_path):
    command = [sys.executable, script(tmp_path, "compiler.py", COMPILER), str(tmp_path / "orphan")]
    pool = CompilePool(1, timeout_s=600.0, command=command)
    running, waiting = pool.submit(spec(0, 0, "s")), pool.submit(spec(0, 0, "p"))
    while not (tmp_path / "orphan").exists() or not (tmp_path / "orphan").read_text():
        time.sleep(0.05)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert running.done() and waiting.cancelled()
    assert not is_running((tmp_path / "orphan").read_text())


def test_pool_may_be_closed_again(pool):
    for _ in range(3):
        pool.close()


@pytest.mark.parametrize(
    ("params", "status", "reason", "restarts"),
    [
        ((0, 0), "ok", None, 0),
        ((1, 1), "run_timeout", "1 s in stage verify", 1),
        ((1, 3), "crashed", "SIGSEGV", 1),
        ((2, 0), "crashed", "garbage", 1),
        ((2, 2), "launch_error", "illegal address", 1),
        ((3, 1), "wrong", "relative error 0.5", 0),
        ((3, 3), "crashed", "nonsense", 0),
    ],
)
def test_worker_turns_every_death_into_a_status_and_serves_the_next(tmp_path, params, status, reason, restarts):
    worker = worker_of(tmp_path, deadlines={"verify": 1.0})
    request = {"schedule": point(*params).as_dict()}
    answer = worker.measure(request)
    assert answer["status"] == status
    assert reason is None or reason in answer["reason"]
    assert worker.measure({"schedule": point(0, 2).as_dict()})["status"] == "ok"
    assert worker.restarts == restarts
    worker.close()


def test_killed_worker_is_replaced(tmp_path):
    worker = worker_of(tmp_path)
    worker.ensure()
    os.kill(worker._channel.pid, 9)
    assert worker.measure({"schedule": point(0, 0).as_dict()})["status"] in ("ok", "crashed")
    assert worker.measure({"schedule": point(0, 0).as_dict()})["status"] == "ok"
    worker.close()


def test_device_that_never_comes_back_stops_with_a_remedy(tmp_path):
    worker = worker_of(tmp_path, "import sys; sys.exit('no CUDA-capable device')")
    with pytest.raises(WorkerLostError, match="no CUDA-capable device.*nvidia-smi"):
        worker.ensure()


def test_child_dies_with_its_parent(tmp_path):
    child = script(tmp_path, "child.py", WORKER)
    parent = script(
        tmp_path,
        "parent.py",
        f"""
        import os, sys
        from qla_jit.tune.channel import Channel
        channel = Channel([sys.executable, {child!r}])
        channel.receive({{"": 20.0}})
        channel.send({{"op": "measure", "schedule": {point(1, 1).as_dict()!r}}})
        print(channel.pid, flush=True)
        os.kill(os.getpid(), 9)
        """,
    )
    pid = int(subprocess.run([sys.executable, parent], capture_output=True, text=True, check=False).stdout)
    until = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(pid)


def test_silent_child_is_killed_at_its_deadline():
    channel = Channel([sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(ChannelError, match="no answer within 0.3 s") as caught:
        channel.receive({"": 0.3})
    assert (caught.value.kind, channel.alive) == ("timeout", False)


def test_sweep_with_hanging_crashing_and_wrong_schedules_goes_on_and_chooses_none_of_them(pool, tmp_path, monkeypatch):
    use_templates(monkeypatch, fake_template(choices=(tuple(range(4)), tuple(range(5)), ("p", "u"))))
    evaluator = LiveEvaluator(pool, worker_of(tmp_path, deadlines={"verify": 1.0}))
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        report = run_sweep(Plan((problem(),), ("64x1",)), evaluator, db)
        stored = [t for t in db.trials() if t.phase == "search"]
        (row,) = db.store.best_rows()
    evaluator.close()
    assert report.stopped == ""
    assert report.units[0].statuses == {
        "ok": 4, "compile_error": 10, "run_timeout": 1, "crashed": 3, "launch_error": 1, "wrong": 1,
    }  # fmt: skip
    assert len(stored) == 20
    assert all(t.reason for t in stored if t.status != "ok")
    assert row.schedule == point(2, 4, "p")
    assert row.gain == pytest.approx(1.4)
    assert stored[0].schedule == point(0, 0, "p")
    good = next(t for t in stored if t.status == "ok")
    assert (good.registers, good.smem_bytes, good.times.verify_s, good.times.measure_s) == (168, 2048, 0.01, 0.02)
    assert good.times.compile_s > 0


def test_schedules_with_equal_cuda_text_are_measured_once(tmp_path):
    text = COMPILER.replace('json.dumps(request["schedule"])', '"same"')
    pool = CompilePool(1, command=[sys.executable, script(tmp_path, "compiler.py", text), "-"])
    evaluator = LiveEvaluator(pool, worker_of(tmp_path))
    first, second = (evaluator.evaluate(problem(), "64x1", point(0, b, "p")) for b in (0, 2))
    again = evaluator.evaluate(problem(), "64x1", point(0, 0, "p"))
    evaluator.close()
    assert (first.status, second.status, again.status) == ("ok", "duplicate", "ok")
    assert str(first.schedule) in second.reason


def test_deadline_ends_the_wait_for_a_compiler(pool, tmp_path):
    evaluator = LiveEvaluator(pool, worker_of(tmp_path))
    with pytest.raises(OutOfTimeError):
        evaluator.evaluate(problem(), "64x1", point(0, 0, "s"), deadline=time.monotonic() + 0.2)
    evaluator.close()
