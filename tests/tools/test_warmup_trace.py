"""Warm-up of the reference engine does not change caches, tables or random state."""

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
def test_kv_contents_tables_and_random_state_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, Any] = {}
    make_tasks = run._warmup_tasks

    def fill_first(prepared: Any, model: Any, engine: Any) -> Any:
        for cache in engine.defragmenter._caches:
            cache.copy_(torch.rand_like(cache))
        engine.scheduler.blocks.grow(7, 40)
        before["caches"] = [cache.clone() for cache in engine.defragmenter._caches]
        before["blocks"] = (engine.scheduler.blocks.used, engine.scheduler.blocks.free_blocks)
        before["sampler"] = engine.sampler.generator.get_state()
        before["torch"] = torch.get_rng_state()
        return make_tasks(prepared, model, engine)

    monkeypatch.setattr(run, "_warmup_tasks", fill_first)
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
        caches = engine.defragmenter._caches
        for now, then in zip(caches, before["caches"], strict=True):
            assert torch.equal(now[1:], then[1:])  # all but the dump block, where padding writes
        blocks = engine.scheduler.blocks
        assert (blocks.used, blocks.free_blocks) == before["blocks"]
        assert torch.equal(engine.sampler.generator.get_state(), before["sampler"])
        assert torch.equal(torch.get_rng_state(), before["torch"])
        assert engine.log.steps == []
        done = [event.facts["shape"] for event in started.prepared.events.named("warmup")]
        assert started.prepared.ledger.bytes("KV cache") == sum(c.nbytes for c in caches)
    assert {"sampler 4", "defragmenter 32", "FULL 4", "PIECEWISE 1", "num_tokens 32"} <= set(done)
