"""Arrays over shared memory and over device memory."""
