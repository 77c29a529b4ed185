"""Graphs as data for other processes."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from piecegraph.torch_compat.basics.symbolic import number_of_guards, shape_guards
from piecegraph.torch_compat.basics.tensors import fresh_fake_mode
from piecegraph.torch_compat.compiling.piece_data import (
    NotData,
    dump_piece,
    dump_plain,
    inputs_mode,
    load_piece,
)

pytestmark = pytest.mark.compile


def plus_one(x):
    return x + 1


def piece(function, *tensors):
    """A graph of one call with these inputs, of which the first dimension is symbolic."""
    graph, mode = Graph(), fresh_fake_mode()
    nodes = []
    for tensor in tensors:
        nodes.append(graph.placeholder(f"a{len(nodes)}"))
        torch._dynamo.mark_dynamic(tensor, 0)
        nodes[-1].meta["example_value"] = mode.from_tensor(tensor)
    graph.output((graph.call_function(function, tuple(nodes)),))
    return GraphModule({}, graph)


def test_a_graph_comes_back_with_its_sizes_and_guards():
    sent = piece(torch.ops.aten.add.Tensor, torch.ones(6, 4), torch.ones(6, 4))
    env = inputs_mode(sent.graph).shape_env
    value = next(iter(sent.graph.nodes)).meta["example_value"]
    assert value.shape[0] > 3  # a guard
    assert number_of_guards(env)
    graph, options = load_piece(dump_piece(sent, {"max_autotune": True}))
    assert options == {"max_autotune": True}
    assert graph.code == sent.code
    loaded = next(iter(graph.graph.nodes)).meta["example_value"]
    assert str(loaded.shape) == str(value.shape)
    assert loaded.stride()[1] == 1
    there = inputs_mode(graph.graph).shape_env
    assert there is not env
    assert [str(guard) for guard, _ in shape_guards(there)] == [
        str(guard) for guard, _ in shape_guards(env)
    ]


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (piece(plus_one, torch.ones(3)), "plus_one"),
        (piece(torch.get_num_threads), "it takes no tensor"),
        (piece(torch.add, torch.ones(8)[2:], torch.ones(3)), "begins at the start of its memory"),
    ],
    ids=["function", "no tensor", "part"],
)
def test_what_cannot_be_sent_is_named(graph, reason):
    with pytest.raises(NotData, match=reason):
        dump_piece(graph, {})


def test_options_of_the_program_are_not_sent():
    with pytest.raises(NotData, match="plus_one is of the program"):
        dump_piece(piece(torch.neg, torch.ones(3)), {"post_grad_custom_post_pass": plus_one})
    with pytest.raises(NotData, match="plus_one is of the program"):
        dump_plain({"pass": plus_one})
    assert dump_plain({"device": torch.device("cpu"), "dtype": torch.float16})
