"""A sweep's plan is kept where its trials are, and comes back as it was."""

import json

import pytest
from tuning_fakes import FakeEvaluator, fake_template, problem, use_templates, with_a_gone_kernel

from qla_jit.db import Database
from qla_jit.errors import ConfigError, DatabaseError
from qla_jit.tune.last_sweep import KEY, Plan, Setup, recall, remember
from qla_jit.tune.sweep import run_sweep

PLAN = Plan((problem(), problem(8, 32, chunk_size=32, state_v_first=True)), ("8192x4", "1x64"), 12.5, 9, 3, False)
SETUP = Setup(4, (1, 0), "/r.jsonl", "/w.jsonl", "/p.png", "postgresql+psycopg://me@there/tuning")


@pytest.fixture
def db(tmp_path):
    with Database(tmp_path / "t.sqlite", shipped=False) as database:
        yield database


@pytest.mark.parametrize("sweep", [(PLAN, SETUP), (Plan((problem(),), ("1x64",)), Setup())])
def test_plan_and_setup_come_back_equal(sweep, db):
    remember(db, *sweep)
    assert recall(Database(db.path, shipped=False)) == sweep


def test_the_later_sweep_is_the_one_to_go_on_with(db):
    remember(db, PLAN, SETUP)
    remember(db, Plan((problem(),), ("1x64",)), SETUP)
    assert recall(db)[0].workloads == ("1x64",)


def test_nothing_to_resume_is_an_error_with_both_remedies_and_makes_no_file(db):
    with pytest.raises(DatabaseError, match="none was; start one.*--db PATH"):
        recall(db)
    assert not db.path.exists()


@pytest.mark.parametrize("text", ['{"version":2}', "{", "[]", '{"version":1,"plan":{"problems":[]},"setup":{}}'])
def test_what_another_version_stored_is_refused_with_the_remedy(text, db):
    db.store.put_meta(KEY, text)
    with pytest.raises(DatabaseError, match=f"{db.path.name}.*start the sweep again"):
        recall(db)


def test_a_sweep_of_the_time_of_one_device_comes_back(db):
    remember(db, PLAN, SETUP)
    stored = json.loads(db.meta(KEY))
    stored["setup"] = {"jobs": 4, "device": 1, "replay": None, "record": None, "picture": None}
    db.store.put_meta(KEY, json.dumps(stored))
    assert recall(db) == (PLAN, Setup(4, (1,)))


def test_a_plan_with_a_kernel_that_is_gone_is_refused_with_the_remedy(db):
    remember(db, PLAN, SETUP)
    db.store.put_meta(KEY, with_a_gone_kernel(db.meta(KEY)))
    with pytest.raises(DatabaseError, match="kernel='gone'.*start the sweep again"):
        recall(db)


def test_a_run_stores_its_plan_before_its_first_trial(db, monkeypatch):
    use_templates(monkeypatch, fake_template())
    plan = Plan((problem(),), ("8192x4",))
    assert run_sweep(plan, FakeEvaluator(stop_after=0), db, setup=SETUP).stopped == "interrupted"
    assert (recall(db), db.trials()) == ((plan, SETUP), [])


def test_a_plan_that_cannot_start_does_not_replace_one_that_can_go_on(db, monkeypatch):
    use_templates(monkeypatch, fake_template(archs=("sm90", "sm120")))
    remember(db, PLAN, SETUP)
    with pytest.raises(ConfigError, match="arch"):
        run_sweep(Plan((problem(arch="sm120"),), ("8192x4",)), FakeEvaluator(), db)
    assert recall(db) == (PLAN, SETUP)
