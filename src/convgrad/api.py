"""The public functions: convolution, its gradients, and the transposed pair, for any array a front end knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .call import (
    ALL_THREE,
    OUT_LABELS,
    Ints,
    Options,
    Padding,
    Scales,
    bias_call,
    call_key,
    checked_mask,
    checked_scales,
    exchanged,
    geometry_of,
    nothing_asked,
    prepare,
    prepared_calls,
    reached_part,
    transposed_geometry,
    with_rest,
    without_rest,
)
from .plan import clear_plan_cache, load
from .problem import Conv, checked_int
from .running import added, ready, sum_dtype, takes_one_image
from .streaming import Ceiling, streamed

ALL_TENSORS = "grad_output, input, weight, input_grad, weight_grad, bias_grad"


def conv(input: Any, weight: Any, *, stride: Ints = 1, padding: Padding = 0, dilation: Ints = 1, groups: int = 1,
         layout: str | None = None, weight_layout: str | None = None, compute: str | None = None,
         dtype: str | None = None, out: Any = None, out_dtype: str | None = None, scales: Scales | None = None,
         workspace: Any = None, max_workspace_bytes: int | None = None, backend: str | None = None,
         num_threads: int | None = None, max_memory_bytes: int | None = None) -> Any:
    """Convolution (cross-correlation, as in every deep-learning library) of `input` with `weight`.

    Parameters
    ----------
    input, weight : array
        Activations (N, C, spatial) and weight (K, C/groups, spatial), or as `layout` and `weight_layout` say.
    stride, dilation : int or one int per axis
    padding : int, one int per axis, one (low, high) pair per axis, or a word
        "valid", "same" (for stride 1), "same_upper" or "same_lower".
    groups : int
    layout, weight_layout : str, optional
        Axis orders such as "NHWC", "TBC", "HWIO"; the defaults are channels first and O, I, spatial.
    compute : str, optional
        Rounding of the operands before they are multiplied: "f32" (none), "tf32", "hf32", "bf16", "f16", ...; "fp8"
        leaves FP8 operands as they are and allows the sums of GPUs that multiply them faster (docs/contract.md).
    dtype : str, optional
        What uint8 operands hold: "hifloat8", "float8_e4m3fn" or "float8_e5m2".
    out : array, optional
        Receives the result.
    out_dtype : str, optional
        Number format of the result; the default is the operands' (float32 for 8-bit operands).
    scales : dict, optional
        Scale of each tensor that has one, by its name ("input", "weight", "output"): what it stands for is what is
        stored times the scale (docs/contract.md). A number, or a float32 array of one element, which on a GPU is read
        when the result is computed.
    workspace, max_workspace_bytes : optional
        Scratch memory of the caller (1-D uint8), and a limit for the plan's.
    backend : str, optional
        Ask this backend only: "native", "triton" or "reference".
    num_threads : int, optional
    max_memory_bytes : int, optional
        Compute tile by tile, each with its operands, results and scratch memory under this ceiling (docs/tile.md).

    Returns
    -------
    array
        The output (N, K, spatial) in `layout`, of the same kind as the operands.

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> x = np.arange(5.0).reshape(1, 1, 5)
    >>> convgrad.conv(x, np.ones((1, 1, 3)), backend="reference")
    array([[[3., 6., 9.]]])
    """
    options = Options(layout, weight_layout, compute, dtype, out_dtype, backend, num_threads, max_workspace_bytes,
                      scales is not None or None)
    arrays = {"input": input, "weight": weight}
    kind, key = call_key("output", arrays, (stride, padding, dilation, groups), options)
    if max_memory_bytes is not None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups)
        return streamed("output", geometry, arrays, options, {"out": out}, Ceiling(max_memory_bytes, workspace))[0]
    call = prepared_calls.get(key)
    if call is None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups)
        call = prepare(key, kind, "output", geometry, arrays, options)
    given = checked_scales(scales, "input, weight, output", call.kind, input)
    return ready(call, arrays, {"out": out}, workspace, scales=given)()[0]


def input_grad(grad_output: Any, weight: Any, input_size: Ints, *, stride: Ints = 1, padding: Padding = 0,
               dilation: Ints = 1, groups: int = 1, layout: str | None = None, weight_layout: str | None = None,
               compute: str | None = None, dtype: str | None = None, out: Any = None, out_dtype: str | None = None,
               scales: Scales | None = None, workspace: Any = None, max_workspace_bytes: int | None = None,
               backend: str | None = None, num_threads: int | None = None, accumulate: bool = False,
               max_memory_bytes: int | None = None) -> Any:
    """Gradient of a convolution with respect to its input.

    Parameters not listed are those of `conv`; `scales` names "grad_output", "weight", "input_grad".

    Parameters
    ----------
    grad_output, weight : array
        Gradient of the output (N, K, spatial) and weight (K, C/groups, spatial).
    input_size : int or one int per spatial axis
        Spatial size of the input; strided convolutions do not determine it.
    accumulate : bool
        Add the gradient to `out`, a float32 or float64 array: computed in full in that format, then added once.

    Returns
    -------
    array
        The gradient (N, C, spatial) in `layout`.

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> convgrad.input_grad(np.ones((1, 1, 3)), np.ones((1, 1, 3)), 5, backend="reference")
    array([[[1., 2., 3., 2., 1.]]])
    """
    out_dtype = sum_dtype(accumulate, out, out_dtype)
    options = Options(layout, weight_layout, compute, dtype, out_dtype, backend, num_threads, max_workspace_bytes,
                      scales is not None or None)
    arrays = {"grad_output": grad_output, "weight": weight}
    kind, key = call_key("input", arrays, (stride, padding, dilation, groups, input_size), options)
    if max_memory_bytes is not None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups, input_size=input_size)
        ceiling = Ceiling(max_memory_bytes, workspace, accumulate)
        return streamed("input", geometry, arrays, options, {"out": out}, ceiling)[0]
    call = prepared_calls.get(key)
    if call is None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups, input_size=input_size)
        call = prepare(key, kind, "input", geometry, arrays, options)
    given = checked_scales(scales, "grad_output, weight, input_grad", call.kind, grad_output)
    run = ready(call, arrays, {"out": None if accumulate else out}, workspace, scales=given)
    return added(call, run, out, arrays) if accumulate else run()[0]


def weight_grad(grad_output: Any, input: Any, kernel_size: Ints, *, stride: Ints = 1, padding: Padding = 0,
                dilation: Ints = 1, groups: int = 1, layout: str | None = None, weight_layout: str | None = None,
                compute: str | None = None, dtype: str | None = None, out: Any = None, out_dtype: str | None = None,
                scales: Scales | None = None, workspace: Any = None, max_workspace_bytes: int | None = None,
                backend: str | None = None, num_threads: int | None = None, accumulate: bool = False,
                max_memory_bytes: int | None = None) -> Any:
    """Gradient of a convolution with respect to its weight.

    Parameters not listed are those of `conv`; `scales` names "grad_output", "input", "weight_grad".

    Parameters
    ----------
    grad_output, input : array
        Gradient of the output (N, K, spatial) and input (N, C, spatial).
    kernel_size : int or one int per spatial axis
        Spatial size of the weight.
    accumulate : bool
        Add the gradient to `out`, a float32 or float64 array: computed in full in that format, then added once.

    Returns
    -------
    array
        The gradient (K, C/groups, spatial) in `weight_layout`.

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> convgrad.weight_grad(np.ones((1, 1, 3)), np.arange(5.0).reshape(1, 1, 5), 3, backend="reference")
    array([[[3., 6., 9.]]])
    """
    out_dtype = sum_dtype(accumulate, out, out_dtype)
    options = Options(layout, weight_layout, compute, dtype, out_dtype, backend, num_threads, max_workspace_bytes,
                      scales is not None or None)
    arrays = {"grad_output": grad_output, "input": input}
    kind, key = call_key("weight", arrays, (stride, padding, dilation, groups, kernel_size), options)
    if max_memory_bytes is not None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups, kernel_size=kernel_size)
        ceiling = Ceiling(max_memory_bytes, workspace, accumulate)
        return streamed("weight", geometry, arrays, options, {"out": out}, ceiling)[0]
    call = prepared_calls.get(key)
    if call is None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups, kernel_size=kernel_size)
        call = prepare(key, kind, "weight", geometry, arrays, options)
    given = checked_scales(scales, "grad_output, input, weight_grad", call.kind, grad_output)
    run = ready(call, arrays, {"out": None if accumulate else out}, workspace, scales=given)
    return added(call, run, out, arrays) if accumulate else run()[0]


def bias_grad(grad_output: Any, *, layout: str | None = None, dtype: str | None = None, out: Any = None,
              out_dtype: str | None = None, scales: Scales | None = None, workspace: Any = None,
              max_workspace_bytes: int | None = None, backend: str | None = None,
              num_threads: int | None = None, accumulate: bool = False) -> Any:
    """Gradient of a convolution with respect to its bias: the sum of `grad_output` over batch and space.

    The parameters are those of `conv` and `weight_grad`; `scales` names "grad_output", "bias_grad".

    Returns
    -------
    array
        The gradient (K,).

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> convgrad.bias_grad(np.ones((2, 3, 4)), backend="reference")
    array([8., 8., 8.])
    """
    out_dtype = sum_dtype(accumulate, out, out_dtype)
    options = Options(layout, None, None, dtype, out_dtype, backend, num_threads, max_workspace_bytes,
                      scales is not None or None)
    call, arrays = bias_call(grad_output, options)
    given = checked_scales(scales, "grad_output, bias_grad", call.kind, grad_output)
    run = ready(call, arrays, {"out": None if accumulate else out}, workspace, scales=given)
    return added(call, run, out, arrays) if accumulate else run()[0]


@takes_one_image
def conv_backward(grad_output: Any, input: Any, weight: Any, *, stride: Ints = 1, padding: Padding = 0,
                  dilation: Ints = 1, groups: int = 1, layout: str | None = None, weight_layout: str | None = None,
                  compute: str | None = None, dtype: str | None = None,
                  output_mask: Sequence[bool] = ALL_THREE, out: Sequence[Any] | None = None,
                  out_dtype: str | None = None, scales: Scales | None = None, workspace: Any = None,
                  max_workspace_bytes: int | None = None, backend: str | None = None,
                  num_threads: int | None = None, max_memory_bytes: int | None = None) -> tuple[Any, Any, Any]:
    """All gradients of a convolution in one call.

    Parameters not listed are those of `conv`; `scales` names "grad_output", "input", "weight", "input_grad",
    "weight_grad", "bias_grad".

    Parameters
    ----------
    grad_output, input, weight : array
        Gradient of the output (N, K, spatial), input (N, C, spatial), weight (K, C/groups, spatial).
    output_mask : three bools
        Which of the gradients of input, weight and bias to compute.
    out : three arrays or None, optional
        Receive the results.

    Returns
    -------
    (grad_input, grad_weight, grad_bias)
        None where the mask says False.

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> x, w, dy = np.ones((1, 1, 4)), np.ones((1, 1, 3)), np.ones((1, 1, 2))
    >>> [g.tolist() for g in convgrad.conv_backward(dy, x, w, backend="reference")]
    [[[[1.0, 2.0, 2.0, 1.0]]], [[[2.0, 2.0, 2.0]]], [2.0]]
    """
    options = Options(layout, weight_layout, compute, dtype, out_dtype, backend, num_threads, max_workspace_bytes,
                      scales is not None or None)
    mask, outs = checked_mask(output_mask, out)
    wrt = "input+weight+bias" if mask is ALL_THREE else \
        "+".join(name for name, wanted in zip(("input", "weight", "bias"), mask) if wanted)
    arrays = {"grad_output": grad_output, "input": input, "weight": weight}
    kind, key = call_key("backward", arrays, (stride, padding, dilation, groups, wrt), options)
    if max_memory_bytes is not None and wrt:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups)
        results = iter(streamed(wrt, geometry, arrays, options, outs, Ceiling(max_memory_bytes, workspace)))
        dx, dw, db = (next(results) if wanted else None for wanted in mask)
        return dx, dw, db
    call = prepared_calls.get(key)
    if call is None:
        geometry = geometry_of(arrays, options, stride, padding, dilation, groups)
        if not wrt:
            checked_scales(scales, ALL_TENSORS, kind, grad_output)
            return nothing_asked(kind, geometry, arrays, options, workspace)
        call = prepare(key, kind, wrt, geometry, arrays, options)
    given = checked_scales(scales, ALL_TENSORS, kind, grad_output)
    if mask is ALL_THREE:
        dx, dw, db = ready(call, arrays, outs, workspace, scales=given)()
        return dx, dw, db
    needed = {name: arrays[name] for name in call.plan.problem.operands}
    results = iter(ready(call, needed, outs, workspace, scales=given)())
    dx, dw, db = (next(results) if wanted else None for wanted in mask)
    return dx, dw, db


def conv_transpose(input: Any, weight: Any, *, stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0,
                   dilation: Ints = 1, groups: int = 1, layout: str | None = None, weight_layout: str | None = None,
                   compute: str | None = None, dtype: str | None = None, out: Any = None, out_dtype: str | None = None,
                   scales: Scales | None = None, workspace: Any = None, max_workspace_bytes: int | None = None,
                   backend: str | None = None, num_threads: int | None = None) -> Any:
    """Transposed convolution: `input` (N, C, spatial), `weight` (C, K/groups, spatial) as in PyTorch.

    Parameters not listed are those of `conv`; with "same_upper" or "same_lower" the output has stride times the
    size of the input.

    Parameters
    ----------
    output_padding : int or one int per axis
        Extra positions at the high end of the output; those that no tap reaches are 0.
    weight_layout : str, optional
        I is the channel axis of the input, O of the output; the default is I, O, spatial.

    Returns
    -------
    array
        The output (N, K, spatial) in `layout`.

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> convgrad.conv_transpose(np.ones((1, 1, 2)), np.ones((1, 1, 2)), stride=2, backend="reference")
    array([[[1., 1., 1., 1.]]])
    """
    options = Options(layout, exchanged(weight_layout), compute, dtype, out_dtype, backend, num_threads,
                      max_workspace_bytes, scales is not None or None)
    arrays = {"grad_output": input, "weight": weight}
    names = {"grad_output": "input", "input_grad": "output"}
    left: tuple[int, ...] = ()
    if output_padding != 0:
        padding, output_padding, left = reached_part(arrays, options, stride, padding, output_padding)
    kind, key = call_key("transpose", arrays, (stride, padding, dilation, groups, output_padding), options, names)
    call = prepared_calls.get(key)
    if call is None:
        geometry = transposed_geometry(arrays, options, stride, padding, dilation, groups, output_padding)
        call = prepare(key, kind, "input", geometry, arrays, options, names)
    given = checked_scales(scales, "input, weight, output", kind, input)
    if any(left):
        return with_rest(call, arrays, out, left, options,
                         lambda part: ready(call, arrays, {"out": part}, workspace, names, scales=given))
    return ready(call, arrays, {"out": out}, workspace, names, scales=given)()[0]


@takes_one_image
def conv_transpose_backward(grad_output: Any, input: Any, weight: Any, *, stride: Ints = 1, padding: Padding = 0,
                            output_padding: Ints = 0, dilation: Ints = 1, groups: int = 1, layout: str | None = None,
                            weight_layout: str | None = None, compute: str | None = None, dtype: str | None = None,
                            output_mask: Sequence[bool] = ALL_THREE, out: Sequence[Any] | None = None,
                            out_dtype: str | None = None, scales: Scales | None = None, workspace: Any = None,
                            max_workspace_bytes: int | None = None, backend: str | None = None,
                            num_threads: int | None = None) -> tuple[Any, Any, Any]:
    """All gradients of a transposed convolution.

    Parameters not listed are those of `conv_transpose`.

    Parameters
    ----------
    grad_output, input, weight : array
        Gradient of the output (N, K, spatial), input (N, C, spatial), weight (C, K/groups, spatial).
    output_mask : three bools
        Which of the gradients of input, weight and bias to compute.
    out : three arrays or None, optional
        Receive the results.

    Returns
    -------
    (grad_input, grad_weight, grad_bias)
        None where the mask says False.

    Examples
    --------
    >>> import numpy as np, convgrad
    >>> x, w, dy = np.ones((1, 1, 2)), np.ones((1, 1, 2)), np.ones((1, 1, 4))
    >>> [g.tolist() for g in convgrad.conv_transpose_backward(dy, x, w, stride=2, backend="reference")]
    [[[[2.0, 2.0]]], [[[2.0, 2.0]]], [4.0]]
    """
    options = Options(layout, exchanged(weight_layout), compute, dtype, out_dtype, backend, num_threads,
                      max_workspace_bytes, scales is not None or None)
    mask, outs = checked_mask(output_mask, out)
    # The same trilinear form with x and dy exchanged: grad_output is the convolution's input, input its gradient.
    arrays = {"grad_output": input, "input": grad_output, "weight": weight}
    if output_padding != 0:
        padding, output_padding, left = reached_part(arrays, options, stride, padding, output_padding)
        if any(left):  # the bias alone depends on what no tap reaches
            arrays["input"] = without_rest(grad_output, left, options)
    names = {"grad_output": "input", "input": "grad_output", "output": "input_grad"}
    needed = {"input": mask[1], "grad_output": any(mask), "weight": mask[0]}
    taken = {name: array for name, array in (("input", input), ("grad_output", grad_output), ("weight", weight))
             if needed[name]}
    parameters = (stride, padding, dilation, groups, output_padding)
    if not any(mask):
        kind, _ = call_key("transpose", arrays, parameters, options, names)
        geometry = transposed_geometry(arrays, options, *parameters)
        checked_scales(scales, ALL_TENSORS, kind, grad_output)
        return nothing_asked(kind, geometry, arrays, options, workspace, names)
    checked: Conv | None = None
    calls = []
    for label, wrt, wanted in zip(OUT_LABELS, ("output", "weight"), mask):
        kind, key = call_key("transpose_" + wrt, arrays, parameters, options, names)
        call = prepared_calls.get(key)
        if call is None:
            checked = checked or transposed_geometry(arrays, options, *parameters)
            call = prepare(key, kind, wrt, checked, arrays, options, names) if wanted else None
        if call is not None and wanted:
            calls.append((label, call, {name: arrays[name] for name in call.plan.problem.operands}, names))
    if mask[2]:
        bias = Options(layout, None, None, dtype, out_dtype, backend, num_threads, max_workspace_bytes,
                       scales is not None or None)
        calls.append((OUT_LABELS[2], *bias_call(grad_output, bias), {}))
    room = max(call.plan.workspace_bytes for _, call, _, _ in calls)
    runs = []
    for label, call, read, own_names in calls:
        given = checked_scales(scales, ALL_TENSORS, call.kind, grad_output)
        runs.append(ready(call, read, {label: outs[label]}, workspace, own_names, taken, given, room))
        taken = {**taken, label: outs[label]} if outs[label] is not None else taken
    # Everything is checked; only now is anything written.
    results = iter([run()[0] for run in runs])
    dx, dw, db = (next(results) if wanted else None for wanted in mask)
    return dx, dw, db


def set_num_threads(num_threads: int) -> None:
    """Set how many threads the CPU kernels use when a call does not say; results do not depend on it.

    Parameters
    ----------
    num_threads : int
        At least 1; 0 goes back to the default: the CPUs that affinity and cgroup allow this process, or the environment
        variable CONVGRAD_NUM_THREADS.

    Examples
    --------
    >>> import convgrad
    >>> convgrad.set_num_threads(2)
    >>> convgrad.get_num_threads()
    2
    >>> convgrad.set_num_threads(0)
    """
    load("native").set_num_threads(checked_int(num_threads, "num_threads", 0))
    clear_plan_cache()  # plans hold memory for their number of threads
    prepared_calls.clear()


def get_num_threads() -> int:
    """How many threads the CPU kernels use when a call does not say. There are no parameters.

    Parameters
    ----------
    None

    Examples
    --------
    >>> import convgrad
    >>> convgrad.get_num_threads() >= 1
    True
    """
    threads: int = load("native").get_num_threads()
    return threads
