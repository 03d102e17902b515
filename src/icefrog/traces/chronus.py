"""CHRONUS jobs (SoCC'21): Philly's jobs with deadlines and rewards, and a model name drawn for each.

All times are minutes (the trace spans 14 days and its longest job 72 hours), relative to the start of the trace.
``expect_time_list`` counts from submission: a ``strict`` job has one deadline, a ``soft`` job is worth less after each of
several, a ``best`` job has none (its entry repeats the submission time). ``user`` holds Philly's virtual clusters.
"""

from __future__ import annotations

import polars as pl

from icefrog.traces.rows import MAX_S, Part, Rows, assemble, parts_of
from icefrog.traces.source import Source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "chronus"
COLUMNS = ("job_id", "user", "num_gpu", "submit_time", "duration", "expect_time_list", "expect_value_list", "job_type")
DESCRIPTION = "CHRONUS: Philly-derived jobs with deadlines (" + ",".join(COLUMNS) + ",...)"
_MINUTE_S = 60.0
_LIST = r"^\d+(\.\d+)?(-\d+(\.\d+)?)*$"


def matches(source: Source) -> bool:
    """Whether the header belongs to this format."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source) -> Trace:
    """Jobs in order of submission; ``submit_s`` counts from the start of the trace, as in the file."""
    return assemble(parts_of(source, _part), f"{source.path.name} ({NAME})")


def _part(table: Table, first_row: int) -> Part:
    rows = Rows(table, first_row)
    gpus = rows.count("num_gpu")
    submit_s, duration_s = rows.number("submit_time") * _MINUTE_S, rows.number("duration") * _MINUTE_S
    rows.drop_impossible(submit_s, gpus, duration_s)
    rows.drop("submitted before the start", submit_s < 0)
    rows.drop("submitted after 317 years", submit_s > MAX_S)
    kind = rows.text("job_type")
    times, worths = _list(rows, "expect_time_list"), _list(rows, "expect_value_list")
    rows.drop("as many rewards as deadlines are needed", times.list.len() != worths.list.len())
    rows.drop("deadline after 317 years", (times.list.max() * _MINUTE_S > MAX_S).fill_null(False))
    due = (kind != "best").fill_null(True) & times.is_not_null()
    first = times.list.first() * _MINUTE_S
    rows.drop("deadline at the submission", due & (first == 0))
    user = rows.text("user")
    return rows.part(
        job_id=rows.text("job_id"),
        submit_s=submit_s,
        num_gpus=gpus,
        duration_s=duration_s,
        user=user,
        vc=user.str.strip_prefix("vc_"),
        kind=kind,
        application=rows.text("model_name"),
        deadline_s=first.set(~due, None),
        rewards=_pairs(times, worths).set(~due, None),
    )


def _list(rows: Rows, column: str) -> pl.Series:
    """``159-189-229`` as lists of numbers."""
    text = rows.text(column)
    good = text.set(~text.str.contains(_LIST).fill_null(True), None)
    rows.unreadable(column, text, good)
    return good.str.split("-").cast(pl.List(pl.Float64))


def _pairs(times: pl.Series, worths: pl.Series) -> pl.Series:
    """``seconds:worth;...`` for each row; what is the same in many rows is written once."""
    frame = pl.DataFrame({"at": times, "worth": worths}).with_columns(
        pl.when(pl.col("at").list.len() == pl.col("worth").list.len()).then("at").otherwise(None).alias("at")
    )
    kinds = frame.unique(maintain_order=True).with_columns(
        pl.struct("at", "worth")
        .map_elements(lambda row: _pair_text(row["at"], row["worth"]), return_dtype=pl.String)
        .alias("text")
    )
    return frame.join(kinds, on=["at", "worth"], how="left", maintain_order="left", nulls_equal=True)["text"]


def _pair_text(times: list[float] | None, worths: list[float] | None) -> str:
    return ";".join(f"{at * _MINUTE_S!r}:{worth!r}" for at, worth in zip(times or (), worths or (), strict=False))
