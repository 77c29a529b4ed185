"""Benchmarks, one file a question; each compares within one run."""
