"""CANN's backward convolutions in Python: the same names, shapes, refusals and status codes, on any machine."""

from __future__ import annotations

from collections.abc import Callable

from . import constants
from .constants import *  # noqa: F403
from .conv3d_ops import Conv3DBackpropFilterV2, Conv3DBackpropInputV2, Conv3DTransposeV2
from .conv_tbc import aclnnConvTbcBackward, aclnnConvTbcBackwardGetWorkspaceSize
from .convolution_backward import aclnnConvolutionBackward, aclnnConvolutionBackwardGetWorkspaceSize
from .descriptors import (
    aclBoolArray,
    aclCreateBoolArray,
    aclCreateIntArray,
    aclCreateTensor,
    aclDataType,
    aclDestroyBoolArray,
    aclDestroyIntArray,
    aclDestroyTensor,
    aclFormat,
    aclIntArray,
    aclTensor,
)
from .execution import aclOpExecutor
from .formats import transdata
from .gradients import CubeMathType
from .products import FACTS, Product, get_product, set_product
from .runtime import (
    ACL_ERROR_INVALID_PARAM,
    ACL_SUCCESS,
    aclFinalize,
    aclInit,
    aclrtCreateStream,
    aclrtCtxGetSysParamOpt,
    aclrtCtxSetSysParamOpt,
    aclrtDestroyStream,
    aclrtFree,
    aclrtMalloc,
    aclrtMemcpy,
    aclrtMemcpyKind,
    aclrtMemMallocPolicy,
    aclrtResetDevice,
    aclrtSetDevice,
    aclrtSynchronizeStream,
    aclSysParamOpt,
)
from .status import GraphError, aclGetRecentErrMsg, aclnnStatus


def infer_shape(operator: object, *args: object, **attributes: object) -> tuple[int, ...]:
    """Shape of y of a graph operator (or its name) alone, with the arguments of the operator; -1 where unknown.

    Examples
    --------
    >>> from convgrad import cann
    >>> cann.infer_shape("Conv3DBackpropInputV2", [8, 8, 24, 32], data_format="NDHWC")
    (8, 1, 8, 24, 32)
    """
    known: dict[str, Callable[..., tuple[int, ...]]] = {
        "Conv3DBackpropInputV2": Conv3DBackpropInputV2.infer_shape,
        "Conv3DBackpropFilterV2": Conv3DBackpropFilterV2.infer_shape,
        "Conv3DTransposeV2": Conv3DTransposeV2.infer_shape}
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", "")
    if name not in known:
        raise ValueError(f"operator={operator!r} is none of {', '.join(known)}")
    return known[name](*args, **attributes)


__all__ = [
    *constants.__all__,
    "ACL_ERROR_INVALID_PARAM", "ACL_SUCCESS", "FACTS", "Conv3DBackpropFilterV2", "Conv3DBackpropInputV2",
    "Conv3DTransposeV2", "CubeMathType", "GraphError", "Product", "aclBoolArray", "aclCreateBoolArray",
    "aclCreateIntArray", "aclCreateTensor", "aclDataType", "aclDestroyBoolArray", "aclDestroyIntArray",
    "aclDestroyTensor", "aclFinalize", "aclFormat", "aclGetRecentErrMsg", "aclInit", "aclIntArray", "aclOpExecutor",
    "aclSysParamOpt", "aclTensor", "aclnnConvTbcBackward", "aclnnConvTbcBackwardGetWorkspaceSize",
    "aclnnConvolutionBackward", "aclnnConvolutionBackwardGetWorkspaceSize", "aclnnStatus", "aclrtCreateStream",
    "aclrtCtxGetSysParamOpt", "aclrtCtxSetSysParamOpt", "aclrtDestroyStream", "aclrtFree", "aclrtMalloc",
    "aclrtMemMallocPolicy", "aclrtMemcpy", "aclrtMemcpyKind", "aclrtResetDevice", "aclrtSetDevice",
    "aclrtSynchronizeStream", "get_product", "infer_shape", "set_product", "transdata",
]
