"""oneDNN Graph in its own spelling, so that a C++ program can be translated line by line.

`dnnl::graph::op` is `dnnl.graph.op`. What fails raises the class of its status; `dnnl.error` catches all of them.
"""

from ..errors import GraphError as error
from . import graph
from .engine import engine, stream

__all__ = ["engine", "error", "graph", "stream"]
