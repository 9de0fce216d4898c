"""The trace as a table and as JSON lines."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from .walk import Block

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("core", "iterate", "m,n", "n,d", "dX pixels", "channels", "curHo", "stretched rows", "dY rows", "kd",
           "L1 A bytes", "L1 B bytes", "products", "written at")


def row(block: Block) -> tuple[str, ...]:
    """Return one block as the cells of the table."""
    def span(pair: tuple[int, int] | None) -> str:
        return "none" if pair is None else f"{pair[0]}..{pair[1]}"

    return (str(block.core), str(block.iterate), f"{block.m},{block.n}", f"{block.batch},{block.depth}",
            f"({block.first[0]},{block.first[1]})..({block.last[0]},{block.last[1]})", span(block.channels),
            str(block.start_row), span(block.stretched_rows), span(block.dy_rows),
            ",".join(str(kd) for kd, _ in block.kernel_depths) or "none", f"{block.bytes_a:,}", f"{block.bytes_b:,}",
            str(block.products),
            "nothing" if block.skipped else f"{block.offset:,} ({block.runs} x {block.run_length})")


def to_table(blocks: Iterable[Block], limit: int | None = None) -> Table:
    """Return a table with one line per Iterate, at most `limit` of them."""
    from rich.table import Table

    blocks = list(blocks)
    shown = blocks if limit is None else blocks[:limit]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for block in shown:
        table.add_row(*row(block))
    if len(shown) < len(blocks):
        table.caption = f"{len(blocks) - len(shown)} more blocks"
    return table


def to_text(blocks: Iterable[Block], limit: int | None = None) -> str:
    """Return the table as plain text."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=220, color_system=None)
    console.print(to_table(blocks, limit))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def to_json_lines(blocks: Iterable[Block]) -> str:
    """Return one JSON object per Iterate; its keys are the fields of Block."""
    return "".join(json.dumps(asdict(block)) + "\n" for block in blocks)
