"""A job gets a partner on its GPU: the partner is started when the job says that it has frozen what it was told to."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from local_rig import Rig, job_spec

from icefrog import events as ev
from icefrog.executors.local.attempts import JobFolder
from icefrog.runtime import protocol
from icefrog.state import Phase

LONG_STEPS = """
import sys, time
from pathlib import Path
import torch
from icefrog.runtime import LayerElastic

home = Path(sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
elastic = LayerElastic(model, optimizer)
for epoch in elastic.epochs(50):
    for _ in range(4):
        loss = elastic.model(torch.randn(8, 4)).square().mean()
        loss.backward()
        (home / "computes").touch()
        while not (home / "gate").exists():
            time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
    elastic.end_epoch()
elastic.close()
"""


def shares_with_frozen_layers(rig: Rig, *, until: Path | None = None) -> None:
    """``a``, which runs alone, is told to freeze a layer and share, and ``b`` to start beside it."""
    rig.submit(job_spec("b", 3, 0.05))
    rig.start("a", 0)
    rig.until_phase("a", Phase.RUNNING)
    rig.until(lambda: until is None or until.exists())
    rig.regrant("a", shared=True, min_frozen_layers=1)
    rig.start("b", 0, shared=True)


def never_started(rig: Rig, job: str) -> bool:
    """After some looks."""
    for _ in range(10):
        rig.look()
    return not JobFolder(rig.home.jobs_dir / job).attempt(1).exists()


def test_a_partner_waits_for_the_end_of_a_long_step(rig: Rig) -> None:
    rig.submit(job_spec("a", 30, 0.05, "gated", "obeys"))
    shares_with_frozen_layers(rig)
    assert never_started(rig, "b")
    rig.controller_dies()  # and the next one waits, too
    assert never_started(rig, "b")
    (rig.home.path / "gate").touch()
    rig.until_phase("b", Phase.COMPLETED)
    assert not [record for record in rig.log if isinstance(record, ev.JobWarned)]


def test_it_waits_no_longer_than_that(tmp_path: Path) -> None:
    """One that does not obey (another runtime, or none of its layers can be frozen) does not keep the other out for ever."""
    rig = Rig(tmp_path / "home", num_gpus=1)
    rig.obey_s = 0.5
    rig.controller_dies()
    rig.submit(job_spec("a", 100, 0.05))
    shares_with_frozen_layers(rig)
    rig.until_phase("b", Phase.COMPLETED)
    warned = [record.message for record in rig.log if isinstance(record, ev.JobWarned) and record.job_id == "b"]
    assert warned == ["started beside a, which did not say within 0.5 s that it has frozen"]
    rig.leave("a")
    rig.until_phase("a", Phase.PENDING)


def test_a_leaving_sharer_is_not_waited_for_longer_than_it_is_there(rig: Rig) -> None:
    rig.submit(job_spec("a", 30, 0.05, "gated", "obeys"))
    shares_with_frozen_layers(rig)
    assert never_started(rig, "b")
    rig.leave("a")
    (rig.home.path / "gate").touch()
    rig.until_phase("b", Phase.COMPLETED)


def test_a_pair_that_starts_frozen_starts_at_once(rig: Rig) -> None:
    """They obey from their first step: neither waits for the other's first word."""
    for name in ("a", "b"):
        rig.submit(job_spec(name, 3, 0.05, "slow-start", "obeys"))
        rig.start(name, 0, shared=True, min_frozen_layers=1)
    rig.look()
    assert all(JobFolder(rig.home.jobs_dir / name).attempt(1).exists() for name in ("a", "b"))
    rig.until_phase("a", Phase.COMPLETED)
    rig.until_phase("b", Phase.COMPLETED)


@pytest.mark.slow
def test_a_training_job_says_when_it_has_frozen(rig: Rig) -> None:
    """The runtime's end of it: told in the middle of a step, it obeys after that step."""
    script = rig.home.path / "job.py"
    script.write_text(textwrap.dedent(LONG_STEPS))
    rig.submit(job_spec("a", command=(sys.executable, str(script), str(rig.home.path))))
    shares_with_frozen_layers(rig, until=rig.home.path / "computes")
    assert never_started(rig, "b")
    (rig.home.path / "gate").touch()
    rig.until_phase("b", Phase.COMPLETED)
    reports = JobFolder(rig.home.jobs_dir / "a").attempt(1).reports.read_bytes().splitlines()
    bounded = [one for one in map(protocol.decode, reports) if isinstance(one, protocol.Bounded)]
    assert [(one.frozen_layers, one.min_frozen_layers) for one in bounded] == [(1, 1)]
    rig.leave("a")
    rig.until(lambda: rig.state.jobs["a"].holding is None)
