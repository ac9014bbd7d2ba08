"""What a compiled kernel says against itself, so that no device time is spent on it: `against` gives the reasons.

Each rule reads the build report (ptxas' words and the cubin's) and has a name.  What only makes a kernel slow counts
where it is more than a little, and worse than in the default of the same template: a problem that makes every schedule
spill still gets its best one.  A number that was not measured breaks no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..arch import Arch
from ..schedule import Violation

# Per thread.  In the recorded sweeps kernels with up to 136 B were as fast as others of their template, and those with
# 1192 B or more 1.15 to 3.2 times slower than its best (docs/tuning.md).
SPILLED_BYTES = 256
WAITS_FACTOR = 2.0  # of the default's full waits per product; a schedule may order its products in another way


@dataclass(frozen=True)
class _Rule:
    """broken(report, default's report, arch) says with numbers what is wrong, or returns None."""

    name: str
    broken: Callable[[Mapping, Mapping, Arch], str | None]


def _smem_fits(report: Mapping, default: Mapping, arch: Arch) -> str | None:
    static, dynamic = report.get("static_smem_bytes") or 0, report.get("smem_bytes") or 0
    if static + dynamic <= arch.smem_bytes_per_cta:
        return None
    return f"{static} B static and {dynamic} B dynamic, {arch.smem_bytes_per_cta} B on {arch}"


def _roles_have_registers(report: Mapping, default: Mapping, arch: Arch) -> str | None:
    over = _over_limit(report)
    known = _over_limit(default)
    worse = {name: live for name, (live, limit) in over.items() if name not in known}
    return ", ".join(f"{name} has {live} live of {over[name][1]}" for name, live in worse.items()) or None


def _over_limit(report: Mapping) -> dict[str, tuple[int, int]]:
    rows = (report.get("role_registers") or {}).items()
    if len(rows) < 2:  # without `setmaxnreg` the launch decides, and what a role declares limits nothing
        return {}
    return {name: (r["live"], r["limit"]) for name, r in rows if r.get("live") is not None and r["live"] > r["limit"]}


def _spills_are_few(report: Mapping, default: Mapping, arch: Arch) -> str | None:
    spilled, usual = report.get("spill_bytes") or 0, default.get("spill_bytes") or 0
    if spilled <= max(SPILLED_BYTES, usual):
        return None
    return f"{spilled} B spilled; {SPILLED_BYTES} B are allowed, the default has {usual} B"


def _products_are_asynchronous(report: Mapping, default: Mapping, arch: Arch) -> str | None:
    usual = {_code(warning) for warning in default.get("warnings") or ()}
    return "; ".join(w for w in report.get("warnings") or () if _code(w) not in usual) or None


def _code(warning: str) -> str:
    return warning.partition(")")[0]  # "(C7510" of "(C7510) Potential Performance Loss: …"


def _waits_are_few(report: Mapping, default: Mapping, arch: Arch) -> str | None:
    mine, usual = _full_waits(report), _full_waits(default)
    if mine is None or usual is None or mine <= WAITS_FACTOR * usual:
        return None
    return f"{mine:.2f} waits for all products per product, the default has {usual:.2f}"


def _full_waits(report: Mapping) -> float | None:
    """Sites that wait until no product is in flight, per product; None for a kernel without WGMMA."""
    counted = report.get("instructions") or {}
    if not counted.get("hgmma"):
        return None
    return sum(count for left, count in counted["waits"] if left == 0) / counted["hgmma"]


RULES = (
    _Rule("shared_memory_fits_the_cta", _smem_fits),
    _Rule("live_registers_fit_the_role", _roles_have_registers),
    _Rule("spills_are_few", _spills_are_few),
    _Rule("products_are_asynchronous", _products_are_asynchronous),
    _Rule("waits_are_few", _waits_are_few),
)


def against(report: Mapping, default: Mapping, arch: Arch) -> tuple[Violation, ...]:
    """Every rule that a kernel breaks.  default: the report of its template's default, empty where that has none."""
    found = ((rule.name, rule.broken(report, default, arch)) for rule in RULES)
    return tuple(Violation(name, detail) for name, detail in found if detail)
