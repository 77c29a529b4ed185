"""A model is compiled while its weights load, in a thread of the engine."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest
import torch
from torch import nn

from piecegraph import Config, prepare
from piecegraph.cache.inspection import manifests
from piecegraph.errors import InvalidSetting, PrepareFailed
from tests.text_compiler import use_text_compiler
from tests.unkept import UNKEPT, settings_that_keep_nothing

from ..conftest import right_step

INPUTS = {"x": "float32[num_tokens, 4]"}


class Layers(nn.Module):
    gain = 1.0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale + self.gain
        return x


@pytest.fixture
def loaded(monkeypatch):
    """The model that a loader reads, with other weights than any other."""
    use_text_compiler(monkeypatch)
    torch.manual_seed(1)
    return Layers().eval()


@pytest.fixture
def reading():
    with ThreadPoolExecutor(1) as thread:
        yield thread


def config(folder, **settings):
    common = {"inputs": INPUTS, "max_num_tokens": 8, "graph_mode": "NONE", "compiler": "text"}
    return Config(**{**common, "cache_dir": folder, **settings})


def without_weights(device="meta"):
    with torch.device(device):
        return Layers().eval()


def bundles(folder):
    """Key and contents of each bundle."""
    return [(each.key.digest, each.blobs) for each, _ in manifests(folder, "bundle")]


def same(served, model):
    for size in (1, 5):
        right_step(served, model, torch.randn(size, 4))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_vllm_38675_a_model_is_compiled_while_its_weights_load(device, loaded, reading, tmp_path):
    """They come from a thread, which on a CPU writes into the model during the trace."""
    model, stored, begun = without_weights(device), Event(), Event()

    def read():
        if device == "cpu":
            for name, tensor in loaded.state_dict().items():
                model.state_dict()[name].copy_(tensor)
                begun.set()
        assert stored.wait(60)
        return loaded.state_dict()

    files = reading.submit(read)
    assert device == "meta" or begun.wait(60)

    def weights():
        assert len(bundles(tmp_path / "early")) == 1
        stored.set()
        model.load_state_dict(files.result(60), assign=device == "meta")

    early = config(tmp_path / "early")
    served = prepare(model, early, weights=weights, device="cpu" if device == "meta" else None)
    report = served.report()
    assert report["cache"]["hit"]
    assert report["counters"]["dynamo_traces"] == 1
    assert "weights" in [phase["name"] for phase in report["startup"]["phases"]]
    same(served, loaded)
    prepare(loaded, config(tmp_path / "late"))
    assert bundles(tmp_path / "early") == bundles(tmp_path / "late")


def test_what_a_value_of_the_loader_changes_is_compiled_after_it_and_named(loaded, tmp_path):
    """The forward reads a number that the loader sets."""
    model = without_weights()
    expected = copy.deepcopy(loaded)
    expected.gain = 3.0

    def weights():
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.gain = 3.0

    served = prepare(model, config(tmp_path), weights=weights, device="cpu")
    cache = served.report()["cache"]
    assert not cache["hit"]
    assert "gain" in cache["detail"]
    assert served.report()["counters"]["dynamo_traces"] == 2
    same(served, expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"prepare\(weights="),
        ({"weights": lambda: None, "device": "cpu"}, "on the meta device"),
        ({"weights": lambda: None, "device": "nowhere"}, "setting device"),
    ],
)
def test_weights_on_the_meta_device_are_refused_by_name(arguments, words, loaded, tmp_path):
    with pytest.raises(InvalidSetting, match=words):
        prepare(without_weights(), config(tmp_path), **arguments)


@pytest.mark.parametrize("kind", ["off", "unusable", "only read", "of no artifacts"])
def test_what_no_cache_keeps_is_compiled_once_after_the_weights(
    kind, loaded, tmp_path, monkeypatch
):
    model, reason = without_weights(), UNKEPT.get(kind, "keeps no artifacts")
    settings = {"compiler": "eager"}
    if kind in UNKEPT:
        settings = settings_that_keep_nothing(kind, tmp_path, monkeypatch)
    weights = partial(model.load_state_dict, loaded.state_dict(), assign=True)
    served = prepare(model, config(tmp_path).changed(**settings), weights=weights, device="cpu")
    assert served.report()["counters"]["dynamo_traces"] == 1
    (told,) = served.events.named("weights.first")
    assert reason in told.facts["reason"]
    same(served, loaded)


def test_a_loader_that_fails_is_the_error(loaded, tmp_path):
    model = without_weights()

    def weights():
        raise FileNotFoundError("no shard 3")

    with pytest.raises(PrepareFailed, match="no shard 3"):
        prepare(model, config(tmp_path), weights=weights, device="cpu")
    assert {each.device.type for each in model.state_dict().values()} == {"meta"}
