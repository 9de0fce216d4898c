"""Drawings of how the gradients are computed, as SVG made by arithmetic: the same index rules as the library's."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad import Conv

PHASES = ("#9cc2ff", "#ffc47e", "#9fe0bd", "#e3b3f5")
CELL = 26


def pictures() -> dict[str, str]:
    return {"images/phases.svg": phases(Conv(1, 1, 1, (11,), (4,), (2,), (1,), ((1, 1),))),
            "images/halo.svg": halo(Conv(1, 1, 1, (12,), (3,), (1,), (1,), ((1, 1),)), cut=6),
            "images/blocked_sum.svg": blocked_sum(blocks=8)}


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    style = ("<style>text{font:13px system-ui,sans-serif;fill:#444}.note{font-size:12px;fill:#777}"
             "@media(prefers-color-scheme:dark){text{fill:#ccc}.note{fill:#999}}</style>")
    body = "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">{style}{body}</svg>'


def cell(x: float, y: float, fill: str, text: object = "") -> str:
    label = f'<text x="{x + CELL / 2}" y="{y + 17}" text-anchor="middle" style="fill:#222">{text}</text>'
    return f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3" fill="{fill}"/>{label}'


def phases(conv: Conv) -> str:
    """Elements of dx by phase, the taps that reach each, and the elements of dy they read."""
    stride, low = conv.stride[0], conv.padding[0][0]
    parts = ['<text x="8" y="24">dx</text><text x="8" y="204">dy</text>']
    for o in range(conv.out_size[0]):
        parts.append(cell(60 + o * CELL * stride, 186, "#d5dae0", o))
    for i in range(conv.in_size[0]):
        phase = (i + low) % stride
        x = 60 + i * CELL
        parts.append(cell(x, 8, PHASES[phase], i))
        for k in range(conv.kernel_size[0]):
            o, rest = divmod(i + low - k * conv.dilation[0], stride)
            if rest == 0 and 0 <= o < conv.out_size[0]:
                parts.append(f'<line x1="{x + 12}" y1="34" x2="{60 + o * CELL * stride + 12}" y2="184" '
                             f'stroke="{PHASES[phase]}" stroke-width="2"/>')
    taps = [[k for k in range(conv.kernel_size[0]) if (k * conv.dilation[0]) % stride == phase] for phase in
            range(stride)]
    for phase, found in enumerate(taps):
        parts.append(cell(60 + phase * 190, 232, PHASES[phase]))
        parts.append(f'<text x="{92 + phase * 190}" y="249">phase {phase}: taps {", ".join(map(str, found))}</text>')
    return svg(60 + CELL * conv.in_size[0] + 30, 270, parts)


def halo(conv: Conv, cut: int) -> str:
    """A line of dx in two tiles, and the elements of dy that both of them read."""
    size, low = conv.in_size[0], conv.padding[0][0]
    parts = ['<text x="8" y="24">dx</text><text x="8" y="104">dy</text>']

    def needed(first: int, last: int) -> set[int]:
        return {i + low - k for i in range(first, last) for k in range(conv.kernel_size[0])} & set(range(conv.out_size[0]))

    left, right = needed(0, cut), needed(cut, size)
    for i in range(size):
        parts.append(cell(60 + i * CELL + (10 if i >= cut else 0), 8, PHASES[i >= cut], i))
    for o in range(conv.out_size[0]):
        fill = "#f7a8b8" if o in left & right else PHASES[o in right]
        parts.append(cell(60 + o * CELL + (10 if o >= cut else 0), 88, fill, o))
    parts.append('<text class="note" x="60" y="140">red: the halo, read by the tiles on both sides of the cut</text>')
    return svg(60 + CELL * size + 40, 156, parts)


def blocked_sum(blocks: int) -> str:
    """A long sum: short chains inside blocks, block sums added in pairs."""
    parts, width = [], 64
    xs = [60 + b * (width + 10) for b in range(blocks)]
    for b, x in enumerate(xs):
        parts.append(f'<rect x="{x}" y="10" width="{width}" height="26" rx="3" fill="{PHASES[b % 2]}"/>'
                     f'<text x="{x + width / 2}" y="28" text-anchor="middle" style="fill:#222">block {b}</text>')
    level, y = [x + width / 2 for x in xs], 36
    while len(level) > 1:
        joined = []
        for a, b in zip(level[::2], level[1::2]):
            middle = (a + b) / 2
            parts.append(f'<path d="M{a} {y}V{y + 20}H{b}V{y}M{middle} {y + 20}v16" fill="none" stroke="#888"/>')
            joined.append(middle)
        level, y = joined, y + 36
    parts.append(f'<text class="note" x="60" y="{y + 18}">terms are added one after the other inside a block only</text>')
    return svg(60 + blocks * (width + 10) + 10, y + 30, parts)
