"""Benchmarks, run from a checkout with `python -m benchmarks`. They are not in the package.

Those of `load` and `serving` measure an engine under load. The others compare two ways of doing
something within one run: `run(quick)` returns `ratios`, named medians of paired runs, and `rows`,
a list of dicts with equal keys. It may also return `columns`, those that a table shows, and a
`note` for its title.
"""
