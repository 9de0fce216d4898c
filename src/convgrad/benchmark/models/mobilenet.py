"""MobileNetV2 (Sandler et al. 2018) and EfficientNet-B0 (Tan and Le 2019): inverted residuals, depthwise inside."""

from __future__ import annotations

import torch
from torch import nn

from .resnet import SqueezeExcitation, classifier, conv_norm


class InvertedResidual(nn.Module):
    """1x1 to more channels, depthwise, 1x1 back; added to its input where the shapes allow."""

    def __init__(self, channels: tuple[int, int], kernel: int, stride: int, expansion: int,
                 activation: type[nn.Module], squeezed: int = 0) -> None:
        super().__init__()
        inputs, outputs = channels
        inner = inputs * expansion
        widen = [conv_norm(inputs, inner, 1), activation()] if expansion > 1 else []
        excitation = [SqueezeExcitation(inner, squeezed, activation)] if squeezed else []
        self.body = nn.Sequential(*widen, conv_norm(inner, inner, kernel, stride, inner), activation(), *excitation,
                                  conv_norm(inner, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return x + y if self.adds else y


# (expansion, kernel, channels, depth, stride) of every stage
MOBILENET_V2 = ((1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 3, 32, 3, 2), (6, 3, 64, 4, 2), (6, 3, 96, 3, 1),
                (6, 3, 160, 3, 2), (6, 3, 320, 1, 1))
EFFICIENTNET_B0 = ((1, 3, 16, 1, 1), (6, 3, 24, 2, 2), (6, 5, 40, 2, 2), (6, 3, 80, 3, 2), (6, 5, 112, 3, 1),
                   (6, 5, 192, 4, 2), (6, 3, 320, 1, 1))


def inverted_residuals(stages: tuple[tuple[int, int, int, int, int], ...], activation: type[nn.Module],
                       squeeze: bool) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 32, 3, 2), activation()]
    channels = 32
    for expansion, kernel, outputs, depth, stride in stages:
        for block in range(depth):
            squeezed = max(1, channels // 4) if squeeze else 0
            layers.append(InvertedResidual((channels, outputs), kernel, 1 if block else stride, expansion, activation,
                                           squeezed))
            channels = outputs
    return classifier([*layers, conv_norm(channels, 1280, 1), activation()], 1280)


def mobilenet_v2() -> nn.Module:
    return inverted_residuals(MOBILENET_V2, nn.ReLU6, squeeze=False)


def efficientnet_b0() -> nn.Module:
    return inverted_residuals(EFFICIENTNET_B0, nn.SiLU, squeeze=True)
