"""All kernels of this backend. To add one, write its record (kernel.py) and name it here."""

from __future__ import annotations

from typing import Any

import torch

from ...problem import Problem, axis_order
from . import (
    band_plans,
    block_plans,
    box_line_plans,
    cell_plans,
    copied_plans,
    decoded_plans,
    depthwise_plans,
    group_plans,
    joined_plans,
    line_plans,
    part_plans,
    point_plans,
    pointer_plans,
    slide_box_plans,
    slide_plans,
    span_plans,
    stacked_plans,
    wide_plans,
)
from .gpu import Gpu, current_gpu
from .kernel import Kernel, Query
from .numbers_on_device import TORCH_DTYPES

KERNELS: tuple[Kernel, ...] = (
    point_plans.KERNEL,
    block_plans.KERNEL,
    cell_plans.KERNEL,
    joined_plans.KERNEL,
    box_line_plans.KERNEL,
    group_plans.KERNEL,
    span_plans.KERNEL,
    wide_plans.KERNEL,
    line_plans.KERNEL,
    slide_box_plans.KERNEL,
    band_plans.KERNEL,
    slide_plans.KERNEL,
    slide_plans.TALL,
    # adapters: copies, or numbers in parts, then any of the others
    part_plans.KERNEL,
    stacked_plans.KERNEL,
    decoded_plans.KERNEL,
    copied_plans.KERNEL,
    # what serves where no other does
    depthwise_plans.KERNEL,
    pointer_plans.GATHER,
    pointer_plans.WEIGHT,
    pointer_plans.BIAS,
)


def query_of(problem: Problem, max_workspace: int | None = None, gpu: Gpu | None = None, tuned: bool = True) -> Query:
    """The query for tensors that lie as the problem's layouts say, without gaps."""
    return Query(problem, gpu or current_gpu(),
                 tuple(empty_tensor(problem, name, problem.dtype, "meta") for name in problem.operands),
                 tuple(empty_tensor(problem, name, problem.out_dtype, "meta") for name in problem.results),
                 max_workspace, KERNELS, tuned)


def empty_tensor(problem: Problem, name: str, dtype: str, device: str) -> Any:
    """A new tensor for an operand or result, lying as the problem's layout says, as a view in canonical axis order."""
    results = {"output", "input", "weight", "bias"}
    shape = problem.shape_of_operand(name) if name == "grad_output" or name not in results else \
        problem.conv.shape_of(name)
    order: tuple[int, ...] = tuple(range(len(shape)))
    if name != "bias":
        layout = problem.weight_layout if name == "weight" else problem.layout
        order = axis_order(layout, problem.conv.axes, weights=name == "weight")
    lying = [0] * len(shape)
    for place, extent in zip(order, shape):
        lying[place] = extent
    return torch.empty(lying, dtype=TORCH_DTYPES[dtype], device=device).permute(order)
