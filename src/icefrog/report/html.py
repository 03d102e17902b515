"""``report.html``: one file that needs no network. Python makes the numbers and figures, the page draws and sorts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from icefrog.report import comparison, gantt, plots, text
from icefrog.report.jobtable import job_table
from icefrog.report.metrics import summarise
from icefrog.report.record import RunRecord

_HIDDEN = ("schema", "report")


def write_report(path: Path, runs: Mapping[str, RunRecord], meta: Mapping[str, Any]) -> None:
    """Write the page.

    Args:
        path: the file to write; its folder is made.
        runs: run by policy, in the order of the comparison; the first is what the others are compared with.
        meta: a ``summary.json`` document (``trace``, ``cluster``, ``runs``); what is missing is worked out from ``runs``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, meta), encoding="utf-8")


def render(runs: Mapping[str, RunRecord], meta: Mapping[str, Any]) -> str:
    """The page as text. The same arguments give the same bytes."""
    known = {str(run["policy"]): run for run in meta.get("runs", ())}
    rows = [known.get(policy) or summarise(run, policy=policy) for policy, run in runs.items()]
    environment = Environment(
        loader=PackageLoader("icefrog.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("template.html")
    return template.render(
        title=_title(runs, meta),
        facts=_facts(runs, meta, rows),
        tables=[
            (comparison.columns(rows, table), comparison.rows(rows, table))
            for table in (comparison.COMPLETION, comparison.FAIRNESS)
            if any(column.value(row) is not None for column in table for row in rows)
        ],
        caveats=comparison.caveats(rows),
        policies=list(runs),
        jobs=sum(len(run.jobs) for run in runs.values()),
        data=script_json({"shared": _shared(runs), "runs": {p: _one(run) for p, run in runs.items()}}),
        plotly=Markup(get_plotlyjs()),
    )


def script_json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    dumped = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        dumped = dumped.replace(character, f"\\u{ord(character):04x}")
    return Markup(dumped)


def _title(runs: Mapping[str, RunRecord], meta: Mapping[str, Any]) -> str:
    trace = meta.get("trace") or {}
    name = next((str(trace[key]) for key in ("name", "source", "trace", "file") if trace.get(key)), "")
    if name:
        return name
    return "Live cluster" if any(run.live for run in runs.values()) else "Run"


def _facts(
    runs: Mapping[str, RunRecord], meta: Mapping[str, Any], rows: list[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """What was run: name and value, in the order shown."""
    facts: list[tuple[str, str]] = []
    first = next(iter(runs.values()), None)
    if first is not None:
        types = sorted({node.gpu_type for node in first.cluster.nodes} - {"any"})
        kind = f" {', '.join(types)}" if types else ""
        facts.append(("cluster", f"{first.cluster.label()} = {first.cluster.num_gpus:,}{kind} GPUs"))
        facts.append(("jobs", f"{max(len(run.jobs) for run in runs.values()):,}"))
        facts.append(("policies" if len(runs) > 1 else "policy", ", ".join(runs)))
    seeds = sorted({str(run["seed"]) for run in rows if run.get("seed") is not None})
    if seeds and not (first is not None and first.live):
        facts.append(("seed", ", ".join(seeds)))
    taken = {name for name, _ in facts} | {"name", "source", *_HIDDEN}
    facts += [(key, value) for key, value in _flat(meta.get("trace") or {}) if key not in taken]
    return facts


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line a key; what is empty is left out."""
    lines = [(key.removesuffix("_s").replace("_", " "), _plain(key, value)) for key, value in values.items()]
    return [(name, value) for name, value in lines if value]


def _plain(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return text.duration(value) if key.endswith("_s") else text.number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_plain(str(name), part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain("", part) for part in value)
    return str(value)


def _shared(runs: Mapping[str, RunRecord]) -> dict[str, plots.Figure]:
    return {
        "jct": plots.jct_distribution(runs),
        "in_use": plots.gpus_in_use(runs),
        "waiting": plots.jobs_waiting(runs),
        "depth": plots.frozen_depth(runs),
    }


def _one(run: RunRecord) -> dict[str, Any]:
    figures = {"timeline": gantt.timeline(run)}
    if 0 < len(run.jobs) <= plots.MAX_LINES:
        figures["depths"] = plots.job_depths(run)
    if any(job.metric for job in run.jobs):
        figures["metric"] = plots.metric_over_time(run)
    return {"figures": figures, "table": job_table(run)}
