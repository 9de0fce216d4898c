// Conv3DBackpropInput as the page of the API writes it, host and kernel, run core by core on a CPU and compared with
// the plain gradient:
//   g++ -std=c++17 $(convgrad cann --cflags) examples/ascendc/kernel.cpp -o kernel && ./kernel

#include <cmath>
#include <cstdio>
#include <vector>

#include "lib/conv_backprop/conv3d_bp_input_api.h"
#include "lib/conv_backprop/conv3d_bp_input_tiling.h"

struct Problem {
    int64_t cin, cout, di, hi, wi, dk, hk, wk, stride, pad;
    int64_t outD() const { return (di - dk) / stride + 1; }
    int64_t outH() const { return (hi + 2 * pad - hk) / stride + 1; }
    int64_t outW() const { return (wi + 2 * pad - wk) / stride + 1; }
};

template <typename T>
class GradInputKernel {
public:
    using weightDxType = ConvBackpropApi::ConvType<ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::FRACTAL_Z_3D, T>;
    using inputSizeDxType = ConvBackpropApi::ConvType<ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::ND, int32_t>;
    using gradOutputDxType = ConvBackpropApi::ConvType<ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::NDC1HWC0, T>;
    using gradInputDxType = ConvBackpropApi::ConvType<ConvCommonApi::TPosition::GM, ConvCommonApi::ConvFormat::NDC1HWC0, T>;

    __aicore__ void Init(GlobalTensor<T> gradOutput, GlobalTensor<T> weight, GlobalTensor<T> gradInput,
                         const optiling::Conv3DBackpropInputTilingData* tilingData)
    {
        gradOutputGm_ = gradOutput;
        weightGm_ = weight;
        gradInputGm_ = gradInput;
        tiling_ = &(tilingData->conv3DDxTiling);
        gradInput_.Init(&(tilingData->conv3DDxTiling));
    }

    // One piece per depth and block of channels; core b of `cores` takes every piece whose number leaves the rest b.
    __aicore__ void Process(int64_t cores)
    {
        const auto& t = *tiling_;
        int64_t number = 0;
        for (uint32_t dinStartIdx_ = 0; dinStartIdx_ < t.di; ++dinStartIdx_) {
            for (uint64_t channel = 0; channel < t.cin; channel += t.singleCoreCin, ++number) {
                if (number % cores != GetBlockIdx()) continue;
                const uint64_t group = channel / t.c0;
                const uint64_t singleShapeM_ = uint64_t{t.hi} * t.wi;
                const uint64_t singleShapeK_ = uint64_t{t.dk} * t.cout1 * t.hk * t.wk * t.c0;
                const uint32_t singleShapeN_ = std::min<uint64_t>(t.singleCoreCin, t.cin - channel);
                const int32_t curHoStartIdx_ = -static_cast<int32_t>(t.backpropPadUp);
                const uint64_t offsetA_ = 0, offsetC_ = group * t.hi * t.wi * t.c0;
                const uint64_t offsetB_ = group * t.hk * t.wk * ((t.cout + 15) / 16) * 16 * t.c0;
                gradInput_.SetSingleShape(singleShapeM_, singleShapeK_, singleShapeN_);
                gradInput_.SetStartPosition(dinStartIdx_, curHoStartIdx_);
                gradInput_.SetGradOutput(gradOutputGm_[offsetA_]);
                gradInput_.SetWeight(weightGm_[offsetB_]);
                while (gradInput_.Iterate()) {
                    gradInput_.GetTensorC(gradInputGm_[offsetC_]);
                }
                gradInput_.ctx.isFirstIter_ = true;
            }
        }
        gradInput_.End();
    }

private:
    ConvBackpropApi::Conv3DBackpropInput<weightDxType, inputSizeDxType, gradOutputDxType, gradInputDxType> gradInput_;
    GlobalTensor<T> gradOutputGm_, weightGm_, gradInputGm_;
    const ConvBackpropApi::TConv3DBackpropInputTiling* tiling_ = nullptr;
};

static int Value(int64_t place) { return static_cast<int>(place * 7 % 5) - 2; }

