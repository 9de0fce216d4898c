"""What the host spends on a GPU call: repeated calls, planning, first calls on new shapes with an empty cache.

    python bench/host_time.py

Needs a GPU but for planning. Repeated calls are timed in a loop as in training, twenty between two waits, so that the
GPU works behind the host. First calls and precompilation run in processes of their own whose kernel
cache is empty.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"  # the checkout's own package, installed or not
sys.path.insert(0, str(SOURCE))
TOGETHER = 20  # calls between two waits: the GPU's queue is finite
# name, input shape, weight shape, arguments of conv_backward; small, so that the host is what takes time
REPEATED: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("dense 3x3", (8, 64, 14, 14), (64, 64, 3, 3), {"padding": 1}),
    ("dense 1x1", (8, 128, 14, 14), (256, 128, 1, 1), {}),
    ("depthwise 3x3", (8, 128, 14, 14), (128, 1, 3, 3), {"padding": 1, "groups": 128}),
    ("grouped 3x3", (8, 128, 14, 14), (128, 4, 3, 3), {"padding": 1, "groups": 32}),
    ("few channels 7x7", (8, 3, 64, 64), (64, 3, 7, 7), {"padding": 3, "stride": 2}),
]
FIRST = ["n64 c64 k64 i56x56 w3x3 p1x1", "n64 c256 k64 i56x56 w1x1", "n64 c64 k256 i56x56 w1x1",
         "n64 c128 k128 i56x56 w3x3 s2x2 p1x1", "n64 c512 k1024 i28x28 w1x1 s2x2", "n64 c3 k64 i224x224 w7x7 s2x2 p3x3",
         "n64 c96 k96 i56x56 w7x7 p3x3 g96", "n64 c256 k256 i28x28 w3x3 p1x1 g32",
         "n64 c384 k384 i14x14 w5x5 p2x2 g384", "n64 c512 k512 i14x14 w3x3 p1x1", "n64 c2048 k512 i7x7 w1x1",
         "n32 c48 k48 i64x64 w3x3 s2x2 p1x1 g48"]


RESNET50 = """
    c3 k64 i224x224 w7x7 s2x2 p3x3, c64 k64 i56x56 w1x1, c64 k64 i56x56 w3x3 p1x1, c64 k256 i56x56 w1x1,
    c256 k64 i56x56 w1x1, c256 k128 i56x56 w1x1, c128 k128 i56x56 w3x3 s2x2 p1x1, c128 k512 i28x28 w1x1,
    c256 k512 i56x56 w1x1 s2x2, c512 k128 i28x28 w1x1, c128 k128 i28x28 w3x3 p1x1, c512 k256 i28x28 w1x1,
    c256 k256 i28x28 w3x3 s2x2 p1x1, c256 k1024 i14x14 w1x1, c512 k1024 i28x28 w1x1 s2x2, c1024 k256 i14x14 w1x1,
    c256 k256 i14x14 w3x3 p1x1, c1024 k512 i14x14 w1x1, c512 k512 i14x14 w3x3 s2x2 p1x1, c512 k2048 i7x7 w1x1,
    c1024 k2048 i14x14 w1x1 s2x2, c2048 k512 i7x7 w1x1, c512 k512 i7x7 w3x3 p1x1"""


def tensors(input_shape: Sequence[int], weight_shape: Sequence[int], arguments: dict[str, Any], last: bool) -> Any:
    """grad_output, input and weight on the GPU, channels last in memory or first."""
    import torch

    memory_format = torch.channels_last if last else torch.contiguous_format
    x, w = (torch.randn(tuple(shape), device="cuda", dtype=torch.bfloat16).to(memory_format=memory_format)
            for shape in (input_shape, weight_shape))
    y = torch.nn.functional.conv2d(x, w, **arguments)
    return torch.randn_like(y).to(memory_format=memory_format), x, w


def microseconds(call: Callable[[], Any], calls: int = 400) -> tuple[float, float]:
    """Median and upper quartile of the host's time for one call."""
    import torch

    found = []
    for number in range(calls):
        if number % TOGETHER == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(found), statistics.quantiles(found, n=4)[2]


def torch_backward(dy: Any, x: Any, w: Any, arguments: dict[str, Any]) -> Any:
    """What torch's own autograd calls."""
    import torch

    stride, padding, dilation = ([arguments.get(name, default)] * 2
                                 for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)))
    return torch.ops.aten.convolution_backward(dy, x, w, [w.shape[0]], stride, padding, dilation, False, [0, 0],
                                               arguments.get("groups", 1), [True] * 3)


def prepared_microseconds(plan: Any, tensors: Sequence[Any]) -> tuple[float, int]:
    """Of the bare prepared call, everything else left out, and its number of steps."""
    import torch

    prepared = plan.prepared([tensor.stride() for tensor in tensors])
    if prepared is None:
        return float("nan"), 0
    memory = torch.empty(prepared.workspace_bytes + 1, dtype=torch.uint8, device="cuda")
    addresses, workspace = [tensor.data_ptr() for tensor in tensors], memory.data_ptr()
    stream = torch.cuda.current_stream().cuda_stream
    return microseconds(lambda: prepared.run(addresses, stream, workspace))[0], prepared.steps


