"""What each Ascend product accepts, as one table: number formats, value ranges, HF32 bits, operators, determinism."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .descriptors import aclDataType

FLOAT, FLOAT16, BF16 = aclDataType.ACL_FLOAT, aclDataType.ACL_FLOAT16, aclDataType.ACL_BF16
HIF8, FP8 = aclDataType.ACL_HIFLOAT8, aclDataType.ACL_FLOAT8_E4M3FN
TO_32 = (FLOAT, FLOAT16)
TO_16 = (FLOAT, FLOAT16, BF16)

INT31 = 2**31 - 1

CONVOLUTION_BACKWARD = "aclnnConvolutionBackward"
CONV_TBC_BACKWARD = "aclnnConvTbcBackward"
INPUT_V2, FILTER_V2, TRANSPOSE_V2 = "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", "Conv3DTransposeV2"
ALL_OPERATORS = (CONVOLUTION_BACKWARD, CONV_TBC_BACKWARD, INPUT_V2, FILTER_V2, TRANSPOSE_V2)


@dataclass(frozen=True)
class Limit:
    """Values that an argument may have on some axes: [low, high]. Empty `ranks` and None `transposed` mean any."""

    argument: str
    axes: str
    low: int
    high: int
    ranks: tuple[int, ...] = ()
    transposed: bool | None = None

    def applies(self, spatial: int, transposed: bool) -> bool:
        return (not self.ranks or spatial in self.ranks) and self.transposed in (None, transposed)


# aclnnConvolutionBackward, documented ranges beyond the lower bounds that hold everywhere.
LIMITS_2201 = (
    Limit("weight", "L", 1, 255, (1,)), Limit("weight", "HW", 1, 255, (2, 3)),
    Limit("stride", "HW", 1, 63, (3,)),
    Limit("padding", "LHW", 0, 255),
    Limit("dilation", "LDHW", 1, 255),
)
LIMITS_3510 = (
    Limit("weight", "HW", 1, 255, transposed=True),
    Limit("stride", "LDHW", 1, INT31 - 1, transposed=True),
    Limit("padding", "LDHW", 0, INT31 - 1, transposed=True),
    Limit("dilation", "LDHW", 1, INT31 - 1, transposed=True),
)

# The graph operators on 5-D tensors.
INPUT_LIMITS_2201 = (
    Limit("filter", "HW", 1, 511), Limit("filter", "D", 1, INT31),
    Limit("strides", "HW", 1, 63), Limit("strides", "D", 1, 255),
    Limit("pads", "DHW", 0, 255), Limit("dilations", "DHW", 1, 255),
)
FILTER_LIMITS_2201 = (
    Limit("filter", "DHW", 1, INT31), Limit("strides", "HW", 1, 63), Limit("strides", "D", 1, 255),
    Limit("pads", "HW", 0, 255), Limit("pads", "D", 0, INT31 - 1),
    Limit("dilations", "HW", 1, 255), Limit("dilations", "D", 1, INT31 - 1),
)


def wide_limits(high: int) -> tuple[Limit, ...]:
    return (Limit("filter", "DHW", 1, high), Limit("strides", "DHW", 1, high), Limit("pads", "DHW", 0, high),
            Limit("dilations", "DHW", 1, high))


@dataclass(frozen=True)
class Facts:
    """One row of the product table."""

    title: str
    architecture: str
    dtypes: tuple[aclDataType, ...]  # of every tensor of aclnnConvolutionBackward
    transposed_dtypes: tuple[aclDataType, ...]
    tbc_dtypes: tuple[aclDataType, ...]  # of every tensor of aclnnConvTbcBackward but bias
    tbc_bias_dtypes: tuple[aclDataType, ...]
    tbc_max_taps: int  # of aclnnConvTbcBackward; 0: no limit
    operator_dtypes: tuple[aclDataType, ...]  # of the graph operators
    operators: tuple[str, ...]
    spatial_axes: tuple[int, ...]
    multiplies_float: bool  # the matrix unit takes FLOAT; if not, FLOAT must be computed in FLOAT16
    hf32_bits: int  # mantissa bits of HF32; 0: there is none
    same_output_dtypes: bool  # gradInput like input, gradWeight like weight, gradBias like gradOutput
    nd_bias: bool  # gradBias of a normal convolution must be ND
    empty_tensors: bool  # tensors without elements have a route of their own
    deterministic: bool  # what the vendor promises by default; results here are always deterministic
    limits: tuple[Limit, ...]
    input_limits: tuple[Limit, ...] = ()  # Conv3DBackpropInputV2 and Conv3DTransposeV2
    filter_limits: tuple[Limit, ...] = ()  # Conv3DBackpropFilterV2


class Product(Enum):
    """The Ascend products; `Product.A2.facts` is its row of the table."""

    A2 = "A2"
    A3 = "A3"
    ASCEND_950 = "ASCEND_950"
    ATLAS_TRAINING = "ATLAS_TRAINING"
    ATLAS_INFERENCE = "ATLAS_INFERENCE"

    @property
    def facts(self) -> Facts:
        return FACTS[self]

    __hash__ = object.__hash__  # members are unique; Enum's own hash is a Python call on every cached lookup


def dav_2201(title: str) -> Facts:
    return Facts(
        title=title, architecture="DAV_2201", dtypes=TO_16, transposed_dtypes=TO_16, tbc_dtypes=TO_16,
        tbc_bias_dtypes=TO_16, tbc_max_taps=0, operator_dtypes=TO_16, operators=ALL_OPERATORS, spatial_axes=(1, 2, 3),
        multiplies_float=True, hf32_bits=11, same_output_dtypes=False, nd_bias=True, empty_tensors=True,
        deterministic=False, limits=LIMITS_2201, input_limits=INPUT_LIMITS_2201,
        filter_limits=FILTER_LIMITS_2201)


def atlas(title: str, architecture: str, tbc: bool) -> Facts:
    return Facts(
        title=title, architecture=architecture, dtypes=TO_32, transposed_dtypes=TO_32,
        tbc_dtypes=TO_32 if tbc else (), tbc_bias_dtypes=TO_16 if tbc else (), tbc_max_taps=0, operator_dtypes=(),
        operators=(CONVOLUTION_BACKWARD, CONV_TBC_BACKWARD) if tbc else (CONVOLUTION_BACKWARD,), spatial_axes=(1, 2),
        multiplies_float=False, hf32_bits=0, same_output_dtypes=False, nd_bias=False, empty_tensors=False,
        deterministic=False, limits=())


FACTS = {
    Product.A2: dav_2201("Atlas A2 (Ascend910B)"),
    Product.A3: dav_2201("Atlas A3 (Ascend910_93)"),
    Product.ASCEND_950: Facts(
        title="Ascend 950PR / 950DT (910_95)", architecture="DAV_3510", dtypes=(*TO_16, HIF8, FP8),
        transposed_dtypes=(*TO_16, HIF8), tbc_dtypes=TO_16, tbc_bias_dtypes=TO_16, tbc_max_taps=255,
        operator_dtypes=(*TO_16, HIF8, FP8),
        operators=ALL_OPERATORS, spatial_axes=(1, 2, 3), multiplies_float=True, hf32_bits=10, same_output_dtypes=True,
        nd_bias=True, empty_tensors=True, deterministic=True, limits=LIMITS_3510, input_limits=wide_limits(INT31),
        filter_limits=wide_limits(INT31 - 1)),
    Product.ATLAS_TRAINING: atlas("Atlas training (Ascend910)", "DAV_1001", tbc=True),
    Product.ATLAS_INFERENCE: atlas("Atlas inference (Ascend310P)", "DAV_2002", tbc=False),
}

# What the chips and boards are called elsewhere, without "Ascend" and "Atlas"; 910B1 to 910B4 are bins of one chip.
MARKET_NAMES = {
    **dict.fromkeys(("910B", "910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1", "800T-A2", "800I-A2", "900-A2",
                     "A200I-A2-BOX"), Product.A2),
    **dict.fromkeys(("910C", "910_93", "910_9391", "910_9392", "910_9381", "910_9382", "910_9372", "910_9362",
                     "900-A3", "800T-A3"), Product.A3),
    **dict.fromkeys(("950", "950PR", "950DT", "910_95", "350"), Product.ASCEND_950),
    **dict.fromkeys(("910", "910A", "910PROA", "910PROB", "TRAINING"), Product.ATLAS_TRAINING),
    **dict.fromkeys(("310P", "310P1", "310P3", "INFERENCE"), Product.ATLAS_INFERENCE),
}

MAX_GROUPS = 65535
TBC_MAX_PAD = 255

_chosen = [Product.A2]


def as_product(product: object) -> Product:
    """Return the Product for a member or its name; None is the product that `set_product` chose."""
    if product is None:
        return _chosen[0]
    if isinstance(product, Product):
        return product
    name = str(product).upper().removeprefix("ASCEND").replace(" ", "").lstrip("_-")
    found = Product.__members__.get(str(product).upper()) or MARKET_NAMES.get(name) \
        or MARKET_NAMES.get(name.removeprefix("ATLAS").lstrip("_-"))
    if found is None:
        raise ValueError(f"product={product!r} is none of {', '.join(Product.__members__)}, nor one of their market "
                         f"names: {', '.join(MARKET_NAMES)}")
    return found


def set_product(product: object) -> Product:
    """Choose the product for calls that name none (A2 at first); returns the one that was chosen before."""
    if product is None:
        raise ValueError(f"product must be one of {', '.join(Product.__members__)}")
    before = _chosen[0]
    _chosen[0] = as_product(product)
    return before


def get_product() -> Product:
    """The product for calls that name none."""
    return _chosen[0]
