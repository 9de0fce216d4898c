"""The convolution operators of oneDNN Graph: the same attributes, defaults and results, run by convgrad's plans."""

from __future__ import annotations

from . import dnnl
from .compiled import Compiled, LogicalTensor
from .errors import (
    AutoPadWarning,
    GraphError,
    InvalidArguments,
    InvalidGraph,
    InvalidGraphOp,
    InvalidShape,
    OutputPaddingWarning,
    Unimplemented,
)
from .operator import Operator
from .operators import (
    OPERATORS,
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardWeights,
    ConvTranspose,
    ConvTransposeBackwardData,
    ConvTransposeBackwardWeights,
)

__all__ = [
    "OPERATORS", "AutoPadWarning", "Compiled", "ConvTranspose", "ConvTransposeBackwardData",
    "ConvTransposeBackwardWeights", "Convolution", "ConvolutionBackwardData", "ConvolutionBackwardWeights",
    "GraphError", "InvalidArguments", "InvalidGraph", "InvalidGraphOp", "InvalidShape", "LogicalTensor", "Operator",
    "OutputPaddingWarning", "Unimplemented", "dnnl",
]
