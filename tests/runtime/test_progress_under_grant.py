"""The rule `progress` in a job that a scheduler runs: inside the grant's bounds, and heard by the scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_rule_progress import USABLE, feed
from torch import nn

from icefrog import events as ev
from icefrog.candidates import candidates
from icefrog.estimate.progress import signal_worth
from icefrog.executors.local.attempts import job_grant
from icefrog.executors.local.reports import nonsense, progress_event
from icefrog.jobstate import JobState, update
from icefrog.runtime import Guards, LayerElastic, protocol
from icefrog.runtime.rules import Progress
from icefrog.runtime.rules.base import Bounds
from icefrog.spec import Target
from icefrog.testing.builders import cluster, job_spec
from icefrog.testing.rules import situation
from icefrog.types import Pricing
from icefrog.views import view

GRANT = {
    "num_gpus": 1,
    "batch_per_gpu": 16,
    "global_batch": 16,
    "max_epochs": 9,
    "freezing": "signal",
    "statistics": False,
}
SHARES = [0.1, 0.2, 0.3, 0.4]


# --- which rule a grant means


@pytest.mark.parametrize(
    ("rule", "freezing", "expected"),
    [
        ("auto", "signal", "progress"),
        ("auto", "tuner", "tuner"),
        ("auto", "none", "none"),
        ("tuner", "signal", "tuner"),
        ("progress", "tuner", "progress"),
        ("egeria", "signal", "egeria"),
        ("none", "signal", "none"),
    ],
)
def test_a_job_file_that_leaves_it_open_follows_the_policy(rule: str, freezing: str, expected: str) -> None:
    told = job_grant(job_spec(freeze={"rule": rule}), ev.Grant(num_gpus=1, batch_per_gpu=16, freezing=freezing))
    elastic, _ = job(told.model_dump(mode="json"))
    assert elastic._decider.rule.name == expected
    elastic.close()


def test_guards_in_a_script_are_for_the_tuner() -> None:
    elastic, _ = job(GRANT, guards=Guards())
    assert elastic._decider.rule.name == "tuner"
    elastic.close()


# --- statistics that nobody reads


@pytest.mark.parametrize(
    ("spec", "grant", "wanted"),
    [
        ({}, {}, False),
        ({}, {"elastic_batch": True}, False),  # the job has one batch
        ({"batch": {"min": 16, "max": 64}}, {}, False),
        ({"batch": {"min": 16, "max": 64}}, {"elastic_batch": True}, True),
        ({}, {"freezing": "freezeout"}, True),
    ],
)
def test_the_scheduler_wants_variances_where_they_move_the_batch_or_tune_a_schedule(
    spec: dict[str, Any], grant: dict[str, Any], wanted: bool
) -> None:
    told = job_grant(job_spec(**spec), ev.Grant(**{"num_gpus": 1, "batch_per_gpu": 16, **grant}))
    assert told.statistics == wanted


@pytest.mark.parametrize(
    ("grant", "options", "measured"),
    [
        ({}, {}, False),
        ({"statistics": True}, {}, True),
        ({"rule": "tuner"}, {}, True),
        ({}, {"lr_rule": "adascale"}, True),
    ],
)
def test_who_reads_no_variances_measures_none(
    grant: dict[str, Any], options: dict[str, Any], measured: bool, tmp_path: Path
) -> None:
    elastic, optimizer = job({**GRANT, **grant}, tmp_path, **options)
    run(elastic, optimizer, epochs=8)
    last = reports(tmp_path, protocol.Progress)[-1]
    assert (last.variance is not None) == measured
    assert (last.signal is not None) == (grant.get("rule") != "tuner")


# --- inside the bounds


def test_fresh_layers_are_frozen_no_deeper_than_the_scheduler_wants() -> None:
    """Before the warm-up is over, freezing is the scheduler's wish alone; when the partner has left, they open."""
    rule = Progress()
    feed(rule, [0.1, 0.1, 0.1, 9.0])
    for depth, bounds, expected in (
        (0, Bounds(0, 3), 0),
        (1, Bounds(1, 3), 1),
        (1, Bounds(0, 3), 0),
        (2, Bounds(1, 3), 1),
    ):
        now = situation(frozen_layers=depth, bounds=bounds, share_done=0.05, cache=USABLE)
        assert rule.propose(now).frozen_layers == expected
    assert rule.propose(situation(share_done=0.2, cache=USABLE)).frozen_layers == 2  # what it does from then on


