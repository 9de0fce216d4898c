"""The JAX front end, public as `convgrad.jax`: convolutions that every transformation of JAX knows."""

from .functions import bias_grad, conv, conv_transpose, input_grad, weight_grad
from .lax_convolution import conv_general_dilated
from .lowering import explain_route

__all__ = ["bias_grad", "conv", "conv_general_dilated", "conv_transpose", "explain_route", "input_grad", "weight_grad"]
