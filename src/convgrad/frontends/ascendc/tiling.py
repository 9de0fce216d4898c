"""Conv3DBpInputTiling: the host side, with the setters of the page, its rules, and the reasons of a refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...problem import checked_padding
from .conv_types import HOST_TYPE, KERNEL_TYPE, ConvDtype, ConvFormat, whole_numbers
from .platform import PlatformInfo
from .setters import AXES, PAD_NAMES, TilingSetters
from .tile_search import search, smallest_l1
from .tiling_struct import Conv3DBackpropInputTilingData, TConv3DBackpropInputTiling, ceil_div


class Conv3DBpInputTiling(TilingSetters):
    """Collect the description of one problem and find its tiling.

    Parameters
    ----------
    platform : PlatformInfo, optional
        Memory sizes; those of an Ascend910B unless given.

    Notes
    -----
    Use one object per problem. For a transposed convolution do not call `SetInputShape`: `cout` is then the number of
    channels of its input, `SetGradOutputShape` the shape of its input, and the shape of its output is inferred.
    """

    def __init__(self, platform: PlatformInfo | None = None) -> None:
        super().__init__(platform)
        self._shared: dict[str, int] = {}  # batch, cin, cout: what more than one setter says
        self._kernel: tuple[int, ...] = (0, 0, 0)
        self._input: tuple[int, ...] | None = None
        self._grad_output: tuple[int, ...] = (0, 0, 0)
        self._output_padding: tuple[int, ...] | None = None

    # Setters

    def _agree(self, method: str, **values: int) -> bool:
        """Store what several setters say; False, and nothing stored, if it contradicts an earlier call."""
        wrong = [f"{name}={value} where an earlier call said {self._shared[name]}" for name, value in values.items()
                 if self._shared.get(name, value) != value]
        if wrong:
            self._contradictions[method] = f"{method} returned False: {', '.join(wrong)}"
            return False
        self._contradictions.pop(method, None)
        self._shared.update(values)
        return True

    def SetWeightShape(self, cout: int, cin: int, d: int, h: int, w: int) -> bool:
        """Give the shape of the weight; False, and nothing stored, if a channel count contradicts an earlier call."""
        cout, cin, *kernel = whole_numbers("SetWeightShape", cout=cout, cin=cin, d=d, h=h, w=w)
        if not self._agree("SetWeightShape", cout=cout, cin=cin):
            return False
        self._kernel = tuple(kernel)
        return True

    def SetInputShape(self, n: int, c: int, d: int, h: int, w: int) -> bool:
        """Give the shape of the forward input, which is that of dX; False on a contradicting batch or channel count."""
        n, c, *size = whole_numbers("SetInputShape", n=n, c=c, d=d, h=h, w=w)
        if not self._agree("SetInputShape", batch=n, cin=c):
            return False
        self._input = tuple(size)
        return True

    def SetGradOutputShape(self, n: int, c: int, d: int, h: int, w: int) -> bool:
        """Give the shape of dY; False on a contradicting batch or channel count."""
        n, c, *size = whole_numbers("SetGradOutputShape", n=n, c=c, d=d, h=h, w=w)
        if not self._agree("SetGradOutputShape", batch=n, cout=c):
            return False
        self._grad_output = tuple(size)
        return True

    def SetOutputPadding(self, outputPadD: int, outputPadH: int, outputPadW: int) -> bool:
        """Give the output padding of a transposed convolution; False, and nothing stored, after SetInputShape."""
        given = whole_numbers("SetOutputPadding", outputPadD=outputPadD, outputPadH=outputPadH, outputPadW=outputPadW)
        if self._input is not None:
            self._contradictions["SetOutputPadding"] = (f"SetOutputPadding{given} returned False: SetInputShape was "
                                                        "called, which a transposed convolution leaves out")
            return False
        self._output_padding = given
        return True

    # Tiling

    @property
    def transposed(self) -> bool:
        return self._input is None

    def GetTiling(self, tilingData: Conv3DBackpropInputTilingData | TConv3DBackpropInputTiling) -> int:
        """Fill the structure with a tiling that fits; return 0, or -1 (nothing written) with reasons in `explain()`."""
        if not isinstance(tilingData, (Conv3DBackpropInputTilingData, TConv3DBackpropInputTiling)):
            raise TypeError("GetTiling fills a Conv3DBackpropInputTilingData or its conv3DDxTiling, got "
                            f"{type(tilingData).__name__}")
        self._refusals = self._first_rules()
        if not self._refusals:
            tiling = self._geometry()
            self._refusals = self._rules_of(tiling)
            if not self._refusals:
                found = search(tiling, self.platform)
                if found:
                    found.element_type = tiling.element_type
                    found.output_format = self._formats["input"] if "input" in self._positions else None
                    self._write(tilingData, found)
                    return 0
                a_bytes, b_bytes = smallest_l1(tiling)
                self._refusals = [f"no tile fits L1: the smallest needs {a_bytes} bytes for dY rows and {b_bytes} for "
                                  f"weights, L1 has {self.platform.usable_l1}"]
        return -1

    @staticmethod
    def _write(target: Conv3DBackpropInputTilingData | TConv3DBackpropInputTiling,
               tiling: TConv3DBackpropInputTiling) -> None:
        if isinstance(target, Conv3DBackpropInputTilingData):
            target.conv3DDxTiling = tiling
        else:
            target.__dict__.update(tiling.__dict__)

    @property
    def input_size(self) -> tuple[int, ...]:
        """Depth, height and width of dX: as given, or inferred for a transposed convolution."""
        if self._input is not None:
            return self._input
        extra = self._output_padding or (0, 0, 0)
        return tuple((out - 1) * stride - self._padding[2 * axis] - self._padding[2 * axis + 1]
                     + dilation * (kernel - 1) + extra[axis] + 1
                     for axis, (out, stride, dilation, kernel) in enumerate(
                         zip(self._grad_output, self._stride, self._dilation, self._kernel)))

    def _first_rules(self) -> list[str]:
        """Check what the later arithmetic needs: signs, formats, types."""
        found = self._first_refusals({"weight": (ConvFormat.FRACTAL_Z_3D,), "grad_output": (ConvFormat.NDC1HWC0,),
                                      "input": (ConvFormat.NDC1HWC0, ConvFormat.NCDHW)})
        found += [f"{name} was not given or is not positive: {self._shared.get(key, 0)}" for key, name in (
            ("batch", "the batch"), ("cout", "the channel count of dY"), ("cin", "the channel count of dX"))
            if self._shared.get(key, 0) <= 0]
        found += [f"{name}={pad} is negative" for name, pad in zip(PAD_NAMES, self._padding) if pad < 0]
        for what, values in (("stride", self._stride), ("dilation", self._dilation), ("kernel", self._kernel),
                             ("dY", self._grad_output), ("dX", self._input or (1, 1, 1))):
            found += [f"{what} {axis} must be positive, got {value}" for axis, value in zip(AXES, values) if value <= 0]
        unknown = [f"{tensor} type is {dtype.name}, it must be FLOAT16 or BF16 (FLOAT32 as an extension)"
                   for tensor, dtype in self._dtypes.items() if dtype not in KERNEL_TYPE]
        found += unknown
        if not unknown and len(set(self._dtypes.values())) > 1:
            listed = ", ".join(f"{tensor} {dtype.name}" for tensor, dtype in self._dtypes.items())
            found.append(f"the types differ: {listed}")
        if self._input is not None and self._output_padding is not None:
            found.append("SetInputShape and SetOutputPadding were both called: output padding belongs to a transposed "
                         "convolution, whose output shape is inferred")
        if not found:
            found += [f"transposed: inferred dX {axis} is {size}" for axis, size in zip(AXES, self.input_size)
                      if size <= 0]
        return found

    def _geometry(self) -> TConv3DBackpropInputTiling:
        """Return a tiling with everything but the tile."""
        dtype = KERNEL_TYPE[next(iter(self._dtypes.values()), ConvDtype.FLOAT16)]
        c0 = 32 // dtype.itemsize
        cin, cout = self._shared["cin"], self._shared["cout"]
        di, hi, wi = self.input_size
        dout, ho, wo = self._grad_output
        dk, hk, wk = self._kernel
        tiling = TConv3DBackpropInputTiling(
            batch=self._shared["batch"], cin=cin, cout=cout, cout1=ceil_div(cout, c0), cin1=ceil_div(cin, c0),
            cout1G=ceil_div(cout, c0), cin1G=ceil_div(cin, c0), c0=c0, c0Bits=c0.bit_length() - 1, dout=dout, ho=ho,
            wo=wo, di=di, hi=hi, wi=wi, dk=dk, hk=hk, wk=wk, group=1, strideD=self._stride[0],
            strideH=self._stride[1], strideW=self._stride[2], dilationD=self._dilation[0],
            dilationH=self._dilation[1], dilationW=self._dilation[2], singleCoreGroup=1,
            singleCoreCout=ceil_div(cout, c0) * c0, singleCoreCout1=ceil_div(cout, c0), singleCoreDin=1,
            singleCoreHo=1, baseD=1, baseBatch=1, baseGroup=1, stepBatch=1, stepGroup=1, singleCoreBatch=1,
            **dict(zip(PAD_NAMES, self._padding)))
        tiling.element_type = dtype
        self._fill_backprop_pads(tiling)
        return tiling

    def _fill_backprop_pads(self, t: TConv3DBackpropInputTiling) -> None:
        head = (t.dk - 1) * t.dilationD - t.padFront
        t.backpropPadUp = (t.hk - 1) * t.dilationH - t.padUp
        t.backpropPadLeft = (t.wk - 1) * t.dilationW - t.padLeft
        high = []
        for size, out, kernel, stride, dilation, pad, low in (
                (t.di, t.dout, t.dk, t.strideD, t.dilationD, t.padFront, head),
                (t.hi, t.ho, t.hk, t.strideH, t.dilationH, t.padUp, t.backpropPadUp),
                (t.wi, t.wo, t.wk, t.strideW, t.dilationW, t.padLeft, t.backpropPadLeft)):
            exact = size - ((out - 1) * stride + 1) + (kernel - 1) * dilation - low
            high.append(exact if 0 <= exact <= 255 else max(0, size - out * stride + pad))
        t.backpropPadTail, t.backpropPadDown, t.backpropPadRight = high
        rest_d = (t.di + t.padFront + t.padBack - (t.dk - 1) * t.dilationD - 1) % t.strideD
        rest_h = (t.hi + t.padUp + t.padDown - (t.hk - 1) * t.dilationH - 1) % t.strideH
        t.initOutputFlag = int(rest_d > t.padBack or rest_h > t.padDown or t.strideH > t.hk or t.dilationD > 1
                               or (self.transposed and (t.backpropPadDown > 0 or head > 0)))

    def _rules_of(self, t: TConv3DBackpropInputTiling) -> list[str]:
        """Return every limit that the problem breaks."""
        found = []
        sizes, outs, kernels = (t.di, t.hi, t.wi), (t.dout, t.ho, t.wo), (t.dk, t.hk, t.wk)
        extra = self._output_padding or (0, 0, 0)
        for axis, name in enumerate(AXES):
            low, high = self._padding[2 * axis: 2 * axis + 2]
            span = (kernels[axis] - 1) * self._dilation[axis] + 1 + (extra[axis] if self.transposed else 0)
            gives = (sizes[axis] + low + high - span) // self._stride[axis] + 1
            if gives != outs[axis]:
                found.append(f"{name}: input {sizes[axis]} with pads {low}, {high}, kernel {kernels[axis]}, dilation "
                             f"{self._dilation[axis]}, stride {self._stride[axis]} gives {gives} outputs, dY has "
                             f"{outs[axis]}")
        if t.strideD > t.dk:
            found.append(f"strideD={t.strideD} is larger than the kernel depth {t.dk}")
        for name, limit in (("strideD", 255), ("strideH", 63), ("strideW", 63)):
            if getattr(t, name) > limit:
                found.append(f"{name}={getattr(t, name)} is larger than {limit}")
        if t.hi * t.wi > 2**32 - 1:
            found.append(f"hi*wi={t.hi * t.wi} is larger than 2^32-1")
        for index, (name, pad) in enumerate(zip(PAD_NAMES, self._padding)):
            kernel = kernels[index // 2]
            if pad > min(255, kernel - 1):
                found.append(f"{name}={pad} is larger than {min(255, kernel - 1)} = min(255, kernel-1) with kernel "
                             f"{kernel}")
        for name, value in (("backpropPadUp = (hk-1)*dilationH - padUp", t.backpropPadUp),
                            ("backpropPadLeft = (wk-1)*dilationW - padLeft", t.backpropPadLeft)):
            if not 0 <= value <= 255:
                found.append(f"{name} = {value} is outside [0, 255]")
        for axis, name in enumerate(AXES):
            value = sizes[axis] - outs[axis] * self._stride[axis] + self._padding[2 * axis]
            if not -255 <= value <= 255:
                found.append(f"{name}: input - dY*stride + pad = {value} is outside [-255, 255]")
        return found


def host_type(dtype: object) -> ConvDtype:
    """Return the host name of a kernel number format."""
    for kernel, host in HOST_TYPE.items():
        if kernel == dtype:
            return host
    raise TypeError(f"dtype {dtype} is none of half, bfloat16_t, float32")


def six_pads(padding: Any) -> tuple[int, ...]:
    """Return the arguments of SetPadding from an int, three ints, three (low, high) pairs, or those six themselves."""
    if hasattr(padding, "tolist"):
        padding = padding.tolist()
    if isinstance(padding, Sequence) and len(padding) == 6:
        padding = tuple(zip(padding[::2], padding[1::2]))
    return tuple(pad for pair in checked_padding(padding, 3) for pad in pair)
