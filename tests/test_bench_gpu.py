"""The benchmark on a GPU: its order, what it asks of the peer, its arena on a GPU or on memory that stands for one."""

from __future__ import annotations

import json
import multiprocessing.dummy
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from convgrad.benchmark import cuda, watched
from convgrad.benchmark.ceilings import Ceilings
from convgrad.benchmark.commands import main
from convgrad.benchmark.layers import ALL_GRADIENTS, load_layers, select, spread
from convgrad.benchmark.results import load
from convgrad.benchmark.rows import Choice, PeerTimes, blank_row, measure

LAYERS = """
conv2d | dense | tiny | input_grad f32 n1 c16 k16 i5x4 w2x2 s2x1
transposed | dense | tiny | conv f32 n1 c16 k8 i6x5 w3x3 s2x2 p1x1
"""


def test_a_short_run_has_all_classes() -> None:
    layers = load_layers("gpu")
    ordered = spread(layers)
    assert sorted(map(str, ordered)) == sorted(map(str, layers))
    for kind in {layer.kind for layer in layers}:
        members = sum(layer.kind == kind for layer in layers)
        assert abs(sum(layer.kind == kind for layer in ordered[:50]) - members / 2) <= 1
    late = {layer.name for layer in ordered[:30]}
    assert [layer.name in late for layer in spread(layers, late)] == [False] * 70 + [True] * 30


def test_layers_of_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    layers = load_layers("gpu")
    assert {layer.kind for layer in select(layers, "", ("few channels",))} == {"few channels"}
    assert [layer.name for layer in select(layers, "stem", ("dense",))] == []
    assert main(["bench", "gpu", "--class", "thick"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--class 'thick' is none of dense, depthwise, grouped, few_channels, conv_tbc" in said


def row_of(gradient: str, dtype: str, **seconds: float) -> dict[str, Any]:
    ways = {way: {"median_s": value} for way, value in seconds.items()}
    return {"layer": "x", "gradient": gradient, "dtype": dtype, "peer": {"ways": ways}}


def test_a_layout_of_the_peer_that_was_far_slower_is_left_out() -> None:
    rows = [row_of("input_grad", "bf16", first=1.0, last=4.0), row_of("weight_grad", "bf16", first=5.0, last=1.0)]
    times = PeerTimes("cuda", rows)
    assert times.far_slower("x", "input_grad", "bf16") == {"last": 4.0}
    assert times.far_slower("x", "weight_grad", "f16") == {"first": 5.0}, "16-bit formats run alike on a GPU"
    assert times.far_slower("x", "weight_grad", "f32") == {} == times.far_slower("y", "weight_grad", "bf16")
    assert times.far_slower("x", ALL_GRADIENTS, "bf16") == {}, "6 and 5 together: both are asked"
    times.add(row_of(ALL_GRADIENTS, "bf16", first=4.0, last=6.0))
    assert times.far_slower("x", ALL_GRADIENTS, "f16") == {"last": 1.5}
    times.add({**row_of("input_grad", "bf16"), "peer": None})
    assert times.far_slower("x", "input_grad", "bf16") == {"last": 4.0}
    assert PeerTimes("cpu", rows).far_slower("x", "weight_grad", "f16") == {}


class Event:
    """A CUDA event by the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


class Torch:
    """torch without a GPU: CPU memory under the name cuda."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.cuda = types.SimpleNamespace(
            Event=Event, synchronize=lambda: None, _sleep=lambda cycles: None, memory_reserved=lambda: 0,
            get_device_properties=lambda device: types.SimpleNamespace(total_memory=1), get_device_name=lambda: "none")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.torch, name)

    def empty(self, shape: Any, device: str, dtype: Any) -> Any:
        return self.torch.empty(shape, dtype=dtype)

    def device(self, name: str) -> Any:
        return self.torch.device("cpu")


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from convgrad.backends.triton.launch import INTERPRETED

    if not INTERPRETED:
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU or TRITON_INTERPRET=1")
        return

    def start(self: Any, with_peer: bool, backend: str | None = None, ceilings: Any = None,
              tell: Any = lambda step: None) -> None:
        self.torch, self.with_peer, self.backend, self.tell = Torch(torch), with_peer, backend, tell
        self.flush, self.ceilings, self.hurried = torch.empty(1), Ceilings(1e12, 1e12, 1e12, "made up"), ()

    monkeypatch.setattr(watched, "CONTEXT", multiprocessing.dummy)  # a thread, which sees what is replaced here
    monkeypatch.setattr(cuda.CudaArena, "__init__", start)
    monkeypatch.setattr(cuda, "cuda_missing", lambda: None)


