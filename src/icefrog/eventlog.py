"""The append-only event log: SQLite for a live controller, JSON lines for a simulation; one reader for both."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from icefrog import events as ev
from icefrog.errors import UserError

_SQLITE_MAGIC = b"SQLite format 3\x00"
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY,           -- the order in which records were applied
    kind TEXT NOT NULL,
    job_id TEXT,
    line TEXT NOT NULL                 -- the record, as JSON
);
CREATE INDEX IF NOT EXISTS records_by_job ON records (job_id, kind);
CREATE TABLE IF NOT EXISTS inbox (     -- what users asked for and no controller has taken up yet
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    job_id TEXT NOT NULL,
    line TEXT NOT NULL
);
"""


class SqliteLog:
    """The log of a live controller, and the inbox through which other processes reach it.

    Every ``append`` is one transaction, on disk when it returns. The controller is the only one who appends (a lock on its
    home sees to that); any process may ``post`` into the inbox and read. Records enter the log in the order in which they
    are applied, so replaying it gives the state that the controller had.

    Raises:
        UserError: the file is damaged, cannot be used, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._received: list[tuple[int, ev.Event]] = []
        with self._guard():
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            self._prepare()

    def _prepare(self) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, _SCHEMA_VERSION):
            raise UserError(
                f"the event log {self.path} has format {found}, this IceFrog reads format {_SCHEMA_VERSION}",
                "use the version of IceFrog that wrote it, or another home folder (ICEFROG_HOME)",
            )
        self._db.execute("PRAGMA synchronous = FULL")
        if found == 0:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {_SCHEMA_VERSION};COMMIT;")

    # -- writing ---------------------------------------------------------------------------------------------------------

    def append(self, records: Sequence[ev.AnyRecord]) -> None:
        """Write records in order, all or none; those that :meth:`receive` handed out leave the inbox with it."""
        rows = [(record.kind, getattr(record, "job_id", None), ev.encode(record)) for record in records]
        logged = {id(record) for record in records}
        taken = [(number,) for number, event in self._received if id(event) in logged]
        with self._transaction() as db:
            db.executemany("INSERT INTO records (kind, job_id, line) VALUES (?, ?, ?)", rows)
            db.executemany("DELETE FROM inbox WHERE id = ?", taken)

    def post(self, events: Sequence[ev.JobSubmitted | ev.CancelRequested]) -> None:
        """Put users' wishes into the inbox, all or none; the controller takes them up when it next looks or runs.

        Raises:
            UserError: a job of that name was submitted before, or (to cancel) never was.
        """
        with self._transaction() as db:
            for event in events:
                self._check_name(event)
                db.execute(
                    "INSERT INTO inbox (kind, job_id, line) VALUES (?, ?, ?)",
                    (event.kind, event.job_id, ev.encode(event)),
                )

    def knows(self, job_id: str) -> bool:
        """Whether a job of that name was ever submitted."""
        with self._guard():
            queries = (
                f"SELECT 1 FROM {table} WHERE job_id = ? AND kind = 'job_submitted'" for table in ("records", "inbox")
            )
            return any(self._db.execute(query, (job_id,)).fetchone() for query in queries)

    def _check_name(self, event: ev.JobSubmitted | ev.CancelRequested) -> None:
        known = self.knows(event.job_id)
        if known and isinstance(event, ev.JobSubmitted):
            raise name_taken(event.job_id)
        if not known and isinstance(event, ev.CancelRequested):
            raise UserError(f"there is no job named {event.job_id}", "`icefrog jobs` lists them")

    # -- reading ---------------------------------------------------------------------------------------------------------

    def receive(self) -> list[ev.Event]:
        """What is in the inbox, oldest first. Each stays there until :meth:`append` logs it."""
        with self._guard():
            rows = self._db.execute("SELECT id, line FROM inbox ORDER BY id").fetchall()
        decoded = [(number, self._decode(line, f"inbox entry {number}")) for number, line in rows]
        wishes = ev.JobSubmitted | ev.CancelRequested
        self._received = [(number, event) for number, event in decoded if isinstance(event, wishes)]
        return [event for _, event in self._received]

    def records(self, after_seq: int = 0) -> Iterator[tuple[int, ev.AnyRecord]]:
        """(sequence number, record) from ``after_seq`` on, which is not included."""
        with self._guard():
            rows = self._db.execute("SELECT seq, line FROM records WHERE seq > ? ORDER BY seq", (after_seq,))
            while batch := rows.fetchmany(1000):
                for seq, line in batch:
                    yield seq, self._decode(line, f"record {seq}")

    def job_records(self, job_id: str) -> list[ev.AnyRecord]:
        """All records that speak of one job."""
        with self._guard():
            rows = self._db.execute("SELECT seq, line FROM records WHERE job_id = ? ORDER BY seq", (job_id,)).fetchall()
        return [self._decode(line, f"record {seq}") for seq, line in rows]

    def read_all(self) -> list[ev.AnyRecord]:
        """The whole log."""
        return [record for _, record in self.records()]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------------------------------

    def _decode(self, line: str, where: str) -> ev.AnyRecord:
        try:
            return ev.decode(line)
        except ValidationError as error:
            raise _damaged(self.path, f"{where} cannot be read ({_first(error)})") from error

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise UserError(
                f"the event log {self.path} cannot be used: {error}",
                "check that its folder exists, can be written to, and that the disk is not full",
            ) from error
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


class JsonlLog:
    """The log of a simulation: one record a line, buffered; the same records give the same bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("wb", buffering=1 << 20)
        except OSError as error:
            raise UserError(
                f"cannot write the event log {path}: {error.strerror}",
                "check that the folder exists and can be written to",
            ) from error

    def append(self, records: Sequence[ev.AnyRecord]) -> None:
        """Write records in order; on disk after :meth:`close`."""
        for record in records:
            self._file.write(ev.encode_bytes(record) + b"\n")

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class MemoryLog:
    """A log that is only kept in memory, for tests and what-if runs."""

    def __init__(self) -> None:
        self.records: list[ev.AnyRecord] = []

    def append(self, records: Sequence[ev.AnyRecord]) -> None:
        """Keep records in order."""
        self.records += records


