"""Everything but the time is the same with PIECEGRAPH_OFF=faster."""

import logging

import pytest
import torch

from piecegraph.compile.speedups import are_on, generating_code
from piecegraph.torch_compat.tracing.dynamo import capture_full_graph
from tests.text_compiler import use_text_compiler

from .models import MIX, Stack
from .starts import start

X = torch.randn(3, 8)


@pytest.fixture(autouse=True)
def text_compiler(monkeypatch):
    use_text_compiler(monkeypatch)
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)


@pytest.mark.parametrize("parts", ["faster", " graphs, faster"])
def test_the_environment_turns_them_off(parts, monkeypatch):
    from torch._inductor import codecache

    def is_replaced():
        before = codecache.torch_key
        with generating_code():
            return codecache.torch_key is not before

    assert are_on()
    assert is_replaced()
    monkeypatch.setenv("PIECEGRAPH_OFF", parts)
    assert not are_on()
    assert not is_replaced()


@pytest.mark.compile
def test_a_bundle_traced_with_them_is_not_used_but_its_code_is(tmp_path, monkeypatch):
    model = Stack()
    first = start(model, tmp_path, splitting_ops=MIX)
    assert start(model, tmp_path, splitting_ops=MIX).hit
    monkeypatch.setenv("PIECEGRAPH_OFF", "faster")
    without = start(model, tmp_path, splitting_ops=MIX)
    assert not without.hit
    assert without.events.counters["text_compiles"] == 0
    assert without.events.counters["equal_modules"] == 0
    assert torch.equal(without(X), first(X))


@pytest.mark.compile
def test_a_failing_trace_with_copies_is_a_warning(tmp_path, monkeypatch, caplog):
    from piecegraph.torch_compat.faster.equal_layers import trace_with_copies as entry

    def fail(*args):
        return entry.TraceWithCopies(capture_full_graph(*args), 0, {}, {"Stack": "KeyError: 'x'"})

    monkeypatch.setattr(entry, "trace_with_copies", fail)
    with caplog.at_level(logging.WARNING, "piecegraph"):
        start(Stack(), tmp_path, splitting_ops=MIX)
    assert "copies_failed module=Stack reason=KeyError: 'x'" in caplog.text
