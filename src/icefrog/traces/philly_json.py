"""Philly's official ``cluster_job_log`` (Jeon et al., ATC'19): a JSON list of jobs with their attempts.

Times are naive local times; a missing one is null, ``""`` or ``"None"``. A job's service time is the sum of its
attempts, not last end - first start; its GPUs are those of its largest attempt (with no attempt they are not known). The
list is decoded one job at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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

_ATTEMPTS: dict[str, pl.DataType | type[pl.DataType]] = {
    "damaged": pl.Boolean,
    "attempts": pl.Int64,
    "gpus": pl.Float64,
    "starts": pl.List(pl.String),
    "ends": pl.List(pl.String),
}


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
    frame = pl.DataFrame({name: pl.Series([_text(job.get(name)) for job in jobs], dtype=pl.String) for name in _FIELDS})
    attempts = pl.DataFrame([_attempts(job) for job in jobs], schema=_ATTEMPTS, orient="row")
    table = Table(Block(path, 1, b""), frame.hstack(attempts), tuple(line for line, _ in items))
    rows = Rows(table, first_row)
    rows.drop("not a job", pl.Series([not isinstance(value, dict) for _, value in items], dtype=pl.Boolean))
    rows.drop("not a job", attempts["damaged"])
    submit = rows.time("submitted_time", _FORMAT)
    rows.drop("no attempt: GPU count not known", attempts["attempts"] == 0)
    bounds = [_times(rows, attempts, name) for name in ("starts", "ends")]
    rows.drop("still running at the end of the log", bounds[1].list.last().is_null() & (attempts["attempts"] > 0))
    duration_s = _sum_s(*bounds)
    rows.drop("attempt without a start or end", duration_s.is_null())
    rows.drop_impossible(submit, attempts["gpus"], duration_s)
    first_start = bounds[0].list.first()
    queue_s = (first_start - submit) / 1e6
    return rows.part(
        job_id=rows.text("jobid"),
        submit_us=submit,
        num_gpus=attempts["gpus"],
        duration_s=duration_s,
        user=rows.text("user"),
        vc=rows.text("vc"),
        state=state_of(rows.text("status")),
        queue_s=queue_s.set((queue_s < 0).fill_null(False), None),
    )


def _attempts(job: Mapping[str, Any]) -> tuple[bool, int, float, list[str | None], list[str | None]]:
    """(not what a job has, number, GPUs of the largest, starts, ends)."""
    attempts = job.get("attempts") or []
    if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
        return True, 0, 0.0, [], []
    gpus = [_gpus(one.get("detail") or []) for one in attempts]
    if None in gpus:
        return True, 0, 0.0, [], []
    starts, ends = ([_text(one.get(name)) for one in attempts] for name in ("start_time", "end_time"))
    return False, len(attempts), float(max((n for n in gpus if n is not None), default=0)), starts, ends


def _gpus(detail: Any) -> int | None:
    if not isinstance(detail, list):
        return None
    lists = [node.get("gpus") or [] if isinstance(node, dict) else None for node in detail]
    return sum(map(len, lists)) if all(isinstance(gpus, list) for gpus in lists) else None  # type: ignore[arg-type]


def _times(rows: Rows, attempts: pl.DataFrame, name: str) -> pl.Series:
    """Microseconds of the attempts, as lists; a time that cannot be read drops the job."""
    flat = attempts.select(pl.int_range(pl.len()).alias("job"), name).explode(name, empty_as_null=True)
    text = flat[name].set(flat[name].is_in(list(MISSING)).fill_null(False), None)
    at = text.str.to_datetime(_FORMAT, strict=False, time_unit="us").cast(pl.Int64)
    bad = flat.filter(text.is_not_null() & at.is_null())["job"].unique()
    jobs = pl.int_range(0, attempts.height, eager=True)
    rows.drop("unreadable attempt time", jobs.is_in(bad.to_list()))
    return flat.select("job", at.alias("at")).group_by("job", maintain_order=True).agg("at")["at"]


def _sum_s(starts: pl.Series, ends: pl.Series) -> pl.Series:
    """Seconds over all attempts; null where a start or an end is missing."""
    frame = pl.DataFrame({"start": starts, "end": ends}).with_row_index("job").explode("start", "end")
    length = (pl.col("end") - pl.col("start")) / 1e6
    total = pl.when(length.is_null().any()).then(None).otherwise(length.sum())
    return frame.group_by("job", maintain_order=True).agg(total.alias("s"))["s"]


def _text(value: Any) -> str | None:
    """What a table would hold: a string, null where there is none; lone surrogates cannot stand in one."""
    if value is None or isinstance(value, dict | list):
        return None
    return (value if isinstance(value, str) else repr(value)).encode("utf-8", "replace").decode().strip() or None
