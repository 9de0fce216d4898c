"""The JAX front end against lax: values and derivatives of every order, exactly, since the data are small integers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed: the JAX front end is not tested")
jnp = jax.numpy

from convgrad import jax as front  # noqa: E402
from convgrad.frontends.jax import lowering  # noqa: E402

BACKENDS = ["native" if "native" in oracle.available_backends() else "reference"]
# input, weight, what lax calls the rest
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 3, 9), (4, 3, 3), {"stride": 1, "padding": 1}),
    "1d_strided_dilated": ((2, 3, 14), (4, 3, 3), {"stride": 3, "padding": [(2, 1)], "dilation": 2}),
    "2d": ((2, 4, 7, 6), (6, 4, 3, 2), {"padding": [(1, 0), (2, 1)]}),
    "2d_grouped": ((2, 6, 8, 7), (4, 3, 3, 3), {"stride": (2, 1), "padding": (1, 1), "groups": 2}),
    "2d_depthwise": ((1, 5, 6, 6), (10, 1, 3, 3), {"padding": 1, "groups": 5}),
    "2d_rest": ((1, 2, 9, 8), (3, 2, 2, 3), {"stride": (3, 4)}),
    "3d": ((1, 2, 5, 4, 6), (4, 2, 2, 3, 3), {"stride": (1, 2, 2), "padding": [(0, 1), (1, 1), (1, 2)]}),
}


def per_axis(value: Any, axes: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * axes


def peer(x: Any, w: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """The same convolution by lax."""
    axes = x.ndim - 2
    pads = [pad if isinstance(pad, tuple) else (pad, pad) for pad in per_axis(padding, axes)]
    return jax.lax.conv_general_dilated(x, w, per_axis(stride, axes), pads, rhs_dilation=per_axis(dilation, axes),
                                        feature_group_count=groups, precision="highest")


def integers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), dtype)


@pytest.fixture(params=["ffi", "callback"], autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways into a plan: XLA's handler and the callback. Where there is no handler, everything is a callback."""
    if request.param == "callback":
        monkeypatch.setenv("CONVGRAD_JAX", "callback")
    elif lowering.handlers()[1] is not None:
        pytest.skip(f"no handlers: {lowering.handlers()[1]}")
    return str(request.param)


def weighted(function: Any) -> Any:
    """A scalar of the function that is linear in its result, with integer weights: gradients stay integers."""

    def loss(*args: Any) -> Any:
        y = function(*args)
        return (y * integers(y.shape, 9, y.dtype)).sum()

    return loss


