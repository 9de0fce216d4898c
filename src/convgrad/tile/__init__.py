"""Convolutions and gradients of one box of a larger problem: which boxes it reads, and its results from the pieces."""

from __future__ import annotations

from .boxes import Box, Tile, boxes_of, grad_output_box, input_box, input_tile, output_tile
from .gradients import tile_conv, tile_input_grad, tile_weight_grad
from .pieces import Piece

__all__ = ["Box", "Piece", "Tile", "boxes_of", "grad_output_box", "input_box", "input_tile", "output_tile", "tile_conv",
           "tile_input_grad", "tile_weight_grad"]
