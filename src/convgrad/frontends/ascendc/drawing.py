"""Drawings made of rectangles and text, written as SVG or as PNG without any imaging library."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import numpy as np

from .font import ADVANCE, DESCENT, HEIGHT, WIDTH, glyph

Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
BLACK: Colour = (20, 20, 24)


class Rectangle(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: Colour | None = None
    outline: Colour | None = None
    hatched: bool = False
    title: str = ""  # shown by a browser under the pointer


class Text(NamedTuple):
    x: float
    y: float  # top of the letters
    text: str
    scale: int = 1
    colour: Colour = BLACK
    centred: bool = False

    @property
    def width(self) -> float:
        return text_width(self.text, self.scale)


def text_width(text: str, scale: int = 1) -> float:
    return len(text) * ADVANCE * scale - scale


@dataclass
class Drawing:
    """Shapes in the order in which they cover each other."""

    width: float
    height: float
    shapes: list[Rectangle | Text] = field(default_factory=list)

    def add(self, *shapes: Rectangle | Text) -> None:
        self.shapes.extend(shapes)

    def to_svg(self) -> str:
        """Return the drawing as an SVG document."""
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                 f'width="{self.width:g}" height="{self.height:g}" font-family="monospace">',
                 '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
                 'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" stroke="#000" stroke-opacity="0.3" '
                 'stroke-width="2"/></pattern></defs>',
                 f'<rect width="{self.width:g}" height="{self.height:g}" fill="{hexadecimal(WHITE)}"/>']
        for shape in self.shapes:
            lines.append(svg_text(shape) if isinstance(shape, Text) else svg_rectangle(shape))
        return "\n".join([*lines, "</svg>", ""])

    def to_png(self, zoom: int = 2) -> bytes:
        """Return the drawing as the bytes of a PNG file, `zoom` pixels per unit."""
        canvas = np.full((round(self.height * zoom), round(self.width * zoom), 3), 255, np.uint8)
        for shape in self.shapes:
            if isinstance(shape, Text):
                paint_text(canvas, shape, zoom)
            else:
                paint_rectangle(canvas, shape, zoom)
        return png(canvas)


def hexadecimal(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def svg_text(text: Text) -> str:
    anchor = ' text-anchor="middle"' if text.centred else ""
    return (f'<text x="{text.x:g}" y="{text.y + HEIGHT * text.scale:g}" font-size="{10 * text.scale:g}" '
            f'textLength="{text.width:g}" fill="{hexadecimal(text.colour)}"{anchor}>{escape(text.text)}</text>')


def svg_rectangle(shape: Rectangle) -> str:
    place = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
    fill = hexadecimal(shape.fill) if shape.fill else "none"
    stroke = f' stroke="{hexadecimal(shape.outline)}" stroke-width="1"' if shape.outline else ""
    title = f"<title>{escape(shape.title)}</title>" if shape.title else ""
    found = f'<rect {place} fill="{fill}"{stroke}>{title}</rect>'
    return found + (f'\n<rect {place} fill="url(#hatch)"/>' if shape.hatched else "")


def paint_rectangle(canvas: np.ndarray, shape: Rectangle, zoom: int) -> None:
    top, bottom = round(shape.y * zoom), round((shape.y + shape.height) * zoom)
    left, right = round(shape.x * zoom), round((shape.x + shape.width) * zoom)
    area = canvas[max(top, 0):bottom, max(left, 0):right]
    if not area.size:
        return
    if shape.fill:
        area[...] = shape.fill
    if shape.hatched:
        rows, columns = np.indices(area.shape[:2])
        stripes = (rows + top + columns + left) % (4 * zoom) < zoom
        area[stripes] = (area[stripes] * 0.7).astype(np.uint8)
    if shape.outline:
        area[:1], area[-1:] = shape.outline, shape.outline
        area[:, :1], area[:, -1:] = shape.outline, shape.outline


def paint_text(canvas: np.ndarray, text: Text, zoom: int) -> None:
    dot = text.scale * zoom
    x = round((text.x - (text.width / 2 if text.centred else 0)) * zoom)
    y = round(text.y * zoom)
    for character in text.text:
        mask = np.kron(glyph(character), np.ones((dot, dot), bool))
        area = canvas[max(y, 0):y + (HEIGHT + DESCENT) * dot, max(x, 0):x + WIDTH * dot]
        seen = mask[max(0, -y):, max(0, -x):][:area.shape[0], :area.shape[1]]
        area[seen] = text.colour
        x += ADVANCE * dot


def png(canvas: np.ndarray) -> bytes:
    """Return an RGB image (rows, columns, 3) of uint8 as a PNG file."""
    rows, columns, _ = canvas.shape
    lines = np.zeros((rows, 1 + columns * 3), np.uint8)  # each line starts with filter type 0
    lines[:, 1:] = canvas.reshape(rows, -1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)  # 8 bits, RGB
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
            + chunk(b"IEND", b""))
