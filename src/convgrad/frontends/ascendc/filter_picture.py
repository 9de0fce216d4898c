"""A picture of the weight gradient: which block of dW each Iterate of a piece computes, and how full memory is."""

from __future__ import annotations

from .drawing import BLACK, Drawing, Rectangle, Text, text_width
from .filter_operator import split_filter_pieces
from .filter_tiling import C0, TConv3DBpFilterTiling
from .picture import BAR_A, BAR_B, BAR_EMPTY, GREY, MARGIN, core_colour, shade
from .platform import PlatformInfo
from .tiling_struct import ceil_div

LARGEST = 640.0


def draw_filter(tiling: TConv3DBpFilterTiling, cores: int = 1, *, kernel_depth: int = 0,
                platform: PlatformInfo | None = None) -> Drawing:
    """Draw dW of one kernel depth as the matrix it is computed as: output channels down, (cin1, kh, kw) x 16 across.

    The cell of a block is written with its Iterate; its colour is the first core that adds to it. Channels that only
    fill up the last group of 16 are not drawn.
    """
    t = tiling.dwTiling
    if not 0 <= kernel_depth < t.dk:
        raise ValueError(f"kernel_depth={kernel_depth}: the kernel has the depths 0..{t.dk - 1}")
    pieces = [piece for piece in split_filter_pieces(tiling, cores) if piece.kd == kernel_depth]
    columns, rows = t.cin * t.hk * t.wk, t.cout
    cell = min(18.0, LARGEST / max(columns / C0, rows / C0))
    width, height = columns / C0 * cell, rows / C0 * cell
    heading = (f"dW {t.cout}x{t.cin}x{t.dk}x{t.hk}x{t.wk}  X {t.batch}x{t.cin}x{t.di}x{t.hi}x{t.wi}  dY "
               f"{t.batch}x{t.cout}x{t.dout}x{t.ho}x{t.wo}  tile M{t.baseM} K{t.baseK} N{t.baseN}  {cores} core(s)")
    top, left = 92.0, MARGIN + 24
    drawing = Drawing(max(left + width + 2 * MARGIN, MARGIN * 2 + text_width(heading), 620.0), top + height + 150)
    drawing.add(Text(MARGIN, 18, "Conv3DBackpropFilter", 2), Text(MARGIN, 42, heading, 1, GREY),
                Text(left, top - 28, f"dW of kernel depth {kernel_depth}: output channels down, (cin1, kh, kw) across"),
                Text(left, top - 16, f"block = Iterate; {len(pieces)} pieces add to this plane", 1, GREY))
    seen: set[int] = set()
    taps = t.hk * t.wk
    for piece in pieces:
        if piece.offsetOutput in seen:
            continue  # more rows or samples, added into the same blocks
        seen.add(piece.offsetOutput)
        group, cout = divmod(piece.offsetOutput - kernel_depth * t.cin1 * t.weight_group, t.weight_group)
        first_column, first_row = group * C0 * taps, cout // C0
        m_iter, n_iter = ceil_div(piece.singleShapeM, t.baseM), ceil_div(piece.singleShapeN, t.baseN)
        for index in range(m_iter * n_iter):
            m, n = divmod(index, n_iter) if t.iterateOrder == 0 else divmod(index, m_iter)[::-1]
            x, y = first_column + n * t.baseN, first_row + m * t.baseM
            end_x, end_y = min(x + t.baseN, columns), min(y + t.baseM, rows)
            if end_x <= x or end_y <= y:
                continue
            colour = shade(core_colour(piece.core), 0.86 if (m + n) % 2 else 1.0)
            area = Rectangle(left + x / C0 * cell, top + y / C0 * cell, (end_x - x) / C0 * cell,
                             (end_y - y) / C0 * cell, colour, GREY,
                             title=f"core {piece.core}, Iterate {index}: channels {y}..{end_y - 1}")
            drawing.add(area)
            if area.width >= text_width(str(index)) + 2 and area.height >= 8:
                drawing.add(Text(area.x + area.width / 2, area.y + area.height / 2 - 3.5, str(index), centred=True))
    platform = platform or PlatformInfo()
    use = t.memory_use()
    bars = (("L0A", use["L0A"], 0, platform.l0ASize // t.al0Pbuffer),
            ("L0B", use["L0B"], 0, platform.l0BSize // t.bl0Pbuffer), ("L0C", use["L0C"], 0, platform.l0CSize),
            ("L1", use["L1A"], use["L1B"], platform.usable_l1))
    for index, (name, first, second, capacity) in enumerate(bars):
        bar = top + height + 40 + 22 * index
        drawing.add(Text(MARGIN, bar + 4, name, 1, BLACK), Rectangle(MARGIN + 30, bar, 300, 15, BAR_EMPTY),
                    Rectangle(MARGIN + 30, bar, 300 * first / capacity, 15, BAR_A),
                    Rectangle(MARGIN + 30 + 300 * first / capacity, bar, 300 * second / capacity, 15, BAR_B),
                    Rectangle(MARGIN + 30, bar, 300, 15, None, GREY),
                    Text(MARGIN + 340, bar + 4, f"{first + second} / {capacity} B"))
    return drawing
