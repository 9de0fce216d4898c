// The tiling that the host hands to the kernel: 66 numbers, 280 bytes.
#pragma once

#include <cstdint>

namespace AscendC {
namespace tiling {

struct TConv3DBackpropInputTiling {
    uint32_t batch = 0, cin = 0, cout = 0, cout1 = 0, cin1 = 0, cout1G = 0, cin1G = 0, c0 = 0, c0Bits = 0,
        dout = 0, ho =
        0, wo = 0, di = 0, hi = 0, wi = 0, dk = 0, hk = 0, wk = 0, group = 0, strideD = 0, strideH = 0, strideW = 0,
        padFront = 0, padBack = 0, padUp = 0, padDown = 0, padLeft = 0, padRight = 0, backpropPadTail = 0,
        backpropPadUp = 0, backpropPadDown = 0, backpropPadLeft = 0, backpropPadRight = 0, dilationD = 0, dilationH
        = 0, dilationW = 0, al0Pbuffer = 0, bl0Pbuffer = 0, cl0Pbuffer = 0, al1Pbuffer = 0, bl1Pbuffer = 0,
        singleCoreGroup = 0, singleCoreCout = 0, singleCoreCout1 = 0, singleCoreCin1 = 0, singleCoreDin = 0,
        singleCoreHo = 0, baseM = 0, baseK = 0, baseN = 0, baseD = 0, baseBatch = 0, baseGroup = 0, stepM = 0, stepN
        = 0, stepKa = 0, stepKb = 0, stepBatch = 0, stepGroup = 0, iterateOrder = 0;
    int32_t hf32Flag = 0, initOutputFlag = 0, reserved = 0;
    uint64_t singleCoreBatch = 0, singleCoreM = 0, singleCoreCin = 0;
};
static_assert(sizeof(TConv3DBackpropInputTiling) == 280, "the layout of the original");

struct Conv3DBackpropInputTilingData {
    TConv3DBackpropInputTiling conv3DDxTiling;
};

}  // namespace tiling
}  // namespace AscendC

namespace optiling {
using AscendC::tiling::Conv3DBackpropInputTilingData;
using AscendC::tiling::TConv3DBackpropInputTiling;
}  // namespace optiling
