"""The global batch moves between epochs: every sample once, the rate by its rule, the same bits after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.estimate.batch import BatchMove
from icefrog.estimate.tuner import efficiency
from icefrog.runtime import LayerElastic, Pipeline, batching, protocol
from icefrog.runtime.batching import Batching
from icefrog.runtime.rules import Guards
from icefrog.types import Config

SAMPLES, BASE = 96, 8
Plan = dict[int, tuple[int, int]]
"""Epochs done -> (batch, micro-steps) from then on."""


def follow(plan: Plan) -> Callable[..., BatchMove | None]:
    """In place of the choice, which depends on measured times."""

    def better(self: Batching, now: Any, frozen_layers: int, *_: Any) -> BatchMove | None:
        batch, accum = plan.get(now.epoch, (0, 0))
        if batch == 0:
            return None
        gpus = now.config.num_gpus
        return BatchMove(Config(gpus, batch // (gpus * accum), accum, frozen_layers), False, f"to {batch}")

    return better


class Lost(Exception):
    """The process is gone."""


def fit(
    plan: Plan,
    epochs: int,
    *,
    die_at: int | None = None,
    depths: dict[int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, from a checkpoint on if there is one; what was seen."""
    real, Batching._better = Batching._better, follow(plan)  # type: ignore[method-assign]
    options = {"lr_rule": "linear", "global_batch": BASE, "rule": "none", "env": {}, "elastic_batch": True} | options
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03125, momentum=0.5)
    elastic = LayerElastic(model, optimizer, **options)
    x, y = models.data(SAMPLES)
    loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_sampler=elastic.sampler(SAMPLES))
    seen: dict[int, list[int]] = {}
    rates: dict[int, list[float]] = {}
    notes, real_step = [], elastic._gate._step

    def step() -> Any:
        rates.setdefault(elastic.epoch, []).append(optimizer.param_groups[0]["lr"])
        return real_step()

    elastic._gate._step = step
    try:
        for epoch in elastic.epochs(100):
            elastic.freeze((depths or {}).get(epoch, 0))
            for (rows,) in loader:
                seen.setdefault(epoch, []).extend(rows.tolist())
                loss = nn.functional.cross_entropy(elastic.model(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if die_at is not None and elastic._at.step == die_at:
                    raise Lost
            notes.append(elastic.end_epoch().reason)
            if epoch + 1 == epochs:
                break
    except Lost:
        elastic._keeper.join()
    finally:
        Batching._better = real  # type: ignore[method-assign]
    found = {
        "model": {name: value.tolist() for name, value in elastic.state_dict()["model"].items()},
        "tracker": elastic._engine.tracker.state_dict(),
        "effective": elastic.effective_samples,
        "batch": (elastic.global_batch, elastic._engine.counting.accum_steps),
        "samples": elastic._at.samples,
        "seen": seen,
        "rates": rates,
        "notes": notes,
        "worth": elastic._decider.batching.worth,
        "phi": elastic._engine.tracker.noise_scale(),
    }
    elastic.close()
    return found


plans = st.dictionaries(st.integers(1, 5), st.sampled_from([(8, 1), (16, 1), (16, 2), (32, 1), (32, 4), (96, 1)]))


@settings(max_examples=5, deadline=None)
@given(plans)
def test_each_sample_comes_once_an_epoch_and_the_rate_follows_the_batch(plan: Plan) -> None:
    found = fit(plan, 6)
    batch = BASE
    for epoch in range(6):
        batch = plan.get(epoch, (batch, 1))[0]
        assert sorted(found["seen"][epoch]) == list(range(SAMPLES))
        assert set(found["rates"][epoch]) == {0.03125 * batch / BASE}
        assert len(found["rates"][epoch]) == -(-SAMPLES // batch)


GROWING: Plan = {2: (16, 1), 3: (32, 2), 5: (32, 1), 6: (16, 2), 7: (8, 1)}


@pytest.mark.parametrize("die_at", [24, 27, 32, 38])
def test_a_job_that_died_goes_on_to_the_same_bits(tmp_path: Path, die_at: int) -> None:
    depths = {4: 2, 6: 1}
    whole = fit(GROWING, 8, depths=depths)
    kept = {"checkpoint_dir": tmp_path, "checkpoint_every_steps": 1, "depths": depths}
    lost = fit(GROWING, 8, die_at=die_at, **kept)
    found = fit(GROWING, 8, **kept)
    for key in ("model", "tracker", "effective", "batch", "samples", "worth", "phi"):
        assert found[key] == whole[key], key
    for epoch in range(8):
        rows = [*lost["seen"].get(epoch, []), *found["seen"].get(epoch, [])]
        assert set(rows) == set(range(SAMPLES))  # those of the step that was lost came again


def test_samples_of_a_larger_batch_count_by_their_efficiency() -> None:
    before = fit({}, 4)
    found = fit({4: (32, 1)}, 5)
    assert before["effective"] == before["samples"] == 4 * SAMPLES
    moved = fit({3: (32, 1)}, 4)
    assert 0 < moved["worth"] < 1
    phi = fit({}, 3)["phi"]
    # The epoch's samples at what was known when it began.
    assert moved["effective"] == pytest.approx(3 * SAMPLES + SAMPLES * float(efficiency(phi, BASE, 32)))
    assert found["notes"][-2].endswith("; to 32")


def test_a_batch_that_does_not_move_trains_the_same_bits() -> None:
    plain = fit({}, 3, elastic_batch=False, stats_every=1)
    elastic = fit({}, 3, stats_every=1)
    assert plain == elastic


def test_noise_makes_the_batch_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real choice: labels at chance, so that a larger batch costs next to nothing and is tried, or gains, at once."""
    monkeypatch.setattr(batching, "free_bytes", lambda *_: 1e15)
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none",
        env={},
        global_batch=BASE,
        lr_rule="sqrt",
        elastic_batch=True,
        guards=Guards(0.0, 0.0, 0, 0),
    )
    x, _ = models.data(256)
    y = torch.randint(0, 3, (256,))
    monkeypatch.setattr(elastic._engine.tracker, "noise_scale", lambda: 1e6)
    sampler = elastic.sampler(256)
    for _ in elastic.epochs(100):
        for rows in sampler:
            nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        reason = elastic.end_epoch().reason
        break
    elastic.close()
    assert elastic.global_batch == 16
    assert "; batch 8 -> 16: " in reason


def test_a_trial_is_kept_only_if_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that was tried is looked at without hysteresis, and not before its speed is known."""
    asked: list[tuple[float, bool]] = []

    def better(_profile: Any, config: Config, *_: Any, hysteresis: float, may_try: bool, **__: Any) -> BatchMove | None:
        asked.append((hysteresis, may_try))
        if len(asked) == 1:
            return BatchMove(Config(1, 2 * config.batch_per_gpu), True, "tried")
        return None

    monkeypatch.setattr(batching, "better_batch", better)
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elastic = LayerElastic(
        model,
        optimizer,
        rule="none",
        env={},
        global_batch=BASE,
        lr_rule="sqrt",
        elastic_batch=True,
        guards=Guards(0.0, 0.25, 0, 0),
    )
    sampler, (x, y) = elastic.sampler(64), models.data()
    looks = []
    for epoch in elastic.epochs(100):
        for rows in sampler:
            nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        elastic.end_epoch()
        looks.append(len(asked))
        if epoch == 6:
            break
    elastic.close()
    first = looks.index(1)
    assert looks[first + 1] == 1  # 4 steps at 16 samples, of which 2 count: not known yet
    assert asked[:1] == [(0.25, True)]
    assert asked[1:2] == [(0.0, True)]
    assert set(asked[2:]) == {(0.25, True)}


def test_the_loop_is_watched_again_when_it_comes_to_accumulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batching, "_better", follow({1: (16, 2)}))
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elastic = LayerElastic(model, optimizer, rule="none", env={}, global_batch=8, lr_rule="linear", elastic_batch=True)
    sampler, (x, y) = elastic.sampler(64), models.data()

    def loop() -> None:
        for _ in elastic.epochs(3):
            for rows in sampler:
                nn.functional.cross_entropy(elastic.model(x[rows]), y[rows]).backward()
                optimizer.step()
                model.zero_grad()
            elastic.end_epoch()

    with pytest.raises(UserError, match="before all 2 micro-steps"):
        loop()
    assert elastic.epoch == 1
    elastic.close()


# --- refusals


def refused(**options: Any) -> LayerElastic:
    model = models.mlp()
    return LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), elastic_batch=True, **options)


