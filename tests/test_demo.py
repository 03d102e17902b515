"""The main job of the system, as a user meets it: `icefrog demo`, interrupted, gone on with, and read in the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from icefrog.demo import run_demo
from icefrog.errors import UserError
from icefrog.home import Home

ROOT = Path(__file__).resolve().parents[1]
ICEFROG = [sys.executable, "-m", "icefrog"]


def processes_of(home: Path) -> list[int]:
    """Processes that have the home in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(home).encode() in text:
            found.append(int(entry.name))
    return found


def rows(home: Path) -> dict[str, dict[str, object]]:
    done = subprocess.run([*ICEFROG, "jobs", "--json", "--home", str(home)], capture_output=True, text=True, check=True)
    return {row["job_id"]: row for row in json.loads(done.stdout)} if done.stdout.startswith("[") else {}


def test_the_home_of_a_running_controller_is_left_alone(tmp_path):
    pytest.importorskip("sklearn")
    home = Home(tmp_path / "home")
    with home.open_log(create=True), home.controller_lock():
        with pytest.raises(UserError, match="a controller runs in"):
            run_demo(home, ROOT / "examples" / "demo", slots=1)
        assert home.db.exists()
        assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.slow
def test_the_demo_is_interrupted_and_gone_on_with(tmp_path):
    pytest.importorskip("sklearn")
    home = tmp_path / "home"
    demo = subprocess.Popen(
        [*ICEFROG, "demo", "--home", str(home), "--slots", "2"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.time() + 240
        while time.time() < deadline and not any(row["epoch"] for row in rows(home).values()):
            assert demo.poll() is None, demo.communicate()[0]
            time.sleep(1)
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=120)
    finally:
        if demo.poll() is None:
            demo.kill()
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert "Go on with:" in output
    assert processes_of(home) == []
    before = rows(home)
    assert len(before) == 3
    assert any(row["effective_samples"] for row in before.values())

    subprocess.run([*ICEFROG, "up", "--until-idle", "--home", str(home)], cwd=ROOT, check=True, timeout=900)
    after = rows(home)
    assert {row["phase"] for row in after.values()} == {"completed"}
    for job_id, row in before.items():
        assert after[job_id]["effective_samples"] > row["effective_samples"]
    subprocess.run([*ICEFROG, "report", str(home)], check=True, timeout=120)
    assert "digits-transformer" in (home / "report.html").read_text()
    assert processes_of(home) == []
