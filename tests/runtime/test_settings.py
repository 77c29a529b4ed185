"""Invalid settings fail when `Config` is made, with messages in the user's terms."""

from __future__ import annotations

import inspect
import pickle
import pydoc
from typing import Any

import pytest

from piecegraph import AttentionSupport, Config
from piecegraph.compile.ir.settings import field_docstrings
from piecegraph.errors import CaptureSizeInvalid, ConfigError, PiecegraphError, UnknownSetting
from piecegraph.runtime.switches import resolve_config

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"foo": 1}, "Config has no setting 'foo'. See"),
    ({"max_num_token": 3}, "has no setting 'max_num_token' (did you mean 'max_num_tokens'?)"),
    ({"cache_layers": ({"at": "x", "trst": 1},)}, "LayerConfig has no setting 'trst' (did"),
    ({"strategy": "eagre"}, "strategy = 'eagre': unknown choice (did you mean 'eager'?). Choose"),
    ({"attention_support": "ALLWAYS"}, "attention_support = 'ALLWAYS': unknown choice. Choose one"),
    ({"attention_support": {"a": "X"}}, "attention_support = 'X': unknown choice"),
    ({"max_num_tokens": "x"}, "max_num_tokens = 'x': its type is str. Choose an integer."),
    ({"max_num_tokens": 0}, "it is out of range. Choose a number greater than or equal to 1."),
    ({"memory_limit": "a"}, "memory_limit = 'a': its type is str. Choose an integer or a number."),
    ({"padding": {"ids": "zer"}}, "padding['ids'] = 'zer': unknown choice (did you mean 'zero'?)"),
    ({"capture_sizes": (8, "a")}, "capture_sizes[1] = 'a': its type is str. Choose an integer."),
    ({"capture_sizes": (8, 4, -1)}, "capture size 4 at position 1"),
    ({"capture_sizes": (4096,)}, "capture size 4096 at position 0 of capture_sizes is above"),
    ({"compile_sizes": (4096,)}, "compile_sizes = 4096: it is outside the served range"),
    ({"compile_ranges": (0,)}, "compile_ranges = 0: it is outside the served range"),
    ({"padding_limit": 3}, "padding_limit = 3: its type is int"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=str)
def test_a_wrong_setting_fails_in_config(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PiecegraphError) as caught:
        Config(**settings)
    assert isinstance(caught.value, ConfigError | CaptureSizeInvalid)
    assert message in str(caught.value)
    for internal in ("pydantic", "Input should", "Extra inputs", "[type="):
        assert internal not in str(caught.value)


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(UnknownSetting, match="did you mean 'max_loras'"):
        Config().changed(max_lora=2)


def test_attention_support_is_accepted_by_name() -> None:
    given = {"mla": "ALWAYS", "linear": AttentionSupport.NEVER}
    assert Config(attention_support=given).attention_support == {
        "mla": AttentionSupport.ALWAYS,
        "linear": AttentionSupport.NEVER,
    }


def test_an_error_pickles_even_if_a_fact_does_not() -> None:
    with pytest.raises(UnknownSetting) as caught:
        Config(foo=1)
    local: Any = lambda: None  # noqa: E731
    caught.value.facts["local"] = local
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (UnknownSetting, str(caught.value))
    assert again.facts["local"] == repr(local)


def test_help_shows_each_setting_with_its_default_and_meaning() -> None:
    text = pydoc.plain(pydoc.render_doc(Config))
    assert len(text) < 12_000
    assert " |  captures_per_step = 1\n |      The most captures between two steps" in text
    docstrings = field_docstrings(Config)
    for name in Config.model_fields:
        assert docstrings[name], f"{name} has no docstring"
        assert f" |  {name}" in text


def test_sources_are_read_for_help_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the source of a class takes a time that grows with the modules of the process."""
    with monkeypatch.context() as patched:
        patched.setattr(inspect, "getmodule", lambda *_: pytest.fail("looked through all modules"))

        class Own(Config):
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
def test_w18_resolving_settings_twice_changes_nothing(settings: dict[str, Any]) -> None:
    once = resolve_config(Config(**settings))
    assert resolve_config(once) == once
