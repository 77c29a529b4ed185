"""Intact bundles that fail when they run: put aside after the second failure, on all machines."""

import shutil

import pytest
import torch

from piecegraph import Events
from piecegraph.cache import Cache
from piecegraph.cache.inspection import manifests
from piecegraph.runtime.core.records import BundleFailed
from piecegraph.tools.cache_verify import verify

from .conftest import Texts

BROKEN = b"def forward(self, *args):\n    raise RuntimeError('no kernel image')\n"


@pytest.fixture
def start(prepare_live, tmp_path):
    """A start of a machine of this name; all share a layer that they write to."""

    def start(machine, **layer):
        url = f"file://{tmp_path}/bucket"
        layers = ({"at": url, "write_back": True, "trust": "anybody", **layer},)
        cache = {"layers": layers, "verify_bundle": "off"}
        return prepare_live(cache_dir=tmp_path / machine, cache=cache)

    return start


@pytest.fixture
def broken(start, monkeypatch):
    """A bundle in the layer whose kernels raise: a builder has compiled it without running it."""
    right = Texts.compile

    def compile_broken(self, graph, inputs, options):
        fn, _ = right(self, graph, inputs, options)()
        return lambda: (fn, {"code": BROKEN})

    monkeypatch.setattr(Texts, "compile", compile_broken)
    assert not start("builder").prepared.compiled.from_bundle
    monkeypatch.setattr(Texts, "compile", right)


def from_bundle(served):
    return served.prepared.compiled.from_bundle


def failing_step(served):
    assert from_bundle(served)
    with pytest.raises(RuntimeError, match="no kernel image") as caught:
        served.step(3)
    return caught.value


def failures(prepared):
    """Of each failure whether it put the bundle aside."""
    return [failure.put_aside for failure in prepared.records.of(BundleFailed)]


def test_kernel_that_raises_twice_takes_the_bundle_out_on_all_machines(start, broken, tmp_path):
    first = start("one")
    assert "it is put aside if another start fails in it" in str(failing_step(first).__notes__)
    assert failures(first.prepared) == [False]
    assert from_bundle(start("three"))
    second = start("two")
    assert "it is put aside" in str(failing_step(second).__notes__)
    (failure,) = second.prepared.records.of(BundleFailed)
    assert failure.reason == "piece 0 failed when it ran: RuntimeError: no kernel image"
    # machine three has a private copy, and machine four an empty directory
    third = start("three")
    assert not from_bundle(third)
    outcome = third.prepared.records.compile.bundle
    assert (outcome.reason, str(outcome.detail).partition(",")[0]) == ("aside", failure.reason)
    third.step(3)
    for machine in ("one", "two", "four"):
        served = start(machine)
        assert from_bundle(served), "what machine three has compiled"
        served.step(3)
        assert verify(tmp_path / machine) == []


@pytest.mark.heavy
def test_layer_that_is_only_read_does_not_bring_it_back(start, broken, tmp_path):
    bucket = {path: path.stat().st_mtime_ns for path in (tmp_path / "bucket").rglob("*")}
    for _ in range(2):
        failing_step(start("one", write_back=False))
    compiled = start("one", write_back=False)
    assert not from_bundle(compiled)
    compiled.step(3)
    again = start("one", write_back=False)
    assert from_bundle(again)
    again.step(3)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bucket").rglob("*")} == bucket


@pytest.mark.heavy
def test_capture_that_fails_counts(start, broken):
    for expected in (False, True):
        served = start("one")
        with pytest.raises(Exception, match="no kernel image") as caught:
            served.prepared.capture()
        assert failures(served.prepared) == [expected], caught.value


def test_failure_of_an_op_and_lack_of_memory_are_no_fault_of_the_bundle(start, monkeypatch):
    start("one")
    served = start("one")
    assert from_bundle(served)
    served.stage.fault = ValueError("of the engine")
    with pytest.raises(ValueError, match="of the engine"):
        served.step(3)

    def lacks_memory(self, code):
        def run(args):
            raise torch.OutOfMemoryError("full")

        return run

    monkeypatch.setattr(Texts, "_loaded", lacks_memory)
    full = start("one")
    with pytest.raises(torch.OutOfMemoryError):
        full.step(3)
    assert failures(served.prepared) == failures(full.prepared) == []


@pytest.mark.heavy
def test_bundle_without_pieces_is_compiled_again(start, tmp_path):
    start("one")
    private = tmp_path / "one"
    ((bundle, _),) = manifests(private, "bundle")
    shutil.rmtree(tmp_path / "bucket")
    cache = Cache(private, Events())
    entry = cache.lookup("bundle", bundle.key)
    cache.publish("bundle", bundle.key, bundle.meta, {"plan.json": entry.contents["plan.json"]})
    served = start("one")
    assert not from_bundle(served)
    outcome = served.prepared.records.compile.bundle
    assert "it cannot be loaded" in str(outcome.reason)
    served.step(3)
    assert from_bundle(start("one"))
