"""Modules placed on ranks of the axis pp, by name: those that need not wait run at one time."""
