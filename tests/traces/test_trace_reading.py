"""Reading job logs: what is kept, what is dropped and said so, and errors that name the place."""

from __future__ import annotations

import gzip
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog.errors import UserError
from icefrog.traces import ReadReport, Trace, TraceJob, read_trace, trace_formats, write_text

PHILLY = """timestamp,duration,num_gpus,gpu_time,cluster
2017-10-09 07:01:55,66.0,1,66.0,11cb48
2017-10-03 03:00:00,120,4,480,6214e9
2017-10-03 03:00:00,3,2,6,

2017-10-03 03:00:05,,1,,a
2017-10-03 03:00:06,10,0,0,a
,10,1,10,a
2017-10-03 03:00:07,0,1,0,a
"""
OWN = "job_id,submit_s,num_gpus,duration_s,user,vc\na,0,1,60,ann,v1\nb,5.5,4,7200.25,,\n"

FORMATS = ["icefrog-csv", "philly-csv", "philly-json", "helios", "pai", "acme", "chronus", "pollux", "slurm"]


def write(tmp_path: Path, text: str | bytes, name: str = "jobs.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_philly_rows_are_kept_in_order_of_submission_and_the_rest_is_counted(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, PHILLY))
    assert [(j.submit_s, j.num_gpus, j.duration_s, j.vc) for j in trace.jobs] == [
        (0.0, 4, 120.0, "6214e9"),
        (0.0, 2, 3.0, ""),
        (532915.0, 1, 66.0, "11cb48"),
    ]
    assert trace.start == datetime(2017, 10, 3, 3)
    assert trace.report == ReadReport(
        8, 3, {"empty line": 1, "no submission time": 1, "0 GPUs": 1, "no duration": 1, "0 s long": 1}
    )
    assert [j.job_id for j in trace.jobs] == ["philly-2", "philly-3", "philly-1"]


def test_a_row_of_a_public_log_that_cannot_be_read_is_counted_and_the_first_is_shown(tmp_path: Path) -> None:
    odd = "2017-13-09 07:01:55,66.0,1,66.0,x\n2017-12-09 07:01:55,-66.0,1,66.0,x\n2017-12-09 07:01:55,6,1.5,66.0,x\n"
    report = read_trace(write(tmp_path, PHILLY + odd + "2017-12-09 07:01:55,soon,1,66.0,x\n")).report
    assert (report.read, report.kept) == (12, 3)
    assert report.dropped["unreadable timestamp"] == report.dropped["unreadable duration"] == 1
    assert report.dropped["negative duration"] == report.dropped["unreadable num_gpus"] == 1
    assert "1 (unreadable timestamp, first: line 10, '2017-13-09 07:01:55')" in report.text()
    assert "1 (unreadable duration, first: line 13, 'soon')" in report.text()


def test_gzip_is_known_by_content_not_by_name(tmp_path: Path) -> None:
    plain, packed = write(tmp_path, PHILLY, "a.csv"), write(tmp_path, gzip.compress(PHILLY.encode()), "b.csv")
    assert read_trace(plain).jobs == read_trace(packed).jobs


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_own_format(tmp_path: Path, ending: str) -> None:
    trace = read_trace(write(tmp_path, "\ufeff" + OWN.replace("\n", ending)))
    assert trace.jobs == (TraceJob("a", 0.0, 1, 60.0, "ann", "v1"), TraceJob("b", 5.5, 4, 7200.25))
    assert trace.start is None


def test_own_format_with_absolute_times(tmp_path: Path) -> None:
    text = "job_id,submit_time,num_gpus,duration_s\nb,2024-01-01 00:01:00,1,5\na,2024-01-01T00:00:30.5,1,5\n"
    trace = read_trace(write(tmp_path, text))
    assert [(j.job_id, j.submit_s) for j in trace.jobs] == [("a", 0.0), ("b", 29.5)]
    assert trace.start == datetime(2024, 1, 1, 0, 0, 30, 500000)


@pytest.mark.parametrize(
    ("text", "where", "given", "allowed"),
    [
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,5\nb,x,1,5\n", "line 3, column 'submit_s'", "'x'", ">= 0"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,0,5\n", "line 2, column 'num_gpus'", "'0'", ">= 1"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1.5,5\n", "line 2, column 'num_gpus'", "'1.5'", "whole"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,-3\n", "line 2, column 'duration_s'", "'-3'", "> 0"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,nan\n", "line 2, column 'duration_s'", "'nan'", "> 0"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,inf\n", "line 2, column 'duration_s'", "'inf'", "> 0"),
        (
            "job_id,submit_s,num_gpus,duration_s\na,0,1,1e308\n",
            "line 2, column 'duration_s'",
            "'1e308'",
            "at most 1e+10",
        ),
        ("job_id,submit_s,num_gpus,duration_s\na,1e11,1,5\n", "line 2, column 'submit_s'", "'1e11'", "at most 1e+10"),
        (
            "job_id,submit_s,num_gpus,duration_s,deadline_s\na,0,1,5,1e300\n",
            "line 2, column 'deadline_s'",
            "'1e300'",
            "at most 1e+10",
        ),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,\n", "line 2, column 'duration_s'", "empty", "> 0"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,5\na,1,1,5\n", "line 3, column 'job_id'", "'a'", "once"),
        ("job_id,submit_s,num_gpus,duration_s\n../x,0,1,5\n", "line 2, column 'job_id'", "'../x'", "letter"),
        ("job_id,submit_s,num_gpus,duration_s\na,0,1,5,6,7\n", "line 2", "6 cells", "4"),
        ('job_id,submit_s,num_gpus,duration_s\n"a\nb",0,1,5\nc,?,1,5\n', "line 2, column 'job_id'", "b'", "letter"),
        (
            'job_id,submit_s,num_gpus,duration_s,user\na,0,1,5,"x\ny"\nc,?,1,5,\n',
            "line 4, column 'submit_s'",
            "'?'",
            "",
        ),
        ("\n\njob_id,submit_s,num_gpus,duration_s\n\na,0,1,-5\n", "line 5, column 'duration_s'", "'-5'", ""),
        ("job_id,submit_s,num_gpus,duration_s,deadline_s\na,0,1,5,0\n", "line 2, column 'deadline_s'", "'0'", "> 0"),
        (
            "job_id,submit_s,num_gpus,duration_s,batch_size\na,0,1,5,1.5\n",
            "line 2, column 'batch_size'",
            "'1.5'",
            ">= 1",
        ),
        ("job_id,submit_s,num_gpus,duration_s,rewards\na,0,1,5,5:\n", "line 2, column 'rewards'", "'5:'", "worth"),
        ("job_id,,submit_s,num_gpus,,duration_s\na,,0,1,,5\n", "line 1", "the column ''", "twice"),
        ("job_id,submit_time,num_gpus,duration_s\na,yesterday,1,5\n", "column 'submit_time'", "'yesterday'", "YYYY"),
        ("a,b,c\n1,2,3\n", "line 1", "'a,b,c'", "icefrog-csv, philly-csv"),
        ("", "", "empty", ""),
        (" \n\n", "", "empty", ""),
        ("job_id,submit_s,num_gpus,duration_s\n", "", "no jobs", ""),
    ],
)
def test_a_bad_file_gets_one_error_that_names_place_value_and_allowed(
    tmp_path: Path, text: str, where: str, given: str, allowed: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    for part in (str(path), where, given, allowed):
        assert part in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_format_can_be_named_and_must_fit(tmp_path: Path) -> None:
    path = write(tmp_path, OWN)
    assert read_trace(path, "icefrog-csv").jobs == read_trace(path).jobs
    with pytest.raises(UserError, match="is not philly-csv"):
        read_trace(path, "philly-csv")
    with pytest.raises(UserError, match="unknown trace format 'x', allowed: icefrog-csv, philly-csv"):
        read_trace(path, "x")
    assert [f.name for f in trace_formats()] == FORMATS


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(UserError, match="cannot read"):
            read_trace(path)


JUNK = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"nan", b"-1", b'"', b'""', b",,,,", b"\x00", b"\r", b"\n", b"1e400", b"inf", b"\xff\xfe", b"'"]),
)


