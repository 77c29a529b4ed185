"""Steps are proved while a model serves: a wrong one takes out of service what shares its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecegraph import Batch, PreparedModel
from piecegraph.cache.settings import CacheSettings
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.runtime import model_policy
from piecegraph.runtime.records import WrongStep
from piecegraph.runtime.shadow import Cause
from piecegraph.tools.steps import load_steps

from .conftest import LiveServed, Model, Texts

Prepare = Callable[..., LiveServed]

EACH = {"every": 1, "share": 1.0}


def run(served: LiveServed, *lengths: int) -> bool:
    """Run one step; whether it gives the plain model's rows."""
    try:
        served.step(*lengths)
    except AssertionError:
        return False
    return True


def the_wrong_step(prepared: PreparedModel) -> WrongStep:
    (wrong,) = prepared.records.of(WrongStep)
    return wrong


def compiled_wrong(patch: pytest.MonkeyPatch, at: int | None = None) -> None:
    """Pieces of the compiler add one to what they give, only `at` that size if it is stated."""

    def wrong(self: Texts, code: str) -> Callable[[list[Any]], Any]:
        right = loaded(self, code)

        def run(args: list[Any]) -> Any:
            rows = next(each for each in args if each.dim() > 1)
            results = right(args)
            hit = at is None or len(rows) == at
            return tuple(one + 1 for one in results) if hit else results

        return run

    loaded = Texts._loaded
    patch.setattr(Texts, "_loaded", wrong)


def test_right_steps_are_counted_and_change_nothing(prepare_live: Prepare) -> None:
    served = prepare_live(shadow=EACH)
    served.prepared.capture()
    for _ in range(3):
        assert run(served, 3)
        assert run(served, 1, 1)
    facts = served.prepared.report()["shadow"]
    assert facts["stopped"] is None
    assert facts["proved"] == [
        {"mode": "PIECEWISE", "num_tokens": 2, "count": 3},
        {"mode": "PIECEWISE", "num_tokens": 4, "count": 3},
    ]
    assert facts["wrong"] == []


def test_wrong_code_is_replaced_by_the_model(
    prepare_live: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_wrong(monkeypatch)
    served = prepare_live(shadow=EACH)
    served.prepared.capture()
    served.prepared.seal()
    assert run(served, 3)  # the wrong step has the uncompiled model's result
    wrong = the_wrong_step(served.prepared)
    assert wrong.out_of_service == Cause.BUNDLE
    assert wrong.graphs == ["PIECEWISE 8", "PIECEWISE 4", "PIECEWISE 2"]
    assert not served.prepared.compiled.traced
    assert run(served, 3)
    (step,) = load_steps(wrong.file)
    assert step.batch.num_tokens == 3


def test_a_kernel_wrong_at_one_size_takes_the_code_out(
    prepare_live: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_wrong(monkeypatch, at=4)
    served = prepare_live(shadow=EACH, cache=False)
    served.prepared.capture()
    assert run(served, 2)
    assert run(served, 3)
    assert the_wrong_step(served.prepared).out_of_service == Cause.CODE
    assert run(served, 4)


class Gained(Model):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def test_a_stale_bundle_is_put_aside(
    prepare_live: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "broken_conditions", lambda *_: [])
    off = CacheSettings(verify_bundle="off")
    prepare_live(Gained(2.0), cache=off)
    served = prepare_live(Gained(3.0), cache=off, shadow=EACH)
    assert served.prepared.compiled.from_bundle
    served.prepared.capture()
    assert run(served, 3)
    assert the_wrong_step(served.prepared).out_of_service == Cause.BUNDLE
    again = prepare_live(Gained(3.0), cache=off)
    assert not again.prepared.compiled.from_bundle
    assert run(again, 3)


class MixesRows(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.nan_to_num(7.0).sum(0)


def test_padding_that_leaks_takes_all_graphs_out(
    prepare_live: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_policy, "find_mixed_rows", lambda *_, **__: [])
    served = prepare_live(MixesRows(), shadow=EACH)
    served.prepared.capture()
    assert run(served, 3)
    wrong = the_wrong_step(served.prepared)
    assert wrong.out_of_service == Cause.GRAPHS
    assert served.prepared.recordings() == []
    assert run(served, 3)
    assert len(served.prepared.records.of(WrongStep)) == 1


def as_decode(served: LiveServed) -> None:
    """Rows count as requests of one token, which FULL graphs serve."""
    served.batch = lambda *lengths: Batch(sum(lengths), sum(lengths), True, 1)  # type: ignore[method-assign]


def test_a_table_that_moved_takes_the_graphs_of_the_mode_out(serve: Prepare) -> None:
    served = serve(shadow=EACH)
    as_decode(served)
    served.prepared.capture()
    assert run(served, 2, 1)
    served.stage.starts = served.stage.starts.clone()  # graphs read the first one
    assert run(served, 1, 2)
    wrong = the_wrong_step(served.prepared)
    assert (wrong.mode, wrong.out_of_service) == ("FULL", Cause.MODE)
    assert {recording.name[:4] for _, recording in served.prepared.recordings()} == {"PIEC"}
    assert run(served, 3)
    assert len(served.prepared.records.of(WrongStep)) == 1
