"""Weights and watched buffers: in place works, moved is an error, `refresh` follows."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from piecegraph import Batch, prepare
from piecegraph.errors import ModelChanged, ModelMismatch, MovedTensor, RecordingReleased
from piecegraph.runtime.backends.replay.backend import ReplayBackend
from piecegraph.runtime.capture.graph_set import GraphSet
from piecegraph.runtime.capture.recording import Recording
from piecegraph.runtime.forward_context import ForwardContext
from piecegraph.runtime.parts.checks.address_checks import Addresses, MetadataAddresses
from piecegraph.runtime.parts.checks.model_check import ModelCheck
from piecegraph.runtime.parts.checks.step_reads import ALL_EVERY

from ..conftest import captured as captured_model
from ..conftest import small_config, strict_backend, tensors_alive
from .conftest import Scaled


def replace_weight(model):
    layer = model.layers[1]
    layer.weight = nn.Parameter(torch.rand_like(layer.weight) + 1, requires_grad=False)
    return "layers.1.weight"


def move_weight(model):
    layer = model.layers[2]
    layer.bias.data = torch.rand_like(layer.bias) + 1
    return "layers.2.bias"


def replace_module(model):
    old, model.layers[1] = model.layers[1], type(model.layers[1])()
    model.layers[1].requires_grad_(False).bias.copy_(old.bias + 1)
    return "layers.1."


def swap_data(model):
    layer = model.layers[0]
    layer.weight.data, kept = torch.rand_like(layer.weight) + 1, layer.weight.data
    model.kept = [kept]  # so that no new tensor has its address
    return "layers.0.weight"


CHANGES = [replace_weight, move_weight, replace_module, swap_data]
LENGTHS = [(1, 1), (3,), (12,)]


def steps(served):
    for lengths in LENGTHS:
        served.step(*lengths)


def captured(serve, **settings):
    served = serve(**settings).capture()
    served.prepared.seal()
    steps(served)
    return served


def test_an_update_in_place_needs_nothing(serve):
    served = captured(serve)
    served.model.layers[0].weight.mul_(2)
    assert served.prepared.refresh() == ()
    steps(served)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_failure_19_no_step_reads_weights_that_were_replaced(serve, change, lengths):
    served = captured(serve, options={"fail_on_moved_inputs": False})  # as on a device
    kept = [parameter.data for parameter in served.model.parameters()]
    name = change(served.model)
    x = torch.ones(sum(lengths), 4)

    def step_until_found():  # at the latest when every weight was checked in turn
        for _ in kept:
            served.prepared(x, batch=served.batch(*lengths))

    with pytest.raises(MovedTensor, match=name):
        step_until_found()
    for other in LENGTHS:  # and from then on in the first step of any batch
        with pytest.raises(MovedTensor, match=name):
            served.prepared(torch.ones(sum(other), 4), batch=served.batch(*other))


@pytest.mark.parametrize("change", CHANGES)
def test_refresh_captures_again_what_reads_replaced_weights(serve, change):
    served = captured(serve)
    before = served.captured()
    name = change(served.model)
    assert list(served.prepared.refresh()) == before
    (event,) = served.prepared.events.named("refresh")
    assert all(moved[0].startswith(name) for moved in event.facts["stale"].values())
    assert event.facts["moved"][0].startswith(name)
    assert not served.prepared.events.named("after_seal")
    assert served.captured() == before
    steps(served)
    assert served.prepared.refresh() == ()


def as_on_a_device(served):
    """Addresses are compared in turn, and found in place so far."""
    checks = served.prepared.parts.checks
    assert not checks._in_turn
    checks._in_turn = True
    served.prepared._core.checks_changed()
    steps(served)
    served.step(12)
    return served


LATE = {"fail_on_moved_inputs": False}  # only what the checks notice counts


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("emulated", "change"),
    [(True, move_weight), (False, replace_weight), (False, replace_module)],
)
def test_a_replaced_weight_is_noticed_by_the_next_step(serve, change, lengths, emulated):
    served = captured(serve, options=LATE)
    if not emulated:
        as_on_a_device(served)
    name = change(served.model)
    with pytest.raises(MovedTensor, match=name):
        served.step(*lengths)


@pytest.mark.parametrize("how", ["step", "idle", "after a release"])
@pytest.mark.parametrize("change", [replace_weight, replace_module])
def test_a_graph_captured_after_a_weight_was_replaced_has_the_old_one(serve, change, how):
    late = how != "after a release"
    served = serve(options=LATE, strategy="lazy" if late else "eager").capture()
    if not late:
        served.prepared.release(keep="plan")
    name = change(served.model)
    if how == "idle":
        while served.prepared.capture_idle(1e9):
            pass
    for _ in range(2):
        with pytest.raises(MovedTensor, match=name):
            served.step(1, 1)
    assert served.captured()
    assert list(served.prepared.refresh()) == served.captured()
    served.step(1, 1)
    assert not served.prepared.refresh()


@pytest.mark.parametrize("change", [move_weight, swap_data])
def test_a_graph_captured_after_a_weights_data_moved_reads_them(serve, change):
    served = serve(options=LATE, strategy="lazy").capture()
    change(served.model)
    served.step(1, 1)
    assert served.captured()


def test_code_that_is_kept_does_not_hide_that_a_weight_was_replaced(serve):
    served = serve(options=LATE).capture()
    name = replace_weight(served.model)
    served.prepared.accept_changes()
    served.prepared.capture()  # binds the code, and leaves graphs as they are
    with pytest.raises(MovedTensor, match=name):
        served.step(1, 1)
    served.prepared.release(keep="plan")
    served.step(1, 1)


@pytest.mark.parametrize("change", [move_weight, swap_data])
def test_a_refresh_tells_other_prepared_models_of_the_module(serve, change):
    first = captured(serve, options=LATE)
    second = as_on_a_device(captured(serve, model=first.model, options=LATE))
    name = change(first.model)
    assert first.prepared.refresh()
    with pytest.raises(MovedTensor, match=name):
        second.step(3)
    assert second.prepared.refresh()
    second.step(3)


def test_memory_given_back_is_noticed_by_the_next_step(serve):
    served, cache, other = serve(options=LATE), torch.zeros(8), torch.zeros(8)
    served.prepared.watch("kv_cache", cache)
    served.prepared.watch("other", other)
    served.prepared.capture()
    for _ in range(3):
        served.step(1, 1)
    cache.untyped_storage().resize_(0)
    with pytest.raises(MovedTensor, match="kv_cache .* freed now"):
        served.step(1, 1)


def test_nothing_of_a_closed_or_dropped_model_stays_in_torchs_hooks(serve):
    before = len(module._global_parameter_registration_hooks)
    closed, dropped = serve(), serve()
    assert len(module._global_parameter_registration_hooks) == before + 2
    closed.prepared.close()
    assert len(module._global_parameter_registration_hooks) == before + 1
    del dropped
    gc.collect()
    assert len(module._global_parameter_registration_hooks) == before


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.down.weight = self.up.weight
        self.requires_grad_(False)

    def forward(self, x):
        return self.down(self.up(x))


@pytest.mark.parametrize("traced", [True, False])
def test_a_weight_that_is_tied_no_more_is_an_error(monkeypatch, traced):
    monkeypatch.setattr(ModelCheck, "check_step", lambda *_: None)  # sooner or later
    model, x = Tied(), torch.rand(4, 4)
    prepared = captured_model(model, 4, compile=traced, capture_sizes=(4,))
    batch = Batch(4, 4)
    assert torch.equal(prepared(x, batch=batch), model(x))
    model.down.weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)
    with pytest.raises(MovedTensor, match=r"down\.weight"):
        prepared(x, batch=batch)
    if traced:
        with pytest.raises(ModelChanged, match="weight"):
            prepared.refresh()
    else:
        prepared.refresh()
        assert torch.equal(prepared(x, batch=batch), model(x))


class Blocks:
    """No module."""


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.blocks = {"first": [nn.Linear(4, 4)]}, Blocks()
        self.blocks.layers = [nn.Sequential(nn.Linear(4, 4))]

    def forward(self, x):
        for layer in (*self.layers["first"], *self.blocks.layers):
            x = layer(x)
        return x


def replace_in_block(model):
    model.layers[3][0].weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)


def untie(model):
    model.layers[1].tied = nn.Parameter(torch.rand(4, 4), requires_grad=False)


@pytest.mark.parametrize("change", [replace_weight, move_weight, replace_in_block, untie])
def test_weights_of_modules_in_lists_are_watched_and_followed_without_a_trace(monkeypatch, change):
    monkeypatch.setattr(ModelCheck, "check_step", lambda *_: None)
    model, x, batch = Plain().requires_grad_(False), torch.rand(4, 4), Batch(4, 4)
    config = small_config(4, compile=False, capture_sizes=(4,))
    prepared = prepare(model, config, backend=strict_backend(**LATE))
    layers = model.layers["first"]
    layers += [nn.Linear(4, 4), nn.Linear(4, 4)]  # after `prepare`
    layers[1].tied = layers[1].weight
    prepared.capture()
    assert not prepared.report()["unwatched"]
    checks = prepared.parts.checks
    checks._in_turn = change is not move_weight  # torch tells of others
    prepared._core.checks_changed()
    assert torch.equal(prepared(x, batch=batch), model(x))  # next is the turn of the first layer
    change(SimpleNamespace(layers=layers + model.blocks.layers))
    with pytest.raises(MovedTensor, match=r"layers\['first'\]\[[12]\]\.|blocks.layers\[0\].0\."):
        prepared(x, batch=batch)
    assert prepared.refresh()
    assert torch.equal(prepared(x, batch=batch), model(x))


def test_swapped_tensors_are_refused_by_torch(serve):
    """Graphs hold weak references to what they read, and torch swaps no tensor that has one."""
    served = captured(serve)
    weight = served.model.layers[1].weight
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(weight, nn.Parameter(weight + 1, requires_grad=False))
    served.step(3)


def test_refresh_captures_again_only_what_is_stale(serve):
    served = serve()
    first, second = torch.zeros(4), torch.zeros(4)
    served.prepared.watch("kv_cache", first)
    served.prepared.capture()
    served.prepared.watch("kv_cache", second)
    with pytest.raises(MovedTensor, match="kv_cache"):
        served.step(1, 1)
    recordings = dict(served.prepared.recordings())
    graph_index = next(iter(recordings))
    checks = served.prepared.parts.checks
    relied = replace(checks._graphs[graph_index], addresses=checks.addresses.snapshot())
    checks._graphs[graph_index] = relied
    served.prepared._core.checks_changed()
    assert set(served.prepared.refresh()) == set(recordings) - {graph_index}
    assert dict(served.prepared.recordings())[graph_index] is recordings[graph_index]
    served.step(1, 1)
    assert first.numel() == 4


def test_failure_20_a_freed_workspace_stops_graphs_until_it_is_watched_again(serve):
    served = serve()
    workspace = torch.zeros(4)
    served.prepared.watch("workspace", workspace)
    served.prepared.capture()
    served.step(1, 1)
    replacement = torch.zeros(4)  # at another address than the one that is freed
    del workspace
    with pytest.raises(MovedTensor, match="workspace .* freed now"):
        served.step(3)
    served.prepared.watch("workspace", replacement)
    assert len(served.prepared.refresh()) == len(served.captured())
    served.step(3)
    assert replacement.numel() == 4


def test_weights_of_another_form_are_refused(serve):
    served = captured(serve)
    served.model.layers[0].bias = nn.Parameter(torch.ones(4, 1), requires_grad=False)
    with pytest.raises(ModelMismatch, match=r"layers\.0\.bias"):
        served.prepared.refresh()


class OfAnEngine(nn.Parameter):
    """A parameter of another class."""


def to_double(weight):
    weight.data = weight.data.double()


def to_strided(weight):
    weight.data = torch.rand(2 * len(weight))[::2]


def to_class(weight):
    weight.__class__ = OfAnEngine


FORMS = [to_double, to_strided, to_class]


@pytest.mark.parametrize("how", ["lazy", "idle", "after a release", "without graphs"])
@pytest.mark.parametrize("change", FORMS)
def test_no_capture_and_no_step_reads_a_weight_in_another_form(serve, change, how):
    """Here addresses are compared in turn, as on a device: forms are compared all at once."""
    served = serve(options=LATE, strategy="lazy" if how == "lazy" else "eager").capture()
    as_on_a_device(served)
    if how != "without graphs":
        served.prepared.release(keep="plan")
    there, weight = served.captured(), served.model.layers[2].bias
    kept, kind = weight.data, type(weight)
    change(weight)
    for _ in range(2):
        if how == "idle":
            with pytest.raises(ModelChanged, match=r"layers\.2\.bias"):
                served.prepared.capture_idle(1e9)
        for lengths in [(12,)] if how == "without graphs" else LENGTHS:
            with pytest.raises(ModelChanged, match=r"layers\.2\.bias"):
                served.step(*lengths)
        with pytest.raises(ModelMismatch, match=r"layers\.2\.bias"):
            served.prepared.refresh()
    assert served.captured() == there
    weight.data, weight.__class__ = kept, kind
    steps(served)
    assert served.captured()


def test_another_form_is_noticed_within_steps_of_code_and_then_in_each(serve):
    served = as_on_a_device(captured(serve, options=LATE))
    (forms,) = served.prepared.parts.checks._forms.values()

    def check(count):
        for _ in range(count):
            forms.check_step()

    check(ALL_EVERY)
    to_class(served.model.layers[2].bias)
    for count in ALL_EVERY, 1, 1:
        with pytest.raises(ModelChanged, match=r"layers\.2\.bias"):
            check(count)


@pytest.mark.parametrize("change", [to_double, to_strided])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_refresh_that_fails_leaves_no_graph_that_serves(serve, layer, name, change):
    served = as_on_a_device(captured(serve, options=LATE))
    change(getattr(served.model.layers[layer], name))
    with pytest.raises(ModelMismatch, match=rf"layers\.{layer}\.{name}"):
        served.prepared.refresh()
    for lengths in LENGTHS:
        with pytest.raises((MovedTensor, ModelChanged), match=rf"layers\.{layer}\.{name}"):
            served.step(*lengths)


@pytest.mark.parametrize("change", [to_double, to_strided])
def test_captures_without_a_trace_read_weights_in_any_form(serve, change):
    served = serve(options=LATE, compile=False).capture()
    served.prepared.release(keep="plan")
    change(served.model.layers[2].bias)
    served.step(1, 1)
    assert served.captured()


def test_weights_loaded_before_the_capture_are_found(serve):
    served = serve()
    replace_weight(served.model)
    served.prepared.capture()
    steps(served)


def test_release_frees_everything_and_capture_restores_it(serve):
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


def test_failure_18_after_release_no_recording_holds_an_address(serve):
    served = captured(serve)
    recordings = [recording for _, recording in served.prepared.recordings()]
    served.prepared.release()
    assert served.captured() == []
    for recording in recordings:
        with pytest.raises(RecordingReleased):
            recording.replay()
    move_weight(served.model)
    served.prepared.capture()
    served.prepared.run(served.prepared.dispatch(Batch(2, 2, True, 1)), torch.ones(2, 4))
    served.step(1, 1)


@pytest.mark.parametrize("action", ["refresh", "release"])
def test_the_device_is_idle_before_a_graph_is_freed(serve, monkeypatch, action):
    served, order, release = captured(serve), list[str](), Recording.release
    replace_weight(served.model)
    monkeypatch.setattr(ReplayBackend, "synchronize", lambda backend: order.append("wait"))
    monkeypatch.setattr(
        Recording, "release", lambda recording: (order.append("free"), release(recording))
    )
    getattr(served.prepared, action)()
    assert order[:2] == ["wait", "free"]


def test_stale_graphs_are_freed_before_the_first_is_captured_again(serve, monkeypatch):
    served = captured(serve, options={"limit": captured(serve).used})  # no room for one more
    before, order = served.captured(), []
    for name in ("remove", "record"):
        method = getattr(GraphSet, name)
        monkeypatch.setattr(
            GraphSet, name, lambda *a, n=name, m=method: (order.append(n), m(*a))[1]
        )
    replace_weight(served.model)
    stale = served.prepared.refresh()
    assert order == ["remove"] * len(stale) + ["record"] * len(stale)
    assert len(stale) > 1
    assert served.captured() == before


def test_a_watched_tensor_that_is_given_other_memory_is_noticed(serve):
    served = serve()
    cache = torch.zeros(4, 8)
    served.prepared.watch("kv_cache", cache)
    served.prepared.capture()
    served.step(1, 1)
    kept = cache.detach()
    cache.data = torch.zeros(4, 8)
    with pytest.raises(MovedTensor, match="kv_cache"):
        served.step(3)  # the first step of this graph compares all
    cache.data = kept
    served.step(1, 1)


def test_without_graphs_a_replaced_module_is_followed_at_the_first_refresh(serve):
    served = serve()
    served.step(3)
    replace_module(served.model)

    def step_until_found():
        for _ in served.prepared.compiled.weights:
            served.prepared(torch.ones(3, 4), batch=served.batch(3))

    with pytest.raises(MovedTensor, match=r"layers\.1\."):
        step_until_found()
    assert served.prepared.refresh() == ()
    (event,) = served.prepared.events.named("refresh")
    assert sorted(event.facts["moved"]) == ["layers.1.bias", "layers.1.weight"]
    served.step(3)


def test_a_watched_view_may_be_dropped_while_its_memory_lives(serve):
    served = serve()
    pages = torch.zeros(4, 8)
    served.prepared.watch("kv_cache", pages[1:])
    served.prepared.capture()
    gc.collect()
    for _ in range(3):
        served.step(1, 1)
    del pages
    with pytest.raises(MovedTensor, match="kv_cache .* freed now"):
        served.step(3)


def test_a_tensor_that_takes_another_place_in_layers_is_an_error_and_refresh_follows_it(serve):
    served = serve()
    spare = served.stage.starts.clone()
    served.prepared.watch("starts", served.stage.starts)
    served.prepared.watch("spare", spare)
    served.prepared.capture()
    assert served.prepared.report()["unwatched"] == []
    served.stage.starts = spare
    with pytest.raises(MovedTensor, match=r"layers\['stage'\]\.starts moved after"):
        served.step(1, 1)
    assert served.prepared.refresh()
    served.step(1, 1)


def test_tensors_that_a_full_graph_reads_unwatched_are_reported_once(serve, monkeypatch):
    served = serve()
    # without it the path is compared
    monkeypatch.setattr(type(served.stage), "graph_constants", ("starts",), raising=False)
    served.prepared.capture()
    (record,) = served.prepared.report()["unwatched"]
    assert record["tensors"] == ["layers['stage'].starts: int64[16]"]
    (event,) = served.prepared.events.named("capture.unwatched")
    assert event.facts["recording"].startswith("FULL")
    watched = serve()
    watched.prepared.watch("starts", watched.stage.starts)
    watched.prepared.capture()
    assert watched.prepared.report()["unwatched"] == []


@dataclass
class Metadata:
    starts: torch.Tensor
    unread: torch.Tensor


def test_failure_12_vllm_44868_metadata_in_other_memory_than_captured_is_an_error(serve):
    served = serve()
    starts = served.stage.starts

    def metadata_for(descriptor, mode):
        return {"attention": Metadata(starts[: descriptor.num_tokens], torch.zeros(2))}

    served.prepared.capture(metadata_for)
    batch, x = served.batch(1, 1), torch.ones(2, 4)
    for given in (starts[:2], starts[:1]):
        metadata = {"attention": Metadata(given, torch.zeros(2))}
        served.prepared(x, batch=batch, metadata=metadata)
    metadata = {"attention": Metadata(starts.clone(), torch.zeros(2))}
    with pytest.raises(MovedTensor, match=r"metadata\['attention'\]\.starts moved after"):
        served.prepared(x, batch=batch, metadata=metadata)


def test_failure_12_metadata_of_another_form_at_the_same_address_is_an_error(serve):
    served = serve()
    starts = served.stage.starts
    served.prepared.capture(lambda descriptor, mode: starts[: descriptor.num_tokens])
    batch, x = served.batch(1, 1), torch.ones(2, 4)
    for given, form in ((starts[::2], r"strides \(2,\) now"), (starts.view(torch.int32), "int32")):
        text = f"metadata has another form after .* at capture, .*{form}"
        with pytest.raises(MovedTensor, match=text):
            served.prepared(x, batch=batch, metadata=given)
    served.prepared(x, batch=batch, metadata=starts)


def test_metadata_that_is_conjugated_or_negated_where_it_lies_is_an_error():
    values = torch.ones(2, dtype=torch.complex64)
    for tensor, name in ((values.conj(), "conjugated"), (values.conj().imag, "negated")):
        plain = values if name == "conjugated" else values.imag
        addresses = MetadataAddresses({"metadata": plain}, [values.data_ptr()], {})
        addresses.check_step(ForwardContext({}, plain), ())
        with torch.inference_mode():
            addresses.check_step(ForwardContext({}, plain), ())
        with pytest.raises(MovedTensor, match=f"at capture, {name} "):
            addresses.check_step(ForwardContext({}, tensor), ())


def test_a_weight_that_is_conjugated_where_it_lies_is_an_error():
    model = nn.Module()
    model.register_buffer("table", torch.ones(2, dtype=torch.complex64))
    addresses = Addresses(torch.Tensor.data_ptr)
    addresses.watch_module(model, dict(model.named_buffers()))
    snapshot = addresses.snapshot()
    model.table = model.table.conj()
    with pytest.raises(MovedTensor, match="at capture, conjugated "):
        snapshot.check()


def test_metadata_of_many_tensors_is_compared_in_turn():
    shared = torch.zeros(2)
    tensors = [shared] * 40 + [torch.zeros(2) for _ in range(10)]
    by_path = {f"metadata['layers'][{at}]": tensor for at, tensor in enumerate(tensors)}
    addresses = MetadataAddresses(by_path, [tensor.data_ptr() for tensor in tensors], {})

    def check(metadata):
        addresses.check_step(ForwardContext({}, metadata), ())

    for _ in range(ALL_EVERY + 1):
        check({"layers": tensors})
    kept, tensors[49] = tensors[49], tensors[49].clone()

    def three_steps():
        for _ in range(3):
            check({"layers": tensors})

    with pytest.raises(MovedTensor, match=r"metadata\['layers'\]\[49\]"):
        three_steps()
    assert kept.numel()


def test_metadata_that_moves_later_is_noticed_at_once(serve):
    served = serve()
    starts = served.stage.starts
    served.prepared.capture(lambda descriptor, mode: starts[: descriptor.num_tokens])
    batch, x = served.batch(1, 1), torch.ones(2, 4)
    for _ in range(70):
        served.prepared(x, batch=batch, metadata=starts[:2])
    with pytest.raises(MovedTensor, match="metadata moved after"):
        served.prepared(x, batch=batch, metadata=starts.clone())
    with pytest.raises(MovedTensor, match=r"metadata has another form after .* strides \(2,\) now"):
        served.prepared(x, batch=batch, metadata=starts[::2])


class Kept(Scaled):
    """What a parameter is made of stays of this class."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Quantized(nn.Module):
    def __init__(self):
        super().__init__()
        weight = Kept(torch.rand(4), torch.tensor(2.0))
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return x * self.weight + 1


@pytest.mark.compile
def test_inner_tensors_of_a_tensor_subclass_are_followed():
    model = Quantized()
    prepared = captured_model(model, 8, strict_backend(**LATE), capture_sizes=(2, 4))
    x = torch.ones(2, 4)

    def step():
        return prepared(x, batch=Batch(2, 2))

    def expected():
        return x * (model.weight.numbers * model.weight.scale) + 1

    assert prepared.dispatch(Batch(2, 2)).mode.name == "FULL"
    assert torch.equal(step(), expected())
    model.weight.scale.fill_(3.0)
    assert torch.equal(step(), expected())
    model.weight.scale = torch.tensor(4.0)
    with pytest.raises(MovedTensor, match=r"weight\.scale"):
        step()
    assert prepared.refresh()
    assert torch.equal(step(), expected())


@pytest.mark.slow
@pytest.mark.heavy
def test_200_captures_and_closes_leak_nothing(serve):
    def cycle():
        served = serve(sizes=(2,)).capture()
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
