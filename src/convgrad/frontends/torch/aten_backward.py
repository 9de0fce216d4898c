"""aten::convolution_backward by our plans: what a call's arguments ask for, who serves it, and the prepared call.

`install` registers a kernel that asks `prepared` once for every signature; see native/bindings_torch.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ... import api
from ...call import DEFAULTS, geometry_of, transposed_geometry
from ...plan import plan
from ...problem import Conv, Plan, Problem, Unsupported
from .tensors import CHANNELS_LAST, FORMATS, empty_cpu, native, threads

SERVED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
DY, X, W, DX, DW, DB, ABSENT = 0, 1, 2, 3, 4, 5, -1  # places of tensors in a prepared call
Handler = Callable[..., Any]


class BackwardCall(NamedTuple):
    """The arguments of aten::convolution_backward."""

    grad_output: torch.Tensor
    input: torch.Tensor
    weight: torch.Tensor
    bias_sizes: Sequence[int] | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int
    output_mask: Sequence[bool]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self[:3]

    def text(self) -> str:
        """One line for reports, for any arguments."""
        dtypes = "/".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors))
        shapes = " ".join(f"{name}{list(tensor.shape)}" for name, tensor in zip(("dy", "x", "w"), self.tensors))
        return (f"{dtypes} {shapes} stride {list(self.stride)} padding {list(self.padding)} dilation "
                f"{list(self.dilation)} groups {self.groups}{' transposed' if self.transposed else ''}")


class Question(NamedTuple):
    """A call as problems of ours: one for all gradients where that can be said, and the geometry behind it."""

    geometry: Conv
    dtype: str
    device: str
    layout: str
    weight_layout: str
    transposed: bool
    mask: tuple[bool, bool, bool]
    compute: str = ""

    def problem(self, wrt: str) -> Problem:
        return Problem(self.geometry, wrt, self.dtype, compute=self.compute, layout=self.layout,
                       weight_layout=self.weight_layout, device=self.device)

    def bias_problem(self) -> Problem:
        """The sums of dy. For a transposed convolution dy has the place of the input."""
        if not self.transposed:
            return self.problem("bias")
        c = self.geometry
        sums = Conv(c.batch, 1, c.in_channels, c.in_size, (1,) * c.axes)
        return Problem(sums, "bias", self.dtype, layout=self.layout, device=self.device)

    def __str__(self) -> str:
        asked = "+".join(name for name, wanted in zip(("input", "weight", "bias"), self.mask) if wanted)
        what, _, rest = str(self.problem("input")).partition(" ")
        assert what
        return f"{asked or 'nothing'} {rest}{' transposed' if self.transposed else ''}"


    def halves(self) -> list[Question]:
        """The gradients that torch and we compute apart from each other: of the input; of weight and bias."""
        dx, dw, db = self.mask
        masks = [(dx, False, False), (False, dw, db)]
        return [self._replace(mask=mask) for mask in masks if any(mask)]


class Part(NamedTuple):
    """A plan of a prepared call, and which tensor it takes as its input, weight, output and bias gradient."""

    plan: Plan
    x: int = ABSENT
    w: int = ABSENT
    y: int = ABSENT
    db: int = ABSENT


def question(call: BackwardCall) -> Question:
    """Say a call in our words; raises Unsupported with the reason where torch has to serve it."""
    dy, x, w = call.tensors
    for tensor in call.tensors:
        if tensor.dtype not in SERVED_DTYPES:
            raise Unsupported(f"{str(tensor.dtype).removeprefix('torch.')} is no number format of ours")
        if tensor.dtype != x.dtype:
            raise Unsupported("operands of several number formats")
        if tensor.layout is not torch.strided:
            raise Unsupported(f"a tensor of layout {tensor.layout}")
        if tensor.device != x.device:
            raise Unsupported("tensors on several devices")
        if tensor.numel() == 0:
            raise Unsupported("an empty tensor")
        if tensor.is_neg() or tensor.is_conj():
            raise Unsupported("a negative or conjugate view")
    if x.dim() not in (3, 4, 5):
        raise Unsupported(f"{x.dim()} axes")
    arguments = (call.stride, call.padding, call.dilation, call.groups)
    try:
        if call.transposed:
            arrays = {"grad_output": x, "input": dy, "weight": w}
            geometry = transposed_geometry(arrays, DEFAULTS, *arguments, call.output_padding)
        else:
            geometry = geometry_of({"grad_output": dy, "input": x, "weight": w}, DEFAULTS, *arguments)
    except (ValueError, TypeError) as error:
        raise Unsupported(f"not a convolution that we know: {error}") from None
    dx_wanted, dw_wanted, db_wanted = call.output_mask
    activations = weights = result_format(call)
    if not x.is_cuda:  # a hint: plans run on any strides, but those of other formats take longer
        activations, weights = dense_format(dy) or activations, dense_format(w) or weights
    last, word = CHANNELS_LAST.get(x.dim(), (None, ""))
    return Question(geometry, FORMATS[x.dtype], x.device.type, word if activations == last else "",
                    f"O{word[1:-1]}I" if weights == last else "",
                    bool(call.transposed), (bool(dx_wanted), bool(dw_wanted), bool(db_wanted)))


def result_format(call: BackwardCall) -> torch.memory_format:
    """The memory format in which torch's own kernel would return the gradients of input and weight."""
    if call.input.is_meta:
        return expected_format(call)
    backend = torch._C._select_conv_backend(
        call.input, call.weight, bias=None, bias_sizes=call.bias_sizes, stride=call.stride, padding=call.padding,
        dilation=call.dilation, transposed=call.transposed, output_padding=call.output_padding, groups=call.groups)
    x, w = call.input, call.weight
    if x.dim() == 3:  # torch computes it as a row of an image
        x, w = x.contiguous().unsqueeze(2), w.unsqueeze(2)
    return torch._C._conv_determine_backend_memory_format(x, w, backend)


