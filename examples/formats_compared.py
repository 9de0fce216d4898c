"""HiFloat8 and FP8 compared: how many bits each keeps, from the smallest value to the largest.

Each curve is the relative distance between neighbouring values. FP8 has constant precision inside a fixed range;
HiFloat8 trades precision for range as numbers move away from one.
"""

from pathlib import Path

import numpy as np

from convgrad.numbers import round_to

FORMATS = {"hifloat8": "#1d4ed8", "float8_e4m3fn": "#b45309", "float8_e5m2": "#0f766e"}
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 300, 60, 40


def worst_error(name: str, exponents: np.ndarray) -> np.ndarray:
    """Largest relative rounding error of the numbers of each binade."""
    steps = np.linspace(1, 2, 400, endpoint=False)
    numbers = np.ldexp(steps[None, :], exponents[:, None])
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.abs(np.asarray(round_to(numbers, name), np.float64) - numbers) / numbers
    return np.where(np.isfinite(errors), errors, 1).max(1)


def place(exponent: int, error: float) -> str:
    """Where a point of a curve lies in the picture: exponents to the right, smaller errors higher up."""
    return f"{LEFT + (exponent + 26) * (WIDTH - LEFT - 20) / 46:.0f},{HEIGHT - BOTTOM - 10 + 36 * np.log2(error):.0f}"


exponents = np.arange(-26, 20)
parts = ['<text x="4" y="16" fill="#777">relative error on a log scale, from 2^-26 to 2^20</text>']
for column, (name, colour) in enumerate(FORMATS.items()):
    errors = worst_error(name, exponents)
    points = " ".join(place(exponent, error) for exponent, error in zip(exponents, errors) if error < 1)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="3"/>'
                 f'<text x="{LEFT + 20 + column * 180}" y="{HEIGHT - 8}" fill="{colour}">{name}</text>')
    usable = exponents[errors < 1]
    print(f"{name:15} best relative error 2^{np.log2(errors.min()):.1f}, "
          f"usable from 2^{usable.min()} to 2^{usable.max() + 1}")
Path("precision.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
                                 f'font-family="sans-serif" font-size="14">{"".join(parts)}</svg>')