@given(packed=st.booleans(), philly=st.booleans(), data=st.data())
def test_no_mutation_of_a_file_gives_anything_but_jobs_or_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, packed: bool, philly: bool, data: st.DataObject
) -> None:
    raw = (PHILLY if philly else OWN).encode()
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(raw)))
        raw = raw[:at] + data.draw(JUNK) + raw[at + data.draw(st.integers(0, 12)) :]
    if packed:
        raw = gzip.compress(raw, mtime=0)
        raw = raw[: data.draw(st.integers(2, len(raw)))] if data.draw(st.booleans()) else raw
    path = tmp_path_factory.mktemp("fuzz") / "jobs.csv"
    path.write_bytes(raw)
    trace = outcome(path)
    if isinstance(trace, UserError):
        assert str(path) in trace.message
        assert "\n" not in trace.message
    else:
        assert trace.report.kept == len(trace.jobs) > 0
        assert all(j.num_gpus >= 1 and 0 < j.duration_s < float("inf") and j.submit_s >= 0 for j in trace.jobs)
        assert [j.submit_s for j in trace.jobs] == sorted(j.submit_s for j in trace.jobs)


def outcome(path: Path) -> Trace | UserError:
    try:
        return read_trace(path)
    except UserError as error:
        return error


LABEL = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), max_size=8)
JOBS = st.lists(
    st.tuples(
        st.floats(0, 1e8, allow_nan=False), st.integers(1, 512), st.floats(1e-3, 1e8, allow_nan=False), LABEL, LABEL
    ),
    min_size=1,
    max_size=6,
)


@given(rows=JOBS, dated=st.booleans())
def test_writing_and_reading_gives_the_same_jobs(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, float, str, str]], dated: bool
) -> None:
    jobs = tuple(TraceJob(f"j{i}", *row) for i, row in enumerate(sorted(rows, key=lambda row: row[0])))
    start = datetime(2020, 2, 29, 12) if dated else None
    trace = Trace(jobs, ReadReport(len(jobs), len(jobs)), "test", start)
    path = tmp_path_factory.mktemp("own") / "jobs.csv"
    path.write_text(write_text(trace), encoding="utf-8")
    again = read_trace(path)
    assert again.jobs == trace.jobs
    if start is not None and again.start is not None:
        assert abs((again.start - start).total_seconds()) < 1e-5


@pytest.mark.data
def test_the_philly_log(data_dir: Path) -> None:
    trace = read_trace(data_dir / "philly/jobs.csv.gz")
    assert trace.report == ReadReport(82248, 82247, {"empty line": 1})
    assert trace.start == datetime(2017, 9, 4, 10, 30, 41)
    assert sum(job.num_gpus == 1 for job in trace.jobs) == 76627
    assert len({job.job_id for job in trace.jobs}) == len(trace.jobs)
