"""The report's schema is as documented in docs/metrics-and-report.md, and it is strict JSON."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from piecegraph import Events
from piecegraph.tools.cli.app import main
from piecegraph.tools.serve.report import _facts
from piecegraph.tools.serve.trace import EXCERPT, read_trace

DOCS = (Path(__file__).parents[2] / "docs" / "metrics-and-report.md").read_text()
DOCUMENTED = [
    name
    for line in DOCS.splitlines()
    if line.startswith("| `") and "." in line.split("|")[1]
    for name in re.findall(r"`([a-z_.\[\]]+)`", line.split("|")[1])
]


RUN = ["run", "--requests", "3", "--model", "layers=2,hidden=32", "--json", "-"]


@pytest.fixture
def report(library, capsys):
    assert main(RUN) == 0
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
    rows = read_trace(EXCERPT, limit=3, length_scale=0.05)
    assert serving["requests"] == report["options"]["requests"] == 3
    assert serving["prompt_tokens"] == sum(row.num_prompt for row in rows)
    assert serving["generated_tokens"] == sum(row.num_generate for row in rows)
    assert serving["generated_tokens_per_second"] == pytest.approx(
        serving["generated_tokens"] / serving["seconds"]
    )


def test_a_trace_that_verifies_a_bundle_is_not_taken_for_one_of_the_start(report):
    assert "verify" not in _facts(report)["compiled"]
    report["cache"] |= {"hit": True, "verified": True}
    assert _facts(report)["compiled"].startswith("1 Dynamo traces, to verify the bundle,")


def test_the_first_token_and_answer_count_from_the_start_of_the_process(library, capsys):
    before = Events.process_seconds()
    assert main(RUN) == 0
    output = capsys.readouterr()
    startup = json.loads(output.out)["startup"]
    token, answer = startup["first_token_seconds"], startup["first_answer_seconds"]
    assert before < token <= answer < Events.process_seconds()
    assert f"{token:.2f} s after the start of the process" in output.err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork
def test_a_process_counts_from_its_own_start(tmp_path):
    began = time.monotonic()
    if os.fork() == 0:
        (tmp_path / "seconds").write_text(str(Events.process_seconds()))
        os._exit(0)
    os.wait()
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert -tick <= float((tmp_path / "seconds").read_text()) <= time.monotonic() - began + tick