def expected_format(call: BackwardCall) -> torch.memory_format:
    """The same for tensors without memory that stand for CUDA tensors: channels last if input or weight is."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(call.input.dim())
    for tensor in (call.input, call.weight) if last is not None else ():
        if tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous():
            return last
    return torch.contiguous_format


def dense_format(tensor: torch.Tensor) -> torch.memory_format | None:
    """Channels first or last, whichever a tensor lies in without gaps; None: neither, or both."""
    first = tensor.is_contiguous()
    last = tensor.dim() in CHANNELS_LAST and tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()][0])
    if first == last:
        return None
    return torch.contiguous_format if first else CHANNELS_LAST[tensor.dim()][0]


def in_one_format(call: BackwardCall) -> BackwardCall:
    """The call with dy in the memory format of x where both are dense and differ, else itself: plans count on it."""
    wanted, found = dense_format(call.input), dense_format(call.grad_output)
    if not call.output_mask[1] or wanted is None or found is None or wanted == found:
        return call
    return call._replace(grad_output=call.grad_output.contiguous(memory_format=wanted))


def result_strides(shape: torch.Size, memory_format: torch.memory_format) -> tuple[int, ...]:
    like = torch.empty(shape if len(shape) > 3 else (*shape[:2], 1, shape[2]), device="meta",
                       memory_format=memory_format)
    strides: tuple[int, ...] = (like if len(shape) > 3 else like.squeeze(2)).stride()
    return strides


def parts_of(asked: Question) -> list[Part]:
    """The plans that compute what a call asks for, each result once."""
    def planned(problem: Problem) -> Plan:
        return plan(problem, num_threads=threads())

    dx, dw, db = asked.mask
    if asked.device == "cuda" and not asked.transposed:  # one plan compiles and launches all of them together
        wrt = "+".join(name for name, wanted in zip(("input", "weight", "bias"), asked.mask) if wanted)
        return [Part(planned(asked.problem(wrt)))] if wrt else []
    parts = []
    if asked.transposed:  # dx is a convolution of dy; dw exchanges x and dy
        if dx: parts.append(Part(planned(asked.problem("output")), x=DY, w=W, y=DX))
        if dw: parts.append(Part(planned(asked.problem("weight")), x=DY, w=DW, y=X))
        if db: parts.append(Part(planned(asked.bias_problem()), y=DY, db=DB))
        return parts
    if dx: parts.append(Part(planned(asked.problem("input")), x=DX, w=W, y=DY))
    if dw and db:
        together = planned(asked.problem("weight+bias"))
        if together.backend == "native" and hasattr(together.run, "__self__"):  # in one pass
            return [*parts, Part(together, x=X, w=DW, y=DY, db=DB)]
    if dw: parts.append(Part(planned(asked.problem("weight")), x=X, w=DW, y=DY))
    if db: parts.append(Part(planned(asked.bias_problem()), y=DY, db=DB))
    return parts


def prepared_on_cpu(call: BackwardCall, parts: list[Part], memory_format: torch.memory_format) -> Any:
    """The call as the native core runs it, without Python between the operands and the results."""
    shapes = (call.input.shape, call.weight.shape, call.grad_output.shape[1:2])
    made = tuple(
        (tuple(shape), result_strides(shape, memory_format) if len(shape) > 1 else (1,), call.input.dtype)
        if wanted else None for shape, wanted in zip(shapes, call.output_mask))
    steps = [(part.plan.run.__self__, part.x, part.w, part.y, part.db) for part in parts]  # type: ignore[attr-defined]
    return native.PreparedBackward(steps, empty_cpu, made)


def compute_on_cuda(call: BackwardCall) -> str:
    """The compute mode that torch would use now."""
    return "tf32" if call.input.dtype == torch.float32 and torch._C._get_cudnn_allow_tf32() else ""


def through_api(keys: Any, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """The call by the public functions: tensors on CUDA, and backends that are not the native one."""
    call = BackwardCall(*arguments)
    memory_format = result_format(call)
    dy = call.grad_output.contiguous(memory_format=memory_format) if call.input.dim() > 3 else call.grad_output
    backward = api.conv_transpose_backward if call.transposed else api.conv_backward
    extra: dict[str, Any] = {"output_padding": tuple(call.output_padding)} if call.transposed else {}
    extra["compute"] = compute_on_cuda(call) if call.input.is_cuda else ""
    return tuple(backward(dy, call.input, call.weight, stride=tuple(call.stride), padding=tuple(call.padding),
                          dilation=tuple(call.dilation), groups=call.groups, output_mask=tuple(call.output_mask),
                          **extra))
