"""A model that changes after `prepare` is an error, never an old result."""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compile.conditions.conditions import checked
from piecegraph.errors import ModelChanged
from piecegraph.runtime.parts.checks import model_check
from piecegraph.torch_compat.tracing.other_threads import unseen_by_other_threads

from .conftest import small_config

pytestmark = pytest.mark.compile

BATCH = pg.Batch(num_tokens=5, num_reqs=5)


class Adapted(nn.Module):
    """A linear layer with two low-rank adapters, in the manner of peft."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.adapters = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "ab"})
        self.active = ["a"]
        self.merged = []

    def forward(self, x):
        result = self.base(x)
        if not self.merged:
            for name in self.active:
                result = result + self.adapters[name](x)
        return result

    def merge(self):
        self.base.weight.data += self.adapters["a"].weight.data
        self.merged.append("a")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.settings, self.act = Settings(), torch.relu

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x)


def hook(module, args, result):
    return result * 2


CHANGES = {
    "switched": (lambda m: setattr(m.layers[1], "active", ["b"]), "layers.1.active[0]: 'a' -> 'b'"),
    "in place": (lambda m: m.layers[2].active.append("b"), "layers.2.active length: 1 items -> 2"),
    "merged": (lambda m: m.layers[0].merge(), "layers.0.merged length: 0 items -> 1 items"),
    "training": (lambda m: m.train(), "dropout.training: False -> True"),
    "hook": (lambda m: m.layers[1].base.register_forward_hook(hook), "0 hooks -> 1 hooks"),
    "method": (lambda m: setattr(m.layers[1], "forward", m.layers[0].forward), "layers.1"),
    "module": (lambda m: setattr(m, "dropout", nn.Identity()), "dropout"),
    "appended": (lambda m: m.layers.append(Adapted()), "layers keys"),
    "hidden": (
        lambda m: vars(m).update(dropout=nn.Identity()),
        "model has its own 'dropout': False",
    ),
}


class Held:
    """An object of which nothing is known but what is read."""

    of_class = 1.0

    def __init__(self):
        self.k = self.unread = 1.0

    def of_method(self):
        return 1.0


DEFAULT = Held()


class Holding(Model):
    def __init__(self):
        super().__init__()
        self.array, self.part, self.recent = np.ones(2), partial(max, [1]), deque([1])
        self.space, self.held, self.listed = SimpleNamespace(k=1), Held(), [Held()]
        self.plain, self.tensors = {"a": [nn.Linear(8, 8, bias=False)]}, [torch.ones(8)]
        self.method, self.called = nn.Linear(8, 8).forward, partial(nn.Linear(8, 8))
        self.held.layer, self.held.layers = nn.Linear(8, 8), [nn.Linear(8, 8)]

    def forward(self, x, default=DEFAULT):
        held = self.held
        read = (
            held.k * held.of_method() * held.of_class * self.listed[0].k * default.k * self.space.k
        )
        read *= self.array[0] * self.part() * self.recent[0] * getattr(held, "extra", 1.0)
        x = held.layers[0](held.layer(x))
        x = self.called(self.method(self.plain["a"][0](x))) * self.tensors[0]
        return super().forward(x) * read


def in_plain(model):
    return model.plain["a"][0]


@dataclass
class Settings:
    heads: int = 2


UNTRACED = {
    **CHANGES,
    "switched": (CHANGES["switched"][0], "layers.1.active: ['a'] -> ['b']"),
    "in place": (CHANGES["in place"][0], "layers.2.active: ['a'] -> ['a', 'b']"),
    "merged": (CHANGES["merged"][0], "layers.0.merged: [] -> ['a']"),
    "hook": (CHANGES["hook"][0], "layers.1.base._forward_hooks: [] -> [["),
    "appended": (CHANGES["appended"][0], "layers.3: none -> Adapted"),
    "hidden": (CHANGES["hidden"][0], "model.dropout: Dropout -> Identity"),
    "removed": (lambda m: m.layers.__delitem__(2), "layers.2: Adapted -> none"),
    "setting": (lambda m: setattr(m.settings, "heads", 4), "settings.heads: 2 -> 4"),
    "function": (lambda m: setattr(m, "act", torch.tanh), "act: relu -> tanh"),
    "array": (lambda m: m.array.fill(3), "array: [b'"),
    "of a partial": (lambda m: m.part.args[0].append(3), "part: [max, [[1]], []] ->"),
    "deque": (lambda m: m.recent.append(3), "recent: [1] -> [1, 3]"),
    "namespace": (lambda m: setattr(m.space, "k", 3), "space.k: 1 -> 3"),
    "of an object": (lambda m: setattr(m.held, "k", 3.0), "model.held.k: 1.0 -> 3.0"),
    "a method": (lambda m: setattr(m.held, "of_method", float), "held.of_method: <bound method"),
    "appears": (lambda m: setattr(m.held, "extra", 3), "model.held.extra: 'missing' -> 3"),
    "of a class": (lambda m: setattr(Held, "of_class", 3.0), "model.held.of_class: 1.0 -> 3.0"),
    "in a list": (lambda m: setattr(m.listed[0], "k", 3.0), "model.listed[0].k: 1.0 -> 3.0"),
    "hook in a dict": (
        lambda m: in_plain(m).register_forward_hook(hook),
        "model.plain['a'][0]._forward_hooks: [] -> [[",
    ),
    "forward in a dict": (
        lambda m: setattr(in_plain(m), "forward", abs),
        "model.plain['a'][0].forward: missing -> abs",
    ),
    "in a method": (lambda m: m.method.__self__.eval(), "method.__self__.training: True -> False"),
    "in a partial": (lambda m: m.called.func.eval(), "called.func.training: True -> False"),
    "in an object": (lambda m: m.held.layer.eval(), "model.held.layer.training: True -> False"),
    "of an object, another": (
        lambda m: setattr(m.held, "layer", nn.Identity()),
        "model.held.layer: Linear(",
    ),
    "in an object's list": (
        lambda m: m.held.layers[0].register_forward_hook(hook),
        "model.held.layers[0]._forward_hooks: [] -> [[",
    ),
    "more weights": (
        lambda m: setattr(in_plain(m), "bias", nn.Parameter(torch.ones(8))),
        "model.plain['a'][0]._parameters: ['weight'] -> ['weight', 'bias']",
    ),
    "data of a tensor": (
        lambda m: setattr(m.tensors[0], "data", torch.zeros(8)),
        "model.tensors: [Tensor at 0x",
    ),
    "of a default": (lambda m: setattr(DEFAULT, "k", 3.0), "forward(default).k: 1.0 -> 3.0"),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


@pytest.fixture
def holding():
    torch.manual_seed(0)
    yield Holding().eval().requires_grad_(False)
    DEFAULT.k = Held.of_class = 1.0


def prepared_for(model, name="x", **settings):
    inputs = {name: "float32[num_tokens, 8]"}
    return pg.prepare(model, small_config(inputs=inputs, capture_sizes=(4, 8), **settings))


@pytest.fixture
def prepared(model):
    with torch.no_grad():
        yield prepared_for(model)


def step(prepared, x):
    return prepared(x, batch=BATCH)


def run_steps(prepared, x, count):
    for _ in range(count):
        step(prepared, x)


@pytest.mark.parametrize("hidden", [nullcontext, unseen_by_other_threads])
def test_what_a_symbolic_tracer_replaces_while_it_runs_is_no_change(prepared, hidden):
    """A thread of ours that builds libraries uses one beside steps, and so may the engine."""
    original, seen = nn.Module.__call__, []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(nn.Module.__call__ is original)
            prepared.refresh()
            return x

    with hidden():
        torch.fx.symbolic_trace(Looks())
    assert seen == [False]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_an_error(model, prepared, monkeypatch, change):
    """In `refresh`, and in steps once a check comes to it: here each step checks all."""
    prepared.capture()
    x = torch.randn(5, 8)
    torch.testing.assert_close(step(prepared, x), model(x))
    assert prepared.refresh() == ()
    make, text = CHANGES[change]
    make(model)
    with pytest.raises(ModelChanged) as refused:
        prepared.refresh()
    assert text in str(refused.value)
    with pytest.raises(ModelChanged):  # known by now
        step(prepared, x)


FACTOR, SIGN = 1.0, 1


class Options:
    def __getattr__(self, name):
        return {"gain": 1.0}[name]


class Reading(nn.Module):
    """A model that reads a global and the environment, and calls functions of torch."""

    def __init__(self):
        super().__init__()
        self.linear, self.options = nn.Linear(8, 8), Options()

    def forward(self, x):
        largest = max([-1.0, 1.0], key=lambda value: SIGN * value)  # Dynamo does not trace it
        factor = FACTOR * float(os.environ.get("OF_A_TEST", "1"))
        return self.linear(x) * largest * self.options.gain * factor


def double(self, x):
    return nn.functional.linear(x, self.weight, self.bias) * 2


BEYOND_THE_MODEL = {
    "global": (lambda p: p.setitem(globals(), "FACTOR", 2.0), "['FACTOR']: 1.0 -> 2.0"),
    "class": (lambda p: p.setattr(Options, "gain", 2.0, raising=False), "options has its own 'g"),
    "inside": (lambda p: p.setitem(globals(), "SIGN", -1), "'.SIGN': '1'} -> {"),
    "variable": (lambda p: p.setenv("OF_A_TEST", "2"), "variable OF_A_TEST: unset -> 2"),
    "method": (lambda p: p.setattr(nn.Linear, "forward", double), "Linear.forward"),
    "function": (lambda p: p.setattr(nn.functional, "linear", torch.matmul), "linear"),
    "hook": (
        lambda p: p.setitem(nn.modules.module._global_forward_hooks, 0, hook),
        "_global_forward_hooks length: 0 items -> 1 items",
    ),
}


@pytest.mark.parametrize("change", BEYOND_THE_MODEL)
def test_a_refresh_checks_all_that_the_trace_relied_on(monkeypatch, change):
    """As the start of another process does that finds the bundle; a step has no time for it."""
    model, x = Reading().requires_grad_(False), torch.randn(5, 8)
    prepared = prepared_for(model)
    prepared.capture()
    assert prepared.refresh() == ()
    make, text = BEYOND_THE_MODEL[change]
    with monkeypatch.context() as patched:
        make(patched)
        with pytest.raises(ModelChanged, match=re.escape(text)):
            prepared.refresh()
        with pytest.raises(ModelChanged):
            step(prepared, x)
    torch.testing.assert_close(step(prepared, x), model(x))


@pytest.fixture
def untraced(holding):
    return prepared_for(holding, compile=False)


@pytest.mark.parametrize("change", UNTRACED)
def test_a_change_of_a_model_that_is_not_traced_is_an_error_while_there_are_graphs(
    holding, untraced, change
):
    """Without a graph the model itself runs; a graph holds what it was at the capture."""
    make, text = UNTRACED[change]
    model, x = holding, torch.randn(5, 8)
    model.held.unread += 1.0
    untraced.capture()
    torch.testing.assert_close(step(untraced, x), model(x))
    assert untraced.refresh() == ()
    make(model)
    with pytest.raises(ModelChanged) as refused:
        untraced.refresh()
    assert text in str(refused.value)
    with pytest.raises(ModelChanged):
        step(untraced, x)
    untraced.release()
    if change != "training":
        torch.testing.assert_close(step(untraced, x), model(x))
        untraced.capture()
        torch.testing.assert_close(step(untraced, x), model(x))


def test_sglang_38943_steps_of_graphs_of_a_model_that_is_not_traced_find_a_change(
    holding, untraced, monkeypatch
):
    model = holding
    monkeypatch.setattr(model_check, "perf_counter", itertools.count().__next__)
    untraced.capture()
    x = torch.randn(5, 8)
    run_steps(untraced, x, 1000)
    model.layers[1].active = ["b"]
    with pytest.raises(ModelChanged, match=r"layers.1.active"):
        run_steps(untraced, x, 100_000)
    model.layers[1].active = ["a"]
    torch.testing.assert_close(step(untraced, x), model(x))


class Counting(nn.Module):
    """A model whose forward changes what it holds."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.last = 0, list[int](), None

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape[0])
        self.last = x * 2
        return self.last + 1


