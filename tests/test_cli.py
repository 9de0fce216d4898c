"""The command line: what it prints, its exit codes, and that no traceback ever reaches a user."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from convgrad import cli, verify
from convgrad.machine import backend_states, processor
from convgrad.problem import Problem

PROBLEM = "input_grad f32 n1 c4 k6 i9x8 w3x3 s2x2 p1x1"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(words)
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report_and_self_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "self-check" in out and out.count("right") >= 12 and "wrong" not in out
    for name in backend_states():
        assert name in out
    assert processor()[0].split()[0] in out


def test_the_script_runs() -> None:
    answer = subprocess.run([sys.executable, "-m", "convgrad"], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "run", PROBLEM, "--backend", "reference", "--seconds", "0.01", "--threads", "1")
    assert (code, err) == (0, "")
    assert out.startswith(PROBLEM) and "right:" in out and "checksum" in out and "GFLOP/s" in out
    again = run(capsys, "run", PROBLEM, "--backend", "reference", "--seconds", "0.01")[1]
    assert [line for line in again.splitlines() if "checksum" in line] == [
        line for line in out.splitlines() if "checksum" in line]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", PROBLEM, "--backend", "reference", "--axis", "0")
    assert code == 0 and "kernel     float64_numpy" in out and "axis H: 9 inputs" in out
    code, _, err = run(capsys, "explain", PROBLEM, "--backend", "reference", "--axis", "5")
    assert code == 2 and "axis=5 is not one of the 2 spatial axes" in err


def test_verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "verify", "no_taps", "--backend", "reference", "--dtype", "f32,hif8")
    assert code == 0 and "problems right" in out
    own = tmp_path / "mine.txt"
    own.write_text(f"# a comment\n[a set]\n\n{PROBLEM}\n")
    code, out, _ = run(capsys, "verify", str(own), "--backend", "reference", "--dtype", "bf16")
    assert code == 0 and "reference: 4 problems right" in out


def test_verify_stops_at_the_first_wrong_element(capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    honest = verify.run_problem

    def wrong_once(problem: Problem, *rest: Any) -> Any:
        results = honest(problem, *rest)
        if problem.wrt == "weight" and problem.dtype == "bfloat16":
            results[0][(-1,) * results[0].ndim] += 1
        return results

    monkeypatch.setattr(verify, "run_problem", wrong_once)
    code, _, err = run(capsys, "verify", "strided", "--backend", "reference", "--dtype", "f32,bf16")
    first = verify.geometry_sets()["strided"][0].with_(wrt="weight", dtype="bfloat16", out_dtype="")
    index = tuple(extent - 1 for extent in first.conv.weight_shape)
    assert code == 1
    assert f"wrong on reference: '{first}': weight result at {index} is" in err
    assert f'convgrad run --backend reference --seed 0 "{first}"' in err


@pytest.mark.parametrize("words, sentence", [
    (("run", "nonsense"), "problem string 'nonsense': expected"),
    (("run", "input_grad f32 n1 c3 k4 i5 w3 g2"), "groups=2 does not divide in_channels=3"),
    (("run",), "the following arguments are required: problem"),
    (("explain", "conv f33 n1"), "'f33' is none of"),
    (("verify", "nothing"), "'nothing' is neither a file nor one of all, channels"),
    (("verify", "all", "--dtype", "f32,int4"), "'f32,int4' is not a list of f64, f32"),
    (("run", PROBLEM, "--backend", "cudnn"), "invalid choice: 'cudnn'"),
    (("run", PROBLEM, "--threads", "0"), "'0' is not a number of at least 1"),
    (("run", PROBLEM, "--seed", "-1"), "'-1' is not a number of at least 0"),
    (("verify", "--seed", "-1"), "'-1' is not a number of at least 0"),
    (("run", PROBLEM, "--seconds", "nan"), "'nan' is not a number of seconds"),
    (("frobnicate",), "invalid choice: 'frobnicate'"),
])
def test_bad_input_is_answered_in_a_sentence(capsys: pytest.CaptureFixture[str], words: tuple[str, ...],
                                             sentence: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2 and sentence in err and "Traceback" not in err


def test_a_refusal_has_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", PROBLEM + " cuda", "--backend", "reference")
    assert code == 3 and "the reference runs on the cpu, not on cuda" in err


def test_a_backend_that_the_environment_misspells(capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_BACKEND", "foo")
    code, _, err = run(capsys, "run", PROBLEM)
    assert code == 2
    assert err == "convgrad: the environment variable CONVGRAD_BACKEND='foo' is none of native, triton, reference\n"


def test_a_cuda_problem_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run(capsys, "run", PROBLEM + " cuda")
    assert code == 3 and "there is no CUDA device here" in err
    code, out, err = run(capsys, "verify", "no_taps", "--backend", "triton")
    assert code == 3 and "triton: not verified, there is no CUDA device here" in out


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise MemoryError("Unable to allocate 36.4 TiB")

    monkeypatch.setattr(cli, "real_operands", full)
    code, _, err = run(capsys, "run", PROBLEM, "--backend", "reference")
    assert (code, err) == (2, "convgrad: not enough memory: Unable to allocate 36.4 TiB\n")


def test_a_fault_is_not_a_wrong_result(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "real_operands", lambda *_: 1 // 0)
    code, _, err = run(capsys, "run", PROBLEM, "--backend", "reference")
    assert code == 4 and "ZeroDivisionError" in err and "this is a fault of convgrad" in err


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in ("run", "verify", "explain", *cli.COMMANDS):
        assert f"    {name} " in out or f"    {name}\n" in out
    assert run(capsys, "--version")[1].startswith("convgrad ")


def test_commands_of_other_modules(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def add_commands(subparsers: Any) -> None:
        parser = subparsers.add_parser("greet")
        parser.add_argument("name")
        parser.set_defaults(run=lambda args: print("hello", args.name) or 7)

    module = argparse.Namespace(add_commands=add_commands)
    monkeypatch.setitem(cli.COMMANDS, "greet", "convgrad.greeting")
    monkeypatch.setitem(sys.modules, "convgrad.greeting", module)
    assert run(capsys, "greet", "you")[:2] == (7, "hello you\n")
    monkeypatch.setitem(cli.COMMANDS, "lost", "convgrad.nowhere")
    code, _, err = run(capsys, "lost", "--any", "words")
    assert code == 2 and "the command lost is not available here: No module named 'convgrad.nowhere'" in err


def test_own_commands_do_not_load_the_others() -> None:
    script = ("import sys; from convgrad.cli import main; main(['explain', sys.argv[1], '--backend', 'reference']); "
              "sys.exit(any(name.partition('.')[0] in ('rich', 'torch', 'triton') or 'benchmark' in name "
              "for name in sys.modules))")
    answer = subprocess.run([sys.executable, "-c", script, PROBLEM], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