def repeated_calls() -> None:
    """All three gradients: the public function, the operator with ours installed, the prepared call alone, torch."""
    import convgrad
    from convgrad.call import prepared_calls
    from convgrad.torch import installed

    for last in (True, False):
        for name, input_shape, weight_shape, arguments in REPEATED:
            given = tensors(input_shape, weight_shape, arguments, last)
            prepared_calls.clear()
            call = partial(convgrad.conv_backward, *given, **arguments)
            results = call()
            median, quartile = microseconds(call)
            plan = next(iter(prepared_calls.values())).plan
            bare, steps = prepared_microseconds(plan, (*given, *results))
            backward = partial(torch_backward, *given, arguments)
            peer, _ = microseconds(backward)
            with installed():
                backward()
                operator, _ = microseconds(backward)
            print(f"repeated  {'last ' if last else 'first'} {name:18} {median:6.1f} us ({quartile:.1f})  installed "
                  f"{operator:5.1f} us  prepared {bare:5.1f} us, {steps} steps  torch {peer:6.1f} us  {plan.kernel}")


def planning() -> None:
    """Milliseconds of planning all three gradients of the benchmark's layers, kernels not compiled."""
    import convgrad
    from convgrad.benchmark.layers import ALL_GRADIENTS, load_layers

    found = []
    for layer in load_layers("gpu"):
        for layout in layer.layouts:
            problem = layer.question(ALL_GRADIENTS, "bfloat16", layout, "cuda")
            start = time.perf_counter()
            convgrad.plan(problem, backend="triton")
            found.append((1e3 * (time.perf_counter() - start), str(problem)))
    times = [milliseconds for milliseconds, _ in found[2:]]  # the first two import the backend
    print(f"planning  {len(times)} problems: median {statistics.median(times):.1f} ms, 90 % "
          f"{statistics.quantiles(times, n=10)[8]:.1f}, most {max(times):.1f} ({max(found[2:])[1]})")


def first_calls() -> None:
    """Seconds of the first call on each of some shapes: run in a process with an empty cache."""
    import torch

    import convgrad
    from convgrad import Problem

    tiny = torch.ones(1, 8, 4, device="cuda")
    start = time.perf_counter()
    convgrad.bias_grad(tiny)
    torch.cuda.synchronize()
    print(f"first     {time.perf_counter() - start:6.2f} s  the first kernel of the process")
    found = []
    for text in FIRST:
        conv = Problem.parse(f"input_grad bf16 {text}").conv
        x, w, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
                    for shape in (conv.input_shape, conv.weight_shape, conv.output_shape))
        torch.cuda.synchronize()
        start = time.perf_counter()
        convgrad.conv_backward(dy, x, w, stride=conv.stride, padding=conv.padding, groups=conv.groups)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
        print(f"first     {found[-1]:6.2f} s  {text}", flush=True)
    print(f"first     median {statistics.median(found):.2f} s, most {max(found):.2f} s")


def precompile() -> None:
    """Seconds to compile all gradients of ResNet-50's layers at batch 64 in parallel processes, and their first calls
    afterwards: run in a process with an empty cache."""
    import torch

    import convgrad
    from convgrad import Problem
    from convgrad.plan import load

    wanted, arrays = [], []
    for text in RESNET50.split(","):
        problem = Problem.parse(f"input_grad+weight_grad bf16 n64 {text.strip()} NHWC OHWI cuda")
        conv = problem.conv
        dy, x, w = (torch.empty(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
                    for shape in (conv.output_shape, conv.input_shape, conv.weight_shape))
        problem = problem.with_(weight_layout="")  # torch calls do not say how a weight lies
        wanted.append((problem, tuple(tensor.stride() for tensor in (dy, x, w, x, w))))
        arrays.append(((dy, x, w), {"stride": conv.stride, "padding": conv.padding}))
    seconds, errors = load("triton").precompile(wanted)
    print(f"model     {seconds:6.2f} s  {len(wanted)} layers of ResNet-50 precompiled, errors {errors}")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for given, options in arrays:
        convgrad.conv_backward(*given, output_mask=(True, True, False), **options)
    torch.cuda.synchronize()
    print(f"model     {time.perf_counter() - start:6.2f} s  first calls of all layers afterwards")


PARTS = {"repeated": repeated_calls, "planning": planning, "first": first_calls, "precompile": precompile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all parts where none is named")
    for part in parser.parse_args().parts or PARTS:
        if part not in ("first", "precompile") or "TRITON_CACHE_DIR" in os.environ:
            PARTS[part]()
            continue
        with tempfile.TemporaryDirectory(prefix="convgrad_") as folder:
            subprocess.run([sys.executable, __file__, part], env={**os.environ, "TRITON_CACHE_DIR": folder}, check=True)


if __name__ == "__main__":
    main()
