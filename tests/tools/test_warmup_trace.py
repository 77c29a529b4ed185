"""Warm-up of the reference engine does not change caches or random state."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from piecegraph.tools.serve import run
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.requests import read_requests


@pytest.mark.compile
def test_kv_contents_and_random_state_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    make, make_task = run.prepare, run._sampling_task

    def caches() -> list[torch.Tensor]:
        return [part for layer in layers.values() for part in (layer.keys, layer.values)]

    def prepare(*args: Any, **kwargs: Any) -> Any:
        layers.update(kwargs["layers"])
        return make(*args, **kwargs)

    def fill_first(prepared: Any, model: Any) -> Any:
        for cache in caches():
            cache.copy_(torch.rand_like(cache))
        before["caches"] = [cache.clone() for cache in caches()]
        before["torch"] = torch.get_rng_state()
        return make_task(prepared, model)

    monkeypatch.setattr(run, "prepare", prepare)
    monkeypatch.setattr(run, "_sampling_task", fill_first)
    options = read_run_options(
        model="layers=2,hidden=32,heads=2,kv_heads=1",
        requests=4,
        length_scale=0.2,
        capture_sizes="1,4",
        max_num_tokens=32,
        max_num_reqs=4,
        backend="eager",
        no_cache=True,
        verify="none",
    )
    requests = read_requests(options)
    with run.start_service(options, requests, [], Console(file=io.StringIO())) as started:
        engine = started.engine
        for now, then in zip(caches(), before["caches"], strict=True):
            assert torch.equal(now[1:], then[1:])  # all but the dump block, where padding writes
        assert torch.equal(torch.get_rng_state(), before["torch"])
        assert engine.log.steps == []
        done = [event.facts["shape"] for event in started.prepared.events.named("warmup")]
        assert started.prepared.parts.strategies.ledger.bytes("KV cache") == sum(
            c.nbytes for c in caches()
        )
    assert {"sampler 4", "FULL 4", "PIECEWISE 1", "num_tokens 32"} <= set(done)
