"""Charts of the report as inline SVG, coloured by the page's CSS classes, so that they follow light and dark.

Each chart is an image to a screen reader, with a sentence that says what it shows; the numbers are in tables beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .report_data import Panel

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34
MOST_POINTS = 300  # more dots than pixels help nobody and make the page large


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def ticks(low: float, high: float, log: bool) -> list[float]:
    """A few round numbers within [low, high]."""
    if log:
        found = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
        if len(found) >= 3:
            return found[:: max(1, len(found) // 6)]
    step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s * step for s in (0.2, 0.5, 1, 2, 5) if (high - low) / (s * step) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, int(high / step + 1e-9) + 1)]


class Axes:
    """A plot area: data coordinates to pixels, with grid, ticks and labels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], log_y: bool, x_label: str, y_label: str):
        self.x, self.log_y = x, log_y
        self._scale = math.log if log_y else float
        self.y = tuple(map(self._scale, y))
        self.parts: list[str] = []
        self._grid(ticks(*y, log_y), ticks(*x, False), x_label, y_label)

    def at(self, x: float, y: float) -> tuple[str, str]:
        (x0, x1), (y0, y1) = self.x, self.y
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - x0) / ((x1 - x0) or 1)
        down = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (self._scale(y) - y0) / ((y1 - y0) or 1)
        return _number(across), _number(down)

    def _grid(self, ys: Sequence[float], xs: Sequence[float], x_label: str, y_label: str) -> None:
        for value in ys:
            _, y = self.at(self.x[0], value)
            self.parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
            self.parts.append(
                f'<text class="tick" x="{LEFT - 5}" y="{y}" dy=".32em" text-anchor="end">{value:g}</text>'
            )
        bottom = HEIGHT - BOTTOM
        for value in xs:
            x, _ = self.at(value, math.exp(self.y[0]) if self.log_y else self.y[0])
            self.parts.append(f'<text class="tick" x="{x}" y="{bottom + 13}" text-anchor="middle">{value:g}</text>')
        middle = (LEFT + WIDTH - RIGHT) // 2
        self.parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>')
        self.parts.append(
            f'<text class="label" x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_label)}</text>'
        )
        down = (TOP + bottom) // 2
        self.parts.append(
            f'<text class="label" transform="translate(11 {down}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_label)}</text>"
        )

    def dots(self, points: Sequence[tuple[float, float]], css: str, radius: float = 2.6) -> None:
        """One path of zero-length round strokes: a tenth of the bytes of circles."""
        if points:
            moves = "".join(f"M{x} {y}h0" for x, y in (self.at(*p) for p in points))
            self.parts.append(f'<path class="{css}" stroke-width="{2 * radius:g}" stroke-linecap="round" d="{moves}"/>')

    def steps(self, points: Sequence[tuple[float, float]], css: str) -> None:
        path = ""
        for x, y in (self.at(*p) for p in points):
            path += f"H{x}V{y}" if path else f"M{x} {y}"
        self.parts.append(f'<path class="{css}" d="{path}"/>')

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        path = " ".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y) in enumerate(self.at(*p) for p in points))
        self.parts.append(f'<path class="{css}" d="{path}"/>')

    def marks(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """Crosses at points."""
        places = [tuple(map(float, self.at(*p))) for p in points]
        moves = "".join(f"M{x - 3:g} {y - 3:g}l6 6m0 -6l-6 6" for x, y in places)
        if moves:
            self.parts.append(f'<path class="{css}" d="{moves}"/>')

    def crosses(self, xs: Sequence[float], css: str) -> None:
        """Marks along the bottom edge, for what has no time."""
        bottom = HEIGHT - BOTTOM - 5
        y = math.exp(self.y[0]) if self.log_y else self.y[0]
        moves = "".join(f"M{float(self.at(x, y)[0]) - 3:g} {bottom - 3}l6 6m0 -6l-6 6" for x in xs)
        if moves:
            self.parts.append(f'<path class="{css}" d="{moves}"/>')

    def svg(self, description: str) -> str:
        inner = "".join(self.parts)
        return (
            f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{escape(description)}">'
            f"<title>{escape(description)}</title>{inner}</svg>"
        )


def legend_key(css: str, text: str, path: str, width: str = "") -> str:
    """An entry of a legend: a mark as in the charts, and its name."""
    extra = f' stroke-width="{width}" stroke-linecap="round"' if width else ""
    mark = f'<svg aria-hidden="true" viewBox="0 0 24 12"><path class="{css}"{extra} d="{path}"/></svg>'
    return f"<span>{mark}{escape(text)}</span>"


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // MOST_POINTS)
    return points[::every] if every > 1 else points


def curve(panel: Panel) -> str:
    """Time of every trial in order, the best so far, the default, failures; empty where nothing ran."""
    ran = [(float(i), t.median_us) for i, t in enumerate(panel.trials, start=1) if t.status == "ok"]
    failed = [float(i) for i, t in enumerate(panel.trials, start=1) if t.status != "ok"]
    if not ran:
        return ""
    times = [time_us for _, time_us in ran]
    low, high = min(times), max(times)
    log = high > 3 * low
    room = (high / low) ** 0.08 if log else 1.0
    pad = (high - low or high) * 0.08
    y = (low / room, high * room) if log else (max(0.0, low - pad), high + pad)
    axes = Axes((0.0, len(panel.trials) + 1.0), y, log, "trial", "median time (µs)")
    axes.dots(_thinned(ran), "dot")
    best, least = [], math.inf
    for i, time_us in ran:
        if time_us < least:
            best.append((i, time_us))
            least = time_us
    if panel.default_trial is not None:
        default_us = panel.default_trial.median_us
        axes.line([(0.0, default_us), (len(panel.trials) + 1.0, default_us)], "default")
    axes.steps([*best, (len(panel.trials) + 1.0, least)], "best")
    axes.dots(best[-1:], "best-dot", 4.5)
    axes.crosses(failed, "failed")
    default = "" if panel.default_trial is None else f", the default {panel.default_trial.median_us:.1f} µs"
    return axes.svg(
        f"{panel.problem.kernel} on {panel.workload}: {len(panel.trials)} trials, {len(failed)} failed, "
        f"best {least:.1f} µs at trial {best[-1][0]:.0f}{default}"
    )


def residuals(points: Sequence[tuple[float, float]], name: str) -> str:
    """Predicted against measured time, both in µs, with the line where they agree; empty without points."""
    if not points:
        return ""
    numbers = [value for pair in points for value in pair]
    low, high = min(numbers) * 0.95, max(numbers) * 1.05
    axes = Axes((low, high), (low, high), False, "measured (µs)", "predicted (µs)")
    axes.line([(low, low), (high, high)], "default")
    axes.dots(_thinned(list(points)), "dot")
    worst = max(abs(predicted / measured - 1) for measured, predicted in points)
    return axes.svg(f"{name}: {len(points)} times predicted against measured, at worst {worst:.1%} off")
