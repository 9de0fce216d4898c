"""Where PyTorch covers the case: the same result from its autograd, exactly, since the data are integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onednn_definition import Case, integers
from onednn_geometries import LISTED

from convgrad import onednn

torch = pytest.importorskip("torch")

SYMMETRIC = {name: case for name, case in LISTED.items() if case.pads_begin == case.pads_end and case.batch}


def forward(case: Case) -> Any:
    function = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[len(case.large) - 1]
    return lambda x, w: function(x, w, None, case.strides, case.pads_begin, case.dilations, case.groups)


def gradients(case: Case, tensors: dict[str, Any]) -> dict[str, Any]:
    """diff_src, diff_weights and dst by PyTorch, in canonical axis order."""
    x = torch.tensor(tensors["large"], dtype=torch.float32, requires_grad=True)
    w = torch.tensor(tensors["weights"], dtype=torch.float32, requires_grad=True)
    y = forward(case)(x, w)
    y.backward(torch.tensor(tensors["small"], dtype=torch.float32))
    return {"large": x.grad.numpy(), "weights": w.grad.numpy(), "small": y.detach().numpy()}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_agreement(name: str, engine: str) -> None:
    case = SYMMETRIC[name]
    tensors = {role: integers(case, role, 3).astype(np.float32) for role in case.shapes}
    peer = gradients(case, tensors)
    formats = {"data_format": "NCX", "weights_format": "OIX"}
    found = {
        "large": onednn.ConvolutionBackwardData(**case.attributes, **formats)(
            tensors["small"], tensors["weights"], case.shapes["large"]),
        "weights": onednn.ConvolutionBackwardWeights(**case.attributes, **formats)(
            tensors["large"], tensors["small"], case.shapes["weights"]),
        "small": onednn.Convolution(**case.attributes, **formats)(tensors["large"], tensors["weights"]),
    }
    for role in case.shapes:
        np.testing.assert_array_equal(found[role], peer[role], err_msg=role)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_transposed_agreement(name: str, engine: str) -> None:
    case = SYMMETRIC[name]
    function = getattr(torch.nn.functional, f"conv_transpose{len(case.large)}d")
    tensors = {role: integers(case, role, 4).astype(np.float32) for role in case.shapes}
    rest = tuple(large - (s * (small - 1) + (k - 1) * d + 1 - 2 * pad) for large, small, s, k, d, pad
                 in zip(case.large, case.small, case.strides, case.kernel, case.dilations, case.pads_begin))
    x = torch.tensor(tensors["small"], requires_grad=True)
    w = torch.tensor(tensors["weights"], requires_grad=True)
    y = function(x, w, None, case.strides, case.pads_begin, rest, case.groups, case.dilations)
    y.backward(torch.tensor(tensors["large"]))
    formats = {"data_format": "NCX", "weights_format": "IOX"}
    operator = onednn.ConvTranspose(**case.attributes, **formats, output_padding=rest)
    found = operator(tensors["small"], tensors["weights"])
    np.testing.assert_array_equal(found, y.detach().numpy())
    found = onednn.ConvTransposeBackwardData(**case.attributes, **formats)(tensors["large"], tensors["weights"])
    np.testing.assert_array_equal(found, x.grad.numpy())
    found = onednn.ConvTransposeBackwardWeights(**case.attributes, **formats)(
        tensors["small"], tensors["large"], case.shapes["weights"])
    np.testing.assert_array_equal(found, w.grad.numpy())
