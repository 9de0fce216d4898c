"""Status codes of the two-phase functions, the refusal that carries one, and the most recent error message."""

from __future__ import annotations

import threading
from enum import IntEnum


class aclnnStatus(IntEnum):
    """Return values of aclnn functions, with the vendor's numbers."""

    ACLNN_SUCCESS = 0
    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002
    ACLNN_ERR_RUNTIME_ERROR = 361001
    ACLNN_ERR_INNER = 561000
    ACLNN_ERR_INNER_INFERSHAPE_ERROR = 561001
    ACLNN_ERR_INNER_TILING_ERROR = 561002
    ACLNN_ERR_INNER_FIND_KERNEL_ERROR = 561003
    ACLNN_ERR_INNER_CREATE_EXECUTOR = 561101
    ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR = 561102
    ACLNN_ERR_INNER_NULLPTR = 561103


SUCCESS = aclnnStatus.ACLNN_SUCCESS
NULLPTR = aclnnStatus.ACLNN_ERR_PARAM_NULLPTR
INVALID = aclnnStatus.ACLNN_ERR_PARAM_INVALID
RUNTIME = aclnnStatus.ACLNN_ERR_RUNTIME_ERROR
INNER_NULLPTR = aclnnStatus.ACLNN_ERR_INNER_NULLPTR

# When this dialect returns a code; the documentation table is made from this.
MEANINGS = {
    SUCCESS: "the phase did what was asked",
    NULLPTR: "a required argument is None, outputMask has not 3 entries, a tensor that is read or written has no data, "
             "a workspace or an executor is missing; aclnnConvTbcBackward also reports a gradient that cannot be "
             "computed this way",
    INVALID: "an argument breaks a rule: number format, storage format, rank, value, shape, channels, groups, "
             "cubeMathType; in phase 2 a workspace that is too small or an executor that was used before",
    RUNTIME: "phase 2 failed while it ran",
    INNER_NULLPTR: "the arguments are valid, but the product (or the engine) has no kernel for them: a value outside "
                   "the documented range, an 8-bit bias sum, an 8-bit gradInput of a normal convolution",
}


class Refusal(Exception):
    """A call that is answered with a status instead of work; the message says argument, rule and numbers."""

    def __init__(self, status: aclnnStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class GraphError(ValueError):
    """A graph operator that fails shape inference or tiling; the message says argument, rule and numbers."""


class _Recent(threading.local):
    message = ""


recent = _Recent()


def aclGetRecentErrMsg() -> str:
    """Return why the last aclnn call of this thread was refused, or "" when it succeeded."""
    return recent.message


def refused(refusal: Refusal) -> aclnnStatus:
    """Remember the sentence of a refusal and return its status."""
    recent.message = str(refusal)
    return refusal.status
