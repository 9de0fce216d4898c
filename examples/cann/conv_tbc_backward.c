/* aclnnConvTbcBackward from C, on the shapes of its document; runs on a CPU:
 *   convgrad cann run examples/cann/conv_tbc_backward.c */

#include <stdio.h>

#include "acl/acl.h"
#include "aclnnop/aclnn_convolution_backward.h"

static float host[16];

static aclTensor* ones(const int64_t* shape, uint64_t rank, void** memory)
{
    size_t count = 1;
    for (uint64_t i = 0; i < rank; i++) {
        count *= (size_t)shape[i];
    }
    for (size_t i = 0; i < count; i++) {
        host[i] = 1;
    }
    if (aclrtMalloc(memory, count * sizeof(float), ACL_MEM_MALLOC_HUGE_FIRST) != ACL_SUCCESS ||
        aclrtMemcpy(*memory, count * sizeof(float), host, count * sizeof(float), ACL_MEMCPY_HOST_TO_DEVICE)) {
        return NULL;
    }
    return aclCreateTensor(shape, rank, ACL_FLOAT, NULL, 0, ACL_FORMAT_ND, shape, rank, *memory);
}

static void print(const char* name, const void* memory, size_t count)
{
    aclrtMemcpy(host, sizeof(host), memory, count * sizeof(float), ACL_MEMCPY_DEVICE_TO_HOST);
    printf("%s", name);
    for (size_t i = 0; i < count; i++) {
        printf(" %g", (double)host[i]);
    }
    printf("\n");
}

int main(void)
{
    const int64_t time[] = {5, 1, 2}, taps[] = {1, 2, 2}, channels[] = {2};
    const int64_t* shapes[] = {time, time, taps, channels, time, taps, channels};
    const uint64_t ranks[] = {3, 3, 3, 1, 3, 3, 1};
    aclTensor* tensors[7];
    void* memory[7];
    aclrtStream stream;
    if (aclInit(NULL) != ACL_SUCCESS || aclrtSetDevice(0) != ACL_SUCCESS || aclrtCreateStream(&stream) != ACL_SUCCESS) {
        printf("%s\n", aclGetRecentErrMsg());
        return 1;
    }
    for (int i = 0; i < 7; i++) {
        tensors[i] = ones(shapes[i], ranks[i], &memory[i]);
    }
    uint64_t size = 0;
    aclOpExecutor* executor = NULL;
    aclnnStatus status = aclnnConvTbcBackwardGetWorkspaceSize(tensors[0], tensors[1], tensors[2], tensors[3], 0, 1,
                                                              tensors[4], tensors[5], tensors[6], &size, &executor);
    void* workspace = NULL;
    if (status == ACLNN_SUCCESS && size > 0) {
        status = aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST);
    }
    if (status == ACLNN_SUCCESS) {
        status = aclnnConvTbcBackward(workspace, size, executor, stream);
    }
    if (status != ACLNN_SUCCESS) {
        printf("%d %s\n", status, aclGetRecentErrMsg());
        return 1;
    }
    print("gradInput", memory[4], 10);
    print("gradWeight", memory[5], 4);
    print("gradBias", memory[6], 2);
    for (int i = 0; i < 7; i++) {
        aclDestroyTensor(tensors[i]);
        aclrtFree(memory[i]);
    }
    aclrtFree(workspace);
    aclrtDestroyStream(stream);
    aclFinalize();
    return 0;
}
