"""Sharded programs: a call is cut along batch, channels and groups, and only sums that were cut are reduced.

A rule names the factors of every axis: batch n, groups g, channels c and k of a group; spatial axes belong to one
device. The factor that a result lacks is summed: where it is sharded, each device computes a part of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ...problem import Problem
from .form import Settings, order_of, roles_of

Compute = Callable[..., Any]


def tell_devices_to(primitives: Iterable[Any]) -> bool:
    """Have JAX tell the lowering rules of these primitives which devices a program runs on; whether that worked.

    NOTE: custom_partitioning needs it when it is reached through a rule of ours. The list has no public name; where a
    new JAX has moved it, calls are not partitioned: XLA gathers their operands, which is slow and right.
    """
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering as listed
    except ImportError:
        return False
    listed.update(primitives)
    return True


@lru_cache(maxsize=4096)
def partitioned(compute: Compute, problem: Problem, settings: Settings) -> Compute:
    """`compute` for one problem, as a function that a sharded program cuts."""
    function = custom_partitioning(lambda *operands: compute(problem, settings, *operands))
    rule, sizes = rule_of(problem)
    function.def_partition(partition=partial_rule(compute, problem, settings), sharding_rule=rule, **sizes)
    return function  # type: ignore[no-any-return]


def factors_of(problem: Problem, role: str) -> list[tuple[str, ...]]:
    """The factors of each axis of a tensor, in the caller's axis order."""
    axes = range(problem.conv.axes)
    conv = problem.conv

    def channels(factor: str, size: int) -> tuple[str, ...]:  # a product has no factors of one
        return (factor,) if conv.groups == 1 else ("g",) if size == 1 else ("g", factor)

    outputs, inputs = channels("k", conv.group_out), channels("c", conv.group_in)
    canonical = {"output": [("n",), outputs, *((f"p{axis}",) for axis in axes)],
                 "input": [("n",), inputs, *((f"h{axis}",) for axis in axes)],
                 "weight": [outputs, ("c",), *((f"r{axis}",) for axis in axes)], "bias": [outputs]}[role]
    found: list[tuple[str, ...]] = [()] * len(canonical)
    for factors, place in zip(canonical, order_of(problem, role)):
        found[place] = factors
    return found


def rule_of(problem: Problem) -> tuple[str, dict[str, int]]:
    """The rule in Shardy's notation, and the sizes of factors that stand in products only."""
    def text(role: str) -> str:
        return " ".join(factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
                        for factors in factors_of(problem, role))

    rule = ", ".join(text(role) for role in roles_of(problem)) + " -> " + text(problem.wrt)
    sizes = {"g": problem.conv.groups, "k": problem.conv.group_out, "c": problem.conv.group_in}
    axes = [factors for role in (*roles_of(problem), problem.wrt) for factors in factors_of(problem, role)]
    alone = {factors[0] for factors in axes if len(factors) == 1}
    inside = {factor for factors in axes for factor in factors} - alone
    return rule, {name: size for name, size in sizes.items() if name in inside}


def partial_rule(compute: Compute, problem: Problem, settings: Settings) -> Compute:
    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        cut = Cut(problem, mesh, arguments)
        shardings = [NamedSharding(mesh, cut.spec(role)) for role in (*roles_of(problem), problem.wrt)]

        def local(*operands: Any) -> Any:
            return cut.summed(compute(cut.problem, settings, *operands))

        return mesh, local, shardings[-1], tuple(shardings[:-1])

    return partition


class Cut:
    """How a mesh cuts a problem: mesh axes by factor, and the problem that is left for one device."""

    def __init__(self, problem: Problem, mesh: Any, arguments: Any) -> None:
        self.whole = problem
        self.axes: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        sizes = {"n": problem.conv.batch, "g": problem.conv.groups, "k": problem.conv.group_out,
                 "c": problem.conv.group_in}
        for role, argument in zip(roles_of(problem), arguments):
            spec = tuple(getattr(argument.sharding, "spec", ()) or ())
            for factors, names in zip(factors_of(problem, role), spec):
                for name in (names,) if isinstance(names, str) else tuple(names or ()):
                    # The slow factor of an axis is cut first; a mesh axis cuts one factor, evenly or not at all.
                    for factor in factors:
                        left = sizes.get(factor, 0)
                        if name not in taken and left and left % mesh.shape[name] == 0:
                            sizes[factor] = left // mesh.shape[name]
                            self.axes[factor] = (*self.axes.get(factor, ()), name)
                            taken.add(name)
        conv = problem.conv
        local = replace(conv, batch=sizes["n"], groups=sizes["g"], in_channels=sizes["g"] * sizes["c"],
                        out_channels=sizes["g"] * sizes["k"])
        self.problem = problem.with_(conv=local)

    def spec(self, role: str) -> PartitionSpec:
        parts = []
        for factors in factors_of(self.whole, role):
            names = tuple(name for factor in factors for name in self.axes.get(factor, ()))
            parts.append(names or None)
        return PartitionSpec(*parts)

    def summed(self, result: Any) -> Any:
        """Add the parts of sums that lie on several devices."""
        kept = {factor for factors in factors_of(self.whole, self.whole.wrt) for factor in factors}
        names = tuple(name for factor, found in self.axes.items() if factor not in kept for name in found)
        return jax.lax.psum(result, names) if names else result
