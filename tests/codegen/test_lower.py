"""Every choice of every parameter lowers: the tuner must not be offered what TileLang cannot build."""

import pytest
from kernels import Kernel, config

from qla_jit import build, ir, registry
from qla_jit.resources import estimate, is_feasible


def choices():
    """Kernels one parameter away from a default, where that alone is feasible; registers do not change the IR."""
    for template in registry.templates().values():
        kernel = Kernel(template.name, config(template.preferred[0] if template.preferred else template.archs[0]))
        default = kernel.spec
        for parameter in template.parameters:
            if "registers" in parameter.name:
                continue
            for value in parameter.choices:
                changed = default.schedule.replace(**{parameter.name: value})
                if changed != default.schedule and is_feasible(default.problem, changed):
                    changed = Kernel(kernel.template, kernel.config, changes=((parameter.name, value),))
                    yield pytest.param(changed, id=str(changed))


@pytest.mark.parametrize("variant", tuple(choices()))
def test_choice_lowers_and_its_products_cost_the_same(variant):
    """A schedule changes how a chunk is computed, not how many FLOPs its template says it needs."""
    pytest.importorskip("tilelang")
    lowered = build.lower(variant.spec, compile_device=False)
    counts, cost = ir.count(lowered.artifact.device_mod), estimate(variant.spec.problem, variant.spec.schedule)
    assert counts.threads == cost.threads and counts.mbarriers == cost.barriers
    assert counts.smem_bytes + counts.static_smem_bytes <= cost.smem_bytes
    if variant.spec.problem.kernel == "fused_forward":
        assert counts.per_chunk.flops * variant.spec.schedule["dv_split"] == cost.work.flops
