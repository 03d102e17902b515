"""``report.html`` of an experiment: one file that needs no network, in the look of the other reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from icefrog.experiment import figures
from icefrog.experiment.curves import curves
from icefrog.experiment.table import notes, span, times
from icefrog.report import text
from icefrog.report.html import script_json

_MAIN = (
    ("mean JCT", "avg_jct_s", text.duration),
    ("median JCT", "p50_jct_s", text.duration),
    ("p90 JCT", "p90_jct_s", text.duration),
    ("p99 JCT", "p99_jct_s", text.duration),
    ("makespan", "makespan_s", text.duration),
    ("GPU use", "gpu_utilization", text.percent),
    ("frozen", "mean_frozen_fraction", text.percent),
    ("restarts", "restarts", text.number),
    ("GPU h lost to restarts", "restart_gpu_hours", text.number),
)
_FAIRNESS = (
    ("mean queueing", "avg_queue_s", text.duration),
    ("median queueing", "p50_queue_s", text.duration),
    ("p99 queueing", "p99_queue_s", text.duration),
    ("worst 5 % queueing", "worst_queue_s", text.duration),
    ("mean ρ", "mean_rho", text.number),
    ("p99 ρ", "p99_rho", text.number),
    ("ρ > 1", "unfair_fraction", text.percent),
    ("Jain", "jain_index", text.number),
)


def render_page(document: Mapping[str, Any]) -> str:
    """The page as text. The same document gives the same bytes."""
    loader = ChoiceLoader([PackageLoader("icefrog.experiment", "."), PackageLoader("icefrog.report", ".")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    found = curves(document)
    drawn = {} if found is None else {key: figures.over(found, key, title, kind) for key, title, kind in figures.CURVES}
    if found is not None:
        first = {"sensitivity": figures.sensitivity(found), "ratio": figures.ratio_over(found, document["base"])}
        drawn = first | drawn
    titles = {"sensitivity": "What it costs", "ratio": f"Speed-up over {document['base']}"}
    titles |= {key: title for key, title, _ in figures.CURVES}
    shown = {key: drawing for key, drawing in drawn.items() if drawing is not None}
    return environment.get_template("page.html").render(
        title=document["name"],
        about=document["about"],
        facts=_facts(document),
        failed=document["failed"],
        notes=notes(document),
        base=document["base"],
        axis=None if found is None else found.axis.replace("_", " "),
        curves=[(key, titles[key][:1].upper() + titles[key][1:]) for key in shown],
        conditions=[_condition(condition, document["base"]) for condition in document["conditions"]],
        data=script_json(
            {"curves": shown, "conditions": [_figures(c, document["base"]) for c in document["conditions"]]}
        ),
        plotly=Markup(get_plotlyjs()),
    )


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    clusters = dict.fromkeys(f"{c['cluster']} = {c['gpus']:,} GPUs" for c in document["conditions"])
    cells = document["cells"]
    counts = (
        f"{cells['done']:,} of {cells['all']:,} cells" if cells["done"] < cells["all"] else f"{cells['all']:,} cells"
    )
    seeds = document["seeds"]
    return [
        ("cluster", ", ".join(clusters)),
        ("traces", ", ".join(document["traces"])),
        (
            "seeds",
            f"{seeds[0]} to {seeds[-1]}"
            if seeds == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 1
            else ", ".join(map(str, seeds)),
        ),
        ("simulated", counts),
    ]


def _condition(condition: Mapping[str, Any], base: str) -> dict[str, Any]:
    best = {key: _best(condition, key) for _, key, _ in (*_MAIN, *_FAIRNESS)}
    rows = condition["rows"]
    return {
        "label": condition["label"],
        "main": [(row["variant"], _speedup(row, base), _cells(row, _MAIN, best)) for row in rows],
        "main_titles": [title for title, _, _ in _MAIN],
        "fairness": [(row["variant"], _cells(row, _FAIRNESS, best)) for row in rows],
        "fairness_titles": [title for title, _, _ in _FAIRNESS],
        "pairs": _pairs(condition),
        "by_trace": _by_trace(rows, base),
        "groups": _groups(rows, base),
    }


def _cells(row: Mapping[str, Any], columns: Any, best: Mapping[str, float | None]) -> list[tuple[str, str, bool]]:
    """(text, interval as a hint, whether it is the best)."""
    cells = []
    for _, key, show in columns:
        measure = row["measures"].get(key)
        if measure is None:
            cells.append((text.NONE, "", False))
        else:
            cells.append((show(measure["mean"]), span(measure, show), measure["mean"] == best[key]))
    return cells


def _best(condition: Mapping[str, Any], key: str) -> float | None:
    from icefrog.experiment.aggregate import MEASURES

    values = [row["measures"][key]["mean"] for row in condition["rows"] if key in row["measures"]]
    if MEASURES[key] == "" or len(set(values)) < 2:
        return None
    return float(min(values) if MEASURES[key] == "min" else max(values))


def _speedup(row: Mapping[str, Any], base: str) -> tuple[str, str, str]:
    """(ratio, interval, wins)."""
    versus = row.get("versus_base", {}).get("avg_jct_s")
    if row["variant"] == base or versus is None:
        return ("1×" if row["variant"] == base else text.NONE, "", "")
    return times(versus["ratio"]), span(versus, times), f"{versus['wins']} of {versus['pairs']} (p = {versus['p']:.2g})"


def _pairs(condition: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """A line a variant: its speed-up over each, with the interval; nothing to tell of two variants."""
    names = [row["variant"] for row in condition["rows"]]
    if len(names) < 3:
        return []
    lines = []
    for name in names:
        found = [condition["pairs"][name].get(other) for other in names]
        lines.append((name, [("", "") if one is None else (times(one["ratio"]), span(one, times)) for one in found]))
    return lines


def _by_trace(rows: Any, base: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Speed-up for each trace; empty with one trace."""
    traces = list(dict.fromkeys(trace for row in rows for trace in row.get("by_trace", {})))
    if len(traces) < 2:
        return [], []
    lines = []
    for row in rows:
        if row["variant"] != base:
            found = [row.get("by_trace", {}).get(trace) for trace in traces]
            cells = [
                text.NONE if one is None else f"{times(one['ratio'])} ({one['wins']}:{one['losses']})" for one in found
            ]
            lines.append((row["variant"], cells))
    return traces, lines


def _groups(rows: Any, base: str) -> list[dict[str, Any]]:
    """A table a label: mean completion time and speed-up of each group of jobs."""
    found = []
    for label, title in (("class", "By size of the job"), ("freezing", "By what the jobs let be frozen")):
        names = sorted({group for row in rows for group in row["groups"].get(label, {})}, key=_size)
        if len(names) < 2:
            continue
        lines = []
        for row in rows:
            groups = row["groups"].get(label, {})
            lines.append((row["variant"], [_group(groups.get(name), row["variant"] == base) for name in names]))
        found.append({"title": title, "names": names, "lines": lines})
    return found


def _group(group: Mapping[str, Any] | None, is_base: bool) -> tuple[str, str]:
    if group is None:
        return text.NONE, ""
    versus = group.get("versus_base")
    ratio = "" if is_base or versus is None else times(versus["ratio"])
    return text.duration(group["mean"]), ratio


def _size(name: str) -> tuple[int, str]:
    order = ("small", "medium", "large", "extra-large", "xlarge")
    return (order.index(name) if name in order else len(order), name)


def _figures(condition: Mapping[str, Any], base: str) -> dict[str, Any]:
    return {"speedups": figures.speedups(condition, base), "cdf": figures.completion_times(condition)}
