"""`jax.lax.conv_general_dilated` with our gradients: the same signature, translated into one problem.

lax knows one operator. With a dilated input it is a transposed convolution, which is the input gradient of another;
with batch groups it is the weight gradient of a grouped convolution. What is none of these goes to lax itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...numbers import dtype_name
from ...problem import Conv, Problem, Unsupported
from .form import Settings, solve
from .functions import FORMATS, out_dtype_name
from .lowering import planned, settings_of

log = logging.getLogger("convgrad.jax")


def conv_general_dilated(lhs: Any, rhs: Any, window_strides: Sequence[int], padding: Any,
                         lhs_dilation: Sequence[int] | None = None, rhs_dilation: Sequence[int] | None = None,
                         dimension_numbers: Any = None, feature_group_count: int = 1, batch_group_count: int = 1,
                         precision: Any = None, preferred_element_type: Any = None, *,
                         backend: str | None = None) -> Any:
    """Convolution with the signature and the meaning of `jax.lax.conv_general_dilated`, differentiable to any order.

    What we do not serve is computed by lax; the logger `convgrad.jax` says why, at level INFO. `precision` is a lower
    limit there, and all of our sums are above it. `backend` is ours, as in `convgrad.plan`.

    Examples
    --------
    >>> import jax.numpy as jnp, convgrad
    >>> x, w = jnp.ones((1, 1, 5)), jnp.ones((1, 1, 3))
    >>> convgrad.jax.conv_general_dilated(x, w, (1,), "SAME", backend="reference").tolist()
    [[[2.0, 3.0, 3.0, 3.0, 2.0]]]
    """
    call = Call.of(lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
                   feature_group_count, batch_group_count, preferred_element_type)
    try:
        return call.solved(lhs, rhs, settings_of(backend))
    except Unsupported as error:
        log.info("lax computes conv_general_dilated(%s, %s): %s", jax.typeof(lhs), jax.typeof(rhs), error)
        return jax.lax.conv_general_dilated(
            lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
            batch_group_count, precision, preferred_element_type)


class Call:
    """The arguments of one call, in our words."""

    def __init__(self, numbers: Any, strides: tuple[int, ...], pads: tuple[tuple[int, int], ...],
                 spread: tuple[int, ...], dilation: tuple[int, ...], groups: tuple[int, int], out: str | None) -> None:
        self.numbers, self.strides, self.pads = numbers, strides, pads
        self.spread, self.dilation = spread, dilation  # of the input, of the window
        self.feature_groups, self.batch_groups = groups
        self.out = out

    @staticmethod
    def of(lhs: Any, rhs: Any, window_strides: Any, padding: Any, lhs_dilation: Any, rhs_dilation: Any,
           dimension_numbers: Any, feature_groups: int, batch_groups: int, preferred: Any) -> Call:
        numbers = jax.lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        axes = len(lhs.shape) - 2
        spread, dilation = tuple(lhs_dilation or (1,) * axes), tuple(rhs_dilation or (1,) * axes)
        if isinstance(padding, str):
            size = [(lhs.shape[place] - 1) * s + 1 if lhs.shape[place] else 0
                    for place, s in zip(numbers.lhs_spec[2:], spread)]
            window = [(rhs.shape[place] - 1) * d + 1 for place, d in zip(numbers.rhs_spec[2:], dilation)]
            padding = jax.lax.padtype_to_pads(size, window, window_strides, padding)
        pads = tuple((int(low), int(high)) for low, high in padding)
        return Call(numbers, tuple(window_strides), pads, spread, dilation, (feature_groups, batch_groups),
                    out_dtype_name(preferred))

    def solved(self, lhs: Any, rhs: Any, settings: Settings) -> Any:
        """The result by us; raises Unsupported with the reason why not."""
        formats = {dtype_name(np.dtype(array.dtype)) for array in (lhs, rhs)}
        if len(formats) != 1 or not formats <= set(FORMATS):
            raise Unsupported(f"operands of {lhs.dtype} and {rhs.dtype}")
        if lhs.ndim not in (3, 4, 5):
            raise Unsupported(f"{lhs.ndim - 2} spatial axes")
        if 0 in lhs.shape or 0 in rhs.shape:
            raise Unsupported("an empty operand")
        groups = {"feature_group_count": self.feature_groups, "batch_group_count": self.batch_groups}
        channels = lhs.shape[self.numbers.lhs_spec[1]]
        if rhs.shape[self.numbers.rhs_spec[1]] * self.feature_groups != channels or any(
                rhs.shape[self.numbers.rhs_spec[0]] % count for count in groups.values()):
            raise Unsupported(f"{rhs.shape} does not fit {channels} channels with {groups}")
        dtype = formats.pop()
        assert dtype is not None
        # Canonical orders: batch, feature, spatial and out feature, in feature, spatial.
        x, w = jnp.transpose(lhs, self.numbers.lhs_spec), jnp.transpose(rhs, self.numbers.rhs_spec)
        if self.batch_groups > 1:
            result = self.weight_gradient(x, w, dtype, settings)
        elif any(step > 1 for step in self.spread):
            result = self.transposed(x, w, dtype, settings)
        else:
            result = self.plain(x, w, dtype, settings)
        return jnp.transpose(result, np.argsort(self.numbers.out_spec).tolist())

    def asked(self, conv: Conv, wrt: str, dtype: str, settings: Settings) -> Problem:
        out = self.out or (dtype if dtype in FORMATS[:4] else "float32")
        problem = Problem(conv, wrt, dtype, out)
        if planned(problem, settings).problem.conv.out_size != conv.out_size:
            raise Unsupported("a geometry that has no plan")
        return problem

    def plain(self, x: Any, w: Any, dtype: str, settings: Settings) -> Any:
        if any(low < 0 or high < 0 for low, high in self.pads):
            raise Unsupported(f"negative padding {self.pads}")
        conv = Conv(x.shape[0], x.shape[1], w.shape[0], x.shape[2:], w.shape[2:], self.strides, self.dilation,
                    self.pads, self.feature_groups)
        return solve(self.asked(conv, "output", dtype, settings), settings, x, w)

    def transposed(self, x: Any, w: Any, dtype: str, settings: Settings) -> Any:
        """With j = o*spread - k*dilation + low and k counted from the other end, this is an input gradient."""
        if any(step > 1 for step in self.strides):
            raise Unsupported(f"window_strides={self.strides} beside lhs_dilation={self.spread}")
        spans = [(k - 1) * d for k, d in zip(w.shape[2:], self.dilation)]
        size = tuple((n - 1) * s + 1 + low + high - span for n, s, (low, high), span in
                     zip(x.shape[2:], self.spread, self.pads, spans))
        lows = [span - low for span, (low, _) in zip(spans, self.pads)]
        highs = [span - high for span, (_, high) in zip(spans, self.pads)]
        if any(low < 0 for low in lows) or any(n < 1 for n in size):
            raise Unsupported(f"padding {self.pads} beyond the spread window {spans}")
        groups = self.feature_groups
        conv = Conv(x.shape[0], w.shape[0], x.shape[1], size, w.shape[2:], self.spread, self.dilation,
                    tuple((low, max(0, high)) for low, high in zip(lows, highs)), groups)
        if conv.out_size != x.shape[2:]:
            raise Unsupported(f"padding {self.pads} beyond the spread window by more than the dilation of the input")
        per_group = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
        turned = jnp.swapaxes(per_group, 1, 2).reshape(x.shape[1], w.shape[0] // groups, *w.shape[2:])
        flipped = jnp.flip(turned, tuple(range(2, w.ndim)))
        return solve(self.asked(conv, "input", dtype, settings), settings, x, flipped)

    def weight_gradient(self, x: Any, w: Any, dtype: str, settings: Settings) -> Any:
        """Batch groups: the features of the operands are the batch, their batches the channels, of a grouped one."""
        if self.feature_groups > 1 or any(step > 1 for step in self.spread):
            raise Unsupported(f"batch_group_count={self.batch_groups} beside feature groups or a dilated input")
        size, taps = x.shape[2:], []
        for n, k, stride, dilation, (low, high) in zip(size, w.shape[2:], self.strides, self.dilation, self.pads):
            taps.append((n + low + high - (k - 1) * dilation - 1) // stride + 1)
        # The padding that makes the output of this convolution as large as rhs; more is never read.
        pads = []
        for n, k, step, tap, dilation, (low, _) in zip(size, w.shape[2:], self.dilation, taps, self.strides, self.pads):
            pads.append((low, max(0, (k - 1) * step + (tap - 1) * dilation + 1 - n - low)))
        if any(tap < 1 or low < 0 for tap, (low, _) in zip(taps, pads)):
            raise Unsupported(f"negative padding or an empty result: {self.pads}")
        conv = Conv(x.shape[1], x.shape[0], w.shape[0], size, tuple(taps), self.dilation, self.strides, tuple(pads),
                    self.batch_groups)
        if conv.out_size != w.shape[2:]:
            raise Unsupported("a window that does not reach the end of its input")
        problem = self.asked(conv, "weight", dtype, settings)
        gradient = solve(problem, settings, jnp.swapaxes(w, 0, 1), jnp.swapaxes(x, 0, 1))
        return jnp.swapaxes(gradient, 0, 1)
