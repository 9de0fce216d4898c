// Tensors, scalars and arrays, and the two phases of the operators: each call becomes one line of JSON.

#include "device.h"

#include "aclnnop/aclnn_convolution_backward.h"

struct aclTensor {
    std::vector<int64_t> shape, strides, storage;
    int64_t offset;
    aclDataType dtype;
    aclFormat format;
    void* data;
};
struct aclScalar {
    std::vector<char> value;
    aclDataType dtype;
};
struct aclIntArray {
    std::vector<int64_t> values;
};
struct aclBoolArray {
    std::vector<bool> values;
};
using namespace convgrad;

namespace {

template <typename Values>
std::string list(const Values& values) {
    std::string text = "[";
    for (auto value : values) text += (text.size() > 1 ? "," : "") + std::to_string(static_cast<long long>(value));
    return text + "]";
}

std::string ints(const aclIntArray* array) { return array == nullptr ? "null" : list(array->values); }
std::string bools(const aclBoolArray* array) { return array == nullptr ? "null" : list(array->values); }

std::string described(const State& s, const aclTensor* tensor) {
    if (tensor == nullptr) return "null";
    std::string place = "null", room = "0";
    if (tensor->data != nullptr) {
        const size_t bytes = room_at(s, tensor->data);
        room = std::to_string(bytes);
        place = bytes == 0 ? "-1" : std::to_string(static_cast<char*>(tensor->data) - s.arena);
    }
    return "{\"shape\":" + list(tensor->shape) + ",\"strides\":" + list(tensor->strides) + ",\"storage\":" +
           list(tensor->storage) + ",\"offset\":" + std::to_string(tensor->offset) + ",\"dtype\":" +
           std::to_string(static_cast<int>(tensor->dtype)) + ",\"format\":" +
           std::to_string(static_cast<int>(tensor->format)) + ",\"place\":" + place + ",\"room\":" + room + "}";
}

aclnnStatus phase_one(const std::string& call, const std::vector<const aclTensor*>& tensors,
                      const std::string& arguments, uint64_t* workspaceSize, aclOpExecutor** executor) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (workspaceSize == nullptr || executor == nullptr) {
        return fail(ACLNN_ERR_PARAM_NULLPTR, call + "GetWorkspaceSize: workspaceSize and executor must not be null");
    }
    std::string request = "{\"call\":\"" + call + "\",\"deterministic\":" + std::to_string(s.deterministic) +
                          ",\"tensors\":[";
    for (size_t i = 0; i < tensors.size(); ++i) request += (i ? "," : "") + described(s, tensors[i]);
    const Answer answer = ask(s, request + "]," + arguments + "}");
    if (answer.status != ACLNN_SUCCESS) return answer.status;
    std::unique_ptr<aclOpExecutor> made(new aclOpExecutor{answer.executor, {}});
    for (const aclTensor* tensor : tensors) {
        if (tensor != nullptr && tensor->data != nullptr) made->tensors.push_back(tensor->data);
    }
    *workspaceSize = answer.size;
    *executor = made.get();
    s.executors.push_back(std::move(made));
    return ACLNN_SUCCESS;
}

aclnnStatus phase_two(const std::string& call, void* workspace, uint64_t workspaceSize, aclOpExecutor* executor) {
    State& s = state();
    std::lock_guard<std::mutex> guard(s.lock);
    if (executor == nullptr) return fail(ACLNN_ERR_PARAM_NULLPTR, call + ": executor is a null pointer");
    bool known = false;
    for (const auto& made : s.executors) known = known || made.get() == executor;
    if (!known) return fail(ACLNN_ERR_PARAM_INVALID, call + ": executor is none that phase 1 returned");
    for (const void* data : executor->tensors) {
        if (room_at(s, data) == 0) {
            return fail(ACLNN_ERR_PARAM_INVALID, call + ": the memory of a tensor was freed after phase 1");
        }
    }
    std::string place = "null";
    if (workspace != nullptr) {
        if (room_at(s, workspace) < workspaceSize) {
            return fail(ACLNN_ERR_PARAM_INVALID, call + ": the workspace is not device memory of workspaceSize=" +
                                                     std::to_string(workspaceSize) + " bytes");
        }
        place = std::to_string(static_cast<char*>(workspace) - s.arena);
    }
    return ask(s, "{\"call\":\"run\",\"operator\":\"" + call + "\",\"executor\":" + std::to_string(executor->id) +
                      ",\"workspace\":" + place + ",\"size\":" + std::to_string(workspaceSize) + "}")
        .status;
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
                           int64_t offset, aclFormat format, const int64_t* storageDims, uint64_t storageDimsNum,
                           void* tensorData) {
    if ((viewDims == nullptr && viewDimsNum > 0) || (storageDims == nullptr && storageDimsNum > 0) ||
        viewDimsNum > 64 || storageDimsNum > 64) {
        message = "aclCreateTensor: extents are missing, or more than 64";
        return nullptr;
    }
    auto* tensor = new aclTensor{std::vector<int64_t>(viewDims, viewDims + viewDimsNum), {},
                                 std::vector<int64_t>(storageDims, storageDims + storageDimsNum), offset, dataType,
                                 format, tensorData};
    if (stride != nullptr) {
        tensor->strides.assign(stride, stride + viewDimsNum);
    } else {
        tensor->strides.assign(viewDimsNum, 1);
        for (size_t i = viewDimsNum; i-- > 1;) tensor->strides[i - 1] = tensor->strides[i] * tensor->shape[i];
    }
    return tensor;
}

