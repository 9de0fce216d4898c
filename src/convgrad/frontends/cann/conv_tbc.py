"""aclnnConvTbcBackward: all three gradients of a 1-D convolution on (time, batch, channel) tensors, in two phases."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ...problem import Conv
from .descriptors import (
    ENGINE_NAMES,
    FORMAT_NAMES,
    Descriptor,
    TensorLike,
    aclFormat,
    as_tensor,
    key_of,
    type_name,
    whole_number,
)
from .execution import Engine, Recipe, aclOpExecutor, phase_two
from .gradients import Layouts, Operand, Tensors, add_bias_sum, add_gradients, arithmetic
from .products import CONV_TBC_BACKWARD, TBC_MAX_PAD, Product, as_product
from .status import INNER_NULLPTR, INVALID, NULLPTR, SUCCESS, Refusal, aclnnStatus, recent, refused

ND, NCL = aclFormat.ACL_FORMAT_ND, aclFormat.ACL_FORMAT_NCL
TENSORS = ("self", "input", "weight", "bias", "gradInput", "gradWeight", "gradBias")
# Places of (time, batch, channel) and of (tap, in, out) in the canonical orders (N, C, L) and (O, I, L).
TBC_ORDER, WEIGHT_ORDER = (1, 2, 0), (2, 1, 0)
TBC_LAYOUTS = Layouts("TBC", "LIO")


class Call(NamedTuple):
    """All arguments of aclnnConvTbcBackwardGetWorkspaceSize that decide its answer; hashable."""

    tensors: tuple[Descriptor | None, ...]
    pad: int
    cube_math_type: int
    product: Product
    strict: bool


class Checked(NamedTuple):
    grad_output: Descriptor
    input: Descriptor
    weight: Descriptor
    bias: Descriptor
    grad_input: Descriptor
    grad_weight: Descriptor
    grad_bias: Descriptor
    call: Call

    @property
    def named(self) -> list[tuple[str, Descriptor]]:
        """The tensors by argument name."""
        return list(zip(TENSORS, (self.grad_output, self.input, self.weight, self.bias, self.grad_input,
                                  self.grad_weight, self.grad_bias)))


def aclnnConvTbcBackwardGetWorkspaceSize(
        self: TensorLike, input: TensorLike, weight: TensorLike, bias: TensorLike, pad: int, cubeMathType: int,
        gradInput: TensorLike, gradWeight: TensorLike, gradBias: TensorLike, *,
        product: object = None, strict: bool = True, backend: str | None = None, num_threads: int | None = None,
        max_workspace_bytes: int | None = None) -> tuple[aclnnStatus, int, aclOpExecutor | None]:
    """Check the arguments of a TBC backward convolution and plan it (phase 1). Stride, dilation and groups are 1.

    Parameters
    ----------
    self : aclTensor or array (T_in + 2*pad + 1 - K, B, C_out)
        The gradient of the output.
    input : aclTensor (T_in, B, C_in)
    weight : aclTensor (K, C_in, C_out)
    bias : aclTensor (C_out,)
        Only its descriptor is read.
    pad : int
        Zeros before and after the time axis.
    cubeMathType : int
        0 KEEP_DTYPE, 1 ALLOW_FP32_DOWN_PRECISION, 2 USE_FP16, 3 USE_HF32.
    gradInput, gradWeight, gradBias : aclTensor
        Shaped like input, weight and bias; all three are always computed.
    product, strict, backend, num_threads, max_workspace_bytes
        As in `aclnnConvolutionBackwardGetWorkspaceSize`.

    Returns
    -------
    (status, workspaceSize, executor)
        executor is None unless status is 0; `aclGetRecentErrMsg()` says why.
    """
    given = (self, input, weight, bias, gradInput, gradWeight, gradBias)
    chosen = as_product(product)
    try:
        tensors = tuple([as_tensor(tensor, name, {}) for tensor, name in zip(given, TENSORS)])
        call = Call(tuple([key_of(tensor) for tensor in tensors]), whole_number(pad, "pad"),
                    whole_number(cubeMathType, "cubeMathType"), chosen, strict)
        executor = aclOpExecutor(CONV_TBC_BACKWARD, prepare(call), tensors,
                                 Engine(backend, num_threads, max_workspace_bytes), failure=NULLPTR)
    except Refusal as refusal:
        return refused(refusal), 0, None
    recent.message = ""
    return SUCCESS, executor.workspace_bytes, executor


def aclnnConvTbcBackward(workspace: Any, workspaceSize: int, executor: aclOpExecutor | None,
                         stream: Any = None) -> aclnnStatus:
    """Compute the gradients (phase 2) with a workspace of the size that phase 1 returned; the executor runs once."""
    return phase_two(CONV_TBC_BACKWARD, workspace, workspaceSize, executor)


def invalid(message: str) -> Refusal:
    return Refusal(INVALID, message)


def check_pointers(call: Call) -> Checked:
    """No tensor is None."""
    for name, tensor in zip(TENSORS, call.tensors):
        if tensor is None:
            raise Refusal(NULLPTR, f"{name} is None (a null pointer)")
    present = [tensor for tensor in call.tensors if tensor is not None]
    grad_output, x, weight, bias, grad_input, grad_weight, grad_bias = present
    return Checked(grad_output, x, weight, bias, grad_input, grad_weight, grad_bias, call)


def check_dtypes(args: Checked) -> None:
    """Number formats that the product knows; 8-bit formats nowhere."""
    facts = args.call.product.facts
    for name, tensor in args.named:
        known = tuple(ENGINE_NAMES) if not args.call.strict else \
            facts.tbc_bias_dtypes if name == "bias" else facts.tbc_dtypes
        if not known:
            raise invalid(f"{facts.title} has no aclnnConvTbcBackward")
        if tensor.dtype not in known:
            raise invalid(f"{name} is {type_name(tensor.dtype)}, but {facts.title} takes "
                          f"{', '.join(map(type_name, known))}")


def check_formats(args: Checked) -> None:
    """ND or NCL; bias and gradBias ND."""
    for name, tensor in args.named:
        formats = (ND,) if name in ("bias", "gradBias") else (ND, NCL)
        if tensor.format not in formats:
            raise invalid(f"{name} has the format {FORMAT_NAMES[tensor.format]}, but must be "
                          f"{' or '.join(FORMAT_NAMES[form] for form in formats)}")


def check_not_empty(args: Checked) -> None:
    """self has elements."""
    if args.grad_output.empty:
        raise invalid(f"self of shape {args.grad_output.shape} is empty")


def check_shapes(args: Checked) -> None:
    """Ranks, no negative extent, channels, pad >= 0, the extents of self, results shaped like their tensors."""
    for name, tensor in args.named:
        rank = 1 if name in ("bias", "gradBias") else 3
        if tensor.rank != rank:
            raise invalid(f"{name} must have {rank} axes, got shape {tensor.shape}")
        if min(tensor.shape) < 0:
            raise invalid(f"{name} of shape {tensor.shape} has a negative extent")
    time, batch, in_channels = args.input.shape
    taps, weight_in, out_channels = args.weight.shape
    pad = args.call.pad
    if in_channels != weight_in:
        raise invalid(f"input.shape[2]={in_channels} must be weight.shape[1]={weight_in}")
    if args.bias.shape[0] != out_channels:
        raise invalid(f"bias.shape[0]={args.bias.shape[0]} must be weight.shape[2]={out_channels}")
    if pad < 0:
        raise invalid(f"pad must be at least 0, got {pad}")
    out_time = time + 2 * pad + 1 - taps
    if out_time < 0:
        raise invalid(f"the output would have the negative length {out_time} = {time} + 2*{pad} + 1 - {taps}")
    if args.grad_output.shape != (out_time, batch, out_channels):
        raise invalid(f"self has shape {args.grad_output.shape}, but input {args.input.shape}, weight "
                      f"{args.weight.shape} and pad={pad} make {(out_time, batch, out_channels)}")
    for name, result, like, source in (("gradInput", args.grad_input, "input", args.input),
                                       ("gradWeight", args.grad_weight, "weight", args.weight),
                                       ("gradBias", args.grad_bias, "bias", args.bias)):
        if result.shape != source.shape:
            raise invalid(f"{name} has shape {result.shape}, but {like} has {source.shape}")


def check_cube_math_type(args: Checked) -> None:
    """cubeMathType is 0 to 3 and the product can do it with the promoted format."""
    call = args.call
    arithmetic(call.cube_math_type, call.product, call.strict, args.grad_output.dtype, args.input.dtype,
               args.weight.dtype)


def check_pad(args: Checked) -> None:
    """pad is at most 255, on every product."""
    if args.call.strict and args.call.pad > TBC_MAX_PAD:
        raise invalid(f"pad={args.call.pad} is more than {TBC_MAX_PAD}")


def check_result_dtypes(args: Checked) -> None:
    """Each gradient has the number format of its tensor."""
    facts = args.call.product.facts
    if not args.call.strict:
        return
    for name, result, like, source in (("gradInput", args.grad_input, "input", args.input),
                                       ("gradWeight", args.grad_weight, "weight", args.weight),
                                       ("gradBias", args.grad_bias, "bias", args.bias)):
        if result.dtype is not source.dtype:
            raise Refusal(INVALID if facts.same_output_dtypes else INNER_NULLPTR,
                          f"{name} is {type_name(result.dtype)}, but must have the format of {like}, "
                          f"{type_name(source.dtype)}")


def check_kernels(args: Checked) -> None:
    """The number of taps that the product has a kernel for."""
    taps, facts = args.weight.shape[0], args.call.product.facts
    if args.call.strict and facts.tbc_max_taps and taps > facts.tbc_max_taps:
        raise Refusal(INNER_NULLPTR, f"weight.shape[0]={taps}, but {facts.title} takes [1, {facts.tbc_max_taps}]")


CHECKS = (check_dtypes, check_formats, check_not_empty, check_shapes, check_cube_math_type, check_pad,
          check_result_dtypes)


@lru_cache(maxsize=4096)
def prepare(call: Call) -> Recipe:
    """Check a call and say what to compute; a call that was checked before is only looked up."""
    args = check_pointers(call)
    for check in CHECKS:
        check(args)
    recipe = Recipe(TENSORS)
    grad_output = Operand(0, args.grad_output, TBC_ORDER)
    grad_bias = Operand(6, args.grad_bias)
    if args.input.empty or args.weight.empty or args.bias.empty:
        # NOTE: the vendor writes the constant B*T into gradBias here; the true sum is written instead (a deviation).
        recipe.zeros = [4, 5]
        add_bias_sum(recipe, grad_output, grad_bias, TBC_LAYOUTS.activations)
        return recipe.finish()
    check_kernels(args)
    time, batch, in_channels = args.input.shape
    taps, _, out_channels = args.weight.shape
    try:
        conv = Conv(batch, in_channels, out_channels, (time,), (taps,), padding=((call.pad, call.pad),))
    except ValueError as error:
        raise Refusal(NULLPTR, str(error)) from error
    number = arithmetic(call.cube_math_type, call.product, call.strict, args.grad_output.dtype, args.input.dtype,
                        args.weight.dtype)
    add_gradients(recipe, conv, Tensors(
        grad_output, Operand(1, args.input, TBC_ORDER), Operand(2, args.weight, WEIGHT_ORDER),
        Operand(4, args.grad_input, TBC_ORDER), Operand(5, args.grad_weight, WEIGHT_ORDER), grad_bias),
        number, layouts=TBC_LAYOUTS)
    return recipe.finish()
