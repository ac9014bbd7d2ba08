"""Several coordinators on one study, as processes of their own, on a PostgreSQL server that the tests start: claims are
exclusive, a host that dies loses at most its trial in flight, and every database ends up with all trials."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import postgres_server
import pytest
from tuning_fakes import best, fake_template, point, problem, script, trial, use_templates

from qla_jit.db import Database
from qla_jit.errors import ConfigError
from qla_jit.tune.board import BoardLostError, key_of, topic_of
from qla_jit.tune.shared_board import SharedBoard, without_password
from qla_jit.tune.space import enumerate_space

HERE = str(Path(__file__).parent)
#: argv: database, storage URL, seconds per trial, name, log file
HOST = f"""
    import sys, time
    sys.path.insert(0, {HERE!r})
    import tuning_fakes as fakes
    from qla_jit import registry
    from qla_jit.db import Database
    from qla_jit.tune import board, sweep
    from qla_jit.tune.shared_board import SharedBoard
    named = {{"fake": fakes.fake_template()}}
    registry.templates = lambda: named
    registry.digest = sweep.digest = board.digest = lambda name: fakes.DIGEST
    path, url, delay_s, name, log = sys.argv[1:]

    def note(text):
        with open(log, "a") as file:
            file.write(f"{{name}} {{text}}\\n")
        print(text, flush=True)

    class Evaluator(fakes.FakeEvaluator):
        def evaluate(self, problem, workload, schedule, deadline=None, search_s=0.0):
            note(f"begin {{schedule}}")
            found = super().evaluate(problem, workload, schedule, deadline, search_s)
            note(f"end {{schedule}}")
            return found

        def race(self, *arguments):
            note(f"race {{arguments[1]}}")
            return super().race(*arguments)

    evaluator = Evaluator(delay_s=float(delay_s))
    shared = SharedBoard(url, heartbeat_s=1, grace_s=3, poll_s=0.1)
    plan = sweep.Plan((fakes.problem(),), ("8192x4", "1x8192"))
    with Database(path, shipped=False) as db:
        report = sweep.run_sweep(plan, evaluator, db, board=shared)
    print("stopped:", report.stopped, flush=True)
"""


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    use_templates(monkeypatch, fake_template())


@pytest.fixture(scope="module")
def server():
    if reason := postgres_server.missing():
        pytest.skip(reason)
    with postgres_server.running() as server:
        yield server


_databases = iter(range(1000))


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request, tmp_path):
    """A storage without studies.  SQLite stands in for the claims' logic where no server can be had."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/study.sqlite"
    return fresh(request.getfixturevalue("server"))


def fresh(server) -> str:
    import psycopg

    name = f"study{next(_databases)}"
    with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url.rpartition("/")[0] + f"/{name}"


@pytest.fixture
def postgres(server):
    return fresh(server)


@pytest.fixture
def board(url):
    boards = []

    def make(**options):
        made = SharedBoard(url, **{"heartbeat_s": 1, "grace_s": 2, "poll_s": 0.0, **options})
        boards.append(made)
        made.enter("topic", ())
        return made

    yield make
    for made in boards:
        made.close()


KEY = key_of(point())


def test_of_two_hosts_one_has_a_key_until_it_gives_it_back(board):
    one, two = board(), board()
    assert (one.claim("topic", KEY), two.claim("topic", KEY), one.claim("topic", KEY)) == (True, False, False)
    one.release("topic", KEY)
    assert two.claim("topic", KEY)


def test_result_is_heard_once_by_every_other_host_and_by_one_that_comes_later(board):
    one, two = board(), board()
    assert one.claim("topic", KEY)
    measured = trial(sm_mhz=1980)
    assert one.publish("topic", KEY, [measured])
    assert two.news("topic") == [[measured]]
    assert (two.news("topic"), one.news("topic")) == ([], [])
    three = board()
    assert three.news("topic") == [[measured]]
    assert not three.claim("topic", KEY)


def test_failed_trials_are_results_too(board):
    one, two = board(), board()
    failures = [trial(point(a, 0), status) for a, status in ((0, "run_timeout"), (2, "compile_error"))]
    for failed in failures:
        one.claim("topic", key_of(failed.schedule))
        one.publish("topic", key_of(failed.schedule), [failed])
    assert two.news("topic") == [[failed] for failed in failures]


