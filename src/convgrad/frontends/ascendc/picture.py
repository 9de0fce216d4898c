"""A picture of a launch: which core computes which block of a plane of dX, what it reads of dY, how full memory is."""

from __future__ import annotations

import colorsys
from typing import NamedTuple

from .drawing import BLACK, WHITE, Colour, Drawing, Rectangle, Text, text_width
from .kernel import rectangles
from .pieces import split_pieces
from .platform import PlatformInfo
from .tiling_struct import TConv3DBackpropInputTiling
from .traffic import estimate
from .walk import Block

PANEL = 400.0  # side of a plane, in units
LARGEST_PANEL = 800.0
MARGIN = 24.0
GREY: Colour = (105, 105, 112)
REAL: Colour = (120, 170, 225)
INSERTED: Colour = (236, 240, 246)
PADDING: Colour = (250, 225, 190)
UNWRITTEN: Colour = (225, 225, 228)
WINDOW: Colour = (200, 30, 50)
BAR_A: Colour = (96, 150, 215)
BAR_B: Colour = (235, 150, 70)
BAR_EMPTY: Colour = (238, 238, 242)


def core_colour(core: int) -> Colour:
    """Return a light colour, different for neighbouring core numbers."""
    red, green, blue = colorsys.hsv_to_rgb((0.58 + core * 0.381966) % 1.0, 0.38 - 0.12 * (core % 3 == 1),
                                           0.97 - 0.09 * (core % 2))
    return round(red * 255), round(green * 255), round(blue * 255)


def shade(colour: Colour, factor: float) -> Colour:
    red, green, blue = (round(part * factor) for part in colour)
    return red, green, blue


class Grid(NamedTuple):
    """A plane of cells on the drawing."""

    x: float
    y: float
    cell_w: float
    cell_h: float

    def area(self, row: float, column: float, rows: float, columns: float, **style: object) -> Rectangle:
        return Rectangle(self.x + column * self.cell_w, self.y + row * self.cell_h, columns * self.cell_w,
                         rows * self.cell_h, **style)  # type: ignore[arg-type]


def cell_size(t: TConv3DBackpropInputTiling, rows: int, columns: int) -> float:
    """Return the side of a cell: the plane fills a panel, or more if only then the numbers fit into the blocks."""
    legible = 10.0 / max(1.0, min(t.baseM, t.singleCoreM) / t.wi)
    return min(18.0, max(PANEL, min(LARGEST_PANEL, legible * max(rows, columns))) / max(rows, columns))


def grid_at(x: float, y: float, cell: float, rows: int, columns: int) -> Grid:
    """Place rows x columns cells; they are square unless the plane is very narrow."""
    return Grid(x, y, max(cell, min(12.0, 60.0 / columns)), max(cell, min(12.0, 60.0 / rows)))


