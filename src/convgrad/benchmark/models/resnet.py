"""ResNet-50 (He et al. 2015) and RegNetY-400MF (Radosavovic et al. 2020): residual blocks with a bottleneck."""

from __future__ import annotations

import torch
from torch import nn


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
                         nn.BatchNorm2d(outputs))


class SqueezeExcitation(nn.Module):
    """Channels weighted by what the whole image says about them."""

    def __init__(self, channels: int, squeezed: int, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, squeezed, 1), activation(),
                                   nn.Conv2d(squeezed, channels, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weigh(x)


class Bottleneck(nn.Module):
    """1x1, 3x3 (perhaps grouped), 1x1, and the way around them."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, groups: int = 1, squeezed: int = 0) -> None:
        super().__init__()
        excitation = [SqueezeExcitation(inner, squeezed)] if squeezed else []
        self.body = nn.Sequential(conv_norm(inputs, inner, 1), nn.ReLU(inplace=True),
                                  conv_norm(inner, inner, 3, stride, groups), nn.ReLU(inplace=True), *excitation,
                                  conv_norm(inner, outputs, 1))
        self.around = nn.Identity() if stride == 1 and inputs == outputs else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


def classifier(features: list[nn.Module], channels: int) -> nn.Sequential:
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (inner, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(depth):
            layers.append(Bottleneck(channels, inner, 4 * inner, 2 if stage and not block else 1))
            channels = 4 * inner
    return classifier(layers, channels)


def regnety_400mf() -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 32, 3, 2), nn.ReLU(inplace=True)]
    channels = 32
    for width, depth in ((48, 1), (104, 3), (208, 6), (440, 6)):
        for block in range(depth):
            layers.append(Bottleneck(channels, width, width, 1 if block else 2, width // 8, round(channels / 4)))
            channels = width
    return classifier(layers, channels)
