"""The benchmark report as one HTML page, from one or several files of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..benchmark.report import heading
from ..benchmark.results import our_time, unsearched
from ..benchmark.rows import Row, failed
from .page import page

ROOFS = (("f64", "f64_flops"), ("f32", "f32_flops"), ("bf16", "bf16_flops"), ("FP8", "fp8_flops"))


def report_page(results: dict[str, Any], models: Sequence[dict[str, Any]] = ()) -> str:
    """The page of a run (see `results.document`); `models` are rows of whole training steps, where there are any."""
    ceilings = results["ceilings"]
    machine = results["machine"]
    chip = machine.get("gpu") or machine["cpu"]
    roofs = [{"name": name, "flops": ceilings[key]} for name, key in ROOFS if ceilings.get(key)]
    data = {"conditions": [sentence.replace("`", "") for sentence in heading(results)], "roofs": roofs,
            "copy_bytes": ceilings["copy_bytes"], "rows": [row_data(row) for row in results["rows"]],
            "models": [model_data(row) for row in models]}
    return page("report", f"convgrad on {chip}", data)


def write_report(results: dict[str, Any], path: str | Path, models: Sequence[dict[str, Any]] = ()) -> None:
    """Write the page of a run; its folder is made where it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(report_page(results, models), encoding="utf-8")


def row_data(row: Row) -> dict[str, Any]:
    """What the page shows of a row; None where it was not measured."""
    entry = our_time(row) or {}
    peer = row["peer"] or {}
    ways = peer.get("ways", {})
    first = row["ours"].get("channels_first", {}).get("median_s")
    peer_first = ways.get("channels_first", {}).get("median_s")
    errors = [found["error"] for found in row["ours"].values() if "error" in found]
    return {"layer": row["layer"], "class": row["class"], "model": row["model"], "dtype": row["dtype"],
            "gradient": row["gradient"], "problem": row["problem"], "ratio": row["ratio"], "wrong": failed(row),
            "unsearched": unsearched(row), "ours_s": entry.get("median_s"),
            "peer_s": ways[peer["best"]]["median_s"] if "best" in peer else None, "gflops": entry.get("gflops"),
            "of_ceiling": entry.get("of_ceiling"), "intensity": row["flops"] / max(row["min_bytes"], 1),
            "kernel": entry.get("kernel", "; ".join(errors)), "verified": entry.get("verified", ""),
            "untuned_ratio": row.get("untuned_ratio"), "host_ratio": row.get("host_ratio"),
            "first_ratio": peer_first / first if first and peer_first else None}


def model_data(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row.get(key) for key in ("model", "dtype", "layout", "peer_s", "ours_s", "ratio")}
