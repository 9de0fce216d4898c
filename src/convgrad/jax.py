"""convgrad for JAX: convolutions inside jit, grad, jvp, vmap and sharded programs."""

from .frontends.jax import *  # noqa: F403
from .frontends.jax import __all__ as __all__
