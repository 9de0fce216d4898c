"""convgrad for PyTorch: differentiable convolutions, and our gradients behind PyTorch's own layers."""

from .frontends.torch import *  # noqa: F403
from .frontends.torch import __all__ as __all__
