"""`convgrad.jax.conv_general_dilated` beside lax's: values, gradients, and what is left to lax."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import oracle
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: the JAX front end is not tested")
jnp = jax.numpy

from convgrad import jax as front  # noqa: E402

BACKEND = "native" if "native" in oracle.available_backends() else "reference"
# lhs, rhs, window_strides, padding, other arguments
SERVED: dict[str, tuple[Any, ...]] = {
    "plain": ((2, 4, 9, 8), (6, 4, 3, 3), (2, 1), [(1, 0), (2, 1)], {}),
    "same": ((2, 4, 9), (6, 4, 3), (2,), "SAME", {"rhs_dilation": (2,)}),
    "grouped": ((2, 6, 7, 5), (4, 3, 2, 3), (1, 1), "VALID", {"feature_group_count": 2}),
    "channels_last": ((2, 9, 8, 4), (3, 3, 4, 6), (1, 2), "SAME_LOWER",
                      {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}),
    "mixed_layouts": ((2, 9, 8, 4), (6, 4, 3, 3), (1, 1), "VALID", {"dimension_numbers": ("NHWC", "OIHW", "NCHW")}),
    "transposed": ((2, 4, 5, 6), (6, 4, 3, 4), (1, 1), [(2, 2), (3, 3)], {"lhs_dilation": (2, 3)}),
    "transposed_grouped": ((2, 4, 5), (6, 2, 3), (1,), [(1, 2)], {"lhs_dilation": (2,), "feature_group_count": 2}),
    "transposed_longer": ((1, 3, 4), (2, 3, 3), (1,), [(2, 3)], {"lhs_dilation": (2,), "rhs_dilation": (1,)}),
    "batch_groups": ((6, 4, 9, 7), (8, 4, 7, 6), (1, 1), [(1, 0), (0, 1)], {"batch_group_count": 2}),
    "batch_groups_strided": ((4, 3, 11), (4, 3, 5), (1,), [(1, 1)], {"batch_group_count": 2, "rhs_dilation": (2,)}),
    "3d": ((1, 2, 4, 5, 6), (4, 2, 2, 3, 3), (1, 2, 2), [(0, 1), (1, 1), (1, 2)], {}),
}
LEFT_TO_LAX: dict[str, tuple[tuple[Any, ...], str]] = {
    "negative_padding": (((2, 4, 9), (6, 4, 3), (1,), [(-1, 0)], {}), "negative padding"),
    "strided_and_spread": (((2, 4, 9), (6, 4, 3), (2,), [(2, 2)], {"lhs_dilation": (2,)}), "window_strides=(2,)"),
    "wide_padding": (((2, 4, 9), (6, 4, 3), (1,), [(5, 5)], {"lhs_dilation": (2,)}), "beyond the spread window"),
    "four_axes": (((1, 2, 3, 3, 3, 3), (2, 2, 2, 2, 2, 2), (1,) * 4, "VALID", {}), "4 spatial axes"),
}


def integers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


def results(function: Any, lhs: Any, rhs: Any, strides: Any, padding: Any, options: dict[str, Any]) -> list[Any]:
    def loss(lhs: Any, rhs: Any) -> Any:
        y = function(lhs, rhs, strides, padding, **options)
        return (y * integers(y.shape, 5)).sum()

    return [function(lhs, rhs, strides, padding, **options), *jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)]


@pytest.mark.parametrize("name", SERVED)
def test_agrees_with_lax(name: str, caplog: pytest.LogCaptureFixture) -> None:
    lhs_shape, rhs_shape, strides, padding, options = SERVED[name]
    lhs, rhs = integers(lhs_shape, 1), integers(rhs_shape, 2)
    with caplog.at_level(logging.INFO, "convgrad.jax"):
        found = results(lambda *args, **more: front.conv_general_dilated(*args, **more, backend=BACKEND), lhs, rhs,
                        strides, padding, options)
    assert not caplog.records  # by us, not by lax
    for ours, theirs in zip(found, results(jax.lax.conv_general_dilated, lhs, rhs, strides, padding, options)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", LEFT_TO_LAX)
def test_falls_back_with_a_reason(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (lhs_shape, rhs_shape, strides, padding, options), words = LEFT_TO_LAX[name]
    lhs, rhs = integers(lhs_shape, 1), integers(rhs_shape, 2)
    with caplog.at_level(logging.INFO, "convgrad.jax"):
        found = front.conv_general_dilated(lhs, rhs, strides, padding, **options)
    assert words in caplog.text
    np.testing.assert_array_equal(found, jax.lax.conv_general_dilated(lhs, rhs, strides, padding, **options))


def test_preferred_element_type() -> None:
    lhs, rhs = integers((2, 4, 9), 1, jnp.bfloat16), integers((6, 4, 3), 2, jnp.bfloat16)
    found = front.conv_general_dilated(lhs, rhs, (1,), "VALID", preferred_element_type=jnp.float32, backend=BACKEND)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.lax.conv_general_dilated(lhs.astype("f"), rhs.astype("f"), (1,), "VALID"))
    grad = jax.grad(lambda w: front.conv_general_dilated(
        lhs, w, (1,), "VALID", preferred_element_type=jnp.float32, backend=BACKEND).sum())(rhs)
    assert grad.dtype == jnp.bfloat16


def test_wrong_arguments_are_lax_own_errors() -> None:
    with pytest.raises((TypeError, ValueError)):
        front.conv_general_dilated(jnp.ones((1, 2, 5)), jnp.ones((2, 3, 3)), (1,), "VALID", backend=BACKEND)
