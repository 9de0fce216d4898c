"""Bad calls: each is refused with the exact sentence, and leaves its outputs as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad import Conv, Problem

KNOWN = "float64, float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, hifloat8"
SHORT = "f64, f32, bf16, f16, e4m3, e5m2, hif8"
MODES = "f64, f32, tf32, hf32, hf32_even, hf32_10, hf32_10_even, bf16, f16, fp8"


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


class Bad(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    sentence: str


X, W, DY = f32(2, 6, 8, 9), f32(4, 6, 3, 3), f32(2, 4, 6, 7)
BAD: list[Bad] = []


def bad(error: type[Exception], sentence: str, call: Callable[[], Any]) -> None:
    BAD.append(Bad(call, error, sentence))


def backward(dy: Any = DY, x: Any = X, w: Any = W, **options: Any) -> Any:
    return convgrad.conv_backward(dy, x, w, backend="reference", **options)


def conv(x: Any = X, w: Any = W, **options: Any) -> Any:
    return convgrad.conv(x, w, backend="reference", **options)


def input_grad(dy: Any = DY, w: Any = W, size: Any = (8, 9), **options: Any) -> Any:
    return convgrad.input_grad(dy, w, size, backend="reference", **options)


def weight_grad(dy: Any = DY, x: Any = X, size: Any = (3, 3), **options: Any) -> Any:
    return convgrad.weight_grad(dy, x, size, backend="reference", **options)


def transpose(x: Any = DY, w: Any = W, **options: Any) -> Any:
    return convgrad.conv_transpose(x, w, backend="reference", **options)


# --- ranks and kinds of arrays ----------------------------------------------------------------------------------------
bad(ValueError, "all arrays must have the same rank: input has 3, weight has 4", lambda: conv(f32(2, 6, 8)))
bad(ValueError, "input must have 3, 4 or 5 axes (batch, channels, 1 to 3 spatial), got shape (2, 3)",
    lambda: conv(f32(2, 3), f32(2, 3)))
bad(ValueError, "input must have 3, 4 or 5 axes (batch, channels, 1 to 3 spatial), got shape (1, 1, 1, 1, 1, 1)",
    lambda: conv(f32(1, 1, 1, 1, 1, 1), f32(1, 1, 1, 1, 1, 1)))
bad(ValueError, "all arrays must have the same rank: grad_output has 4, input has 5, weight has 4",
    lambda: backward(x=f32(2, 6, 8, 9, 1)))
bad(ValueError, "grad_output must have 3, 4 or 5 axes (batch, channels, 1 to 3 spatial), got shape (5,)",
    lambda: convgrad.bias_grad(f32(5), backend="reference"))
bad(TypeError, "input must be an array (NumPy, PyTorch, or anything with __dlpack__), got builtins.list",
    lambda: conv([[[1.0]]]))
bad(TypeError, "weight must be an array (NumPy, PyTorch, or anything with __dlpack__), got builtins.NoneType",
    lambda: conv(w=None))
bad(TypeError, "grad_output is a masked array: a convolution has no use for a mask; pass grad_output.filled(0)",
    lambda: input_grad(np.ma.masked_array(DY)))

# --- channels, batch, groups ------------------------------------------------------------------------------------------
bad(ValueError, "weight has 5 input channels per group, but in_channels=6 and groups=1 give 6",
    lambda: conv(w=f32(4, 5, 3, 3)))
bad(ValueError, "weight has 6 input channels per group, but in_channels=6 and groups=2 give 3", lambda: conv(groups=2))
bad(ValueError, "groups=4 does not divide in_channels=6", lambda: conv(groups=4))
bad(ValueError, "groups=3 does not divide out_channels=4", lambda: conv(w=f32(4, 2, 3, 3), groups=3))
bad(ValueError, "groups must be at least 1, got 0", lambda: conv(groups=0))
bad(ValueError, "groups must be at least 1, got -2", lambda: backward(groups=-2))
bad(TypeError, "groups must be an integer, got 1.0 (float)", lambda: conv(groups=1.0))
bad(TypeError, "groups must be an integer, got True (bool)", lambda: conv(groups=True))
bad(TypeError, "groups must be an integer, got (1,) (tuple)", lambda: conv(groups=(1,)))
bad(ValueError, "grad_output has 5 channels, but the weight has 4 output channels", lambda: backward(f32(2, 5, 6, 7)))
bad(ValueError, "grad_output has 3 channels, but the weight has 4 output channels",
    lambda: input_grad(f32(2, 3, 6, 7)))
bad(ValueError, "grad_output has batch 3, but the input has batch 2", lambda: backward(f32(3, 4, 6, 7)))
bad(ValueError, "grad_output has batch 1, but the input has batch 2", lambda: weight_grad(f32(1, 4, 6, 7)))
bad(ValueError, "groups=5 does not divide out_channels=4", lambda: input_grad(groups=5))

# --- strides, pads, dilations, sizes ----------------------------------------------------------------------------------
bad(ValueError, "stride[0] must be at least 1, got 0", lambda: conv(stride=(0, 1)))
bad(ValueError, "stride must be at least 1, got 0", lambda: conv(stride=0))
bad(ValueError, "stride must be at least 1, got -1", lambda: backward(stride=-1))
bad(TypeError, "stride must be an integer or one integer per axis, got 1.5", lambda: conv(stride=1.5))
bad(TypeError, "stride must be an integer or one integer per axis, got '2'", lambda: conv(stride="2"))
bad(TypeError, "stride[1] must be an integer, got 2.0 (float)", lambda: conv(stride=(1, 2.0)))
bad(ValueError, "stride must have one value per spatial axis (2), got 3: (1, 1, 1)", lambda: conv(stride=(1, 1, 1)))
bad(ValueError, "dilation must be at least 1, got 0", lambda: conv(dilation=0))
bad(ValueError, "dilation must have one value per spatial axis (2), got 1: (2,)", lambda: conv(dilation=[2]))
bad(ValueError, "dilation[1] must be at least 1, got -3", lambda: weight_grad(dilation=(1, -3)))
bad(ValueError, "padding must be at least 0, got -1", lambda: conv(padding=-1))
bad(ValueError, "padding[1] must be at least 0, got -2", lambda: conv(padding=(1, -2)))
bad(ValueError, "padding[0] must be at least 0, got -1", lambda: conv(padding=((0, -1), (0, 0))))
bad(ValueError, "padding[1] must be (low, high), got (1, 2, 3)", lambda: conv(padding=((0, 1), (1, 2, 3))))
bad(ValueError, "padding must have one value or one (low, high) pair per spatial axis (2), got 3: (1, 1, 1)",
    lambda: conv(padding=(1, 1, 1)))
bad(ValueError, "padding='full' is none of 'valid', 'same', 'same_upper', 'same_lower'", lambda: conv(padding="full"))
bad(TypeError, "padding must be an integer, one integer or one (low, high) pair per axis, or a word, got 0.5",
    lambda: conv(padding=0.5))
bad(TypeError, "padding[0] must be an integer, got 'a' (str)", lambda: conv(padding=("a", 1)))
bad(ValueError, "stride must be at most 2^62, got 9223372036854775808", lambda: conv(stride=2**63))
bad(ValueError, "grad_output has spatial size (6, 7), but input (8, 9), kernel (3, 3), stride (2, 2), "
    "padding ((0, 0), (0, 0)), dilation (1, 1) give (3, 4)", lambda: backward(stride=2))
bad(ValueError, "grad_output has spatial size (6, 7), but input (8, 10), kernel (3, 3), stride (1, 1), "
    "padding ((0, 0), (0, 0)), dilation (1, 1) give (6, 8)", lambda: input_grad(size=(8, 10)))
bad(ValueError, "grad_output has spatial size (6, 7), but input (8, 9), kernel (3, 5), stride (1, 1), "
    "padding ((0, 0), (0, 0)), dilation (1, 1) give (6, 5)", lambda: weight_grad(size=(3, 5)))
bad(ValueError, "input_size must have one value per spatial axis (2), got 4: (2, 6, 8, 9)",
    lambda: input_grad(size=(2, 6, 8, 9)))
bad(ValueError, "input_size[1] must be at least 0, got -9", lambda: input_grad(size=(8, -9)))
bad(TypeError, "input_size must be an integer or one integer per axis, got None", lambda: input_grad(size=None))
bad(ValueError, "kernel_size[0] must be at least 1, got 0", lambda: weight_grad(size=(0, 3)))
bad(ValueError, "kernel_size[1] must be at least 1, got 0", lambda: conv(w=f32(4, 6, 3, 0)))
bad(TypeError, "kernel_size must be an integer or one integer per axis, got '33'", lambda: weight_grad(size="33"))

bad(TypeError, "padding must be an integer, one integer or one (low, high) pair per axis, or a word, got b'11'",
    lambda: conv(padding=b"11"))
bad(TypeError, "padding[1] must be an integer, got b'12' (bytes)", lambda: conv(padding=(0, b"12")))
bad(TypeError, "stride must be an integer or one integer per axis, got bytearray(b'\\x01\\x01')",
    lambda: conv(stride=bytearray((1, 1))))
bad(TypeError, "stride must be an integer or one integer per axis, got <class 'numpy.float32'>",
    lambda: conv(stride=np.float32))

# --- layouts ----------------------------------------------------------------------------------------------------------
bad(ValueError, "layout='NHCX' is not an order of the axes 'NCHW' (2 spatial)", lambda: conv(layout="NHCX"))
bad(ValueError, "layout='NDHWC' is not an order of the axes 'NCHW' (2 spatial)", lambda: conv(layout="NDHWC"))
bad(ValueError, "layout='NNHW' is not an order of the axes 'NCHW' (2 spatial)", lambda: backward(layout="NNHW"))
bad(ValueError, "weight_layout='HWOO' is not an order of the axes 'OIHW' (2 spatial)",
    lambda: conv(weight_layout="HWOO"))
bad(ValueError, "weight_layout='IOHX' is not an order of the axes 'IOHW' (2 spatial)",
    lambda: transpose(weight_layout="IOHX"))
bad(TypeError, "layout must be a string such as 'NCHW', got 5", lambda: conv(layout=5))
bad(TypeError, "weight_layout must be a string such as 'OIHW', got ('O', 'I')",
    lambda: conv(weight_layout=("O", "I")))
bad(ValueError, "weight has 3 input channels per group, but in_channels=9 and groups=1 give 9",
    lambda: conv(layout="NHWC", w=f32(4, 3, 3, 3)))

# --- number formats ---------------------------------------------------------------------------------------------------
bad(TypeError, f"input has dtype int32; known are {KNOWN}", lambda: conv(np.ones((2, 6, 8, 9), np.int32)))
bad(TypeError, f"input has dtype complex64; known are {KNOWN}", lambda: conv(X.astype(np.complex64), W))
bad(TypeError, "input has dtype >f4 (byte-swapped: convert it with .astype(dtype.newbyteorder('='))); "
    f"known are {KNOWN}", lambda: conv(X.astype(">f4")))
bad(TypeError, "all operands must have one dtype: input is float32, weight is float64",
    lambda: conv(w=W.astype(np.float64)))
bad(TypeError, "all operands must have one dtype: grad_output is bfloat16, input is float32",
    lambda: backward(DY.astype(ml_dtypes.bfloat16)))
bad(TypeError, "input is uint8; say dtype='hifloat8' (or an 8-bit float format) to tell what it holds",
    lambda: conv(X.astype(np.uint8), W.astype(np.uint8)))
bad(TypeError, "input is uint8, so dtype must be one of the 8-bit formats float8_e4m3fn, float8_e5m2, hifloat8, "
    "got dtype='float32'", lambda: conv(X.astype(np.uint8), W.astype(np.uint8), dtype="float32"))
bad(TypeError, "input has dtype float32, but dtype='hifloat8' was asked for", lambda: conv(dtype="hifloat8"))
bad(TypeError, "dtype must be a string, got <class 'numpy.float32'>", lambda: conv(dtype=np.float32))
bad(TypeError, "dtype must be a string, got ['f32']", lambda: conv(dtype=["f32"]))
bad(TypeError, "out_dtype must be a string, got {}", lambda: conv(out_dtype={}))
bad(TypeError, "compute must be a string, got []", lambda: conv(compute=[]))
bad(TypeError, "layout must be a string such as 'NCHW', got {}", lambda: conv(layout={}))
bad(TypeError, f"out_dtype=['float32'] is none of {KNOWN}",
    lambda: Problem(Conv(1, 1, 1, (1,), (1,)), out_dtype=["float32"]))  # type: ignore[arg-type]
bad(TypeError, f"out_dtype='int8' is none of {KNOWN}", lambda: conv(out_dtype="int8"))
bad(ValueError, f"compute='fp4' is none of {MODES}", lambda: conv(compute="fp4"))
bad(ValueError, "compute='fp8' does not go with float32 operands: it takes float8_e4m3fn or float8_e5m2 as it is and "
    "rounds nothing to it", lambda: conv(compute="fp8"))
bad(ValueError, "compute='f64' does not go with float32 operands: float64 data is computed in f64, all other data in "
    "f32 or less", lambda: conv(compute="f64"))
bad(ValueError, "compute='tf32' does not go with float64 operands: float64 data is computed in f64, all other data in "
    "f32 or less", lambda: conv(X.astype(np.float64), W.astype(np.float64), compute="tf32"))

# --- transposed convolutions ------------------------------------------------------------------------------------------
bad(ValueError, "output_padding must be at least 0, got -1", lambda: transpose(output_padding=-1))
bad(ValueError, "weight has 5 input channels, but the input has 4", lambda: transpose(w=f32(5, 6, 3, 3)))
bad(ValueError, "groups=3 does not divide in_channels=4", lambda: transpose(groups=3))
bad(ValueError, "padding ((9, 9), (9, 9)) is larger than the output: input size (6, 7), kernel (3, 3), "
    "stride (1, 1), dilation (1, 1) give (-10, -9)", lambda: transpose(padding=9))
bad(ValueError, "output_padding=(1, 0) does not go with padding='same_upper', which fixes the size",
    lambda: transpose(stride=2, padding="same_upper", output_padding=(1, 0)))
bad(ValueError, "grad_output has shape (2, 6, 8, 8), but the output of this transposed convolution has (2, 6, 8, 9) "
    "(batch, channels, spatial)",
    lambda: convgrad.conv_transpose_backward(f32(2, 6, 8, 8), DY, W, backend="reference"))

# --- masks, backends, threads, workspaces -----------------------------------------------------------------------------
bad(ValueError, "output_mask must have three values (input, weight, bias), got 2",
    lambda: backward(output_mask=(True, False)))
bad(TypeError, "output_mask must have three values (input, weight, bias), got True", lambda: backward(output_mask=True))
bad(TypeError, "output_mask must have three bools (input, weight, bias), got 'abc'",
    lambda: backward(output_mask="abc"))
bad(TypeError, "output_mask must have three bools (input, weight, bias), got (1, 2, 0)",
    lambda: backward(output_mask=(1, 2, 0)))
bad(ValueError, f"scales['input'] must be positive and finite as a float32, got {10**400}",
    lambda: conv(scales={"input": 10**400}))
bad(ValueError, "backend='cudnn' is none of native, triton, reference",
    lambda: convgrad.conv(X, W, backend="cudnn"))
bad(TypeError, "backend must be a string, got 3", lambda: convgrad.conv(X, W, backend=3))  # type: ignore[arg-type]
bad(ValueError, "num_threads must be at least 1, got 0", lambda: conv(num_threads=0))
bad(TypeError, "num_threads must be an integer, got 1.5 (float)", lambda: conv(num_threads=1.5))
bad(ValueError, "max_workspace_bytes must be at least 0, got -1", lambda: conv(max_workspace_bytes=-1))
bad(TypeError, "workspace must be a 1-D uint8 numpy array, got bytearray", lambda: conv(workspace=bytearray(64)))
bad(TypeError, "workspace must be a 1-D uint8 numpy array, got float32 of shape (64,)",
    lambda: conv(workspace=f32(64)))
bad(ValueError, "workspace must be contiguous, got strides (2,)",
    lambda: conv(workspace=np.zeros(64, np.uint8)[::2]))

# --- problems and problem strings -------------------------------------------------------------------------------------
bad(ValueError, "problem string 'conv': expected '<result> <dtype> n… c… k… i… w…'", lambda: Problem.parse("conv"))
bad(ValueError, "problem string 'dgrad f32 n1': 'dgrad' is none of conv, input_grad, weight_grad, bias_grad",
    lambda: Problem.parse("dgrad f32 n1"))
bad(ValueError, f"problem string 'conv f31 n1 c1 k1 i1 w1': 'f31' is none of {SHORT}",
    lambda: Problem.parse("conv f31 n1 c1 k1 i1 w1"))
bad(ValueError, f"problem string 'conv f32> n1 c1 k1 i1 w1': '' is none of {SHORT}",
    lambda: Problem.parse("conv f32> n1 c1 k1 i1 w1"))
bad(ValueError, "problem string 'conv f32 n1 c1 i5 w3': k missing", lambda: Problem.parse("conv f32 n1 c1 i5 w3"))
bad(ValueError, "problem string 'conv f32 n1 c1 k1 i5 w3 zz': cannot read the word 'zz'",
    lambda: Problem.parse("conv f32 n1 c1 k1 i5 w3 zz"))
bad(ValueError, "problem string 'conv f32 n1 n2 c1 k1 i5 w3': 'n' is given twice ('1' and '2')",
    lambda: Problem.parse("conv f32 n1 n2 c1 k1 i5 w3"))
bad(ValueError, "problem string 'conv f32 n1x2 c1 k1 i5 w3': n1x2 is not one number",
    lambda: Problem.parse("conv f32 n1x2 c1 k1 i5 w3"))
bad(ValueError, "problem string 'conv f32 n1 c1 k1 i5x w3': i5x is not a list of numbers",
    lambda: Problem.parse("conv f32 n1 c1 k1 i5x w3"))
bad(ValueError, "problem string 'conv f32 n1 c1 k1 i5 w3 p1:2:3': p1:2:3 is not a list of pads or low:high pairs",
    lambda: Problem.parse("conv f32 n1 c1 k1 i5 w3 p1:2:3"))
bad(ValueError, "kernel_size must have one value per spatial axis (2), got 1: (3,)",
    lambda: Problem.parse("conv f32 n1 c1 k1 i5x5 w3"))
bad(ValueError, "layout='NHWC' is not an order of the axes 'NCL' (1 spatial)",
    lambda: Problem.parse("conv f32 n1 c1 k1 i5 w3 NHWC"))
bad(TypeError, "a problem must be a Problem or a problem string, got int", lambda: convgrad.plan(7))  # type: ignore
bad(ValueError, "wrt='dx' is none of output, input, weight, bias (or input, weight, bias joined by '+')",
    lambda: Problem(Conv(1, 1, 1, (1,), (1,)), "dx"))
bad(ValueError, "wrt='weight+input': several results are asked as input+weight+bias, in that order",
    lambda: Problem(Conv(1, 1, 1, (1,), (1,)), "weight+input"))
bad(ValueError, "device='tpu' is neither 'cpu' nor 'cuda'", lambda: Problem(Conv(1, 1, 1, (1,), (1,)), device="tpu"))
bad(ValueError, "in_size must have 1, 2 or 3 spatial axes, got (1, 1, 1, 1)",
    lambda: Conv(1, 1, 1, (1, 1, 1, 1), (1, 1, 1, 1)))
bad(ValueError, f"the input of shape (1, {2**40}, {2**40}) has more than 2^59 elements",
    lambda: Conv(1, 2**40, 1, (2**40,), (1,)))
bad(ValueError, "axis=2 is not one of the 2 spatial axes (0 to 1, or negative)",
    lambda: convgrad.explain("conv f32 n1 c1 k1 i5x5 w3x3", backend="reference", axis=2))


# --- a mask that asks for nothing is no reason to accept anything ----------------------------------------------------
NONE = (False, False, False)
bad(ValueError, "backend='vulkan' is none of native, triton, reference",
    lambda: convgrad.conv_backward(DY, X, W, output_mask=NONE, backend="vulkan"))
bad(ValueError, "num_threads must be at least 1, got -4", lambda: backward(output_mask=NONE, num_threads=-4))
bad(TypeError, "input has dtype float32, but dtype='float16' was asked for",
    lambda: convgrad.conv_transpose_backward(X, DY, W, output_mask=NONE, dtype="float16"))
bad(ValueError, f"compute='int4' is none of {MODES}", lambda: backward(output_mask=NONE, compute="int4"))
bad(TypeError, "workspace must be a 1-D uint8 numpy array, got int", lambda: backward(output_mask=NONE, workspace=64))
bad(ValueError, "scales['x']: the tensors of this call are grad_output, input, weight, input_grad, weight_grad, "
    "bias_grad", lambda: backward(output_mask=NONE, scales={"x": 2.0}))


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.sentence[:60])
def test_sentence(case: Bad) -> None:
    with pytest.raises(case.error) as caught:
        case.call()
    assert str(caught.value) == case.sentence
    assert type(caught.value) is case.error


def test_there_are_many() -> None:
    assert len(BAD) >= 60
    assert len({case.sentence for case in BAD}) == len(BAD)


# --- outputs ----------------------------------------------------------------------------------------------------------

def tangled() -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(500, np.float32), (2, 4, 6, 7), (168, 42, 7, 4))


def unaligned() -> np.ndarray:
    return np.zeros(2 * 4 * 6 * 7 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 4, 6, 7)


def read_only() -> np.ndarray:
    out = np.zeros((2, 4, 6, 7), np.float32)
    out.flags.writeable = False
    return out


BAD_OUTS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "out must be a numpy array like the operands, got list", lambda: [0.0]),
    (TypeError, "out has dtype float64, but the result is float32", lambda: np.zeros((2, 4, 6, 7))),
    (TypeError, "out has dtype >f4, but the result is float32", lambda: np.zeros((2, 4, 6, 7), ">f4")),
    (ValueError, "out has shape (2, 4, 6, 8), but the result has shape (2, 4, 6, 7)", lambda: f32(2, 4, 6, 8)),
    (ValueError, "out has shape (336,), but the result has shape (2, 4, 6, 7)", lambda: f32(336)),
    (ValueError, "out is read-only", read_only),
    (TypeError, "out is a masked array: a result has no mask; pass out.data",
     lambda: np.ma.masked_array(np.zeros((2, 4, 6, 7), np.float32))),
    (ValueError, "out overlaps input in memory", lambda: X.reshape(-1)[:336].reshape(2, 4, 6, 7)),
    (ValueError, "out has elements that overlap each other (strides (0, 168, 28, 4), shape (2, 4, 6, 7))",
     lambda: np.lib.stride_tricks.as_strided(np.zeros(500, np.float32), (2, 4, 6, 7), (0, 168, 28, 4))),
    (ValueError, "out has elements that overlap each other (strides (168, 42, 7, 4), shape (2, 4, 6, 7))", tangled),
]


@pytest.mark.parametrize("error, sentence, make", BAD_OUTS, ids=[sentence[:50] for _, sentence, _ in BAD_OUTS])
def test_bad_outputs_stay_untouched(error: type[Exception], sentence: str, make: Callable[[], Any]) -> None:
    out = make()
    before = out.tobytes() if isinstance(out, np.ndarray) else list(out)
    with pytest.raises(error) as caught:
        conv(out=out)
    assert str(caught.value) == sentence
    assert (out.tobytes() if isinstance(out, np.ndarray) else out) == before


def test_an_unaligned_output_is_refused_with_its_strides() -> None:
    out = unaligned()
    with pytest.raises(ValueError) as caught:
        conv(out=out)
    assert str(caught.value) == "out is not aligned to its 4-byte elements (strides (672, 168, 28, 4)); pass a copy"
    assert not out.any()


def test_an_unaligned_operand_is_refused() -> None:
    raw = np.zeros(X.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(X.shape)
    with pytest.raises(ValueError, match=r"^input is not aligned to its 4-byte elements"):
        conv(raw)


OUTS = {  # wrong arguments of a call whose outputs are right
    "grad_output": dict(dy=f32(2, 4, 5, 7)), "groups": dict(groups=4), "stride": dict(stride=0),
    "dtype": dict(x=X.astype(np.float64)), "layout": dict(layout="NHWZ"), "compute": dict(compute="f8"),
    "workspace": dict(workspace=f32(3)), "backend": dict(num_threads=0), "mask": dict(output_mask=()),
}


@pytest.mark.parametrize("name", OUTS)
def test_good_outputs_of_a_bad_call_stay_untouched(name: str) -> None:
    outs = tuple(np.full(shape, 7.0, np.float32) for shape in (X.shape, W.shape, (4,)))
    with pytest.raises((ValueError, TypeError)):
        backward(out=outs, **OUTS[name])
    assert all((out == 7).all() for out in outs)


def test_one_bad_output_of_three_stops_all() -> None:
    good = np.full(X.shape, 7.0, np.float32), np.full(W.shape, 7.0, np.float32)
    inside = good[0].reshape(-1)[:4]
    for third, sentence in ((f32(5), "out (gradient of bias) has shape (5,), but the result has shape (4,)"),
                            (inside, "out (gradient of bias) overlaps out (gradient of input) in memory")):
        with pytest.raises(ValueError) as caught:
            backward(out=(*good, third))
        assert str(caught.value) == sentence
        assert all((out == 7).all() for out in good)
    with pytest.raises(TypeError) as wrong:
        backward(out=good)
    assert str(wrong.value) == "out must be three arrays or None: (grad_input, grad_weight, grad_bias)"


def test_transposed_backward_checks_all_outputs_before_it_runs() -> None:
    dy, x = f32(2, 6, 8, 9), f32(2, 4, 6, 7)
    good = np.full(x.shape, 7.0, np.float32), np.full(W.shape, 7.0, np.float32)
    for third, sentence in (
            (f32(4), "out (gradient of bias) has shape (4,), but the result has shape (6,)"),
            (good[0].reshape(-1)[:6], "out (gradient of bias) overlaps out (gradient of input) in memory")):
        with pytest.raises(ValueError) as caught:
            convgrad.conv_transpose_backward(dy, x, W, out=(*good, third), backend="reference")
        assert str(caught.value) == sentence
        assert all((out == 7).all() for out in good)
    with pytest.raises(ValueError) as caught:
        convgrad.conv_transpose_backward(dy, x, W, out=(x, good[1], None), backend="reference")
    assert str(caught.value) == "out (gradient of input) overlaps input in memory"


def test_a_workspace_that_is_too_small_or_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.call import prepared_calls
    from convgrad.plan import _cache, load

    module, honest = load("reference"), load("reference").plan
    monkeypatch.setattr(module, "plan", lambda problem, **options: honest(problem)._replace(workspace_bytes=1000))
    _cache.clear()
    prepared_calls.clear()
    out = np.full((2, 4, 6, 7), 7.0, np.float32)
    with pytest.raises(ValueError) as caught:
        conv(out=out, workspace=np.zeros(999, np.uint8))
    assert str(caught.value) == "workspace has 999 bytes, but the plan needs 1000"
    with pytest.raises(ValueError) as caught:
        conv(out=out, workspace=out.reshape(-1).view(np.uint8))
    assert str(caught.value) == "workspace overlaps out in memory"
    with pytest.raises(convgrad.Unsupported) as refused:
        conv(out=out, max_workspace_bytes=999)
    assert "float64_numpy needs a workspace of 1000 bytes, but max_workspace_bytes=999" in str(refused.value)
    assert (out == 7).all()
    monkeypatch.undo()
    _cache.clear()
    prepared_calls.clear()


def test_a_refusal_names_every_backend() -> None:
    with pytest.raises(convgrad.Unsupported) as caught:
        convgrad.plan("input_grad f32 n1 c1 k1 i1 w1 cuda", backend="reference")
    assert caught.value.reasons == {"reference": "the reference runs on the cpu, not on cuda"}
    assert str(caught.value) == ("no backend can run 'input_grad f32 n1 c1 k1 i1 w1 cuda': "
                                 "reference: the reference runs on the cpu, not on cuda")
