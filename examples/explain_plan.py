"""Asking why: which kernel solves a problem, in what tiles, at what expected cost, and who refused."""

import convgrad

for problem in ("input_grad f32 n8 c64 k128 i56x56 w3x3 s2x2 p1x1",
                "weight_grad bf16 n4 c96 k96 i14x14 w7x7 p3x3 g96 NHWC OHWI"):
    print(convgrad.explain(problem), end="\n\n")
