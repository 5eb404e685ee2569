"""Context parallelism: each rank has a share of the sequence, and attention goes around a ring."""
