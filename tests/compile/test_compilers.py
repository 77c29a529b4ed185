"""Compilers of other packages: their version is in both keys, and their blobs have any name."""

from dataclasses import replace

import pytest

from piecegraph.cache import Cache
from piecegraph.compile.bundle.bundle import put_aside
from piecegraph.compile.bundle.key_factors import machine_key
from piecegraph.compile.ir import registered_compilers as compilers
from piecegraph.compile.ir.config import CodeConfig
from piecegraph.errors import CompilerUnversioned
from piecegraph.events import Events
from tests.text_compiler import TEXT, compile_text, load_texts

from . import ops as _registers  # noqa: F401
from .starts import CPU, start
from .test_models import MIX, Stack

pytestmark = pytest.mark.compile

BLOB = "kernel_source"


def compile_elsewhere(graph, inputs, options):
    fn, blobs = compile_text(graph, inputs, options)()
    return lambda: (fn, {BLOB: blobs["code"]})


def load_elsewhere(artifacts):
    return load_texts([{"code": blobs[BLOB]} for blobs in artifacts])


@pytest.fixture
def install(monkeypatch):
    def install(compiler):
        point = type("Point", (), {"name": "text", "load": lambda self: compiler})()
        monkeypatch.setattr(compilers, "entry_points", lambda group: [point])

    return install


def begin(root, depth=4):
    return start(Stack(depth), root, splitting_ops=MIX)


def test_code_of_another_version_is_not_loaded(tmp_path, install):
    install(TEXT)
    begin(tmp_path)
    old = machine_key(CodeConfig(compiler="text"), CPU)
    assert begin(tmp_path).hit
    install(replace(TEXT, version="2"))
    assert machine_key(CodeConfig(compiler="text"), CPU) != old
    upgraded = begin(tmp_path)
    assert "compiler text: '1' -> '2'" in upgraded.reason.replace('"', "'")
    assert upgraded.events.counters["text_compiles"] == 3


def test_a_compiler_whose_code_is_loaded_states_its_version(tmp_path, install):
    install(replace(TEXT, version=""))
    with pytest.raises(CompilerUnversioned, match="'text', an entry point of piecegraph.compilers"):
        begin(tmp_path)
    install(replace(TEXT, version="", load=None))
    assert not begin(tmp_path).hit


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_keys_of_built_in_compilers_state_no_version(compiler):
    versions = machine_key(CodeConfig(compiler=compiler), CPU).factors["versions"]
    assert {*versions} == {"piecegraph", "torch", "torch_commit", "triton", "python"}


def test_a_blob_may_have_any_name(tmp_path, install):
    install(replace(TEXT, compile=compile_elsewhere, load=load_elsewhere))
    first = begin(tmp_path)
    assert first.events.counters["text_compiles"] == 3
    other = begin(tmp_path, depth=7)  # a model with equal pieces
    assert not other.hit
    assert other.events.counters["text_compiles"] == 0
    assert put_aside(
        Cache(tmp_path, Events()), first.compiled.plan, first.compiled.model, "it failed"
    )
    assert begin(tmp_path).reason.startswith("aside")
