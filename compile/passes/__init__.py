"""Rewrites of the graph that Inductor lowers; one pass per file."""
