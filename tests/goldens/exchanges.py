"""The topics on which two ranks exchange facts, in their order, for each scene.

Both ranks run all scenes, one after another in one process group, and must be at equal topics.
"""

from __future__ import annotations

import json
import re
import tempfile
import traceback
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piecegraph import Batch, PreparedModel, Ranks
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.runtime.parts.checks.model_check import ModelCheck
from tests.processes import two_ranks

from ..compile.models import Stack
from .runs import (
    BESIDE,
    cached,
    evicting,
    prepared_model,
    replay_options,
    report_and_metrics,
    serve,
    served,
    wait_for_threads,
)

Scene = Callable[[Ranks, Path], PreparedModel]
POLLED = (Batch(1, 1),) * 16
"""Steps after which ranks compare whether work beside the steps is over."""
BOTH = "FULL_AND_PIECEWISE"


def delayed_captures(ranks: Ranks, folder: Path) -> PreparedModel:
    """Some between steps, the rest in idle time."""
    prepared = served(graph_mode=BOTH, strategy="delayed", ranks=ranks)
    prepared.parts.strategies.idle(1e6)
    return prepared


def lazy_captures_and_evictions(ranks: Ranks, folder: Path) -> PreparedModel:
    return evicting(folder, ranks=ranks)


def memory_limit_probes(ranks: Ranks, folder: Path) -> PreparedModel:
    prepared = prepared_model(graph_mode="FULL", steps={"memory_limit": 9000}, ranks=ranks)
    prepared.parts.strategies.memory_plan()
    prepared.capture()
    return prepared


def warm_up(ranks: Ranks, folder: Path) -> PreparedModel:
    prepared = prepared_model(graph_mode="PIECEWISE", ranks=ranks)
    prepared.warm_up()
    return prepared


def captures_again(ranks: Ranks, folder: Path) -> PreparedModel:
    """After all graphs were freed, and after a weight was replaced."""
    model = Stack(2)
    prepared = prepared_model(model, graph_mode="PIECEWISE", ranks=ranks)
    prepared.capture()
    prepared.release()
    prepared.capture()
    model.scale = nn.Parameter(torch.ones(8) * 2)
    prepared.refresh()
    return prepared


def capture_that_fails_on_one_rank(ranks: Ranks, folder: Path) -> PreparedModel:
    prepared = prepared_model(graph_mode="FULL", ranks=ranks)
    if ranks.rank == 1:
        replay_options(prepared, failing_captures=frozenset({1}))
    prepared.capture()
    serve(prepared)
    return prepared


def shadow(ranks: Ranks, folder: Path) -> PreparedModel:
    """Both ranks prove the same steps."""
    return served(graph_mode="FULL", shadow={"every": 2, "share": 1.0}, ranks=ranks)


def not_compiled(ranks: Ranks, folder: Path) -> PreparedModel:
    return served(graph_mode=BOTH, compile=False, ranks=ranks)


def verification(ranks: Ranks, folder: Path) -> PreparedModel:
    """A start stores a bundle, and one loads it: its trace is equal."""
    served(**cached(folder, graph_mode="PIECEWISE", ranks=ranks)).close()
    prepared = prepared_model(**cached(folder, graph_mode="PIECEWISE", ranks=ranks))
    prepared.capture()
    wait_for_threads()
    serve(prepared, POLLED)
    return prepared


def verification_that_refuses(ranks: Ranks, folder: Path) -> PreparedModel:
    """The model is another now, which only the trace finds: ranks compile again."""
    return _refused(ranks, folder, odd=1)


def verification_that_refuses_on_one_rank(ranks: Ranks, folder: Path) -> PreparedModel:
    """The model of one rank is another: both leave the bundle, and stay uncompiled."""
    return _refused(ranks, folder, odd=1 if ranks.rank == 1 else None)


