"""Scales per tensor: every backend multiplies sums once and rounds once; a bad scale is refused, nothing written."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest

import convgrad
from convgrad import Problem, Unsupported, plan
from convgrad.call import prepared_calls
from convgrad.numbers import decode, encode
from convgrad.plan import clear_plan_cache
from convgrad.problem import DTYPES
from convgrad.verify import in_order, integer_operands, laid_out, poisoned, real_operands

Array = np.ndarray[Any, Any]

# Number formats are in turn those of operands and result.
GEOMETRIES = [
    "input_grad f32 n2 c4 k6 i5x4 w3x3 p1x1 NHWC OHWI",
    "input_grad f32 n2 c6 k4 i7x7 w3x3 s2x2 p1x1 g2",
    "input_grad f32 n2 c5 k5 i9 w3 p2:0 g5 NLC",
    "conv f32 n1 c4 k3 i3x4x3 w2x3x2 p1x1x0 NDHWC ODHWI",
    "conv f32 n0 c4 k4 i5 w3",
    "weight_grad f32 n3 c8 k6 i6x5 w3x3 p1x1 NHWC OHWI",
    "weight_grad f32 n0 c4 k4 i5 w3",
    "bias_grad f32 n2 c3 k5 i4x6 w1x1",
    "weight_grad+bias_grad f32 n2 c5 k5 i9x4 w3x3 p1x1 g5 NHWC OHWI",
    "input_grad+weight_grad+bias_grad f32 n2 c8 k8 i6x6 w3x3 p1x1 g8 NHWC OHWI",
]


def scaled(text: str, dtype: str, out_dtype: str) -> Problem:
    return Problem.parse(text).with_(dtype=dtype, out_dtype=out_dtype, compute="", scaled=True)


# Operands and results: each to itself, e4m3 to everything, everything to e4m3, 8 bits to float32.
FORMATS = [(a, b) for a in DTYPES for b in DTYPES
           if a == b or "float8_e4m3fn" in (a, b) or (DTYPES[a][1] == 1 and b == "float32")]


@pytest.mark.parametrize("backend", oracle.available_backends())
@pytest.mark.parametrize("number, dtypes", enumerate(FORMATS), ids=str)
def test_contract(backend: str, number: int, dtypes: tuple[str, str], seed: int) -> None:
    """Bit by bit with integers, whose sums are exact, whatever the scales; within the bound otherwise."""
    geometries = GEOMETRIES if backend != "triton" else [GEOMETRIES[number % len(GEOMETRIES)]]
    for place, text in enumerate(geometries):
        problem = scaled(text, *dtypes)
        style = oracle.STYLES[(place + number) % len(oracle.STYLES)]
        oracle.check_exact(problem, backend, seed=seed, style=style, thin=bool(place % 2))
        oracle.check_bound(problem, backend, seed=seed, style=style)
        oracle.check_nonfinite(problem, backend, seed=seed)


@pytest.mark.parametrize("backend", oracle.available_backends())
def test_powers_of_two_only_move_the_exponent(backend: str) -> None:
    problem = oracle.as_problem("conv e4m3>f32 n2 c8 k4 i6x5 w3x3", backend)
    operands = real_operands(problem)
    plain = oracle.run_guarded(problem, backend, operands)
    scales = {"input_scale": np.array(8, "f"), "weight_scale": np.array(0.25, "f"), "output_scale": np.array(16, "f")}
    times = oracle.run_guarded(problem.with_(scaled=True), backend, operands | scales)
    assert plain is not None and times is not None
    assert np.array_equal(times[0], plain[0] / 8)


@pytest.mark.parametrize("backend", oracle.available_backends())
def test_few_images_at_a_time(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of other formats than the sums' are made from sums of as many images as fit; the last may be fewer."""
    text = "input_grad e4m3>bf16 n7 c8 k4 i6x5 w3x3 p1x1"
    if backend == "native":
        from convgrad.backends.native import NativeSums

        monkeypatch.setattr(NativeSums, "most_bytes", 3 * 4 * 8 * 30)
    elif backend == "triton":
        from convgrad.backends.triton.scaled_plans import TritonSums

        monkeypatch.setattr(TritonSums, "most_bytes", 3 * 4 * 8 * 30)
    clear_plan_cache()
    try:
        problem = oracle.as_problem(text + " scaled", backend)
        assert backend == "reference" or "3 images at a time" in plan(problem, backend=backend).notes[-1]
        assert oracle.check_exact(problem, backend, style="gaps")
        assert oracle.check_bound(problem, backend)
    finally:
        clear_plan_cache()


