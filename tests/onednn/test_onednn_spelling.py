"""oneDNN Graph in its own spelling: a C++ program line by line, and what each call refuses."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from convgrad import onednn
from convgrad.frontends.onednn.dnnl.graph import graph, logical_tensor, op, partition, status, tensor
from convgrad.onednn import dnnl

f32, s32 = logical_tensor.data_type.f32, logical_tensor.data_type.s32
strided, undef, any_layout = (logical_tensor.layout_type.strided, logical_tensor.layout_type.undef,
                              logical_tensor.layout_type.any)


def backward_data(**attributes: Any) -> op:
    """ConvolutionBackwardData of 1x1x2x2 and 1x1x3x3 into 1x1x4x4."""
    diff_dst = logical_tensor(0, f32, [1, 1, 2, 2], strided)
    weights = logical_tensor(1, f32, [1, 1, 3, 3], strided)
    diff_src = logical_tensor(2, f32, 4, strided)
    conv = op(0, op.kind.ConvolutionBackwardData, [diff_dst, weights], [diff_src], "conv_bwd_data")
    values = {"strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1], "groups": 1,
              "data_format": "NCX", "weights_format": "OIX", "dst_shape": [1, 1, 4, 4], **attributes}
    for name, value in values.items():
        if value is not None:
            conv.set_attr(op.attr(name), value)
    return conv


def partition_of(conv: op) -> partition:
    g = graph(dnnl.engine.kind.cpu)
    assert g.add_op(conv) is status.success
    g.finalize()
    found, = g.get_partitions()
    return found


DIFF_DST = np.arange(4, dtype=np.float32)
WEIGHTS = np.array([1, 0, 1, 0, 1, 0, 1, 0, 1], np.float32)
DIFF_SRC = [0, 1, 0, 1, 2, 3, 3, 3, 0, 3, 3, 1, 2, 3, 2, 3]


def test_a_program_line_by_line(engine: str) -> None:
    eng = dnnl.engine(dnnl.engine.kind.cpu, 0)
    strm = dnnl.stream(eng)
    conv = backward_data()
    g = dnnl.graph.graph(dnnl.engine.kind.cpu)
    g.add_op(conv)
    g.finalize()
    partitions = g.get_partitions()
    assert len(partitions) == 1 and partitions[0].is_supported() and partitions[0].get_ops() == [0]
    inputs, outputs = partitions[0].get_input_ports(), partitions[0].get_output_ports()
    cp = partitions[0].compile(inputs, outputs, eng)
    queried = cp.query_logical_tensor(2)
    assert queried.get_dims() == (1, 1, 4, 4) and queried.get_mem_size() == 64
    ts_dst = tensor(queried, eng)  # allocates
    cp.execute(strm, [tensor(inputs[0], eng, DIFF_DST), tensor(inputs[1], eng, WEIGHTS)], [ts_dst])
    strm.wait()
    assert ts_dst.get_data_handle().tolist() == DIFF_SRC
    # By id, not by place; arrays of the shape serve as well as flat memory.
    result = np.zeros((1, 1, 4, 4), np.float32)
    cp.execute(strm, [tensor(inputs[1], eng, WEIGHTS.reshape(1, 1, 3, 3)), tensor(inputs[0], eng, DIFF_DST)],
               [tensor(queried, eng, result)])
    assert result.ravel().tolist() == DIFF_SRC


def test_strides_of_flat_memory(engine: str) -> None:
    eng = dnnl.engine()
    conv = backward_data()
    conv.inputs[0] = logical_tensor(0, f32, [1, 1, 2, 2], [4, 4, 1, 2])  # columns first
    conv.outputs[0] = logical_tensor(2, f32, [1, 1, 4, 4], [32, 32, 8, 2])
    cp = partition_of(conv).compile(conv.inputs, conv.outputs, eng)
    memory = np.full(32, 7, np.float32)
    cp.execute(dnnl.stream(eng), [tensor(conv.inputs[0], eng, DIFF_DST.reshape(2, 2).T.ravel().copy()),
                                  tensor(conv.inputs[1], eng, WEIGHTS)], [tensor(conv.outputs[0], eng, memory)])
    assert memory.reshape(4, 4, 2)[:, :, 0].ravel().tolist() == DIFF_SRC
    assert (memory[1::2] == 7).all()


def test_the_shape_as_an_input_tensor(engine: str) -> None:
    eng = dnnl.engine()
    conv = backward_data(dst_shape=None)
    conv.add_input(logical_tensor(9, s32, [4], strided))
    cp = partition_of(conv).compile(conv.inputs, conv.outputs, eng)
    values = [tensor(conv.inputs[0], eng, DIFF_DST), tensor(conv.inputs[1], eng, WEIGHTS)]
    result = np.zeros((1, 1, 4, 4), np.float32)
    out = [tensor(conv.outputs[0], eng, result)]
    cp.execute(dnnl.stream(eng), [*values, tensor(conv.inputs[2], eng, np.array([1, 1, 4, 4], np.int32))], out)
    assert result.ravel().tolist() == DIFF_SRC
    with pytest.raises(onednn.InvalidShape, match="holds only zeros"):
        cp.execute(dnnl.stream(eng), [*values, tensor(conv.inputs[2], eng)], out)


def test_the_library_rule_holds_for_auto_pad(engine: str) -> None:
    conv = backward_data(auto_pad="SAME_UPPER", strides=[2, 2], dst_shape=[1, 1, 4, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", onednn.AutoPadWarning)
        cp = partition_of(conv).compile(conv.inputs, conv.outputs, dnnl.engine())
    assert cp.compiled.pads_begin == (0, 0)


def test_other_operators_are_partitions_that_are_not_supported() -> None:
    g = graph()
    g.add_op(op(1, op.kind.ReLU, [logical_tensor(0, f32, undef)], [logical_tensor(1, f32, undef)], "relu"))
    g.finalize()
    found, = g.get_partitions()
    assert not found.is_supported() and found.get_ops_num() == 1
    with pytest.raises(onednn.Unimplemented, match="is a ReLU"):
        found.compile(found.get_input_ports(), found.get_output_ports(), dnnl.engine())


@pytest.mark.parametrize("change, error, words", [
    (lambda conv: conv.set_attr("pads_begin", [-1, 0]), "invalid_graph_op", "is negative"),
    (lambda conv: conv.set_attr("fused", 1), "invalid_graph_op", "no attribute 'fused'"),
    (lambda conv: conv.attributes.pop("strides"), "invalid_graph_op", "needs the attribute 'strides'"),
    (lambda conv: conv.inputs.pop(), "invalid_graph_op", "has 1 and 1"),
    (lambda conv: conv.add_output(logical_tensor(5, f32, undef)), "invalid_graph_op", "has 2 and 2"),
])
def test_add_op_refuses(change: Any, error: str, words: str) -> None:
    conv = backward_data()
    change(conv)
    if error == "invalid_graph_op" and len(conv.outputs) == 2:
        words = "has 2 and 2"
    with pytest.raises(dnnl.error, match=words) as caught:
        graph().add_op(conv)
    assert caught.value.status == error
    assert graph().add_op(conv, False) is status(error)


def test_the_order_of_the_steps() -> None:
    g = graph()
    g.add_op(backward_data())
    with pytest.raises(onednn.InvalidGraph, match="must be finalized"):
        g.get_partitions()
    with pytest.raises(onednn.InvalidGraphOp, match="an operator 0 already"):
        g.add_op(backward_data())
    other = backward_data()
    other.id = 1
    with pytest.raises(onednn.InvalidGraph, match="tensor 2 is an output of the operators 0 and 1"):
        g.add_op(other)
    g.finalize()
    with pytest.raises(onednn.InvalidGraph, match="is finalized"):
        g.add_op(other)


@pytest.mark.parametrize("inputs, outputs, words", [
    (lambda c: c.inputs[:1], lambda c: c.outputs, r"the inputs must be the tensors \[0, 1\], got \[0\]"),
    (lambda c: [c.inputs[0], c.inputs[0]], lambda c: c.outputs, "got "),
    (lambda c: c.inputs, lambda c: c.inputs[:1], r"the outputs must be the tensors \[2\], got \[0\]"),
    (lambda c: [logical_tensor(0, f32, [1, 1, -1, 2], any_layout), c.inputs[1]], lambda c: c.outputs,
     "tensor 0 has unknown extents"),
    (lambda c: c.inputs, lambda c: [logical_tensor(2, f32, [1, 1, 5, 4], strided)], "has shape .* but .* give"),
    (lambda c: c.inputs, lambda c: [logical_tensor(2, "f16", [1, 1, 4, 4], strided)], "is f16, but the inputs are f32"),
])
def test_compile_refuses(inputs: Any, outputs: Any, words: str, engine: str) -> None:
    conv = backward_data()
    with pytest.raises(dnnl.error, match=words):
        partition_of(conv).compile(inputs(conv), outputs(conv), dnnl.engine())


def test_memory_that_is_too_small_stays_untouched(engine: str) -> None:
    eng, conv = dnnl.engine(), backward_data()
    cp = partition_of(conv).compile(conv.inputs, conv.outputs, eng)
    values = [tensor(conv.inputs[0], eng, DIFF_DST), tensor(conv.inputs[1], eng, WEIGHTS)]
    for handle in (np.full(15, 7, np.float32), np.full((4, 4), 7, np.float32)):
        with pytest.raises(onednn.InvalidArguments, match="tensor 2"):
            cp.execute(dnnl.stream(eng), values, [tensor(conv.outputs[0], eng, handle)])
        assert (handle == 7).all()
