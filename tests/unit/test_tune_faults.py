"""Real faults around a sweep: disk full, a read-only home, readers during a sweep, a card that fails its probes,
impossible times, a damaged or newer database.  Nothing is lost, nothing wrong is kept, and the sweep finishes or says
what to do."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tuning_fakes import ENVIRONMENT, fake_template, point, problem, script, trial, use_templates

from qla_jit import registry
from qla_jit.config import OpConfig
from qla_jit.db import Database, Store, jsonl, schema
from qla_jit.errors import DatabaseError
from qla_jit.tune import clocks
from qla_jit.tune.clocks import Clocks, Nvml
from qla_jit.tune.compile_pool import CompilePool
from qla_jit.tune.evaluate import LiveEvaluator
from qla_jit.tune.roofline import floor_us
from qla_jit.tune.sweep import Plan, run_sweep
from qla_jit.tune.worker import MAX_START_FAILURES, Worker
from qla_jit.workload import lengths_of

HERE = str(Path(__file__).parent)
#: argv: database, seconds per trial, most bytes of a file.  Prints a line per stored trial, then why it stopped, or the
#: error as qla-tune does.
SWEEP = f"""
    import sys
    sys.path.insert(0, {HERE!r})
    import tuning_fakes as fakes
    from qla_jit import registry
    from qla_jit.db import Database
    from qla_jit.errors import QlaError
    from qla_jit.tune import board, sweep
    named = {{"fake": fakes.fake_template()}}
    registry.templates = lambda: named
    registry.digest = sweep.digest = board.digest = lambda name: fakes.DIGEST

    class Printing(sweep.Listener):
        def trial_done(self, unit, trial, queued):
            print(trial.schedule, flush=True)

    LIMIT = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    if LIMIT:
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    plan = sweep.Plan((fakes.problem(),), ("8192x4",))
    try:
        database = Database(None if sys.argv[1] == "-" else sys.argv[1], shipped=False)
        report = sweep.run_sweep(plan, fakes.FakeEvaluator(delay_s=float(sys.argv[2])), database, Printing())
    except QlaError as error:
        sys.exit(f"qla-tune: {{error}}")
    print("stopped:", report.stopped)
"""
COMPILER = """
    import json
    from qla_jit.tune.child import serve

    def handle(request, reply):
        reply.result(status="ok", path="/artifact", report={}, source_sha256=json.dumps(request["schedule"]))

    serve(dict, handle)
