"""Descriptors, enums, the product table, transdata."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from convgrad import cann
from convgrad.cann import aclDataType, aclFormat, aclnnStatus, aclTensor, transdata


# --- enums -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, number", [("FLOAT", 0), ("FLOAT16", 1), ("INT32", 3), ("INT64", 9), ("DOUBLE", 11),
                                          ("BF16", 27), ("HIFLOAT8", 34), ("FLOAT8_E5M2", 35), ("FLOAT8_E4M3FN", 36)])
def test_numbers_of_data_types(name, number):
    assert aclDataType[f"ACL_{name}"] == number


@pytest.mark.parametrize("name, number", [
    ("FORMAT_NCHW", 0), ("FORMAT_NHWC", 1), ("FORMAT_ND", 2), ("FORMAT_NC1HWC0", 3), ("FORMAT_FRACTAL_Z", 4),
    ("FORMAT_HWCN", 16), ("FORMAT_NDHWC", 27), ("FORMAT_NCDHW", 30), ("FORMAT_NDC1HWC0", 32), ("FRACTAL_Z_3D", 33),
    ("FORMAT_NCL", 47)])
def test_numbers_of_formats(name, number):
    assert aclFormat[f"ACL_{name}"] == number


@pytest.mark.parametrize("name, number", [
    ("ACLNN_SUCCESS", 0), ("ACLNN_ERR_PARAM_NULLPTR", 161001), ("ACLNN_ERR_PARAM_INVALID", 161002),
    ("ACLNN_ERR_RUNTIME_ERROR", 361001), ("ACLNN_ERR_INNER_INFERSHAPE_ERROR", 561001),
    ("ACLNN_ERR_INNER_TILING_ERROR", 561002), ("ACLNN_ERR_INNER_CREATE_EXECUTOR", 561101),
    ("ACLNN_ERR_INNER_NULLPTR", 561103)])
def test_numbers_of_statuses(name, number):
    assert aclnnStatus[name] == number


# --- aclTensor -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["FLOAT", "float32", "ACL_FLOAT", np.float32, np.dtype("float32"), 0,
                                   np.int32(0), "FP32", "f32", aclDataType.ACL_FLOAT])
@pytest.mark.parametrize("form", ["NCHW", "nchw", "ACL_FORMAT_NCHW", 0, np.int64(0), aclFormat.ACL_FORMAT_NCHW])
def test_names_numbers_and_members(dtype, form):
    tensor = aclTensor(shape=(1, 2, 3, 4), dtype=dtype, format=form)
    assert (tensor.dtype, tensor.format) == (aclDataType.ACL_FLOAT, aclFormat.ACL_FORMAT_NCHW)


@pytest.mark.parametrize("dtype, wanted", [("BFLOAT16", 27), ("BF16", 27), (ml_dtypes.bfloat16, 27), ("HIFLOAT8", 34),
                                           ("FLOAT8_E4M3FN", 36), (ml_dtypes.float8_e4m3fn, 36), ("INT64", 9),
                                           (np.int64(1), 1), ("fp16", 1), ("FP8_E4M3FN", 36)])
def test_other_data_types(dtype, wanted):
    assert aclTensor(shape=(1,), dtype=dtype).dtype == wanted


def test_arrays_are_wrapped_and_not_copied():
    for array in (np.zeros((3, 4), np.float32), np.zeros((3, 4), ml_dtypes.bfloat16),
                  np.zeros((6, 8), np.float16)[::2, ::2]):
        tensor = aclTensor(array)
        assert tensor.data is array and np.shares_memory(np.asarray(tensor), array)
        assert tensor.shape == (3, 4)
        assert tensor.strides == tuple(step // array.itemsize for step in array.strides)


def test_hifloat8_storage():
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    tensor = aclTensor(codes, dtype="HIFLOAT8")
    assert tensor.dtype == aclDataType.ACL_HIFLOAT8 and np.shares_memory(np.asarray(tensor), codes)
    assert aclTensor(codes).dtype == aclDataType.ACL_UINT8
    en_dtypes = pytest.importorskip("en_dtypes")
    tensor = aclTensor(codes.view(en_dtypes.hifloat8))
    assert tensor.dtype == aclDataType.ACL_HIFLOAT8 and np.shares_memory(np.asarray(tensor), codes)


def test_views_of_a_storage():
    storage = np.arange(24, dtype=np.float32)
    tensor = aclTensor(storage, shape=(2, 3), strides=(12, 2), offset=1, storage_shape=(24,))
    assert np.array_equal(np.asarray(tensor), storage.reshape(2, 12)[:, 1:7:2])
    made = cann.aclCreateTensor([2, 3], 2, aclDataType.ACL_FLOAT, [12, 2], 1, aclFormat.ACL_FORMAT_ND, [24], 1, storage)
    assert np.array_equal(np.asarray(made), np.asarray(tensor))
    assert (made.shape, made.strides, made.offset, made.storage_shape) == ((2, 3), (12, 2), 1, (24,))
    memory = storage.view(np.uint8)
    assert np.array_equal(np.asarray(aclTensor(memory, shape=(4, 6), dtype="FLOAT")), storage.reshape(4, 6))
    reverse = aclTensor(storage, shape=(24,), strides=(-1,), offset=23)
    assert np.array_equal(np.asarray(reverse), storage[::-1])


@pytest.mark.parametrize("call, error, words", [
    (lambda: aclTensor(), TypeError, "shape and dtype"),
    (lambda: aclTensor(shape=(1,)), TypeError, "shape and dtype"),
    (lambda: aclTensor(np.zeros(2, np.float32), shape=(-1, 2)), ValueError, "negative"),
    (lambda: aclTensor(shape=(1,), dtype="FLOAT7"), TypeError, "FLOAT7"),
    (lambda: aclTensor(shape=(1,), dtype="FLOAT", format="CHWN"), ValueError, "CHWN"),
    (lambda: aclTensor(np.zeros(3, np.float32), dtype="FLOAT16"), TypeError, "float32"),
    (lambda: aclTensor(np.zeros(3, np.complex256)), TypeError, "complex256"),
    (lambda: aclTensor(np.zeros(3, ">f4")), TypeError, "byte-swapped"),
    (lambda: aclTensor(np.zeros(13, np.uint8)[1:].view(np.float32)), ValueError, "aligned"),
    (lambda: aclTensor(np.zeros(6, np.float32), shape=(2, 4)), ValueError, "storage has 6"),
    (lambda: aclTensor(np.zeros(6, np.float32), shape=(2, 3), strides=(3, 1), offset=1), ValueError, "storage has 6"),
    (lambda: aclTensor(np.zeros(6, np.float32), shape=(2, 3), strides=(3,)), ValueError, "one entry per axis"),
    (lambda: aclTensor(np.zeros((4, 4), np.float32)[:, ::2], shape=(8,)), ValueError, "not contiguous"),
    (lambda: aclTensor(shape=3, dtype="FLOAT"), TypeError, "shape must be a sequence"),
    (lambda: aclTensor(shape=(1,), dtype="STRING").__array__(), ValueError, "without data"),
])
def test_descriptors_that_cannot_be(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_arrays_of_numbers():
    assert cann.aclIntArray([1, np.int64(2)]) == (1, 2)
    assert cann.aclBoolArray([1, 0, True]) == (True, False, True)
    assert cann.aclCreateIntArray([1, 2, 3], 2) == (1, 2)
    assert cann.aclCreateBoolArray([True, False, True], 3) == (True, False, True)
    assert cann.aclDestroyIntArray(cann.aclIntArray()) == cann.aclDestroyBoolArray(cann.aclBoolArray()) == 0
    with pytest.raises(TypeError):
        cann.aclIntArray([1.5])


def test_a_descriptor_prints_itself():
    text = repr(aclTensor(shape=(1, 2, 3), dtype="BFLOAT16", format="NCL"))
    assert text == "aclTensor(shape=(1, 2, 3), dtype=BFLOAT16, format=NCL, no data)"


# --- products --------------------------------------------------------------------------------------------------------
def test_the_product_table():
    facts = cann.FACTS
    assert set(facts) == set(cann.Product) and len(cann.Product) == 5
    assert [facts[product].hf32_bits for product in cann.Product] == [11, 11, 10, 0, 0]
    assert [facts[product].deterministic for product in cann.Product] == [False, False, True, False, False]
    assert [3 in facts[product].spatial_axes for product in cann.Product] == [True, True, True, False, False]
    assert "aclnnConvTbcBackward" not in cann.Product.ATLAS_INFERENCE.facts.operators
    assert "Conv3DBackpropInputV2" not in cann.Product.ATLAS_TRAINING.facts.operators


# --- transdata -------------------------------------------------------------------------------------------------------
PLAIN = ("NCDHW", "NDHWC", "DHWCN")


def counted(shape, dtype):
    return (np.arange(np.prod(shape)) % 120 + 1).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize("form", PLAIN[:2])
def test_activations_there_and_back(form, dtype):
    x = counted((2, 19, 2, 3, 4), dtype)
    moved = x.transpose(["NCDHW".index(letter) for letter in form])
    packed = transdata(moved, form, "NDC1HWC0")
    c0 = 32 // x.dtype.itemsize
    assert packed.shape == (2, 2, -(-19 // c0), 3, 4, c0)
    assert packed[1, 1, 0, 2, 3, 7] == x[1, 7, 1, 2, 3]
    assert np.array_equal(transdata(packed, "NDC1HWC0", form, shape=moved.shape), moved)
    whole = transdata(packed, "NDC1HWC0", "NCDHW")  # without a shape all channels of the blocks
    assert whole.shape[1] == packed.shape[2] * c0 and not whole[:, 19:].astype(np.float32).any()


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("form", PLAIN)
def test_weights_there_and_back(form, groups):
    w = counted((12, 5, 2, 3, 2), np.float16)
    moved = w.transpose(["NCDHW".index(letter) for letter in form])
    packed = transdata(moved, form, "FRACTAL_Z_3D", groups)
    assert np.array_equal(transdata(packed, aclFormat.ACL_FRACTAL_Z_3D, form, groups, shape=moved.shape), moved)
    assert np.array_equal(transdata(aclTensor(w, format="NCDHW"), "NCDHW", "FRACTAL_Z_3D", groups), packed)


def test_two_dimensional_kin():
    x, w = counted((2, 9, 3, 4), np.float32), counted((17, 9, 3, 3), np.float32)
    packed = transdata(x, "NCHW", "NC1HWC0")
    assert packed.shape == (2, 2, 3, 4, 8)
    assert np.array_equal(transdata(packed, "NC1HWC0", "NHWC", shape=(2, 3, 4, 9)), x.transpose(0, 2, 3, 1))
    packed = transdata(w, "NCHW", "FRACTAL_Z")
    assert packed.shape == (18, 2, 16, 8)
    assert np.array_equal(transdata(packed, "FRACTAL_Z", "HWCN", shape=(3, 3, 9, 17)), w.transpose(2, 3, 1, 0))


@pytest.mark.parametrize("source", PLAIN)
@pytest.mark.parametrize("target", PLAIN)
def test_between_plain_formats(source, target):
    x = counted((2, 3, 4, 5, 6), np.float32)
    there = transdata(x.transpose(["NCDHW".index(letter) for letter in source]), source, target)
    assert there.flags.c_contiguous
    assert np.array_equal(there, x.transpose(["NCDHW".index(letter) for letter in target]))


@pytest.mark.parametrize("call, words", [
    (lambda x: transdata(x, "NCDHW", "NC1HWC0"), "different numbers"),
    (lambda x: transdata(x, "ND", "NDC1HWC0"), "src_format=ND"),
    (lambda x: transdata(x[0], "NCDHW", "NDC1HWC0"), "5 axes"),
    (lambda x: transdata(x, "NDC1HWC0", "FRACTAL_Z_3D"), "both blocked"),
    (lambda x: transdata(transdata(x, "NCDHW", "FRACTAL_Z_3D"), "FRACTAL_Z_3D", "NCDHW"), "shape is required"),
    (lambda x: transdata(transdata(x, "NCDHW", "NDC1HWC0"), "NDC1HWC0", "NCDHW", shape=(1, 2, 3)), "5 axes"),
    (lambda x: transdata(transdata(x, "NCDHW", "NDC1HWC0"), "NDC1HWC0", "NCDHW", shape=(2, 3, 4, 5, 7)),
     "does not hold"),
    (lambda x: transdata(aclTensor(shape=x.shape, dtype="FLOAT"), "NCDHW", "NDC1HWC0"), "without data"),
])
def test_transdata_refuses(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.zeros((2, 3, 4, 5, 6), np.float32))


# --- imports ---------------------------------------------------------------------------------------------------------
def test_the_dialect_loads_only_when_it_is_named():
    code = ("import sys, convgrad; assert 'convgrad.frontends.cann' not in sys.modules; convgrad.cann.aclTensor;"
            "assert 'torch' not in sys.modules; import convgrad.cann; from convgrad.cann import Product;"
            "assert sys.modules['convgrad.cann'] is sys.modules['convgrad.frontends.cann'] is convgrad.cann")
    subprocess.run([sys.executable, "-c", code], check=True)
