"""aclnnConvolutionBackward with HIFLOAT8 and FLOAT8_E4M3FN tensors, on descriptors alone."""

from __future__ import annotations

import pytest
from test_cann_status import INNER, INVALID, OK, changed, phase_one, row_id

from convgrad import cann

H, F8 = "HIFLOAT8", "FLOAT8_E4M3FN"
ONLY_DX, ONLY_DW, ONLY_DB = ((True, False, False), (False, True, False), (False, False, True))
EIGHT_BIT = [
    ("2d-transposed", {"all.dtype": H, "outputMask": ONLY_DX}, OK),
    ("3d-transposed", {"all.dtype": H, "outputMask": ONLY_DX}, OK),
    ("2d-transposed-groups", {"all.dtype": H, "outputMask": ONLY_DX}, OK),
    ("2d-transposed", {"all.dtype": H, "weight.dtype": "FLOAT16", "gradWeight.dtype": "FLOAT16", "outputMask": ONLY_DX},
     INVALID),
    ("2d-transposed", {"gradOutput.dtype": H, "gradBias.dtype": H, "outputMask": ONLY_DX}, INVALID),
    ("2d-transposed", {"all.dtype": H, "gradBias.dtype": "FLOAT", "outputMask": ONLY_DX}, INVALID),
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": (True, True, False)}, OK),
    ("2d-transposed", {"all.dtype": H, "outputMask": (True, True, False)}, INVALID),  # gradWeight must be FLOAT
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": ONLY_DW}, INVALID),  # both passed
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "gradInput": None, "outputMask": ONLY_DW}, OK),
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": (False,) * 3}, OK),
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": ONLY_DW, "outputPadding": (0, 1)},
     INVALID),
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT16", "outputMask": ONLY_DW}, INVALID),
    ("2d-transposed-groups", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": ONLY_DW}, INVALID),
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": ONLY_DB}, INNER),
    ("2d-transposed", {"all.dtype": H, "gradWeight.dtype": "FLOAT"}, INNER),
    ("2d-transposed", {"all.dtype": F8, "outputMask": ONLY_DX}, INVALID),
    ("2d", {"all.dtype": H, "outputMask": ONLY_DX}, INVALID),  # both gradInput and gradWeight are passed
    ("2d", {"all.dtype": F8, "outputMask": ONLY_DX}, INVALID),
    ("2d", {"all.dtype": H, "outputMask": (False,) * 3}, OK),
    ("2d", {"all.dtype": H, "outputMask": ONLY_DB}, INNER),
    ("2d", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "outputMask": ONLY_DW}, INVALID),
    ("2d", {"all.dtype": H, "gradWeight": None, "outputMask": ONLY_DX}, INNER),  # the kernel was removed
    ("2d", {"all.dtype": F8, "gradWeight": None, "outputMask": ONLY_DX}, INNER),
    ("2d", {"all.dtype": H, "weight.dtype": "FLOAT16", "gradWeight": None, "outputMask": ONLY_DX}, INVALID),
    ("2d", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "gradInput": None, "outputMask": ONLY_DW}, OK),
    ("3d", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "gradInput": None, "outputMask": ONLY_DW}, OK),
    ("2d", {"all.dtype": H, "gradInput": None, "outputMask": ONLY_DW}, INVALID),
    ("2d", {"all.dtype": F8, "gradWeight.dtype": "FLOAT", "gradInput": None, "outputMask": ONLY_DW}, INVALID),
    ("2d-groups", {"all.dtype": H, "gradWeight.dtype": "FLOAT", "gradInput": None, "outputMask": ONLY_DW}, INVALID),
    ("2d", {"all.dtype": H, "gradInput": None, "gradWeight": None, "outputMask": ONLY_DB}, INNER),
    ("2d", {"all.dtype": H, "gradInput": None, "gradWeight": None, "outputMask": (False,) * 3}, OK),
]


@pytest.mark.parametrize("row", EIGHT_BIT, ids=lambda row: row_id((*row, "")))
def test_8_bit_on_950(row):
    base, changes, status = row
    found, _, _ = phase_one(changed(base, changes | {"product": "ASCEND_950"}))
    assert found == status, cann.aclGetRecentErrMsg()


@pytest.mark.parametrize("row", EIGHT_BIT, ids=lambda row: row_id((*row, "")))
@pytest.mark.parametrize("product", ["A2", "A3", "ATLAS_TRAINING", "ATLAS_INFERENCE"])
def test_8_bit_elsewhere(row, product):
    base, changes, _ = row
    assert phase_one(changed(base, changes | {"product": product}))[0] == INVALID