"""


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    use_templates(monkeypatch, fake_template())


@pytest.fixture
def evaluator(tmp_path):
    made = []

    def make(worker_text, **options):
        pool = CompilePool(1, command=[sys.executable, script(tmp_path, "compiler.py", COMPILER)])
        worker = Worker(command=[sys.executable, script(tmp_path, "worker.py", worker_text)], **options)
        made.append(LiveEvaluator(pool, worker))
        return made[-1]

    yield make
    for one in made:
        one.close()


def sweep(tmp_path, *arguments, **options):
    code = script(tmp_path, "sweep.py", SWEEP)
    return subprocess.run([sys.executable, code, *map(str, arguments)], capture_output=True, text=True, **options)


def empty_bytes(folder) -> int:
    """Size of a database with nothing in it; the pages that migrations left free take the first trials."""
    Store(folder / "empty.sqlite").close()
    size = (folder / "empty.sqlite").stat().st_size
    (folder / "empty.sqlite").unlink()
    return size


def searched(path):
    return [t for t in Database(path, shipped=False).trials() if t.phase == "search"]


def sound(path) -> bool:
    with sqlite3.connect(path) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def check_full_disk(path, done, tmp_path, make_room):
    assert done.returncode == 1
    assert "free space" in done.stderr and str(path) in done.stderr and "Traceback" not in done.stderr
    printed = len(done.stdout.splitlines())
    make_room()
    assert sound(path)
    assert len(searched(path)) == printed > 0  # every trial that was reported is there, and no half of another
    again = sweep(tmp_path, path, 0)
    assert again.stdout.splitlines()[-1] == "stopped: "
    assert len(searched(path)) == len({t.schedule for t in searched(path)}) == 60


def test_full_disk_stops_the_sweep_with_a_remedy_and_nothing_lost(tmp_path, small_disk):
    path, filler, code = small_disk / "t.sqlite", small_disk / "filler", script(tmp_path, "sweep.py", SWEEP)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, code, str(path), "0.05"], **pipes)
    seen = [process.stdout.readline() for _ in range(10)]
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:  # somebody else fills the disk
            file.write(b"x" * 4096)
    out, err = process.communicate(timeout=60)
    done = subprocess.CompletedProcess(process.args, process.returncode, "".join(seen) + out, err)
    check_full_disk(path, done, tmp_path, filler.unlink)


def test_file_that_may_grow_no_more_stops_the_sweep_with_a_remedy_and_nothing_lost(tmp_path):
    path = tmp_path / "t.sqlite"
    check_full_disk(path, sweep(tmp_path, path, 0, empty_bytes(tmp_path)), tmp_path, lambda: None)


def test_recording_that_cannot_grow_stops_the_sweep_and_keeps_whole_lines(tmp_path, small_disk):
    file = small_disk / "r.jsonl"
    recorder = jsonl.Recorder(file)
    with pytest.raises(DatabaseError, match="r.jsonl.*free space"):
        for i in range(10_000):
            recorder.add(trial(created=str(i)))
    recorder.close()
    kept = jsonl.read(file).trials
    assert [t.created for t in kept] == [str(i) for i in range(len(kept))] and len(kept) > 50


def test_half_a_line_that_a_crash_left_in_a_recording_is_removed_before_the_next(tmp_path):
    file = tmp_path / "r.jsonl"
    recorder = jsonl.Recorder(file)
    recorder.add(trial(created="1"))
    recorder.add(trial(created="2"))
    recorder.close()
    os.truncate(file, file.stat().st_size - 20)
    recorder = jsonl.Recorder(file)
    recorder.add(trial(created="3"))
    recorder.close()
    assert [t.created for t in jsonl.read(file).trials] == ["1", "3"]


FULL_DISK_COMPILER = """
    import json, os, sys
    from qla_jit import build
    from qla_jit.errors import BuildError
    from qla_jit.tune import compile_child
    from qla_jit.tune.child import serve

    def ensure(spec, store):
        if os.path.exists(sys.argv[1]):
            raise ERROR
        raise BuildError("nvcc failed", log="error: no such instruction")

    build.ensure = ensure
    serve(dict, compile_child._handle)
