"""Names as C code writes them, without their enum, and PyTorch tensors as data."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad import cann

ENUMS = (cann.aclDataType, cann.aclFormat, cann.aclrtMemMallocPolicy, cann.aclrtMemcpyKind, cann.aclSysParamOpt,
         cann.aclnnStatus, cann.CubeMathType)


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_every_member_has_its_unscoped_name(enum):
    for member in enum:
        assert getattr(cann, member.name) is member
        assert member.name in cann.__all__


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_torch_tensors_are_wrapped_without_a_copy(name):
    torch = pytest.importorskip("torch")
    values = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for data in (values, values.T):
        tensor = cann.aclTensor(data)
        assert tensor.shape == tuple(data.shape)
        assert tensor.array.__array_interface__["data"][0] == data.data_ptr()
        assert tensor.array.astype(np.float64).tolist() == data.double().tolist()
        assert cann.descriptors.ENGINE_NAMES[tensor.dtype] == name


def test_gradients_of_torch_tensors(backend):
    torch = pytest.importorskip("torch")
    dy, x, w = (torch.ones(shape, dtype=torch.bfloat16) for shape in ((1, 2, 3, 3), (1, 2, 3, 3), (2, 2, 1, 1)))
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty(2, dtype=torch.bfloat16)
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        dy, x, w, [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3, 0, dx, dw, db, backend=backend)
    assert status == cann.ACLNN_SUCCESS, cann.aclGetRecentErrMsg()
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == cann.ACLNN_SUCCESS
    assert (dx == 2).all() and (dw == 9).all() and (db == 9).all()


def test_a_torch_tensor_elsewhere_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="on the CPU, got device meta"):
        cann.aclTensor(torch.empty(2, device="meta"))
