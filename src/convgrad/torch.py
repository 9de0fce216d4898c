"""`import convgrad.torch`: another name of `convgrad.frontends.torch`, differentiable convolutions for PyTorch."""

import sys

from .frontends.torch import *  # noqa: F403

sys.modules[__name__] = sys.modules["convgrad.frontends.torch"]
