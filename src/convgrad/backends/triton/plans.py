"""Plans: what the registry chooses for a problem, for tensors as they lie, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...problem import Plan, Problem, Unsupported
from .fallback import run_first_compiled
from .flat import flat_view, flattened
from .kernel import Choice, Query, choose
from .numbers_on_device import on_tensors
from .prepared import prepared_plan
from .registry import KERNELS, query_of
from .replay import Run
from .tuning import SEPARATE, Entry, entry_of


def make_plan(problem: Problem, max_workspace: int | None, entry: Entry | None = None) -> Plan:
    """The plan for a problem that this backend can run; `entry` overrules tuning files and models."""
    if no_products(problem):
        if len(problem.results) > 1:
            raise Unsupported("several results of a problem without elements: one kernel each is used")
        return prepared_plan(Plan(problem, "triton", "fill_zero", on_tensors(problem, fill_zero), 0))
    made = Made(problem, max_workspace, entry)
    return prepared_plan(Plan(problem, "triton", made.name, on_tensors(problem, made.run), made.workspace_bytes,
                              made.notes))


def no_products(problem: Problem) -> bool:
    """Whether a result is empty, or every sum of one is: no outputs, no channels, or nothing but padding."""
    conv = problem.conv
    return (any(0 in conv.shape_of(result) for result in problem.results) or 0 in conv.output_shape
            or (problem.wrt != "bias" and 0 in (conv.group_in, *conv.in_size)))


class Made:
    """The choices for a problem: one for tensors that lie as its layouts say, others as such tensors come."""

    def __init__(self, problem: Problem, max_workspace: int | None, entry: Entry | None) -> None:
        self.problem, self.max_workspace, self.entry = problem, max_workspace, entry
        self.flat = flattened(problem)
        query = query_of(problem, max_workspace)
        first = self.prepare(query)
        self.prepared = {(lie_of(query.operands, query.results), KERNELS): first}
        self.name, self.workspace_bytes, self.notes = first.name, first.workspace_bytes, first.notes

    def run(self, operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        run_first_compiled(self.problem, self.suited(operands, results, workspace), (*operands, *results))

    def suited(self, operands: tuple[Any, ...], results: tuple[Any, ...],
               workspace: Any) -> Iterator[tuple[str, Callable[[], None]]]:
        """What serves tensors that lie so, the fastest first; the last compiles anywhere."""
        key = lie_of(operands, results)
        kernels = KERNELS
        while True:
            if (key, kernels) not in self.prepared:
                query = replace(query_of(self.problem, self.max_workspace), operands=operands, results=results,
                                kernels=kernels)
                try:
                    self.prepared[key, kernels] = self.prepare(query)
                except Unsupported:  # a plan of several results is for these tensors one after the other
                    self.prepared[key, kernels] = apart(query)
            found = self.prepared[key, kernels]
            # tensors that lie otherwise may need more memory than the plan says: then it is their own
            memory = workspace if found.workspace_bytes <= self.workspace_bytes else None
            yield found.name, partial(found.run, operands, results, memory)
            kernels = tuple(kernel for kernel in kernels if kernel.fallback or kernel.name not in found.kernels)
            if all(kernel.fallback for kernel in kernels) or not found.kernels:
                return

    def prepare(self, query: Query) -> Chosen:
        """What runs for tensors that lie so."""
        flat = None if self.flat is None else flat_query(query, self.flat)
        if flat is None:
            return chosen(query, self.entry)
        found = chosen(flat, self.entry)

        def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
            found.run(tuple(map(flat_view, operands)), tuple(map(flat_view, results)), workspace)

        return replace(found, run=run, notes=("windows cover whole images: one matrix product", *found.notes))


@dataclass(frozen=True)
class Chosen:
    """One choice, or a weight gradient's that sums the bias gradient as well."""

    name: str
    run: Run
    workspace_bytes: int
    notes: tuple[str, ...]
    kernels: frozenset[str]  # that run, of those that may not compile everywhere


def chosen(query: Query, entry: Entry | None) -> Chosen:
    """The choice for a query, or Unsupported."""
    problem = query.problem
    several = len(problem.results) > 1
    if several and (entry or entry_of(problem, query.gpu)[0]) == SEPARATE:
        raise Unsupported("several results at once: tuning found one kernel each to be faster")
    if several and not query.geo.depthwise:
        return weight_and_bias(query, entry)
    choice = choose(query, entry)
    if choice is None:
        raise Unsupported(why_none(query, entry))
    if several and entry is None and choice.source.startswith("cost model"):
        refuse_where_apart_is_faster(query, choice)
    return as_chosen(choice)


