"""PyTorch tensors, on the CPU and on CUDA, as operands and results: the array kind of `convgrad.frontends`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.autograd import forward_ad

from ...numbers import storage_dtype
from ...problem import DTYPES, Plan
from .. import Again, Recorded
from ..numpy import checked_format, overlaps_itself

try:
    native: Any = importlib.import_module("convgrad._native")
except ImportError:  # not built: other backends serve
    native = None

FORMATS = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
           torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
TORCH_DTYPES = {name: dtype for dtype, name in FORMATS.items()} | {"hifloat8": torch.uint8}
# A new tensor of a size, strides and a dtype, on the CPU and on the current GPU: what torch's own compiler calls, in
# half the time.
empty_cpu: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cpu", None) or (
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype))
empty_cuda: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None) or (
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"))
# Sizes, strides, number formats and devices of a dict of tensors as one key, where torch has DLPack's C interface.
read_signature: Any = native.TensorSignature(torch.Tensor, torch.nn.Parameter) \
    if native is not None and hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else None
INTEGERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}  # by size, in NumPy's words: what any format crosses as
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
CHANNELS_LAST = {4: (torch.channels_last, "NHWC"), 5: (torch.channels_last_3d, "NDHWC")}


def has_cuda() -> bool:
    """Whether there is a GPU for CUDA tensors."""
    return torch.cuda.is_available()


class TorchFunctions(NamedTuple):
    """What a prepared call on a GPU needs of torch."""

    empty: Callable[..., Any]  # (size, strides, dtype) -> a tensor on the current device
    allocate: Callable[[int, int], int]  # (bytes, stream) -> an address
    free: Callable[[int], None]
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]


def torch_functions() -> TorchFunctions:
    c: Any = torch._C
    return TorchFunctions(empty_cuda, c._cuda_cudaCachingAllocator_raw_alloc, c._cuda_cudaCachingAllocator_raw_delete,
                          c._cuda_getDevice, c._cuda_getCurrentRawStream)


def signature(arrays: dict[str, Any]) -> Any:
    """Shapes, number formats, what `home` looks at (strides and devices), and the number of threads."""
    read = None if read_signature is None else read_signature(arrays)
    if read is not None:
        return threads(), read
    return threads(), tuple([(array.shape, array.dtype, array.stride(), array.device) for array in arrays.values()])


def has_c_exchange() -> bool:
    """Whether the native core can read tensors by itself: torch 2.10 and later show them in DLPack's C interface."""
    return native is not None and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def threads() -> int | None:
    """As many as torch would use (torch.set_num_threads), and no more than convgrad has been told to."""
    return None if native is None else native.threads_for_torch()


def execute(run: Callable[..., Any], operands: tuple[Any, ...], targets: tuple[Any, ...], workspace: Any) -> None:
    """On the CPU the work is done by torch's own threads."""
    if native is None or isinstance(operands[0], torch.Tensor):
        run(operands, targets, workspace)
    else:
        native.run_on_torch_team(run, operands, targets, workspace)


def recorded(arrays: dict[str, Any]) -> bool:
    """Whether autograd, torch.func, a subclass or a tracer wants to know; negative views are resolved on the way."""
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return True
    plain = not any([type(array) not in PLAIN_TYPES or array.is_neg() for array in arrays.values()])
    if plain and forward_ad._current_level < 0 and not any([array.requires_grad for array in arrays.values()]):
        return False
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality):
        return False  # inside an operator, below all of them
    return not plain or forward_ad._current_level >= 0 or torch.is_grad_enabled()


def record(asked: Recorded, arrays: dict[str, Any]) -> Sequence[Any]:
    from .recording import record

    return record(asked, arrays)


