"""One model of the card: the measured facts that every cost model counts with, in SI units.

What a kernel reaches of a fact (tensor cores with narrow tiles, the clock while it waits) is the kernel's own constant,
a share of what stands here. The facts of an H200 were measured; those of another card follow from what its driver says.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
import triton

from .launch import INTERPRETED

HOPPER = 9  # major compute capability: asynchronous products of warp groups, the copy engine with its barriers
TESTED_TRITON = "3.6."  # what Gluon kernels are compiled with is no stable interface: other versions were not seen
WORKSPACE_FLOOR = 64 * 2**20  # bytes that any plan may use


@dataclass(frozen=True)
class Gpu:
    """The facts of a card."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    clock_hz: float  # while all multiprocessors are busy
    memory_bytes_per_s: float  # of kernels that read and write long rows
    l2_bytes_per_s: float
    l2_bytes: int
    shared_bytes: int  # of a multiprocessor
    registers: int  # of a multiprocessor
    tensor_flops: float  # dense 16-bit products at that clock; float32 and 8 bits follow by the kernels' own ratios
    launch_s: float  # of a kernel that does nothing, beside others

    def text(self) -> str:
        """The facts as JSON, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Gpu:
        facts = json.loads(text)
        return cls(**{**facts, "capability": tuple(facts["capability"])})

    @property
    def program_bytes(self) -> int:
        """Shared memory of the programs of a multiprocessor, less what the compiler keeps for itself."""
        return self.shared_bytes - 8 * 1024


# Measured on one card: clock by kernels that only issue instructions (bench/h200.md, strips), memory by those that are
# bound by it (4.27e12 for a plain copy, 3.5 to 3.8 for ours), L2 by boxes that hit it, launches by empty kernels.
H200 = Gpu("NVIDIA H200", (9, 0), 132, 1.85e9, 3.6e12, 12.5e12, 50 * 2**20, 228 * 1024, 65536, 989e12, 4e-6)
# The interpreter has no card: it plans as for an H200, with the kernels that any card runs.
INTERPRETER = Gpu("Triton's interpreter", (0, 0), 132, 1.85e9, 3.6e12, 12.5e12, 50 * 2**20, 228 * 1024, 65536, 989e12,
                  4e-6)
FLOPS_PER_CLOCK = {7: 1024, 8: 2048, 9: 4096}  # of a multiprocessor's tensor cores, by major capability
MEMORY_SHARE = 0.75  # of the memory's data sheet that kernels reach, as on an H200
CLOCK_SHARE = 0.93  # of the highest clock


@lru_cache(maxsize=16)
def gpu_of(device: int) -> Gpu:
    """The facts of a device of this machine."""
    found = torch.cuda.get_device_properties(device)
    if found.name == H200.name:
        return H200
    clock = 1e3 * getattr(found, "clock_rate", H200.clock_hz / 1e3 / CLOCK_SHARE) * CLOCK_SHARE
    bus, rate = getattr(found, "memory_bus_width", 0), getattr(found, "memory_clock_rate", 0)
    memory = MEMORY_SHARE * 2e3 * rate * bus / 8 or H200.memory_bytes_per_s
    count = found.multi_processor_count
    per_clock = FLOPS_PER_CLOCK.get(found.major, FLOPS_PER_CLOCK[HOPPER])
    return Gpu(found.name, (found.major, found.minor), count, clock, memory,
               H200.l2_bytes_per_s * count / H200.multiprocessors, found.L2_cache_size,
               found.shared_memory_per_multiprocessor, found.regs_per_multiprocessor, per_clock * count * clock,
               H200.launch_s)


class Planning:
    """The card that plans are made for where it is not the current one: in processes that only compile."""

    gpu: Gpu | None = None


def current_gpu() -> Gpu:
    """The card that plans are made for; an H200 where there is none, so that plans can be read anywhere."""
    if Planning.gpu is not None:
        return Planning.gpu
    if INTERPRETED:
        return INTERPRETER
    return gpu_of(torch.cuda.current_device()) if torch.cuda.is_available() else H200


def needs_hopper(gpu: Gpu) -> str | None:
    """Why a card cannot run Gluon kernels for Hopper; None where it can."""
    if gpu.capability[0] != HOPPER:
        return f"needs compute capability {HOPPER}.x (Hopper), {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if not triton.__version__.startswith(TESTED_TRITON):
        return f"needs Triton {TESTED_TRITON}x, which it was tested with, and this is {triton.__version__}"
    return None


def runs_anywhere(gpu: Gpu) -> str | None:
    """Plain Triton kernels run on any card."""
    return None
