"""Steps are logged, recorded and replayed; nobody is told about them unless asked for."""

import pickle
from contextlib import contextmanager

import pytest
import torch

import piecegraph as pg
from piecegraph.errors import InvalidSetting, ModelClosed, SizeOutOfRange
from piecegraph.runtime.core.step_file import restore_state, write_steps
from piecegraph.runtime.part import Part, Parts
from piecegraph.tools.steps import StepRecorder, load_steps, replay_step


@pytest.fixture(scope="module")
def prepared(small_config):
    config = small_config(
        inputs={"input": "float32[num_tokens, 4]"}, capture_sizes=(2, 4), splitting_ops=(),
        graph_mode="FULL_DECODE_ONLY",
    )  # fmt: skip
    made = pg.prepare(torch.nn.Linear(4, 4), config)
    made.capture()
    yield made
    made.close()


@pytest.fixture
def log(prepared):
    """The log of the last nine steps, for a test that looks at it."""
    prepared.parts.log.keep(9)
    yield prepared.parts.log
    prepared.parts.log.keep(0)


def decode(size):
    return pg.Batch(size, size, is_decode=True, query_len=1)


def run(prepared, batch, **more):
    return prepared.run(prepared.dispatch(batch), torch.ones(batch.num_tokens, 4), **more)


def test_the_log_says_how_steps_ran_and_why(prepared, log):
    log.keep(3)
    for batch in (decode(1), decode(1), decode(3), pg.Batch(3, 1), decode(6)):
        run(prepared, batch)
    rows = [
        (each.mode, each.descriptor.num_tokens, each.num_tokens, each.padding, each.reason)
        for each in log.last_steps()
    ]
    assert rows == [
        ("FULL", 4, 3, 1, "padded"),
        ("NONE", 3, 3, 0, "no graph for this kind of batch"),
        ("NONE", 6, 6, 0, "above largest size"),
    ]
    steps = log.last_steps()
    assert all(each.microseconds > 0 and each.error is None for each in steps)
    assert sum(map(sum, log.step_log.counts.values())) == 5
    assert pickle.loads(pickle.dumps(steps)) == steps
    log.keep(0)
    assert log.last_steps() == []


def test_the_runner_up_is_the_graph_that_came_closest(prepared, log):
    for batch in (decode(1), decode(3), pg.Batch(3, 1), decode(6)):
        run(prepared, batch)
    assert [each.runner_up for each in log.last_steps()] == [
        "FULL 4: less preferred",
        None,
        "FULL 2: no graph for this kind of batch",
        "FULL 4: above largest size",
    ]


def test_a_step_that_raises_is_logged_and_observers_stay(prepared, log):
    with pytest.raises(SizeOutOfRange):
        prepared.run(prepared.dispatch(decode(2)), torch.ones(9, 4))
    run(prepared, decode(2))
    assert [each.error for each in log.last_steps()] == ["SizeOutOfRange", None]


def test_an_observer_that_raises_leaves_the_others(prepared, log):
    class Broken(pg.StepObserver):
        def began(self, *step):
            raise ValueError

    broken = Broken()
    log.observe(broken)
    with pytest.raises(ValueError):  # noqa: PT011
        run(prepared, decode(2))
    log.unobserve(broken)
    run(prepared, decode(2))
    assert log.last_steps()[-1].error is None


def test_recorded_steps_give_the_same_results_again(prepared, tmp_path):
    file = tmp_path / "steps.pt"
    x = torch.randn(3, 4)
    batch = decode(3)
    with StepRecorder(prepared, file, metadata=lambda metadata, decision: metadata + 1):
        first = prepared.run(prepared.dispatch(batch), x, metadata=1).clone()
        x.zero_()
        batch.num_tokens = 2
        batch.num_reqs = 2
        prepared(torch.ones(2, 4), batch=batch, metadata=5)
    run(prepared, decode(1))
    one, two = load_steps(file, metadata=lambda kept, decision: (kept, decision.mode.name))
    assert (one.batch, two.batch.num_tokens) == (decode(3), 2)
    assert one.metadata_for(prepared.dispatch(one.batch)) == (2, "FULL")
    torch.testing.assert_close(replay_step(prepared, one), first)


