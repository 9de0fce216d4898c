"""What a call is made of: aclTensor, aclIntArray, aclBoolArray and the enums of number and storage formats."""

from __future__ import annotations

import math
import operator
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...numbers import storage_dtype
from .status import INVALID, Refusal, aclnnStatus

Array = npt.NDArray[Any]


class aclDataType(IntEnum):
    """Number formats, with the vendor's numbers."""

    ACL_DT_UNDEFINED = -1
    ACL_FLOAT = 0
    ACL_FLOAT16 = 1
    ACL_INT8 = 2
    ACL_INT32 = 3
    ACL_UINT8 = 4
    ACL_INT16 = 6
    ACL_UINT16 = 7
    ACL_UINT32 = 8
    ACL_INT64 = 9
    ACL_UINT64 = 10
    ACL_DOUBLE = 11
    ACL_BOOL = 12
    ACL_STRING = 13
    ACL_COMPLEX64 = 16
    ACL_COMPLEX128 = 17
    ACL_BF16 = 27
    ACL_INT4 = 29
    ACL_UINT1 = 30
    ACL_COMPLEX32 = 33
    ACL_HIFLOAT8 = 34
    ACL_FLOAT8_E5M2 = 35
    ACL_FLOAT8_E4M3FN = 36
    ACL_FLOAT8_E8M0 = 37
    ACL_FLOAT6_E3M2 = 38
    ACL_FLOAT6_E2M3 = 39
    ACL_FLOAT4_E2M1 = 40
    ACL_FLOAT4_E1M2 = 41


class aclFormat(IntEnum):
    """Storage formats, with the vendor's numbers (DHWCN has its number from the graph engine)."""

    ACL_FORMAT_UNDEFINED = -1
    ACL_FORMAT_NCHW = 0
    ACL_FORMAT_NHWC = 1
    ACL_FORMAT_ND = 2
    ACL_FORMAT_NC1HWC0 = 3
    ACL_FORMAT_FRACTAL_Z = 4
    ACL_FORMAT_NC1HWC0_C04 = 12
    ACL_FORMAT_HWCN = 16
    ACL_FORMAT_NDHWC = 27
    ACL_FORMAT_FRACTAL_NZ = 29
    ACL_FORMAT_NCDHW = 30
    ACL_FORMAT_DHWCN = 31
    ACL_FORMAT_NDC1HWC0 = 32
    ACL_FRACTAL_Z_3D = 33
    ACL_FORMAT_NC = 35
    ACL_FORMAT_NCL = 47


