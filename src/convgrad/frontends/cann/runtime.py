"""The few calls around an operator in a CANN program, so that a program can be ported line by line. Memory is NumPy."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ACL_SUCCESS = 0
ACL_ERROR_INVALID_PARAM = 100000


class aclrtMemMallocPolicy(IntEnum):
    """Accepted by aclrtMalloc; ordinary memory has one kind of pages here."""

    ACL_MEM_MALLOC_HUGE_FIRST = 0
    ACL_MEM_MALLOC_HUGE_ONLY = 1
    ACL_MEM_MALLOC_NORMAL_ONLY = 2


class aclrtMemcpyKind(IntEnum):
    """Accepted by aclrtMemcpy; host and device are the same memory here."""

    ACL_MEMCPY_HOST_TO_HOST = 0
    ACL_MEMCPY_HOST_TO_DEVICE = 1
    ACL_MEMCPY_DEVICE_TO_HOST = 2
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3


class aclSysParamOpt(IntEnum):
    """Options of a context."""

    ACL_OPT_DETERMINISTIC = 0


_options = {aclSysParamOpt.ACL_OPT_DETERMINISTIC: 0}


def aclInit(configPath: Any = None) -> int:
    return ACL_SUCCESS


def aclFinalize() -> int:
    return ACL_SUCCESS


def aclrtSetDevice(deviceId: int) -> int:
    return ACL_SUCCESS


def aclrtResetDevice(deviceId: int) -> int:
    return ACL_SUCCESS


def aclrtCreateStream() -> tuple[int, object]:
    """Return (status, stream). Calls run at once, so a stream orders nothing."""
    return ACL_SUCCESS, object()


def aclrtDestroyStream(stream: Any) -> int:
    return ACL_SUCCESS


def aclrtSynchronizeStream(stream: Any) -> int:
    """Everything has run already."""
    return ACL_SUCCESS


def aclrtMalloc(size: int, policy: int = aclrtMemMallocPolicy.ACL_MEM_MALLOC_HUGE_FIRST) -> tuple[int, Array]:
    """Return (status, memory): `size` bytes as a uint8 array."""
    if size <= 0:
        return ACL_ERROR_INVALID_PARAM, np.empty(0, np.uint8)
    return ACL_SUCCESS, np.empty(size, np.uint8)


def aclrtFree(memory: Any) -> int:
    return ACL_SUCCESS


def aclrtMemcpy(dst: Array, destMax: int, src: Array, count: int, kind: int) -> int:
    """Copy `count` bytes between contiguous arrays; `destMax` is the room at dst."""
    if count > destMax or count > dst.nbytes or count > src.nbytes:
        return ACL_ERROR_INVALID_PARAM
    dst.reshape(-1).view(np.uint8)[:count] = src.reshape(-1).view(np.uint8)[:count]
    return ACL_SUCCESS


def aclrtCtxSetSysParamOpt(opt: int, value: int) -> int:
    """Set an option. Results are deterministic with and without it; some products refuse other calls with it."""
    _options[aclSysParamOpt(opt)] = value
    return ACL_SUCCESS


def aclrtCtxGetSysParamOpt(opt: int) -> tuple[int, int]:
    """Return (status, value) of an option."""
    return ACL_SUCCESS, _options[aclSysParamOpt(opt)]


def deterministic() -> bool:
    return bool(_options[aclSysParamOpt.ACL_OPT_DETERMINISTIC])
