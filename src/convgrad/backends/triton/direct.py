"""Compiled kernels as steps of a prepared call, which the native module launches through the CUDA driver.

Triton's own launcher is a C module that it compiles per signature (half a second on a first call), and it asks the
driver about every pointer on every call. A prepared call (`native/gpu/prepared_call.h`) has its arguments in memory of
its own; running it again only changes the pointers, the addresses in tensor maps and the stream.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import triton

from ... import _native

# The order of kernel parameters and what compiled kernels tell are Triton's own affair: known for this version only.
KNOWN_TRITON = triton.__version__.startswith("3.6.")
# How scalar parameters lie in memory, as the struct module has it.
SCALARS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I",
           "u64": "Q", "fp32": "f", "fp64": "d"}
# The driver numbers the element types of tensor maps otherwise than the compiler does.
TENSOR_MAP_TYPES = {**{code: code for code in range(16)}, 8: 10, 9: 8, 10: 9}
_kernels: dict[str, Any] = {}  # by the compiled kernel's hash: each is loaded once per device

Place = Callable[[Any], tuple[int, int] | None]  # slot and offset of a tensor; None: its address never changes


def understands(compiled: Any) -> bool:
    """Whether a compiled kernel's parameters are known here."""
    metadata = compiled.metadata
    described = [kind for kind in compiled.src.signature.values() if str(kind).startswith("tensordesc")]
    meta = getattr(metadata, "tensordesc_meta", None) or []
    return (KNOWN_TRITON and metadata.profile_scratch_size == 0 and len(described) == len(meta) and None not in meta
            and all(kind == "constexpr" or kind in SCALARS or str(kind).startswith(("*", "tensordesc"))
                    for kind in compiled.src.signature.values()))


def kernel_of(compiled: Any) -> Any:
    """The native module's kernel for a compiled one."""
    found = _kernels.get(compiled.hash)
    if found is None:
        metadata = compiled.metadata
        found = _kernels[compiled.hash] = _native.GpuKernel(
            compiled.name, compiled.kernel, threads=32 * metadata.num_warps, shared_bytes=metadata.shared,
            cluster=metadata.num_ctas, cooperative=bool(metadata.launch_cooperative_grid),
            pdl=bool(metadata.launch_pdl))
    return found


def add_launch(call: Any, compiled: Any, grid: Sequence[int], arguments: Sequence[Any], place_of: Place,
               scratch: tuple[int, int] | None) -> None:
    """Add a launch to a prepared call; `scratch` is the memory that the compiler wants for the whole grid."""
    call.add_launch(kernel_of(compiled), (*grid, 1, 1)[:3])
    meta = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    for kind, value in zip(compiled.src.signature.values(), arguments):
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            add_tensor_map(call, value, next(meta), place_of(value.base))
            for extent in value.shape:
                call.add_scalar(struct.pack("i", extent))
            for step in value.strides:
                call.add_scalar(struct.pack("q", step))
        elif kind.startswith("*"):
            add_address(call, place_of(value), value)
        else:
            call.add_scalar(struct.pack(SCALARS[kind], value))
    add_address(call, scratch, None)
    add_address(call, None, None)  # memory for profiles: not used


def add_address(call: Any, place: tuple[int, int] | None, fixed: Any) -> None:
    if place is not None:
        call.add_pointer(*place)
        return
    call.add_scalar(struct.pack("Q", 0 if fixed is None else fixed.data_ptr()))
    if fixed is not None:
        call.keep(fixed)


def add_tensor_map(call: Any, described: Any, meta: dict[str, Any], place: tuple[int, int] | None) -> None:
    """Add what the copy engine must know about a tensor descriptor."""
    assert place is not None, "tensor maps are of the caller's tensors or of scratch memory"
    size = meta["elem_size"]
    call.add_tensor_map(
        *place, type=TENSOR_MAP_TYPES[meta["elem_type"]], extents=list(reversed(described.shape)),
        strides=[size * step for step in reversed(described.strides[:-1])],
        box=list(reversed(getattr(described, "span", None) or meta["block_size"])),
        steps=list(reversed(getattr(described, "steps", None) or (1,) * len(described.shape))),
        swizzle=meta["swizzle"], fill=1 if described.padding == "nan" else 0)
