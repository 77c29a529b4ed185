"""A miss is explained by the nearest entry and the factors that differ."""

import os

from piecegraph.cache import Key
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.inspection import nearest_entries
from piecegraph.cache.keys.key import ABSENT, VARIANT, Difference
from piecegraph.cache.names import entry_name

FACTORS = {"torch": "2.13.0", "config": {"level": 2, "passes": ["a"]}, "piece": "12ab"}


def publish(cache, **changes):
    key = Key.of("codegen", FACTORS | changes)
    cache.publish("artifact", key, {}, {})
    return key


def test_nearest_entry_and_its_differences_come_first(cache, root):
    publish(cache, torch="2.12.0", piece="99ff")
    near = publish(cache, torch="2.12.0", old=True)
    nearest = publish(cache, config={"level": 3, "passes": ["a"]})
    publish(cache, torch="2.11.0", piece="00", config={})
    found = nearest_entries(
        [DirectoryLayer(root)], "artifact", Key.of("codegen", FACTORS), at_most=3
    )
    assert [entry.key for entry in found[:1]] == [nearest]
    assert found[0].differences == (Difference("config.level", 3, 2),)
    assert len(found) == 3
    by_key = {entry.key: entry.differences for entry in found}
    assert by_key[near] == (
        Difference("old", True, ABSENT),
        Difference("torch", "2.12.0", "2.13.0"),
    )


def test_of_two_equally_near_the_one_used_last_comes_first(cache, root):
    keys = [publish(cache, torch=version) for version in ("2.11.0", "2.12.0", "2.12.1")]
    for age, key in zip((20, 10, 30), keys, strict=True):
        os.utime(root / entry_name("artifact", key.digest), (1e9 - age, 1e9 - age))
    found = nearest_entries([DirectoryLayer(root)], "artifact", Key.of("codegen", FACTORS))
    assert [entry.key for entry in found] == [keys[1], keys[0], keys[2]]


def test_an_entry_that_does_not_differ_explains_nothing(cache, root):
    key = publish(cache)
    cache.publish("artifact", key.extended({VARIANT: 1}), {}, {})
    assert nearest_entries([DirectoryLayer(root)], "artifact", key) == []


def test_other_kinds_and_damaged_entries_are_passed_over(cache, root):
    cache.publish("bundle", Key.of("codegen", FACTORS), {}, {})
    cache.publish("artifact", Key.of("trace", FACTORS), {}, {})
    damaged = publish(cache, torch="1")
    (root / entry_name("artifact", damaged.digest)).write_bytes(b"?")
    assert nearest_entries([DirectoryLayer(root)], "artifact", Key.of("codegen", FACTORS)) == []


def test_empty_or_missing_directory_has_no_answer(cache, root):
    assert nearest_entries([DirectoryLayer(root)], "artifact", Key.of("codegen", {})) == []
    assert nearest_entries([DirectoryLayer(root / "none")], "artifact", Key.of("codegen", {})) == []
