"""The PyTorch front end: differentiable functions and `patch`, public as `convgrad.torch`."""

from .functions import conv, conv_transpose
from .patching import patch, patched, unpatch
from .registration import install, installed, uninstall

__all__ = ["conv", "conv_transpose", "install", "installed", "patch", "patched", "uninstall", "unpatch"]
