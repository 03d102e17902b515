"""No file, however damaged, gives anything but jobs or one error for the user; and every row is accounted for."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import LOGS, PAI_HEADERS, PAI_JOB, PAI_TASK

from icefrog.errors import UserError
from icefrog.spec import JOB_ID_PATTERN
from icefrog.traces import Trace, describe, read_trace, to_specs, write_text
from icefrog.workloads import Catalogue, load_catalogue

QUICK, SLOW = 300, 10_000
JUNK = [
    *[
        b"",
        b" ",
        b"\n",
        b"\r",
        b"\r\n",
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b'"',
        b'""',
        b"'",
        b",",
        b",,,,,,,,",
        b"|",
    ],
    *[b"nan", b"inf", b"-1", b"1e400", b"-0", b"0", b"9" * 30, b"1e9", b"2.5", b"0x10", b"1_000", b"None", b"Unknown"],
    *[b"9999-12-31 23:59:59", b"0000-00-00 00:00:00", b"2020-02-30 00:00:00", b"1900-01-01T00:00:00", b"+25:00"],
    *[
        b"[",
        b"]",
        b"{",
        b"}",
        b"[]",
        b"{}",
        b"null",
        b'"\\ud800"',
        b":",
        b"-",
        b"+",
        b"=",
        b"gres/gpu=",
        b"gres/gpu=1e9",
    ],
    *["é".encode(), "\u2028".encode(), b"%s%n", b"<script>", b"../../x", b"\x1b[31m", b"(((", b"\\"],
]


def mutate(raw: bytes, rng: np.random.Generator) -> bytes:
    """One to four edits."""
    for _ in range(int(rng.integers(1, 5))):
        raw = edit(raw, JUNK[int(rng.integers(len(JUNK)))], rng)
    return raw


def edit(raw: bytes, junk: bytes, rng: np.random.Generator) -> bytes:
    """Junk put in or over something, a part cut out or doubled, a line or a cell changed, the end lost."""
    a, b = sorted(int(x) for x in rng.integers(0, len(raw) + 1, size=2))
    b = min(b, a + int(rng.integers(0, 40)))
    lines = raw.split(b"\n")
    line = int(rng.integers(len(lines)))
    match int(rng.integers(12)):
        case 0:
            return raw[:a] + junk + raw[b:]
        case 1:
            return raw[:a] + junk + raw[a:]
        case 2:
            return raw[:a] + raw[b:]
        case 3:
            return raw[:b] + raw[a:]
        case 4:
            return raw[:a] + bytes(rng.integers(0, 256, size=3, dtype=np.uint8)) + raw[a:]
        case 5:
            return b"\n".join(lines[:line] + lines[line + 1 :])
        case 6:
            return b"\n".join([*lines[: line + 1], *lines[line:]])
        case 7:
            return raw[:a]
        case 8:
            return _cell(lines, 0, junk, rng)
        case _:
            return _cell(lines, line, junk, rng)


def _cell(lines: list[bytes], line: int, junk: bytes, rng: np.random.Generator) -> bytes:
    mark = b"|" if b"|" in lines[line] else b","
    cells = lines[line].split(mark)
    cells[int(rng.integers(len(cells)))] = junk
    return b"\n".join([*lines[:line], mark.join(cells), *lines[line + 1 :]])


def write_mutated(folder: Path, number: int) -> Path:
    """File ``number`` of the fuzz, in a fresh folder: the formats in turn, PAI's folder among them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rng = np.random.default_rng([number, 20])
    formats = [*LOGS.values(), ("", "")]
    name, text = formats[number % len(formats)]
    files = {name: text} if name else {"pai_job_table.csv": PAI_JOB, "pai_task_table.csv": PAI_TASK, **PAI_HEADERS}
    damaged = list(files)[int(rng.integers(len(files)))]
    for file, content in files.items():
        raw = mutate(content.encode(), rng) if file == damaged else content.encode()
        if rng.random() < 0.15 and not file.endswith(".header"):
            raw = gzip.compress(raw, mtime=0)
            raw = mutate(raw, rng) if rng.random() < 0.5 else raw
        (folder / file).write_bytes(raw)
    return folder / name if name else folder


