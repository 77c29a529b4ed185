"""Rewrites of the graph that Inductor is about to lower; one pass a file."""
