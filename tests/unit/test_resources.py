"""Every rule and limit is named when it is broken, and every default keeps them all."""

from dataclasses import replace

import pytest

from qla_jit.arch import ARCHS, get_arch
from qla_jit.config import (
    BACKWARD_KERNELS,
    CHUNK_SIZES,
    DTYPES,
    HEAD_DIMS,
    KERNELS,
    SPLIT_BACKWARD_KERNELS,
    SPLIT_KERNELS,
    OpConfig,
    Problem,
)
from qla_jit.errors import UnsupportedError
from qla_jit.registry import candidates, get_template, templates
from qla_jit.resources import SMEM_ALIGNMENT, estimate, is_feasible
from qla_jit.schedule import Role, Schedule


def problem_for(template, arch=None, **changes) -> Problem:
    chunk_size = changes.pop("chunk_size", 64)
    config = OpConfig(**{"num_heads": 2, "num_value_heads": 8, "arch": arch or template.archs[0], **changes})
    return config.problem(template.kernel, chunk_size)


def rules_broken(problem, schedule, arch=None) -> set[str]:
    return {v.rule for v in is_feasible(problem, schedule, arch).violations}


#: (template, rule) → what breaks it: changes of the problem, changes of the default schedule.
BREAKS = {
    ("kkt_inverse_sm90", "value_heads_are_whole_groups"): ({}, {"value_heads_per_cta": 3}),
    ("fused_forward_sm90", "dv_tile_is_one_or_two_groups"): ({"head_dim_v": 64}, {"dv_split": 2}),
    ("fused_forward_mma", "each_warp_owns_16_rows"): ({"head_dim_v": 64}, {"dv_split": 2, "threads": 128}),
}


@pytest.mark.parametrize("name, rule", sorted(BREAKS))
def test_rule_is_named_when_broken(name, rule):
    template = get_template(name)
    in_problem, in_schedule = BREAKS[name, rule]
    problem = problem_for(template, **in_problem)
    assert rule not in rules_broken(problem, template.default(problem))
    assert rule in rules_broken(problem, template.default(problem).replace(**in_schedule))


def small_and_real_cards(arch):
    card = get_arch(arch)
    return (card, replace(card, smem_bytes_per_sm=32 * 1024))


@pytest.mark.parametrize("name, rule", [(t.name, r.name) for t in templates().values() for r in t.rules])
def test_every_rule_can_break_and_says_the_numbers(name, rule):
    """Among all points and shapes there is one that the rule refuses, and one that it lets pass."""
    template = get_template(name)
    broken = next(r for r in template.rules if r.name == rule).broken
    said = {
        broken(replace(problem_for(template, **dims, num_heads=1, num_value_heads=heads), chunk_size=c), point, card)
        for dims in ({"head_dim_v": 64}, {"head_dim_v": 128})
        for heads in (1, 8, 12)
        for c in CHUNK_SIZES
        for card in small_and_real_cards(template.archs[0])
        for point in template.points()
    }
    assert None in said and len(said) > 1
    assert all(any(ch.isdigit() for ch in text) for text in said if text is not None)


def test_warp_groups_that_ask_for_too_many_registers_are_refused():
    template = get_template("fused_forward_sm90")
    problem = problem_for(template)
    refused = [s for s in template.points() if "warp_groups_fit_the_launch" in rules_broken(problem, s)]
    allowed = [s for s in template.points() if is_feasible(problem, s)]
    assert refused and allowed
    asked = [max(estimate(problem, s).registers for s in some) for some in (allowed, refused)]
    assert asked[0] <= get_arch("sm90").registers_per_sm < asked[1]


@pytest.mark.parametrize(
    "limit, rule",
    [
        ({"smem_bytes_per_cta": 50_000}, "shared_memory_fits_the_cta"),
        ({"max_threads_per_cta": 256}, "threads_fit_the_cta"),
        ({"registers_per_sm": 40_000}, "registers_fit_the_sm"),
    ],
)
def test_card_limit_is_named_with_its_number(limit, rule):
    template = get_template("fused_forward_sm90")
    problem = problem_for(template)
    found = is_feasible(problem, template.default(problem), replace(get_arch("sm90"), **limit))
    assert [v.rule for v in found.violations] == [rule]
    assert str(*limit.values()) in str(found)


def test_shared_memory_limit_counts_padding():
    template = get_template("fused_forward_sm90")
    problem = problem_for(template)
    cost = estimate(problem, template.default(problem))
    assert cost.smem_bytes < cost.padded_smem_bytes and cost.padded_smem_bytes % SMEM_ALIGNMENT == 0
    exact = replace(get_arch("sm90"), smem_bytes_per_cta=cost.padded_smem_bytes)
    assert is_feasible(problem, template.default(problem), exact)
    assert not is_feasible(problem, template.default(problem), replace(exact, smem_bytes_per_cta=cost.smem_bytes))


