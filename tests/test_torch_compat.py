"""Each private name of torch that we use is there and does what we rely on."""

from __future__ import annotations

from typing import Any

import torch

from piecegraph import torch_compat


def test_without_modes_hides_calls_from_a_mode() -> None:
    seen: list[Any] = []

    class Spy(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func)
            return func(*args, **kwargs)

    with Spy():
        with torch_compat.without_modes():
            torch.ones(2)
        assert not seen
        torch.ones(2)
    assert seen


def test_storages_are_told_apart_also_when_freed() -> None:
    tensor = torch.rand(3)
    assert torch_compat.storage_id(tensor[1:]) == torch_compat.storage_id(tensor)
    taken = torch_compat.storage_id(tensor)
    weak = torch_compat.weak_storage(tensor)
    del tensor
    others = [torch.rand(3) for _ in range(1000)]
    assert weak.expired()
    assert taken not in {torch_compat.storage_id(other) for other in others}


def test_composite_operators_are_known() -> None:
    assert torch_compat.is_composite(torch.ops.aten.reshape.default)
    assert not torch_compat.is_composite(torch.ops.aten.add.Tensor)


def test_an_unowned_alias_of_nothing_is_nothing() -> None:
    assert torch_compat.unowned_alias(torch.rand(0, 3)).shape == (0, 3)


def test_names_for_a_device_exist_without_one() -> None:
    for name in ("_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert hasattr(torch._C, name) or not torch.cuda.is_available()
    for name in ("capture_begin", "capture_end", "instantiate", "raw_cuda_graph", "replay"):
        assert hasattr(torch.cuda.CUDAGraph, name)


def test_faking_is_noticed() -> None:
    assert not torch_compat.is_faking()
    with torch_compat.fresh_fake_mode():
        assert torch_compat.is_faking()
    assert not torch_compat.is_faking()


def test_gradients_are_turned_off_and_on() -> None:
    torch_compat.set_grad_enabled(False)
    assert not torch_compat.is_grad_enabled()
    torch_compat.set_grad_enabled(True)
    assert torch_compat.is_grad_enabled()