def test_a_stall_opens_what_the_grant_lets_and_the_rest_when_it_may() -> None:
    rule = Progress(patience=1, margin=0.0)
    feed(rule, [0.1] * 4 + [5.0] * 4)
    target = {"target": Target(value=0.9), "best_metric": 0.6, "cache": USABLE}

    def depth(frozen: int, least: int, metrics: int, stalled: int) -> int:
        bounds = Bounds(least, 7)
        told = {**target, "metrics": (0.6,) * metrics, "stalled": stalled}
        return rule.propose(situation([1.0] * 8, frozen, bounds=bounds, **told)).frozen_layers

    assert depth(0, 0, 1, 0) == 4
    assert depth(4, 3, 2, 1) == 3  # half would be 2
    assert depth(3, 3, 3, 2) == 3  # no deeper bound to open
    assert depth(3, 0, 4, 0) == 2  # and it never freezes deeper than half of 4 again


def test_layers_that_the_scheduler_froze_keep_their_share() -> None:
    """As of then: their own signal is not measured any more, and that of the others shrinks as they learn."""
    rule = Progress(margin=0.0)
    feed(rule, SHARES)
    rule.propose(situation(frozen_layers=2, bounds=Bounds(2, 3), cache=USABLE))
    learnt_since = Progress()
    learnt_since.load_state_dict(rule.state_dict())
    meter = learnt_since._meter
    meter._ema[2:] = [value / 10 for value in meter._ema[2:]]
    for one in (rule, learnt_since):
        assert one.signal() == pytest.approx(SHARES)


def test_nothing_is_told_before_it_is_measured() -> None:
    rule = Progress()
    assert rule.signal() is None
    feed(rule, [0.0] * 4)
    assert rule.signal() is None
    feed(rule, SHARES)
    assert rule.signal() == pytest.approx(SHARES)


# --- in training


def job(
    grant: dict[str, Any], folder: Path | None = None, **options: Any
) -> tuple[LayerElastic, torch.optim.Optimizer]:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    env = {protocol.ENV_GRANT: json.dumps(grant)}
    if folder is not None:
        env |= {protocol.ENV_ATTEMPT_DIR: str(folder), protocol.ENV_CHECKPOINT_DIR: str(folder / "checkpoint")}
    return LayerElastic(model, optimizer, env=env, **options), optimizer


def run(elastic: LayerElastic, optimizer: torch.optim.Optimizer, *, epochs: int) -> None:
    x, y = models.data()
    left = epochs
    for _ in elastic.epochs(9):
        for at in range(0, len(x), 16):
            nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16]).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch(metric=0.1)
        left -= 1
        if not left:
            break
    elastic.close()


def reports(folder: Path, kind: type[Any]) -> list[Any]:
    lines = (folder / "reports.jsonl").read_bytes().splitlines()
    return [one for one in map(protocol.decode, lines) if isinstance(one, kind)]


def test_a_grant_that_changes_in_an_epoch_is_obeyed_after_the_step_and_that_is_said(tmp_path: Path) -> None:
    """psi is the signal's there, and not that of variances, which nobody has measured."""
    elastic, optimizer = job(GRANT, tmp_path)
    x, y = models.data()
    psi = []
    for epoch in elastic.epochs(9):
        for step in range(4):
            nn.functional.cross_entropy(elastic.model(x[:16]), y[:16]).backward()
            if (epoch, step) == (3, 1):
                shared = {**GRANT, "min_frozen_layers": 2, "shared": True}
                (tmp_path / "grant.json").write_text(json.dumps(shared))
            optimizer.step()
            optimizer.zero_grad()
            if epoch == 3:
                psi.append((elastic.frozen_layers, elastic._engine.psi, elastic._decider.rule.signal()))
        if epoch == 3:
            break
        elastic.end_epoch(metric=0.1)
    assert [depth for depth, *_ in psi] == [0, 2, 2, 2]
    _, worth, signal = psi[1]
    assert worth == pytest.approx(float(signal_worth(signal)[2]))
    assert [(one.frozen_layers, one.min_frozen_layers) for one in reports(tmp_path, protocol.Bounded)] == [(2, 2)]
    assert {one.min_frozen_layers for one in reports(tmp_path, protocol.Progress)} == {0}
    elastic.close()


def test_another_rule_in_its_place_is_not_asked_at_its_times(tmp_path: Path) -> None:
    elastic, optimizer = job({**GRANT, "rule": "progress", "freezing": "freezeout"}, tmp_path)
    run(elastic, optimizer, epochs=2)
    assert [one.step for one in reports(tmp_path, protocol.Progress)] == [4, 8]


