"""YOLOv3 (Darknet-53 backbone, three detection heads), written from the published architecture (arXiv:1804.02767)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

BACKBONE = ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4))  # (channels, residual blocks) of each stage


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, leaky ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1),
    )


class Residual(nn.Module):
    """1x1 to half the channels, 3x3 back, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels // 2, 1), conv(channels // 2, channels, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def neck(inputs: int, channels: int) -> nn.Sequential:
    """The five alternating convolutions before each head."""
    wide = 2 * channels
    return nn.Sequential(
        conv(inputs, channels, 1),
        conv(channels, wide, 3),
        conv(wide, channels, 1),
        conv(channels, wide, 3),
        conv(wide, channels, 1),
    )


class YoloV3(nn.Module):
    """Three predictions of 3 x (5 + classes) channels at strides 32, 16, 8."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = conv(3, 32, 3)
        self.stages = nn.ModuleList()
        channels = 32
        for width, depth in BACKBONE:
            blocks = [Residual(width) for _ in range(depth)]
            self.stages.append(nn.ModuleList([conv(channels, width, 3, 2), *blocks]))
            channels = width
        outputs = 3 * (5 + num_classes)
        self.necks, self.heads, self.routes = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inputs = 1024
        for width in (512, 256, 128):
            self.necks.append(neck(inputs, width))
            self.heads.append(nn.Sequential(conv(width, 2 * width, 3), nn.Conv2d(2 * width, outputs, 1)))
            if width > 128:
                self.routes.append(conv(width, width // 2, 1))
                inputs = width // 2 + width
        self.num_classes = num_classes

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        x, skips = self.stem(image), []
        for stage in self.stages:
            for block in stage:
                x = block(x)
            skips.append(x)
        predictions = []
        for scale, (body, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            x = body(x)
            predictions.append(head(x))
            if scale < len(self.routes):
                x = torch.cat([F.interpolate(self.routes[scale](x), scale_factor=2), skips[3 - scale]], dim=1)
        return predictions

    def units(self) -> list[tuple[str, list[str]]]:
        """Freezable units in forward order: name, module names."""
        units = [("stem", ["stem"])]
        for i, (_, depth) in enumerate(BACKBONE):
            units += [(f"stage{i + 1}.{j}", [f"stages.{i}.{j}"]) for j in range(depth + 1)]
        for i in range(3):
            route = [f"routes.{i - 1}"] if i else []
            units += [(f"neck{i + 1}", [*route, f"necks.{i}"]), (f"head{i + 1}", [f"heads.{i}"])]
        return units
