"""How ranks that another launcher started find each other: over MPI, over torch's store."""
