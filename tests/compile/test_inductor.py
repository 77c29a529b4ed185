"""Pieces compiled by Inductor: results, guards that it adds, mutating custom ops."""

import contextlib

import pytest
import torch
from torch import nn
from torch._inductor.cpp_builder import CppBuilder

from piecegraph.compile.backends import inductor
from piecegraph.compile.ir.config import DynamicShapes
from piecegraph.errors import GuardUnproved, PieceFailed
from piecegraph.events import Events
from piecegraph.torch_compat.repairs import inductor_fixes

from .models import MIX, SIZES, Body, Function, Products, Stack, X, assert_right
from .size_models import SOUND, all_but_five, six_rows

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]


def test_equal_to_eager_at_every_size_loaded_the_next_time_and_shared_with_a_deeper_model(compiled):
    model, deep = Stack(4), Stack(9)
    settings = {"inputs": X, "splitting_ops": MIX, "compiler": "inductor", "max_num_tokens": 128}
    made = compiled(model, **settings)
    assert made.events.counters["inductor_compiles"] == 3
    again = compiled(model, **settings)
    assert again.events.counters["inductor_compiles"] == 0
    assert again.events.counters["dynamo_traces"] == 0
    deeper = compiled(deep, **settings)
    assert deeper.events.counters["inductor_compiles"] == 0
    for size in SIZES:
        x = torch.randn(size, 8)
        expected = model(x).detach()
        torch.testing.assert_close(made(x), expected)
        torch.testing.assert_close(again(x), expected)
        torch.testing.assert_close(deeper(x), deep(x).detach())


@pytest.mark.heavy
def test_artifact_without_any_pass_is_kept_too(compiled):
    settings = {"inputs": X, "compiler": "inductor", "level": 0}
    compiled(Stack(1), splitting_ops=MIX, **settings)
    again = compiled(Stack(1), splitting_ops=MIX, **settings)
    assert again.events.counters["inductor_compiles"] == 0


@pytest.mark.heavy
def test_code_that_is_one_library_is_loaded_with_it(compiled):
    settings = {
        "inputs": X,
        "compiler": "inductor",
        "codegen": {"inductor_options": {"cpp_wrapper": True}},
    }
    for compiles in (2, 0):
        made = compiled(Stack(1), splitting_ops=MIX, **settings)
        assert made.events.counters["inductor_compiles"] == compiles
        assert_right(made, Stack(1), [7])


def test_what_inductor_itself_does_not_keep_is_served_and_not_kept(compiled):
    ops = ("piecegraph_test::fresh",)
    settings = {"inputs": X, "compiler": "inductor", "splitting_ops": ops}
    options = {"force_disable_caches": True}
    for _ in range(2):
        made = compiled(Products(), codegen={"inductor_options": options}, **settings)
        assert made.events.counters["inductor_compiles"] == 1
        assert made.events.named("bundle.not_kept")
    assert_right(made, Products(), [7])


class Twice(nn.Module):
    """Two pieces that begin with the same elementwise kernel; the second has one more."""

    def forward(self, x):
        x = x.tanh() * 3
        out = torch.empty_like(x)
        torch.ops.piecegraph_test.mix(x, out, "layer")
        out = out.tanh() * 3
        return out.sort(0).values.exp()


def test_kernel_that_several_pieces_have_is_compiled_once(compiled, monkeypatch):
    built = []
    build = CppBuilder.build

    def note(builder):
        built.append(builder.get_target_file_path())
        return build(builder)

    monkeypatch.setattr(CppBuilder, "build", note)
    made = compiled(Twice(), inputs=X, splitting_ops=MIX, compiler="inductor")
    kernels = [end.facts["kernels"] for end in made.events.named("compile.end")]
    assert kernels == [1, 2]
    assert sum(target.endswith(".so") for target in built) == 2
    assert_right(made, Twice(), [7])


@pytest.mark.heavy
@pytest.mark.parametrize("body", SOUND, ids=lambda body: body.__name__)
def test_sound_model_is_not_refused_for_what_inductor_guards_on(compiled, body):
    model = Body(body)
    made = compiled(model, inputs=X, compiler="inductor")
    assert_right(made, model, (*SIZES, 2048))


