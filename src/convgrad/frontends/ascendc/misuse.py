"""Mistakes in the use of the API, raised with the reason; the device library does not notice them."""

from __future__ import annotations

# One line per mistake that the model tells apart. `docs/ascendc.md` shows the message that each gives.
MISTAKES = {
    "init-missing": "a method is called before Init",
    "init-twice": "Init is called a second time",
    "after-end": "a method is called after End",
    "tiling-invalid": "the tiling given to Init contradicts itself or does not fit the memories",
    "types": "types or formats are not those of the page, or not those of the tiling",
    "piece-incomplete": "Iterate before all four setters of the piece",
    "rows": "singleShapeM is not a whole number of dX rows, or the rows lie outside dX",
    "argument-order": "arguments in the order of another method",
    "single-shape": "singleShapeK or singleShapeN is none that the tiling allows",
    "resident-weights": "singleShapeN over the weights that stay in L1",
    "start-position": "depth or start row outside dX",
    "start-row-pad": "the start row without backpropPadUp subtracted",
    "grad-output-offset": "the GradOutput pointer does not belong to the start position",
    "input-offset": "the Input pointer of the Filter does not belong to its start row",
    "weight-offset": "the Weight pointer is not at the first group of a channel block",
    "output-offset": "the output pointer does not belong to the piece",
    "workspace": "dX itself as the output of NCDHW blocks, which go to a workspace first",
    "depth-twice": "the depth offset is in the pointer although the object adds it",
    "block-lost": "a computed block is overwritten before GetTensorC took it",
    "not-transposed": "an NCDHW block is still in the workspace when its slot is used again, or at End",
    "operand-overwritten": "the output or the workspace lies on dY, X, the weight or another core's slot",
    "end-early": "End before the first Iterate, or before the last block of a piece",
    "end-missing": "the coverage is asked for before every object has called End",
    "no-block": "GetTensorC without a block",
    "block-taken": "GetTensorC a second time for one Iterate",
    "first-iter": "a new piece is iterated although ctx.isFirstIter_ was not set",
    "not-zeroed": "the output must be zero before the first block and is not",
    "written-twice": "an element of the output is written by two blocks",
    "never-written": "an element of the output is written by no block",
}


class Misuse(RuntimeError):
    """A call that the device library would take without a word and answer with wrong data.

    Attributes
    ----------
    mistake : str
        Its name in `MISTAKES`.
    """

    def __init__(self, mistake: str, message: str) -> None:
        if mistake not in MISTAKES:
            raise KeyError(f"{mistake!r} is not listed in MISTAKES")
        super().__init__(message)
        self.mistake = mistake


class OutOfBounds(IndexError):
    """An access outside the buffer behind a GlobalTensor."""
