"""A process with an accelerator that is no CUDA device: random numbers, autocast and keys."""

from types import SimpleNamespace

import pytest
import torch

from piecegraph.compile.bundle.key_factors import device_factors
from piecegraph.compile.conditions.values import Undescribable
from piecegraph.runtime.capture.dummy_batch import preserve_rng_state
from piecegraph.torch_compat.basics.devices import (
    autocast_devices,
    device_facts,
    devices_in_use,
    graph_classes,
    runs_triton,
)
from piecegraph.torch_compat.basics.tensors import under_this_autocast

XPU = torch.device("xpu")


@pytest.fixture
def xpu(monkeypatch):
    """torch's module of the one XPU of this process, which has seeds instead of generators."""
    seeds = [7]
    module = SimpleNamespace(
        seeds=seeds,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        get_rng_state=lambda device: seeds[device],
        set_rng_state=lambda state, device: seeds.__setitem__(device, state),
        get_device_name=lambda device: "Max 1550",
        get_device_capability=lambda device: {"version": "12.60.7", "sub_group_sizes": [16, 32]},
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: XPU)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_its_generators_are_restored_once_it_is_in_use(xpu):
    with preserve_rng_state():
        xpu.seeds[0] = 8
    assert xpu.seeds == [7]
    xpu.is_initialized = lambda: False
    assert devices_in_use() == ("xpu", range(0))


def test_its_autocast_is_kept(xpu):
    assert autocast_devices() == ("cpu", "cuda", "xpu")
    torch.set_autocast_enabled("xpu", True)
    try:
        fn = under_this_autocast(lambda: torch.is_autocast_enabled("xpu"))
    finally:
        torch.set_autocast_enabled("xpu", False)
    assert fn()


def test_f6_its_key_names_the_device_and_not_the_cpu(xpu):
    factors = device_factors(XPU)
    assert "Max 1550" in factors["is"]
    assert "12.60.7" in factors["is"]
    assert factors.keys() == {"type", "index", "is"}
    xpu.get_device_name = lambda device: "B580"
    assert device_factors(XPU) != factors


def test_f6_a_device_that_states_nothing_has_no_key(xpu):
    del xpu.get_device_capability
    with pytest.raises(LookupError):
        device_facts(XPU)
    with pytest.raises(Undescribable, match=r"device has no description: torch\.xpu states"):
        device_factors(XPU)


def test_inductor_has_triton_for_all_but_two():
    kinds = ("cpu", "mps", "cuda", "xpu")
    assert [runs_triton(torch.device(kind)) for kind in kinds] == [False, False, True, True]


def test_captures_of_all_devices_are_seen():
    assert graph_classes()[torch.cuda.CUDAGraph] == "a CUDA graph"
    assert all(hasattr(each, "capture_begin") for each in graph_classes())
