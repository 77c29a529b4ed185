"""Invalid settings fail when `Config` is made, with messages in the user's terms."""

from __future__ import annotations

import inspect
import json
import pickle
import pydoc
from contextlib import suppress

import pytest

from piecegraph import (
    Attention,
    CacheSettings,
    Codegen,
    Config,
    Delayed,
    Eager,
    LayerConfig,
    Lazy,
    Sizes,
    Steps,
    Tracing,
    Variants,
)
from piecegraph.errors import CaptureSizeInvalid, ConfigError, PiecegraphError, UnknownSetting
from piecegraph.runtime.setup.switches import resolve_config
from piecegraph.settings import field_docstrings, setting_names
from tests.tables import tables_of

OBJECTS = (Tracing, Codegen, Sizes, Variants, Attention, Steps)

TABLES = tables_of(__file__)


@pytest.mark.parametrize(("settings", "message"), TABLES["wrong"], ids=str)
def test_a_wrong_setting_fails_in_config(settings, message):
    with pytest.raises(PiecegraphError) as caught:
        Config(**settings)
    assert isinstance(caught.value, ConfigError | CaptureSizeInvalid)
    assert message in str(caught.value)
    for internal in ("pydantic", "Input should", "Extra inputs", "[type="):
        assert internal not in str(caught.value)


ODD = (
    float("nan"), float("inf"), -1, 0, 2**70, 10**400, "x", "", "\ud800", "a\0b", None, [], {},
    (1, 2), True, b"x", 1.5, ["a"], {"a": 1}, [float("nan")], object(), (5, 1),
)  # fmt: skip


@pytest.mark.parametrize("name", setting_names(Config))
def test_an_odd_value_is_taken_or_is_an_error_of_its_setting(name):
    """Of any type. What is taken can be written into a report, which has no infinite numbers."""
    for value in ODD:
        with suppress(PiecegraphError):
            config = Config().changed(**{name: value})
            json.dumps(config.model_dump(mode="json"), allow_nan=False)


@pytest.mark.parametrize(("name", "meant"), TABLES["meant"])
def test_a_setting_of_an_object_is_found_by_its_own_name(name, meant):
    with pytest.raises(UnknownSetting, match=f"did you mean '{meant}'"):
        Config(**{name: 1})


def test_a_changed_copy_is_checked_too():
    with pytest.raises(UnknownSetting, match=r"did you mean 'steps\.memory_limit'"):
        Config().changed(steps={"memory_limits": 2})


def test_a_change_of_an_object_keeps_its_other_settings():
    config = Config(tracing={"guards": "check", "min_num_tokens": 4})
    assert config.changed(tracing={"min_num_tokens": 8}).tracing.guards.value == "check"
    assert config.changed(tracing=Tracing(min_num_tokens=8)).tracing.guards.value == "prove"
    dotted = config.changed(**{"tracing.min_num_tokens": 8, "steps.padding.x": -1})
    assert dotted.tracing == Tracing(guards="check", min_num_tokens=8)
    assert dotted.changed(**{"steps.padding.y": 0}).steps.padding == {"x": -1, "y": 0}


def test_a_strategy_is_a_name_or_an_object_with_its_own_settings():
    assert Config().strategy == Eager()
    lazy = Config(strategy="lazy", max_num_tokens=16)
    assert lazy.strategy == Lazy()
    assert lazy.changed(strategy={"max_bytes": 7}).strategy == Lazy(max_bytes=7)
    assert lazy.changed(strategy=Delayed(captures_per_step=2)).strategy.captures_per_step == 2
    shown = lazy.model_dump(mode="json")["strategy"]
    assert shown == {"kind": "lazy", "captures_per_step": 1, "max_bytes": None}
    assert Config(strategy=shown).strategy == Lazy()
    with pytest.raises(UnknownSetting, match=r"strategy\.max_bytes"):
        Delayed(max_bytes=3)


def test_the_cache_is_off_on_or_an_object():
    assert Config(cache=False).cache is False
    assert Config(cache=True) == Config() == Config(cache=CacheSettings())
    assert Config(cache=False).changed(**{"cache.max_bytes": 3}).cache == CacheSettings(max_bytes=3)


def test_an_error_pickles_even_if_a_fact_does_not():
    with pytest.raises(UnknownSetting) as caught:
        Config(foo=1)
    local = lambda: None  # noqa: E731
    caught.value.facts["local"] = local
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (UnknownSetting, str(caught.value))
    assert again.facts["local"] == repr(local)


def test_help_on_all_settings_is_one_screen():
    lines = pydoc.plain(pydoc.render_doc(Config)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines[3:])) <= 88
    assert " |  strategy       eager      When graphs are captured." in lines
    for name in Config.model_fields:
        assert any(line.startswith(f" |  {name} ") and len(line.split()) > 4 for line in lines)


@pytest.mark.parametrize("part", [*OBJECTS, Eager, Delayed, Lazy, CacheSettings, LayerConfig])
def test_help_on_an_object_shows_each_setting_with_its_default_and_meaning(part):
    text = pydoc.plain(pydoc.render_doc(part))
    assert len(text.splitlines()) <= 75
    docstrings = field_docstrings(part)
    for name in part.model_fields:
        assert docstrings[name], f"{name} has no docstring"
        assert f" |  {name}" in text


def test_sources_are_read_for_help_alone(monkeypatch):
    """Finding the source of a class takes a time that grows with the modules of the process."""
    with monkeypatch.context() as patched:
        patched.setattr(inspect, "getmodule", lambda *_: pytest.fail("looked through all modules"))

        class Own(Steps):
            """Settings of an engine."""

            speed: int = 3
            """How fast
            it is."""

    assert field_docstrings(Own)["speed"] == "How fast\nit is."
    text = pydoc.plain(pydoc.render_doc(Own))
    assert " |  Settings of an engine." in text
    assert " |  speed = 3\n |      How fast\n |      it is." in text

    unwritten = type("Unwritten", (Own,), {"__module__": __name__})
    assert "speed = 3" in str(unwritten.__doc__)


@pytest.mark.parametrize("settings", [{}, {"level": 0}, {"compiler": "eager", "level": 1}])
def test_w18_resolving_settings_twice_changes_nothing(settings):
    once = resolve_config(Config(**settings))
    assert resolve_config(once) == once
