import pytest
from tuning_fakes import fake_template, point, problem, use_templates

from qla_jit.config import OpConfig
from qla_jit.errors import UnsupportedError
from qla_jit.resources import is_feasible
from qla_jit.tune.space import enumerate_space, plan_problems


def test_every_feasible_point_is_listed_once_and_the_default_first(monkeypatch):
    use_templates(monkeypatch, fake_template())
    space = enumerate_space(problem())
    assert space.points[0] == space.default == point()
    assert len(space.points) == len(set(space.points)) == 60
    assert all(is_feasible(problem(), p) for p in space.points)


def test_rejected_points_are_counted_by_rule(monkeypatch):
    use_templates(monkeypatch, fake_template())
    space = enumerate_space(problem())
    assert space.rejected == {"sum_is_even": 60}
    assert space.total == 120


def test_points_of_all_templates_of_a_kernel_are_in_the_space(monkeypatch):
    use_templates(monkeypatch, fake_template(), fake_template("other"), fake_template("inverse", "kkt_inverse"))
    assert {p.template for p in enumerate_space(problem()).points} == {"fake", "other"}


def test_restricted_space_keeps_only_given_points(monkeypatch):
    use_templates(monkeypatch, fake_template())
    kept = [point(2, 4, "r"), point(1, 0)]
    assert enumerate_space(problem()).restricted(kept).points == (point(2, 4, "r"),)


def test_an_optional_kernel_is_planned_where_it_is_named():
    assert {p.kernel for p in plan_problems([OpConfig(2, 8, activation=True)])} == {"kkt_inverse", "fused_forward"}
    (found,) = plan_problems([OpConfig(2, 8, gate_dtype="bfloat16")], ["input_activation"], [64, 32])
    assert (found.kernel, found.gate_dtype, found.beta_dtype) == ("input_activation", "bfloat16", "float32")
    assert len(enumerate_space(found).points) > 4


def test_plan_shares_problems_and_puts_the_heaviest_kernel_first():
    problems = plan_problems([OpConfig(16, 64), OpConfig(8, 64)], chunk_sizes=[64])
    assert [(p.kernel, p.num_heads) for p in problems] == [
        ("fused_forward", 16),
        ("kkt_inverse", 16),
        ("fused_forward", 8),
        ("kkt_inverse", 8),
    ]


def test_plan_without_any_template_says_why(monkeypatch):
    use_templates(monkeypatch, fake_template(archs=("sm120",)))
    with pytest.raises(UnsupportedError, match="not for sm90"):
        plan_problems([OpConfig(16, 64)], ["fused_forward"])


def test_real_templates_have_points_for_every_kernel():
    for p in plan_problems([OpConfig(16, 64)]):
        assert enumerate_space(p).points, p
