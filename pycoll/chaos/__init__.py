"""Faults that are injected into running ranks, and what they cost a training (`pycoll chaos`)."""
