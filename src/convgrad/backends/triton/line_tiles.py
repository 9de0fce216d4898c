"""The tile of the weight gradient line by line, and the shapes whose times are known."""

from __future__ import annotations

from dataclasses import dataclass

from .tiles import Box

# The tiles that the cost model was fitted to: output channels, input channels and pixels of a line, then the taps
# a program without chains and with chains. Others are right, too, but no time is known of them.
FITTED_TILES: dict[tuple[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {
    (64, 16, 64): ((1, 2, 3, 4), (3, 4, 6)),
    (64, 16, 128): ((1, 5), (5,)),
    (64, 32, 64): ((1, 2, 3, 5), (2, 3, 4)),
    (64, 32, 128): ((), (3,)),
    (64, 64, 64): ((1, 3), (2, 3, 4)),
    (64, 128, 64): ((1, 2), (3, 4)),
    (64, 256, 64): ((1,), ()),
    (128, 32, 64): ((1, 2), ()),
    (128, 64, 64): ((1, 2, 4), ()),
    (128, 64, 128): ((2,), ()),
    (128, 128, 64): ((1, 2), (2, 3)),
    (128, 256, 64): ((1,), ()),
    (256, 64, 64): ((1,), (2, 3)),
    (256, 128, 64): ((1,), ()),
}


@dataclass(frozen=True)
class LineTile:
    """BK x CB channels and NT taps of `axis` a program; `box` is a line of pixels; `chain`: lines share their x."""

    box: Box
    BK: int
    CB: int
    NT: int
    axis: int
    chain: bool
    y_slots: int
    x_slots: int
    warps: int
    together: int  # programs that share a multiprocessor
    splits: int  # parts of a tile's sums, added by a second kernel
    seconds: float
    programs: int = 0  # that share the lines of all tiles evenly; 0: each has one run of one tile
    turned: bool = False  # input channels are the rows of a product, for results whose output channels are neighbours
    shared: bool = False  # taps share a copy of x; of problems with one axis, whose images become the last one

    def __str__(self) -> str:
        return (f"lines of {'x'.join(map(str, self.box))} pixels, {self.BK} x {self.CB} channels x {self.NT} taps of "
                f"axis {self.axis}{' in chains' if self.chain else ' that share x' if self.shared else ''}, "
                f"{self.y_slots}+{self.x_slots} slots, "
                f"{self.splits} runs{f' shared by {self.programs} programs' if self.programs else ''}, "
                f"{self.seconds * 1e6:.0f} us expected")
