"""Loops that use the three lines in other ways than the documents say: told what is wrong, or right all the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import nn
from two_ranks import Ranks

from icefrog.errors import UserError
from icefrog.runtime import LayerElastic, Pipeline
from icefrog.runtime.rules.none import NoFreezing
from icefrog.spec import Target


def made(optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> LayerElastic:
    model = models.mlp()
    return LayerElastic(model, optimizer(model.parameters(), lr=1e-2), rule="none", env={}, **options)


def backward(elastic: LayerElastic, batch: int = 16, first: int = 0) -> None:
    x, y = models.data()
    nn.functional.cross_entropy(elastic.model(x[first : first + batch]), y[first : first + batch]).backward()


def steps(elastic: LayerElastic, number: int = 2) -> None:
    for _ in range(number):
        backward(elastic)
        elastic.optimizer.step()
        elastic.optimizer.zero_grad()


def test_a_loop_without_epochs_is_told_once() -> None:
    elastic = made()
    steps(elastic)
    with pytest.warns(UserWarning, match=r"end_epoch\(\) without elastic.epochs\(\)"):
        elastic.end_epoch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(elastic)
        elastic.end_epoch()


def test_a_loop_of_ones_own_behind_begin_is_told_nothing_and_gets_a_new_order_each_epoch() -> None:
    elastic = made(global_batch=16)
    sampler = elastic.sampler(64)
    x, y = models.data()
    orders = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elastic.begin(3)
        for _ in range(3):
            order = list(sampler)
            for places in order:
                nn.functional.cross_entropy(elastic.model(x[places]), y[places]).backward()
                elastic.optimizer.step()
                elastic.optimizer.zero_grad()
            orders.append(order)
            elastic.end_epoch()
    assert orders[0] != orders[1] != orders[2]
    assert elastic.outcome == "completed"


def test_a_loader_that_is_used_up_ends_with_an_error_and_not_in_endless_epochs() -> None:
    elastic = made()

    def once() -> Iterator[int]:
        yield from range(3)

    loader = once()

    def loop() -> None:
        for _ in elastic.epochs(3):
            for _ in loader:
                steps(elastic, 1)
            elastic.end_epoch()

    with pytest.raises(UserError, match=r"epoch 1 ended without an optimizer\.step"):
        loop()


def test_an_epoch_ended_twice() -> None:
    elastic = made()

    def loop() -> None:
        for _ in elastic.epochs(3):
            steps(elastic)
            elastic.end_epoch()
            elastic.end_epoch()

    with pytest.raises(UserError, match=r"end_epoch\(\) was called 2 times in epoch 0"):
        loop()


def test_a_batch_left_out_after_its_backward_pass_counts_nothing() -> None:
    elastic = made()
    for _ in elastic.epochs(1):
        for place in range(4):
            backward(elastic, first=16 * place)
            if place != 1:  # its loss was not finite, say
                elastic.optimizer.step()
            elastic.optimizer.zero_grad()
        elastic.end_epoch()
    assert elastic.effective_samples == 48


def test_a_train_step_left_out_counts_nothing() -> None:
    """In one process a pipeline is a single stage, yet forward and backward are its own."""
    elastic = made(parallel=Pipeline(nn.functional.cross_entropy, micro_batches=2))
    x, y = models.data()
    for _ in elastic.epochs(1):
        for place in range(4):
            elastic.train_step(x[16 * place : 16 * place + 16], y[16 * place : 16 * place + 16])
            if place != 1:
                elastic.optimizer.step()
            elastic.optimizer.zero_grad()
        elastic.end_epoch()
    assert elastic.effective_samples == 48


def test_zero_grad_between_forward_and_backward_changes_no_count() -> None:
    elastic = made()
    x, y = models.data()
    for _ in range(2):
        loss = nn.functional.cross_entropy(elastic.model(x), y)
        elastic.optimizer.zero_grad()
        loss.backward()
        elastic.optimizer.step()
    assert elastic.effective_samples == 128


def test_gradients_put_in_place_by_hand_after_zero_grad_are_a_step_of_the_batch() -> None:
    elastic = made()
    backward(elastic)
    kept = [param.grad.clone() for param in elastic.model.parameters() if param.grad is not None]
    elastic.optimizer.zero_grad()
    for param, grad in zip(elastic.model.parameters(), kept, strict=True):
        param.grad = grad
    elastic.optimizer.step()
    assert elastic.effective_samples == 16


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_boundary_moves_inside_a_block_of_validation(context: Any) -> None:
    elastic = made()
    depths = []
    for epoch in elastic.epochs(3):
        steps(elastic)
        with context():
            elastic.model(models.data()[0])
            elastic.end_epoch(0.5)
            elastic.freeze(1 - epoch % 2)
        depths.append(elastic.frozen_layers)
    assert depths[:3] == [1, 0, 1]


def test_a_second_loop_goes_on_from_memory_not_from_the_checkpoint(tmp_path: Path) -> None:
    elastic = made(checkpoint_dir=tmp_path)
    for epoch in elastic.epochs(4):
        steps(elastic)
        if epoch == 1:
            break  # or Ctrl-C in a notebook
        elastic.end_epoch()
    with torch.no_grad():
        for param in elastic.model.parameters():
            param.zero_()
    done = elastic.effective_samples
    for epoch in elastic.epochs(4):
        assert epoch == 1
        assert elastic.effective_samples == done == 64
        assert not any(param.any() for param in elastic.model.parameters())
        break


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(UserError, match="holds no parameter of the model"):
        LayerElastic(models.mlp(), torch.optim.Adam(models.mlp().parameters()), env={})


def test_an_optimizer_is_given_to_one_layer_elastic_at_a_time() -> None:
    model = models.mlp()
    optimizer = torch.optim.Adam(model.parameters())
    first = LayerElastic(model, optimizer, env={})
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps the step
    with pytest.raises(UserError, match="belongs to another LayerElastic"):
        LayerElastic(model, optimizer, env={})
    first.close()
    LayerElastic(model, optimizer, env={})


def test_a_rule_that_cannot_close_leaves_model_and_optimizer_free_all_the_same() -> None:
    class Stuck(NoFreezing):
        def close(self) -> None:
            raise RuntimeError("stuck")

    model = models.mlp()
    optimizer = torch.optim.Adam(model.parameters())
    elastic = LayerElastic(model, optimizer, rule=Stuck(), env={})
    with pytest.raises(RuntimeError, match="stuck"):
        elastic.close()
    assert "step" not in vars(optimizer)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_names_may_be_grouped_into_layers() -> None:
    model = models.mlp()
    elastic = LayerElastic(model, torch.optim.Adam(model.parameters()), layers=[["0", "1"], [model[2], "3"]], env={})
    assert [len(layer.params) for layer in elastic.layers] == [4, 4]


def checkpointed(folder: Path) -> None:
    elastic = made(checkpoint_dir=folder)
    for _ in elastic.epochs(1):
        steps(elastic)
        elastic.end_epoch()
    elastic.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_checkpoint_of_another_kind_of_optimizer(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    checkpointed(tmp_path)
    with pytest.raises(UserError, match=f"another kind of optimizer: Adam, not {kind.__name__}"):
        made(kind, checkpoint_dir=tmp_path).begin(2)


def test_a_state_of_an_optimizer_with_fewer_settings(tmp_path: Path) -> None:
    elastic = made()
    state = elastic.state_dict()
    del state["optimizer"]["groups"][0]["amsgrad"]
    with pytest.raises(UserError, match="another kind of optimizer: this Adam wants amsgrad"):
        elastic.load_state_dict(state)


def test_a_checkpoint_of_a_model_with_other_shapes(tmp_path: Path) -> None:
    checkpointed(tmp_path)
    model = models.mlp(dim=7)
    elastic = LayerElastic(model, torch.optim.Adam(model.parameters()), checkpoint_dir=tmp_path, env={})
    with pytest.raises(UserError, match="the checkpoint is of another model"):
        elastic.begin(2)


@pytest.mark.parametrize("depth", [1.7, 1.0, True, "1", None, torch.tensor(1.0)])
def test_freezing_what_is_no_whole_number(depth: Any) -> None:
    elastic = made()
    for _ in range(2):
        with pytest.raises(UserError, match="cannot freeze") as error:
            elastic.freeze(depth)
        assert error.value.hint == "give a whole number, 0 to 3"
        elastic.freeze(torch.tensor(1))  # type: ignore[arg-type]
        assert elastic.frozen_layers == 1


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf")])
def test_an_infinite_metric_is_never_the_best(mode: Any, bad: float) -> None:
    elastic = made(target=Target(metric="m", value=0.5 if mode == "min" else 2.0, mode=mode))
    elastic.begin(9)
    for metric in (1.0, bad):
        steps(elastic)
        decision = elastic.end_epoch(metric)
        assert not decision.done
    assert decision.metric is None
    seen = elastic._decider.validations
    assert (seen.metrics, seen.best, seen.stalled) == ([1.0], 1.0, 1)
    steps(elastic)
    elastic.end_epoch(float("nan"))
    assert seen.stalled == 1  # it is none


@pytest.mark.parametrize("name", ["00000001.pt", "00000001.json", "00000001.pt.tmp"])
def test_a_folder_with_a_checkpoints_name_is_in_nobodys_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "inside").mkdir(parents=True)
    checkpointed(tmp_path)
    resumed = made(checkpoint_dir=tmp_path)
    resumed.begin(2)
    assert resumed.epoch == 1
    resumed.close()
    assert (tmp_path / name / "inside").is_dir()


@pytest.mark.parametrize("accum", [1, 2, 3])
@pytest.mark.parametrize("clips", [False, True])
def test_clipping_in_the_loop_with_accumulation_is_told_once(accum: int, clips: bool) -> None:
    elastic = made(accum_steps=accum)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for micro in range(3 * accum):
            backward(elastic, 8 - micro % 2)  # of unequal size: what we rescale ourselves is no clipping
            if clips:
                nn.utils.clip_grad_norm_(elastic.model.parameters(), 100.0)
            elastic.optimizer.step()
            elastic.optimizer.zero_grad()
    told = ["gradients are changed between" in str(item.message) for item in caught]
    assert told == ([True] if clips and accum > 1 else [])


def clip_between_ranks(clips: bool) -> list[str]:
    elastic = made(accum_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            backward(elastic, 8)
            if clips:
                nn.utils.clip_grad_norm_(elastic.model.parameters(), 100.0)
            elastic.optimizer.step()
            elastic.optimizer.zero_grad()
    elastic.close()
    return [str(item.message) for item in caught if "gradients are changed" in str(item.message)]


def test_clipping_is_told_between_ranks(ranks: Ranks) -> None:
    assert [len(found) for found in ranks.run(clip_between_ranks, True)] == [1, 0]  # rank 0 speaks
    assert ranks.run(clip_between_ranks, False) == [[], []]


def test_a_second_one_on_the_same_model_is_refused_until_the_first_is_closed() -> None:
    model = models.mlp()
    first = LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", env={})
    first.freeze(2)
    with pytest.raises(UserError, match="model belongs to another LayerElastic"):
        LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", env={})
    assert [param.requires_grad for param in model.parameters()] == [False] * 4 + [True] * 4
    twin = copy.deepcopy(model)  # has nothing to do with it
    LayerElastic(twin, torch.optim.SGD(twin.parameters(), lr=0.1), rule="none", env={}).close()
    first.close()
    LayerElastic(model, torch.optim.SGD(model.parameters(), lr=0.1), rule="none", env={}).close()


def test_what_is_refused_leaves_the_model_free() -> None:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({"lr_rule": "cube"}, {"rule": "nobody"}, {"parallel": "nobody"}, {"layers": ["nobody"]}):
        with pytest.raises(UserError):
            LayerElastic(model, optimizer, env={}, **options)  # type: ignore[arg-type]
    LayerElastic(model, optimizer, env={}).close()


def test_lazy_modules_are_refused_until_they_have_run() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"shapes of 0.weight, 0.bias are not known yet"):
        LayerElastic(model, optimizer, env={})
    model(torch.ones(2, 3))
    LayerElastic(model, optimizer, env={}).close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_the_models_gradients_in_mid_accumulation_is_an_error(*, set_to_none: bool) -> None:
    for sampled in (False, True):
        elastic = made(accum_steps=3)
        if sampled:
            elastic.sampler(64, global_batch=16)
        elastic.begin(2)
        for micro in range(7):  # through the optimizer it waits
            elastic.optimizer.zero_grad(set_to_none=set_to_none)
            backward(elastic, 8 - micro % 2)
            elastic.optimizer.step()
        elastic.close()
        elastic = made(accum_steps=3)
        backward(elastic)
        elastic.optimizer.step()
        elastic.model.zero_grad(set_to_none=set_to_none)
        with pytest.raises(UserError, match="zeroed or changed before all 3 micro-steps") as caught:
            backward(elastic)
        assert "optimizer.zero_grad()" in caught.value.hint
        elastic.close()


def test_under_lbfgs_no_rule_freezes_anything_and_that_is_told() -> None:
    model = models.mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x, y = models.data()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    elastic = LayerElastic(model, optimizer, rule=lambda now: now.at(2, "always"), env={})
    with pytest.warns(UserWarning, match="nothing will be frozen: LBFGS"):
        elastic.begin(2)
    for _ in elastic.epochs(2):
        optimizer.step(closure)
        assert elastic.end_epoch().frozen_layers == 0
    elastic.close()


def test_an_epoch_of_the_sampler_that_is_left_in_mid_accumulation_does_not_shift_the_next_one() -> None:
    elastic = made(accum_steps=3)
    sampler = elastic.sampler(64, global_batch=12)
    x, y = models.data()
    for epoch in elastic.epochs(2):
        steps = elastic._at.step
        for micro, places in enumerate(sampler):
            if epoch == 0 and micro == 4:
                break  # out of memory, say
            nn.functional.cross_entropy(elastic.model(x[places]), y[places]).backward()
            elastic.optimizer.step()
            elastic.optimizer.zero_grad()
            assert elastic.stepped == (micro % 3 == 2)
        assert elastic._at.step - steps == (1 if epoch == 0 else len(range(0, 64, 12)))
        elastic.freeze(epoch)
        elastic.end_epoch()
        assert elastic.frozen_layers == epoch
        if epoch == 1:
            break
    elastic.close()


def test_several_ranks_without_torch_distributed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would train a model each, in silence."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"built without torch\.distributed"):
        made()
