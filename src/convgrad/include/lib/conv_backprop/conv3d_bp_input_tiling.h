// Conv3DBpInputTiling, the host side: the setters of the page and GetTiling. The tile is the largest block that fits.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "lib/conv_backprop/conv3d_bp_input_tiling_data.h"
#include "lib/conv_backprop/conv3d_bp_types.h"
#include "tiling/platform/platform_ascendc.h"

namespace ConvBackpropApi {

using AscendC::tiling::Conv3DBackpropInputTilingData;
using AscendC::tiling::TConv3DBackpropInputTiling;

struct PlatformInfo {
    std::string socVersion = "Ascend910B";
    uint64_t l1Size = 524288, l0CSize = 131072, ubSize = 262144, l0ASize = 65536, l0BSize = 65536;
};

class Conv3DBpInputTiling {
public:
    Conv3DBpInputTiling() : Conv3DBpInputTiling(PlatformInfo{}) {}
    explicit Conv3DBpInputTiling(const platform_ascendc::PlatformAscendC& platform)
        : Conv3DBpInputTiling(PlatformInfo{platform.GetSocVersionName()}) {}
    explicit Conv3DBpInputTiling(const PlatformInfo& platform) : platform_(platform) {
        if (platform.socVersion.rfind("Ascend910B", 0) && platform.socVersion.rfind("Ascend910_93", 0)) {
            throw std::invalid_argument("the API does not exist on " + platform.socVersion + " (Atlas A2 and A3 only)");
        }
    }

    bool SetWeightShape(int64_t cout, int64_t cin, int64_t d, int64_t h, int64_t w) {
        if (!Agree("SetWeightShape", {{"cout", cout}, {"cin", cin}})) return false;
        kernel_ = {d, h, w};
        return true;
    }
    bool SetInputShape(int64_t n, int64_t c, int64_t d, int64_t h, int64_t w) {
        if (!Agree("SetInputShape", {{"batch", n}, {"cin", c}})) return false;
        input_ = {d, h, w};
        transposed_ = false;
        return true;
    }
    bool SetGradOutputShape(int64_t n, int64_t c, int64_t d, int64_t h, int64_t w) {
        if (!Agree("SetGradOutputShape", {{"batch", n}, {"cout", c}})) return false;
        output_ = {d, h, w};
        return true;
    }
    void SetWeightType(TPosition pos, ConvFormat format, ConvDtype dtype) {
        SetType("weight", pos, format == ConvFormat::FRACTAL_Z_3D, dtype);
    }
    void SetInputType(TPosition pos, ConvFormat format, ConvDtype dtype) {
        SetType("input", pos, format == ConvFormat::NDC1HWC0 || format == ConvFormat::NCDHW, dtype);
    }
    void SetGradOutputType(TPosition pos, ConvFormat format, ConvDtype dtype) {
        SetType("GradOutput", pos, format == ConvFormat::NDC1HWC0, dtype);
    }
    void SetPadding(int64_t padFront, int64_t padBack, int64_t padUp, int64_t padDown, int64_t padLeft,
                    int64_t padRight) {
        pads_ = {padFront, padBack, padUp, padDown, padLeft, padRight};
    }
    void SetStride(int64_t strideD, int64_t strideH, int64_t strideW) { stride_ = {strideD, strideH, strideW}; }
    void SetDilation(int64_t dilationD, int64_t dilationH, int64_t dilationW) {
        dilation_ = {dilationD, dilationH, dilationW};
    }
    bool SetOutputPadding(int64_t outputPadD, int64_t outputPadH, int64_t outputPadW) {
        if (!transposed_) {
            wrong_["SetOutputPadding"] = "SetOutputPadding returned false: SetInputShape was called";
            return false;
        }
        outputPad_ = {outputPadD, outputPadH, outputPadW};
        return true;
    }

    // 0, or -1 with the reasons in explain() and nothing written.
    int64_t GetTiling(Conv3DBackpropInputTilingData& tilingData) {
        reasons_.clear();
        for (const auto& entry : wrong_) reasons_.push_back(entry.second);
        for (const char* name : {"batch", "cin", "cout"}) {
            if (shared_[name] <= 0) reasons_.push_back(std::string(name) + " was not given or is not positive");
        }
        TConv3DBackpropInputTiling t;
        if (reasons_.empty()) CheckAxes();
        if (reasons_.empty()) Fill(t);
        if (reasons_.empty() && !FindTile(t)) reasons_.push_back("no tile fits L1");
        if (!reasons_.empty()) return -1;
        tilingData.conv3DDxTiling = t;
        return 0;
    }

