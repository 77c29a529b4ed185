"""`trace_with_copies`: what fails with copies is traced without."""

from __future__ import annotations

from typing import Any

import pytest

from .test_equal_modules import Stack, captured


@pytest.mark.parametrize("name", ["_Regions._copied", "PassedConstant.as_proxy"])
def test_what_fails_with_copies_is_traced_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piecegraph.torch_compat.faster.equal_layers import equal_modules

    kind, _, method = name.partition(".")
    owner: Any = getattr(equal_modules, kind)
    original = getattr(owner, method)

    def fail(self: Any, *args: Any) -> Any:
        original(self, *args)
        raise RuntimeError("no copies here")

    monkeypatch.setattr(owner, method, fail)
    _, trace = captured(Stack())
    assert trace.copied == 0
    assert trace.failure == "RuntimeError: no copies here"
