"""ConvNeXt-T (Liu et al. 2022): depthwise 7x7, linear layers over channels, patches between the stages."""

from __future__ import annotations

import torch
from torch import nn


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of every pixel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.pointwise = nn.Sequential(nn.LayerNorm(channels, eps=1e-6), nn.Linear(channels, 4 * channels), nn.GELU(),
                                       nn.Linear(4 * channels, channels))
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pointwise(self.depthwise(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext_t() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
        patch = 4 if channels == 3 else 2
        between = nn.Conv2d(channels, width, patch, patch)
        layers += [between, ChannelNorm(width, eps=1e-6)] if channels == 3 else [ChannelNorm(channels, eps=1e-6),
                                                                                 between]
        layers += [Block(width) for _ in range(depth)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(channels),
                         nn.Linear(channels, 1000))
