import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tuning_fakes import add_rows_of_a_gone_kernel, best, point, problem, script, trial

from qla_jit.db import schema
from qla_jit.db.layers import Database
from qla_jit.db.records import STATUSES, problem_body, short_id
from qla_jit.db.store import Store
from qla_jit.errors import DatabaseError
from qla_jit.spec import canonical_json

HERE = str(Path(__file__).parent)
WRITER = f"""
    import sys
    sys.path.insert(0, {HERE!r})
    from tuning_fakes import point, trial
    from qla_jit.db.store import Store
    store = Store(sys.argv[1])
    for i in range(int(sys.argv[2])):
        store.add_trial(trial(created=sys.argv[3] + str(i)))
        print(i, flush=True)
"""


def test_every_status_survives_with_its_reason(tmp_path):
    with Store(tmp_path / "t.sqlite") as store:
        written = [trial(status=s, created=s) for s in STATUSES]
        for t in written:
            store.add_trial(t)
    with Store(tmp_path / "t.sqlite", mode="ro") as store:
        assert store.trials() == written
        assert [t.uid for t in store.trials()] == [t.uid for t in written]


def test_trials_are_found_by_problem_and_workload(tmp_path):
    with Store(tmp_path / "t.sqlite") as store:
        for heads in (16, 32):
            for workload in ("8192x4", "1x8192"):
                store.add_trial(trial(problem_=problem(heads, 64), workload=workload))
        found = store.trials(problem(32, 64), "1x8192")
    assert [(t.problem.num_heads, t.workload) for t in found] == [(32, "1x8192")]


def test_same_trial_twice_is_stored_once(tmp_path):
    with Store(tmp_path / "t.sqlite") as store:
        store.add_trial(trial())
        store.add_trial(trial())
        assert len(store.trials()) == 1


def test_new_best_row_replaces_the_old(tmp_path):
    with Store(tmp_path / "t.sqlite") as store:
        store.put_best(best(median=80.0))
        store.put_best(best(median=70.0))
        store.put_best(best(workload="1x8192"))
        assert [(r.workload, r.median_us) for r in store.best_rows()] == [("1x8192", 80.0), ("8192x4", 70.0)]


def test_rows_of_a_gone_kernel_stay_in_the_file_and_are_only_counted(tmp_path):
    path = add_rows_of_a_gone_kernel(tmp_path / "t.sqlite")
    with Store(path) as store:
        assert (store.best_rows(), store.best_rows("sm90"), store.trials(), store.num_trials) == ([], [], [], 0)
        store.add(trials=[trial()], best=[best()])
    with Store(path, mode="ro") as store:
        assert store.best_rows() == store.best_rows("sm90") == [best()]
        assert store.trials() == store.trials(problem(), "8192x4") == [trial()]
        assert store.num_trials == 1
        assert store.left_out() == {"gone": 3}


def test_failed_batch_changes_nothing(tmp_path, monkeypatch):
    with Store(tmp_path / "t.sqlite") as store:
        monkeypatch.setattr("qla_jit.db.store._best_row", lambda row: {"median_us": None})
        with pytest.raises(DatabaseError, match="NOT NULL"):
            store.add(trials=[trial()], best=[best()])
        assert store.trials() == []
        assert store.environments() == {}


def test_tables_are_strict_and_the_journal_is_a_rollback_journal(tmp_path):
    Store(tmp_path / "t.sqlite").close()
    connection = sqlite3.connect(tmp_path / "t.sqlite")
    tables = connection.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main' AND type = 'table'")
    strict = {name: flag for name, flag in tables if not name.startswith("sqlite_")}
    assert set(strict) >= {"environment", "problem", "schedule", "trial", "best", "cost_model"}
    assert set(strict.values()) == {1}
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_status_outside_the_vocabulary_is_refused_by_sqlite_too(tmp_path):
    with Store(tmp_path / "t.sqlite") as store:
        store.add_trial(trial())
    connection = sqlite3.connect(tmp_path / "t.sqlite")
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        connection.execute("UPDATE trial SET status = 'fine'")


