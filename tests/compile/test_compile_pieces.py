"""The order in which pieces are compiled: some are generated while others' kernels are built."""

import gc
from contextlib import contextmanager
from gc import get_freeze_count

import pytest

from piecegraph.compile.backends import in_process
from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.ir import registered_compilers as compilers
from piecegraph.errors import PieceFailed
from piecegraph.torch_compat.basics.tensors import is_fake
from tests.text_compiler import compile_text, load_texts

from . import ops as _registers  # noqa: F401
from .starts import start
from .test_models import MIX, Stack

pytestmark = pytest.mark.compile


class Recording:
    """A compiler that logs its calls in order and fails at one of them, `broken`."""

    def __init__(self, broken=""):
        self.log = []
        self.collecting = set()
        self.sizes = []
        self._broken, self._count = broken, 0

    def load(self):
        return Compiler("recording", self._compile, load_texts, session=self._session, version="1")

    @contextmanager
    def _session(self):
        self.log.append("open")
        try:
            yield
        finally:
            self.log.append("close")

    def _compile(self, graph, inputs, options):
        number, self._count = self._count, self._count + 1
        self._note(f"generate {number}")
        self.collecting.add(gc.isenabled())
        self.sizes.append({str(size) for x in inputs if is_fake(x) for size in x.shape})
        building = compile_text(graph, inputs, options)

        def build():
            self._note(f"build {number}")
            return building()

        return build

    def _note(self, call):
        self.log.append(call)
        if call == self._broken:
            raise OSError("no compiler")


@pytest.fixture
def using(monkeypatch):
    def use(compiler):
        compiler.name = "recording"
        monkeypatch.setattr(compilers, "entry_points", lambda group: [compiler])
        return compiler

    return use


def begin(root):
    return start(Stack(4), root, splitting_ops=MIX, compiler="recording")


@pytest.mark.parametrize(
    ("ahead", "calls"),
    [(1, "g0 b0 g1 b1 g2 b2"), (2, "g0 g1 b0 g2 b1 b2"), (4, "g0 g1 g2 b0 b1 b2")],
)
def test_the_code_of_pieces_is_generated_while_others_are_built(
    tmp_path, using, monkeypatch, ahead, calls
):
    monkeypatch.setattr(in_process, "AHEAD", ahead)
    compiler = using(Recording())
    begin(tmp_path)
    assert [f"{call[0]}{call[-1]}" for call in compiler.log[1:-1]] == calls.split()


@pytest.mark.parametrize(
    ("broken", "missing"), [("generate 1", "g0 g1 b0 b1"), ("build 1", "g0 b0")]
)
def test_what_was_generated_before_an_error_is_kept(tmp_path, using, broken, missing):
    using(Recording(broken))
    with pytest.raises(PieceFailed, match=r"piece 1 .*OSError: no compiler"):
        begin(tmp_path)
    again = using(Recording())
    begin(tmp_path)
    assert [f"{call[0]}{call[-1]}" for call in again.log[1:-1]] == missing.split()
    assert begin(tmp_path).hit


def test_nothing_missing_opens_no_session(tmp_path, using):
    using(Recording())
    begin(tmp_path)
    again = using(Recording())
    start(Stack(7), tmp_path, splitting_ops=MIX, compiler="recording")
    assert again.log == []


def test_garbage_is_not_collected_while_compiling_and_is_afterwards(tmp_path, using):
    compiler = using(Recording("generate 2"))
    with pytest.raises(PieceFailed):
        begin(tmp_path)
    assert compiler.collecting == {False}
    assert gc.isenabled()


def test_code_for_one_size_is_of_fake_inputs_without_symbols(tmp_path, using):
    """Of real tensors torch makes every size a symbol, that of a weight too, and guards on them."""
    compiler = using(Recording())
    start(Stack(1), tmp_path, compiler="recording", splitting_ops=(), codegen={"sizes": (16,)})
    assert sorted(sizes >= {"16"} for sizes in compiler.sizes) == [False, True]
    assert [sizes <= {"16", "8"} for sizes in compiler.sizes if "16" in sizes] == [True]


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_stays_as_it_was(tmp_path, using, frozen, monkeypatch):
    using(Recording())
    monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
    gc.freeze()
    if not frozen:
        gc.unfreeze()
    begin(tmp_path)
    assert bool(get_freeze_count()) is frozen
