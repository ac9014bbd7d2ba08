"""How much each parameter of a template explains of the times that were measured, and pairs of parameters as tables.

Plain variance shares of log time, no model to trust: for a parameter, the variance of the mean over its values, divided
by the whole variance (the first-order Sobol index of the measured points).  ``interactions`` is what no sum of
single-parameter effects explains, from a least-squares fit.  On a space that was measured whole these are exact; on a
part of it, of the points that the search chose.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..schedule import Value

MIN_POINTS = 4

Point = tuple[Mapping[str, Value], float]


@dataclass(frozen=True)
class Importance:
    """Shares of the variance of log time over ``points`` measured points: one per parameter, and the rest."""

    points: int
    shares: dict[str, float]
    interactions: float


def varying(points: Sequence[Mapping[str, Value]]) -> dict[str, list[Value]]:
    """Parameters with more than one value, and the values in the order met; numbers are sorted."""
    seen: dict[str, dict[Value, None]] = defaultdict(dict)
    for params in points:
        for name, value in params.items():
            seen[name][value] = None
    return {name: _ordered(list(values)) for name, values in seen.items() if len(values) > 1}


def _ordered(values: list[Value]) -> list[Value]:
    numbers = all(isinstance(v, (int, float)) for v in values)
    return sorted(values) if numbers else sorted(values, key=str)


def importance(points: Sequence[Point]) -> Importance | None:
    """Shares per parameter, largest first; None where fewer than four points ran, or all took the same time."""
    names = varying([params for params, _ in points])
    if len(points) < MIN_POINTS or not names:
        return None
    logs = [math.log(time_us) for _, time_us in points]
    total = _variance(logs)
    if total <= 1e-12:
        return None
    shares = {name: _between([params[name] for params, _ in points], logs) / total for name in names}
    rest = _additive_residual([params for params, _ in points], names, logs) / total
    largest_first = dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))
    return Importance(len(points), largest_first, min(1.0, max(0.0, rest)))


def between(labels: Sequence[Value], times_us: Sequence[float]) -> float | None:
    """The share of the variance of log time that one label explains, for example the template's name."""
    logs = [math.log(t) for t in times_us]
    total = _variance(logs) if logs else 0.0
    return _between(labels, logs) / total if total > 1e-12 and len(set(labels)) > 1 else None


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / len(values)


def _between(labels: Sequence[Value], values: Sequence[float]) -> float:
    groups: dict[Value, list[float]] = defaultdict(list)
    for label, value in zip(labels, values):
        groups[label].append(value)
    mean = sum(values) / len(values)
    return sum(len(g) * (sum(g) / len(g) - mean) ** 2 for g in groups.values()) / len(values)


def _additive_residual(params: Sequence[Mapping], names: Mapping[str, list], values: Sequence[float]) -> float:
    import numpy as np

    columns = [np.ones(len(params))]
    for name, choices in names.items():
        columns += [np.array([p[name] == choice for p in params], dtype=float) for choice in choices[1:]]
    matrix, target = np.stack(columns, axis=1), np.array(values)
    solution, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    return float(np.mean((target - matrix @ solution) ** 2))


@dataclass(frozen=True)
class PairCell:
    """Points with one pair of values: how many were tried and ran, and the best of their times over all others."""

    tried: int
    ran: int
    best_us: float | None


@dataclass(frozen=True)
class Pair:
    """A heat map: rows are the values of ``first``, columns those of ``second``; absent cells were not tried."""

    first: str
    second: str
    rows: list[Value]
    columns: list[Value]
    cells: dict[tuple[Value, Value], PairCell]


def pairs(points: Sequence[tuple[Mapping[str, Value], float | None]], names: Sequence[str] | None = None) -> list[Pair]:
    """Every pair of varying parameters (of ``names``, in that order); a time of None is a point that did not run."""
    values = varying([params for params, _ in points])
    chosen = [name for name in (names or values) if name in values]
    return [_pair(points, a, b, values) for a, b in itertools.combinations(chosen, 2)]


def _pair(points, first: str, second: str, values: Mapping[str, list]) -> Pair:
    groups: dict[tuple[Value, Value], list[float | None]] = defaultdict(list)
    for params, time_us in points:
        groups[params[first], params[second]].append(time_us)
    cells = {
        key: PairCell(len(times), len(ran), min(ran, default=None))
        for key, times in groups.items()
        for ran in [[t for t in times if t is not None]]
    }
    return Pair(first, second, values[first], values[second], cells)
