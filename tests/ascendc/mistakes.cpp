// Every mistake that the C++ objects tell apart, provoked on one small problem; prints "mistake" or what happened.

#include <cstdio>
#include <functional>
#include <vector>

#include "lib/conv_backprop/conv3d_bp_input_api.h"
#include "lib/conv_backprop/conv3d_bp_input_tiling.h"

using namespace ConvBackpropApi;

template <ConvFormat FORMAT>
using Object = Conv3DBackpropInput<ConvType<TPosition::GM, ConvFormat::FRACTAL_Z_3D, half>,
                                   ConvType<TPosition::GM, ConvFormat::ND, int32_t>,
                                   ConvType<TPosition::GM, ConvFormat::NDC1HWC0, half>,
                                   ConvType<TPosition::GM, FORMAT, half>>;

// W 20x40x1x3x3, dX 1x40x4x6x8, dY 1x20x4x6x8, height and width padded by 1; tile 16 x 16.
struct Launch {
    optiling::Conv3DBackpropInputTilingData data;
    TConv3DBackpropInputTiling& t = data.conv3DDxTiling;
    std::vector<half> dy, weight, dx, plain, workspace;
    GlobalTensor<half> dyGm, weightGm, dxGm, plainGm, workspaceGm;
    Object<ConvFormat::NDC1HWC0> op;
    Object<ConvFormat::NCDHW> ncdhw;

    explicit Launch(int32_t initOutputFlag = 0) {
        Conv3DBpInputTiling host;
        host.SetWeightShape(20, 40, 1, 3, 3);
        host.SetInputShape(1, 40, 4, 6, 8);
        host.SetGradOutputShape(1, 20, 4, 6, 8);
        host.SetPadding(0, 0, 1, 1, 1, 1);
        host.GetTiling(data);
        t.baseM = t.baseN = t.singleCoreCin = 16, t.singleCoreCin1 = 1, t.singleCoreM = 24;
        t.baseK = 144, t.stepKa = t.stepKb = 1, t.al1Pbuffer = t.bl1Pbuffer = 2;
        t.initOutputFlag = initOutputFlag;
        dy.assign(4 * 2 * 48 * 16, half(1)), weight.assign(3 * 9 * 32 * 16, half(1));
        dx.assign(4 * 3 * 48 * 16, half(7)), plain.assign(40 * 4 * 48, half(7)), workspace.assign(512, half(0));
        dyGm.SetGlobalBuffer(dy.data(), dy.size()), weightGm.SetGlobalBuffer(weight.data(), weight.size());
        dxGm.SetGlobalBuffer(dx.data(), dx.size()), plainGm.SetGlobalBuffer(plain.data(), plain.size());
        workspaceGm.SetGlobalBuffer(workspace.data(), workspace.size());
    }
    template <typename T>
    void Set(T& object, uint32_t depth = 0, uint64_t m = 48, uint64_t k = 288, uint32_t n = 32, int32_t row = -1,
             uint64_t a = 0, uint64_t b = 0) {
        object.SetSingleShape(m, k, n);
        object.SetStartPosition(depth, row);
        object.SetGradOutput(dyGm[a]);
        object.SetWeight(weightGm[b]);
    }
    void Begin() { op.Init(&t), Set(op); }
    void First(uint64_t output = 0) { Begin(), op.Iterate(), op.GetTensorC(dxGm[output]); }
    void Finish() {
        while (op.Iterate()) op.GetTensorC(dxGm);
    }
};

static void Try(const char* what, const std::function<void(Launch&)>& action, int32_t flag = 0) {
    Launch run(flag);
    try {
        action(run);
        std::printf("%s: nothing was refused\n", what);
    } catch (const Misuse& error) {
        std::printf("%s: %s\n", what, error.mistake);
    } catch (const std::out_of_range&) {
        std::printf("%s: out of range\n", what);
    }
}