@pytest.mark.usefixtures("arena")
def test_rows_of_the_gpu_arena(tmp_path: Path) -> None:
    (tmp_path / "layers.txt").write_text(LAYERS)
    words = ["bench", f"{tmp_path}/layers.txt", "--device", "cuda", "--backend", "triton", "--seconds", "0.001"]
    assert main([*words, "--dtype", "bf16", "--limit-seconds", "600", "--json", f"{tmp_path}/1.json"]) == 0
    rows = load([f"{tmp_path}/1.json"])["rows"]
    assert [(row["layer"], row["gradient"]) for row in rows] == [
        (layer, gradient) for layer in ("conv2d", "transposed")
        for gradient in ("input_grad", "weight_grad", ALL_GRADIENTS)]
    for row in rows:
        entry = row["ours"]["channels_last"]
        assert entry["worst_error"] <= 1 and entry["q1_s"] <= entry["median_s"] <= entry["q3_s"] and row["ratio"]
        assert set(row["spent_s"]) == {"ours", "peer", "timing"}
    assert rows[2]["ours"]["channels_last"]["verified"].count(" of ") == 3, "three results were compared"
    # a layout that was far slower then is not asked for again
    rows[0]["peer"]["ways"]["channels_first"]["median_s"] = 1e3 * rows[0]["peer"]["ways"]["channels_last"]["median_s"]
    (tmp_path / "2.json").write_text(json.dumps({**load([f"{tmp_path}/1.json"]), "rows": rows[:1]}))
    words += ["--gradient", "input_grad", "--filter", "conv2d", "--json", f"{tmp_path}/3.json"]
    assert main([*words, "--dtype", "f16", "--known", f"{tmp_path}/2.json"]) == 0
    (row,) = load([f"{tmp_path}/3.json"])["rows"]
    assert list(row["peer"]["ways"]) == ["channels_last"] and "left out" in row["peer"]["notes"][0]


@pytest.mark.usefixtures("arena")
def test_overhead_of_first_and_later_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    from convgrad.benchmark import overhead

    monkeypatch.setattr(overhead, "CALLS", 4)
    monkeypatch.setenv("TRITON_CACHE_DIR", "kept")
    (tmp_path / "layers.txt").write_text(LAYERS)
    assert main(["bench", f"{tmp_path}/layers.txt", "--device", "cuda", "--backend", "triton", "--dtype", "bf16",
                 "--gradient", "input_grad", "--overhead", "--json", f"{tmp_path}/1.json"]) == 0
    rows = json.loads((tmp_path / "1.json").read_text())["rows"]
    assert [row["layer"] for row in rows] == ["conv2d", "transposed"]
    assert all(row["first_call_s"] > 0 and row["host_q1_s"] <= row["host_s"] for row in rows)
    assert "the first kernel of the process took" in capsys.readouterr().out


@pytest.mark.usefixtures("arena")
def test_fp8_beside_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "layers.txt").write_text(LAYERS + "wide | dense | tiny | input_grad f32 n1 c256 k256 i3 w2\n")
    words = ["bench", f"{tmp_path}/layers.txt", "--device", "cuda", "--backend", "triton", "--seconds", "0.001"]
    assert main([*words, "--fp8", "--json", f"{tmp_path}/1.json"]) == 0
    rows = json.loads((tmp_path / "1.json").read_text())["rows"]
    assert [(row["layer"], row["gradient"]) for row in rows] == [("wide", "input_grad"), ("wide", "weight_grad")]
    for row in rows:
        assert all(entry["worst_error"] <= 1 and entry["ratio"] > 0 for entry in row["modes"].values())
        assert list(row["modes"]) == ["bf16", "fp8 exact", 'compute="fp8"']
    assert "in the mean of 1, lowest" in capsys.readouterr().out


def stumble(connection: Any, with_peer: bool, backend: str | None, ceilings: Ceilings | None) -> None:
    """Serves rows as `watched.serve` does, but the peer never ends with channels last, and three layers go wrong.

    For the layer "patient" it ends when it does not search.
    """
    connection.send(("ready", (ceilings or Ceilings(1e12, 1e12, 1e12, "made up"), {"peer": "made up"})))
    while (request := connection.recv()) is not None:
        layer, gradient, dtype, _, left_out, hurried = request
        if "channels_last" not in left_out and not (layer.name == "patient" and "channels_last" in hurried):
            connection.send(("at", "peer channels_last"))
            time.sleep(3600)
        connection.send(("at", "ours channels_last"))
        if layer.name == "dies":
            os._exit(3)
        if layer.name == "hangs":
            time.sleep(3600)
        if layer.name == "raises":
            connection.send(("lost", "RuntimeError: out of memory"))
            return
        row = blank_row(layer, gradient, layer.question(gradient, dtype, "channels_last", "cuda"), 1.0)
        connection.send(("row", {**row, "peer": {"ways": {"channels_first": {"median_s": 1e-3}}},
                                 "spent_s": {"peer": 0.1, "ours": 0.1, "timing": 0.1}}))


