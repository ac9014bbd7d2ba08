"""What a build report says against a kernel, and that a sweep then measures nothing of it."""

import sys

import pytest
from tuning_fakes import ENVIRONMENT, fake_template, point, problem, script, trial, use_templates

from qla_jit.arch import get_arch
from qla_jit.db import Database
from qla_jit.tune.compile_pool import CompilePool
from qla_jit.tune.evaluate import LiveEvaluator
from qla_jit.tune.static_filter import RULES, SPILLED_BYTES, against
from qla_jit.tune.sweep import Plan, run_sweep
from qla_jit.tune.worker import Worker

SM90 = get_arch("sm90")
SERIALISED = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."


def roles(load, state=168):
    return {"load": {"limit": 24, "live": load}, "state": {"limit": 192, "live": state}}


def report(**changes):
    """That of a kernel with nothing against it."""
    values = dict(
        registers=168, spill_bytes=0, local_bytes=0, static_smem_bytes=18432, smem_bytes=212992, warnings=[],
        role_registers=roles(22),
        instructions={"hgmma": 76, "hmma": 0, "stl": 0, "ldl": 0, "waits": [[0, 5], [1, 6]]},
    )  # fmt: skip
    return {**values, **changes}


def rules(broken):
    return [violation.rule for violation in broken]


def test_good_kernel_and_its_usual_variants_have_nothing_against_them():
    late = report(instructions={"hgmma": 76, "waits": [[0, 7], [1, 4]]}, spill_bytes=32, local_bytes=16)
    narrow = report(instructions={"hgmma": 52, "waits": [[0, 4], [1, 4]]})
    for candidate in (report(), late, narrow):
        assert against(candidate, report(), SM90) == ()


@pytest.mark.parametrize(
    ("changes", "rule", "numbers"),
    [
        ({"spill_bytes": SPILLED_BYTES + 4}, "spills_are_few", "260 B spilled"),
        ({"warnings": [SERIALISED]}, "products_are_asynchronous", "C7510"),
        ({"smem_bytes": 215000}, "shared_memory_fits_the_cta", "18432 B static and 215000 B dynamic, 232448 B"),
        ({"role_registers": roles(25)}, "live_registers_fit_the_role", "25 live of 24"),
        ({"instructions": {"hgmma": 76, "waits": [[0, 76]]}}, "waits_are_few", "1.00 waits"),
    ],
)
def test_each_rule_names_itself_and_its_numbers(changes, rule, numbers):
    (violation,) = against(report(**changes), report(), SM90)
    assert violation.rule == rule
    assert numbers in violation.detail


def test_every_rule_has_a_case_above_and_several_can_be_broken_at_once():
    broken = against(
        report(
            spill_bytes=900, warnings=[SERIALISED], smem_bytes=232448,
            role_registers=roles(40), instructions={"hgmma": 8, "waits": [[0, 8]]},
        ),
        report(), SM90,
    )  # fmt: skip
    assert rules(broken) == [rule.name for rule in RULES]


def test_what_the_default_does_too_is_not_held_against_a_schedule_unless_it_cannot_run():
    bad = report(
        spill_bytes=900, warnings=[SERIALISED], smem_bytes=232448,
        role_registers=roles(40), instructions={"hgmma": 8, "waits": [[0, 8]]},
    )  # fmt: skip
    assert rules(against(bad, bad, SM90)) == ["shared_memory_fits_the_cta"]
    assert rules(against({**bad, "smem_bytes": 0, "spill_bytes": 904}, bad, SM90)) == ["spills_are_few"]


@pytest.mark.parametrize("default", [{}, report()])
def test_what_was_not_measured_breaks_no_rule(default):
    unknown = report(instructions=None, role_registers=roles(None, None))
    assert against(unknown, default, SM90) == ()
    assert against({}, default, SM90) == ()
    assert against(report(), {}, SM90) == ()


def test_registers_that_a_role_only_declares_limit_nothing_where_it_is_the_only_one():
    alone = report(role_registers={"inverse": {"limit": 144, "live": 160}})
    assert against(alone, report(), SM90) == ()


COMPILER = """
    import json
    from qla_jit.tune.child import serve

    def handle(request, reply):
        params = request["schedule"]["params"]
        report = {"registers": 168, "smem_bytes": 1024, "local_bytes": 0, "spill_bytes": 200 * params["b"]}
        reply.result(status="ok", path="/artifact", report=report, source_sha256=json.dumps(params))

    serve(dict, handle)
"""
WORKER = f"""
    import sys
    from qla_jit.tune.child import serve

    def handle(request, reply):
        b = request["schedule"]["params"]["b"] if request["op"] != "probe" else 0
        if request["op"] != "probe":
            print(b, file=open(sys.argv[1], "a"))
        reply.result(status="ok", samples_us=[100.0 - b] * 3)

    serve(lambda: {{"environment": {ENVIRONMENT.as_dict()!r}}}, handle)
"""


@pytest.fixture()
def make_evaluator(tmp_path, monkeypatch):
    """Four schedules (0, b) that spill 200 B times b, and are the faster the more they do."""
    use_templates(monkeypatch, fake_template(choices=((0,), (0, 2, 4, 6), ("p",))))
    made = []

    def make(**options):
        pool = CompilePool(1, command=[sys.executable, script(tmp_path, "compiler.py", COMPILER)])
        worker = Worker(command=[sys.executable, script(tmp_path, "worker.py", WORKER), str(tmp_path / "ran")])
        made.append(LiveEvaluator(pool, worker, **options))
        return made[-1]

    yield make
    for evaluator in made:
        evaluator.close()


def test_filtered_schedule_is_stored_with_its_reason_and_never_runs(make_evaluator, tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        found = run_sweep(Plan((problem(),), ("64x1",)), make_evaluator(), db)
        stored = {t.schedule: t for t in db.trials() if t.phase == "search"}
        (row,) = db.store.best_rows()
    assert found.units[0].statuses == {"ok": 1, "filtered": 3}
    assert "spills_are_few: 400 B spilled" in stored[point(0, 2)].reason
    assert (stored[point(0, 2)].samples_us, stored[point(0, 2)].registers) == ((), 168)
    assert set((tmp_path / "ran").read_text().split()) == {"0"}
    assert row.schedule == point(0, 0)


def test_no_filter_measures_what_was_filtered_before(make_evaluator, tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        run_sweep(Plan((problem(),), ("64x1",)), make_evaluator(), db)
        plan = Plan((problem(),), ("64x1",), static_filter=False)
        again = run_sweep(plan, make_evaluator(static_filter=False), db)
        (row,) = db.store.best_rows()
    assert (again.units[0].resumed, again.units[0].statuses) == (1, {"ok": 4})
    assert row.schedule == point(0, 6)


def test_filtered_trial_goes_through_the_database_and_text(tmp_path):
    from qla_jit.db import jsonl

    row = trial(status="filtered", reason="spills_are_few: 900 B spilled")
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        db.store.add_trial(row)
        assert db.trials() == [row]
        assert jsonl.loads(db.export_text(), "text").trials == [row]
