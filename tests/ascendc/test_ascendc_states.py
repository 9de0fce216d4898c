"""Any order of calls on the Ascend C objects: each is refused, or the result is right. Nothing in between."""

from __future__ import annotations

import contextlib
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from convgrad import Unsupported, ascendc

DY, W, X = (1, 3, 2, 3, 4), (3, 20, 1, 2, 2), (1, 20, 2, 4, 5)
half = ascendc.half
TILE = {"baseM": 16, "baseN": 16, "baseK": 64, "stepKa": 1, "stepKb": 1, "al1Pbuffer": 2, "bl1Pbuffer": 2,
        "singleCoreM": 10, "singleCoreCin": 16}


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(1, 4, DY).astype(half), rng.integers(1, 4, W).astype(half)


def plain(dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    dx = np.zeros(X)
    for h, v, i, j in np.ndindex(3, 4, 2, 2):
        dx[:, :, :, h + i, v + j] += np.einsum("nod,oi->nid", dy[..., h, v].astype(float),
                                               w[:, :, 0, i, j].astype(float))
    return dx.astype(half)


class InputGradient(RuleBasedStateMachine):
    """Calls of the page in any order with right and wrong arguments; End and the coverage check have the last word."""

    @initialize(plain_output=st.booleans())
    def start(self, plain_output: bool) -> None:
        self.dy, self.w = operands()
        self.tiling = ascendc.find_tiling(ascendc.describe(DY, W, half, input_size=X[2:])).with_(**TILE)
        self.pieces = ascendc.split_pieces(self.tiling)
        self.grad_output = ascendc.GlobalTensor(ascendc.pack_ndc1hwc0(self.dy))
        self.weight = ascendc.GlobalTensor(ascendc.pack_fractal_z_3d(self.w))
        self.format = ascendc.ConvFormat.NCDHW if plain_output else ascendc.ConvFormat.NDC1HWC0
        shape = X if plain_output else (1, 2, 2, 4, 5, 16)
        self.memory = np.full(shape, np.nan, half)
        self.output = ascendc.GlobalTensor(self.memory)
        self.workspace = ascendc.GlobalTensor(np.full(256, np.nan, half))
        self.op = ascendc.Conv3DBackpropInput[ascendc.conv_types(half, self.format)]()
        self.piece = self.pieces[0]

    def attempt(self, call, *arguments) -> object:
        try:
            return call(*arguments)
        except (ascendc.Misuse, ascendc.OutOfBounds, Unsupported):
            return None

    @rule()
    def init(self) -> None:
        self.attempt(self.op.Init, self.tiling)

    @rule(number=st.integers(0, 7), wrong=st.sampled_from(["", "", "", "row", "weight", "shape"]))
    def describe_piece(self, number: int, wrong: str) -> None:
        piece = self.piece = self.pieces[number]
        self.attempt(self.op.SetSingleShape, piece.singleShapeM + (5 if wrong == "shape" else 0), piece.singleShapeK,
                     piece.singleShapeN)
        self.attempt(self.op.SetStartPosition, piece.d, piece.curHoStartIdx + (1 if wrong == "row" else 0))
        self.attempt(self.op.SetGradOutput, self.grad_output[piece.offsetA])
        self.attempt(self.op.SetWeight, self.weight[piece.offsetB if wrong != "weight" else 0])

    @rule()
    def iterate(self) -> None:
        self.attempt(self.op.Iterate)

    @rule(place=st.sampled_from(["right", "right", "start", "workspace"]), atomic=st.sampled_from([0, 0, 0, 1]))
    def take(self, place: str, atomic: int) -> None:
        target = {"right": self.workspace if self.format is ascendc.ConvFormat.NCDHW else
                  self.output[self.piece.offsetC], "start": self.output, "workspace": self.workspace}[place]
        self.attempt(self.op.GetTensorC, target, atomic)

    @precondition(lambda self: self.format is ascendc.ConvFormat.NCDHW)
    @rule()
    def transpose(self) -> None:
        with contextlib.suppress(ascendc.Misuse, ascendc.OutOfBounds, ValueError):
            ascendc.TransposeBlock(self.op, self.workspace, self.output)

    @rule()
    def next_piece(self) -> None:
        self.op.ctx.isFirstIter_ = True

    @rule(count=st.integers(1, 8))
    def whole_pieces(self, count: int) -> None:
        """The loop of the page for the next pieces, so that complete programs are reached."""
        for piece in self.pieces[:count]:
            self.next_piece()
            self.describe_piece(self.pieces.index(piece), "")
            while self.attempt(self.op.Iterate):
                self.take("right", 0)
                if self.format is ascendc.ConvFormat.NCDHW:
                    self.transpose()

    def teardown(self) -> None:
        """What End and the coverage check let through is the plain gradient."""
        if not hasattr(self, "op"):
            return
        try:
            self.op.End()
            ascendc.check_coverage(self.output, self.tiling, self.format)
        except ascendc.Misuse:
            return
        found = self.memory if self.format is ascendc.ConvFormat.NCDHW else ascendc.unpack_ndc1hwc0(self.memory, X[1])
        assert found.tobytes() == plain(self.dy, self.w).tobytes()


QUICK = settings(max_examples=60, stateful_step_count=14, derandomize=True, deadline=None, database=None,
                 suppress_health_check=list(HealthCheck))


@pytest.mark.filterwarnings("ignore::convgrad.ascendc.EndMissing")
class TestInputGradient(InputGradient.TestCase):
    settings = QUICK


def test_the_machine_reaches_right_results() -> None:
    """A complete program of the machine's own rules passes both checks: the machine can succeed."""
    for plain_output in (False, True):
        machine = InputGradient()
        machine.start(plain_output)
        machine.init()
        machine.whole_pieces(8)
        machine.op.End()
        ascendc.check_coverage(machine.output, machine.tiling, machine.format)
        machine.op = ascendc.Conv3DBackpropInput(*ascendc.conv_types(half))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del machine