def test_its_memory_survives_a_resize(tmp_path: Path) -> None:
    """Stopped while the scheduler holds two layers frozen; the next attempt goes on with the same shares."""
    told = GRANT, {**GRANT, "min_frozen_layers": 2}, {**GRANT, "min_frozen_layers": 2}
    states = []
    for attempt, grant in enumerate(told):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if attempt:
            (tmp_path / str(attempt - 1) / "checkpoint").rename(folder / "checkpoint")
        elastic, optimizer = job(grant, folder)
        if attempt < 2:
            run(elastic, optimizer, epochs=2)
        else:
            elastic.begin(9)
            elastic.close()
        states.append(elastic._decider.rule.state_dict())
    assert states[2] == states[1]
    assert len(states[1]["kept"]) == 2
    assert [one.min_frozen_layers for one in reports(tmp_path / "2", protocol.Started)] == [2]


# --- the scheduler's end


def reported(**changes: Any) -> protocol.Progress:
    numbers = dict.fromkeys(("psi", "throughput", "step_s", "effective_progress", "mem_bytes"), 1.0)
    nothing = dict.fromkeys(("remaining_samples", "metric", "variance", "sqr_norm", "util_pct", "profile"))
    counts = {"time_s": 2.0, "epoch": 1, "step": 9, "samples": 9, "effective_samples": 9.0, "frozen_layers": 0}
    return protocol.Progress(**{**numbers, **nothing, **counts, "reason": "", **changes})


def running(*told: protocol.Progress, profile: Any) -> JobState:
    spec = job_spec(gpus=(1, 2))
    state = JobState(spec=spec, oracle_duration_s=None, submit_s=0.0, profile=profile)
    for report in told:
        update(state, progress_event(spec, 1, report, 0))
    return state


def layered(flops: Sequence[float]) -> Any:
    from icefrog.profile import LayerCost
    from icefrog.testing.builders import profile

    return profile(layers=tuple(LayerCost(name=str(i), flops=f, param_bytes=1e6) for i, f in enumerate(flops)))


def test_what_a_live_job_reports_prices_its_depths() -> None:
    """Half of the layers, which cost most, hold a tenth of the signal: frozen, at worth .9^.5."""
    signal = (0.05, 0.05, 0.4, 0.5)
    costs = layered([9e9, 9e9, 1e9, 1e9])
    spec_view = view(running(reported(signal=signal), profile=costs), 60.0)
    for freezing in ("signal", "tuner"):  # it goes by what it reports, whatever others do
        best = candidates(spec_view, cluster(), 10.0, Pricing(freezing=freezing))[0]
        assert best.config.frozen_layers == 2
        assert best.estimate.psi == pytest.approx(0.9**0.5)
    nothing = candidates(spec_view, cluster(), 10.0, Pricing())[0]
    assert nothing.config.frozen_layers == 0


def test_a_job_that_goes_by_eq_3_again_is_priced_by_it() -> None:
    told = reported(signal=(0.05, 0.05, 0.4, 0.5)), reported(variance=(1.0, 1.0, 1.0, 97.0), sqr_norm=(1.0,) * 4)
    spec_view = view(running(*told, profile=layered([9e9, 9e9, 1e9, 1e9])), 60.0)
    best = candidates(spec_view, cluster(), 10.0, Pricing(freezing="signal"))[0]
    assert best.estimate.psi == pytest.approx(0.97)


def test_the_depth_in_force_is_priced_however_deep() -> None:
    """Three of four layers, behind which half of the signal is left: nobody would offer that, yet there it is."""
    told = reported(signal=(0.1, 0.2, 0.2, 0.5), frozen_layers=3, psi=0.5**0.5)
    spec_view = view(running(told, profile=layered([9e9, 9e9, 9e9, 1e9])), 60.0)
    best = candidates(spec_view, cluster(), 10.0, Pricing(freezing="signal"))[0]
    assert (best.config.frozen_layers, best.estimate.psi) == (3, pytest.approx(0.5**0.5))


def test_old_reports_read_and_nonsense_is_refused() -> None:
    new = json.loads(protocol.encode(reported(signal=(0.5, 0.5))))
    old = {key: value for key, value in new.items() if key not in ("signal", "min_frozen_layers")}
    decoded = protocol.decode(json.dumps(old))
    assert isinstance(decoded, protocol.Progress)
    assert decoded.signal is None
    assert decoded.min_frozen_layers == 0
    assert nonsense(decoded) == ""
    assert "statistics" in nonsense(reported(signal=(0.5, -0.1)))
    assert "length" in nonsense(reported(signal=(0.5, 0.5), variance=(1.0,)))
    assert "frozen_layers" in nonsense(protocol.Bounded(time_s=1.0, frozen_layers=-1, min_frozen_layers=0))