@pytest.mark.parametrize(
    "batches", [(decode(3), decode(4)), (pg.Batch(6, 1), pg.Batch(6, 2), pg.Batch(6, 3))]
)
def test_steps_that_were_dispatched_ahead_are_recorded_each_with_its_batch(prepared, batches):
    with StepRecorder(prepared, None) as recorder:
        decisions = [prepared.dispatch(batch) for batch in batches]
        for batch, decision in zip(batches, decisions, strict=True):
            prepared.dispatch(decode(1))  # what is dispatched and not run is not recorded
            prepared.run(decision, torch.full((batch.num_tokens, 4), float(batch.num_reqs)))
    assert [step.batch for step in recorder.steps] == [*batches]
    assert [step.args[0][0, 0].item() for step in recorder.steps] == [b.num_reqs for b in batches]
    assert prepared.dispatch(batches[0]) is prepared.dispatch(batches[0])


def test_the_runner_up_of_a_step_that_was_dispatched_ahead_is_its_own(prepared, log):
    decisions = {size: prepared.dispatch(decode(size)) for size in (1, 6, 3)}
    for size, decision in decisions.items():
        prepared.run(decision, torch.ones(size, 4))
    assert [each.runner_up for each in log.last_steps()] == [
        "FULL 4: less preferred",
        "FULL 4: above largest size",
        None,
    ]


def test_a_recorder_stops_at_its_limit(prepared, tmp_path):
    file = tmp_path / "steps.pt"
    recorder = StepRecorder(prepared, file, limit=2)
    for size in (1, 2, 3):
        run(prepared, decode(size))
    assert [step.batch.num_tokens for step in load_steps(file)] == [1, 2]
    recorder.close()


@pytest.mark.parametrize("content", [b"", b"no", None])
def test_a_file_without_steps_is_refused(content, tmp_path):
    file = tmp_path / "steps.pt"
    if content is None:
        torch.save({"other": 1}, file)
    else:
        file.write_bytes(content)
    with pytest.raises(InvalidSetting, match="steps file"):
        load_steps(file)


@pytest.mark.compile
@pytest.mark.usefixtures("traced_once")
def test_the_command_records_and_replays(tmp_path, capsys):
    from piecegraph.tools.cli.app import main

    small = ["--model", "layers=1,hidden=16,heads=2,vocab=32", "--requests", "2"]
    options = [*small, "--backend", "eager", "--no-cache", "--capture-sizes", "1,2"]
    file = str(tmp_path / "steps.pt")
    assert main(["run", *options, "--record", file]) == 0
    assert main(["explain", *options, "--replay", file, "--format", "json", "--output", "-"]) == 0
    assert '"schema": 2' in capsys.readouterr().out


def test_a_file_restores_the_rows_that_its_step_found(tmp_path):
    cache, table = torch.zeros(4, 2), torch.zeros(3)
    rows = torch.tensor([1, 3])
    state = {"cache": (0, rows, torch.ones(2, 2)), "table": (0, None, torch.full((3,), 2.0))}
    write_steps(tmp_path / "step.pt", [], state)
    restore_state(tmp_path / "step.pt", {"cache": cache, "table": table, "other": torch.zeros(1)})
    assert cache[:, 0].tolist() == [0, 1, 0, 1]
    assert table.tolist() == [2, 2, 2]


class Caller(pg.StepObserver):
    """Runs a step of its own before each step."""

    def __init__(self, prepared):
        self.prepared = prepared
        self.told = []

    def dispatched(self, batch, decision):
        self.told.append("dispatched")

    def began(self, decision, args, kwargs, metadata):
        self.told.append("began")
        if len(self.told) < 9:
            run(self.prepared, decode(2))

    def ended(self, decision, num_tokens, error):
        self.told.append("ended")


def test_a_step_inside_a_step_is_not_told(prepared):
    caller = Caller(prepared)
    prepared.parts.log.observe(caller)
    run(prepared, decode(3))
    prepared.parts.log.unobserve(caller)
    assert caller.told == ["dispatched", "began", "ended"]


def test_ranges_of_a_closed_model_are_refused(small_config):
    config = small_config(splitting_ops=(), inputs={"input": "float32[num_tokens, 4]"})
    closed = pg.prepare(torch.nn.Linear(4, 4), config)
    closed.close()
    with pytest.raises(ModelClosed):
        closed.parts.log.profiler_ranges()


def test_what_was_entered_is_left_if_a_later_part_refuses():
    left = []

    class Enters(Part):
        name = "enters"

        @contextmanager
        def around_recording(self, entry):
            try:
                yield
            finally:
                left.append(self.name)

    class Refuses(Part):
        name = "refuses"

        @contextmanager
        def around_recording(self, entry):
            raise ModelClosed()
            yield

    parts = Parts()
    parts.set([Enters(), Refuses()], [Enters, Refuses])
    with pytest.raises(ModelClosed) as refused, parts.around_recording(None):
        pass
    assert (left, refused.type) == (["enters"], ModelClosed)  # kept alive by its traceback
