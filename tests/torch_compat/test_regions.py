"""Code of Inductor in programs that compile regions themselves."""

import sys
from types import SimpleNamespace

import pytest
import torch

from piecegraph.torch_compat.compiling.regions import regions_noted, regions_through


def test_code_of_inductor_is_called_through_a_hook(monkeypatch):
    class Code:
        def __call__(self, args):
            return sum(args.pop() for _ in range(len(args)))  # the code empties its list

    module = SimpleNamespace(CompiledFxGraph=Code)
    monkeypatch.setitem(sys.modules, "torch._inductor.output_code", module)
    seen = []

    def hook(code):
        def call(args):
            seen.append(list(args))
            return int(code(args))

        return call

    args = [1, 2]
    with regions_through(hook):
        assert [Code()(args), Code()(args)] == [3, 3]
    assert seen == [[1, 2], [1, 2]]
    assert Code()(args) == 3
    assert args == []


@pytest.mark.compile
def test_a_region_that_a_program_enters_is_noted():
    region = torch.compile(lambda x: x + 1, backend="eager")
    region(torch.ones(1))
    entered = []
    with regions_noted(lambda: entered.append(None)):
        assert region(torch.ones(1)).tolist() == [2.0]
        assert len(entered) == 1
        torch.ones(1) + 1
        assert len(entered) == 1
    region(torch.ones(1))
    assert len(entered) == 1
