"""The parent of one attempt's processes: ``python supervisor.py ATTEMPT_DIR``. Standard library only, so it is up at once.

It outlives the controller that started it, and nothing outlives it:

1. It takes the job's run lock before anything else and hands it on to the ranks. The lock is free only when the supervisor
   and all of its ranks are gone, so no job runs twice, whatever happens to the controller.
2. It starts the ranks as a gang; one that dies takes the others with it.
3. A file ``stop`` in the attempt's folder, or SIGTERM, asks the job to save a checkpoint and leave; SIGKILL follows after a
   grace period, or at once for a file ``kill`` or a second SIGTERM.
4. It writes ``exit.json`` when all is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

_POLL_S = 0.05
_LOCK_WAIT_S = 5.0  # for a test of the lock to pass, or a predecessor to be gone
_GANG_GRACE_S = 0.5  # for the other ranks to write down why they fail, too
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Supervisor:
    """One attempt, from the lock to ``exit.json``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launch: dict[str, Any] = json.loads((folder / "launch.json").read_text())
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.codes: dict[int, int] = {}
        self.terms = 0
        self.stop_forwarded = False
        self.killed = False
        self.failed_rank: int | None = None

    def run(self) -> int:
        """Exit status: 0 it ran (well or not), 3 somebody else runs this job or ran this attempt."""
        lock = self._lock()
        if lock is None or (self.folder / "supervisor.pid").exists():
            return 3
        self._write("supervisor.pid", {"pid": os.getpid(), "start_ticks": start_ticks(), "time_s": time.time()})
        signal.signal(signal.SIGTERM, self._on_term)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        problem = ""
        if self._asked_to_stop():
            self.stop_forwarded = True
            problem = "asked to stop before it started"
        else:
            try:
                self._start(lock)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                what = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
                problem = f"cannot start {self.launch['argv'][0]} in {self.launch['cwd']}: {what}"
        self._watch()
        self._sweep()
        self._write(
            "exit.json",
            {
                "exit_codes": [self.codes.get(rank) for rank in range(len(self.ranks))],
                "failed_rank": self.failed_rank,
                "stop_forwarded": self.stop_forwarded,
                "killed": self.killed,
                "problem": problem,
                "time_s": time.time(),
            },
        )
        return 0

    def _lock(self) -> int | None:
        lock = os.open(self.launch["lock"], os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)

    def _start(self, lock: int) -> None:
        count = int(self.launch["num_ranks"])
        gang = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared_env = {**os.environ, **self.launch["env"], **gang}
        parent = os.getpid()

        def child() -> None:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        try:
            with (self.folder / "log").open("ab") as log:
                for rank in range(count):
                    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                    self.ranks.append(
                        subprocess.Popen(
                            self.launch["argv"],
                            cwd=self.launch["cwd"],
                            env={**shared_env, **numbers},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            pass_fds=(lock,),
                            preexec_fn=child,
                        )
                    )
        except OSError:
            self._kill(range(len(self.ranks)))
            raise
        self._write("ranks.json", {"pids": [rank.pid for rank in self.ranks], "time_s": time.time()})

    def _watch(self) -> None:
        """Until every rank is gone."""
        kill_at, gang_broken = math.inf, False
        while len(self.codes) < len(self.ranks):
            self._reap()
            now = time.monotonic()
            if self._asked_to_stop() and not self.stop_forwarded:
                self._forward_stop()
                kill_at = min(kill_at, now + float(self.launch["grace_s"]))
            if self.failed_rank is not None and not gang_broken:
                gang_broken = True
                kill_at = min(kill_at, now + _GANG_GRACE_S)
            if self.terms > 1 or (self.folder / "kill").exists():
                kill_at = now
            if now >= kill_at and len(self.codes) < len(self.ranks):
                self.killed = self.killed or not gang_broken
                self._kill(rank for rank in range(len(self.ranks)) if rank not in self.codes)
            time.sleep(_POLL_S)

    def _asked_to_stop(self) -> bool:
        return self.terms > 0 or (self.folder / "stop").exists() or (self.folder / "kill").exists()

    def _forward_stop(self) -> None:
        self.stop_forwarded = True
        (self.folder / "stop").touch()
        # A job that reports watches the file itself and leaves at a step boundary; a signal would hit its data loaders.
        if not (self.folder / "reports.jsonl").exists():
            for number, rank in enumerate(self.ranks):
                if number not in self.codes:
                    _signal_group(rank.pid, signal.SIGTERM)

    def _reap(self) -> None:
        for number, rank in enumerate(self.ranks):
            if number in self.codes:
                continue
            if os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Not reaped yet, so its number is still its own: what it left behind in its group goes first.
            _signal_group(rank.pid, signal.SIGKILL)
            self.codes[number] = rank.wait()
            as_asked = self.stop_forwarded and self.codes[number] in (-signal.SIGTERM, 128 + signal.SIGTERM)
            if self.codes[number] != 0 and not as_asked and self.failed_rank is None:
                self.failed_rank = number

    def _kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            _signal_group(self.ranks[number].pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """Processes that a rank left behind in groups of their own come to us as their new parent; end them."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        for _ in range(100):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            pids = children.read_text().split() if children.exists() else []
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        self.terms += 1

    def _write(self, name: str, value: dict[str, Any]) -> None:
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(json.dumps(value))
        temporary.replace(self.folder / name)


def start_ticks(pid: int | None = None) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie. Tells a reused number apart."""
    try:
        text = Path(f"/proc/{pid if pid is not None else 'self'}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _signal_group(pgid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux: the sweep and the lock still hold
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def free_port() -> int:
    """For a gang to meet at.

    Its first rank binds it only seconds later, so it is none that the kernel hands out by itself in the meantime (gloo alone
    opens several sockets a rank): two gangs that meet at one port wait for each other until their time is up.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_PORTS = range(20_000, 30_000)
"""Below what systems give to outgoing connections (from 32,768 on Linux, from 49,152 elsewhere)."""


if __name__ == "__main__":
    sys.exit(Supervisor(Path(sys.argv[1])).run())
