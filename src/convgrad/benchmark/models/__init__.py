"""Whole models for `convgrad bench torch`, built in code: what is measured needs no other package and no download."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from .convnext import convnext_t
from .hifigan import hifigan_generator
from .mobilenet import efficientnet_b0, mobilenet_v2
from .resnet import regnety_400mf, resnet50
from .unet3d import unet3d


class Model(NamedTuple):
    """How to build a model, and the shape of its input for a batch and the side of an image."""

    build: Callable[[], nn.Module]
    input_shape: Callable[[int, int], tuple[int, ...]]


def images(batch: int, size: int) -> tuple[int, ...]:
    return batch, 3, size, size


def spectrograms(batch: int, size: int) -> tuple[int, ...]:
    """32 frames, the length HiFi-GAN is trained with, where images have 224 pixels."""
    return batch, 80, max(1, size // 7)


def volumes(batch: int, size: int) -> tuple[int, ...]:
    """A quarter of the side of an image, in whole steps of the three poolings."""
    side = max(8, size // 32 * 8)
    return batch, 1, side, side, side


MODELS = {
    "resnet50": Model(resnet50, images), "mobilenet_v2": Model(mobilenet_v2, images),
    "regnety_400mf": Model(regnety_400mf, images), "efficientnet_b0": Model(efficientnet_b0, images),
    "convnext_t": Model(convnext_t, images), "hifigan": Model(hifigan_generator, spectrograms),
    "unet3d": Model(unet3d, volumes),
}
