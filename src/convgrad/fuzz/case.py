"""A case: a problem, the data it is run on, and how it is called. Its string repeats it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..guarded import PLAIN, View
from ..problem import Problem
from ..verify import EXACT_DATA, REAL_DATA

# How a problem is run: by its plan, by its own public function, by conv_backward with a mask, or as the transposed
# convolution that it also is. Then what the caller gives: results (`out`), a workspace, and canonical shapes over
# memory in the problem's layout instead of a layout's name (`permuted`).
WAYS = ("plan", "function", "backward", "transposed")
GIVEN = ("out", "workspace", "permuted")


@dataclass(frozen=True)
class Case:
    """What is fuzzed. `views` are those of the operands, then of the results; none means plain ones."""

    problem: Problem
    data: tuple[str, ...] = ("whole",)
    seed: int = 0
    views: tuple[View, ...] = ()
    call: tuple[str, ...] = ("plan",)
    limit: int | None = None  # max_workspace_bytes
    threads: tuple[int, ...] = ()  # numbers of threads that must give the same bits
    repeats: int = 1  # the same call again: a GPU replays its launches

    def __post_init__(self) -> None:
        way, *given = self.call
        if way not in WAYS or set(given) - set(GIVEN):
            raise ValueError(f"call={'+'.join(self.call)} is none of {', '.join(WAYS)}, with any of {', '.join(GIVEN)}")
        unknown = set(self.data) - set(EXACT_DATA) - set(REAL_DATA)
        if unknown or not self.data:
            raise ValueError(f"data={','.join(self.data)} is not made of {', '.join([*EXACT_DATA, *REAL_DATA])}")
        arrays = len(self.problem.operands) + len(self.problem.results)
        if self.views and len(self.views) != arrays:
            raise ValueError(f"'{self.problem}' has {arrays} operands and results, but {len(self.views)} views")

    @property
    def all_views(self) -> tuple[View, ...]:
        return self.views or (PLAIN,) * (len(self.problem.operands) + len(self.problem.results))

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def __str__(self) -> str:
        """The problem string, and after a semicolon whatever is not the default."""
        words = {"data": ",".join(self.data) if self.data != ("whole",) else "",
                 "seed": str(self.seed) if self.seed else "",
                 "views": ",".join(map(str, self.views)) if any(view != PLAIN for view in self.views) else "",
                 "call": "+".join(self.call) if self.call != ("plan",) else "",
                 "limit": "" if self.limit is None else str(self.limit),
                 "threads": ",".join(map(str, self.threads)),
                 "repeats": str(self.repeats) if self.repeats != 1 else ""}
        options = " ".join(f"{name}={value}" for name, value in words.items() if value)
        return f"{self.problem} ; {options}" if options else str(self.problem)

    @staticmethod
    def parse(text: str) -> Case:
        problem, _, rest = text.partition(";")
        read: dict[str, Callable[[str], Any]] = {
            "data": lambda value: tuple(value.split(",")), "seed": int,
            "views": lambda value: tuple(map(View.parse, value.split(","))),
            "call": lambda value: tuple(value.split("+")), "limit": int,
            "threads": lambda value: tuple(map(int, value.split(","))), "repeats": int}
        options: dict[str, Any] = {}
        for word in rest.split():
            name, _, value = word.partition("=")
            if name not in read:
                raise ValueError(f"case {text!r}: {word!r} is none of {', '.join(f'{known}=…' for known in read)}")
            options[name] = read[name](value)
        return Case(Problem.parse(problem), **options)
