"""The performance page, made from the committed results: nothing on it is written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convgrad.benchmark.report import heading
from convgrad.benchmark.results import load, summaries
from convgrad.pages.report import report_page

RUNS = (("cpu_zen4", "Two cores of an AMD Zen 4"), ("cpu_core_amx", "Two cores of an Intel Xeon with AMX"),
        ("h200", "NVIDIA H200"))
HEAD = ("class", "dtype", "gradient", "rows", "mean", "lowest", "lowest layer", "lost", "of ceiling")


def pages(results: Path) -> dict[str, str]:
    """The summary as Markdown, and the interactive report of each run."""
    parts = ["# Performance", "",
             "Ratios are the peer's time over ours: above 1 we are faster. Means are geometric. Every row was proved "
             "before it was timed; the reports say for each row whether all elements were compared or samples.", ""]
    made: dict[str, str] = {}
    for name, title in RUNS:
        found = load([results / f"{name}.json"])
        made[f"reports/{name}.html"] = report_page(found)
        parts += [f"## {title}", "", *(f"{sentence}\n" for sentence in heading(found)[:4]),
                  f"[All rows, with charts](reports/{name}.html)", "", *table(found), ""]
    return made | {"performance.md": "\n".join(parts)}


def table(found: dict[str, Any]) -> list[str]:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for line in summaries(found["rows"]):
        if line["mean_ratio"] is None:
            continue
        group = [row for row in found["rows"]
                 if all(row[key] == line[key] for key in ("class", "dtype", "gradient"))]
        lost = sum(1 for row in group if row["ratio"] is not None and row["ratio"] < 1)
        lines.append(f"| {line['class']} | {line['dtype']} | {line['gradient']} | {line['rows']} | "
                     f"{line['mean_ratio']:.3g} | {line['worst_ratio']:.3g} | {line['worst_layer']} | {lost} | "
                     f"{line['mean_of_ceiling']:.0%} |")
    return lines
