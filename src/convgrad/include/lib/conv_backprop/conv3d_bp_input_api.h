// Conv3DBackpropInput on a CPU: each Iterate computes one block of dX from packed memory, and every call is checked
// against the tiling and against the calls before it. A mistake throws ConvBackpropApi::Misuse.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "lib/conv_backprop/conv3d_bp_input_tiling_data.h"
#include "lib/conv_backprop/conv3d_bp_types.h"

using AscendC::GetBlockIdx;
using AscendC::GlobalTensor;

namespace ConvBackpropApi {

using AscendC::tiling::TConv3DBackpropInputTiling;

struct Conv3dConfig {
    int loadB2Condition;
    bool enableKernelSplit;
};
constexpr Conv3dConfig CONV3D_CFG_DEFAULT = {1, false};

// Lengths that follow from the tiling.
struct Sizes {
    uint64_t weightGroup, gradOutputSample, outputDepth, outputSample, innerK, fullK, stretchedRows, windowRows;
    explicit Sizes(const TConv3DBackpropInputTiling& t)
        : weightGroup(uint64_t{t.hk} * t.wk * CeilDiv(t.cout, 16) * 16 * t.c0),
          gradOutputSample(uint64_t{t.dout} * t.cout1 * t.ho * t.wo * t.c0),
          outputDepth(uint64_t{t.cin1} * t.hi * t.wi * t.c0), outputSample(t.di * outputDepth),
          innerK(uint64_t{t.cout1} * t.hk * t.wk * t.c0), fullK(t.dk * innerK),
          stretchedRows(uint64_t{t.ho - 1} * t.strideH + 1), windowRows(0) {
        const uint64_t rows = t.baseM % t.wi == 0  ? t.baseM / t.wi
                              : t.baseM > t.wi     ? t.baseM / t.wi + 2
                              : t.wi % t.baseM == 0 ? 1
                                                    : 2;
        windowRows = rows + uint64_t{t.hk - 1} * t.dilationH;
    }
};

// Refuses a tiling that contradicts itself or does not fit L0.
inline void CheckTiling(const TConv3DBackpropInputTiling& t, uint64_t elementBytes) {
    const uint32_t positive[] = {t.batch, t.cin, t.cout, t.c0, t.dout, t.ho, t.wo, t.di, t.hi, t.wi, t.dk, t.hk, t.wk,
                                 t.strideD, t.strideH, t.strideW, t.dilationD, t.dilationH, t.dilationW, t.baseM,
                                 t.baseK, t.baseN, t.stepKa, t.stepKb, t.al0Pbuffer, t.bl0Pbuffer};
    for (uint32_t value : positive) {
        if (value == 0) throw Misuse("tiling-invalid", "Init with a tiling that has a 0 where a size must be positive");
    }
    if (t.c0 * elementBytes != 32) {
        throw Misuse("types", "the tiling has c0=" + Text(uint64_t{t.c0}) + ", not that of the type");
    }
    const uint64_t padUp = uint64_t{t.hk - 1} * t.dilationH - t.padUp;
    const uint64_t padLeft = uint64_t{t.wk - 1} * t.dilationW - t.padLeft;
    if (t.cin1 != CeilDiv(t.cin, t.c0) || t.cout1 != CeilDiv(t.cout, t.c0) || t.group != 1 || t.stepM != 1 ||
        t.stepN != 1 || t.backpropPadUp != padUp || t.backpropPadLeft != padLeft || t.iterateOrder > 1) {
        throw Misuse("tiling-invalid", "Init with a tiling whose fields contradict each other");
    }
    if (t.baseN % t.c0 || t.baseK % t.c0 || t.baseM % std::min(t.c0, 16u) || t.singleCoreM % t.wi ||
        t.stepKa * t.baseK % (t.hk * t.wk * t.c0) || t.stepKb * t.baseK % (t.hk * t.wk * t.c0)) {
        throw Misuse("tiling-invalid", "Init with a tile that is not made of whole blocks");
    }
    if (uint64_t{t.baseM} * t.baseK * elementBytes > 65536 / t.al0Pbuffer ||
        uint64_t{t.baseK} * t.baseN * elementBytes > 65536 / t.bl0Pbuffer ||
        uint64_t{t.baseM} * t.baseN * 4 > 131072) {
        throw Misuse("tiling-invalid", "Init with a tile of " + Text(uint64_t{t.baseM}) + " x " +
                                           Text(uint64_t{t.baseN}) + " that does not fit L0");
    }
}

template <class WEIGHT_TYPE, class INPUT_TYPE, class GRAD_OUTPUT_TYPE, class GRAD_INPUT_TYPE,
          const Conv3dConfig& CONV3D_CONFIG = CONV3D_CFG_DEFAULT>
struct Conv3DBpInputCfg {
    using WeightType = WEIGHT_TYPE;
    using InputType = INPUT_TYPE;
    using GradOutputType = GRAD_OUTPUT_TYPE;
    using GradInputType = GRAD_INPUT_TYPE;
    using SrcT = typename WEIGHT_TYPE::Type;
    using DstT = typename GRAD_INPUT_TYPE::Type;
    static_assert(WEIGHT_TYPE::pos == TPosition::GM && INPUT_TYPE::pos == TPosition::GM &&
                      GRAD_OUTPUT_TYPE::pos == TPosition::GM && GRAD_INPUT_TYPE::pos == TPosition::GM,
                  "every tensor lies in GM");
    static_assert(WEIGHT_TYPE::format == ConvFormat::FRACTAL_Z_3D, "the weight is FRACTAL_Z_3D");
    static_assert(GRAD_OUTPUT_TYPE::format == ConvFormat::NDC1HWC0, "GradOutput is NDC1HWC0");
    static_assert(INPUT_TYPE::format == ConvFormat::ND, "InputSize is ND");
    static_assert(GRAD_INPUT_TYPE::format == ConvFormat::NDC1HWC0 || GRAD_INPUT_TYPE::format == ConvFormat::NCDHW,
                  "GradInput is NDC1HWC0, or NCDHW through a workspace");
    static_assert(std::is_same<typename GRAD_OUTPUT_TYPE::Type, SrcT>::value && std::is_same<DstT, SrcT>::value,
                  "Weight, GradOutput and GradInput have one type");
    static_assert(std::is_same<typename INPUT_TYPE::Type, int32_t>::value, "InputSize is int32_t");
};

template <typename Intf, class Config>
struct Conv3DBpInputImpl {};

template <class Config_, template <typename, class> class Impl>
struct Conv3DBpInputIntf {
    using Config = Config_;
    using SrcT = typename Config::SrcT;
    using DstT = typename Config::DstT;

