"""The errors of the oneDNN Graph dialect: one class per status code of the library, and the auto_pad warning."""

from __future__ import annotations

from typing import ClassVar

from ...problem import Unsupported


class GraphError(Exception):
    """A call that oneDNN Graph would answer with a status code; `status` is the library's name for it."""

    status: ClassVar[str] = ""


class InvalidGraph(GraphError, ValueError):
    """A serialised graph that cannot be read."""

    status = "invalid_graph"


class InvalidGraphOp(GraphError, ValueError):
    """The operator itself is malformed: attribute unknown, missing, of the wrong kind; wrong inputs or types."""

    status = "invalid_graph_op"


class InvalidShape(GraphError, ValueError):
    """A rank or a shape does not fit the attributes, or a shape that is needed was not given."""

    status = "invalid_shape"


class InvalidArguments(GraphError, ValueError):
    """The numbers contradict each other: shape law, channels, groups, strides, output_padding."""

    status = "invalid_arguments"


class Unimplemented(GraphError, Unsupported):
    """Legal, but nothing here can run it: unknown extents at compile time, or no backend for the problem."""

    status = "unimplemented"


class OutputPaddingWarning(UserWarning):
    """output_padding is at or above the stride: computed here, while the library infers the shape and then refuses."""


class AutoPadWarning(UserWarning):
    """The document's auto_pad formula and the library's code give different pads for the problem at hand."""
