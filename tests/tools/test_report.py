"""The report's schema is as documented in docs/report.md, and it is strict JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from piecegraph.tools.cli.app import main

DOCS = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
DOCUMENTED = [
    name
    for line in DOCS.splitlines()
    if line.startswith("| `") and "." in line.split("|")[1]
    for name in re.findall(r"`([a-z_.\[\]]+)`", line.split("|")[1])
]


@pytest.fixture
def report(library, capsys):
    assert main(["run", "--requests", "3", "--model", "layers=2,hidden=32", "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_every_documented_key_is_there(report):
    assert len(DOCUMENTED) > 25
    for name in DOCUMENTED:
        value = report
        for key in name.split("."):
            assert key.removesuffix("[]") in value, name
            value = value[key.removesuffix("[]")]
        assert isinstance(value, list) == name.endswith("[]"), name


def test_counts_agree_with_each_other(report):
    serving = report["serving"]
    assert serving["requests"] == report["options"]["requests"] == 3
    assert serving["generated_tokens"] >= 3
    assert serving["generated_tokens_per_second"] == pytest.approx(
        serving["generated_tokens"] / serving["seconds"]
    )


def test_a_requests_tokens_are_all_counted(report):
    from piecegraph.tools.serve.requests import EXCERPT, read_trace

    rows = read_trace(EXCERPT, limit=3, length_scale=0.05)
    assert report["serving"]["prompt_tokens"] == sum(row.num_prompt for row in rows)
    assert report["serving"]["generated_tokens"] == sum(row.num_generate for row in rows)