    struct {
        bool isFirstIter_ = true;
    } ctx;

    void Init(const TConv3DBackpropInputTiling* tiling) {
        if (ended_) throw Misuse("after-end", "Init after End; create a new object");
        if (tiling_ != nullptr) throw Misuse("init-twice", "Init was already called; it may be called once per object");
        CheckTiling(*tiling, sizeof(SrcT));
        tiling_ = tiling;
        sizes_ = std::make_unique<Sizes>(*tiling);
    }

    void SetSingleShape(uint64_t singleShapeM, uint64_t singleShapeK, uint32_t singleShapeN) {
        Setter("SetSingleShape", 1);
        const auto& t = *tiling_;
        const std::string call = "SetSingleShape(M=" + Text(singleShapeM) + ", K=" + Text(singleShapeK) + ", N=" +
                                 Text(uint64_t{singleShapeN}) + "): ";
        if (singleShapeK != sizes_->fullK) {
            if (singleShapeN == sizes_->fullK || singleShapeM == sizes_->fullK) {
                throw Misuse("argument-order", call + "K must be dk*cout1*hk*wk*c0 = " + Text(sizes_->fullK) +
                                                   "; the order is M, K, N");
            }
            throw Misuse("single-shape", call + "K must be dk*cout1*hk*wk*c0 = " + Text(sizes_->fullK));
        }
        if (singleShapeM == 0 || singleShapeM % t.wi || singleShapeM > uint64_t{t.hi} * t.wi) {
            throw Misuse("rows", call + "M must be whole dX rows of wi=" + Text(uint64_t{t.wi}) + ", at most hi*wi");
        }
        if (singleShapeN == 0 || singleShapeN > t.cin1 * t.c0) {
            throw Misuse("single-shape", call + "N must be from 1 to cin1*c0 = " + Text(uint64_t{t.cin1} * t.c0));
        }
        const bool resident = t.dk == 1 && t.bl1Pbuffer == 1 && t.baseN / t.c0 >= t.singleCoreCin1 &&
                              uint64_t{t.baseK} * t.stepKb >= uint64_t{t.singleCoreCout} * t.hk * t.wk;
        if (resident && CeilDiv(singleShapeN, t.c0) * t.c0 > t.baseN) {
            throw Misuse("resident-weights", call + "the weights of baseN channels stay in L1 for the whole piece");
        }
        m_ = singleShapeM;
        cin1_ = CeilDiv(singleShapeN, t.c0);
    }