def test_what_a_host_had_already_is_published_when_it_comes(board):
    one, two = board(), board()
    known = trial()
    two.enter("other", ())
    one.enter("other", [known])
    assert not two.claim("other", KEY)
    assert two.news("other") == [[known]]
    assert one.news("other") == []


def test_claims_of_a_silent_host_are_given_away_and_its_late_result_is_refused(board, monkeypatch):
    monkeypatch.setattr(SharedBoard, "_beat", lambda self, every_s: None)
    dead, alive = board(), board()
    assert dead.claim("topic", KEY)
    until = time.monotonic() + 10
    while not alive.claim("topic", KEY):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert not dead.publish("topic", KEY, [trial(median=1.0)])
    assert alive.publish("topic", KEY, [trial(median=2.0)])
    assert dead.news("topic") == [[trial(median=2.0)]]


def test_heartbeats_keep_a_claim_for_longer_than_the_grace(board):
    working, other = board(), board()
    assert working.claim("topic", KEY)
    for _ in range(8):
        time.sleep(0.5)
        assert not other.claim("topic", KEY)
    assert working.publish("topic", KEY, [trial()])


def test_claim_that_lasts_longer_than_any_trial_is_given_away_in_spite_of_heartbeats(board):
    hanging, other = board(), board(patience_s=0.5)
    assert hanging.claim("topic", KEY)
    assert not other.claim("topic", KEY)
    time.sleep(0.7)
    assert other.claim("topic", KEY)


def test_closing_gives_claims_back(board):
    one, two = board(), board()
    assert one.claim("topic", KEY)
    one.close()
    assert two.claim("topic", KEY)


CLAIMER = f"""
    import sys
    sys.path.insert(0, {HERE!r})
    from qla_jit.tune.shared_board import SharedBoard
    board = SharedBoard(sys.argv[1], poll_s=0.0)
    board.enter("topic", ())
    print("ready", flush=True)
    sys.stdin.readline()
    for key in range(40):
        if board.claim("topic", str(key)):
            print(key, flush=True)
    print("done", flush=True)
    sys.stdin.readline()
"""


