"""Rules on real training: who is asked when, what they are told, and that the runtime obeys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import models
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import Guards, LayerElastic, Stopped, protocol
from icefrog.runtime.parallel.single import Single
from icefrog.runtime.rules import (
    RULES,
    AutoFreeze,
    Egeria,
    Fixed,
    FreezeOut,
    FreezingRule,
    Gradients,
    Hands,
    Linear,
    PipeTransformer,
    Proposal,
    Situation,
)
from icefrog.spec import RuleName, Target
from icefrog.testing.rules import situation


def make(rule, model=None, **options):  # type: ignore[no-untyped-def]
    model = model if model is not None else models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return LayerElastic(model, optimizer, rule=rule, **{"env": {}, **options}), optimizer


def loop(elastic, optimizer, max_epochs, *, epochs=None, losses=False):  # type: ignore[no-untyped-def]
    """Epochs of 4 steps of 16 samples; returns the decisions."""
    x, y = models.data()
    decisions = []
    for epoch in elastic.epochs(max_epochs):
        for at in range(0, len(x), 16):
            loss = nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16])
            loss.backward()
            if losses:
                elastic.note_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
        decisions.append(elastic.end_epoch(metric=0.1 * (epoch + 1)))
        if epochs is not None and len(decisions) == epochs:
            break
    return decisions


class Recorder(FreezingRule):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[Situation] = []
        self.steps: list[int] = []

    def propose(self, now: Situation) -> Proposal:
        self.told.append(now)
        return now.at(1 if now.epoch >= 2 else 0, "as I like")

    def observe(self, hands: Hands) -> None:
        self.steps.append(hands.step)
        live = hands.layers[hands.frozen_layers :]
        assert all(param.grad is not None for layer in live for param in layer.params.values())


def test_a_rule_is_told_everything_and_obeyed() -> None:
    rule = Recorder()
    elastic, optimizer = make(rule, samples_per_epoch=64, target=Target(value=99.0))
    decisions = loop(elastic, optimizer, 6, epochs=6, losses=True)
    assert [d.frozen_layers for d in decisions] == [0, 1, 1, 1, 1, 1]
    assert decisions[1].reason == "as I like"
    assert [now.step for now in rule.told] == [0, 4, 8, 12, 16, 20, 24]
    assert [now.epoch for now in rule.told] == list(range(7))
    assert rule.steps == list(range(24))
    first, last = rule.told[0], rule.told[-1]
    assert (first.profile, first.gradients, first.train_loss, first.step_s) == (None, None, None, 0.0)
    assert last.frozen_layers == 1
    assert last.bounds.max_frozen == 3
    assert last.metrics == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert (last.best_metric, last.stalled) == (pytest.approx(0.6), 0)
    assert last.gradients is None or len(last.gradients.fresh) == 4
    assert last.train_loss is not None
    assert 0 < last.train_loss < 2
    assert last.learning_rates == (0.05,)
    assert last.steps_since_move == 16
    assert last.samples == 384
    assert 0 < last.share_done < 1
    assert last.throughput(0) is not None
    assert all(layer.flops > 0 for layer in last.layers)
    assert rule.name == "Recorder"


def test_a_function_is_a_rule() -> None:
    elastic, optimizer = make(lambda now: now.at(2, "two from the second epoch on") if now.epoch else now.stay("wait"))
    assert [d.frozen_layers for d in loop(elastic, optimizer, 9, epochs=3)] == [2, 2, 2]


def test_a_proposal_out_of_bounds_is_cut_and_says_so() -> None:
    elastic, optimizer = make(lambda now: Proposal(7, "all of it"), max_fraction=0.5)
    decisions = loop(elastic, optimizer, 9, epochs=2)
    assert decisions[0].frozen_layers == 2
    assert "bounds 0..2" in decisions[0].reason


def test_fixed_freezes_before_the_first_step() -> None:
    model = models.mlp()
    before = models.bytes_of(model)
    elastic, optimizer = make(Fixed(2), model)
    loop(elastic, optimizer, 9, epochs=1)
    after = models.bytes_of(model)
    assert all(after[name] == before[name] for name in before if name.startswith(("0.", "1.")))
    assert all(after[name] != before[name] for name in before if name.startswith(("2.", "3")))


def test_linear_rises_with_progress() -> None:
    elastic, optimizer = make(Linear(0.0, 1.0), samples_per_epoch=64, guards=None)
    depths = [d.frozen_layers for d in loop(elastic, optimizer, 8)]
    assert depths == sorted(depths)
    assert depths[0] == 0
    assert depths[-1] == 3


def test_names_and_their_mistakes() -> None:
    assert {"auto", *RULES} == set(get_args(RuleName))
    for name in RULES:
        assert make(name)[0].rule.name == name
    with pytest.raises(UserError, match="no freezing rule 'tunner'"):
        make("tunner")
    with pytest.raises(UserError, match="guards belong"):
        make(Fixed(1), guards=Guards())
    for wrong in (lambda: Fixed(-1), lambda: Linear(0.5, 0.5), lambda: FreezeOut(0.0), lambda: PipeTransformer(1)):
        with pytest.raises(UserError):
            wrong()


@pytest.mark.parametrize(
    ("grant", "rule", "active"),
    [
        ({"freezing": "freezeout"}, None, "freezeout"),
        ({"freezing": "freezeout"}, Fixed(2), "freezeout"),  # the policy reckons with it
        ({"freezing": "freezeout"}, "none", "none"),  # what the script refuses, nobody does
        ({"freezing": "freezeout", "rule": "none"}, None, "none"),
        ({"freezing": "freezeout", "rule": "none"}, Fixed(2), "none"),
        ({"freezing": "tuner"}, Fixed(2), "fixed"),
        ({"freezing": "tuner"}, None, "tuner"),
    ],
)
def test_the_grant_names_the_rule(grant, rule, active, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    granted = {"num_gpus": 1, "batch_per_gpu": 16, "global_batch": 16, "max_epochs": 3, **grant}
    env = {protocol.ENV_ATTEMPT_DIR: str(tmp_path), protocol.ENV_GRANT: json.dumps(granted)}
    elastic, optimizer = make(rule, env=env)
    loop(elastic, optimizer, 3, epochs=1)
    assert elastic._decider.active.name == active


def test_freezing_changes_with_the_grant_while_running(tmp_path: Path) -> None:
    granted = {"num_gpus": 1, "batch_per_gpu": 16, "global_batch": 16, "max_epochs": 9}
    env = {protocol.ENV_ATTEMPT_DIR: str(tmp_path), protocol.ENV_GRANT: json.dumps(granted)}
    elastic, optimizer = make(None, env=env)
    for epoch in elastic.epochs(9):
        models.train(elastic, optimizer, 4)
        if epoch == 0:
            (tmp_path / "grant.json").write_text(json.dumps({**granted, "freezing": "freezeout"}))
        reason = elastic.end_epoch(metric=0.1).reason
        if epoch == 1:
            break
    assert elastic._decider.active.name == "freezeout"
    assert "schedule" in reason


def test_pipetransformer_by_hand() -> None:
    """Ten layers: at most a third of the open ones at a time, and not beyond the smallest gradient."""

    def depth(frozen: int, *norms: float) -> int:
        now = situation([1.0] * 10, frozen)
        return (
            PipeTransformer().propose(replace(now, gradients=Gradients((1.0,) * 10, norms, (True,) * 10))).frozen_layers
        )

    assert depth(0, *[9.0] * 8, 1.0, 9.0) == 3
    assert depth(3, *[0.0] * 3, *[9.0] * 5, 1.0, 9.0) == 5
    assert depth(3, *[0.0] * 3, 9.0, 1.0, *[9.0] * 5) == 4
    assert depth(8, *[0.0] * 8, 9.0, 1.0) == 8
    assert depth(0, 1.0, *[9.0] * 9) == 0


@pytest.mark.parametrize("rule", [AutoFreeze, Egeria])
def test_rules_that_look_at_gradients_refuse_a_model_in_parts(rule, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(Single, "sharded", True)
    with pytest.raises(UserError, match="whole gradients"):
        make(rule())


@pytest.mark.parametrize(
    "rule",
    [
        lambda: FreezeOut(0.5),
        lambda: FreezeOut(0.5, "cubed"),
        AutoFreeze,
        lambda: Egeria(evaluate_every=3, window=2, tolerance=0.5, warmup_share=0.0),
        lambda: Linear(0.0, 1.0),
        lambda: Fixed(2, 0.3),
        PipeTransformer,
    ],
    ids=["freezeout", "freezeout-cubed", "autofreeze", "egeria", "linear", "fixed", "pipetransformer"],
)
def test_a_stopped_and_resumed_job_is_the_same_to_the_bit(rule, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Stopped in the middle of an epoch and of an interval, at step 21 of 48 (each rule decides every 6 steps, too)."""

    def fit(folder: Path, attempt: str, stop_at: int | None):  # type: ignore[no-untyped-def]
        (folder / attempt).mkdir(parents=True)
        env = {protocol.ENV_ATTEMPT_DIR: str(folder / attempt), protocol.ENV_CHECKPOINT_DIR: str(folder / "kept")}
        model = models.mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        elastic = LayerElastic(model, optimizer, rule=rule(), global_batch=16, tune_every_steps=6, env=env)
        sampler = elastic.sampler(64)
        x, y = models.data()
        for epoch in elastic.epochs(20):
            for rows in sampler:
                nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
                elastic.note_loss(1.0)
                if elastic._at.step == stop_at:
                    (folder / attempt / "stop").touch()
                optimizer.step()
                optimizer.zero_grad()
            elastic.end_epoch(metric=0.1)
            if epoch == 11:
                break
        return elastic, model

    whole, straight = fit(tmp_path / "whole", "a", None)
    with pytest.raises(Stopped):
        fit(tmp_path / "parts", "a", 20)
    resumed, model = fit(tmp_path / "parts", "b", None)
    assert resumed._decider.state_dict() == whole._decider.state_dict()
    assert resumed.frozen_layers == whole.frozen_layers
    assert models.bytes_of(model) == models.bytes_of(straight)
