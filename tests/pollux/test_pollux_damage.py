"""Measurements that parse, and cannot be: refused with the file's name, before they can stop or mislead a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from invented import FOUR_NODES, trace, write

from icefrog.errors import UserError
from icefrog.executors.sim.pollux.application import Application
from icefrog.executors.sim.pollux.scenario import pollux_scenario, pollux_settings
from icefrog.simulate import simulate


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("1.0,1.0\n", "0.0,0.0\n", "nor both 0"),  # no gain can be computed of it
        ("1.0,1.0\n", "-1.0,-5.0\n", "neither negative"),  # a job would go backwards and never end
        ("200.0,200", "100.0,200", "must rise"),
        ("200.0,200", "200.0,100", "must rise"),
        ("100.0,100,", "0.0,100,", "must be positive"),
    ],
)
def test_impossible_epochs_are_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = write(tmp_path) / "pollux" / "bert" / "validation-8.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=problem) as error:
        Application.read(tmp_path, "bert")
    assert "validation-8.csv" in str(error.value)


def test_a_placement_that_turns_out_not_to_be_measured_is_told_as_the_users_to_mend(tmp_path: Path) -> None:
    """The packed placement of a request is checked beforehand; that one of four GPUs on four nodes is needed, only later."""
    app = write(tmp_path) / "pollux" / "bert"
    placements = [f"{gpus},{local},1.0,0.1" for gpus in (3, 4) for local in (4, 8, 16)]
    (app / "placements.csv").write_text("\n".join(["placement,local_bsz,step_time,sync_time", *placements, ""]))
    scalability = [f"16,64,{local},1.0,0.1" for local in (4, 8, 16)]
    (app / "scalability.csv").write_text(
        "\n".join(["num_nodes,num_replicas,local_bsz,step_time,sync_time", *scalability, ""])
    )
    settings = pollux_settings()
    on_three = [(0.0, 3, 24)] * 4
    scenario, _ = pollux_scenario(trace(*on_three, (0.0, 4, 32)), FOUR_NODES, tmp_path, settings)
    with pytest.raises(UserError, match="bert was not measured on 4 GPUs on 4 nodes") as error:
        simulate(scenario, "tiresias", settings=settings)
    assert error.value.hint