aclScalar* aclCreateScalar(void* value, aclDataType dataType) {
    const size_t size = aclDataTypeSize(dataType);
    if (value == nullptr || size == 0) return nullptr;
    const char* bytes = static_cast<const char*>(value);
    return new aclScalar{std::vector<char>(bytes, bytes + size), dataType};
}

aclIntArray* aclCreateIntArray(const int64_t* value, uint64_t size) {
    return value == nullptr && size > 0 ? nullptr : new aclIntArray{std::vector<int64_t>(value, value + size)};
}

aclBoolArray* aclCreateBoolArray(const bool* value, uint64_t size) {
    return value == nullptr && size > 0 ? nullptr : new aclBoolArray{std::vector<bool>(value, value + size)};
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyScalar(const aclScalar* scalar) {
    delete scalar;
    return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
    delete array;
    return ACLNN_SUCCESS;
}

aclnnStatus aclDestroyBoolArray(const aclBoolArray* array) {
    delete array;
    return ACLNN_SUCCESS;
}

aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** viewDims, uint64_t* viewDimsNum) {
    if (tensor == nullptr || viewDims == nullptr || viewDimsNum == nullptr) return ACLNN_ERR_PARAM_NULLPTR;
    *viewDimsNum = tensor->shape.size();
    *viewDims = new int64_t[tensor->shape.size()];  // the caller deletes it, as documented
    for (size_t i = 0; i < tensor->shape.size(); ++i) (*viewDims)[i] = tensor->shape[i];
    return ACLNN_SUCCESS;
}

aclnnStatus aclnnConvolutionBackwardGetWorkspaceSize(
    const aclTensor* gradOutput, const aclTensor* input, const aclTensor* weight, const aclIntArray* biasSizes,
    const aclIntArray* stride, const aclIntArray* padding, const aclIntArray* dilation, bool transposed,
    const aclIntArray* outputPadding, int groups, const aclBoolArray* outputMask, int8_t cubeMathType,
    aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
    const std::string arguments =
        "\"biasSizes\":" + ints(biasSizes) + ",\"stride\":" + ints(stride) + ",\"padding\":" + ints(padding) +
        ",\"dilation\":" + ints(dilation) + ",\"transposed\":" + (transposed ? "true" : "false") +
        ",\"outputPadding\":" + ints(outputPadding) + ",\"groups\":" + std::to_string(groups) + ",\"outputMask\":" +
        bools(outputMask) + ",\"cubeMathType\":" + std::to_string(cubeMathType);
    return phase_one("aclnnConvolutionBackward", {gradOutput, input, weight, gradInput, gradWeight, gradBias},
                     arguments, workspaceSize, executor);
}

aclnnStatus aclnnConvolutionBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     const aclrtStream) {
    return phase_two("aclnnConvolutionBackward", workspace, workspaceSize, executor);
}

aclnnStatus aclnnConvTbcBackwardGetWorkspaceSize(
    const aclTensor* self, const aclTensor* input, const aclTensor* weight, const aclTensor* bias, int64_t pad,
    int8_t cubeMathType, aclTensor* gradInput, aclTensor* gradWeight, aclTensor* gradBias, uint64_t* workspaceSize,
    aclOpExecutor** executor) {
    return phase_one("aclnnConvTbcBackward", {self, input, weight, bias, gradInput, gradWeight, gradBias},
                     "\"pad\":" + std::to_string(pad) + ",\"cubeMathType\":" + std::to_string(cubeMathType),
                     workspaceSize, executor);
}

aclnnStatus aclnnConvTbcBackward(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, const aclrtStream) {
    return phase_two("aclnnConvTbcBackward", workspace, workspaceSize, executor);
}

}  // extern "C"
