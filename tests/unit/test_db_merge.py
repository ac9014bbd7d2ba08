"""Merging unites trials, keeps the better-measured row of each key, and is all or nothing."""

import pytest
from tuning_fakes import (
    add_rows_of_a_gone_kernel,
    best,
    cost_model,
    fake_template,
    point,
    problem,
    trial,
    use_templates,
    with_a_gone_kernel,
)

from qla_jit.db import Database, Store, jsonl, schema, store
from qla_jit.db.merge import Merged, better, better_fit, merge, read_source
from qla_jit.errors import DatabaseError

OLD = "e" * 64


@pytest.fixture(autouse=True)
def templates(monkeypatch):
    use_templates(monkeypatch, fake_template())


def database(path, rows=(), trials=()):
    with Store(path) as store:
        store.add(trials=trials, best=rows)
    return path


def text(path, rows=(), trials=()):
    path.write_text(jsonl.dumps(rows, trials), encoding="utf-8")
    return path


def merged(path, *sources) -> Merged:
    with Database(path, shipped=False) as into:
        return merge(sources, into)


def contents(path):
    with Store(path, mode="ro") as store:
        return store.best_rows(), store.trials()


RULES = {
    "a current template beats more trials and a lower median": (
        best(trials=1, median=90.0),
        best(trials=60, median=50.0, template_digest=OLD),
    ),
    "a current template beats one that this version lacks": (
        best(trials=1, median=90.0),
        best(point(template="gone"), trials=60, median=50.0),
    ),
    "more trials beat a lower median": (best(trials=60, median=90.0), best(trials=59, median=50.0)),
    "of two old rows the one of more trials stays": (
        best(trials=60, median=90.0, template_digest=OLD),
        best(trials=59, median=50.0, template_digest=OLD),
    ),
    "equal trials leave the lower median": (best(median=50.0), best(median=90.0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_holds_whichever_side_the_better_row_is_on(rule, tmp_path):
    good, bad = RULES[rule]
    assert better(good, bad) == better(bad, good) == good
    for name, own, other in (("kept", good, bad), ("replaced", bad, good)):
        into = database(tmp_path / f"{name}.sqlite", [own])
        done = merged(into, text(tmp_path / "other.jsonl", [other]))
        assert contents(into)[0] == [good]
        assert (done.best_new, done.best_replaced, done.best_kept) == (0, name == "replaced", name == "kept")
    done = merged(tmp_path / "both.sqlite", text(tmp_path / "1.jsonl", [good]), text(tmp_path / "2.jsonl", [bad]))
    assert contents(tmp_path / "both.sqlite")[0] == [good]
    assert done.best_new == 1


def test_rows_of_other_keys_are_all_kept(tmp_path):
    into = database(tmp_path / "into.sqlite", [best()])
    others = [best(workload="1x8192"), best(problem_=problem(8, 32)), best(problem_=problem(arch="sm120"))]
    assert merged(into, text(tmp_path / "a.jsonl", others)).best_new == 3
    assert len(contents(into)[0]) == 4


def test_trials_are_united_without_duplicates(tmp_path):
    mine, shared, theirs = (trial(created=name) for name in ("mine", "shared", "theirs"))
    into = database(tmp_path / "into.sqlite", trials=[mine, shared])
    sources = [
        database(tmp_path / "a.sqlite", trials=[shared, theirs]),
        text(tmp_path / "b.jsonl", trials=[theirs, mine]),
    ]
    done = merged(into, *sources)
    assert [t.created for t in contents(into)[1]] == ["mine", "shared", "theirs"]
    assert (done.trials_read, done.trials_new) == (4, 1)


def test_rows_of_a_gone_kernel_are_left_out_of_a_merge_and_stay_where_they_were(tmp_path):
    into = add_rows_of_a_gone_kernel(database(tmp_path / "into.sqlite", [best(median=90.0)]))
    source = add_rows_of_a_gone_kernel(database(tmp_path / "a.sqlite", [best(median=50.0)], [trial()]))
    other = text(tmp_path / "b.jsonl", [best()])
    other.write_text(with_a_gone_kernel(other.read_text()))
    done = merged(into, source, other)
    assert (done.trials_read, done.trials_new, done.best_replaced, done.left_out) == (1, 1, 1, {"gone": 4})
    assert contents(into) == ([best(median=50.0)], [trial()])
    with Store(into, mode="ro") as store:
        assert store.left_out() == {"gone": 3}


def test_order_of_sources_does_not_show_and_merging_again_changes_nothing(tmp_path):
    equal = [best(point(a=a), created=str(a)) for a in (0, 2)]
    a = database(tmp_path / "a.sqlite", [equal[0]], [trial(created="a")])
    b = text(tmp_path / "b.jsonl", [equal[1]], [trial(created="b")])
    exports = []
    for name, sources in (("ab", (a, b)), ("ba", (b, a)), ("aba", (a, b, a))):
        merged(tmp_path / f"{name}.sqlite", *sources)
        exports.append(Database(tmp_path / f"{name}.sqlite", shipped=False).export_text())
    assert exports[0] == exports[1] == exports[2]
    again = merged(tmp_path / "ab.sqlite", a, b)
    assert (again.trials_new, again.best_new, again.best_replaced, again.best_kept) == (0, 0, 0, 1)
    assert Database(tmp_path / "ab.sqlite", shipped=False).export_text() == exports[0]


def test_sources_are_told_apart_by_content_not_by_name(tmp_path):
    rows, trials = [best()], [trial()]
    for source in (database(tmp_path / "a.jsonl", rows, trials), text(tmp_path / "b.sqlite", rows, trials)):
        found = read_source(source)
        assert (found.best, found.trials) == (rows, trials)


@pytest.mark.parametrize("kind", ["absent", "foreign", "malformed"])
def test_a_bad_source_changes_nothing_and_makes_no_target(kind, tmp_path):
    good, bad = text(tmp_path / "good.jsonl", [best()], [trial()]), tmp_path / "bad"
    if kind == "foreign":
        bad.write_bytes(b"SQLite format 3\0" + b"\1" * 4096)
    if kind == "malformed":
        bad.write_text(good.read_text() + '{"kind":"novel"}\n')
    with pytest.raises(DatabaseError, match="bad"):
        merged(tmp_path / "into.sqlite", good, bad)
    assert not (tmp_path / "into.sqlite").exists()


def test_a_failure_while_writing_leaves_the_target_as_it_was(tmp_path, monkeypatch):
    own = best(median=90.0)
    into = database(tmp_path / "into.sqlite", [own], [trial(created="own")])
    before = contents(into)
    rows = [best(median=50.0), best(workload="1x8192", median=40.0)]
    plain = store._best_row
    monkeypatch.setattr(store, "_best_row", lambda row: {**plain(row), "median_us": None if row == rows[1] else 1.0})
    with pytest.raises(DatabaseError, match="NOT NULL"):
        merged(into, text(tmp_path / "a.jsonl", rows, [trial(created="theirs")]))
    assert contents(into) == before


def test_rows_that_a_sweep_stores_meanwhile_are_compared_too(tmp_path, monkeypatch):
    """What is stored is read inside the writing transaction, so a better row that came in between stays."""
    into, late = tmp_path / "into.sqlite", best(median=10.0, trials=61)
    source = text(tmp_path / "a.jsonl", [best(median=50.0)])
    with Database(into, shipped=False) as target, Store(into) as sweep:
        plain = target.store.merge

        def merge_after_the_sweep(*arguments):
            sweep.put_best(late)
            return plain(*arguments)

        monkeypatch.setattr(target.store, "merge", merge_after_the_sweep)
        assert merge([source], target).best_kept == 1
    assert contents(into)[0] == [late]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (cost_model(rows=5, loo_error=0.09), cost_model(rows=50, loo_error=0.01, template_digest=OLD)),
        (cost_model(rows=24, loo_error=0.09), cost_model(rows=12, loo_error=0.01)),
        (cost_model(loo_error=0.01), cost_model(loo_error=0.02)),
    ],
)
def test_better_founded_fit_is_kept_whichever_side_it_is_on(good, bad, tmp_path):
    assert better_fit(good, bad) == better_fit(bad, good) == good
    for name, own, other in (("kept", good, bad), ("replaced", bad, good)):
        into = tmp_path / f"{name}.sqlite"
        with Store(into) as store:
            store.add(fits=[own])
        source = tmp_path / "source.jsonl"
        source.write_text(jsonl.dumps(fits=[other, cost_model(point(2, 4, "r"))]))
        assert merged(into, source).fits_new == 1 + (name == "replaced")
        with Store(into, mode="ro") as store:
            assert store.fits() == [good, cost_model(point(2, 4, "r"))]


def test_source_of_an_older_schema_is_merged_and_left_as_it_was(tmp_path, monkeypatch):
    source = database(tmp_path / "old.sqlite", [best()], [trial()])
    before = source.read_bytes()
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, ("CREATE TABLE extra (id TEXT) STRICT",)])
    assert merged(tmp_path / "new.sqlite", source).trials_new == 1
    assert source.read_bytes() == before
