"""Robust least squares with coefficients >= 0, on relative errors, for the three coefficients of a cost model.

Minimises Σ ρ((A x − t) / (scale · t)) with the soft-L1 loss ρ(z) = 2 (√(1 + z²) − 1), by iteratively reweighted least
squares.  A step solves its bounded problem exactly: of the supports whose unconstrained solution is >= 0, the cheapest
is the optimum.  Needs NumPy alone, and gives equal numbers for equal rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

#: Relative error from where a row is taken for an outlier rather than for noise.
SCALE = 0.02
ITERATIONS = 100
#: A coefficient that lowers the cost by less than this share explains nothing.
NEGLIGIBLE = 1e-6


def fit(features: Sequence[Sequence[float]], times: Sequence[float], scale: float = SCALE) -> tuple[float, ...]:
    """Coefficients x >= 0 of ``features @ x ≈ times``.  features: rows × coefficients.  times: all > 0."""
    target = np.asarray(times, dtype=float)
    matrix = np.asarray(features, dtype=float) / target[:, None]
    weights = np.ones(len(target))
    solution = _nonnegative(matrix, weights)
    for _ in range(ITERATIONS):
        errors = (matrix @ solution - 1) / scale
        weights = 1 / np.sqrt(1 + errors**2)
        previous, solution = solution, _nonnegative(matrix, weights)
        if np.allclose(previous, solution, rtol=1e-9, atol=0):
            break
    return tuple(float(x) for x in solution)


def loss(
    features: Sequence[Sequence[float]], times: Sequence[float], found: Sequence[float], scale: float = SCALE
) -> float:
    """What `fit` minimises, at coefficients ``found``."""
    errors = (np.asarray(features, dtype=float) @ np.asarray(found) / np.asarray(times, dtype=float) - 1) / scale
    return float((2 * (np.sqrt(1 + errors**2) - 1)).sum())


def _nonnegative(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """argmin over x >= 0 of Σ w (A x − 1)²; of equally good ones that with the fewest terms."""
    count = matrix.shape[1]
    root = np.sqrt(weights)
    scaled = matrix * root[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1
    best, best_cost = np.zeros(count), float(weights.sum())
    for size in range(1, count + 1):
        for support in map(list, itertools.combinations(range(count), size)):
            found, _, rank, _ = np.linalg.lstsq(scaled[:, support] / norms[support], root, rcond=1e-9)
            if rank < size or (found < 0).any():
                continue
            cost = float(((scaled[:, support] @ (found / norms[support]) - root) ** 2).sum())
            if cost < best_cost * (1 - NEGLIGIBLE):
                best, best_cost = np.zeros(count), cost
                best[support] = found / norms[support]
    return best


def leave_one_out(
    features: Sequence[Sequence[float]], times: Sequence[float], scale: float = SCALE
) -> tuple[float, ...]:
    """|prediction / time − 1| of every row by a fit of the others."""
    errors = []
    for left in range(len(times)):
        others = [i for i in range(len(times)) if i != left]
        x = fit([features[i] for i in others], [times[i] for i in others], scale)
        errors.append(abs(float(np.dot(features[left], x)) / times[left] - 1))
    return tuple(errors)
