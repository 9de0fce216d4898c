"""The whole operator's work cut into pieces, and the pieces dealt to the cores."""

from __future__ import annotations

from typing import NamedTuple

from ...problem import checked_int
from .piece_checks import aligned_row
from .tiling_struct import TConv3DBackpropInputTiling, ceil_div
from .walk import PieceShape, Walk


class Piece(NamedTuple):
    """What one core does between two settings of isFirstIter_: some rows and channels of one depth of one sample."""

    core: int
    n: int
    d: int
    row0: int
    rows: int
    cin1_0: int
    cin: int
    offsetA: int  # GradOutput pointer
    offsetB: int  # Weight pointer
    offsetC: int  # output pointer (NDC1HWC0), without the depth
    curHoStartIdx: int
    singleShapeM: int
    singleShapeK: int
    singleShapeN: int
    skipped: bool  # no dY row reaches it: it is left to the zeroed output

    def walk(self, tiling: TConv3DBackpropInputTiling) -> Walk:
        """Return the blocks of the piece."""
        shape = PieceShape.of(tiling, self.singleShapeM, self.singleShapeK, self.singleShapeN)
        return Walk(tiling, shape, self.d, self.curHoStartIdx, self.n, self.cin1_0)


def split_pieces(tiling: TConv3DBackpropInputTiling, cores: int = 1) -> list[Piece]:
    """Cut dX into pieces of singleCoreM pixels and singleCoreCin channels and deal them to `cores`.

    Every element of dX belongs to one piece, except rows at the bottom that no dY reaches. Each core takes a
    contiguous range; the first (pieces mod cores) cores take one more.

    Returns
    -------
    list of Piece
        In the order in which they are dealt: rows outermost, then sample, depth, and channels fastest.
    """
    t = tiling
    cores = checked_int(cores, "cores", 1)
    m_count, n_count = ceil_div(t.hi * t.wi, t.singleCoreM), ceil_div(t.cin1 * t.c0, t.singleCoreCin)
    piece_rows = t.singleCoreM // t.wi
    total = t.batch * t.di * m_count * n_count
    share, more = divmod(total, cores)
    pieces = []
    for p in range(total):
        m, rest = divmod(p, t.batch * t.di * n_count)
        sample_depth, j = divmod(rest, n_count)
        n, d = divmod(sample_depth, t.di)
        core = p // (share + 1) if p < more * (share + 1) else more + (p - more * (share + 1)) // share
        row0 = m * piece_rows
        rows = min(piece_rows, t.hi - row0)
        if m == m_count - 1:
            rows -= t.unreached_rows
        group = j * t.singleCoreCin // t.c0
        channels = min(t.singleCoreCin, t.cin - j * t.singleCoreCin)
        start_row = row0 - t.backpropPadUp
        row = aligned_row(start_row, t.strideH)
        pieces.append(Piece(
            core, n, d, row0, max(rows, 0), group, channels, curHoStartIdx=start_row,
            offsetA=n * t.grad_output_sample + row * t.wo * t.c0, offsetB=group * t.weight_group,
            offsetC=n * t.output_sample + (group * t.hi + row0) * t.wi * t.c0, singleShapeM=max(rows, 0) * t.wi,
            singleShapeK=t.full_k, singleShapeN=channels, skipped=rows <= 0 or row >= t.ho))
    return pieces
