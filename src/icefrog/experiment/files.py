"""The files an experiment leaves for programs and people: ``experiment.json``, ``cells.csv``, ``report.html``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from icefrog.errors import UserError
from icefrog.experiment.aggregate import MEASURES, Document
from icefrog.experiment.page import render_page
from icefrog.experiment.sweep import Planned, Sweep


def write_files(out_dir: Path, document: Document, planned: Sequence[Planned], sweep: Sweep) -> Path:
    """Write all three; return the page's path. Raises :class:`UserError` if the folder cannot be written to."""
    page = out_dir / "report.html"
    try:
        (out_dir / "experiment.json").write_text(document_json(document), encoding="utf-8")
        cells_frame(planned, sweep).write_csv(out_dir / "cells.csv")
        page.write_text(render_page(document), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write to {out_dir}: {error.strerror}", "check the folder's rights and space"
        ) from error
    return page


def document_json(document: Document) -> str:
    """The text of ``experiment.json``: NaN and infinity never get into it."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def cells_frame(planned: Sequence[Planned], sweep: Sweep) -> pl.DataFrame:
    """One row a finished cell: what it was, its key, and its measures."""
    axes = list(dict.fromkeys(axis for one in planned for axis in one.cell.condition.axes))
    rows: list[dict[str, Any]] = []
    for one in planned:
        if (result := sweep.results.get(one.key)) is None:
            continue
        cell, summary = one.cell, result["summary"]
        rows.append(
            {
                "variant": cell.variant.name,
                "policy": cell.variant.policy,
                "options": json.dumps(dict(cell.variant.options), sort_keys=True),
                "trace": cell.trace.label,
                "seed": cell.seed,
                **{axis: str(cell.condition.axes.get(axis, "")) for axis in axes},
                "jobs": summary["jobs"],
                **{key: _float(summary.get(key)) for key in MEASURES},
                "wall_s": _float(summary.get("wall_s")),
                "key": one.key,
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
