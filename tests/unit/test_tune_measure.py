"""The order of checks around a timing, on a case without a GPU: capture and clock are replaced, the checks are real."""

import copy
import math

import pytest
import torch
from tuning_fakes import problem

from qla_jit.tune import measure as module
from qla_jit.tune.measure import EDGE_GATES, EDGE_LENGTHS, Bench, edge_lengths, measure


class FakeCase:
    """Output = 2 × input; the seed is the data."""

    tolerance = 6e-3

    def __init__(self, problem, lengths, seed, device, gates):
        self.lengths, self.value, self.gates = tuple(lengths), float(seed + 1), gates
        self.output = 0.0

    def copy(self):
        return copy.copy(self)

    def refill(self, other):
        self.value = other.value

    def poison(self):
        self.output = math.nan

    def launch(self, kernel):
        self.output = kernel(self.value, self.output, (self.lengths, self.gates))

    def error(self):
        return abs(self.output / (2 * self.value) - 1)


class FakeGraph:
    def __init__(self, case, kernel):
        self.replay = lambda: case.launch(kernel)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "_captured", FakeGraph)
    monkeypatch.setattr(
        module, "_timed", lambda bench, graph, samples, observe: (graph.replay(), ((1.0, 2.0), observe()))[1]
    )


def run(kernel, verify=True, bench=None, seed=10, stages=None):
    bench = bench or Bench("none", FakeCase)
    stages = [] if stages is None else stages
    return measure(bench, kernel, problem(), [64], seed, 2, verify, stages.append)


def test_right_kernel_is_timed_after_all_stages():
    stages = []
    found = run(lambda x, y, n: 2 * x, stages=stages)
    assert (found.status, found.samples_us, found.error) == ("ok", (1.0, 2.0), 0.0)
    assert stages == ["data", "verify", "measure", "recheck"]


def test_kernel_that_writes_nothing_is_nonfinite():
    found = run(lambda x, y, n: y)
    assert (found.status, found.samples_us, found.error) == ("nonfinite", (), None)


def test_kernel_that_is_right_for_one_seed_only_is_wrong():
    found = run(lambda x, y, n: 22.0)  # 2 × (seed 10 + 1)
    assert found.status == "wrong"
    assert "seed 11: relative error 0.0833 > tolerance 0.006" in found.reason
    assert found.samples_us == ()


@pytest.mark.parametrize("gates", EDGE_GATES)
def test_kernel_that_is_wrong_at_edge_lengths_or_a_decay_is_wrong(gates):
    found = run(lambda x, y, n: 2 * x * (1 + (n == (EDGE_LENGTHS, gates))))
    assert found.status == "wrong"
    assert found.reason.startswith(f"edge lengths, {gates} decay")


def test_graph_that_remembers_old_data_is_wrong():
    calls = []

    def kernel(x, y, lengths):
        calls.append(x)
        return 2 * calls[3] if len(calls) > 3 else 2 * x

    found = run(kernel)
    assert found.status == "wrong"
    assert found.reason.startswith("graph replay, seed 12")
    assert found.samples_us == ()


def test_repeated_timing_of_a_verified_kernel_skips_the_checks():
    stages = []
    found = run(lambda x, y, n: y, verify=False, stages=stages)
    assert (found.status, found.samples_us) == ("ok", (1.0, 2.0))
    assert "recheck" not in stages


def test_data_is_made_once_per_seed_and_freed_for_another_problem():
    made = []
    bench = Bench("none", lambda *a, **k: (made.append(a), FakeCase(*a, **k))[1])
    for _ in range(3):
        run(lambda x, y, n: 2 * x, bench=bench)
    assert len(made) == 5  # three seeds, of which one is copied, the edge lengths without and with violent decay
    bench.case(problem(8, 32), [64], 0)
    assert len(bench._cases) == 1


def test_what_the_workload_says_goes_to_its_cases_and_not_to_the_edge_lengths():
    made = []

    def make_case(problem, lengths, seed, device, gates, **cut):
        made.append((tuple(lengths), gates, cut))
        return FakeCase(problem, lengths, seed, device, gates)

    split = problem(kernel="segment_state")
    asked = {"segment_chunks": 16, "gates": "mild:50"}
    found = measure(
        Bench("none", make_case), lambda x, y, n: 2 * x, split, [4096], 10, 2, True, lambda stage: None, asked=asked
    )
    assert found.status == "ok"
    assert made[:3] == [((4096,), "mild:50", {"segment_chunks": 16})] * 3  # three seeds
    assert made[3:] == [(edge_lengths(split), gates, {}) for gates in EDGE_GATES]
