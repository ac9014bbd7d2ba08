"""The kernels of a split through the tuner: cases, edge lengths, floors, sweeps, and the command line."""

import json

import pytest
import torch
from qla_jit.templates.segments_sm90 import FIRST, SEQUENCE
from split_times import ModelEvaluator, timed
from tuning_fakes import ENVIRONMENT

from qla_jit import cli, harness
from qla_jit.config import BACKWARD_KERNELS, FORWARD_KERNELS, SPLIT_KERNELS, OpConfig
from qla_jit.db import Database, Store, jsonl
from qla_jit.db.jsonl import Recorder
from qla_jit.errors import ConfigError
from qla_jit.model.features import MEASURED_TOLERANCE, Split, expected_warmup_chunks, windowed_heads
from qla_jit.registry import select
from qla_jit.spec import KernelSpec
from qla_jit.tune.evaluate import LiveEvaluator
from qla_jit.tune.measure import EDGE_GATES, EDGE_LENGTHS, Bench, edge_lengths
from qla_jit.tune.roofline import floor_us
from qla_jit.tune.shipped_plan import (
    MOST_SPLIT_HEADS,
    SHIPPED_SPLIT_WORKLOADS,
    SHIPPED_WORKLOADS,
    shipped_problems,
)
from qla_jit.tune.sweep import Plan, run_sweep
from qla_jit.workload import parse, workload_of

CONFIG = OpConfig(1, 2, 64, 64)
CUT = ("1x4096/16", "1x4096/32~0", "1x2048/16~100")


def problems(config=CONFIG, kernels=SPLIT_KERNELS):
    return [config.problem(kernel) for kernel in kernels]


def default(problem):
    return select(problem).default(problem)


@pytest.mark.parametrize("kernel", SPLIT_KERNELS)
def test_case_is_cut_as_the_workload_says(kernel):
    problem = CONFIG.problem(kernel)
    asked = workload_of(kernel, "1x2048/16~50")
    case = Bench("cpu").case(problem, asked.lengths, 0, **asked.case)
    assert len(case.tensors["segments"]) == 2  # of 32 chunks
    assert sorted((case.tensors["starts"][1] > 0).tolist()) == [False, True]  # one head of two has a window


@pytest.mark.parametrize("kernel", SPLIT_KERNELS)
@pytest.mark.parametrize("gates", EDGE_GATES)
def test_edge_lengths_of_a_split_are_cut_and_corrected(kernel, gates):
    problem = CONFIG.problem(kernel)
    case = Bench("cpu").case(problem, edge_lengths(problem), 0, gates)
    table, starts = case.tensors["segments"], case.tensors["starts"]
    assert table[:, SEQUENCE].bincount().tolist() == [1, 1, 2, 2, 4]  # segments of each sequence
    followers = starts[table[:, FIRST] > 0]  # segments with another ahead
    assert bool((followers == (-1 if gates == "none" else 1)).all())
    scans = sum(bool((table[i : i + 2, FIRST] > 0).all() and (starts[i : i + 2] < 0).all()) for i in range(len(table)))
    assert (scans > 1) == (gates == "none")  # the correction walks more than one segment


def test_edge_lengths_of_the_others_stay():
    assert {edge_lengths(problem) for problem in problems(kernels=FORWARD_KERNELS)} == {EDGE_LENGTHS}


def test_expected_windows_are_those_of_the_measured_gates():
    problem = OpConfig(2, 8, 64, 64).problem("segment_state")
    asked = parse("1x4096/16")
    starts = harness.make_case(problem, asked.lengths, 0, "cpu", **asked.case).tensors["starts"][1:]
    assert set(starts.unique().tolist()) == {-1, Split.of(asked).warmup_chunks}
    assert Split.of(asked).warmup_chunks == expected_warmup_chunks(harness.WINDOW)
    assert harness.WINDOW == MEASURED_TOLERANCE
    assert (starts > 0).sum(1).unique().tolist() == [windowed_heads(8, Split.of(asked).window_share)]


def test_worker_is_told_of_the_cut():
    evaluator = LiveEvaluator.__new__(LiveEvaluator)
    evaluator._seed = 3
    compiled = type("Built", (), {"path": "here"})
    for kernel, workload, case in (
        ("segment_state", "1x4096/16~50", {"segment_chunks": 16, "gates": "mild:50"}),
        ("fused_forward", "1x4096", {}),
    ):
        problem = CONFIG.problem(kernel)
        request = evaluator._request(KernelSpec(problem, default(problem)), workload, compiled, 5, verify=True)
        assert (request["lengths"], request["case"]) == ([4096], case)
        assert json.loads(json.dumps(request)) == request
    with pytest.raises(ConfigError, match="must cut its sequences"):
        evaluator._request(KernelSpec(problems()[0], default(problems()[0])), "1x4096", compiled, 5, verify=True)


def test_floor_counts_only_what_is_done():
    state, correct, forward = problems(OpConfig(2, 8))
    schedule = default(state)

    def floor(problem, share):
        return floor_us(problem, default(problem), [32768], Split(32, share))

    assert floor(state, 1.0) == floor(correct, 1.0) == 0.0
    whole = floor_us(OpConfig(2, 8).problem("fused_forward"), default(OpConfig(2, 8).problem("fused_forward")), [32768])
    assert floor(forward, 0.0) == floor(forward, 1.0) == pytest.approx(whole)
    # 15 of 16 segments make their state, and 14 of them a transfer matrix as well, at the same cost.
    declared = floor_us(state, schedule, [32768], Split(32, 0.0))
    assert floor(state, 0.75) == pytest.approx(declared / 4)
    narrow = schedule.replace(columns=64, registers="40/168/240")  # makes X twice as often
    assert declared < floor_us(state, narrow, [32768], Split(32, 0.0)) < 1.5 * declared


