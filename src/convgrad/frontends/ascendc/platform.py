"""Memory sizes of the AI cores by product, and which products have the API at all."""

from __future__ import annotations

from dataclasses import dataclass

L1_RESERVED = 128  # bytes at the end of L1 that the convolution objects leave alone


@dataclass(frozen=True)
class PlatformInfo:
    """Memory sizes in bytes of one AI core."""

    socVersion: str = "Ascend910B"
    l1Size: int = 524288
    l0CSize: int = 131072
    ubSize: int = 262144
    l0ASize: int = 65536
    l0BSize: int = 65536
    btSize: int = 1024
    fbSize: int = 2048

    @property
    def usable_l1(self) -> int:
        """Bytes of L1 that the A and B queues share."""
        return self.l1Size - L1_RESERVED

    @staticmethod
    def ascend910b() -> PlatformInfo:
        """Return what the default constructor of the host side assumes."""
        return PlatformInfo()

    @staticmethod
    def of(product: str) -> PlatformInfo:
        """Return the sizes of a product by its name in `PRODUCTS`, its series ("Atlas A2") or its chip."""
        for name, entry in PRODUCTS.items():
            if product.lower() == entry.series.lower() or product.lower().startswith(name.lower()):
                return entry.info
        raise ValueError(f"product {product!r} is none of {', '.join(PRODUCTS)}")


@dataclass(frozen=True)
class Product:
    """One row of the product table."""

    series: str
    info: PlatformInfo
    has_api: bool


PRODUCTS = {
    "Ascend910B": Product("Atlas A2", PlatformInfo("Ascend910B", ubSize=196608), True),
    "Ascend910_93": Product("Atlas A3", PlatformInfo("Ascend910_93", ubSize=196608), True),
    "Ascend950": Product("Atlas 350", PlatformInfo("Ascend950", l0CSize=262144, ubSize=253952), False),
}


def check_known(info: PlatformInfo) -> None:
    """Raise ValueError for a chip that is in no row of the table."""
    if not isinstance(info, PlatformInfo):
        raise TypeError(f"platform must be a PlatformInfo, got {type(info).__name__}")
    if not any(info.socVersion.startswith(name) for name in PRODUCTS):
        raise ValueError(f"socVersion {info.socVersion!r} is none of {', '.join(PRODUCTS)}")


def has_api(info: PlatformInfo) -> bool:
    """Return whether the convolution backward API exists on this chip: "Ascend910B3" is an Ascend910B."""
    return any(product.has_api and info.socVersion.startswith(name) for name, product in PRODUCTS.items())
