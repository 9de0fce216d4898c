"""TConv3DBackpropInputTiling: the 66 numbers that the host hands to the kernel, their bytes and their rules."""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from ...blocked import BLOCK_OUT
from .conv_types import ConvFormat, DType
from .platform import PlatformInfo

LAYOUT = struct.Struct("<60I3i4x3Q")
UINT32_FIELDS, INT32_FIELDS = 60, 3
ACCUMULATOR_BYTES = 4  # L0C holds float32


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def window_rows(base_m: int, width: int, kernel: int, dilation: int) -> int:
    """Return how many rows of the stretched dY one block of `base_m` pixels loads for dX rows of `width` pixels."""
    if base_m % width == 0:
        rows = base_m // width
    elif base_m > width:
        rows = base_m // width + 2  # a block in mid-row touches a part of a row at both ends
    else:
        rows = 1 if width % base_m == 0 else 2
    return rows + (kernel - 1) * dilation


@dataclass
class TConv3DBackpropInputTiling:
    """The tiling structure, its fields in memory order; 280 bytes, little-endian.

    GetTiling fills it. The vendor does not support hand-made values; this model does (an extension): change a field or
    use `with_`, and `validate()` says what would break.
    """

    batch: int = 0
    cin: int = 0
    cout: int = 0
    cout1: int = 0
    cin1: int = 0
    cout1G: int = 0
    cin1G: int = 0
    c0: int = 0
    c0Bits: int = 0
    dout: int = 0
    ho: int = 0
    wo: int = 0
    di: int = 0
    hi: int = 0
    wi: int = 0
    dk: int = 0
    hk: int = 0
    wk: int = 0
    group: int = 0
    strideD: int = 0
    strideH: int = 0
    strideW: int = 0
    padFront: int = 0
    padBack: int = 0
    padUp: int = 0
    padDown: int = 0
    padLeft: int = 0
    padRight: int = 0
    backpropPadTail: int = 0
    backpropPadUp: int = 0
    backpropPadDown: int = 0
    backpropPadLeft: int = 0
    backpropPadRight: int = 0
    dilationD: int = 0
    dilationH: int = 0
    dilationW: int = 0
    al0Pbuffer: int = 0
    bl0Pbuffer: int = 0
    cl0Pbuffer: int = 0
    al1Pbuffer: int = 0
    bl1Pbuffer: int = 0
    singleCoreGroup: int = 0
    singleCoreCout: int = 0
    singleCoreCout1: int = 0
    singleCoreCin1: int = 0
    singleCoreDin: int = 0
    singleCoreHo: int = 0
    baseM: int = 0
    baseK: int = 0
    baseN: int = 0
    baseD: int = 0
    baseBatch: int = 0
    baseGroup: int = 0
    stepM: int = 0
    stepN: int = 0
    stepKa: int = 0
    stepKb: int = 0
    stepBatch: int = 0
    stepGroup: int = 0
    iterateOrder: int = 0
    hf32Flag: int = 0
    initOutputFlag: int = 0
    reserved: int = 0
    singleCoreBatch: int = 0
    singleCoreM: int = 0
    singleCoreCin: int = 0

    # Not a field: the structure does not say which number format it was made for, our GetTiling remembers it.
    element_type = cast("DType | None", None)
    output_format = cast("ConvFormat | None", None)  # and the format that SetInputType said, if it was called

    def to_bytes(self) -> bytes:
        """Return the 280 bytes of the structure."""
        try:
            return LAYOUT.pack(*(getattr(self, f.name) for f in fields(self)))
        except struct.error:
            raise ValueError("; ".join(self._out_of_range())) from None

    @classmethod
    def from_bytes(cls, data: bytes) -> TConv3DBackpropInputTiling:
        """Read a structure back."""
        if len(data) != LAYOUT.size:
            raise ValueError(f"TConv3DBackpropInputTiling has {LAYOUT.size} bytes, got {len(data)}")
        return cls(*LAYOUT.unpack(data))

    def with_(self, **changes: Any) -> TConv3DBackpropInputTiling:
        """Return a copy with some fields changed; `singleCoreCin` and `singleCoreCin1` follow each other and baseN."""
        if "baseN" in changes:
            changes.setdefault("singleCoreCin", changes["baseN"])
        if "singleCoreCin" in changes:
            changes.setdefault("singleCoreCin1", ceil_div(changes["singleCoreCin"], self.c0))
        copy = replace(self, **changes)
        copy.element_type, copy.output_format = self.element_type, self.output_format
        return copy

    # Lengths that follow from the fields

    @property
    def element_bytes(self) -> int:
        return 32 // self.c0

    @property
    def kernel_column(self) -> int:
        """U: length in K of one group of c0 output channels."""
        return self.hk * self.wk * self.c0

    @property
    def inner_k(self) -> int:
        """K of one kernel depth."""
        return self.cout1 * self.kernel_column

    @property
    def full_k(self) -> int:
        """K as SetSingleShape takes it: all kernel depths."""
        return self.dk * self.inner_k

    @property
    def weight_n1(self) -> int:
        """Blocks of 16 output channels in FRACTAL_Z_3D."""
        return ceil_div(self.cout, BLOCK_OUT)

    @property
    def weight_group(self) -> int:
        """Elements of one group of c0 input channels in FRACTAL_Z_3D (one kernel depth)."""
        return self.hk * self.wk * self.weight_n1 * BLOCK_OUT * self.c0

    @property
    def weight_size(self) -> int:
        return self.dk * self.cin1 * self.weight_group

    @property
    def grad_output_sample(self) -> int:
        """Elements of one sample of dY in NDC1HWC0."""
        return self.dout * self.cout1 * self.ho * self.wo * self.c0

    @property
    def output_depth(self) -> int:
        """Elements of one depth of dX in NDC1HWC0."""
        return self.cin1 * self.hi * self.wi * self.c0

    @property
    def output_sample(self) -> int:
        return self.di * self.output_depth

    @property
    def stretched_rows(self) -> int:
        """Rows of dY after strideH-1 zero rows were put between its rows."""
        return (self.ho - 1) * self.strideH + 1

    @property
    def window_rows(self) -> int:
        return window_rows(self.baseM, self.wi, self.hk, self.dilationH)

    @property
    def weights_resident(self) -> bool:
        """Whether L1 keeps all weights of a piece, so that they are loaded once."""
        return (self.dk == 1 and self.bl1Pbuffer == 1
                and self.baseK * self.stepKb >= self.singleCoreCout * self.hk * self.wk
                and self.baseN // self.c0 >= self.singleCoreCin1)

    @property
    def unreached_rows(self) -> int:
        """Rows at the bottom of dX that no row of dY reaches; the last piece leaves them out."""
        return max(0, self.backpropPadDown - self.dilationH * (self.hk - 1))

    def kernel_depths(self, depth: int) -> list[tuple[int, int]]:
        """Return (kernel depth, dY depth) for each kernel depth that contributes to a depth of dX."""
        found = []
        for kd in range(self.dk):
            position = depth + self.padFront - kd * self.dilationD
            if position >= 0 and position % self.strideD == 0 and position < self.dout * self.strideD:
                found.append((kd, position // self.strideD))
        return found

    def memory_use(self) -> dict[str, int]:
        """Return the bytes in use: L0A, L0B (one of their buffers), L0C, and L1 by queue."""
        e = self.element_bytes
        rows = min(self.window_rows, self.stretched_rows)
        a_channels = max(self.stepKa * self.baseK // (self.hk * self.wk), 1)
        return {
            "L0A": self.baseM * self.baseK * e, "L0B": self.baseK * self.baseN * e,
            "L0C": self.cl0Pbuffer * self.baseM * self.baseN * ACCUMULATOR_BYTES,
            "L1A": self.al1Pbuffer * e * rows * self.wo * self.strideW * a_channels,
            "L1B": self.bl1Pbuffer * e * self.baseN * self.stepKb * self.baseK,
        }

    def memory_size(self, platform: PlatformInfo | None = None) -> dict[str, int]:
        """Return the bytes there are: one buffer of L0A and L0B, L0C, and L1 for both queues together."""
        platform = platform or PlatformInfo()
        return {"L0A": platform.l0ASize // self.al0Pbuffer, "L0B": platform.l0BSize // self.bl0Pbuffer,
                "L0C": platform.l0CSize, "L1": platform.usable_l1}

    # Rules

    def problems(self, platform: PlatformInfo | None = None) -> list[str]:
        """Return every rule that the values break, with the numbers; an empty list if they are usable."""
        found = self._out_of_range()
        if found:
            return found
        found = self._broken_extents()
        return found or self._broken_tile() + self._over_capacity(platform)

    def validate(self, platform: PlatformInfo | None = None) -> None:
        """Raise ValueError with every broken rule."""
        found = self.problems(platform)
        if found:
            raise ValueError("tiling: " + "; ".join(found))

    def _out_of_range(self) -> list[str]:
        found = []
        for index, f in enumerate(fields(self)):
            value = getattr(self, f.name)
            low, high = ((0, 2**32 - 1) if index < UINT32_FIELDS else
                         (-2**31, 2**31 - 1) if index < UINT32_FIELDS + INT32_FIELDS else (0, 2**64 - 1))
            if not hasattr(value, "__index__") or not low <= operator.index(value) <= high:
                found.append(f"{f.name}={value!r} is not an integer in [{low}, {high}]")
        return found

    def _broken_extents(self) -> list[str]:
        positive = ("batch", "cin", "cout", "c0", "dout", "ho", "wo", "di", "hi", "wi", "dk", "hk", "wk", "strideD",
                    "strideH", "strideW", "dilationD", "dilationH", "dilationW", "baseM", "baseK", "baseN", "stepKa",
                    "stepKb", "singleCoreM", "singleCoreCin")
        found = [f"{name}={getattr(self, name)} must be positive" for name in positive if getattr(self, name) < 1]
        for name in ("al0Pbuffer", "bl0Pbuffer", "cl0Pbuffer", "al1Pbuffer", "bl1Pbuffer"):
            if getattr(self, name) not in (1, 2):
                found.append(f"{name}={getattr(self, name)} must be 1 or 2")
        if found:
            return found
        if (self.c0, self.c0Bits) not in ((16, 4), (8, 3)):
            found.append(f"c0={self.c0}, c0Bits={self.c0Bits}: must be 16, 4 (half, bfloat16_t) or 8, 3 (float)")
            return found
        expected = {"cin1": ceil_div(self.cin, self.c0), "cout1": ceil_div(self.cout, self.c0),
                    "singleCoreCout1": ceil_div(self.cout, self.c0),
                    "singleCoreCout": ceil_div(self.cout, self.c0) * self.c0, "group": 1, "stepM": 1, "stepN": 1,
                    "singleCoreCin1": ceil_div(self.singleCoreCin, self.c0),
                    "backpropPadUp": (self.hk - 1) * self.dilationH - self.padUp,
                    "backpropPadLeft": (self.wk - 1) * self.dilationW - self.padLeft}
        found += [f"{name}={getattr(self, name)} must be {value}" for name, value in expected.items()
                  if getattr(self, name) != value]
        for axis, size, out, kernel, stride, dilation, pads in (
                ("depth", self.di, self.dout, self.dk, self.strideD, self.dilationD, self.padFront + self.padBack),
                ("height", self.hi, self.ho, self.hk, self.strideH, self.dilationH, self.padUp + self.padDown),
                ("width", self.wi, self.wo, self.wk, self.strideW, self.dilationW, self.padLeft + self.padRight)):
            needed = (out - 1) * stride + (kernel - 1) * dilation + 1
            if size + pads < needed:
                found.append(f"{axis}: {out} outputs need {needed} positions, the padded input has {size + pads}")
        return found

    def _broken_tile(self) -> list[str]:
        found = []
        for name in ("baseM", "baseK", "baseN"):
            unit = min(BLOCK_OUT, self.c0) if name == "baseM" else self.c0  # float has blocks of 8 pixels too
            if getattr(self, name) % unit:
                found.append(f"{name}={getattr(self, name)} is not a multiple of {unit}")
        for name in ("stepKa", "stepKb"):
            depth = getattr(self, name) * self.baseK
            if depth % self.kernel_column:
                found.append(f"{name}*baseK={depth} is not a multiple of hk*wk*c0={self.kernel_column}")
        if self.stepKa % self.stepKb and self.stepKb % self.stepKa:
            found.append(f"neither of stepKa={self.stepKa} and stepKb={self.stepKb} divides the other")
        if self.singleCoreM % self.wi:
            found.append(f"singleCoreM={self.singleCoreM} is not a whole number of dX rows of wi={self.wi} pixels")
        if self.singleCoreCin % self.c0:
            found.append(f"singleCoreCin={self.singleCoreCin} is not a multiple of c0={self.c0}")
        if self.iterateOrder not in (0, 1):
            found.append(f"iterateOrder={self.iterateOrder} is neither 0 (ORDER_M) nor 1 (ORDER_N)")
        return found

    def _over_capacity(self, platform: PlatformInfo | None) -> list[str]:
        use, size = self.memory_use(), self.memory_size(platform)
        found = [f"{name} needs {use[name]} bytes of {size[name]}" for name in ("L0A", "L0B", "L0C")
                 if use[name] > size[name]]
        if use["L1A"] + use["L1B"] > size["L1"]:
            found.append(f"L1 needs {use['L1A']} bytes for A and {use['L1B']} for B, together more than {size['L1']}")
        return found


class Conv3DBackpropInputTilingData:
    """The structure with one member that `GetTiling` fills."""

    def __init__(self) -> None:
        self.conv3DDxTiling = TConv3DBackpropInputTiling()
