"""A schedule is plain data: order does not matter, names are checked, and it survives the round trip."""

import json

import pytest

from qla_jit.arch import get_arch
from qla_jit.config import OpConfig
from qla_jit.errors import ConfigError
from qla_jit.registry import get_template, templates
from qla_jit.schedule import Parameter, Role, Schedule, Violation, check_params, registers_rule


def test_order_of_parameters_does_not_matter():
    one, two = Schedule.of("t", {"b": 1, "a": "x"}), Schedule.of("t", {"a": "x", "b": 1})
    assert one == two and hash(one) == hash(two)
    assert str(one) == "t(a=x, b=1)"
    assert one != Schedule.of("u", {"a": "x", "b": 1})


def test_values_are_read_by_name():
    schedule = Schedule.of("t", {"a": 1})
    assert schedule["a"] == 1
    with pytest.raises(KeyError, match="b"):
        schedule["b"]


def test_replace_changes_one_value_and_refuses_unknown_names():
    schedule = Schedule.of("t", {"a": 1, "b": 2})
    assert schedule.replace(a=3).params() == {"a": 3, "b": 2}
    assert schedule.params() == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match=r"parameters of t .*\['c'\]"):
        schedule.replace(c=1)


def test_every_default_survives_json():
    for template in templates().values():
        schedule = template.default(OpConfig(2, 8, arch=template.archs[0]).problem(template.kernel))
        assert Schedule.from_dict(json.loads(json.dumps(schedule.as_dict()))) == schedule


def test_points_are_all_combinations_in_declaration_order():
    template = get_template("fused_forward_mma")
    points = list(template.points())
    split, copies, threads = (p.choices for p in template.parameters)
    assert len(points) == len(set(points)) == len(split) * len(copies) * len(threads)
    assert points[0].params() == {"dv_split": split[0], "copies": copies[0], "threads": threads[0]}
    assert points[1]["threads"] == threads[1]


def test_defaults_are_among_the_choices():
    for template in templates().values():
        for parameter in template.parameters:
            assert parameter.default in parameter.choices, f"{template.name}.{parameter.name}"
            assert parameter.meaning


def test_check_params_names_each_mistake():
    parameters = (Parameter("a", (1, 2), 1, ""), Parameter("b", ("x",), "x", ""))
    assert check_params("t", parameters, Schedule.of("t", {"a": 2, "b": "x"})) == []
    rules = [v.rule for v in check_params("t", parameters, Schedule.of("u", {"a": 3, "b": "x"}))]
    assert rules == ["template_matches", "value_is_a_choice"]
    (found,) = check_params("t", parameters, Schedule.of("t", {"a": 1, "c": 1}))
    assert str(found) == "parameters_match: missing ['b'], unknown ['c']"


def test_registers_rule_counts_threads_times_registers():
    rule = registers_rule(lambda p, s: (Role("all", 8, s["registers"], ""),))
    arch = get_arch("sm90")
    assert rule.broken(None, Schedule.of("t", {"registers": 255}), arch) is None
    assert "131072" in rule.broken(None, Schedule.of("t", {"registers": 512}), arch)


def test_violation_reads_as_rule_and_numbers():
    assert str(Violation("fits", "3 > 2")) == "fits: 3 > 2"
