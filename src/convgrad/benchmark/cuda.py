"""The GPU arena: torch tensors for us, cuDNN as the peer, CUDA events as the clock, a cold L2 cache for everybody.

This is the one place of the benchmark that imports torch into its own process, because there is one GPU to share.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from ..plan import plan
from ..problem import SPATIAL_LETTERS, Problem
from .arena import OURS, Entry, public_call
from .ceilings import Ceilings
from .judge import Expected, Float64, canonical, memory_order
from .layers import Layer
from .peer_torch import prepare, ways
from .peers import PeerFailed
from .provenance import describe_machine
from .timing import Contestant

FLUSH_BYTES = 256 << 20  # written before every timed run: larger than the L2 cache of any GPU
MATRIX = 8192


def cuda_missing() -> str | None:
    """Return why no GPU can be used, or None."""
    try:
        import torch
    except ImportError:
        return "a GPU is used through torch, which is not installed (pip install torch)"
    return None if torch.cuda.is_available() else "torch sees no CUDA GPU"


class TorchExpected(Expected):
    """The same comparison with the arithmetic in float64 on the device: problems for a GPU are too large for NumPy."""

    def float64(self, array: Any) -> Any:
        return array.double()

    def mixed(self, array: Any, matrix: Float64, axis: int, weights: bool) -> Any:
        import torch

        rows, channels = matrix.shape
        if rows == channels:
            return array.double()
        groups = 1 if weights and axis == 1 else self.problem.conv.groups
        moved = array.movedim(axis, 0)
        on_device = torch.as_tensor(matrix, device=array.device)
        parts = [on_device @ part.reshape(channels, -1).double() for part in moved.split(channels)]
        assert len(parts) == groups
        return torch.cat(parts).reshape(groups * rows, *moved.shape[1:]).movedim(0, axis)

    def reference(self, operands: dict[str, Any]) -> Any:
        """One tap at a time, as the NumPy reference does: x (N G C i), w (G K C taps), dy (N G K o)."""
        import torch

        conv, wrt = self.conv, self.problem.wrt
        n, g, c, k = conv.batch, conv.groups, conv.group_in, conv.group_out
        device = next(iter(operands.values())).device
        shapes = {"input": (n, g, c, *conv.in_size), "weight": (g, k, c, *conv.kernel_size),
                  "grad_output": (n, g, k, *conv.out_size)}
        asked = "grad_output" if wrt == "output" else wrt
        x, w, dy = (torch.zeros(shapes[name], dtype=torch.float64, device=device) if name == asked
                    else operands[name].reshape(shapes[name]) for name in ("input", "weight", "grad_output"))
        letters = SPATIAL_LETTERS[conv.axes].lower()
        for tap in itertools.product(*map(range, conv.kernel_size)):
            spans = [conv.tap_range(axis, t) for axis, t in enumerate(tap)]
            at_w = (..., *tap)
            if any(first >= last for first, last in spans):
                continue
            starts = [first * s + t * d - low for (first, _), t, s, d, (low, _) in
                      zip(spans, tap, conv.stride, conv.dilation, conv.padding)]
            at_x = (..., *(slice(start, start + (last - first - 1) * s + 1, s)
                           for start, (first, last), s in zip(starts, spans, conv.stride)))
            at_dy = (..., *(slice(first, last) for first, last in spans))
            if wrt == "output":
                dy[at_dy] += torch.einsum(f"gkc,ngc{letters}->ngk{letters}", w[at_w], x[at_x])
            elif wrt == "input":
                x[at_x] += torch.einsum(f"gkc,ngk{letters}->ngc{letters}", w[at_w], dy[at_dy])
            else:
                w[at_w] = torch.einsum(f"ngk{letters},ngc{letters}->gkc", dy[at_dy], x[at_x])
        result = {"output": dy, "input": x, "weight": w}[wrt]
        return result.reshape(conv.shape_of(wrt))


class CudaArena:
    """One NVIDIA GPU."""

    device = "cuda"
    rest = 0.0

    def __init__(self, with_peer: bool, backend: str | None = None) -> None:
        import torch

        self.torch, self.with_peer, self.backend = torch, with_peer, backend
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.operands: dict[str, Any] = {}
        self.expected: Expected | None = None
        self.ceilings = self.measure_ceilings()

    def describe(self) -> dict[str, Any]:
        torch = self.torch
        cudnn = f"{torch.__version__} with cuDNN {torch.backends.cudnn.version()}"
        return {"machine": {**describe_machine(), "gpu": torch.cuda.get_device_name()}, "threads": None,
                "clock": "CUDA events", "ceilings": self.ceilings.as_dict(),
                "peer": {"name": "torch", "version": cudnn, "note": "cudnn.benchmark"} if self.with_peer else None}

    def seconds_at_ceiling(self, problem: Problem) -> float:
        half = problem.dtype != "float32"  # tensor cores take f16 and bf16 alike
        flops = self.ceilings.bf16_flops if half else self.ceilings.f32_flops
        return max(problem.flops / flops, problem.min_bytes / self.ceilings.copy_bytes)

    def prepare(self, problem: Problem) -> None:
        self.problem, self.operands, self.expected = problem, {}, None
        self.torch.cuda.empty_cache()

    def ours(self, problem: Problem, layout: str) -> Entry:
        torch = self.torch
        chosen = plan(problem, backend=self.backend)
        if self.expected is None:
            torch.manual_seed(0)
            self.operands = {name: (torch.rand(problem.shape_of_operand(name), device="cuda") * 2 - 1).to(
                getattr(torch, problem.dtype)) for name in problem.operands}
            self.expected = TorchExpected(self.problem, self.operands)
        placed = {name: self.placed(name, problem) for name in problem.operands}
        call = public_call(problem, placed, self.backend, None)
        weights = problem.wrt == "weight"
        result = canonical(call(), problem.weight_layout if weights else problem.layout, weights)
        verified = self.expected.check(result, chosen.kernel)
        del result
        return Entry(Contestant(OURS, layout, self.turn_of(call)), chosen, verified)

    def placed(self, name: str, problem: Problem) -> Any:
        weights = name == "weight"
        letters = problem.weight_layout if weights else problem.layout
        tensor = self.operands[name]
        return tensor.permute(memory_order(letters, tensor.ndim - 2, weights)).contiguous()

    def peers(self, layer: Layer, problem: Problem) -> tuple[list[Contestant], list[str]]:
        if not self.with_peer:
            return [], []
        found, notes = [], []
        for way in ways(problem):
            try:
                with self.torch.device("cuda"):
                    call = prepare(problem, layer.transposed, way)
                    call.run()  # cuDNN searches its algorithms here
                found.append(Contestant("torch", way, self.turn_of(call.run), call.scale))
                notes += [call.note] if call.note and call.note not in notes else []
            except (RuntimeError, ValueError) as error:
                notes.append(f"{way}: {str(error).splitlines()[0]}")
        if not found:
            raise PeerFailed("; ".join(notes))
        return found, notes

    def turn_of(self, call: Callable[[], Any]) -> Callable[[int], list[float]]:
        """Time each run by events on the stream, after a write that pushes everything out of the L2 cache."""
        torch = self.torch

        def turn(repeats: int) -> list[float]:
            events = []
            for _ in range(repeats):
                self.flush.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                events.append((start, end))
            torch.cuda.synchronize()
            return [start.elapsed_time(end) * 1e-3 for start, end in events]

        return turn

    def measure_ceilings(self) -> Ceilings:
        torch = self.torch

        def product(dtype: Any) -> float:
            a, b = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
            turn = self.turn_of(lambda: a @ b)
            turn(3)
            return 2 * MATRIX**3 / statistics.median(turn(10))

        source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        turn = self.turn_of(lambda: target.copy_(source))
        turn(3)
        copied = 2 * source.numel() / statistics.median(turn(10))
        return Ceilings(product(torch.float32), product(torch.bfloat16), copied, "torch matrix products and copies")
