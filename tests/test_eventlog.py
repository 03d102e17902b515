"""The event log: what goes in comes out, in order, once; and damage is told, not shown as a traceback."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.eventlog import JsonlLog, SqliteLog, read_log
from icefrog.testing import builders as b

RECORDS: list[ev.AnyRecord] = [
    ev.JobSubmitted(time_s=0.0, job=b.job_spec("a")),
    ev.Tick(time_s=0.5),
    ev.PlanDecided(time_s=0.5, policy="p", gpus_granted=1, waiting=0, reasons={"a": "its turn"}, memory={"x": [1]}),
    ev.Start(time_s=0.5, job_id="a", attempt=1, gpus=b.gpus(1), grant=b.grant(1), reason="its turn"),
    ev.JobStarted(time_s=1.0, job_id="a", attempt=1, profile=b.profile()),
    ev.ProgressReported(
        time_s=2.0, job_id="a", attempt=1, epoch=1, effective_samples=0.1 + 0.2, variance=(1e-300, 2.0)
    ),
    ev.JobFinished(time_s=3.0, job_id="a", attempt=1, outcome="completed", metric=0.97),
]


def submitted(name: str = "a") -> ev.JobSubmitted:
    return ev.JobSubmitted(time_s=0.0, job=b.job_spec(name))


@pytest.fixture
def log(tmp_path: Path) -> SqliteLog:
    return SqliteLog(tmp_path / "events.db")


def test_both_kinds_give_back_what_was_put_in(tmp_path: Path, log: SqliteLog) -> None:
    log.append(RECORDS[:3])
    log.append(RECORDS[3:])
    with JsonlLog(tmp_path / "events.jsonl") as lines:
        lines.append(RECORDS)
    assert log.read_all() == RECORDS
    assert read_log(tmp_path / "events.db") == RECORDS
    assert read_log(tmp_path / "events.jsonl") == RECORDS
    assert log.job_records("a") == [record for record in RECORDS if record.kind not in ("tick", "plan_decided")]
    assert [seq for seq, _ in log.records(after_seq=5)] == [6, 7]


@given(st.lists(st.sampled_from(RECORDS), max_size=20), st.integers(1, 5))
def test_the_same_records_are_the_same_bytes_however_they_are_batched(
    tmp_path_factory: pytest.TempPathFactory, records: list[ev.AnyRecord], size: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    for name, step in (("one", max(len(records), 1)), ("two", size)):
        with JsonlLog(folder / name) as log:
            for start in range(0, len(records), step):
                log.append(records[start : start + step])
    assert (folder / "one").read_bytes() == (folder / "two").read_bytes()
    assert read_log(folder / "one") == records


def test_what_comes_in_stays_in_the_inbox_until_it_is_logged(tmp_path: Path, log: SqliteLog) -> None:
    user = SqliteLog(tmp_path / "events.db")
    user.post([submitted("a"), submitted("b")])
    received = log.receive()
    assert [event.kind for event in received] == ["job_submitted"] * 2
    assert log.receive() == received  # the controller died in between: nothing is lost
    log.append([ev.Tick(time_s=0.5)])
    assert log.receive() == received  # something else was logged
    received = log.receive()
    user.post([submitted("c")])  # comes too late for this round
    tick = ev.Tick(time_s=1.0)
    log.append([*received, tick])
    assert log.read_all()[1:] == [*received, tick]
    assert [event.job_id for event in log.receive() if isinstance(event, ev.JobSubmitted)] == ["c"]


def test_an_append_that_fails_changes_nothing(tmp_path: Path, log: SqliteLog) -> None:
    log.post([submitted("a")])
    received = log.receive()
    with pytest.raises(AttributeError):
        log.append([*received, "no record"])  # type: ignore[list-item]
    blocker = sqlite3.connect(tmp_path / "events.db", isolation_level=None)
    blocker.execute("CREATE TRIGGER full BEFORE DELETE ON inbox BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    with pytest.raises(UserError, match="disk full"):
        log.append(received)
    assert log.read_all() == []
    blocker.execute("DROP TRIGGER full")
    log.append(received)
    assert (log.read_all(), log.receive()) == (received, [])


def test_a_name_is_taken_once_and_only_a_known_one_is_cancelled(log: SqliteLog) -> None:
    log.post([submitted("a")])
    with pytest.raises(UserError, match="a job named a was submitted before"):
        log.post([submitted("b"), submitted("a")])
    assert not log.knows("b")  # all or none
    log.append(log.receive())
    with pytest.raises(UserError, match="submitted before"):
        log.post([submitted("a")])
    with pytest.raises(UserError, match="no job named z"):
        log.post([ev.CancelRequested(time_s=0.0, job_id="z")])


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "garbage":
            path.write_bytes(b"garbage" * 1000)
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "holes":
            path.write_bytes(data[:4096] + bytes(len(data) - 4096))
        case "empty line":
            sqlite3.connect(path, isolation_level=None).execute("UPDATE records SET line = '{}' WHERE seq = 3")
        case "other version":
            sqlite3.connect(path, isolation_level=None).execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("how", ["garbage", "cut", "holes", "empty line", "other version"])
def test_a_damaged_database_is_an_error_with_a_hint(tmp_path: Path, log: SqliteLog, how: str) -> None:
    for _ in range(200):
        log.append(RECORDS)
    log.close()
    damage(tmp_path / "events.db", how)
    with pytest.raises(UserError) as caught:
        SqliteLog(tmp_path / "events.db").read_all()
    assert "events.db" in caught.value.message
    assert caught.value.hint
    with pytest.raises(UserError):
        read_log(tmp_path / "events.db")


def test_a_damaged_file_of_lines_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonlLog(path) as log:
        log.append(RECORDS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(UserError, match=r"events\.jsonl:7: the last line is cut off"):
        read_log(path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"kind": "tick"}\n' + lines[1])
    with pytest.raises(UserError, match=r"events\.jsonl:2: .*time_s: Field required"):
        read_log(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"events\.jsonl:1"):
        read_log(path)


def test_a_log_that_is_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_log(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match="cannot write"):
        JsonlLog(tmp_path / "no" / "folder.jsonl")
    with pytest.raises(UserError, match="cannot be used"):
        SqliteLog(tmp_path / "no" / "folder.db")
