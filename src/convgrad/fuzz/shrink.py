"""From a case that fails to the smallest one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..guarded import PLAIN
from ..problem import SPATIAL_LETTERS, Conv, Problem, default_compute
from .case import Case

# Which of some cases is the first that fails; None where none does. Several at once can be tried in parallel.
FirstFailing = Callable[[Sequence[Case]], int | None]


def shrink(case: Case, first_failing: FirstFailing, at_once: int = 1, seconds: float = 60.0) -> Case:
    """Take the first simpler case that still fails, again and again, until none does or the time is over."""
    end = time.monotonic() + seconds
    tried = {str(case)}
    while time.monotonic() < end:
        fresh = [simpler for simpler in unique(simpler_cases(case)) if str(simpler) not in tried]
        found = None
        for begin in range(0, len(fresh), at_once):
            some = fresh[begin:begin + at_once]
            tried.update(map(str, some))
            found = first_failing(some)
            if found is not None:
                case = some[found]
                break
            if time.monotonic() > end:
                break
        if found is None:
            break
    return case


def unique(cases: Iterator[Case]) -> list[Case]:
    return list({str(case): case for case in cases}.values())


def simpler_cases(case: Case) -> Iterator[Case]:
    """All steps towards a simpler case, the largest first."""
    yield from simpler_calls(case)
    problem = case.problem
    geometries = (problem.with_(conv=conv) for conv in simpler_geometries(problem.conv))
    for other in (*simpler_questions(problem), *geometries):
        same_arrays = (other.operands, other.results) == (problem.operands, problem.results)
        try:
            yield case.with_(problem=other, views=case.views if same_arrays else ())
        except ValueError:  # a call that such a problem does not have
            continue
    for axis in range(problem.conv.axes if problem.conv.axes > 1 else 0):
        yield case.with_(problem=without_axis(problem, axis), views=())


def simpler_calls(case: Case) -> Iterator[Case]:
    plain = case.with_(views=(), call=("plan",), limit=None, threads=(), repeats=1, data=case.data[:1], seed=0)
    yield plain
    yield from (case.with_(data=(kind,)) for kind in case.data if len(case.data) > 1)
    yield case.with_(views=(), call=("plan",))
    yield case.with_(limit=None)
    yield from (case.with_(threads=some) for some in ((), case.threads[:1], case.threads[:2]))
    yield case.with_(repeats=1)
    yield case.with_(call=("plan",))
    yield from (case.with_(call=tuple(word for word in case.call if word != given)) for given in case.call[1:])
    yield case.with_(views=())
    for place, view in enumerate(case.views):
        less = ({"gaps": ()}, {"sliced": ()}, {"flipped": ()}, {"broadcast": ()},
                {"broadcast": view.broadcast[1:]}, {"broadcast": view.broadcast[:-1]})
        for simpler in (PLAIN, replace(view, offset=False), *(replace(view, **change) for change in less)):
            yield case.with_(views=(*case.views[:place], simpler, *case.views[place + 1:]))
    yield case.with_(data=("whole",))
    yield case.with_(seed=0)


def simpler_questions(problem: Problem) -> Iterator[Problem]:
    results = problem.results
    if len(results) > 1:
        yield from (problem.with_(wrt=wrt) for wrt in results)
        yield from (problem.with_(wrt="+".join(other for other in results if other != wrt)) for wrt in results)
    yield problem.with_(scaled=False)
    yield problem.with_(layout="", weight_layout="")
    yield problem.with_(layout="")
    yield problem.with_(weight_layout="")
    yield problem.with_(compute=default_compute(problem.dtype))
    yield problem.with_(dtype="float32", out_dtype="", compute="")
    yield problem.with_(out_dtype="float32")
    yield problem.with_(out_dtype=problem.dtype)


def simpler_geometries(conv: Conv) -> Iterator[Conv]:
    groups, into, out = conv.groups, conv.group_in, conv.group_out
    for fewer in smaller(groups, 1):
        yield replace(conv, groups=fewer, in_channels=fewer * into, out_channels=fewer * out)
    for batch in smaller(conv.batch, 1):
        yield replace(conv, batch=batch)
    for channels in smaller(into, 1):
        yield replace(conv, in_channels=groups * channels)
    for channels in smaller(out, 1):
        yield replace(conv, out_channels=groups * channels)
    for name, least in (("kernel_size", 1), ("in_size", 1), ("stride", 1), ("dilation", 1)):
        values = getattr(conv, name)
        for axis, value in enumerate(values):
            for less in smaller(value, least):
                changed: Any = {name: (*values[:axis], less, *values[axis + 1:])}
                yield replace(conv, **changed)
    for axis, (low, high) in enumerate(conv.padding):
        for pair in ((0, 0), (low, 0), (0, high), *((less, high) for less in smaller(low, 0)),
                     *((low, less) for less in smaller(high, 0))):
            yield replace(conv, padding=(*conv.padding[:axis], pair, *conv.padding[axis + 1:]))


def smaller(value: int, least: int) -> list[int]:
    """The least, then steps from the half to one less."""
    if value <= least:
        return []
    steps = [(value - least) // part for part in (2, 4, 8)]
    return list(dict.fromkeys((least, *(value - step for step in steps if step), value - 1)))


def without_axis(problem: Problem, axis: int) -> Problem:
    """The problem with one spatial axis less; layouts keep their channels last or first."""
    conv = problem.conv

    def rest(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[:axis], *values[axis + 1:])

    spatial = SPATIAL_LETTERS[conv.axes - 1]
    smaller_conv = Conv(conv.batch, conv.in_channels, conv.out_channels, rest(conv.in_size), rest(conv.kernel_size),
                        rest(conv.stride), rest(conv.dilation), rest(conv.padding), conv.groups)
    return problem.with_(conv=smaller_conv, layout=f"N{spatial}C" if problem.layout.endswith("C") else "",
                         weight_layout=f"O{spatial}I" if problem.weight_layout.endswith("I") else "")
