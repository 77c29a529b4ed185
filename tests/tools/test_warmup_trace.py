"""Warm-up of the reference engine does not change caches or random state."""

import pytest
import torch

from piecegraph.tools.serve import run

from .conftest import started


@pytest.mark.compile
def test_kv_contents_and_random_state_are_as_before(monkeypatch):
    before = {}
    layers = {}
    make, make_tasks = run.prepare, run._warmup_tasks

    def caches():
        return [part for layer in layers.values() for part in (layer.keys, layer.values)]

    def prepare(*args, **kwargs):
        layers.update(kwargs["layers"])
        return make(*args, **kwargs)

    def fill_first(engine, model):
        for cache in caches():
            cache.copy_(torch.rand_like(cache))
        before["caches"] = [cache.clone() for cache in caches()]
        before["torch"] = torch.get_rng_state()
        return make_tasks(engine, model)

    monkeypatch.setattr(run, "prepare", prepare)
    monkeypatch.setattr(run, "_warmup_tasks", fill_first)
    options = {"max_num_tokens": 32, "max_num_reqs": 4, "capture_sizes": "1,4"}
    with started(model="layers=2,hidden=32,heads=2,kv_heads=1", defragment=32, **options) as it:
        engine, prepared = it.service.engine, it.service.prepared
        for now, then in zip(caches(), before["caches"], strict=True):
            assert torch.equal(now[1:], then[1:])  # all but the dump block, where padding writes
        assert torch.equal(torch.get_rng_state(), before["torch"])
        assert engine.log.steps == []
        done = [
            (event.facts["kind"], event.facts["shape"]) for event in prepared.events.named("warmup")
        ]
        phases = [span.name for span in prepared.events.phases]
        assert prepared.parts.strategies.ledger.bytes("KV cache") == sum(c.nbytes for c in caches())
    assert [shape for kind, shape in done if kind == "sampler"] == ["0", "1", "4"]
    swaps = [shape for kind, shape in done if kind == "defragmenter"]
    assert swaps == ["8", "16", "32", "64", "128", "256", "512", "8"]
    assert {("capture", "FULL 4"), ("capture", "PIECEWISE 1"), ("range", "num_tokens 32")} < {*done}
    assert phases[-4:] == ["warmup.range", "capture", "warmup.sampler", "warmup.defragmenter"]
