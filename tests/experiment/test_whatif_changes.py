"""What-if: the texts that change a set-up."""

from __future__ import annotations

import pytest

from icefrog.errors import UserError
from icefrog.experiment.cells import Condition, Variant
from icefrog.experiment.changes import Setup, changed
from icefrog.specfile import parse_cluster

BASE = Setup(Variant("as it is", "icefrog", {"rho": 0.5}), Condition(parse_cluster("12x4")))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *(("gpus+8", "14x4"), ("gpus-8", "10x4"), ("gpus*2", "24x4"), ("gpus=64", "16x4"), ("nodes+1", "13x4")),
        *(("nodes-11", "1x4"), ("nodes*1.5", "18x4"), ("cluster=2x8", "2x8"), ("nodes+1, nodes*2", "26x4")),
    ],
)
def test_sizes(text: str, label: str) -> None:
    setup = changed(BASE, text)
    assert setup.condition.cluster.label() == label
    assert setup.variant.policy == "icefrog"


def test_policies_and_options() -> None:
    assert changed(BASE, "policy=srtf").variant == Variant("policy=srtf", "srtf", {}, "policy=srtf")
    assert dict(changed(BASE, "icefrog.rho=0.25").variant.options) == {"rho": "0.25"}
    both = changed(BASE, "icefrog.share=no,icefrog.rho=1")
    assert dict(both.variant.options) == {"rho": "1", "share": "no"}
    assert dict(changed(BASE, "policy=fifo,fifo.backfill=easy").variant.options) == {"backfill": "easy"}


def test_jobs_and_the_world() -> None:
    twice = changed(BASE, "load=1.5,load=2").condition
    assert (twice.pace, twice.load) == (3.0, 1.0)  # the same jobs, faster
    limits = {text: changed(BASE, f"freeze={text}").condition for text in ("all", "half", "none", "0.25")}
    assert [limit.restrict_freezing for limit in limits.values()] == [0.0, 0.5, 1.0, 0.75]
    assert {limit.restricted_max_fraction for limit in limits.values()} == {0.0}
    assert dict(changed(BASE, "noise=0.3, round_s=60").condition.world) == {"noise": 0.3, "round_s": 60.0}
    assert changed(BASE, "gpus+8,load=2").variant.name == "gpus+8, load=2"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ",",
            "gpus",
            "gpus+",
            "gpus+2",
            "gpus-48",
            "gpus=0",
            "nodes*1.01",
            "gpus/2",
            "cluster=2by4",
            "cluster=none.yaml",
        ),
        *(
            "policy=fido",
            "policy=",
            "icefrog.roh=1",
            "icefrog.rho=2",
            "srtf.rho=1",
            "rho=1",
            "load=0",
            "load=nan",
            "load=x",
        ),
        *("freeze=some", "freeze=2", "noise=-1", "noise=", "seed=3", "nois=1"),
    ],
)
def test_what_is_no_change(text: str) -> None:
    with pytest.raises(UserError) as caught:
        changed(BASE, text)
    assert caught.value.hint


def test_mixed_clusters_are_named_anew() -> None:
    mixed = Setup(BASE.variant, Condition(parse_cluster("2x4:a100-80gb+2x4:t4")))
    with pytest.raises(UserError, match="several kinds"):
        changed(mixed, "gpus+8")
    assert changed(mixed, "cluster=4x4").condition.cluster.label() == "4x4"
