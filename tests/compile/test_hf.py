"""Hugging Face models through the adapter: equal to their own eager attention."""

from __future__ import annotations

import copy

import pytest
import torch

from piecegraph import ForwardContext, forward_context
from piecegraph.errors import MissingMetadata, TraceFailed

transformers = pytest.importorskip("transformers")

from piecegraph.tools.integrations.transformers import (  # noqa: E402
    INPUTS,
    SPLITTING_OP,
    PackedModel,
    PackedRequests,
    adapt,
    attend_packed,
)

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

SIZES = (1, 2, 3, 7, 64, 256)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = {"sliding_window": 16, "query_pre_attn_scalar": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = {
    "llama": lambda t: t.LlamaConfig(**SMALL, **GROUPED),
    "qwen3": lambda t: t.Qwen3Config(**SMALL, **GROUPED),
    "gemma2": lambda t: t.Gemma2Config(**SMALL, **GROUPED, **WINDOW),
    "mixtral": lambda t: t.MixtralConfig(**SMALL, **GROUPED, **EXPERTS),
    "bert": lambda t: t.BertConfig(**SMALL),
}


def make(config):
    torch.manual_seed(0)
    settings = {"add_pooling_layer": False} if config.model_type == "bert" else {}
    model = transformers.AutoModel.from_config(config, attn_implementation="eager", **settings)
    return model.eval().requires_grad_(False)


def step(function, *args, query_lens, layers=None):
    with forward_context(ForwardContext(layers or {}, PackedRequests(query_lens))):
        return function(*args)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_its_own_attention(compiled, family, compiler):
    own = make(FAMILIES[family](transformers))
    model = PackedModel(copy.deepcopy(own))
    settings = {"inputs": INPUTS, "splitting_ops": (SPLITTING_OP,), "max_num_tokens": 256}
    made = compiled(model, compiler=compiler, **settings)
    assert len(made.plan.piece_uses()) == 4
    assert len(made.plan.pieces) == 3
    for size in SIZES:
        ids, positions = torch.randint(64, (size,)), torch.arange(size)
        expected = own(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0][0]
        actual = step(made, ids, positions, query_lens=(size,))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "bert"])
def test_packed_requests_do_not_see_each_other(family):
    own = make(FAMILIES[family](transformers))
    model = PackedModel(copy.deepcopy(own))
    lengths = (3, 1, 20)
    ids = torch.randint(64, (sum(lengths),))
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = step(model, ids, positions, query_lens=lengths)
    for one, place, result in zip(
        ids.split(lengths), positions.split(lengths), packed.split(lengths), strict=True
    ):
        expected = own(input_ids=one[None], position_ids=place[None], use_cache=False)[0][0]
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_unknown_attention_argument_is_rejected_not_swallowed(compiled):
    config = transformers.GptOssConfig(**SMALL, **GROUPED, **EXPERTS, rope_parameters=None)
    with pytest.raises(TraceFailed, match="attention with s_aux") as caught:
        compiled(PackedModel(make(config)), inputs=INPUTS, splitting_ops=(SPLITTING_OP,))
    assert "transformers.py" in caught.value.where


def test_model_is_compiled_with_its_own_inputs(compiled):
    """(1, T) inputs, a decorated forward with keyword arguments, a ModelOutput."""
    own = make(FAMILIES["llama"](transformers))
    model = adapt(copy.deepcopy(own))
    arguments = {"input_ids": torch.arange(5)[None], "position_ids": torch.arange(5)[None]}
    inputs = {"input_ids": "int64[1, num_tokens]", "position_ids": "int64[1, num_tokens]"}
    made = compiled(model, examples=((), arguments), inputs=inputs, splitting_ops=(SPLITTING_OP,))
    ids, positions = torch.randint(64, (1, 7)), torch.arange(7)[None]
    with forward_context(ForwardContext({}, PackedRequests((7,)))):
        result = made(input_ids=ids, position_ids=positions)
    expected = own(input_ids=ids, position_ids=positions, use_cache=False)
    assert type(result) is type(expected)
    torch.testing.assert_close(result.last_hidden_state, expected.last_hidden_state)


def test_layers_of_the_engine_replace_the_default_attention():
    model = PackedModel(make(FAMILIES["llama"](transformers)))
    seen = []

    def layer(query, key, value, output, rule, metadata):
        seen.append((tuple(query.shape), tuple(key.shape), rule.causal))
        attend_packed(query, key, value, output, rule, metadata)

    layers = {"layers.1.self_attn": layer}
    step(model, torch.arange(5), torch.arange(5), query_lens=(3,), layers=layers)
    assert seen == [((5, 4, 8), (5, 2, 8), True)]


def test_step_without_metadata_is_refused():
    model = PackedModel(make(FAMILIES["llama"](transformers)))
    with forward_context(ForwardContext({})), pytest.raises(MissingMetadata):
        model(torch.arange(3), torch.arange(3))
