"""convgrad computes the gradients of convolutions for any Python array, exactly to a written contract."""

__version__ = "0.1.0"
