"""Figures of an experiment's report: plain plotly dictionaries, as in :mod:`icefrog.report.plots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from icefrog.experiment.curves import Curve, Curves, Row
from icefrog.experiment.table import span, times
from icefrog.report import text
from icefrog.report.plots import DASHES, PALETTE, Figure, figure, log_time_axis

CURVES: tuple[tuple[str, str, str], ...] = (
    ("avg_jct_s", "mean JCT", "time"),
    ("p99_jct_s", "p99 JCT", "time"),
    ("worst_queue_s", "mean queueing of the 5 % that wait longest", "time"),
    ("p99_rho", "p99 of finish-time fairness ρ", "number"),
    ("mean_frozen_fraction", "frozen layers", "percent"),
    ("restart_gpu_hours", "GPU hours lost to restarts", "number"),
)
"""Measures drawn over a quantity: key, title, how values are shown."""

_SHOW: Mapping[str, Callable[[float | None], str]] = {
    "time": text.duration,
    "number": text.number,
    "percent": text.percent,
}


def speedups(condition: Mapping[str, Any], base: str) -> Figure:
    """Ratio of the base's mean completion time to each variant's, with its interval; right of the line is faster."""
    rows = [row for row in condition["rows"] if row["variant"] != base and "avg_jct_s" in row.get("versus_base", {})]
    data = []
    for i, row in enumerate(condition["rows"]):
        if row not in rows:
            continue
        versus = row["versus_base"]["avg_jct_s"]
        if versus["ratio"] is None:
            continue
        hover = f"{times(versus['ratio'])} {span(versus, times)}<br>won {versus['wins']} of {versus['pairs']}"
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape(row["variant"]),
                "x": [versus["ratio"]],
                "y": [escape(row["variant"])],
                "marker": {"color": _colour(i), "size": 9},
                "error_x": _bars([versus["ratio"]], [versus["low"]], [versus["high"]], _colour(i)),
                "hovertemplate": hover + "<extra></extra>",
                "showlegend": False,
            }
        )
    shown = figure(
        data, xaxis={"title": f"mean JCT of {escape(base)} / mean JCT"}, yaxis={}, height=70 + 34 * max(len(rows), 2)
    )
    shown["layout"]["yaxis"] |= {"autorange": "reversed", "type": "category"}
    shown["layout"]["hovermode"] = "closest"
    shown["layout"]["shapes"] = [
        {
            "type": "line",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "x0": 1,
            "x1": 1,
            "line": {"color": "#888888", "width": 1, "dash": "dash"},
        }
    ]
    return shown


def completion_times(condition: Mapping[str, Any]) -> Figure:
    """Share of all jobs of all replicates that completed within a time."""
    data, lows, highs = [], [1.0], [1.0]
    for i, row in enumerate(condition["rows"]):
        if not row["cdf"]:
            continue
        jct_s = np.maximum(np.array(row["cdf"]), 0.1)
        done = 100 * completed(row) / max(row["jobs"], 1)
        share = np.linspace(done / len(jct_s), done, len(jct_s))
        lows.append(float(jct_s[0]))
        highs.append(float(jct_s[-1]))
        data.append(
            _line(i, row["variant"], jct_s.tolist(), share.tolist())
            | {"text": [text.duration(value) for value in jct_s], "hovertemplate": "%{y:.1f} % within %{text}"}
        )
    axis = log_time_axis("job completion time", min(lows[1:], default=1.0), max(highs[1:], default=10.0))
    return figure(data, xaxis=axis, yaxis={"title": "jobs, %", "range": [0, 102]}, height=360)


def completed(row: Row) -> int:
    """Jobs of a row with a completion time."""
    lost = row["lost"]
    return int(row["jobs"]) - sum(int(n) for status, n in lost.items() if status != "target_missed")


def over(found: Curves, key: str, title: str, kind: str) -> Figure | None:
    """One measure over the varied quantity, with its intervals; None if no line has it."""
    lines = []
    for i, curve in enumerate(found.lines):
        points = [(x, row["measures"][key]) for x, row in curve.points if key in row["measures"]]
        if points:
            lines.append(_curve(i, curve, points, "mean", _SHOW[kind]))
    if not lines or all(value == 0 for line in lines for value in line["y"]):
        return None
    if kind == "percent":
        for line in lines:
            line["y"] = [100 * y for y in line["y"]]
            line["error_y"] = line["error_y"] | {
                side: [100 * v for v in line["error_y"][side]] for side in ("array", "arrayminus")
            }
    axis: Figure = {"title": title + (", %" if kind == "percent" else ""), "rangemode": "tozero"}
    values = [y for line in lines for y in line["y"] if y > 0]
    if kind == "time" and values:
        steep = max(values) > 8 * min(values)
        axis = log_time_axis(title, min(values) / 1.3, max(values) * 1.3) if steep else _linear_time(title, max(values))
    return figure(lines, xaxis=_x_axis(found), yaxis=axis)


def ratio_over(found: Curves, base: str) -> Figure | None:
    """The speed-up over the base along the varied quantity, with its intervals."""
    lines = []
    for i, curve in enumerate(found.lines):
        rows = [
            (x, row["versus_base"]["avg_jct_s"]) for x, row in curve.points if "avg_jct_s" in row.get("versus_base", {})
        ]
        points = [(x, versus) for x, versus in rows if versus["ratio"] is not None]
        if points and any(row["variant"] != base for _, row in curve.points):
            lines.append(_curve(i, curve, points, "ratio", times))
    if not lines:
        return None
    return _around_one(lines, found, f"mean JCT of {escape(base)} / mean JCT")


def sensitivity(found: Curves) -> Figure | None:
    """Mean completion time along the knob in times that of the same policy at the default; below the line is faster."""
    lines: list[Figure] = []
    settings: set[float] = set()
    for i, curve in enumerate(found.lines):
        rows = [(x, row.get("sensitivity", {}).get(found.axis)) for x, row in curve.points]
        points = [(x, outcome) for x, outcome in rows if outcome is not None]
        if len(points) > 1:
            lines.append(_curve(i, curve, points, "ratio", times))
            settings |= {outcome["at"] for _, outcome in points}
    if not lines:
        return None
    where = f"{found.axis}={settings.pop():g}" if len(settings) == 1 else "the first value"
    return _around_one(lines, found, f"mean JCT / mean JCT at {escape(where)}")


def _around_one(lines: Sequence[Figure], found: Curves, title: str) -> Figure:
    shown = figure(list(lines), xaxis=_x_axis(found), yaxis={"title": title})
    shown["layout"]["shapes"] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": 1,
            "y1": 1,
            "line": {"color": "#888888", "width": 1, "dash": "dash"},
        }
    ]
    return shown


def _curve(
    i: int, curve: Curve, points: Sequence[tuple[float, Mapping[str, Any]]], key: str, show: Callable[[Any], str]
) -> Figure:
    x, y = [x for x, _ in points], [float(point[key]) for _, point in points]
    line = _line(i, curve.name, x, y)
    line["line"] = line["line"] | {"shape": "linear", "dash": "dot" if curve.flat else line["line"]["dash"]}
    line["mode"], line["marker"] = ("lines" if curve.flat else "lines+markers"), {"size": 6}
    line["text"] = [
        f"{show(point[key])} ({span(point, show)})" if span(point, show) else show(point[key]) for _, point in points
    ]
    line["hovertemplate"] = "%{text}"
    lows, highs = [point["low"] for _, point in points], [point["high"] for _, point in points]
    line["error_y"] = _bars(y, lows, highs, _colour(i)) | ({"visible": False} if curve.flat else {})
    return line


def _line(i: int, name: str, x: list[float], y: list[float]) -> Figure:
    line = {"color": _colour(i), "width": 1.8, "dash": DASHES[i // len(PALETTE) % len(DASHES)], "shape": "hv"}
    return {"type": "scatter", "mode": "lines", "name": escape(name), "x": x, "y": y, "line": line}


def _bars(values: Sequence[float], lows: Sequence[float | None], highs: Sequence[float | None], colour: str) -> Figure:
    up = [0.0 if high is None else max(high - value, 0.0) for value, high in zip(values, highs, strict=True)]
    down = [0.0 if low is None else max(value - max(low, 0.0), 0.0) for value, low in zip(values, lows, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "thickness": 1,
        "width": 3,
        "color": colour,
    }


def _colour(i: int) -> str:
    return PALETTE[i % len(PALETTE)]


def _x_axis(found: Curves) -> Figure:
    xs = sorted({x for curve in found.lines for x, _ in curve.points})
    axis: Figure = {"title": found.axis.replace("_", " "), "tickvals": xs, "ticktext": [f"{x:g}" for x in xs]}
    return axis | ({"type": "log"} if xs[0] > 0 and xs[-1] >= 8 * xs[0] else {})


def _linear_time(title: str, most_s: float) -> Figure:
    unit, unit_s = text.time_unit(most_s)
    step = _round_step(most_s / unit_s / 5)
    ticks = np.arange(0, most_s * 1.35 / unit_s + step, step)
    labels = [f"{tick:g}" for tick in ticks.tolist()]
    return {
        **{"title": f"{title}, {unit}", "tickvals": (ticks * unit_s).tolist(), "ticktext": labels},
        "range": [0, most_s * 1.3],
    }


def _round_step(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10 ** np.floor(np.log10(max(step, 1e-9)))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= step))
