"""The training API, as the design's contract has it."""

from __future__ import annotations

import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.runtime import Guards, LayerElastic, protocol
from icefrog.spec import Target

PAPER = Guards(0, 0, 0, 0)


def loop(elastic: LayerElastic, optimizer: torch.optim.Optimizer, max_epochs: int, metrics=None):  # type: ignore[no-untyped-def]
    """The contract's loop, on 64 samples in batches of 16; returns the decisions."""
    model = elastic.model
    x, y = models.data()
    decisions = []
    for epoch in elastic.epochs(max_epochs):
        for at in range(0, len(x), 16):
            loss = nn.functional.cross_entropy(model(x[at : at + 16]), y[at : at + 16])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        decisions.append(elastic.end_epoch(metric=metrics[epoch] if metrics else 0.1))
    return decisions


def make(**options):  # type: ignore[no-untyped-def]
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return LayerElastic(model, optimizer, env={}, **options), optimizer


def test_unfrozen_training_ends_after_max_epochs() -> None:
    elastic, optimizer = make(rule="none")
    decisions = loop(elastic, optimizer, 3)
    assert [d.effective_samples for d in decisions] == [64, 128, 192]
    assert [d.done for d in decisions] == [False, False, True]
    assert elastic.outcome == "completed"


def test_target_ends_training() -> None:
    elastic, optimizer = make(rule="none", target=Target(value=0.9))
    decisions = loop(elastic, optimizer, 10, metrics=[0.2, 0.95, 0.99])
    assert len(decisions) == 2
    assert elastic.outcome == "completed"


def test_p0_without_the_target_is_target_missed() -> None:
    elastic, optimizer = make(rule="none", target=Target(value=0.9))
    assert len(loop(elastic, optimizer, 2, metrics=[0.2, 0.3])) == 2
    assert elastic.outcome == "target_missed"


def test_frozen_samples_are_worth_psi_so_more_epochs_are_run() -> None:
    elastic, optimizer = make(rule="none")
    models.train(elastic, optimizer, 24)  # statistics first
    elastic._at.__init__()  # type: ignore[misc]
    elastic.freeze(2)
    psi = elastic.psi
    assert 0 < psi < 1
    decisions = loop(elastic, optimizer, 3)
    assert len(decisions) > 3
    assert decisions[0].effective_samples < 64
    assert decisions[-1].effective_samples >= 192 - 1e-6
    steps = np.diff([0.0] + [d.effective_samples for d in decisions])
    assert np.all(steps > 0)


def test_nothing_freezes_before_the_statistics_are_ready() -> None:
    elastic, optimizer = make(guards=PAPER)
    decisions = loop(elastic, optimizer, 4)  # 16 steps
    assert all(d.frozen_layers == 0 and "not ready" in d.reason for d in decisions)


def test_decisions_follow_the_tuner_within_bounds() -> None:
    elastic, optimizer = make(guards=PAPER, tune_every_steps=4, max_fraction=0.5)
    decisions = loop(elastic, optimizer, 12)
    assert elastic.profile() is not None
    assert all(0 <= d.frozen_layers <= 2 for d in decisions)
    assert all(0 < d.psi <= 1 and d.effective_progress > 0 for d in decisions[1:])
    assert elastic.frozen_layers == decisions[-1].frozen_layers


def test_the_grant_narrows_the_bounds_and_may_change_while_running(tmp_path: Path) -> None:
    grant = {"num_gpus": 1, "batch_per_gpu": 16, "global_batch": 16, "max_epochs": 3, "min_frozen_layers": 2}
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    env = {protocol.ENV_ATTEMPT_DIR: str(tmp_path), protocol.ENV_GRANT: json.dumps(grant)}
    elastic = LayerElastic(model, optimizer, env=env)
    decisions = []
    for epoch in elastic.epochs(3):
        models.train(elastic, optimizer, 4)
        if epoch == 0:
            (tmp_path / "grant.json").write_text(json.dumps({**grant, "min_frozen_layers": 1, "max_frozen_layers": 1}))
        decisions.append(elastic.end_epoch(metric=0.1))
        if epoch == 0:
            (tmp_path / "grant.json").unlink()
        if len(decisions) == 3:
            break
    assert [d.frozen_layers for d in decisions] == [1, 1, 1]
    progress = [
        line
        for line in map(protocol.decode, (tmp_path / "reports.jsonl").read_bytes().splitlines())
        if isinstance(line, protocol.Progress)
    ]
    assert [p.frozen_layers for p in progress] == [1, 1, 1]
    assert all(p.mem_bytes > 0 and p.step_s >= 0 for p in progress)


def test_forgetting_end_epoch_is_an_error() -> None:
    elastic, _ = make()
    with pytest.raises(UserError, match="end_epoch"):
        for _ in elastic.epochs(2):
            pass


def test_state_dict_round_trip_in_memory() -> None:
    elastic, optimizer = make(rule="none")
    models.train(elastic, optimizer, 25)
    elastic.freeze(1)
    models.train(elastic, optimizer, 5)
    state = elastic.state_dict()
    other, _ = make(rule="none")
    other.load_state_dict(state)
    assert other.frozen_layers == 1
    assert other.psi == elastic.psi
    assert models.bytes_of(other.model) == models.bytes_of(elastic.model)


