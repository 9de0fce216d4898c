"""From a prepared call and its arrays to results: every check first, then the run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from .call import NOTHING, SAME_NAMES, Call
from .frontends import Recorded
from .problem import DTYPES, default_compute


def ready(call: Call, arrays: dict[str, Any], outs: dict[str, Any], workspace: Any,
          names: dict[str, str] = SAME_NAMES, taken: dict[str, Any] = NOTHING,
          scales: dict[str, Any] = NOTHING, needed: int = 0) -> Callable[[], Sequence[Any]]:
    """Check everything about the arrays of a prepared call and return the function that runs it.

    `outs` are the caller's output arrays (or None) by the name for messages, one per result; `taken` are other arrays
    that they must not overlap; `scales` those of a scaled call, by the caller's names of the tensors; `needed` the
    bytes of workspace where other plans of the same call need more.
    """
    if call.kind.recorded(arrays):
        return recorded(call, arrays, (*scales, *[label for label, out in outs.items() if out is not None]), workspace)
    again = call.again
    if again and workspace is None and not scales and all([out is None for out in outs.values()]):
        return lambda: again(arrays.values()) or checked(call, arrays, outs, workspace, names, taken, scales)()
    return checked(call, arrays, outs, workspace, names, taken, scales, needed)


def recorded(call: Call, arrays: dict[str, Any], given: tuple[str, ...], workspace: Any) -> Callable[[], Sequence[Any]]:
    """A call on arrays whose library follows what is computed, for derivatives or for a trace."""
    problem = call.plan.problem
    given += (*["workspace"] * (workspace is not None), *[f"backend={call.backend!r}"] * (call.backend is not None),
              *[f"compute={problem.compute!r}"] * (problem.compute != default_compute(problem.dtype)),
              *[problem.dtype] * (DTYPES[problem.dtype][1] == 1))
    if given:
        raise ValueError(f"the arrays are recorded (they require gradients, or a program is traced), which does not go "
                         f"with {', '.join(given)}: detach them first")
    return lambda: call.kind.record(Recorded(problem, call.operand_orders, call.result_orders), arrays)


def checked(call: Call, arrays: dict[str, Any], outs: dict[str, Any], workspace: Any, names: dict[str, str],
            taken: dict[str, Any], scales: dict[str, Any], needed: int = 0) -> Callable[[], Sequence[Any]]:
    """What `ready` does for a call that does not only repeat an earlier one with new results."""
    kind, chosen = call.kind, call.plan
    out_format = chosen.problem.out_dtype
    operands = tuple([
        kind.operand(array, names.get(name, name), order, format_name)
        for (name, array), order, format_name in zip(arrays.items(), call.operand_orders, call.formats)])
    if scales:
        tensors = [scaled.removesuffix("_scale") for scaled in chosen.problem.scales]
        operands += tuple([scales[names.get(name, name)] for name in tensors])
        taken = {**taken, **{f"scales[{name!r}]": scale for name, scale in scales.items() if hasattr(scale, "dtype")}}
    like = next(iter(arrays.values()))
    results: dict[str, Any] = {}
    for (label, out), shape in zip(outs.items(), call.result_shapes):
        if out is None:
            out = kind.empty(shape, out_format, like)
        else:
            others = {names.get(name, name): array for name, array in arrays.items()}
            kind.check_out(out, shape, out_format, label, {**others, **taken, **results})
        results[label] = out
    targets = tuple([kind.operand(result, label, order, out_format)
                     for (label, result), order in zip(results.items(), call.result_orders)])
    if workspace is not None:
        others = {names.get(name, name): array for name, array in arrays.items()}
        kind.check_workspace(workspace, max(needed, chosen.workspace_bytes), {**others, **taken, **results})
        workspace = kind.workspace_view(workspace)

    def run() -> Sequence[Any]:
        kind.execute(chosen.run, operands, targets, workspace)
        if call.again is False and workspace is None and not scales and all([out is None for out in outs.values()]):
            call.again = kind.again(chosen, operands, targets, tuple(results.values()))
        return tuple([kind.returned(result, like) for result in results.values()])

    return run


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_one_image(function: Function) -> Function:
    """Let a function of (grad_output, input, weight) take one image without its batch axis, as PyTorch's do."""
    @functools.wraps(function)
    def call(grad_output: Any, input: Any, weight: Any, **options: Any) -> Any:
        axes = getattr(weight, "ndim", 0) - 1
        if getattr(input, "ndim", None) != axes or getattr(grad_output, "ndim", None) != axes or options.get("layout"):
            return function(grad_output, input, weight, **options)
        out = options.get("out")
        if isinstance(out, (tuple, list)) and len(out) == 3 and hasattr(out[0], "ndim"):
            options["out"] = (out[0][None], *out[1:])
        dx, dw, db = function(grad_output[None], input[None], weight, **options)
        return None if dx is None else dx[0], dw, db

    return cast(Function, call)


def sum_dtype(accumulate: bool, out: Any, out_dtype: str | None) -> str | None:
    """The number format in which a result is computed that is then added to `out`: its own, float32 or float64."""
    if not accumulate:
        return out_dtype
    if out is None:
        raise ValueError("accumulate=True adds to out: give the array to add to")
    found = str(getattr(out, "dtype", type(out).__name__)).removeprefix("torch.")
    if found not in ("float32", "float64"):
        raise TypeError(f"accumulate=True adds to a float32 or float64 array, but out is {found}")
    return out_dtype or found


def added(call: Call, run: Callable[[], Sequence[Any]], out: Any, arrays: dict[str, Any]) -> Any:
    """Add the one result of a call to `out`: computed in full, rounded to the format of `out`, added once."""
    call.kind.check_out(out, call.result_shapes[0], call.plan.problem.out_dtype, "out", arrays)
    if call.kind.recorded(arrays):
        raise ValueError("the arrays are recorded (they require gradients, or a program is traced), which does not go "
                         "with accumulate=True: detach them first")
    return call.kind.add(out, run()[0])