def check(path: Path, number: int, *, deep: bool) -> bool:
    """Whether there were jobs; fails if there was anything but jobs or an error for the user."""
    trace = outcome(path)
    if isinstance(trace, UserError):
        assert trace.message, number
        assert trace.hint, number
        assert "\n" not in trace.message, number
        return False
    assert_sound(trace)
    if deep:
        json.dumps(describe(trace), allow_nan=False)
        own = path.parent / "own.csv" if path.is_file() else path.with_suffix(".own")
        own.write_text(write_text(trace), encoding="utf-8")
        again = outcome(own, "icefrog-csv")
        assert isinstance(again, Trace), (number, again)
        assert again.jobs == trace.jobs, number
        assert len(to_specs(trace, catalogue()).specs) == len(trace.jobs)
    return True


@cache
def catalogue() -> Catalogue:
    return load_catalogue()


def outcome(path: Path, format: str | None = None) -> Trace | UserError:
    try:
        return read_trace(path, format)
    except UserError as error:
        return error


def assert_sound(trace: Trace) -> None:
    assert trace.report.kept == len(trace.jobs) > 0
    assert trace.report.read == trace.report.kept + sum(trace.report.dropped.values())
    assert all(count > 0 for count in trace.report.dropped.values())
    assert set(trace.report.examples) <= set(trace.report.dropped)
    assert len({job.job_id for job in trace.jobs}) == len(trace.jobs)
    assert [job.submit_s for job in trace.jobs] == sorted(job.submit_s for job in trace.jobs)
    for job in trace.jobs:
        assert re.fullmatch(JOB_ID_PATTERN, job.job_id)
        assert type(job.num_gpus) is int
        assert 1 <= job.num_gpus <= 1_000_000
        assert 0 < job.duration_s < float("inf")
        assert 0 <= job.submit_s < float("inf")
        assert job.gpu_demand is None or 0 < job.gpu_demand <= job.num_gpus


@pytest.mark.parametrize("part", range(4))
def test_damaged_files_of_every_format(tmp_path: Path, part: int) -> None:
    read = sum(check(write_mutated(tmp_path / "x", n), n, deep=True) for n in range(part, QUICK, 4))
    assert QUICK / 4 * 0.2 < read < QUICK / 4 * 0.95  # the damage is neither hopeless nor harmless


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_damaged_files(tmp_path: Path, part: int) -> None:
    read = sum(check(write_mutated(tmp_path / "x", n), n, deep=n % 5 == 0) for n in range(QUICK + part, SLOW, 4))
    assert read > 500


CELL = st.one_of(
    st.sampled_from(["", "0", "1", "2.5", "-3", "nan", "x", "None", "2020-01-01 00:00:00", "2020-01-02 10:00:00", "a"]),
    st.text(st.characters(codec="ascii", exclude_characters='",|\r\n\x00'), max_size=4),
)


@given(rows=st.lists(st.lists(CELL, min_size=8, max_size=8), min_size=1, max_size=12), blank=st.integers(0, 3))
@settings(max_examples=60)
def test_every_line_is_either_kept_or_dropped_for_a_reason(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], blank: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "log.csv"
    good = "g,u,v,1,COMPLETED,2020-01-01 00:00:00,2020-01-01 00:00:00,2020-01-01 00:00:05"
    lines = [",".join(cells) for cells in rows]
    lines[0:0] = [""] * blank + [good]
    header = "job_id,user,vc,gpu_num,state,submit_time,start_time,end_time"
    path.write_text("\n".join([header, *lines]) + "\n")
    report = read_trace(path).report
    assert report.read == len(lines)
    assert report.read == report.kept + sum(report.dropped.values())
    assert report.dropped.get("empty line", 0) >= blank
