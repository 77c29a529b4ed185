"""What cannot be described by value is in the report, with the user's line."""

import importlib.util
import io
import re
import sys

import pytest
import torch

from piecegraph import Config, compile_ahead, explain_miss, prepare
from piecegraph.cache.inspection import manifests
from piecegraph.compile.conditions.values import Undescribable
from piecegraph.compile.plan import split_model
from tests.tables import tables_of
from tests.text_compiler import use_text_compiler

from ..starts import start

pytestmark = pytest.mark.compile

FORMS = tables_of(__file__)

SOURCE = """
import io, torch
{before}
class Model(torch.nn.Module):
    def forward(self, x{default}):
        return {result}
"""


KEPT = pytest.mark.needs_torch("2.12", "Dynamo 2.11 cannot trace a kept result of an object")


@pytest.mark.parametrize(
    "form", [pytest.param(each, marks=[KEPT] * (each == "kept result")) for each in FORMS]
)
def test_pytorch_189330_report_names_the_condition_and_the_line(form, tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    case = FORMS[form]
    file = tmp_path / "case.py"
    default = ", stream=STREAM" if form == "default" else ""
    file.write_text(SOURCE.format(**case, default=default))
    spec = importlib.util.spec_from_file_location("case", file)
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "case", module)
    spec.loader.exec_module(module)
    config = Config(
        compiler="text",
        inputs={"x": "float32[num_tokens, 8]"},
        max_num_tokens=64,
        graph_mode="NONE",
        cache_dir=tmp_path / "cache",
    )
    for number_of_start in range(2):
        torch._dynamo.reset()
        prepared = prepare(module.Model(), config)
        report = prepared.report()["cache"]
        built = prepared.records.compile.pieces
        prepared.close()
        # traced each time; artifacts are used again, but not those of an op that has no description
        assert report["verified"] == "the model was traced by this start"
        assert bool(built) == (number_of_start == 0 or form == "op")
        assert not report["hit"]
        (line,) = report["not_cacheable"]
        assert re.search(case["report"], line), line
        if "# here" in file.read_text():
            number = file.read_text().split("# here")[0].count("\n") + 1
            assert f"{file}:{number}" in line


def test_report_names_the_setting_that_has_no_description(tmp_path, monkeypatch):
    class Pass:
        def __init__(self):
            self.named = {'say "it"': io.StringIO()}

        def __call__(self, graph):
            pass

    use_text_compiler(monkeypatch)
    config = Config(
        compiler="text",
        inputs={"input": "float32[num_tokens, 8]"},
        graph_mode="NONE",
        codegen={"passes": {"own": Pass()}},
        cache_dir=tmp_path,
    )
    prepared = prepare(torch.nn.Linear(8, 8), config)
    (line,) = prepared.report()["cache"]["not_cacheable"]
    assert re.search(r"passes: code.* is a _io.StringIO, which has no description", line)
    assert not list(manifests(tmp_path)), "neither a bundle nor an artifact that nobody could find"
    forecast = explain_miss(torch.nn.Linear(8, 8), config)
    assert str(forecast) == f"no bundle: not cacheable: {line}"
    assert not compile_ahead(torch.nn.Linear(8, 8), config)


def test_a_piece_without_a_description_is_not_stored(tmp_path, monkeypatch):
    def fingerprint(*_):
        raise Undescribable(".x", "has no description")

    use_text_compiler(monkeypatch)
    monkeypatch.setattr(split_model, "fingerprint", fingerprint)
    made = start(torch.nn.Linear(8, 8), tmp_path, inputs={"input": "float32[num_tokens, 8]"})
    assert not list(manifests(tmp_path))
    (event,) = made.events.named("bundle.not_kept")
    assert event.facts["reason"] == "piece 0: x has no description"
