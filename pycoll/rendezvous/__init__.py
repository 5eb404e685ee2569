"""Rendezvous of ranks that another launcher started: over MPI, over torch's store."""