    void SetStartPosition(uint32_t curDinStartIdx, int32_t curHoStartIdx) {
        Setter("SetStartPosition", 2);
        const auto& t = *tiling_;
        const int64_t up = t.backpropPadUp, highest = int64_t{t.hi} - 1 - up;
        if (curDinStartIdx >= t.di) {
            throw Misuse("start-position", "SetStartPosition: the depth must be in 0.." + Text(uint64_t{t.di} - 1));
        }
        if (curHoStartIdx < -up || curHoStartIdx > highest) {
            const bool row = curHoStartIdx > highest && curHoStartIdx < static_cast<int64_t>(t.hi);
            throw Misuse(row ? "start-row-pad" : "start-position",
                         "SetStartPosition: the row must be in " + Text(-up) + ".." + Text(highest) +
                             ", the first dX row minus backpropPadUp=" + Text(up));
        }
        depth_ = curDinStartIdx;
        startRow_ = curHoStartIdx;
    }

    void SetGradOutput(const GlobalTensor<SrcT>& gradOutput) {
        Setter("SetGradOutput", 4);
        gradOutput_ = gradOutput;
    }

    void SetWeight(const GlobalTensor<SrcT>& weight) {
        Setter("SetWeight", 8);
        weight_ = weight;
    }

    template <bool sync = true>
    bool Iterate(bool enPartialSum = false) {
        Called("Iterate");
        if (enPartialSum) throw std::invalid_argument("Conv3DBackpropInput: enPartialSum is reserved");
        if (given_ != 15) throw Misuse("piece-incomplete", "Iterate before all four setters of the piece");
        LoseBlock("Iterate");
        const auto& t = *tiling_;
        const uint64_t mIter = CeilDiv(m_, t.baseM), nIter = CeilDiv(cin1_ * t.c0, t.baseN);
        if (ctx.isFirstIter_) {
            CheckPiece();
            mIdx_ = nIdx_ = 0;
            ctx.isFirstIter_ = setterSinceStart_ = finished_ = false;
        } else {
            if (finished_ || setterSinceStart_) {
                throw Misuse("first-iter", "Iterate for a new piece, or after the last block, with ctx.isFirstIter_ = "
                                           "false; set it to true after each finished piece");
            }
            uint64_t& fast = t.iterateOrder == 1 ? mIdx_ : nIdx_;
            uint64_t& slow = t.iterateOrder == 1 ? nIdx_ : mIdx_;
            if (++fast == (t.iterateOrder == 1 ? mIter : nIter)) {
                fast = 0;
                ++slow;
            }
            if (mIdx_ >= mIter || nIdx_ >= nIter) {
                finished_ = true;
                blockReady_ = false;
                return false;
            }
        }
        Multiply();
        started_ = blockReady_ = true;
        blockTaken_ = false;
        return true;
    }

    template <bool sync = true>
    void GetTensorC(GlobalTensor<DstT> output, uint8_t enAtomic = 0, bool enSequentialWrite = false) {
        Called("GetTensorC");
        if (!blockReady_) throw Misuse("no-block", "GetTensorC without an Iterate that returned true before it");
        if (blockTaken_) throw Misuse("block-taken", "GetTensorC a second time for one Iterate; L0C was freed");
        if (enSequentialWrite) throw std::invalid_argument("Conv3DBackpropInput: enSequentialWrite is reserved");
        if (Shares(output, gradOutput_) || Shares(output, weight_)) {
            throw Misuse("operand-overwritten", "GetTensorC into the memory of an operand, which later blocks read");
        }
        constexpr bool plain = Config::GradInputType::format == ConvFormat::NCDHW;
        if (plain) {
            CheckSlot(output);
        } else {
            CheckOutput(output, enAtomic);
        }
        blockTaken_ = true;
        output.buffer().writers.push_back(ended());
        if (skipped_) return;
        const auto& t = *tiling_;
        const uint64_t groups = useN_ / t.c0;
        const uint64_t start = plain ? GetBlockIdx() * uint64_t{t.baseM} * t.baseN
                                     : nIdx_ * t.baseN * t.hi * t.wi +
                                           (mIdx_ * t.baseM + uint64_t{depth_} * t.hi * t.wi * t.cin1) * t.c0;
        const uint64_t stride = plain ? useM_ * t.c0 : uint64_t{t.hi} * t.wi * t.c0;
        for (uint64_t j = 0; j < groups; ++j) {
            for (uint64_t p = 0; p < useM_; ++p) {
                for (uint64_t c = 0; c < t.c0; ++c) {
                    const uint64_t place = start + j * stride + p * t.c0 + c;
                    if (!plain && !enAtomic && place + output.offset() < output.buffer().size &&
                        output.buffer().written[place + output.offset()]) {
                        throw Misuse("written-twice", "element " + Text(place + output.offset()) +
                                                          " of dX was written by an earlier block already");
                    }
                    const float value = block_[p * useN_ + j * t.c0 + c];
                    output.SetValue(place, DstT(enAtomic ? float(output.GetValue(place)) + value : value));
                }
            }
        }
        if (plain) {
            slot_ = output;
            dumped_ = {output.offset() + start, useM_, useN_, group_ * t.c0 + nIdx_ * t.baseN};
            output.buffer().slots[dumped_.place] = {uint64_t{t.baseM} * t.baseN, this};
            std::fill_n(output.buffer().read.begin() + dumped_.place, useM_ * useN_, 0);
        }
    }

