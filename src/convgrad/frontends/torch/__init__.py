"""The PyTorch front end, public as `convgrad.torch`: functions, layers, `install` and `patch`."""

from .fp8 import Fp8Conv1d, Fp8Conv2d, Fp8Conv3d
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
from .main_grad import accumulate_main_grad
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
from .precompiling import precompile
from .registration import install, installed, uninstall
from .report import report

__all__ = [
    "CausalConv1d", "CausalConv2d", "CausalConv3d", "Conv1d", "Conv2d", "Conv3d", "ConvTBC", "ConvTranspose1d",
    "ConvTranspose2d", "ConvTranspose3d", "Fp8Conv1d", "Fp8Conv2d", "Fp8Conv3d", "accumulate_main_grad", "conv",
    "conv1d", "conv1d_input", "conv1d_weight", "conv2d", "conv2d_input", "conv2d_weight", "conv3d", "conv3d_input",
    "conv3d_weight", "conv_tbc", "conv_transpose", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "install", "installed", "patch", "patched", "per_sample_weight_grad", "precompile", "report", "uninstall",
    "unpatch",
]