def why_none(query: Query, entry: Entry | None) -> str:
    """Why no kernel serves: the workspace that the thriftiest needs, where that is all that is missing."""
    plain = tuple(kernel for kernel in query.kernels if kernel.fallback)
    free = choose(replace(query, max_workspace=None, kernels=plain)) if query.max_workspace is not None else None
    if free is None or entry is not None:
        return f"{query.problem}: no kernel fits{f' of those that {entry} names' if entry else ''}"
    return (f"{free.prepared.name} needs a workspace of {free.prepared.workspace_bytes} bytes, "
            f"but max_workspace_bytes={query.max_workspace}")


def as_chosen(choice: Choice) -> Chosen:
    prepared = choice.prepared
    return Chosen(prepared.name, prepared.run, prepared.workspace_bytes, notes_of(choice), special(choice))


def notes_of(choice: Choice) -> tuple[str, ...]:
    """What `explain` prints: the tile, the others' reasons, where the tile comes from."""
    others = (f"not {name}: {reason}" for name, reason in choice.reasons.items()
              if not reason.startswith(("computes", "one channel a group")))
    return (f"tile: {choice.prepared.note}", f"expected: {1e6 * choice.seconds:.1f} us on {choice.query.gpu.name}",
            *others, f"tile chosen by: {choice.source}")


def refuse_where_apart_is_faster(query: Query, together: Choice) -> None:
    """Raise Unsupported where one kernel for the first result and one for the others are expected to be faster.

    Of 19 depthwise layers measured on an H200 both ways, the models decide 18 so.
    """
    first, *rest = query.problem.results
    parts = [choose(part_of(query, (first,))), choose(part_of(query, tuple(rest)))]
    special = [part.seconds for part in parts if part is not None and not part.kernel.fallback]
    if together.kernel.fallback:
        faster = len(special) > 0
    else:
        faster = len(special) == len(parts) and together.seconds > sum(special)
    if faster:
        raise Unsupported("several results at once: one pass each is faster by the model")


def part_of(query: Query, results: tuple[str, ...]) -> Query:
    """The query for some of the results."""
    problem = query.problem.with_(wrt="+".join(results))
    operands = dict(zip(query.problem.operands, query.operands))
    written = dict(zip(query.problem.results, query.results))
    return replace(query, problem=problem, operands=tuple(operands[name] for name in problem.operands),
                   results=tuple(written[name] for name in results))


def weight_and_bias(query: Query, entry: Entry | None) -> Chosen:
    """Weight and bias gradient in one pass, where the fastest kernel for the weight gradient can do that."""
    if query.problem.wrt != "weight+bias":
        raise Unsupported("several results of a dense or grouped convolution: one kernel each is used")
    alone = part_of(query, ("weight",))
    choice = choose(alone, entry) if flattened(alone.problem) is None else None
    size = 0 if choice is None else choice.prepared.workspace_bytes + choice.prepared.bias_bytes
    if choice is None or not choice.prepared.bias_bytes or size > query.limit:
        raise Unsupported("weight and bias gradient at once: one kernel each is used")
    return Chosen(f"{choice.prepared.name}_bias", choice.prepared.run, size, notes_of(choice),
                  special(choice))


def special(*choices: Choice) -> frozenset[str]:
    return frozenset(choice.kernel.name for choice in choices if not choice.kernel.fallback)


def apart(query: Query) -> Chosen:
    """Each result by a kernel of its own."""
    problem = query.problem
    parts = [part_of(query, (result,)) for result in problem.results]
    choices = []
    for part in parts:
        choice = choose(part)
        if choice is None:
            raise Unsupported(why_none(part, None))
        choices.append(choice)
    picks = [[problem.operands.index(name) for name in part.problem.operands] for part in parts]

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        for choice, pick, result in zip(choices, picks, results):
            choice.prepared.run(tuple(operands[place] for place in pick), (result,), workspace)

    return Chosen(" + ".join(choice.prepared.name for choice in choices), run,
                  max(choice.prepared.workspace_bytes for choice in choices), (), special(*choices))


def flat_query(query: Query, problem: Problem) -> Query | None:
    """The query for the flat problem; None where the tensors cannot be seen so."""
    operands, results = tuple(map(flat_view, query.operands)), tuple(map(flat_view, query.results))
    if any(view is None for view in (*operands, *results)):
        return None
    return replace(query, problem=problem, operands=operands, results=results)


def lie_of(operands: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a choice depends on of the tensors."""
    return tuple((tensor.stride(), tensor.data_ptr() % 16) for tensor in (*operands, *results))


def fill_zero(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
    for result in results:
        result.zero_()