def add(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return out.add_(result)


def home(arrays: dict[str, Any]) -> tuple[str, str | None]:
    """Device of the tensors, and their memory order when it is channels last under a channels-first shape."""
    first = next(iter(arrays.values()))
    for name, array in arrays.items():
        if array.device != first.device:
            raise TypeError(f"all tensors must be on one device: {next(iter(arrays))} is on {first.device}, "
                            f"{name} is on {array.device}")
    if first.device.type not in ("cpu", "cuda"):
        raise TypeError(f"tensors must be on the cpu or on cuda, got {first.device}")
    return first.device.type, next((memory for name, array in arrays.items()
                                    if name != "weight" and (memory := _memory_order(array))), None)


def _memory_order(array: torch.Tensor) -> str | None:
    if array.dim() not in CHANNELS_LAST or array.is_contiguous():
        return None
    memory_format, layout = CHANNELS_LAST[array.dim()]
    return layout if array.is_contiguous(memory_format=memory_format) else None


def format_of(array: torch.Tensor, name: str, dtype: str | None) -> str:
    return checked_format(FORMATS.get(array.dtype), array.dtype == torch.uint8, str(array.dtype), name, dtype)


def operand(array: torch.Tensor, name: str, order: tuple[int, ...] | None, format_name: str) -> Any:
    """A view in canonical axis order: NumPy for the CPU, the tensor itself on CUDA."""
    if array.layout is not torch.strided or array.is_neg() or array.is_conj():
        raise TypeError(f"{name} must be a plain strided tensor (no negative or conjugate view, not sparse)")
    if array.requires_grad:
        array = array.detach()
    if array.is_cuda:
        return array if order is None else array.permute(order)
    view = Memory(array, storage_dtype(format_name)).view()
    return view if order is None else view.transpose(order)


class Memory:
    """A tensor's memory for NumPy, by address: `Tensor.numpy()` would make its storage unresizable for good."""

    def __init__(self, tensor: torch.Tensor, stored: np.dtype[Any]) -> None:
        self.tensor = tensor  # views keep it alive
        self.stored = stored
        size = stored.itemsize
        self.__array_interface__ = {
            "version": 3, "data": (tensor.data_ptr(), False), "shape": tuple(tensor.shape),
            "strides": tuple([step * size for step in tensor.stride()]), "typestr": INTEGERS[size]}

    def view(self) -> np.ndarray[Any, Any]:
        return np.asarray(self).view(self.stored)


def empty(shape: tuple[int, ...], format_name: str, like: torch.Tensor) -> torch.Tensor:
    """A new result; channels last under a channels-first shape is kept, as PyTorch does."""
    memory_format = CHANNELS_LAST[like.dim()][0] if len(shape) == like.dim() and _memory_order(like) \
        else torch.contiguous_format
    return torch.empty(shape, dtype=TORCH_DTYPES[format_name], device=like.device, memory_format=memory_format)


def returned(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return result


def check_out(out: Any, shape: tuple[int, ...], format_name: str, name: str, operands: dict[str, Any]) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{name} must be a torch tensor like the operands, got {type(out).__name__}")
    if out.dtype != TORCH_DTYPES[format_name] and not (out.dtype == torch.uint8 and DTYPES[format_name][1] == 1):
        raise TypeError(f"{name} has dtype {out.dtype}, but the result is {format_name}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad: write into a tensor that does not, or call under torch.no_grad()")
    first = next(iter(operands.values()))
    if out.device != first.device:
        raise ValueError(f"{name} is on {out.device}, but the operands are on {first.device}")
    if tuple(out.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(out.shape)}, but the result has shape {shape}")
    if not out.is_contiguous() and overlaps_itself(tuple(out.shape), out.stride(), 1):
        raise ValueError(f"{name} has elements that overlap each other (strides {out.stride()}, shape "
                         f"{tuple(out.shape)})")
    for other, array in operands.items():
        if _bytes_overlap(out, array):
            raise ValueError(f"{name} overlaps {other} in memory")


def check_workspace(workspace: Any, needed: int, operands: dict[str, Any]) -> None:
    if not isinstance(workspace, torch.Tensor) or workspace.dtype != torch.uint8 or workspace.dim() != 1:
        what = f"{workspace.dtype} of shape {tuple(workspace.shape)}" if isinstance(workspace, torch.Tensor) \
            else type(workspace).__name__
        raise TypeError(f"workspace must be a 1-D uint8 torch tensor, got {what}")
    first = next(iter(operands.values()))
    if workspace.device != first.device or not workspace.is_contiguous():
        raise ValueError(f"workspace must be contiguous and on {first.device}, got {workspace.device}")
    if workspace.numel() < needed:
        raise ValueError(f"workspace has {workspace.numel()} bytes, but the plan needs {needed}")
    for name, array in operands.items():
        if _bytes_overlap(workspace, array):
            raise ValueError(f"workspace overlaps {name} in memory")


def workspace_view(workspace: torch.Tensor) -> Any:
    return workspace if workspace.is_cuda else Memory(workspace, np.dtype(np.uint8)).view()


def again(plan: Plan, operands: tuple[Any, ...], targets: tuple[Any, ...],
          results: tuple[Any, ...]) -> Again | Literal[False] | None:
    """The prepared call on CUDA for other tensors that lie alike; views are not made again."""
    if not results[0].is_cuda:
        return None
    if any(tensor.data_ptr() & 15 for tensor in (*operands, *targets)):
        return False
    device = results[0].get_device()
    prepared = plan.prepared([tensor.stride() for tensor in (*operands, *targets)], device)
    if prepared is None:
        return None
    made = [(tuple(result.shape), result.stride(), result.dtype) for result in results]
    if read_signature is not None and hasattr(prepared, "handle"):  # a call of the native module
        places = list(range(len(operands) + len(results)))
        repeat: Again = native.CudaRepeat([(prepared, places)], made, torch_functions(), torch.Tensor)
        return repeat
    workspace_bytes = prepared.workspace_bytes

    def launch(arrays: Iterable[Any]) -> Sequence[Any] | None:
        pointers = []
        together = 0
        for array in arrays:
            if array.is_neg():
                return None
            pointer = array.data_ptr()
            together |= pointer
            pointers.append(pointer)
        if together & 15 or torch._C._cuda_getDevice() != device:
            return None
        new = [empty_cuda(*one) for one in made]
        pointers += [result.data_ptr() for result in new]
        stream = torch._C._cuda_getCurrentRawStream(device)
        if not workspace_bytes:
            prepared.run(pointers, stream)
            return new
        # NOTE: memory of torch's allocator without the tensor around it: 3 microseconds less
        workspace = torch._C._cuda_cudaCachingAllocator_raw_alloc(workspace_bytes, stream)
        try:
            prepared.run(pointers, stream, workspace)
        finally:  # free for what this stream does after these launches
            torch._C._cuda_cudaCachingAllocator_raw_delete(workspace)
        return new

    return launch


def from_numpy(array: np.ndarray[Any, Any], format_name: str) -> torch.Tensor:
    """A tensor with the values of a NumPy array, on CUDA where there is one (the interpreter computes on the CPU)."""
    same_size = array.view(INTEGERS[array.dtype.itemsize])
    tensor = torch.from_numpy(same_size).view(TORCH_DTYPES[format_name])
    return tensor.to("cuda" if has_cuda() else "cpu", copy=True)  # strides of dense arrays are kept


def strided(memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], format_name: str) -> torch.Tensor:
    """Bytes as a tensor of a shape and strides in elements."""
    return memory.view(TORCH_DTYPES[format_name]).as_strided(shape, strides)


def to_numpy(tensor: torch.Tensor, format_name: str) -> np.ndarray[Any, Any]:
    """The values of a tensor as a NumPy array in the format's storage dtype."""
    return Memory(tensor.cpu(), storage_dtype(format_name)).view()


def _bytes_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors meet (strided holes count: a refusal, never a wrong result)."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    low_a, low_b = a.data_ptr(), b.data_ptr()
    high_a, high_b = low_a + _reach(a), low_b + _reach(b)
    return low_a < high_b and low_b < high_a


def _reach(array: torch.Tensor) -> int:
    last = sum((extent - 1) * step for extent, step in zip(array.shape, array.stride()))
    return (last + 1) * array.element_size()
