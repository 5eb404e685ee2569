"""Context parallelism: ranks share the sequence, and attention passes keys around a ring."""
