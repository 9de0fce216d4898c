"""`convgrad bench torch`: the models are those of the papers, and a small run gives a table and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("convgrad._native")
from convgrad.benchmark.models import MODELS
from convgrad.cli import main

# as published, or as torchvision counts them
PARAMETERS = {"resnet50": 25_557_032, "mobilenet_v2": 3_504_872, "regnety_400mf": 4_344_144,
              "efficientnet_b0": 5_288_548, "convnext_t": 28_589_128, "hifigan": 13_936_130, "unet3d": 1_402_020}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_parameters(name: str) -> None:
    model = MODELS[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_a_run_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = ["bench", "torch", "--models", "mobilenet_v2", "--size", "32", "--batch", "2", "--dtype", "f32",
             "--seconds", "0.01", "--threads", "1", "--json", str(file)]
    assert main(words) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["model"] == "mobilenet_v2" and row["rounds"] >= 3
    for part in ("step", "forward", "backward"):
        assert row[part]["torch"] > 0 and row[part]["convgrad"] > 0 and row[part]["ratio"] > 0
    assert "lowest" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--models", "alexnet", "--models 'alexnet' is none of resnet50"),
    ("--dtype", "f8", "--dtype 'f8' is none of f32"),
    ("--size", "16", "--size must be numbers of at least 32, got '16'"),
    ("--batch", "0", "--batch must be at least 1, got 0")])
def test_bad_words_are_named(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "torch", option, value]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
