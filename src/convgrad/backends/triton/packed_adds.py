"""Packed 16-bit additions taken apart before ptxas sees them, because it drops their constants.

`add.s16x2 d, {a, b}, constant` whose result is used in one half only becomes an addition of 0 in ptxas 12.8 to 13.0
(right in 13.3; triton-lang/triton 11581). LLVM makes such additions where it can prove that numbers are small, as it
can of `tap // 3`; padding is then left out of an index, and sums miss a row. `tests/test_triton_compiler.py` asks ptxas
for the fault and says when it is gone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from threading import Lock, local
from typing import Any

from triton import knobs

PACKED_ADD = re.compile(r"\badd\.[su]16x2\s+(%\w+),\s*(%\w+),\s*(%\w+);")
APART = """{{
\t.reg .b16 %low<2>, %high<2>;
\tmov.b32 {{%low0, %high0}}, {first};
\tmov.b32 {{%low1, %high1}}, {second};
\tadd.s16 %low0, %low0, %low1;
\tadd.s16 %high0, %high0, %high1;
\tmov.b32 {result}, {{%low0, %high0}};
\t}}"""
def taken_apart(ptx: str) -> str:
    """PTX with two additions in place of every packed one."""
    return PACKED_ADD.sub(lambda found: APART.format(result=found[1], first=found[2], second=found[3]), ptx)


class Pipeline:
    """Triton's pipeline with packed additions taken apart, while any thread is within it; a hook set before stays."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.users = 0
        self.before: Any = None

    def __enter__(self) -> None:
        with self.lock:
            if self.users == 0:
                self.before = knobs.runtime.add_stages_inspection_hook
                knobs.runtime.add_stages_inspection_hook = self.hook
            self.users += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                knobs.runtime.add_stages_inspection_hook = self.before

    def hook(self, backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: Any) -> None:
        if self.before is not None:
            self.before(backend, stages, options, language, capability)
        if getattr(asking, "whether_compiled", False):
            raise NotCompiled
        make = stages.get("ptx")
        if make is not None:
            stages["ptx"] = lambda source, metadata: taken_apart(make(source, metadata))


pipeline = Pipeline()
asking = local()  # of this thread: .whether_compiled


class NotCompiled(Exception):
    """A kernel is in no cache, and this thread did not want to compile it."""


@contextlib.contextmanager
def only_from_caches() -> Iterator[None]:
    """Raise NotCompiled where a kernel would have to be compiled."""
    asking.whether_compiled = True
    try:
        yield
    finally:
        asking.whether_compiled = False


def compiled_without(kernel: Any, warm_up: Callable[[], Any]) -> Any:
    """What `warm_up` compiles of a kernel, without packed additions.

    A binary that an older version left in Triton's cache on disk is compiled again.
    """
    with pipeline:
        compiled = warm_up()
        if not PACKED_ADD.search(compiled.asm.get("ptx", "")):
            return compiled
        kernel.device_caches.clear()
        with knobs.compilation.scope():
            knobs.compilation.always_compile = True
            return warm_up()
