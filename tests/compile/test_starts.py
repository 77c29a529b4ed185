"""Many starts on one cache: replicas, ranks, required bundles, caches that fail."""

import errno
import inspect
import multiprocessing
import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.mutation_guard import install_generation_tagging_init

from piecegraph.cache import Cache
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.inspection import manifests
from piecegraph.cache.names import BLOB_AREA
from piecegraph.compile.pipeline import compile_missing, find_model
from piecegraph.compile.warm import NoBundle
from piecegraph.errors import BundleMissing
from piecegraph.events import Events
from piecegraph.torch_compat.basics.modules import untagged
from tests.text_compiler import use_text_compiler

from .starts import request_of, start

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

PROCESSES = 16
FORK = multiprocessing.get_context("fork")


class Tiny(torch.nn.Module):
    def __init__(self, gain=2.0):
        super().__init__()
        self.gain = gain
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x):
        return torch.sin(x) * self.gain + self.shift


class Makes(Tiny):
    """Makes a module in its forward."""

    def forward(self, x):
        return torch.nn.Hardtanh(-0.5, 0.5)(super().forward(x))


@pytest.fixture(autouse=True)
def text_compiler(monkeypatch):
    use_text_compiler(monkeypatch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def is_right(made, model):
    x = torch.randn(5, 8)
    return bool(torch.allclose(made(x), model(x)))


def _replica(root, gain, told):
    torch.set_num_threads(1)
    model = Tiny(gain)
    made = start(model, root)
    told.put((made.hit, made.events.counters["text_compiles"], is_right(made, model)))


def replicas(root, gains):
    """The outcome of each process; all are started at the same time."""
    told = FORK.Queue()
    processes = [FORK.Process(target=_replica, args=(root, gain, told)) for gain in gains]
    for process in processes:
        process.start()
    outcomes = [told.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()
    return outcomes


@pytest.mark.slow
def test_sixteen_replicas_on_an_empty_directory_compile_once(tmp_path):
    outcomes = replicas(tmp_path, [2.0] * PROCESSES)
    assert [right for _, _, right in outcomes] == [True] * PROCESSES
    assert sum(compiles for _, compiles, _ in outcomes) == 1
    assert sum(hit for hit, _, _ in outcomes) == PROCESSES - 1


@pytest.mark.slow
@pytest.mark.heavy
def test_sixteen_different_models_at_once(tmp_path):
    outcomes = replicas(tmp_path, [float(gain) for gain in range(PROCESSES)])
    assert [right for _, _, right in outcomes] == [True] * PROCESSES
    assert sum(compiles for _, compiles, _ in outcomes) == PROCESSES


def test_force_without_a_bundle_names_the_factor_that_differs(tmp_path):
    start(Tiny(), tmp_path)
    assert start(Tiny(), tmp_path, bundle="force").hit
    with pytest.raises(BundleMissing, match=r"differs in max_num_tokens: 64 -> 65"):
        start(Tiny(), tmp_path, bundle="force", max_num_tokens=65)
    with pytest.raises(BundleMissing, match="absent"):
        start(Tiny(), tmp_path / "empty", bundle="force")
    with pytest.raises(BundleMissing, match="keeps no artifacts"):
        start(Tiny(), tmp_path, bundle="force", compiler="eager")


SIGNATURE = inspect.signature(lambda a: None)


class ReadsASignature(torch.nn.Module):
    def forward(self, x):
        return x * len(SIGNATURE.parameters)


def test_a_signature_that_the_program_holds_is_a_condition(tmp_path, monkeypatch):
    start(ReadsASignature(), tmp_path)
    assert start(ReadsASignature(), tmp_path).hit
    monkeypatch.setitem(globals(), "SIGNATURE", inspect.signature(lambda a, b: None))
    reason = start(ReadsASignature(), tmp_path).reason
    assert "SIGNATURE" in reason
    assert "keys" in reason


def test_what_compiled_before_in_the_process_refuses_no_bundle(tmp_path, monkeypatch):
    """Dynamo replaces methods of Module when it first compiles, and leaves them so."""
    for name in ("__init__", "__setstate__"):
        own = getattr(torch.nn.Module, name)
        monkeypatch.setattr(torch.nn.Module, name, untagged(own) or own)
    assert not start(Makes(), tmp_path).hit
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    install_generation_tagging_init()
    model = Makes()
    again = start(model, tmp_path)
    assert again.hit, again.reason
    assert is_right(again, model)


def test_a_refused_start_is_looked_up_once(tmp_path):
    start(Tiny(2.0), tmp_path)
    refused = start(Tiny(3.0), tmp_path)
    assert "gain: 2.0 -> 3.0" in refused.reason
    assert refused.events.counters["cache.miss.refused"] == 1
    assert len(refused.events.named("bundle")) == 1


@pytest.mark.parametrize("before", [[], [2.0]])
def test_what_another_process_stored_after_the_look_up_is_loaded(tmp_path, before):
    for gain in before:
        start(Tiny(gain), tmp_path)
    missing = find_model(request_of(Tiny(3.0), tmp_path))
    assert isinstance(missing, NoBundle)
    start(Tiny(3.0), tmp_path)
    assert compile_missing(missing).from_bundle


def others(*facts):
    """An exchange with ranks that state what this one states, but for `facts`."""
    return lambda topic, own: [dict(own), *({**own, **fact} for fact in facts)]


def test_c3_vllm_57423_all_ranks_trace_if_one_has_no_bundle(tmp_path):
    start(Tiny(), tmp_path)
    assert start(Tiny(), tmp_path, exchange=others({}, {})).hit
    lacking = {"plan": None, "reason": "absent"}
    made = start(Tiny(), tmp_path, exchange=others({}, lacking))
    assert not made.hit
    assert made.events.counters["dynamo_traces"] == 1
    assert made.events.counters["text_compiles"] == 0
    assert "rank 2 has none: absent" in str(made.events.named("bundle")[-1].facts)
    with pytest.raises(BundleMissing, match="rank 1 has none"):
        start(Tiny(), tmp_path, exchange=others(lacking), bundle="force")


def test_c3_sglang_40320_ranks_with_other_keys_may_have_other_plans(tmp_path):
    start(Tiny(), tmp_path)
    assert start(Tiny(), tmp_path, exchange=others({"key": "other", "plan": "other"})).hit
    made = start(Tiny(), tmp_path, exchange=others({"plan": "other"}))
    assert "another plan under the same key" in str(made.events.named("bundle")[-1].facts)


def test_a_damaged_bundle_is_a_miss_and_never_a_wrong_result(tmp_path):
    """What the cache does with each kind of damage: tests/cache/test_damage.py."""
    start(Tiny(), tmp_path)
    for path in (tmp_path / BLOB_AREA).rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"damaged" + path.read_bytes())
    made = start(Tiny(), tmp_path)
    assert not made.hit
    assert "damaged" in made.reason
    assert is_right(made, Tiny())


@pytest.mark.parametrize("kinds", [("bundle",), ("bundle", "artifact")])
def test_code_that_does_not_load_is_compiled_again_and_replaced(tmp_path, kinds):
    start(Tiny(), tmp_path)
    cache = Cache(tmp_path, Events())
    for kind in kinds:
        for manifest, _ in list(manifests(tmp_path, kind)):
            entry = cache.lookup(kind, manifest.key)
            code = "code" if kind == "artifact" else "a0.code"
            cache.publish(kind, manifest.key, entry.meta, {**entry.contents, code: b"not code"})
    made = start(Tiny(), tmp_path)
    assert "it cannot be loaded: NameError" in made.reason
    assert len(made.events.named("artifact.refused")) == len(kinds) - 1
    assert is_right(made, Tiny())
    assert start(Tiny(), tmp_path).hit


def test_full_disk_and_vanished_directory_do_not_keep_a_process_from_serving(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryLayer, "store", full)
        made = start(Tiny(), tmp_path / "full")
    assert is_right(made, Tiny())
    assert made.events.named("cache.publish_failed")
    start(Tiny(), tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    assert is_right(start(Tiny(), tmp_path / "gone"), Tiny())


def test_a_start_whose_directory_cannot_be_used_says_so_and_what_to_do():
    cache = Cache(None, Events(), off_reason="/x: Permission denied")
    miss = find_model(replace(request_of(Tiny(), compiler="inductor"), cache=cache))
    assert str(miss) == "the cache is off: /x: Permission denied"
    assert "cache_dir" in miss.remedy
