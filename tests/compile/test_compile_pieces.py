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
from piecegraph.compile.ir.compilation import Finish
from piecegraph.errors import PieceFailed

from . import ops as _registers  # noqa: F401
from .starts import compile_text, load_texts, start
from .test_models import MIX, Stack

pytestmark = pytest.mark.compile


class Recording:
    """A compiler that logs its calls in order and cannot compile the piece numbered `broken`."""

    def __init__(self, stage: str = "", broken: int | None = None) -> None:
        self.log: list[str] = []
        self.collecting: set[bool] = set()
        self._stage, self._broken, self._count = stage, broken, 0

    def load(self) -> Compiler:
        return Compiler("recording", self._compile, load_texts, session=self._session)

    @contextmanager
    def _session(self) -> Iterator[None]:
        self.log.append("open")
        try:
            yield
        finally:
            self.log.append("close")

    def _compile(self, graph: GraphModule, inputs: Any, options: Mapping[str, Any]) -> Finish:
        number, self._count = self._count, self._count + 1
        self._say("begin", number)
        ending = compile_text(graph, inputs, options)

        def finish() -> Any:
            self._say("finish", number)
            return ending()

        return finish

    def _say(self, stage: str, number: int) -> None:
        self.log.append(f"{stage} {number}")
        self.collecting.add(gc.isenabled())
        if (stage, number) == (self._stage, self._broken):
            raise OSError("no compiler")


@pytest.fixture
def using(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(compiler: Recording) -> Recording:
        compiler.name = "recording"  # type: ignore[attr-defined]
        monkeypatch.setattr(compilers, "entry_points", lambda group: [compiler])
        return compiler

    return use


def begin(root: Path) -> Any:
    return start(Stack(4), root, splitting_ops=MIX, compiler="recording")


def test_next_piece_begins_before_the_one_before_is_finished(tmp_path: Path, using: Any) -> None:
    compiler = using(Recording())
    begin(tmp_path)
    work = ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]
    assert compiler.log == ["open", *work, "close"]


@pytest.mark.parametrize(("stage", "kept"), [("begin", 1), ("finish", 1)])
def test_what_was_begun_before_an_error_is_kept(
    tmp_path: Path, using: Any, stage: str, kept: int
) -> None:
    using(Recording(stage, 1))
    with pytest.raises(PieceFailed, match=r"piece 1 .*OSError: no compiler"):
        begin(tmp_path)
    again = using(Recording())
    begin(tmp_path)
    assert sum(said.startswith("begin") for said in again.log) == 3 - kept
    assert begin(tmp_path).hit


def test_nothing_missing_opens_no_session(tmp_path: Path, using: Any) -> None:
    using(Recording())
    begin(tmp_path)
    again = using(Recording())
    start(Stack(7), tmp_path, splitting_ops=MIX, compiler="recording")
    assert again.log == []


@pytest.mark.parametrize("stage", ["begin", "finish"])
def test_garbage_is_not_collected_while_compiling_and_is_afterwards(
    tmp_path: Path, using: Any, stage: str
) -> None:
    compiler = using(Recording(stage, 2))
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