def test_file_of_the_second_schema_keeps_its_trials_and_takes_filtered_ones(tmp_path, monkeypatch):
    path, rows = tmp_path / "t.sqlite", [trial(status=s, created=s) for s in STATUSES if s != "filtered"]
    with monkeypatch.context() as context:
        context.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
        with Store(path) as store:
            store.add(trials=rows)
    with Store(path) as store:
        assert store.trials(problem(), "8192x4") == rows
        store.add_trial(rows[0])
        store.add_trial(trial(status="filtered"))
        assert store.trials() == [*rows, trial(status="filtered")]
        assert store._query("SELECT count(*) AS n FROM sqlite_master WHERE name = 'trial_by_problem'") == [{"n": 1}]


def test_failing_migration_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "t.sqlite"
    with Store(path) as store:
        store.add_trial(trial())
    before = path.read_bytes()
    steps = [*schema.MIGRATIONS, ("CREATE TABLE extra (id TEXT) STRICT", "CREATE TABLE broken (")]
    monkeypatch.setattr(schema, "MIGRATIONS", steps)
    with pytest.raises(DatabaseError):
        Store(path)
    assert path.read_bytes() == before


def test_older_file_is_migrated_with_its_rows_when_read(tmp_path, monkeypatch):
    path = tmp_path / "t.sqlite"
    with Store(path) as store:
        store.add_trial(trial())
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, ("CREATE TABLE extra (id TEXT) STRICT",)])
    with pytest.raises(DatabaseError, match=f"schema version == {len(schema.MIGRATIONS)}"):
        Store(path, mode="ro")
    assert Database(path, shipped=False).trials() == [trial()]
    with Store(path, mode="ro") as store:
        assert store._query("SELECT count(*) AS n FROM extra") == [{"n": 0}]


