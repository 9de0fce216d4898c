"""The convolution shapes of oneDNN's benchdnn, read where they lie; skipped, visibly, where that folder is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import oracle
import pytest

from convgrad import Conv, Problem
from convgrad.problem import SPATIAL_LETTERS

# Beside the checkout, or where CONVGRAD_CASES says.
CASES = Path(os.environ.get("CONVGRAD_CASES") or Path(__file__).resolve().parents[2] / "shared" / "cases")
FILE = CASES / "benchdnn_half.jsonl"
FORMATS = ("float32", "bfloat16", "float16", "float32", "float64")
RESULTS = ("input", "weight", "output")
SMALL = 2e-3  # GFLOP: such shapes are asked for all results, larger ones for one


def cases() -> list[tuple[Conv, float]]:
    if not FILE.exists():
        pytest.skip("../shared/cases/benchdnn_half.jsonl is not there (CONVGRAD_CASES may name its folder)")
    rows = [json.loads(line) for line in FILE.read_text().splitlines()]
    return [(Conv(row["batch"], row["in_channels"], row["out_channels"], tuple(row["large"]), tuple(row["kernel"]),
                  tuple(row["strides"]), tuple(row["dilations"]),
                  tuple(zip(row["pads_begin"], row["pads_end"], strict=True)), row["g"]), row["gflop_test"])
            for row in rows]


def test_shapes_are_those_of_the_cases() -> None:
    conversions = cases()
    rows = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert len(conversions) == len(rows) >= 1000
    for (conv, _), row in zip(conversions, rows, strict=True):
        assert conv.out_size == tuple(row["small"]), row["desc"]


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("backend", oracle.available_backends())
def test_integers_bit_by_bit(backend: str, part: int, seed: int) -> None:
    for place, (conv, gflop) in list(enumerate(cases()))[part::8]:
        if (backend == "reference" and place % 10) or (oracle.interpreted(backend) and (place % 97 or gflop > 1e-5)):
            continue
        if place // 8 % oracle.one_in(backend):
            continue
        for wrt in RESULTS if gflop < SMALL else (RESULTS[place % 3],):
            dtype = FORMATS[place % len(FORMATS)]
            space = SPATIAL_LETTERS[conv.axes]
            layout = f"N{space}C" if place // 5 % 2 else f"NC{space}"
            oracle.check_exact(Problem(conv, wrt, dtype, layout=layout), backend, seed=seed,
                               style="contiguous" if place % 4 else oracle.STYLES[place // 4 % 4])
