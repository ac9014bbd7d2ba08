import json
import sys
from pathlib import Path

import pytest
from tuning_fakes import best, fake_template, point, problem, time_us, trial, use_templates

from qla_jit.db import jsonl
from qla_jit.tune.space import enumerate_space

pytest.importorskip("rich")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import search_study  # noqa: E402

WORKLOAD = "8192x4"


@pytest.fixture()
def files(tmp_path, monkeypatch):
    """Two recorded configurations of 60 points, and the winners' rows."""
    use_templates(monkeypatch, fake_template())
    sweeps = tmp_path / "sweeps"
    sweeps.mkdir()
    for heads in (32, 64):
        asked = problem(16, heads)
        trials = [trial(p, median=time_us(p), problem_=asked) for p in enumerate_space(asked).points]
        (sweeps / f"{heads}.jsonl").write_text(jsonl.dumps(trials=trials))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(jsonl.dumps([best(point(2, 4, "r"), problem(16, 64)), best(point(0, 4, "q"), problem(16, 32))]))
    yield tuple(sorted(sweeps.glob("*.jsonl"))), rows
    search_study.recording.cache_clear()


def study(files, strategy, heads=64, seeds=4):
    sweeps, rows = files
    return search_study.study_space(sweeps, rows, problem(16, heads), WORKLOAD, strategy, seeds)


def test_budgets_never_exceed_their_share(files):
    assert [r.trials for r in study(files, "random")] == [6, 15, 30]
    assert [search_study.budget(9, share) for share in search_study.SHARES] == [1, 2, 4]


def test_neighbours_leave_out_the_rows_of_the_problem_itself(files):
    rows = jsonl.read(files[1]).best
    assert [m.schedule for m in search_study.neighbours(rows, problem(), WORKLOAD)] == [point(0, 4, "q")]
    won = [study(files, "random+near", heads)[0] for heads in (32, 64)]
    assert [(r.hits, r.median_loss) for r in won][0] == (1.0, 0.0)  # its neighbour's winner is the best here
    assert won[1].median_loss > 0


@pytest.mark.parametrize("strategy", search_study.STRATEGIES)
def test_every_strategy_begins_with_the_default_and_never_gets_worse(files, strategy):
    small, middle, large = study(files, strategy)
    assert small.worst_loss <= 0.46
    assert small.median_loss >= middle.median_loss >= large.median_loss
    assert (small.points, small.near_points) == (60, 1)


def test_table_has_a_line_for_each_kernel_and_strategy(files, tmp_path):
    results = [r for heads in (32, 64) for r in study(files, "random+near", heads, seeds=1)]
    path = tmp_path / "out.jsonl"
    rows = [{"kind": "row", **vars(r)} for r in results]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"kind": "run"}, *rows]))
    assert search_study.read_results(path) == results
    lines = search_study.table(results).splitlines()
    assert len(lines) == 3
    assert lines[2] == "| fused_forward | 2 × 60 | random+near | 50% | 50% | 50% | 1 | 1.5% | 3.0% |"


def test_table_in_the_notes_is_that_of_the_stored_results():
    docs = Path(__file__).parents[2] / "docs"
    table = search_study.table(search_study.read_results(docs / "perf" / "search_study.jsonl"))
    assert table in (docs / "tuning.md").read_text()
