"""max_memory_bytes: the same results tile by tile, from files that are mapped, under a ceiling that is measured."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from test_structure import backend_environment
from test_tile import random_conv

import convgrad
from convgrad import Problem, streaming
from convgrad.verify import exact_results, integer_operands, real_operands, wrong_bits

FORMATS = (("float32", ""), ("bfloat16", ""), ("float64", ""), ("bfloat16", "float32"), ("hifloat8", "float16"))


def called(problem: Problem, operands: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """The results of a problem by the public function."""
    conv = problem.conv
    geometry = dict(stride=conv.stride, padding=conv.padding, dilation=conv.dilation, groups=conv.groups)
    geometry |= dict(out_dtype=problem.out_dtype, dtype="hifloat8" if problem.dtype == "hifloat8" else None)
    if problem.wrt == "output":
        return (convgrad.conv(operands["input"], operands["weight"], **geometry, **options),)
    if problem.wrt == "input":
        return (convgrad.input_grad(operands["grad_output"], operands["weight"], conv.in_size, **geometry, **options),)
    if problem.wrt == "weight":
        return (convgrad.weight_grad(operands["grad_output"], operands["input"], conv.kernel_size, **geometry,
                                     **options),)
    return convgrad.conv_backward(operands["grad_output"], operands["input"], operands["weight"], **geometry, **options)


def least(problem: Problem, operands: dict[str, Any], backend: str) -> int:
    """The smallest power of two that is enough."""
    for power in range(6, 40):
        try:
            called(problem, operands, backend=backend, max_memory_bytes=2**power)
        except ValueError as error:
            assert "is too little" in str(error)
            continue
        return 2**power
    raise AssertionError(f"no ceiling is enough for '{problem}'")


@pytest.mark.parametrize("wrt", ["output", "input", "weight", "input+weight+bias"])
@pytest.mark.parametrize("backend", [name for name in ("native", "reference") if name in oracle.available_backends()])
def test_every_ceiling_gives_the_exact_result(backend: str, wrt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = []
    jobs_of = streaming.Stream.jobs

    def counted(stream: streaming.Stream) -> list[streaming.Job]:
        jobs = jobs_of(stream)
        tiles.append(len(jobs))
        return jobs

    monkeypatch.setattr(streaming.Stream, "jobs", counted)
    for seed in range(40 if backend == "native" else 12):
        dtype, out_dtype = FORMATS[seed % len(FORMATS)]
        problem = Problem(random_conv(random.Random(seed)), wrt, dtype, out_dtype)
        operands = integer_operands(problem, seed)
        exact = exact_results(problem, operands)
        smallest = least(problem, operands, backend)
        for limit in (smallest, 2 * smallest, 2**40):
            results = called(problem, operands, backend=backend, max_memory_bytes=limit)
            for one, got, value in zip(problem.results, results, exact, strict=True):
                wrong = wrong_bits(problem, one, got, value)
                assert wrong is None, f"seed {seed}, {limit} bytes: {wrong}"
    assert max(tiles) > 3 and min(tiles) <= 1


@pytest.mark.parametrize("sizes", ["n0 c2 k3 i5x5", "n2 c0 k3 i5x5", "n2 c2 k0 i5x5", "n2 c2 k3 i0x5", "n2 c2 k3 i5x0"])
def test_empty_tensors(sizes: str) -> None:
    for wrt in ("conv", "input_grad", "weight_grad", "input_grad+weight_grad+bias_grad"):
        problem = Problem.parse(f"{wrt} f32 {sizes} w3x3 p1x1")
        operands = integer_operands(problem)
        tiled, whole = called(problem, operands, max_memory_bytes=2**16), called(problem, operands)
        assert all(np.array_equal(one, other) for one, other in zip(tiled, whole, strict=True))


def test_layouts_and_outs() -> None:
    x = np.arange(2 * 12 * 10 * 3, dtype=np.float32).reshape(2, 12, 10, 3) % 5
    weight = np.arange(3 * 3 * 3 * 4, dtype=np.float32).reshape(3, 3, 3, 4) % 3
    options: dict[str, Any] = dict(padding=1, stride=2, layout="NHWC", weight_layout="HWIO")
    dy = convgrad.conv(x, weight, **options)
    out = np.full_like(dy, 7)
    assert convgrad.conv(x, weight, **options, out=out, max_memory_bytes=20_000) is out
    assert np.array_equal(out, dy)
    outs = (np.full_like(x, 7), np.full_like(weight, 7), None)
    whole = convgrad.conv_backward(dy, x, weight, **options)
    got = convgrad.conv_backward(dy, x, weight, **options, out=outs, max_memory_bytes=20_000)
    assert got[0] is outs[0] and got[1] is outs[1]
    for one, other in zip(got, whole, strict=True):
        assert np.array_equal(one, other)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    x, weight = torch.ones(3, 4, 9, 9, dtype=torch.bfloat16), torch.ones(5, 4, 3, 3, dtype=torch.bfloat16)
    got = convgrad.conv(x, weight, padding=1, max_memory_bytes=30_000)
    assert got.dtype == torch.bfloat16 and torch.equal(got, torch.nn.functional.conv2d(x, weight, padding=1))
    with pytest.raises(ValueError, match="recorded"):
        convgrad.conv(x.requires_grad_(), weight, max_memory_bytes=30_000)


# A process that may allocate no more than the ceiling, and one MiB for the interpreter, beyond what it has; files that
# are mapped do not count.
MEASURED = """
import re, resource, sys
from pathlib import Path
import numpy as np, convgrad