    void End() {
        Called("End");
        LoseBlock("End");
        if (!started_) throw Misuse("end-early", "End before the first Iterate; nothing was computed");
        if (!finished_) throw Misuse("end-early", "End in the middle of a piece; go on until Iterate returns false");
        if (setterSinceStart_) throw Misuse("end-early", "End after the setters of a piece that was not iterated");
        CheckMoved("End");
        if (dumped_.pixels) slot_.buffer().slots.erase(dumped_.place);
        ended_ = true;
        *ended() = true;
    }

private:
    void Called(const char* method) {
        if (tiling_ == nullptr) throw Misuse("init-missing", std::string(method) + " before Init(tiling)");
        if (ended_) throw Misuse("after-end", std::string(method) + " after End; the queues are already freed");
    }
    void Setter(const char* method, int bit) {
        Called(method);
        given_ |= bit;
        setterSinceStart_ = true;
    }
    void LoseBlock(const char* method) {
        if (blockReady_ && !blockTaken_) {
            throw Misuse("block-lost", std::string(method) + " while the block of the last Iterate still lies in L0C");
        }
    }
    template <typename A, typename B>
    static bool Shares(const A& a, const B& b) {
        const auto *x = reinterpret_cast<const char*>(a.memory()), *y = reinterpret_cast<const char*>(b.memory());
        return x < y + b.buffer().size * sizeof(SrcT) && y < x + a.buffer().size * sizeof(DstT);
    }
    std::shared_ptr<bool>& ended() {
        if (!endedFlag_) endedFlag_ = std::make_shared<bool>(false);
        return endedFlag_;
    }
    uint64_t Aligned(int64_t row) const { return row < 0 ? 0 : CeilDiv(row, tiling_->strideH); }

    // Rows, dY pointer and weight pointer belong together.
    void CheckPiece() {
        const auto& t = *tiling_;
        const int64_t firstRow = startRow_ + int64_t{t.backpropPadUp};
        if (firstRow + static_cast<int64_t>(m_ / t.wi) > static_cast<int64_t>(t.hi)) {
            throw Misuse("rows", Text(m_ / t.wi) + " rows from dX row " + Text(firstRow) + " on do not fit hi=" +
                                     Text(uint64_t{t.hi}));
        }
        const uint64_t row = uint64_t{t.wo} * t.c0, got = gradOutput_.offset() % sizes_->gradOutputSample;
        const uint64_t expected = Aligned(startRow_) * row;
        if (got != expected) {
            if (depth_ && got == expected + uint64_t{depth_} * t.cout1 * t.ho * row) {
                throw Misuse("depth-twice", "the GradOutput pointer holds the depth " + Text(uint64_t{depth_}) +
                                                "; the object chooses the depth itself");
            }
            const bool pad = t.backpropPadUp && got == Aligned(startRow_ - int64_t{t.backpropPadUp}) * row;
            throw Misuse(pad ? "start-row-pad" : "grad-output-offset",
                         "the GradOutput pointer must be n*" + Text(sizes_->gradOutputSample) + " + " + Text(expected) +
                             ", got " + Text(gradOutput_.offset()));
        }
        group_ = weight_.offset() / sizes_->weightGroup;
        if (weight_.offset() % sizes_->weightGroup || group_ + cin1_ > t.cin1) {
            throw Misuse("weight-offset", "the Weight pointer " + Text(weight_.offset()) + " must be j*" +
                                              Text(sizes_->weightGroup) + ", the channels inside the weight");
        }
        firstRow_ = static_cast<uint64_t>(firstRow);
    }

