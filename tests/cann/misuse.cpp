// What the C functions refuse; every line prints one code, with the words of the message where there is one.

#include <cstdio>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_conv_tbc_backward.h"

static void Say(const char* what, int code) { std::printf("%s: %d %s\n", what, code, aclGetRecentErrMsg()); }

int main() {
    void *device = nullptr, *other = nullptr;
    aclrtStream stream = nullptr;
    Say("malloc before init", aclrtMalloc(&device, 64, ACL_MEM_MALLOC_HUGE_FIRST));
    Say("set device before init", aclrtSetDevice(0));
    Say("init", aclInit(nullptr));
    Say("init twice", aclInit(nullptr));
    Say("stream before device", aclrtCreateStream(&stream));
    aclrtSetDevice(0);
    aclrtCreateStream(&stream);
    Say("malloc", aclrtMalloc(&device, 4096, ACL_MEM_MALLOC_HUGE_FIRST));
    Say("malloc of nothing", aclrtMalloc(&other, 0, ACL_MEM_MALLOC_NORMAL_ONLY));
    std::vector<float> host(2048, 1);
    Say("copy too much", aclrtMemcpy(device, 8192, host.data(), 8192, ACL_MEMCPY_HOST_TO_DEVICE));
    Say("copy over destMax", aclrtMemcpy(device, 16, host.data(), 32, ACL_MEMCPY_HOST_TO_DEVICE));
    Say("copy of the wrong kind", aclrtMemcpy(device, 4096, host.data(), 4096, ACL_MEMCPY_DEVICE_TO_HOST));
    Say("copy", aclrtMemcpy(device, 4096, host.data(), 4096, ACL_MEMCPY_HOST_TO_DEVICE));
    const int64_t time[] = {5, 1, 2}, taps[] = {1, 2, 2}, channels[] = {2}, far[] = {600, 1, 2};
    auto make = [&](const int64_t* shape, uint64_t rank, size_t place) {
        return aclCreateTensor(shape, rank, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape, rank,
                               static_cast<char*>(device) + place);
    };
    aclTensor* tensors[] = {make(time, 3, 0), make(time, 3, 256), make(taps, 3, 512), make(channels, 1, 768),
                            make(time, 3, 1024), make(taps, 3, 1280), make(channels, 1, 1536)};
    uint64_t size = 7;
    aclOpExecutor* executor = nullptr;
    auto phase_one = [&](aclTensor* input, int64_t pad, int8_t cube) {
        return aclnnConvTbcBackwardGetWorkspaceSize(tensors[0], input, tensors[2], tensors[3], pad, cube, tensors[4],
                                                    tensors[5], tensors[6], &size, &executor);
    };
    Say("null tensor", phase_one(nullptr, 0, 0));
    Say("pad", phase_one(tensors[1], -1, 0));
    Say("cubeMathType", phase_one(tensors[1], 0, 9));
    aclTensor* beyond = make(far, 3, 0);
    Say("a tensor beyond its memory", phase_one(beyond, 0, 0));
    aclTensor* on_host = aclCreateTensor(time, 3, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, time, 3, host.data());
    Say("a tensor in host memory", phase_one(on_host, 0, 0));
    Say("no executor", aclnnConvTbcBackward(nullptr, 0, nullptr, stream));
    Say("phase 1", phase_one(tensors[1], 0, 0));
    Say("another operator", aclnnConvolutionBackward(nullptr, size, executor, stream));
    Say("a workspace in host memory", aclnnConvTbcBackward(host.data(), 64, executor, stream));
    aclrtMalloc(&other, size, ACL_MEM_MALLOC_HUGE_FIRST);
    Say("no workspace", aclnnConvTbcBackward(nullptr, size, executor, stream));
    Say("phase 2", aclnnConvTbcBackward(other, size, executor, stream));
    Say("phase 2 again", aclnnConvTbcBackward(other, size, executor, stream));
    float result = 0;
    aclrtMemcpy(&result, 4, static_cast<char*>(device) + 1280, 4, ACL_MEMCPY_DEVICE_TO_HOST);
    std::printf("gradWeight %g\n", result);
    phase_one(tensors[1], 0, 0);
    Say("free", aclrtFree(device));
    Say("free twice", aclrtFree(device));
    Say("phase 2 on freed memory", aclnnConvTbcBackward(other, size, executor, stream));
    for (aclTensor* tensor : tensors) aclDestroyTensor(tensor);
    aclDestroyTensor(beyond);
    aclDestroyTensor(on_host);
    aclrtDestroyStream(stream);
    Say("finalize", aclFinalize());
    Say("finalize twice", aclFinalize());
    return 0;
}
