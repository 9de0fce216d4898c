"""Estimates without running: bytes moved, arithmetic, and balance over the cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .pieces import Piece, split_pieces
from .tiling_struct import TConv3DBackpropInputTiling


@dataclass(frozen=True)
class Traffic:
    """Totals over all cores. Nothing here is a time on a device."""

    pieces: int
    blocks: int
    passes: int  # blocks x valid kernel depths
    products: int  # passes x slices of K
    flop: int
    bytes_a: int  # dY, global memory -> L1
    bytes_b: int  # weights, global memory -> L1
    bytes_l0a: int  # L1 -> L0A
    bytes_l0b: int  # L1 -> L0B
    bytes_c: int  # L0C -> global memory
    reread_a: float  # bytes_a / size of dY
    reread_b: float  # bytes_b / size of the weights
    cores: int
    blocks_of_busiest_core: int

    @property
    def flop_per_byte(self) -> float:
        moved = self.bytes_a + self.bytes_b + self.bytes_c
        return self.flop / moved if moved else 0.0

    @property
    def imbalance(self) -> float:
        """Blocks of the busiest core over the mean; 1 is perfect."""
        return self.blocks_of_busiest_core * self.cores / self.blocks if self.blocks else 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"flop_per_byte": self.flop_per_byte, "imbalance": self.imbalance}

    def lines(self) -> list[str]:
        """Return the estimate as readable lines."""
        return [
            f"pieces {self.pieces} on {self.cores} core(s), blocks {self.blocks}, busiest core "
            f"{self.blocks_of_busiest_core} blocks (imbalance {self.imbalance:.2f})",
            f"GM -> L1   dY {self.bytes_a:,} B (read {self.reread_a:.2f} times), weights {self.bytes_b:,} B "
            f"(read {self.reread_b:.2f} times)",
            f"L1 -> L0   A {self.bytes_l0a:,} B, B {self.bytes_l0b:,} B",
            f"L0C -> GM  dX {self.bytes_c:,} B",
            f"{self.flop:,} flop in {self.products:,} products, {self.flop_per_byte:.1f} flop per byte of global "
            "memory",
        ]


def estimate(tiling: TConv3DBackpropInputTiling, cores: int = 1) -> Traffic:
    """Return what a launch on `cores` cores moves and computes."""
    t = tiling
    pieces = split_pieces(t, cores)
    known: dict[tuple[int, ...], np.ndarray] = {}
    total = np.zeros(len(COUNTED), np.int64)
    per_core = [0] * cores
    for piece in pieces:
        if piece.skipped:
            continue
        walk = piece.walk(t)
        key = (piece.row0, piece.rows, piece.cin, len(walk.kernel_depths))
        if key not in known:
            known[key] = counted(piece, t)
        total += known[key]
        per_core[piece.core] += len(walk)
    counts = dict(zip(COUNTED, (int(value) for value in total)))
    dy_bytes = t.batch * t.grad_output_sample * t.element_bytes
    return Traffic(pieces=len(pieces), cores=cores, blocks_of_busiest_core=max(per_core),
                   reread_a=counts["bytes_a"] / dy_bytes,
                   reread_b=counts["bytes_b"] / (t.weight_size * t.element_bytes), **counts)


COUNTED = ("blocks", "passes", "products", "flop", "bytes_a", "bytes_b", "bytes_l0a", "bytes_l0b", "bytes_c")


def counted(piece: Piece, t: TConv3DBackpropInputTiling) -> np.ndarray:
    """Return the totals of one piece in the order of COUNTED."""
    e, k = t.element_bytes, t.inner_k
    total = np.zeros(len(COUNTED), np.int64)
    for block in piece.walk(t).blocks():
        passes = len(block.kernel_depths)
        written = 0 if block.skipped else block.pixels * block.columns * e
        total += (1, passes, block.products, 2 * passes * k * block.pixels * block.columns, block.bytes_a,
                  block.bytes_b, passes * k * block.pixels * e, passes * k * block.columns * e, written)
    return total