folder, limit, ceiling = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) or None
convgrad.set_num_threads(1)
kernel = (8, 8, 3, 3, 3)
x, dy = (np.lib.format.open_memmap(folder / f"{name}.npy", "r") for name in ("x", "dy"))
dx = np.lib.format.open_memmap(folder / "dx.npy", "r+")
weight = np.ones(kernel, np.float32)
convgrad.conv_backward(*(np.ones(s, np.float32) for s in ((1, 8, 4, 4, 4), (1, 8, 4, 4, 4), kernel)), padding=1)
used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + limit + 2**20, resource.RLIM_INFINITY))
try:
    _, dw, db = convgrad.conv_backward(dy, x, weight, padding=1, out=(dx, None, None), max_memory_bytes=ceiling)
    print("fits", int(db[0]), int(dw[0, 0, 1, 1, 1]), int(dx[1, 0, 50, 30, 30]))
except MemoryError:
    print("MemoryError")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measured by a limit that Linux knows")
@pytest.mark.skipif("native" not in oracle.available_backends(), reason="measures the native backend")
def test_mapped_files_larger_than_the_ceiling(tmp_path: Path) -> None:
    """25 MB a tensor through 1 MiB: the process could not have allocated more, and the undivided call needs more."""
    shape = (2, 8, 96, 64, 64)
    for name in ("x", "dy", "dx"):
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, shape)[...] = 1
    pixels = 2 * 96 * 64 * 64
    for ceiling, expected in ((2**20, f"fits {pixels} {pixels} {8 * 27}"), (0, "MemoryError")):
        answer = subprocess.run([sys.executable, "-c", MEASURED, str(tmp_path), str(2**20), str(ceiling)],
                                capture_output=True, text=True, env=backend_environment())
        assert answer.stdout.strip() == expected, answer.stderr


def test_a_repeated_call_gives_the_same_bits() -> None:
    problem = Problem.parse("weight_grad f32 n3 c8 k8 i20x20 w3x3 p1x1")
    operands = real_operands(problem)
    first, again = (called(problem, operands, max_memory_bytes=60_000)[0] for _ in range(2))
    assert first.tobytes() == again.tobytes()


X, WEIGHT = np.ones((1, 2, 8), np.float32), np.ones((3, 2, 3), np.float32)
BAD = [
    (dict(max_memory_bytes="much"), TypeError, "max_memory_bytes must be an integer"),
    (dict(max_memory_bytes=0), ValueError, "max_memory_bytes must be at least 1, got 0"),
    (dict(max_memory_bytes=64), ValueError, "max_memory_bytes=64 is too little .* one image and one position"),
    (dict(workspace=np.empty(99, np.uint8)), ValueError, "max_memory_bytes does not go with workspace"),
    (dict(scales={"input": 2.0}), ValueError, "max_memory_bytes does not go with scales"),
    (dict(out=np.full((1, 3, 5), 7, np.float32)), ValueError, "out has shape"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(max_memory_bytes=2**20, out=np.full((1, 3, 6), 7, np.float32)) | changes
    with pytest.raises(error, match=message):
        convgrad.conv(X, WEIGHT, **arguments)
    assert (arguments["out"] == 7).all()


def test_accumulate_and_gpu_arrays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_memory_bytes does not go with accumulate=True"):
        convgrad.input_grad(np.ones((1, 3, 6), np.float32), WEIGHT, 8, accumulate=True, out=X.copy(),
                            max_memory_bytes=2**20)
    monkeypatch.setattr("convgrad.frontends.numpy.home", lambda arrays: ("cuda", None))
    with pytest.raises(ValueError, match="in the memory of the host"):
        convgrad.conv(X, WEIGHT, max_memory_bytes=2**20)
