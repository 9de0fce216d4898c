"""Differentiable convolutions for JAX: convgrad's plans as functions that every transformation knows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...call import Ints, Options, Padding, exchanged, geometry_of, transposed_geometry
from ...numbers import dtype_name
from ...problem import Conv, Problem, axis_order
from .form import Settings, order_of, solve, spread
from .lowering import settings_of

FORMATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
PADDING_NAMES = {"same": "same_upper"}  # what lax calls the padding that we call same_upper


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
    settings = settings_of(backend, num_threads, max_workspace_bytes)
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
    settings = settings_of(backend, num_threads, max_workspace_bytes)
    return with_bias(problem, settings, solve(problem, settings, input, weight), bias, geometry.in_channels)


def input_grad(grad_output: Any, weight: Any, input_size: Ints, *, stride: Ints = 1, padding: Padding = 0,
               dilation: Ints = 1, groups: int = 1, layout: str | None = None, weight_layout: str | None = None,
               compute: str | None = None, out_dtype: Any = None, backend: str | None = None,
               num_threads: int | None = None, max_workspace_bytes: int | None = None) -> Any:
    """Gradient of a convolution with respect to its input, itself differentiable.

    The parameters are those of `convgrad.input_grad`; operands may be FP8, results of which are float32 unless
    `out_dtype` says otherwise.

    Examples
    --------
    >>> import jax.numpy as jnp, convgrad
    >>> convgrad.jax.input_grad(jnp.ones((1, 1, 3)), jnp.ones((1, 1, 3)), 5, backend="reference").tolist()
    [[[1.0, 2.0, 3.0, 2.0, 1.0]]]
    """
    arrays = {"grad_output": grad_output, "weight": weight}
    options = Options(layout, weight_layout, compute, out_dtype=out_dtype_name(out_dtype))
    geometry = geometry_of(arrays, options, stride, padding_name(padding), dilation, groups, input_size=input_size)
    problem = problem_of(geometry, "input", arrays, options)
    return solve(problem, settings_of(backend, num_threads, max_workspace_bytes), grad_output, weight)


def weight_grad(grad_output: Any, input: Any, kernel_size: Ints, *, stride: Ints = 1, padding: Padding = 0,
                dilation: Ints = 1, groups: int = 1, layout: str | None = None, weight_layout: str | None = None,
                compute: str | None = None, out_dtype: Any = None, backend: str | None = None,
                num_threads: int | None = None, max_workspace_bytes: int | None = None) -> Any:
    """Gradient of a convolution with respect to its weight, itself differentiable.

    The parameters are those of `convgrad.weight_grad`; operands may be FP8, results of which are float32 unless
    `out_dtype` says otherwise.

    Examples
    --------
    >>> import jax.numpy as jnp, convgrad
    >>> convgrad.jax.weight_grad(jnp.ones((1, 1, 3)), jnp.arange(5.0).reshape(1, 1, 5), 3, backend="reference").tolist()
    [[[3.0, 6.0, 9.0]]]
    """
    arrays = {"grad_output": grad_output, "input": input}
    options = Options(layout, weight_layout, compute, out_dtype=out_dtype_name(out_dtype))
    geometry = geometry_of(arrays, options, stride, padding_name(padding), dilation, groups, kernel_size=kernel_size)
    problem = problem_of(geometry, "weight", arrays, options)
    return solve(problem, settings_of(backend, num_threads, max_workspace_bytes), grad_output, input)


def bias_grad(grad_output: Any, *, layout: str | None = None, out_dtype: Any = None, backend: str | None = None,
              num_threads: int | None = None, max_workspace_bytes: int | None = None) -> Any:
    """Gradient of a convolution with respect to its bias, itself differentiable.

    The parameters are those of `convgrad.bias_grad`.

    Examples
    --------
    >>> import jax.numpy as jnp, convgrad
    >>> convgrad.jax.bias_grad(jnp.ones((2, 3, 4)), backend="reference").tolist()
    [8.0, 8.0, 8.0]
    """
    if grad_output.ndim not in (3, 4, 5):
        raise ValueError(f"grad_output must have 3, 4 or 5 axes, got shape {tuple(grad_output.shape)}")
    places = axis_order(layout or "", grad_output.ndim - 2)
    batch, channels, *size = (grad_output.shape[place] for place in places)
    options = Options(layout, None, None, out_dtype=out_dtype_name(out_dtype))
    problem = problem_of(Conv(batch, 1, channels, tuple(size), (1,) * len(size)), "bias", {"grad_output": grad_output},
                         options)
    return solve(problem, settings_of(backend, num_threads, max_workspace_bytes), grad_output)


def padding_name(padding: Any) -> Any:
    return PADDING_NAMES.get(padding.lower(), padding.lower()) if isinstance(padding, str) else padding


def out_dtype_name(out_dtype: Any) -> str | None:
    """Our name of a result's format, from a name or a dtype of JAX."""
    if out_dtype is None or isinstance(out_dtype, str):
        return out_dtype
    return dtype_name(np.dtype(out_dtype)) or str(np.dtype(out_dtype))


def problem_of(geometry: Conv, wrt: str, arrays: dict[str, Any], options: Options) -> Problem:
    """The question that a call asks; all arrays have one of the formats that JAX and we know."""
    found = {name: dtype_name(np.dtype(array.dtype)) for name, array in arrays.items()}
    for name, format_name in found.items():
        if format_name not in FORMATS:
            raise TypeError(f"{name} has dtype {arrays[name].dtype}; known here are {', '.join(FORMATS)}")
    (first, dtype), *others = found.items()
    for name, other in others:
        if other != dtype:
            raise TypeError(f"all operands must have one dtype: {first} is {dtype}, {name} is {other}")
    assert dtype is not None
    return Problem(geometry, wrt, dtype, options.out_dtype or "", options.compute or "", options.layout or "",
                   options.weight_layout or "")


def with_bias(problem: Problem, settings: Settings, result: Any, bias: Any, channels: int) -> Any:
    """Add a bias; its gradient is our own sum, in f32 whatever the operands."""
    if bias is None:
        return result
    if bias.shape != (channels,) or bias.dtype != result.dtype:
        raise ValueError(f"bias must be {result.dtype} of shape ({channels},), one value per output channel, got "
                         f"{bias.dtype} of shape {tuple(bias.shape)}")
    batch, _, *size = (result.shape[place] for place in order_of(problem, "output"))
    flat = Conv(batch, channels, channels, tuple(size), (1,) * len(size), groups=max(1, channels))
    question = Problem(flat, "bias", problem.out_dtype, problem.out_dtype, layout=problem.layout)
    return result + spread(question, settings, bias)
