"""Plans: which kernels answer a Problem, with what tiles, and how tensors become kernel arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

from ...numbers import hifloat8_tables
from ...problem import DTYPES, Plan, Problem, Unsupported
from .gather import gather_kernel
from .geometry import Geometry, geometry, needs_wide, strides_of
from .launch import INTERPRETED, Launch, Step, aligned_strides, device_of, power_of_two
from .tiles import MULTIPROCESSORS, WORKSPACE_FLOOR, GatherTile, WeightTile, choose_gather, choose_weight
from .weight import bias_kernel, reduce_kernel, weight_kernel

Run = Callable[[tuple[Any, ...], tuple[Any, ...], Any], None]

# Rounding of operands by (number format, compute mode): see elements.as_operand. Formats that a mode does not change
# are not listed.
ROUNDS = {
    ("float32", "tf32"): "away:10", ("float32", "hf32_10"): "away:10", ("float32", "hf32_10_even"): "even:10",
    ("float32", "hf32"): "away:11", ("float32", "hf32_even"): "even:11",
    ("float32", "bf16"): "bf16", ("float32", "f16"): "f16", ("float16", "bf16"): "bf16", ("bfloat16", "f16"): "f16",
}
# 8-bit operands enter products as 16-bit numbers that hold them exactly.
STORED_8BIT = {"float8_e4m3fn": "exact_f16", "float8_e5m2": "exact_f16", "hifloat8": "table"}
TORCH_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
                "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
                "hifloat8": torch.uint8}
_tables: dict[Any, Any] = {}


def make_plan(problem: Problem, max_workspace: int | None) -> Plan:
    """Return the plan for a problem that this backend can run."""
    if len(problem.results) > 1:
        raise Unsupported("several results at once: one kernel each is used")
    if DTYPES[problem.out_dtype][1] == 1:
        raise Unsupported(f"out_dtype={problem.out_dtype}: the kernels write float64, float32, bfloat16 or float16")
    geo = geometry(problem.conv)
    wrt = problem.wrt
    if problem.conv.shape_of(wrt).count(0) or math.prod(problem.conv.output_shape) == 0 \
            or problem.conv.group_in == 0:
        return Plan(problem, "triton", "fill_zero", on_tensors(problem, fill_zero), 0)
    if wrt == "bias":
        return bias_plan(problem, geo, max_workspace)
    if wrt == "weight":
        return weight_plan(problem, geo, max_workspace)
    return gather_plan(problem, geo)


def fill_zero(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
    for result in results:
        result.zero_()


def rounding(problem: Problem) -> str:
    """How operands are rounded on load."""
    if problem.dtype in STORED_8BIT:
        # bf16 keeps at least as many bits as any 8-bit format, f16 loses only HiFloat8's range: both exact for ours
        return STORED_8BIT[problem.dtype]
    return ROUNDS.get((problem.dtype, problem.compute), "")


def arithmetic(problem: Problem) -> dict[str, Any]:
    """ROUND, PRECISION and ACC of a problem."""
    rounded = rounding(problem)
    precision = "ieee"
    if problem.dtype == "float32" and rounded not in ("bf16", "f16"):
        precision = "tf32" if rounded.endswith(":10") else "tf32x3"
    if INTERPRETED:
        precision = "ieee"
    return {"ROUND": rounded, "PRECISION": precision, "ACC": tl.float64 if problem.dtype == "float64" else tl.float32}


def table_for(problem: Problem, like: Any) -> Any:
    """Decoding table of an 8-bit format on the tensor's device (any tensor where none is needed)."""
    if problem.dtype != "hifloat8":
        return like
    found = _tables.get(like.device)
    if found is None:
        values = np.asarray(hifloat8_tables()[0], dtype=np.float32)
        found = _tables[like.device] = torch.from_numpy(values).to(like.device).to(torch.bfloat16)
    return found


