"""Tensor parallelism: layers shared out over the ranks of an axis."""
