"""What the CANN operators should give, written down a second time: float64 loops over positions and the dtype steps.

Nothing here calls the engine: gradients are gathered position by position, roundings are done on bits or by ml_dtypes
and en_dtypes, so that a mistake in the dialect and one in here would have to be the same mistake to go unseen.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

STORED = {"FLOAT": np.dtype(np.float32), "FLOAT16": np.dtype(np.float16), "BFLOAT16": np.dtype(ml_dtypes.bfloat16),
          "DOUBLE": np.dtype(np.float64), "FLOAT8_E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn)}


def gradients(dy, x, w, stride, pads, dilation, groups):
    """(dx, dw, db) of a convolution in float64; arrays are N C spatial and O I/g spatial, pads are pairs."""
    dx, dw = np.zeros(x.shape), np.zeros(w.shape)
    per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
    for tap in np.ndindex(*w.shape[2:]):
        for o in np.ndindex(*dy.shape[2:]):
            i = tuple(o[a] * stride[a] + tap[a] * dilation[a] - pads[a][0] for a in range(len(o)))
            if any(not 0 <= i[a] < x.shape[2 + a] for a in range(len(i))):
                continue
            for g in range(groups):
                inner, outer = slice(g * per_in, (g + 1) * per_in), slice(g * per_out, (g + 1) * per_out)
                dx[(slice(None), inner, *i)] += dy[(slice(None), outer, *o)] @ w[(outer, slice(None), *tap)]
                dw[(outer, slice(None), *tap)] += dy[(slice(None), outer, *o)].T @ x[(slice(None), inner, *i)]
    return dx, dw, dy.sum(axis=(0, *range(2, dy.ndim)))


def forward(x, w, out_size, stride, pads, dilation, groups):
    """The convolution itself in float64 (the gradient of a transposed convolution)."""
    y = np.zeros((x.shape[0], w.shape[0], *out_size))
    per_in, per_out = x.shape[1] // groups, w.shape[0] // groups
    for tap in np.ndindex(*w.shape[2:]):
        for o in np.ndindex(*out_size):
            i = tuple(o[a] * stride[a] + tap[a] * dilation[a] - pads[a][0] for a in range(len(o)))
            if any(not 0 <= i[a] < x.shape[2 + a] for a in range(len(i))):
                continue
            for g in range(groups):
                inner, outer = slice(g * per_in, (g + 1) * per_in), slice(g * per_out, (g + 1) * per_out)
                y[(slice(None), outer, *o)] += x[(slice(None), inner, *i)] @ w[(outer, slice(None), *tap)].T
    return y


def backward(dy, x, w, stride, pads, dilation, groups, transposed):
    """(gradInput, gradWeight, gradBias) of a normal or a transposed convolution in float64."""
    if not transposed:
        return gradients(dy, x, w, stride, pads, dilation, groups)
    dx = forward(dy, w, x.shape[2:], stride, pads, dilation, groups)
    _, dw, _ = gradients(x, dy, w, stride, pads, dilation, groups)
    return dx, dw, dy.sum(axis=(0, *range(2, dy.ndim)))


def hf32(values, mantissa_bits):
    """float32 values rounded to HF32, ties away from zero: add half of the dropped unit to the magnitude, cut."""
    dropped = 23 - mantissa_bits
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half, mask = np.uint32(1 << (dropped - 1)), np.uint32(0xFFFFFFFF << dropped & 0xFFFFFFFF)
    return ((bits + half) & mask).view(np.float32).astype(np.float64)


def common_type(*dtypes):
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return "DOUBLE" if "DOUBLE" in dtypes else "FLOAT"


def rounded_operand(values, common, mode):
    """An operand as it enters the products; `mode` is "", "fp16" or the mantissa bits of HF32."""
    if mode == "fp16":
        return values.astype(np.float16).astype(np.float64)
    return hf32(values, mode) if mode else values


def mode_of(common, cube_math_type, hf32_bits):
    """cubeMathType for the promoted type; hf32_bits is 0 on products that compute FLOAT in FLOAT16."""
    if cube_math_type == 2 and common in ("FLOAT", "BFLOAT16"):
        return "fp16"
    if common != "FLOAT" or cube_math_type == 0:
        return ""
    return hf32_bits or "fp16"


def cast(values, *steps):
    """float64 values through number formats one after the other."""
    for step in steps:
        if step == "HIFLOAT8":
            import en_dtypes

            values = np.asarray(values, np.float32).astype(en_dtypes.hifloat8)
        else:
            values = np.asarray(values).astype(np.float32 if step != "DOUBLE" else np.float64).astype(STORED[step])
    return values


def expected(dy, x, w, dtypes, outputs, *, stride, pads, dilation, groups=1, transposed=False, cube=0, bits=11):
    """The three results as stored arrays: dtypes of (gradOutput, input, weight), outputs of the gradients."""
    common = common_type(*dtypes)
    mode = mode_of(common, cube, bits)
    a, b, c = (rounded_operand(values, common, mode) for values in (dy, x, w))
    dx, dw, _ = backward(a, b, c, stride, pads, dilation, groups, transposed)
    db = dy.sum(axis=(0, *range(2, dy.ndim)))
    produced = "FLOAT16" if mode == "fp16" else common
    wide = "DOUBLE" if common == "DOUBLE" else "FLOAT"
    return cast(dx, produced, outputs[0]), cast(dw, wide, outputs[1]), cast(db, dtypes[0], outputs[2])


def small_integers(rng, shape, dtype="FLOAT", largest=3):
    """Integers that every format here holds exactly, as stored array and as float64."""
    values = rng.integers(-largest, largest + 1, shape).astype(np.float64)
    if dtype == "HIFLOAT8":
        return cast(values, "HIFLOAT8").view(np.uint8), values
    return values.astype(np.float32).astype(STORED[dtype]), values