def _refused(ranks: Ranks, folder: Path, odd: int | None) -> PreparedModel:
    served(**cached(folder, graph_mode="PIECEWISE", ranks=ranks)).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "broken_conditions", lambda *_: [])
        patch.setattr(ModelCheck, "check_step", lambda *_: None)  # its turn comes later
        settings = cached(folder, graph_mode="PIECEWISE", ranks=ranks)
        prepared = prepared_model(Stack(2, odd), **settings)
        prepared.capture()
        wait_for_threads()
        serve(prepared, POLLED)
    wait_for_threads()
    serve(prepared, POLLED * 2)
    return prepared


def switch_between_steps(ranks: Ranks, folder: Path) -> PreparedModel:
    """With `bundle="serve"` and no bundle."""
    prepared = prepared_model(**cached(folder, graph_mode="PIECEWISE", bundle="serve", ranks=ranks))
    prepared.capture()
    wait_for_threads()
    serve(prepared, POLLED * 2)
    return prepared


def switch_that_is_awaited(ranks: Ranks, folder: Path) -> PreparedModel:
    prepared = prepared_model(**cached(folder, graph_mode="PIECEWISE", bundle="serve", ranks=ranks))
    prepared.capture()
    prepared.parts.starts.wait_until_compiled()
    return prepared


SCENES: tuple[Scene, ...] = (
    delayed_captures, lazy_captures_and_evictions, memory_limit_probes, warm_up, captures_again,
    capture_that_fails_on_one_rank, shadow, not_compiled, verification, verification_that_refuses,
    verification_that_refuses_on_one_rank, switch_between_steps, switch_that_is_awaited,
)  # fmt: skip

SOME = (
    delayed_captures, lazy_captures_and_evictions, memory_limit_probes, captures_again,
    capture_that_fails_on_one_rank, verification_that_refuses_on_one_rank, switch_that_is_awaited,
)  # fmt: skip
"""Those of `make test`; all are played by `make heavy`."""
REPORTED = delayed_captures
"""The scene after which report and metrics are recorded, too."""


def of_two_ranks(
    played: tuple[Scene, ...] = SCENES,
) -> tuple[str, dict[str, Any]]:
    """The topics of these scenes as text, and what one rank reports after `REPORTED`."""
    with tempfile.TemporaryDirectory() as folder:
        two_ranks(_run, Path(folder), played)
        outcomes = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
    errors = [f"rank {n}: {each['error']}" for n, each in enumerate(outcomes) if "error" in each]
    assert not errors, "\n".join(errors)  # of both: one may only miss the other
    assert outcomes[0] == outcomes[1], "both ranks are at equal topics and report the same"
    scenes = [[scene, *topics, ""] for scene, topics in outcomes[0]["topics"].items()]
    return "\n".join(line for lines in scenes for line in lines), outcomes[0]["report"]


def _run(rank: int, folder: Path, played: tuple[Scene, ...]) -> None:
    """A forked rank. Writes the topics of each scene, or the error that ended it."""
    outcome: dict[str, Any] = {"topics": {}}
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
        for scene in played:
            name = scene.__name__.replace("_", " ")
            ranks = Ranks(timeout_s=60)
            outcome["topics"][name] = noted = _noting(ranks)
            prepared = scene(ranks, folder / scene.__name__)
            if scene is REPORTED:
                outcome["report"] = report_and_metrics(prepared)
            prepared.close()
            outcome["topics"][name] = _once(noted)
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(outcome))


def _once(topics: list[str]) -> list[str]:
    """Each indented, with how often it follows itself. While ranks wait for a thread they repeat
    its topic, as long as that takes."""
    counted = [(topic, len([*same])) for topic, same in groupby(topics)]
    return [
        f"  {topic}" + (f" ({n} times)" if n > 1 and not topic.startswith(BESIDE) else "")
        for topic, n in counted
    ]


def _noting(ranks: Ranks) -> list[str]:
    """The topics of all that `ranks` exchanges from now on, with the names of the facts."""
    noted: list[str] = []
    exchange = ranks.exchange

    def note(topic: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        names = dict.fromkeys(re.sub(r"graph \d+", "graph N", name) for name in facts)
        noted.append(f"{topic}: {', '.join(names)}")
        return exchange(topic, facts)

    ranks.exchange = note  # type: ignore[method-assign]
    return noted
