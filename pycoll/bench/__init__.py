"""What `pycoll bench` does: cases, measuring on ranks, a record that grows, pictures of it."""