    void CheckOutput(const GlobalTensor<DstT>& output, uint8_t enAtomic) {
        const auto& t = *tiling_;
        const uint64_t row = uint64_t{t.wi} * t.c0;
        const bool whole = gradOutput_.buffer().size == t.batch * sizes_->gradOutputSample &&
                           output.buffer().size == t.batch * sizes_->outputSample;
        const uint64_t batch = whole ? gradOutput_.offset() / sizes_->gradOutputSample
                                     : output.offset() / sizes_->outputSample;
        const uint64_t expected = batch * sizes_->outputSample + group_ * t.hi * row + firstRow_ * row;
        if (output.offset() != expected) {
            const bool twice = depth_ && output.offset() == expected + depth_ * sizes_->outputDepth;
            throw Misuse(twice ? "depth-twice" : "output-offset",
                         "the output pointer must be " + Text(expected) + ", without the depth, which GetTensorC adds; "
                             "got " + Text(output.offset()));
        }
        if ((t.initOutputFlag || enAtomic) && !output.buffer().touched && !output.buffer().zeroChecked) {
            for (uint64_t i = 0; i < output.buffer().size; ++i) {
                if (!(float(output.memory()[i]) == 0.0f)) {
                    throw Misuse("not-zeroed", "dX must be zero at first; element " + Text(i) + " is not");
                }
            }
            output.buffer().zeroChecked = true;
        }
    }

    // The block in the workspace was read, all of it but the channels that fill up the last group.
    void CheckMoved(const char* method) {
        const auto& t = *tiling_;
        for (uint64_t c = 0; c < dumped_.channels && dumped_.channel + c < t.cin; ++c) {
            for (uint64_t p = 0; p < dumped_.pixels; ++p) {
                if (!slot_.buffer().read[dumped_.place + (c / t.c0 * dumped_.pixels + p) * t.c0 + c % t.c0]) {
                    throw Misuse("not-transposed", std::string(method) + " while a block still lies in the workspace; "
                                                   "with an NCDHW GradInput it must be moved to dX first");
                }
            }
        }
    }

    // An NCDHW block goes to a free slot of a workspace and must be read from there before the next one.
    void CheckSlot(const GlobalTensor<DstT>& output) {
        const auto& t = *tiling_;
        const uint64_t length = uint64_t{t.baseM} * t.baseN, first = output.offset() + GetBlockIdx() * length;
        if (output.buffer().size == t.batch * uint64_t{t.cin} * t.di * t.hi * t.wi && output.buffer().size != length) {
            throw Misuse("workspace", "GetTensorC into dX itself; with an NCDHW GradInput it takes a workspace of "
                                      "baseM*baseN = " + Text(length) + " elements per core");
        }
        CheckMoved("GetTensorC");
        for (const auto& slot : output.buffer().slots) {
            if (slot.first < first + length && first < slot.first + slot.second.first && slot.second.second != this) {
                throw Misuse("operand-overwritten", "the workspace slot at " + Text(first) +
                                                        " holds the block of another core");
            }
        }
    }

    // One block in float: every tap of the stretched dY, zeros included, over all valid kernel depths.
    void Multiply() {
        const auto& t = *tiling_;
        const uint64_t first = mIdx_ * t.baseM;
        useM_ = std::min<uint64_t>(t.baseM, m_ - first);
        useN_ = std::min<uint64_t>(t.baseN, cin1_ * t.c0 - nIdx_ * t.baseN);
        const int64_t top = startRow_ + static_cast<int64_t>(first / t.wi), low = std::max<int64_t>(top, 0);
        const int64_t high = std::min<int64_t>(top + sizes_->windowRows, sizes_->stretchedRows) - 1;
        const bool rows = low <= high && static_cast<int64_t>(CeilDiv(low, t.strideH)) <= high / int64_t{t.strideH};
        block_.assign(useM_ * useN_, 0.0f);
        skipped_ = true;
        for (uint64_t kd = 0; kd < t.dk; ++kd) {
            const int64_t d = int64_t{depth_} + t.padFront - static_cast<int64_t>(kd * t.dilationD);
            if (d < 0 || d % t.strideD || d >= int64_t{t.dout} * t.strideD) continue;
            if (t.initOutputFlag == 1 && !rows) continue;
            skipped_ = false;
            AddDepth(kd, static_cast<uint64_t>(d / t.strideD), first);
        }
    }

