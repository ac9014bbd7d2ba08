"""The race that decides the best row: the fastest few against the default, interleaved, on every workload.

A challenger wins only by more than the noise; otherwise the default stays, because a difference that cannot be
repeated is no reason to prefer a schedule that nobody has run before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from ..db.records import ALL_WORKLOADS, BestRow, Trial
from ..schedule import Schedule
from .evaluate import now

FINALISTS = 3
ROUNDS = 5
#: Clock steps and neighbours move a median by about this much between runs, whatever the samples of one run say.
NOISE_FLOOR = 0.005


def finalists(trials: Iterable[Trial], default: Schedule, count: int = FINALISTS) -> list[Schedule]:
    """The default (if it ran) and the ``count`` fastest others, by their last search trial."""
    last = {t.schedule: t for t in trials if t.phase == "search"}
    ran = sorted((t for t in last.values() if t.status == "ok"), key=lambda t: t.median_us)
    chosen = [t.schedule for t in ran if t.schedule != default][:count]
    return [s for s in (default, *chosen) if s in {t.schedule for t in ran}]


def noise_us(a: Trial, b: Trial) -> float:
    """How far apart two medians may lie by chance: their 95 % notches (1.57 IQR / √n, McGill 1978) combined, at
    least 0.5 % of the time."""
    notches = [1.57 * t.iqr_us / math.sqrt(len(t.samples_us)) for t in (a, b)]
    return max(math.hypot(*notches), NOISE_FLOOR * min(a.median_us, b.median_us))


def winner(raced: Sequence[Trial], default: Schedule) -> Trial | None:
    """The fastest of a race, or the default where it is not beaten by more than noise; None where nothing ran."""
    ran = [t for t in raced if t.status == "ok"]
    if not ran:
        return None
    fastest = min(ran, key=lambda t: t.median_us)
    incumbent = next((t for t in ran if t.schedule == default), None)
    if incumbent is not None and incumbent.median_us - fastest.median_us <= noise_us(incumbent, fastest):
        return incumbent
    return fastest


def best_row(raced: Sequence[Trial], default: Schedule, trials: int) -> BestRow | None:
    """The row to store for one workload."""
    won = winner(raced, default)
    if won is None:
        return None
    incumbent = next((t for t in raced if t.schedule == default and t.status == "ok"), None)
    return BestRow(
        problem=won.problem,
        workload=won.workload,
        schedule=won.schedule,
        median_us=won.median_us,
        default_median_us=incumbent.median_us if incumbent else None,
        template_digest=won.template_digest,
        environment=won.environment,
        trials=trials,
        created=now(),
    )


def overall_row(races: Mapping[str, Sequence[Trial]], default: Schedule, trials: int) -> BestRow | None:
    """The row over all workloads: the least geometric mean among schedules that ran on each of them."""
    ran = [{t.schedule: t for t in raced if t.status == "ok"} for raced in races.values()]
    everywhere = set.intersection(*map(set, ran)) if ran else set()
    if len(races) < 2 or not everywhere:
        return None
    means = {s: statistics.geometric_mean(one[s].median_us for one in ran) for s in everywhere}
    fastest = min(sorted(everywhere, key=str), key=means.__getitem__)
    if default in means and means[default] - means[fastest] <= NOISE_FLOOR * means[fastest]:
        fastest = default
    sample = ran[0][fastest]
    return BestRow(
        problem=sample.problem,
        workload=ALL_WORKLOADS,
        schedule=fastest,
        median_us=means[fastest],
        default_median_us=means.get(default),
        template_digest=sample.template_digest,
        environment=sample.environment,
        trials=trials,
        created=now(),
    )
