"""Replicas that differ between steps: gossip among neighbors, and local steps."""
