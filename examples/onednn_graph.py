"""A oneDNN Graph operator without oneDNN: the input gradient of a strided convolution, compiled and run.

Names, attributes and refusals are the library's own, so a graph can be tried out before it is ported.
"""

import numpy as np

from convgrad import onednn

op = onednn.ConvolutionBackwardData(strides=[2, 2], pads_begin=[1, 1], pads_end=[1, 1], dilations=[1, 1],
                                    data_format="NXC", weights_format="XIO", dst_shape=[1, 8, 8, 4])
diff_dst = np.ones((1, 4, 4, 6), np.float32)
weights = np.ones((3, 3, 4, 6), np.float32)
compiled = op.compile(onednn.LogicalTensor(diff_dst.shape, "f32"), onednn.LogicalTensor(weights.shape, "f32"))
diff_src = compiled(diff_dst, weights, scratchpad=np.empty(compiled.scratchpad_size, np.uint8))
print(diff_src[0, :, :, 0].astype(int))

try:
    onednn.ConvolutionBackwardData(strides=[0, 2], pads_begin=[1, 1], pads_end=[1, 1], dilations=[1, 1])
except onednn.GraphError as refusal:
    print(f"refused: {refusal}")
