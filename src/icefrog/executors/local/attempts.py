"""One attempt on disk: a folder that a supervisor is pointed at, and what can be read back from it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from icefrog import events as ev
from icefrog.executors.local import files, supervisor
from icefrog.executors.local.text import plain
from icefrog.runtime import protocol
from icefrog.spec import JobSpec
from icefrog.types import GpuId


class Life(Enum):
    """How far an attempt is."""

    NOT_BEGUN = auto()  # no supervisor has taken it up (yet)
    RUNNING = auto()  # a supervisor or ranks of it are there
    OVER = auto()  # it ran, and nothing of it is left


class ExitRecord(BaseModel):
    """``exit.json``, the supervisor's last word."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    exit_codes: list[int | None]
    failed_rank: int | None = Field(ge=0)
    stop_forwarded: bool
    killed: bool
    problem: str
    time_s: float

    def failure(self) -> tuple[int, int] | None:
        """(rank, exit code) of the rank that failed first, if one did."""
        if self.failed_rank is None:
            return None
        code = self.exit_codes[self.failed_rank] if self.failed_rank < len(self.exit_codes) else None
        return self.failed_rank, 1 if code is None else code


@dataclass(frozen=True, slots=True)
class JobFolder:
    """``home/jobs/<job>``."""

    path: Path

    @property
    def lock(self) -> Path:
        """Held by whatever runs of the job."""
        return self.path / "run.lock"

    def attempt(self, number: int) -> Attempt:
        """The folder of one attempt, whether it exists or not."""
        return Attempt(self, number)

    def newest(self, up_to: int) -> Attempt | None:
        """The newest attempt that was written down."""
        found = (self.attempt(number) for number in range(up_to, 0, -1))
        return next((attempt for attempt in found if attempt.exists()), None)


