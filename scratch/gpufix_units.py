"""How far sums of constants are off on the GPU, in units of 2^-24 (2^-53) of the sum of |a*b|, by length of the sum."""
import sys
import torch, convgrad
from convgrad.plan import _cache
torch.manual_seed(0)
def last():
    return list(_cache.values())[-1].kernel if _cache else "?"
for name, dtype, out in (("bf16", torch.bfloat16, "float32"), ("f16", torch.float16, "float32"), ("f32", torch.float32, None), ("f64", torch.float64, None)):
    for c, k, i in ((64, 64, 28), (512, 64, 14), (2048, 64, 14), (2048, 256, 7)):
        for value in (0.1, 0.7):
            x = torch.full((2, c, i, i), value, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)
            w = torch.full((k, c, 3, 3), 1.1, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)
            y = convgrad.conv(x, w, padding=1, **({"out_dtype": out} if out else {}))
            e = float(x[0, 0, 0, 0].double() * w[0, 0, 0, 0].double()) * 9 * c
            unit = 2.0**-53 if dtype is torch.float64 else 2.0**-24
            if dtype is torch.float64:
                from fractions import Fraction
                e = Fraction(float(x[0, 0, 0, 0])) * Fraction(float(w[0, 0, 0, 0])) * 9 * c
                off = float(abs(Fraction(float(y[0, 0, 5, 5])) - e) / e) / unit
            else:
                off = abs(float(y[0, 0, 5, 5].double()) - e) / abs(e) / unit
            L = 9 * c
            print(f"conv {name} c{c} k{k} i{i} {value}: {off:8.1f} units, f(L) {8 + min(L, 512) + 2 * L**.5:6.0f}  {last()}")
    for n, c, k, i in ((8, 64, 64, 28), (64, 64, 64, 56), (16, 8, 8, 112), (64, 96, 96, 56)):
        g = 96 if c == 96 else 1
        x = torch.full((n, c, i, i), 0.7, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)
        dy = torch.full((n, k, i, i), 1.1, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)
        w = torch.full((k, c // g, 3, 3), 1.0, dtype=dtype, device="cuda").contiguous(memory_format=torch.channels_last)
        dx, dw, db = convgrad.conv_backward(dy, x, w, padding=1, groups=g, **({"out_dtype": out} if out else {}))
        L, unit = n * i * i, 2.0**-53 if dtype is torch.float64 else 2.0**-24
        ex, eb = float(x.flatten()[0].double() * dy.flatten()[0].double()) * L, float(dy.flatten()[0].double()) * L
        print(f"grads {name} n{n} c{c} i{i} g{g}: dw {abs(float(dw[0, 0, 1, 1].double()) - ex) / ex / unit:8.1f}, db {abs(float(db[0].double()) - eb) / eb / unit:8.1f} units, "
              f"f(L) {8 + min(L, 512) + 2 * L**.5:6.0f}  {last()}")
