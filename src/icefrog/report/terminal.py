"""The tables that the command line prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from icefrog.report import comparison, text
from icefrog.report.record import RunRecord


def render_table(run: RunRecord) -> Table:
    """One row a job: time to accuracy, target reached, GPUs and frozen layers over time, restarts."""
    table = Table(pad_edge=False)
    table.add_column("job", overflow="fold")
    table.add_column("time to accuracy", justify="right")
    table.add_column("target reached")
    table.add_column("GPUs over time", overflow="fold")
    table.add_column("frozen layers over time", overflow="fold")
    table.add_column("restarts", justify="right")
    for job in run.jobs:
        layers = f" (of {job.num_layers})" if job.num_layers and job.frozen else ""
        # Text, not str: a target's metric may hold what rich would take for markup.
        table.add_row(
            Text(job.job_id),
            text.duration(text.time_to_accuracy(job)),
            Text(text.target_text(job)),
            text.gpus_over_time(job),
            text.frozen_over_time(job) + layers,
            str(job.restarts),
        )
    return table


def render_comparison(summary: Mapping[str, Any]) -> Group:
    """Two tables with a row a policy of a ``summary.json`` document: completion; waiting, fairness and restarts.

    The best of each column is bold.
    """
    runs = summary["runs"]
    parts = [_comparison(runs, comparison.COMPLETION)]
    if any(run.get("mean_rho") is not None for run in runs):
        parts.append(_comparison(runs, comparison.FAIRNESS))
    parts[-1].caption, parts[-1].caption_justify = "\n".join(comparison.caveats(runs)) or None, "left"
    return Group(*parts)


def _comparison(runs: Sequence[comparison.Run], which: comparison.Table) -> Table:
    table = Table(pad_edge=False)
    table.add_column("policy")
    for column in comparison.columns(runs, which):
        table.add_column(column.title, justify="right")
    for policy, cells in comparison.rows(runs, which):
        table.add_row(Text(policy), *(Text(cell.text, style="bold" if cell.best else "") for cell in cells))
    return table
