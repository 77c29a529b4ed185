"""Graphs of several modes, chosen for each batch.

From vLLM's CUDA graph modes and dispatcher, SGLang's graph runner, breakable-cuda-graphs.
"""

import pytest
import torch

import piecegraph as pg
from piecegraph.errors import MovedTensor

from .conftest import HIDDEN, mode_of

MODES = {
    "NONE": ("NONE 3", "NONE 3"),
    "PIECEWISE": ("PIECEWISE 4", "PIECEWISE 4"),
    "FULL_DECODE_ONLY": ("FULL 4", "NONE 3"),
    "FULL_AND_PIECEWISE": ("FULL 4", "PIECEWISE 4"),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_says_what_decodes_and_what_mixed_batches_use(prepare, mode):
    """vLLM: `cudagraph_mode`."""
    prepared = prepare(graph_mode=mode)
    if mode != "NONE":
        prepared.capture(None)
    assert (mode_of(prepared, 3, True), mode_of(prepared, 3, False)) == MODES[mode]


def test_full_graphs_of_mixed_batches_where_attention_allows(prepare):
    """vLLM: `AttentionCGSupport.ALWAYS`."""
    prepared = prepare(graph_mode="FULL", attention={"support": "ALWAYS"})
    prepared.capture(None)
    assert mode_of(prepared, 3, False) == "FULL 4"


def test_a_model_that_is_not_traced_breaks_its_graphs(prepare):
    """breakable-cuda-graphs, SGLang: graphs without a compiler."""
    prepared = prepare(compile=False, graph_mode="PIECEWISE")
    prepared.capture(None)
    assert mode_of(prepared, 3, False) == "PIECEWISE 4"


def test_lora_cases_have_graphs_of_their_own(prepare):
    """vLLM: `cudagraph_specialize_lora`."""
    prepared = prepare(variants={"max_loras": 2, "lora_graphs": "by_count"})
    entries = prepared.dispatcher.plan.entries
    assert {entry.descriptor.lora_case for entry in entries} >= {0, 2}


def test_speculative_decodes_of_several_tokens_are_uniform(prepare):
    """vLLM: `uniform_decode_query_len`."""
    prepared = prepare(attention={"support": "UNIFORM_BATCH"}, variants={"query_lens": 2})
    prepared.capture(None)
    batch = pg.Batch(4, 2, is_decode=True, query_len=2)
    assert prepared.dispatch(batch).mode.name == "FULL"


def test_a_decision_says_why(prepare):
    """piecegraph: each dispatch has a reason."""
    prepared = prepare()
    prepared.capture(None)
    assert prepared.dispatch(pg.Batch(16, 1)).reason is not None


def test_a_weight_that_moved_is_an_error_by_name(prepare):
    """vLLM: `CUDAGraphWrapper` checks input addresses in debug mode; here all, always."""
    prepared = prepare()
    prepared.capture(None)
    model = prepared.compiled.model
    model.layers[0].weight = torch.nn.Parameter(model.layers[0].weight.clone(), False)
    with pytest.raises(MovedTensor, match=r"layers\.0\.weight"):
        prepared(torch.rand(3, HIDDEN), batch=pg.Batch(3, 3, is_decode=True, query_len=1))


def test_graphs_are_released_and_captured_again(prepare):
    """vLLM: sleep mode."""
    prepared = prepare()
    prepared.capture(None)
    prepared.release()
    assert mode_of(prepared, 3, True) == "NONE 3"
    prepared.capture(None)
    assert mode_of(prepared, 3, True) == "FULL 4"