def test_without_a_learning_rate_rule_it_is_refused() -> None:
    with pytest.raises(UserError, match="unchanged learning rate is another training") as error:
        refused(env={}, global_batch=8)
    assert "lr_rule='linear'" in error.value.hint


def test_without_the_elastic_sampler_it_is_refused() -> None:
    elastic = refused(env={}, lr_rule="sqrt")
    with pytest.raises(UserError, match="elastic sampler deals it") as error:
        elastic.begin(3)
    assert "elastic.sampler(" in error.value.hint
    elastic.close()


def test_a_pipeline_keeps_its_batch(ranks: Ranks) -> None:
    for message in ranks.run(refuse_pipeline):
        assert message == "the batch of a pipeline does not move"


def refuse_pipeline() -> str:
    with pytest.raises(UserError) as error:
        refused(lr_rule="sqrt", parallel=Pipeline(nn.functional.cross_entropy))
    refused(lr_rule="sqrt").close()  # the process group is left to the next one
    return error.value.message


# --- under a scheduler


def granted(folder: Path, **changes: Any) -> dict[str, str]:
    grant = {
        "num_gpus": 1,
        "batch_per_gpu": 8,
        "global_batch": 8,
        "elastic_batch": True,
        "base_batch": 8,
        "max_global_batch": 32,
        "rule": "none",
    }
    folder.mkdir(exist_ok=True, parents=True)
    return {
        protocol.ENV_GRANT: json.dumps(grant | changes),
        protocol.ENV_ATTEMPT_DIR: str(folder),
        protocol.ENV_CHECKPOINT_DIR: str(folder.parent / "kept"),
    }


