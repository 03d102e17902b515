"""Train and eval modes of modules that freeze and open again, beside what the user's loop makes of them."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

from icefrog.runtime import LayerElastic


def held(model: nn.Sequential, *, training: bool) -> None:
    """The modes of many fine-tuning scripts: one normalisation never learns, one dropout is always on."""
    model.train(training)
    model[0][1].eval()
    model[0][3].train()


def step(elastic: LayerElastic, optimizer: torch.optim.Optimizer) -> None:
    models.train(elastic, optimizer, 1)


@pytest.mark.parametrize("opened_in_training", [True, False])
@pytest.mark.parametrize("frozen_in_training", [True, False])
def test_modules_that_the_user_holds_in_a_mode_get_it_back(
    *, frozen_in_training: bool, opened_in_training: bool
) -> None:
    model = models.bn_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    held(model, training=True)
    step(elastic, optimizer)
    held(model, training=frozen_in_training)
    elastic.freeze(2)
    held(model, training=True)
    step(elastic, optimizer)
    assert not any(module.training for module in model[0])
    held(model, training=opened_in_training)
    elastic.freeze(0)
    assert model[0][1].training is False
    assert model[0][3].training is True
    assert [model[0][0].training, model[1][1].training, model[1][3].training] == [opened_in_training] * 3


def test_other_code_puts_modes_back_one_by_one() -> None:
    """Lightning does so behind validation: what was frozen when it began is opened, and must not stay asleep."""
    model = models.bn_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    step(elastic, optimizer)
    for depth in (2, 1, 0):
        before = {module: module.training for module in model.modules()}
        model.eval()
        elastic.freeze(depth)
        for module, mode in before.items():
            module.training = mode
        step(elastic, optimizer)
        awake = [module.training for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
        assert awake == [place >= depth for place in range(3)]
    model.eval()
    elastic.freeze(2)
    elastic.freeze(0)
    elastic.close()
    assert not model._forward_pre_hooks
    model.train()
    assert all(module.training for module in model.modules())


class PaddedEncoder(nn.Module):
    """PyTorch's own encoder, with a padding mask: in eval mode it turns to nested tensors, which no training layer takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 3)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden[:, 0])


def test_pytorchs_encoder_with_padding_freezes() -> None:
    model = PaddedEncoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = LayerElastic(model, optimizer, rule="none", env={})
    assert len(elastic.layers) == 5
    tokens = torch.randint(1, 20, (8, 6), generator=torch.Generator().manual_seed(1))
    tokens[:4, 4:] = 0

    def trained(depth: int) -> None:
        elastic.freeze(depth)
        model.train()
        plain = PaddedEncoder()
        plain.load_state_dict(model.state_dict())
        nn.functional.cross_entropy(plain(tokens), torch.arange(8) % 3).backward()
        nn.functional.cross_entropy(elastic.model(tokens), torch.arange(8) % 3).backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        for layer in elastic.layers[depth:]:
            for name, param in layer.params.items():
                assert torch.equal(param.grad, expected[name])
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            assert torch.allclose(elastic.model(tokens), plain.requires_grad_(False)(tokens), atol=0.5)

    for depth in (0, 1, 2, 3, 0):
        trained(depth)
    elastic.close()
    assert model.encoder.use_nested_tensor
