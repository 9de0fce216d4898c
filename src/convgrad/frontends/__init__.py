"""Array kinds: which front end speaks for an array. A kind is a module with the functions of `Kind`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

from numpy import ndarray

from ..problem import Plan, Problem
from . import numpy as _numpy

Again = Callable[[Iterable[Any]], Sequence[Any] | None]
Order = tuple[int, ...] | None  # place of each canonical axis in an array; None: all in their own


class Recorded(NamedTuple):
    """What a recorded call asks: its problem, and the axis orders of operands and results."""

    problem: Problem
    operand_orders: tuple[Order, ...]
    result_orders: tuple[Order, ...]


class Kind(Protocol):
    """What the public functions need to know about a family of arrays."""

    def signature(self, arrays: dict[str, Any]) -> Any:
        """All that `home`, `format_of` and the geometry depend on: calls with equal signatures are prepared once."""

    def home(self, arrays: dict[str, Any]) -> tuple[str, str | None]:
        """Device of all arrays ("cpu" or "cuda"), and their memory order where it differs from their axis order."""

    def format_of(self, array: Any, name: str, dtype: str | None) -> str:
        """Name of the number format of an operand."""

    def threads(self) -> int | None:
        """Threads for a call on the CPU that does not say; None: our default. Part of the signature where it varies."""

    def execute(self, run: Callable[..., Any], operands: tuple[Any, ...], targets: tuple[Any, ...],
                workspace: Any) -> None:
        """Call a plan's `run`, on the threads that these arrays' library has."""

    def recorded(self, arrays: dict[str, Any]) -> bool:
        """Whether the arrays' library follows what is computed from them: for derivatives, or to trace a program."""

    def record(self, asked: Recorded, arrays: dict[str, Any]) -> Sequence[Any]:
        """The results of a call on such arrays, in a way that the library can follow."""

    def add(self, out: Any, result: Any) -> Any:
        """Add a result to an array that `check_out` has accepted, and return the array."""

    def operand(self, array: Any, name: str, order: tuple[int, ...] | None, format_name: str) -> Any:
        """The operand as a backend takes it: a view in canonical axis order."""

    def empty(self, shape: tuple[int, ...], format_name: str, like: Any) -> Any:
        """A new result array in the caller's axis order."""

    def returned(self, result: Any, like: Any) -> Any:
        """The finished result as the caller gets it."""

    def check_out(self, out: Any, shape: tuple[int, ...], format_name: str, name: str,
                  operands: dict[str, Any]) -> None:
        """Refuse an output array that cannot receive the result."""

    def check_workspace(self, workspace: Any, needed: int, operands: dict[str, Any]) -> None:
        """Refuse an unusable workspace."""

    def workspace_view(self, workspace: Any) -> Any:
        """The workspace as a backend takes it."""

    def again(self, plan: Plan, operands: tuple[Any, ...], targets: tuple[Any, ...],
              results: tuple[Any, ...]) -> Again | Literal[False] | None:
        """A shorter way for calls of the same signature: from the operands, as they are given, to new results.

        Asked when the plan's `run` has filled `targets`, the views of `results`. None: there is none; False: ask again
        after the next call. The way itself answers None where the operands need the long one.
        """


# Top-level package of an array's type -> front end module. Imported when such an array appears, never before.
KINDS = {"torch": "convgrad.frontends.torch.tensors", "cupy": "convgrad.frontends.dlpack",
         "jax": "convgrad.frontends.dlpack", "jaxlib": "convgrad.frontends.dlpack"}
MOST_TYPES = 64
_known_types: dict[type, Kind] = {ndarray: cast(Kind, _numpy)}


def kind_of(arrays: dict[str, Any], names: dict[str, str]) -> Kind:
    """The one kind of all arrays; raises TypeError for mixtures and for things that are no arrays.

    `names` maps an operand to the caller's word for it where the two differ.
    """
    types = {type(array) for array in arrays.values()}
    if len(types) == 1:
        known = _known_types.get(next(iter(types)))
        if known is not None:
            return known
    kinds = {}
    arrays = {names.get(name, name): array for name, array in arrays.items()}
    for name, array in arrays.items():
        if _numpy.accepts(array, name):
            kinds[name] = cast(Kind, _numpy)
        else:
            kinds[name] = _foreign_kind(array, name)
    first, *rest = kinds.values()
    if any(kind is not first for kind in rest):
        what = ", ".join(f"{name} is {_type_name(array)}" for name, array in arrays.items())
        raise TypeError(f"all arrays of a call must be of one kind: {what}")
    if len(types) == 1 and len(_known_types) < MOST_TYPES:
        _known_types[types.pop()] = first
    return first


def _type_name(array: object) -> str:
    return f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"


def _foreign_kind(array: Any, name: str) -> Kind:
    packages = [base.__module__.partition(".")[0] for base in type(array).__mro__]  # a subclass is of its base's kind
    package = next((name for name in packages if name in KINDS), packages[0])
    shown = hasattr(array, "__dlpack__") or hasattr(array, "__cuda_array_interface__")
    module = KINDS.get(package) or ("convgrad.frontends.dlpack" if shown else None)
    if module is None or (package in KINDS and package not in sys.modules):
        raise TypeError(f"{name} must be an array (NumPy, PyTorch, or anything with __dlpack__), "
                        f"got {_type_name(array)}")
    return cast(Kind, importlib.import_module(module))
