"""From checked arguments to results: a Recipe of Problems, its plans, the executor that runs them once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numbers import decode, encode, storage_dtype
from ...plan import plan as find_plan
from ...problem import DTYPES, Plan, Problem, Unsupported
from ..numpy import overlaps_itself
from .descriptors import aclTensor, whole_number
from .status import INNER_NULLPTR, INVALID, NULLPTR, RUNTIME, SUCCESS, Refusal, aclnnStatus, recent, refused

Array = npt.NDArray[Any]
ONE_ROUNDING = ("float32", "float16", "bfloat16")  # NumPy converts between these through float32, exact on the way
ALIGNMENT = 64  # every part of a workspace starts on a cache line


class View(NamedTuple):
    """One operand or result of a Problem: the array at `place`, its axes in the order a plan takes them."""

    place: int
    order: tuple[int, ...] | None = None

    def of(self, arrays: list[Any]) -> Any:
        array = arrays[self.place]
        return array if self.order is None else array.transpose(self.order)


class Task(NamedTuple):
    """One Problem with its operands and results."""

    problem: Problem
    operands: tuple[View, ...]
    results: tuple[View, ...]


class Temporary(NamedTuple):
    """A tensor in another number format that lives in the workspace for the time of the call."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass
class Recipe:
    """Everything phase 2 does, in order: convert operands, solve the tasks, convert results, write zeros.

    Places count the tensors of the call first, then the temporaries.
    """

    names: tuple[str, ...]
    tasks: list[Task] = field(default_factory=list)
    before: list[tuple[int, int]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    zeros: list[int] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    formats: dict[int, str] = field(default_factory=dict)  # number format of every place that is converted
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    temporary_bytes: int = 0

    def temporary(self, shape: tuple[int, ...], dtype: str) -> int:
        self.temporaries.append(Temporary(shape, dtype))
        place = len(self.names) + len(self.temporaries) - 1
        self.formats[place] = dtype
        return place

    def converted(self, place: int, shape: tuple[int, ...], dtype: str, wanted: str) -> int:
        """The place that holds the tensor at `place` in the format `wanted`; the same tensor is converted once."""
        if dtype == wanted:
            return place
        for source, target in self.before:
            if source == place and self.formats[target] == wanted:
                return target
        self.formats[place] = dtype
        target = self.temporary(shape, wanted)
        self.before.append((place, target))
        return target

    def produced(self, place: int, shape: tuple[int, ...], dtype: str, produced: str) -> int:
        """The place where a result is written in the format `produced` before it is converted for `place`."""
        if dtype == produced:
            return place
        self.formats[place] = dtype
        source = self.temporary(shape, produced)
        self.after.append((source, place))
        return source

    def finish(self) -> Recipe:
        """Note which tensors are read and written, once."""
        count = len(self.names)
        read = [view.place for task in self.tasks for view in task.operands] + [source for source, _ in self.before]
        written = [view.place for task in self.tasks for view in task.results] + [target for _, target in self.after]
        self.reads = tuple(sorted({place for place in read if place < count}))
        self.writes = tuple(sorted({place for place in written + self.zeros if place < count}))
        self.temporary_bytes = sum(aligned(temporary.nbytes) for temporary in self.temporaries)
        return self


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Engine(NamedTuple):
    """How the engine is asked: the keywords of `convgrad.plan`."""

    backend: str | None = None
    num_threads: int | None = None
    max_workspace_bytes: int | None = None


class aclOpExecutor:
    """What phase 1 hands to phase 2: the plans and the tensors of one call. It runs once."""

    __slots__ = ("operator", "plans", "recipe", "tensors", "used", "workspace_bytes")

    def __init__(self, operator: str, recipe: Recipe, tensors: tuple[aclTensor | None, ...], engine: Engine,
                 failure: aclnnStatus = INNER_NULLPTR) -> None:
        try:
            self.plans: list[Plan] = [
                find_plan(task.problem, backend=engine.backend, max_workspace_bytes=engine.max_workspace_bytes,
                          num_threads=engine.num_threads) for task in recipe.tasks]
        except Unsupported as error:
            raise Refusal(failure, str(error)) from error
        self.operator = operator
        self.recipe = recipe
        self.tensors = tensors
        self.used = False
        scratch = max([plan.workspace_bytes for plan in self.plans], default=0)
        needed = aligned(scratch) + recipe.temporary_bytes
        self.workspace_bytes = needed + ALIGNMENT if needed else 0  # room to start on a cache line

    def run(self, workspace: Array | None) -> None:
        recipe = self.recipe
        arrays: list[Any] = [None if tensor is None else tensor.array for tensor in self.tensors]
        scratch = None
        if workspace is not None and self.workspace_bytes:
            start = -workspace.__array_interface__["data"][0] % ALIGNMENT
            for temporary in recipe.temporaries:
                part = workspace[start:start + temporary.nbytes]
                arrays.append(part.view(storage_dtype(temporary.dtype)).reshape(temporary.shape))
                start += aligned(temporary.nbytes)
            scratch = workspace[start:]
        for source, target in recipe.before:
            convert(arrays[source], recipe.formats[source], arrays[target], recipe.formats[target])
        for task, plan in zip(recipe.tasks, self.plans):
            operands = tuple([view.of(arrays) for view in task.operands])
            results = tuple([view.of(arrays) for view in task.results])
            plan.run(operands, results, scratch if plan.workspace_bytes else None)
        for source, target in recipe.after:
            convert(arrays[source], recipe.formats[source], arrays[target], recipe.formats[target])
        for place in recipe.zeros:
            arrays[place].fill(0)


def convert(source: Array, source_format: str, target: Array, target_format: str) -> None:
    """Write the values of `source` into `target`, rounded once to its number format."""
    if source_format in ONE_ROUNDING and target_format in ONE_ROUNDING:
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(target, source, casting="unsafe")
    else:
        target[...] = encode(decode(source, source_format), target_format)


def phase_two(operator: str, workspace: Any, workspace_size: int, executor: aclOpExecutor | None) -> aclnnStatus:
    """Check what phase 2 is given, run the executor, return the status. Nothing is written when the call is refused."""
    try:
        if executor is None:
            raise Refusal(NULLPTR, f"{operator}: executor is None")
        if not isinstance(executor, aclOpExecutor):
            raise Refusal(INVALID, f"executor must be what {operator}GetWorkspaceSize returned, got "
                                   f"{type(executor).__name__}")
        memory = check_phase_two(operator, workspace, workspace_size, executor)
        executor.used = True
        try:
            executor.run(memory)
        except Exception as error:
            raise Refusal(RUNTIME, f"{operator}: {type(error).__name__}: {error}") from error
    except Refusal as refusal:
        return refused(refusal)
    recent.message = ""
    return SUCCESS


def check_phase_two(operator: str, workspace: Any, workspace_size: int, executor: aclOpExecutor) -> Array | None:
    """Return the workspace as bytes, or refuse."""
    if executor.operator != operator:
        raise Refusal(INVALID, f"{operator}: executor belongs to {executor.operator}")
    if executor.used:
        raise Refusal(INVALID, f"{operator}: executor was used before; an executor runs once, call "
                               f"{operator}GetWorkspaceSize again")
    memory = None
    needed = executor.workspace_bytes
    workspace_size = whole_number(workspace_size, "workspaceSize")
    if needed:
        if workspace is None:
            raise Refusal(NULLPTR, f"{operator}: workspace is None, but {needed} bytes are needed")
        memory = bytes_of(operator, workspace)
        if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous or not memory.flags.writeable:
            raise Refusal(INVALID, f"{operator}: workspace must be writable contiguous bytes, got {memory.dtype} of "
                                   f"shape {memory.shape}")
        if workspace_size < needed or memory.size < needed:
            raise Refusal(INVALID, f"{operator}: the workspace has {memory.size} bytes and workspaceSize="
                                   f"{workspace_size}, but {needed} bytes are needed")
    recipe, tensors = executor.recipe, executor.tensors
    for place in (*recipe.reads, *recipe.writes):
        tensor = tensors[place]
        if tensor is None or tensor.array is None:
            raise Refusal(NULLPTR, f"{operator}: {recipe.names[place]} is a descriptor without data")
    for place in recipe.writes:
        check_target(operator, recipe, executor, place)
    if memory is not None:
        check_apart(operator, memory[:needed], executor)
    return memory


def bytes_of(operator: str, workspace: Any) -> Array:
    try:
        return workspace if isinstance(workspace, np.ndarray) else np.frombuffer(workspace, np.uint8)
    except (TypeError, ValueError) as error:
        raise Refusal(INVALID, f"{operator}: workspace must be writable contiguous bytes: {error}") from None


def check_apart(operator: str, memory: Array, executor: aclOpExecutor) -> None:
    """Refuse a workspace that lies on a tensor that is read or written."""
    recipe = executor.recipe
    for place in (*recipe.reads, *recipe.writes):
        array = executor.tensors[place].array  # type: ignore[union-attr]
        if np.may_share_memory(memory, array) and np.shares_memory(memory, array):
            raise Refusal(INVALID, f"{operator}: the workspace overlaps {recipe.names[place]} in memory")


def check_target(operator: str, recipe: Recipe, executor: aclOpExecutor, place: int) -> None:
    """Refuse a result that cannot be written, or that lies on an operand or on another result."""
    name = recipe.names[place]
    target = executor.tensors[place].array  # type: ignore[union-attr]
    assert target is not None
    if not target.flags.writeable:
        raise Refusal(INVALID, f"{operator}: {name} is read-only")
    if not target.flags.c_contiguous and overlaps_itself(target.shape, target.strides, target.itemsize):
        raise Refusal(INVALID, f"{operator}: {name} has elements that overlap each other (shape {target.shape}, "
                               f"strides {target.strides} in bytes)")
    for other in (*recipe.reads, *recipe.writes):
        if other == place:
            continue
        array = executor.tensors[other].array  # type: ignore[union-attr]
        if np.may_share_memory(target, array) and np.shares_memory(target, array):
            raise Refusal(INVALID, f"{operator}: {name} overlaps {recipe.names[other]} in memory")