# Number formats that the engine computes with, by the names of convgrad.
ENGINE_NAMES = {
    aclDataType.ACL_FLOAT: "float32", aclDataType.ACL_FLOAT16: "float16", aclDataType.ACL_BF16: "bfloat16",
    aclDataType.ACL_DOUBLE: "float64", aclDataType.ACL_HIFLOAT8: "hifloat8",
    aclDataType.ACL_FLOAT8_E4M3FN: "float8_e4m3fn", aclDataType.ACL_FLOAT8_E5M2: "float8_e5m2",
}
INTEGER_NAMES = {getattr(aclDataType, f"ACL_{name.upper()}"): name
                 for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")}
BYTE_FORMATS = (aclDataType.ACL_HIFLOAT8, aclDataType.ACL_FLOAT8_E4M3FN, aclDataType.ACL_FLOAT8_E5M2)

# The documents write FLOAT, BFLOAT16, FLOAT32; NumPy writes float32, bfloat16. All lead to one enum member.
_DTYPE_BY_NAME = {member.name.removeprefix("ACL_"): member for member in aclDataType} | {
    "FLOAT32": aclDataType.ACL_FLOAT, "BFLOAT16": aclDataType.ACL_BF16, "FLOAT64": aclDataType.ACL_DOUBLE,
    "F32": aclDataType.ACL_FLOAT, "FP32": aclDataType.ACL_FLOAT, "F16": aclDataType.ACL_FLOAT16,
    "FP16": aclDataType.ACL_FLOAT16, "FP8_E4M3FN": aclDataType.ACL_FLOAT8_E4M3FN}
NUMBERS = (int, np.integer)  # what an enum member may be given as: np.int32(1) is the number 1, not the dtype int32
_FORMAT_BY_NAME = {member.name.removeprefix("ACL_").removeprefix("FORMAT_"): member for member in aclFormat}

FORMAT_NAMES = {member: name for name, member in _FORMAT_BY_NAME.items()}
BLOCKED_FORMATS = (aclFormat.ACL_FORMAT_NDC1HWC0, aclFormat.ACL_FRACTAL_Z_3D, aclFormat.ACL_FORMAT_NC1HWC0,
                   aclFormat.ACL_FORMAT_FRACTAL_Z)


def as_data_type(dtype: object) -> aclDataType:
    """Return the enum member for a member, its number, a name (FLOAT, bfloat16, ACL_BF16) or a NumPy dtype."""
    if isinstance(dtype, aclDataType):
        return dtype
    if isinstance(dtype, NUMBERS) and not isinstance(dtype, bool):
        return aclDataType(int(dtype))
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name  # type: ignore[call-overload]
    found = _DTYPE_BY_NAME.get(name.upper().removeprefix("ACL_"))
    if found is None:
        raise TypeError(f"dtype={dtype!r} is no number format of CANN")
    return found


def as_format(form: object) -> aclFormat:
    """Return the enum member for a member, its number or a name (NCHW, ACL_FORMAT_NCHW)."""
    if isinstance(form, aclFormat):
        return form
    if isinstance(form, NUMBERS) and not isinstance(form, bool):
        return aclFormat(int(form))
    found = None
    if isinstance(form, str):
        found = _FORMAT_BY_NAME.get(form)
        if found is None:
            found = _FORMAT_BY_NAME.get(form.upper().removeprefix("ACL_").removeprefix("FORMAT_"))
    if found is None:
        raise ValueError(f"format={form!r} is none of {', '.join(_FORMAT_BY_NAME)}")
    return found


def numpy_dtype(dtype: aclDataType) -> np.dtype[Any]:
    """The NumPy dtype that stores a number format (uint8 for HIFLOAT8)."""
    if dtype in ENGINE_NAMES:
        return storage_dtype(ENGINE_NAMES[dtype])
    if dtype in INTEGER_NAMES:
        return np.dtype(INTEGER_NAMES[dtype])
    raise TypeError(f"data of {dtype.name} cannot be held here; pass a descriptor without data")


def type_name(dtype: aclDataType) -> str:
    """The name the documents use: FLOAT, FLOAT16, BFLOAT16, HIFLOAT8, ..."""
    return "BFLOAT16" if dtype is aclDataType.ACL_BF16 else dtype.name.removeprefix("ACL_")


class Descriptor(NamedTuple):
    """What the checks read of a tensor; hashable, so that a call that was checked before is recognised."""

    shape: tuple[int, ...]
    dtype: aclDataType
    format: aclFormat

    @property
    def empty(self) -> bool:
        return 0 in self.shape

    @property
    def rank(self) -> int:
        return len(self.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """C-order strides in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class aclTensor:
    """A tensor descriptor: shape, strides, offset, storage shape, number format, storage format, and data or none.

    Parameters
    ----------
    data : array, optional
        A NumPy array or a PyTorch tensor on the CPU, wrapped and never copied. HIFLOAT8 is stored as uint8 (say
        dtype="HIFLOAT8") or as the hifloat8 dtype of en_dtypes. None makes a descriptor that can be checked and planned
        with, but not run.
    shape, strides, offset : optional
        The view in elements; `data` is then the storage. Without them the view is `data` itself.
    dtype : name, NumPy dtype or aclDataType; optional with data
    format : name or aclFormat
    storage_shape : optional
        Shape of the storage; for blocked formats the blocked shape, while `shape` is the logical one.

    Examples
    --------
    >>> import numpy as np
    >>> from convgrad import cann
    >>> cann.aclTensor(np.ones((2, 3, 4, 4), np.float32), format="NCHW")
    aclTensor(shape=(2, 3, 4, 4), dtype=FLOAT, format=NCHW)
    >>> cann.aclTensor(shape=(512, 512, 7, 7, 7), dtype="BFLOAT16", format="NCDHW").data is None
    True
    """

    __slots__ = ("array", "data", "dtype", "format", "key", "offset", "shape", "storage_shape", "strides")

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    array: Array | None  # the view, in the storage dtype of its number format; None without data
    data: Any  # what the caller passed

    def __init__(self, data: Any = None, *, shape: Sequence[int] | None = None, dtype: object = None,
                 format: object = "ND", strides: Sequence[int] | None = None, offset: int = 0,
                 storage_shape: Sequence[int] | None = None) -> None:
        self.data = data
        self.format = as_format(format)
        self.offset = operator.index(offset)
        stored = None
        if data is None:
            if shape is None or dtype is None:
                raise TypeError("aclTensor without data needs shape and dtype")
            self.dtype = as_data_type(dtype)
        else:
            stored, self.dtype = stored_array(data, dtype)
        if stored is not None and shape is not None and min(int_tuple(shape, "shape"), default=0) < 0:
            raise ValueError(f"shape {tuple(shape)} has a negative extent")
        blocked = self.format in BLOCKED_FORMATS
        whole = stored is not None and strides is None and self.offset == 0 and storage_shape is None \
            and (shape is None or blocked or tuple(shape) == stored.shape)
        if whole and stored is not None:
            self.array = stored
            self.storage_shape = stored.shape
            self.shape = stored.shape if shape is None else int_tuple(shape, "shape")
            size = stored.itemsize
            self.strides = tuple([step // size for step in stored.strides]) if self.shape == stored.shape \
                else contiguous_strides(self.shape)
        else:
            self.shape = int_tuple(stored.shape if shape is None and stored is not None else shape, "shape")
            self.strides = contiguous_strides(self.shape) if strides is None else int_tuple(strides, "strides")
            if len(self.strides) != len(self.shape):
                raise ValueError(f"strides {self.strides} must have one entry per axis of shape {self.shape}")
            self.storage_shape = self.shape if storage_shape is None else int_tuple(storage_shape, "storage_shape")
            self.array = None if stored is None else \
                stored.reshape(self.storage_shape) if blocked else strided_view(stored, self)
        self.key = Descriptor(self.shape, self.dtype, self.format)

    @property
    def engine_dtype(self) -> str:
        """The number format by its convgrad name."""
        return ENGINE_NAMES[self.dtype]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if self.array is None:
            raise ValueError("this aclTensor is a descriptor without data")
        array = self.array if dtype is None else self.array.astype(dtype, copy=False)
        return array.copy() if copy else array

    def __repr__(self) -> str:
        what = f"shape={self.shape}, dtype={type_name(self.dtype)}, format={FORMAT_NAMES[self.format]}"
        return f"aclTensor({what}{', no data' if self.data is None else ''})"


def is_torch(data: object) -> bool:
    return type(data).__module__.partition(".")[0] == "torch" and hasattr(data, "data_ptr")


def array_of_torch(tensor: Any) -> Array:
    """The memory of a PyTorch tensor on the CPU as an array; formats that NumPy lacks go by their ml_dtypes name."""
    if tensor.device.type != "cpu":
        raise ValueError(f"a PyTorch tensor must be on the CPU, got device {tensor.device}")
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ENGINE_NAMES.values() and storage_dtype(name).isbuiltin != 1:  # a dtype of ml_dtypes
        torch = sys.modules["torch"]
        bits = tensor.view(torch.int16 if name == "bfloat16" else torch.uint8)
        return np.asarray(bits.numpy()).view(storage_dtype(name))
    return np.asarray(tensor.numpy())


def stored_array(data: Any, dtype: object) -> tuple[Array, aclDataType]:
    """The caller's array in the storage dtype of its number format, without a copy, and that format."""
    array = data if isinstance(data, np.ndarray) else array_of_torch(data) if is_torch(data) else np.asarray(data)
    found, wanted = number_format(array.dtype, dtype)
    if array.dtype != wanted:
        raw_bytes = array.dtype == np.uint8 and array.ndim == 1  # device memory, as aclrtMalloc gives it
        if not raw_bytes and not (array.dtype.itemsize == 1 and found in BYTE_FORMATS):
            raise TypeError(f"data has dtype {array.dtype.name}, but dtype={type_name(found)} was given")
        array = array.view(wanted)
    if not array.flags.aligned:
        raise ValueError(f"data is not aligned to its {array.itemsize}-byte elements (strides {array.strides})")
    return array, found


@lru_cache(maxsize=256)
def number_format(stored: np.dtype[Any], dtype: object) -> tuple[aclDataType, np.dtype[Any]]:
    """The number format of an array (as `dtype` says, if it says) and the NumPy dtype that stores it."""
    if not stored.isnative:
        raise TypeError(f"data has the byte-swapped dtype {stored}")
    found = as_data_type(stored if dtype is None else dtype)
    if found in BYTE_FORMATS and stored != np.uint8 and as_data_type(stored) is not found:
        raise TypeError(f"data has dtype {stored.name}, but dtype={type_name(found)} was given")
    return found, numpy_dtype(found)


def strided_view(stored: Array, tensor: aclTensor) -> Array:
    """The view (shape, strides, offset) of a storage; raises when it leaves the storage."""
    if not stored.flags.c_contiguous:
        raise ValueError("strides, offset and storage_shape describe a contiguous storage, but data is not contiguous")
    flat = stored.reshape(-1)
    if 0 not in tensor.shape:
        reach = [step * (extent - 1) for step, extent in zip(tensor.strides, tensor.shape)]
        lowest = tensor.offset + sum(step for step in reach if step < 0)
        highest = tensor.offset + sum(step for step in reach if step > 0)
        if lowest < 0 or highest >= flat.size:
            raise ValueError(f"shape {tensor.shape}, strides {tensor.strides}, offset {tensor.offset} reach the "
                             f"elements {lowest} to {highest}, but the storage has {flat.size}")
        flat = flat[tensor.offset:]
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [step * flat.itemsize for step in tensor.strides])


class aclIntArray(tuple[int, ...]):
    """A list of 64-bit integers; any Python sequence of integers does as well."""

    __slots__ = ()

    def __new__(cls, values: Iterable[int] = ()) -> aclIntArray:
        return super().__new__(cls, [operator.index(value) for value in values])


class aclBoolArray(tuple[bool, ...]):
    """A list of booleans; any Python sequence does as well."""

    __slots__ = ()

    def __new__(cls, values: Iterable[object] = ()) -> aclBoolArray:
        return super().__new__(cls, [bool(value) for value in values])


def int_tuple(values: object, name: str) -> tuple[int, ...]:
    """A tuple of ints from an aclIntArray or any sequence of integers."""
    if type(values) is aclIntArray:
        return values
    try:
        return tuple([operator.index(value) for value in values])  # type: ignore[attr-defined]
    except TypeError:
        raise TypeError(f"{name} must be a sequence of integers, got {reprlib.repr(values)}") from None


def whole_number(value: object, name: str) -> int:
    """An integer argument of a two-phase function; 1.0 and "1" are none."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise Refusal(INVALID, f"{name} must be an integer, got {reprlib.repr(value)}") from None


def truth(value: object, name: str) -> bool:
    """A boolean argument of a two-phase function, or an integer in the place of one."""
    return bool(value) if isinstance(value, (bool, np.bool_)) else bool(whole_number(value, name))


def optional_ints(values: object, name: str) -> tuple[int, ...] | None:
    """An aclIntArray argument of a two-phase function; None is a null pointer."""
    try:
        return None if values is None else int_tuple(values, name)
    except TypeError as error:
        raise Refusal(INVALID, str(error)) from None


def optional_bools(values: object, name: str) -> tuple[bool, ...] | None:
    """An aclBoolArray argument of a two-phase function; None is a null pointer."""
    if values is None or type(values) is aclBoolArray:
        return values
    try:
        given = [*values]  # type: ignore[misc]
    except TypeError:
        raise Refusal(INVALID, f"{name} must be a sequence of booleans, got {reprlib.repr(values)}") from None
    return tuple([truth(value, name) for value in given])


TensorLike = aclTensor | Array | None


def as_tensor(tensor: Any, name: str, formats: Mapping[int, str]) -> aclTensor | None:
    """The tensor itself, or an array wrapped in the format of its rank (ND where `formats` has none)."""
    if tensor is None or type(tensor) is aclTensor:
        return tensor
    if not isinstance(tensor, np.ndarray) and not is_torch(tensor):
        raise Refusal(INVALID, f"{name} must be an aclTensor, an array or None, got {type(tensor).__name__}")
    try:
        return aclTensor(tensor, format=formats.get(tensor.ndim, "ND"))
    except (TypeError, ValueError) as error:
        raise Refusal(INVALID, f"{name}: {error}") from None


def key_of(tensor: aclTensor | None) -> Descriptor | None:
    return None if tensor is None else tensor.key


def aclCreateTensor(viewDims: Sequence[int], viewDimsNum: int, dataType: object, stride: Sequence[int] | None,
                    offset: int, format: object, storageDims: Sequence[int], storageDimsNum: int,
                    tensorData: Any) -> aclTensor:
    """Make an aclTensor with the arguments of the C function in their order; tensorData may be None."""
    shape = int_tuple(viewDims, "viewDims")[:viewDimsNum]
    storage = int_tuple(storageDims, "storageDims")[:storageDimsNum]
    if len(shape) != viewDimsNum or len(storage) != storageDimsNum:
        raise ValueError(f"viewDimsNum={viewDimsNum} and storageDimsNum={storageDimsNum} must not exceed the "
                         f"{len(shape)} and {len(storage)} extents given")
    if tensorData is not None and isinstance(tensorData, np.ndarray) and tensorData.dtype == np.uint8 \
            and tensorData.ndim == 1:  # device memory may be larger than the tensor
        tensorData = tensorData[:math.prod(storage) * numpy_dtype(as_data_type(dataType)).itemsize]
    return aclTensor(tensorData, shape=shape, dtype=dataType, format=format,
                     strides=None if stride is None else tuple(stride)[:viewDimsNum], offset=offset,
                     storage_shape=storage)


def aclCreateIntArray(value: Sequence[int], size: int) -> aclIntArray:
    """Make an aclIntArray of the first `size` values."""
    return aclIntArray(list(value)[:size])


def aclCreateBoolArray(value: Sequence[object], size: int) -> aclBoolArray:
    """Make an aclBoolArray of the first `size` values."""
    return aclBoolArray(list(value)[:size])


def aclDestroyTensor(tensor: aclTensor) -> aclnnStatus:
    """Accepted for line-by-line ports; Python frees the descriptor."""
    return aclnnStatus.ACLNN_SUCCESS


def aclDestroyIntArray(array: aclIntArray) -> aclnnStatus:
    """Accepted for line-by-line ports; Python frees the array."""
    return aclnnStatus.ACLNN_SUCCESS


def aclDestroyBoolArray(array: aclBoolArray) -> aclnnStatus:
    """Accepted for line-by-line ports; Python frees the array."""
    return aclnnStatus.ACLNN_SUCCESS
