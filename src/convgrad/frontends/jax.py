"""Differentiable convolutions for JAX: convgrad's plans as functions that jit, grad and vmap know.

All three tensors of a convolution enter one trilinear form, so one function, `solve`, serves every derivative of every
order: the derivative of the form with respect to one role is the form with the other roles filled. Under vmap the new
axis is folded into the batch or into the groups, so that a mapped call is still one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ..call import Ints, Options, Padding, exchanged, geometry_of, transposed_geometry
from ..numbers import dtype_name
from ..plan import plan
from ..problem import Conv, Plan, Problem, axis_order
from .numpy import from_line

FORMATS = ("float64", "float32", "bfloat16", "float16")
# Each question and the roles that answer it, in the order of Problem.operands; "output" is called grad_output there.
OTHERS = {"output": ("input", "weight"), "input": ("output", "weight"), "weight": ("output", "input")}
PADDING_NAMES = {"same": "same_upper"}  # what lax calls the padding that we call same_upper


class Settings(NamedTuple):
    """What is handed on to the planner."""

    backend: str | None = None
    num_threads: int | None = None
    max_workspace_bytes: int | None = None


def conv(input: Any, weight: Any, bias: Any = None, *, stride: Ints = 1, padding: Padding = 0, dilation: Ints = 1,
         groups: int = 1, layout: str | None = None, weight_layout: str | None = None, compute: str | None = None,
         backend: str | None = None, num_threads: int | None = None, max_workspace_bytes: int | None = None) -> Any:
    """Differentiable convolution of JAX arrays; may be called inside jit, grad and vmap.

    Parameters
    ----------
    input, weight : jax.Array
        Activations (N, C, spatial) and weight (K, C/groups, spatial), or as `layout` and `weight_layout` say.
    bias : jax.Array, optional
        One value per output channel.
    stride, dilation : int or one int per axis
    padding : int, one int per axis, one (low, high) pair per axis, or "valid", "same" ("same_upper"), "same_lower"
        Names in any case, as lax spells them too.
    groups : int
    layout, weight_layout : str, optional
        Axis orders such as "NHWC" and "HWIO".
    compute : str, optional
        Rounding of the operands before they are multiplied, in every derivative too.
    backend, num_threads, max_workspace_bytes : optional
        As in `convgrad.plan`.

    Returns
    -------
    jax.Array
        The output in `layout`, of the operands' dtype.

    Examples
    --------
    >>> import jax, convgrad
    >>> loss = lambda w: convgrad.jax.conv(jax.numpy.ones((1, 1, 5)), w, backend="reference").sum()
    >>> jax.grad(loss)(jax.numpy.ones((1, 1, 3))).tolist()
    [[[3.0, 3.0, 3.0]]]
    """
    arrays = {"input": input, "weight": weight}
    options = Options(layout, weight_layout, compute)
    geometry = geometry_of(arrays, options, stride, padding_name(padding), dilation, groups)
    problem = problem_of(geometry, "output", arrays, options)
    settings = Settings(backend, num_threads, max_workspace_bytes)
    return with_bias(problem, settings, solve(problem, settings, input, weight), bias, geometry.out_channels)


def conv_transpose(input: Any, weight: Any, bias: Any = None, *, stride: Ints = 1, padding: Padding = 0,
                   output_padding: Ints = 0, dilation: Ints = 1, groups: int = 1, layout: str | None = None,
                   weight_layout: str | None = None, compute: str | None = None, backend: str | None = None,
                   num_threads: int | None = None, max_workspace_bytes: int | None = None) -> Any:
    """Differentiable transposed convolution: `input` (N, C, spatial), `weight` (C, K/groups, spatial).

    In `weight_layout` I is the channel axis of the input and O of the output. The other parameters are those of `conv`.

    Examples
    --------
    >>> import jax.numpy as jnp, convgrad
    >>> convgrad.jax.conv_transpose(jnp.ones((1, 1, 2)), jnp.ones((1, 1, 2)), stride=2, backend="reference").tolist()
    [[[1.0, 1.0, 1.0, 1.0]]]
    """
    arrays = {"grad_output": input, "weight": weight}
    options = Options(layout, exchanged(weight_layout), compute)
    geometry = transposed_geometry(arrays, options, stride, padding_name(padding), dilation, groups, output_padding)
    problem = problem_of(geometry, "input", {"input": input, "weight": weight}, options)
    settings = Settings(backend, num_threads, max_workspace_bytes)
    return with_bias(problem, settings, solve(problem, settings, input, weight), bias, geometry.in_channels)


def padding_name(padding: Any) -> Any:
    return PADDING_NAMES.get(padding.lower(), padding.lower()) if isinstance(padding, str) else padding


def problem_of(geometry: Conv, wrt: str, arrays: dict[str, Any], options: Options) -> Problem:
    """The question that a call asks; both arrays must have one of the formats that JAX differentiates."""
    found = {name: dtype_name(np.dtype(array.dtype)) for name, array in arrays.items()}
    for name, format_name in found.items():
        if format_name not in FORMATS:
            raise TypeError(f"{name} has dtype {arrays[name].dtype}; known here are {', '.join(FORMATS)}")
    (first, dtype), (second, other) = found.items()
    if dtype != other or dtype is None:
        raise TypeError(f"all operands must have one dtype: {first} is {dtype}, {second} is {other}")
    return Problem(geometry, wrt, dtype, dtype, options.compute or "", options.layout or "",
                   options.weight_layout or "")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def solve(problem: Problem, settings: Settings, a: Any, b: Any) -> Any:
    """Solve the trilinear form for the role `problem.wrt` from the other two."""
    return mapped_call(problem, settings)(a, b)


def solve_forward(problem: Problem, settings: Settings, a: Any, b: Any) -> tuple[Any, tuple[Any, Any]]:
    """Keep each operand only where the other one is differentiated: its gradient is all that needs it."""
    saved = (a.value if b.perturbed else None, b.value if a.perturbed else None)
    return solve(problem, settings, a.value, b.value), saved


def solve_backward(problem: Problem, settings: Settings, saved: tuple[Any, Any], grad: Any) -> tuple[Any, ...]:
    if isinstance(grad, SymbolicZero):
        return (None, None)
    roles = OTHERS[problem.wrt]
    filled = dict(zip(roles, saved)) | {problem.wrt: grad}
    operands = {role: [filled[other] for other in OTHERS[role]] for role in roles}
    return tuple(None if any(operand is None for operand in operands[role])
                 else solve(problem.with_(wrt=role), settings, *operands[role]) for role in roles)


solve.defvjp(solve_forward, solve_backward, symbolic_zeros=True)


@lru_cache(maxsize=4096)
def mapped_call(problem: Problem, settings: Settings) -> Callable[..., Any]:
    """The call of one plan, with the rule that folds an axis of vmap into the problem."""
    chosen = planned(problem, settings)
    result = jax.ShapeDtypeStruct(shape_in_layout(problem, problem.wrt), jnp.dtype(problem.dtype))
    call = custom_vmap(lambda *operands: jax.pure_callback(runner(chosen), result, *operands))

    @call.def_vmap
    def fold(size: int, batched: list[bool], *operands: Any) -> tuple[Any, bool]:
        where = fold_into_batch if folds_into_batch(problem, tuple(batched)) else fold_into_groups
        folded, axes = where(problem, size)
        grown = []
        for operand, mapped, axis in zip(operands, batched, axes):
            if axis is not None and not mapped:
                operand = jnp.broadcast_to(operand, (size, *operand.shape))
            grown.append(operand if axis is None else merged(operand, axis))
        return split(mapped_call(folded, settings)(*grown), axes[-1], size), True

    return call  # type: ignore[no-any-return]


def planned(problem: Problem, settings: Settings) -> Plan:
    return plan(problem, backend=settings.backend, num_threads=settings.num_threads,
                max_workspace_bytes=settings.max_workspace_bytes)


def runner(chosen: Plan) -> Callable[..., Any]:
    """The function behind the callback: arrays of the host in, array of the host out."""
    problem = chosen.problem
    orders = [order_of(problem, role) for role in roles_of(problem)]
    shape, order = shape_in_layout(problem, problem.wrt), order_of(problem, problem.wrt)
    dtype = jnp.dtype(problem.dtype)

    def run(*operands: Any) -> Any:
        out = from_line(shape, dtype)
        views = tuple(np.asarray(operand).transpose(axes) for operand, axes in zip(operands, orders))
        chosen.run(views, (out.transpose(order),), None)
        return out

    return run


def roles_of(problem: Problem) -> tuple[str, ...]:
    return ("output",) if problem.wrt == "bias" else OTHERS[problem.wrt]


def order_of(problem: Problem, role: str) -> tuple[int, ...]:
    """Position of each canonical axis in the caller's layout of a tensor."""
    if role == "bias":
        return (0,)
    weights = role == "weight"
    return axis_order(problem.weight_layout if weights else problem.layout, problem.conv.axes, weights)


