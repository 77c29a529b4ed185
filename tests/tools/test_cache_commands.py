"""The cache commands, from arguments to output and exit status."""

import hashlib
import importlib
import json
import os
import shutil
import stat
import sys
from unittest.mock import Mock

import pytest

from piecegraph import Events, prepare
from piecegraph.cache import Cache, Entry, Key, statistics
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.names import blob_name, entry_name
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.tools.cli.app import main
from piecegraph.tools.cli.cache_commands import cache_app
from piecegraph.tools.integrations.prometheus import metrics_text
from tests.unkept import UNKEPT, settings_that_keep_nothing

SMALL = ["--model", "layers=1,hidden=16,heads=2,vocab=32"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A cache with two bundles and an artifact; the commands find it through the environment."""
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PIECEGRAPH_CACHE_SIGNING_KEY_FILE", raising=False)
    monkeypatch.delenv("PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE", raising=False)
    cache = Cache(tmp_path / "cache", Events())
    cache.publish("bundle", Key.of("trace", {"a": 1}), {"pieces": 3}, {"plan.json": b"one"})
    cache.publish("bundle", Key.of("trace", {"a": 2}), {"pieces": 4}, {"plan.json": b"two"})
    cache.publish("artifact", Key.of("codegen", {"b": 1}), {"compile_seconds": 1.5}, {"x": b"3"})
    return tmp_path / "cache"


def digest(kind, **factors):
    return Key.of(kind, factors).digest


def test_list_names_kind_key_size_and_facts(root, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["cache", "list"]) == 0
    out = capsys.readouterr().out
    assert "3 entries" in out
    assert f"artifact/{digest('codegen', b=1)[:12]}" in out
    assert "compile_seconds=1.5" in out


def test_show_gives_the_factors_as_json(root, capsys):
    name = digest("trace", a=2)[:10]
    for asked in (name, f"bundle/{name}"):
        assert main(["cache", "show", asked]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["factors"] == {"a": 2}
        assert facts["meta"] == {"pieces": 4}


GAINED = """
import torch
from piecegraph import Config, prepare


class Gained(torch.nn.Module):
    gain = 2.0

    def forward(self, x):
        return x * self.gain


def make():
    inputs = {"x": "float32[num_tokens, 4]"}
    return Gained(), Config(inputs=inputs, max_num_tokens=8, graph_mode="NONE")


def changed():
    Gained.gain = 3.0
    return make()
"""


@pytest.mark.compile
def test_verify_with_trace_is_0_for_the_bundle_of_the_model_and_2_for_one_that_is_stale(
    root, capsys, monkeypatch, tmp_path
):
    (tmp_path / "gained_model.py").write_text(GAINED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)
    monkeypatch.setattr(bundles, "broken_conditions", lambda *_: [])
    model, config = importlib.import_module("gained_model").make()
    prepared = prepare(model, config)
    assert main(["cache", "verify", "--trace", "gained_model:make"]) == 0
    assert "is that of the model: True" in capsys.readouterr().out
    assert "\npiecegraph_bundle_verified " not in metrics_text(prepared)
    assert main(["cache", "verify", "--trace", "gained_model:changed"]) == 2
    assert "* 3.0" in capsys.readouterr().err
    stale = prepare(*importlib.import_module("gained_model").changed())
    assert stale.parts.starts.wait_until_verified(300) is False
    assert "\npiecegraph_bundle_verified 0.0" in metrics_text(stale)
    for each in (prepared, stale):
        each.close()


@pytest.mark.parametrize("name", ["f" * 20, "", "artifact/" + "0" * 12])
def test_a_name_must_mean_one_entry(root, capsys, name):
    assert main(["cache", "show", name]) == 2
    assert "has no entry" in capsys.readouterr().err


def test_verify_is_0_for_a_clean_cache(root, capsys):
    assert main(["cache", "verify"]) == 0
    assert "3 readable entries, 0 findings" in capsys.readouterr().out


def test_verify_sums_its_statuses(root, capsys):
    (root / blob_name(hashlib.sha256(b"one").hexdigest())).write_bytes(b"???")
    assert main(["cache", "verify"]) == 1
    assert "CORRUPT" in capsys.readouterr().out
    root.chmod(0o755)
    assert main(["cache", "verify"]) == 1 + 2
    entry = root / entry_name("artifact", digest("codegen", b=1))
    entry.rename(entry.with_name("stray"))
    assert main(["cache", "verify"]) == 1 + 2 + 4


def test_prune_goes_down_to_a_size_and_an_age(root, capsys):
    assert main(["cache", "prune"]) == 0
    assert "removed 0 entries" in capsys.readouterr().out
    assert main(["cache", "prune", "--size", "0"]) == 0
    assert "removed 3 entries" in capsys.readouterr().out
    assert not list(root.glob("entries*/*/*/*"))


def test_a_prune_that_fails_says_so(root, capsys):
    shutil.rmtree(root / "tmp")
    (root / "tmp").write_text("")
    assert main(["cache", "prune", "--size", "0"]) == 2
    captured = capsys.readouterr()
    assert "cannot write" in captured.err
    assert "removed" not in captured.out


def test_an_import_that_stores_nothing_says_so(root, capsys, tmp_path, monkeypatch):
    path = tmp_path / "bundle.tar"
    assert main(["cache", "export", str(path)]) == 0
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(DirectoryLayer, "store", Mock(side_effect=full))
    capsys.readouterr()
    target = ["--cache-dir", str(tmp_path / "other")]
    assert main(["cache", "import", str(path), "--trust", *target]) == 2
    captured = capsys.readouterr()
    assert "No space left on device" in captured.err
    assert not captured.out


@pytest.mark.parametrize("names", [[], [digest("trace", a=1)[:10]]])
def test_an_entry_that_is_not_whole_is_not_left_out_of_an_export(root, capsys, tmp_path, names):
    (root / blob_name(hashlib.sha256(b"one").hexdigest())).unlink()
    assert main(["cache", "export", str(tmp_path / "bundle.tar"), *names]) == 2
    assert "incomplete: blob plan.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "bundle.tar").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ("2KiB", 2048), ("1.5MB", 1.5e6), ("3GiB", 3 << 30), ("7B", 7)]
)
def test_sizes_have_decimal_and_binary_units(text, size):
    from piecegraph.tools.cli.cache_commands import _bytes

    assert _bytes(text) == size


def test_bundles_travel_in_one_file_and_must_be_believed(root, capsys, tmp_path, monkeypatch):
    path, other = tmp_path / "bundle.tar", tmp_path / "other"
    assert main(["cache", "export", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 entries" in out
    assert "not signed" in out
    first = out.splitlines()[2].split()[-2]
    target = ["--cache-dir", str(other)]
    assert main(["cache", "import", str(path), *target]) == 2
    assert main(["cache", "import", str(path), "--pin", "0" * 64, *target]) == 2
    assert f"no entry with digest {'0' * 64}" in capsys.readouterr().err
    assert main(["cache", "import", str(path), "--pin", first, *target]) == 0
    assert capsys.readouterr().out.count("bundle/") == 1
    assert main(["cache", "import", str(path), "--trust", *target]) == 0
    assert main(["cache", "show", digest("trace", a=1), *target]) == 0
    shutil.rmtree(other)
    signing = str(tmp_path / "ci.key")
    assert main(["cache", "keygen", signing, "--name", "ci", "--expires", "2999-12-31"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (tmp_path / "ci.key.pub").read_text().strip()
    assert main(["cache", "keygen", signing]) == 2
    monkeypatch.setenv("PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE", f"{signing}.pub")
    assert main(["cache", "import", str(path), *target]) == 2
    monkeypatch.setenv("PIECEGRAPH_CACHE_SIGNING_KEY_FILE", signing)
    assert main(["cache", "export", str(path)]) == 0
    monkeypatch.delenv("PIECEGRAPH_CACHE_SIGNING_KEY_FILE")
    assert main(["cache", "import", str(path), *target]) == 0
    assert main(["cache", "verify", *target]) == 0
    assert main(["cache", "keygen", signing, "--next-epoch"]) == 0
    assert "epoch=2" in (tmp_path / "ci.key.pub").read_text()
    assert main(["cache", "import", str(path), *target]) == 2
    assert "before 2 of key" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_list_of_what_is_no_directory_has_the_status_of_verify(tmp_path, capsys, name):
    (tmp_path / "file").write_text("")
    there = ["--cache-dir", str(tmp_path / name)]
    assert main(["cache", "list", *there]) == main(["cache", "verify", *there]) == 4
    assert "there is no directory" in capsys.readouterr().err


def test_an_export_replaces_nothing_but_a_file(root, capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert main(["cache", "export", str(tmp_path / "pipe")]) == 2
    assert "it exists" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_one_entry_can_be_exported_and_pinned(root, capsys, tmp_path):
    path = tmp_path / "one.tar"
    assert main(["cache", "export", str(path), digest("trace", a=1)]) == 0
    pinned = capsys.readouterr().out.splitlines()[2].split()[-2]
    target = ["--cache-dir", str(tmp_path / "other")]
    assert main(["cache", "import", str(path), "--pin", pinned, *target]) == 0


def test_diff_shows_what_two_entries_differ_in(root, capsys):
    one, two = (f"bundle/{digest('trace', a=n)[:10]}" for n in (1, 2))
    assert main(["cache", "diff", one, two]) == 1
    assert "factors.a: 1 -> 2\nmeta.pieces: 3 -> 4" in capsys.readouterr().out
    assert main(["cache", "diff", one, one]) == 0
    assert capsys.readouterr().out == "they are equal\n"


def test_stats_sum_all_starts(root, capsys):
    key = Key.of("codegen", {"b": 1})
    for _ in range(2):
        assert isinstance(Cache(root, Events()).lookup("artifact", key), Entry)
    Cache(root, Events()).lookup("bundle", Key.of("trace", {"a": 3}))
    (root / blob_name(hashlib.sha256(b"one").hexdigest())).write_bytes(b"???")
    Cache(root, Events()).lookup("bundle", Key.of("trace", {"a": 1}))
    with open(root / "statistics", "ab") as file:
        file.write(b'{"artifact.hit":')  # of a process that died
    assert main(["cache", "stats", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["lookups"] == {
        "artifact": {"hits": 2, "misses": 0, "by_reason": {}},
        "bundle": {"hits": 0, "misses": 2, "by_reason": {"absent": 1, "damaged": 1}},
    }
    assert (facts["bytes_written"], facts["bytes_read"]) == (7, 2)
    assert 0 < facts["seconds_saved"] <= 3
    assert main(["cache", "stats"]) == 0
    out = capsys.readouterr().out
    assert "artifact: 2 hits of 2" in out
    assert "  damaged: 1" in out


def test_counts_of_many_starts_stay_small(root, monkeypatch):
    monkeypatch.setattr(statistics, "MAX_BYTES", 400)
    for _ in range(100):
        statistics.add_counts(root, {"bundle.hit": 1})
    assert (root / "statistics").stat().st_size < 500
    assert statistics.read_counts(root)["bundle.hit"] == 100


def test_lines_of_counts_that_are_none_are_skipped(root, capsys):
    lines = [
        '{"bundle.hit": "x"}',
        '{"bundle.hit": [1]}',
        '{"bundle.hit": 0.5}',
        "[1]",
        "[" * 10**5,
    ]
    (root / "statistics").write_text("\n".join([*lines, '{"bundle.hit": 1}', ""]))
    statistics.add_counts(root, {"bundle.hit": 1})
    assert statistics.read_counts(root) == {"bundle.hit": 2}
    assert main(["cache", "stats"]) == 0


@pytest.mark.compile
def test_every_answer_can_be_json(root, capsys, tmp_path, monkeypatch, text_compiler):
    one, two = (digest("trace", a=n)[:10] for n in (1, 2))
    path, other = str(tmp_path / "bundle.tar"), ["--cache-dir", str(tmp_path / "other")]
    (tmp_path / "answers.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = (
        ["list"], ["show", one], ["diff", one, two], ["stats"], ["verify"], ["export", path],
        ["import", path, "--trust", *other], ["keygen", str(tmp_path / "key")], ["prune"],
        ["why", "--of", "answers:make"], ["warm", *SMALL, *other],
    )  # fmt: skip
    assert {command[0] for command in commands} == {
        each.name for each in cache_app.registered_commands
    }
    for command in commands:
        main(["cache", *command, "--json", "-"])
        assert json.loads(capsys.readouterr().out), command
    assert main(["cache", "stats", "--json", str(tmp_path / "stats.json")]) == 0
    assert "entries" in capsys.readouterr().out
    assert json.loads((tmp_path / "stats.json").read_text())["directory"] == str(root)


OWN_MODEL = """
import torch
import piecegraph as pg

def make():
    inputs = {"x": "float32[num_tokens, 8]"}
    return torch.nn.Linear(8, 8), pg.Config(inputs=inputs, max_num_tokens=32)
"""


def test_why_of_a_model_of_ones_own(root, capsys, tmp_path, monkeypatch):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["cache", "why", "--of", "engine.model:make", "--json", "-"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["reason"], len(facts["nearest"])) == ("absent", 2)
    assert facts["nearest"][0]["differences"][0]["new"] == "<absent>"
    assert main(["cache", "why", "--of", "engine.model:other"]) == 2
    assert "module:function" in capsys.readouterr().err


@pytest.mark.compile
def test_why_names_the_option_that_differs_and_warm_stores_it(tmp_path, capsys, text_compiler):
    there = [*SMALL, "--cache-dir", str(tmp_path / "cache")]
    assert main(["cache", "why", *there]) == 1
    assert "absent" in capsys.readouterr().out
    assert main(["cache", "warm", *there, "--ranks", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("rank 0 on cpu: built")
    assert second.startswith("rank 1 on cpu: was there")
    assert main(["cache", "why", *there]) == 0
    assert capsys.readouterr().out.endswith(": hit\n")
    assert main(["cache", "why", *there, "--max-num-tokens", "64"]) == 1
    assert "max_num_tokens: 128 -> 64" in capsys.readouterr().out
    assert main(["cache", "why", *there, "--capture-sizes", "1,2"]) == 0


@pytest.mark.compile
def test_warm_says_that_a_directory_is_only_read(tmp_path, capsys, monkeypatch, text_compiler):
    there = [*SMALL, "--cache-dir", str(tmp_path)]
    with monkeypatch.context() as patched:
        settings_that_keep_nothing("only read", tmp_path, patched)
        assert main(["cache", "warm", *there]) == 2
    assert UNKEPT["only read"] in capsys.readouterr().err
    assert main(["cache", "warm", *there]) == 0
    settings_that_keep_nothing("only read", tmp_path / "only read", monkeypatch)
    assert main(["cache", "warm", *there]) == 0
    assert "was there" in capsys.readouterr().out
    assert main(["cache", "warm", *there, "--ahead"]) == 2


@pytest.mark.compile
@pytest.mark.heavy
def test_warm_builds_libraries(tmp_path, capsys):
    there = [*SMALL, "--cache-dir", str(tmp_path / "cache")]
    for expected in ("built, with libraries", "was there, with libraries"):
        assert main(["cache", "warm", *there, "--ahead"]) == 0
        assert expected in capsys.readouterr().out
