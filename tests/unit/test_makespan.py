"""The makespan of groups of equal jobs against a simulation that places one job after the other."""

import heapq
import random

import pytest

from qla_jit.model.makespan import makespan


def simulated(groups, machines):
    """Every job, the longest first, on the machine of least load."""
    loads = [0] * machines
    for duration in sorted((d for d, count in groups for _ in range(count)), reverse=True):
        heapq.heapreplace(loads, loads[0] + duration)
    return max(loads)


def draws(longest, shortest, most, seeds):
    for seed in range(seeds):
        draw = random.Random(seed)
        groups = [
            (draw.randint(shortest, longest), draw.choice([1, 2, draw.randrange(most)]))
            for _ in range(draw.randint(1, 8))
        ]
        yield groups, draw.choice([1, 2, 7, 132])


def test_few_jobs_end_when_the_simulation_says():
    for groups, machines in draws(60, 20, 20, 300):
        if sum(d * n for d, n in groups) < 32 * 20 * machines:  # no job is short beside an even share
            assert makespan(groups, machines) == simulated(groups, machines), (groups, machines)


def test_many_jobs_end_within_a_64th_of_the_simulation():
    for groups, machines in draws(50, 0, 3000, 300):
        wanted = simulated(groups, machines)
        assert makespan(groups, machines) == pytest.approx(wanted, rel=1 / 64), (groups, machines)


def test_equal_jobs_are_whole_waves():
    assert makespan([(5, 264)], 132) == 10
    assert makespan([(5, 265)], 132) == 15
    assert makespan([(1, 10**9)], 1000) == 10**6


def test_one_long_job_is_the_end_where_the_others_fit_beside_it():
    assert makespan([(100, 1), (1, 13_000)], 132) == 100


def test_groups_of_one_duration_are_one_group():
    assert makespan([(4, 3), (7, 2), (4, 5)], 3) == makespan([(7, 2), (4, 8)], 3) == simulated([(7, 2), (4, 8)], 3)


@pytest.mark.parametrize("groups", [[], [(0, 5)], [(3, 0)]])
def test_without_work_the_end_is_zero(groups):
    assert makespan(groups, 132) == 0
