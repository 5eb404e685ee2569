"""What running ranks do: flight records, traces, stacks, jobs of this host and of others."""
