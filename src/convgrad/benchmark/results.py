"""Results as JSON: what was measured, where, of which commit; and what the rows say together."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .layers import CLASSES
from .provenance import commit, versions
from .rows import Row

SCHEMA = "convgrad-bench/1"
FIELDS = ("schema", "set", "date", "commit", "versions", "machine", "threads", "clock", "ceilings", "peer", "rows",
          "skipped")
ROW_FIELDS = ("layer", "class", "model", "gradient", "dtype", "problem", "flops", "min_bytes", "ceiling_s", "ours",
              "peer", "ratio")


def document(name: str, arena: dict[str, Any], rows: list[Row], skipped: int) -> dict[str, Any]:
    """Return the whole of a run as plain data; `arena` is its description (machine, peer, ceilings)."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"schema": SCHEMA, "set": name, "date": now, "commit": commit(), "versions": versions(), **arena,
            "rows": rows, "skipped": skipped}


def save(results: dict[str, Any], path: str | Path) -> None:
    """Write results, one line for each field and row; the file is whole at any time, whenever the run is killed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text_of(results))
    unfinished.replace(path)


def text_of(results: dict[str, Any]) -> str:
    """Results as JSON with one line for each field and row: short, and a change of one row is a change of one line."""
    fields = []
    for name, value in results.items():
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if name == "rows" and value else json.dumps(value)
        fields.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def load(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Read one or several files of results; the rows of later files replace or join those of earlier ones."""
    merged: dict[str, Any] = {}
    rows: dict[tuple[str, ...], Row] = {}
    for path in paths:
        results = json.loads(Path(path).read_text())
        missing = [field for field in FIELDS if field not in results]
        if results.get("schema") != SCHEMA or missing:
            raise ValueError(f"{path}: not a file of results ({SCHEMA}): {', '.join(missing) or 'wrong schema'}")
        for row in results["rows"]:
            absent = [field for field in ROW_FIELDS if field not in row]
            if absent:
                raise ValueError(f"{path}: the row of {row.get('layer')} has no {', '.join(absent)}")
            rows[row["layer"], row["gradient"], row["dtype"]] = row
        merged = {**merged, **results}
    if not merged:
        raise ValueError("no file of results was named")
    return {**merged, "rows": list(rows.values())}


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else None


def our_time(row: Row) -> dict[str, Any] | None:
    """Our entry that the ratio speaks of, or our fastest; None when we have no time for the row."""
    timed = {layout: entry for layout, entry in row["ours"].items() if "median_s" in entry}
    if not timed:
        return None
    layout = row.get("ratio_layout") or min(timed, key=lambda name: float(timed[name]["median_s"]))
    return {"layout": layout, **timed[layout]}


def unsearched(row: Row) -> bool:
    """Whether the peer's time is that of its own choice, because the search for its best was given up."""
    peer = row["peer"] or {}
    return peer.get("best") in peer.get("unfinished", ())


def summaries(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One line per class, number format and gradient: rows, mean and worst ratio, mean share of the ceiling.

    A peer that was not searched for its best counts in no mean ratio: it can be a hundred times slower.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["class"], row["dtype"], row["gradient"]), []).append(row)
    order = {kind: place for place, kind in enumerate(CLASSES)}
    lines = []
    for key in sorted(groups, key=lambda k: (order.get(k[0], 99), k[1] != "f32", k[1] == "f16", k[2])):
        group = groups[key]
        compared = [row for row in group if row["ratio"] and not unsearched(row)]
        worst = min(compared, key=lambda row: float(row["ratio"]), default=None)
        entries = [entry for entry in map(our_time, group) if entry]
        lines.append({"class": key[0], "dtype": key[1], "gradient": key[2], "rows": len(group),
                      "compared": len(compared), "mean_ratio": geometric_mean(row["ratio"] for row in compared),
                      "worst_ratio": worst["ratio"] if worst else None, "worst_layer": worst["layer"] if worst else "",
                      "mean_of_ceiling": geometric_mean(entry["of_ceiling"] for entry in entries)})
    return lines
