"""plan(problem) -> Plan: ask the backends in order, keep their reasons, remember the answer."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from .checks import check_counts, check_room
from .problem import Plan, Problem, Unsupported, checked_int

# Every backend is one module with a function `plan`. A new backend is a module and a line here.
BACKENDS = {
    "native": "convgrad.backends.native",
    "triton": "convgrad.backends.triton",
    "reference": "convgrad.backends.reference",
}
# Who is asked when the caller names no backend. The reference is never in this list: it is a thousand times slower.
ORDER = {"cpu": ("native",), "cuda": ("triton",)}


class Prepared(Protocol):
    """A call with nothing left to decide: addresses in, work started; what front ends keep for calls that repeat.

    `run` may be called by several threads. It releases the interpreter's lock and, on a GPU, starts the work on a
    stream without waiting for it. A failure is a RuntimeError that names the kernel and the problem.
    """

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace that `run` needs, aligned to 64 bytes on the CPU and to 512 on a GPU."""

    def run(self, addresses: Sequence[int], stream: int = 0, workspace: int = 0) -> None:
        """Run on tensors that begin at `addresses`: the operands, then the results, in the order of `Plan.run`.

        `stream` is the handle of a CUDA stream (0 is the default stream), `workspace` the address of so many bytes.
        """


Call = Callable[[], None]
CACHE_LIMIT = 4096
_cache: dict[tuple[Problem, str | None, int | None, int | None], Plan] = {}


def plan(problem: Problem | str, *, backend: str | None = None, max_workspace_bytes: int | None = None,
         num_threads: int | None = None) -> Plan:
    """Choose how to solve a problem.

    Parameters
    ----------
    problem : Problem or str
        What to compute; a string is read by `Problem.parse`.
    backend : str, optional
        Ask this backend only. The environment variable CONVGRAD_BACKEND sets the default.
    max_workspace_bytes : int, optional
        Upper limit for the scratch memory of the plan.
    num_threads : int, optional
        Threads for this call; the default is one per processor that this process may use.

    Returns
    -------
    Plan
        Raises `Unsupported`, with one reason per backend, when nobody can run the problem.

    Examples
    --------
    >>> import convgrad
    >>> convgrad.plan("input_grad f32 n1 c8 k8 i9x9 w3x3", backend="reference").kernel
    'float64_numpy'
    """
    if not isinstance(problem, Problem):
        problem = Problem.parse(problem)
    backend, max_workspace_bytes, num_threads = checked_request(backend, max_workspace_bytes, num_threads)
    key = (problem, backend, max_workspace_bytes, num_threads)
    found = _cache.get(key)
    if found is None:
        found = _choose(problem, backend, max_workspace_bytes, num_threads)
        if len(_cache) >= CACHE_LIMIT:
            _cache.clear()
        _cache[key] = found
    return found


def checked_request(backend: object, max_workspace_bytes: object,
                    num_threads: object) -> tuple[str | None, int | None, int | None]:
    """The arguments of `plan` beside the problem, or an error that names the bad one."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {backend!r}")
    if backend and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}")
    room = None if max_workspace_bytes is None else checked_int(max_workspace_bytes, "max_workspace_bytes", 0)
    return backend, room, None if num_threads is None else checked_int(num_threads, "num_threads", 1)


def clear_plan_cache() -> None:
    """Forget all plans, for example after an environment variable changed."""
    _cache.clear()


def _choose(problem: Problem, backend: str | None, max_workspace_bytes: int | None, num_threads: int | None) -> Plan:
    name = backend or os.environ.get("CONVGRAD_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"the environment variable CONVGRAD_BACKEND={name!r} is none of {', '.join(BACKENDS)}")
    refusals: dict[str, str] = {}
    for candidate in (name,) if name else ORDER[problem.device]:
        try:
            module = load(candidate)
            chosen: Plan = module.plan(problem, max_workspace_bytes=max_workspace_bytes, num_threads=num_threads)
            if max_workspace_bytes is not None and chosen.workspace_bytes > max_workspace_bytes:
                raise Unsupported(f"{chosen.kernel} needs a workspace of {chosen.workspace_bytes} bytes, "
                                  f"but max_workspace_bytes={max_workspace_bytes}")
            return chosen._replace(refusals=tuple(refusals.items()))
        except Unsupported as error:
            refusals[candidate] = str(error)
        except ImportError as error:  # a backend that loads what it needs only when it is asked for a plan
            refusals[candidate] = f"not available: {error}"
    if len(problem.results) > 1:
        return _compose(problem, backend, max_workspace_bytes, num_threads)
    if name is None:
        refusals["reference"] = "used only when asked for by name (backend='reference'): it is slow"
    reasons = "; ".join(f"{who}: {why}" for who, why in refusals.items())
    raise Unsupported(f"no backend can run '{problem}': {reasons}", refusals)


def load(name: str) -> Any:
    """Import a backend module, or raise Unsupported with the reason why it is not available here."""
    try:
        return importlib.import_module(BACKENDS[name])
    except ImportError as error:
        raise Unsupported(f"not available: {error}") from error


def notes_since(chosen: Plan) -> tuple[str, ...]:
    """What its backends know of a plan that they did not know when they made it."""
    asked = (getattr(load(name), "notes_since", None) for name in chosen.backend.split("+"))
    return tuple(note for notes in asked if notes is not None for note in notes(chosen.problem))


def _compose(problem: Problem, backend: str | None, max_workspace_bytes: int | None, num_threads: int | None) -> Plan:
    """Several results that no backend computes in one pass: one plan each, run one after the other."""
    def planned(*wrt: str) -> list[Plan]:
        return [plan(problem.with_(wrt=one), backend=backend, max_workspace_bytes=max_workspace_bytes,
                     num_threads=num_threads) for one in wrt]

    first, *rest = problem.results
    parts = planned(first)
    with contextlib.suppress(Unsupported):  # the bias gradient rides along where a backend can do that
        parts += planned("weight+bias") if rest == ["weight", "bias"] else planned(*rest)
    if len(parts) == 1:
        parts += planned(*rest)
    names = (*problem.operands, *problem.scales)
    picks = [[names.index(name) for name in (*part.problem.operands, *part.problem.scales)] for part in parts]

    def calls(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> list[Call]:
        found: list[Call] = []
        first = 0
        for part, pick in zip(parts, picks):
            last = first + len(part.problem.results)
            found.append(partial(part.run, tuple(operands[place] for place in pick), results[first:last], workspace))
            first = last
        return found

    needed = max(part.workspace_bytes for part in parts)

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        check_counts(problem, operands, results)
        check_room(workspace, needed)
        for call in calls(operands, results, workspace):
            call()

    backends = list(dict.fromkeys(part.backend for part in parts))
    alike = len(backends) == 1 and not problem.scaled  # scales need not be tensors
    as_one = getattr(load(backends[0]), "as_one", None) if alike else None
    composed = Plan(problem, "+".join(backends), " + ".join(part.kernel for part in parts), run, needed,
                    tuple(note for part in parts for note in (f"{part.problem.wrt}: {part.kernel}", *part.notes)))
    return as_one(composed, calls) if as_one else composed
