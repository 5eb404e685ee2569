"""ZeRO: state that data-parallel replicas shard instead of each keeping all of it."""
