"""Tests with Dask and Ray: `make farm-test`, in an environment that has them."""

import os

if not os.environ.get("FARM_TESTS"):
    collect_ignore_glob = ["test_*.py"]
