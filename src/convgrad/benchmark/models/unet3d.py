"""A 3-D U-Net (Cicek et al. 2016) of 16 to 128 channels for volumes of one channel and four classes."""

from __future__ import annotations

import itertools

import torch
from torch import nn


def twice(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(),
                         nn.Conv3d(outputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU())


class UNet3d(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        self.down = nn.ModuleList(twice(inputs, outputs) for inputs, outputs in zip((1, *widths), widths))
        pairs = list(itertools.pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose3d(wide, narrow, 2, 2) for narrow, wide in pairs)
        self.merge = nn.ModuleList(twice(2 * narrow, narrow) for narrow, _ in pairs)
        self.head = nn.Conv3d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool3d(x, 2) if level else x)
            kept.append(x)
        for up, merge, beside in zip(self.up, self.merge, kept[-2::-1]):
            x = merge(torch.cat([up(x), beside], 1))
        y: torch.Tensor = self.head(x)
        return y


def unet3d() -> nn.Module:
    return UNet3d()
