"""Philly's official ``cluster_job_log`` (Jeon et al., ATC'19): a JSON list of jobs with their attempts.

Times are naive local times; a missing one is null, ``""`` or ``"None"``. A job's service time is the sum of its
attempts, not last end - first start; its GPUs are those of its largest attempt (with no attempt they are not known). The
list is decoded one job at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from icefrog.errors import UserError
from icefrog.traces.rows import MISSING, Part, Rows, assemble, state_of
from icefrog.traces.source import Block, Source
from icefrog.traces.table import Table
from icefrog.traces.trace import Trace

NAME = "philly-json"
COLUMNS = ("jobid", "user", "vc", "status", "submitted_time", "attempts")
DESCRIPTION = "Microsoft Philly's cluster_job_log (JSON list: " + ",".join(COLUMNS) + ")"
_FORMAT = "%Y-%m-%d %H:%M:%S"
_FIELDS = ("jobid", "user", "vc", "status", "submitted_time")
_BATCH = 20_000
_HINT = "the file is Philly's cluster_job_log: a JSON list with one object a job"


def matches(source: Source) -> bool:
    """Whether the file is a JSON list."""
    return source.head.lstrip().startswith("[")


def read(source: Source) -> Trace:
    """Jobs that ran to an end, in order of submission; the others are dropped and counted.

    Raises:
        UserError: the file is not a JSON list.
    """
    parts: list[Part] = []
    batch: list[tuple[int, Any]] = []
    for item in _items(source.path, source.text()):
        batch.append(item)
        if len(batch) == _BATCH:
            parts.append(_part(source.path, batch, len(parts) * _BATCH))
            batch = []
    parts.append(_part(source.path, batch, len(parts) * _BATCH))
    return assemble(parts, f"{source.path.name} ({NAME})")


def _items(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each element of the list."""
    decode = json.JSONDecoder().raw_decode
    at, line, counted = _skip(text, text.find("[") + 1), 1, 0
    first = True
    while True:
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            break
        if not first:
            if text[at : at + 1] != ",":
                raise UserError(f"{path}, line {line}: not a JSON list: ',' or ']' is missing", _HINT)
            at = _skip(text, at + 1)
        try:
            value, end = decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "a value that cannot be decoded"
            raise UserError(f"{path}, line {line}: not a JSON list: {reason}", _HINT) from error
        yield line, value
        at, first = _skip(text, end), False
    if text[at + 1 :].strip():
        raise UserError(f"{path}, line {line}: text after the end of the JSON list", _HINT)


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\r", "\n") and at < len(text):
        at += 1
    return at


def _part(path: Path, items: list[tuple[int, Any]], first_row: int) -> Part:
    jobs = [value if isinstance(value, dict) else {} for _, value in items]
    frame = pl.DataFrame([_strings(name, [job.get(name) for job in jobs]) for name in _FIELDS])
    frame = frame.with_columns(pl.lit("element").alias("what"))  # one without any of the fields is no empty line
    table = Table(Block(path, 1, b""), frame, tuple(line for line, _ in items))
    rows = Rows(table, first_row)
    sizes = [_gpus(job.get("attempts") or []) for job in jobs]
    attempts = _attempts(jobs, sizes)
    count = pl.Series([len(size or ()) for size in sizes], dtype=pl.Int64)
    gpus = pl.Series([float(max(size or (0,))) for size in sizes], dtype=pl.Float64)
    whole = [isinstance(value, dict) and size is not None for (_, value), size in zip(items, sizes, strict=True)]
    rows.drop("not a job", ~pl.Series(whole, dtype=pl.Boolean))
    submit = rows.time("submitted_time", _FORMAT)
    rows.drop("no attempt: GPU count not known", count == 0)
    rows.drop("unreadable attempt time", attempts["unreadable"])
    rows.drop("still running at the end of the log", attempts["last_end"].is_null())
    rows.drop("attempt without a start or end", attempts["duration_s"].is_null())
    rows.drop_impossible(submit, gpus, attempts["duration_s"])
    queue_s = (attempts["first_start"] - submit) / 1e6
    return rows.part(
        job_id=rows.text("jobid"),
        submit_us=submit,
        num_gpus=gpus,
        duration_s=attempts["duration_s"],
        user=rows.text("user"),
        vc=rows.text("vc"),
        state=state_of(rows.text("status")),
        queue_s=queue_s.set((queue_s < 0).fill_null(False), None),
    )


def _gpus(attempts: Any) -> list[int] | None:
    """GPUs of each attempt; None for what are no attempts."""
    if not isinstance(attempts, list):
        return None
    sizes = []
    for attempt in attempts:
        detail = (attempt.get("detail") or []) if isinstance(attempt, dict) else None
        if not isinstance(detail, list):
            return None
        lists = [node.get("gpus") or [] if isinstance(node, dict) else None for node in detail]
        if not all(isinstance(gpus, list) for gpus in lists):
            return None
        sizes.append(sum(len(gpus) for gpus in lists if gpus))
    return sizes


def _attempts(jobs: list[dict[str, Any]], sizes: list[list[int] | None]) -> pl.DataFrame:
    """One row a job: first start and last end (microseconds), the sum over attempts (s; null where one has no start or
    end), and whether a time cannot be read.
    """
    flat = [
        (index, attempt.get("start_time"), attempt.get("end_time"))
        for index, (job, size) in enumerate(zip(jobs, sizes, strict=True))
        if size
        for attempt in job["attempts"]
    ]
    index = pl.Series("job", [row[0] for row in flat], dtype=pl.Int64)
    start, start_bad = _times(_strings("start", [row[1] for row in flat]))
    end, end_bad = _times(_strings("end", [row[2] for row in flat]))
    length = (pl.col("end") - pl.col("start")) / 1e6
    each = pl.DataFrame([index, start.alias("start"), end.alias("end"), (start_bad | end_bad).alias("bad")])
    by_job = each.group_by("job", maintain_order=True).agg(
        pl.col("start").first().alias("first_start"),
        pl.col("end").last().alias("last_end"),
        pl.when(length.is_null().any()).then(None).otherwise(length.sum()).alias("duration_s"),
        pl.col("bad").any().alias("unreadable"),
    )
    every = pl.DataFrame({"job": pl.int_range(0, len(jobs), eager=True, dtype=pl.Int64)})
    return every.join(by_job, on="job", how="left", maintain_order="left")


def _times(text: pl.Series) -> tuple[pl.Series, pl.Series]:
    """(microseconds since 1970, whether there is a text that is no time)."""
    text = text.set(text.is_in(list(MISSING)).fill_null(False), None)
    at = text.str.to_datetime(_FORMAT, strict=False, time_unit="us").cast(pl.Int64)
    return at, text.is_not_null() & at.is_null()


def _strings(name: str, values: list[Any]) -> pl.Series:
    """JSON values as a table would hold them; null where there is nothing."""
    texts = [value if isinstance(value, str) else _text(value) for value in values]
    try:
        column = pl.Series(name, texts, dtype=pl.String)
    except (UnicodeError, TypeError, pl.exceptions.PolarsError):  # half of a surrogate pair, which is no character
        whole = [None if text is None else text.encode("utf-8", "replace").decode() for text in texts]
        column = pl.Series(name, whole, dtype=pl.String)
    return column.str.strip_chars().replace("", None)


def _text(value: Any) -> str | None:
    return None if value is None or isinstance(value, dict | list) else repr(value)
