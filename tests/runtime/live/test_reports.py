"""Accidents that users of serving engines reported, replayed as they would meet them here.

Others are among the tests of what protects from them: docs/failures.md has a row for each.
"""

from __future__ import annotations

import pwd
from typing import ClassVar

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, RuntimeMode, prepare
from piecegraph.errors import ArgumentFixed, InputMismatch

from ..conftest import captured, small_config


def served(model, **settings):
    return captured(model, **{"compile": False, **settings})


class Deepstack(nn.Module):
    """Adds what an image request brings."""

    def forward(self, x, states):
        return sum(states.values(), x)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_sglang_33726_rows_of_an_image_are_added_or_refused(mode):
    inputs = dict.fromkeys(("x", "states.hidden"), "float32[num_tokens, 4]")
    way = {"compile": True, "compiler": "eager"} if mode == "PIECEWISE" else {}
    prepared = served(Deepstack(), inputs=inputs, graph_mode=mode, **way)
    x, hidden = torch.rand(2, 2, 4)
    text = prepared(x, {"hidden": hidden}, batch=Batch(2, 2))
    assert torch.equal(text, x + hidden)
    with pytest.raises(InputMismatch, match="'states' is a dict with 'hidden', 'deepstack_0'"):
        prepared(x, {"hidden": hidden, "deepstack_0": hidden}, batch=Batch(2, 2))


class IdsOrEmbeddings(nn.Module):
    def forward(self, x, embeddings=None):
        if (x is None) == (embeddings is None):
            raise ValueError("either, not both")
        return (x if embeddings is None else embeddings) * 2


def test_vllm_48648_a_call_of_the_other_form_names_the_argument():
    prepared, x = served(IdsOrEmbeddings()), torch.rand(2, 4)
    assert torch.equal(prepared(x, batch=Batch(2, 2)), x * 2)
    with pytest.raises(ArgumentFixed, match="'embeddings' is a tensor"):
        prepared(x, x, batch=Batch(2, 2))


class Workspace(nn.Module):
    """Uses memory that a library keeps for all models."""

    kept: ClassVar = {"memory": torch.ones(8, 4)}

    def forward(self, x):
        return x * self.kept["memory"][: x.size(0)]


def test_vllm_55341_graphs_keep_the_memory_that_grew_under_them_and_say_so():
    model = Workspace()
    prepared = served(model, capture_sizes=(2,))
    assert prepared.events.named("capture.unwatched")
    model.kept["memory"] = torch.ones(16, 4)  # a warm-up of the library needed more
    junk = [torch.full((8, 4), torch.nan) for _ in range(100)]
    for rows in (2, 8, 2):
        x = torch.rand(rows, 4)
        assert torch.equal(prepared(x, batch=Batch(rows, rows)), x)
    del junk


@pytest.mark.parametrize("query_len", [1, 2, 3])
@pytest.mark.parametrize("most", [3, 6, 7, 13, 40])
def test_ascend_16049_the_largest_batches_have_graphs_whatever_the_limit(most, query_len):
    inputs, variants = {"input": "float32[num_tokens, 4]"}, {"query_lens": (query_len,)}
    config = small_config(64, inputs=inputs, variants=variants, graph_mode="FULL_DECODE_ONLY")
    prepared = prepare(nn.Identity(), config.changed(compile=False, max_num_reqs=most))
    prepared.capture()
    for requests in range(1, min(most, 64 // query_len) + 1):
        batch = Batch(requests * query_len, requests, is_decode=True, query_len=query_len)
        assert prepared.dispatch(batch).mode is RuntimeMode.FULL


def test_vllm_44548_a_user_without_an_entry_and_a_home_can_start(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "USER", "LOGNAME", "PIECEGRAPH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(4, 4)
    inputs = {"input": "float32[num_tokens, 4]"}
    prepared = prepare(
        model, Config(inputs=inputs, compiler="eager", max_num_tokens=4, graph_mode="NONE")
    )
    (unusable,) = prepared.events.named("cache.unusable")
    assert "no home directory" in unusable.facts["reason"]
    assert prepared(torch.ones(2, 4), batch=Batch(2, 1)).shape == (2, 4)
