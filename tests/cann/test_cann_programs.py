"""C and C++ programs compile with warnings as errors, run on the CPU and print the right numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from convgrad.cli import main
from convgrad.frontends.cann import native_library

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cann"
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]
pytestmark = pytest.mark.skipif(not COMPILERS, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """One build of the library for all tests of a run."""
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path_factory.getbasetemp().parent / "aclnn"))
    monkeypatch.delenv("CONVGRAD_CANN_PRODUCT", raising=False)


def built(source, program, *flags, compiler=COMPILERS[0] if COMPILERS else ""):
    language = [compiler.replace("clang++", "clang").replace("g++", "gcc"), "-std=c11"] if source.suffix == ".c" else \
        [compiler, "-std=c++17"]
    subprocess.run([*language, "-Wall", "-Wextra", "-Werror", *flags, *native_library.compile_flags(), str(source),
                    *native_library.link_flags(), "-o", str(program)], check=True)


def output(program, **environment):
    environment = {**os.environ, **environment}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


RIGHT = """1-D: gradInput 2 gradWeight 12 gradBias 12
2-D: gradInput 2 gradWeight 98 gradBias 98
3-D: gradInput 2 gradWeight 686 gradBias 686
"""


@pytest.mark.parametrize("compiler", COMPILERS)
def test_convolution_backward_in_every_rank(compiler, tmp_path):
    """The numbers are those of the documents' examples."""
    built(EXAMPLES / "conv_backward.cpp", tmp_path / "program", compiler=compiler)
    assert output(tmp_path / "program") == RIGHT


def test_the_same_under_the_address_sanitizer(tmp_path):
    built(EXAMPLES / "conv_backward.cpp", tmp_path / "program", "-fsanitize=address,undefined",
          "-fno-sanitize-recover=all")
    assert output(tmp_path / "program") == RIGHT


def test_a_program_in_c(tmp_path):
    built(EXAMPLES / "conv_tbc_backward.c", tmp_path / "program")
    assert output(tmp_path / "program") == "gradInput" + " 2" * 10 + "\ngradWeight 5 5 5 5\ngradBias 5 5\n"


def test_what_the_functions_refuse(tmp_path):
    built(Path(__file__).parent / "misuse.cpp", tmp_path / "program", "-fsanitize=address")
    said = dict(line.split(": ", 1) for line in output(tmp_path / "program").splitlines() if ": " in line)
    for what, code, words in (
            ("malloc before init", 107002, "before aclrtSetDevice"), ("set device before init", 100001, "aclInit"),
            ("init", 0, ""), ("init twice", 100002, "before"), ("stream before device", 107002, "aclrtSetDevice"),
            ("malloc", 0, ""), ("malloc of nothing", 100000, "size 0"), ("copy too much", 100000, "beyond"),
            ("copy over destMax", 100000, "destMax"), ("copy of the wrong kind", 100000, "kind"), ("copy", 0, ""),
            ("null tensor", 161001, "input is None"), ("pad", 161002, "pad must be at least 0"),
            ("cubeMathType", 161002, "cubeMathType=9"), ("a tensor beyond its memory", 161002, "storage has 1024"),
            ("a tensor in host memory", 161002, "not device memory"), ("no executor", 161001, "null pointer"),
            ("phase 1", 0, ""), ("another operator", 161002, "belongs to aclnnConvTbcBackward"),
            ("a workspace in host memory", 161002, "not device memory"), ("phase 2", 0, ""),
            ("no workspace", 161001, "bytes are needed"),
            ("phase 2 again", 161002, "used before"), ("free", 0, ""), ("free twice", 100000, "was freed"),
            ("phase 2 on freed memory", 161002, "freed after phase 1"), ("finalize", 0, ""),
            ("finalize twice", 100001, "without aclInit")):
        found, _, text = said[what].partition(" ")
        assert (int(found), words in text) == (code, True), (what, said[what])


def test_what_was_printed_survives_an_exit_without_flush(tmp_path):
    """The vendor's examples leave with _exit after aclFinalize."""
    source = tmp_path / "leave.cpp"
    source.write_text('#include <cstdio>\n#include <unistd.h>\n#include "acl/acl.h"\n'
                      'int main() { if (aclInit(nullptr)) return 1; std::printf("printed"); aclFinalize(); _exit(0); }')
    built(source, tmp_path / "program")
    assert output(tmp_path / "program") == "printed"


def test_the_command_compiles_and_runs(capfd):
    assert main(["cann", "run", "--product", "950", str(EXAMPLES / "conv_backward.cpp")]) == 0
    assert capfd.readouterr().out == RIGHT
    assert main(["cann", "run", "--product", "ATLAS_TRAINING", str(EXAMPLES / "conv_backward.cpp")]) == 1
    assert "phase 1: 161002 cubeMathType=0" in capfd.readouterr().out


def test_the_flags_of_the_command(capsys):
    assert main(["cann", "--cflags", "--libs"]) == 0
    flags = capsys.readouterr().out.split()
    assert flags[0] == f"-I{native_library.INCLUDE}" and flags[-1] == "-lconvgrad_aclnn"
    assert (Path(flags[1].removeprefix("-L")) / "libconvgrad_aclnn.so").exists()


def test_without_a_compiler_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert main(["cann", "--libs"]) == 2
    assert "no C++ compiler was found: install g++ or clang++" in capsys.readouterr().err
    assert main(["cann", "run", "absent.cpp"]) == 2
    assert "there is no file absent.cpp" in capsys.readouterr().err


def test_checking_a_call_on_every_product(capsys):
    call = ["--grad-output", "2,8,5,5", "--input", "2,4,9,9", "--weight", "8,4,3,3", "--stride", "2,2"]
    assert main(["cann", "check", *call, "--padding", "1,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["0", "0", "0", "161002", "161002"]
    assert main(["cann", "check", *call]) == 3
    assert "gradOutput must have the extent 4, got 5" in capsys.readouterr().out
    assert main(["cann", "products"]) == 0
    assert "Ascend910B" in capsys.readouterr().out
    assert main(["cann"]) == 2
