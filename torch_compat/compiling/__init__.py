"""Inductor: generate code, build it, load it."""
