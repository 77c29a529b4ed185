"""Example values of copied regions equal those of a trace that copies nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piecegraph.torch_compat.faster.equal_layers.trace_with_copies import trace_with_copies
from piecegraph.torch_compat.tracing.dynamo import (
    capture_full_graph,
    dynamo_tracing,
    mark_dynamic,
)

pytestmark = [
    pytest.mark.compile,
    pytest.mark.needs_torch("2.13", "torch cannot move the place of a guard"),
]


def views(x: Tensor, w: Tensor) -> Tensor:
    first, second = (x @ w).view(-1, 2, 4).transpose(0, 1).chunk(2, dim=-1)
    return x + torch.cat((second, first), dim=-1).transpose(0, 1).reshape(-1, 8)


def writes(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y[:, :4].mul_(w[0, :4])
    z = y.add_(w.t()[0]).t_().contiguous()
    return z.t() + y.unsqueeze_(0)[0].t()


def dtypes(x: Tensor, w: Tensor) -> Tensor:
    y = (x * w[0]).contiguous()
    halves = torch.view_as_complex(y.view(-1, 4, 2)) * 1j
    return torch.view_as_real(halves).flatten(1) + y.view(torch.int32).to(torch.float32)


def sizes(x: Tensor, w: Tensor) -> Tensor:
    tokens, width = x.shape
    steps = torch.arange(tokens, device=x.device) * (width + 1)
    empty = torch.empty(0, width)
    stacked = torch.cat([x[1:], x[:1], empty]).expand(3, tokens, width)
    return x + stacked.sum(0) * steps[:, None] + w.new_ones(2 * tokens, width)[::2]


def constants(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.tensor([2.0])
    real, imaginary = torch.complex(x, x).conj().real, torch.view_as_real(x + 0j)
    return x * scale + real.neg() + imaginary[..., 1] * w[0].detach()


@torch.library.custom_op("copied_values::doubled", mutates_args=("x",))
def doubled(x: Tensor) -> Tensor:
    return x.mul_(2).sum()


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(())


def into_weights(x: Tensor, w: Tensor) -> Tensor:
    total = doubled(w)
    return (x @ w).sin() + total


def into_argument(x: Tensor, w: Tensor) -> Tensor:
    total = doubled(x)
    return (x @ w).sin() + total


class Layer(nn.Module):
    def __init__(self, operators: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.operators = nn.Parameter(torch.eye(8)), operators

    def forward(self, x: Tensor) -> Tensor:
        return self.operators(x, self.weight)


class Stack(nn.Module):
    def __init__(self, operators: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(operators) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        for layer in self.layers:
            x = layer(x)
        return x


class Parts(nn.Module):
    """A layer of which two weights are parts of one memory, or are not."""

    def __init__(self, of_one):
        super().__init__()
        whole = torch.ones(16, 8)
        self.low = nn.Parameter(whole[:8])
        self.high = nn.Parameter((whole if of_one else whole.clone())[8:])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((y[:, :4] @ self.low[:4, :4], x[:, 4:] + self.high[0, 4:]), dim=1)


class Unlike(nn.Module):
    """Calls of equal form, of which some have arguments or weights that share memory."""

    def __init__(self, of_one, views):
        super().__init__()
        self.layers, self.views = nn.ModuleList(map(Parts, of_one)), views

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        for layer, is_view in zip(self.layers, self.views, strict=True):
            x = layer(x, x.view(-1, 8) if is_view else x * 1)
        return x


def traced_by(capture, model):
    torch._dynamo.reset()
    x = torch.ones(5, 8)
    mark_dynamic(x, 0, "num_tokens", (1, 64), "backed")
    with dynamo_tracing("backed"), torch.no_grad():
        return capture(model, (x,), {})


def captured(model):
    trace = traced_by(trace_with_copies, model)
    return trace.captured, trace.copied


def captured_whole(model):
    return traced_by(capture_full_graph, model)


def values_of(found):
    """All that can be read of the example values: which are one object and which share memory
    as the position of the first."""
    objects = {}
    memory = {}
    facts = []
    for node in found.graph.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("example_value")):
            facts.append((str(node.target), type(value).__name__))
            if not isinstance(value, Tensor):
                facts.append(str(value))
                continue
            storage = value.untyped_storage()
            facts += [
                objects.setdefault(id(value), len(objects)),
                memory.setdefault(storage._cdata, len(memory)),
                (str(value.dtype), str(value.device), value.requires_grad, value.is_leaf),
                [str(size) for size in (*value.shape, *value.stride(), value.storage_offset())],
                (value.is_conj(), value.is_neg(), value.is_inference()),
                str(storage.nbytes()),
                value._version,
            ]
    return facts


def with_memory_of_another():
    """A stack of which two weights are two parameters on one memory."""
    model = Stack(views)
    model.layers[2].weight.data = model.layers[1].weight.data
    return model


def of_many_forms():
    """A stack whose weights differ in what a fake tensor keeps of them; each layer is like two."""
    model = nn.Module.__new__(Stack)
    nn.Module.__init__(model)
    weights = [
        torch.eye(8),
        nn.Parameter(torch.eye(8), requires_grad=False),
        nn.Parameter(torch.eye(9).t()[:8, :8]),
        nn.Parameter(torch.zeros(64)[None].expand(8, 64)[:, ::8]),
    ]
    model.layers = nn.ModuleList(Layer(views) for _ in range(3 * len(weights)))
    for layer, weight in zip(model.layers, (w for w in weights for _ in range(3)), strict=True):
        del layer.weight
        made = weight.detach().clone()
        if isinstance(weight, nn.Parameter):
            layer.weight = nn.Parameter(made, requires_grad=weight.requires_grad)
        else:
            layer.register_buffer("weight", made)
    return model


YES, NO = (True, True, True), (False, False, False)


@pytest.mark.parametrize(
    ("model", "num_copied"),
    [
        *((Stack(views), 3), (Stack(writes), 2), (Stack(sizes), 3), (Stack(into_weights), 3)),
        *((Unlike((True, False, True), NO), 2), (Unlike(NO, (True, False, True)), 2)),
        *(
            pytest.param(model, copied, marks=pytest.mark.heavy)
            for model, copied in (
                *((Stack(dtypes), 3), (Stack(constants), 3), (Stack(into_argument), 3)),
                *((with_memory_of_another(), 3), (of_many_forms(), 8)),
                *((Unlike(YES, YES), 2), (Unlike(NO, NO), 2)),
                *((Unlike((False, True, False), NO), 2), (Unlike(NO, (False, True, False)), 2)),
            )
        ),
    ],
)
def test_copied_values_are_those_of_a_whole_trace(model, num_copied):
    found, copied = captured(model)
    assert num_copied == copied
    assert values_of(found) == values_of(captured_whole(model))
