"""What a trace ran through: functions, calls that became constants, what was absent."""

import math
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from piecegraph.torch_compat.tracing.dynamo import capture_full_graph, dynamo_tracing
from piecegraph.torch_compat.tracing.inlined import inlined_calls


class Options:
    pass


class Fallback(torch.nn.Module):
    def __getattr__(self, name):
        return 2.0 if name == "answered" else super().__getattr__(name)


class Passed(Fallback):
    pass


class Last(Passed):
    def __getattr__(self, name):
        return super().__getattr__(name)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.options, self.last = Options(), Last()

    def forward(self, x):
        x = scaled(x) * self.last.answered + len(os.environ.get("PIECEGRAPH_TEST_VARIABLE", ""))
        try:
            return x * self.options.gain  # here
        except AttributeError:
            x = x + max([1, 2], key=holding(lambda value: -value))
            x = x + sorted([1, 2], key=partial(lambda one, value: value, 1))[0]  # Dynamo calls it
            return x + sys.getrecursionlimit() + max([1, 2], key=negative)


def holding(inner):
    return lambda value: inner(value)


def negative(value):
    return -value


def scaled(x):
    return x * math.sqrt(4.0)


@pytest.fixture(scope="module")
def inlined():
    with dynamo_tracing("backed"):
        captured = capture_full_graph(Model(), (torch.zeros(2),), {})
    return captured.inlined


def test_functions_and_variables_are_recorded(inlined):
    assert scaled in inlined.functions.values()
    assert inlined.variables == {"PIECEGRAPH_TEST_VARIABLE"}
    assert not inlined.obstacles


def test_what_was_absent_is_recorded_as_a_guard(inlined):
    probes = {(each.expression, each.argument): each for each in inlined.facts}
    probe = probes["L['self'].options", "gain"]
    assert probe.kind == "HASATTR"
    line = int(str(probe.where).rpartition(":")[2])
    assert "# here" in Path(__file__).read_text().splitlines()[line - 1]
    assert not inlined.class_reads


def test_what_a_fallback_answered_is_recorded(inlined):
    facts = [(each.expression, each.argument) for each in inlined.facts if each.kind == "FALLBACK"]
    assert ("L['self']", "last") in facts  # by `nn.Module`
    assert any("last" in expression and name == "answered" for expression, name in facts)


def test_a_class_that_super_passes_is_recorded(inlined):
    passed = [each for each in inlined.facts if each.kind == "NOT_PRESENT_IN_GENERIC_DICT"]
    found = {(each.expression.partition(".__mro__")[2], each.argument) for each in passed}
    assert found == {("[1]", "__getattr__")}


def test_calls_that_became_constants_are_recorded(inlined):
    assert [(c.function, c.arguments) for c in inlined.results] == [(sys.getrecursionlimit, ())]


def test_a_function_that_a_builtin_calls_is_recorded(inlined):
    called = [each.expression for each in inlined.facts if each.kind == "CALLED"]
    assert called == ["G['negative']"]
    made = {code.co_qualname for code in inlined.called}
    assert made == {"Model.forward.<locals>.<lambda>", "holding.<locals>.<lambda>"}
    assert {code.co_argcount for code in inlined.called} == {1}


def test_nothing_stays_replaced():
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    before = InstructionTranslatorBase.exception_handler
    with inlined_calls():
        assert InstructionTranslatorBase.exception_handler is not before
    assert InstructionTranslatorBase.exception_handler is before