def test_file_of_the_first_schema_keeps_its_trials_and_their_uids(tmp_path, monkeypatch):
    path = tmp_path / "t.sqlite"
    with monkeypatch.context() as context:
        context.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:1])
        Store(path).close()
    row = trial()
    with sqlite3.connect(path) as connection:  # as the first version wrote it: a trial without clocks
        connection.execute("INSERT INTO environment VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                           (row.environment.id, *row.environment.as_dict().values()))  # fmt: skip
        body, schedule = problem_body(row.problem), row.schedule.as_dict()
        values = short_id(body), row.problem.arch, row.problem.kernel, canonical_json(body)
        connection.execute("INSERT INTO problem VALUES (?, ?, ?, ?)", values)
        values = short_id(schedule), row.schedule.template, canonical_json(schedule)
        connection.execute("INSERT INTO schedule VALUES (?, ?, ?)", values)
        values = (row.uid, short_id(body), short_id(schedule), row.workload, row.template_digest, row.environment.id)
        values += (row.status, row.reason, row.phase, canonical_json(list(row.samples_us)), row.median_us, row.iqr_us)
        values += (row.error, row.registers, row.smem_bytes, row.local_bytes, 1.5, 0.25, 0.125, 0.0625, 0.0)
        places = ", ".join("?" * (len(values) + 1))
        connection.execute(f"INSERT INTO trial VALUES (NULL, {places})", (*values, row.created))
    connection.close()
    assert Database(path, shipped=False).trials() == [row]
    with Store(path) as store:
        store.add_trial(row)
        assert store.num_trials == 1
        store.add_trial(trial(created="later", sm_mhz=1980, memory_mhz=3201))
        assert [(t.sm_mhz, t.memory_mhz) for t in store.trials()] == [(None, None), (1980, 3201)]
        assert store.fits() == []


@pytest.mark.parametrize("mode", ["rw", "ro", "immutable"])
def test_foreign_newer_truncated_and_garbage_files_are_refused_and_unchanged(tmp_path, mode):
    foreign = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    newer = tmp_path / "newer.sqlite"
    Store(newer).close()
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    truncated = tmp_path / "truncated.sqlite"
    with Store(truncated) as store:
        store.add(trials=[trial(created=str(i)) for i in range(50)])
    truncated.write_bytes(truncated.read_bytes()[: truncated.stat().st_size // 2])
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_bytes(b"not a database at all" * 100)
    remedies = {foreign: "another", newer: "upgrade", truncated: "import your last export", garbage: "import"}
    for path, remedy in remedies.items():
        before = path.read_bytes()
        with pytest.raises(DatabaseError, match=remedy):
            Store(path, mode=mode).trials()
        with pytest.raises(DatabaseError, match=path.name):
            Database(path, shipped=False).best_rows("sm90")
        assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in remedies)


def test_reading_creates_no_file(tmp_path):
    database = Database(tmp_path / "none" / "t.sqlite", shipped=False)
    assert database.trials() == []
    assert database.best_rows("sm90") == []
    assert list(tmp_path.iterdir()) == []


def test_immutable_file_is_read_beside_no_new_file_and_never_written(tmp_path):
    path = tmp_path / "t.sqlite"
    with Store(path) as store:
        store.put_best(best())
    os.chmod(path, 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        with Store(path, mode="immutable") as store:
            assert store.best_rows("sm90") == [best()]
            with pytest.raises(DatabaseError, match="mode == 'rw'"):
                store.add_trial(trial())
        assert [p.name for p in tmp_path.iterdir()] == ["t.sqlite"]
    finally:
        os.chmod(tmp_path, 0o755)


def test_folder_that_cannot_be_made_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="QLA_DB"):
        Store(tmp_path / "file" / "t.sqlite")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write into a read-only folder")
def test_read_only_folder_is_explained(tmp_path):
    os.chmod(tmp_path, 0o555)
    try:
        with pytest.raises(DatabaseError, match="QLA_DB"):
            Store(tmp_path / "t.sqlite")
    finally:
        os.chmod(tmp_path, 0o755)


def test_kill_9_of_a_writer_loses_at_most_the_trial_in_flight(tmp_path):
    path = tmp_path / "t.sqlite"
    command = [sys.executable, script(tmp_path, "writer.py", WRITER), str(path), "100000", "w"]
    for _ in range(3):
        before = len(Database(path, shipped=False).trials())
        writer = subprocess.Popen([*command[:-1], f"w{before}."], stdout=subprocess.PIPE, text=True)
        for _ in range(12):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        acknowledged = 12 + len(writer.stdout.read().splitlines())
        writer.wait()
        stored = len(Database(path, shipped=False).trials()) - before
        assert acknowledged <= stored <= acknowledged + 1


def test_rollback_left_by_a_killed_writer_is_finished_by_a_reader(tmp_path):
    path = tmp_path / "t.sqlite"
    with Store(path) as store:
        store.add_trial(trial())
    crashing = """
        import os, sqlite3, sys
        c = sqlite3.connect(sys.argv[1], isolation_level=None)
        c.execute("PRAGMA cache_size = 1")
        c.execute("BEGIN IMMEDIATE")
        c.execute("CREATE TABLE filler (x)")
        for i in range(200):
            c.execute("INSERT INTO filler VALUES (?)", ("x" * 3000,))
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, script(tmp_path, "crash.py", crashing), str(path)], check=False)
    assert (tmp_path / "t.sqlite-journal").stat().st_size > 0
    assert Database(path, shipped=False).trials() == [trial()]


def test_two_processes_write_one_file_and_lose_nothing(tmp_path):
    path, code = tmp_path / "t.sqlite", script(tmp_path, "writer.py", WRITER)
    writers = [
        subprocess.Popen([sys.executable, code, str(path), "40", name], stdout=subprocess.DEVNULL) for name in "ab"
    ]
    assert [w.wait() for w in writers] == [0, 0]
    created = [t.created for t in Database(path, shipped=False).trials()]
    assert sorted(created) == sorted(f"{name}{i}" for name in "ab" for i in range(40))


def test_schedule_values_keep_their_types(tmp_path):
    typed = point(True, 1, "1")
    with Store(tmp_path / "t.sqlite") as store:
        store.add_trial(trial(typed))
        found = store.trials()[0].schedule
    assert [type(v) for _, v in found.items] == [bool, int, str]
