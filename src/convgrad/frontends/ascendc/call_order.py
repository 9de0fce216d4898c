"""The order in which the methods of a convolution object may be called, for both objects."""

from __future__ import annotations

from typing import Any

from .misuse import Misuse


class Context:
    """The part of the object's state that the page asks its user to set."""

    def __init__(self) -> None:
        self.isFirstIter_ = True


class CallOrder:
    """CREATED -> Init -> setters -> (Iterate, GetTensorC)... -> End.

    With `strict` off nothing is raised here, as on the device; only accesses outside a buffer still are.
    """

    def __init__(self, name: str, setters: tuple[str, ...], strict: bool) -> None:
        self.name, self.setters, self.strict = name, setters, strict
        self.initialised = self.ended = self.finished = False
        self.block_ready = self.block_taken = self.setter_since_start = self.started = False
        self.given: set[str] = set()

    def refuse(self, mistake: str, message: str) -> None:
        """Raise Misuse, unless the object mimics the device."""
        if self.strict:
            raise Misuse(mistake, message)

    def init(self) -> None:
        if self.ended:
            self.refuse("after-end", f"{self.name}: Init after End; create a new object")
        if self.initialised:
            self.refuse("init-twice", f"{self.name}: Init was already called; it allocates the L1 and L0 queues and "
                        "may be called once per object")
        self.initialised = True

    def called(self, method: str) -> None:
        """Note a call that needs Init before it and no End."""
        if not self.initialised:
            self.refuse("init-missing", f"{self.name}: {method} before Init; Init(tiling) comes first because every "
                        "other method reads the tiling")
        if self.ended:
            self.refuse("after-end", f"{self.name}: {method} after End; the queues are already freed")

    def setter(self, method: str) -> None:
        self.called(method)
        self.given.add(method)
        self.setter_since_start = True

    def iterate(self, context: Context) -> None:
        """Note an Iterate; it must not lose a block, nor run on after the last one."""
        self.called("Iterate")
        missing = [method for method in self.setters if method not in self.given]
        if missing:
            self.refuse("piece-incomplete", f"{self.name}: Iterate before {', '.join(missing)}; the piece is not "
                        "described yet")
        self.lose_block("Iterate")
        if not context.isFirstIter_ and (self.finished or self.setter_since_start):
            when = "for a new piece" if self.setter_since_start else "after the last block of the piece"
            self.refuse("first-iter", f"{self.name}: Iterate {when} with ctx.isFirstIter_ = False; set "
                        "ctx.isFirstIter_ = True after each finished piece, or the block counters stay at its end")

    def lose_block(self, method: str) -> None:
        if self.block_ready and not self.block_taken:
            self.refuse("block-lost", f"{self.name}: {method} while the block of the last Iterate still lies in L0C; "
                        "without GetTensorC it is lost")

    def computed(self) -> None:
        self.started = True
        self.block_ready, self.block_taken, self.finished = True, False, False

    def exhausted(self) -> None:
        self.block_ready, self.finished, self.started = False, True, True

    def take(self) -> None:
        """Note a GetTensorC: there must be a block, and it leaves once."""
        self.called("GetTensorC")
        if not self.block_ready:
            self.refuse("no-block", f"{self.name}: GetTensorC without a block; each call needs an Iterate that "
                        "returned True before it")
        if self.block_ready and self.block_taken:
            self.refuse("block-taken", f"{self.name}: GetTensorC a second time for one Iterate; L0C was freed by the "
                        "first")
        self.block_taken = True

    def end(self) -> None:
        self.called("End")
        self.lose_block("End")
        if not self.started:
            self.refuse("end-early", f"{self.name}: End before the first Iterate; nothing was computed")
        if not self.finished:
            self.refuse("end-early", f"{self.name}: End in the middle of a piece; go on until Iterate returns False, "
                        "or the rest of the piece is never written")
        if self.setter_since_start:
            self.refuse("end-early", f"{self.name}: End after the setters of a piece that was not iterated")
        self.ended = True

    def leave(self, failure: Any) -> bool:
        """Return whether leaving a `with` statement should call End."""
        return failure is None and self.initialised and not self.ended