def shape_in_layout(problem: Problem, role: str) -> tuple[int, ...]:
    shape = [0] * len(problem.conv.shape_of(role))
    for extent, place in zip(problem.conv.shape_of(role), order_of(problem, role)):
        shape[place] = extent
    return tuple(shape)


# vmap. A rule returns the larger problem and, for each operand and then the result, the axis that grew (None: it did
# not).

Folding = tuple[Problem, list[int | None]]


def folds_into_batch(problem: Problem, batched: tuple[bool, ...]) -> bool:
    """Whether only an activation is mapped: the weight is then shared, as it is among the examples of a batch."""
    return problem.wrt in ("output", "input") and batched == (True, False)


def fold_into_batch(problem: Problem, size: int) -> Folding:
    grown = replace(problem.conv, batch=problem.conv.batch * size)
    axis = order_of(problem, "input")[0]
    return problem.with_(conv=grown), [axis, None, axis]


def fold_into_groups(problem: Problem, size: int) -> Folding:
    """Every mapped pair of tensors becomes groups of its own, beside the others."""
    conv = problem.conv
    grown = replace(conv, in_channels=conv.in_channels * size, out_channels=conv.out_channels * size,
                    groups=conv.groups * size)
    channel = {role: order_of(problem, role)[0 if role in ("weight", "bias") else 1]
               for role in ("output", "input", "weight", "bias")}
    return problem.with_(conv=grown), [channel[role] for role in (*roles_of(problem), problem.wrt)]


