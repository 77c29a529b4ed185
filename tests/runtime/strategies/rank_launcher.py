"""Forks ranks that play scenes: one for each line of standard input, `FOLDER SCENE-SIZE-RANK`.

A scene is a function of this file, which is given the ranks and whether this is the odd one. RANK
is that one, or SIZE if none differs. Each rank writes what came of it into FOLDER; one that hangs
is killed and writes nothing. The name is printed when all have ended.
"""

from piecegraph.tests.quick_imports import end, imported_by_starts

# isort: split
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from socket import socket

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from piecegraph import Batch, Config, Dispatcher, GraphMode, break_graph, prepare
from piecegraph.compile.ir import registered_compilers as compilers
from piecegraph.dispatch import AttentionSupport, CaptureStrategy, make_plan
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions
from piecegraph.runtime.capture import op_log
from piecegraph.runtime.capture.captures import Captures
from piecegraph.runtime.capture.recorder import ACTIVE, record
from piecegraph.runtime.core.records import CaptureFailure, Records
from piecegraph.runtime.forward_context import CURRENT
from piecegraph.runtime.parts.ranks.ranks import Ranks, start_facts
from piecegraph.runtime.parts.strategies.capturer import StrategyCapturer
from piecegraph.tests.text_compiler import EntryPoint
from piecegraph.torch_compat.basics.tensors import is_faking

TIMEOUT_S = {"come_late": 4.0, "die": 4.0, "they_start_cold": 8.0}  # of the scenes that wait for it
DEADLINE_S = 60.0


def agree(ranks, odd):
    return start(ranks, (1, 2))


def disagree_on_sizes(ranks, odd):
    return start(ranks, (1, 3) if odd else (1, 2))


def disagree_on_attention(ranks, odd):
    return start(ranks, (1, 2), AttentionSupport.NEVER if odd else AttentionSupport.ALWAYS)


def come_late(ranks, odd):
    """The odd rank comes when the others have given it up; rank 0, which has the store, waits."""
    deadline = timedelta(seconds=DEADLINE_S)
    if odd:
        ranks._store.wait([ranks._key("lost")], deadline)
    try:
        return start(ranks, (1, 2))
    finally:
        if odd:
            ranks._store.set("came", "")
        elif ranks.rank == 0:
            ranks._store.wait(["came"], deadline)


def die(ranks, odd):
    start(ranks, (1, 2))
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.exchange("after the death", {})


def one_cannot_capture(ranks, odd):
    capturer, captured = capturer_of(ranks, failing={2} if odd else set())
    capturer.startup()
    for n in (2, 2, 1, 1):
        capturer.before_step(Batch(n, n))
    return captured


def one_cannot_probe(ranks, odd):
    """The smallest probe of the odd rank fails; what ranks try to capture, and what they have."""
    capturer, captured = capturer_of(
        ranks, failing={3} if odd else set(), eager=True, steps={"memory_limit": 5000}
    )
    graphs, tried = capturer.captures.captures.graphs, list[str]()
    original = graphs.record

    def record_and_note(graph_index, session):
        tried.append(str(graph_index))
        return original(graph_index, session)

    graphs.record = record_and_note
    capturer.startup()
    assert capturer.memory.forecast is not None
    return [*tried, str(capturer.memory.forecast), *captured]


def one_sees_another_batch(ranks, odd):
    capturer, captured = capturer_of(ranks)
    capturer.startup()
    capturer.before_step(Batch(1, 1) if odd else Batch(2, 2))
    return captured


def limits_differ(ranks, odd):
    capturer, captured = capturer_of(
        ranks, eager=True, steps={"memory_limit": 0.5}, free=300 if odd else 900
    )
    capturer.startup()
    return captured


@break_graph(fake=lambda x: x * 1)
def summed(x):
    """A collective between two graphs: a rank that does not come leaves the others in it."""
    count = torch.ones(1)
    dist.all_reduce(count)
    return x * count


class Reducing(torch.nn.Module):
    def forward(self, x):
        return summed(summed(x * 2) + 1) * 3


def ready(ranks, model, **settings):
    """The model, by default not traced and in FULL graphs."""
    config = Config(**{
        "compile": False, "inputs": {"x": "float32[num_tokens, 2]"}, "max_num_tokens": 8,
        "max_num_reqs": 8, "capture_sizes": (2, 4, 8), "graph_mode": "FULL", "cache": False,
        "attention": {"support": "ALWAYS"}, **settings,
    })  # fmt: skip
    return prepare(model, config, backend=ReplayBackend(), ranks=ranks)