@dataclass(frozen=True, slots=True)
class Attempt:
    """``home/jobs/<job>/attempt-<n>``."""

    job: JobFolder
    number: int

    @property
    def path(self) -> Path:
        """The folder."""
        return self.job.path / f"attempt-{self.number}"

    @property
    def log(self) -> Path:
        """Standard output and error of all ranks."""
        return self.path / "log"

    @property
    def reports(self) -> Path:
        """What the job says of itself."""
        return self.path / protocol.REPORTS_FILE

    def exists(self) -> bool:
        """Whether it was written down completely."""
        return os.path.exists(self.path / "launch.json")

    def create(
        self,
        spec: JobSpec,
        gpus: tuple[GpuId, ...],
        grant: ev.Grant,
        device_env: Mapping[str, str],
        probe: protocol.ProbeRequest | None = None,
        parallel: str = "auto",
    ) -> None:
        """Write down what to run; ``launch.json`` comes last and makes it valid. Doing it again changes nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        cwd = Path(spec.cwd or ".")
        checkpoint = (cwd / spec.checkpoint) if spec.checkpoint else self.job.path / "checkpoint"
        granted = job_grant(spec, grant).model_copy(update={"probe": probe, "parallel": parallel})
        self.write_grant(granted)
        files.write_json(self.path / "spec.json", spec.model_dump_json(by_alias=True, indent=2))
        env = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            **spec.env,
            **device_env,
            protocol.ENV_JOB_ID: spec.job_id,
            protocol.ENV_ATTEMPT: str(self.number),
            protocol.ENV_ATTEMPT_DIR: str(self.path),
            protocol.ENV_CHECKPOINT_DIR: str(checkpoint),
            protocol.ENV_GRANT: granted.model_dump_json(),
        }
        launch = {
            "argv": argv(spec, grant, checkpoint),
            "cwd": str(cwd),
            "env": env,
            "num_ranks": grant.num_gpus,
            "gpus": [[gpu.node, gpu.device] for gpu in gpus],
            "shared": grant.shared,
            "grace_s": spec.stop_grace_s,
            "lock": str(self.job.lock),
        }
        checkpoint.mkdir(parents=True, exist_ok=True)
        files.write_json(self.path / "launch.json", launch)

    def write_grant(self, grant: protocol.Grant) -> None:
        """Tell a running job its bounds."""
        files.write_json(self.path / protocol.GRANT_FILE, grant.model_dump_json())

    def read_grant(self) -> protocol.Grant | None:
        """The bounds it was told last; None where that cannot be read."""
        try:
            found = files.read_record(self.path / protocol.GRANT_FILE)
            return None if found is None else protocol.Grant.model_validate(found)
        except ValidationError:
            return None

    def born_with(self) -> protocol.Grant | None:
        """The bounds it was started with; None where that cannot be read."""
        try:
            launch = files.read_record(self.path / "launch.json") or {}
            return protocol.Grant.model_validate_json(launch["env"][protocol.ENV_GRANT])
        except (KeyError, TypeError, ValidationError):
            return None

    def told_at_s(self) -> float:
        """When its bounds were written last, s since the epoch; 0 where that cannot be read."""
        try:
            return (self.path / protocol.GRANT_FILE).stat().st_mtime
        except OSError:
            return 0.0

    def holds(self) -> tuple[tuple[GpuId, ...], bool] | None:
        """(the GPUs it runs on, whether as one of two on its GPU); None where that cannot be read."""
        launch = files.read_record(self.path / "launch.json")
        try:
            gpus = () if launch is None else tuple(GpuId(int(node), int(device)) for node, device in launch["gpus"])
            return None if launch is None else (gpus, bool(launch["shared"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def spawn(self) -> subprocess.Popen[bytes]:
        """Start a supervisor, in a session of its own: Ctrl-C at the controller's terminal is not for it.

        A second one for the same attempt gives up by itself, so starting one too many is harmless.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        with open(os.open(self.path / "supervisor.log", flags, 0o666), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(self.path)],
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def life(self) -> Life:
        """How far it is, told by the lock and the supervisor's files alone."""
        known = self._supervisor()
        if known is None:
            if self._locked():
                return Life.RUNNING
            if not any(os.path.lexists(self.path / name) for name in ("supervisor.pid", "exit.json")):
                return Life.NOT_BEGUN
            known = self._supervisor()  # only now: it may have begun since the first look
            if known is None:  # something is left where its files were, and it cannot be read
                return Life.RUNNING if self._locked() else Life.OVER
        pid, ticks = known
        if self.exit_record() is None and supervisor.start_ticks(pid) == ticks:
            return Life.RUNNING
        return Life.RUNNING if self._locked() else Life.OVER

    def _locked(self) -> bool:
        try:
            return files.is_locked(self.job.lock)
        except OSError:
            return False

    def _supervisor(self) -> tuple[int, int] | None:
        """(process, when it started); None where that cannot be read."""
        record = files.read_record(self.path / "supervisor.pid") or {}
        pid, ticks = record.get("pid"), record.get("start_ticks")
        return (pid, ticks) if isinstance(pid, int) and isinstance(ticks, int) and 0 < pid < 1 << 31 else None

    def exit_record(self) -> ExitRecord | None:
        """How its supervisor says it ended; None where that cannot be read."""
        try:
            return ExitRecord.model_validate(files.read_record(self.path / "exit.json"))
        except ValidationError:
            return None

    def exit_damaged(self) -> bool:
        """Whether something else lies where ``exit.json`` should be."""
        return os.path.lexists(self.path / "exit.json") and self.exit_record() is None

    def orphaned(self) -> bool:
        """Whether ranks may be left whose supervisor was killed."""
        known = self._supervisor()
        return known is not None and self.exit_record() is None and supervisor.start_ticks(known[0]) != known[1]

    def kill_orphans(self) -> int:
        """End whatever is left of it, its supervisor included; how many processes that were."""
        left = files.stragglers(self.job.lock, f"{protocol.ENV_ATTEMPT_DIR}={self.path}")
        files.kill(left)
        return len(left)

    def ask_stop(self) -> None:
        """Ask it to save a checkpoint and leave; asking again changes nothing. One that cannot be asked is ended."""
        self._ask(protocol.STOP_FILE)

    def ask_kill(self) -> None:
        """End it without a checkpoint."""
        self._ask("kill")

    def _ask(self, name: str) -> None:
        try:
            if not os.path.exists(self.path / name):
                (self.path / name).touch()
        except OSError:  # it has spoilt its own folder, where nothing can reach it any more
            self.kill_orphans()

    def up_since_s(self) -> float | None:
        """When its ranks were all started, s since the epoch; None where that cannot be read."""
        since_s = (files.read_record(self.path / "ranks.json") or {}).get("time_s")
        return since_s if isinstance(since_s, float) and math.isfinite(since_s) else None

    def last_words(self) -> str:
        """The last line of its log that says something."""
        try:
            with files.open_regular(self.log) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((words[:200] for line in reversed(lines) if (words := plain(line))), "")


def job_grant(spec: JobSpec, grant: ev.Grant) -> protocol.Grant:
    """What a job is told: the scheduler's grant and the rules of its own specification."""
    moves_batch = grant.elastic_batch and len(spec.batch.options()) > 1
    return protocol.Grant(
        **grant.model_dump(),
        global_batch=grant.global_batch,
        base_batch=spec.batch.initial,
        max_global_batch=spec.batch.options()[-1],
        max_fraction=spec.freeze.max_fraction,
        rule=spec.freeze.rule,
        statistics=moves_batch or grant.freezing == "freezeout",
        target=spec.target,
        max_epochs=spec.max_epochs,
    )


def argv(spec: JobSpec, grant: ev.Grant, checkpoint: Path) -> list[str]:
    """The command of each rank, its placeholders filled in. ``python`` is the one that runs IceFrog."""
    if spec.command is None:
        return [sys.executable, "-m", "icefrog.executors.local.entry", spec.entry or ""]
    values = {
        "{max_epochs}": str(spec.max_epochs),
        "{num_gpus}": str(grant.num_gpus),
        "{batch}": str(grant.global_batch),
        "{checkpoint}": str(checkpoint),
    }
    words = []
    for word in spec.command:
        for placeholder, value in values.items():
            word = word.replace(placeholder, value)
        words.append(word)
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    return words