def test_schedule_of_another_kernel_or_arch_is_refused():
    forward, inverse = get_template("fused_forward_sm90"), get_template("kkt_inverse_sm90")
    problem = problem_for(forward)
    assert rules_broken(problem, inverse.default(problem_for(inverse))) == {"kernel_matches"}
    on_blackwell = replace(problem, arch="sm100")
    assert rules_broken(on_blackwell, forward.default(on_blackwell)) == {"arch_is_supported"}


def test_parameters_must_be_the_templates_own():
    template = get_template("fused_forward_mma")
    problem = problem_for(template)
    good = template.default(problem).params()
    missing = Schedule.of("fused_forward_mma", {"threads": 128})
    wrong = Schedule.of("fused_forward_mma", {**good, "threads": 96})
    assert rules_broken(problem, missing) == {"parameters_match"}
    assert "dv_split" in str(is_feasible(problem, missing))
    assert rules_broken(problem, wrong) == {"value_is_a_choice"}
    assert "threads=96" in str(is_feasible(problem, wrong))


def test_unsupported_problem_gives_the_templates_reason():
    template = get_template("kkt_inverse_sm90")
    problem = problem_for(template, chunk_size=32)
    found = is_feasible(problem, template.default(problem))
    assert [v.rule for v in found.violations] == ["problem_is_supported"]
    assert "chunk_size=32" in str(found)


@pytest.mark.parametrize("arch", sorted(ARCHS))
@pytest.mark.parametrize("kernel", KERNELS)
def test_defaults_are_feasible_for_every_supported_problem(arch, kernel):
    answered = 0
    for dk in HEAD_DIMS["head_dim_k"]:
        for dv in HEAD_DIMS["head_dim_v"]:
            for dtype in DTYPES:
                for heads in ((1, 1), (2, 8), (4, 16), (16, 32), (16, 48), (3, 9), (1, 7)):
                    for chunk_size in CHUNK_SIZES:
                        config = OpConfig(*heads, head_dim_k=dk, head_dim_v=dv, dtype=dtype, arch=arch)
                        problem = config.problem(kernel, chunk_size)
                        for template in candidates(problem):
                            found = is_feasible(problem, template.default(problem))
                            assert found, f"{template.name} {problem}: {found}"
                            answered += chunk_size == 64
    if kernel in (*SPLIT_KERNELS, *BACKWARD_KERNELS, *SPLIT_BACKWARD_KERNELS) and arch != "sm90":
        assert answered == 0  # of Hopper only, so far
        return
    assert answered >= 4 * 2 * 7  # at least one template for every problem at chunk size 64


def test_every_choice_of_every_parameter_is_feasible_somewhere():
    for template in templates().values():
        live = set()
        for arch in template.archs:
            for dims in ((64, 64), (128, 64), (64, 128), (128, 128), (128, 256)):
                for heads in ((1, 1), (1, 8), (1, 12), (2, 64)):
                    shape = dict(zip(("head_dim_k", "head_dim_v", "num_heads", "num_value_heads"), (*dims, *heads)))
                    problem = problem_for(template, arch, **shape)
                    live |= {item for s in template.points() if is_feasible(problem, s) for item in s.items}
        dead = {(p.name, c) for p in template.parameters for c in p.choices} - live
        assert not dead, f"{template.name}: {sorted(dead, key=str)} can never be used"


def test_estimate_adds_up_the_declarations():
    for template in templates().values():
        problem = problem_for(template)
        schedule = template.default(problem)
        cost = estimate(problem, schedule)
        roles = template.roles(problem, schedule)
        assert all(isinstance(r, Role) for r in roles) and cost.roles == roles
        assert cost.threads == sum(32 * r.warps for r in roles)
        assert cost.registers == sum(32 * r.warps * r.registers for r in roles)
        assert cost.barriers == template.barriers(problem, schedule)
        buffers = sum(b.elements * b.itemsize for b in template.buffers(problem, schedule))
        assert cost.smem_bytes == buffers + 8 * cost.barriers
        assert cost.work == template.work(problem, schedule)


def test_hopper_forward_estimate_is_the_known_table():
    template = get_template("fused_forward_sm90")
    problem = OpConfig(16, 64).problem("fused_forward")
    cost = estimate(problem, template.default(problem))
    wide, square = 64 * 128 * 2, 64 * 64 * 2
    k, q, a, v, x, b, o = 3 * wide, 3 * wide, 2 * square, 2 * wide, 2 * wide, 2 * square, wide
    gates, barriers = 3 * (4 * 64 + 256) * 4, 22 * 8
    assert cost.smem_bytes == k + q + a + v + x + b + o + gates + barriers
    assert (cost.threads, cost.barriers) == (512, 22)
    assert cost.work.flops == 2 * 64 * 128 * (3 * 128 + 64) + 2 * 64 * 64 * (128 + 128 + 64)


def test_no_template_for_a_problem_says_what_each_lacks():
    from qla_jit.registry import select

    problem = OpConfig(1, 1).problem("kkt_inverse")
    unknown = replace(problem, arch="sm80")
    with pytest.raises(UnsupportedError, match="kkt_inverse_mma: not for sm80"):
        select(unknown)
