"""A sweep or a database as one HTML page: no script, no network, readable in light and dark, and without its colours.

`render` is a function of its data: the same records give the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape

from .. import __version__
from ..config import Problem
from ..db.lookup import heads_of
from ..db.records import ALL_WORKLOADS
from ..schedule import Schedule
from . import importance as shares
from .report_boundary import boundary_section
from .report_charts import curve, legend_key, residuals
from .report_data import BestLine, Panel, ReportData, failures, problem_order, source_is_current, template_sources
from .report_style import CSS
from .report_tables import table

MOST_MODELS = 6  # whose residuals are drawn
MOST_PAIRED = 6  # parameters of a template in heat maps, the most important ones


def render(data: ReportData, title: str = "Tuning report") -> str:
    """The whole page."""
    sections = [
        ("best", "Best rows against defaults", _best_section(data)),
        ("importance", "What matters: parameter importances", _importance_section(data)),
        ("spaces", "Every sweep: curves and parameter pairs", _spaces_section(data)),
        ("failures", "Failures by reason", _failures_section(data)),
        ("model", "Cost model", model_section(data.models)),
        ("boundary", "Where splitting pays", boundary_section(data.planes)),
        ("provenance", "Provenance", _provenance_section(data)),
    ]
    shown = [(key, heading, body) for key, heading, body in sections if body]
    links = "".join(f'<li><a href="#{key}">{escape(heading)}</a></li>' for key, heading, _ in shown)
    body = "".join(
        f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{escape(heading)}</h2>{content}</section>'
        for key, heading, content in shown
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        # Nothing may be loaded, so the page says so: a mistake here is an error in the browser, not a request.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_summary(data)}<nav aria-label='Sections'><ul>{links}</ul></nav></header>"
        f"<main>{body}</main><footer>qla-jit {escape(__version__)}, from {escape(_from(data.sources))}"
        f"</footer></body></html>\n"
    )


def _from(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{len(sources)} files"


def name_of(problem: Problem) -> str:
    """``fused_forward 16:64``, with what is not usual about it."""
    parts = [problem.kernel, heads_of(problem)]
    if problem.head_dim_v not in (None, 128) or problem.head_dim_k not in (None, 128):
        parts.append(f"dims {problem.head_dim_k}" + (f":{problem.head_dim_v}" if problem.head_dim_v else ""))
    if problem.chunk_size != 64:
        parts.append(f"chunk {problem.chunk_size}")
    parts += [d for d in (problem.dtype, problem.state_dtype) if d not in (None, "bfloat16", "float32")]
    if problem.state_v_first:
        parts.append("state V first")
    return " ".join(map(str, parts))


def _workload(name: str) -> str:
    return "all" if name == ALL_WORKLOADS else escape(name)


def _params(schedule: Schedule) -> str:
    inner = " ".join(f"{escape(name)}=<b>{escape(str(value))}</b>" for name, value in schedule.items)
    return f'<span class="schedule">{escape(schedule.template)} {inner}</span>'


def _badge(text: str, css: str) -> str:
    return f'<span class="badge {css}">{escape(text)}</span>'


def _summary(data: ReportData) -> str:
    ran = sum(t.status == "ok" for t in data.trials)
    gains = [line.row.gain for line in data.best if line.row.gain is not None and line.row.workload != ALL_WORKLOADS]
    stale = sum(line.current is not True for line in data.best)
    facts = [
        ("trials", f"{len(data.trials)}"),
        ("of them ran and were right", f"{ran / len(data.trials):.0%}" if data.trials else "–"),
        ("problems", f"{len(data.problems)}"),
        ("best rows", f"{len(data.best)}"),
        ("geometric mean gain over defaults", f"{statistics.geometric_mean(gains):.2f}×" if gains else "–"),
        ("rows of older sources", f"{stale}"),
    ]
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in facts)
    cards_html = f'<dl class="facts">{cards}</dl>'
    where = "; ".join(str(e) for e in data.environments) or "no card yet"
    newest = f"Newest record {data.newest[:19].replace('T', ' ')} UTC. " if data.newest else ""
    return f"<p>{escape(newest)}{escape(where)}.</p>{cards_html}"


def _best_section(data: ReportData) -> str:
    if not data.best:
        return "<p>No best row is stored yet.</p>"

    def order(line: BestLine) -> tuple:
        row = line.row
        return problem_order(row.problem), row.workload != ALL_WORKLOADS, row.workload, line.layer

    def cells(line: BestLine) -> list[str]:
        row = line.row
        badge = _badge(line.state, "good" if line.current else "bad")
        default = "–" if row.default_median_us is None else f"{row.default_median_us:.1f}"
        return [
            escape(name_of(row.problem)),
            _workload(row.workload),
            f"{row.median_us:.1f}",
            default,
            "–" if row.gain is None else f'<span class="gain">{_bar(min(1.0, row.gain - 1))}{row.gain:.2f}×</span>',
            str(row.trials),
            _params(row.schedule),
            escape(line.layer),
            badge,
        ]

    head = ["problem", "workload", "best µs", "default µs", "gain", "trials", "schedule", "from", "source"]
    note = (
        "<p>Medians of one interleaved race of the finalists against the template's default. "
        "<i>all</i> is the geometric mean over the workloads of a sweep. <i>stale</i>: measured with an older source "
        "of the template; used with a warning until it is measured again.</p>"
    )
    return note + table(head, map(cells, sorted(data.best, key=order)), numeric=(2, 3, 4, 5))


def _bar(share: float) -> str:
    return f'<span class="bar" style="--w:{max(0.0, min(1.0, share)):.3f}" aria-hidden="true"></span>'


def _by_problem(panels: Iterable[Panel]) -> list[tuple[Problem, list[Panel]]]:
    groups: dict[Problem, list[Panel]] = {}
    for panel in panels:
        if panel.trials:
            groups.setdefault(panel.problem, []).append(panel)
    return list(groups.items())


def _points(panel: Panel, template: str) -> list[tuple[dict, float]]:
    return [(t.schedule.params(), t.median_us) for t in panel.ran if t.schedule.template == template]


def _column(panel: Panel, panels: Sequence[Panel]) -> str:
    several_cards = len({p.environment for p in panels if p.workload == panel.workload}) > 1
    return f"{panel.workload} ({panel.environment.gpu})" if several_cards else panel.workload


def _importance_section(data: ReportData) -> str:
    parts = []
    for problem, panels in _by_problem(data.panels):
        rows = _importance_rows(panels)
        if rows:
            head = ["parameter", *(_column(p, panels) for p in panels)]
            parts.append(table(head, rows, name_of(problem), range(1, len(head))))
    if not parts:
        return ""
    note = (
        "<p>Share of the variance of log time that a parameter explains alone, over the points of its template that "
        "ran. <i>template</i>: which template it is, over all points. <i>interactions</i>: what no sum of "
        "single-parameter effects explains. Parameters that a rule ties together explain the "
        "same variance twice. Where a space was not measured whole, the points are those that the search chose.</p>"
    )
    return note + f'<div class="tiles">{"".join(parts)}</div>'


def _importance_rows(panels: Sequence[Panel]) -> list[list[str]]:
    rows = []

    def add(name: str, values: Sequence[float | None]) -> None:
        if any(v is not None for v in values):
            shown = ["–" if v is None else f"{_bar(v)}{v:.0%}" for v in values]
            rows.append([name, *shown])

    def template_share(panel: Panel) -> float | None:
        return shares.between([t.schedule.template for t in panel.ran], [t.median_us for t in panel.ran])

    add("<i>template</i>", [template_share(p) for p in panels])
    for template in dict.fromkeys(name for panel in panels for name in panel.templates):
        found = [shares.importance(_points(panel, template)) for panel in panels]
        if not any(found):
            continue
        counts = ["" if f is None else f"{f.points} points" for f in found]
        rows.append([f'<span class="schedule">{escape(template)}</span>', *counts])
        means: dict[str, float] = {}
        for f in filter(None, found):
            for name, share in f.shares.items():
                means[name] = means.get(name, 0.0) + share
        for name in sorted(means, key=lambda n: (-means[n], n)):
            add(f"&ensp;{escape(name)}", [f and f.shares.get(name) for f in found])
        add("&ensp;<i>interactions</i>", [f and f.interactions for f in found])
    return rows


def _spaces_section(data: ReportData) -> str:
    parts = [_legend()]
    kernels = set()
    for problem, panels in _by_problem(data.panels):
        opened = "" if problem.kernel in kernels else " open"
        kernels.add(problem.kernel)
        parts.append(
            f"<details{opened}><summary>{escape(name_of(problem))} {_headline(panels)}</summary>"
            f'<div class="panels">{"".join(_figure(p, panels) for p in panels)}</div>'
            f"{''.join(_heat_maps(p, panels) for p in panels)}</details>"
        )
    return "".join(parts) if len(parts) > 1 else ""


def _legend() -> str:
    keys = (
        legend_key("dot", "trial", "M12 6h0", "6"),
        legend_key("best", "best so far", "M1 6H23"),
        legend_key("default", "template default", "M1 6H23"),
        legend_key("failed", "failed", "M9 3l6 6m0 -6l-6 6"),
    )
    return f'<p class="legend">{"".join(keys)}</p>'


def _headline(panels: Sequence[Panel]) -> str:
    told = []
    for panel in panels:
        if panel.best is not None:
            default = panel.default_trial
            gain = "" if default is None else f" ({default.median_us / panel.best.median_us:.2f}×)"
            told.append(f"{panel.workload} {panel.best.median_us:.1f} µs{gain}")
    return f'<span class="quiet">{escape(", ".join(told) or "nothing ran")}</span>'


def _figure(panel: Panel, panels: Sequence[Panel]) -> str:
    chart = curve(panel) or "<p>No trial ran.</p>"
    failed = len(panel.trials) - len(panel.ran)
    told = [f"{len(panel.trials)} trials"] + [f"{failed} failed"] * bool(failed)
    told += [f"{panel.older} older ones left out"] * bool(panel.older)
    stale = any(not source_is_current(t.schedule.template, t.template_digest) for t in panel.trials)
    badge = " " + _badge("stale", "bad") if stale else ""
    caption = f"<b>{escape(_column(panel, panels))}</b> {escape(', '.join(told))}{badge}"
    return f"<figure><figcaption>{caption}</figcaption>{chart}</figure>"


def _heat_maps(panel: Panel, panels: Sequence[Panel]) -> str:
    maps = []
    for template in panel.templates:
        found = shares.importance(_points(panel, template))
        points = [(t.schedule.params(), t.median_us) for t in panel.trials if t.schedule.template == template]
        names = list(found.shares)[:MOST_PAIRED] if found else None
        maps += [_heat_map(pair, template, panel) for pair in shares.pairs(points, names)]
    maps = [m for m in maps if m]
    if not maps:
        return ""
    note = (
        "Time of the best point with both values, relative to the best point of all; the shade goes from a table's "
        "worst to its best. In brackets how many points ran, if not all; a dot where none was tried."
    )
    return (
        f'<details class="inner"><summary>Parameter pairs on {escape(_column(panel, panels))} '
        f'<span class="quiet">{len(maps)} heat map{"s" * (len(maps) > 1)}</span></summary><p>{note}</p>'
        f'<div class="tiles">{"".join(maps)}</div></details>'
    )


def _heat_map(pair: shares.Pair, template: str, panel: Panel) -> str:
    times = [cell.best_us for cell in pair.cells.values() if cell.best_us is not None]
    if not times or panel.best is None:
        return ""
    least, low, high = panel.best.median_us, min(times), max(times)

    def cell(row, column) -> str:
        found = pair.cells.get((row, column))
        if found is None:
            return '<td class="none">·</td>'
        if found.best_us is None:
            return f'<td class="none">none of {found.tried} ran</td>'
        heat = 1.0 if high <= low else math.log(high / found.best_us) / math.log(high / low)
        some = f" <small>({found.ran}/{found.tried})</small>" if found.ran < found.tried else ""
        return f'<td style="--h:{heat:.2f}">{found.best_us / least:.2f}×{some}</td>'

    heads = "".join(f'<th scope="col">{escape(str(c))}</th>' for c in pair.columns)
    rows = "".join(
        f'<tr><th scope="row">{escape(str(r))}</th>{"".join(cell(r, c) for c in pair.columns)}</tr>' for r in pair.rows
    )
    corner = f'<td class="corner">{escape(pair.first)} ↓ {escape(pair.second)} →</td>'
    return (
        f'<div class="wide"><table class="heat"><caption>{escape(template)}: {escape(pair.first)} × '
        f"{escape(pair.second)}</caption><thead><tr>{corner}{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _failures_section(data: ReportData) -> str:
    if not data.trials:
        return ""
    found = failures(data.trials)
    if not found:
        return f"<p>None of {len(data.trials)} trials failed.</p>"

    def cells(f) -> list[str]:
        example = f.example
        where = f"{name_of(example.problem)} {example.workload}"
        return [f.status, f.kernel, str(f.count), escape(f.reason), f"{escape(where)} {_params(example.schedule)}"]

    head = ["status", "kernel", "trials", "reason", "the first of them"]
    return table(head, map(cells, found), numeric=(2,))


def model_section(models: Sequence[dict]) -> str:
    """Cost-model fits in plain form, empty without any.

    Keys of one: ``name``, ``coefficients`` {name: value}, ``rows`` (int), ``loo_error`` (share), ``fitted_on``
    (digest), and optionally ``schedule``, ``points`` [(measured µs, predicted µs)] and
    ``note``.  The first few are drawn.
    """
    if not models:
        return ""

    def cells(model: dict) -> list[str]:
        values = " ".join(f"{escape(str(k))}=<b>{float(v):.4g}</b>" for k, v in model["coefficients"].items())
        return [
            escape(model["name"]),
            f'<span class="schedule">{escape(model.get("schedule", ""))}</span>',
            f'<span class="schedule">{values}</span>',
            str(model["rows"]),
            f"{model['loo_error']:.1%}",
            f"<code>{escape(model['fitted_on'][:16])}</code>",
            escape(model.get("note", "")),
        ]

    head = ["model", "schedule", "coefficients, µs", "rows", "left-out error", "fitted on", "note"]
    drawn = [model for model in models if model.get("points")][:MOST_MODELS]
    note = "<p>Robust fits to the rows of the database; the error is of predictions for rows that were left out.</p>"
    charts = f'<div class="panels">{"".join(map(_residual_panel, drawn))}</div>'
    return note + charts + table(head, map(cells, models), numeric=(3, 4))


def _residual_panel(model: dict) -> str:
    name = f"<b>{escape(model['name'])}</b> <span class='schedule'>{escape(model.get('schedule', ''))}</span>"
    chart = residuals(model["points"], model["name"])
    return f"<div><figure><figcaption>{name}</figcaption>{chart}</figure>{_residual_table(model)}</div>"


def _residual_table(model: dict) -> str:
    worst = sorted(model["points"], key=lambda p: -abs(p[1] / p[0] - 1))[:5]
    rows = [
        [f"{measured:.1f}", f"{predicted:.1f}", f"{predicted / measured - 1:+.1%}"] for measured, predicted in worst
    ]
    return table(["measured µs", "predicted µs", "residual"], rows, "largest residuals", (0, 1, 2))


def _provenance_section(data: ReportData) -> str:
    environments = [
        [
            f"<code>{e.id}</code>",
            *map(escape, map(str, (e.gpu, e.arch, e.sm_count, e.driver, e.cuda, e.tilelang, e.torch))),
        ]
        for e in data.environments
    ]
    head = ["environment", "GPU", "arch", "SMs", "driver", "CUDA", "TileLang", "torch"]
    parts = [table(head, environments, "What the times were measured with", (3,))]
    sources = [
        [
            escape(s.template),
            f"<code>{s.digest[:16]}</code>",
            {True: _badge("current", "good"), False: _badge("stale", "bad"), None: _badge("template gone", "bad")}[
                s.current
            ],
            str(s.trials),
            str(s.best_rows),
        ]
        for s in template_sources(data)
    ]
    head = ["template", "digest of its source", "against this version", "trials", "best rows"]
    parts.append(table(head, sources, "Which template sources were measured", (3, 4)))
    if data.left_out:
        told = ", ".join(f"{rows} rows of {kernel}" for kernel, rows in sorted(data.left_out.items()))
        parts.append(f"<p>Left out: {escape(told)}, kernels that this version does not have.</p>")
    files = "".join(f"<li><code>{escape(source)}</code></li>" for source in data.sources)
    return "".join(parts) + f"<p>Read from:</p><ul>{files}</ul>"