def test_processes_that_claim_the_same_keys_at_once_get_each_key_once(url, tmp_path):
    command = [sys.executable, script(tmp_path, "claimer.py", CLAIMER), url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    claimers = [subprocess.Popen(command, **pipes) for _ in range(4)]
    assert [c.stdout.readline().strip() for c in claimers] == ["ready"] * 4
    for claimer in claimers:
        claimer.stdin.write("\n")
        claimer.stdin.flush()
    got = []
    for claimer in claimers:
        while (line := claimer.stdout.readline().strip()) != "done":
            got.append(int(line))
    for claimer in claimers:
        claimer.communicate("\n")
    counts = Counter(got)
    assert set(counts.values()) <= {1}
    assert len(counts) >= 38  # of two that saw each other, none may have it at first


def test_topics_of_other_cards_sources_or_workloads_are_not_shared():
    from dataclasses import replace

    from tuning_fakes import ENVIRONMENT

    space = enumerate_space(problem())
    names = {
        topic_of(space, "8192x4", ENVIRONMENT),
        topic_of(space, "1x8192", ENVIRONMENT),
        topic_of(space, "8192x4", replace(ENVIRONMENT, driver="999")),
        topic_of(enumerate_space(problem(8, 32)), "8192x4", ENVIRONMENT),
        topic_of(space, "8192x4", ENVIRONMENT, static_filter=False),
    }
    assert len(names) == 5
    assert topic_of(space, "8192x4", ENVIRONMENT) in names


def test_passwords_are_not_kept():
    assert without_password("postgresql+psycopg://me:se:cr@et@host/db") == "postgresql+psycopg://me@host/db"
    assert without_password("sqlite:////tmp/a.sqlite") == "sqlite:////tmp/a.sqlite"


@pytest.mark.parametrize("bad", ["nonsense", "postgresql+nodriver://x/y"])
def test_unusable_url_is_explained(bad):
    with pytest.raises(ConfigError, match="postgresql.psycopg://.*qla-jit.postgresql"):
        SharedBoard(bad)


class Hosts:
    def __init__(self, folder, url, delay_s=0.05):
        self.folder, self.url, self.delay_s = folder, url, delay_s
        self.code, self.log = script(folder, "host.py", HOST), folder / "log"

    def start(self, name):
        command = [sys.executable, self.code, str(self.path(name)), self.url, str(self.delay_s), name, str(self.log)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def path(self, name):
        return self.folder / f"{name}.sqlite"

    def noted(self, what):
        lines = [line.split(" ", 2) for line in self.log.read_text().splitlines()]
        return Counter(rest for _, noted, rest in lines if noted == what), {n for n, noted, _ in lines if noted == what}

    def trials(self, name):
        return [t for t in Database(self.path(name), shipped=False).trials() if t.phase == "search"]


def ended(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()[-1]


def test_two_hosts_measure_every_point_once_and_both_have_all(postgres, tmp_path):
    hosts = Hosts(tmp_path, postgres)
    both = [hosts.start(name) for name in "ab"]
    assert [ended(p) for p in both] == ["stopped: ", "stopped: "]
    measured, who = hosts.noted("end")
    assert len(measured) == 60 and set(measured.values()) == {2}  # once per workload
    assert who == {"a", "b"}
    assert set(hosts.noted("race")[0].values()) == {1}
    a, b = hosts.trials("a"), hosts.trials("b")
    assert len(a) == len(b) == 120
    assert {t.uid for t in a} == {t.uid for t in b}
    rows = [Database(hosts.path(name), shipped=False).best_rows("sm90") for name in "ab"]
    assert [[(r.workload, r.schedule) for _, r in found] for found in rows] == [
        [(w, best().schedule) for w in ("*", "1x8192", "8192x4")]
    ] * 2


def test_host_that_is_killed_loses_at_most_its_trial_in_flight(postgres, tmp_path):
    hosts = Hosts(tmp_path, postgres, delay_s=0.1)
    dying = hosts.start("dying")
    lines = [dying.stdout.readline() for _ in range(2 * 7 + 1)]
    assert lines[-1].startswith("begin")
    living = hosts.start("living")
    os.kill(dying.pid, signal.SIGKILL)
    dying.wait()
    assert ended(living) == "stopped: "
    measured, _ = hosts.noted("end")
    begun, _ = hosts.noted("begin")
    assert sum(measured.values()) in (120, 121)  # 121: killed after its trial ended and before it was published
    assert 120 <= sum(begun.values()) <= 121
    assert len({(t.schedule, t.workload) for t in hosts.trials("living")}) == len(hosts.trials("living")) == 120
    # What the dead host had published is in the living one's database, and its own file goes on where it was.
    old = {t.uid for t in hosts.trials("dying")}
    assert len(old - {t.uid for t in hosts.trials("living")}) <= 1
    again = hosts.start("dying")
    assert ended(again) == "stopped: "
    assert len({(t.schedule, t.workload) for t in hosts.trials("dying")}) == 120
    assert sum(hosts.noted("end")[0].values()) in (120, 121)


def test_server_that_dies_stops_the_sweep_with_the_trial_kept_and_a_remedy(tmp_path):
    if reason := postgres_server.missing():
        pytest.skip(reason)
    with postgres_server.running() as server:
        hosts = Hosts(tmp_path, server.url, delay_s=0.1)
        host = hosts.start("a")
        for _ in range(9):
            host.stdout.readline()
        server.kill()
        said = ended(host)
        assert "must answer" in said and "run the same command" in said
        finished = sum(hosts.noted("end")[0].values())
        assert len(hosts.trials("a")) == finished
        server.start()
        assert ended(hosts.start("a")) == "stopped: "
        assert len({(t.schedule, t.workload) for t in hosts.trials("a")}) == len(hosts.trials("a")) == 120


def test_storage_that_cannot_be_reached_is_explained():
    pytest.importorskip("psycopg")
    with pytest.raises(BoardLostError, match="must answer.*run the same command"):
        SharedBoard("postgresql+psycopg://qla@127.0.0.1:1/none")
