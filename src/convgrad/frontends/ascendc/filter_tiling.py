"""The host side of Conv3DBackpropFilter: its tiling, its setters, and our search for its tile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from ...blocked import BLOCK_OUT
from .conv_types import KERNEL_TYPE, ConvDtype, ConvFormat, DType, IterateOrder, whole_numbers
from .platform import PlatformInfo
from .setters import AXES, PAD_NAMES, TilingSetters
from .tiling_struct import ACCUMULATOR_BYTES, ceil_div

C0 = 16  # half and bfloat16 only


@dataclass
class DwTiling:
    """The part of the tiling that the kernel reads. M is cout, N is cin1*c0*hk*wk of one kernel depth, K is ho*wo."""

    batch: int = 0
    cin: int = 0
    cout: int = 0
    cin1: int = 0
    cout1: int = 0
    dout: int = 0
    ho: int = 0
    wo: int = 0
    di: int = 0
    hi: int = 0
    wi: int = 0
    dk: int = 0
    hk: int = 0
    wk: int = 0
    group: int = 1
    strideD: int = 1
    strideH: int = 1
    strideW: int = 1
    padFront: int = 0
    padBack: int = 0
    padUp: int = 0
    padDown: int = 0
    padLeft: int = 0
    padRight: int = 0
    dilationD: int = 1
    dilationH: int = 1
    dilationW: int = 1
    channelSize: int = C0
    m0: int = BLOCK_OUT
    k0: int = C0
    n0: int = BLOCK_OUT
    al0Pbuffer: int = 2
    bl0Pbuffer: int = 2
    cl0Pbuffer: int = 1
    al1Pbuffer: int = 2
    bl1Pbuffer: int = 2
    baseM: int = 0
    baseK: int = 0
    baseN: int = 0
    stepM: int = 1
    stepN: int = 1
    stepKa: int = 1
    stepKb: int = 1
    iterateOrder: int = 0
    bl1Bound: int = 0  # elements of one buffer of the B queue
    singleCoreBatch: int = 1
    singleCoreDk: int = 1
    singleCoreHo: int = 0
    singleCoreCin: int = 0
    singleCoreCout: int = 0
    hf32Flag: int = 0

    # Not a field: the number format the tiling was made for.
    element_type = cast("DType | None", None)

    @property
    def columns(self) -> int:
        """N: all columns of one kernel depth."""
        return self.cin1 * C0 * self.hk * self.wk

    @property
    def weight_group(self) -> int:
        """Elements of one group of 16 input channels of dW (one kernel depth)."""
        return self.hk * self.wk * self.cout1 * BLOCK_OUT * C0

    @property
    def grad_output_plane(self) -> int:
        return self.ho * self.wo * C0

    @property
    def input_plane(self) -> int:
        return self.hi * self.wi * C0

    def input_rows(self, pixels: int) -> int:
        """Return how many X rows a run of `pixels` outputs needs."""
        whole = pixels % self.wo == 0 or self.wo % pixels == 0  # a run never crosses the end of a row
        rows = min(ceil_div(pixels, self.wo) + (0 if whole else 1), self.ho)
        return (rows - 1) * self.strideH + (self.hk - 1) * self.dilationH + 1

    def memory_use(self) -> dict[str, int]:
        """Return the bytes in use by level; L1 by queue."""
        e = 2
        window = self.hk * self.wk * C0
        whole = self.baseN % window == 0 or window % self.baseN == 0  # a block never crosses into another group
        groups = ceil_div(self.baseN, window) + (0 if whole else 1)
        b_elements = min(groups, self.cin1) * self.input_rows(self.stepKb * self.baseK) * self.wi * C0
        return {"L0A": self.baseM * self.baseK * e, "L0B": self.baseK * self.baseN * e,
                "L0C": self.cl0Pbuffer * self.baseM * self.baseN * ACCUMULATOR_BYTES,
                "L1A": self.al1Pbuffer * self.baseM * self.stepKa * self.baseK * e,
                "L1B": self.bl1Pbuffer * b_elements * e}

    def problems(self, platform: PlatformInfo | None = None) -> list[str]:
        """Return every rule that the tile breaks."""
        platform = platform or PlatformInfo()
        found = [f"{name}={getattr(self, name)} must be a positive multiple of {BLOCK_OUT}"
                 for name in ("baseM", "baseK", "baseN", "singleCoreCin", "singleCoreCout")
                 if getattr(self, name) < 1 or getattr(self, name) % BLOCK_OUT]
        if self.singleCoreHo < 1:
            found.append(f"singleCoreHo={self.singleCoreHo} must be positive")
        if self.iterateOrder not in (0, 1):
            found.append(f"iterateOrder={self.iterateOrder} is neither 0 (ORDER_M) nor 1 (ORDER_N)")
        if found:
            return found
        use = self.memory_use()
        for name, size in (("L0A", platform.l0ASize // self.al0Pbuffer), ("L0B", platform.l0BSize // self.bl0Pbuffer),
                           ("L0C", platform.l0CSize)):
            if use[name] > size:
                found.append(f"{name} needs {use[name]} bytes of {size}")
        if use["L1A"] + use["L1B"] > platform.usable_l1:
            found.append(f"L1 needs {use['L1A']} bytes for A and {use['L1B']} for B, together more than "
                         f"{platform.usable_l1}")
        return found

    def with_(self, **changes: Any) -> DwTiling:
        """Return a copy with some fields changed."""
        copy = replace(self, **changes)
        copy.element_type = self.element_type
        return copy


@dataclass
class FilterParams:
    """Numbers about the tiling as a whole."""

    totalL1Size: int = 0


@dataclass
class BasicBlockTiling:
    """The piece of one core."""

    singleCoreM: int = 0
    singleCoreN: int = 0
    singleCoreK: int = 0


@dataclass
class TConv3DBpFilterTiling:
    """The tiling of Conv3DBackpropFilter in its three parts. The layout of its bytes is not modelled."""

    params: FilterParams = field(default_factory=FilterParams)
    dwTiling: DwTiling = field(default_factory=DwTiling)
    basicBlockTiling: BasicBlockTiling = field(default_factory=BasicBlockTiling)


class Conv3dBpFilterTiling(TilingSetters):
    """Collect the description of one problem and find its tiling. The shape setters return nothing, unlike Input's."""

    def __init__(self, platform: PlatformInfo | None = None) -> None:
        super().__init__(platform)
        self._weight: tuple[int, ...] = (0,) * 5
        self._input: tuple[int, ...] = (0,) * 5
        self._grad_output: tuple[int, ...] = (0,) * 5
        self._dtypes = {"weight": ConvDtype.FLOAT32, "input": ConvDtype.FLOAT16, "grad_output": ConvDtype.FLOAT16}

    def SetWeightShape(self, cout: int, cin: int, d: int, h: int, w: int) -> None:
        self._weight = whole_numbers("SetWeightShape", cout=cout, cin=cin, d=d, h=h, w=w)

    def SetInputShape(self, n: int, c: int, d: int, h: int, w: int) -> None:
        self._input = whole_numbers("SetInputShape", n=n, c=c, d=d, h=h, w=w)

    def SetGradOutputShape(self, n: int, c: int, d: int, h: int, w: int) -> None:
        self._grad_output = whole_numbers("SetGradOutputShape", n=n, c=c, d=d, h=h, w=w)

    def GetTiling(self, tilingData: TConv3DBpFilterTiling) -> int:
        """Fill the structure; return 0, or -1 (nothing written) with reasons in `explain()`."""
        if not isinstance(tilingData, TConv3DBpFilterTiling):
            raise TypeError(f"GetTiling fills a TConv3DBpFilterTiling, got {type(tilingData).__name__}")
        self._refusals = self._rules()
        if self._refusals:
            return -1
        tile = find_tile(self._geometry(), self.platform)
        if tile is None:
            self._refusals = [f"no tile fits L1 ({self.platform.usable_l1} bytes): one window of "
                              f"{(self._weight[3] - 1) * self._dilation[1] + 1} input rows of {self._input[4]} pixels "
                              "is too large"]
            return -1
        tilingData.dwTiling = tile
        use = tile.memory_use()
        tilingData.params = FilterParams(use["L1A"] + use["L1B"])
        tilingData.basicBlockTiling = BasicBlockTiling(
            tile.singleCoreCout, tile.singleCoreCin * tile.hk * tile.wk, tile.singleCoreHo * tile.wo)
        return 0

    def _rules(self) -> list[str]:
        found = self._first_refusals({"weight": (ConvFormat.FRACTAL_Z_3D,), "input": (ConvFormat.NDC1HWC0,),
                                      "grad_output": (ConvFormat.NDC1HWC0,)})
        for what, values in (("weight", self._weight), ("input", self._input), ("dY", self._grad_output),
                             ("stride", self._stride), ("dilation", self._dilation)):
            if min(values) <= 0:
                found.append(f"{what} {values} must be positive in every place")
        if min(self._padding) < 0:
            found.append(f"padding {self._padding} must not be negative")
        if self._dtypes["weight"] != ConvDtype.FLOAT32:
            found.append(f"weight type is {self._dtypes['weight'].name}, dW is always FLOAT32")
        dtype = self._dtypes["input"]
        if dtype not in (ConvDtype.FLOAT16, ConvDtype.BF16) or dtype != self._dtypes["grad_output"]:
            found.append(f"input is {dtype.name} and GradOutput {self._dtypes['grad_output'].name}; both must be "
                         "FLOAT16 or both BF16")
        if found:
            return found
        (cout, cin, *kernel), (n, c, *size), (batch, channels, *out) = self._weight, self._input, self._grad_output
        if n != batch or c != cin or channels != cout:
            found.append(f"shapes contradict each other: weight {self._weight}, input {self._input}, dY "
                         f"{self._grad_output}")
        for axis, name in enumerate(AXES):
            low, high = self._padding[2 * axis: 2 * axis + 2]
            gives = (size[axis] + low + high - (kernel[axis] - 1) * self._dilation[axis] - 1) // self._stride[axis] + 1
            if gives != out[axis]:
                found.append(f"{name}: input {size[axis]} with pads {low}, {high}, kernel {kernel[axis]}, dilation "
                             f"{self._dilation[axis]}, stride {self._stride[axis]} gives {gives} outputs, dY has "
                             f"{out[axis]}")
        for name, value, limit in (("strideH", self._stride[1], 63), ("strideW", self._stride[2], 63),
                                   ("hk", kernel[1], 511), ("wk", kernel[2], 511),
                                   *((pad, value, 255) for pad, value in zip(PAD_NAMES[2:], self._padding[2:])),
                                   ("dilationH", self._dilation[1], 255), ("dilationW", self._dilation[2], 255)):
            if value > limit:
                found.append(f"{name}={value} is larger than {limit}")
        return found

    def _geometry(self) -> DwTiling:
        (cout, cin, dk, hk, wk), (n, _, di, hi, wi), (_, _, dout, ho, wo) = (
            self._weight, self._input, self._grad_output)
        tiling = DwTiling(
            batch=n, cin=cin, cout=cout, cin1=ceil_div(cin, C0), cout1=ceil_div(cout, BLOCK_OUT), dout=dout, ho=ho,
            wo=wo, di=di, hi=hi, wi=wi, dk=dk, hk=hk, wk=wk, strideD=self._stride[0], strideH=self._stride[1],
            strideW=self._stride[2], dilationD=self._dilation[0], dilationH=self._dilation[1],
            dilationW=self._dilation[2], **dict(zip(PAD_NAMES, self._padding)))
        tiling.element_type = KERNEL_TYPE[self._dtypes["input"]]
        return tiling


