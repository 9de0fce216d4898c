"""The GPU arena: torch tensors for us, cuDNN as the peer, CUDA events as the clock, a cold L2 cache for everybody.

This is the one place of the benchmark that imports torch into its own process, because there is one GPU to share.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
from typing import Any

from ..plan import plan
from ..problem import Conv, Plan, Problem
from .arena import OURS, Entry, public_call, transposed_backward
from .ceilings import Ceilings
from .judge import Verified, canonical, memory_order
from .layers import ALL_GRADIENTS, GRADIENTS, Layer
from .peer_torch import prepare, ways
from .peers import PeerFailed
from .provenance import describe_machine
from .samples import check_samples
from .timing import Contestant

FLUSH_BYTES = 256 << 20  # written before every timed run: larger than the L2 cache of any GPU
MATRIX = 8192
TOGETHER = 8             # runs that are queued while the GPU waits, so that no time of the host is measured
WAIT_CYCLES = 300_000    # of the GPU for each of them, in which the host queues it: about 0.15 milliseconds


def cuda_missing() -> str | None:
    """Return why no GPU can be used, or None."""
    try:
        import torch
    except ImportError:
        return "a GPU is used through torch, which is not installed (pip install torch)"
    return None if torch.cuda.is_available() else "torch sees no CUDA GPU"


def questions_of(layer: Layer, gradient: str, dtype: str, layout: str) -> list[Problem]:
    """The problems whose kernels a row's call may launch."""
    names = (*GRADIENTS, gradient) if gradient == ALL_GRADIENTS else (gradient,)
    return [layer.question(name, dtype, layout, "cuda") for name in names]


def seconds_at_ceiling(ceilings: Ceilings, problem: Problem) -> float:
    """Least time a GPU with these ceilings needs."""
    half = problem.dtype != "float32"  # tensor cores take f16 and bf16 alike
    return max(problem.flops / (ceilings.bf16_flops if half else ceilings.f32_flops),
               problem.min_bytes / ceilings.copy_bytes)


