"""A CANN call without an NPU: aclnnConvolutionBackward in two phases, with its status codes.

The first phase checks and plans, the second computes. What the product would refuse is refused here, with its code.
"""

import numpy as np

from convgrad import cann

FLOAT, NCHW = cann.aclDataType.ACL_FLOAT, cann.aclFormat.ACL_FORMAT_NCHW


def tensor(data: np.ndarray) -> cann.aclTensor:
    strides = [stride // data.itemsize for stride in data.strides]
    return cann.aclCreateTensor(list(data.shape), data.ndim, FLOAT, strides, 0, NCHW, list(data.shape), data.ndim, data)


dy, x, w = np.ones((1, 4, 6, 6), "f"), np.ones((1, 2, 8, 8), "f"), np.ones((4, 2, 3, 3), "f")
dx, dw, db = np.zeros_like(x), np.zeros_like(w), np.zeros(4, "f")


def phase_one(stride: int) -> tuple[int, int, object]:
    def pair(value: int) -> cann.aclIntArray:
        return cann.aclCreateIntArray([value, value], 2)

    return cann.aclnnConvolutionBackwardGetWorkspaceSize(
        tensor(dy), tensor(x), tensor(w), cann.aclCreateIntArray([4], 1), pair(stride), pair(0), pair(1), False,
        pair(0), 1, cann.aclCreateBoolArray([True, True, True], 3), 0, tensor(dx), tensor(dw),
        cann.aclCreateTensor([4], 1, FLOAT, [1], 0, cann.aclFormat.ACL_FORMAT_ND, [4], 1, db))


status, size, executor = phase_one(stride=1)
workspace = np.empty(size, np.uint8) if size else None
print("status", status, "then", cann.aclnnConvolutionBackward(workspace, size, executor, None))
print("gradInput, one channel:\n", dx[0, 0].astype(int), "\ngradBias:", db.astype(int))

status, _, _ = phase_one(stride=0)
print("a stride of 0:", status, cann.aclGetRecentErrMsg().splitlines()[0])
