"""`import convgrad.jax`: another name of `convgrad.frontends.jax`, differentiable convolutions for JAX."""

import sys

from .frontends.jax import *  # noqa: F403

sys.modules[__name__] = sys.modules["convgrad.frontends.jax"]
