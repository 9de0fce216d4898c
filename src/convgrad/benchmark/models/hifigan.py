"""The generator of HiFi-GAN V1 (Kong et al. 2020): 1-D, transposed and dilated convolutions under weight norm."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


def dilated(channels: int, kernel: int, dilation: int) -> nn.Module:
    return weight_norm(nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=dilation * (kernel // 2)))


class ResidualUnit(nn.Module):
    """Three pairs of convolutions of one kernel size, the first of each pair more and more dilated."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.LeakyReLU(0.1), dilated(channels, kernel, dilation), nn.LeakyReLU(0.1),
                          dilated(channels, kernel, 1)) for dilation in (1, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = x + pair(x)
        return x


class Upsampling(nn.Module):
    """A transposed convolution, then the mean of three residual units of different reach."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.up = weight_norm(nn.ConvTranspose1d(channels, channels // 2, kernel, stride, (kernel - stride) // 2))
        self.units = nn.ModuleList(ResidualUnit(channels // 2, reach) for reach in (3, 7, 11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(nn.functional.leaky_relu(x, 0.1))
        return torch.stack([unit(x) for unit in self.units]).mean(0)


def hifigan_generator() -> nn.Module:
    layers: list[nn.Module] = [weight_norm(nn.Conv1d(80, 512, 7, padding=3))]
    channels = 512
    for kernel, stride in ((16, 8), (16, 8), (4, 2), (4, 2)):
        layers.append(Upsampling(channels, kernel, stride))
        channels //= 2
    return nn.Sequential(*layers, nn.LeakyReLU(0.01), weight_norm(nn.Conv1d(channels, 1, 7, padding=3)), nn.Tanh())