def merged(array: Any, axis: int) -> Any:
    """Make the first axis the slow part of axis `axis` (counted without it)."""
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2:])


def split(array: Any, axis: int | None, size: int) -> Any:
    """Undo `merged` for a result."""
    assert axis is not None
    array = array.reshape(*array.shape[:axis], size, array.shape[axis] // size, *array.shape[axis + 1:])
    return jnp.moveaxis(array, axis, 0)


# Bias: added by JAX, its gradient summed by us, in f32 whatever the operands.


def with_bias(problem: Problem, settings: Settings, result: Any, bias: Any, channels: int) -> Any:
    if bias is None:
        return result
    if bias.shape != (channels,) or bias.dtype != result.dtype:
        raise ValueError(f"bias must be {result.dtype} of shape ({channels},), one value per output channel, got "
                         f"{bias.dtype} of shape {tuple(bias.shape)}")
    batch, _, *size = (result.shape[place] for place in order_of(problem, "output"))
    flat = Conv(batch, channels, channels, tuple(size), (1,) * len(size), groups=max(1, channels))
    return add_bias(Problem(flat, "bias", problem.dtype, problem.dtype, layout=problem.layout), settings, result, bias)


def along_channels(problem: Problem, values: Any) -> Any:
    shape = [1] * (problem.conv.axes + 2)
    shape[order_of(problem, "output")[1]] = -1
    return values.reshape(shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def add_bias(problem: Problem, settings: Settings, result: Any, bias: Any) -> Any:
    return result + along_channels(problem, bias)


def add_bias_forward(problem: Problem, settings: Settings, result: Any, bias: Any) -> tuple[Any, Any]:
    return add_bias(problem, settings, result.value, bias.value), () if bias.perturbed else None


def add_bias_backward(problem: Problem, settings: Settings, saved: Any, grad: Any) -> tuple[Any, Any]:
    if isinstance(grad, SymbolicZero):
        return (None, None)
    return grad, None if saved is None else bias_grad(problem, settings, grad)


add_bias.defvjp(add_bias_forward, add_bias_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def bias_grad(problem: Problem, settings: Settings, grad_output: Any) -> Any:
    return mapped_call(problem, settings)(grad_output)


bias_grad.defvjp(
    lambda problem, settings, grad_output: (bias_grad(problem, settings, grad_output), None),
    lambda problem, settings, saved, grad: (
        jnp.broadcast_to(along_channels(problem, grad), shape_in_layout(problem, "output")),))