@pytest.mark.parametrize("body", [six_rows, all_but_five], ids=lambda body: body.__name__)
def test_slices_of_any_size_are_lowered(compiled, body, monkeypatch):
    """Slices that may begin or end past the last row; torch 2.11 needs `slices_of_any_size`."""
    model = Body(body)
    if torch.__version__ < "2.12":
        with monkeypatch.context() as patched:
            patched.setattr(inductor_fixes, "slices_of_any_size", contextlib.nullcontext)
            with pytest.raises(PieceFailed, match="unbacked_bindings"):
                # more tokens than an artifact of another test serves
                compiled(model, inputs=X, compiler="inductor", max_num_tokens=4096)
    made = compiled(model, inputs=X, compiler="inductor")
    assert_right(made, model, (1, 2, 3, 5, 7, 64))


class Ranked(nn.Module):
    """Inductor sorts with 16-bit indices below 32767 rows, and guards on that."""

    def forward(self, x):
        return x.sort(0).indices


@pytest.mark.needs_torch(
    "2.12", "Inductor 2.11 does not guard: its sort has 16-bit indices for known sizes only"
)
def test_guard_of_the_compiler_is_proved_or_refused(compiled):
    settings = {
        "inputs": X,
        "compiler": "inductor",
        "tracing": {"dynamic_shapes": DynamicShapes.BACKED},
    }
    made = compiled(Ranked(), **settings, max_num_tokens=30000)
    guards = [event.facts for event in made.events.named("guard")]
    assert any("32767" in guard["expression"] and guard["proved"] for guard in guards)
    with pytest.raises(GuardUnproved, match="num_tokens < 32767.* = 32767, 32768"):
        compiled(Ranked(), **settings, max_num_tokens=40000)


def test_original_of_a_mutated_value_is_kept_where_it_is_needed(compiled):
    class Both(nn.Module):
        def forward(self, x):
            before = x * 2
            after = before.clone()
            torch.ops.piecegraph_test.turn(after, before.clone())
            return before, after

    made = compiled(Both(), inputs=X, compiler="inductor")
    assert_right(made, Both(), [5])


def in_product(x):
    h = x @ x.T
    b = h * 1.5
    torch.ops.piecegraph_test.accumulate(h, b + 1)
    return h + b


def test_value_computed_before_a_mutation_is_of_the_old_value(compiled):
    """Inductor 2.13 alone computes `b` after the op, from what the op has written."""
    model = Function(in_product)
    made = compiled(model, inputs=X, compiler="inductor")
    assert_right(made, model, (1, 2, 3, 7, 64))


def test_what_is_needed_once_has_spans_of_its_own(monkeypatch):
    compiled = []

    def compile_piece(*given):
        return lambda: compiled.append(given)

    monkeypatch.setattr(inductor, "compile_piece", compile_piece)
    for ready in (True, False):
        events = Events()
        monkeypatch.setattr(inductor, "cpp_headers_ready", lambda _, ready=ready: ready)
        inductor.first_use(torch.device("cpu"), events)
        assert [span.name for span in events.spans] == [
            "import inductor",
            *([] if ready else ["toolchain"]),
        ]
        assert len(compiled) == (0 if ready else 1)


class SizesAlone(nn.Module):
    """Of its pieces one has the number of tokens alone; two inputs have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, pos):
        q = self.linear(x)
        torch.ops.piecegraph_test.mix(pos, q, "first")
        out = torch.zeros(x.shape[0], 8)
        torch.ops.piecegraph_test.mix(q, out, "second")
        return out + q


@pytest.mark.parametrize("dynamic_shapes", DynamicShapes)
def test_a_piece_that_is_given_the_number_of_tokens_alone(compiled, dynamic_shapes):
    model = SizesAlone()
    inputs = {**X, "pos": "float32[num_tokens, 8]"}
    tracing = {"dynamic_shapes": dynamic_shapes}
    made = compiled(model, inputs=inputs, splitting_ops=MIX, compiler="inductor", tracing=tracing)
    for size in (1, 5):
        x, pos = torch.randn(size, 8), torch.randn(size, 8)
        torch.testing.assert_close(made(x, pos), model(x, pos).detach())
