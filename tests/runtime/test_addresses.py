"""Address checks: a tensor that moved or was freed is named before it is read."""

import re

import pytest
import torch
from torch import nn

from piecegraph.errors import MovedTensor
from piecegraph.runtime.backends.ownership import Ownership
from piecegraph.runtime.backends.replay.backend import ReplayBackend
from piecegraph.runtime.parts.checks.address_checks import Addresses
from piecegraph.runtime.parts.checks.shared_memory import named_weights


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return model.requires_grad_(False)


@pytest.fixture
def addresses(model):
    addresses = Addresses(ReplayBackend().address)
    addresses.watch_module(model, dict(named_weights(model)))
    return addresses


def move_data(model):
    kept = model[0].weight.data
    model[0].weight.data = torch.rand(2, 2)
    return kept


def replace_parameter(model):
    kept = model[0].bias
    model[0].bias = nn.Parameter(kept.clone(), requires_grad=False)
    return kept


def replace_buffer(model):
    kept = model[1].running_mean
    model[1].running_mean = kept.clone()
    return kept


def test_a_weight_of_another_form_at_its_address_is_named(model, addresses):
    snapshot = addresses.snapshot()
    model[0].weight.data = model[0].weight.data.t()
    assert snapshot.moved() == ["0.weight"]
    with pytest.raises(MovedTensor, match=r"with strides \(2, 1\) at .* strides \(1, 2\) now"):
        snapshot.check()


def check_two_tensors_a_step(model, snapshot):
    """Until each was compared."""
    for _ in range((len(model.state_dict()) + 1) // 2):
        snapshot.check_step()


def test_samples_compare_forms_as_well(model, addresses):
    """A graph still reads all elements of a weight that is now one of them, four times."""
    snapshot = addresses.snapshot()
    snapshot.check_step()
    weight = model[0].weight
    weight.data = weight.data.as_strided((2, 2), (0, 0))
    with pytest.raises(MovedTensor, match=r"^0\.weight .* strides \(0, 0\) now"):
        check_two_tensors_a_step(model, snapshot)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        pytest.param(move_data, "0.weight", id="failure_19_new_data"),
        pytest.param(replace_parameter, "0.bias", id="failure_19_a_new_parameter"),
        pytest.param(replace_buffer, "1.running_mean", id="failure_18_a_new_state_buffer"),
    ],
)
def test_what_was_moved_is_named(model, addresses, change, name):
    snapshot = addresses.snapshot()
    old = change(model)
    assert snapshot.moved() == [name]
    with pytest.raises(
        MovedTensor, match=f"^{re.escape(name)} moved after graphs were captured"
    ) as caught:
        snapshot.check()
    assert hex(old.data_ptr()) in str(caught.value)


def test_failure_20_a_freed_workspace_is_named():
    addresses = Addresses(ReplayBackend().address)
    workspace = torch.rand(4)
    addresses.watch("workspace", workspace)
    snapshot = addresses.snapshot()
    del workspace
    with pytest.raises(MovedTensor, match=r"^workspace moved after .* freed now"):
        snapshot.check()


def test_memory_that_only_recordings_hold_counts_as_freed():
    """The engine replaced it: without the check, graphs would go on to read the old memory."""
    addresses, recordings = Addresses(ReplayBackend().address), [Ownership(), Ownership()]
    cache = torch.rand(4)
    addresses.watch("kv_cache", cache[1:])  # a view that is dropped
    snapshot = addresses.snapshot()
    for ownership in recordings:
        ownership.find([cache])
    snapshot.check()
    del cache
    with pytest.raises(MovedTensor, match=r"^kv_cache moved after .* freed now"):
        snapshot.check()
    assert [len(ownership.found()) for ownership in recordings] == [1, 1]


def test_failure_21_released_memory_is_named_and_fine_when_it_is_back():
    addresses = Addresses(ReplayBackend().address)
    cache = torch.rand(4)
    addresses.watch("kv_cache", cache)
    snapshot = addresses.snapshot()
    home = cache.data
    cache.data = torch.empty(0)
    with pytest.raises(MovedTensor, match="kv_cache"):
        snapshot.check()
    cache.data = home
    snapshot.check()


def test_w15_samples_reach_every_tensor_in_turn(model, addresses):
    snapshot = addresses.snapshot()
    snapshot.check_step()
    kept = model[1].num_batches_tracked  # the last in turn
    model[1].num_batches_tracked = kept.clone()
    with pytest.raises(MovedTensor, match=r"1\.num_batches_tracked"):
        check_two_tensors_a_step(model, snapshot)


def test_w15_the_first_step_compares_everything(model, addresses):
    snapshot = addresses.snapshot()
    kept = model[1].bias
    model[1].bias = nn.Parameter(kept.clone(), requires_grad=False)
    with pytest.raises(MovedTensor, match=r"1\.bias"):
        snapshot.check_step()


def test_after_one_was_found_moved_no_snapshot_passes_by_sampling(model, addresses):
    first, second = addresses.snapshot(), addresses.snapshot()
    first.check_step()
    second.check_step()
    home = model[0].weight.data
    model[0].weight.data = torch.rand(2, 2)
    with pytest.raises(MovedTensor):
        first.check()
    for snapshot in (first, second, first):
        with pytest.raises(MovedTensor, match=r"0\.weight"):
            snapshot.check_step()
    model[0].weight.data = home
    first.check_step()
    second.check_step()


def test_a_check_of_all_does_not_wait_for_its_turn(model, addresses):
    inner = ("weight", "running_mean", "running_var", "bias")
    code = addresses.snapshot(["0.weight", "0.bias", *(f"1.{name}" for name in inner)])
    code.check_step()
    kept = model[1].bias
    model[1].bias = nn.Parameter(kept.clone(), requires_grad=False)
    code.check_step()  # two of six are in turn
    text = r"^1\.bias moved after the model was prepared.*call refresh\(\) to follow it"
    with pytest.raises(MovedTensor, match=text):
        code.check_all()


def test_a_name_given_to_another_tensor_makes_the_first_stale():
    addresses = Addresses(ReplayBackend().address)
    first, second = torch.rand(2), torch.rand(2)
    addresses.watch("kv_cache", first)
    snapshot = addresses.snapshot()
    snapshot.check_step()
    addresses.watch("kv_cache", second)
    assert snapshot.moved() == ["kv_cache"]
    with pytest.raises(MovedTensor, match="kv_cache"):
        snapshot.check_step()
    assert first.numel() == 2


def test_a_snapshot_of_some_names_ignores_the_rest():
    addresses = Addresses(ReplayBackend().address)
    weight, cache = torch.rand(2), torch.rand(2)
    addresses.watch("weight", weight)
    addresses.watch("cache", cache)
    snapshot = addresses.snapshot(["weight"])
    del cache
    snapshot.check()
    for _ in range(3):
        snapshot.check_step()
