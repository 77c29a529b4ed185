"""Small models with a fault injected in the parts around them, for tests of bisect.

They live in a module of their own so that a reproduction script can import them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piecegraph import get_forward_context
from tests.ops import define

LIBRARY = torch.library.Library("faulty", "DEF")


def attention(query, output, layer_name):
    """Add each row to its slot of the cache, and read that."""
    context = get_forward_context()
    layer, slots = context.layers[layer_name], context.metadata
    layer.cache.index_add_(0, slots, query)
    output.copy_(layer.cache[slots])


define(LIBRARY, "attention(Tensor query, Tensor(a!) output, str layer_name) -> ()", attention)


@dataclass
class Layer:
    """A cache of one row a slot."""

    cache: torch.Tensor


@dataclass
class Slots:
    """A step's slots in a persistent buffer, padded with `dump` or with what is left there."""

    buffer: torch.Tensor
    rows: tuple[int, ...]
    dump: int | None

    def __call__(self, decision):
        padded = decision.descriptor.num_tokens
        if self.dump is not None:
            self.buffer[:padded] = self.dump
        self.buffer[: len(self.rows)] = torch.tensor(self.rows)
        return self.buffer[:padded]


@dataclass
class Padding:
    """Metadata of a capture: the persistent buffer, every row in the dump slot."""

    buffer: torch.Tensor
    dump: int

    def __call__(self, descriptor, mode):
        return self.buffer[: descriptor.num_tokens].fill_(self.dump)


class Tiny(torch.nn.Module):
    """Two pieces around one attention op."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.requires_grad_(False)

    def forward(self, x):
        query = self.before(x).sin()
        output = torch.empty_like(query)
        torch.ops.faulty.attention(query, output, "layer")
        return (self.after(output) * 2).relu() - 1


class Branching(Tiny):
    """Takes another way when the number of tokens is a multiple of 8."""

    def forward(self, x):
        if x.shape[0] % 8 == 0:
            x = x + 1
        return super().forward(x)


class Chooses(Tiny):
    """Has the activation for few tokens only, and more of attention for many."""

    def forward(self, x):
        if x.shape[0] <= 4:
            return super().forward(x)
        for layer in (self.before, self.after):
            output = torch.empty_like(x)
            torch.ops.faulty.attention(layer(x), output, "layer")
            x = output
        return x * 2


class Twice(Tiny):
    """Of its four pieces the second and the third differ in nothing but an operator."""

    def forward(self, x):
        y = self.before(x).sin()
        for repair in (torch.cos, torch.sin, torch.tanh):
            output = torch.empty_like(y)
            torch.ops.faulty.attention(y, output, "layer")
            y = repair(output)
        return y


class Unsteady(Tiny):
    def forward(self, x):
        return super().forward(x) + torch.rand(4)


class WrongOnce:
    """A compiler that is wrong the first `times` it is used, and fills what is merely allocated."""

    def __init__(self, times):
        self.times = times

    def __call__(self, graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.empty_like:
                node.target = lambda x: torch.full_like(x, 7.0)
            elif node.target == "sin" and self.times > 0:
                node.target = "cos"
        self.times -= 1
        graph.recompile()
        return graph.forward


def wrong_activations(graph, inputs):
    """A compiler with a wrong pass: relu becomes abs, and silu relu."""
    for node in graph.graph.nodes:
        if node.target == "relu":
            node.target = "abs"
        elif node.target is torch.nn.functional.silu:
            node.target = torch.nn.functional.relu
    graph.recompile()
    return graph.forward


def scaled(query, output):
    """Each row of the query by the step's row of weights and by its scale, a number of Python."""
    metadata = get_forward_context().metadata
    output.copy_(query * metadata.weights[: len(query), None] * metadata.scale)


define(LIBRARY, "scaled(Tensor query, Tensor(a!) output) -> ()", scaled)


@dataclass
class Weights:
    """Metadata of `scaled`."""

    weights: torch.Tensor
    scale: float = 1.0


@dataclass
class StepWeights:
    """A step's weights in `buffer`, or in new memory where there is none."""

    value: float
    scale: float
    buffer: torch.Tensor | None = None

    def __call__(self, decision):
        if self.buffer is None:
            return Weights(torch.full((32,), self.value), self.scale)
        return Weights(self.buffer.fill_(self.value), self.scale)


class Scaling(torch.nn.Module):
    def forward(self, x):
        output = torch.empty_like(x)
        torch.ops.faulty.scaled(x * 2, output)
        return output + 1


class WrongFake(Tiny):
    """Calls an op whose result is transposed in memory, which its fake does not say."""

    def forward(self, x):
        return super().forward(torch.ops.faulty.transposed(x) * 2)


class MixedRows(Tiny):
    """The rows of a batch depend on each other, so padding changes real rows."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class Clobbering(Padding):
    """Capture metadata that points into a slot of a live request."""

    def __call__(self, descriptor, mode):
        return self.buffer[: descriptor.num_tokens].fill_(2)


def split_at_attention(node):
    return "attention" in str(node.target)


def sin_to_cos(graph):
    """A user's pass with a typing error."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.cos.default


def harmless(graph):
    """A user's pass that changes nothing."""


