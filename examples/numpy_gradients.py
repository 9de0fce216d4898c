"""Gradients of a strided, grouped convolution with NumPy arrays, checked by a finite difference."""

from __future__ import annotations

import numpy as np

import convgrad

random = np.random.default_rng(0)
x = random.standard_normal((2, 8, 15, 15))  # batch, channels, height, width
w = random.standard_normal((12, 4, 3, 3))  # out channels, in channels / groups, kernel
options = dict(stride=2, padding=1, groups=2)

y = convgrad.conv(x, w, **options)
dy = random.standard_normal(y.shape)  # gradient of some loss by y; the loss here is <y, dy>
dx, dw, db = convgrad.conv_backward(dy, x, w, **options)

# Move along a random direction: the loss changes by the gradient's projection on it.
step, direction = 1e-6, random.standard_normal(x.shape)
slope = np.vdot(convgrad.conv(x + step * direction, w, **options) - y, dy) / step
print(f"output {y.shape}, gradients {dx.shape}, {dw.shape}, {db.shape}")
print(f"slope by finite difference {slope:.6f}, by the gradient {np.vdot(dx, direction):.6f}")

# Any layout and number format: the same convolution channels last, in bfloat16 storage with HiFloat8 further down.
problem = convgrad.Problem.parse("input_grad bf16 n2 c8 k12 i15x15 w3x3 s2x2 p1x1 g2 NHWC HWIO")
print(convgrad.explain(problem))
