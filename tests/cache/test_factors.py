"""Keys hold stable plain data: values that vary per run or place are refused."""

import enum
import hashlib
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.cache.keys.factors import canonical, is_place, plain
from piecegraph.cache.keys.key import ABSENT, Difference, Key, diff
from piecegraph.errors import InvalidFactor
from tests.processes import PYTHON, output_of

words = st.text(st.sampled_from("abcxyz_"), min_size=1, max_size=6)
factors = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
named_factors = st.dictionaries(words, factors, max_size=5)


@given(named_factors, named_factors)
def test_keys_are_equal_exactly_if_their_factors_are(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (Key.of("trace", one) == Key.of("trace", other)) == same
    assert Key.of("trace", one).factors == one


@given(named_factors, st.randoms(use_true_random=False))
def test_order_of_factors_does_not_matter(one, chance):
    names = list(one)
    chance.shuffle(names)
    assert Key.of("trace", {name: one[name] for name in names}) == Key.of("trace", one)


@given(named_factors, named_factors)
def test_diff_leads_from_one_key_to_the_other(old, new):
    differences = diff(old, new)
    assert (differences == []) == (canonical(old) == canonical(new))
    back = [Difference(each.name, each.new, each.old) for each in differences]
    assert diff(new, old) == back


def test_diff_names_the_pass_that_changed_and_shows_only_what_differs():
    long = "y" * 9000
    first = ["fuse", {"code": f"{long} 1 {long}", "code.helper": "z"}]
    second = ["fuse", {"code": f"{long} 2 {long}", "code.helper": "z"}]
    (changed,) = diff({"passes": [["other", {}], first]}, {"passes": [["other", {}], second]})
    assert changed.name == "passes.fuse.code"
    assert "y 1 y" in str(changed)
    assert "y 2 y" in str(changed)
    assert len(str(changed)) < 300
    (moved,) = diff({"passes": [["a", 1], ["b", 2]]}, {"passes": [["b", 2], ["a", 1]]})
    assert str(moved) == 'passes in order: ["a", "b"] -> ["b", "a"]'
    (variable,) = diff({"environment": {}}, {"environment": {"MY_FLAG": "1"}})
    assert str(variable) == 'environment.MY_FLAG: <absent> -> "1"'


def test_diff_says_old_and_new():
    old = {"config": {"level": 2, "gone": True}, "torch": "2.12.0", "n": 1}
    new = {"config": {"level": 3}, "torch": "2.12.0", "n": 1.0, "isa": "avx2"}
    differences = diff(old, new)
    assert differences[0] == Difference("config.gone", True, ABSENT)
    assert [str(difference) for difference in differences] == [
        "config.gone: true -> <absent>",
        "config.level: 2 -> 3",
        'isa: <absent> -> "avx2"',
        "n: 1 -> 1.0",
    ]


@pytest.mark.parametrize(
    "pair", [(1, True), (1, 1.0), (0, False), ("1", 1), (None, "null"), ([], {})]
)
def test_values_that_python_confuses_are_different_factors(pair):
    assert Key.of("trace", {"x": pair[0]}) != Key.of("trace", {"x": pair[1]})
    assert len(diff({"x": pair[0]}, {"x": pair[1]})) == 1


def test_kind_is_part_of_the_key():
    assert Key.of("trace", {}).digest != Key.of("codegen", {}).digest


def test_digest_is_full_length_and_stable():
    key = Key.of("codegen", {"a": [1, "ä"], "b": None})
    content = b'{"factors":{"a":[1,"\\u00e4"],"b":null},"kind":"codegen","schema":2}'
    assert key.digest == hashlib.sha256(content).hexdigest()


class Level(enum.Enum):
    TWO = 2


def test_tuples_sets_and_enums_become_plain_data():
    given_ = {"t": (1, 2), "s": frozenset({"b", "a"}), "e": Level.TWO, "n": {"x": {3, 1}}}
    assert Key.of("trace", given_).factors == {
        "t": [1, 2],
        "s": ["a", "b"],
        "e": 2,
        "n": {"x": [1, 3]},
    }


PER_PLACE = [
    "/usr/bin/g++",
    "~/models",
    "~",
    "C:\\cuda",
    "\\\\server\\share",
    "file:///models/x",
    "-I/usr/include",
    "--config=/etc/x",
    "g++ -O3 /tmp/a.cpp",
    str(Path.home() / "x"),
    tempfile.gettempdir(),
    os.getcwd(),
]
PER_RUN = [f"{object()!r}", f"{test_digest_is_full_length_and_stable!r}", str(uuid.uuid4())]


@pytest.mark.parametrize("value", PER_PLACE + PER_RUN, ids=range(len(PER_PLACE + PER_RUN)))
def test_c1_vllm_47573_what_varies_per_place_or_run_is_refused(value):
    for factor in (value, [value], {"x": value}, {value: 1}):
        with pytest.raises(InvalidFactor, match=r"trace\.config"):
            Key.of("trace", {"config": factor})


@pytest.mark.parametrize("name", ["pid", "hostname", "worker_id", "kv.run_id", "Timestamp"])
def test_c1_dynamo_10695_worker_id_in_a_free_form_config_is_refused(name):
    with pytest.raises(InvalidFactor, match="varies per run or place"):
        Key.of("trace", {"additional_config": {"connector": {name: 17}}})


NO_PLACES = (
    "a / b",
    "s3://bucket/x",
    "n/a",
    "2.13.0+cpu",
    "/",
    "s0//2",
    "x // y",
    "GPU H200",
    "a:b",
    "-O3",
)


@pytest.mark.parametrize("value", NO_PLACES)
def test_words_that_are_no_places_are_taken(value):
    assert not is_place(value)
    assert Key.of("trace", {"x": value}).factors == {"x": value}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", object(), Path("x"), {1: 2}])
def test_what_is_no_plain_data_is_refused(value):
    with pytest.raises(InvalidFactor, match=r"trace\.x"):
        Key.of("trace", {"x": value})


def test_nesting_without_end_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(InvalidFactor, match="nested"):
        plain("x", endless)


SCRIPT = """
from piecegraph.cache import Key
from piecegraph.compile.conditions.code import fingerprint
from tests_sources import kernel
print(Key.of("trace", {"ops": {"b", "a", "c", "d"}, "nested": {"x": {(1, "z"), (1, "y")}}}).digest)
print(fingerprint(kernel))
"""

SOURCES = """
SHAPES = {"small": (1, 2), "large": (3, 4)}
def kernel(x):
    return x in {"a", "b", "c", "d"}, SHAPES["small"]
"""


@pytest.mark.slow
def test_failure_W10_keys_do_not_depend_on_the_hash_seed(tmp_path, monkeypatch, capsys):
    (tmp_path / "tests_sources.py").write_text(SOURCES)
    monkeypatch.syspath_prepend(tmp_path)
    exec(SCRIPT, {})
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join(sys.path)
    environ = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path, "HOME": "/home/other"}
    assert output_of(PYTHON, "-c", SCRIPT, env=environ) == capsys.readouterr().out