def reports(folder: Path) -> list[protocol.AnyReport]:
    return [protocol.decode(line) for line in (folder / protocol.REPORTS_FILE).read_text().splitlines()]


def first_batch(folder: Path) -> tuple[int | None, int | None]:
    started = next(report for report in reports(folder) if isinstance(report, protocol.Started))
    return started.batch_per_gpu, started.accum_steps


def attempt(folder: Path, plan: Plan, epochs: int, *, script: dict[str, Any] | None = None, **grant: Any) -> Any:
    own: dict[str, Any] = {"rule": None, "global_batch": None, "elastic_batch": False, "env": granted(folder, **grant)}
    return fit(plan, epochs, **own, **(script or {}))


def test_a_grant_lets_it_move_and_hears_of_it(tmp_path: Path) -> None:
    found = attempt(tmp_path / "a1", {3: (32, 2)}, 4)
    assert found["batch"] == (32, 2)
    told = [report for report in reports(tmp_path / "a1") if isinstance(report, protocol.Progress)]
    assert [(report.batch_per_gpu, report.accum_steps) for report in told] == [(8, 1), (8, 1), (16, 2), (16, 2)]
    assert attempt(tmp_path / "a2", {}, 5)["batch"] == (32, 2)  # goes on as it was
    assert [first_batch(tmp_path / name) for name in ("a1", "a2")] == [(None, None), (16, 2)]
    before = attempt(tmp_path / "a3", {}, 6, batch_per_gpu=32, global_batch=32)
    assert before["batch"] == (32, 2)
    # Beside a partner it has what was priced, and counts by that.
    found = attempt(tmp_path / "a4", {}, 7, shared=True, batch_per_gpu=16, global_batch=16)
    assert found["batch"] == (16, 1)
    counted = SAMPLES * float(efficiency(before["phi"], BASE, 16))  # at once, by what was known
    assert found["effective"] - before["effective"] == pytest.approx(counted)
    assert found["worth"] == pytest.approx(float(efficiency(found["phi"], BASE, 16)))
    # The user has narrowed the range.
    assert attempt(tmp_path / "a5", {}, 8, max_global_batch=8)["batch"] == (8, 1)


@pytest.mark.parametrize(("largest", "granted_m", "accum"), [(8, 8, 4), (16, 8, 2), (8, 16, 2), (4, 32, 1)])
def test_on_fewer_gpus_a_batch_is_dealt_in_micro_steps_that_are_known_to_fit(
    tmp_path: Path, largest: int, granted_m: int, accum: int
) -> None:
    """From four ranks to one: what a GPU held then, or is granted now."""
    model = models.mlp()
    env = granted(tmp_path / "a1", batch_per_gpu=granted_m, global_batch=granted_m)
    elastic = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), lr_rule="linear", env=env)
    elastic.sampler(SAMPLES)
    kept = {
        "global_batch": 32,
        "batch_per_gpu": largest,
        "accum_steps": 1,
        "worth": 0.9,
        "moved_step": 5,
        "trial": True,
    }
    elastic.load_state_dict({**elastic.state_dict(), "batch": kept})
    counting = elastic._engine.counting
    assert (elastic.global_batch, counting.accum_steps, counting.batch_per_gpu) == (32, accum, 32 // accum)
    saved = elastic.state_dict()["batch"]
    assert saved == {**kept, "batch_per_gpu": 32 // accum, "accum_steps": accum}
    elastic.close()


def test_a_script_that_cannot_move_it_trains_on_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="lets the batch move, and it stays: a batch that moves with an unchanged"):
        found = attempt(tmp_path / "a1", {1: (32, 1)}, 3, script={"lr_rule": "none"})
    assert found["batch"] == (8, 1)
    assert found["effective"] == 3 * SAMPLES
    warned = [report for report in reports(tmp_path / "a1") if isinstance(report, protocol.Warned)]
    assert len(warned) == 1
    fixed = tmp_path / "fixed" / "a1"
    attempt(fixed, {1: (32, 1)}, 3, script={"lr_rule": "none"}, max_global_batch=8)  # nowhere to move
    assert not any(isinstance(report, protocol.Warned) for report in reports(fixed))


# --- two ranks


def spread(plan: Plan, epochs: int, parallel: str) -> dict[str, Any]:
    return fit(plan, epochs, parallel=parallel, env=None)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_move_together_and_train_as_one(ranks: Ranks, parallel: str) -> None:
    plan: Plan = {1: (16, 1), 2: (32, 2), 3: (16, 1)}
    alone = fit(plan, 4)
    first, second = ranks.run(spread, plan, 4, parallel, timeout_s=40)
    for key in ("model", "effective", "batch", "samples", "rates", "notes", "worth"):
        assert first[key] == second[key], key
    assert (first["batch"], first["samples"], first["rates"]) == (alone["batch"], alone["samples"], alone["rates"])
    for epoch in range(4):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == list(range(SAMPLES))
    for name, value in first["model"].items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(alone["model"][name]), rtol=1e-4, atol=1e-5)
