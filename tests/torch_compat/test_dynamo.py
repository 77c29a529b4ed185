"""One full-graph capture, its inputs and errors; registered backends."""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from piecegraph.torch_compat.basics.facts import GuardFact
from piecegraph.torch_compat.tracing import dynamo

SCALE = 3


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return {"y": doubled(x) * self.weight * SCALE}


def doubled(x):
    return x if "PIECEGRAPH_TEST_VARIABLE" in os.environ else x * 2


def captured(model, x):
    with dynamo.dynamo_tracing("backed_size_oblivious"):
        return dynamo.capture_full_graph(model, (x,), {})


@pytest.mark.parametrize("shapes", ["backed", "backed_size_oblivious", "unbacked"])
def test_full_graph_is_dynamic_where_it_was_marked(shapes):
    x = torch.zeros(5, 2)
    dynamo.mark_dynamic(x, 0, "num_tokens", (1, 64), shapes)
    model = Scaled()
    with dynamo.dynamo_tracing(shapes):
        found = dynamo.capture_full_graph(model, (x,), {})
    placeholders = found.graph.graph.find_nodes(op="placeholder")
    sources = {dynamo.input_source(node): node for node in placeholders}
    (name,) = [source for source in sources if source.endswith("['x']")]
    rows, columns = sources[name].meta["example_value"].shape
    assert isinstance(rows, torch.SymInt)
    assert columns == 2
    result = found.call(lambda *_: (torch.full((5, 2), 7.0),))(x)
    assert torch.equal(result["y"], torch.full((5, 2), 7.0))
    assert any("SCALE" in guard.expression for guard in found.guards)
    assert doubled.__code__ in found.inlined.functions
    assert found.inlined.variables == {"PIECEGRAPH_TEST_VARIABLE"}
    guard = next(guard for guard in found.guards if "SCALE" in guard.expression)
    assert guard.kind in ("CONSTANT_MATCH", "EQUALS_MATCH")  # the second in torch 2.11
    assert str(guard.where).partition(":")[0] == __file__


names_during_the_trace: list = []


@torch.compiler.assume_constant_result
def looks():
    names_during_the_trace.append(set(globals()))
    return 2


class Looking(Scaled):
    def forward(self, x):
        return super().forward(torch.relu(x)) | {"twice": x * looks() * SCALE}


def test_a_trace_writes_no_name_into_the_module_of_the_function():
    """Another thread may go through the names just then."""
    before = set(globals())
    for model in (Scaled(), Looking()):
        found = captured(model, torch.zeros(5, 2))
        assert any(guard.expression == "G['SCALE']" for guard in found.guards)
        assert not any(__name__ in module for module in found.aliases.values())
        assert any(name.startswith("__builtins_dict__") for name in found.global_scope)
        assert set(globals()) == before
    assert names_during_the_trace == [before]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("forward", [partial, lambda forward: SimpleNamespace(call=forward).call])
def test_a_forward_that_is_no_method(forward, hooked):
    model = Scaled()
    model.forward = forward(model.forward)
    replaced = model.forward
    if hooked:
        model.register_forward_hook(lambda module, args, result: {"y": result["y"] + 1})
    found = captured(model, torch.zeros(5, 2))
    assert model.forward is replaced
    assert [node.op for node in found.graph.graph.nodes].count("call_function") == 3 + hooked


def test_model_without_tensor_operations_has_no_graph():
    class Nothing(torch.nn.Module):
        def forward(self, x):
            return 1

    assert captured(Nothing(), torch.zeros(2)) is None


def test_settings_of_a_trace_are_put_back():
    import torch._dynamo.config as dynamo_config
    from torch.fx.experimental import _config as shapes_config

    def state():
        return [dynamo_config.automatic_dynamic_shapes, shapes_config.backed_size_oblivious]

    before = state()
    with dynamo.dynamo_tracing("backed_size_oblivious"):
        assert state() == [False, True]
    with dynamo.reasoning_about_sizes("backed"):
        assert shapes_config.backed_size_oblivious is False
    assert state() == before


def test_line_of_an_error_is_the_users():
    class Breaks(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()  # here
            return x + 1

    with pytest.raises(Exception, match=r".") as caught:
        captured(Breaks(), torch.zeros(2))
    where = dynamo.user_location(caught.value)
    file, _, line = where.rpartition(":")
    assert os.path.samefile(file, __file__)
    assert "# here" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert dynamo.user_location(ValueError()) is None


def test_registered_backends_are_found_by_name():
    assert {"eager", "inductor"} <= set(dynamo.registered_backends())
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    x = torch.randn(3)
    assert torch.equal(dynamo.registered_backend("eager")(graph, [x])(x), x.relu())


def test_op_without_a_fake_is_named():
    library = torch.library.Library("piecegraph_no_fake", "DEF")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", torch.clone, "CPU")

    class Calls(torch.nn.Module):
        def forward(self, x):
            return torch.ops.piecegraph_no_fake.f(x)

    with pytest.raises(Exception, match=r".") as caught:
        captured(Calls(), torch.zeros(2))
    assert dynamo.unsupported_op(caught.value) == "piecegraph_no_fake::f"
    assert dynamo.unsupported_op(ValueError("unsupported operator: a.b")) is None
    library._destroy()


def test_a_guard_on_an_attribute_whose_source_is_the_attribute():
    """torch 2.11 states it so; later versions state the owner and the name."""
    owner = SimpleNamespace(name="L['self']")
    named = SimpleNamespace(name="L['self'].flag", base=owner, member="flag")
    guard = SimpleNamespace(
        create_fn=None,
        create_fn_name=lambda: "HASATTR",
        originating_source=named,
        user_stack=None,
    )
    assert [*dynamo._guard_facts([guard])] == [GuardFact("L['self']", "HASATTR", "flag", None)]


@pytest.mark.parametrize(
    ("make", "gradients"),
    [
        (torch.inference_mode, True),
        (torch.enable_grad, True),
        (lambda: torch.autocast("cpu", torch.bfloat16), False),
    ],
)
def test_contexts_in_a_graph_are_recognized(make, gradients):
    class Inside(torch.nn.Module):
        def forward(self, x):
            with make():
                return x @ x

    with dynamo.dynamo_tracing("backed"):
        captured = dynamo.capture_full_graph(Inside(), (torch.zeros(2, 2),), {})
    targets = [node.target for node in captured.graph.graph.nodes if node.op == "call_function"]
    assert any(map(dynamo.is_gradient_switch, targets)) is gradients
    assert (dynamo.enter_autocast in targets) is not gradients
    assert (dynamo.exit_autocast in targets) is not gradients


def test_current_shape_env_is_that_of_the_sizes_a_backend_gets():
    found = []

    def backend(graph, inputs):
        env = dynamo.current_shape_env()
        found.extend(env is x.node.shape_env for x in inputs if isinstance(x, torch.SymInt))
        return graph

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.zeros(5))
    assert found == [True]


def test_what_tracing_needs_is_imported():
    """Before it is used, in a process of its own: tests/torch_compat/test_first_imports.py."""
    dynamo.import_dynamo()
    assert "torch._dynamo.functional_export" in sys.modules
