"""Data parallelism: replicas that share a batch."""
