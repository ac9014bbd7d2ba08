"""Several cards of one host, each a real process that dies, hangs or never starts: no trial is lost or repeated."""

import json
import os
import sys
import threading
import time
from dataclasses import replace

import pytest
from tuning_fakes import ENVIRONMENT, fake_template, point, problem, script, use_templates

from qla_jit.db import Database
from qla_jit.errors import ConfigError
from qla_jit.tune.cards import Cards
from qla_jit.tune.compile_pool import CompilePool
from qla_jit.tune.evaluate import LiveEvaluator
from qla_jit.tune.sweep import Plan, run_sweep
from qla_jit.tune.worker import Worker, WorkerLostError

CARD = """
    import json, os, sys, time
    from qla_jit.tune.child import serve

    name, log, environment = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    broken = log + "." + name + ".broken"

    def prepare():
        if os.path.exists(broken):
            sys.exit(f"card {name} has fallen off the bus")
        return {"environment": environment}

    def handle(request, reply):
        if request["op"] == "probe":
            reply.result(status="ok")
            return
        params = request["schedule"]["params"]
        a, b, c = params["a"], params["b"], params["c"]
        with open(log, "a") as file:
            heads = request.get("problem", {}).get("num_heads")
            file.write(f"{name} {a} {b} {c} {request['samples']} {len(request.get('lengths', ()))} {heads}\\n")
        reply.stage("verify")
        if name in environment_fault(a, b, c):
            open(broken, "w").close()
            os._exit(9)
        time.sleep(DELAY)
        time_us = 100.0 + 10 * abs(a - 2) + 5 * abs(b - 4) + 3 * abs(ord(c) - ord("r"))
        reply.result(status="ok", samples_us=[time_us] * 3, error=1e-3, verify_s=0.01, measure_s=0.02, sm_mhz=1980)

    DELAY = float(sys.argv[4])
    FAULTS = json.loads(sys.argv[5])

    def environment_fault(a, b, c):
        return FAULTS.get(f"{a}{b}{c}", "") + FAULTS.get("any", "")

    serve(prepare, handle)
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


class Host:
    """Makes workers and evaluators that log who measured what."""

    def __init__(self, folder):
        self.folder, self.log = folder, folder / "log"
        self.log.touch()
        self.card, self.compiler = script(folder, "card.py", CARD), script(folder, "compiler.py", COMPILER)

    def worker(self, name, environment=ENVIRONMENT, delay_s=0.0, faults=None, **options):
        values = [json.dumps(environment.as_dict()), str(delay_s), json.dumps(faults or {})]
        return Worker(command=[sys.executable, self.card, name, str(self.log), *values], **options)

    def evaluator(self, names, **options):
        pool = CompilePool(2, command=[sys.executable, self.compiler])
        return LiveEvaluator(pool, [self.worker(name, **options) for name in names])

    def sweep(self, names, plan=None, **options):
        evaluator = self.evaluator(names, **options)
        try:
            with Database(self.folder / "t.sqlite", shipped=False) as db:
                report = run_sweep(plan or Plan((problem(),), ("8192x4",)), evaluator, db)
                return report, db.trials()
        finally:
            evaluator.close()

    def lines(self, samples=None):
        found = [line.split() for line in self.log.read_text().splitlines()]
        return [line for line in found if samples is None or line[4] == str(samples)]


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


def test_trials_are_shared_by_the_cards_and_every_point_is_measured_once(host):
    report, trials = host.sweep("01", delay_s=0.06)
    assert report.stopped == ""
    searched = host.lines(samples=40)
    assert len(searched) == len({tuple(line[1:4]) for line in searched}) == 60
    counts = [sum(line[0] == name for line in searched) for name in "01"]
    assert min(counts) >= 15
    assert len([t for t in trials if t.phase == "search"]) == 60
    assert report.units[0].row.schedule == point(2, 4, "r")
    assert {t.sm_mhz for t in trials} == {1980}


def test_each_card_has_a_workload_of_its_own_as_long_as_there_are_as_many(host):
    host.sweep("01", Plan((problem(),), ("8192x4", "1x8192")), delay_s=0.02)
    searched = host.lines(samples=40)
    by_card = [[line[5] for line in searched if line[0] == name] for name in "01"]
    assert sum(map(len, by_card)) == 120 and min(map(len, by_card)) >= 50
    changes = [sum(a != b for a, b in zip(of, of[1:])) for of in by_card]
    assert max(changes) <= 1  # at the end, when one workload is done, its card may help the other


def test_each_card_has_a_problem_of_its_own_its_races_too(host):
    """So no card waits for the other's race, and each makes the data of its own problems only."""
    problems = tuple(problem(heads, 64) for heads in (2, 4, 8, 16))
    report, _ = host.sweep("01", Plan(problems, ("8192x4", "1x8192"), max_trials=8), delay_s=0.02)
    assert [len(unit.trials) for unit in report.units] == [8] * 8 and len(report.overall) == 4
    of_problem = {}
    for line in host.lines():
        of_problem.setdefault(line[6], []).append(line[0])
    on_both = [heads for heads, names in of_problem.items() if len(set(names)) > 1]
    assert len(on_both) <= 1, of_problem  # the last one, when no other is left, has the help of both


