import json

import pytest
from tuning_fakes import FakeEvaluator, best, fake_template, point, problem, trial, use_templates

from qla_jit import cli
from qla_jit.arch import ARCHS
from qla_jit.config import BACKWARD_KERNELS, FORWARD_KERNELS, KERNELS
from qla_jit.db import Database
from qla_jit.db.records import Times
from qla_jit.resources import is_feasible
from qla_jit.tune import commands
from qla_jit.tune.shipped_plan import OPERATORS, SHIPPED_WORKLOADS, Pace, pace_of, planned, shipped_problems
from qla_jit.tune.space import enumerate_space
from qla_jit.workload import lengths_of

PROBLEMS = [problem(16, 64), problem(8, 32), problem(4, 16), problem(2, 8)]


@pytest.fixture()
def fakes(monkeypatch, tmp_path):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setenv("QLA_DB", str(tmp_path / "user.sqlite"))


@pytest.fixture()
def db(fakes, tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as opened:
        yield opened


def test_list_covers_the_families_at_every_tensor_parallel_degree():
    heads = {op.heads for op in OPERATORS if op.head_dims == (128, 128)}
    for value_heads in (64, 48, 32, 16):
        assert {(16 // tp, value_heads // tp) for tp in (1, 2, 4, 8)} <= heads
    dims = {d for op in OPERATORS for d in op.head_dims}
    assert dims == {64, 128, 256}
    tokens = [sum(lengths_of(w)) for w in SHIPPED_WORKLOADS]
    assert max(tokens) >= 16384 and min(tokens) <= 2048
    assert len(set(OPERATORS)) == len(OPERATORS) and all(op.models for op in OPERATORS)


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_every_problem_of_the_list_has_a_default_that_runs(arch):
    found = shipped_problems(arch)
    assert found and len(set(found)) == len(found)
    for p in found:
        space = enumerate_space(p)
        assert space.points and is_feasible(p, space.points[0])


def test_list_begins_with_the_largest_model_and_its_heaviest_kernel():
    found = shipped_problems("sm90")
    assert [(p.kernel, p.num_heads, p.num_value_heads) for p in found[:4]] == [
        ("fused_forward", 16, 64), ("kkt_inverse", 16, 64), ("fused_forward", 8, 32), ("kkt_inverse", 8, 32),
    ]  # fmt: skip
    kernels = [p.kernel for p in found]
    forward = found[: next(i for i, kernel in enumerate(kernels) if kernel in BACKWARD_KERNELS)]
    assert {p.kernel for p in forward} == set(FORWARD_KERNELS) and set(kernels[len(forward) :]) == set(BACKWARD_KERNELS)
    assert shipped_problems("sm100") and not set(BACKWARD_KERNELS) & {p.kernel for p in shipped_problems("sm100")}
    assert not set(BACKWARD_KERNELS) & {p.kernel for p in shipped_problems("sm90", chunk_sizes=[32])}
    first_other = next(i for i, p in enumerate(forward) if (p.head_dim_k, p.head_dim_v or 128) != (128, 128))
    default_dims = [i for i, p in enumerate(forward) if (p.head_dim_k, p.head_dim_v or 128) == (128, 128)]
    assert max(default_dims) < first_other
    gated = shipped_problems("sm90", kernels=("input_activation",), gate_dtype="bfloat16")
    assert {p.gate_dtype for p in gated} == {"bfloat16"}
    only = shipped_problems("sm90", dtype="float16", kernels=("kkt_inverse",))
    assert {p.kernel for p in only} == {"kkt_inverse"} and {p.dtype for p in only} == {"float16"}
    assert set(KERNELS) >= {p.kernel for p in found}


def test_without_a_budget_everything_fits_in_the_order_given(db):
    found = planned(PROBLEMS, ("8192x4", "1x8192"), db)
    assert [p.problem for p in found] == PROBLEMS and all(p.fits for p in found)
    assert {(p.points, p.left, p.state) for p in found} == {(60, 120, "untuned")}


def test_budget_takes_the_head_of_the_list_and_always_the_first(db):
    whole = planned(PROBLEMS, ("8192x4",), db)
    two = whole[0].estimate_s + whole[1].estimate_s
    assert [p.fits for p in planned(PROBLEMS, ("8192x4",), db, two + 1)] == [True, True, False, False]
    assert [p.fits for p in planned(PROBLEMS, ("8192x4",), db, 0.1)] == [True, False, False, False]
    fewer = planned(PROBLEMS, ("8192x4",), db, two + 1, max_trials=5)
    assert all(p.points == 5 for p in fewer) and all(p.fits for p in fewer)


def test_compiling_and_measuring_overlap_and_more_of_both_take_less(db):
    slow = planned(PROBLEMS, ("8192x4",), db, jobs=1)[0].estimate_s
    compilers = planned(PROBLEMS, ("8192x4",), db, jobs=1000)[0].estimate_s
    cards = planned(PROBLEMS, ("8192x4",), db, jobs=1000, cards=2)[0].estimate_s
    assert slow > compilers > cards


def test_what_is_untuned_or_stale_goes_first_and_what_is_measured_whole_last(db):
    whole = enumerate_space(PROBLEMS[0]).points
    db.store.add(
        best=[
            best(problem_=PROBLEMS[0]),
            best(problem_=PROBLEMS[1]),
            best(problem_=PROBLEMS[2], template_digest="e" * 64),
        ],
        trials=[trial(s, problem_=PROBLEMS[0]) for s in whole],
    )
    found = planned(PROBLEMS, ("8192x4",), db)
    assert [(p.problem.num_heads, p.state) for p in found] == [
        (4, "stale"), (2, "untuned"), (8, "tuned"), (16, "done"),
    ]  # fmt: skip
    assert found[-1].left == 0 and found[-1].estimate_s < found[0].estimate_s / 5


def test_trials_of_an_older_source_or_another_workload_are_still_to_make(db):
    db.store.add(
        trials=[
            trial(point(0, 0)),
            trial(point(0, 2), template_digest="e" * 64),
            trial(point(0, 4), workload="1x8192"),
            trial(point(1, 1), "wrong"),
            trial(point(2, 2), phase="final"),
        ]
    )
    assert planned(PROBLEMS, ("8192x4",), db)[0].left == 58


def test_pace_is_that_of_the_databases_own_trials():
    assert pace_of([]) == Pace()
    trials = [trial(times=Times(20.0, 1.0, 0.5, 9.0, 0.5)), trial(times=Times(0.1, 3.0, 0.5, 9.0, 0.5))]
    found = pace_of([*trials, trial(status="crashed", times=Times(300.0, 60.0, 0, 0, 0))])
    assert (found.compile_s, found.trial_s) == (20.0, 3.0)


def call(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    return caught.value.code or 0


def test_command_with_nothing_named_tunes_the_list_within_its_budget(fakes, monkeypatch, capsys):
    monkeypatch.setattr(commands, "_evaluator", lambda *a: FakeEvaluator())
    monkeypatch.setattr(commands, "SHIPPED_BUDGET_S", 200.0)
    assert call("--arch", "sm90", "--jobs", 16, "--json") == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    problems = list(dict.fromkeys((u["problem"]["num_heads"], u["problem"]["num_value_heads"]) for u in told["units"]))
    assert problems == [(16, 64)][: len(problems)] and len(told["units"]) == len(problems) * len(SHIPPED_WORKLOADS)
    assert "plan: 1 of" in captured.err and "budget 3 min" in captured.err and "next run" in captured.err
    # The same command goes on: what is done is last now.
    assert call("--arch", "sm90", "--jobs", 16, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["units"][0]["problem"]["num_value_heads"] == 32


def test_heads_or_head_dims_mean_those_alone(fakes, monkeypatch, capsys):
    monkeypatch.setattr(commands, "_evaluator", lambda *a: FakeEvaluator())
    assert call("--heads", "2:8", "--kernels", "fused_forward", "--json") == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [u["workload"] for u in told["units"]] == ["8192x4", "1x8192"] and "plan:" not in captured.err
    assert call("--head-dim", "64", "--kernels", "fused_forward", "--workload", "1x64", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {u["problem"]["head_dim_k"] for u in told["units"]} == {64} and len(told["units"]) == 8


def test_dry_run_prints_the_plan_and_touches_nothing(fakes, tmp_path, capsys):
    assert call("--arch", "sm90", "--dry-run", "--budget", "600", "--jobs", 8, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], told["dry_run"], told["budget_s"]) == ("run", True, 600.0)
    first, *_, last = told["problems"]
    assert first["problem"]["num_value_heads"] == 64 and first["within_budget"] and not last["within_budget"]
    assert call("--heads", "2:8", "--kernels", "fused_forward", "--dry-run") == 0
    captured = capsys.readouterr()
    assert "fused_forward 2:8" in captured.out and "no budget" in captured.err
    assert not (tmp_path / "user.sqlite").exists()
