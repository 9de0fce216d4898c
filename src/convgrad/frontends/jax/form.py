"""The trilinear form as primitives of JAX.

T(x, w, dy) = sum of x*w*dy is linear in each role, so one primitive, the form solved for one role from the other two,
is all that differentiation needs: its derivative by either operand, forward or backward, is the same primitive solved
for another role. Bias gradients are a linear primitive whose transpose is a broadcast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...problem import Problem, axis_order
from .folding import fold_into_batch, fold_into_groups, folds_into_batch, merged, split

# Each question and the roles that answer it, in the order of Problem.operands; "output" is called grad_output there.
OTHERS = {"output": ("input", "weight"), "input": ("output", "weight"), "weight": ("output", "input")}


class Settings(NamedTuple):
    """What is handed on to the planner."""

    backend: str | None = None
    num_threads: int | None = None
    max_workspace_bytes: int | None = None
    callback: bool = False  # through Python even where XLA has a handler


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


def result_type(problem: Problem) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_in_layout(problem, problem.wrt), jnp.dtype(problem.out_dtype))


# --- the primitives ---------------------------------------------------------------------------------------------------

solve_p = Primitive("convgrad_solve")  # two operands
bias_grad_p = Primitive("convgrad_bias_grad")  # one operand: the sum over batch and pixels
spread_p = Primitive("convgrad_spread")  # one operand: its transpose, a bias repeated over batch and pixels
FORMS = (solve_p, bias_grad_p)


def solve(problem: Problem, settings: Settings, *operands: Any) -> Any:
    """The form solved for the role `problem.wrt`, from the other roles in the order of OTHERS."""
    form = bias_grad_p if problem.wrt == "bias" else solve_p
    return form.bind(*with_one_manual_type(operands), problem=problem, settings=settings)


def varying_axes(operand: Any) -> frozenset[str]:
    """Mesh axes over which a value differs inside shard_map; JAX has given this field two names so far."""
    kind = jax.typeof(operand)
    manual = getattr(kind, "manual_axis_type", None)
    found: frozenset[str] = manual.varying if manual is not None else getattr(kind, "vma", frozenset())
    return found


def with_one_manual_type(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inside shard_map: operands that vary over different mesh axes are marked as varying over all of them."""
    types = [varying_axes(operand) for operand in operands]
    together = frozenset[str]().union(*types)
    return tuple(jax.lax.pcast(operand, tuple(sorted(together - found)), to="varying") if together - found else operand
                 for operand, found in zip(operands, types))


def abstract(*operands: Any, problem: Problem, settings: Settings) -> Any:
    for operand, role in zip(operands, roles_of(problem)):
        assert operand.shape == shape_in_layout(problem, role), (operand.shape, problem, role)
    found = result_type(problem)
    return operands[0].update(shape=found.shape, dtype=found.dtype, weak_type=False)


def run_alone(form: Primitive) -> Any:
    """Outside of jit a primitive is a compiled program of its own."""
    compiled = jax.jit(form.bind, static_argnames=("problem", "settings"))
    return lambda *operands, problem, settings: compiled(*operands, problem=problem, settings=settings)


def as_operand(grad: Any, problem: Problem) -> Any:
    """A cotangent as an operand: where results have a wider format than operands, it is rounded to the operands'."""
    return grad if grad.dtype == jnp.dtype(problem.dtype) else grad.astype(problem.dtype)


def transposed(role: str, grad: Any, others: dict[str, Any], problem: Problem, settings: Settings) -> Any:
    """The cotangent of one role: the form solved for it, from the cotangent of the result and the other operand."""
    filled = {**others, problem.wrt: as_operand(grad, problem)}
    question = problem.with_(wrt=role, out_dtype=problem.dtype)
    return solve(question, settings, *(filled[other] for other in OTHERS[role]))


def transpose_first(grad: Any, a: Any, b: Any, *, problem: Problem, settings: Settings) -> Any:
    first, second = OTHERS[problem.wrt]
    return transposed(first, grad, {second: b}, problem, settings)


def transpose_second(grad: Any, a: Any, b: Any, *, problem: Problem, settings: Settings) -> Any:
    first, second = OTHERS[problem.wrt]
    return transposed(second, grad, {first: a}, problem, settings)


def along_channels(problem: Problem, values: Any) -> Any:
    shape = [1] * (problem.conv.axes + 2)
    shape[order_of(problem, "output")[1]] = -1
    return values.reshape(shape)


def spread(problem: Problem, settings: Settings, bias: Any) -> Any:
    """One value per channel, repeated; the gradient is our own sum (`problem` is that of the bias gradient)."""
    return spread_p.bind(bias, problem=problem, settings=settings)


def repeated(bias: Any, *, problem: Problem, settings: Settings) -> Any:
    return jnp.broadcast_to(along_channels(problem, bias), shape_in_layout(problem, "output"))


def abstract_spread(bias: Any, *, problem: Problem, settings: Settings) -> Any:
    return bias.update(shape=shape_in_layout(problem, "output"), weak_type=False)


def transpose_spread(grad: Any, bias: Any, *, problem: Problem, settings: Settings) -> list[Any]:
    return [solve(problem, settings, as_operand(grad, problem))]


def transpose_bias_grad(grad: Any, operand: Any, *, problem: Problem, settings: Settings) -> list[Any]:
    return [spread(problem, settings, as_operand(grad, problem))]


def batch(operands: Any, axes: Any, *, problem: Problem, settings: Settings) -> tuple[Any, int]:
    """vmap: the new axis joins the batch or the groups, so that a mapped call is still one call."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
    mapped = tuple(axis is not None for axis in axes)
    fold = fold_into_batch if folds_into_batch(problem, mapped) else fold_into_groups
    folded, places = fold(problem, size, roles_of(problem), order_of)
    grown = []
    for operand, axis, place in zip(operands, axes, places):
        if place is not None:
            operand = jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None \
                else jnp.moveaxis(operand, axis, 0)
            operand = merged(operand, place)
        grown.append(operand)
    return split(solve(folded, settings, *grown), places[-1], size), 0


def batch_spread(operands: Any, axes: Any, *, problem: Problem, settings: Settings) -> tuple[Any, int]:
    bias, size = jnp.moveaxis(operands[0], axes[0], 0), operands[0].shape[axes[0]]
    folded, (place, _) = fold_into_groups(problem, size, roles_of(problem), order_of)
    return split(spread(folded, settings, merged(bias, 0)), place, size), 0


for form in FORMS:
    form.def_impl(run_alone(form))
    form.def_abstract_eval(abstract)
    batching.primitive_batchers[form] = batch
spread_p.def_impl(run_alone(spread_p))
spread_p.def_abstract_eval(abstract_spread)
batching.primitive_batchers[spread_p] = batch_spread
mlir.register_lowering(spread_p, mlir.lower_fun(repeated, multiple_results=False))
ad.defbilinear(solve_p, transpose_first, transpose_second)
ad.deflinear2(bias_grad_p, transpose_bias_grad)
ad.deflinear2(spread_p, transpose_spread)


def register_lowering(platform: str, rule: Any) -> None:
    for form in FORMS:
        mlir.register_lowering(form, mlir.lower_fun(rule, multiple_results=False), platform=platform)