def read_log(path: Path) -> list[ev.AnyRecord]:
    """All records of a log, of either kind.

    Raises:
        UserError: there is no such file, or it is damaged or cut off; the message says where.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise UserError(
            f"cannot read the event log {path}: {error.strerror}",
            "give the events.jsonl of a simulation or the events.db of a controller's home",
        ) from error
    if head == _SQLITE_MAGIC:
        with SqliteLog(path) as log:
            return log.read_all()
    if path.suffix in (".db", ".sqlite"):
        raise _damaged(path, "it is not an SQLite file")
    return _read_jsonl(path)


def _read_jsonl(path: Path) -> list[ev.AnyRecord]:
    records: list[ev.AnyRecord] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                raise UserError(
                    f"{path}:{number}: the last line is cut off",
                    f"the run that wrote it was interrupted: run it again, or delete line {number} to keep the rest",
                )
            try:
                records.append(ev.decode(line))
            except ValidationError as error:
                raise UserError(
                    f"{path}:{number}: not a record of an event log ({_first(error)})",
                    "restore the file from a copy, or run the simulation again",
                ) from error
    return records


def name_taken(job_id: str) -> UserError:
    """Job names are unique in a log, finished jobs included."""
    return UserError(
        f"a job named {job_id} was submitted before",
        "names are unique: give this one another (name: in the job file, or --name); "
        f"`icefrog explain {job_id}` shows the other",
    )


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"the event log {path} is damaged: {what}",
        "restore it from a copy, or move its folder away and start anew (checkpoints are not touched)",
    )


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
