"""The PyTorch front end: differentiable functions and `patch`, public as `convgrad.torch`."""

from .functions import conv, conv_transpose
from .install import install, installed, uninstall
from .patching import patch, patched, unpatch
from .precompile import precompile

__all__ = ["conv", "conv_transpose", "install", "installed", "patch", "patched", "precompile", "uninstall", "unpatch"]
