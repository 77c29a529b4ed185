"""Models of every form: the compiled form returns what the model does."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from piecegraph.compile.ir.config import DynamicShapes
from piecegraph.errors import ArgumentFixed, InputMismatch, ModelMismatch, SizeOutOfRange

from .models import MIX, SIZES, Stack, X

pytestmark = pytest.mark.compile

ops = torch.ops.piecegraph_test


def same(made, model, *args, **kwargs):
    """Check the compiled form against the model, results and their structure."""
    with torch.no_grad():
        expected = model(*args, **kwargs)
    actual = made(*args, **kwargs)
    assert type(actual) is type(expected)
    assert_same(as_plain(actual), as_plain(expected))
    return actual


def assert_same(actual, expected):
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def as_plain(value):
    if isinstance(value, Tensor | int | float | str | None):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return [as_plain(item) for item in value]


@pytest.mark.parametrize(
    ("layers", "odd", "unique"),
    [(1, None, 2), (2, None, 3), (3, None, 3), (6, None, 3), (6, 1, 4), (6, 2, 4)],
)
def test_pieces_are_one_more_than_layers_and_three_unique(compiled, layers, odd, unique):
    """A layer that differs adds what differs."""
    made = compiled(Stack(layers, odd), inputs=X, splitting_ops=MIX)
    assert len(made.plan.piece_uses()) == layers + 1
    assert len(made.plan.pieces) == unique
    for size in SIZES:
        same(made, Stack(layers, odd), torch.randn(size, 8))


@pytest.mark.parametrize("shapes", list(DynamicShapes))
def test_equal_pieces_are_found_under_every_shape_type(compiled, shapes):
    made = compiled(Stack(5), inputs=X, splitting_ops=MIX, tracing={"dynamic_shapes": shapes})
    assert len(made.plan.pieces) == 3


class Cross(nn.Module):
    """Text attends to an image: two sizes that have nothing to do with each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.key = nn.Linear(8, 8)

    def forward(self, x, image):
        scores = x @ self.key(image).t()
        out = torch.empty_like(x)
        ops.mix(x, out, "text")
        return scores.softmax(-1) @ image + out, torch.cat([x, image])


def test_two_independent_sizes(compiled):
    made = compiled(
        Cross(),
        inputs={**X, "image": "float32[num_patches, 8]"},
        tracing={"symbol_limits": {"num_patches": (1, 99)}},
        splitting_ops=MIX,
    )
    assert [(s.label, s.low, s.high) for s in made.plan.symbols] == [
        ("num_tokens", 1, 2048),
        ("num_patches", 1, 99),
    ]
    for tokens in SIZES:
        for patches in (1, 2, 64, 99):
            same(made, Cross(), torch.randn(tokens, 8), torch.randn(patches, 8))
    with pytest.raises(SizeOutOfRange, match="num_patches"):
        made(torch.randn(2, 8), torch.randn(100, 8))


class Largest(nn.Module):
    def forward(self, x, image):
        return x * max(x.shape[0], image.shape[0]), image.sum(0) / min(x.shape[0], image.shape[0])


def test_the_larger_and_the_smaller_of_two_sizes(compiled):
    inputs = {**X, "image": "float32[num_patches, 8]"}
    made = compiled(Largest(), inputs=inputs, tracing={"symbol_limits": {"num_patches": (1, 99)}})
    for patches in (1, 7, 99):
        same(made, Largest(), torch.randn(7, 8), torch.randn(patches, 8))


def test_size_in_the_second_dimension(compiled):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(16, 8)

        def forward(self, input_ids, positions):
            return self.table(input_ids) + positions.sum(0)[None, :, None]

    inputs = {"input_ids": "int64[1, num_tokens]", "positions": "int64[3, num_tokens]"}
    made = compiled(Rows(), inputs=inputs)
    for size in SIZES:
        same(made, Rows(), torch.randint(16, (1, size)), torch.randint(9, (3, size)))


