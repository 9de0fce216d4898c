"""The adjoint check: three inner products that must agree, whatever the geometry.

A convolution is linear in x and in w, so <conv(x, w), dy> = <x, dx> = <w, dw>. The check needs no reference and finds
any wrong tap, because a random direction meets every element.
"""

import numpy as np

import convgrad

random = np.random.default_rng(1)
for options in ({"stride": (2, 3), "padding": [(2, 0), (1, 1)], "dilation": (1, 2), "groups": 2},
                {"padding": 1}, {"stride": 4, "groups": 4}):
    x = random.standard_normal((3, 8, 17, 20))
    w = random.standard_normal((12, 8 // options.get("groups", 1), 3, 3))
    y = convgrad.conv(x, w, **options)
    dy = random.standard_normal(y.shape)
    dx, dw, _ = convgrad.conv_backward(dy, x, w, **options)
    products = [np.vdot(y, dy), np.vdot(x, dx), np.vdot(w, dw)]
    print(f"{options}: " + "  ".join(f"{value:.10f}" for value in products))
    assert np.ptp(products) < 1e-9 * np.abs(products).max() * 100