def wrong_at_seven(graph, inputs):
    """A compiler whose code is wrong for seven rows and nothing else."""

    def run(*args):
        results = graph(*args)
        rows = [r for r in results if isinstance(r, torch.Tensor) and r.dim() and len(r) == 7]
        for result in rows:
            result.view(-1)[-1] += 1
        return results

    return run


def refuses_relu(graph, inputs):
    """A compiler that fails on one piece."""
    if any("relu" in str(node.target) for node in graph.graph.nodes):
        raise RuntimeError("no rule for relu")
    return graph.forward


class Counted(Tiny):
    """An op inside a piece reads how many rows the metadata has: more in a padded step."""

    def forward(self, x):
        return super().forward(torch.ops.faulty.counted(x))


class After(Tiny):
    """Tiny with `change` after its attention."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(super().forward(x) + x)


def silu(x):
    return torch.nn.functional.silu(x * 3)


def largest(x):
    return x - x.amax(-1, keepdim=True)


def smaller(x):
    return torch.where(x > 0, x, x * 2)


def mean_of_many(x):
    return x + x.repeat(1, 1024).softmax(-1).mean(-1, keepdim=True)


def without_the_sum(x):
    return x - x.sum(0)


class Cancelled(torch.nn.Module):
    """Sums of bfloat16 that lose all but a few bits; a compiler keeps float32 in between."""

    def forward(self, x):
        y = x.bfloat16()
        return ((y + 1000) * 1.01 - 1010 - y * 1.01).float()


class Residual(torch.nn.Module):
    """Twelve layers in bfloat16, each of which adds to the result; its end amplifies."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(12))
        self.bfloat16().requires_grad_(False)

    def forward(self, x):
        x = x.bfloat16()
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(torch.nn.functional.rms_norm(x, (4,)))) * 4
        return x.softmax(-1) * 100


def divided(x, low, high):
    low.copy_(x.clamp(max=0))
    high.copy_(x.clamp(min=0))


define(LIBRARY, "divided(Tensor x, Tensor(a!) low, Tensor(b!) high) -> ()", divided)
for _name, _run in {
    "counted": lambda x: x * len(get_forward_context().metadata),
    "doubled_type": lambda x: x.double(),
    "first_columns": lambda x: x[:, :2].contiguous(),
    "on_host": lambda x: x * (x.abs().max().item() > 0),
    "transposed": lambda x: x.t().contiguous().t(),
}.items():
    define(LIBRARY, f"{_name}(Tensor x) -> Tensor", _run, torch.empty_like)


def wrong_type(x):
    return torch.ops.faulty.doubled_type(x) * 2


def wrong_shape(x):
    return torch.ops.faulty.first_columns(x) * 2


def halves(x):
    low, high = torch.empty_like(x), torch.empty_like(x)
    torch.ops.faulty.divided(x, low, high)
    return low * 3 + high


def on_host(x):
    return torch.ops.faulty.on_host(x) * 2


def swapped_writes(graph):
    """A user's pass that exchanges what an op writes to; its results are functional here."""
    for node in graph.nodes:
        if "getitem" in str(node.target) and "divided" in str(node.args[0].args[:1]):
            node.args = (node.args[0], {1: 2, 2: 1}.get(node.args[1], node.args[1]))


def in_half(graph):
    """A user's pass that computes sines in half precision."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.sin.default:
            with graph.inserting_before(node):
                half = graph.call_function(torch.ops.aten.to.dtype, (node.args[0], torch.float16))
            with graph.inserting_after(node):
                back = graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32))
            node.replace_all_uses_with(back)
            node.args, back.args = (half,), (node, torch.float32)


class Cached(torch.nn.Module):
    """Writes its rows to a buffer; a result has what was there before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(32, 4))
        self.requires_grad_(False)

    def forward(self, x):
        before = self.cache[: x.shape[0]].clone()
        self.cache[: x.shape[0]] = self.linear(x)
        return before + x


def loses_writes(graph, inputs):
    """A compiler whose code writes to copies of what it is given."""
    return lambda *args: graph(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))


def crosses_results(graph, inputs):
    """A compiler that exchanges the first two results of a piece."""

    def run(*args):
        first, *rest = graph(*args)
        if rest and rest[0].shape == first.shape:
            # it is not written yet, and its memory may hold the right numbers
            return rest[0].fill_(2.0), first, *rest[1:]
        return first, *rest

    return run


@dataclass
class Nested:
    """Metadata of `nested`: `table` a row of numbers a token, the others numbers of Python."""

    table: torch.Tensor
    extra: list
    by_name: dict


def nested(query, output, field):
    metadata = get_forward_context().metadata
    values = {
        "table": lambda: metadata.table[: len(query)].sum(1, keepdim=True),
        "extra": lambda: metadata.extra[1],
        "by_name": lambda: metadata.by_name["scale"],
    }
    output.copy_(query * values[field]())


define(LIBRARY, "nested(Tensor query, Tensor(a!) output, str field) -> ()", nested)


class Reading(torch.nn.Module):
    """Its op reads one field of the metadata."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, x):
        output = torch.empty_like(x)
        torch.ops.faulty.nested(x * 2, output, self.field)
        return output + 1


class Hooked(Tiny):
    """A hook of a module reads an attribute."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0
        self.before.register_forward_hook(lambda module, args, output: output * self.factor)


GAIN = [1.0]


class Global(Tiny):
    """Reads a list of its module."""

    def forward(self, x):
        return super().forward(x) * GAIN[0]
