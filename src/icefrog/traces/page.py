"""A trace as one HTML page that needs no network, in the look of the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from icefrog.profile import FloatArray
from icefrog.report import text
from icefrog.report.html import script_json
from icefrog.report.plots import PALETTE, Figure
from icefrog.traces.describe import describe
from icefrog.traces.drawing import TITLES, gpu_range, printable
from icefrog.traces.trace import Trace

MAX_POINTS = 600
"""A distribution with more values is shown by this many of its quantiles."""
MAX_BARS = 240
"""Submissions over time are counted in at most this many intervals."""
_INTERVALS_H = (1, 2, 6, 12, 24, 48, 168, 336, 672)
_TIME_TICKS = {
    1: "1 s",
    10: "10 s",
    60: "1 min",
    600: "10 min",
    3600: "1 h",
    6 * 3600: "6 h",
    86400: "1 d",
    604800: "7 d",
}


def render(trace: Trace) -> str:
    """The page as text. The same trace gives the same bytes."""
    facts = describe(trace)
    loader = ChoiceLoader([PackageLoader("icefrog.traces", "."), PackageLoader("icefrog.report", ".")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(
        title=facts["source"],
        facts=_facts(facts),
        dropped=[
            (f"{n:,}", reason, facts["rows"]["examples"].get(reason, ""))
            for reason, n in facts["rows"]["dropped"].items()
        ],
        quantiles=_quantile_rows(facts),
        groups=[(TITLES[name], _group_rows(groups)) for name, groups in facts["by"].items()],
        data=script_json(_figures(trace, facts)),
        plotly=Markup(get_plotlyjs()),
    )


def _facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    start = f"{facts['start']} {facts['zone'] or '(local time)'}" if facts["start"] else "relative times"
    rows = [
        ("jobs", f"{facts['jobs']:,}"),
        ("from", start),
        ("span", text.duration(facts["span_s"])),
        ("GPU hours", text.number(facts["gpu_hours"])),
        ("rows read", f"{facts['rows']['read']:,}"),
    ]
    more = [
        (name, facts[key]) for key, name in (("users", "users"), ("vcs", "VCs"), ("with_deadline", "with a deadline"))
    ]
    return rows + [(name, f"{count:,}") for name, count in more if count]


def _quantile_rows(facts: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    shapes = (
        ("submissions an hour", "submissions_per_hour", text.number),
        ("duration", "duration_s", text.duration),
        ("GPUs", "num_gpus", text.number),
        ("GPU hours", "gpu_hours_per_job", text.number),
        ("queueing in the log", "queue_s", text.duration),
    )
    return [(title, [shape(v) for v in facts[key].values()]) for title, key, shape in shapes if facts[key]]


def _group_rows(groups: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    total = sum(group["gpu_hours"] for group in groups.values()) or 1.0
    return [
        (
            printable(name),
            f"{int(group['jobs']):,}",
            text.duration(group["p50_duration_s"]),
            text.number(group["gpu_hours"]),
            text.percent(group["gpu_hours"] / total),
        )
        for name, group in groups.items()
    ]


def _figures(trace: Trace, facts: Mapping[str, Any]) -> dict[str, Figure]:
    duration_s = np.array([job.duration_s for job in trace.jobs])
    gpu_h = np.array([job.gpu_s for job in trace.jobs]) / 3600.0
    figures = {
        "submissions": _submissions(trace),
        "duration": _distribution(
            [("jobs", duration_s, None), ("GPU hours", duration_s, gpu_h)], "duration", _TIME_TICKS
        ),
        "gpu_hours": _distribution([("jobs", gpu_h, None), ("GPU hours", gpu_h, gpu_h)], "GPU hours of a job"),
        "gpus": _by_gpus(trace),
    }
    if facts["jobs_by_hour_of_day"] is not None:
        hours = [f"{hour:02d}:00" for hour in range(24)]
        figures["hours"] = _figure([_bar("jobs", hours, facts["jobs_by_hour_of_day"], 0)], "hour of the day", "jobs")
    return figures


def _submissions(trace: Trace) -> Figure:
    submit_s = np.array([job.submit_s for job in trace.jobs])
    span_h = (submit_s[-1] - submit_s[0]) / 3600.0
    each_h = next((h for h in _INTERVALS_H if span_h / h <= MAX_BARS), span_h / MAX_BARS)
    counts = np.bincount(((submit_s - submit_s[0]) // (each_h * 3600.0)).astype(np.int64))
    days = span_h > 72
    at = np.arange(len(counts)) * each_h / (24.0 if days else 1.0)
    axis = f"{'days' if days else 'hours'} since the first submission"
    return _figure([_bar("jobs", _short(at), counts.tolist(), 0)], axis, f"jobs in {each_h:g} h")


def _distribution(
    curves: Sequence[tuple[str, FloatArray, FloatArray | None]], title: str, ticks: Mapping[int, str] | None = None
) -> Figure:
    """Cumulative shares on a logarithmic axis; a curve with weights is the share of their sum."""
    data = []
    for i, (name, values, weights) in enumerate(curves):
        order = np.argsort(values)
        share = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
        share = 100.0 * share / share[-1]
        kept = np.linspace(0, len(values) - 1, min(MAX_POINTS, len(values))).round().astype(int)
        if weights is not None:  # by weight: the few long jobs that carry it must not be lost between two points
            at = np.searchsorted(share, np.linspace(0.0, 100.0, min(MAX_POINTS, len(values))))
            kept = np.unique(np.minimum(at, len(values) - 1))
        line = {"color": PALETTE[i], "width": 1.8, "shape": "hv"}
        x, y = np.maximum(values[order][kept], 1e-4), share[kept]
        data.append({"type": "scatter", "mode": "lines", "name": name, "x": _short(x), "y": _short(y), "line": line})
    axis: Figure = {"type": "log", "title": title}
    if ticks is not None:
        axis |= {"tickvals": list(ticks), "ticktext": list(ticks.values())}
    return _figure(data, axis, {"title": "%", "range": [0, 102]})


def _by_gpus(trace: Trace) -> Figure:
    """Share of jobs and of GPU hours by GPUs, in powers of two."""
    gpus = np.array([job.num_gpus for job in trace.jobs])
    gpu_h = np.array([job.gpu_s for job in trace.jobs]) / 3600.0
    kind = np.ceil(np.log2(gpus)).astype(np.int64)
    names = [gpu_range(int(k)) for k in range(int(kind.max()) + 1)]
    jobs = np.bincount(kind)
    hours = np.bincount(kind, weights=gpu_h)
    total = hours.sum() or 1.0
    bars = [
        _bar("jobs", names, _short(100.0 * jobs / jobs.sum()), 0),
        _bar("GPU hours", names, _short(100.0 * hours / total), 1),
    ]
    return _figure(bars, "GPUs", "%")


def _bar(name: str, x: Sequence[Any], y: Sequence[float], colour: int) -> Figure:
    return {"type": "bar", "name": escape(name), "x": list(x), "y": list(y), "marker": {"color": PALETTE[colour]}}


def _figure(data: list[Figure], xaxis: str | Figure, yaxis: str | Figure) -> Figure:
    first = {"title": xaxis} if isinstance(xaxis, str) else xaxis
    second = {"title": yaxis} if isinstance(yaxis, str) else yaxis
    if isinstance(data[0]["x"][0], str):
        first = {**first, "type": "category"}
    layout = {
        "xaxis": {**first, "title": {"text": first["title"]}},
        "yaxis": {**second, "title": {"text": second["title"]}},
        "showlegend": len(data) > 1,
        "bargap": 0.12,
    }
    return {"data": data, "layout": layout, "height": 300, "note": ""}


def _short(values: FloatArray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
