"""Each part can be turned off alone, from three places, and the result stays correct."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from piecegraph import SWITCHES, Batch, GraphMode, prepare, switched_off
from piecegraph.errors import InvalidSetting
from piecegraph.tools.serve.options import SWITCH_NAMES

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "debugging.md").read_text()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, scale=2.0):
        return {"out": self.linear(x) * scale, "rest": (x.sum(-1), x)}


@pytest.fixture
def config(small_config):
    return partial(small_config, graph_mode=GraphMode.FULL)


@pytest.mark.compile
@pytest.mark.parametrize("name", SWITCHES)
def test_the_result_is_right_with_each_part_off(name, config):
    model, x = Model(), torch.randn(3, 4)
    prepared = prepare(model, switched_off(config(), [name]))
    prepared.capture()
    with torch.no_grad():
        expected = model(x)
    result = prepared(x, batch=Batch(3, 3))
    torch.testing.assert_close(result, expected)
    assert type(result["rest"]) is tuple


@pytest.mark.compile
def test_without_compilation_nothing_is_traced_and_python_runs_in_each_step(config):
    model = Model()
    calls = []
    model.linear.register_forward_hook(lambda *_: calls.append(1))
    prepared = prepare(model, switched_off(config(), ["compile", "graphs"]))
    assert prepared.events.counters["dynamo_traces"] == 0
    assert prepared.resolved.mode is GraphMode.NONE
    calls.clear()
    for size in (1, 3):
        prepared(torch.randn(size, 4), batch=Batch(size, size))
    assert len(calls) == 2


@pytest.mark.compile
def test_an_uncompiled_model_checks_its_inputs_as_a_compiled_one_does(config):
    from piecegraph.errors import ArgumentFixed, InputMismatch, SizeOutOfRange

    prepared = prepare(Model(), config(compile=False))
    for fault, args in (
        (InputMismatch, (torch.randn(3, 5),)),
        (SizeOutOfRange, (torch.randn(9, 4),)),
        (ArgumentFixed, (torch.randn(3, 4), 3.0)),
    ):
        with pytest.raises(fault):
            prepared(*args, batch=Batch(3, 3))


@pytest.mark.compile
def test_the_environment_turns_parts_off_in_any_engine(monkeypatch, config):
    monkeypatch.setenv("PIECEGRAPH_OFF", "graphs, dedupe")
    prepared = prepare(Model(), config())
    assert prepared.config.graph_mode is GraphMode.NONE
    assert prepared.config.codegen.passes == {"dedupe": False}
    assert prepared.config.compile is True


def flat(settings, prefix=""):
    """Settings by dotted name."""
    named = {}
    for name, value in settings.items():
        inner = isinstance(value, dict) and value and prefix + name != "inputs"
        named |= flat(value, f"{prefix}{name}.") if inner else {prefix + name: value}
    return named


def test_a_switch_changes_nothing_but_its_own_settings(config):
    for name, settings in SWITCHES.items():
        codegen = {"passes": {"functionalization": False, "dedupe": True}, "partition": "inductor"}
        before = config(compiler="inductor", cache=True, codegen=codegen)
        stated, changed = flat(before.model_dump()), flat(switched_off(before, [name]).model_dump())
        differing = {k for k, v in changed.items() if v != stated.get(k)}
        assert differing == set(settings)


@pytest.mark.parametrize("name", ["", "everything", "GRAPHS"])
def test_an_unknown_switch_is_an_error_that_lists_them(name, config):
    with pytest.raises(InvalidSetting, match="dedupe"):
        switched_off(config(), [name])


def test_the_command_line_offers_what_the_library_has():
    assert tuple(SWITCHES) == SWITCH_NAMES


def test_the_table_in_the_documentation_is_the_one_in_the_code():
    rows = re.findall(
        r"^\| `--off ([a-z-]+)` \| `([^`]*)` \| `PIECEGRAPH_OFF=([a-z-]+)` \|", TABLE, re.M
    )
    stated = {name: settings for name, settings, _ in rows}
    assert [name for name, _, _ in rows] == [variable for _, _, variable in rows] == list(SWITCHES)
    for name, settings in SWITCHES.items():
        assert stated[name] == ", ".join(f"{k}={v!r}" for k, v in settings.items())
