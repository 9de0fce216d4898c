"""Where the blocks of a piece lie: which pixels, channels, dY rows and kernel depths each Iterate touches.

No data is read here. The kernel, the trace, the traffic estimate and the picture all ask this one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .conv_types import IterateOrder
from .tiling_struct import TConv3DBackpropInputTiling, ceil_div


class PieceShape(NamedTuple):
    """What SetSingleShape says and derives. K counts all kernel depths, the iterations over K are per depth."""

    m: int
    k: int
    n: int
    rows: int
    cin1: int
    cout1: int
    m_iter: int
    n_iter: int
    k_iter: int

    @staticmethod
    def of(tiling: TConv3DBackpropInputTiling, m: int, k: int, n: int) -> PieceShape:
        """Return the shape of a piece of `m` pixels, `n` channels and a length of `k` in K."""
        cin1 = ceil_div(n, tiling.c0)
        cout1 = k // (tiling.dk * tiling.kernel_column)
        return PieceShape(m, k, n, m // tiling.wi, cin1, cout1, ceil_div(m, tiling.baseM),
                          ceil_div(cin1 * tiling.c0, tiling.baseN),
                          ceil_div(cout1 * tiling.kernel_column, tiling.baseK))


class Load(NamedTuple):
    """One load from global memory to L1."""

    queue: str  # "A" for dY, "B" for weights
    kernel_depth: int
    first_slice: int
    slices: int
    bytes: int
    buffer: str  # "ping" or "pong"


@dataclass(frozen=True)
class Block:
    """What one Iterate computes and what GetTensorC writes. All ranges are (first, last), both inclusive."""

    core: int
    iterate: int  # counts from 0 inside the piece
    m: int
    n: int
    batch: int
    depth: int
    first_pixel: int  # inside the piece
    pixels: int  # useM
    first: tuple[int, int]  # (row, column) of dX
    last: tuple[int, int]
    channels: tuple[int, int]
    start_row: int  # curHo: first row of the stretched dY, negative inside the top padding
    stretched_rows: tuple[int, int] | None  # after clipping to the rows that exist
    dy_rows: tuple[int, int] | None  # the real rows among them
    kernel_depths: tuple[tuple[int, int], ...]  # (kernel depth, dY depth)
    products: int
    loads_a: int
    loads_b: int
    bytes_a: int
    bytes_b: int
    skipped: bool  # nothing is computed and GetTensorC writes nothing
    offset: int  # element offset that GetTensorC adds to the output pointer
    runs: int
    run_length: int
    run_stride: int
    loads: tuple[Load, ...] = ()

    @property
    def columns(self) -> int:
        """useN: channels of the block, whole groups of c0."""
        return self.channels[1] - self.channels[0] + 1


class Walk:
    """The blocks of one piece.

    Parameters
    ----------
    tiling : TConv3DBackpropInputTiling
    shape : PieceShape
    depth, start_row : int
        The arguments of SetStartPosition.
    batch, group : int
        Sample, and first group of c0 channels, of the piece (only for what is shown).
    """

    def __init__(self, tiling: TConv3DBackpropInputTiling, shape: PieceShape, depth: int, start_row: int,
                 batch: int = 0, group: int = 0) -> None:
        self.tiling, self.shape, self.depth, self.start_row = tiling, shape, depth, start_row
        self.batch, self.group = batch, group
        self.kernel_depths = tuple(tiling.kernel_depths(depth))

    def __len__(self) -> int:
        return self.shape.m_iter * self.shape.n_iter

    def place(self, index: int) -> tuple[int, int]:
        """Return the (m, n) block indices of Iterate number `index`."""
        if self.tiling.iterateOrder == IterateOrder.ORDER_M:
            m, n = divmod(index, self.shape.n_iter)
        else:
            n, m = divmod(index, self.shape.m_iter)
        return m, n

    def next_place(self, m: int, n: int) -> tuple[tuple[int, int], bool]:
        """Return the block indices after (m, n), and whether they still belong to the piece."""
        if self.tiling.iterateOrder == IterateOrder.ORDER_M:
            n += 1
            if n >= self.shape.n_iter:
                m, n = m + 1, 0
            return (m, n), m < self.shape.m_iter
        m += 1
        if m >= self.shape.m_iter:
            m, n = 0, n + 1
        return (m, n), n < self.shape.n_iter

    def blocks(self, core: int = 0) -> Iterator[Block]:
        """Yield every block of the piece in the order of Iterate."""
        for index in range(len(self)):
            yield self.block(self.place(index), index, core)

    def block(self, place: tuple[int, int], index: int, core: int = 0, with_loads: bool = False) -> Block:
        """Return the block at (m, n), which Iterate number `index` computes."""
        t, shape = self.tiling, self.shape
        m, n = place
        first = m * t.baseM
        use_m = min(t.baseM, shape.m - first)
        use_n = min(t.baseN, shape.cin1 * t.c0 - n * t.baseN)
        top_row = self.start_row + t.backpropPadUp
        start_row = self.start_row + first // t.wi
        stretched, real = self.rows_read(start_row)
        skipped = not self.kernel_depths or (t.initOutputFlag == 1 and real is None)
        depths = () if skipped else self.kernel_depths
        rows = 0 if real is None else real[1] - real[0] + 1
        k_length = shape.cout1 * t.kernel_column
        b_passes = 0 if t.weights_resident and index > self.first_computed else len(depths)
        first_channel = (self.group * t.c0) + n * t.baseN
        return Block(
            core=core, iterate=index, m=m, n=n, batch=self.batch, depth=self.depth, first_pixel=first, pixels=use_m,
            first=(top_row + first // t.wi, first % t.wi),
            last=(top_row + (first + use_m - 1) // t.wi, (first + use_m - 1) % t.wi),
            channels=(first_channel, first_channel + use_n - 1), start_row=start_row, stretched_rows=stretched,
            dy_rows=real, kernel_depths=depths, products=len(depths) * shape.k_iter,
            loads_a=len(depths) * ceil_div(shape.k_iter, t.stepKa), loads_b=b_passes * ceil_div(shape.k_iter, t.stepKb),
            bytes_a=len(depths) * k_length // (t.hk * t.wk) * rows * t.wo * t.element_bytes,
            bytes_b=b_passes * k_length * use_n * t.element_bytes,
            skipped=skipped, offset=n * t.baseN * t.hi * t.wi + (first + self.depth * t.hi * t.wi * t.cin1) * t.c0,
            runs=use_n // t.c0, run_length=use_m * t.c0, run_stride=t.hi * t.wi * t.c0,
            loads=tuple(self.loads(b_passes, use_n, rows)) if with_loads and depths else ())

    def rows_read(self, start_row: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Return the stretched rows that exist in a block's window, and the dY rows among them."""
        t = self.tiling
        low = max(start_row, 0)
        high = min(start_row + t.window_rows, t.stretched_rows) - 1
        if low > high:
            return None, None
        first, last = ceil_div(low, t.strideH), high // t.strideH
        return (low, high), ((first, last) if first <= last else None)

    @cached_property
    def first_computed(self) -> int:
        """Index of the first block that is not skipped: the one that loads weights that stay."""
        for index in range(len(self)):
            m, _ = self.place(index)
            if self.tiling.initOutputFlag != 1 or self.rows_read(self.start_row + m * self.tiling.baseM
                                                                 // self.tiling.wi)[1] is not None:
                return index
        return len(self)

    def loads(self, b_passes: int, use_n: int, rows: int) -> list[Load]:
        """Return the loads to L1 of one block of `use_n` channels and `rows` dY rows, in the order of K."""
        t, k_length = self.tiling, self.shape.cout1 * self.tiling.kernel_column
        column_bytes = use_n * t.element_bytes
        channel_bytes = rows * t.wo * t.element_bytes
        found = []
        for order, (kd, _) in enumerate(self.kernel_depths):
            for queue, step, buffers in (("A", t.stepKa, t.al1Pbuffer), ("B", t.stepKb, t.bl1Pbuffer)):
                if queue == "B" and not b_passes:
                    continue
                per_depth = ceil_div(self.shape.k_iter, step)
                for load in range(per_depth):
                    length = min((load + 1) * step * t.baseK, k_length) - load * step * t.baseK
                    size = length // (t.hk * t.wk) * channel_bytes if queue == "A" else length * column_bytes
                    found.append(Load(queue, kd, load * step, min(step, self.shape.k_iter - load * step), size,
                                      ("ping", "pong")[(order * per_depth + load) % buffers]))
        return found