def test_what_a_forward_changes_itself_is_no_change():
    prepared, x = prepared_for(model := Counting(), compile=False), torch.randn(5, 8)
    with torch.no_grad():
        prepared.capture()
        torch.testing.assert_close(step(prepared, x), x * 2 + 1)
        model(x)
        assert prepared.refresh() == ()
        model.eval()
        with pytest.raises(ModelChanged, match=r"model.training: True -> False"):
            prepared.refresh()


def test_an_engine_may_replace_the_models_own_forward(model, prepared):
    x, forward = torch.randn(5, 8), model.forward
    model.forward = lambda x: step(prepared, x)  # as integrations do
    assert prepared.refresh() == ()
    torch.testing.assert_close(model(x), forward(x))


def test_what_the_engine_says_it_has_changed_is_named_and_its_own(model, prepared):
    """As an integration that sets its own attention back after `prepare`."""
    seen = list[Any]()
    prepared.events.listeners.append(seen.append)
    model.layers[0].active = ["b"]
    prepared.seal()
    with pytest.raises(ModelChanged, match=r"layers.0.active\[0\]"):
        prepared.refresh()
    changes = ["model.layers.0.active[0]: 'a' -> 'b'"]
    assert prepared.parts.checks.accept_changes() == changes
    assert prepared.refresh() == ()
    [named] = [event.facts["changes"] for event in seen if event.name == "model.changes_accepted"]
    assert named == changes
    model.layers[0].active = ["c"]  # as transformers does in each `generate_batch`
    assert prepared.refresh() == ()
    model.layers[1].active = ["b"]
    with pytest.raises(ModelChanged, match=r"layers.1.active\[0\]"):
        prepared.refresh()


