"""docs/failures.md has a row for each code in a test name, and names only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "failures.md").read_text()
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
}
PROJECTS = (
    "vllm|sglang|triton|dynamo|1cat|insitubatch|pytorch|transformers|xllm"
    "|rtp|infinilm|ascend|recipes"
)
CODE = re.compile(rf"_(?:failure_(\d+|w\d+)|(w\d+)|((?:{PROJECTS})_\d+))(?=_|$)", re.IGNORECASE)


def codes(name):
    return {code.upper() for found in CODE.findall(name) for code in found if code}


def test_codes_are_found_in_names():
    assert codes("test_failure_28_x") == {"28"}
    assert codes("test_c1_vllm_53366_failure_W9_x") == {"VLLM_53366", "W9"}
    assert codes("test_w23_x") == {"W23"}
    assert codes("test_moved_c1_vllm_47573") == {"VLLM_47573"}


def test_each_code_used_by_a_test_has_a_row():
    rows = {row.upper() for row in re.findall(r"^\| (\w+) \| ", PAGE, re.M)} - {"ROW"}
    used = set().union(*map(codes, TESTS))
    assert used - rows == set()
    assert len(used) > 50


def test_each_row_names_a_test_that_exists_and_carries_its_code():
    rows = re.findall(r"^\| (\w+) \| .* \| `(test_\w+)` \|$", PAGE, re.M)
    assert set(re.findall(r"`(test_\w+)`", PAGE)) - TESTS == set()
    assert [row for row, name in rows if row.upper() not in codes(name) | {"C1"}] == []