def on_tensors(problem: Problem, run: Run) -> Run:
    """Wrap a runner so that it takes CUDA tensors as they are and, when interpreted, NumPy arrays as tensors."""
    def run_on_tensors(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        with device_of(results[0]):
            run(operands, results, workspace)

    if not INTERPRETED:
        return run_on_tensors

    def run_on_arrays(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any = None) -> None:
        taken = tuple(as_tensor(operand, problem.dtype) for operand in operands)
        given = tuple(as_tensor(result, problem.out_dtype) for result in results)
        scratch = torch.from_numpy(workspace) if isinstance(workspace, np.ndarray) else workspace
        run(taken, given, scratch)
        for result, tensor in zip(results, given):
            if isinstance(result, np.ndarray) and not shares(result, tensor):
                result[...] = as_array(tensor, result.dtype)

    return run_on_arrays


def as_tensor(array: Any, dtype: str) -> Any:
    if isinstance(array, torch.Tensor):
        return array
    size = DTYPES[dtype][1]
    if any(step < 0 or step % size for step in array.strides) or not array.flags.writeable:
        array = array.copy()
    bits = {1: np.uint8, 2: np.int16}.get(size)
    stored = array if bits is None else array.view(bits) if array.flags.c_contiguous or array.ndim == 0 else \
        np.lib.stride_tricks.as_strided(array[(slice(0, 1),) * array.ndim].reshape(-1).view(bits), array.shape, array.strides)
    return torch.from_numpy(stored).view(TORCH_DTYPES[dtype])


def shares(array: Any, tensor: Any) -> bool:
    return bool(array.size == 0 or array.__array_interface__["data"][0] == tensor.data_ptr())


def as_array(tensor: Any, dtype: Any) -> Any:
    size = tensor.element_size()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy().view(dtype)


def gather_plan(problem: Problem, geo: Geometry) -> Plan:
    """The output, or the input gradient."""
    is_input = problem.wrt == "input"
    tile = choose_gather(geo, is_input, operand_bytes(problem))
    step = Step(gather_kernel, lambda source, weight, result, table: gather_launch(
        geo, tile, is_input, arithmetic(problem), source, weight, result))

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        step(*operands, results[0], table_for(problem, results[0]))

    name = f"gather_{DTYPES[problem.dtype][0]}_{tile.BM}x{tile.BN}x{tile.TS * tile.CB}"
    return Plan(problem, "triton", name, on_tensors(problem, run), 0, (f"tile: {tile}",))


def operand_bytes(problem: Problem) -> int:
    """Bytes of an operand as it enters a product."""
    narrow = rounding(problem) in ("bf16", "f16", "exact_f16", "table")
    return 2 if narrow else DTYPES[problem.dtype][1]


def gather_launch(geo: Geometry, tile: GatherTile, is_input: bool, numbers: dict[str, Any], source: Any, weight: Any,
                  result: Any) -> Launch:
    sn, sc, *s = strides_of(source)
    wo, wi, *w = strides_of(weight)
    rn, rc, *r = strides_of(result)
    salign, (sn, *s) = aligned_strides((sn, *s))
    walign, (wo, *w) = aligned_strides((wo, *w))
    ralign, (rn, *r) = aligned_strides((rn, *r))
    from_extents, to_extents = (geo.y, geo.x) if is_input else (geo.x, geo.y)
    positions = geo.phase_positions if is_input else geo.y
    red, col = (geo.group_out, geo.group_in) if is_input else (geo.group_in, geo.group_out)
    row_tiles = -(-geo.batch * math.prod(positions) // tile.BM)
    columns = col * tile.GP * (geo.phases if tile.PACK else 1)
    programs = -(-columns // tile.BN) * row_tiles * (geo.groups // tile.GP)
    if is_input and not tile.PACK:
        programs *= geo.phases
    slots = geo.span if tile.PACK else geo.kernel
    constants = {
        "SALIGN": salign, "WALIGN": walign, "RALIGN": ralign, **geo.constants(), **geo.phase_constants(),
        "U0": slots[0], "U1": slots[1], "U2": slots[2], "RED": red, "COL": col, "INPUT": is_input,
        "WIDE": needs_wide(source, weight, result), **numbers, **tile.constants()}
    scalars = (geo.batch, *from_extents, *to_extents, *positions, row_tiles, sn, sc, *s, wo, wi, *w, rn, rc, *r)
    return Launch((programs,), scalars, constants, tile.warps, tile.stages)


def weight_plan(problem: Problem, geo: Geometry, max_workspace: int | None) -> Plan:
    tile = choose_weight(geo, operand_bytes(problem), max_workspace)
    numbers = arithmetic(problem)
    step = Step(weight_kernel, lambda dy, x, result, table: weight_launch(geo, tile, numbers, dy, x, result))
    add = Step(reduce_kernel, lambda partial, result: reduce_launch(geo, tile.SPLITS, result))
    shape = (tile.SPLITS, geo.groups * geo.group_out, *geo.kernel, geo.group_in)
    partial_bytes = 4 * math.prod(shape) if tile.SPLITS > 1 else 0
    if problem.dtype == "float64":
        partial_bytes *= 2

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        dw = results[0]
        if tile.SPLITS == 1:
            step(*operands, dw, table_for(problem, dw))
            return
        partial = partial_sums(problem, workspace, partial_bytes, shape, dw)
        step(*operands, partial.permute(0, 1, 5, 2, 3, 4), table_for(problem, dw))
        add(partial, dw)

    name = f"weight_{DTYPES[problem.dtype][0]}_{tile.BK}x{tile.TS * tile.CB}x{tile.BP}_split{tile.SPLITS}"
    return Plan(problem, "triton", name, on_tensors(problem, run), partial_bytes, (f"tile: {tile}",))


def partial_sums(problem: Problem, workspace: Any, size: int, shape: tuple[int, ...], like: Any) -> Any:
    """The workspace as partial sums: the caller's memory, or new memory of the stream's allocator."""
    dtype = torch.float64 if problem.dtype == "float64" else torch.float32
    if workspace is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    start = -workspace.data_ptr() % 16
    if workspace.numel() < start + size:
        raise ValueError(f"workspace has {workspace.numel()} bytes, but the plan needs {size}, 16-byte aligned")
    return workspace[start:start + size].view(dtype).view(shape)


def weight_launch(geo: Geometry, tile: WeightTile, numbers: dict[str, Any], dy: Any, x: Any, result: Any) -> Launch:
    yn, yc, *y = strides_of(dy)
    xn, xc, *xs = strides_of(x)
    yalign, (yn, *y) = aligned_strides((yn, *y))
    xalign, (xn, *xs) = aligned_strides((xn, *xs))
    if tile.SPLITS > 1:
        r_split, ro, ri, *r = result.stride()
    else:
        r_split, (ro, ri, *r) = 0, strides_of(result)
    run = -(-geo.pixels // tile.SPLITS)
    run = -(-run // tile.BP) * tile.BP
    programs = (-(-geo.group_in * tile.GP // tile.CB) * -(-geo.taps // tile.TS) * -(-geo.group_out * tile.GP // tile.BK)
                * tile.SPLITS * (geo.groups // tile.GP))
    constants = {"YALIGN": yalign, "XALIGN": xalign, **geo.constants(), "KG": geo.group_out, "CG": geo.group_in,
                 "WIDE": needs_wide(dy, x, result), **numbers, **tile.constants()}
    scalars = (geo.pixels, run, *geo.y, *geo.x, yn, yc, *y, xn, xc, *xs, r_split, ro, ri, *r)
    return Launch((programs,), scalars, constants, tile.warps, tile.stages)


def reduce_launch(geo: Geometry, splits: int, result: Any) -> Launch:
    """The launch that adds `splits` partial weight gradients in order."""
    ro, ri, *r = strides_of(result)
    size = geo.groups * geo.group_out * geo.group_in * geo.taps
    bs = min(8, power_of_two(splits))
    be = 256 if size >= 256 * MULTIPROCESSORS else 64
    return Launch((-(-size // be),), (size, splits, geo.group_in, *geo.kernel, ro, ri, *r),
                  {"BS": bs, "BE": be}, 4, 1)


def bias_plan(problem: Problem, geo: Geometry, max_workspace: int | None) -> Plan:
    channels = geo.groups * geo.group_out
    bk = min(128, power_of_two(channels))
    bp = max(1, 4096 // bk)
    limit = WORKSPACE_FLOOR if max_workspace is None else max_workspace
    tiles = -(-channels // bk)
    splits = max(1, min(-(-8 * MULTIPROCESSORS // tiles), geo.pixels // (4 * bp), limit // (8 * channels)))
    double = problem.dtype == "float64"
    numbers = {"ROUND": STORED_8BIT.get(problem.dtype, ""), "ACC": tl.float64 if double else tl.float32}
    run_length = -(-geo.pixels // splits)
    run_length = -(-run_length // bp) * bp

    def launch(dy: Any, result: Any, table: Any) -> Launch:
        yn, yc, *y = strides_of(dy)
        align, (yn, *y) = aligned_strides((yn, *y))
        r_split, r_k = result.stride() if splits > 1 else (0, result.stride(0))
        constants = {"YALIGN": align, "WIDE": needs_wide(dy), **numbers, "BP": bp, "BK": bk}
        return Launch((tiles, splits), (geo.pixels, run_length, *geo.y, yn, yc, *y, r_split, r_k, channels), constants, 8, 2)

    step = Step(bias_kernel, launch)
    add = Step(reduce_kernel, lambda partial, result: Launch(
        (-(-channels // 64),), (channels, splits, 1, 1, 1, 1, result.stride(0), 0, 0, 0, 0),
        {"BS": min(32, power_of_two(splits)), "BE": 64}, 4, 1))
    size = (8 if double else 4) * splits * channels if splits > 1 else 0

    def run(operands: tuple[Any, ...], results: tuple[Any, ...], workspace: Any) -> None:
        db = results[0]
        if splits == 1:
            step(operands[0], db, table_for(problem, db))
            return
        partial = partial_sums(problem, workspace, size, (splits, channels), db)
        step(operands[0], partial, table_for(problem, db))
        add(partial, db)

    return Plan(problem, "triton", f"bias_{DTYPES[problem.dtype][0]}_{bp}x{bk}_split{splits}",
                on_tensors(problem, run), size, (f"{splits} runs of pixels",))
