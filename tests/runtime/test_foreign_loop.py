"""What an adapter needs: a loop that belongs to other code, state that other code saves, and a model given back clean."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch

from icefrog.runtime import LayerElastic, Stopped, protocol
from icefrog.runtime.saving import TENSORS
from icefrog.spec import Target


def make(env=None, **options):  # type: ignore[no-untyped-def]
    model = models.bn_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return LayerElastic(model, optimizer, env=env or {}, **options), optimizer


def reports(folder: Path) -> list[protocol.AnyReport]:
    return [protocol.decode(line) for line in (folder / protocol.REPORTS_FILE).read_text().splitlines()]


def test_begin_decide_and_finish_report_as_the_own_loop_does(tmp_path: Path) -> None:
    env = {protocol.ENV_ATTEMPT_DIR: str(tmp_path)}
    elastic, optimizer = make(env, samples_per_epoch=64, target=Target(value=0.9), on_stop=lambda: None)
    elastic.begin(2)
    models.train(elastic, optimizer, 2)
    decision = elastic.decide(metric=0.5)
    assert (decision.metric, decision.done, elastic.epoch) == (0.5, False, 0)
    models.train(elastic, optimizer, 2)
    elastic.end_epoch(metric=0.6)
    elastic.saved(tmp_path / "checkpoint-4")
    elastic.finish()
    elastic.finish()
    assert [report.kind for report in reports(tmp_path)] == [
        "started", "progress", "progress", "checkpointed", "finished",
    ]  # fmt: skip
    last = reports(tmp_path)[-1]
    assert isinstance(last, protocol.Finished)
    assert last.outcome == "target_missed"


def test_state_of_our_own_goes_on_beside_a_foreign_checkpoint() -> None:
    """All but the tensors is JSON; without them it goes on, too."""
    elastic, optimizer = make(rule="none", samples_per_epoch=64)
    elastic.begin(4)
    models.train(elastic, optimizer, 5)
    elastic.freeze(2)
    models.train(elastic, optimizer, 3)
    text = plain(elastic)
    weights, moments = elastic.model.state_dict(), optimizer.state_dict()

    other, other_optimizer = make(rule="none", samples_per_epoch=64)
    other.model.load_state_dict(weights)
    other_optimizer.load_state_dict(moments)
    before = models.bytes_of(other.model)
    other.load_state_dict(json.loads(text))
    assert models.bytes_of(other.model) == before  # weights are the other code's business
    assert other.frozen_layers == 2
    assert other.effective_samples == elastic.effective_samples
    assert plain(other) == text
    with_tensors, _ = make(rule="none", samples_per_epoch=64)
    with_tensors.load_state_dict(elastic.state_dict(own_only=True))
    assert with_tensors._engine.statistics._last.keys() == set(map(id, live(with_tensors)))


def plain(elastic: LayerElastic) -> str:
    return json.dumps({key: value for key, value in elastic.state_dict(own_only=True).items() if key not in TENSORS})


def live(elastic: LayerElastic) -> list[torch.nn.Parameter]:
    return [param for param in elastic.model.parameters() if param.requires_grad]


def test_a_request_to_stop_is_left_to_the_loop(tmp_path: Path) -> None:
    env = {protocol.ENV_ATTEMPT_DIR: str(tmp_path), protocol.ENV_CHECKPOINT_DIR: str(tmp_path / "checkpoints")}
    asked = []
    elastic, optimizer = make(env, on_stop=lambda: asked.append(True))
    elastic.begin(2)
    models.train(elastic, optimizer, 1)
    assert not asked
    (tmp_path / protocol.STOP_FILE).touch()
    models.train(elastic, optimizer, 1)
    assert asked == [True]
    elastic.finish()
    assert reports(tmp_path)[-1].kind == "stopped"
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(Stopped):  # as ever without on_stop
        models.train(*make(env), 2)


def test_close_gives_model_and_optimizer_back_as_they_were() -> None:
    model = models.bn_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    step = vars(optimizer)["step"]
    elastic = LayerElastic(model, optimizer, env={}, rule="none")
    models.train(elastic, optimizer, 2)
    elastic.freeze(2)
    models.train(elastic, optimizer, 2)
    elastic.close()
    assert all(param.requires_grad for param in model.parameters())
    assert all(module.training for module in model.modules())
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
    assert vars(optimizer)["step"] is step  # the scheduler's counter; without it the scheduler warns
    optimizer.step()
    scheduler.step()
    again = LayerElastic(model, optimizer, env={}, rule="none")  # every layer is there
    assert len(again.layers) == len(elastic.layers)
