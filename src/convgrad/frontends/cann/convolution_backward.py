"""aclnnConvolutionBackward: gradients of 1-D, 2-D and 3-D convolutions and transposed convolutions, in two phases."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ...problem import Conv
from .backward_checks import (
    FIRST,
    RESULTS,
    TENSORS,
    THEN,
    Call,
    Checked,
    check_empty,
    check_empty_results,
    check_pointers,
    takes_empty_route,
)
from .descriptors import TensorLike, as_tensor, key_of, optional_bools, optional_ints, truth, whole_number
from .execution import Engine, Recipe, aclOpExecutor, phase_two
from .gradients import Operand, Tensors, add_gradients, arithmetic
from .products import CONVOLUTION_BACKWARD, as_product
from .runtime import deterministic
from .status import INNER_NULLPTR, SUCCESS, Refusal, aclnnStatus, recent, refused

ARRAY_FORMATS = {4: "NCHW", 5: "NCDHW"}  # of arrays that come without a descriptor, by rank


def aclnnConvolutionBackwardGetWorkspaceSize(
        gradOutput: TensorLike, input: TensorLike, weight: TensorLike, biasSizes: Any, stride: Any,
        padding: Any, dilation: Any, transposed: bool, outputPadding: Any, groups: int, outputMask: Any,
        cubeMathType: int, gradInput: TensorLike, gradWeight: TensorLike, gradBias: TensorLike, *,
        product: object = None, strict: bool = True, backend: str | None = None, num_threads: int | None = None,
        max_workspace_bytes: int | None = None) -> tuple[aclnnStatus, int, aclOpExecutor | None]:
    """Check the arguments of a backward convolution and plan it (phase 1).

    Parameters
    ----------
    gradOutput, input, weight : aclTensor or array
        ND or NCL with 3 axes, NCHW with 4, NCDHW with 5; a bare array counts as such. A transposed
        convolution has weight (C of input, C of gradOutput / groups, ...). Data is not needed here.
    biasSizes : sequence of one int, or None
        Read for empty tensors only.
    stride, padding, dilation, outputPadding : sequence of int
        One value per spatial axis; padding in 2-D also as [up, down, left, right].
    transposed : bool
    groups : int
    outputMask : sequence of 3 bool
        Which of gradInput, gradWeight, gradBias to compute. A tensor passed although it is not asked for is checked
        and left as it is.
    cubeMathType : int
        0 KEEP_DTYPE, 1 ALLOW_FP32_DOWN_PRECISION, 2 USE_FP16, 3 USE_HF32.
    gradInput, gradWeight, gradBias : aclTensor, array or None
    product : Product or name, optional
        Whose rules and HF32 bits hold; the one of `set_product` unless given.
    strict : bool
        False lifts the limits of the product (formats, ranges, missing kernels); the rules of shapes stay.
    backend, num_threads, max_workspace_bytes
        As in `convgrad.plan`.

    Returns
    -------
    (status, workspaceSize, executor)
        executor is None unless status is 0; `aclGetRecentErrMsg()` says why.
    """
    given = (gradOutput, input, weight, gradInput, gradWeight, gradBias)
    chosen = as_product(product)
    try:
        tensors = tuple([as_tensor(tensor, name, ARRAY_FORMATS) for tensor, name in zip(given, TENSORS)])
        dy, x, w, dx, dw, db = [key_of(tensor) for tensor in tensors]
        call = Call(dy, x, w, optional_ints(biasSizes, "biasSizes"), optional_ints(stride, "stride"),
                    optional_ints(padding, "padding"), optional_ints(dilation, "dilation"),
                    truth(transposed, "transposed"), optional_ints(outputPadding, "outputPadding"),
                    whole_number(groups, "groups"), optional_bools(outputMask, "outputMask"),
                    whole_number(cubeMathType, "cubeMathType"), dx, dw, db, chosen, strict, deterministic())
        executor = aclOpExecutor(CONVOLUTION_BACKWARD, prepare(call), tensors,
                                 Engine(backend, num_threads, max_workspace_bytes))
    except Refusal as refusal:
        return refused(refusal), 0, None
    recent.message = ""
    return SUCCESS, executor.workspace_bytes, executor


def aclnnConvolutionBackward(workspace: Any, workspaceSize: int, executor: aclOpExecutor | None,
                             stream: Any = None) -> aclnnStatus:
    """Compute the gradients (phase 2) with a workspace of the size that phase 1 returned; the executor runs once."""
    return phase_two(CONVOLUTION_BACKWARD, workspace, workspaceSize, executor)


@lru_cache(maxsize=4096)
def prepare(call: Call) -> Recipe:
    """Check a call and say what to compute; a call that was checked before is only looked up."""
    args = check_pointers(call)
    for check in FIRST:
        check(args)
    recipe = Recipe(TENSORS)
    if takes_empty_route(args):
        check_empty(args)
        check_empty_results(args)
        recipe.zeros = [TENSORS.index(name) for asked, name in zip(args.mask, RESULTS) if asked]
        return recipe.finish()
    for check in THEN:
        check(args)
    if any(args.mask):
        add_problems(recipe, args)
    return recipe.finish()


def add_problems(recipe: Recipe, args: Checked) -> None:
    call = args.call

    def operand(name: str) -> Operand:
        return Operand(TENSORS.index(name), getattr(call, name))

    def result(which: int) -> Operand | None:
        return operand(RESULTS[which]) if args.mask[which] else None

    number = arithmetic(call.cubeMathType, call.product, call.strict, args.grad_output.dtype, args.input.dtype,
                        args.weight.dtype)
    try:
        batch, in_channels, *in_size = args.conv_input.shape
        conv = Conv(batch, in_channels, args.conv_output.shape[1], tuple(in_size), args.weight.shape[2:], args.stride,
                    args.dilation, args.pads, call.groups)
    except ValueError as error:
        raise Refusal(INNER_NULLPTR, str(error)) from error
    tensors = Tensors(operand("gradOutput"), operand("input"), operand("weight"), result(0), result(1), result(2))
    add_gradients(recipe, conv, tensors, number, call.transposed)
