"""What experiments found, for the evidence pages: one row a cell as CSV, and curves as SVG.

    python scripts/experiment_figures.py runs/load/cells.csv=load runs/ablations/cells.csv=ablations ...

reads what ``icefrog experiment`` left and writes ``docs/evidence/data/experiments/NAME.csv`` and, where one quantity was
varied, ``docs/evidence/img/NAME.svg``. The same results make the same bytes; given the CSV that is there, it draws again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
import polars as pl

from icefrog.experiment.statistics import Interval, ratio_interval
from icefrog.report.plots import PALETTE

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "icefrog"
from matplotlib import pyplot as plt  # noqa: E402

KEPT = (
    *("jobs", "completed", "avg_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "avg_queue_s", "worst_queue_s"),
    *("gpu_utilization", "gpu_hours", "restarts", "restart_gpu_hours", "mean_frozen_fraction", "p99_rho"),
)
"""Measures that the tables keep, in six digits."""
OURS = ("icefrog", "icefrog-elastic")
JOBS_VARY = ("load", "scale", "restrict_freezing")
"""Quantities that change the jobs: two values of them have no seeds to compare in pairs."""

Line = list[tuple[float, Interval]]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Tables of cells and curves of experiments, for the evidence pages.")
    parser.add_argument("cells", nargs="+", metavar="CELLS.csv=NAME")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    chosen = parser.parse_args(argv)
    for entry in chosen.cells:
        source, _, name = entry.partition("=")
        cells = short(pl.read_csv(source, infer_schema_length=None))
        table = chosen.out / "data" / "experiments" / f"{name}.csv"
        table.parent.mkdir(parents=True, exist_ok=True)
        cells.write_csv(table)
        if found := list(panels(cells)):
            draw(found, chosen.out / "img" / f"{name}.svg")


def short(cells: pl.DataFrame) -> pl.DataFrame:
    """What a cell was and its main measures, without what a machine's speed decides."""
    head = [name for name in _head(cells) if name not in ("policy", "options", "trace")]
    return cells.select(*head, *(pl.col(name).cast(pl.Float64).round_sig_figs(6) for name in KEPT))


def panels(cells: pl.DataFrame) -> Iterator[tuple[str, str, dict[str, Line]]]:
    """(title, quantity, lines by variant): the others' mean JCT in times that of ours, over the quantity that was varied;
    over a setting of the world, also each variant's in times its own at the first value. Nothing where several were varied.
    """
    told = ("variant", "policy", "options", "trace", "seed")
    axes = [name for name in _head(cells) if name not in told and cells[name].n_unique() > 1]
    if len(axes) != 1:
        return
    axis = axes[0]
    variants = cells["variant"].unique(maintain_order=True).to_list()
    values = sorted(cells[axis].unique())
    for ours in (name for name in OURS if name in variants):
        pairs = {
            name: [(x, _ratio(cells, axis, (name, x), (ours, x))) for x in values] for name in variants if name != ours
        }
        yield f"mean JCT in times that of {ours}", axis, _known(pairs)
    if axis not in JOBS_VARY:
        own = {name: [(x, _ratio(cells, axis, (name, x), (name, values[0]))) for x in values] for name in variants}
        yield f"mean JCT in times that at {values[0]:g}", axis, _known(own)


def draw(found: Sequence[tuple[str, str, dict[str, Line]]], file: Path) -> None:
    """A panel each, side by side, with 95 % intervals as bars."""
    figure, axes = plt.subplots(1, len(found), figsize=(0.6 + 3.8 * len(found), 3.4), squeeze=False)
    for axis, (title, quantity, lines) in zip(axes.flat, found, strict=True):
        for colour, (name, line) in zip(PALETTE, lines.items(), strict=False):
            axis.plot(
                [x for x, _ in line], [one.value for _, one in line], ".-", color=colour, linewidth=1.3, label=name
            )
            for x, one in line:
                if one.low is not None and one.high is not None:
                    axis.vlines(x, one.low, one.high, color=colour, linewidth=1.0)
        axis.axhline(1.0, color="#888888", linewidth=0.8, linestyle="--")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(quantity.replace("_", " "), fontsize=8)
        axis.tick_params(labelsize=8)
        axis.legend(fontsize=7)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _head(cells: pl.DataFrame) -> list[str]:
    """The columns that say what a cell was."""
    return cells.columns[: cells.columns.index("jobs")]


def _ratio(cells: pl.DataFrame, axis: str, one: tuple[str, float], other: tuple[str, float]) -> Interval | None:
    """Mean JCT of (variant, value) in times that of another, over the seeds that both have."""
    first, second = (
        dict(cells.filter(pl.col("variant") == name, pl.col(axis) == x).select("seed", "avg_jct_s").iter_rows())
        for name, x in (one, other)
    )
    seeds = sorted(first.keys() & second.keys())
    return ratio_interval([first[seed] for seed in seeds], [second[seed] for seed in seeds]) if seeds else None


def _known(lines: dict[str, list[tuple[float, Interval | None]]]) -> dict[str, Line]:
    found = {name: [(x, one) for x, one in line if one is not None] for name, line in lines.items()}
    return {name: line for name, line in found.items() if line}


if __name__ == "__main__":
    main()