def test_sweep_measures_each_kernel_on_the_workloads_that_suit_it(tmp_path):
    plan = Plan((*problems(), CONFIG.problem("fused_forward")), (*CUT, "1x4096"), max_trials=3)
    with Database(tmp_path / "t.sqlite", shipped=False) as db:
        report = run_sweep(plan, ModelEvaluator(), db)
        units = [(unit.problem.kernel, unit.workload) for unit in report.units]
        assert units == [*((kernel, cut) for kernel in SPLIT_KERNELS for cut in CUT), ("fused_forward", "1x4096")]
        assert report.stopped == "" and all(unit.row for unit in report.units)
        assert db.lookup(problems()[0]).row.workload == "*"
        with pytest.raises(ConfigError, match="segment_state must cut"):
            run_sweep(Plan(tuple(problems()), ("1x4096",)), ModelEvaluator(), db)


@pytest.fixture()
def recording(tmp_path):
    path = tmp_path / "split.jsonl"
    recorder = Recorder(str(path))
    with Database(tmp_path / "first.sqlite", shipped=False) as db:
        run_sweep(Plan(tuple(problems(OpConfig(2, 8))), CUT), ModelEvaluator(), db, recorder=recorder)
    recorder.close()
    return str(path)


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    return ended.value.code


def test_recorded_sweep_of_a_split_is_replayed_from_the_command_line(recording, tmp_path, capsys):
    db = str(tmp_path / "t.sqlite")
    chosen = ["--heads", "2:8", "--kernels", ",".join(SPLIT_KERNELS), "--workload", ",".join(CUT)]
    assert call("run", *chosen, "--replay", recording, "--db", db, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {(u["problem"]["kernel"], u["workload"]) for u in told["units"]} == {
        (kernel, cut) for kernel in SPLIT_KERNELS for cut in CUT
    }
    with Store(db) as store:
        rows = store.best_rows("sm90")
    assert {row.workload for row in rows} == {*CUT, "*"}
    assert len(jsonl.loads(open(recording).read(), recording).trials) > len(rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kernels", "fused_forward", "--workload", "1x8192/16"], "fused_forward must leave its sequences whole"),
        (["--kernels", "segment_state", "--workload", "1x8192"], "segment_state must cut its sequences"),
        (["--kernels", "segment_state,fused_forward", "--workload", "1x8192/16"], "fused_forward must leave"),
        (["--kernels", "segment_state", "--workload", "1x8192/16~200"], "PERCENT of 0 to 100"),
        (["--workload", "1x8192,1x8192/16"], "must leave its sequences whole"),
    ],
)
def test_workloads_that_suit_no_kernel_are_refused(arguments, said, tmp_path, capsys):
    assert call("run", "--heads", "2:8", *arguments, "--dry-run", "--db", str(tmp_path / "t.sqlite")) == 2
    assert said in capsys.readouterr().err


def planned(capsys, tmp_path, *arguments):
    assert call("run", *arguments, "--dry-run", "--json", "--db", str(tmp_path / "t.sqlite")) == 0
    return json.loads(capsys.readouterr().out)


def test_default_workloads_follow_from_the_kernels(tmp_path, capsys):
    assert planned(capsys, tmp_path)["workloads"] == list(SHIPPED_WORKLOADS)
    both = planned(capsys, tmp_path, "--kernels", ",".join((*FORWARD_KERNELS, *SPLIT_KERNELS)))
    assert both["workloads"] == [*SHIPPED_WORKLOADS, *SHIPPED_SPLIT_WORKLOADS]
    split = planned(capsys, tmp_path, "--kernels", "segment_state", "--heads", "2:8")
    assert all("/" in workload for workload in split["workloads"])
    (one,) = split["problems"]
    assert one["trials_left"] == one["points"] * len(split["workloads"])


def test_shipped_list_of_a_split_has_few_heads_several_lengths_and_all_shares():
    found = shipped_problems("sm90", kernels=SPLIT_KERNELS)
    assert {problem.kernel for problem in found} == set(SPLIT_KERNELS)
    assert max(problem.num_value_heads for problem in found) == MOST_SPLIT_HEADS
    asked = [parse(workload) for workload in SHIPPED_SPLIT_WORKLOADS]
    assert {w.decaying_percent for w in asked} == {0, 75, 100}
    assert len({w.segment_chunks for w in asked}) >= 5 and len({w.lengths for w in asked}) >= 3
    assert ENVIRONMENT.sm_count == 132 and timed(found[0], default(found[0]), "1x32768/16").median_us > 0
    default_list = shipped_problems("sm90")
    assert {problem.kernel for problem in default_list} == {*FORWARD_KERNELS, *BACKWARD_KERNELS}


def test_a_copy_of_a_case_has_memory_of_its_own_and_takes_other_data():
    split = OpConfig(1, 2, 64, 64).problem("segment_forward")
    first, second = (harness.make_case(split, (1100, 64), seed, "cpu", segment_chunks=8) for seed in (0, 1))
    arena = first.copy()
    kept = {name: x.clone() for name, x in first.tensors.items() if isinstance(x, torch.Tensor)}
    arena.poison()
    arena.refill(second)
    for name, x in kept.items():
        assert torch.equal(first.tensors[name].nan_to_num(), x.nan_to_num()), name
        assert torch.equal(arena.tensors[name].nan_to_num(), second.tensors[name].nan_to_num()), name
    assert all(torch.equal(arena.wanted[name], x) for name, x in second.wanted.items())
