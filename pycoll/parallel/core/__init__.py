"""The mesh and what every kind of parallelism builds on: placement, ledger, batches, randomness."""
