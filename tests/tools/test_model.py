"""The reference decoder: what the seed fixes, and that it is one graph for every token count."""

import pytest
import torch

from piecegraph import BatchDescriptor, ForwardContext, RuntimeMode, forward_context
from piecegraph.tools.engine.decoder_config import DecoderConfig
from piecegraph.tools.engine.model import Decoder, rotary_table, rotate

CONFIG = DecoderConfig(3, 16, 4, 2, 24, 50, max_positions=64)


def test_the_seed_fixes_the_weights():
    one, same, other = (Decoder(CONFIG, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_no_parameter_asks_for_a_gradient():
    assert not any(parameter.requires_grad for parameter in Decoder(CONFIG, seed=0).parameters())


def test_rotary_embedding_turns_pairs_by_the_position():
    cos, sin = rotary_table(CONFIG)
    x = torch.randn(5, 1, 4)
    positions = torch.tensor([0, 1, 2, 7, 63])
    turned = rotate(x, cos[positions][:, None], sin[positions][:, None])
    as_complex = torch.complex(x[..., :2].double(), x[..., 2:].double())
    frequency = torch.tensor([1.0, CONFIG.rope_theta**-0.5], dtype=torch.float64)
    angle = positions[:, None, None] * frequency
    expected = as_complex * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(turned[..., :2], expected.real.float())
    torch.testing.assert_close(turned[..., 2:], expected.imag.float())


def test_logits_are_a_head_over_chosen_rows():
    model = Decoder(CONFIG, seed=0)
    hidden = torch.randn(6, 16)
    torch.testing.assert_close(model.logits(hidden[[5]])[0], hidden[5] @ model.head.weight.T)


@pytest.mark.compile
def test_dynamo_traces_one_graph_for_every_token_count(make_world):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    world = make_world()
    traced = torch.compile(world.model, fullgraph=True, backend=keep)
    for num_tokens in (5, 7, 2):
        ids = torch.arange(num_tokens)
        positions = torch.arange(num_tokens)
        for tensor in (ids, positions):
            torch._dynamo.mark_dynamic(tensor, 0)
        metadata = world.buffers.padding(BatchDescriptor(num_tokens), RuntimeMode.NONE)
        with forward_context(ForwardContext(world.layers, metadata)):
            hidden = traced(ids, positions)
            assert torch.equal(hidden, world.model(ids, positions))
    calls = [node for node in graphs[0].graph.nodes if "paged_attention" in str(node.target)]
    assert len(graphs) == 1
    assert [node.args[-1] for node in calls] == world.model.layer_names