int main() {
    Try("Iterate before Init", [](Launch& r) { r.op.Iterate(); });
    Try("Init twice", [](Launch& r) { r.op.Init(&r.t), r.op.Init(&r.t); });
    Try("a tile over L0C", [](Launch& r) { r.t.baseM = 2064, r.op.Init(&r.t); });
    Try("a tiling of another type", [](Launch& r) { r.t.c0 = 8, r.op.Init(&r.t); });
    Try("Iterate before the setters", [](Launch& r) { r.op.Init(&r.t), r.op.Iterate(); });
    Try("M is not whole rows", [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 20); });
    Try("SetSingleShape(M, N, K)", [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 48, 32, 288); });
    Try("K of half the channels", [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 48, 144); });
    Try("a depth that dX does not have", [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 4); });
    Try("the start row itself", [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 48, 288, 32, 5); });
    Try("more rows than are left",
        [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 48, 288, 32, 0), r.op.Iterate(); });
    Try("the dY pointer of another row",
        [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 48, 288, 32, -1, 384), r.op.Iterate(); });
    Try("a weight pointer inside a group",
        [](Launch& r) { r.op.Init(&r.t), r.Set(r.op, 0, 48, 288, 32, -1, 0, 256), r.op.Iterate(); });
    Try("the output pointer of another group", [](Launch& r) { r.First(768); });
    Try("the depth in the output pointer", [](Launch& r) {
        r.op.Init(&r.t), r.Set(r.op, 2), r.op.Iterate(), r.op.GetTensorC(r.dxGm[2 * 3 * 48 * 16]);
    });
    Try("Iterate twice", [](Launch& r) { r.Begin(), r.op.Iterate(), r.op.Iterate(); });
    Try("GetTensorC before Iterate", [](Launch& r) { r.Begin(), r.op.GetTensorC(r.dxGm); });
    Try("GetTensorC twice", [](Launch& r) { r.First(), r.op.GetTensorC(r.dxGm); });
    Try("Iterate after the last block", [](Launch& r) { r.Begin(), r.Finish(), r.op.Iterate(); });
    Try("the next piece without isFirstIter_", [](Launch& r) { r.Begin(), r.Finish(), r.Set(r.op, 1), r.op.Iterate(); });
    Try("GetTensorC into dY", [](Launch& r) { r.Begin(), r.op.Iterate(), r.op.GetTensorC(r.dyGm); });
    Try("initOutputFlag, not zeroed", [](Launch& r) { r.First(); }, 1);
    Try("enAtomic, not zeroed", [](Launch& r) { r.Begin(), r.op.Iterate(), r.op.GetTensorC(r.dxGm, 1); });
    Try("the same piece twice", [](Launch& r) {
        r.Begin(), r.Finish(), r.op.ctx.isFirstIter_ = true, r.Set(r.op), r.Finish();
    });
    Try("Init, then End", [](Launch& r) { r.op.Init(&r.t), r.op.End(); });
    Try("End in mid-piece", [](Launch& r) { r.First(), r.op.End(); });
    Try("End with a block", [](Launch& r) { r.Begin(), r.op.Iterate(), r.op.End(); });
    Try("End twice", [](Launch& r) { r.Begin(), r.Finish(), r.op.End(), r.op.End(); });
    Try("coverage before End", [](Launch& r) { r.Begin(), r.Finish(), CheckCoverage(r.dxGm, r.t); });
    Try("a piece left out", [](Launch& r) { r.Begin(), r.Finish(), r.op.End(), CheckCoverage(r.dxGm, r.t); });
    Try("NCDHW into dX", [](Launch& r) {
        r.ncdhw.Init(&r.t), r.Set(r.ncdhw), r.ncdhw.Iterate(), r.ncdhw.GetTensorC(r.plainGm);
    });
    Try("NCDHW, not moved", [](Launch& r) {
        r.ncdhw.Init(&r.t), r.Set(r.ncdhw), r.ncdhw.Iterate(), r.ncdhw.GetTensorC(r.workspaceGm);
        r.ncdhw.Iterate(), r.ncdhw.GetTensorC(r.workspaceGm);
    });
    Try("NCDHW, End without moving", [](Launch& r) {
        r.t.baseM = 48, r.ncdhw.Init(&r.t), r.Set(r.ncdhw, 0, 48, 288, 16), r.workspace.resize(768);
        r.workspaceGm.SetGlobalBuffer(r.workspace.data(), 768);
        while (r.ncdhw.Iterate()) r.ncdhw.GetTensorC(r.workspaceGm);
        r.ncdhw.End();
    });
    Try("outside the memory", [](Launch& r) { r.dxGm[999999]; });
    return 0;
}
