"""Values of opaque types, such as names of layers, are arguments of splitting calls."""

import enum

import pytest
import torch
from torch import nn

from piecegraph.compile.ir.serialization import decode, encode
from piecegraph.errors import NotPortable
from tests.text_compiler import use_text_compiler

from .models import X
from .starts import start

pytestmark = pytest.mark.compile

opaque = pytest.importorskip("torch._library.opaque_object")
opaque_base = pytest.importorskip("torch._opaque_base")
CALLS = []


class Kind(enum.Enum):
    FULL = 1


class Name(metaclass=opaque_base.OpaqueBaseMeta):  # torch 2.11 asks for it
    """The name of a layer, which Dynamo makes an input of the graph."""

    def __init__(self, name, kind=Kind.FULL, parents=()):
        self.name, self.kind, self.parents = name, kind, parents

    def __eq__(self, other):
        return isinstance(other, Name) and vars(self) == vars(other)

    def __hash__(self):
        return hash(self.name)

    def __fx_repr__(self):
        parents = "".join(f"{each.__fx_repr__()[0]}, " for each in self.parents)
        text = f"Name({self.name!r}, kind=Kind.{self.kind.name}, parents=({parents}))"
        return text, {"Name": Name, "Kind": Kind}


class Lost(Name):
    """Its representation leads to another value."""

    def __fx_repr__(self):
        return "Name('other')", {"Name": Name}


opaque.register_opaque_type(Name, typ="value", hoist=True)
TYPE = opaque.get_opaque_type_name(Name)


def mix(x, out, name):
    CALLS.append(name)
    out.copy_(x.flip(0) * 2)


@pytest.fixture(scope="module")
def op():
    library = torch.library.Library("opaque_tests", "DEF")
    library.define(f"mix(Tensor x, Tensor(a!) out, {TYPE} name) -> ()")
    library.impl("mix", mix, "CPU")
    torch.library.register_fake("opaque_tests::mix", lambda *args: None, lib=library)
    yield "opaque_tests::mix"
    library._destroy()


class Layer(nn.Module):
    def __init__(self, index, made_in_forward):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.text, self.made_in_forward = f"layers.{index}", made_in_forward
        self.name = Name(self.text, parents=(Name("model"),))

    def forward(self, x):
        out = torch.empty_like(x)
        name = Name(self.text) if self.made_in_forward else self.name
        torch.ops.opaque_tests.mix(x * self.weight, out, name)
        return out


class Model(nn.Module):
    def __init__(self, made_in_forward=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, made_in_forward) for i in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


GAINS = {"a": 2.0}


@torch.compiler.assume_constant_result
def gain(name, dtype):
    return GAINS[name.name]


class Scaled(nn.Module):
    def forward(self, x):
        return x * gain(Name("a"), dtype=torch.float32)


@pytest.mark.parametrize("made_in_forward", [False, True])
def test_equal_layers_are_equal_pieces(op, compiled, made_in_forward):
    model, x = Model(made_in_forward), torch.randn(5, 8)
    made = compiled(model, inputs=X, splitting_ops=(op,))
    expected = model(x)
    CALLS.clear()
    torch.testing.assert_close(made(x), expected)
    assert [name.name for name in CALLS] == [layer.text for layer in model.layers]
    assert all(type(name) is Name for name in CALLS)
    assert made_in_forward or CALLS[0].parents == (Name("model"),)
    assert made.plan.piece_uses() == [0, 0, 0, 0]


def test_the_value_is_stored_in_the_plan(op, tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    x = torch.randn(5, 8)
    assert not start(Model(), tmp_path, splitting_ops=(op,)).hit
    torch.manual_seed(0)
    model = Model()
    again = start(model, tmp_path, splitting_ops=(op,))
    assert again.hit, again.reason
    torch.testing.assert_close(again(x), model(x))
    model.layers[2].name = Name("elsewhere")
    other = start(model, tmp_path, splitting_ops=(op,))
    assert not other.hit
    assert "layers.2.name" in other.reason


def test_what_a_function_returned_for_a_value_is_a_condition(tmp_path, monkeypatch):
    """Dynamo calls the function while it traces."""
    use_text_compiler(monkeypatch)
    x, model = torch.randn(5, 8), Scaled()
    assert not start(model, tmp_path).hit
    again = start(model, tmp_path)
    assert again.hit
    assert again.compiled.relies_on(__name__)
    assert not again.compiled.relies_on("json")
    monkeypatch.setitem(GAINS, "a", 3.0)
    other = start(model, tmp_path)
    assert not other.hit
    assert "gain" in other.reason
    torch.testing.assert_close(other(x), 3 * x)


def test_inside_a_piece_it_is_a_constant(op, compiled):
    model, x = Model(), torch.randn(5, 8)
    made = compiled(model, inputs=X, splitting_ops=())
    torch.testing.assert_close(made(x), model(x))
    assert [name.name for name in CALLS[-4:]] == [layer.text for layer in model.layers]


def test_a_region_that_is_traced_once(op, compiled):
    model, x = Model(), torch.randn(5, 8)
    expected = model(x)
    Layer.forward, whole = torch.compiler.nested_compile_region(Layer.forward), Layer.forward
    try:
        made = compiled(model, inputs=X, splitting_ops=(op,))
    finally:
        Layer.forward = whole
    CALLS.clear()
    torch.testing.assert_close(made(x), expected)
    assert [name.name for name in CALLS] == [layer.text for layer in model.layers]
    assert made.plan.piece_uses() == [0, 1, 1, 1]


def test_source_of_a_value_is_not_run():
    value = Name("a", parents=(Name("b"), Name("c")))
    assert decode(encode(value)) == value
    for text in ("open('x')", "Name(open)", "Name('a').name", "[Name for _ in 'ab']", "Name("):
        with pytest.raises(NotPortable):
            decode({"opaque": [text, [["Name", __name__, "Name"], ["open", "builtins", "type"]]]})
    with pytest.raises(NotPortable):
        encode(Lost("this"))
