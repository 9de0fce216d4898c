// aclnnConvolutionBackward in 1-D, 2-D and 3-D on ones, whose gradients are known; runs on a CPU:
//   convgrad cann run examples/cann/conv_backward.cpp

#include <cstdio>
#include <memory>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_convolution_backward.h"

#define CHECK_RET(cond, return_expr) \
    do {                             \
        if (!(cond)) {               \
            return_expr;             \
        }                            \
    } while (0)

using Shape = std::vector<int64_t>;
using TensorPtr = std::unique_ptr<aclTensor, aclnnStatus (*)(const aclTensor*)>;
using MemoryPtr = std::unique_ptr<void, aclError (*)(void*)>;
using IntArrayPtr = std::unique_ptr<aclIntArray, aclnnStatus (*)(const aclIntArray*)>;

struct Tensor {
    TensorPtr tensor{nullptr, aclDestroyTensor};
    MemoryPtr memory{nullptr, aclrtFree};
    int64_t size = 1;
};

int CreateOnes(const Shape& shape, Tensor& made)
{
    for (int64_t extent : shape) {
        made.size *= extent;
    }
    std::vector<float> host(made.size, 1);
    const size_t bytes = host.size() * sizeof(float);
    void* device = nullptr;
    auto ret = aclrtMalloc(&device, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
    CHECK_RET(ret == ACL_SUCCESS, return ret);
    made.memory.reset(device);
    ret = aclrtMemcpy(device, bytes, host.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE);
    CHECK_RET(ret == ACL_SUCCESS, return ret);
    Shape strides(shape.size(), 1);
    for (int64_t i = static_cast<int64_t>(shape.size()) - 2; i >= 0; i--) {
        strides[i] = shape[i + 1] * strides[i + 1];
    }
    const aclFormat formats[] = {aclFormat::ACL_FORMAT_ND,  aclFormat::ACL_FORMAT_ND,   aclFormat::ACL_FORMAT_ND,
                                 aclFormat::ACL_FORMAT_NCL, aclFormat::ACL_FORMAT_NCHW, aclFormat::ACL_FORMAT_NCDHW};
    made.tensor.reset(aclCreateTensor(shape.data(), shape.size(), aclDataType::ACL_FLOAT, strides.data(), 0,
                                      formats[shape.size()], shape.data(), shape.size(), device));
    return made.tensor == nullptr ? ACL_ERROR_INTERNAL_ERROR : ACL_SUCCESS;
}

int PrintResult(const char* name, const Tensor& result)
{
    std::vector<float> host(result.size, 0);
    const size_t bytes = host.size() * sizeof(float);
    auto ret = aclrtMemcpy(host.data(), bytes, result.memory.get(), bytes, ACL_MEMCPY_DEVICE_TO_HOST);
    CHECK_RET(ret == ACL_SUCCESS, return ret);
    bool equal = true;
    for (float value : host) {
        equal = equal && value == host[0];
    }
    std::printf(" %s %g%s", name, host[0], equal ? "" : " (not all equal)");
    return ACL_SUCCESS;
}

int Run(const Shape& gradOutputShape, const Shape& inputShape, const Shape& weightShape, int64_t step,
        aclrtStream stream)
{
    const size_t axes = weightShape.size() - 2;
    Tensor gradOutput, input, weight, gradInput, gradWeight, gradBias;
    const Shape biasShape = {gradOutputShape[1]};
    for (auto& [shape, tensor] : {std::pair<const Shape&, Tensor&>{gradOutputShape, gradOutput},
                                  {inputShape, input}, {weightShape, weight}, {inputShape, gradInput},
                                  {weightShape, gradWeight}, {biasShape, gradBias}}) {
        auto ret = CreateOnes(shape, tensor);
        CHECK_RET(ret == ACL_SUCCESS, std::printf("%s\n", aclGetRecentErrMsg()); return ret);
    }
    auto ints = [](const Shape& values) {
        return IntArrayPtr(aclCreateIntArray(values.data(), values.size()), aclDestroyIntArray);
    };
    const auto biasSizes = ints(biasShape), stride = ints(Shape(axes, step)), padding = ints(Shape(axes, 0));
    const auto dilation = ints(Shape(axes, 1)), outputPadding = ints(Shape(axes, 0));
    const bool mask[3] = {true, true, true};
    std::unique_ptr<aclBoolArray, aclnnStatus (*)(const aclBoolArray*)> outputMask(aclCreateBoolArray(mask, 3),
                                                                                  aclDestroyBoolArray);
    uint64_t workspaceSize = 0;
    aclOpExecutor* executor = nullptr;
    auto ret = aclnnConvolutionBackwardGetWorkspaceSize(
        gradOutput.tensor.get(), input.tensor.get(), weight.tensor.get(), biasSizes.get(), stride.get(), padding.get(),
        dilation.get(), false, outputPadding.get(), 1, outputMask.get(), 0, gradInput.tensor.get(),
        gradWeight.tensor.get(), gradBias.tensor.get(), &workspaceSize, &executor);
    CHECK_RET(ret == ACL_SUCCESS, std::printf("phase 1: %d %s\n", ret, aclGetRecentErrMsg()); return ret);
    void* workspace = nullptr;
    if (workspaceSize > 0) {
        ret = aclrtMalloc(&workspace, workspaceSize, ACL_MEM_MALLOC_HUGE_FIRST);
        CHECK_RET(ret == ACL_SUCCESS, return ret);
    }
    MemoryPtr workspacePtr(workspace, aclrtFree);
    ret = aclnnConvolutionBackward(workspace, workspaceSize, executor, stream);
    CHECK_RET(ret == ACL_SUCCESS, std::printf("phase 2: %d %s\n", ret, aclGetRecentErrMsg()); return ret);
    ret = aclrtSynchronizeStream(stream);
    CHECK_RET(ret == ACL_SUCCESS, return ret);
    std::printf("%zu-D:", axes);
    ret = PrintResult("gradInput", gradInput);
    CHECK_RET(ret == ACL_SUCCESS, return ret);
    ret = PrintResult("gradWeight", gradWeight);
    CHECK_RET(ret == ACL_SUCCESS, return ret);
    ret = PrintResult("gradBias", gradBias);
    std::printf("\n");
    return ret;
}

int main()
{
    aclrtStream stream = nullptr;
    auto ret = aclInit(nullptr);
    CHECK_RET(ret == ACL_SUCCESS, std::printf("aclInit: %d %s\n", ret, aclGetRecentErrMsg()); return 1);
    ret = aclrtSetDevice(0);
    CHECK_RET(ret == ACL_SUCCESS, return 1);
    ret = aclrtCreateStream(&stream);
    CHECK_RET(ret == ACL_SUCCESS, return 1);
    const bool right = Run({4, 2, 3}, {4, 2, 9}, {2, 2, 3}, 3, stream) == ACL_SUCCESS &&
                       Run({2, 2, 7, 7}, {2, 2, 7, 7}, {2, 2, 1, 1}, 1, stream) == ACL_SUCCESS &&
                       Run({2, 2, 7, 7, 7}, {2, 2, 7, 7, 7}, {2, 2, 1, 1, 1}, 1, stream) == ACL_SUCCESS;
    aclrtDestroyStream(stream);
    aclrtResetDevice(0);
    aclFinalize();
    return right ? 0 : 1;
}