    std::string explain() const {
        std::string text;
        for (const auto& reason : reasons_) text += (text.empty() ? "" : "\n") + reason;
        return text;
    }

private:
    using Three = std::array<int64_t, 3>;

    bool Agree(const char* method, const std::vector<std::pair<const char*, int64_t>>& values) {
        for (const auto& [name, value] : values) {
            const auto known = shared_.find(name);
            if (known != shared_.end() && known->second != value) {
                wrong_[method] = std::string(method) + " returned false: " + name + "=" + std::to_string(value) +
                                 " where an earlier call said " + std::to_string(known->second);
                return false;
            }
        }
        for (const auto& [name, value] : values) shared_[name] = value;
        wrong_.erase(method);
        return true;
    }
    void SetType(const std::string& name, TPosition pos, bool format, ConvDtype dtype) {
        wrong_.erase(name);
        if (pos != TPosition::GM) wrong_[name] = name + " must lie in GM";
        if (!format) wrong_[name] = name + " has another format than the page's";
        if (dtype != ConvDtype::FLOAT16 && dtype != ConvDtype::BF16 && dtype != ConvDtype::FLOAT32) {
            wrong_[name] = name + " must be FLOAT16 or BF16";
        }
        types_[name] = dtype;
        wrong_.erase("types");
        for (const auto& entry : types_) {
            if (entry.second != dtype) wrong_["types"] = "the types differ";
        }
    }
    void CheckAxes() {
        const char* names[] = {"depth", "height", "width"};
        const int64_t limits[] = {255, 63, 63};
        for (int axis = 0; axis < 3; ++axis) {
            const int64_t low = pads_[2 * axis], high = pads_[2 * axis + 1], step = stride_[axis];
            const int64_t kernel = kernel_[axis], spread = dilation_[axis];
            if (low < 0 || high < 0 || step < 1 || spread < 1 || kernel < 1 || output_[axis] < 1) {
                reasons_.push_back(std::string(names[axis]) + ": a size is not positive, or a pad negative");
                continue;
            }
            if (transposed_) {
                input_[axis] = (output_[axis] - 1) * step - low - high + spread * (kernel - 1) + outputPad_[axis] + 1;
            }
            const int64_t span = (kernel - 1) * spread + 1 + (transposed_ ? outputPad_[axis] : 0);
            const int64_t back = (kernel - 1) * spread - low;
            const int64_t room = input_[axis] + low + high - span;
            if (input_[axis] < 1 || room < 0 || room / step + 1 != output_[axis]) {
                reasons_.push_back(std::string(names[axis]) + ": input " + std::to_string(input_[axis]) +
                                   " does not give " + std::to_string(output_[axis]) + " outputs");
            }
            if (step > limits[axis] || low > std::min<int64_t>(255, kernel - 1) ||
                high > std::min<int64_t>(255, kernel - 1) || (axis > 0 && (back < 0 || back > 255)) ||
                (axis == 0 && step > kernel)) {
                reasons_.push_back(std::string(names[axis]) + ": a stride or pad is outside its range");
            }
        }
    }
    void Fill(TConv3DBackpropInputTiling& t) {
        const bool wide = types_.count("weight") && types_["weight"] == ConvDtype::FLOAT32;
        t.c0 = wide ? 8 : 16;
        t.c0Bits = wide ? 3 : 4;
        t.batch = shared_["batch"], t.cin = shared_["cin"], t.cout = shared_["cout"];
        t.cin1 = t.cin1G = CeilDiv(t.cin, t.c0), t.cout1 = t.cout1G = CeilDiv(t.cout, t.c0);
        t.dout = output_[0], t.ho = output_[1], t.wo = output_[2];
        t.di = input_[0], t.hi = input_[1], t.wi = input_[2];
        t.dk = kernel_[0], t.hk = kernel_[1], t.wk = kernel_[2];
        t.strideD = stride_[0], t.strideH = stride_[1], t.strideW = stride_[2];
        t.dilationD = dilation_[0], t.dilationH = dilation_[1], t.dilationW = dilation_[2];
        t.padFront = pads_[0], t.padBack = pads_[1], t.padUp = pads_[2], t.padDown = pads_[3];
        t.padLeft = pads_[4], t.padRight = pads_[5];
        t.group = t.singleCoreGroup = t.singleCoreDin = t.singleCoreHo = t.baseD = t.baseBatch = t.baseGroup = 1;
        t.stepM = t.stepN = t.stepBatch = t.stepGroup = t.singleCoreBatch = t.iterateOrder = t.cl0Pbuffer = 1;
        t.al0Pbuffer = t.bl0Pbuffer = 2;
        t.singleCoreCout = t.cout1 * t.c0, t.singleCoreCout1 = t.cout1;
        t.backpropPadUp = (t.hk - 1) * t.dilationH - t.padUp;
        t.backpropPadLeft = (t.wk - 1) * t.dilationW - t.padLeft;
        const int64_t head = (kernel_[0] - 1) * dilation_[0] - pads_[0];
        uint32_t* high[] = {&t.backpropPadTail, &t.backpropPadDown, &t.backpropPadRight};
        const int64_t low[] = {head, t.backpropPadUp, t.backpropPadLeft};
        bool unreached = stride_[1] > kernel_[1] || dilation_[0] > 1;
        for (int axis = 0; axis < 3; ++axis) {
            const int64_t exact = input_[axis] - ((output_[axis] - 1) * stride_[axis] + 1) +
                                  (kernel_[axis] - 1) * dilation_[axis] - low[axis];
            *high[axis] = exact >= 0 && exact <= 255
                              ? exact
                              : std::max<int64_t>(0, input_[axis] - output_[axis] * stride_[axis] + pads_[2 * axis]);
            const int64_t rest = (input_[axis] + pads_[2 * axis] + pads_[2 * axis + 1] -
                                  (kernel_[axis] - 1) * dilation_[axis] - 1) % stride_[axis];
            unreached = unreached || (axis < 2 && rest > pads_[2 * axis + 1]);
        }
        t.initOutputFlag = unreached || (transposed_ && (t.backpropPadDown > 0 || head > 0));
    }
    // The largest block of pixels and channels whose operands fit L0 and, with one window of K, L1.
    bool FindTile(TConv3DBackpropInputTiling& t) const {
        const uint64_t e = 32 / t.c0, taps = uint64_t{t.hk} * t.wk, channels = uint64_t{t.cin1} * t.c0;
        const uint64_t pixels = CeilDiv(uint64_t{t.hi} * t.wi, 16) * 16;
        uint64_t best = 0;
        for (uint32_t buffers : {2u, 1u}) {
            for (uint64_t m = 16; m <= std::min<uint64_t>(pixels, 1024); m += 16) {
                for (uint64_t n = t.c0; n <= std::min<uint64_t>(channels, 1024); n += t.c0) {
                    uint64_t part = 0;  // taps of one slice of K: a divisor of all taps
                    for (uint64_t d = 1; d <= taps; ++d) {
                        if (taps % d == 0 && std::max(m, n) * d * t.c0 * e <= platform_.l0ASize / 2) part = d;
                    }
                    const uint64_t rows = (m % t.wi == 0 ? m / t.wi : m / t.wi + 2) + uint64_t{t.hk - 1} * t.dilationH;
                    const uint64_t stretched = std::min(rows, uint64_t{t.ho - 1} * t.strideH + 1);
                    const uint64_t l1 = buffers * e * (stretched * t.wo * t.strideW * t.c0 + n * taps * t.c0);
                    const bool fits = part > 0 && m * n * 4 <= platform_.l0CSize && l1 <= platform_.l1Size - 128;
                    if (!fits || m * n <= best) continue;
                    best = m * n;
                    t.baseM = m, t.baseN = n, t.baseK = part * t.c0, t.stepKa = t.stepKb = taps / part;
                    t.al1Pbuffer = t.bl1Pbuffer = buffers;
                }
            }
            if (best) break;
        }
        t.singleCoreM = uint64_t{t.hi} * t.wi, t.singleCoreCin = t.baseN, t.singleCoreCin1 = t.baseN / t.c0;
        return best > 0;
    }

    PlatformInfo platform_;
    std::map<std::string, int64_t> shared_;
    std::map<std::string, std::string> wrong_;
    std::map<std::string, ConvDtype> types_;
    std::vector<std::string> reasons_;
    Three kernel_{0, 0, 0}, input_{0, 0, 0}, output_{0, 0, 0}, outputPad_{0, 0, 0};
    Three stride_{1, 1, 1}, dilation_{1, 1, 1};
    std::array<int64_t, 6> pads_{0, 0, 0, 0, 0, 0};
    bool transposed_ = true;
};

}  // namespace ConvBackpropApi
