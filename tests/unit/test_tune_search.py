import statistics

import pytest
from tuning_fakes import best, fake_template, point, problem, time_us, trial, use_templates

from qla_jit.db.lookup import ranked
from qla_jit.resources import is_feasible
from qla_jit.tune.search import NEIGHBOURS, STARTUP, Exhaustive, OptunaSearch, first_points, make_strategy
from qla_jit.tune.space import enumerate_space

WIDE = (tuple(range(6)), tuple(range(8)), tuple("pqrstuvw"))


@pytest.fixture()
def points(monkeypatch):
    use_templates(monkeypatch, fake_template(choices=WIDE))
    return enumerate_space(problem()).points


def run(strategy, count):
    asked = []
    for _ in range(count):
        chosen = strategy.ask()
        if chosen is None:
            break
        asked.append(chosen)
        strategy.tell(trial(chosen, median=time_us(chosen)))
    return asked


def test_few_points_are_measured_exhaustively_and_many_by_tpe(points):
    assert len(points) == 192
    assert isinstance(make_strategy(points[:64], []), Exhaustive)
    assert isinstance(make_strategy(points[:65], []), OptunaSearch)
    assert isinstance(make_strategy(points[:64], [], budget_trials=20), OptunaSearch)


def test_exhaustive_tries_each_point_once_default_first(points):
    asked = run(Exhaustive(points[:40], seed=1), 1000)
    assert asked[0] == points[0]
    assert sorted(map(str, asked)) == sorted(map(str, points[:40]))
    assert asked != list(points[:40])


@pytest.mark.parametrize("make", [Exhaustive, OptunaSearch])
def test_equal_seeds_give_equal_orders(points, make):
    assert run(make(points, 3), 25) == run(make(points, 3), 25)
    assert run(make(points, 3), 25) != run(make(points, 4), 25)


def test_tpe_asks_only_feasible_points_and_none_twice(points):
    asked = run(OptunaSearch(points, 0), 1000)
    assert asked[0] == points[0]
    assert len(asked) == len(set(asked)) == len(points)
    assert all(is_feasible(problem(), p) for p in asked)


def test_tpe_with_points_in_flight_asks_none_twice(points):
    strategy, pending, asked = OptunaSearch(points, 0), [], []
    for _ in range(60):
        while len(pending) < 8:
            pending.append(strategy.ask())
            asked.append(pending[-1])
        done = pending.pop(0)
        strategy.tell(trial(done, median=time_us(done)))
    assert len(asked) == len(set(asked))


def test_tpe_learns_from_failures_and_times(points):
    def best_of(seed, count=48):
        return min(time_us(p) for p in run(OptunaSearch(points, seed), count))

    def best_random(seed, count=48):
        return min(time_us(p) for p in run(Exhaustive(points, seed), count))

    seeds = range(12)
    assert statistics.mean(map(best_of, seeds)) < statistics.mean(map(best_random, seeds))


def test_resumed_search_asks_only_what_is_not_stored(points):
    history = [trial(p, median=time_us(p)) for p in run(OptunaSearch(points, 0), 30)]
    history[5] = trial(history[5].schedule, status="wrong")
    strategy = make_strategy(points, history, seed=0)
    asked = run(strategy, 1000)
    assert not {t.schedule for t in history} & set(asked)
    assert len(asked) == len(points) - 30


def test_history_of_points_that_left_the_space_is_ignored(points):
    strategy = make_strategy(points, [trial(point(1, 0)), trial(point(0, 0, "gone"))])
    assert strategy.ask() == points[0]


def test_two_templates_are_one_search(monkeypatch):
    use_templates(monkeypatch, fake_template(), fake_template("other", choices=((0, 2), (0, 2), ("x",))))
    points = enumerate_space(problem()).points
    asked = []
    strategy = OptunaSearch(points, 0)
    while (chosen := strategy.ask()) is not None:
        asked.append(chosen)
        strategy.tell(trial(chosen))
    assert sorted(map(str, asked)) == sorted(map(str, points))


def test_startup_draws_points_and_not_templates(monkeypatch):
    use_templates(monkeypatch, fake_template(choices=WIDE), fake_template("rare", choices=((0,), (0,), ("x", "y"))))
    points = enumerate_space(problem()).points
    asked = [p for seed in range(30) for p in run(OptunaSearch(points, seed), STARTUP)[1:]]
    assert len(points) == 194
    assert sum(p.template == "rare" for p in asked) < len(asked) / 10


def test_startup_ends_and_the_model_takes_over(points):
    model, shuffled = run(OptunaSearch(points, 0), 3 * STARTUP), run(Exhaustive(points, 0), 3 * STARTUP)
    assert model[:STARTUP] == shuffled[:STARTUP]
    assert model[STARTUP:] != shuffled[STARTUP:]


@pytest.mark.parametrize("few", [False, True])
def test_winners_of_the_nearest_problems_come_right_after_the_default(points, few):
    rows = [
        best(point(4, 2, "s"), problem_=problem(2, 8)),
        best(point(2, 4, "r"), problem_=problem(16, 32)),
        best(point(1, 0), problem_=problem(16, 48)),  # not feasible here
        best(point(2, 2, "q"), problem_=problem(8, 32)),
    ]
    near = ranked(problem(), [("user", row) for row in rows], "8192x4")
    expected = [point(2, 2, "q"), point(2, 4, "r")]
    offered = points[:40] if few else points
    offered = list(dict.fromkeys([*offered, *expected]))
    assert run(make_strategy(offered, [], near=near), 3) == [points[0], *expected]
    assert len(run(make_strategy(offered, [], near=near), 1000)) == len(offered)


def test_only_the_best_few_winners_come_first(points):
    rows = [best(p, problem_=problem(16, 80 + 16 * i)) for i, p in enumerate(points[10:20])]
    near = ranked(problem(), [("user", row) for row in rows])
    assert first_points(points, near) == [points[0], *points[10 : 10 + NEIGHBOURS]]