    void AddDepth(uint64_t kd, uint64_t dyDepth, uint64_t first) {
        const auto& t = *tiling_;
        const uint64_t couts = CeilDiv(t.cout, 16) * 16, groups = useN_ / t.c0;
        for (uint64_t p = 0; p < useM_; ++p) {
            const int64_t h = firstRow_ + (first + p) / t.wi, w = (first + p) % t.wi;
            for (uint64_t kh = 0; kh < t.hk; ++kh) {
                for (uint64_t kw = 0; kw < t.wk; ++kw) {
                    const int64_t y = h + t.padUp - static_cast<int64_t>(kh * t.dilationH);
                    const int64_t x = w + t.padLeft - static_cast<int64_t>(kw * t.dilationW);
                    const bool real = y >= 0 && x >= 0 && y % t.strideH == 0 && x % t.strideW == 0 &&
                                      y / t.strideH < t.ho && x / t.strideW < t.wo;
                    for (uint64_t co = 0; co < t.cout1 * uint64_t{t.c0}; ++co) {
                        float value = 0.0f;
                        if (real) {
                            const uint64_t row = (dyDepth * t.cout1 + co / t.c0) * t.ho + y / t.strideH;
                            const uint64_t pixel = (row - Aligned(startRow_)) * t.wo + x / t.strideW;
                            value = float(gradOutput_.GetValue(pixel * t.c0 + co % t.c0));
                        }
                        for (uint64_t j = 0; j < groups; ++j) {
                            const uint64_t group = kd * t.cin1 + nIdx_ * (t.baseN / t.c0) + j;
                            const uint64_t column = group * sizes_->weightGroup +
                                                    ((kh * t.wk + kw) * couts + co) * t.c0;
                            for (uint64_t c = 0; c < t.c0; ++c) {
                                block_[p * useN_ + j * t.c0 + c] += value * float(weight_.GetValue(column + c));
                            }
                        }
                    }
                }
            }
        }
    }

    const TConv3DBackpropInputTiling* tiling_ = nullptr;
    std::unique_ptr<Sizes> sizes_;
    uint64_t m_ = 0, cin1_ = 0, firstRow_ = 0, group_ = 0, mIdx_ = 0, nIdx_ = 0, useM_ = 0, useN_ = 0;
    uint32_t depth_ = 0;
    int64_t startRow_ = 0;
    GlobalTensor<SrcT> gradOutput_, weight_;
    GlobalTensor<DstT> slot_;
    struct {
        uint64_t place = 0, pixels = 0, channels = 0, channel = 0;
    } dumped_;  // the NCDHW block in the workspace slot
    std::vector<float> block_;
    std::shared_ptr<bool> endedFlag_;
    int given_ = 0;
    bool ended_ = false, started_ = false, finished_ = true, setterSinceStart_ = false;
    bool blockReady_ = false, blockTaken_ = false, skipped_ = false;
};

template <class WEIGHT_TYPE, class INPUT_TYPE, class GRAD_OUTPUT_TYPE, class GRAD_INPUT_TYPE>
using Conv3DBackpropInput =
    Conv3DBpInputIntf<Conv3DBpInputCfg<WEIGHT_TYPE, INPUT_TYPE, GRAD_OUTPUT_TYPE, GRAD_INPUT_TYPE, CONV3D_CFG_DEFAULT>,
                      Conv3DBpInputImpl>;

// An extension: throws unless every object that wrote `output` has ended and every element was written. With
// initOutputFlag, elements may be left as they were zeroed.
template <typename T>
void CheckCoverage(const GlobalTensor<T>& output, const TConv3DBackpropInputTiling& tiling) {
    for (const auto& writer : output.buffer().writers) {
        const auto ended = writer.lock();
        if (ended && !*ended) throw Misuse("end-missing", "an object that wrote dX has not called End");
    }
    if (tiling.initOutputFlag) return;
    for (uint64_t i = 0; i < output.buffer().size; ++i) {
        if (!output.buffer().written[i]) {
            throw Misuse("never-written", "element " + Text(i) + " of dX was written by no block");
        }
    }
}

}  // namespace ConvBackpropApi
