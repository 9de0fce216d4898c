"""The PyTorch front end, public as `convgrad.torch`: functions, layers, `install` and `patch`."""

from .functional import (
    conv,
    conv1d,
    conv2d,
    conv3d,
    conv_tbc,
    conv_transpose,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from .grad import conv1d_input, conv1d_weight, conv2d_input, conv2d_weight, conv3d_input, conv3d_weight
from .modules import (
    CausalConv1d,
    CausalConv2d,
    CausalConv3d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTBC,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from .patching import patch, patched, unpatch
from .per_sample import per_sample_weight_grad
from .registration import install, installed, uninstall
from .report import report

__all__ = [
    "CausalConv1d", "CausalConv2d", "CausalConv3d", "Conv1d", "Conv2d", "Conv3d", "ConvTBC", "ConvTranspose1d",
    "ConvTranspose2d", "ConvTranspose3d", "conv", "conv1d", "conv1d_input", "conv1d_weight", "conv2d", "conv2d_input",
    "conv2d_weight", "conv3d", "conv3d_input", "conv3d_weight", "conv_tbc", "conv_transpose", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "install", "installed", "patch", "patched", "per_sample_weight_grad",
    "report", "uninstall", "unpatch",
]
