"""The dtype steps: what the operands are promoted to, how cubeMathType rounds them, what each result becomes."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ...problem import Conv, Problem
from .descriptors import ENGINE_NAMES, Descriptor, aclDataType, type_name
from .execution import Recipe, Task, View
from .products import Product
from .status import INVALID, Refusal


class CubeMathType(IntEnum):
    """How FLOAT operands may be rounded before they are multiplied."""

    KEEP_DTYPE = 0
    ALLOW_FP32_DOWN_PRECISION = 1
    USE_FP16 = 2
    USE_HF32 = 3


HF32_MODES = {11: "hf32", 10: "hf32_10"}
WIDE = ("float32", "float64")  # formats that sums are kept in: rounding from them is the one rounding


class Arithmetic(NamedTuple):
    """The formats of one call, by convgrad names."""

    operands: str  # all three operands are converted to this
    compute: str  # and rounded so before a product
    grad_input: str  # gradInput is produced in this, then converted to its own format


def promoted(*dtypes: aclDataType) -> aclDataType:
    """One format for several operands: the common one, else DOUBLE if there is one, else FLOAT."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return aclDataType.ACL_DOUBLE if aclDataType.ACL_DOUBLE in dtypes else aclDataType.ACL_FLOAT


def arithmetic(cube_math_type: int, product: Product, strict: bool, *dtypes: aclDataType) -> Arithmetic:
    """What cubeMathType means for operands of these formats on this product; refuses what the product cannot do."""
    if cube_math_type not in CubeMathType.__members__.values():
        raise Refusal(INVALID, f"cubeMathType={cube_math_type} is none of 0 KEEP_DTYPE, 1 ALLOW_FP32_DOWN_PRECISION, "
                               "2 USE_FP16, 3 USE_HF32")
    mode = CubeMathType(cube_math_type)
    common = promoted(*dtypes)
    name = ENGINE_NAMES[common]
    facts = product.facts
    if mode is CubeMathType.USE_FP16 and common in (aclDataType.ACL_FLOAT, aclDataType.ACL_BF16):
        return Arithmetic(name, "f16", "float16")
    if common is not aclDataType.ACL_FLOAT:
        return Arithmetic(name, "", name)
    if mode is CubeMathType.ALLOW_FP32_DOWN_PRECISION and not facts.multiplies_float:
        return Arithmetic(name, "f16", "float16")
    if not facts.multiplies_float and strict:
        raise Refusal(INVALID, f"cubeMathType={mode.value} {mode.name} does not go with {type_name(common)} operands "
                               f"on {facts.title}: it computes FLOAT in FLOAT16 only (cubeMathType 1 or 2)")
    if mode is CubeMathType.KEEP_DTYPE:
        return Arithmetic(name, "f32", name)
    return Arithmetic(name, HF32_MODES[facts.hf32_bits or 11], name)


class Operand(NamedTuple):
    """A tensor of the call: its place, its shape in canonical axis order, its format, how to transpose it there."""

    place: int
    tensor: Descriptor
    order: tuple[int, ...] | None = None

    @property
    def dtype(self) -> str:
        return ENGINE_NAMES[self.tensor.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """Canonical shape."""
        return self.tensor.shape if self.order is None else tuple(self.tensor.shape[axis] for axis in self.order)


class Tensors(NamedTuple):
    """The operands of a backward call and the results that are asked for."""

    grad_output: Operand
    input: Operand
    weight: Operand
    grad_input: Operand | None
    grad_weight: Operand | None
    grad_bias: Operand | None


class Layouts(NamedTuple):
    activations: str = ""
    weights: str = ""


NATURAL = Layouts()


def add_gradients(recipe: Recipe, conv: Conv, tensors: Tensors, number: Arithmetic, transposed: bool = False,
                  layouts: Layouts = NATURAL) -> None:
    """Add to the recipe the Problems whose solutions are the gradients that `tensors` asks for.

    For a transposed convolution `conv` is the convolution that it reverses: its input is gradOutput.
    """
    grad_output, x, weight = tensors.grad_output, tensors.input, tensors.weight
    asked = [(name, result) for name, result in (("input", tensors.grad_input), ("weight", tensors.grad_weight),
                                                 ("bias", tensors.grad_bias)) if result is not None]
    produced = {"input": number.grad_input, "weight": "float64" if number.operands == "float64" else "float32",
                "bias": grad_output.dtype}
    outputs = {name: result_format(result.dtype, produced[name]) for name, result in asked}
    in_one_pass = not transposed and len(asked) > 1 and len({*outputs.values()}) == 1 and \
        all(operand.dtype == number.operands for operand in (grad_output, x, weight))
    problem = Problem(conv, dtype=number.operands, compute=number.compute, layout=layouts.activations,
                      weight_layout=layouts.weights)
    roles = {"grad_output": x, "input": grad_output, "weight": weight} if transposed else \
        {"grad_output": grad_output, "input": x, "weight": weight}
    if in_one_pass:
        one = problem.with_(wrt="+".join(name for name, _ in asked), out_dtype=next(iter(outputs.values())))
        add_task(recipe, one, roles, [result for _, result in asked])
        return
    for name, result in asked:
        if name == "bias":
            add_bias_sum(recipe, grad_output, result, layouts.activations)
        else:
            wrt = "output" if transposed and name == "input" else name
            add_task(recipe, problem.with_(wrt=wrt, out_dtype=outputs[name]), roles, [result])


def add_bias_sum(recipe: Recipe, grad_output: Operand, result: Operand, layout: str = "") -> None:
    """Add the sum of gradOutput over all axes but its channels, as it is: neither promoted nor rounded before."""
    n, c, *size = grad_output.shape
    any_conv = Conv(n, c, c, tuple(size), (1,) * len(size))  # its output has the shape of gradOutput
    out_dtype = result_format(result.dtype, grad_output.dtype)
    add_task(recipe, Problem(any_conv, "bias", grad_output.dtype, out_dtype, layout=layout),
             {"grad_output": grad_output}, [result])


def result_format(wanted: str, produced: str) -> str:
    """The format a Problem writes: the wanted one if the result may be rounded to it once, else the produced one."""
    return wanted if produced in WIDE else produced


def add_task(recipe: Recipe, problem: Problem, roles: dict[str, Operand], results: list[Operand]) -> None:
    """Add one Problem, with conversions of operands and results where formats differ."""
    operands = []
    for name in problem.operands:
        operand = roles[name]
        place = recipe.converted(operand.place, operand.tensor.shape, operand.dtype, problem.dtype)
        operands.append(View(place, operand.order))
    targets = []
    for result in results:
        place = recipe.produced(result.place, result.tensor.shape, result.dtype, problem.out_dtype)
        targets.append(View(place, result.order))
    recipe.tasks.append(Task(problem, tuple(operands), tuple(targets)))
