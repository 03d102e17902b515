"""A trace in a terminal: quantiles as a table, distributions as bars."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from icefrog.report import text
from icefrog.traces.describe import describe
from icefrog.traces.trace import Trace

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_FULL = "█"
MAX_COUNTS = 12
"""More different GPU counts than these are shown in powers of two."""
TITLES = {"vc": "VC", "state": "state", "gpu_type": "GPU type", "kind": "kind", "application": "application"}


def describe_text(trace: Trace, width: int = 110) -> str:
    """The statistics of a trace in lines of text, without colours."""
    out = StringIO()
    console = Console(file=out, width=width, no_color=True, force_terminal=False, highlight=False)
    console.print(draw(describe(trace)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def draw(facts: Mapping[str, Any]) -> RenderableType:
    """Statistics as :func:`icefrog.traces.describe` gives them, for a rich console."""
    parts: list[RenderableType] = [_summary(facts), _quantile_table(facts)]
    parts.append(_bars("jobs by duration", facts["jobs_by_duration"]))
    parts.append(_bars("jobs by GPUs", _by_gpus(facts["jobs_by_gpus"])))
    parts.append(_bars("jobs by GPU time", facts["jobs_by_class"]))
    if facts["jobs_by_hour_of_day"] is not None:
        hours = {f"{hour:02d}:00": count for hour, count in enumerate(facts["jobs_by_hour_of_day"])}
        parts.append(_bars("submissions by hour of the day", hours))
    parts += [_group_table(name, groups) for name, groups in facts["by"].items()]
    return Group(*(Padding(part, (0, 0, 1, 0)) for part in parts))


def bar(share: float, width: int = _BAR) -> str:
    """A bar of ``share`` (0..1) of the width, to an eighth of a character; what is not nothing is seen."""
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    return (_FULL * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def gpu_range(power: int) -> str:
    """The counts above 2^(power-1), up to 2^power: ``5-8``."""
    low, high = (1 << max(power - 1, 0)) + 1, 1 << power
    return str(high) if low >= high else f"{low}-{high}"


def _by_gpus(counts: Mapping[str, int]) -> Mapping[str, int]:
    if len(counts) <= MAX_COUNTS:
        return counts
    merged: Counter[int] = Counter()
    for gpus, count in counts.items():
        merged[(int(gpus) - 1).bit_length()] += count
    return {gpu_range(power): merged[power] for power in sorted(merged)}


def _summary(facts: Mapping[str, Any]) -> Text:
    rows = facts["rows"]
    zone = f" {facts['zone']}" if facts["zone"] else " local time"
    start = f", from {facts['start']}{zone}" if facts["start"] else ", relative times"
    lines = Text(facts["source"], style="bold")
    lines.append("\n")
    lines.append(
        f"{facts['jobs']:,} jobs in {text.duration(facts['span_s'])}{start}; {facts['gpu_hours']:,.0f} GPU hours",
        style="not bold",
    )
    people = [f"{facts[key]:,} {name}" for key, name in (("users", "users"), ("vcs", "VCs")) if facts[key]]
    if facts["with_deadline"]:
        people.append(f"{facts['with_deadline']:,} jobs with a deadline")
    if people:
        lines.append("; " + ", ".join(people), style="not bold")
    lines.append(f"\n{rows['read']:,} rows read, {rows['kept']:,} kept", style="not bold")
    for reason, count in rows["dropped"].items():
        example = f" (first: {rows['examples'][reason]})" if reason in rows["examples"] else ""
        lines.append(f"\n  dropped {count:,}: {reason}{example}", style="not bold")
    return lines


def _quantile_table(facts: Mapping[str, Any]) -> Table:
    table = Table(pad_edge=False, box=None, header_style="dim")
    table.add_column("")
    for name in facts["duration_s"]:
        table.add_column({"p0": "min", "p100": "max"}.get(name, name), justify="right", no_wrap=True)
    shapes: list[tuple[str, str, Any]] = [
        ("submissions an hour", "submissions_per_hour", text.number),
        ("duration", "duration_s", text.duration),
        ("GPUs", "num_gpus", text.number),
        ("GPU hours", "gpu_hours_per_job", text.number),
        ("queueing in the log", "queue_s", text.duration),
    ]
    for title, key, shape in shapes:
        if facts[key]:
            table.add_row(title, *(shape(value) for value in facts[key].values()))
    return table


def _bars(title: str, counts: Mapping[str, int]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(justify="right", min_width=10)
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column(style="cyan", no_wrap=True)
    most, total = max(counts.values(), default=0) or 1, sum(counts.values()) or 1
    for name, count in counts.items():
        table.add_row(name, f"{count:,}", text.percent(count / total), bar(count / most))
    return table


def _group_table(name: str, groups: Mapping[str, Mapping[str, float]]) -> Table:
    title = f"GPU hours by {TITLES[name]}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for head in ("jobs", "median", "GPU hours", ""):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", style="cyan", no_wrap=True)
    total = sum(group["gpu_hours"] for group in groups.values()) or 1.0
    most = max(group["gpu_hours"] for group in groups.values()) or 1.0
    for label, group in groups.items():
        table.add_row(
            Text(printable(label), overflow="ellipsis", no_wrap=True),
            f"{int(group['jobs']):,}",
            text.duration(group["p50_duration_s"]),
            text.number(group["gpu_hours"]),
            text.percent(group["gpu_hours"] / total),
            bar(group["gpu_hours"] / most, _BAR // 2),
        )
    return table


def printable(label: str | Iterable[str]) -> str:
    """A label of the log without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in label)