@pytest.mark.parametrize("backend", oracle.available_backends())
def test_a_limited_workspace_holds_fewer_sums(backend: str) -> None:
    problem = oracle.as_problem("conv e4m3>bf16 n5 c4 k4 i6x5 w3x3 scaled", backend)
    free = plan(problem, backend=backend).workspace_bytes
    one_image = 4 * 12 * 4 + 63
    assert oracle.check_exact(problem, backend, max_workspace_bytes=max(one_image, free // 2))
    if backend != "reference":
        with pytest.raises(Unsupported, match=f"sums that are scaled and then rounded need a workspace of {one_image} "
                                              "bytes, but max_workspace_bytes=254"):
            plan(problem, backend=backend, max_workspace_bytes=254)


def test_the_same_bits_for_any_number_of_threads(seed: int) -> None:
    problem = Problem.parse("input_grad e4m3 n9 c33 k16 i30x31 w3x3 p1x1 scaled")
    operands = in_order(problem, real_operands(problem, seed))
    results = []
    for threads in (1, 2, 3, 7):
        result = laid_out(problem, "input", poisoned(problem.conv.shape_of("input"), problem.out_dtype))
        plan(problem, backend="native", num_threads=threads).run(operands, (result,), None)
        results.append(result.tobytes())
    assert len(set(results)) == 1


def test_problem_strings_say_that_there_are_scales() -> None:
    problem = Problem.parse("input_grad+bias_grad e4m3 n1 c2 k2 i5 w3 NLC cuda scaled")
    assert Problem.parse(str(problem)) == problem and problem.scaled
    assert problem.scales == ("grad_output_scale", "weight_scale", "input_grad_scale", "bias_grad_scale")
    assert problem.with_(scaled=False).scales == ()
    assert "scaled" not in str(problem.with_(scaled=False))
    assert "scales: f32 sums" in str(convgrad.explain("conv e4m3 n1 c2 k2 i5 w3 scaled"))


# --- the public functions ---------------------------------------------------------------------------------------------

X, W, DY = (encode(np.random.default_rng(1).standard_normal(shape), "float8_e4m3fn")
            for shape in ((2, 6, 8, 9), (4, 6, 3, 3), (2, 4, 6, 7)))
S = {"grad_output": 0.3, "input": np.float32(2.5), "weight": np.array([0.7], np.float32)}
OUT = {"input_grad": 0.11, "weight_grad": 1.7, "bias_grad": 13, "output": 0.9}


def value(array: Array, scale: Any) -> Array:
    """What a tensor stands for."""
    return decode(array, "float8_e4m3fn") * float(np.float32(np.asarray(scale).item()))


def picked(*names: str) -> dict[str, Any]:
    return {name: (S | OUT)[name] for name in names}


CALLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "conv": (lambda s, **o: (convgrad.conv(X, W, scales=s, **o),), ("input", "weight", "output")),
    "input_grad": (lambda s, **o: (convgrad.input_grad(DY, W, (8, 9), scales=s, **o),),
                   ("grad_output", "weight", "input_grad")),
    "weight_grad": (lambda s, **o: (convgrad.weight_grad(DY, X, 3, scales=s, **o),),
                    ("grad_output", "input", "weight_grad")),
    "bias_grad": (lambda s, **o: (convgrad.bias_grad(DY, scales=s, **o),), ("grad_output", "bias_grad")),
    "conv_backward": (lambda s, **o: convgrad.conv_backward(DY, X, W, scales=s, **o),
                      ("grad_output", "input", "weight", "input_grad", "weight_grad", "bias_grad")),
    "conv_transpose": (lambda s, **o: (convgrad.conv_transpose(DY, W, scales=s, **o),), ("input", "weight", "output")),
    "conv_transpose_backward": (lambda s, **o: convgrad.conv_transpose_backward(X, DY, W, scales=s, **o),
                                ("grad_output", "input", "weight", "input_grad", "weight_grad", "bias_grad")),
}


def expected(name: str) -> tuple[Array, ...]:
    """The same functions on float64 arrays of what the tensors stand for."""
    x, w, dy = value(X, S["input"]), value(W, S["weight"]), value(DY, S["grad_output"])
    grad = value(X, S["grad_output"])  # of a transposed convolution: its input and output change places
    small = value(DY, S["input"])
    return {"conv": lambda: (convgrad.conv(x, w),), "input_grad": lambda: (convgrad.input_grad(dy, w, (8, 9)),),
            "weight_grad": lambda: (convgrad.weight_grad(dy, x, 3),), "bias_grad": lambda: (convgrad.bias_grad(dy),),
            "conv_backward": lambda: convgrad.conv_backward(dy, x, w),
            "conv_transpose": lambda: (convgrad.conv_transpose(small, w),),
            "conv_transpose_backward": lambda: convgrad.conv_transpose_backward(grad, small, w)}[name]()


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", CALLS)
def test_results_stand_for_what_the_operands_stand_for(name: str, backend: str) -> None:
    call, names = CALLS[name]
    wanted = expected(name)
    owns = [n for n in names if n in OUT]
    for out_dtype, error in (("float32", 2.0**-17), ("float64", 2.0**-17), ("bfloat16", 2.0**-8)):
        results = call(picked(*names), backend=backend, out_dtype=out_dtype)
        for own, result, exact in zip(owns, results, wanted, strict=True):
            found = result.astype(np.float64) * float(np.float32(OUT[own]))
            assert np.abs(found - exact).max() <= error * np.abs(exact).max(), (own, out_dtype)


@pytest.mark.parametrize("name", CALLS)
def test_scales_that_are_not_given_are_one(name: str) -> None:
    call, names = CALLS[name]
    plain = call(None)
    for result, same in zip(plain, call({}), strict=True):
        assert np.array_equal(result, same)
    for result, twice in zip(plain, call({names[0]: 2}), strict=True):
        assert result is not None and twice is not None
    assert np.array_equal(convgrad.conv(X, W, scales={"input": 2}), 2 * convgrad.conv(X, W))


def test_a_masked_gradient_ignores_what_it_does_not_read() -> None:
    dx, dw, db = convgrad.conv_backward(DY, X, W, scales=S | {"input_grad": 2.0, "bias_grad": 4.0},
                                        output_mask=(False, False, True))
    assert dx is dw is None
    assert np.array_equal(db, convgrad.bias_grad(DY, scales={"grad_output": 0.3, "bias_grad": 4.0}))


def test_new_values_need_no_new_plan() -> None:
    convgrad.conv(X, W, scales={"input": 1.5, "output": 2})
    before = dict(prepared_calls)
    for step in range(5):
        convgrad.conv(X, W, scales={"weight": 1.0 + step, "input": np.array(0.5 + step, np.float32)})
    assert prepared_calls == before


RULE = "must be a number, or a float32 array of one element where the operands are"
BAD_SCALES: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "scales must be a dict of numbers by tensor (input, weight, output), got 2.0", 2.0),
    (ValueError, "scales['grad_output']: the tensors of this call are input, weight, output", {"grad_output": 1.0}),
    (ValueError, "scales[0]: the tensors of this call are input, weight, output", {0: 1.0}),
    (TypeError, f"scales['input'] {RULE}, got None", {"input": None}),
    (TypeError, f"scales['input'] {RULE}, got True", {"input": True}),
    (TypeError, f"scales['input'] {RULE}, got [1.0]", {"input": [1.0]}),
    (TypeError, f"scales['weight'] {RULE}, got float64 of shape (1,)", {"weight": np.ones(1)}),
    (TypeError, f"scales['weight'] {RULE}, got float32 of shape (2,)", {"weight": np.ones(2, np.float32)}),
    (TypeError, f"scales['weight'] {RULE}, got float32 of shape (0,)", {"weight": np.ones(0, np.float32)}),
    (ValueError, "scales['output'] must be positive and finite as a float32, got 0.0", {"output": 0.0}),
    (ValueError, "scales['output'] must be positive and finite as a float32, got -1", {"output": -1}),
    (ValueError, "scales['output'] must be positive and finite as a float32, got nan", {"output": float("nan")}),
    (ValueError, "scales['output'] must be positive and finite as a float32, got inf",
     {"output": np.array(np.inf, np.float32)}),
    (ValueError, "scales['output'] must be positive and finite as a float32, got 1e+39", {"output": 1e39}),
    (ValueError, "scales['output'] must be positive and finite as a float32, got 1e-46", {"output": 1e-46}),
]


