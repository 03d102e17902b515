"""The rule that follows the signal: worked decisions, the meter against full gradients, and what it does in training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import nn

from icefrog.errors import UserError
from icefrog.estimate.progress import seconds_by_depth, signal_share, signal_worth
from icefrog.runtime import LayerElastic
from icefrog.runtime.layers import Layer
from icefrog.runtime.rules import FreezingRule, Guards, Hands, Progress, Proposal, Situation, make_rule
from icefrog.runtime.rules.base import Bounds, CacheState
from icefrog.runtime.rules.signal import SignalMeter
from icefrog.spec import Target
from icefrog.testing.rules import RuleContract, measured_profile, situation

USABLE = CacheState(0, 0, "nothing is frozen")


def weights(learnt: bool) -> torch.Tensor:
    """A matrix of independent weights; with one strong direction in it where something was learnt."""
    noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    return noise + (2.0 * torch.outer(torch.arange(16.0).cos(), torch.arange(16.0).sin()) if learnt else 0.0)


def feed(rule: FreezingRule, signal: list[float], steps: int = 20, learnt: bool = False) -> None:
    """Steps whose gradients have these squared norms."""
    params = [nn.Parameter(weights(learnt)) for _ in signal]
    layers = [Layer(str(i), [], {str(i): param}) for i, param in enumerate(params)]
    for step in range(steps):
        for param, value in zip(params, signal, strict=True):
            param.grad = torch.full((16, 16), value**0.5 / 16)
        rule.observe(Hands(step, nn.Identity(), layers, 0, torch.optim.SGD(params, lr=1.0)))


def test_worth_is_the_share_of_the_signal_that_still_trains() -> None:
    np.testing.assert_allclose(signal_share([1.0, 2.0, 3.0, 4.0])[:4], [1.0, 0.9, 0.7, 0.4])
    np.testing.assert_allclose(signal_worth([1.0, 2.0, 3.0, 4.0])[:4], np.sqrt([1.0, 0.9, 0.7, 0.4]))


def test_frozen_layers_keep_their_share_while_the_others_learn() -> None:
    """Frozen at 2 with worth .7; since then the suffix's signal fell to a tenth, half of it now in the last layer."""
    np.testing.assert_allclose(signal_share([1.0, 2.0, 0.35, 0.35], kept=[0.1, 0.2])[:4], [1.0, 0.9, 0.7, 0.35])


def test_a_cached_prefix_spares_its_share_of_the_forward_pass() -> None:
    """4 equal layers, forward 16 ms, backward 32 ms: half frozen takes 32 ms, and 24 with the prefix read back."""
    now = situation().config
    profile = measured_profile(4)
    np.testing.assert_allclose(seconds_by_depth(profile, now, 1), [0.048, 0.040, 0.032, 0.024], rtol=1e-6)
    cached = seconds_by_depth(profile, now, 1, forward_share=1 / 3, cached=True)
    np.testing.assert_allclose(cached, [0.048, 0.036, 0.024, 0.012], rtol=1e-6)


def test_layers_that_had_learnt_freeze_at_once_and_fresh_ones_after_the_warm_up() -> None:
    early = situation(share_done=0.05, cache=USABLE)
    pretrained, fresh = Progress(), Progress()
    feed(pretrained, [1.0, 1.0, 4.0, 4.0], learnt=True)
    feed(fresh, [1.0, 1.0, 4.0, 4.0])
    assert pretrained.propose(early).frozen_layers == 2  # .8^.5 of the progress in half of the time
    assert "fresh" in fresh.propose(early).reason
    assert fresh.propose(replace(early, share_done=0.2)).frozen_layers == 2


def test_layers_that_had_learnt_freeze_deeper() -> None:
    """8 layers of one signal: behind 5 of them 3/8 is left, behind 4 one half, behind 3 5/8."""
    now = situation([1.0] * 8, cache=USABLE)
    pretrained, fresh = Progress(margin=0.0), Progress(margin=0.0)
    feed(pretrained, [1.0] * 8, learnt=True)
    feed(fresh, [1.0] * 8)
    assert pretrained.propose(now).frozen_layers == 4
    assert fresh.propose(now).frozen_layers == 3


