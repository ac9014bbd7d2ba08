"""tools/split_regret.py: its batches are the same in every run, and its figures are what the rows say."""

import json

import pytest
import torch
from pretended_card import forget_operators, pretend
from tool_files import load_tool

from qla_jit.numerics import make_inputs


@pytest.fixture(scope="module")
def tool():
    return load_tool("split_regret")


def test_random_batches_are_fixed_and_within_their_bounds(tool):
    batches = tool.random_batches()
    assert batches == tool.random_batches() and len(batches) == 60
    for batch in batches:
        assert 1 <= len(batch["lengths"]) <= 64 and sum(batch["lengths"]) <= tool.MOST_TOKENS
        assert all(64 <= length <= 65_536 for length in batch["lengths"]) and 0 <= batch["percent"] <= 100
    assert {batch["window"] for batch in batches} == {"exact", tool.WINDOW}
    assert min(batch["heads"][1] for batch in batches) == 2 and max(batch["heads"][1] for batch in batches) == 64
    assert len(tool.core_batches()) == 5 * 7 * 2
    assert {batch["pass"] for batch in tool.backward_batches()} == {"backward"}


def test_segment_lengths_surround_the_plan_and_cut_something(tool):
    found = tool.segment_lengths(24, [32768], 8, 132, 8)
    assert 24 in found and found == sorted(found) and min(found) >= 8 and max(found) < 512
    assert tool.segment_lengths(None, [512], 64, 132, 8) == []


def test_report_gives_regret_against_the_best_of_each_row(tool, tmp_path, capsys):
    rows = [
        {"us": {"whole": 100, "8": 60, "16": 50}, "planned": "16", "hinted": "8", "predicted_us": 55.0},
        {"us": {"whole": 100, "8": 80}, "planned": "whole", "hinted": "8", "predicted_us": 90.0},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tool.main(["report", str(path)])
    said = capsys.readouterr().out
    assert "2 batches, 5 plans measured" in said
    assert "| the plan | 12.5% | 25.0% |" in said
    assert "| the plan, told the share of windows | 10.0% | 20.0% |" in said
    assert "| never split | 62.5% | 100.0% |" in said
    assert "at worst +0.0%" in said and "median 10.0%" in said


def test_a_length_between_two_that_were_measured_takes_a_time_between_theirs(tool):
    us = {"whole": 100.0, "8": 60.0, "8 told": 55.0, "16": 40.0}
    known = (("8", 60.0), ("8 told", 55.0), ("16 told", 40.0), ("whole", 100.0), ("ordered", None))
    for name, want in (*known, ("12", 50.0), ("12 told", 50.0), ("4", 60.0), ("99", 40.0)):
        assert tool.time_of(us, name) == want
    assert tool.time_of({"whole": 1.0}, "8") is None


def test_replan_judges_what_would_be_planned_now(tool, tmp_path, capsys):
    batch = {"heads": [2, 8], "lengths": [32768], "percent": 75, "window": tool.WINDOW}
    us = {"whole": 700.0, "8": 260.0, "32": 160.0, "64": 210.0, "256": 500.0}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(batch | {"us": us}) + "\n" + json.dumps(batch | {"us": us, "pass": "backward"}))
    tool.main(["replan", str(path)])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["the plan", "told the share"]
    for row in rows:
        assert row[2].strip() == "2 of 2" and 0 <= float(row[4].strip(" %")) < 100 and row[5].strip().startswith("-")


def test_both_plans_are_measured_by_their_own_schedules(tool, monkeypatch):
    launched = []

    def load(artifact):
        return lambda *arguments: launched.append(artifact.spec.schedule)

    pretend(monkeypatch, load)
    batch = {"heads": (1, 4), "lengths": [630, 3535, 1793, 402, 18955], "percent": 25, "window": tool.WINDOW}
    x = make_inputs(batch["lengths"], *batch["heads"])
    runs, plans, names = tool.forward_runs(batch, x, torch.device("cpu"), 132)
    assert set(names) <= set(runs) and "whole" in runs and len(runs) > 4
    assert names[0] == str(plans[0].segment_chunks) and names[1].split()[0] == str(plans[1].segment_chunks)
    for name, plan in zip(names, plans):
        launched.clear()
        runs[name]()
        assert launched == list(plan.schedules.values())
    assert (names[1].endswith(" told")) == (plans[0].schedules != plans[1].schedules)
    forget_operators()