def test_no_batch_size_is_an_error() -> None:
    class Weird(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, scale: float) -> torch.Tensor:
            return (self.w * scale).sum()

    model = Weird()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, env={})
    elastic.model(2.0).backward()
    with pytest.raises(UserError, match="batch size"):
        optimizer.step()


def test_close_gives_the_optimizer_back() -> None:
    elastic, optimizer = make()
    elastic.close()
    assert "step" not in vars(optimizer)


def test_a_sharer_is_frozen_deep_enough_from_its_first_step_and_from_the_step_after_a_new_grant(tmp_path: Path) -> None:
    grant = {
        "num_gpus": 1,
        "batch_per_gpu": 16,
        "global_batch": 16,
        "max_epochs": 3,
        "min_frozen_layers": 1,
        "shared": True,
    }
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    env = {protocol.ENV_ATTEMPT_DIR: str(tmp_path), protocol.ENV_GRANT: json.dumps(grant)}
    elastic = LayerElastic(model, optimizer, env=env)
    epochs = elastic.epochs(3)
    next(epochs)
    assert elastic.frozen_layers == 1  # before any step: its partner may be there already
    models.train(elastic, optimizer, 2)
    (tmp_path / "grant.json").write_text(json.dumps({**grant, "min_frozen_layers": 2}))
    models.train(elastic, optimizer, 1)
    assert elastic.frozen_layers == 2
    assert elastic.profile() is None  # steps beside a partner say nothing of the job alone
    (tmp_path / "grant.json").write_text(json.dumps({**grant, "min_frozen_layers": 0, "shared": False, "pad": 1}))
    models.train(elastic, optimizer, 4)
    assert elastic.profile() is not None
    elastic.close()


@pytest.mark.parametrize("value", [0.51, 0.7, 0.97])
def test_a_metric_equal_to_the_target_reaches_it_and_is_reported_as_given(value: float) -> None:
    elastic, optimizer = make(rule="none", target=Target(value=value), samples_per_epoch=64)
    decision = loop(elastic, optimizer, 9, metrics=[value])[0]
    assert decision.done
    assert decision.metric == value


def test_step_with_a_closure_trains_as_without() -> None:
    x, y = models.data()
    for kind in (torch.optim.SGD, torch.optim.LBFGS):
        model = models.mlp()
        twin = models.mlp()
        optimizer = kind(model.parameters(), lr=0.1)
        plain = kind(twin.parameters(), lr=0.1)
        elastic = LayerElastic(model, optimizer, rule="none", env={})

        def closure(net: nn.Module, of: torch.optim.Optimizer) -> torch.Tensor:
            of.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            mine = optimizer.step(lambda: closure(elastic.model, optimizer))  # noqa: B023 - called at once
            assert torch.equal(mine, plain.step(lambda: closure(twin, plain)))  # noqa: B023
        assert elastic._at.samples == 3 * 64
        assert models.bytes_of(model) == models.bytes_of(twin)


def test_samples_of_the_users_own_accumulation_all_count() -> None:
    elastic, optimizer = make(rule="none")
    x, y = models.data()
    for _ in range(2):
        for at in (0, 16, 32):
            nn.functional.cross_entropy(elastic.model(x[at : at + 16]), y[at : at + 16]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert elastic._at.samples == 96
    two_views = elastic.model(x[:16]) - elastic.model(x[:16] + 1)  # one batch, seen twice, one backward
    two_views.square().mean().backward()
    optimizer.step()
    assert elastic._at.samples == 96 + 16


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, accum: int) -> None:
    model = models.mlp().to(dtype)
    model[3].float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model[3].register_forward_pre_hook(lambda _module, args: (args[0].float(),))
    elastic = LayerElastic(model, optimizer, rule="none", accum_steps=accum, env={})
    x, y = models.data()
    for _ in range(48):
        nn.functional.cross_entropy(elastic.model(x.to(dtype)), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert np.all(np.isfinite(elastic._engine.tracker.variance))


def test_a_move_inside_an_accumulation_waits_for_the_optimizer_step() -> None:
    elastic, optimizer = make(rule="none", accum_steps=2)
    models.train(elastic, optimizer, 3)
    elastic.freeze(1)
    assert elastic.frozen_layers == 0
    assert elastic.end_epoch().frozen_layers == 1  # not forgotten by a decision in between
    state = elastic.state_dict()
    models.train(elastic, optimizer, 1)
    assert elastic.frozen_layers == 1
    assert elastic._at.samples_per_epoch == 48  # three micro-batches, two of them stepped
    other, _ = make(rule="none", accum_steps=2)
    other.load_state_dict(state)
    assert other.frozen_layers == 1


def test_a_layer_that_the_user_opens_later_is_adopted() -> None:
    model = models.mlp()
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    models.train(elastic, optimizer, 2)
    model[1].requires_grad_(True)
    before = models.bytes_of(model[1])
    models.train(elastic, optimizer, 2)
    assert models.bytes_of(model[1]) == before  # nobody would synchronise it
    with pytest.warns(UserWarning, match=r"put right: 1\.0\.weight"):
        elastic.end_epoch()
    models.train(elastic, optimizer, 1)
    assert models.bytes_of(model[1]) != before
    elastic.freeze(2)
    assert not model[1][0].weight.requires_grad
