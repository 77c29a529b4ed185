"""Code of Inductor in programs that compile regions themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from piecegraph.torch_compat.compiling.regions import regions_through


def test_code_of_inductor_is_called_through_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    class Code:
        def __call__(self, args: list[int]) -> int:
            return sum(args.pop() for _ in range(len(args)))  # the code empties its list

    module = SimpleNamespace(CompiledFxGraph=Code)
    monkeypatch.setitem(sys.modules, "torch._inductor.output_code", module)
    seen: list[Any] = []

    def hook(code: Any) -> Any:
        def call(args: list[int]) -> int:
            seen.append(list(args))
            return int(code(args))

        return call

    args = [1, 2]
    with regions_through(hook):
        assert [Code()(args), Code()(args)] == [3, 3]
    assert seen == [[1, 2], [1, 2]]
    assert Code()(args) == 3
    assert args == []