def reducing(ranks, model=None, **settings):
    return ready(ranks, model or Reducing(), graph_mode="PIECEWISE", **settings)


class Functional(torch.nn.Module):
    """Its collective returns before it has ended: who reads the result waits for it."""

    def forward(self, x):
        return collectives.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


class Gathering(torch.nn.Module):
    """Its collective calls operators in a thread of its own."""

    def forward(self, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x * 2)
        return sum(parts) + 1


def they_meet(ranks, odd):
    """Inside of FULL graphs, and in a break of PIECEWISE graphs."""
    right, traced = [], {"compile": True, "compiler": "eager"}
    piecewise = {**traced, "graph_mode": "PIECEWISE", "splitting_ops": ALL_REDUCE}
    ways = (Functional, {}), (Functional, piecewise), (Gathering, {}), (Gathering, traced)
    for model, way in ways:
        inputs = {"x": "float32[num_tokens, 512]"}
        prepared = ready(ranks, model(), inputs=inputs, capture_sizes=(4,), **way)
        prepared.capture()
        for number in range(10):
            x = torch.full((4, 512), 1.0 + number)
            batch = Batch(4, 4, is_decode=True, query_len=1)
            result, expected = prepared(x, batch=batch), 2 * dist.get_world_size() * x + 1
            right.append(torch.equal(result, expected))
    return right


ALL_REDUCE = ("_c10d_functional::all_reduce",)


class ReducingInside(torch.nn.Module):
    """Two collectives inside a FULL graph; `fault` is called after each. That the number of rows
    reaches none is found by runs."""

    def __init__(self, fault=lambda x: None):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        count = torch.ones(1)
        dist.all_reduce(count)
        self.fault(x)
        dist.all_reduce(count)
        self.fault(x)
        return x * 2 * (count + x.shape[0] - x.shape[0])


def reducing_inside(ranks, fails):
    """The model fails after a collective wherever `fails(recorder, x)`."""

    def fault(x):
        if fails(ACTIVE.get(), x):
            raise RuntimeError("out of something")

    model = ReducingInside(fault)
    return model, ready(ranks, model)


def reasons(prepared):
    """Why captures have failed."""
    return [failure.reason for failure in prepared.records.of(CaptureFailure)]


def failing_capture(ranks, fails):
    model, prepared = reducing_inside(ranks, fails)
    seconds = seconds_of_failure(prepared)
    return [*reasons(prepared), *modes(prepared, 4, 2, model=model), f"{seconds:.1f}"]


def one_fails_inside_a_graph(ranks, odd):
    """The capture of four tokens fails on the odd rank, between two collectives."""
    return failing_capture(
        ranks, lambda recorder, x: odd and recorder and recorder._open and len(x) == 4
    )


def one_fails_before_a_graph(ranks, odd):
    """As above, in the run before the recording."""
    return failing_capture(
        ranks, lambda recorder, x: odd and recorder and not recorder._open and len(x) == 4
    )


def one_fails_in_a_first_run(ranks, odd):
    """As above, at the end of a run of the first capture alone, which is that of eight tokens."""
    failures = iter([False, odd])
    return failing_capture(
        ranks, lambda recorder, x: not recorder and CURRENT.get() and next(failures, False)
    )


def one_looks_again(ranks, odd):
    """It alone sees a difference between two runs, as of memory that a collective still holds."""
    if odd:
        found, differences = iter([{0}]), op_log._differences
        op_log._differences = lambda *logs: next(found, None) or differences(*logs)
    model, prepared = reducing_inside(ranks, lambda recorder, x: False)
    prepared.capture()
    return [*reasons(prepared), *modes(prepared, 8, 4, 2, model=model)]


def one_fails_at_the_end(ranks, odd):
    """The first capture, when other ranks have met in all collectives of it."""
    failures = iter([False, odd])
    return failing_capture(
        ranks, lambda recorder, x: recorder and recorder._open and next(failures, False)
    )


def raised_by(call, began):
    """The error, and the seconds until then."""
    try:
        call()
    except Exception as error:
        return [f"{type(error).__name__}: {error}", f"{time.monotonic() - began:.1f}"]


def one_fails_in_a_comparison(ranks, odd):
    """`prepare` cannot compare padding on the odd rank, and makes other runs there."""
    began, failures = time.monotonic(), iter([odd])
    _, prepared = reducing_inside(
        ranks, lambda recorder, x: not is_faking() and not CURRENT.get() and next(failures, 0)
    )
    return raised_by(prepared.capture, began)


