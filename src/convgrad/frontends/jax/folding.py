"""vmap on problems: a new axis becomes part of the batch or of the groups.

A rule returns the larger problem and, for each operand and then the result, the axis that grew (None: it did not).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ...problem import Problem

Orders = Callable[[Problem, str], tuple[int, ...]]
Folding = tuple[Problem, list[int | None]]


def folds_into_batch(problem: Problem, mapped: tuple[bool, ...]) -> bool:
    """Whether only an activation is mapped: the weight is then shared, as it is among the examples of a batch."""
    return problem.wrt in ("output", "input") and mapped == (True, False)


def fold_into_batch(problem: Problem, size: int, roles: tuple[str, ...], order_of: Orders) -> Folding:
    grown = replace(problem.conv, batch=problem.conv.batch * size)
    axis = order_of(problem, "input")[0]
    return problem.with_(conv=grown), [axis, None, axis]


def fold_into_groups(problem: Problem, size: int, roles: tuple[str, ...], order_of: Orders) -> Folding:
    """Every mapped pair of tensors becomes groups of its own, beside the others."""
    conv = problem.conv
    grown = replace(conv, in_channels=conv.in_channels * size, out_channels=conv.out_channels * size,
                    groups=conv.groups * size)
    channel = {role: order_of(problem, role)[0 if role in ("weight", "bias") else 1]
               for role in ("output", "input", "weight", "bias")}
    return problem.with_(conv=grown), [channel[role] for role in (*roles, problem.wrt)]


def merged(array: Any, axis: int) -> Any:
    """Make the first axis the slow part of axis `axis` (counted without it)."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2:])


def split(array: Any, axis: int | None, size: int) -> Any:
    """Undo `merged` for a result."""
    assert axis is not None
    array = array.reshape(*array.shape[:axis], size, array.shape[axis] // size, *array.shape[axis + 1:])
    return jnp.moveaxis(array, axis, 0)