"""


@pytest.mark.parametrize(
    "error",
    [
        'OSError(28, "No space left on device")',
        'BuildError("nvcc failed", log="fatal: /tmp/x.o: No space left on device")',
        'OSError(30, "Read-only file system")',
    ],
)
def test_full_disk_of_the_compiler_is_no_fault_of_a_schedule(tmp_path, evaluator, error):
    full = tmp_path / "full"
    full.touch()
    code = script(tmp_path, "full.py", FULL_DISK_COMPILER.replace("ERROR", error))
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        for stopped, statuses in (("set QLA_CACHE_DIR", set()), ("", {"compile_error"})):
            one = evaluator(worker_text())
            one._pool.close()
            one._pool = CompilePool(1, command=[sys.executable, code, str(full)])
            report = run_sweep(Plan((problem(),), ("64x1",), max_trials=4), one, db)
            assert stopped in report.stopped and bool(stopped) == bool(report.stopped)
            assert {t.status for t in db.trials()} == statuses
            one._pool.close()
            full.unlink(missing_ok=True)


def bound(*command) -> list[str]:
    """A command that file permissions bind, also where the tests run as root."""
    if os.getuid():
        return [*map(str, command)]
    tool = shutil.which("setpriv")
    if tool is None:
        pytest.skip("root may write everywhere, and setpriv (util-linux) is not there to give that up")
    dropped = "-dac_override,-dac_read_search"
    return [tool, f"--bounding-set={dropped}", f"--inh-caps={dropped}", *map(str, command)]


def bound_sweep(folder, *arguments, **options):
    command = bound(sys.executable, script(folder, "sweep.py", SWEEP), *arguments)
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_read_only_home_names_the_file_and_the_way_out(tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    environment = {k: v for k, v in os.environ.items() if k not in ("QLA_DB", "QLA_CACHE_DIR", "XDG_DATA_HOME")}
    environment |= {"HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = bound_sweep(tmp_path, "-", 0, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("qla-tune: ") and "QLA_DB" in done.stderr and str(home) in done.stderr
    assert list(home.iterdir()) == []
    code = "from qla_jit.db import open_db; print(len(open_db().best_rows('sm90')) > 0)"
    read = subprocess.run(bound(sys.executable, "-c", code), capture_output=True, text=True, env=environment)
    assert read.stdout.strip() == "True", read.stderr


def test_database_in_a_read_only_folder_is_read_and_not_written(tmp_path):
    folder = tmp_path / "shared"
    folder.mkdir()
    with Store(folder / "t.sqlite") as store:
        store.add_trial(trial())
    before = (folder / "t.sqlite").read_bytes()
    os.chmod(folder / "t.sqlite", 0o444)
    os.chmod(folder, 0o555)
    code = "import sys; from qla_jit.db import Database; print(len(Database(sys.argv[1], shipped=False).trials()))"
    read = subprocess.run(bound(sys.executable, "-c", code, folder / "t.sqlite"), capture_output=True, text=True)
    assert read.stdout.strip() == "1", read.stderr
    done = bound_sweep(tmp_path, folder / "t.sqlite", 0)
    assert done.returncode == 1
    assert "make its folder writable" in done.stderr and "Traceback" not in done.stderr
    assert (folder / "t.sqlite").read_bytes() == before
    os.chmod(folder, 0o755)


READER = """
    import sys, time
    from qla_jit.db import Database
    database, seen, reads, end = Database(sys.argv[1], shipped=False), 0, 0, time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end or reads < 3:
        trials = database.trials()
        assert len(trials) >= seen, (len(trials), seen)
        assert all(len(t.samples_us) == 3 for t in trials)
        database.best_rows("sm90")
        seen, reads = len(trials), reads + 1
    print(reads)
"""


def test_sixty_four_readers_during_a_sweep_see_whole_trials_and_stop_nothing(tmp_path):
    path, code = tmp_path / "t.sqlite", script(tmp_path, "reader.py", READER)
    with Store(path) as store:
        store.add_trial(trial(point(3, 1, "u"), created="before"))
    command = [sys.executable, code, str(path), "6"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    readers = [subprocess.Popen(command, **pipes) for _ in range(64)]
    try:
        done = sweep(tmp_path, path, 0.02, timeout=300)
        said = [reader.communicate(timeout=300) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
    assert done.stdout.splitlines()[-1] == "stopped: ", done.stderr
    assert [err for _, err in said if err] == []
    assert all(int(out) >= 3 for out, _ in said)
    assert len({t.schedule for t in searched(path)}) == 60
    assert sound(path)


def test_sweep_on_a_damaged_or_newer_database_says_what_to_do_and_changes_nothing(tmp_path):
    truncated, newer = tmp_path / "truncated.sqlite", tmp_path / "newer.sqlite"
    for path in (truncated, newer):
        with Store(path) as store:
            store.add(trials=[trial(created=str(i)) for i in range(50)])
    truncated.write_bytes(truncated.read_bytes()[:20_000])
    with sqlite3.connect(newer) as connection:
        connection.execute(f"PRAGMA user_version = {len(schema.MIGRATIONS) + 1}")
    connection.close()
    for path, remedy in ((truncated, "import your last export"), (newer, "upgrade qla-jit")):
        before = path.read_bytes()
        done = sweep(tmp_path, path, 0)
        assert done.returncode == 1
        assert remedy in done.stderr and "Traceback" not in done.stderr
        assert path.read_bytes() == before


def test_database_that_is_cut_short_during_a_sweep_stops_it_with_the_remedy(tmp_path):
    path, code = tmp_path / "t.sqlite", script(tmp_path, "sweep.py", SWEEP)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, code, str(path), "0.05"], **pipes)
    for _ in range(20):
        process.stdout.readline()
    with path.open("r+b") as file:
        file.truncate(8192)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "import your last export" in said and "Traceback" not in said


def test_coordinator_killed_in_the_middle_of_a_commit_leaves_whole_trials(tmp_path):
    """Killed where SQLite has begun to change the file: the journal that is left undoes it."""
    path = tmp_path / "t.sqlite"
    with Store(path) as store:
        store.add(trials=[trial(point(0, 0, c), created=c) for c in "pqr"])
    before = searched(path)
    dying = f"""
        import os, signal, sqlite3, sys
        sys.path.insert(0, {HERE!r})
        from tuning_fakes import point, trial
        from qla_jit.db import Store
        store = Store(sys.argv[1])
        store._connection.execute("PRAGMA cache_size = 1")  # pages go to the file before the commit

        def die(*_):
            if os.path.getsize(sys.argv[1] + "-journal") > 0:
                os.kill(os.getpid(), signal.SIGKILL)

        store._connection.set_trace_callback(lambda text: text.startswith("COMMIT") and die())
        store.add(trials=[trial(point(1, 1, "p"), created=str(i)) for i in range(200)])
    """
    done = subprocess.run([sys.executable, script(tmp_path, "dying.py", dying), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "t.sqlite-journal").stat().st_size > 0
    assert searched(path) == before
    assert sound(path)


WORKER = f"""
    import json, os, sys, time
    from qla_jit.tune.child import serve

    def handle(request, reply):
        log(request["op"])
        if request["op"] == "probe":
            PROBE
            reply.result(status="ok")
            return
        params = request["schedule"]["params"]
        reply.stage("verify")
        KERNEL
        time_us = 100.0 + 10 * abs(params["a"] - 2) + 5 * abs(params["b"] - 4)
        reply.result(status="ok", samples_us=[time_us + i for i in range(4)], error=1e-3, verify_s=0.01, measure_s=0.02,
                     sm_mhz=1755, memory_mhz=3201)

    def log(text):
        with open(__file__ + ".log", "a") as file:
            file.write(f"{{os.getpid()}} {{text}}\\n")

    serve(lambda: {{"environment": {ENVIRONMENT.as_dict()!r}}}, handle)
