"""From attributes and shapes to the one convolution that they describe, or the error that says why there is none.

The six operators are three questions about two tensors and a weight: `small` is the tensor on the output side of a
convolution (dst of Convolution, src of ConvTranspose), `large` the one on its input side. Shapes are canonical here
(N C spatial, O I spatial); the operator translates from data_format and weights_format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ...problem import Conv
from .errors import InvalidArguments, InvalidShape
from .padding import Axis, Pads, engine_axis, large_extent, small_extent

if TYPE_CHECKING:
    from .operator import Operator

Shape = tuple[int, ...]


class Geometry(NamedTuple):
    """A convolution, its pads as oneDNN counts them, and the canonical shapes of the three tensors."""

    conv: Conv
    pads_begin: Shape
    pads_end: Shape
    shapes: dict[str, Shape]


def canonical_axes(layout: str, axes: int) -> tuple[int, ...]:
    """For each canonical axis its position in NXC, NCX, XIO or OIX with `axes` spatial axes."""
    spatial_at = layout.index("X")
    positions = []
    for letter in ("NC" if "N" in layout else "OI"):
        index = layout.index(letter)
        positions.append(index if index < spatial_at else index + axes - 1)
    return (*positions, *range(spatial_at, spatial_at + axes))


def to_canonical(shape: Shape, layout: str) -> Shape:
    return tuple(shape[position] for position in canonical_axes(layout, len(shape) - 2))


def from_canonical(shape: Shape, layout: str) -> Shape:
    result = [0] * len(shape)
    for extent, position in zip(shape, canonical_axes(layout, len(shape) - 2)):
        result[position] = extent
    return tuple(result)


def check_rank(name: str, shape: Shape, strides: Shape) -> None:
    if len(shape) == len(strides) + 2:
        return
    if len(shape) not in (3, 4, 5):
        raise InvalidArguments(f"{name} has shape {shape} of rank {len(shape)}: ranks 3, 4 and 5 are supported")
    raise InvalidShape(f"{name} has shape {shape} with {len(shape) - 2} spatial axes but strides={strides} has "
                       f"{len(strides)} values")


def check_result_rank(name: str, shape: Shape, strides: Shape) -> None:
    if len(shape) != len(strides) + 2:
        raise InvalidShape(f"{name}={shape} has {len(shape)} values, but with strides={strides} the result has "
                           f"{len(strides) + 2} axes")


def check_weights(name: str, weights: Shape, groups: int) -> None:
    if 0 in weights:
        raise InvalidArguments(f"{name} has no elements: its canonical shape (O, I/groups, spatial) is {weights}")
    if weights[0] % groups:
        raise InvalidArguments(f"groups={groups} does not divide the {weights[0]} channels of {name} that are split "
                               f"into groups (canonical shape {weights})")


def check_channels(operator: Operator, shapes: dict[str, Shape]) -> None:
    """Hold the channels of the tensors against the weights, and their batches against each other."""
    names, weights, groups = operator.names, shapes["weights"], operator.groups
    for role, expected, rule in (("small", weights[0], f"{weights[0]}"),
                                 ("large", weights[1] * groups, f"groups * {weights[1]} = {weights[1] * groups}")):
        if role in shapes and shapes[role][1] != expected:
            raise operator.channel_error(f"{names[role]} has {shapes[role][1]} channels but {names['weights']} of "
                                         f"canonical shape {weights} with groups={groups} asks for {rule}")
    if "small" in shapes and "large" in shapes and shapes["small"][0] != shapes["large"][0]:
        raise InvalidArguments(f"{names['small']} has batch {shapes['small'][0]} but {names['large']} has batch "
                               f"{shapes['large'][0]}")


def settle_pads(operator: Operator, shapes: dict[str, Shape]) -> tuple[list[Axis], list[Pads]]:
    """Return the axes and the pads that the attributes and auto_pad give them, whether or not the extents then fit."""
    weights = shapes["weights"]
    if operator.channel_error is InvalidShape:  # found by shape inference, before the weights are split
        check_channels(operator, shapes)
    check_weights(operator.names["weights"], weights, operator.groups)
    check_channels(operator, shapes)
    extra = getattr(operator, "output_padding", (0,) * len(operator.strides))
    axes = [Axis(*values) for values in zip(weights[2:], operator.strides, operator.dilations, extra)]
    return axes, [operator.axis_pads(index, axis, extent(shapes, "large", index), extent(shapes, "small", index))
                  for index, axis in enumerate(axes)]


def extent(shapes: dict[str, Shape], role: str, index: int) -> int | None:
    """The extent of a spatial axis; None of the tensor that is to be inferred."""
    return shapes[role][2 + index] if role in shapes else None


def solve_sizes(names: dict[str, str], shapes: dict[str, Shape], axes: list[Axis],
                pads: list[Pads]) -> dict[str, Shape]:
    """Return both spatial sizes, inferring the one that is not in `shapes`, or say why they do not fit."""
    found: dict[str, list[int]] = {"small": [], "large": []}
    for index, (axis, pair) in enumerate(zip(axes, pads)):
        large, small = extent(shapes, "large", index), extent(shapes, "small", index)
        begin, end = pair
        if large is None:
            assert small is not None
            large = inferred_large(names, index, axis, small, pair)
        law = small_extent(axis, large, pair)
        if small is None:
            small = law
            if small < 0:
                raise InvalidShape(f"{names['large']} is too small on spatial axis {index}: extent {large} + pads "
                                   f"{begin} + {end} against a kernel that spans {axis.span}")
        elif small != law and not beyond_stride(axis, large, small, pair):
            raise InvalidArguments(
                f"spatial axis {index}: {names['small']} has extent {small}, but {names['large']} of extent {large} "
                f"gives trunc(({large} - {axis.span} + {begin} + {end}) / {axis.stride}) + 1 = {law} "
                f"(kernel={axis.kernel}, dilation={axis.dilation}, stride={axis.stride}, pads=({begin}, {end}))")
        check_output_padding(names, index, axis, large, small, pair)
        found["small"].append(small)
        found["large"].append(large)
    return {role: tuple(extents) for role, extents in found.items()}


def inferred_large(names: dict[str, str], index: int, axis: Axis, small: int, pads: Pads) -> int:
    large = large_extent(axis, small, pads)
    if large < 0:
        raise InvalidShape(f"{names['large']} would have extent {large} on spatial axis {index}: {axis.stride} * "
                           f"({small} - 1) + {axis.span} - {pads[0]} - {pads[1]} + {axis.output_padding}")
    return large


def rest_of(axis: Axis, large: int, small: int, pads: Pads) -> int:
    """What the extents leave beyond the last window: the output_padding that they imply."""
    return large - (axis.stride * (small - 1) + axis.span - pads[0] - pads[1])


def beyond_stride(axis: Axis, large: int, small: int, pads: Pads) -> bool:
    """Whether output_padding is at or above the stride and explains an extent that the shape law does not."""
    return axis.output_padding >= axis.stride and axis.output_padding == rest_of(axis, large, small, pads)


def check_output_padding(names: dict[str, str], index: int, axis: Axis, large: int, small: int, pads: Pads) -> None:
    """A non-zero output_padding must be the rest that the extents leave; zero, the default, claims nothing."""
    rest = rest_of(axis, large, small, pads)
    if axis.output_padding and axis.output_padding != rest:
        raise InvalidArguments(
            f"output_padding[{index}]={axis.output_padding} contradicts the shapes: {names['large']} of extent {large} "
            f"is {axis.stride} * ({small} - 1) + {axis.span} - {pads[0]} - {pads[1]} + {rest}, so it would be {rest} "
            f"(stride={axis.stride}, kernel={axis.kernel}, dilation={axis.dilation}); oneDNN would ignore it")


def solve(operator: Operator, shapes: dict[str, Shape]) -> Geometry:
    """Return the geometry of `operator` for canonical shapes; `shapes` lacks at most the result.

    `operator` gives groups, strides, dilations, output_padding, the names of its tensors and `axis_pads`.
    """
    weights = shapes["weights"]
    axes, pads = settle_pads(operator, shapes)
    sizes = solve_sizes(operator.names, shapes, axes, pads)
    batch = (shapes["small"] if "small" in shapes else shapes["large"])[0]
    solved = list(map(engine_axis, axes, sizes["large"], sizes["small"], pads))
    for index, (reach, _) in enumerate(solved):
        if reach < 0:
            raise InvalidArguments(f"no tap reaches spatial axis {index} of {operator.names['large']}: pads "
                                   f"{pads[index]} are larger than the {axes[index].stride} * ({sizes['small'][index]} "
                                   f"- 1) + {axes[index].span} positions that they cut")
    try:
        conv = Conv(batch, weights[1] * operator.groups, weights[0], tuple(extent for extent, _ in solved),
                    weights[2:], operator.strides, operator.dilations, tuple(pair for _, pair in solved),
                    operator.groups)
    except ValueError as error:  # an extent beyond the engine's 64-bit limits
        raise InvalidArguments(str(error)) from None
    shapes = {"small": (batch, weights[0], *sizes["small"]),
              "large": (batch, weights[1] * operator.groups, *sizes["large"]), "weights": weights}
    return Geometry(conv, tuple(pair[0] for pair in pads), tuple(pair[1] for pair in pads), shapes)
