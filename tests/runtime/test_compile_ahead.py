"""Whether `compile_ahead` has stored a bundle with libraries, and why not."""

import pytest
import torch

from piecegraph import Config, Events, compile_ahead
from piecegraph.compile import ahead
from piecegraph.runtime import compile_ahead as module
from tests.text_compiler import use_text_compiler
from tests.unkept import UNKEPT, settings_that_keep_nothing

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("kind", [*UNKEPT, ""])
def test_compile_ahead_says_whether_the_next_start_finds_it(kind, tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    monkeypatch.setattr(ahead, "build_library", lambda *_: b"library")
    monkeypatch.setattr(module, "_look_at_padding", lambda *_: None)
    given = settings_that_keep_nothing(kind, tmp_path, monkeypatch) if kind else {}
    inputs = {"input": "float32[num_tokens, 4]"}
    config = Config(inputs=inputs, max_num_tokens=16, compiler="text", cache_dir=tmp_path)
    events = Events()
    stored = compile_ahead(torch.nn.Softsign(), config.changed(**given), events=events)
    assert stored == (not kind)
    told = [*events.named("compile.library_failed"), *events.named("cache.publish_failed")]
    assert stored or UNKEPT[kind] in told[0].facts["reason"]
    assert (events.counters["library_compiles"] > 0) == (kind in ("full", ""))
