"""Shared by all tests: no Hypothesis deadlines, a small heap, GPU tests only where there is one."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import os
import re
import sys
import uuid
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

# Until tests begin nothing is garbage: collecting it takes a tenth of what imports and pytest take.
gc.disable()

# What is imported until then is kept compiled, also where the environment keeps nothing: workers
# and a hundred processes of tests would compile it again. Modules that a test writes are not.
KEEPS_NO_BYTECODE, sys.dont_write_bytecode = sys.dont_write_bytecode, False

# Last of all that is done at the exit. Until then the heap stays frozen, since pytest collects
# garbage twice when it ends; what is frozen after it is reported as leaked, in many lines below its
# last one. A worker of xdist has reported everything and need not take torch apart, for seconds.
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)
else:
    atexit.register(gc.unfreeze)

import piecegraph  # noqa: E402

# examples have no deadline: their duration depends on how busy the machine is
for profile, examples in {"here": 25, "in-ci": 100, "many": 1000}.items():
    settings.register_profile(profile, deadline=None, max_examples=examples)
settings.load_profile("in-ci" if os.environ.get("CI") else "here")

SEED = int(os.environ.get("SEED", "0"))
AS_SHIPPED = bool(os.environ.get("AS_SHIPPED"))
"""Users have worker processes, a second trace beside each warm start, and a heap that is frozen
meanwhile. They take time that tests of something else need not take: see `make test-as-shipped`."""
if not AS_SHIPPED:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("PIECEGRAPH_OFF", "verification")

ROOT = Path(piecegraph.__file__).parent
SAMPLED = 6
"""Cases of one test from which on `--sampled` runs a third of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sampled", action="store_true", help="a third of each test's many cases")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-fast` does not import files whose tests it deselects: compilers take seconds."""
    if collection_path.suffix != ".py" or "not compile" not in config.option.markexpr:
        return None
    marks = re.search(r"^pytestmark = .*?(?=\n\n)", collection_path.read_text(), re.DOTALL | re.M)
    return True if marks and "mark.compile" in marks[0] else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with long tests first, so that no worker is left with one of them at the end."""
    if config.option.sampled:
        config.hook.pytest_deselected(items=drop_two_thirds_of_cases(items))
    cost: dict[Path, int] = {}
    for item in items:
        own = 2 * bool(item.get_closest_marker("slow")) + bool(item.get_closest_marker("compile"))
        cost[item.path] = max(cost.get(item.path, 0), own)
    items.sort(key=lambda item: (-cost[item.path], item.path))


def drop_two_thirds_of_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove them from `items`. Those that stay are the same each time, and anywhere in a table."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: dict[str, pytest.Item] = {}
    for each in cases.values():
        if len(each) >= SAMPLED:
            each.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            dropped |= {item.nodeid: item for item in each[len(each) // 3 :]}
    items[:] = [item for item in items if item.nodeid not in dropped]
    return [*dropped.values()]


def pytest_configure(config: pytest.Config) -> None:
    """Each of xdist's workers collects all files and begins with others than the rest, so that it
    finds most of them compiled: pytest takes seconds for that in a fresh clone."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if worker and config.args == config.getini("testpaths"):
        tests = sorted(each for each in Path(__file__).parent.glob("[!_]*") if each.is_dir())
        first = worker * len(tests) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        files = sorted(Path(__file__).parent.glob("test_*.py"))
        config.args = [*map(str, [*tests[first:], *files, *tests[:first]])]


def drop_handlers_of_traces() -> None:
    """pytest keeps no trace of torch, which would be made of each compilation for it."""
    trace = logging.getLogger("torch.__trace")
    trace.handlers[:] = [h for h in trace.handlers if "pytest" not in type(h).__module__]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    drop_handlers_of_traces()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `needs_torch` where torch is older, before any of their fixtures."""
    drop_handlers_of_traces()
    for mark in item.iter_markers("needs_torch"):
        needed, reason = mark.args
        if version("torch") < needed:
            pytest.skip(f"{reason}: NOT tested with torch {version('torch')}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """`make test-core` with a part off: tests of what the part guarantees cannot pass."""
    sys.dont_write_bytecode = KEEPS_NO_BYTECODE
    if not AS_SHIPPED:
        gc.freeze()
    gc.enable()
    off = set(os.environ.get("PIECEGRAPH_OFF", "").split(","))
    for item in session.items:
        for mark in item.iter_markers("needs_part"):
            if off.intersection(mark.args):
                item.add_marker(pytest.mark.skip(reason=f"part {mark.args[0]} is off"))


@pytest.fixture(autouse=True, scope="session")
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave nothing in the user's cache and find nothing there; xdist's workers share one."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PIECEGRAPH_CACHE_DIR", str(folder / "piecegraph-cache"))
        yield


@pytest.fixture(scope="session")
def package_sources() -> dict[str, Path]:
    """Every Python file of the package itself, by its name relative to the package."""
    apart = {"tests", "examples", "benchmarks", "build"}
    folders = [f for f in ROOT.iterdir() if f.is_dir() and f.name not in apart and f.name[0] != "."]
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path for path in paths}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket on an S3 server here, also for processes of the test."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    environ = {"AWS_ENDPOINT_URL_S3": url, "AWS_DEFAULT_REGION": "us-east-1"}
    environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    name = uuid.uuid4().hex
    s3fs.S3FileSystem.clear_instance_cache()  # those of the server of another test
    s3fs.S3FileSystem().mkdir(name)
    yield f"s3://{name}"
    server.stop()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """Objects of earlier tests do not slow down garbage collection in later ones.

    A capture session collects garbage; with all of torch's compilers loaded that takes a second.
    Each start of a model asks whether anything is frozen, and counting it takes 40 ms.
    """
    gc.collect()
    if AS_SHIPPED:
        yield
        return
    gc.freeze()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "get_freeze_count", lambda: 1)
        yield


def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that a thread keeps from its end prints where, and ends; xdist ends its workers."""
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(180, exit=True)


@pytest.fixture(autouse=True)
def random_by_name(request: pytest.FixtureRequest) -> None:
    """A test's random numbers depend on its name and SEED, not on the tests that ran before it."""
    if torch := sys.modules.get("torch"):
        on_cpu = torch.default_generator.manual_seed  # of all devices it takes longer than a test
        seed = torch.manual_seed if torch.cuda.is_available() else on_cpu
        seed(zlib.crc32(request.node.nodeid.encode()) + SEED)


@pytest.fixture(autouse=True)
def gpu_or_skip(request: pytest.FixtureRequest) -> None:
    """Skip tests marked `gpu` where there is no device."""
    if request.node.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: this is NOT tested here")
