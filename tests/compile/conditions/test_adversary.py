"""Changes of all cases, with conditions and without: no wrong number after the verification.

Process A stores a bundle, process B starts with the changed model on A's cache.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ..starts import use_text_compiler
from . import test_conditions
from .cases import adversary_sources, sources
from .run_cases import run
from .test_conditions import NEVER_CACHED

NOT_CACHEABLE = {
    *("subclasses_of_a_class", "shape_of_a_numpy_array", "method_with_a_constant_result"),
}
ADVERSARY = adversary_sources()
LET_THROUGH = {"registry_of_copies"}
"""What conditions alone do not find."""
SAMPLE = (
    *("arguments_of_the_program", "order_of_bases", "printing_of_torch"),
    *("cache_of_autocast", "class_item_that_reads_the_class", "registered_with_a_subclass"),
)
REFUSED = (
    *("instance_check_that_reads_the_object", "subclass_hook_that_reads_the_class"),
    *("registered_as_a_path", "registered_with_a_registered_class", "registered_with_a_subclass"),
    *("class_item_that_reads_the_class", "check_of_a_shadowing_module"),
    "method_with_a_constant_result",
)
"""What conditions let through when these changes were first tried."""
NOT_OF_A_THREAD = {"default_of_autocast", "thread_local"}
"""Values of one thread: `prepare` does not run under autocast."""
Outcomes = dict[str, dict[str, Any]]


def write(cases: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both variants of the cases, and the first once more at another place."""
    monkeypatch.setattr(test_conditions, "sources", lambda: cases)
    monkeypatch.setattr(test_conditions, "unread_sources", dict)
    for variant, name in enumerate(("first", "second")):
        test_conditions.write(folder / name, variant)
    shutil.copytree(folder / "first", folder / "moved")


def start_one(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *starts: tuple[str, str]
) -> list[dict[str, Any]]:
    """The outcomes of starts of one case here, each `(bundle, variant)`, on one cache."""
    use_text_compiler(monkeypatch)
    write({name: ADVERSARY[name]}, folder, monkeypatch)
    return [run(name, bundle, folder / variant, folder / "cache") for bundle, variant in starts]


def expect_none_stale(cold: Outcomes, changed: Outcomes) -> None:
    assert not [name for name in cold if "error" in cold[name] or "error" in changed[name]]
    assert not [name for name in cold if not (cold[name]["right"] and changed[name]["right"])]


@pytest.mark.heavy
def test_no_change_is_a_stale_hit(tmp_path, monkeypatch):
    assert len(ADVERSARY) >= 190
    write(ADVERSARY, tmp_path, monkeypatch)
    cold, changed = (
        test_conditions.starts(bundle, tmp_path / folder, tmp_path / "cache")
        for bundle, folder in (("use", "first"), ("force", "second"))
    )
    assert {name for name in ADVERSARY if not changed[name].get("right")} == LET_THROUGH
    assert {name for name in ADVERSARY if changed[name]["hit"]} == LET_THROUGH
    assert {name for name in ADVERSARY if cold[name]["not_kept"]} == NOT_CACHEABLE


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_nothing_is_stale_after_verification(tmp_path, monkeypatch):
    """No condition refuses a bundle here; in the second and the third run only a trace does."""
    cases = {**sources(), **ADVERSARY}
    write(cases, tmp_path, monkeypatch)
    cold, *changed, control = (
        test_conditions.starts(bundle, tmp_path / folder, tmp_path / "cache")
        for bundle, folder in (
            ("use", "first"),
            ("before", "second"),
            ("background", "second"),
            ("background", "moved"),
        )
    )
    for run_of_changed in changed:
        expect_none_stale(cold, run_of_changed)
        found = [name for name in cases if run_of_changed[name].get("verified") is False]
        missed = [name for name in cases if not run_of_changed[name]["hit"]]
        print(f"{len(cases)} changes: {len(found)} found by a trace, {len(missed)} other keys")
        assert len(found) + len(missed) == len(cases)
        assert len(found) > 520
    refused = {name for name in cases if control[name].get("verified") is not True}
    assert refused == NEVER_CACHED.keys() | NOT_CACHEABLE | NOT_OF_A_THREAD


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", REFUSED)
def test_conditions_refuse_at_once(name, tmp_path, monkeypatch):
    cold, changed, control = start_one(
        name, tmp_path, monkeypatch, ("use", "first"), ("force", "second"), ("force", "moved")
    )
    assert (cold["right"], changed["right"], control["right"]) == (True, True, True)
    assert (changed["hit"], control["hit"]) == (False, name not in NOT_CACHEABLE)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", SAMPLE)
def test_a_trace_finds_what_no_condition_refuses(name, tmp_path, monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)
    outcomes = start_one(
        name,
        tmp_path,
        monkeypatch,
        ("use", "first"),
        ("before", "second"),
        ("background", "second"),
    )
    expect_none_stale({name: outcomes[0]}, {name: outcomes[1]})
    assert [outcome.get("verified") for outcome in outcomes] == [None, False, False]