def test_three_workloads_on_two_cards_are_searched_whole(host):
    report, trials = host.sweep("01", Plan((problem(),), ("8192x4", "1x8192", "1024x8"), max_trials=20))
    assert [len(unit.trials) for unit in report.units] == [20, 20, 20]
    assert all(unit.row is not None for unit in report.units) and report.stopped == ""


def test_a_race_is_on_one_card_and_races_of_two_workloads_run_side_by_side(host):
    host.sweep("01", Plan((problem(),), ("8192x4", "1x8192")), delay_s=0.01)
    raced = host.lines(samples=20)
    assert len(raced) == 2 * 4 * 5
    assert {line[0] for line in raced} == {"0", "1"}


def test_one_workload_is_raced_on_one_card(host):
    host.sweep("01")
    assert len({line[0] for line in host.lines(samples=20)}) == 1


def test_trial_of_a_card_that_dies_is_measured_on_another(host):
    report, trials = host.sweep("01", delay_s=0.05, faults={"any": "1"})
    assert report.stopped == ""
    assert {t.status for t in trials} == {"ok"}
    assert len({t.schedule for t in trials}) == 60
    (reason,) = report.lost
    assert "card 1 has fallen off the bus" in reason


def test_kernel_that_takes_two_cards_with_it_is_blamed_and_the_third_goes_on(host):
    report, trials = host.sweep("012", faults={"11p": "012"})
    blamed = [t for t in trials if t.status != "ok"]
    assert [(t.schedule, t.status) for t in blamed] == [(point(1, 1, "p"), "crashed")]
    assert "2 cards were lost while it ran" in blamed[0].reason
    assert len([t for t in trials if t.phase == "search"]) == 60
    assert len(report.lost) == 2


def test_last_card_that_dies_stops_the_sweep_with_everything_stored(host):
    faults = {"11p": "01", "22q": "01"}
    report, trials = host.sweep("01", faults=faults)
    assert "nvidia-smi" in report.stopped
    assert len(report.lost) == 2
    for name in "01":
        os.unlink(f"{host.log}.{name}.broken")
    report, trials = host.sweep("01")
    assert report.stopped == ""
    searched = [t for t in trials if t.phase == "search"]
    assert len(searched) == len({t.schedule for t in searched}) == 60


def test_card_that_dies_in_a_race_loses_nothing(host):
    evaluator = host.evaluator("01", faults={"24r": "0"})
    raced = evaluator.race(problem(), "8192x4", [point(), point(2, 4, "r")], 5)
    evaluator.close()
    assert [t.status for t in raced] == ["ok", "ok"]
    assert [len(t.samples_us) for t in raced] == [15, 15]
    assert len(evaluator.lost) == 1


def test_a_kernel_that_only_crashes_itself_is_recorded_and_costs_no_card(host):
    hang = {"verify": 0.5}
    cards = Cards([host.worker("0", delay_s=60, deadlines=hang), host.worker("1", delay_s=60, deadlines=hang)])
    request = {"op": "measure", "schedule": point().as_dict(), "samples": 1}
    assert cards.measure(request)["status"] == "run_timeout"
    assert cards.count == 2
    cards.close()


def test_a_card_that_never_starts_is_given_up_with_its_reason(host):
    open(f"{host.log}.1.broken", "w").close()
    report, _ = host.sweep("01")
    assert report.stopped == ""
    assert len(report.lost) == 1


def test_unequal_cards_are_refused(host):
    other = replace(ENVIRONMENT, gpu="Other", sm_count=78)
    cards = Cards([host.worker("0"), host.worker("1", environment=other)])
    with pytest.raises(ConfigError, match="must be equal.*132 SMs.*78.*one after another"):
        _ = cards.environment
    cards.close()


def test_closing_ends_a_running_request_at_once_and_starts_nothing_again(host):
    cards = Cards([host.worker("0", delay_s=60)])
    _ = cards.environment
    request = {"op": "measure", "schedule": point().as_dict(), "samples": 1}
    ended = []

    def measure():
        with pytest.raises(WorkerLostError, match="ended"):
            cards.measure(request)
        ended.append(True)

    thread = threading.Thread(target=measure)
    thread.start()
    while not host.lines():
        time.sleep(0.01)
    started = time.monotonic()
    cards.close()
    thread.join(10)
    assert ended == [True]
    assert time.monotonic() - started < 5


@pytest.mark.wall_clock
def test_two_cards_take_half_the_time(host):
    took = []
    for names in ("0", "01"):
        evaluator = host.evaluator(names, delay_s=0.1)
        with Database(host.folder / f"{names}.sqlite", shipped=False) as db:
            _ = evaluator.environment
            started = time.monotonic()
            run_sweep(Plan((problem(),), ("8192x4", "1x8192"), max_trials=8), evaluator, db)
            took.append(time.monotonic() - started)
        evaluator.close()
    assert took[0] / took[1] > 1.5  # 1.9 on an idle machine
