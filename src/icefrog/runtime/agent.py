"""The job's end of the file protocol: reads the grant, appends reports, notices a request to stop.

Without the environment of an executor every method does nothing, so a plain run of the script works the same way.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from pydantic import ValidationError

from icefrog.errors import UserError
from icefrog.runtime import protocol
from icefrog.runtime.protocol import AnyReport, Grant

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Agent:
    """One rank's view of the executor.

    Args:
        env: the environment, normally ``os.environ``.

    Raises:
        UserError: ``ICEFROG_GRANT`` is not a valid grant.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        folder = env.get(protocol.ENV_ATTEMPT_DIR)
        checkpoint = env.get(protocol.ENV_CHECKPOINT_DIR)
        self.job_id = env.get(protocol.ENV_JOB_ID)
        self.rank = int(env.get("RANK", "0"))
        self.attempt_dir = Path(folder) if folder else None
        self.checkpoint_dir = Path(checkpoint) if checkpoint else None
        self.grant = _parse_grant(env[protocol.ENV_GRANT]) if env.get(protocol.ENV_GRANT) else None
        self._terminated = False
        self._grant_read = (0, 0)  # of the file that was read: which one, and when it was written (ns)
        self._unsent = b""  # lines that the disk had no room for
        self._sending = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether an executor listens."""
        return self.attempt_dir is not None

    def listen(self) -> None:
        """Treat SIGTERM as a request to stop, where an executor runs this job and Python allows it (main thread)."""
        if self.active and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        self._terminated = True

    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop; ranks agree among themselves at a step boundary."""
        if self._terminated:
            return True
        return self.attempt_dir is not None and (self.attempt_dir / protocol.STOP_FILE).exists()

    def refresh_grant(self) -> bool:
        """Read ``grant.json`` if it was replaced since; True if the bounds are new. An unreadable file is ignored."""
        if self.attempt_dir is None:
            return False
        path = self.attempt_dir / protocol.GRANT_FILE
        try:
            found = path.stat()
            identity = (found.st_ino, found.st_mtime_ns)  # two within one tick of the file system's clock are two files
            if identity == self._grant_read:
                return False
            grant = _parse_grant(path.read_text())
        except (OSError, UserError):
            return False
        self._grant_read = identity
        changed, self.grant = grant != self.grant, grant
        return changed

    def report(self, report: AnyReport, *, last: bool = False) -> None:
        """Append one line. Rank 0 only; from any thread. Where the disk is full, training goes on, and the line waits for
        the next report.

        Args:
            report: of any kind.
            last: nothing will follow.

        Raises:
            OSError: the file cannot be written to, and that is not a full disk, or this is the last line.
        """
        if self.attempt_dir is None or self.rank != 0:
            return
        with self._sending:
            self._unsent += protocol.encode(report)
            path = self.attempt_dir / protocol.REPORTS_FILE
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    while self._unsent:  # a full disk may take a part
                        self._unsent = self._unsent[os.write(descriptor, self._unsent) :]
                finally:
                    os.close(descriptor)
            except OSError as error:
                if last or error.errno not in _NO_ROOM:
                    raise

    def write_probed(self, probed: protocol.Probed) -> None:
        """Put ``probe.json`` into the attempt's folder, whole or not at all."""
        if self.attempt_dir is None:
            return
        path = self.attempt_dir / protocol.PROBE_FILE
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(probed.model_dump_json(by_alias=True))
        temporary.replace(path)

    @staticmethod
    def now_s() -> float:
        """Time stamps of reports, seconds since the epoch."""
        return time.time()


def _parse_grant(text: str) -> Grant:
    try:
        return Grant.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole value"
        raise UserError(
            f"{protocol.ENV_GRANT} is not a valid grant: {where}: {first['msg']}",
            "it is set by the executor; unset it to run the script by itself",
        ) from error
