"""The JSON contract of ``icefrog solve``, inbound: every malformed input becomes one UserError that names its key."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from icefrog.errors import UserError
from icefrog.policies.iceshare.problem import SHARED_GPUS, ExclusiveOption, Job, Problem, SharedOption

_MAX_COUNT = 10_000_000
_TIME_RANGE_S = (1e-6, 1e15)
_WEIGHT_RANGE = (1e-9, 1e9)
_MAX_AMOUNT = 1e20
_TOP = {"gpus", "gpu_mem_bytes", "jobs", "literal_weights"}
_JOB = {"id", "weight", "current", "partner", "restart_s", "options", "share", "must_run"}


def parse_problem(data: Any) -> Problem:
    """The problem in ``data``, a decoded JSON object of the form

        {"gpus": 4, "gpu_mem_bytes": 8e10, "jobs": [{"id": "A", "weight": 1.0, "current": 2, "restart_s": 60,
          "options": [{"gpus": 1, "tta_s": 6000}], "share": [{"tta_s": 6600, "mem_bytes": 3e10, "util_pct": 42}],
          "must_run": false}]}

    Optional: ``weight``, ``current`` (null: waits), ``restart_s``, ``share``, ``must_run``; ``partner`` (id of the job it
    shares with now, a preference among equal optima); ``gpu_mem_bytes`` where no job shares; ``literal_weights``.

    Raises:
        UserError: anything else, with the path of the key, the value given and what is allowed.
    """
    top = _object(data, "problem", _TOP, {"gpus", "jobs"})
    num_gpus = _count(top["gpus"], "gpus")
    jobs = _array(top["jobs"], "jobs")
    parsed = [_job(job, f"jobs[{k}]") for k, job in enumerate(jobs)]
    _check_ids(parsed)
    shares = any(job.shared for job in parsed)
    if "gpu_mem_bytes" in top:
        mem_bytes = _number(top["gpu_mem_bytes"], "gpu_mem_bytes", 1e-6, _MAX_AMOUNT, "bytes of one GPU")
    elif shares:
        raise UserError("gpu_mem_bytes is missing", "give the memory of one GPU in bytes; pairs are checked against it")
    else:
        mem_bytes = math.inf
    literal = _boolean(top.get("literal_weights", False), "literal_weights")
    return Problem.from_jobs(num_gpus, parsed, mem_bytes, literal_weights=literal)


def _job(data: Any, path: str) -> Job:
    raw = _object(data, path, _JOB, {"id", "options"})
    job_id = _text(raw["id"], f"{path}.id")
    options = _array(raw["options"], f"{path}.options")
    if not options:
        raise UserError(f"{path}.options is empty (job {job_id!r})", "give at least one {gpus, tta_s}")
    exclusive = tuple(_exclusive(o, f"{path}.options[{i}]") for i, o in enumerate(options))
    counts = [o.gpus for o in exclusive]
    for i, count in enumerate(counts):
        if count in counts[:i]:
            raise UserError(
                f"{path}.options[{i}].gpus: {count} is given twice (job {job_id!r})", "give each GPU count once"
            )
    share = raw.get("share")
    shared = tuple(
        _shared(o, f"{path}.share[{i}]")
        for i, o in enumerate(_array(share, f"{path}.share") if share is not None else [])
    )
    current = _current(raw.get("current"), f"{path}.current", counts, bool(shared))
    partner = raw.get("partner")
    if partner is not None:
        _text(partner, f"{path}.partner")
        if current != SHARED_GPUS:
            raise UserError(
                f"{path}.partner: {partner!r}, but the job does not share now",
                "give partner only with current: 0.5",
            )
    return Job(
        id=job_id,
        options=exclusive,
        shared=shared,
        weight=_number(raw.get("weight", 1.0), f"{path}.weight", *_WEIGHT_RANGE, "a weight"),
        current=current,
        partner=partner,
        restart_s=_number(raw.get("restart_s", 0.0), f"{path}.restart_s", 0.0, _TIME_RANGE_S[1], "seconds"),
        must_run=_boolean(raw.get("must_run", False), f"{path}.must_run"),
    )


def _exclusive(data: Any, path: str) -> ExclusiveOption:
    raw = _object(data, path, {"gpus", "tta_s"}, {"gpus", "tta_s"})
    return ExclusiveOption(_count(raw["gpus"], f"{path}.gpus"), _time(raw["tta_s"], f"{path}.tta_s"))


def _shared(data: Any, path: str) -> SharedOption:
    keys = {"tta_s", "mem_bytes", "util_pct"}
    raw = _object(data, path, keys, keys)
    return SharedOption(
        tta_s=_time(raw["tta_s"], f"{path}.tta_s"),
        mem_bytes=_number(raw["mem_bytes"], f"{path}.mem_bytes", 0.0, _MAX_AMOUNT, "bytes"),
        util_pct=_number(raw["util_pct"], f"{path}.util_pct", 0.0, 1e6, "per cent"),
    )


def _current(value: Any, path: str, counts: list[int], shares: bool) -> float | None:
    if value is None:
        return None
    allowed: list[float] = [*([SHARED_GPUS] if shares else []), *counts]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value not in allowed:
        raise UserError(
            f"{path}: {_show(value)} is not one of the job's options",
            f"give one of {allowed}, or leave it out for a waiting job",
        )
    return float(value)


def _check_ids(jobs: list[Job]) -> None:
    first: dict[str, int] = {}
    for k, job in enumerate(jobs):
        if job.id in first:
            raise UserError(
                f"jobs[{k}].id: {_show(job.id)} is also the id of jobs[{first[job.id]}]", "give every job its own id"
            )
        first[job.id] = k
    for k, job in enumerate(jobs):
        if job.partner is None:
            continue
        other = jobs[first[job.partner]] if job.partner in first else None
        if other is None or other is job or other.partner not in (None, job.id):
            raise UserError(
                f"jobs[{k}].partner: {_show(job.partner)} is no other job that shares with it",
                "give the id of the job on the same GPU, or leave it out",
            )


def _object(value: Any, path: str, known: set[str], required: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected an object, got {_show(value)}", f"give an object with {_names(known)}")
    unknown = [key for key in value if key not in known]
    if unknown:
        raise UserError(f"{path}: unknown key {_show(unknown[0])}", f"known keys: {_names(known)}")
    missing = sorted(required - value.keys())
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing", f"required keys: {_names(required)}")
    return value


def _array(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{path}: expected a list, got {_show(value)}", "write it as [...]")
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{path}: expected a non-empty string, got {_show(value)}", "give a name in quotes")
    return value


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{path}: expected true or false, got {_show(value)}", "write true or false, without quotes")
    return value


def _count(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_COUNT:
        raise UserError(
            f"{path}: expected a whole number of GPUs, got {_show(value)}", f"give an integer from 1 to {_MAX_COUNT}"
        )
    return value


def _time(value: Any, path: str) -> float:
    return _number(value, path, *_TIME_RANGE_S, "seconds")


def _number(value: Any, path: str, least: float, most: float, what: str) -> float:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    if not fine:
        raise UserError(
            f"{path}: expected {what}, got {_show(value)}",
            f"give a finite number {'>= 0' if least == 0 else '> 0'} (from {least:g} to {most:g})",
        )
    return float(value)


def _show(value: Any) -> str:
    """The value as a user may recognise it, in one line and never long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**30:
        return "a huge integer"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers beyond the digit limit, or nesting without end, inside
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _names(keys: Collection[str]) -> str:
    return ", ".join(sorted(keys))
