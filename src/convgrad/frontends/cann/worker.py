"""The process behind the C functions: maps their device memory and answers both phases with this dialect."""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .conv_tbc import aclnnConvTbcBackward, aclnnConvTbcBackwardGetWorkspaceSize
from .convolution_backward import aclnnConvolutionBackward, aclnnConvolutionBackwardGetWorkspaceSize
from .descriptors import aclDataType, aclFormat, aclTensor, numpy_dtype
from .execution import aclOpExecutor
from .products import set_product
from .runtime import aclrtCtxSetSysParamOpt, aclSysParamOpt
from .status import INVALID, RUNTIME, Refusal, aclGetRecentErrMsg, aclnnStatus, refused

Bytes = npt.NDArray[np.uint8]
# Phase 1 of each operator, how many tensors come before its other arguments, and those arguments.
PHASE_ONE: dict[str, tuple[Callable[..., Any], int, tuple[str, ...]]] = {
    "aclnnConvolutionBackward": (aclnnConvolutionBackwardGetWorkspaceSize, 3, (
        "biasSizes", "stride", "padding", "dilation", "transposed", "outputPadding", "groups", "outputMask",
        "cubeMathType")),
    "aclnnConvTbcBackward": (aclnnConvTbcBackwardGetWorkspaceSize, 4, ("pad", "cubeMathType")),
}
PHASE_TWO = {"aclnnConvolutionBackward": aclnnConvolutionBackward, "aclnnConvTbcBackward": aclnnConvTbcBackward}


def serve(arena_fd: int, arena_size: int, socket_fd: int) -> None:
    """Answer requests, one JSON object per line, until the program closes its end."""
    arena = np.frombuffer(mmap.mmap(arena_fd, arena_size), np.uint8)
    if os.environ.get("CONVGRAD_CANN_PRODUCT"):
        set_product(os.environ["CONVGRAD_CANN_PRODUCT"])
    connection = socket.socket(fileno=socket_fd)
    connection.sendall(b"ready\n")
    executors: dict[int, aclOpExecutor] = {}
    for line in connection.makefile("r", encoding="utf-8"):
        try:
            status, size, number = answered(json.loads(line), arena, executors)
            text = aclGetRecentErrMsg()
        except Exception as error:  # the program gets a status; the traceback is ours
            status, size, number, text = RUNTIME, 0, -1, f"{type(error).__name__}: {error}"
            sys.excepthook(type(error), error, error.__traceback__)
        text = " ".join(text.split())
        connection.sendall(f"{int(status)} {size} {number}\n{text}\n".encode())


def answered(request: dict[str, Any], arena: Bytes,
             executors: dict[int, aclOpExecutor]) -> tuple[aclnnStatus, int, int]:
    """Do what a request asks; return (status, workspaceSize, number of the executor)."""
    if request["call"] == "run":
        place, size = request["workspace"], request["size"]
        workspace = None if place is None else arena[place:place + size]
        return PHASE_TWO[request["operator"]](workspace, size, executors[request["executor"]], None), 0, -1
    aclrtCtxSetSysParamOpt(aclSysParamOpt.ACL_OPT_DETERMINISTIC, request["deterministic"])
    try:
        tensors: list[Any] = [tensor_of(described, arena) for described in request["tensors"]]
    except Refusal as refusal:
        return refused(refusal), 0, -1
    backend = os.environ.get("CONVGRAD_BACKEND") or None
    phase_one, first, names = PHASE_ONE[request["call"]]
    arguments = [*tensors[:first], *(request[name] for name in names), *tensors[first:]]
    status, size, executor = phase_one(*arguments, backend=backend)
    number = len(executors)
    if executor is not None:
        executors[number] = executor
    return status, size, number


def tensor_of(described: dict[str, Any] | None, arena: Bytes) -> aclTensor | None:
    """The tensor of a description: a view of the device memory, or a descriptor without data."""
    if described is None:
        return None
    try:
        dtype, form = aclDataType(described["dtype"]), aclFormat(described["format"])
        place = described["place"]
        if place is None or min(described["shape"], default=0) < 0:
            return aclTensor(shape=described["shape"], dtype=dtype, format=form)
        if place < 0:
            raise ValueError("tensorData is not device memory that aclrtMalloc gave out")
        size = described["room"] // numpy_dtype(dtype).itemsize * numpy_dtype(dtype).itemsize
        return aclTensor(arena[place:place + size], shape=described["shape"], dtype=dtype, format=form,
                         strides=described["strides"], offset=described["offset"])
    except (TypeError, ValueError) as error:
        raise Refusal(INVALID, str(error)) from None
