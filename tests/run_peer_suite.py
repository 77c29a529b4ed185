"""Run a test suite of torch's compiler through our backend: `make peer-test SUITE=FILE`.

FILE is `test/inductor/test_torchinductor.py` of the installed release of torch, or a file like it:
its tests compile with its global `compile_fx`. It is not stored here, and its code is run. A test
that fails is run again as it is: it is worse if it passes then. One line per test, then the sums.
"""

import argparse
import importlib
import json
import sys
import unittest
from collections import Counter
from pathlib import Path

import piecegraph as pg
from piecegraph.runtime.torch_compile import backend


def outcome(test):
    """`passed`, `skipped`, or the last line of what went wrong."""
    result = unittest.TestResult()
    unittest.TestSuite([type(test)(test._testMethodName)]).run(result)
    faults = [*result.errors, *result.failures]
    if faults:
        return faults[0][1].strip().splitlines()[-1]
    return "skipped" if result.skipped else "passed"


def tests_of(suite, selected):
    """The tests whose name, with that of the class, contains `selected`."""
    if isinstance(suite, unittest.TestCase):
        if selected in suite.id():
            yield suite
        return
    for each in suite:
        yield from tests_of(each, selected)


def compare(module, selected, compiler):
    """Run the selected tests of a suite; returns how many were equal, worse, and so on."""
    theirs, events, sums = module.compile_fx, pg.Events(), Counter[str]()

    def ours(graph, inputs, **_):
        return backend(graph, inputs, {"compiler": compiler, "cache": False, "events": events})

    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module), selected):
        module.compile_fx = ours
        fault = outcome(test)
        module.compile_fx = theirs
        verdict = {"passed": "equal", "skipped": "skipped"}.get(fault)
        if verdict is None:
            verdict = "worse" if outcome(test) == "passed" else "fails in torch too"
        sums[verdict] += 1
        print(json.dumps({"test": test.id(), "verdict": verdict, "outcome": fault}), flush=True)
    return {**sums, "backend": pg.backend_report(events)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--select", default="CpuTests", help="part of a test's name")
    parser.add_argument("--compiler", default="inductor")
    options = parser.parse_args()
    sys.path.insert(0, str(options.file.parent))  # the suite imports files beside it
    module = importlib.import_module(options.file.stem)
    sums = compare(module, options.select, options.compiler)
    print(json.dumps(sums))
    sys.exit(bool(sums.get("worse")))


if __name__ == "__main__":
    main()
