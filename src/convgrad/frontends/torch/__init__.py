"""The PyTorch front end: differentiable functions, `install` and `patch`, public as `convgrad.torch`."""

from .functions import conv, conv_transpose
from .patching import patch, patched, unpatch
from .registration import install, installed, uninstall
from .report import report

__all__ = ["conv", "conv_transpose", "install", "installed", "patch", "patched", "report", "uninstall", "unpatch"]