def test_layers_that_had_learnt_freeze_beyond_the_middle_where_they_carry_little_of_the_signal() -> None:
    """Behind 5 of 8 layers: 72 % of the signal is left, or 56 %."""
    now = situation([1.0] * 8, cache=USABLE)
    for last, depth in ((3.0, 5), (1.0, 4)):
        pretrained, fresh = Progress(margin=0.0), Progress(margin=0.0)
        for rule, learnt in ((pretrained, True), (fresh, False)):
            feed(rule, [0.3, 0.7, 0.7, 0.7, 0.7, 2.0, last, last], learnt=learnt)
        assert pretrained.propose(now).frozen_layers == depth
        assert fresh.propose(now).frozen_layers <= 4


def test_freezing_that_does_not_pay_is_left_alone() -> None:
    rule = Progress()
    feed(rule, [9.0, 9.0, 1.0, 1.0])
    assert rule.propose(situation(cache=USABLE)).frozen_layers == 0


def test_layers_that_carry_much_of_the_signal_stay_open() -> None:
    """Behind two layers .55 of the signal is left, which would pay; behind one .8."""
    careful, bold = Progress(margin=0.0), Progress(margin=0.0, least_signal=0.5)
    for rule in (careful, bold):
        feed(rule, [2.0, 2.5, 3.5, 2.0])
    assert careful.propose(situation(cache=USABLE)).frozen_layers == 1
    assert bold.propose(situation(cache=USABLE)).frozen_layers == 2


def test_without_a_cache_the_forward_pass_counts() -> None:
    """Worth .6^.5: half of the time pays with the cache, two thirds without it do not."""
    with_cache, without = Progress(), Progress()
    for rule in (with_cache, without):
        feed(rule, [2.0, 2.0, 3.0, 3.0])
    assert with_cache.propose(situation(cache=USABLE)).frozen_layers == 2
    assert without.propose(situation()).frozen_layers == 0


def test_a_cache_that_never_hits_opens_the_layers_again() -> None:
    rule = Progress(least_signal=0.0)
    feed(rule, [3.0, 3.0, 2.0, 2.0])
    assert rule.propose(situation(cache=USABLE)).frozen_layers == 2
    later = situation(frozen_layers=2, cache=CacheState(0, 40, None), steps_since_move=40)
    assert rule.propose(later).frozen_layers == 0
    assert rule.propose(situation(cache=USABLE)).frozen_layers == 0  # and it is not believed in again


def test_a_stalled_metric_opens_half_and_depth_never_returns() -> None:
    rule = Progress(patience=2)
    feed(rule, [0.1] * 4 + [5.0] * 4)
    start = situation([1.0] * 8, cache=USABLE, target=Target(value=0.9), metrics=(0.5,), best_metric=0.5)
    assert rule.propose(start).frozen_layers == 4
    depth = 4
    for expected, metrics in (
        (4, (0.5, 0.6)),
        (4, (0.5, 0.6, 0.6)),
        (2, (0.5, 0.6, 0.6, 0.6)),
        (2, (0.5, 0.6, 0.6, 0.6, 0.6)),
    ):
        now = situation(
            [1.0] * 8,
            depth,
            cache=CacheState(9, 1, None),
            target=Target(value=0.9),
            metrics=metrics,
            best_metric=0.6,
            stalled=len(metrics) - 2,
        )
        depth = rule.propose(now).frozen_layers
        assert depth == expected, metrics
    opened = replace(start, metrics=(0.5,) * 9, stalled=0)
    assert rule.propose(opened).frozen_layers <= 2


