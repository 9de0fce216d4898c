"""Results for people: Markdown from a JSON file, and the same tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .results import our_time, summaries, unsearched
from .rows import Row, failed

SHORT = {"channels_first": "cf", "channels_last": "cl", "time_first": "tbc", "conv_tbc": "tbc", "views": "views"}
ROW_HEAD = ("ratio", "layer", "class", "dtype", "gradient", "ours ms", "quartiles", "other layout ms", "GFLOP/s",
            "of ceiling", "peer ms", "error", "remarks")
SUM_HEAD = ("class", "dtype", "gradient", "rows", "mean ratio", "worst ratio", "worst layer", "mean of ceiling")


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def ratio_text(row: Row) -> str:
    if row["ratio"] is None:
        return "-"
    return ("~" if row["peer"].get("estimated") else "<" if unsearched(row) else "") + f"{row['ratio']:.3g}"


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    """Trouble first (wrong, then refused), then by ratio: what we lose stands on top."""
    def rank(row: Row) -> tuple[int, float]:
        if failed(row):
            return 0, 0.0
        if our_time(row) is None:
            return 1, 0.0
        return (2, row["ratio"]) if row["ratio"] is not None else (3, 0.0)
    return sorted(rows, key=rank)


def row_cells(row: Row) -> list[str]:
    entry, peer = our_time(row), row["peer"] or {}
    remarks = list(peer.get("notes", ()))
    remarks += [f"peer: {peer['error']}"] if peer.get("error") else []
    remarks += dict.fromkeys(e["error"] for e in row["ours"].values() if "error" in e)
    peer_text = f"{ms(peer['ways'][peer['best']]['median_s'])} {SHORT[peer['best']]}" if "best" in peer else ""
    start = [ratio_text(row), row["layer"], row["class"], row["dtype"], row["gradient"]]
    if entry is None:
        return [*start, "WRONG" if failed(row) else "refused", "", "", "", "", peer_text, "", "; ".join(remarks)]
    others = [f"{ms(e['median_s'])} {SHORT[layout]}" for layout, e in row["ours"].items()
              if layout != entry["layout"] and "median_s" in e]
    worst = max(e["worst_error"] for e in row["ours"].values() if "worst_error" in e)
    if entry["verified"] != "every element":
        remarks.append(f"verified: {entry['verified']}")
    return [*start, f"{ms(entry['median_s'])} {SHORT[entry['layout']]}", f"{ms(entry['q1_s'])}-{ms(entry['q3_s'])}",
            " ".join(others), f"{entry['gflops']:.3g}", f"{entry['of_ceiling']:.0%}", peer_text, f"{worst:.2f}",
            "; ".join(remarks)]


def summary_cells(line: dict[str, Any]) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)
    return [line["class"], line["dtype"], line["gradient"], str(line["rows"]), number(line["mean_ratio"], ".3g"),
            number(line["worst_ratio"], ".3g"), line["worst_layer"], number(line["mean_of_ceiling"], ".0%")]


def heading(results: dict[str, Any]) -> list[str]:
    """What a reader must know before the numbers, as sentences."""
    machine, ceilings, peer = results["machine"], results["ceilings"], results["peer"]
    chip = machine.get("gpu") or f"{machine['cpu']}, {results['threads']} of {machine['cores']} cores"
    lines = [f"Set `{results['set']}`, {len(results['rows'])} rows, {results['date'][:16].replace('T', ' ')} UTC, "
             f"commit {results['commit'] or 'unknown'}.",
             f"Machine: {chip} ({', '.join(machine.get('instructions', ()))}).".replace(" ()", "")]
    bf16 = f"{ceilings['bf16_flops'] / 1e9:.4g} GFLOP/s bf16" if ceilings["bf16_flops"] else "no bf16 products"
    lines.append(f"Ceilings in the same run: {ceilings['f32_flops'] / 1e9:.4g} GFLOP/s f32, {bf16}, "
                 f"{ceilings['copy_bytes'] / 1e9:.3g} GB/s copy ({ceilings['how']}).")
    if peer:
        note = f" ({peer['note']})" if peer.get("note") else ""
        lines.append(f"Peer: {peer['name']} {peer.get('version', '')}{note}, the faster of its layouts. Ratio = its "
                     "time over ours in the same layout: above 1 we are faster; ~ means estimated, < that the peer's "
                     "search for its best was given up and the ratio counts in no mean; see the remarks.")
    lines.append("Every row was compared with the float64 reference before it was timed; error is in units of the "
                 "contract's error bound (1 would be the limit). Times are medians, with quartiles.")
    if results["clock"] == "cpu":
        lines.append("Times are processor time of one thread, because the machine was shared.")
    if results.get("memory") == "fresh":
        lines.append("Results were written to fresh memory, so times contain page faults.")
    if results["skipped"]:
        lines.append(f"The time limit left out {results['skipped']} rows.")
    return lines


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    clean = [[cell.replace("|", "/") for cell in row] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *clean)]


def markdown(results: dict[str, Any]) -> str:
    """Render results as a Markdown page: conditions, classes, all rows with the lost ones first."""
    rows = sorted_rows(results["rows"])
    lost = [row for row in rows if row["ratio"] is not None and row["ratio"] < 1]
    unsolved = [row for row in rows if our_time(row) is None]
    lines = ["# Benchmark", "", *heading(results), "", "## By class", "",
             *markdown_table(SUM_HEAD, [summary_cells(line) for line in summaries(rows)]), "",
             f"## All rows ({len(lost)} lost, {len(unsolved)} without a time of ours)", "",
             *markdown_table(ROW_HEAD, [row_cells(row) for row in rows])]
    return "\n".join(lines) + "\n"


def print_tables(results: dict[str, Any], console: Console, most: int = 40) -> None:
    """Print conditions, every row that was lost or went wrong (and up to `most` in all), and the classes."""
    rows = sorted_rows(results["rows"])
    bad = [row for row in rows if our_time(row) is None or failed(row) or (row["ratio"] or 1) < 1]
    shown = rows[:max(most, len(bad))]
    for sentence in heading(results):
        console.print(sentence.replace("`", ""), style="dim", markup=False, highlight=False)
    table = Table(title=f"{len(shown)} of {len(rows)} rows, lost ones first")
    for title in ROW_HEAD:
        words = title in ("layer", "class", "dtype", "gradient", "remarks")
        table.add_column(title, justify="left" if words else "right", overflow="fold",
                         no_wrap=title in ("layer", "ratio", "ours ms"))
    for row in shown:
        style = "red" if row in bad else "green" if row["ratio"] else ""
        table.add_row(*row_cells(row), style=style)
    console.print(table)
    sums = Table(title="Geometric means by class")
    for title in SUM_HEAD:
        sums.add_column(title)
    for line in summaries(rows):
        sums.add_row(*summary_cells(line))
    console.print(sums)
