"""A pytest plugin for engines: `pytest_plugins = "piecegraph.testing"` in `conftest.py`.

The fixture `graph_case` runs a test once for each graph mode and strategy. `graph_case.check(make)`
drives the engine that `make` returns through steps that find what is silent on a device. The work
of a `delayed_graph_case` is delayed: an engine that overlaps must wait for `reads_done()`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import proxy, ref

import pytest
import torch
from torch import Tensor

from .. import (
    Batch,
    Decision,
    PreparedModel,
    ReplayBackend,
    ReplayOptions,
    RuntimeMode,
    StepObserver,
)
from ..errors import CaptureAfterSeal, RunError
from ..runtime.core.preserved import SavedMemory
from ..runtime.tensors_by_path import tensors_by_path
from ..torch_compat.basics.tensors import storage_id, tree_leaves, tree_map_only
from .bisect.case import BisectCase
from .bisect.observe import copies, run_model
from .bisect.state import ModelState
from .steps import Rebuild, StepRecorder, with_metadata

LENGTHS: tuple[tuple[int, ...], ...] = (
    (1,) * 7, (1,) * 3, (1,), (1,) * 4, (4, 3), (1, 1, 5), (1, 1), (3,), (1,) * 7, (1,) * 2,
)  # fmt: skip
"""Query lengths of the requests of each step. Batches shrink, so that rows of a larger one are left
in what an engine does not write again; a step of ones alone is a decode step."""

CASES = (
    ("NONE", "eager"),
    ("PIECEWISE", "eager"),
    ("FULL_DECODE_ONLY", "eager"),
    ("FULL_AND_PIECEWISE", "eager"),
    ("FULL_AND_PIECEWISE", "delayed"),
    ("FULL_AND_PIECEWISE", "lazy"),
)


class Engine(Protocol):
    """What a test tells the plugin about its engine."""

    prepared: PreparedModel

    def start(self) -> None:
        """Capture and seal, as in production."""

    def step(self, lengths: Sequence[int], is_decode: bool) -> Any:
        """Run a step of one request per length.

        Returns its tensors and what they must be: real rows, and state such as the KV cache.
        Where `check` has `keep` and `rebuild`, it returns the results of the prepared model alone.
        """

    def live_state(self) -> Mapping[str, Tensor]:
        """The parts of KV caches and other state that requests may be using: views without what is
        reserved for padding. A capture must not write to them."""


@dataclass(frozen=True)
class GraphCase:
    """One graph mode and strategy; `settings` are for `Config`, `backend` for `prepare`."""

    graph_mode: str
    strategy: str
    backend: ReplayBackend

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "graph_mode": self.graph_mode,
            "strategy": self.strategy,
            "steps": {"after_seal": "raise_all"},
        }

    def check(
        self,
        make: Callable[[GraphCase], Engine],
        lengths: Sequence[Sequence[int]] = LENGTHS,
        *,
        between: Callable[[Engine, int], None] = lambda engine, step: None,
        keep: Rebuild | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        """Start the engine and run a step for each of `lengths`; fails with what is wrong.

        Checked are: captures leave live state alone, the model is sealed, each batch states the
        real counts, the best mode is used, metadata has the padded rows, everything that a step
        reads by address is in its place (else MovedTensor), and results are those of the plain
        model; delayed ones are compared at the end. Then the prepared model is closed. `between` is
        called before each step with its number. With `keep` and `rebuild`, see `prove_with`, the
        plain model runs here, from the state before the step: `step` then returns the results of
        the prepared model alone.
        """
        engine = make(self)
        with closing(engine.prepared):  # sealed: it would refuse what other tests compile
            reference = None
            if keep is not None and rebuild is not None:
                reference = _Reference(engine, keep, rebuild, len(lengths))
            self._run(engine, lengths, between, reference)

    def _run(
        self,
        engine: Engine,
        lengths: Sequence[Sequence[int]],
        between: Callable[[Engine, int], None],
        reference: _Reference | None,
    ) -> None:
        prepared = engine.prepared
        observer = _Observer(prepared, reference)
        prepared.parts.log.observe(observer)
        prepared.parts.checks.compare_all()
        with _untouched(engine, "the startup captures"):
            engine.start()
        must_be_sealed(prepared)
        comparisons: list[Callable[[], None]] = []
        for number, each in enumerate(lengths):
            between(engine, number)
            observer.metadata_faults.clear()
            batch = batch_of(each)
            where = f"step {number}, requests of {list(each)} tokens"
            try:
                got = engine.step(each, batch.is_decode)
            except RunError:
                for fault in observer.metadata_faults:  # says more than what the step noticed
                    pytest.fail(f"{where}: {fault}")
                raise
            self._check_decision(prepared, observer, batch, where)
            for fault in (*observer.metadata_faults, *observer.kept_too_long(got)):
                pytest.fail(f"{where}: {fault}")
            got, expected = got if reference is None else reference.compared(got)
            got = tree_map_only(Tensor, Tensor.clone, got)
            message = partial("{}: {}".format, where)
            comparisons.append(partial(torch.testing.assert_close, got, expected, msg=message))
            if not self.backend.options.delay:
                comparisons.pop()()
        for compare in comparisons:
            compare()
        self.backend.synchronize()

    def _check_decision(
        self, prepared: PreparedModel, observer: _Observer, batch: Batch, where: str
    ) -> None:
        stated, decision = observer.batch, observer.decision
        assert stated is not None, f"{where}: the engine ran no step of the prepared model"
        for fact in ("num_tokens", "num_reqs", "is_decode"):
            real, said = getattr(batch, fact), getattr(stated, fact)
            assert said == real, f"{where}: {fact} of the Batch is {said}, but it is {real}"
        if self.strategy == "eager":
            wanted = prepared.dispatcher.wanted(batch)
            assert decision.mode is wanted.mode, f"{where}: {decision}, wanted {wanted.mode.name}"


class _Reference:
    """What the plain model does of the last step, from the state before it."""

    def __init__(self, engine: Engine, keep: Rebuild, rebuild: Rebuild, num_steps: int) -> None:
        prepared, self._live_state = engine.prepared, engine.live_state
        model, layers = prepared.compiled.model, prepared._core.steps.context.layers
        self._case = BisectCase(model, prepared.config, (), layers)
        self._state = ModelState(model, layers)
        self._synchronize = prepared.backend.synchronize
        self._recorder = StepRecorder(prepared, None, limit=num_steps, metadata=keep)
        self._rebuild = rebuild
        self._before = self._state.now()

    def begin(self) -> None:
        """A step is about to run."""
        self._synchronize()
        self._before = self._state.now()

    def compared(self, results: Any) -> tuple[Any, Any]:
        """The results and the state that the step wrote, and what they must be."""
        self._synchronize()
        after, live = self._before.later(), copies(self._live_state())
        (step,) = with_metadata(self._recorder.steps[-1:], self._rebuild)
        self._before.restore()
        want = run_model(self._case, step, self._state)
        expected = copies(self._live_state())
        after.restore()
        if want.error is not None:
            raise want.error
        rows = after.rows_of(want.written)
        return (copies(results), rows, live), (want.results, want.state, expected)


class _Observer(StepObserver):
    """Remembers the last batch, and what is wrong with the metadata of its step."""

    def __init__(self, prepared: PreparedModel, reference: _Reference | None) -> None:
        self._prepared = proxy(prepared)  # it holds its observers
        self._reference = reference
        self._results: list[ref[Tensor]] = []
        self.batch: Batch | None = None
        self.decision: Any = None
        self.metadata_faults: list[str] = []

    def dispatched(self, batch: Batch, decision: Decision) -> None:
        self.batch, self.decision = batch, decision

    def began(self, decision: Decision, args: Any, kwargs: Any, metadata: Any) -> None:
        if self._reference is not None:
            self._reference.begin()
        batch, padded = self.batch, decision.descriptor
        if batch is None or decision.mode is not RuntimeMode.FULL:
            return
        sizes = {batch.num_tokens: padded.num_tokens, batch.num_reqs: padded.num_reqs}
        for path, tensor in tensors_by_path("metadata", metadata):
            rows = tensor.shape[0] if tensor.dim() else None
            most = max(size or 0 for size in sizes.values())
            if rows in sizes and rows < most and rows != sizes[rows] and sizes[rows]:
                self.metadata_faults.append(
                    f"{path} has {rows} rows, for the real size; the FULL graph reads {sizes[rows]}"
                )

    def kept_too_long(self, got: Any) -> Iterator[str]:
        """Results of an earlier step among those of this one."""
        results = [each for each in tree_leaves(got) if isinstance(each, Tensor)]
        graphs = {
            storage_id(output): index
            for index, recording in self._prepared.recordings()
            for output in tree_leaves(recording.outputs)
            if isinstance(output, Tensor)
        }
        for number, result in enumerate(results):
            own = graphs.get(storage_id(result), self.decision.graph_index)
            if own != self.decision.graph_index or any(old() is result for old in self._results):
                yield (
                    f"result {number} is of an earlier step, whose memory the next one overwrites: "
                    "copy what is kept"
                )
        self._results = [ref(each) for each in results if storage_id(each) in graphs]


@contextmanager
def _untouched(engine: Engine, what: str) -> Iterator[None]:
    """Fails if the block writes to live state, which holds other values meanwhile."""
    parts = dict(engine.live_state())
    before = SavedMemory(list(parts.values()))
    for part in parts.values():
        part.copy_(torch.rand(part.shape) * 100)
    marked = before.now()
    yield
    for name, elements in zip(parts, marked.changed(marked.now()), strict=True):
        if elements.any():
            pytest.fail(f"{what} wrote to live state {name!r}: dummy batches must use padding")
    before.restore()


def must_be_sealed(prepared: PreparedModel) -> None:
    """Fails unless `seal` was called: until then compiling under traffic is no error."""
    try:
        prepared.capture()
    except CaptureAfterSeal:
        return
    pytest.fail("the engine serves without `prepared.seal()`")


def batch_of(lengths: Sequence[int]) -> Batch:
    """The facts of a step of requests with these query lengths; ones alone are a decode step."""
    decode = set(lengths) == {1}
    return Batch(sum(lengths), len(lengths), is_decode=decode, query_len=1 if decode else None)


def case_of(graph_mode: str, strategy: str, *, delay: bool = False) -> GraphCase:
    """One case, on a replay backend that turns silent faults into errors."""
    options = ReplayOptions(
        poison_before_replay=True,
        poison_old_results=True,
        fail_on_moved_inputs=True,
        delay=delay,
        fail_on_early_writes=delay,
    )
    return GraphCase(graph_mode, strategy, ReplayBackend(options))


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def graph_case(request: pytest.FixtureRequest) -> GraphCase:
    """Each graph mode and strategy in turn."""
    return case_of(*request.param)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def delayed_graph_case(request: pytest.FixtureRequest) -> Iterator[GraphCase]:
    """Each graph mode and strategy in turn, with `ReplayOptions(delay=True)`."""
    case = case_of(*request.param, delay=True)
    yield case
    gc.collect()  # results of a check that failed
    case.backend.synchronize()