def test_rows_that_hang_or_die_are_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "PATIENCE_SECONDS", 2.5)
    monkeypatch.setattr(watched, "SEARCH_SECONDS", 1.0)
    monkeypatch.setattr(watched, "SAY_SECONDS", 0.5)
    names = ["a", "dies", "hangs", "raises", "b", "patient"]
    (tmp_path / "layers.txt").write_text("".join(
        f"{name} | dense | tiny | input_grad f32 n1 c16 k16 i5x4 w2x2\n" for name in names))
    layers, choice = load_layers(f"{tmp_path}/layers.txt"), Choice(("bfloat16",), ("input_grad",), ("channels_last",))
    said: list[str] = []
    measurer = watched.Watched(True, "reference", layers, choice, (), stumble, said.append)
    known = [{"layer": name, "gradient": "input_grad", "dtype": "f16",
              "peer": {"ways": {"channels_first": {"median_s": 1e-3}}, "given_up": {"channels_last": 45.0}}}
             for name in names[1:5]]
    rows, skipped = measure(layers, choice, measurer, known=known)
    measurer.close()
    assert skipped == 0 and [row["layer"] for row in rows] == names
    assert rows[0]["peer"]["given_up"]["channels_last"] >= 1 and rows[0]["spent_s"]["peer"] > 2
    assert rows[0]["peer"]["unfinished"]["channels_last"] >= 1 and "given_up" not in rows[5]["peer"]
    assert rows[5]["peer"]["unfinished"]["channels_last"] >= 1
    assert measurer.unfinished["patient", ALL_GRADIENTS, False] == {"channels_last"}
    assert measurer.finished["patient", ALL_GRADIENTS, False] == {"channels_first"}
    errors = [row["ours"].get("channels_last") for row in rows]
    assert errors[0] is None is errors[4]
    assert errors[1] == {"error": "ours channels_last: the process ended with status 3", "wrong": True}
    assert errors[2] is not None and "ours channels_last: not done within" in errors[2]["error"]
    assert errors[3] == {"error": "ours channels_last: RuntimeError: out of memory", "wrong": True}
    assert any("a bfloat16 input_grad: peer channels_last takes more than 0.5 s" in text for text in said)
    assert not any(text.startswith("b ") for text in said), "its slow layout was known"


def test_the_time_limit_holds_for_a_row_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "GRACE_SECONDS", 0.1)
    (tmp_path / "layers.txt").write_text("hangs | dense | tiny | input_grad f32 n1 c16 k16 i5x4 w2x2\n")
    layers = load_layers(f"{tmp_path}/layers.txt")
    choice = Choice(("bfloat16",), ("input_grad",), ("channels_last",), limit_seconds=10.0)
    measurer = watched.Watched(True, "reference", layers, choice, (), stumble)
    measurer.end = time.monotonic() + 1
    start = time.monotonic()
    assert measure(layers, choice, measurer) == ([], 1)
    assert time.monotonic() - start < 600  # the row itself would take an hour


COMPILE = """
from triton.runtime.driver import driver
from convgrad.backends.triton.ahead import Background, NoDriver

if __name__ == "__main__":
    driver.set_active(NoDriver(("cuda", 90, 32)))
    jobs = [("bias_grad bf16 n2 c8 k8 i5 w3 NLC OLI cuda", None),
            ("input_grad bf16 n2 c8 k8 i5 w3 g8 NLC OLI cuda", {"kernel": "separate"})]
    background = Background(jobs, 2, 200)
    print(*(background.wait(job, 200) for job in (*jobs, ("conv f32 n1 c1 k1 i1 w1", None))))
"""


def test_kernels_are_compiled_beside_other_work(tmp_path: Path) -> None:
    """In processes that have no GPU, for one: compiled, refused, and never asked for."""
    pytest.importorskip("triton")
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path)), "TRITON_INTERPRET": "0",
                   "TRITON_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr
    assert list((tmp_path / "cache").rglob("*.cubin"))
