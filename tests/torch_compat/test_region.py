"""The forms of arguments, and names among the arguments of nodes."""

from types import SimpleNamespace

import pytest
import torch

from piecegraph.torch_compat.tracing.dynamo import import_dynamo

pytestmark = pytest.mark.compile


def test_arguments_of_different_form():
    import_dynamo()
    from torch._dynamo.variables import ConstantVariable, ListVariable, TupleVariable

    from piecegraph.torch_compat.faster.equal_layers.region import form_of

    def form(*values):
        items = [ConstantVariable.create(each) for each in values]
        return form_of(TupleVariable(items), [])

    different = [form(1), form(True), form(1.0), form(0.0), form(-0.0), form("1"), form(1, None)]
    assert len({*different}) == len(different)
    assert form(1, "a") == form(1, "a")
    assert form_of(ListVariable([]), []) is None  # may be changed by the call


def test_what_tells_tensors_and_sources_apart():
    import_dynamo()

    from piecegraph.torch_compat.faster.equal_layers.region import metadata

    one = torch.zeros(4, 4)
    others = [
        torch.zeros(4, 4).t(),
        one[:2],
        one.double(),
        one[1:],
        torch.nn.Parameter(one),
        one.view(2, 8),
    ]
    assert all(metadata(one) != metadata(other) for other in others)
    assert metadata(one) == metadata(torch.ones(4, 4))


def test_results_of_nodes_are_compared_by_form():
    import_dynamo()
    from piecegraph.torch_compat.faster.equal_layers.calls import form_of_node

    def node(*results):
        made = torch.fx.Graph().call_function(torch.relu, ())
        made.meta["example_value"] = results
        return made

    one = form_of_node(node(torch.zeros(2, 3), 4))
    assert one == form_of_node(node(torch.ones(2, 3), 4))
    assert one != form_of_node(node(torch.zeros(2, 3), 5))
    assert one != form_of_node(node(torch.zeros(3, 2).t(), 4))


def test_a_source_is_found_in_expressions_of_what_is_below_it():
    import_dynamo()
    from torch._dynamo.source import AttrSource, LocalSource

    from piecegraph.torch_compat.faster.equal_layers.region import pattern_of

    found = pattern_of(AttrSource(LocalSource("self"), "a"))
    assert found.search("L['self'].a.weight")
    assert not found.search("L['self'].ab.weight")


def test_changes_of_plain_objects_are_compared_and_of_others_unknown():
    import_dynamo()
    from torch._dynamo.side_effects import AttributeMutationExisting
    from torch._dynamo.source import LocalSource
    from torch._dynamo.variables import ListVariable, UserDefinedObjectVariable

    from piecegraph.torch_compat.faster.equal_layers.region import changes_of

    class Effects:
        def __init__(self, *variables):
            self.id_to_variable = dict(enumerate(variables))
            self.store_attr_mutations = {each: {"count": 1} for each in variables}

        def is_modified(self, variable):
            return True

    def changes(*variables):
        return changes_of(SimpleNamespace(output=SimpleNamespace(side_effects=Effects(*variables))))

    there = {"mutation_type": AttributeMutationExisting(), "source": LocalSource("x")}
    own = UserDefinedObjectVariable(SimpleNamespace(), **there)
    other = UserDefinedObjectVariable(SimpleNamespace(), **there)
    made = ListVariable([], **there)
    assert changes() == []
    assert [change[1:] for change in changes(own)] == [("count", 1)]
    assert changes(own) == changes(own)
    assert changes(own) != changes(other)
    assert changes(own, made) is None
