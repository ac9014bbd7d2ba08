import pytest
from tool_files import load_tool
from tuning_fakes import add_rows_of_a_gone_kernel, best, cost_model, point, problem, trial, with_a_gone_kernel

from qla_jit.db import Store, jsonl
from qla_jit.db.layers import SOURCE_DIGEST, Database
from qla_jit.db.records import STATUSES
from qla_jit.errors import DatabaseError


def records():
    rows = [best(problem_=problem(h, 64), workload=w) for h in (32, 16) for w in ("8192x4", "*")]
    return rows, [trial(status=s, created=str(i)) for i, s in enumerate(STATUSES)]


def test_export_import_export_is_byte_equal(tmp_path):
    rows, trials = records()
    first = Database(tmp_path / "a.sqlite", shipped=False)
    fits = [cost_model(point(a, 0, "p")) for a in (2, 0)]
    first.store.add(trials=trials, best=rows, fits=fits)
    text = first.export_text()
    second = Database(tmp_path / "b.sqlite", shipped=False)
    second.import_records(jsonl.loads(text, "text"))
    second.import_records(jsonl.loads(text, "text"))
    assert second.export_text() == text
    assert text.count('"kind":"trial"') == len(trials)
    assert text.count('"kind":"best"') == len(rows)
    assert text.count('"kind":"cost_model"') == len(fits)
    assert second.store.fits() == fits[::-1]


def test_order_of_insertion_does_not_show_in_an_export():
    rows, trials = records()
    fits = [cost_model(point(a, 0, "p")) for a in (2, 0)]
    assert jsonl.dumps(rows, trials, fits) == jsonl.dumps(rows[::-1], trials[::-1], fits[::-1])


def test_export_can_leave_trials_and_other_archs_out(tmp_path):
    database = Database(tmp_path / "a.sqlite", shipped=False)
    database.store.add(trials=[trial()], best=[best(), best(problem_=problem(arch="sm120"))])
    text = database.export_text(arch="sm120", trials=False)
    assert text.count('"kind":"best"') == 1
    assert '"kind":"trial"' not in text


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda lines: lines[1:], "line 1"),
        (lambda lines: [lines[0].replace('"version":1', '"version":2'), *lines[1:]], "upgrade"),
        (lambda lines: [*lines, '{"kind":"novel"}'], "line 4.*novel"),
        (lambda lines: [lines[0], lines[2]], "line 2.*environment"),
        (lambda lines: [lines[0], lines[1].replace("580.1", "999"), lines[2]], "line 2.*digest"),
        (lambda lines: [*lines[:2], lines[2][:40]], "line 3"),
        (lambda lines: [*lines[:2], lines[2].replace('"kernel":"fused_forward"', '"kernel":3')], "line 3"),
        (lambda lines: [*lines[:2], lines[2].replace('"kernel":"fused_forward",', "")], "line 3"),
        (lambda lines: [], "empty"),
    ],
)
def test_damaged_text_is_refused_with_its_line(damage, named):
    lines = jsonl.dumps([best()]).splitlines()
    with pytest.raises(DatabaseError, match=named):
        jsonl.loads("\n".join(damage(lines)), "file")


def test_rows_of_a_gone_kernel_are_left_out_and_counted():
    text = jsonl.dumps([best()], [trial()])
    _header, _environment, *rows = text.splitlines(keepends=True)
    records = jsonl.loads(text + with_a_gone_kernel("".join(rows)), "text")
    assert (records.best, records.trials, records.left_out) == ([best()], [trial()], {"gone": 2})


def test_export_leaves_rows_of_a_gone_kernel_out(tmp_path):
    database = Database(add_rows_of_a_gone_kernel(tmp_path / "t.sqlite"), shipped=False)
    database.store.put_best(best())
    assert database.export_text() == jsonl.dumps([best()])
    assert database.left_out() == {"gone": 3}
    assert Database(tmp_path / "none.sqlite", shipped=False).left_out() == {}


def test_recorder_appends_across_runs_and_names_an_environment_once(tmp_path):
    path = tmp_path / "sweep.jsonl"
    for created in ("1", "2"):
        recorder = jsonl.Recorder(path)
        recorder.add(trial(created=created))
        recorder.close()
    assert [t.created for t in jsonl.read(path).trials] == ["1", "2"]
    assert path.read_text().count('"kind":"environment"') == 1
    assert path.read_text().count('"kind":"header"') == 1


def test_build_db_gives_equal_bytes_and_leaves_nothing_else(tmp_path):
    tool = load_tool("build_db")
    rows, trials = records()
    source = tmp_path / "sm90.jsonl"
    source.write_text(jsonl.dumps(rows, trials))
    tool.build(source, tmp_path / "one.sqlite")
    tool.build(source, tmp_path / "two.sqlite")
    assert (tmp_path / "one.sqlite").read_bytes() == (tmp_path / "two.sqlite").read_bytes()
    with Store(tmp_path / "one.sqlite", mode="immutable") as store:
        assert len(store.best_rows("sm90")) == len(rows)
        assert len(store.trials()) == len(trials)
        assert store.meta(SOURCE_DIGEST)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.sqlite", "sm90.jsonl", "two.sqlite"]


def test_build_db_check_notices_a_changed_row(tmp_path):
    tool = load_tool("build_db")
    source = tmp_path / "sm90.jsonl"
    source.write_text(jsonl.dumps([best()]))
    assert tool.main(["--folder", str(tmp_path), "--check"]) == 1
    assert tool.main(["--folder", str(tmp_path)]) == 0
    assert tool.main(["--folder", str(tmp_path), "--check"]) == 0
    source.write_text(jsonl.dumps([best(median=79.0)]))
    assert tool.main(["--folder", str(tmp_path), "--check"]) == 1


def test_build_db_refuses_rows_of_a_kernel_that_this_version_does_not_have(tmp_path):
    source = tmp_path / "sm90.jsonl"
    source.write_text(with_a_gone_kernel(jsonl.dumps([best()])))
    with pytest.raises(DatabaseError, match="sm90.jsonl has rows of {'gone': 1}; remove them"):
        load_tool("build_db").build(source, tmp_path / "sm90.sqlite")
    assert [p.name for p in tmp_path.iterdir()] == ["sm90.jsonl"]


def test_shipped_files_in_the_tree_are_valid_and_built():
    assert load_tool("build_db").main(["--check"]) == 0