class Weights(nn.Module):
    """Every way of holding a tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("table", torch.randn(8), persistent=False)
        self.blocks = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(2)])

    def forward(self, x):
        y = self.head(self.embedding(x) - self.mean)
        return y * self.table + self.blocks[0] - self.blocks[1]


def test_tied_weights_and_buffers(compiled):
    model = Weights()
    made = compiled(model, inputs=X)
    names = [weight.target for weight in made.plan.weights]
    assert len(names) == len(set(names)) == 5
    same(made, model, torch.randn(7, 8))
    with torch.no_grad():
        model.embedding.weight.zero_()
        model.table.add_(1)
    same(made, model, torch.randn(7, 8))


def test_weights_of_another_model_of_the_same_form_can_be_bound(compiled):
    made = compiled(Weights(), inputs=X)
    other = Weights()
    with torch.no_grad():
        other.mean.add_(3)
    step = replace(made.compiled, model=other).rebound().link()
    x = torch.randn(3, 8)
    torch.testing.assert_close(step(x)[0], other(x))
    other.mean = torch.randn(9)
    with pytest.raises(ModelMismatch, match="mean"):
        replace(made.compiled, model=other).rebound()


def test_model_on_the_meta_device_is_compiled_without_weights(compiled):
    with torch.device("meta"):
        model = Stack(3)
    made = compiled(model, inputs=X, splitting_ops=MIX, device="meta")
    real = Stack(3)
    step = replace(made.compiled, model=real).rebound().link()
    x = torch.randn(7, 8)
    torch.testing.assert_close(step(x)[0], real(x))


@dataclass
class Output:
    hidden: Tensor
    extra: tuple[Tensor, ...] | None = None
    count: int = 3


Pair = namedtuple("Pair", ["first", "second"])

RESULTS = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, y + 1),
    "one": lambda y, x: (y,),
    "list": lambda y, x: [y, [y - 1, None]],
    "dict": lambda y, x: {"hidden": y, "pair": (y, 2 * y)},
    "ordered": lambda y, x: OrderedDict(b=y, a=y + 1),
    "ordered by numbers": lambda y, x: OrderedDict([(1, y), (0, {"self": y + 1})]),
    "of an operator": lambda y, x: (y.max(1), y),
    "dataclass": lambda y, x: Output(y, (y, y * 2)),
    "dataclass without": lambda y, x: Output(y),
    "named tuple": lambda y, x: Pair(y, y + 1),
    "twice": lambda y, x: (y, y),
    "input": lambda y, x: (y, x),
    "constants": lambda y, x: (y, 3, "name", None, 2.5),
    "size": lambda y, x: (y, x.shape[0], x.shape[0] * 2 + 1),
    "nothing else": lambda y, x: {"a": None, "y": y},
}


UNTRACED = ("list", "ordered by numbers", "of an operator", "dataclass without", "named tuple")
"""Forms that a model without a trace takes by ways of their own."""


class Returns(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.form = form

    def forward(self, x):
        return RESULTS[self.form](self.linear(x), x)


@pytest.mark.parametrize(
    ("form", "traced"),
    [*((form, True) for form in RESULTS), *((form, False) for form in UNTRACED)],
)
def test_result_has_the_form_the_model_gives(compiled, form, traced):
    model = Returns(form)
    made = compiled(model, inputs=X, compile=traced)
    assert not made.events.named("effect_dropped")
    for size in (1, 7):
        same(made, model, torch.randn(size, 8))


class Arguments(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask=None, *, scale=None, factor=2.0, mode="plain"):
        y = self.linear(x) * factor
        if mask is not None:
            y = y * mask
        if scale is not None:
            y = y * scale
        return y if mode == "plain" else -y


def test_arguments_by_keyword_and_none(compiled):
    model = Arguments()
    made = compiled(model, inputs={**X, "scale": "float32[8]"})
    x, scale = torch.randn(5, 8), torch.randn(8)
    same(made, model, x, scale=scale)
    same(made, model, x=x, mask=None, scale=scale, mode="plain")
    with pytest.raises(ArgumentFixed, match="mode"):
        made(x, scale=scale, mode="negative")
    with pytest.raises(ArgumentFixed, match="factor"):
        made(x, scale=scale, factor=3.0)
    with pytest.raises(ArgumentFixed, match="mask"):
        made(x, torch.ones(8), scale=scale)
    with pytest.raises(InputMismatch, match="scale"):
        made(x)


def test_nested_arguments_given_as_examples(compiled):
    class Nested(nn.Module):
        def forward(self, batch, pair):
            return batch["x"] + pair[0] * pair[1]["scale"]

    def arguments(size):
        x = torch.randn(size, 8)
        return {"x": x}, (torch.randn(size, 8), {"scale": torch.tensor(2.0)})

    inputs = {"batch.x": "float32[num_tokens, 8]", "pair.0": "float32[num_tokens, 8]"}
    made = compiled(Nested(), examples=(arguments(5), {}), inputs=inputs)
    for size in SIZES:
        same(made, Nested(), *arguments(size))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_prepared_and_called_under_any_gradient_mode(compiled, mode):
    model = Stack(2)
    with mode():
        made = compiled(model, inputs=X, splitting_ops=MIX)
        x = torch.randn(7, 8)
        expected = model(x)
        result = made(x)
    torch.testing.assert_close(result, expected.detach())
    assert not result.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(made(x), expected.detach())


class Towers(nn.Module):
    """A vision tower and a language model, compiled each by itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.vision = Stack(2)
        self.language = Stack(3)

    def forward(self, image, x):
        return self.language(torch.cat([self.vision(image), x]))


def test_several_compiled_submodules_in_one_model(compiled):
    model, plain = Towers(), Towers()
    vision = compiled(model.vision, inputs=X, splitting_ops=MIX, max_num_tokens=64)
    language = compiled(model.language, inputs=X, splitting_ops=MIX)
    model.vision.forward = vision.__call__
    model.language.forward = language.__call__
    for patches, tokens in [(1, 1), (16, 3), (64, 64)]:
        image, x = torch.randn(patches, 8), torch.randn(tokens, 8)
        torch.testing.assert_close(model(image, x), plain(image, x))