def same(found: Any, expected: Any) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float64), np.asarray(expected, np.float64))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients(backend: str, name: str) -> None:
    jit = name != "2d"  # outside of jit every operation is a program of its own: once is enough
    in_shape, weight_shape, options = CASES[name]
    x, w, b = integers(in_shape, 1), integers(weight_shape, 2), integers(weight_shape[:1], 3)
    spread = (-1, *(1,) * (len(in_shape) - 2))
    transform = jax.jit if jit else lambda function: function

    def ours(x: Any, w: Any, b: Any) -> Any:
        return front.conv(x, w, b, **options, backend=backend)

    def theirs(x: Any, w: Any, b: Any) -> Any:
        return peer(x, w, **options) + b.reshape(spread)

    same(transform(ours)(x, w, b), theirs(x, w, b))
    for found, expected in zip(transform(jax.grad(weighted(ours), (0, 1, 2)))(x, w, b),
                               jax.grad(weighted(theirs), (0, 1, 2))(x, w, b)):
        same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend: str, dtype: str) -> None:
    x, w, b = (integers(shape, seed, dtype) for seed, shape in enumerate([(2, 3, 6, 6), (4, 3, 3, 3), (4,)]))
    grads = jax.grad(weighted(lambda *args: front.conv(*args, backend=backend)), (0, 1, 2))(x, w, b)
    exact = jax.grad(weighted(lambda x, w, b: peer(x, w) + b[:, None, None]), (0, 1, 2))(
        *(array.astype(np.float32) for array in (x, w, b)))
    for found, expected in zip(grads, exact):
        same(found, expected.astype(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64(backend: str) -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x, w = integers((1, 2, 7), 1, np.float64) / 3, integers((3, 2, 3), 2, np.float64)
        found = jax.grad(weighted(lambda x, w: front.conv(x, w, backend=backend)), 1)(x, w)
        expected = jax.grad(weighted(peer), 1)(x, w)
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_and_padding_names(backend: str) -> None:
    x, w = integers((2, 7, 8, 4), 1), integers((3, 2, 4, 6), 2)
    for ours, theirs in (("SAME", "SAME"), ("same_lower", "SAME_LOWER"), ("valid", "VALID")):

        def found(x: Any, w: Any, padding: str = ours) -> Any:
            return front.conv(x, w, stride=2, padding=padding, layout="NHWC", weight_layout="HWIO", backend=backend)

        def expected(x: Any, w: Any, padding: str = theirs) -> Any:
            return jax.lax.conv_general_dilated(x, w, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

        same(found(x, w), expected(x, w))
        for ours_grad, theirs_grad in zip(jax.grad(weighted(found), (0, 1))(x, w),
                                          jax.grad(weighted(expected), (0, 1))(x, w)):
            same(ours_grad, theirs_grad)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_conv_transpose(backend: str, name: str) -> None:
    """The transposed convolution is the input gradient of the convolution, so lax gives it by vjp."""
    in_shape, weight_shape, options = CASES[name]
    w, b = integers(weight_shape, 2), integers((in_shape[1],), 3)
    large = jnp.zeros(in_shape)
    small = integers(peer(large, w, **options).shape, 4)
    axes = len(in_shape) - 2
    pads = [pad if isinstance(pad, tuple) else (pad, pad) for pad in per_axis(options.get("padding", 0), axes)]
    rest = [size - ((o - 1) * s + d * (k - 1) + 1 - low - high) for size, o, s, d, k, (low, high) in zip(
        in_shape[2:], small.shape[2:], per_axis(options.get("stride", 1), axes),
        per_axis(options.get("dilation", 1), axes), weight_shape[2:], pads)]

    def ours(y: Any, w: Any, b: Any) -> Any:
        return front.conv_transpose(y, w, b, **options, output_padding=rest, backend=backend)

    def theirs(y: Any, w: Any, b: Any) -> Any:
        return jax.vjp(lambda x: peer(x, w, **options), large)[1](y)[0] + b.reshape(-1, *(1,) * axes)

    same(ours(small, w, b), theirs(small, w, b))
    for found, expected in zip(jax.grad(weighted(ours), (0, 1, 2))(small, w, b),
                               jax.grad(weighted(theirs), (0, 1, 2))(small, w, b)):
        same(found, expected)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (1, 0, 0),
                                  (2, 1, 1)])
@pytest.mark.parametrize("name", ["1d_strided_dilated", "2d_grouped"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap(backend: str, name: str, axes: tuple[int | None, ...]) -> None:
    in_shape, weight_shape, options = CASES[name]
    spread = (-1, *(1,) * (len(in_shape) - 2))
    args = []
    for seed, (shape, axis) in enumerate(zip((in_shape, weight_shape, weight_shape[:1]), axes)):
        args.append(integers(shape if axis is None else (*shape[:axis], 3, *shape[axis:]), seed))

    def ours(x: Any, w: Any, b: Any) -> Any:
        return front.conv(x, w, b, **options, backend=backend)

    def theirs(x: Any, w: Any, b: Any) -> Any:
        return peer(x, w, **options) + b.reshape(spread)

    same(jax.vmap(ours, axes)(*args), jax.vmap(theirs, axes)(*args))
    for found, expected in zip(jax.jit(jax.vmap(jax.grad(weighted(ours), (0, 1, 2)), axes))(*args),
                               jax.vmap(jax.grad(weighted(theirs), (0, 1, 2)), axes)(*args)):
        same(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_in_channels_last_and_twice(backend: str) -> None:
    x, w = integers((3, 2, 2, 6, 5, 4), 1), integers((2, 2, 3, 4, 6), 2)

    def ours(x: Any, w: Any) -> Any:
        return front.conv(x, w, layout="NHWC", weight_layout="HWIO", backend=backend)

    def theirs(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def twice(function: Any) -> Any:
        return jax.vmap(jax.vmap(jax.grad(weighted(function), (0, 1)), (0, 0)), (0, None))

    for found, expected in zip(twice(ours)(x, w), twice(theirs)(x, w)):
        same(found, expected)


def test_a_mapped_call_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_runs(monkeypatch)
    x, w = integers((5, 2, 3, 6), 1), integers((4, 3, 3), 2)
    jax.vmap(lambda x: front.conv(x, w, backend="reference"))(x).block_until_ready()
    assert ran == ["output"]
    ran.clear()
    per_example = jax.vmap(jax.grad(lambda w, x: front.conv(x, w, backend="reference").sum()), (None, 0))(w, x)
    assert per_example.shape == (5, 4, 3, 3) and ran == ["output", "weight"]


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The results that were computed, in order."""
    ran: list[str] = []
    original = lowering.runner

    def counting(chosen: Any) -> Any:
        run = original(chosen)

        def counted(*operands: Any) -> Any:
            ran.append(chosen.problem.wrt)
            return run(*operands)

        return counted

    monkeypatch.setattr(lowering, "runner", counting)
    jax.clear_caches()
    return ran


@pytest.mark.parametrize("which, expected", [(0, {"input"}), (1, {"weight"}), (2, {"bias"}),
                                             ((0, 2), {"input", "bias"})])
def test_only_wanted_gradients_are_computed(which: Any, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_runs(monkeypatch)
    x, w, b = integers((1, 2, 6), 1), integers((3, 2, 3), 2), integers((3,), 3)
    jax.block_until_ready(jax.grad(weighted(lambda *args: front.conv(*args, backend="reference")), which)(x, w, b))
    assert set(ran) == {"output"} | expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_and_third_order(backend: str) -> None:
    x, w = integers((1, 2, 6, 5), 1), integers((2, 2, 3, 3), 2)

    def derivatives(function: Any) -> tuple[Any, ...]:
        def square(x: Any, w: Any) -> Any:
            return (function(x, w) ** 2).sum()

        first = jax.grad(square, 0)
        second = jax.grad(lambda x, w: (first(x, w) ** 2).sum(), 1)
        third = jax.grad(lambda x, w: second(x, w).sum(), 0)
        return first(x, w), second(x, w), third(x, w)

    found = derivatives(lambda x, w: front.conv(x, w, stride=(2, 1), padding=1, backend=backend))
    for ours, theirs in zip(found, derivatives(lambda x, w: peer(x, w, stride=(2, 1), padding=1))):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_inside_scan_and_checkpoint() -> None:
    x, w = integers((1, 3, 8), 1), integers((4, 3, 3, 3), 2)

    def through(function: Any) -> Any:
        def loss(w: Any) -> Any:
            layer = jax.checkpoint(lambda x, w: (function(x, w), None))
            return jax.lax.scan(layer, x, w)[0].sum()

        return jax.jit(jax.grad(loss))(w)

    np.testing.assert_allclose(through(lambda x, w: front.conv(x, w, padding=1, backend="reference")),
                               through(lambda x, w: peer(x, w, padding=1)), rtol=1e-6)


def test_arrays_of_many_megabytes_under_jit() -> None:
    """The callback gets large arrays while XLA's threads are busy: it must not wait for itself."""
    backend = BACKENDS[-1]
    x, w = jnp.ones((4, 32, 64, 64)), jnp.ones((32, 32, 1, 1))
    step = jax.jit(lambda x, w: front.conv(front.conv(x, w, backend=backend) + 1, w, backend=backend).mean())
    assert float(step(x, w)) == 33 * 32


@pytest.mark.parametrize("arguments, error, words", [
    (((1, 3, 8), (4, 2, 3), {}), ValueError, "weight has 2 input channels per group"),
    (((1, 3, 8), (4, 3, 3), {"stride": 0}), ValueError, "stride must be at least 1"),
    (((1, 3, 8), (4, 3, 3), {"padding": "full"}), ValueError, "padding='full'"),
    (((1, 3, 8), (4, 3, 3), {"backend": "abacus"}), ValueError, "backend='abacus' is none of"),
    (((1, 3, 8), (4, 3, 3), {"compute": "f64"}), ValueError, "compute='f64' does not go with float32"),
])
def test_errors_while_tracing(arguments: Any, error: type[Exception], words: str) -> None:
    """Mistakes are told when the function is traced, not from inside a callback."""
    in_shape, weight_shape, options = arguments
    with pytest.raises(error, match=words):
        jax.jit(lambda x, w: front.conv(x, w, **{"backend": "reference", **options}))(
            jnp.ones(in_shape), jnp.ones(weight_shape))


def test_errors_of_dtypes_and_bias() -> None:
    x, w = jnp.ones((1, 3, 8)), jnp.ones((4, 3, 3))
    with pytest.raises(TypeError, match="input is float32, weight is bfloat16"):
        front.conv(x, w.astype("bfloat16"), backend="reference")
    with pytest.raises(TypeError, match="input has dtype int32"):
        front.conv(x.astype(int), w, backend="reference")
    with pytest.raises(ValueError, match=r"bias must be float32 of shape \(4,\).*got float32 of shape \(3,\)"):
        front.conv(x, w, jnp.ones(3), backend="reference")


def test_compute_mode_reaches_every_derivative() -> None:
    """With compute="bf16" 1 + 2^-9 enters the products as 1, in the forward and in both gradients."""
    fine = jnp.full((1, 1, 4), 1 + 2.0**-9)
    value, grads = jax.value_and_grad(
        lambda x, w: (front.conv(x, w, compute="bf16", backend="reference") * fine[..., :1]).sum(), (0, 1))(fine, fine)
    assert float(value) == 4 * (1 + 2.0**-9)  # the products are exact, the factor after them is not rounded
    assert set(np.asarray(grads[0]).ravel()) == set(np.asarray(grads[1]).ravel()) == {1.0}


def test_documentation_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_BACKEND", BACKENDS[-1])
    page = (Path(__file__).parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["per_example"].shape == (8, 3, 3, 16, 32)
    np.testing.assert_allclose(names["per_example"].mean(0), names["weight_grad"], rtol=1e-4)


CHECKED = ["1d_strided_dilated", "2d_grouped", "3d"]


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_reverse_mode_to_second_order(backend: str, name: str) -> None:
    from jax.test_util import check_grads

    in_shape, weight_shape, options = CASES[name]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x, w, b = (integers(shape, seed, np.float64) / 3 for seed, shape in
                   enumerate((in_shape, weight_shape, weight_shape[:1])))
        check_grads(lambda x, w, b: front.conv(x, w, b, **options, backend=backend), (x, w, b), order=2,
                    modes=("fwd", "rev"))


def test_hessians_in_every_nesting() -> None:
    x, w = jnp.ones((1, 1, 5)), jnp.ones((1, 1, 3))
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            found = outer(inner(lambda w: (front.conv(x, w, backend="reference") ** 2).sum()))(w)
            np.testing.assert_allclose(found.reshape(3, 3), np.full((3, 3), 6.0))


def test_gradients_are_functions_of_their_own() -> None:
    x, w = integers((2, 4, 9), 1), integers((6, 2, 3), 2)
    options = {"stride": 2, "padding": 1, "groups": 2}
    dy = integers(front.conv(x, w, **options).shape, 3)
    dx, dw = jax.vjp(lambda x, w: front.conv(x, w, **options), x, w)[1](dy)
    same(front.input_grad(dy, w, 9, **options), dx)
    same(front.weight_grad(dy, x, 3, **options), dw)
    same(front.bias_grad(dy), dy.sum((0, 2)))
    same(jax.grad(lambda dy: front.bias_grad(dy) @ jnp.arange(6.0))(dy), jnp.broadcast_to(
        jnp.arange(6.0)[:, None], dy.shape))


def test_fp8_operands_give_float32() -> None:
    x, w = integers((2, 4, 9), 1, jnp.float8_e4m3fn), integers((6, 4, 3), 2, jnp.float8_e4m3fn)
    dy = integers((2, 6, 7), 3, jnp.float8_e4m3fn)
    wide = [array.astype(np.float32) for array in (dy, w, x)]
    same(front.input_grad(dy, w, 9), front.input_grad(wide[0], wide[1], 9))
    same(front.weight_grad(dy, x, 3, out_dtype=jnp.bfloat16),
         front.weight_grad(wide[0], wide[2], 3).astype(jnp.bfloat16))


def test_export_keeps_the_plan(route: str) -> None:
    """An exported program carries the problem as numbers; it runs where nothing was planned before."""
    from jax import export

    if route != "ffi":
        with pytest.raises(NotImplementedError, match="callback"):  # a callback cannot be exported
            export.export(jax.jit(lambda x: front.conv(x, x, backend=BACKENDS[0])))(jnp.ones((1, 1, 3))).serialize()
        return
    x, w = integers((2, 3, 9), 1), integers((4, 3, 3), 2)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in lowering.TARGETS.values()]
    exported = export.export(jax.jit(lambda x, w: front.conv(x, w, backend="native")), disabled_checks=checks)(x, w)
    same(export.deserialize(exported.serialize()).call(x, w), peer(x, w))


def test_donated_operands() -> None:
    x, w = integers((2, 4, 9), 1), integers((4, 4, 3), 2)
    expected = peer(x, w, padding=1)
    step = jax.jit(lambda x, w: front.conv(x, w, padding=1, backend=BACKENDS[-1]), donate_argnums=0)
    same(step(jnp.array(x), w), expected)


def test_the_route_is_explained(route: str) -> None:
    text = front.explain_route("conv f32 n1 c1 k1 i5 w3", backend="reference")
    assert text.startswith("pure_callback into Python")
    if "native" in BACKENDS:
        found = front.explain_route("conv f32 n1 c1 k1 i5 w3", backend="native")
        assert found.startswith("XLA FFI" if route == "ffi" else "pure_callback into Python: CONVGRAD_JAX=callback")
