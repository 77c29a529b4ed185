"""Bisect finds the injected fault, one at each stage."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from piecegraph.errors import InvalidSetting
from piecegraph.tools.bisect import bisect
from piecegraph.tools.bisect.case import first_wrong
from piecegraph.tools.bisect.culprit import PieceSearch
from piecegraph.tools.bisect.rerun import Rerun
from piecegraph.tools.bisect.stages import stages

from . import faulty_models as models
from .planted_faults import site_for

pytestmark = pytest.mark.compile


@pytest.fixture
def case():
    """Makes steps of given sizes; in each the rows go to the slots from the end backwards."""
    with site_for("eager") as site:
        yield partial(site.case, sizes=(8, 3, 5))


@pytest.fixture
def found():
    """`found(case)` bisects and gives the finding and its line."""

    def find(it, **options):
        finding = bisect(it, **options)
        return finding, finding.line()

    return find


@pytest.fixture
def wrong_pass(registered):
    return registered(models.wrong_activations)


def test_a_model_that_is_right_gives_no_finding(case):
    said = []
    assert bisect(case(), say=said.append) is None
    assert said == [
        "traced graph: right",
        "split: right",
        "dedupe: right",
        "PIECEWISE: right",
        "FULL: right",
    ]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"compile": False}, []),
        ({"compile": False, "graph_mode": "FULL"}, ["PIECEWISE", "FULL"]),
        ({"graph_mode": "NONE"}, ["traced graph", "split", "dedupe"]),
        ({"graph_mode": "PIECEWISE"}, ["traced graph", "split", "dedupe", "PIECEWISE"]),
        ({"level": 1, "splitting_ops": ()}, ["traced graph", "FULL"]),
        ({"level": 1}, ["traced graph", "split", "dedupe", "PIECEWISE"]),
        (
            {"compiler": "inductor", "codegen": {"partition": "inductor"}, "level": 1},
            ["traced graph", "split", "dedupe", "compiler", "partitions", "PIECEWISE"],
        ),
    ],
)
def test_a_stage_is_there_only_if_something_is_new_in_it(small_config, settings, names):
    config = small_config(**{"splitting_ops": ("faulty::attention",), **settings})
    assert [stage.name for stage in stages(config)] == names


def test_no_stage_is_not_called_right(case):
    with pytest.raises(InvalidSetting, match="graphs are off as well"):
        bisect(case(compile=False, graph_mode="NONE"))


def test_another_number_of_tensors_is_wrong():
    one = torch.ones(2)
    assert first_wrong([one, one], [one, one]) is None
    assert first_wrong([one, one], [one]).tensor == 1
    assert first_wrong([], [one]).tensor == 0
    assert first_wrong([one, one], [one * 2]).tensor == 0


def test_the_first_wrong_element_is_one_that_rounding_does_not_explain():
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = expected.clone()
    got[0, 1] += 1e-4  # which the model's own rounding makes in this row
    got[1, 0] = torch.nan

    def rounded():
        noisy = expected.clone()
        noisy[0] += torch.rand(1) * 1e-4 + 1e-4
        return [noisy]

    assert first_wrong([expected], [got]).element == (0, 1)
    assert first_wrong([expected], [got], run=rounded).element == (1, 0)
    assert first_wrong([expected], [got], tolerance=1e-2).element == (1, 0)
    assert first_wrong([expected[0]], [got[0]], run=lambda: [rounded()[0][0]]) is None


def test_a_wrong_pass_is_found_down_to_the_operator_and_its_line(case, found, wrong_pass):
    """The state is as before then."""
    it = case(compiler=wrong_pass)
    cache = it.layers["layer"].cache
    finding, line = found(it)
    assert (finding.stage, finding.piece, finding.size) == ("compiler", 1, 8)
    assert finding.operator.startswith("relu (faulty_models.py:")
    assert finding.wrong.expected == -1 < finding.wrong.got
    assert "first wrong: output 0 [" in line
    assert "\n" not in line
    assert it.layers["layer"].cache is cache
    assert not cache.any()


def test_a_wrong_pass_is_found_in_the_interval_of_the_step(case, found, wrong_pass):
    """The pieces of another trace are others, and the activation is in one of them."""
    it = case(models.Chooses(), sizes=(8, 3), compiler=wrong_pass, tracing={"guards": "split"})
    finding, _ = found(it)
    assert (finding.stage, finding.step, finding.piece) == ("compiler", 1, 1)
    assert finding.operator.startswith("relu (faulty_models.py:")


def test_a_piece_that_is_right_by_itself_blames_no_operator(case, found, registered):
    """What a bare allocation holds is no result: it cannot be wrong or be the cause."""
    finding, line = found(case(compiler=registered(models.WrongOnce(times=2))))
    assert (finding.stage, finding.piece, finding.operator) == ("compiler", 0, None)
    assert "compiled by itself it is right" in line


def fails(*args, **kwargs):
    raise RuntimeError("the search cannot go on")


@pytest.mark.parametrize(
    "search", ["find", pytest.param("inputs_of", marks=pytest.mark.heavy), "__init__"]
)
def test_a_search_that_fails_loses_nothing_of_what_was_found(
    case, found, wrong_pass, monkeypatch, search
):
    monkeypatch.setattr(PieceSearch, search, fails)
    finding, line = found(case(compiler=wrong_pass))
    assert (finding.stage, finding.piece, finding.operator) == ("compiler", 1, None)
    assert line.endswith("; search failed: RuntimeError: the search cannot go on")


def test_a_sweep_that_fails_is_said(case, monkeypatch, registered):
    monkeypatch.setattr(PieceSearch, "__init__", fails)
    said = []
    right = registered(lambda graph, inputs: graph.forward)
    assert bisect(case(compiler=right), say=said.append) is None
    (failed,) = [line for line in said if "search failed" in line]
    assert failed.startswith("compiler: no other sizes compared, search failed: RuntimeError")


def test_a_size_is_named_without_the_operator_if_its_search_fails(
    case, found, monkeypatch, registered
):
    monkeypatch.setattr(PieceSearch, "find_in", fails)
    finding, line = found(case(compiler=registered(models.wrong_at_seven)))
    assert (finding.stage, finding.size, finding.operator) == ("compiler", 7, None)
    assert "no step has this size" in line
    assert "search failed" in line


def test_causes_of_a_wrong_graph_that_cannot_be_found_are_said(case, found, monkeypatch):
    monkeypatch.setattr(Rerun, "graph", fails)
    _, line = found(case(models.Counted(), sizes=(3, 5)))
    assert line.endswith("search failed: RuntimeError: the search cannot go on")


def test_a_piece_with_an_op_that_reads_the_context_of_its_step(case, found):
    finding, line = found(case(models.Counted(), sizes=(3, 5)))
    assert (finding.stage, finding.piece) == ("PIECEWISE", 0), line


def run_here(script, capsys):
    """The exit status and the output of a program that runs in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code, capsys.readouterr().out


def run_alone(script, _):
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("run", [run_here, pytest.param(run_alone, marks=pytest.mark.heavy)])
def test_the_script_fails_as_long_as_the_number_is_wrong(
    case, found, tmp_path, capsys, monkeypatch, run
):
    """Its folders are those that this process imports from."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    script = tmp_path / "wrong.py"
    _, line = found(case(models.Branching(), tracing={"guards": "drop"}), script=script)
    status, said = run(script, capsys)
    assert (status, said.strip()) == (1, line)
    assert line in script.read_text()


def test_what_cannot_be_pickled_is_said(case, wrong_pass, tmp_path):
    said = []
    it = case(compiler=wrong_pass)
    it.model.hidden = lambda: None
    finding = bisect(it, script=tmp_path / "wrong.py", say=said.append)
    assert finding is not None
    assert said[-1].startswith("no script: ")
