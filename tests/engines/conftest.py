"""Tests with real engines: `make engine-test`, each in an environment that has the engine."""

import os

if not os.environ.get("ENGINE_TESTS"):
    collect_ignore_glob = ["test_*.py"]
