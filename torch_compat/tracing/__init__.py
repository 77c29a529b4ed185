"""Dynamo: one trace, and what it relied on."""
