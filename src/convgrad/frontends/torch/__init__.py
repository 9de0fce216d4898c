"""The PyTorch front end: differentiable functions and `patch`, public as `convgrad.torch`."""

from .functions import conv, conv_transpose
from .patching import patch, patched, unpatch

__all__ = ["conv", "conv_transpose", "patch", "patched", "unpatch"]