def draw(tiling: TConv3DBackpropInputTiling, cores: int = 1, *, sample: int = 0, depth: int = 0, channel_piece: int = 0,
         highlight: int | None = None, platform: PlatformInfo | None = None) -> Drawing:
    """Draw one plane of dX and of the stretched dY, the memories, and the traffic.

    Parameters
    ----------
    tiling : TConv3DBackpropInputTiling
    cores : int
    sample, depth : int
        The plane of dX that is shown.
    channel_piece : int
        Which piece along the channels; its first block of channels is shown.
    highlight : int, optional
        Number of the block in the plane whose dY rows are framed; the middle one unless given.
    platform : PlatformInfo, optional
    """
    t = tiling
    if not (0 <= sample < t.batch and 0 <= depth < t.di):
        raise ValueError(f"sample={sample}, depth={depth}: dX has {t.batch} samples and {t.di} depths")
    group = channel_piece * t.singleCoreCin // t.c0
    shown = plane_blocks(t, cores, sample, depth, group)
    if not shown:
        raise ValueError(f"channel_piece={channel_piece}: no block of dX lies there")
    blocks = [block for _, block in shown]
    label, chosen = shown[len(shown) // 2 if highlight is None else highlight]
    height, width = t.stretched_rows + t.backpropPadUp + t.backpropPadDown, stretched_width(t)
    top = 92.0
    cell = cell_size(t, max(height, t.hi), max(width, t.wi))
    left_grid = grid_at(MARGIN + 24, top, cell, t.hi, t.wi)
    second = left_grid.x + max(t.wi * left_grid.cell_w, 190.0) + 64
    right_grid = grid_at(second, top, cell, height, width)
    bottom = top + max(t.hi * left_grid.cell_h, height * right_grid.cell_h) + 30
    traffic = estimate(t, cores).lines()
    drawing_width = max(second + max(width * right_grid.cell_w, 330.0),
                        MARGIN + max(text_width(line) for line in [*traffic, heading(t, cores)])) + MARGIN
    drawing = Drawing(drawing_width, bottom + 215)
    drawing.add(Text(MARGIN, 18, "Conv3DBackpropInput", 2), Text(MARGIN, 42, heading(t, cores), 1, GREY))
    draw_blocks(drawing, left_grid, t, shown, chosen)
    draw_stretched(drawing, right_grid, t, label, chosen)
    draw_legend(drawing, bottom, sorted({block.core for block in blocks}))
    draw_memory(drawing, bottom + 30, t, platform or PlatformInfo())
    for index, line in enumerate(traffic):
        drawing.add(Text(MARGIN, bottom + 130 + 14 * index, line))
    return drawing


def stretched_width(t: TConv3DBackpropInputTiling) -> int:
    return (t.wo - 1) * t.strideW + 1 + t.backpropPadLeft + t.backpropPadRight


def heading(t: TConv3DBackpropInputTiling, cores: int) -> str:
    return (f"dX {t.batch}x{t.cin}x{t.di}x{t.hi}x{t.wi}  W {t.cout}x{t.cin}x{t.dk}x{t.hk}x{t.wk}  "
            f"dY {t.batch}x{t.cout}x{t.dout}x{t.ho}x{t.wo}  stride {t.strideD},{t.strideH},{t.strideW}  "
            f"tile M{t.baseM} K{t.baseK} N{t.baseN}  "
            f"{cores} core{'s' if cores > 1 else ''}")


def plane_blocks(t: TConv3DBackpropInputTiling, cores: int, sample: int, depth: int,
                 group: int) -> list[tuple[str, Block]]:
    """Return (label, block) for the blocks of one plane: the number of Iterate, with the piece if there are several."""
    pieces = [p for p in split_pieces(t, cores) if (p.n, p.d, p.cin1_0) == (sample, depth, group) and not p.skipped]
    return [(f"{number}:{block.iterate}" if len(pieces) > 1 else str(block.iterate), block)
            for number, piece in enumerate(pieces) for block in piece.walk(t).blocks(piece.core) if block.n == 0]


def draw_blocks(drawing: Drawing, grid: Grid, t: TConv3DBackpropInputTiling, shown: list[tuple[str, Block]],
                chosen: Block) -> None:
    drawing.add(Text(grid.x, grid.y - 28, f"dX plane: n={chosen.batch} d={chosen.depth} channels "
                     f"{chosen.channels[0]}..{min(chosen.channels[1], t.cin - 1)}"),
                Text(grid.x, grid.y - 16, "block = Iterate" if ":" not in shown[0][0] else "block = piece:Iterate", 1,
                     GREY))
    drawing.add(grid.area(0, 0, t.hi, t.wi, fill=UNWRITTEN, outline=GREY, title="not written: no dY row reaches it"))
    for number, (label, block) in enumerate(shown):
        # Neighbours differ in shade, so the parts of a block that starts in mid-row are seen to belong together.
        fill = UNWRITTEN if block.skipped else shade(core_colour(block.core), 0.86 if number % 2 else 1.0)
        title = (f"core {block.core}, Iterate {block.iterate}: ({block.first[0]},{block.first[1]})..({block.last[0]},"
                 f"{block.last[1]}), reads dY rows {block.dy_rows}")
        parts = [grid.area(block.first[0] + row, column, rows, columns, fill=fill, title=title)
                 for _, (row, column, rows, columns) in rectangles(block.first[1], block.pixels, t.wi)]
        drawing.add(*parts)
        if block is chosen:
            drawing.add(*(part._replace(fill=None, outline=WINDOW, hatched=True) for part in parts))
        largest = max(parts, key=lambda part: part.width * part.height)
        if largest.height >= 8 and largest.width >= text_width(label) + 2:
            drawing.add(Text(largest.x + largest.width / 2, largest.y + largest.height / 2 - 3.5, label, centred=True))
    draw_scale(drawing, grid, t.hi, t.wi, 0, 0)


def draw_scale(drawing: Drawing, grid: Grid, rows: int, columns: int, first_row: int, first_column: int) -> None:
    """Write the first and last index of both axes beside the plane."""
    for index, label in ((0.0, first_row), (rows - 1.0, first_row + rows - 1)):
        text = str(label)
        drawing.add(Text(grid.x - text_width(text) - 4, grid.y + (index + 0.5) * grid.cell_h - 3.5, text, 1, GREY))
    for index, label in ((0.0, first_column), (columns - 1.0, first_column + columns - 1)):
        drawing.add(Text(grid.x + (index + 0.5) * grid.cell_w, grid.y + rows * grid.cell_h + 5, str(label), 1, GREY,
                         centred=True))


def draw_stretched(drawing: Drawing, grid: Grid, t: TConv3DBackpropInputTiling, label: str, chosen: Block) -> None:
    """Draw dY with its inserted rows and columns and its padding, and frame the rows of one block."""
    rows, columns = t.stretched_rows, (t.wo - 1) * t.strideW + 1
    up, left = t.backpropPadUp, t.backpropPadLeft
    height, width = rows + up + t.backpropPadDown, stretched_width(t)
    seen = chosen.stretched_rows
    window = "no rows" if seen is None else f"rows {seen[0]}..{seen[1]}"
    drawing.add(Text(grid.x, grid.y - 28, "dY stretched by the stride, with padding"),
                Text(grid.x, grid.y - 16, f"frame: block {label} (hatched left) reads {window}", 1, WINDOW))
    drawing.add(grid.area(0, 0, height, width, fill=PADDING, outline=GREY, title="padding"),
                grid.area(up, left, rows, columns, fill=REAL, title="dY"))
    if t.strideH > 1:
        drawing.add(*(grid.area(up + row * t.strideH + 1, left, t.strideH - 1, columns, fill=INSERTED,
                                title="inserted zero rows") for row in range(t.ho - 1)))
    if t.strideW > 1:
        drawing.add(*(grid.area(up, left + column * t.strideW + 1, rows, t.strideW - 1, fill=INSERTED,
                                title="inserted zero columns") for column in range(t.wo - 1)))
    drawing.add(grid.area(up, left, rows, columns, outline=GREY))
    low, high = max(chosen.start_row, -up), min(chosen.start_row + t.window_rows, rows + t.backpropPadDown)
    if low < high:
        frame = grid.area(up + low, 0, high - low, width, outline=WINDOW)
        drawing.add(frame, frame._replace(x=frame.x - 1, y=frame.y - 1, width=frame.width + 2, height=frame.height + 2))
    draw_scale(drawing, grid, height, width, -up, -left)


def draw_legend(drawing: Drawing, y: float, cores: list[int]) -> None:
    x = MARGIN
    named = [(core_colour(core), f"core {core}") for core in cores[:8]]
    if len(cores) > 8:
        named.append((WHITE, f"and {len(cores) - 8} more"))
    for colour, name in [*named, (REAL, "dY"), (INSERTED, "inserted zeros"), (PADDING, "padding"),
                         (UNWRITTEN, "not written")]:
        drawing.add(Rectangle(x, y, 9, 9, colour, GREY if colour != WHITE else None), Text(x + 13, y + 1, name))
        x += 13 + text_width(name) + 12
        if x > drawing.width - 110:
            x, y = MARGIN, y + 13


def draw_memory(drawing: Drawing, y: float, t: TConv3DBackpropInputTiling, platform: PlatformInfo) -> None:
    """Draw how full L0A, L0B, L0C and L1 are; L1 is shared by the queues of dY (A) and of the weights (B)."""
    use, size = t.memory_use(), t.memory_size(platform)
    bars = [(name, [(use[name], BAR_A)], size[name]) for name in ("L0A", "L0B", "L0C")]
    bars.append(("L1", [(use["L1A"], BAR_A), (use["L1B"], BAR_B)], size["L1"]))
    length = 300.0
    for index, (name, parts, capacity) in enumerate(bars):
        top = y + 22 * index
        drawing.add(Text(MARGIN, top + 4, name, 1, BLACK), Rectangle(MARGIN + 30, top, length, 15, BAR_EMPTY))
        x = MARGIN + 30
        for used, colour in parts:
            drawing.add(Rectangle(x, top, length * used / capacity, 15, colour))
            x += length * used / capacity
        drawing.add(Rectangle(MARGIN + 30, top, length, 15, None, GREY))
        total = sum(used for used, _ in parts)
        split = f"  (dY {parts[0][0]} + weights {parts[1][0]})" if len(parts) > 1 else ""
        drawing.add(Text(MARGIN + 30 + length + 10, top + 4,
                         f"{total} / {capacity} B  {100 * total / capacity:.0f}%{split}"))
