"""The order in which pieces are compiled: one is generated while another's kernels are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from gc import get_freeze_count
from pathlib import Path
from typing import Any

import pytest
from torch.fx import GraphModule

from piecegraph.compile.backends import registry as compilers
from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.ir.compilation import Built
from piecegraph.errors import PieceFailed

from . import ops as _registers  # noqa: F401
from .starts import compile_text, load_texts, start
from .test_models import MIX, Stack

pytestmark = pytest.mark.compile


class Recording:
    """A compiler that logs its calls in order and cannot compile the piece numbered `broken`."""

    def __init__(self, broken: int | None = None) -> None:
        self.log: list[str] = []
        self.collecting: set[bool] = set()
        self._broken, self._count = broken, 0

    def load(self) -> Compiler:
        return Compiler("recording", self._compile, load_texts, session=self._session)

    @contextmanager
    def _session(self) -> Iterator[None]:
        self.log.append("open")
        try:
            yield
        finally:
            self.log.append("close")

    def _compile(self, graph: GraphModule, inputs: Any, options: Mapping[str, Any]) -> Built:
        number, self._count = self._count, self._count + 1
        self.log.append(f"compile {number}")
        self.collecting.add(gc.isenabled())
        if number == self._broken:
            raise OSError("no compiler")
        return compile_text(graph, inputs, options)


@pytest.fixture
def using(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(compiler: Recording) -> Recording:
        compiler.name = "recording"  # type: ignore[attr-defined]
        monkeypatch.setattr(compilers, "entry_points", lambda group: [compiler])
        return compiler

    return use


def begin(root: Path) -> Any:
    return start(Stack(4), root, splitting_ops=MIX, compiler="recording")


def test_pieces_are_compiled_in_one_session(tmp_path: Path, using: Any) -> None:
    compiler = using(Recording())
    begin(tmp_path)
    assert compiler.log == ["open", "compile 0", "compile 1", "compile 2", "close"]


def test_what_was_compiled_before_an_error_is_kept(tmp_path: Path, using: Any) -> None:
    using(Recording(broken=1))
    with pytest.raises(PieceFailed, match=r"piece 1 .*OSError: no compiler"):
        begin(tmp_path)
    again = using(Recording())
    begin(tmp_path)
    assert again.log == ["open", "compile 0", "compile 1", "close"]
    assert begin(tmp_path).hit


def test_nothing_missing_opens_no_session(tmp_path: Path, using: Any) -> None:
    using(Recording())
    begin(tmp_path)
    again = using(Recording())
    start(Stack(7), tmp_path, splitting_ops=MIX, compiler="recording")
    assert again.log == []


def test_garbage_is_not_collected_while_compiling_and_is_afterwards(
    tmp_path: Path, using: Any
) -> None:
    compiler = using(Recording(broken=2))
    with pytest.raises(PieceFailed):
        begin(tmp_path)
    assert compiler.collecting == {False}
    assert gc.isenabled()


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_frozen_stays_as_it_was(
    tmp_path: Path, using: Any, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    using(Recording())
    monkeypatch.setattr(gc, "get_freeze_count", get_freeze_count)
    gc.freeze()
    if not frozen:
        gc.unfreeze()
    begin(tmp_path)
    assert bool(get_freeze_count()) is frozen
