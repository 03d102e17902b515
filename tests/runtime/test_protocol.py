from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from icefrog import events as ev
from icefrog.errors import UserError
from icefrog.executors.local.attempts import job_grant
from icefrog.runtime import protocol
from icefrog.runtime.agent import Agent
from icefrog.testing.builders import job_spec

GRANT = {"num_gpus": 1, "batch_per_gpu": 16, "global_batch": 16, "max_epochs": 3, "target": {"value": 0.9}}


def agent(folder: Path, **env: str) -> Agent:
    return Agent({protocol.ENV_ATTEMPT_DIR: str(folder), protocol.ENV_GRANT: json.dumps(GRANT), **env})


def test_importing_the_protocol_does_not_import_torch() -> None:
    code = "import sys, icefrog.runtime.protocol; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reports_are_lines_that_decode_to_what_was_sent(tmp_path: Path) -> None:
    one = agent(tmp_path)
    sent = [
        protocol.Warned(time_s=1.0, message="line\nbreak"),
        protocol.Finished(time_s=2.0, outcome="completed", metric=0.9, effective_samples=10.0),
    ]
    for report in sent:
        one.report(report)
    lines = (tmp_path / "reports.jsonl").read_bytes().splitlines()
    assert [protocol.decode(line) for line in lines] == sent


def test_only_rank_0_reports(tmp_path: Path) -> None:
    agent(tmp_path, RANK="1").report(protocol.Warned(time_s=1.0, message=""))
    assert not (tmp_path / "reports.jsonl").exists()


def test_a_full_disk_delays_a_report_and_ends_no_training(tmp_path: Path) -> None:
    sent = [protocol.Warned(time_s=float(i), message=str(i)) for i in range(4)]
    path = tmp_path / "reports.jsonl"
    one = agent(tmp_path)
    one.report(sent[0])
    path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    one.report(sent[1])
    with pytest.raises(OSError, match="No space left"):
        one.report(sent[2], last=True)  # nothing would send it later
    (tmp_path / "kept").rename(path)
    one.report(sent[3])
    assert [protocol.decode(line) for line in path.read_bytes().splitlines()] == sent
    (tmp_path / "reports.jsonl").unlink()
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):  # nobody listens any more
        one.report(sent[0])


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValidationError):
        protocol.decode(b'{"kind": "nonsense", "time_s": 1}')


def test_stop_file_is_noticed(tmp_path: Path) -> None:
    one = agent(tmp_path)
    assert not one.stop_requested()
    (tmp_path / "stop").touch()
    assert one.stop_requested()


def test_sigterm_is_a_request_to_stop(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one = agent(tmp_path)
    try:
        one.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert one.stop_requested()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_new_grant_is_read_once_and_a_broken_one_ignored(tmp_path: Path) -> None:
    one = agent(tmp_path)
    assert not one.refresh_grant()
    (tmp_path / "grant.json").write_text(json.dumps({**GRANT, "max_frozen_layers": 2}))
    assert one.refresh_grant()
    assert one.grant is not None
    assert one.grant.max_frozen_layers == 2
    assert not one.refresh_grant()
    (tmp_path / "grant.json").write_text("{")
    assert not one.refresh_grant()
    assert one.grant.max_frozen_layers == 2


def test_two_grants_within_one_tick_of_the_clock_are_both_read(tmp_path: Path) -> None:
    one = agent(tmp_path)
    for bound in (2, 3):
        half = tmp_path / f"half{bound}"
        half.write_text(json.dumps({**GRANT, "max_frozen_layers": bound}))
        os.utime(half, ns=(10**18, 10**18))
        half.replace(tmp_path / "grant.json")
        assert one.refresh_grant()
        assert one.grant is not None
        assert one.grant.max_frozen_layers == bound


def test_a_broken_grant_in_the_environment_is_a_user_error() -> None:
    with pytest.raises(UserError, match="num_gpus"):
        Agent({protocol.ENV_GRANT: '{"batch_per_gpu": 1, "global_batch": 1}'})


def test_a_job_is_told_the_policy_s_rule_and_its_own() -> None:
    spec = job_spec(freeze={"rule": "egeria"}, max_epochs=3)
    told = job_grant(spec, ev.Grant(num_gpus=2, batch_per_gpu=32, freezing="freezeout"))
    assert (told.freezing, told.rule, told.global_batch) == ("freezeout", "egeria", 64)


def test_without_an_executor_nothing_happens() -> None:
    alone = Agent({})
    alone.report(protocol.Warned(time_s=1.0, message=""))
    alone.listen()
    assert not alone.active
    assert not alone.stop_requested()
    assert not alone.refresh_grant()
