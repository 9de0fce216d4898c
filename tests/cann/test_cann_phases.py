"""Phase 2: the workspace, the executor that runs once, refusals that write nothing, the line-by-line example."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from convgrad import cann

OK, NULL, INVALID, RUNTIME = 0, 161001, 161002, 361001


class Call:
    """A 1-D call of mixed formats, so that a workspace is needed for the conversions."""

    def __init__(self, dtype=np.float16, out=np.float32):
        self.dy, self.x, self.w = (np.ones(shape, dtype) for shape in ((4, 2, 3), (4, 2, 9), (2, 2, 3)))
        self.results = [np.full(shape, 7, out) for shape in ((4, 2, 9), (2, 2, 3), (2,))]

    def phase_one(self, backend, **options):
        tensors = [cann.aclTensor(array) for array in (self.dy, self.x, self.w)]
        results = [cann.aclTensor(array) for array in self.results]
        return cann.aclnnConvolutionBackwardGetWorkspaceSize(
            *tensors, [2], [3], [0], [1], False, [0], 1, [True] * 3, 0, *results, backend=backend, **options)

    @property
    def untouched(self):
        return all((array == 7).all() for array in self.results)

    @property
    def solved(self):
        return (self.results[0] == 2).all() and (self.results[1] == 12).all() and (self.results[2] == 12).all()


def test_workspace_rules(backend):
    call = Call()
    status, size, executor = call.phase_one(backend)
    assert status == OK and size > 0
    workspace = np.full(size + 32, 0x5A, np.uint8)
    assert cann.aclnnConvolutionBackward(None, size, executor, None) == NULL
    assert str(size) in cann.aclGetRecentErrMsg()
    assert cann.aclnnConvolutionBackward(workspace[:size - 1], size, executor, None) == INVALID
    assert cann.aclnnConvolutionBackward(workspace, size - 1, executor, None) == INVALID
    assert cann.aclnnConvolutionBackward(np.zeros(size, np.float32), size, executor, None) == INVALID
    assert call.untouched
    assert cann.aclnnConvolutionBackward(workspace[16:size + 16], size, executor, None) == OK
    assert call.solved
    assert (workspace[:16] == 0x5A).all() and (workspace[size + 16:] == 0x5A).all()


@pytest.mark.parametrize("kind", [bytearray, lambda size: memoryview(bytearray(size)),
                                  lambda size: np.empty(size, np.uint8)])
def test_kinds_of_workspace(kind, backend):
    call = Call()
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(kind(size), size, executor) == OK
    assert call.solved


def test_read_only_bytes_are_no_workspace(backend):
    call = Call()
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(bytes(size), size, executor) == INVALID
    assert call.untouched


@pytest.mark.parametrize("shift", [0, 1, 7, 63])
def test_a_workspace_may_start_anywhere(shift, backend):
    call = Call()
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(np.empty(size + 64, np.uint8)[shift:], size, executor) == OK
    assert call.solved


def test_an_executor_runs_once(backend):
    call = Call(np.float32)
    _, size, executor = call.phase_one(backend)
    workspace = np.empty(size, np.uint8) if size else None
    assert cann.aclnnConvolutionBackward(workspace, size, executor) == OK
    for array in call.results:
        array.fill(7)
    assert cann.aclnnConvolutionBackward(workspace, size, executor) == INVALID
    assert "once" in cann.aclGetRecentErrMsg()
    assert call.untouched


def test_no_executor():
    assert cann.aclnnConvolutionBackward(None, 0, None) == NULL
    assert cann.aclnnConvTbcBackward(None, 0, None) == NULL
    assert cann.aclnnConvolutionBackward(None, 0, "executor") == INVALID
    assert "executor must be" in cann.aclGetRecentErrMsg()


def test_the_executor_of_another_operator(backend):
    call = Call(np.float32)
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvTbcBackward(np.empty(size, np.uint8), size, executor) == INVALID
    assert "aclnnConvolutionBackward" in cann.aclGetRecentErrMsg()
    assert call.untouched


def test_results_that_cannot_be_written(backend):
    call = Call(np.float32)
    call.results[1].flags.writeable = False
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == INVALID
    assert "gradWeight is read-only" in cann.aclGetRecentErrMsg()
    assert call.untouched


def test_results_that_overlap(backend):
    call = Call(np.float32)
    call.results[0] = call.x
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == INVALID
    assert "gradInput overlaps input" in cann.aclGetRecentErrMsg()
    assert (call.x == 1).all()


def test_a_result_with_overlapping_elements(backend):
    call = Call(np.float32)
    call.results[2] = np.lib.stride_tricks.as_strided(np.full(1, 7, np.float32), (2,), (0,))
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == INVALID
    assert "gradBias has elements that overlap each other" in cann.aclGetRecentErrMsg()


def test_a_result_whose_rows_overlap(backend):
    call = Call(np.float32)
    storage = np.full(80, 7, np.float32)
    call.results[0] = np.lib.stride_tricks.as_strided(storage, (4, 2, 9), (64, 32, 4))
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == INVALID
    assert "gradInput has elements that overlap each other" in cann.aclGetRecentErrMsg()
    assert (storage == 7).all()


@pytest.mark.parametrize("place", ["dy", "x", "w"])
def test_a_workspace_that_lies_on_a_tensor(place, backend):
    call = Call()
    _, size, executor = call.phase_one(backend)
    memory = np.zeros(size + 4096, np.uint8)
    old = getattr(call, place)
    inside = memory[128:128 + old.nbytes].view(old.dtype).reshape(old.shape)
    inside[...] = old
    setattr(call, place, inside)
    _, size, executor = call.phase_one(backend)
    assert cann.aclnnConvolutionBackward(memory, size, executor) == INVALID
    assert "the workspace overlaps" in cann.aclGetRecentErrMsg()
    assert call.untouched and (inside == 1).all()
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == OK
    assert call.solved


def test_a_failure_while_running_is_a_status(backend):
    call = Call(np.float32)
    _, size, executor = call.phase_one(backend)

    def fail(*_):
        raise MemoryError("no room")

    executor.plans[0] = executor.plans[0]._replace(run=fail)
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == RUNTIME
    assert "no room" in cann.aclGetRecentErrMsg()


def test_messages_belong_to_their_thread(backend):
    assert cann.aclnnConvolutionBackward(None, 0, None) == NULL
    seen = []
    thread = threading.Thread(target=lambda: seen.append(cann.aclGetRecentErrMsg()))
    thread.start()
    thread.join()
    assert seen == [""]
    assert "executor" in cann.aclGetRecentErrMsg()
    Call().phase_one(backend)
    assert cann.aclGetRecentErrMsg() == ""


@pytest.mark.parametrize("place, value, words", [
    (0, [1.0], "gradOutput must be an aclTensor, an array or None, got list"),
    (0, np.zeros((4, 2, 3), ">f4"), "gradOutput: data has the byte-swapped"),
    (4, 3, "stride must be a sequence"), (5, ["0"], "padding must be a sequence"), (7, "no", "transposed"),
    (9, None, "groups must be an integer, got None"), (9, "1", "groups"), (9, 1.5, "groups"), (9, 1.0, "groups"),
    (10, 7, "outputMask must be a sequence"), (10, [1.0] * 3, "outputMask"), (11, [0], "cubeMathType"),
    (11, None, "cubeMathType")], ids=str)
def test_wrong_python_types_are_a_status(place, value, words, backend):
    call = Call(np.float32)
    assert call.phase_one(backend)[0] == OK  # so that 1.0 would find the answer for 1 in a cache
    arguments = [call.dy, call.x, call.w, [2], [3], [0], [1], False, [0], 1, [True] * 3, 0, *call.results]
    arguments[place] = value
    assert cann.aclnnConvolutionBackwardGetWorkspaceSize(*arguments, backend=backend) == (INVALID, 0, None)
    assert words in cann.aclGetRecentErrMsg()


@pytest.mark.parametrize("workspace, size", [("text", 10**6), (3.5, 10**6), (bytearray(10**6), None),
                                             (bytearray(10**6), 1e6)], ids=["str", "float", "size-None", "size-1e6"])
def test_a_workspace_of_a_wrong_type_is_a_status(workspace, size, backend):
    call = Call()
    executor = call.phase_one(backend)[2]
    assert cann.aclnnConvolutionBackward(workspace, size, executor) == INVALID
    assert "workspace" in cann.aclGetRecentErrMsg()
    assert call.untouched


def test_an_unknown_product_is_a_python_error():
    with pytest.raises(ValueError, match="product='A9'"):
        cann.aclnnConvolutionBackwardGetWorkspaceSize(None, None, None, None, [1], [0], [1], False, [0], 1, [1] * 3, 0,
                                                      None, None, None, product="A9")


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_arrays_without_a_descriptor(axes, backend):
    """A bare array has the format of its rank: (ND, NCHW, NCDHW)."""
    dy, x, w = (np.ones((n, 2, *(size,) * axes), np.float32) for n, size in ((1, 3), (1, 3), (2, 1)))
    dx, dw, db = np.full(x.shape, 7, np.float32), np.full(w.shape, 7, np.float32), np.full(2, 7, np.float32)
    status, size, executor = cann.aclnnConvolutionBackwardGetWorkspaceSize(
        dy, x, w, [2], [1] * axes, [0] * axes, [1] * axes, False, [0] * axes, 1, [True] * 3, 0, dx, dw, db,
        backend=backend)
    assert status == OK, cann.aclGetRecentErrMsg()
    assert cann.aclnnConvolutionBackward(np.empty(size, np.uint8), size, executor) == OK
    assert (dx == 2).all() and (dw == 3**axes).all() and (db == 3**axes).all()


def test_time_first_arrays_without_a_descriptor(backend):
    arrays = [np.ones(shape, np.float32) for shape in ((5, 1, 2), (5, 1, 2), (1, 2, 2), (2,))]
    dx, dw, db = results = [np.full(array.shape, 7, np.float32) for array in arrays[1:]]
    status, size, executor = cann.aclnnConvTbcBackwardGetWorkspaceSize(*arrays, 0, 0, *results, backend=backend)
    assert status == OK, cann.aclGetRecentErrMsg()
    assert cann.aclnnConvTbcBackward(np.empty(size, np.uint8), size, executor) == OK
    assert (dx == 2).all() and (dw == 5).all() and (db == 5).all()


def test_max_workspace_is_passed_on(backend):
    status, _, _ = Call(np.float32).phase_one(backend, max_workspace_bytes=1 << 30, num_threads=1)
    assert status == OK


def test_plans_are_asked_for_again_after_the_plan_cache_is_cleared(backend):
    from convgrad.plan import clear_plan_cache

    first = Call(np.float32).phase_one(backend)[2].plans[0]
    assert Call(np.float32).phase_one(backend)[2].plans[0] is first
    clear_plan_cache()
    assert Call(np.float32).phase_one(backend)[2].plans[0] is not first


def test_a_program_ported_line_by_line(backend):
    """The TBC example of the vendor's page, call by call."""
    assert cann.aclInit(None) == cann.ACL_SUCCESS
    assert cann.aclrtSetDevice(0) == cann.ACL_SUCCESS
    ret, stream = cann.aclrtCreateStream()
    assert ret == cann.ACL_SUCCESS

    def create(host, shape, data_type):
        size = host.nbytes
        ret, memory = cann.aclrtMalloc(size, cann.aclrtMemMallocPolicy.ACL_MEM_MALLOC_HUGE_FIRST)
        assert ret == cann.ACL_SUCCESS
        copy = cann.aclrtMemcpyKind.ACL_MEMCPY_HOST_TO_DEVICE
        assert cann.aclrtMemcpy(memory, size, host, size, copy) == cann.ACL_SUCCESS
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = shape[i + 1] * strides[i + 1]
        form = cann.aclFormat.ACL_FORMAT_NCHW if len(shape) == 4 else cann.aclFormat.ACL_FORMAT_ND
        return memory, cann.aclCreateTensor(shape, len(shape), data_type, strides, 0, form, shape, len(shape), memory)

    shapes = ([5, 1, 2], [5, 1, 2], [1, 2, 2], [2], [5, 1, 2], [1, 2, 2], [2])
    made = [create(np.ones(shape, np.float32), shape, cann.aclDataType.ACL_FLOAT) for shape in shapes]
    tensors = [tensor for _, tensor in made]
    ret, size, executor = cann.aclnnConvTbcBackwardGetWorkspaceSize(*tensors[:4], 0, 1, *tensors[4:], backend=backend)
    assert ret == cann.ACL_SUCCESS
    workspace = None
    if size > 0:
        ret, workspace = cann.aclrtMalloc(size)
    assert cann.aclnnConvTbcBackward(workspace, size, executor, stream) == cann.ACL_SUCCESS
    assert cann.aclrtSynchronizeStream(stream) == cann.ACL_SUCCESS
    for (memory, _), shape, value in zip(made[4:], shapes[4:], (2, 5, 5)):
        result = np.zeros(shape, np.float32)
        copy = cann.aclrtMemcpyKind.ACL_MEMCPY_DEVICE_TO_HOST
        assert cann.aclrtMemcpy(result, result.nbytes, memory, result.nbytes, copy) == cann.ACL_SUCCESS
        assert (result == value).all()
        assert cann.aclrtMemcpy(result, 1, memory, result.nbytes, copy) == cann.ACL_ERROR_INVALID_PARAM
    for memory, tensor in made:
        assert cann.aclDestroyTensor(tensor) == 0 and cann.aclrtFree(memory) == 0
    assert cann.aclrtDestroyStream(stream) == 0 and cann.aclrtResetDevice(0) == 0 and cann.aclFinalize() == 0
