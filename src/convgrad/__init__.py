"""convgrad computes the gradients of convolutions for any Python array, exactly to a written contract."""

from __future__ import annotations

import importlib
from typing import Any

from .api import (
    bias_grad,
    conv,
    conv_backward,
    conv_transpose,
    conv_transpose_backward,
    get_num_threads,
    input_grad,
    set_num_threads,
    weight_grad,
)
from .explain import explain
from .plan import plan
from .problem import Conv, Plan, Problem, Unsupported

__version__ = "0.1.0"

__all__ = [
    "Conv", "Plan", "Problem", "Unsupported", "bias_grad", "conv", "conv_backward", "conv_transpose",
    "conv_transpose_backward", "explain", "get_num_threads", "input_grad", "plan", "set_num_threads", "weight_grad",
]

# Dialects and framework front ends load when first named: `convgrad.cann`, `convgrad.torch`, ...
_LAZY = ("torch", "jax", "onednn", "cann", "ascendc", "tile")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"convgrad.{name}")
    raise AttributeError(f"module 'convgrad' has no attribute {name!r}")
