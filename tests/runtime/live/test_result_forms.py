"""An op that returns another form than its fake kernel said, memory that it was given, or that
writes what its schema does not say, is an error by name, in every mode."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from piecegraph import Batch, Events, prepare
from piecegraph.compile.plan.result_forms import checked_link
from piecegraph.errors import AllCapturesFailed, ResultNotAsTraced

from ..conftest import right_step, small_config

LIES = {
    "wider": (lambda x: (x + 1).double(), r"float64\[\d, 4\].* told the trace float32\[\d, 4\]"),
    "narrower": (lambda x: (x + 1).half(), r"float16\[\d, 4\].* told the trace float32\[\d, 4\]"),
    "columns": (lambda x: (x + 1)[:, :3].clone(), r"float32\[\d, 3\].* told .* float32\[\d, 4\]"),
    "strides": (lambda x: (x + 1).t().contiguous().t(), r"strides \[1, \d\].* told .* \[4, 1\]"),
    "one size": (lambda x: (x + 1).double() if len(x) == 3 else x + 1, r"float64\[3, 4\]"),
}
BEHIND_THE_SCHEMA = {
    "writes": (lambda x: x.add_(1).clone(), "wrote to an argument, but its schema"),
    "returns its argument": (lambda x: x, "returned memory that it was given"),
    "returns a part of it": (lambda x: x[:], "returned memory that it was given"),
}
OP = {"op": torch.clone}


def told(x):
    return torch.empty_like(x)


@pytest.fixture(scope="module", autouse=True)
def op(temporary_op):
    temporary_op("told_tests::op", "(Tensor x) -> Tensor", lambda x: OP["op"](x), told)


class Model(nn.Module):
    def forward(self, x):
        return torch.ops.told_tests.op(x + 1) * 2


def config(mode, **settings):
    config = small_config(16, splitting_ops=("told_tests::op",), graph_mode=mode)
    return config.changed(**{"capture_sizes": (3,), **settings})


def serves(rows=3, layers=None):
    """In graphs, with the operator's own results."""
    settings = config("PIECEWISE", capture_sizes=(rows,))
    prepared = prepare(Model(), settings, layers=layers)
    prepared.capture()
    for _ in range(2):
        mode = right_step(prepared, lambda x: x * 2 + 2, torch.rand(rows, 4))
        assert mode == "PIECEWISE"


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("lie", LIES)
def test_pytorch_182328_a_splitting_op_is_held_to_its_fake_kernel(monkeypatch, mode, lie):
    fn, words = LIES[lie]
    prepared = prepare(Model(), config(mode))
    x = torch.rand(3, 4)
    if mode == "NONE":
        prepared(x[:2], batch=Batch(2, 2))
    monkeypatch.setitem(OP, "op", fn)
    fake = f"test_result_forms.py:{told.__code__.co_firstlineno}"
    run = partial(prepared, x, batch=Batch(3, 3)) if mode == "NONE" else prepared.capture
    for _ in range(2):
        with pytest.raises((ResultNotAsTraced, AllCapturesFailed), match=words) as caught:
            run()
        assert "told_tests::op returned" in str(caught.value)
        assert fake in str(caught.value)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_each_capture_compares_what_splitting_ops_return(monkeypatch, mode):
    """Not only the first one of a kind, whose ops are all looked at."""
    monkeypatch.setitem(OP, "op", LIES["one size"][0])
    events = Events()
    prepare(Model(), config(mode, capture_sizes=(3, 6)), events=events).capture()
    (failed,) = (event.facts for event in events.events if event.name == "capture.failed")
    assert failed["num_tokens"] == 3
    assert "float64[3, 4]" in failed["reason"]


def test_what_is_as_told_serves(monkeypatch):
    """A dimension of one element has any stride."""
    monkeypatch.setitem(OP, "op", lambda x: x.t().contiguous().t())
    serves(rows=1)


@pytest.mark.parametrize("mode", ["NONE", "FULL"])
@pytest.mark.parametrize("lie", ["wider", "columns", *BEHIND_THE_SCHEMA])
def test_an_op_in_a_piece_is_held_to_its_fake_kernel_and_schema(monkeypatch, mode, lie):
    """In `prepare`, where pieces run with padding; also where no graph is captured."""
    fn, words = {**LIES, **BEHIND_THE_SCHEMA}[lie]
    monkeypatch.setitem(OP, "op", fn)
    run = partial(prepare, Model(), config(mode, splitting_ops=()))
    if mode == "NONE":
        run = partial(run(), torch.rand(3, 4), batch=Batch(3, 3))
    with pytest.raises(ResultNotAsTraced, match=f"told_tests::op .*{words}"):
        run()


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_a_splitting_op_is_held_to_what_its_schema_says_of_writes(monkeypatch, mode):
    """A capture restores what a model is known to write: captures counted in a buffer."""
    monkeypatch.setitem(OP, "op", BEHIND_THE_SCHEMA["writes"][0])
    prepared = prepare(Model(), config(mode))
    step = partial(prepared, torch.rand(3, 4), batch=Batch(3, 3))
    with pytest.raises((ResultNotAsTraced, AllCapturesFailed), match="wrote to an argument"):
        (step if mode == "NONE" else prepared.capture)()


def test_a_cache_that_an_op_reaches_by_name_may_be_of_any_size(monkeypatch):
    """Of one above 64 KiB writes are compared that torch counts, but not below a mode."""
    layer = SimpleNamespace(cache=torch.zeros(1 << 15))
    monkeypatch.setitem(OP, "op", lambda x: x.clone() + 0 * layer.cache.add_(1)[0])
    serves(layers={"attention": layer})


def test_a_splitting_op_may_return_its_argument(monkeypatch):
    """No compiled code holds both."""
    monkeypatch.setitem(OP, "op", lambda x: x)
    serves()


def test_an_assertion_of_compiled_code_names_the_op_and_its_line():
    compiled = prepare(Model(), config("NONE", splitting_ops=())).compiled

    def failing(arguments):
        raise AssertionError("expected size 3==4\nError in op: torch.ops.told_tests.op.default\n")

    broken = replace(compiled, pieces=(failing,))
    line = Model.forward.__code__.co_firstlineno + 1
    words = rf"told_tests::op returned expected size 3==4.*test_result_forms.py:{line}"
    with pytest.raises(ResultNotAsTraced, match=words):
        checked_link(broken)(torch.rand(3, 4))
