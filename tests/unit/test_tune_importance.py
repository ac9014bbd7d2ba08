import itertools
import math

import pytest

from qla_jit.tune.importance import between, importance, pairs, varying


def grid(time_us):
    return [({"a": a, "b": b, "c": "x"}, time_us(a, b)) for a, b in itertools.product((1, 2, 4), ("p", "q"))]


def test_shares_are_the_variances_of_an_additive_time():
    effect_a, effect_b = {1: 0.0, 2: 1.0, 4: 2.0}, {"p": 0.0, "q": 0.5}
    found = importance(grid(lambda a, b: 100 * math.exp(effect_a[a] + effect_b[b])))
    of_a, of_b = 2 / 3, 1 / 16  # the variances of 0, 1, 2 and of 0, 0.5
    assert found.shares == pytest.approx({"a": of_a / (of_a + of_b), "b": of_b / (of_a + of_b)})
    assert list(found.shares) == ["a", "b"]
    assert found.interactions == pytest.approx(0.0, abs=1e-12)
    assert found.points == 6


def test_a_pure_interaction_is_no_parameters_own():
    found = importance([({"a": a, "b": b}, 200.0 if a == b else 100.0) for a in (0, 1) for b in (0, 1)])
    assert found.shares == pytest.approx({"a": 0.0, "b": 0.0}, abs=1e-12)
    assert found.interactions == pytest.approx(1.0)


def test_too_little_to_say_anything_is_none():
    assert importance(grid(lambda a, b: 100.0)) is None
    assert importance(grid(lambda a, b: float(a))[:3]) is None
    assert importance([({"a": 1}, 1.0), ({"a": 1}, 2.0), ({"a": 1}, 3.0), ({"a": 1}, 4.0)]) is None


def test_a_label_that_decides_everything_explains_everything():
    assert between(["x", "x", "y", "y"], [10.0, 10.0, 20.0, 20.0]) == pytest.approx(1.0)
    assert between(["x", "x"], [10.0, 20.0]) is None
    assert between([], []) is None


def test_varying_parameters_have_their_values_in_order():
    assert varying([{"n": 16, "s": "b", "one": 1}, {"n": 2, "s": "a", "one": 1}]) == {"n": [2, 16], "s": ["a", "b"]}


def test_a_pair_holds_the_best_over_all_other_parameters_and_counts_what_failed():
    points = [
        ({"a": 0, "b": 0, "c": 0}, 50.0),
        ({"a": 0, "b": 0, "c": 1}, 40.0),
        ({"a": 0, "b": 1, "c": 0}, None),
        ({"a": 1, "b": 0, "c": 0}, 70.0),
        ({"a": 1, "b": 0, "c": 1}, None),
    ]
    found = {(p.first, p.second): p for p in pairs(points)}
    assert list(found) == [("a", "b"), ("a", "c"), ("b", "c")]
    cells = found["a", "b"].cells
    assert (cells[0, 0].best_us, cells[0, 0].ran, cells[0, 0].tried) == (40.0, 2, 2)
    assert (cells[0, 1].best_us, cells[0, 1].ran) == (None, 0)
    assert (cells[1, 0].ran, cells[1, 0].tried) == (1, 2)
    assert (1, 1) not in cells
    assert [(p.first, p.second) for p in pairs(points, ["c", "a"])] == [("c", "a")]