def one_fails_in_warm_up(ranks, odd):
    """The first dummy run of `warm_up` fails on the odd rank; all ranks raise."""
    _, prepared = reducing_inside(ranks, lambda recorder, x: odd and CURRENT.get())
    return raised_by(prepared.warm_up, time.monotonic())


def one_lacks_a_layer(ranks, odd):
    """Its dummy batch lacks what the caller must pass, which ends a capture."""
    _, prepared = reducing_inside(
        ranks, lambda recorder, x: odd and CURRENT.get() and CURRENT.get().layers["kv"]
    )
    return raised_by(prepared.capture, time.monotonic())


def one_fails_beside_a_collective(ranks, odd):
    """The odd rank fails at the second graph of its last capture, in the middle of it."""
    prepared = reducing(ranks)
    if odd:
        prepared.backend.options = ReplayOptions(failing_captures=frozenset({8}))
    seconds = seconds_of_failure(prepared)
    return [*reasons(prepared), *modes(prepared, 4, 2), f"{seconds:.1f}"]


def one_is_wrong(ranks, odd):
    """From the third step on a graph of the odd rank is wrong; its own state has no part in it."""
    prepared = reducing(ranks, shadow={"every": 1, "share": 1.0})
    prepared.capture()
    seen = modes(prepared, 4, 2)
    (recording,) = (each for _, each in prepared.recordings() if each.name.endswith(" 4"))
    right = recording.replay

    def wrong():
        right()
        recording.outputs[0].add_(1)

    if odd:
        recording.replay = wrong
    seen += modes(prepared, 2, 4, 4, 2)
    facts = prepared.report()["shadow"]
    proved = sum(each["count"] for each in facts["proved"])
    took_out = [(each["out_of_service"], each["graphs"]) for each in facts["wrong"]]
    return [*seen, str(proved), str(facts["stopped"]), str(took_out)]


def they_sleep(ranks, odd):
    """Steps, a sleep, and steps again: all graphs are back, without `capture`."""
    prepared = reducing(ranks, strategy="eager")
    prepared.capture()
    prepared.seal()
    there = len(prepared.recordings())
    seen = modes(prepared, 4, 2, 2, 2)
    before = len(prepared.events.named("capture"))
    for _ in range(2):
        prepared.release(keep="plan")
        assert not prepared.recordings()
        seen += modes(prepared, 8, 2)
        prepared.capture_idle(1e9)
        assert len(prepared.recordings()) == there
    back = prepared.events.named("capture")[before:]
    return [*seen, *modes(prepared, 4), *(str(event.facts["num_tokens"]) for event in back)]


class Weighted(Reducing):
    def __init__(self):
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.ones(2)), 1

    def forward(self, x):
        return super().forward(x * self.weight) * self.factor


def cold_start(ranks, verify):
    """One rank compiles, the others wait for that and load what it has stored."""
    os.environ["PIECEGRAPH_OFF"] = ""
    compilers.entry_points = lambda group: [EntryPoint()]
    folder = ranks.exchange("folder", {"folder": tempfile.mkdtemp()})[0]["folder"]
    inputs, cache = {"input": "float32[num_tokens, 2]"}, {"verify_bundle": verify}
    model, way = torch.nn.Linear(2, 2), {"compile": True, "compiler": "text", "graph_mode": "NONE"}
    prepared = ready(ranks, model, inputs=inputs, cache_dir=Path(folder), cache=cache, **way)
    seen = set(modes(prepared, *[8] * 40, model=model))
    return [prepared.report()["cache"]["hit"], *sorted(seen)]


def they_start_cold(ranks, odd):
    return cold_start(ranks, "background")


def they_start_cold_and_verify_before(ranks, odd):
    return cold_start(ranks, "before")


def one_has_another_weight(ranks, odd):
    """Graphs of the odd rank alone are stale at a refresh that all ranks make."""
    model, prepared = Weighted(), reducing(ranks, Weighted())
    prepared.capture()
    prepared.seal()
    if odd:
        prepared.compiled.model.weight = torch.nn.Parameter(torch.ones(2))
    refreshed = prepared.refresh()
    return [len(refreshed), *modes(prepared, 8, 4, 2, model=model)]


def one_has_changed(ranks, odd):
    """The model of the odd rank is no longer that of its graphs."""
    prepared = reducing(ranks, Weighted())
    prepared.capture()
    if odd:
        prepared.compiled.model.factor = 2
    return raised_by(prepared.refresh, time.monotonic())