def test_steps_find_a_change_by_themselves(model, prepared, monkeypatch):
    """Checks take a hundredth of the time, by a clock that goes on by one with each look at it."""
    clock = itertools.count()
    monkeypatch.setattr(model_check, "perf_counter", clock.__next__)
    monkeypatch.setattr(model_check, "MOST_S", 100.0)
    prepared.refresh()  # begins to check
    x, places = torch.randn(5, 8), len([*checked(prepared.compiled.conditions, model)])
    run_steps(prepared, x, 1000)
    model.layers[2].active = ["b"]
    with pytest.raises(ModelChanged, match=r"layers.2.active\[0\]"):
        run_steps(prepared, x, 110 * places)
    ticks = next(clock)
    steps = sum(row["count"] for row in prepared.report()["dispatch"])
    assert 0 < ticks - steps < 0.02 * ticks
    for _ in range(2):
        with pytest.raises(ModelChanged):
            step(prepared, x)
    model.layers[2].active = ["a"]
    torch.testing.assert_close(step(prepared, x), model(x))


@pytest.mark.heavy
def test_adapters_of_peft_are_switched_and_merged_while_serving():
    peft = pytest.importorskip("peft", reason="peft is not installed: real adapters are not tried")
    torch.manual_seed(0)
    config = {"target_modules": ["0", "1", "2"], "r": 2, "init_lora_weights": False}
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config), "first")
    adapted.add_adapter("second", peft.LoraConfig(**config))
    adapted.set_adapter("first")
    served = adapted.eval().requires_grad_(False).base_model.model
    x = torch.randn(5, 8)

    def serve_until_it_is_noticed():
        with pytest.raises(ModelChanged) as noticed:
            run_steps(prepared, x, 100_000)
        return str(noticed.value)

    def prepare_again():
        prepared = prepared_for(served, "input")
        prepared.capture()
        torch.testing.assert_close(step(prepared, x), served(x))
        return prepared

    prepared = prepare_again()
    adapted.set_adapter("second")
    assert "'first' -> 'second'" in serve_until_it_is_noticed()
    prepared = prepare_again()
    adapted.merge_adapter()
    assert "merged_adapters length: 0 items -> 1 items" in serve_until_it_is_noticed()
    with pytest.raises(ModelChanged):
        prepared.refresh()
    adapted.unmerge_adapter()
    prepared = prepare_again()
    with adapted.disable_adapter():
        assert "_disable_adapters: False -> True" in serve_until_it_is_noticed()
