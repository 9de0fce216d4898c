"""The names of the Ascend C page: positions, formats, number formats and ConvType."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from ...problem import checked_int

DType = np.dtype[Any]

half: DType = np.dtype(np.float16)
bfloat16_t: DType = np.dtype(ml_dtypes.bfloat16)
float32: DType = np.dtype(np.float32)
int32_t: DType = np.dtype(np.int32)

# What the page documents, and what this model adds when asked to (`allow_undocumented=True`).
DOCUMENTED_TYPES = (half, bfloat16_t)
UNDOCUMENTED_TYPES = (float32,)


class TPosition(IntEnum):
    """Logical place of a tensor. The convolution objects take GM (global memory) only."""

    GM = 0
    A1 = 1
    A2 = 2
    B1 = 3
    B2 = 4
    CO1 = 7
    CO2 = 8


class ConvFormat(IntEnum):
    """Data formats, in the order of the original enumeration."""

    ND = 0
    NCHW = 1
    NHWC = 2
    HWCN = 3
    DHWNC = 4
    DHWCN = 5
    NDHWC = 6
    NCDHW = 7
    NC1HWC0 = 8
    NDC1HWC0 = 9
    FRACTAL_Z_3D = 10
    MAX = 11


class ConvDtype(IntEnum):
    """Number formats of the host side, in the order of the original enumeration."""

    FLOAT16 = 0
    FLOAT32 = 1
    BF16 = 2
    INT4 = 3
    INT8 = 4
    UINT8 = 5
    INT32 = 6
    INT64 = 7
    UINT64 = 8


class IterateOrder(IntEnum):
    """Which block index runs fastest inside a piece."""

    ORDER_M = 0  # N fastest: the dY rows stay, the weights stream
    ORDER_N = 1  # M fastest: the weights stay, dY streams; the only value that GetTiling produces


class B2Condition(IntEnum):
    """How a slice of K lies against the kernel window; the model follows the general case, correct for all."""

    BASEK_LT_HKWK = 0
    BASEK_GE_HKWK = 1
    HKWK_EQ_ONE = 2


KERNEL_TYPE = {ConvDtype.FLOAT16: half, ConvDtype.BF16: bfloat16_t, ConvDtype.FLOAT32: float32}
HOST_TYPE = {kernel: host for host, kernel in KERNEL_TYPE.items()}


def whole_numbers(method: str, **arguments: int) -> tuple[int, ...]:
    """Return the arguments of a call as ints, or raise an error that names the one that is none."""
    return tuple(checked_int(value, f"{method}: {name}", -2**63) for name, value in arguments.items())


EnumT = TypeVar("EnumT", bound=IntEnum)


def member(kind: type[EnumT], value: Any, what: str) -> EnumT:
    """Return a member of an enumeration, given as itself or by its number; another enumeration's is an error."""
    if isinstance(value, kind) or type(value) is int:
        return kind(value)
    raise TypeError(f"{what} must be a {kind.__name__}, got {value!r}")


TYPE_NAMES = {half: "half", bfloat16_t: "bfloat16_t", float32: "float", int32_t: "int32_t"}
SPELLINGS = ({name: dtype for dtype, name in TYPE_NAMES.items()} | {"INT32": int32_t}
             | {host.name: dtype for host, dtype in KERNEL_TYPE.items()})


def type_name(dtype: DType) -> str:
    """Return the C++ name of a number format."""
    return TYPE_NAMES.get(np.dtype(dtype), str(np.dtype(dtype)))


def kernel_type(spelling: Any) -> DType:
    """Return the number format that a NumPy type, a C++ name or a member of ConvDtype means."""
    name = spelling.name if isinstance(spelling, ConvDtype) else spelling
    if isinstance(name, str) and name in SPELLINGS:
        return SPELLINGS[name]
    try:
        return np.dtype(name)
    except TypeError:
        raise TypeError(f"dtype must be half, bfloat16_t, float32 or int32_t, got {spelling!r}") from None


@dataclass(frozen=True)
class ConvType:
    """Position, format and number format of one tensor: `ConvType<POSITION, FORMAT, T>` of the page.

    `ConvType(TPosition.GM, ConvFormat.NDC1HWC0, half)` and `ConvType[TPosition.GM, ConvFormat.NDC1HWC0, half]`
    are the same. The number format may be any NumPy spelling of it, its C++ name or its name on the host side.
    """

    pos: TPosition
    format: ConvFormat
    dtype: DType

    def __post_init__(self) -> None:
        for name, kind in (("pos", TPosition), ("format", ConvFormat)):
            object.__setattr__(self, name, member(kind, getattr(self, name), f"ConvType {name}"))
        object.__setattr__(self, "dtype", kernel_type(self.dtype))

    @property
    def Type(self) -> DType:
        """The number format under the name of its member in C++."""
        return self.dtype

    def __class_getitem__(cls, arguments: tuple[TPosition, ConvFormat, DType]) -> ConvType:
        return cls(*arguments)

    def __str__(self) -> str:
        return f"ConvType<{self.pos.name}, {self.format.name}, {type_name(self.dtype)}>"
