"""A sharing pair parts: who stays may spread out when the other has left, not when it was asked to."""

from __future__ import annotations

from pathlib import Path

from local_rig import Rig, grant, job_spec

from icefrog import events as ev
from icefrog.executors.local.attempts import JobFolder
from icefrog.state import Phase


def told_to_share(rig: Rig) -> bool:
    told = JobFolder(rig.home.jobs_dir / "stays").attempt(1).read_grant()
    assert told is not None
    return told.shared


def test_who_stays_is_told_that_it_is_alone_when_the_other_has_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home", num_gpus=1)
    for name in ("stays", "leaves"):
        rig.submit(job_spec(name, 200, 0.2))
        rig.start(name, 0, shared=True)
        rig.until_phase(name, Phase.RUNNING)
    rig.leave("leaves")
    rig.command(ev.Regrant(time_s=rig.clock.now_s(), job_id="stays", attempt=1, grant=grant()))
    assert told_to_share(rig)
    rig.controller_dies()  # and the next one does not tell it either
    assert told_to_share(rig)
    rig.until_phase("leaves", Phase.PENDING)
    rig.look()
    assert not told_to_share(rig)
    rig.leave("stays")
    rig.until_phase("stays", Phase.PENDING)