template <typename T>
bool Run(const char* name, const Problem& p, ConvCommonApi::ConvDtype dtype, int64_t cores)
{
    ConvBackpropApi::Conv3DBpInputTiling host(platform_ascendc::PlatformAscendC("Ascend910B"));
    using ConvCommonApi::ConvFormat;
    using ConvCommonApi::TPosition;
    host.SetWeightType(TPosition::GM, ConvFormat::FRACTAL_Z_3D, dtype);
    host.SetInputType(TPosition::GM, ConvFormat::NDC1HWC0, dtype);
    host.SetGradOutputType(TPosition::GM, ConvFormat::NDC1HWC0, dtype);
    const int64_t outD = p.outD(), outH = p.outH(), outW = p.outW();
    if (!host.SetWeightShape(p.cout, p.cin, p.dk, p.hk, p.wk) || !host.SetInputShape(1, p.cin, p.di, p.hi, p.wi) ||
        !host.SetGradOutputShape(1, p.cout, outD, outH, outW)) {
        return false;
    }
    host.SetPadding(0, 0, p.pad, p.pad, p.pad, p.pad);
    host.SetStride(p.stride, p.stride, p.stride);
    optiling::Conv3DBackpropInputTilingData tilingData;
    if (host.GetTiling(tilingData) == -1) {
        std::printf("%s: %s\n", name, host.explain().c_str());
        return false;
    }
    const auto& t = tilingData.conv3DDxTiling;

    // Pack dY as NDC1HWC0 and the weight as FRACTAL_Z_3D.
    const int64_t c0 = t.c0, couts = (p.cout + 15) / 16 * 16;
    std::vector<T> dy(outD * t.cout1 * outH * outW * c0), weight(p.dk * t.cin1 * p.hk * p.wk * couts * c0);
    std::vector<T> dx(p.di * t.cin1 * p.hi * p.wi * c0, T(t.initOutputFlag ? 0.0f : std::nanf("")));
    for (int64_t d = 0, i = 0; d < outD; ++d)
        for (int64_t c = 0; c < p.cout; ++c)
            for (int64_t hw = 0; hw < outH * outW; ++hw, ++i)
                dy[((d * t.cout1 + c / c0) * outH * outW + hw) * c0 + c % c0] = T(Value(i));
    for (int64_t o = 0; o < p.cout; ++o)
        for (int64_t c = 0; c < p.cin; ++c)
            for (int64_t k = 0; k < p.dk; ++k)
                for (int64_t hw = 0; hw < p.hk * p.wk; ++hw)
                    weight[(((k * t.cin1 + c / c0) * p.hk * p.wk + hw) * couts + o) * c0 + c % c0] =
                        T(Value(((o * p.cin + c) * p.dk + k) * p.hk * p.wk + hw));

    GlobalTensor<T> dyGm, weightGm, dxGm;
    dyGm.SetGlobalBuffer(dy.data(), dy.size());
    weightGm.SetGlobalBuffer(weight.data(), weight.size());
    dxGm.SetGlobalBuffer(dx.data(), dx.size());
    for (AscendC::BlockIdx() = 0; AscendC::BlockIdx() < cores; ++AscendC::BlockIdx()) {
        GradInputKernel<T> kernel;
        kernel.Init(dyGm, weightGm, dxGm, &tilingData);
        kernel.Process(cores);
    }
    AscendC::BlockIdx() = 0;
    ConvBackpropApi::CheckCoverage(dxGm, t);

    // The plain gradient.
    int64_t wrong = 0;
    for (int64_t c = 0; c < p.cin; ++c)
        for (int64_t d = 0; d < p.di; ++d)
            for (int64_t h = 0; h < p.hi; ++h)
                for (int64_t w = 0; w < p.wi; ++w) {
                    float sum = 0;
                    for (int64_t o = 0; o < p.cout; ++o)
                        for (int64_t kd = 0; kd < p.dk; ++kd)
                            for (int64_t kh = 0; kh < p.hk; ++kh)
                                for (int64_t kw = 0; kw < p.wk; ++kw) {
                                    const int64_t z = d - kd, y = h + p.pad - kh, x = w + p.pad - kw;
                                    if (z < 0 || y < 0 || x < 0 || z % p.stride || y % p.stride || x % p.stride ||
                                        z / p.stride >= outD || y / p.stride >= outH || x / p.stride >= outW)
                                        continue;
                                    const int64_t place = (z / p.stride * p.cout + o) * outH * outW +
                                                          y / p.stride * outW + x / p.stride;
                                    sum += Value(place) * Value(((o * p.cin + c) * p.dk + kd) * p.hk * p.wk +
                                                                kh * p.wk + kw);
                                }
                    const float found = dx[((d * t.cin1 + c / c0) * p.hi * p.wi + h * p.wi + w) * c0 + c % c0];
                    wrong += !(found == float(T(sum)));
                }
    std::printf("%s: tile %u x %u, %lld wrong elements\n", name, t.baseM, t.baseN, static_cast<long long>(wrong));
    return wrong == 0;
}

int main()
{
    const Problem small = {17, 20, 3, 6, 7, 2, 3, 3, 1, 1}, strided = {9, 5, 4, 9, 8, 2, 2, 2, 2, 0};
    const bool right = Run<half>("half", small, ConvCommonApi::ConvDtype::FLOAT16, 1) &&
                       Run<bfloat16_t>("bfloat16_t", small, ConvCommonApi::ConvDtype::BF16, 3) &&
                       Run<half>("stride 2", strided, ConvCommonApi::ConvDtype::FLOAT16, 2) &&
                       Run<float>("float", small, ConvCommonApi::ConvDtype::FLOAT32, 2);
    return right ? 0 : 1;
}
