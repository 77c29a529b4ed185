"""The list of capabilities in `docs/architecture.md` names these tests, and these alone."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_list_and_the_tests_are_the_same():
    page = (HERE.parents[1] / "docs" / "architecture.md").read_text()
    section = page.split("## What this library must be able to do")[1].split("\n## ")[0]
    listed = sorted(re.findall(r"`(test_\w+)`", section))
    found = []
    for file in HERE.glob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert ast.get_docstring(node) or file.stem == "test_list", node.name
                found += [node.name] if file.stem != "test_list" else []
    assert listed == sorted(found)
