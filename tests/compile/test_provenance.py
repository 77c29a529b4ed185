"""A changed value is a miss if the trace relied on it, and only then."""

import importlib
import os
import shutil
import subprocess
import sys

import pytest
import torch

from piecegraph.compile.conditions.conditions import broken_conditions

from .starts import start, use_text_compiler

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

HELPERS = """
SCALE = 2.0
FLAG = True
TABLE = {"gain": 1.0, "unread": 5}
CALLS = []

class Settings:
    __slots__ = ("bias", "unread")

    def __init__(self):
        self.bias, self.unread = 3.0, 4.0

SETTINGS = Settings()

def helper(x):
    CALLS
    return x * SCALE if FLAG else x
"""

MODEL = """
import torch
import served_helpers
from served_helpers import helper

LOCAL = 5.0

class Served(torch.nn.Module):
    factor = 3.0

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.eps = 0.5
        self.settings = served_helpers.Settings()
        self.deep = [[[[[[[[1.0]]]]]]]]
        power = 2.0
        self.act = lambda x: x * power
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x):
        x = helper(self.act(self.linear(x))) + self.eps + self.settings.bias * self.factor
        x = x + LOCAL + served_helpers.SETTINGS.bias + served_helpers.TABLE["gain"]
        return x + self.shift[..., :8] + self.deep[0][0][0][0][0][0][0][0]
"""


class Checkout:
    """The two modules above in a directory of their own, imported from there."""

    def __init__(self, folder, helpers=HELPERS, model=MODEL):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "served_helpers.py").write_text(helpers)
        (folder / "served_model.py").write_text(model)
        for name in ("served_helpers", "served_model"):
            sys.modules.pop(name, None)
        sys.path.insert(0, str(folder))
        try:
            importlib.invalidate_caches()
            self.model_module = importlib.import_module("served_model")
        finally:
            sys.path.remove(str(folder))
        self.helpers = sys.modules["served_helpers"]

    def model(self):
        torch.manual_seed(0)
        return self.model_module.Served()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    # Python takes .pyc files by size and second of the source: an edit within one would not be read
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Checkout(tmp_path / "checkout")
    for name in ("served_helpers", "served_model"):
        sys.modules.pop(name, None)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """One cache directory for all tests: what they change must not depend on the place."""
    return tmp_path_factory.mktemp("bundles")


def trace_key_of(model):
    from piecegraph.compile.bundle.key_factors import trace_key
    from piecegraph.config import Config, compile_config

    from .models import X
    from .starts import CPU

    config = compile_config(Config(compiler="text", max_num_tokens=64, inputs=X))
    return trace_key(model, config, CPU)


@pytest.mark.parametrize(
    ("helpers", "model"),
    [
        (HELPERS.replace("x * SCALE", "x / SCALE"), MODEL),
        (HELPERS, MODEL.replace("+ self.eps", "- self.eps")),
    ],
    ids=["function of another module", "forward"],
)
def test_edited_source_is_a_miss(helpers, model, checkout, bundles, tmp_path):
    start(checkout.model(), bundles / "edited")
    edited = Checkout(tmp_path / "checkout", helpers, model)
    after = start(edited.model(), bundles / "edited")
    assert not after.hit
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(after(x), edited.model()(x))


def test_c1_vllm_47573_moved_checkout_and_cache_are_hits(checkout, tmp_path):
    start(checkout.model(), tmp_path / "cache")
    shutil.move(tmp_path / "cache", tmp_path / "moved" / "cache")
    moved = Checkout(tmp_path / "elsewhere" / "checkout")
    after = start(moved.model(), tmp_path / "moved" / "cache")
    assert after.hit, after.reason


def test_examples_of_another_form_are_a_miss(checkout, bundles):
    root, model = bundles / "examples", checkout.model()
    start(model, root, examples=((torch.zeros(5, 8),), {}), inputs=inputs_of("float32"))
    sized = start(model, root, examples=((torch.zeros(9, 8),), {}), inputs=inputs_of("float32"))
    assert sized.hit, sized.reason


def inputs_of(dtype):
    return {"x": f"{dtype}[num_tokens, 8]"}


class Switched(torch.nn.Module):
    def forward(self, x, double=False):
        return x * 2 if double else x + 0


def test_flag_among_the_examples_is_a_factor(bundles, monkeypatch):
    use_text_compiler(monkeypatch)
    x = torch.ones(5, 8)
    start(Switched(), bundles, examples=((x, False), {}), inputs=inputs_of("float32"))
    after = start(Switched(), bundles, examples=((x, True), {}), inputs=inputs_of("float32"))
    assert not after.hit
    assert "examples.double" in after.reason
    assert after(x).eq(2).all()


def test_changed_inductor_setting_is_a_miss_and_a_cold_start_changes_none(checkout, bundles):
    import torch._inductor.config as inductor_config

    first = start(checkout.model(), bundles / "setting")
    assert trace_key_of(checkout.model()) == first.key
    with inductor_config.patch({"cpp.simdlen": 8}):
        after = start(checkout.model(), bundles / "setting")
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
def test_process_wide_switch_of_torch_is_a_factor(name, checkout):
    switch, value, usual = SWITCHES[name]
    model = checkout.model()
    key = trace_key_of(model)
    try:
        switch(value)
        assert trace_key_of(model) != key
    finally:
        switch(usual)
    assert trace_key_of(model) == key


def test_autocast_is_a_factor(checkout):
    model = checkout.model()
    with torch.autocast("cpu", torch.bfloat16):
        inside = trace_key_of(model)
    assert inside != trace_key_of(model)


class Fused(torch.nn.Module):
    def forward(self, x):
        return torch.ops.piecegraph_provenance.fused(x)[:, :4] * 2


def _define_fused(width, gain):
    library = torch.library.Library("piecegraph_provenance", "DEF")
    library.define("fused(Tensor x) -> Tensor")
    library.impl("fused", lambda x: x[:, :width] * gain, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "piecegraph_provenance::fused", lambda x: x[:, :width].clone(), lib=library
    )
    return library


def test_fake_implementation_of_an_op_is_checked(bundles, monkeypatch):
    use_text_compiler(monkeypatch)
    library = _define_fused(6, 2.0)
    try:
        start(Fused(), bundles / "fake")
        assert start(Fused(), bundles / "fake").hit
    finally:
        library._destroy()
    library = _define_fused(4, 2.0)
    try:
        after = start(Fused(), bundles / "fake")
        assert not after.hit
        assert "op piecegraph_provenance::fused" in after.reason
    finally:
        library._destroy()


def test_c1_no_provenance_is_a_reason():
    for conditions in (None, 1, {}, {"nodes": [], "identities": [], "roots": {"": 1}}):
        assert "unreadable" in str(broken_conditions(conditions, torch.nn.Module())[0])


HASHED = """
import sys; sys.path.insert(0, {folder!r})
import torch
from served_model import Served
from piecegraph.compile.ir.config import CompileConfig
from piecegraph.compile.bundle.key_factors import trace_key
model = Served()
model.names = {{"a", "b", "c", "d"}}
model.act = None
config = CompileConfig(inputs={{"x": "float32[num_tokens, 8]"}}, splitting_ops=("a::b", "c::d"))
print(trace_key(model, config, torch.device("cpu")).digest)
"""


@pytest.mark.heavy  # tests/goldens has starts from what processes of other seeds stored
def test_two_hash_seeds_give_one_key(checkout, tmp_path):
    program = HASHED.format(folder=str(tmp_path / "checkout"))

    def key(seed):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert len({key("1"), key("2")}) == 1
