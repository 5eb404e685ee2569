"""Observes running ranks: flight records, traces, stacks, jobs on this host and on others."""
