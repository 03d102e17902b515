"""The folder of a live controller: where its log, its lock, its settings and its jobs are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from icefrog import events as ev
from icefrog.driver import RealClock
from icefrog.errors import UserError
from icefrog.eventlog import SqliteLog
from icefrog.executors.local import files
from icefrog.executors.local.supervisor import start_ticks
from icefrog.spec import ClusterSpec
from icefrog.state import ClusterState, IllegalTransitionError

ENV_HOME = "ICEFROG_HOME"
_LOCK_WAIT_S = 3.0


class Settings(BaseModel):
    """``home/cluster.json``: written at the first ``up``, changed by the options of later ones."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: int = Field(default=1, alias="schema", ge=1, le=1)
    cluster: ClusterSpec
    policy: str = "icefrog"
    options: dict[str, Any] = Field(default_factory=dict)
    round_s: float = Field(default=15.0, gt=0, description="seconds between scheduling rounds")
    restart_s: float = Field(default=10.0, ge=0, description="cost of a restart until one was measured, s")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Home:
    """The paths, and what guards them. Nothing is created before it is needed."""

    path: Path

    @classmethod
    def find(cls, path: str | Path | None = None, env: Mapping[str, str] | None = None) -> Home:
        """``path``, else $ICEFROG_HOME, else ``./.icefrog``. Raises :class:`UserError` where it is no folder."""
        chosen = path or (os.environ if env is None else env).get(ENV_HOME) or ".icefrog"
        home = Path(chosen).absolute()
        if "\0" in str(home) or (os.path.lexists(home) and not home.is_dir()):
            raise UserError(
                f"{str(home)!r} is not a folder", "give a folder, or a path that does not exist yet: --home"
            )
        return cls(home)

    @property
    def db(self) -> Path:
        """The event log."""
        return self.path / "events.db"

    @property
    def jobs_dir(self) -> Path:
        """A folder for each job."""
        return self.path / "jobs"

    @property
    def settings_path(self) -> Path:
        """Cluster, policy, rounds."""
        return self.path / "cluster.json"

    @property
    def lock_path(self) -> Path:
        """Held by the running controller; its process number is inside."""
        return self.path / "controller.lock"

    def open_log(self, *, create: bool = False) -> SqliteLog:
        """The event log.

        Raises:
            UserError: there is none (and ``create`` is false), it is damaged, or it is gone and the jobs are not.
        """
        if not self.db.exists():
            if not create:
                raise UserError(
                    f"nothing was ever submitted to or run in {self.path}",
                    "`icefrog up` starts a controller there; another home: --home or ICEFROG_HOME",
                )
            self._create()
        return SqliteLog(self.db)

    def _create(self) -> None:
        if self.jobs_dir.is_dir() and any(self.jobs_dir.iterdir()):
            raise UserError(
                f"{self.jobs_dir} holds jobs, yet the event log {self.db.name} beside it is gone",
                "restore the log, or move the folder away to start anew",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot create the home folder {self.path}: {error.strerror}", "choose another: --home or ICEFROG_HOME"
            ) from error

    # -- settings --------------------------------------------------------------------------------------------------------

    def settings(self) -> Settings | None:
        """The settings; None before the first ``up``. Raises :class:`UserError` on a file that makes no sense."""
        try:
            found = files.read_json(self.settings_path)
            return None if found is None else Settings.model_validate(found)
        except json.JSONDecodeError as error:
            raise self._bad_settings(str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._bad_settings(f"{where}: {first['msg']} (given: {first['input']!r})") from error

    def _bad_settings(self, what: str) -> UserError:
        return UserError(
            f"{self.settings_path}: {what}", "correct it, or delete it: the next `icefrog up` writes it anew"
        )

    def save_settings(self, settings: Settings) -> None:
        """Replace the settings."""
        files.write_json(self.settings_path, settings.model_dump_json(by_alias=True, indent=2) + "\n")

    # -- one controller a home -------------------------------------------------------------------------------------------

    def controller_pid(self) -> int | None:
        """The process number of the running controller; None if there is none."""
        return self._written_pid() if files.is_locked(self.lock_path) else None

    def _written_pid(self) -> int | None:
        text = self.lock_path.read_text().strip()
        return int(text) if text.isdigit() else None

    def _take_lock(self) -> int | None:
        """The lock, or None if a living process has it.

        It can be taken for a moment although no controller lives: somebody tests it, or a supervisor that a killed
        controller was about to start has not let go of what it inherited.
        """
        clock = RealClock(0.05)
        give_up_s = clock.now_s() + _LOCK_WAIT_S
        while (lock := files.try_lock(self.lock_path)) is None:
            pid = self._written_pid()
            if clock.now_s() > give_up_s or (pid is not None and start_ticks(pid) is not None):
                return None
            clock.wait_until(give_up_s)
        return lock

    @contextmanager
    def controller_lock(self) -> Iterator[None]:
        """Be the one controller. Raises :class:`UserError` naming the other one's process."""
        lock = self._take_lock()
        if lock is None:
            pid = self._written_pid()
            raise UserError(
                f"a controller is running in {self.path} already (process {pid})",
                "`icefrog jobs` shows what it does, `icefrog down` stops it; for a second one give another --home",
            )
        try:
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            yield
            os.ftruncate(lock, 0)
        finally:
            os.close(lock)

    # -- the state -------------------------------------------------------------------------------------------------------

    def replay(self, log: SqliteLog, cluster: ClusterSpec) -> ClusterState:
        """The state that the log adds up to. Raises :class:`UserError` if it does not add up."""
        state = ClusterState(cluster)
        for seq, record in log.records():
            self._apply(state, record, f"record {seq}")
        return state

    def _apply(self, state: ClusterState, record: ev.AnyRecord, where: str) -> None:
        try:
            state.apply(record)
        except IllegalTransitionError as error:
            raise UserError(
                f"the event log {self.db} does not add up at {where}: {error}",
                "restore it from a copy, or move the home folder away and start anew",
            ) from error