@pytest.mark.parametrize("error, sentence, scales", BAD_SCALES, ids=[sentence[:60] for _, sentence, _ in BAD_SCALES])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_bad_scales(error: type[Exception], sentence: str, scales: Any, backend: str) -> None:
    out = np.full((2, 4, 6, 7), 7.0, np.float32)
    with pytest.raises(error) as caught:
        convgrad.conv(X, W, out=out, scales=scales, backend=backend)
    assert str(caught.value) == sentence
    assert (out == 7).all()


def test_bad_scales_of_other_calls() -> None:
    for call, names in CALLS.values():
        with pytest.raises(ValueError, match=f"the tensors of this call are {', '.join(names)}$"):
            call({"bias": 1.0})
    outs = tuple(np.full(shape, 7.0, np.float32) for shape in (DY.shape, W.shape, (6,)))
    with pytest.raises(ValueError, match="must be positive"):
        convgrad.conv_transpose_backward(X, DY, W, scales={"bias_grad": 0}, out=outs)
    assert all((out == 7).all() for out in outs)


# --- other arrays -----------------------------------------------------------------------------------------------------

def test_torch_tensors_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    x, w = (torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn) for a in (X, W))
    scales = {"input": torch.tensor(2.5), "weight": torch.tensor([0.7], requires_grad=True), "output": 0.9}
    same = convgrad.conv(x, w, scales=scales)
    assert np.array_equal(same.numpy(), convgrad.conv(X, W, scales=picked("input", "weight", "output")))
    with pytest.raises(TypeError) as caught:
        convgrad.conv(x, w, scales={"input": np.ones(1, np.float32)})
    assert str(caught.value) == ("all arrays of a call must be of one kind: the first operand is torch.Tensor, "
                                 "scales['input'] is numpy.ndarray")
    with pytest.raises(TypeError, match=r"must be a number, or .*, got torch.float64 of shape \(1,\)"):
        convgrad.conv(x, w, scales={"input": torch.ones(1, dtype=torch.float64)})


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x, w = jnp.asarray(X), jnp.asarray(W)
    result = convgrad.conv(x, w, scales={"input": jnp.float32(2.5), "weight": jnp.full(1, 0.7, jnp.float32)})
    assert np.array_equal(np.asarray(result), convgrad.conv(X, W, scales=picked("input", "weight")))


def test_integers_are_exact_for_every_function_of_the_interpreter() -> None:
    """NumPy arrays and numbers as scales reach the kernels of the GPU backend in the interpreter, too."""
    if "triton" not in oracle.available_backends() or not oracle.interpreted("triton"):
        pytest.skip("needs TRITON_INTERPRET=1")
    operands = integer_operands(Problem.parse("conv e4m3 n2 c4 k4 i5 w3"))
    arguments = operands["input"], operands["weight"]
    scales = {"input": 0.3, "output": 0.7}
    for out_dtype in ("float32", "float8_e4m3fn"):
        found, same = (convgrad.conv(*arguments, scales=scales, out_dtype=out_dtype, backend=backend).tobytes()
                       for backend in ("triton", "reference"))
        assert found == same