class CudaArena:
    """One NVIDIA GPU."""

    device = "cuda"
    rest = 0.0
    rounds = 3  # the GPU's clock is steady, and between two runs the cache is written over, which takes time
    repeats = 16

    def __init__(self, with_peer: bool, backend: str | None = None, ceilings: Ceilings | None = None,
                 tell: Callable[[str], None] = lambda step: None) -> None:
        """`ceilings`: where they are known; `tell` hears of every step of a row before it begins."""
        import torch

        self.torch, self.with_peer, self.backend, self.tell = torch, with_peer, backend, tell
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.operands: dict[str, Any] = {}
        self.gradient = ""
        self.hurried: Collection[str] = ()  # ways of the peer that choose without a search
        self.ceilings = ceilings or self.measure_ceilings()

    def describe(self) -> dict[str, Any]:
        torch = self.torch
        cudnn = f"{torch.__version__} with cuDNN {torch.backends.cudnn.version()}"
        return {"machine": {**describe_machine(), "gpu": torch.cuda.get_device_name()}, "threads": None,
                "clock": "CUDA events", "ceilings": self.ceilings.as_dict(),
                "peer": {"name": "torch", "version": cudnn, "note": "cudnn.benchmark"} if self.with_peer else None}

    def seconds_at_ceiling(self, problem: Problem) -> float:
        return seconds_at_ceiling(self.ceilings, problem)

    def products(self, problem: Problem) -> list[Contestant]:
        return []

    def prepare(self, problem: Problem, layer: Layer, gradient: str) -> None:
        self.problem, self.layer, self.gradient, self.operands = problem, layer, gradient, {}
        if 2 * self.torch.cuda.memory_reserved() > self.torch.cuda.get_device_properties(0).total_memory:
            self.torch.cuda.empty_cache()

    def ours(self, problem: Problem, layout: str) -> Entry:
        self.tell(f"ours {layout}")
        chosen = self.plan_of(problem)
        call = self.call_of(problem)
        results = call() if self.gradient == ALL_GRADIENTS else (call(),)
        verified = self.verified(problem, results, chosen.kernel)
        del results
        self.operands = {}  # made again for another layout: the largest layers leave no room for them beside the peer's
        return Entry(Contestant(OURS, layout, self.turn_of(call, f"ours {layout}, timed")), chosen, verified)

    def call_of(self, problem: Problem) -> Callable[[], Any]:
        """Return our call for the prepared problem on random operands."""
        torch, together = self.torch, self.gradient == ALL_GRADIENTS
        names = ("grad_output", "input", "weight") if together else problem.operands
        if not self.operands:
            torch.manual_seed(0)
            dtype = getattr(torch, problem.dtype)
            drawn = dtype if dtype.itemsize > 1 else torch.bfloat16  # torch draws no FP8 numbers
            self.operands = {name: torch.empty(problem.shape_of_operand(name), device="cuda", dtype=drawn).uniform_(
                -1, 1).to(dtype) for name in names}
        placed = {name: self.placed(name, problem) for name in names}
        return transposed_backward(problem, placed, self.backend) if together and self.layer.transposed else \
            public_call(problem, placed, self.backend, None)

    def plan_of(self, problem: Problem) -> Plan:
        """The plan that a call of ours runs, to tell of it."""
        chosen = plan(problem, backend=self.backend)
        if self.gradient == ALL_GRADIENTS and self.layer.transposed:
            other = plan(problem.with_(wrt="weight"), backend=self.backend)
            return chosen._replace(kernel=f"{chosen.kernel} + {other.kernel} + bias",
                                   workspace_bytes=max(chosen.workspace_bytes, other.workspace_bytes))
        return chosen

    def verified(self, problem: Problem, results: tuple[Any, ...], kernel: str) -> Verified:
        """Samples of all results against float64; the worst of them."""
        found = []
        wrts = problem.results if len(results) != 3 or not self.layer.transposed else ("output", "weight", "input")
        for wrt, result in zip(wrts, results):
            if wrt == "input" and self.layer.transposed:  # its bias: the sum over what is the input to us
                conv = problem.conv
                pointwise = Conv(conv.batch, 1, conv.in_channels, conv.in_size, (1,) * conv.axes)
                question, wrt, operands = problem.with_(conv=pointwise), "bias", {"grad_output": self.operands["input"]}
            else:
                question, operands = problem, self.operands
                if wrt != "bias":
                    result = canonical(result, problem.weight_layout if wrt == "weight" else problem.layout,
                                       wrt == "weight")
            found.append(check_samples(question, operands, result, wrt, kernel))
        return Verified(max(one.worst for one in found), "; ".join(dict.fromkeys(one.how for one in found)))

    def placed(self, name: str, problem: Problem) -> Any:
        weights = name == "weight"
        letters = problem.weight_layout if weights else problem.layout
        tensor = self.operands[name]
        return tensor.permute(memory_order(letters, tensor.ndim - 2, weights)).contiguous()

    def peers(self, layer: Layer, problem: Problem, left_out: Collection[str]) -> tuple[list[Contestant], list[str]]:
        if not self.with_peer:
            return [], []
        found, notes = [], []
        for way in (way for way in ways(problem) if way not in left_out):
            self.tell(f"peer {way}")
            self.torch.backends.cudnn.benchmark = way not in self.hurried
            if way in self.hurried:
                notes.append(f"{way}: cuDNN's own choice, because its search was given up")
            try:
                with self.torch.device("cuda"):
                    call = prepare(problem, layer.transposed, way, together=self.gradient == ALL_GRADIENTS)
                    call.run()  # cuDNN searches its algorithms here
                found.append(Contestant("torch", way, self.turn_of(call.run, f"peer {way}"), call.scale))
                notes += [call.note] if call.note and call.note not in notes else []
            except (RuntimeError, ValueError) as error:
                notes.append(f"{way}: {str(error).splitlines()[0]}")
                self.torch.cuda.synchronize()  # an error that the GPU does not recover from is raised again
        if not found:
            raise PeerFailed("; ".join(notes))
        return found, notes

    def turn_of(self, call: Callable[[], Any], who: str) -> Callable[[int], list[float]]:
        """Time each run by events on the stream, after a write that pushes everything out of the L2 cache."""
        torch = self.torch

        def turn(repeats: int) -> list[float]:
            self.tell(who)
            events = []
            for number in range(repeats):
                if number % TOGETHER == 0:
                    torch.cuda.synchronize()
                    torch.cuda._sleep(WAIT_CYCLES * min(TOGETHER, repeats - number))
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
            turn = self.turn_of(lambda: a @ b, "start")
            turn(3)
            return 2 * MATRIX**3 / statistics.median(turn(10))

        source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        turn = self.turn_of(lambda: target.copy_(source), "start")
        turn(3)
        copied = 2 * source.numel() / statistics.median(turn(10))
        return Ceilings(product(torch.float32), product(torch.bfloat16), copied, "torch matrix products and copies")
