"""Any order of two-phase calls with any tensors: a call is refused and writes nothing, or its results are right."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from convgrad import cann

FILL = 77


class TwoPhases(RuleBasedStateMachine):
    """One memory for everything, so that results, operands and workspaces may lie on each other."""

    executors = Bundle("executors")

    @initialize()
    def start(self) -> None:
        self.memory = np.full(4096, FILL, np.float32)
        rng = np.random.default_rng(0)
        self.operands = [rng.integers(-3, 4, shape).astype(np.float32) for shape in ((2, 3, 4), (2, 2, 6), (3, 2, 3))]
        starts = (0, 64, 128)
        for start, values in zip(starts, self.operands):
            self.memory[start:start + values.size] = values.ravel()
        self.inputs = [self.memory[start:start + values.size].reshape(values.shape)
                       for start, values in zip(starts, self.operands)]

    def right(self) -> list[np.ndarray]:
        dy, x, w = (np.asarray(values, float) for values in self.operands)
        with np.errstate(invalid="ignore", over="ignore"):
            return self.gradients(dy, x, w)

    @staticmethod
    def gradients(dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
        dx, dw = np.zeros(x.shape), np.zeros(w.shape)
        for t, k in np.ndindex(4, 3):
            dx[:, :, t + k] += dy[:, :, t] @ w[:, :, k]
            dw[:, :, k] += dy[:, :, t].T @ x[:, :, t + k]
        return [dx, dw, dy.sum((0, 2))]

    @rule(target=executors, places=st.tuples(*[st.sampled_from([0, 60, 200, 210, 300, 400])] * 3),
          step=st.sampled_from([1, 1, 1, 2, 0]), mask=st.tuples(*[st.booleans()] * 3),
          groups=st.sampled_from([1, 1, 1, 1.0, 2, None]), half=st.booleans())
    def phase_one(self, places, step, mask, groups, half):
        shapes = ((2, 2, 6), (3, 2, 3), (3,))
        results = []
        for place, shape in zip(places, shapes):
            count = int(np.prod(shape))
            dtype = np.float16 if half else np.float32
            flat = self.memory[place:].view(dtype)
            strides = [flat.itemsize * step * extent for extent in np.cumprod([1, *shape[:0:-1]])[::-1]]
            assert flat.size > count * max(step, 1)
            results.append(np.lib.stride_tricks.as_strided(flat, shape, strides))
        status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
            *self.inputs, [3], [1], [0], [1], False, [0], groups, mask, 0, *results, backend="reference")
        assert (executor is None) == (status != 0)
        return status, size, executor, mask, results

    @rule(call=consumes(executors), workspace=st.sampled_from(["none", "own", "on the operands", "short", "elsewhere"]),
          tbc=st.sampled_from([False, False, False, True]))
    def phase_two(self, call, workspace, tbc):
        _, size, executor, mask, results = call
        memory = self.memory.view(np.uint8)
        given = {"none": None, "own": np.empty(size, np.uint8), "on the operands": memory[:size], "short":
                 np.empty(max(size - 1, 0), np.uint8), "elsewhere": memory[4096:4096 + size]}[workspace]
        before = self.memory.copy()
        self.operands = [array.copy() for array in self.inputs]  # an operand that is not read may hold a result
        exact_results = self.right()
        run = cann.aclnnConvTbcBackward if tbc else cann.aclnnConvolutionBackward
        status = run(given, size, executor, None)
        if status != 0:
            assert self.memory.tobytes() == before.tobytes(), "a refused call wrote"
            assert cann.aclGetRecentErrMsg()
            return
        for asked, found, exact in zip(mask, results, exact_results):
            if asked:
                wanted = exact.astype(np.float32).astype(found.dtype)
                assert np.array_equal(found, wanted, equal_nan=True), "a wrong result in silence"
        for read, values, found in zip((any(mask), mask[1], mask[0]), self.operands, self.inputs):
            assert not read or np.array_equal(values, found), "an operand that is read was overwritten"
        if executor is not None:
            assert run(given, size, executor, None) != 0, "an executor ran twice"


class TestTwoPhases(TwoPhases.TestCase):
    settings = settings(max_examples=80, stateful_step_count=10, derandomize=True, deadline=None, database=None,
                        suppress_health_check=list(HealthCheck))


def test_the_machine_reaches_right_results() -> None:
    machine = TwoPhases()
    machine.start()
    call = machine.phase_one((200, 300, 400), 1, (True, True, True), 1, False)
    assert call[0] == 0
    machine.phase_two(call, "own", False)
    assert np.array_equal(call[4][0], machine.right()[0])
