import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tuning_fakes import (
    DIGEST,
    ENVIRONMENT,
    FakeEvaluator,
    best,
    fake_template,
    point,
    problem,
    trial,
    use_templates,
    with_a_gone_kernel,
)

from qla_jit import cli
from qla_jit.db import Database, jsonl
from qla_jit.db.lookup import family
from qla_jit.db.records import CostModel, Environment
from qla_jit.tune.report import model_section, render
from qla_jit.tune.report_charts import curve, residuals, ticks
from qla_jit.tune.report_data import failures, filtered, from_database, from_files, panels_of, template_sources
from qla_jit.tune.sweep import Plan, run_sweep

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "tuning_db" / "sweeps").glob("*.jsonl"))
VOID = {"meta", "br", "link", "img"}


@pytest.fixture(autouse=True)
def templates(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))


class Checker(HTMLParser):
    """Refuses tags that are not closed in order, and collects what a page holds."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, *a) for a in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-5:])
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    ids = [value for _, name, value in checker.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value for _, name, value in checker.attributes if name == "href"]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    assert not {"script", "link", "img", "iframe"} & set(checker.seen)
    assert not re.search(r"(src|href|url|@import)\W{0,3}https?:", page)
    return checker


def tuned(path, statuses=None):
    with Database(path, shipped=False) as db:
        run_sweep(Plan((problem(), problem(8, 32)), ("8192x4", "1x8192")), FakeEvaluator(statuses or {}), db)
    return path


def test_page_of_a_database_has_every_section_and_is_the_same_each_time(tmp_path):
    path = tuned(tmp_path / "user.sqlite", {point(1, 1): "wrong", point(1, 3): "wrong", point(0, 2): "crashed"})
    with Database(path, shipped=False) as db:
        data = from_database(db)
        page = render(data, "A <title>")
    with Database(path, shipped=False) as db:
        assert render(from_database(db), "A <title>") == page
    found = checked(page)
    for heading in ("Best rows against defaults", "parameter importances", "curves", "Failures", "Provenance"):
        assert heading in found.text
    assert "A <title>" in found.text
    assert len([tag for tag in found.seen if tag == "figure"]) == 4
    assert "because wrong" in found.text and "because crashed" in found.text
    assert "1.46×" in found.text  # the gain of the best row
    assert "Fake H200" in found.text and DIGEST[:16] in found.text
    assert "Cost model" not in found.text
    charts = [value for tag, name, value in found.attributes if tag == "svg" and name == "aria-label"]
    assert "60 trials, 3 failed, best 100.0 µs" in charts[0] and "default 146.0 µs" in charts[0]


def test_best_row_table_marks_rows_of_older_sources(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        db.store.add(best=[best(), best(problem_=problem(8, 32), template_digest="e" * 64)])
        data = from_database(db)
    assert [(line.row.problem.num_heads, line.state) for line in data.best] == [(16, "current"), (8, "stale")]
    found = checked(render(data))
    assert "stale" in found.text and "current" in found.text
    assert [(s.digest[0], s.current, s.best_rows) for s in template_sources(data)] == [("d", True, 1), ("e", False, 1)]


def test_row_of_a_template_that_is_gone_is_told_not_refused(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        gone = point(template="gone")
        db.store.add(best=[best(gone)], trials=[trial(gone)])
        data = from_database(db)
    assert data.best[0].state == "template gone"
    checked(render(data))


def test_trials_of_cards_and_of_older_sources_are_not_mixed():
    other = Environment(**{**ENVIRONMENT.as_dict(), "gpu": "Other"})
    trials = [
        trial(point(0, 0), median=10.0, template_digest="e" * 64, created="1"),
        trial(point(0, 0), median=100.0, created="2"),
        trial(point(2, 4, "r"), median=80.0, created="3"),
        trial(point(2, 4, "r"), median=70.0, created="4"),
        trial(point(0, 0), median=30.0, environment=other, created="5"),
    ]
    first, second = sorted(panels_of(trials), key=lambda p: p.environment.gpu)
    assert (first.older, first.best.median_us, first.default_trial.median_us) == (1, 70.0, 100.0)
    assert len(first.trials) == 2
    assert (second.older, second.best.median_us) == (0, 30.0)


def test_default_of_an_older_source_is_the_trial_that_the_sweep_began_with():
    old = {"template_digest": "e" * 64}
    begun = point(3, 1, "q")
    panel = panels_of([trial(begun, created="1", **old), trial(point(2, 4), created="2", **old)])[0]
    assert panel.default == begun
    panel = panels_of([trial(begun, created="1"), trial(point(2, 4), created="2")])[0]
    assert panel.default is None and panel.default_trial is None
    assert "default" not in curve(panel).split("<path")[0]


def test_like_failures_meet_whatever_their_numbers():
    trials = [
        trial(point(0, 0), "wrong", reason="relative error 0.51 > tolerance 0.01\nmore"),
        trial(point(0, 2), "wrong", reason="relative error 3.2e-05 > tolerance 0.01"),
        trial(point(0, 4), "crashed", reason="worker: <signal> SIGSEGV"),
    ]
    found = failures(trials)
    assert [(f.status, f.count) for f in found] == [("wrong", 2), ("crashed", 1)]
    data = from_records(trials)
    assert "<signal>" in checked(render(data)).text


def from_records(trials):
    from qla_jit.tune.report_data import ReportData

    return ReportData(["memory"], trials, [], panels_of(trials))


def test_empty_database_gives_a_page_that_says_so(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        found = checked(render(from_database(db)))
    assert "No best row" in found.text


def test_files_give_the_rows_that_their_races_decide(tmp_path):
    recorder = jsonl.Recorder(tmp_path / "sweep.jsonl")
    with Database(tmp_path / "a.sqlite", shipped=False) as db:
        plan = Plan((problem(),), ("8192x4", "1x8192"))
        report = run_sweep(plan, FakeEvaluator(), db, recorder=recorder)
    recorder.close()
    data = from_files([tmp_path / "sweep.jsonl"])
    stored = {
        row.workload: (row.schedule, row.median_us, row.gain) for row in [u.row for u in report.units] + report.overall
    }
    assert {b.row.workload: (b.row.schedule, b.row.median_us, b.row.gain) for b in data.best} == stored
    again = from_files([tmp_path / "sweep.jsonl", tmp_path / "a.sqlite"])
    assert len(again.trials) == len(data.trials)
    assert {b.layer for b in again.best} == {"a.sqlite"}


def test_filters_keep_kernels_and_heads(tmp_path):
    with Database(tuned(tmp_path / "user.sqlite"), shipped=False) as db:
        data = from_database(db)
    assert len(filtered(data, heads=["8:32"]).panels) == 2
    assert filtered(data, kernels=["kkt_inverse"]).panels == []
    assert from_files([tmp_path / "user.sqlite"], "sm100").trials == []


def test_cost_model_section_is_there_only_with_a_model():
    assert model_section([]) == ""
    model = {
        "name": "fused_forward sm90 <8:32>",
        "coefficients": {"depth_us": 1.25, "constant_us": 12.5},
        "rows": 24,
        "loo_error": 0.031,
        "fitted_on": "ab" * 32,
        "points": [(100.0, 103.0), (200.0, 190.0)],
    }
    found = checked(f"<main>{model_section([model])}</main>")
    assert "3.1%" in found.text and "depth_us" in found.text and "-5.0%" in found.text and "<8:32>" in found.text
    assert "figure" in found.seen
    without_points = {k: v for k, v in model.items() if k != "points"}
    assert "figure" not in checked(f"<main>{model_section([without_points])}</main>").seen
    assert residuals([], "x") == ""


def test_fits_of_the_database_are_drawn_with_their_residuals(tmp_path):
    coefficients = (1.5, 0.05, 6.0)
    fit = CostModel(
        family(problem()), point(), "work", coefficients, 3, 0.02, 0.05, "ab" * 32, DIGEST, ENVIRONMENT, "2026"
    )
    trials = [trial(workload=w, median=m) for w, m in (("1x8192", 200.0), ("8192x4", 800.0), ("1024x8", 120.0))]
    with Database(tmp_path / "user.sqlite", shipped=False) as db:
        db.store.add(trials=trials, fits=[fit], best=[best(point())])
        data = from_database(db)
    (model,) = data.models
    assert (model["rows"], model["loo_error"], len(model["points"])) == (3, 0.02, 3)
    assert model["note"].startswith("in use") and "stale" not in model["note"]
    found = checked(render(data))
    assert "Cost model" in found.text and "us_per_step" in found.text and "largest residuals" in found.text
    assert from_files([tmp_path / "user.sqlite"]).models == data.models


@pytest.mark.parametrize(("low", "high", "log"), [(33.0, 41.0, False), (20.0, 9000.0, True), (100.0, 100.5, False)])
def test_ticks_lie_within_the_axis_and_are_few(low, high, log):
    found = ticks(low, high, log)
    assert 2 <= len(found) <= 12 and all(low <= t <= high for t in found)


def test_curve_of_thousands_of_trials_stays_small():
    trials = [trial(point(a % 4, a % 5, str(a)), median=100 + (a * 7919) % 500, created=f"{a:05}") for a in range(5000)]
    assert len(curve(panels_of(trials)[0])) < 12_000
    assert curve(panels_of([trial(status="wrong")])[0]) == ""


def test_shipped_sweeps_make_one_page_below_5_mb(monkeypatch):
    monkeypatch.undo()  # the real templates
    data = from_files(SHIPPED)
    page = render(data)
    checked(page)
    assert len(SHIPPED) == 8 and data.panels and data.best
    assert len(page.encode()) < 5_000_000


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def test_verb_writes_the_page_and_says_what_is_on_it(tmp_path, capsys):
    tuned(tmp_path / "user.sqlite")
    out = tmp_path / "r.html"
    assert (
        call("report", "--out", out, "--kernels", "fused_forward", "--heads", "8:32", "--title", "Mine", "--json") == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["verb"], told["ok"], told["problems"]) == ("qla-tune", "report", True, 1)
    assert "Mine" in checked(out.read_text()).text and out.stat().st_size == told["bytes"]
    (tmp_path / "a.jsonl").write_text(with_a_gone_kernel(jsonl.dumps([], [trial()])))
    assert call("report", tmp_path / "a.jsonl", "--out", out) == 0
    assert "1 rows of gone" in checked(out.read_text()).text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--kernels", "novel"], "novel"),
        (["--out", "/nowhere/r.html"], "/nowhere/r.html"),
        (["a.jsonl", "--db", "b.sqlite"], "leave one out"),
    ],
)
def test_bad_arguments_are_errors_without_traceback(arguments, named, capsys):
    assert call("report", *arguments) == 2
    assert named in (err := capsys.readouterr().err) and "Traceback" not in err
