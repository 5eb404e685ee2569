"""Parallelism by annotations: shardings of a few tensors, propagated through the traced graph."""
