"""Fleets: files replaced during a start, several variants on one cache, CPUs of two types."""

import importlib
import os
import sys
from dataclasses import replace

import pytest
import torch

from piecegraph.cache.inspection import manifests
from piecegraph.compile import pipeline
from piecegraph.compile.bundle import bundle, key_factors
from piecegraph.compile.ir.compilation import BundleMiss
from piecegraph.compile.trace import dynamo
from tests.text_compiler import use_text_compiler

from ..starts import start

pytestmark = pytest.mark.compile

VARIABLES = os.environ
HELPER = "def f(x):\n    return x * {gain}\n"
MODEL = """
import torch, deployed_helper
class Model(torch.nn.Module):
    def forward(self, x):
        return deployed_helper.f(x)
"""


class Deployment:
    """A directory with a model, whose helper a deployment replaces."""

    def __init__(self, folder):
        self._folder = folder
        (folder / "deployed_model.py").write_text(MODEL)

    def write(self, gain):
        (self._folder / "deployed_helper.py").write_text(HELPER.format(gain=gain))

    def process(self):
        """The model of a process that starts now."""
        for name in ("deployed_helper", "deployed_model"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        torch._dynamo.reset()
        return importlib.import_module("deployed_model").Model()


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Deployment(tmp_path)
    for name in ("deployed_helper", "deployed_model"):
        sys.modules.pop(name, None)


def result(made):
    return float(made(torch.ones(3, 8))[0, 0])


@pytest.mark.parametrize("stage", ["trace_key", "store_bundle"])
def test_f5_a_deployment_during_a_start_stores_no_old_code_as_new(
    stage, deployment, tmp_path, monkeypatch
):
    """The files are replaced before the key is made, or after the code was compiled."""
    deployment.write(2.0)
    old = deployment.process()
    module = pipeline if stage == "trace_key" else bundle
    original = getattr(module, stage)

    def deployed(*args, **kwargs):
        deployment.write(3.5)
        return original(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(module, stage, deployed)
        assert result(start(old, tmp_path / "cache")) == 2.0
    new = start(deployment.process(), tmp_path / "cache")
    assert not new.hit
    assert "deployed_helper.f" in new.reason
    assert result(new) == 3.5


def test_variants_of_one_model_live_side_by_side(deployment, tmp_path):
    for gain in (2.0, 3.5, 4.5):
        deployment.write(gain)
        assert not start(deployment.process(), tmp_path / "cache").hit
    for gain in (2.0, 3.5, 4.5):
        deployment.write(gain)
        made = start(deployment.process(), tmp_path / "cache")
        assert made.hit
        assert result(made) == gain


def test_a_bundle_stored_again_replaces_the_one_that_this_process_would_use(
    deployment, tmp_path, monkeypatch
):
    """As compiling ahead does, whose trace of the same model may have other guards."""
    deployment.write(2.0)
    with monkeypatch.context() as patched:
        recorded = dynamo.record_conditions

        def another(*args):
            conditions = recorded(*args)
            return replace(conditions, data={**conditions.data, "environment": {"UNSET": None}})

        patched.setattr(dynamo, "record_conditions", another)
        start(deployment.process(), tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "load_bundle", lambda *_: BundleMiss("absent"))
        assert not start(deployment.process(), tmp_path / "cache").hit
    (stored,) = manifests(tmp_path / "cache", "bundle")
    assert stored[0].meta["conditions"]["environment"] == {}
    assert start(deployment.process(), tmp_path / "cache").hit


def test_f7_code_of_another_cpu_is_a_miss_that_names_the_extension(
    deployment, tmp_path, monkeypatch
):
    deployment.write(2.0)
    monkeypatch.setattr(key_factors, "cpu_extensions", lambda: ("amx_tile", "avx2", "avx512f"))
    start(deployment.process(), tmp_path / "cache")
    assert start(deployment.process(), tmp_path / "cache").hit
    monkeypatch.setattr(key_factors, "cpu_extensions", lambda: ("avx2", "avx512f"))
    other = start(deployment.process(), tmp_path / "cache")
    assert not other.hit
    assert "device.extensions.amx_tile: true -> <absent>" in other.reason
    assert other.events.counters["text_compiles"] == 1


def test_a_secret_that_the_model_reads_is_stored_as_a_digest(tmp_path, monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, x):
            return x * len(VARIABLES["PG_TEST_TOKEN"])

    use_text_compiler(monkeypatch)
    monkeypatch.setenv("PG_TEST_TOKEN", "secret word")
    start(Model(), tmp_path)
    (stored,) = manifests(tmp_path, "bundle")
    assert "PG_TEST_TOKEN" in stored[0].meta["conditions"]["environment"]
    assert "secret word" not in str(stored[0].meta)
