"""Figures of the report: plain plotly dictionaries, without the colours of a theme, which the page adds.

Every figure is ``{"data", "layout", "height", "note"}``. Text that plotly shows as its pseudo-HTML is escaped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, TypeAlias

import numpy as np

from icefrog.report import text
from icefrog.report.metrics import focus_end_s, resample
from icefrog.report.record import JobRecord, RunRecord, StepSeries, area_until

Figure: TypeAlias = dict[str, Any]

PALETTE = ("#3a7fc1", "#d8702a", "#2f9e77", "#a765b5", "#b59a1f", "#c4516b", "#6f7f8f", "#49a7b8")
"""Colours of policies (or jobs): told apart on white and on black, and with a red-green weakness."""
DASHES = ("solid", "dash", "dot", "dashdot")

MAX_STEPS = 800
"""A series with more steps is shown as means over this many equal intervals."""
MAX_POINTS = 1000
"""A distribution with more values is shown by this many of its quantiles."""
MAX_LINES = 12
"""More jobs than this are shown as one mean instead of a line each."""

_TICKS: dict[float, str] = {
    **{0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 6 * 3600: "6 h", 86400: "1 d"},
    **{7 * 86400: "7 d", 30 * 86400: "30 d", 365 * 86400: "1 y"},
}
_FINE_TICKS: dict[float, str] = {
    **{2: "2 s", 5: "5 s", 20: "20 s", 30: "30 s", 120: "2 min", 300: "5 min", 1200: "20 min", 1800: "30 min"},
    **{2 * 3600: "2 h", 4 * 3600: "4 h", 12 * 3600: "12 h", 2 * 86400: "2 d", 4 * 86400: "4 d", 14 * 86400: "14 d"},
}
"""Of a logarithmic axis of time: these, and those between them where the axis spans less than a factor of 500."""


def jct_distribution(runs: Mapping[str, RunRecord]) -> Figure:
    """Share of all jobs that completed within a time, on a logarithmic axis; a curve that ends below 100 % lost jobs."""
    data, note = [], ""
    for i, (policy, run) in enumerate(runs.items()):
        jct_s = np.sort([job.jct_s for job in run.jobs if job.jct_s is not None])
        if not len(jct_s):
            continue
        share = 100 * np.arange(1, len(jct_s) + 1) / len(run.jobs)
        if len(jct_s) > MAX_POINTS:
            note = f"Shown by {MAX_POINTS:,} quantiles."
            kept = np.linspace(0, len(jct_s) - 1, MAX_POINTS).round().astype(int)
            jct_s, share = jct_s[kept], share[kept]
        jct_s = np.maximum(jct_s, 0.1)  # a logarithm has no room for 0
        x = [float(jct_s[0]), *jct_s.tolist()]
        line = _line(i, policy, x, [0.0, *share.tolist()])
        line |= {"text": [text.duration(value) for value in x], "hovertemplate": "%{y:.1f} % within %{text}"}
        data.append(line)
    low, high = min((line["x"][0] for line in data), default=1), max((line["x"][-1] for line in data), default=1)
    return figure(
        data,
        xaxis=log_time_axis("job completion time", low, high),
        yaxis={"title": "jobs, %", "range": [0, 102]},
        note=note,
    )


def log_time_axis(title: str, low_s: float, high_s: float) -> Figure:
    """A logarithmic axis of time from a little below ``low_s`` to a little above ``high_s``."""
    ticks = dict(sorted({**_TICKS, **(_FINE_TICKS if high_s < 500 * low_s else {})}.items()))
    return {
        **{"type": "log", "title": title, "tickvals": list(ticks), "ticktext": list(ticks.values())},
        "range": [float(np.log10(low_s * 0.9)), float(np.log10(high_s * 1.1))],
    }


def gpus_in_use(runs: Mapping[str, RunRecord]) -> Figure:
    """GPUs held over time; the dashed line is what the cluster has in service."""
    total = max(run.cluster.num_gpus for run in runs.values()) if runs else 0
    shown = _over_time(runs, {policy: run.in_use for policy, run in runs.items()}, "GPUs")
    if shown["data"]:
        longest = max(runs.values(), key=lambda run: run.end_s)
        if longest.in_service:
            shown["data"].append(_in_service(longest, runs))
        else:
            shown["layout"]["shapes"] = [_level(total)]
        shown["layout"]["yaxis"]["range"] = [0, total * 1.06]
    return shown


def _in_service(run: RunRecord, runs: Mapping[str, RunRecord]) -> Figure:
    """The dashed line where nodes left: nodes do so alike under every policy, so that of the longest run stands for all."""
    _, unit_s = text.time_unit(_span(runs))
    steps = _thinned(run.capacity, run, _focus(runs))
    steps = (*steps, (run.end_s, steps[-1][1]))
    line = _line(0, "in service", [t / unit_s for t, _ in steps], [gpus for _, gpus in steps])
    line["line"] |= {"color": "#888888", "width": 1, "dash": "dash"}
    return line | {"hovertemplate": "%{y:.4~g} GPUs in service"}


def jobs_waiting(runs: Mapping[str, RunRecord]) -> Figure:
    """Jobs that hold no GPU, over time."""
    return _over_time(runs, {policy: run.waiting for policy, run in runs.items()}, "jobs")


def frozen_depth(runs: Mapping[str, RunRecord]) -> Figure:
    """Mean frozen share of the layers over time, weighted by GPUs; jobs whose number of layers is unknown are left out."""
    _, unit_s = text.time_unit(_span(runs))
    data = []
    for i, (policy, run) in enumerate(runs.items()):
        x, y = _mean_depth(run)
        if x:
            data.append(_line(i, policy, [t / unit_s for t in x], y) | {"hovertemplate": "%{y:.1f} %"})
    return figure(data, xaxis=_time_axis(runs), yaxis={"title": "frozen layers, %", "range": [0, 100]})


def _mean_depth(run: RunRecord) -> tuple[list[float], list[float | None]]:
    """(times in s, percent); None where no GPU is held."""
    changes: list[tuple[float, float, float]] = []  # time, change of GPUs held, change of GPUs x frozen share
    for job in run.jobs:
        for part in job.segments(run.end_s):
            fraction = job.frozen_fraction(part.frozen_layers)
            if part.gpus > 0 and fraction is not None:
                changes.append((part.start_s, part.gpus, part.gpus * fraction))
                changes.append((part.end_s, -part.gpus, -part.gpus * fraction))
    if not changes or run.end_s <= run.start_s:
        return [], []
    steps = np.array(sorted(changes))
    focus_s = focus_end_s(run)
    edges = np.linspace(run.start_s, focus_s, MAX_STEPS // 2 + 1)
    if focus_s < run.end_s:
        edges = np.concatenate((edges, np.linspace(focus_s, run.end_s, MAX_STEPS // 8 + 1)[1:]))
    held, frozen = (np.diff(area_until(steps[:, 0], np.cumsum(steps[:, k]), edges)) for k in (1, 2))
    values = [100 * float(f / h) if h > 1e-6 else None for f, h in zip(frozen, held, strict=True)]
    return edges[:-1].tolist(), values


def job_depths(run: RunRecord) -> Figure:
    """A line a job: its frozen layers over time, in percent where L is known. For a handful of jobs."""
    unit, unit_s = text.time_unit(run.end_s - run.start_s)
    known = all(job.num_layers for job in run.jobs if job.frozen)
    data = []
    for i, job in enumerate(run.jobs):
        if not job.frozen:
            continue
        last_s = job.finish_s if job.finish_s is not None else run.end_s
        steps = [*job.frozen, (last_s, job.frozen[-1][1])]
        y = [100 * (job.frozen_fraction(layers) or 0.0) if known else layers for _, layers in steps]
        of = f" of {job.num_layers}" if job.num_layers else ""
        line = _line(i, job.job_id, [t / unit_s for t, _ in steps], y)
        line |= {"text": [f"{layers:g}{of} layers" for _, layers in steps], "hovertemplate": "%{text}"}
        data.append(line)
    axis: Figure = {"title": "frozen layers, %", "range": [-2, 100]} if known else {"title": "frozen layers"}
    return figure(data, xaxis={"title": f"time, {unit}"}, yaxis=axis)


def metric_over_time(run: RunRecord) -> Figure:
    """A line a job: the metric it reported; dotted: its target."""
    unit, unit_s = text.time_unit(run.end_s - run.start_s)
    reporting = [job for job in run.jobs if job.metric]
    shown = reporting[:MAX_LINES]
    data: list[Figure] = []
    for i, job in enumerate(shown):
        steps = _thin(job.metric, MAX_STEPS)
        line = _line(i, job.job_id, [t / unit_s for t, _ in steps], [_finite(value) for _, value in steps])
        line["mode"], line["line"]["shape"], line["marker"] = "lines+markers", "linear", {"size": 4}
        name = escape(job.target.metric) if job.target is not None else "metric"
        line["hovertemplate"] = f"{name} %{{y:.4f}}"
        data.append(line)
        if job.target is not None:
            data.append(_target_line(i, job, run.end_s, unit_s))
    names = {job.target.metric for job in shown if job.target is not None}
    note = f"The first {MAX_LINES} of {len(reporting):,} jobs." if len(reporting) > len(shown) else ""
    title = escape(names.pop()) if len(names) == 1 else "metric"
    return figure(data, xaxis={"title": f"time, {unit}"}, yaxis={"title": title}, note=note)


def _target_line(i: int, job: JobRecord, end_s: float, unit_s: float) -> Figure:
    assert job.target is not None
    last_s = job.finish_s if job.finish_s is not None else end_s
    line = _line(i, job.job_id, [job.submit_s / unit_s, last_s / unit_s], [job.target.value] * 2)
    line["line"] |= {"dash": "dot", "width": 1.2}
    return line | {"showlegend": False, "hoverinfo": "skip"}


# --- shared pieces ---------------------------------------------------------------------------------------------------


def _over_time(runs: Mapping[str, RunRecord], series: Mapping[str, StepSeries], title: str) -> Figure:
    _, unit_s = text.time_unit(_span(runs))
    data, coarse = [], False
    for i, (policy, run) in enumerate(runs.items()):
        if not series[policy]:
            continue
        steps = _thinned(series[policy], run, _focus(runs))
        coarse = coarse or len(steps) != len(series[policy])
        steps = (*steps, (run.end_s, series[policy][-1][1]))
        line = _line(i, policy, [t / unit_s for t, _ in steps], [value for _, value in steps])
        data.append(line | {"hovertemplate": f"%{{y:.4~g}} {title}"})
    note = f"Means over {MAX_STEPS} equal intervals." if coarse else ""
    return figure(data, xaxis=_time_axis(runs), yaxis={"title": title, "rangemode": "tozero"}, note=note)


def _thinned(series: StepSeries, run: RunRecord, focus_s: float) -> StepSeries:
    """At most ``MAX_STEPS`` means in what is shown first, and a quarter as many in the tail after it."""
    if len(series) <= MAX_STEPS or focus_s >= run.end_s:
        return resample(series, run.start_s, run.end_s, MAX_STEPS)
    head = tuple(step for step in series if step[0] < focus_s)
    tail = ((focus_s, head[-1][1] if head else 0.0), *(step for step in series if step[0] >= focus_s))
    return (
        *resample(head, run.start_s, focus_s, MAX_STEPS),
        *resample(tail, focus_s, run.end_s, MAX_STEPS // 4),
    )


def _line(i: int, name: str, x: Sequence[float], y: Sequence[float | None]) -> Figure:
    colour, dash = PALETTE[i % len(PALETTE)], DASHES[i // len(PALETTE) % len(DASHES)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(name),
        "x": _short(x),
        "y": _short(y),
        "line": {"color": colour, "width": 1.8, "dash": dash, "shape": "hv"},
    }


def figure(data: list[Figure], *, xaxis: Figure, yaxis: Figure, height: int = 320, note: str = "") -> Figure:
    """What the page draws: data, layout with titled axes, height in pixels, and a note to stand below."""
    layout = {
        "xaxis": {**xaxis, "title": {"text": xaxis.get("title", "")}},
        "yaxis": {**yaxis, "title": {"text": yaxis.get("title", "")}},
        "showlegend": len(data) > 1,
        "hovermode": "x unified" if xaxis.get("type") != "log" else "closest",
    }
    return {"data": data, "layout": layout, "height": height, "note": note}


def _time_axis(runs: Mapping[str, RunRecord]) -> Figure:
    unit, unit_s = text.time_unit(_span(runs))
    axis: Figure = {"title": f"time, {unit}"}
    if any(_focus(runs) < run.end_s for run in runs.values()):
        start_s = min(run.start_s for run in runs.values())
        axis |= {"range": [start_s / unit_s, _focus(runs) / unit_s], "title": f"time, {unit} (double-click: all of it)"}
    return axis


def _focus(runs: Mapping[str, RunRecord]) -> float:
    return max((focus_end_s(run) for run in runs.values()), default=0.0)


def _span(runs: Mapping[str, RunRecord]) -> float:
    return max((focus_end_s(run) - run.start_s for run in runs.values()), default=0.0)


def _level(y: float) -> Figure:
    return {
        **{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "layer": "below"},
        "line": {"color": "#888888", "width": 1, "dash": "dash"},
    }


def _thin(series: StepSeries, limit: int) -> StepSeries:
    """At most ``limit`` points, the last one among them."""
    if len(series) <= limit:
        return series
    kept = np.linspace(0, len(series) - 1, limit).round().astype(int)
    return tuple(series[i] for i in kept)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Seven significant digits: more than a screen shows, less than a page of digits."""
    return [None if value is None else float(f"{value:.7g}") for value in values]