class OpensAt(FreezingRule):
    """Two layers frozen for steps 2 and 3, then none."""

    def propose(self, now: Situation) -> Proposal:
        depth = {2: 2, 3: 2}.get(now.step, 0)
        return Proposal(depth, "as written", forget_momentum=True)


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam])
def test_layers_that_open_forget_momentum_and_nothing_else(make: Any) -> None:
    """Two large gradients, a freeze, an opening: first moments start from zero, second moments and counts go on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = make(model.parameters(), lr=1e-4)
    elastic = LayerElastic(model, optimizer, rule=OpensAt(), samples_per_epoch=32, tune_every_steps=1, env={})
    kept: dict[str, torch.Tensor] = {}
    for step in range(4):
        elastic.model(torch.full((8, 2), 10.0 if step < 2 else 1.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state[model[0].weight]
        first = state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"]
        second = {name: value.clone() for name, value in state.items() if value is not first}
        assert bool(first.any()) == (step < 3)
        if step >= 2:  # frozen after two steps, opened after four
            assert all(torch.equal(value, kept[name]) for name, value in second.items())
        kept = second
    elastic.close()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_meter_agrees_with_gradients_of_all_samples(make: Any) -> None:
    """Shares of G . P G, G over all data, at a learning rate too small to move; batches of half the data."""
    torch.manual_seed(0)
    model = models.mlp()
    x, y = models.data()
    optimizer = make(model.parameters(), lr=1e-9)
    elastic = LayerElastic(model, optimizer, rule="none", samples_per_epoch=64, env={})
    meter, generator = SignalMeter(), torch.Generator().manual_seed(1)
    for step in range(400):
        chosen = torch.randperm(len(x), generator=generator)[: len(x) // 2]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
        meter.observe(Hands(step, model, elastic.layers, 0, optimizer))
        optimizer.step()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    exact = []
    for layer in elastic.layers:
        total = 0.0
        for param in layer.params.values():
            assert param.grad is not None
            state = optimizer.state[param]
            scale = state["exp_avg_sq"].sqrt() + 1e-8 if "exp_avg_sq" in state else 1.0
            total += float((param.grad.square() / scale).sum())
        exact.append(total)
    measured = meter.progress()
    elastic.close()
    assert measured is not None
    np.testing.assert_allclose(np.array(measured) / sum(measured), np.array(exact) / sum(exact), atol=0.05)


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="max_share=2"):
        Progress(max_share=2)


@pytest.mark.parametrize(
    "make",
    [Progress, lambda: Progress(margin=0.0, warmup_share=0.0, patience=1)],
    ids=["default", "eager"],
)
class TestContract(RuleContract):
    def observe(self, rule: FreezingRule, now: Situation) -> None:
        """20 steps of gradients drawn from the situation's step; a few overflow."""
        rng = np.random.default_rng(now.step)
        params = [nn.Parameter(torch.from_numpy(rng.normal(size=3))) for _ in range(now.num_layers)]
        layers = [Layer(str(i), [], {str(i): param}) for i, param in enumerate(params)]
        for step in range(now.step, now.step + 20):
            for param in params[now.frozen_layers :]:
                param.grad = torch.from_numpy(rng.normal(size=3) + 0.5) * (np.inf if rng.random() < 0.02 else 1.0)
            rule.observe(Hands(step, nn.Identity(), layers, now.frozen_layers, None))


def test_bounds_are_obeyed() -> None:
    rule = Progress()
    feed(rule, [0.1, 0.1, 4.0, 4.0])
    assert rule.propose(situation(bounds=Bounds(0, 1), cache=USABLE)).frozen_layers == 1


def test_it_is_the_default_of_a_job_on_its_own() -> None:
    """Where whole gradients are to be had, and no guards for the tuner are given."""
    assert make_rule(None).name == "progress"
    assert make_rule(None, sharded=True).name == "tuner"
    assert make_rule(None, Guards()).name == "tuner"


@pytest.mark.parametrize(("given", "measured"), [({}, False), ({"stats_every": 1}, True), ({"rule": "tuner"}, True)])
def test_a_job_on_its_own_measures_no_statistics_for_it(given: dict[str, Any], measured: bool) -> None:
    """Unless they are asked for: on a large model they cost more than the rule's own look."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    elastic = LayerElastic(model, optimizer, samples_per_epoch=8, env={}, **given)
    for _ in range(30):
        elastic.model(torch.randn(8, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (elastic._engine.tracker.stats() is not None) == measured
    elastic.close()
