"""Hooks of modules, and the dict that holds a parameter or buffer."""

from functools import partial

import torch
from torch import nn
from torch._dynamo.mutation_guard import install_generation_tagging_init

from piecegraph.torch_compat.basics import modules
from piecegraph.torch_compat.basics.modules import untagged


def hook(*args):
    return None


def test_forward_hooks_of_a_module():
    module = nn.Linear(2, 2)
    assert not any(modules.forward_hooks(module).values())
    module.register_forward_hook(hook)
    module.register_forward_pre_hook(hook)
    assert list(modules.forward_hooks(module).values()) == [[hook], [hook]]


def test_hooks_of_all_modules():
    before = len(modules.global_forward_hooks())
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert modules.global_forward_hooks()[before:] == [hook]
    finally:
        handle.remove()


def test_a_tensor_is_found_in_its_dict():
    module = nn.BatchNorm1d(2)
    assert modules.tensor_dict(module, "weight")["weight"] is module.weight
    assert modules.tensor_dict(module, "running_mean")["running_mean"] is module.running_mean


def test_a_place_tells_whether_a_tensor_is_conjugated():
    tensor = torch.ones(2, dtype=torch.complex64)
    assert modules.place_of(tensor) == modules.place_of(tensor[:])
    assert modules.place_of(tensor) != modules.place_of(tensor.conj())


def test_places_of_replaced_tensors_and_modules_are_read():
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2)))
    names = ("0.0.weight", "0.0.running_mean")
    reads = [modules.place_reader(model, name, torch.Tensor.data_ptr) for name in names]

    def places():
        tensors = (model[0][0].weight, model[0][0].running_mean)
        return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]

    assert [read() for read in reads] == places()
    held = model[0][0].weight, model[0][0].running_mean
    assert [modules.weight_place(each, torch.Tensor.data_ptr) for each in held] == places()
    model[0][0].weight = nn.Parameter(torch.ones(2))
    model[0][0].running_mean = torch.ones(2)
    assert [read() for read in reads] == places()
    model[0] = nn.Sequential(nn.BatchNorm1d(2))
    assert [read() for read in reads] == places()
    model[0][0].weight = None
    assert reads[0]() is None
    del model[0]
    assert reads[1]() is None


def test_function_that_a_call_runs():
    class Called(nn.Linear):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    module = nn.Linear(2, 2)
    assert modules.called_function(module) is nn.Linear.forward
    module.forward = partial(module.forward)
    assert modules.called_function(module) is nn.Linear.forward
    module.register_forward_hook(hook)
    assert modules.called_function(module) is nn.Module.__call__
    assert modules.called_function(Called(2, 2)) is Called.__call__


def test_what_dynamo_calls_from_its_own_init_of_modules():
    install_generation_tagging_init()
    inner = untagged(nn.Module.__init__)
    assert nn.Module.__init__ is not inner
    assert inner.__module__ == nn.Module.__module__
    assert inner.__qualname__ == "Module.__init__"
    assert untagged(inner) is untagged(nn.Linear) is untagged(print) is None


def test_module_inside_a_compiled_one():
    module = nn.Linear(2, 2)
    assert modules.original_module(module) is module
    assert modules.original_module(torch.compile(module)) is module


def test_weights_on_the_meta_device_have_memory_for_a_while():
    class Kept(torch.nn.Parameter):
        pass

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[0].bias = Kept(model[0].bias.detach(), requires_grad=False)
    model[0].bias.loader = "a loader"
    model.tied = model[0].weight
    model[1].running_mean = torch.ones(4)
    before = model.state_dict(keep_vars=True)
    with modules.allocated(model, torch.device("cpu")):
        forms = {name: (each.shape, each.device.type) for name, each in model.state_dict().items()}
        assert forms == {name: (each.shape, "cpu") for name, each in before.items()}
        assert model.tied is model[0].weight
        assert type(model[0].bias) is Kept
        assert model[0].bias.loader == "a loader"
        assert not model[0].bias.requires_grad
        assert model[1].running_mean is before["1.running_mean"]
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is before[name] for name in before)
