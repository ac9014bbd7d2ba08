"""The section of the report that shows where splitting pays: a chart per operator, and its numbers as tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..db.lookup import heads_of
from .boundary import LENGTHS, Boundary, Column, Measured, rules
from .report_charts import Axes, legend_key
from .report_tables import table

SHOWN_TOKENS = 32768  # of the predictions in the table
NEAREST = min(range(len(LENGTHS)), key=lambda i: abs(LENGTHS[i] - SHOWN_TOKENS))
_RULE_STYLES = ("rule", "default")


def boundary_section(planes: Sequence[Boundary]) -> str:
    """The section, empty where the database has no models of the kernels of a split."""
    if not planes:
        return ""
    note = (
        "<p>Predicted by the cost models, for equal sequences whose gates forget as those that are measured by "
        "default. A split must be predicted faster by the plan's margin. Rules of other libraries hold for their own "
        "kernels; they are shown as lines, and split to the left of and above them.</p>"
    )
    keys = [
        legend_key("dot", "split, by the plan", "M12 6h0", "6"),
        legend_key("best-dot", "measured: split is faster", "M12 6h0", "9"),
        legend_key("failed", "measured: whole is faster", "M9 3l6 6m0 -6l-6 6"),
    ]
    named = {rule.name: style for plane in planes for rule, style in _styled(plane)}
    keys += [legend_key(style, name, "M1 6H23") for name, style in named.items()]
    panels = "".join(map(_panel, planes))
    return f'{note}<p class="legend">{"".join(keys)}</p><div class="panels">{panels}</div>'


def _styled(plane: Boundary) -> list[tuple]:
    found = rules(plane.forward.arch)
    return list(zip(found, _RULE_STYLES[-len(found) :]))


def _panel(plane: Boundary) -> str:
    forward = plane.forward
    dims = f", dims {forward.head_dim_k}:{forward.head_dim_v}"
    name = f"<b>{forward.arch} {heads_of(forward)}</b>{dims} <span class='quiet'>{escape(plane.environment.gpu)}</span>"
    figure = f"<figure><figcaption>{name}</figcaption>{chart(plane)}</figure>"
    return f"<div>{figure}{_predictions(plane.columns)}{_measurements(plane.measured)}</div>"


def chart(plane: Boundary) -> str:
    """The plane as SVG: split lengths, measured points and the rules of others."""
    widest = max(c.pairs for c in plane.columns)
    right = 1.05 * max([76, widest, *(m.pairs for m in plane.measured)])
    tokens = [LENGTHS[0], LENGTHS[-1], *(m.tokens for m in plane.measured)]
    shortest, longest = min(tokens), max(tokens)
    y = (shortest * 0.8 / 1000, longest * 1.25 / 1000)
    axes = Axes((0.0, right), y, True, "sequences × value heads", "length (1000 tokens)")
    axes.dots([(c.pairs, length / 1000) for c in plane.columns for length in c.split_lengths], "dot")
    for rule, style in _styled(plane):
        axes.line([(pairs, tokens / 1000) for pairs, tokens in rule.corners], style)
    axes.dots([(m.pairs, m.tokens / 1000) for m in plane.measured if m.pays], "best-dot", 4.5)
    axes.marks([(m.pairs, m.tokens / 1000) for m in plane.measured if not m.pays], "failed")
    split = [c.pairs for c in plane.columns if c.split_lengths]
    told = f"up to {max(split)} sequences × heads" if split else "nowhere"
    faster = sum(m.pays for m in plane.measured)
    measured = f"; measured both ways {len(plane.measured)}, split faster {faster}" if plane.measured else ""
    return axes.svg(f"heads {heads_of(plane.forward)}: splitting is predicted to pay {told}{measured}")


def _predictions(columns: Sequence[Column]) -> str:
    rows = []
    for column in columns:
        plan = column.plans[NEAREST]
        found = column.split_lengths
        rows.append(
            [
                str(column.sequences),
                str(column.pairs),
                f"{found[0]}" if found else "never",
                "whole" if plan.segment_chunks is None else f"{plan.segment_chunks}",
                f"{plan.chosen.total_us:.1f}",
            ]
        )
    head = ["sequences", "× heads", "split from", f"segments at {LENGTHS[NEAREST]}", "predicted µs"]
    return table(head, rows, "Predicted, in tokens and chunks", range(5))


def _measurements(measured: Sequence[Measured]) -> str:
    if not measured:
        return ""
    rows = [
        [
            f"{m.tokens} × {m.sequences}",
            f"{m.whole_us:.1f}",
            f"{m.split_us:.1f}",
            str(m.segment_chunks),
            "split" if m.pays else "whole",
            "whole" if m.plan.segment_chunks is None else f"split, {m.plan.segment_chunks}",
        ]
        for m in measured
    ]
    head = ["sequences", "whole µs", "split µs", "best segment", "faster", "plan"]
    return table(head, rows, "Measured both ways, without kkt_inverse", (1, 2, 3))
