"""`report()`: what became of the convolutions' gradients under `install()` and `patch()`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .serving import rows


@dataclass(frozen=True)
class Line:
    """One geometry: how often it was asked for, who served it and why, seconds on the host's clock."""

    geometry: str
    served_by: str
    why: str
    calls: int
    seconds: float


class Report:
    """A printable table, longest times first; iterate over it for its lines."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __str__(self) -> str:
        if not self.lines:
            return "no gradient of a convolution has been asked for under install() or patch()"
        head = ("geometry", "calls", "ms", "served by", "why / kernels")
        table = [head, *((line.geometry, str(line.calls), f"{1e3 * line.seconds:.2f}", line.served_by, line.why)
                         for line in self.lines)]
        widths = [max(len(row[column]) for row in table) for column in range(len(head) - 1)]
        text = ["  ".join([row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]),
                           row[3].ljust(widths[3]), row[4]]) for row in table]
        ours = sum(line.seconds for line in self.lines if line.served_by != "torch")
        total = sum(line.seconds for line in self.lines)
        calls = sum(line.calls for line in self.lines)
        return "\n".join([*text, f"{calls} calls, {1e3 * total:.2f} ms, of which {1e3 * ours:.2f} ms by convgrad"])


def report(reset: bool = False) -> Report:
    """What became of the gradients since the start, or since the last `report(reset=True)`.

    Times are the host's: on a GPU those of the launches. Calls of tensor subclasses are counted when they have been
    made plain; a call whose gradients go to both sides has a line on each.

    Examples
    --------
    >>> import torch, convgrad.torch
    >>> with convgrad.torch.installed():
    ...     torch.nn.Conv2d(3, 8, 3)(torch.ones(1, 3, 5, 5)).sum().backward()
    >>> sum(line.calls for line in convgrad.torch.report(reset=True)) >= 1
    True
    """
    lines = [Line(row.geometry, row.served_by, row.why, row.tally.calls, row.tally.seconds)
             for row in rows.values() if row.tally.calls]
    if reset:
        for row in rows.values():
            row.tally.calls, row.tally.seconds = 0, 0.0
    return Report(sorted(lines, key=lambda line: -line.seconds))
