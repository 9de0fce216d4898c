"""Launching compiled kernels through the CUDA driver itself.

Triton's own launcher is a C module that it compiles per signature (half a second on a first call), and it asks the
driver about every pointer on every call. Here a launch is prepared once: its parameters lie in memory of ours, and a
later call only changes the pointers, the addresses in tensor maps and the stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import triton
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

# The order of kernel parameters and what compiled kernels tell are Triton's own affair: known for this version only.
KNOWN_TRITON = triton.__version__.startswith("3.6.")
SCALARS: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double}
# The driver numbers the element types of tensor maps otherwise than the compiler does.
TENSOR_MAP_TYPES = {**{code: code for code in range(16)}, 8: 10, 9: 8, 10: 9}
TENSOR_MAP_BYTES = 128
PROMOTE_TO_128 = 2  # bytes that a copy fetches into the cache at least
INVALID_CONTEXT = 201
_functions: dict[tuple[str, int], int] = {}  # by the compiled kernel's hash and the device


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = (("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
                ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
                ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
                ("attribute_count", ctypes.c_uint))


@lru_cache(maxsize=1)
def cuda() -> Any:
    """The driver's library with the functions used here."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    library.cuLaunchKernelEx.argtypes = [pointer, pointer, pointer, pointer]
    library.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    library.cuTensorMapEncodeTiled.argtypes = [pointer, ctypes.c_int, unsigned, pointer, pointer, pointer, pointer,
                                               pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    return library


def check(status: int, what: str) -> None:
    """Raise what the driver calls an error."""
    if status:
        text = ctypes.c_char_p()
        cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status}, {(text.value or b'unknown').decode()}")


def bind_context(device: int) -> None:
    """Make the device's primary context the calling thread's: a thread that never used CUDA has none."""
    context = ctypes.c_void_p()
    check(cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "primary context")
    check(cuda().cuCtxSetCurrent(context), "current context")


def function_of(compiled: Any, device: int) -> int:
    """Handle of a compiled kernel, loaded onto the current device; raises OutOfResources where it does not fit."""
    found = _functions.get((compiled.hash, device))
    if found is None:
        metadata, utils = compiled.metadata, driver.active.utils
        limit = utils.get_device_properties(device)["max_shared_mem"]
        if metadata.shared > limit:
            raise OutOfResources(metadata.shared, limit, "shared memory")
        _, found, _, _, threads = utils.load_binary(compiled.name, compiled.kernel, metadata.shared, device)
        if 32 * metadata.num_warps > threads:
            raise OutOfResources(32 * metadata.num_warps, threads, "threads")
        _functions[compiled.hash, device] = found
    return int(found)


def understands(compiled: Any) -> bool:
    """Whether a compiled kernel's parameters are known here."""
    metadata = compiled.metadata
    described = [kind for kind in compiled.src.signature.values() if str(kind).startswith("tensordesc")]
    meta = getattr(metadata, "tensordesc_meta", None) or []
    return (KNOWN_TRITON and metadata.num_ctas == 1 and not metadata.launch_cooperative_grid and not metadata.launch_pdl
            and metadata.global_scratch_size == 0 and metadata.profile_scratch_size == 0
            and len(described) == len(meta) and None not in meta
            and all(kind == "constexpr" or kind in SCALARS or str(kind).startswith(("*", "tensordesc"))
                    for kind in compiled.src.signature.values()))


class Prepared:
    """One launch, all but its pointers fixed. `pointers` and `maps` pair a tensor with the place of its address."""

    def __init__(self, compiled: Any, grid: Sequence[int], arguments: Sequence[Any], device: int) -> None:
        self.device = device
        self.function = ctypes.c_void_p(function_of(compiled, device))
        warps, _, shared = compiled.packed_metadata
        self.config = LaunchConfig(*(*grid, 1, 1)[:3], 32 * warps, 1, 1, shared, None, None, 0)
        self.pointers: list[tuple[Any, Any]] = []
        self.maps: list[tuple[Any, int]] = []
        cells: list[Any] = []
        meta = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
        for kind, value in zip(compiled.src.signature.values(), arguments):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                address, memory = tensor_map(value, next(meta))
                self.maps.append((value.base, address))
                cells += [memory, *map(ctypes.c_int32, value.shape), *map(ctypes.c_int64, value.strides)]
            elif kind.startswith("*"):
                cells.append(ctypes.c_uint64(value.data_ptr()))
                self.pointers.append((value, cells[-1]))
            else:
                cells.append(SCALARS[kind](value))
        cells += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # memory for the whole grid and for profiles: not used
        addresses = [address_of(cell) for cell in cells]
        self.cells = cells  # kept alive
        self.table = (ctypes.c_void_p * len(cells))(*addresses)
        self.arguments = (ctypes.c_void_p(ctypes.addressof(self.config)), self.function,
                          ctypes.c_void_p(ctypes.addressof(self.table)), None)
        self.start = cuda().cuLaunchKernelEx

    def launch(self, stream: int) -> None:
        """Start the kernel on a stream."""
        self.config.stream = stream
        self.after(self.start(*self.arguments))

    def after(self, status: int) -> None:
        """Look at what the driver said of a start, and start again where only a context was missing."""
        if status == INVALID_CONTEXT:
            bind_context(self.device)
            status = self.start(*self.arguments)
        if status:
            check(status, "kernel launch")

    def forget_tensors(self) -> None:
        """Drop the tensors of the call it was made for."""
        self.pointers, self.maps = [], []


def address_of(cell: Any) -> int:
    if isinstance(cell, AlignedMemory):
        return cell.address
    return ctypes.addressof(cell)


class AlignedMemory:
    """Memory of a tensor map, which the driver wants aligned."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_char * (2 * TENSOR_MAP_BYTES))()
        start = ctypes.addressof(self.memory)
        self.address = start + -start % TENSOR_MAP_BYTES


def tensor_map(described: Any, meta: dict[str, Any]) -> tuple[int, AlignedMemory]:
    """Encode what the copy engine must know about a tensor descriptor; returns where it lies."""
    memory = AlignedMemory()
    rank = len(described.shape)
    size = meta["elem_size"]
    shape = (ctypes.c_uint64 * rank)(*reversed(described.shape))
    strides = (ctypes.c_uint64 * rank)(*(size * step for step in reversed(described.strides[:-1])))
    box = (ctypes.c_uint32 * rank)(*reversed(getattr(described, "span", None) or meta["block_size"]))
    apart = (ctypes.c_uint32 * rank)(*reversed(getattr(described, "steps", None) or (1,) * rank))
    check(cuda().cuTensorMapEncodeTiled(
        memory.address, TENSOR_MAP_TYPES[meta["elem_type"]], rank, described.base.data_ptr(), shape, strides, box,
        apart, 0, meta["swizzle"], PROMOTE_TO_128, 1 if described.padding == "nan" else 0),
        f"tensor map of {list(described.shape)} strides {list(described.strides)}")
    return memory.address, memory

