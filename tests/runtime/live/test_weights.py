"""Weights and watched buffers: in place is fine, moved is an error, `refresh` follows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import Batch
from piecegraph.errors import ModelMismatch, MovedTensor

from ..conftest import tensors_alive


def replace_weight(model: nn.Module) -> str:
    layer = model.layers[1]
    layer.weight = nn.Parameter(torch.rand_like(layer.weight) + 1, requires_grad=False)
    return "layers.1.weight"


def move_weight(model: nn.Module) -> str:
    layer = model.layers[2]
    layer.bias.data = torch.rand_like(layer.bias) + 1
    return "layers.2.bias"


def captured(serve: Callable[..., Any], **settings: Any) -> Any:
    served = serve(**settings)
    served.prepared.capture()
    served.prepared.seal()
    for lengths in ((1, 1), (3,), (12,)):
        served.step(*lengths)
    return served


def test_an_update_in_place_needs_nothing(serve: Callable[..., Any]) -> None:
    served = captured(serve)
    served.model.layers[0].weight.mul_(2)
    assert served.prepared.refresh() == ()
    for lengths in ((1, 1), (3,), (12,)):
        served.step(*lengths)


@pytest.mark.parametrize("change", [replace_weight, move_weight])
@pytest.mark.parametrize("lengths", [(1, 1), (3,), (12,)])
def test_failure_19_no_step_reads_weights_that_were_replaced(
    serve: Callable[..., Any], change: Callable[[nn.Module], str], lengths: tuple[int, ...]
) -> None:
    served = captured(serve, options={"fail_on_moved_inputs": False})  # as on a device
    kept = [parameter.data for parameter in served.model.parameters()]
    name = change(served.model)
    x = torch.ones(sum(lengths), 4)

    def step_until_found() -> None:  # at the latest when every weight was checked in turn
        for _ in kept:
            served.prepared(x, batch=served.batch(*lengths))

    with pytest.raises(MovedTensor, match=name):
        step_until_found()
    for other in ((1, 1), (3,), (12,)):  # and from then on in the first step of any batch
        with pytest.raises(MovedTensor, match=name):
            served.prepared(torch.ones(sum(other), 4), batch=served.batch(*other))


@pytest.mark.parametrize("change", [replace_weight, move_weight])
def test_refresh_captures_again_what_reads_replaced_weights(
    serve: Callable[..., Any], change: Callable[[nn.Module], str]
) -> None:
    served = captured(serve)
    before = served.captured()
    name = change(served.model)
    assert list(served.prepared.refresh()) == before
    (event,) = served.prepared.events.named("refresh")
    assert set(map(tuple, event.facts["stale"].values())) == {(name,)}
    assert not served.prepared.events.named("after_seal")
    assert served.captured() == before
    for lengths in ((1, 1), (3,), (12,)):
        served.step(*lengths)
    assert served.prepared.refresh() == ()


def test_refresh_captures_again_only_what_is_stale(serve: Callable[..., Any]) -> None:
    served = serve()
    first, second = torch.zeros(4), torch.zeros(4)
    served.prepared.watch("kv_cache", first)
    served.prepared.capture()
    served.prepared.watch("kv_cache", second)
    with pytest.raises(MovedTensor, match="kv_cache"):
        served.step(1, 1)
    recordings = dict(served.prepared.recordings())
    graph_index = next(iter(recordings))
    served.prepared._graphs.captured[
        graph_index
    ].addresses = served.prepared._graphs.addresses.snapshot()
    assert set(served.prepared.refresh()) == set(recordings) - {graph_index}
    assert dict(served.prepared.recordings())[graph_index] is recordings[graph_index]
    served.step(1, 1)
    assert first.numel() == 4


def test_failure_20_a_freed_workspace_stops_graphs_until_it_is_watched_again(
    serve: Callable[..., Any],
) -> None:
    served = serve()
    workspace = torch.zeros(4)
    served.prepared.watch("workspace", workspace)
    served.prepared.capture()
    served.step(1, 1)
    del workspace
    with pytest.raises(MovedTensor, match="workspace .* freed now"):
        served.step(3)
    anew = torch.zeros(4)
    served.prepared.watch("workspace", anew)
    assert len(served.prepared.refresh()) == len(served.captured())
    served.step(3)
    assert anew.numel() == 4


def test_weights_of_another_form_are_refused(serve: Callable[..., Any]) -> None:
    served = captured(serve)
    served.model.layers[0].bias = nn.Parameter(torch.ones(4, 1), requires_grad=False)
    with pytest.raises(ModelMismatch, match=r"layers\.0\.bias"):
        served.prepared.refresh()


def test_weights_loaded_before_the_capture_are_found(serve: Callable[..., Any]) -> None:
    served = serve()
    replace_weight(served.model)
    served.prepared.capture()
    for lengths in ((1, 1), (3,), (12,)):
        served.step(*lengths)


def test_release_frees_everything_and_capture_restores_it(serve: Callable[..., Any]) -> None:
    served = captured(serve)
    before, used = served.captured(), served.backend.memory().used
    served.prepared.release()
    assert served.captured() == []
    assert served.backend.memory().used == 0 < used
    assert served.step(1, 1) == "NONE 2"
    served.prepared.capture()
    assert served.captured() == before
    assert served.backend.memory().used == used
    assert served.step(1, 1) == "FULL 2"


def test_failure_18_after_release_no_recording_holds_an_address(serve: Callable[..., Any]) -> None:
    served = captured(serve)
    served.prepared.release()
    move_weight(served.model)
    served.prepared.capture()
    served.prepared.run(served.prepared.dispatch(Batch(2, 2, True, 1)), torch.ones(2, 4))
    served.step(1, 1)


@pytest.mark.slow
def test_200_captures_and_closes_leak_nothing(serve: Callable[..., Any]) -> None:
    def cycle() -> None:
        served = serve(sizes=(2,))
        served.prepared.capture()
        served.step(1, 1)
        served.prepared.close()
        assert served.backend.memory().used == 0

    cycle()
    gc.freeze()  # existing objects need not be collected before each capture
    try:
        gc.collect()
        before = tensors_alive()
        for _ in range(200):
            cycle()
        gc.collect()
        assert tensors_alive() <= before
    finally:
        gc.unfreeze()
