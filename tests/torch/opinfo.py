"""PyTorch's own samples of convolutions: the arguments that its tests call each function with."""

from __future__ import annotations

import sys
import types
import unittest
from typing import Any

import torch

NAMES = [f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)]


def operators() -> dict[str, Any]:
    if "expecttest" not in sys.modules:  # torch's table of operators imports it and does not use it
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    found = {op.name.rpartition(".")[2]: op for op in op_db if op.name.startswith("nn.functional.conv")}
    assert set(NAMES) <= set(found)
    return found


def samples(operator: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    return list(operator.sample_inputs("cpu", dtype, requires_grad=True))
