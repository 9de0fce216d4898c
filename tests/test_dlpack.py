"""Arrays of libraries known by DLPack alone: values, results of their own kind, refusals."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import convgrad


class Other:
    """An array of another library: it shows its memory through DLPack, its dtype and its shape, nothing else."""

    def __init__(self, values: Any) -> None:
        self.values = values

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def other_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("otherlib")
    library.from_dlpack = Other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "otherlib", library)
    monkeypatch.setattr(Other, "__module__", "otherlib.core")


def some(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_gradients_come_back_as_the_same_kind(dtype: str) -> None:
    x, w, dy = some((2, 4, 6, 5), 1, dtype), some((6, 2, 3, 3), 2, dtype), some((2, 6, 3, 3), 3, dtype)
    settings: dict[str, Any] = {"stride": 2, "padding": 1, "groups": 2}
    expected = convgrad.conv_backward(dy, x, w, **settings)
    found = convgrad.conv_backward(Other(dy), Other(x), Other(w), **settings)
    for one, other in zip(found, expected):
        assert type(one) is Other
        np.testing.assert_array_equal(np.from_dlpack(one), other)


def test_strides_are_read_where_the_elements_lie() -> None:
    x, w = some((2, 5, 6, 3), 1).transpose(0, 3, 1, 2), some((4, 3, 2, 2), 2)[:, :, ::-1]
    np.testing.assert_array_equal(np.from_dlpack(convgrad.conv(Other(x), Other(w))), convgrad.conv(x, w))


def test_out_receives_the_result() -> None:
    x, w, out = some((1, 2, 6), 1), some((3, 2, 3), 2), np.full((1, 3, 4), 7.0, np.float32)
    kept = Other(out)
    assert convgrad.conv(Other(x), Other(w), out=kept) is kept
    np.testing.assert_array_equal(out, convgrad.conv(x, w))


@pytest.mark.parametrize(("make", "sentence"), [
    (lambda x: Other(np.full((1, 3, 5), 7, np.float32)),
     r"out has shape \(1, 3, 5\), but the result has shape \(1, 3, 4\)"),
    (lambda x: Other(np.full((1, 3, 4), 7, np.float64)), "out has dtype float64, but the result is float32"),
    (lambda x: np.full((1, 3, 4), 7, np.float32), "out must be an array like the operands, got ndarray"),
    (lambda x: Other(np.lib.stride_tricks.as_strided(np.full(6, 7, np.float32), (1, 3, 4), (24, 4, 4))),
     r"out has elements that overlap each other \(strides \(24, 4, 4\) bytes, shape \(1, 3, 4\)\)"),
    (lambda x: Other(x.reshape(-1)[-12:].reshape(1, 3, 4)), "out overlaps input in memory"),
])
def test_bad_outputs_are_refused_and_left_alone(make: Any, sentence: str) -> None:
    x, w = np.full((1, 6, 4), 7, np.float32), some((3, 6, 1), 2)
    out = make(x)
    with pytest.raises((TypeError, ValueError), match=sentence):
        convgrad.conv(Other(x), Other(w), out=out)
    assert (np.asarray(out if isinstance(out, np.ndarray) else out.values) == 7).all()


def test_other_refusals() -> None:
    x, w = some((1, 2, 6), 1), some((3, 2, 3), 2)
    with pytest.raises(TypeError, match="workspace is taken with NumPy arrays and torch tensors only"):
        convgrad.conv(Other(x), Other(w), workspace=Other(np.zeros(64, np.uint8)))
    with pytest.raises(TypeError, match="input is uint8; say dtype='hifloat8'"):
        convgrad.conv(Other(x.astype(np.uint8)), Other(w.astype(np.uint8)))
    with pytest.raises(TypeError, match="all arrays of a call must be of one kind"):
        convgrad.conv(Other(x), w)

    class Elsewhere(Other):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)

    Elsewhere.__module__ = "otherlib.core"
    with pytest.raises(TypeError, match=r"one device: input is on DLPack device \(1, 0\), weight on"):
        convgrad.conv(Other(x), Elsewhere(w))
    with pytest.raises(TypeError, match=r"arrays must be on the cpu or on cuda, got DLPack device \(10, 0\)"):
        convgrad.conv(Elsewhere(x), Elsewhere(w))


def test_triton_takes_memory_shown_by_cuda_array_interface_alone() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")

    class Shown:
        def __init__(self, tensor: Any) -> None:
            self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), np.dtype(np.float32)

        @property
        def __cuda_array_interface__(self) -> Any:
            return self.tensor.__cuda_array_interface__

    dy, w = some((2, 24, 10, 9), 1), some((24, 16, 3, 3), 2)
    found = convgrad.input_grad(Shown(torch.tensor(dy, device="cuda")), Shown(torch.tensor(w, device="cuda")), (10, 9),
                                padding=1)
    wanted = convgrad.input_grad(dy, w, (10, 9), padding=1, backend="reference")
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)
