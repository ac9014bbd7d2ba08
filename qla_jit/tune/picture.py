"""A sweep as a picture: every trial in order, the best so far, the default, and how trials failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..db.lookup import heads_of
from ..db.records import Trial
from .sweep import Unit

COLOURS = {
    "ok": "#2f6fb3",
    "wrong": "#d1495b",
    "nonfinite": "#a8324a",
    "crashed": "#5f0f40",
    "launch_error": "#e07a1f",
    "run_timeout": "#8a5a00",
    "compile_error": "#8d99ae",
    "compile_timeout": "#5c677d",
    "infeasible": "#c5cad3",
    "duplicate": "#b7d3ea",
    "filtered": "#d9c9a3",
}
DEFAULT_COLOUR, BEST_COLOUR, INK, GRID = "#e0a100", "#1b9e77", "#222831", "#e3e7ee"
COLUMNS = 3


def draw(units: Sequence[Unit], path: str | Path, title: str = "") -> Path:
    """Write a PNG with one panel per (problem, workload) that has trials; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [unit for unit in units if unit.trials] or list(units)[:1]
    columns = len(shown) if len(shown) <= COLUMNS else 2 if len(shown) == 4 else COLUMNS
    columns = max(1, columns)
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(5.6 * columns, 3.9 * rows + 0.9), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, unit in zip(axes, shown):
        _panel(axis, unit)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    environment = next((str(t.environment) for unit in shown for t in unit.trials), "")
    heading = f"{title or 'qla-tune'}\n{environment}" if columns > 1 else title or "qla-tune"
    figure.suptitle(heading, fontsize=12, color=INK)
    _legend(figure, shown, columns)
    figure.savefig(path)
    return Path(path)


def _panel(axis, unit: Unit) -> None:
    ok = [(i, t.median_us) for i, t in enumerate(unit.trials, start=1) if t.status == "ok"]
    axis.set_title(_title(unit), fontsize=10, color=INK, loc="left")
    axis.grid(True, axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.set_xlabel("trial", fontsize=9)
    axis.set_ylabel("median time (µs)", fontsize=9)
    axis.tick_params(labelsize=8)
    if ok:
        axis.set_yscale("log" if max(t for _, t in ok) > 4 * min(t for _, t in ok) else "linear")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}" if axis.get_yscale() == "log" else "")
        axis.scatter(*zip(*ok), s=20, color=COLOURS["ok"], alpha=0.75, linewidths=0, zorder=3)
        _best_so_far(axis, ok, len(unit.trials))
    _failures(axis, unit.trials)
    default = unit.default
    if default is not None and default.status == "ok":
        axis.axhline(default.median_us, color=DEFAULT_COLOUR, linewidth=1.2, linestyle=(0, (5, 3)), zorder=2)
        at = unit.trials.index(default) + 1
        axis.scatter([at], [default.median_us], marker="D", s=52, color=DEFAULT_COLOUR, edgecolors=INK, zorder=5)
    axis.set_xlim(0.0, len(unit.trials) + 1.0)


def _best_so_far(axis, ok: list[tuple[int, float]], count: int) -> None:
    steps, best = [], float("inf")
    for i, time_us in ok:
        best = min(best, time_us)
        steps.append((i, best))
    axis.step(*zip(*steps, (count + 0.5, best)), where="post", color=BEST_COLOUR, linewidth=1.8, zorder=4)
    at = next(i for i, time_us in ok if time_us == best)
    axis.scatter([at], [best], marker="*", s=150, color=BEST_COLOUR, edgecolors="white", linewidths=0.8, zorder=6)


def _failures(axis, trials: Sequence[Trial]) -> None:
    """Failed trials have no time: ticks along the bottom edge, coloured by status."""
    failed = [(i, t.status) for i, t in enumerate(trials, start=1) if t.status != "ok"]
    if failed:
        where = axis.get_xaxis_transform()
        colours = [COLOURS[status] for _, status in failed]
        axis.scatter(
            [i for i, _ in failed], [0.025] * len(failed), marker="x", s=26, linewidths=1.5, c=colours, transform=where,
            clip_on=False, zorder=5,
        )  # fmt: skip


def _title(unit: Unit) -> str:
    text = f"{unit.problem.kernel}  heads {heads_of(unit.problem)}  {unit.workload}"
    if unit.problem.chunk_size != 64:
        text += f"  chunk {unit.problem.chunk_size}"
    if unit.row is not None and unit.row.gain is not None:
        text += f"\nbest {unit.row.median_us:.1f} µs, {unit.row.gain:.2f}× the default"
    return text


def _legend(figure, units: Sequence[Unit], columns: int) -> None:
    from matplotlib.lines import Line2D

    seen = {t.status for unit in units for t in unit.trials}
    entries = [
        Line2D([], [], marker="o", linestyle="", color=COLOURS["ok"], label="trial"),
        Line2D([], [], color=BEST_COLOUR, linewidth=1.8, marker="*", markersize=10, label="best so far"),
        Line2D([], [], color=DEFAULT_COLOUR, linestyle="--", marker="D", label="template default"),
        *(
            Line2D([], [], marker="x", linestyle="", color=COLOURS[s], label=s.replace("_", " "))
            for s in COLOURS
            if s != "ok" and s in seen
        ),
    ]
    width = min(len(entries), 3 * columns)
    figure.legend(handles=entries, loc="outside lower center", ncols=width, fontsize=8, frameon=False)
