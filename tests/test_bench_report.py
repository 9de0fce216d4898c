"""What the benchmark keeps: rows, files of results, the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convgrad.benchmark.commands import main
from convgrad.benchmark.peers import Peer
from convgrad.benchmark.report import markdown, sorted_rows
from convgrad.benchmark.results import SCHEMA, document, geometric_mean, load, save, summaries
from convgrad.benchmark.rows import compare


def made_up_row(name: str, kind: str, ours: float, peer: float | None, **peer_entry: object) -> dict:
    times = {"median_s": ours, "q1_s": ours, "q3_s": ours, "best_s": ours, "runs": 3, "verified": "every element",
             "worst_error": 0.5, "kernel": "k", "backend": "b"}
    ways = {"channels_last": {"median_s": peer, "best_s": peer, **peer_entry}} if peer else {}
    row = {"layer": name, "class": kind, "model": "m", "gradient": "input_grad", "dtype": "f32", "problem": "p",
           "flops": 10**9, "min_bytes": 10, "ceiling_s": 0.005, "ratio": None, "ours":
           {"channels_first": dict(times), "channels_last": dict(times)},
           "peer": {"name": "torch", "ways": ways, "notes": ["a | note"], **({} if peer else {"error": "SIGILL"})}}
    compare(row)
    return row


ARENA = {"machine": {"cpu": "a chip", "cores": 2, "instructions": ["avx2"]}, "threads": 2, "clock": "wall",
         "ceilings": {"f32_flops": 1e11, "bf16_flops": 0, "copy_bytes": 1e10, "how": "made up"},
         "peer": {"name": "torch", "version": "1", "note": ""}}


def test_results_survive_and_lost_rows_stand_on_top(tmp_path: object) -> None:
    rows = [made_up_row("fast", "dense", 0.01, 0.04), made_up_row("slow", "dense", 0.01, 0.005),
            made_up_row("estimated", "grouped", 0.01, 9.0, scaled=100.0), made_up_row("crash", "depthwise", 0.01, None)]
    path = f"{tmp_path}/deep/results.json"
    save(document("made up", ARENA, rows, 2), path)
    results = load([path])
    lines = Path(path).read_text().splitlines()
    assert all(any(json.dumps(row) == line.rstrip(",") for line in lines) for row in rows), "one line for each row"
    assert results["schema"] == SCHEMA and results["rows"] == json.loads(json.dumps(rows))
    assert results["versions"]["python"] and results["date"].endswith("+00:00")
    assert [row["layer"] for row in sorted_rows(results["rows"])] == ["slow", "fast", "estimated", "crash"]
    page = markdown(results)
    assert "(1 lost, 0 without a time of ours)" in page and "left out 2 rows" in page
    assert "| 0.5 | slow | dense |" in page and "| ~900 | estimated |" in page and "peer: SIGILL" in page
    lines = page.splitlines()
    assert len({line.count("|") for line in lines if line.startswith("| ")}) == 2  # two tables, no broken row
    first = summaries(results["rows"])[0]
    assert (first["class"], first["worst_layer"]) == ("dense", "slow")
    assert first["mean_ratio"] == pytest.approx(geometric_mean([4, 0.5])) == pytest.approx(2**0.5)
    assert first["mean_of_ceiling"] == pytest.approx(0.5)


def test_a_peer_that_was_not_searched_counts_in_no_mean() -> None:
    searched, given_up = made_up_row("x", "dense", 1.0, 2.0), made_up_row("y", "dense", 1.0, 100.0)
    given_up["peer"]["unfinished"] = {given_up["peer"]["best"]: 8.0}
    line = summaries([searched, given_up])[0]
    assert (line["rows"], line["compared"], line["mean_ratio"]) == (2, 1, pytest.approx(2.0))
    assert "| <100 | y |" in markdown(document("a", ARENA, [searched, given_up], 0))


def test_later_results_replace_rows(tmp_path: object) -> None:
    save(document("a", ARENA, [made_up_row("x", "dense", 1.0, 1.0), made_up_row("y", "dense", 1.0, 1.0)], 0),
         f"{tmp_path}/1.json")
    save(document("a", ARENA, [made_up_row("x", "dense", 1.0, 7.0)], 0), f"{tmp_path}/2.json")
    merged = load([f"{tmp_path}/1.json", f"{tmp_path}/2.json"])
    assert {row["layer"]: row["ratio"] for row in merged["rows"]} == {"x": 7.0, "y": 1.0}
    with open(f"{tmp_path}/3.json", "w") as file:
        file.write('{"schema": "else"}')
    with pytest.raises(ValueError, match="not a file of results"):
        load([f"{tmp_path}/3.json"])


def test_report_command(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    save(document("made up", ARENA, [made_up_row("x", "dense", 1.0, 2.0)], 0), f"{tmp_path}/1.json")
    assert main(["report", f"{tmp_path}/1.json"]) == 0
    assert "| 2 | x | dense |" in capsys.readouterr().out
    assert main(["report", f"{tmp_path}/1.json", "-o", f"{tmp_path}/page.md"]) == 0
    assert main(["report", f"{tmp_path}/none.json"]) == 2


def test_demo_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Peer, "installed", staticmethod(lambda name: False))
    assert main(["demo", "weight_grad f32 n1 c8 k8 i9x9 w3x3 p1x1", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "torch is not installed" in text and "all 2 within the error bound" in text
    assert main(["demo", "nonsense"]) == 2
