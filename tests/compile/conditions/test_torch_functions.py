"""What functions of torch read when they run, also in graphs inside the graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from piecegraph.compile.conditions.torch_functions import names_read

from ..traces import facts_of_trace


def nodes_of(*targets):
    graph = torch.fx.Graph()
    return [
        graph.call_method(each) if isinstance(each, str) else graph.call_function(each)
        for each in targets
    ]


@pytest.mark.parametrize(
    ("target", "space", "name"),
    [
        (F.layer_norm, "torch", "layer_norm"),
        (F.silu, "torch._C._nn", "silu"),
        (F.multi_head_attention_forward, "torch.nn.functional", "scaled_dot_product_attention"),
        (F.max_pool2d, "torch", "max_pool2d"),  # in the closure of a dispatching function
        (torch.einsum, "torch._VF", "einsum"),
        ("norm", "torch", "norm"),  # of a method
        ("norm", "torch.linalg", "vector_norm"),
        ("sin", "torch.Tensor", "sin"),
    ],
)
def test_names_that_functions_of_torch_read_are_known(target, space, name):
    assert name in names_read(nodes_of(target))[space]


def test_functions_of_a_program_are_not_followed_and_no_module_is_one_of_the_compiler():
    assert names_read(nodes_of(nodes_of, torch.sin)) == {"torch.Tensor": []}
    spaces = names_read(nodes_of(F.multi_head_attention_forward, F.max_pool2d, torch.einsum))
    assert not any(space.startswith(("torch._dynamo", "torch._inductor")) for space in spaces)


class Checkpointed(nn.Module):
    def forward(self, x):
        return checkpoint(lambda y: torch.ops.pg_nested.scale(F.silu(y)), x, use_reentrant=False)


def test_what_the_body_of_a_checkpoint_calls_is_a_condition():
    library = torch.library.Library("pg_nested", "DEF")
    library.define("scale(Tensor x) -> Tensor")
    library.impl("scale", lambda x: x * 2, "CompositeImplicitAutograd")
    conditions = facts_of_trace(Checkpointed(), splitting_ops=())[0]["conditions"]
    of_op = conditions["::", '"pg_nested"', '"scale"']
    assert any("CompositeImplicitAutograd" in each for each in of_op)
    assert any('"silu"' in each for each in conditions["torch._C._nn",])