def one_proves(ranks, odd):
    reducing(ranks, shadow={"every": 1} if odd else None).capture()


def one_proves_less(ranks, odd):
    reducing(ranks, shadow={"every": 7 if odd else 1}).capture()


def one_lacks_a_part(ranks, odd):
    os.environ["PIECEGRAPH_OFF"] = "strategies" if odd else ""
    reducing(ranks).capture()


def seconds_of_failure(prepared):
    """Capture; the seconds from the capture before the one that failed, if any, to its end."""
    before = [time.perf_counter() - prepared.events.began]
    prepared.capture()
    (failed,) = prepared.events.named("capture.failed")
    before += [event.at for event in prepared.events.named("capture") if event.at < failed.at]
    return failed.at - max(before)


def modes(prepared, *sizes, model=None):
    """Run steps; mode and padded size of each, and whether its rows are the model's."""
    seen = []
    for n in sizes:
        x = torch.randn(n, 2)
        decision = prepared.dispatch(Batch(n, n))
        rows = prepared.run(decision, x).clone()
        right = torch.allclose(rows, (model or Reducing())(x), atol=1e-5)
        padded = decision.descriptor.num_tokens
        seen.append(f"{decision.mode.name} {padded} {'right' if right else 'wrong'}")
    return seen


def start(ranks, sizes, support=None):
    settings = {} if support is None else {"attention": {"support": support}}
    plan = make_plan(GraphMode.FULL, sizes, max_num_reqs=8)
    ranks.agree("start", start_facts(Config(**settings), plan))
    return ["agreed"]


def capturer_of(ranks, *, failing=frozenset(), eager=False, free=10_000, **settings):
    """A capturer of a tiny function, and the list of what it has captured."""
    options = ReplayOptions(failing_captures=frozenset(failing), graph_bytes=100, limit=free)
    backend, captured = ReplayBackend(options), list[str]()
    dispatcher = Dispatcher(make_plan(GraphMode.FULL, (1, 2, 4), max_num_reqs=8))
    buffer = torch.zeros(4)

    class Graphs:
        def record(self, graph_index, session):
            size = dispatcher.plan.entries[graph_index].descriptor.num_tokens
            return record(double, (buffer[:size],), session, name=str(size), breaks=False)

        def install(self, graph_index, recording):
            captured.append(recording.name)

        def remove(self, graph_index):
            del captured[graph_index]

    strategy = CaptureStrategy.EAGER if eager else CaptureStrategy.LAZY
    config = Config(strategy=strategy, **settings)
    limit, exchange = config.steps.memory_limit, ranks.exchange
    captures = Captures(dispatcher.plan, backend, Records(), Graphs(), exchange)
    capturer = StrategyCapturer(config.strategy, limit, captures, dispatcher)
    return capturer, captured


def double(x):
    return x * 2


def play(folder, rank, size, scene, odd, listening):
    """Rank 0 hosts the store, as without a launcher, and ends at once if it fails."""
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "localhost", port, size, is_master=rank == 0, timeout=timedelta(seconds=DEADLINE_S),
        master_listen_fd=listening.detach() if rank == 0 else None,
    )  # fmt: skip
    dist.init_process_group("gloo", store=store, world_size=size, rank=rank)
    try:
        ranks = Ranks(timeout_s=TIMEOUT_S.get(scene, DEADLINE_S))
        outcome = {"result": globals()[scene](ranks, rank == odd)}
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    written = folder / f"rank-{rank}.json"
    written.with_suffix(".new").write_text(json.dumps(outcome))
    written.with_suffix(".new").rename(written)
    while "result" in outcome and len(list(folder.glob("rank-*.json"))) < size:
        time.sleep(0.02)  # a healthy rank goes on serving
    os._exit(0)


def play_all(folder, size, scene, odd):
    children = []
    with socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        for rank in range(size):
            child = os.fork()
            if child == 0:
                play(folder, rank, size, scene, odd, listening)
            children.append(child)
    deadline = time.monotonic() + DEADLINE_S
    while children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for child in children:
        os.kill(child, signal.SIGKILL)


def main():
    imported_by_starts()
    for line in sys.stdin:
        folder, name = line.split()
        scene, size, odd = name.split("-")
        play_all(Path(folder), int(size), scene, int(odd))
        print(name, flush=True)


if __name__ == "__main__":
    main()
    end()
