"""Trace equal modules once, and copy what they leave in the graph."""
