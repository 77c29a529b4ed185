"""Settings of torch that change generated code."""

from __future__ import annotations

import pytest
import torch

from piecegraph.torch_compat import settings


def test_changed_settings_are_those_that_shape_code() -> None:
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config

    before = settings.changed_settings()
    with (
        inductor_config.patch({"cpp.simdlen": 8, "trace.enabled": True, "compile_threads": 3}),
        dynamo_config.patch(verbose=True),
    ):
        changed = settings.changed_settings()
    assert {k: v for k, v in changed.items() if before.get(k) != v} == {
        "torch._inductor.config.cpp.simdlen": 8
    }


def test_switches_of_the_process_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.global_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert settings.global_state()["autocast"] == {"cpu": "torch.bfloat16"}
    torch.set_default_dtype(torch.float64)
    try:
        assert settings.global_state()["default_dtype"] == "torch.float64"
    finally:
        torch.set_default_dtype(torch.float32)
    assert settings.global_state() == before
