"""One injected fault of each kind that was once missed or attributed to the wrong part."""

import pytest

from piecegraph.tools.bisect import bisect

from . import faulty_models as models
from .planted_faults import FAULTS, find, site_for

pytestmark = pytest.mark.compile

OF_A_KIND = (
    *("rows mix; split at a pattern", "rows mix; split at named ops"),
    "rows mix; split by a predicate",  # found below
    *("the sum of all rows is taken off", "a LAZY capture writes live state"),
    *("a FULL graph froze a value in a dict", "a FULL graph froze a host value"),
    *("a FULL graph froze a value in a list", "metadata is in new memory"),
    *("the KV cache moves after the capture", "a compiler exchanges two results"),
    *("a global changed", "twelve residual layers in bfloat16", "a mean of 4096 numbers"),
    "an op in a piece reads how long the metadata is",
)
"""Faults that have the line of another one."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.what, marks=[pytest.mark.heavy] * (f.what in OF_A_KIND))
        for f in FAULTS
        if not f.compiler
    ],
)
def test_a_fault_is_named_and_nothing_else_is_blamed(fault):
    fault.check(find(fault, "eager"))


@pytest.mark.heavy
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_same_under_inductor(fault):
    fault.check(find(fault, "inductor"))


@pytest.fixture
def compiled_by(registered):
    """A case under a compiler of this test."""
    with site_for("eager") as site:
        yield lambda compiler: site.case(sizes=(8, 3, 5), compiler=registered(compiler))


def test_a_fault_at_a_size_that_no_step_has_is_found_by_the_sweep(compiled_by):
    finding = bisect(compiled_by(models.wrong_at_seven))
    assert (finding.stage, finding.step, finding.size) == ("compiler", None, 7)
    assert finding.piece is not None
    assert "no step has this size" in finding.line()
    assert "step=-" in finding.line()


def test_what_a_sweep_covered_is_said(compiled_by):
    said = []
    assert bisect(compiled_by(lambda graph, inputs: graph.forward), say=said.append) is None
    (covered,) = [line for line in said if "compared at" in line]
    assert covered.startswith("compiler: 2 of 2 pieces compared at 1, 2, 3, 4, 5, 7, 8, 11, 13")
    assert covered.endswith("31, 32")


def test_a_compiler_that_fails_on_a_piece_is_named_with_the_piece(compiled_by):
    finding = bisect(compiled_by(models.refuses_relu))
    assert (finding.stage, finding.piece) == ("compiler", 1)
    assert "no rule for relu" in finding.line()


def test_stages_before_a_wrong_one_are_right_however_the_graph_is_split():
    (by_predicate,) = (fault for fault in FAULTS if fault.what == "rows mix; split by a predicate")
    said = []
    by_predicate.check(find(by_predicate, "eager", said.append))
    assert said == ["traced graph: right", "split: right", "dedupe: right", "PIECEWISE: wrong"]


def test_the_users_cache_is_only_read(tmp_path):
    """Stand-in for Inductor: graphs kept in this process."""
    from piecegraph.compile.backends.registry import Compiler

    kept = {}

    def keep(graph, inputs, options):
        name = str(len(kept)).encode()
        kept[name] = lambda args: graph.forward(*args)
        return lambda: (kept[name], {"code": name})

    cache = tmp_path / "cache"
    with site_for("inductor") as site:
        fake = Compiler("inductor", keep, lambda artifacts: [kept[a["code"]] for a in artifacts])
        site.patch.setattr("piecegraph.compile.backends.registry.INDUCTOR", fake)
        site.patch.setattr("piecegraph.compile.backends.registry.inductor.compile_uncached", keep)
        assert bisect(site.case(cache_dir=cache)) is None
    assert not cache.exists()
