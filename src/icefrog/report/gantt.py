"""The per-job timeline: one row a job; bars coloured by frozen depth, as high as their GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import Any

from icefrog.report import text
from icefrog.report.metrics import focus_end_s
from icefrog.report.plots import Figure
from icefrog.report.record import JobRecord, RunRecord, Segment

MAX_ROWS = 150
"""Jobs shown; of more, an even sample by submission."""
MAX_BARS = 6000
"""Bars a browser draws without a pause; beyond it, neighbouring depths are drawn as one."""
COLOURS = ((0.0, "#e3b04b"), (0.35, "#9bbf9e"), (0.7, "#4f97cf"), (1.0, "#2455a4"))
"""Warm: everything is trained. Cold: frozen. Lightness falls, so it can be read without colour."""
_TEXT_ROOM = 0.015
"""A bar with a number in it is at least this part of the time axis long."""
_DEPTH_STEPS = (0.0, 0.05, 0.1, 0.25, 1.0)
_MARKS = {
    "crash": ("died", "x-thin", "#d1344b"),
    "failed": ("failed", "x-open", "#d1344b"),
    "cancelled": ("cancelled", "square-open", "#888888"),
    "target_missed": ("target missed", "circle-open", "#d1344b"),
}


@dataclass(frozen=True, slots=True)
class _Bar:
    """A segment as drawn: it may span several depths."""

    segment: Segment
    row: int
    job: JobRecord
    exact: bool


def timeline(run: RunRecord) -> Figure:
    """The figure. Waiting is a thin grey bar; half a GPU (shared) is hatched; the number in a bar is its GPU count."""
    jobs = _sample(run.jobs)
    tall = len(jobs) > 30
    row_px = 34 if len(jobs) <= 12 else 22 if len(jobs) <= 40 else 16
    bars, step = _bars(jobs, run.end_s)
    focus_s = focus_end_s(run)
    unit, unit_s = text.time_unit(focus_s - run.start_s)
    most = max((bar.segment.gpus for bar in bars), default=1.0)
    waiting = [bar for bar in bars if bar.segment.gpus == 0]
    running = [bar for bar in bars if bar.segment.gpus > 0]
    data = [_waiting_trace(waiting, unit_s)] if waiting else []
    if running:
        data.append(_running_trace(running, unit_s, most))
        shared = [bar for bar in running if bar.segment.gpus < 1]
        data += [_hatch_trace(shared, unit_s, most)] if shared else []
        data.append(_count_trace(running, unit_s, focus_s - run.start_s))
        data.append(_colour_bar(row_px * len(jobs)))
    data += _mark_traces(jobs, unit_s)
    zoom = {"range": [run.start_s / unit_s, focus_s / unit_s]} if focus_s < run.end_s else {}
    rows = {
        "tickvals": list(range(len(jobs))),
        "ticktext": [escape(_clip(job.job_id)) for job in jobs],
        **{"range": [len(jobs) - 0.4, -0.6], "showgrid": False, "zeroline": False},
        "tickfont": {"size": 10 if tall else 12},
    }
    layout: Figure = {
        "xaxis": {"title": {"text": f"time, {unit}"}, "side": "top" if tall else "bottom", "zeroline": False, **zoom},
        "yaxis": rows,
        **{"barmode": "overlay", "hovermode": "closest", "showlegend": len(data) > 1},
        # Above the axis, which is at the top of a tall figure.
        "legend": {"y": 1 + (38 if tall else 4) / max(row_px * len(jobs), 1)},
        "margin": {"t": 76 if tall else 30},
    }
    return {
        "data": data if jobs else [],
        "layout": layout,
        "height": max(100 + row_px * len(jobs), 230),
        "note": _note(run, jobs, step),
    }


def _sample(jobs: Sequence[JobRecord]) -> list[JobRecord]:
    if len(jobs) <= MAX_ROWS:
        return list(jobs)
    return [jobs[i * len(jobs) // MAX_ROWS] for i in range(MAX_ROWS)]


def _note(run: RunRecord, jobs: Sequence[JobRecord], step: float) -> str:
    notes = []
    if len(jobs) < len(run.jobs):
        notes.append(f"{len(jobs)} of {len(run.jobs):,} jobs, evenly by submission; the table below has all.")
    if step >= 1:
        notes.append("Depths are averaged between changes of the GPUs.")
    elif step:
        notes.append(f"Depths within {100 * step:.0f} % of the layers are drawn as one.")
    return " ".join(notes)


def _bars(jobs: Sequence[JobRecord], end_s: float) -> tuple[list[_Bar], float]:
    """(bars, step of depth they were merged by)."""
    bars: list[_Bar] = []
    for step in _DEPTH_STEPS:
        bars = [bar for row, job in enumerate(jobs) for bar in _merge(row, job, job.segments(end_s), step)]
        if len(bars) <= MAX_BARS:
            return bars, step
    return bars, _DEPTH_STEPS[-1]


def _merge(row: int, job: JobRecord, segments: Sequence[Segment], step: float) -> list[_Bar]:
    """Neighbours with the same GPUs, no more than ``step`` of the layers apart, become one bar of their mean depth."""
    layers = step * (job.num_layers or 0)
    groups: list[list[Segment]] = []
    low = high = 0
    for part in segments:
        low, high = min(low, part.frozen_layers), max(high, part.frozen_layers)
        if groups and groups[-1][-1].gpus == part.gpus and high - low <= layers:
            groups[-1].append(part)
        else:
            groups.append([part])
            low = high = part.frozen_layers
    return [_Bar(_join(group), row, job, len({part.frozen_layers for part in group}) == 1) for group in groups]


def _join(group: Sequence[Segment]) -> Segment:
    span_s = group[-1].end_s - group[0].start_s
    if len(group) == 1 or span_s <= 0:
        return group[0]
    mean = sum(part.frozen_layers * (part.end_s - part.start_s) for part in group) / span_s
    return replace(group[0], end_s=group[-1].end_s, frozen_layers=round(mean))


def _geometry(bars: Sequence[_Bar], unit_s: float) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "y": [bar.row for bar in bars],
        "base": [_six(bar.segment.start_s / unit_s) for bar in bars],
        "x": [_six((bar.segment.end_s - bar.segment.start_s) / unit_s) for bar in bars],
        "hoverinfo": "text",
    }


def _waiting_trace(bars: Sequence[_Bar], unit_s: float) -> Figure:
    def hover(bar: _Bar) -> str:
        part = bar.segment
        return f"<b>{escape(bar.job.job_id)}</b><br>waits {text.duration(part.end_s - part.start_s)}{_when(part)}"

    return _geometry(bars, unit_s) | {
        "name": "waiting",
        "width": 0.22,
        "marker": {"color": "rgba(135,140,150,0.38)", "line": {"width": 0}},
        "hovertext": [hover(bar) for bar in bars],
        "textposition": "none",
    }


def _running_trace(bars: Sequence[_Bar], unit_s: float, most: float) -> Figure:
    colours = [colour(bar.job.frozen_fraction(bar.segment.frozen_layers) or 0.0) for bar in bars]
    return _geometry(bars, unit_s) | {
        "name": "running",
        "width": [_height(bar.segment.gpus, most) for bar in bars],
        "marker": {"color": colours, "line": {"width": 0.7, "color": colours}},  # no seams between neighbours
        "textposition": "none",
        "hovertext": [_running_hover(bar) for bar in bars],
        "showlegend": False,
    }


def _hatch_trace(bars: Sequence[_Bar], unit_s: float, most: float) -> Figure:
    """Laid over the bars of sharers: a bar's own pattern would take its colours' place."""
    spans = [_span(group) for group in _stretches(bars)]
    clear, stripes = "rgba(0,0,0,0)", "rgba(255,255,255,0.6)"
    hatch = {"shape": "/", "size": 6, "solidity": 0.2, "fillmode": "overlay", "bgcolor": clear, "fgcolor": stripes}
    return _geometry(spans, unit_s) | {
        "name": "shared",
        "width": [_height(bar.segment.gpus, most) for bar in spans],
        "marker": {"color": clear, "line": {"width": 0}, "pattern": {**hatch, "fgopacity": 1}},
        **{"hoverinfo": "skip", "showlegend": False},
    }


def _stretches(bars: Sequence[_Bar]) -> list[list[_Bar]]:
    """Bars of one job on the same number of GPUs without a gap between them."""
    out: list[list[_Bar]] = []
    for bar in bars:
        last = out[-1][-1] if out else None
        if (
            last is not None
            and last.row == bar.row
            and last.segment.gpus == bar.segment.gpus
            and last.segment.end_s == bar.segment.start_s
        ):
            out[-1].append(bar)
        else:
            out.append([bar])
    return out


def _span(group: Sequence[_Bar]) -> _Bar:
    first = group[0]
    return replace(first, segment=replace(first.segment, end_s=group[-1].segment.end_s))


def _count_trace(bars: Sequence[_Bar], unit_s: float, span_s: float) -> Figure:
    """GPU counts, once while one stays the same, where there is room. (A bar's own text would need more.)"""
    points: list[tuple[float, int, str, str]] = []
    for group in _stretches(bars):
        part = _span(group).segment
        if part.end_s - part.start_s >= _TEXT_ROOM * span_s:
            middle_s = (part.start_s + part.end_s) / 2
            under = next(bar for bar in group if bar.segment.end_s >= middle_s)
            dark = (under.job.frozen_fraction(under.segment.frozen_layers) or 0.0) > 0.5
            count = "½" if part.gpus == 0.5 else f"{part.gpus:g}"
            points.append((middle_s / unit_s, under.row, count, "#ffffff" if dark else "#1b1f24"))
    return {
        **{"type": "scatter", "mode": "text", "name": "GPUs", "showlegend": False, "hoverinfo": "skip"},
        "x": [_six(x) for x, _, _, _ in points],
        "y": [row for _, row, _, _ in points],
        "text": [count for _, _, count, _ in points],
        "textfont": {"size": 9, "color": [ink for _, _, _, ink in points]},
    }


def _colour_bar(height_px: int) -> Figure:
    """A trace of nothing that carries the scale of depths."""
    at = [0, 0.25, 0.5, 0.75, 1] if height_px > 200 else [0, 0.5, 1]
    scale = {
        "title": {"text": "frozen<br>&nbsp;", "side": "top"},
        **{"tickvals": at, "ticktext": [f"{100 * part:.0f} %" for part in at]},
        **{
            "thickness": 10,
            "len": min(200, max(110, height_px)),
            "lenmode": "pixels",
            "y": 1,
            "yanchor": "top",
            "outlinewidth": 0,
        },
    }
    marker = {"color": [0], "cmin": 0, "cmax": 1, "colorscale": COLOURS, "showscale": True, "colorbar": scale}
    nowhere: Figure = {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker}
    return nowhere | {"showlegend": False, "hoverinfo": "skip"}


def colour(fraction: float) -> str:
    """The colour of a frozen share of the layers, ``#rrggbb``: linear between ``COLOURS``."""
    at = min(max(fraction, 0.0), 1.0)
    (low, first), (high, second) = next(pair for pair in pairwise(COLOURS) if at <= pair[1][0])
    part = (at - low) / (high - low)
    channels = [(int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in channels)


def _running_hover(bar: _Bar) -> str:
    part, job = bar.segment, bar.job
    gpus = "half a GPU (shared)" if part.gpus == 0.5 else f"{part.gpus:g} GPU{'s' if part.gpus != 1 else ''}"
    of = f" of {job.num_layers}" if job.num_layers else ""
    about = "" if bar.exact else "about "
    partner = next((s.partner for s in job.sharing if s.start_s < part.end_s and s.end_s > part.start_s), None)
    lines = [
        f"<b>{escape(job.job_id)}</b>" + (f" ({escape(job.workload)})" if job.workload else ""),
        gpus + (f", beside {escape(partner)}" if partner is not None and part.gpus < 1 else ""),
        f"{about}{part.frozen_layers}{of} layers frozen",
        f"{text.duration(part.end_s - part.start_s)}{_when(part)}",
    ]
    return "<br>".join(lines)


def _when(part: Segment) -> str:
    return f"<br>from {text.duration(part.start_s)} to {text.duration(part.end_s)}"


def _mark_traces(jobs: Sequence[JobRecord], unit_s: float) -> list[Figure]:
    """Crashes, and ends other than completion."""
    marks: dict[str, list[tuple[float, int, str]]] = {kind: [] for kind in _MARKS}
    for row, job in enumerate(jobs):
        for time_s, message in job.deaths:
            marks["crash"].append((time_s, row, f"<b>{escape(job.job_id)}</b><br>{escape(message)}"))
        if job.status in marks and job.finish_s is not None:
            hover = f"<b>{escape(job.job_id)}</b><br>{text.status_text(job.status)}: {escape(job.reason)}"
            marks[job.status].append((job.finish_s, row, hover))
    traces: list[Figure] = []
    for kind, points in marks.items():
        if not points:
            continue
        name, symbol, colour = _MARKS[kind]
        trace: dict[str, Any] = {
            **{"type": "scatter", "mode": "markers", "name": name, "hoverinfo": "text"},
            "x": [_six(time_s / unit_s) for time_s, _, _ in points],
            "y": [row for _, row, _ in points],
            "hovertext": [hover for _, _, hover in points],
            "marker": {"symbol": symbol, "color": colour, "size": 8, "line": {"width": 1.5, "color": colour}},
        }
        traces.append(trace)
    return traces


def _height(gpus: float, most: float) -> float:
    """Of a row of 1: a GPU takes half of it, the largest count nearly all; logarithmic between."""
    if most <= 1:
        return 0.6
    return round(0.5 + 0.4 * max(0.0, math.log2(gpus) / math.log2(most)), 3)


def _clip(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def _six(value: float) -> float:
    return float(f"{value:.7g}")
