"""What an experiment prints: one row a variant and condition, with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from icefrog.report import text

COLUMNS = (
    ("mean JCT", "avg_jct_s", text.duration),
    ("median", "p50_jct_s", text.duration),
    ("p99", "p99_jct_s", text.duration),
    ("queueing", "avg_queue_s", text.duration),
    ("GPU use", "gpu_utilization", text.percent),
    ("restarts", "restarts", text.number),
    ("frozen", "mean_frozen_fraction", text.percent),
    ("p99 ρ", "p99_rho", text.number),
)


def render(document: Mapping[str, Any]) -> Table:
    """The table of a findings document; the row with the lowest mean completion time of a condition in bold."""
    conditions = document["conditions"]
    labelled = any(condition["label"] for condition in conditions)
    table = Table(pad_edge=False, caption="\n".join(notes(document)) or None, caption_justify="left")
    if labelled:
        table.add_column("condition")
    for title in ("policy", "mean JCT", "95 % interval", "speed-up", "95 % interval", "won"):
        table.add_column(title, justify="left" if title == "policy" else "right")
    for title, _, _ in COLUMNS[1:]:
        table.add_column(title, justify="right")
    for condition in conditions:
        best = min(
            (row["measures"]["avg_jct_s"]["mean"] for row in condition["rows"] if "avg_jct_s" in row["measures"]),
            default=None,
        )
        for i, row in enumerate(condition["rows"]):
            jct = row["measures"].get("avg_jct_s")
            cells = list(_cells(row, row["variant"] == document["base"]))
            first = [condition["label"] if i == 0 else ""] if labelled else []
            style = "bold" if jct is not None and jct["mean"] == best and len(condition["rows"]) > 1 else ""
            table.add_row(
                *first, *(Text(cell, style=style) for cell in cells), end_section=row is condition["rows"][-1]
            )
    return table


def _cells(row: Mapping[str, Any], is_base: bool) -> Iterator[str]:
    measures = row["measures"]
    yield row["variant"]
    jct = measures.get("avg_jct_s", {})
    yield text.duration(jct.get("mean"))
    yield span(jct, text.duration)
    versus = row.get("versus_base", {}).get("avg_jct_s")
    if is_base or versus is None:
        yield from ("1×" if is_base else text.NONE, "", "")
    else:
        yield times(versus["ratio"])
        yield span(versus, times)
        yield f"{versus['wins']} of {versus['pairs']}"
    for _, key, show in COLUMNS[1:]:
        yield show(measures[key]["mean"]) if key in measures else text.NONE


def times(ratio: float | None) -> str:
    """``1.84×``."""
    return text.NONE if ratio is None else f"{ratio:.2f}×"


def span(interval: Mapping[str, Any], show: Any) -> str:
    """``1 h 20 min … 2 h 10 min``; empty without an interval."""
    low, high = interval.get("low"), interval.get("high")
    return "" if low is None or high is None else f"{show(max(low, 0.0))} … {show(high)}"


def notes(document: Mapping[str, Any]) -> list[str]:
    """What a reader must know of the table: replicates, jobs that were lost, runs that stalled."""
    notes = []
    counts = {row["replicates"] for condition in document["conditions"] for row in condition["rows"]}
    if counts:
        many = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        notes.append(
            f"Means over {many} replicate{'' if many == '1' else 's'} (trace x seed). Speed-up: mean JCT of "
            f"{document['base']} over that of the policy, on the same jobs; won: replicates with a lower mean JCT."
        )
    for condition in document["conditions"]:
        for row in condition["rows"]:
            if row["lost"]:
                lost = ", ".join(f"{n:,} {text.status_text(key)}" for key, n in row["lost"].items())
                where = f" at {condition['label']}" if condition["label"] else ""
                notes.append(f"{row['variant']}{where}: {lost} of {row['jobs']:,} jobs.")
            if row["stalled"]:
                notes.append(f"{row['variant']}: {row['stalled']} of {row['replicates']} runs stalled.")
    return notes