def find_tile(t: DwTiling, platform: PlatformInfo) -> DwTiling | None:
    """Return `t` with the tile that moves the fewest bytes: dY once per block of N, X once per block of M."""
    m, n = t.cout1 * BLOCK_OUT, t.columns
    dy_bytes, x_bytes = t.cout1 * t.grad_output_plane * 2, t.cin1 * t.input_plane * 2
    choices = []
    for base_m in range(BLOCK_OUT, min(m, 1024) + 1, BLOCK_OUT):
        widest = min(n, 1024, platform.l0CSize // (ACCUMULATOR_BYTES * base_m)) // BLOCK_OUT * BLOCK_OUT
        for base_n in range(BLOCK_OUT, widest + 1, BLOCK_OUT):
            # A block of N narrower than the kernel window loads the same X rows as a whole window.
            window_share = max(1, t.hk * t.wk * C0 // base_n)
            cost = ceil_div(n, base_n) * dy_bytes + ceil_div(m, base_m) * window_share * x_bytes
            choices.append((cost, -base_m * base_n, base_m, base_n))
    whole = t.with_(singleCoreHo=t.ho, singleCoreCin=t.cin1 * C0, singleCoreCout=m,
                    iterateOrder=int(IterateOrder.ORDER_N if m > n else IterateOrder.ORDER_M))
    choices.sort()
    for a_buffers, b_buffers in ((2, 2), (2, 1), (1, 2), (1, 1)):  # one buffer where two do not fit
        tile = first_fitting(whole.with_(al1Pbuffer=a_buffers, bl1Pbuffer=b_buffers), choices, platform)
        if tile is not None:
            return tile.with_(bl1Bound=tile.memory_use()["L1B"] // (2 * tile.bl1Pbuffer))
    return None


def first_fitting(whole: DwTiling, choices: list[tuple[int, int, int, int]],
                  platform: PlatformInfo) -> DwTiling | None:
    """The cheapest block size for which some length of K fits L0 and L1, with the longest such K."""
    for _, _, base_m, base_n in choices:
        limit = min(platform.l0ASize, platform.l0BSize) // 2 // (2 * max(base_m, base_n))
        longest = min(limit // C0, ceil_div(whole.ho * whole.wo, C0))
        lengths = [longest * C0] if longest else []
        if longest > 1:
            lengths.append(C0)  # the shortest run of pixels, for rows that fill L1
        for base_k in lengths:
            for steps in (16, 8, 4, 2, 1):
                tile = whole.with_(baseM=base_m, baseN=base_n, baseK=base_k, stepKa=steps, stepKb=steps)
                if not tile.problems(platform):
                    return tile
    return None
