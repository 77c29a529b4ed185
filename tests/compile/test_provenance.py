"""A changed value is a miss if the trace relied on it, and only then."""

import importlib
import shutil
import sys

import pytest
import torch

from piecegraph.compile.bundle.key_factors import trace_key
from piecegraph.compile.conditions.conditions import broken_conditions
from piecegraph.config import Config, compile_config
from tests.text_compiler import use_text_compiler

from .models import X
from .starts import CPU, start

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

FILES = "served_helpers", "served_model"


@pytest.fixture(autouse=True)
def text_compiler(monkeypatch):
    use_text_compiler(monkeypatch)
    yield
    torch._dynamo.reset()
    for name in FILES:
        sys.modules.pop(name, None)


def trace_key_of(model):
    config = compile_config(Config(compiler="text", max_num_tokens=64, inputs=X))
    return trace_key(model, config, CPU)


MODEL = """
import torch, served_helpers
class Served(torch.nn.Module):
    def forward(self, x):
        return served_helpers.doubled(x)
"""


def served(folder):
    """A model whose code is in two files of a folder."""
    folder.mkdir()
    (folder / "served_helpers.py").write_text("def doubled(x):\n    return x * 2\n")
    (folder / "served_model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        for name in FILES:
            sys.modules.pop(name, None)
        return importlib.import_module("served_model").Served()


def test_c1_vllm_47573_moved_checkout_and_cache_are_hits(tmp_path):
    start(served(tmp_path / "checkout"), tmp_path / "cache")
    shutil.move(tmp_path / "cache", tmp_path / "moved" / "cache")
    after = start(served(tmp_path / "elsewhere"), tmp_path / "moved" / "cache")
    assert after.hit, after.reason


def test_examples_of_another_size_are_a_hit(tmp_path):
    given = {"inputs": inputs_of("float32")}
    for size in (5, 9):
        made = start(Switched(), tmp_path, examples=((torch.zeros(size, 8),), {}), **given)
    assert made.hit, made.reason


def inputs_of(dtype):
    return {"x": f"{dtype}[num_tokens, 8]"}


class Switched(torch.nn.Module):
    def forward(self, x, double=False):
        return x * 2 if double else x + 0


def test_flag_among_the_examples_is_a_factor(tmp_path):
    x = torch.ones(5, 8)
    start(Switched(), tmp_path, examples=((x, False), {}), inputs=inputs_of("float32"))
    after = start(Switched(), tmp_path, examples=((x, True), {}), inputs=inputs_of("float32"))
    assert not after.hit
    assert "examples.double" in after.reason
    assert after(x).eq(2).all()


def test_changed_inductor_setting_is_a_miss_and_a_cold_start_changes_none(tmp_path):
    import torch._inductor.config as inductor_config

    first = start(Switched(), tmp_path)
    assert trace_key_of(Switched()) == first.key
    with inductor_config.patch({"cpp.simdlen": 8}):
        after = start(Switched(), tmp_path)
    assert not after.hit
    assert "torch._inductor.config.cpp.simdlen" in after.reason


def set_precision(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


SWITCHES = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "default device": (torch.set_default_device, "meta", None),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "precision of a backend": (set_precision, "bf16", "none"),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "flash attention": (torch.backends.cuda.enable_flash_sdp, False, True),
    "efficient attention": (torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "math attention": (torch.backends.cuda.enable_math_sdp, False, True),
    "cudnn attention": (torch.backends.cuda.enable_cudnn_sdp, False, True),
    "threads": (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_process_wide_switch_of_torch_is_a_factor(name):
    switch, value, usual = SWITCHES[name]
    model = Switched()
    key = trace_key_of(model)
    try:
        switch(value)
        assert trace_key_of(model) != key
    finally:
        switch(usual)
    assert trace_key_of(model) == key


def test_autocast_is_a_factor():
    model = Switched()
    with torch.autocast("cpu", torch.bfloat16):
        inside = trace_key_of(model)
    assert inside != trace_key_of(model)


def test_c1_no_provenance_is_a_reason():
    for conditions in (None, 1, {}, {"nodes": [], "identities": [], "roots": {"": 1}}):
        assert "unreadable" in str(broken_conditions(conditions, torch.nn.Module())[0])
