"""The checks of aclnnConvolutionBackward, in the order in which the first broken rule decides the status."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ...problem import SPATIAL_LETTERS
from .descriptors import BYTE_FORMATS, ENGINE_NAMES, FORMAT_NAMES, Descriptor, aclDataType, aclFormat, type_name
from .gradients import CubeMathType, arithmetic, promoted
from .products import MAX_GROUPS, Product
from .status import INNER_NULLPTR, INVALID, NULLPTR, Refusal, aclnnStatus

HIF8 = aclDataType.ACL_HIFLOAT8
ND, NCL, NCHW, NCDHW = (aclFormat.ACL_FORMAT_ND, aclFormat.ACL_FORMAT_NCL, aclFormat.ACL_FORMAT_NCHW,
                        aclFormat.ACL_FORMAT_NCDHW)
FORMATS_OF_RANK = {3: (ND, NCL), 4: (NCHW,), 5: (NCDHW,)}
TENSORS = ("gradOutput", "input", "weight", "gradInput", "gradWeight", "gradBias")
RESULTS = ("gradInput", "gradWeight", "gradBias")


class Call(NamedTuple):
    """All arguments of aclnnConvolutionBackwardGetWorkspaceSize that decide its answer; hashable."""

    gradOutput: Descriptor | None
    input: Descriptor | None
    weight: Descriptor | None
    biasSizes: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    padding: tuple[int, ...] | None
    dilation: tuple[int, ...] | None
    transposed: bool
    outputPadding: tuple[int, ...] | None
    groups: int
    outputMask: tuple[bool, ...] | None
    cubeMathType: int
    gradInput: Descriptor | None
    gradWeight: Descriptor | None
    gradBias: Descriptor | None
    product: Product
    strict: bool
    deterministic: bool


class Checked(NamedTuple):
    """The same arguments after the pointer check: nothing required is None any more."""

    grad_output: Descriptor
    input: Descriptor
    weight: Descriptor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    mask: tuple[bool, ...]
    call: Call

    @property
    def present(self) -> Iterator[tuple[str, Descriptor]]:
        """The tensors that were passed, also those that the mask leaves out, by argument name."""
        for name in TENSORS:
            tensor = getattr(self.call, name)
            if tensor is not None:
                yield name, tensor

    @property
    def spatial(self) -> int:
        return self.weight.rank - 2

    @property
    def conv_input(self) -> Descriptor:
        """The tensor that is the input of the convolution: gradOutput when transposed."""
        return self.grad_output if self.call.transposed else self.input

    @property
    def conv_output(self) -> Descriptor:
        return self.input if self.call.transposed else self.grad_output

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """(before, after) per axis; four values are [up, down, left, right]."""
        if self.spatial == 2 and len(self.padding) == 4:
            up, down, left, right = self.padding
            return (up, down), (left, right)
        return tuple((pad, pad) for pad in self.padding)


def invalid(message: str) -> Refusal:
    return Refusal(INVALID, message)


def inner(message: str) -> Refusal:
    return Refusal(INNER_NULLPTR, message)


def check_pointers(call: Call) -> Checked:
    """Required arguments are not None, outputMask has 3 entries, every result in the mask has a tensor."""
    for name in ("gradOutput", "input", "weight", "stride", "padding", "dilation", "outputPadding", "outputMask"):
        if getattr(call, name) is None:
            raise Refusal(NULLPTR, f"{name} is None (a null pointer)")
    mask = call.outputMask
    assert mask is not None
    if len(mask) != 3:
        raise Refusal(NULLPTR, f"outputMask must have 3 entries (gradInput, gradWeight, gradBias), got {len(mask)}")
    for asked, name in zip(mask, RESULTS):
        if asked and getattr(call, name) is None:
            raise Refusal(NULLPTR, f"{name} is None, but outputMask {mask} asks for it")
    assert call.gradOutput and call.input and call.weight  # a Descriptor is a tuple with entries: true
    assert call.stride is not None and call.padding is not None
    assert call.dilation is not None and call.outputPadding is not None
    return Checked(call.gradOutput, call.input, call.weight, call.stride, call.padding, call.dilation,
                   call.outputPadding, mask, call)


def check_dtypes(args: Checked) -> None:
    """Number formats that the product knows; on 950 each gradient has the format of its tensor."""
    call, facts = args.call, args.call.product.facts
    known = tuple(ENGINE_NAMES) if not call.strict else facts.transposed_dtypes if call.transposed else facts.dtypes
    for name, tensor in args.present:
        if tensor.dtype not in known:
            raise invalid(f"{name} is {type_name(tensor.dtype)}, but {facts.title} takes "
                          f"{', '.join(map(type_name, known))} with transposed={call.transposed}")
    if not (facts.same_output_dtypes and call.strict):
        return
    for name, like in (("gradInput", "input"), ("gradWeight", "weight"), ("gradBias", "gradOutput")):
        result, source = getattr(call, name), getattr(call, like)
        if result is None or result.dtype == source.dtype or (name == "gradWeight" and source.dtype in BYTE_FORMATS):
            continue
        raise invalid(f"{name} is {type_name(result.dtype)}, but {facts.title} wants the format of {like}, "
                      f"{type_name(source.dtype)}")


def check_8bit(args: Checked) -> None:
    """What 8-bit tensors may be combined with."""
    call = args.call
    if not call.strict:
        return
    narrow = {tensor.dtype for _, tensor in args.present if tensor.dtype in BYTE_FORMATS}
    if not narrow:
        return
    both = call.gradInput is not None and call.gradWeight is not None
    asked = args.mask[1] if call.transposed and not args.mask[0] else \
        not call.transposed and (args.mask[0] or args.mask[1])
    if both and asked:
        raise invalid("with 8-bit tensors only one of gradInput and gradWeight may be passed, both are "
                      f"(transposed={call.transposed}, outputMask {args.mask})")
    operands = [("gradOutput", args.grad_output), ("input", args.input), ("weight", args.weight)]
    bias = [("gradBias", call.gradBias)] if call.gradBias is not None else []
    if args.mask[0]:
        all_one_format([*operands, ("gradInput", call.gradInput), *bias], "gradInput")
    if args.mask[1]:
        all_one_format([*operands, *bias], "gradWeight")
        assert call.gradWeight is not None
        if args.input.dtype in BYTE_FORMATS:
            check_8bit_weight_gradient(args, call.gradWeight)


def all_one_format(tensors: list[tuple[str, Descriptor | None]], result: str) -> None:
    """If one of the tensors is 8-bit, all are, and of the same format."""
    dtypes = {name: tensor.dtype for name, tensor in tensors if tensor is not None}
    if len({*dtypes.values()}) > 1 and any(dtype in BYTE_FORMATS for dtype in dtypes.values()):
        found = ", ".join(f"{name} {type_name(dtype)}" for name, dtype in dtypes.items())
        raise invalid(f"{result} from 8-bit tensors wants one format for all of them, got {found}")


def check_8bit_weight_gradient(args: Checked, grad_weight: Descriptor) -> None:
    call = args.call
    if args.input.dtype is not HIF8:
        raise invalid(f"gradWeight cannot be computed from {type_name(args.input.dtype)}, of the 8-bit formats only "
                      "from HIFLOAT8")
    if grad_weight.dtype is not aclDataType.ACL_FLOAT:
        raise invalid(f"gradWeight of HIFLOAT8 tensors must be FLOAT, got {type_name(grad_weight.dtype)}")
    if call.groups != 1:
        raise invalid(f"gradWeight of HIFLOAT8 tensors wants groups=1, got groups={call.groups}")
    if call.transposed and any(args.output_padding):
        raise invalid(f"gradWeight of HIFLOAT8 tensors wants outputPadding of zeros, got {args.output_padding}")


def check_formats(args: Checked) -> None:
    """Rank 3, 4 or 5 with the storage format of that rank, no negative extent; gradBias is ND unless transposed."""
    for name, tensor in args.present:
        if min(tensor.shape, default=0) < 0:
            raise invalid(f"{name} of shape {tensor.shape} has a negative extent")
        if name == "gradBias":
            continue
        formats = FORMATS_OF_RANK.get(tensor.rank)
        if formats is None:
            raise invalid(f"{name} has {tensor.rank} axes (shape {tensor.shape}), but 3, 4 or 5 are possible")
        if tensor.format not in formats:
            raise invalid(f"{name} with {tensor.rank} axes has the format {FORMAT_NAMES[tensor.format]}, but must be "
                          f"{' or '.join(FORMAT_NAMES[form] for form in formats)}")
    call = args.call
    bias = call.gradBias
    if bias is not None and not call.transposed and call.product.facts.nd_bias and bias.format is not ND:
        raise invalid(f"gradBias has the format {FORMAT_NAMES[bias.format]}, but must be ND")


def check_values(args: Checked) -> None:
    """stride >= 1, padding >= 0, dilation >= 1, outputPadding in its range, groups >= 1."""
    call = args.call
    for name, values, low in (("stride", args.stride, 1), ("padding", args.padding, 0), ("dilation", args.dilation, 1)):
        if any(value < low for value in values):
            raise invalid(f"every value of {name} must be at least {low}, got {values}")
    extra = args.output_padding
    if not call.transposed and any(extra):
        raise invalid(f"outputPadding must be 0 with transposed=False, got {extra}")
    if any(value < 0 for value in extra):
        raise invalid(f"every value of outputPadding must be at least 0, got {extra}")
    if args.weight.rank == 5 and any(more >= step for more, step in zip(extra, args.stride)):
        raise invalid(f"outputPadding {extra} must be smaller than stride {args.stride} on every axis")
    if call.groups < 1:
        raise invalid(f"groups must be at least 1, got {call.groups}")


def check_cube_math_type(args: Checked) -> None:
    """cubeMathType is 0 to 3 and the product can do it with the promoted format."""
    arithmetic(args.call.cubeMathType, args.call.product, args.call.strict, args.grad_output.dtype, args.input.dtype,
               args.weight.dtype)


def takes_empty_route(args: Checked) -> bool:
    return (args.call.product.facts.empty_tensors or not args.call.strict) and (args.input.empty or args.weight.empty)


def check_lengths(args: Checked) -> None:
    """stride, dilation: one value per axis; padding, outputPadding: one per axis, or 4 in 2-D."""
    axes = args.spatial
    for name, values, four in (("stride", args.stride, False), ("padding", args.padding, True),
                               ("dilation", args.dilation, False), ("outputPadding", args.output_padding, True)):
        if len(values) != axes and not (four and axes == 2 and len(values) == 4):
            raise invalid(f"{name} must have {axes} values{' (or 4)' if four and axes == 2 else ''} for weight of "
                          f"shape {args.weight.shape}, got {values}")


def check_shapes(args: Checked) -> None:
    """Equal ranks, nothing empty that must not be, results shaped like their tensors, lengths of the attributes."""
    call = args.call
    ranks = {name: tensor.rank for name, tensor in (("gradOutput", args.grad_output), ("input", args.input),
                                                    ("weight", args.weight))}
    if len({*ranks.values()}) > 1:
        raise invalid(f"gradOutput, input and weight must have the same number of axes, got {tuple(ranks.values())}")
    for name, tensor in (("gradOutput", args.grad_output), ("weight", args.weight)):
        if tensor.empty:
            raise invalid(f"{name} of shape {tensor.shape} is empty, while the other tensors are not")
    for name, result, like, source in (("gradInput", call.gradInput, "input", args.input),
                                       ("gradWeight", call.gradWeight, "weight", args.weight)):
        if result is not None and result.shape != source.shape:
            raise invalid(f"{name} has shape {result.shape}, but {like} has {source.shape}")
    channels = args.grad_output.shape[1]
    if call.gradBias is not None and call.gradBias.shape != (channels,):
        raise invalid(f"gradBias has shape {call.gradBias.shape}, but gradOutput has {channels} channels")
    check_lengths(args)


def check_channels(args: Checked) -> None:
    """Channels of the three tensors agree, with groups and with the batch."""
    call, groups = args.call, args.call.groups
    outer, inner = ("input", "gradOutput") if call.transposed else ("gradOutput", "input")
    if args.conv_output.shape[1] != args.weight.shape[0]:
        raise invalid(f"{outer} has {args.conv_output.shape[1]} channels, but weight of shape {args.weight.shape} "
                      f"makes {args.weight.shape[0]}")
    in_channels = args.conv_input.shape[1]
    if in_channels % args.weight.shape[1]:
        raise invalid(f"{inner} has {in_channels} channels, which weight.shape[1]={args.weight.shape[1]} does not "
                      "divide")
    if in_channels // args.weight.shape[1] != groups:
        raise invalid(f"{inner} has {in_channels} channels and weight.shape[1] is {args.weight.shape[1]}: that makes "
                      f"{in_channels // args.weight.shape[1]} groups, but groups={groups}")
    if args.weight.shape[0] % groups:
        raise invalid(f"groups={groups} does not divide weight.shape[0]={args.weight.shape[0]}")
    if args.grad_output.shape[0] != args.input.shape[0]:
        raise invalid(f"gradOutput has batch {args.grad_output.shape[0]}, but input has {args.input.shape[0]}")


def check_spatial(args: Checked) -> None:
    """The extents of gradOutput and input fit the geometry."""
    large, small = ("gradOutput", "input") if args.call.transposed else ("input", "gradOutput")
    for axis, letter in enumerate(SPATIAL_LETTERS[args.spatial]):
        size, kernel = args.conv_input.shape[2 + axis], args.weight.shape[2 + axis]
        before, after = args.pads[axis]
        span = args.dilation[axis] * (kernel - 1) + 1
        numbers = (f"{letter}: {large} {size}, padding {before} and {after}, kernel {kernel}, "
                   f"dilation {args.dilation[axis]}, stride {args.stride[axis]}")
        if size + before + after < span:
            raise invalid(f"the padded {large} is smaller than the spread kernel ({size + before + after} < {span}) on "
                          f"{numbers}")
        expected = (size + before + after - span) // args.stride[axis] + 1
        if args.conv_output.shape[2 + axis] != expected:
            raise invalid(f"{small} must have the extent {expected}, got {args.conv_output.shape[2 + axis]}, on "
                          f"{numbers}")


def check_product_shapes(args: Checked) -> None:
    """What the product refuses although the shapes fit: 3-D where there is none, FLOAT gradWeight of 16-bit groups."""
    call, facts = args.call, args.call.product.facts
    if not call.strict:
        return
    if args.spatial not in facts.spatial_axes:
        raise invalid(f"{facts.title} has no {args.spatial}-D convolution, weight has shape {args.weight.shape}")
    if facts.architecture != "DAV_2201" or not args.mask[1] or call.groups == 1 or call.gradWeight is None \
            or call.gradWeight.dtype is not aclDataType.ACL_FLOAT:
        return
    through_2d = args.spatial == 2 and call.deterministic and not args.mask[0]
    common = promoted(args.grad_output.dtype, args.input.dtype, args.weight.dtype)
    fp16 = call.cubeMathType == CubeMathType.USE_FP16
    if (args.spatial == 3 or through_2d) and (common is not aclDataType.ACL_FLOAT or fp16):
        status: aclnnStatus = INNER_NULLPTR if through_2d else INVALID
        raise Refusal(status, f"gradWeight in FLOAT with groups={call.groups} cannot be computed on {facts.title} from "
                              f"{type_name(common)} operands with cubeMathType={call.cubeMathType}; pass gradWeight in "
                              "the format of the operands, or FLOAT operands with cubeMathType 0, 1 or 3")


def check_kernels(args: Checked) -> None:
    """The documented value ranges of the product, and the 8-bit kernels that do not exist."""
    call, facts = args.call, args.call.product.facts
    if not call.strict:
        return
    letters = SPATIAL_LETTERS[args.spatial]
    values: dict[str, list[tuple[int, ...]]] = {
        "weight": [(extent,) for extent in args.weight.shape[2:]], "stride": [(step,) for step in args.stride],
        "padding": list(args.pads), "dilation": [(step,) for step in args.dilation]}
    for limit in facts.limits:
        if not limit.applies(args.spatial, call.transposed):
            continue
        for letter, found in zip(letters, values[limit.argument]):
            if letter in limit.axes and not all(limit.low <= value <= limit.high for value in found):
                raise inner(f"{limit.argument} has {found[0] if len(found) == 1 else found} on {letter}, but "
                            f"{facts.title} takes [{limit.low}, {limit.high}]")
    if call.groups > MAX_GROUPS:
        raise inner(f"groups={call.groups} is more than {MAX_GROUPS}")
    if args.mask[0] and not call.transposed and args.input.dtype in BYTE_FORMATS:
        raise inner(f"gradInput of a normal convolution from {type_name(args.input.dtype)} has no kernel since "
                    "2026-01-29; strict=False computes it")
    if args.mask[2] and args.grad_output.dtype in BYTE_FORMATS:
        raise inner(f"gradBias cannot be summed in {type_name(args.grad_output.dtype)}, only in FLOAT, FLOAT16 and "
                    "BFLOAT16")


def check_empty(args: Checked) -> None:
    """The checks of the empty-tensor route, in their order."""
    call, groups = args.call, args.call.groups
    weight = args.weight.shape
    if args.input.rank != args.weight.rank:
        raise invalid(f"input and weight must have the same number of axes, got {args.input.rank} and "
                      f"{args.weight.rank}")
    if args.mask[2]:
        expected = weight[1] * groups if call.transposed else args.grad_output.shape[1]
        if call.biasSizes is None or len(call.biasSizes) != 1 or call.biasSizes[0] != expected:
            raise invalid(f"biasSizes must be [{expected}] for empty tensors when gradBias is asked for, got "
                          f"{call.biasSizes}")
    if args.mask[0] and args.input.shape[0] and args.input.shape[1]:
        raise invalid(f"input of shape {args.input.shape} may only be empty by its batch or its channels when "
                      "gradInput is asked for")
    check_lengths(args)
    if weight[0] % groups:
        raise invalid(f"groups={groups} does not divide weight.shape[0]={weight[0]}")
    channels = args.conv_input.shape[1]
    if not (call.transposed and args.input.shape[0] == 0) and (channels or weight[1]) \
            and (weight[1] == 0 or channels != weight[1] * groups):
        name = "gradOutput" if call.transposed else "input"
        raise invalid(f"{name} has {channels} channels, but weight.shape[1]*groups is {weight[1]}*{groups}")
    if call.transposed:
        if weight[0] == 0 or weight[0] != args.input.shape[1]:
            raise invalid(f"weight.shape[0]={weight[0]} must be the {args.input.shape[1]} channels of input and not 0")
        return
    for axis, (before, after) in enumerate(args.pads):
        size, span = args.input.shape[2 + axis], args.dilation[axis] * (weight[2 + axis] - 1) + 1
        if size + before + after < span:
            raise invalid(f"input with padding is smaller than the spread kernel ({size + before + after} < {span}) on "
                          f"spatial axis {axis}")


def check_empty_results(args: Checked) -> None:
    """Each result of the empty-tensor route that is written has the shape of its tensor."""
    bias = args.call.biasSizes or ()
    for asked, name, shape in zip(args.mask, RESULTS, (args.input.shape, args.weight.shape, bias)):
        result = getattr(args.call, name)
        if asked and result.shape != shape:
            raise inner(f"{name} has shape {result.shape}, but empty tensors make zeros of shape {shape}")


# After the pointers, in this order; between the last of FIRST and the first of THEN the empty-tensor route leaves.
FIRST = (check_dtypes, check_8bit, check_formats, check_values, check_cube_math_type)
THEN = (check_shapes, check_channels, check_spatial, check_product_shapes, check_kernels)