"""


def worker_text(probe="pass", kernel="pass"):
    return WORKER.replace("PROBE", probe).replace("KERNEL", kernel)


def logged(tmp_path):
    return [line.split()[1] for line in (tmp_path / "worker.py.log").read_text().splitlines()]


def test_a_kernel_that_never_ends_is_followed_by_a_probe_of_the_fresh_process(tmp_path, evaluator):
    one = evaluator(worker_text(kernel="time.sleep(600 if params['a'] == 1 else 0)"), deadlines={"verify": 0.5})
    hanging, next_ = (one.evaluate(problem(), "64x1", point(a, b, "p")) for a, b in ((1, 1), (0, 0)))
    assert (hanging.status, next_.status) == ("run_timeout", "ok")
    assert "0.5 s in stage verify" in hanging.reason
    assert logged(tmp_path) == ["measure", "probe", "measure"]


def test_card_that_fails_every_probe_stops_the_sweep_clearly_and_records_no_more_trials(tmp_path, evaluator):
    text = worker_text(probe="time.sleep(600)", kernel="os._exit(9) if (params['a'], params['b']) == (1, 1) else None")
    one = evaluator(text, deadlines={"probe": 0.3, "request": 0.3})
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        report = run_sweep(Plan((problem(),), ("64x1",)), one, db)
        trials = db.trials()
    assert f"{MAX_START_FAILURES} in a row failed" in report.stopped and "nvidia-smi" in report.stopped
    assert logged(tmp_path).count("probe") == MAX_START_FAILURES
    assert [t.status for t in trials].count("crashed") == 1
    assert trials[-1].status == "crashed"
    assert len(trials) < 60


def test_worker_killed_from_outside_in_the_middle_of_a_sweep_costs_one_trial(tmp_path, evaluator):
    one = evaluator(worker_text(kernel="time.sleep(0.02)"))

    class Killing:
        killed = 0

        def __getattr__(self, name):
            return lambda *a: None

        def trial_done(self, unit, trial, queued):
            if len(unit.trials) in (10, 20):
                os.kill(one._cards._workers[0]._channel.pid, signal.SIGKILL)
                self.killed += 1

    killing = Killing()
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        report = run_sweep(Plan((problem(),), ("64x1",)), one, db, killing)
        statuses = report.units[0].statuses
    assert killing.killed == 2
    assert report.stopped == ""
    assert statuses["ok"] >= 58 and sum(statuses.values()) == 60
    assert report.units[0].row.schedule.params()["a"] == 2


def test_trial_holds_all_samples_clocks_and_the_five_times(tmp_path, evaluator):
    one = evaluator(worker_text(kernel="time.sleep(0.2)"))
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        run_sweep(Plan((problem(),), ("64x1",), max_trials=1), one, db)
        found = next(t for t in db.trials() if t.phase == "search")
        (row,) = db.store._query("SELECT samples_us, median_us, iqr_us FROM trial WHERE phase = 'search'")
    assert json.loads(row["samples_us"]) == list(found.samples_us) and len(found.samples_us) == 4
    assert (row["median_us"], row["iqr_us"]) == (found.median_us, found.iqr_us)
    assert found.iqr_us == pytest.approx(1.5)
    assert (found.sm_mhz, found.memory_mhz) == (1755, 3201)
    times = found.times
    assert (times.verify_s, times.measure_s) == (0.01, 0.02)
    assert times.compile_s > 0 and times.search_s > 0
    assert times.overhead_s > 0.15  # what the worker did not account for


REAL_TEMPLATES = registry.templates


def test_floor_is_below_every_recorded_time():
    real = OpConfig(16, 64).problem("fused_forward")
    assert floor_us(real, point(), [8192] * 4) < 1e-3  # the fake template declares next to no work
    with pytest.MonkeyPatch.context() as context:
        context.setattr(registry, "templates", REAL_TEMPLATES)
        file = Path(HERE).parents[1] / "tuning_db" / "sweeps" / "sm90_16_64.jsonl"
        checked = 0
        for t in jsonl.read(file).trials:
            if t.status == "ok" and t.schedule.template in REAL_TEMPLATES():
                try:
                    least = floor_us(t.problem, t.schedule, lengths_of(t.workload))
                except KeyError:  # a parameter that the template had then
                    continue
                assert 0 < least < t.median_us
                checked += 1
        assert checked > 20


@pytest.mark.parametrize("second", ["1", "150"])
def test_time_below_the_floor_is_measured_again_and_wrong_if_it_stays(tmp_path, evaluator, monkeypatch, second):
    monkeypatch.setattr("qla_jit.tune.evaluate.floor_us", lambda *arguments: 50.0)
    kernel = f"""
        if params["a"] == 1:
            first = not os.path.exists(__file__ + ".again")
            open(__file__ + ".again", "w").close()
            time_us = 1.0 if first else {second}.0
            reply.result(status="ok", samples_us=[time_us] * 3, error=1e-3, verify_s=0, measure_s=0)
            return""".strip()
    one = evaluator(worker_text(kernel=kernel))
    found = one.evaluate(problem(), "64x1", point(1, 1, "p"))
    assert logged(tmp_path).count("measure") == 2
    if second == "1":
        assert (found.status, found.samples_us) == ("wrong", ())
        assert "measured 1 and then 1 us, below the roofline floor of 50 us" in found.reason
    else:
        assert (found.status, found.median_us) == ("ok", 150.0)


NVML = """
    #include <string.h>
    int nvmlInit_v2(void) { return 0; }
    int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
        *handle = (void *)1;
        return strcmp(uuid, "GPU-1234") ? 6 : 0;
    }
    int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *mhz) {
        if (handle != (void *)1) return 2;
        if (type == 1) { *mhz = 1980; return 0; }
        return 3;
    }
"""


def test_clocks_are_read_through_the_drivers_library(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a stand-in of the library")
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    nvml = Nvml(str(library))
    assert nvml.clocks("1234") == nvml.clocks("GPU-1234") == Clocks(1980, None)
    with pytest.raises(RuntimeError, match="nvmlDeviceGetHandleByUUID gave 6"):
        nvml.clocks("other")


def test_card_without_the_library_has_no_clocks(monkeypatch):
    clocks._nvml.cache_clear()
    monkeypatch.setattr(clocks, "LIBRARY", "libnot-there.so")
    monkeypatch.setattr(clocks.Nvml.__init__, "__defaults__", ("libnot-there.so",))
    assert clocks.observe("1234") == Clocks()
    clocks._nvml.cache_clear()
