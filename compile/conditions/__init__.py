"""Conditions: what a trace relied on, by place and value, recorded with a bundle and checked."""
