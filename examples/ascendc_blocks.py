"""The blocks of an Ascend C launch without an NPU: find a tile, run every piece, compare, draw, and make a mistake."""

import numpy as np

import convgrad
from convgrad import ascendc

rng = np.random.default_rng(0)
dy = rng.integers(-2, 3, (1, 20, 4, 6, 8)).astype(np.float16)
w = rng.integers(-2, 3, (20, 40, 1, 3, 3)).astype(np.float16)

host = ascendc.describe(dy.shape, w.shape, ascendc.half, input_size=(4, 6, 8), padding=(0, 1, 1))
tiling = ascendc.find_tiling(host, cores=2).with_(baseM=16)
print("\n".join(ascendc.estimate(tiling, cores=2).lines()))

trace: list[ascendc.Block] = []
dx = ascendc.run(dy, w, input_size=(4, 6, 8), padding=(0, 1, 1), cores=2, tiling=tiling, trace=trace)
exact = convgrad.input_grad(dy, w, (4, 6, 8), padding=(0, 1, 1), backend="reference")
print(f"{len(trace)} blocks, equal to the plain gradient: {np.array_equal(dx, exact)}")
print(ascendc.to_text(trace, limit=4))
print(f"a picture of {len(ascendc.draw(tiling, cores=2).to_svg())} bytes of SVG")

op = ascendc.Conv3DBackpropInput(*ascendc.conv_types(ascendc.half))
op.Init(tiling)
try:
    op.SetSingleShape(48, 40, tiling.full_k)  # the order of the Filter's arguments
except ascendc.Misuse as mistake:
    print(mistake)
