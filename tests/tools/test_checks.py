"""Company that changes a result is found with its layer, a fact that a key lacks by its name."""

import dataclasses

import pytest
import torch

from piecegraph import Batch
from piecegraph.errors import InvalidSetting, PiecegraphError
from piecegraph.tools.bisect import BisectCase, Step, check_invariance, check_keys
from piecegraph.tools.cli.app import main

from . import faulty_models as models

pytestmark = pytest.mark.compile

BUFFER = torch.full((32,), 31)
ROWS = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def compose(numbers):
    """Each request has a slot of its own, which no other reads."""
    size = len(numbers)
    step = models.Slots(BUFFER, tuple(numbers), 31)
    return Step((ROWS[list(numbers)],), Batch(size, size, is_decode=True, query_len=1), step)


def case(model, small_config, **settings):
    limits = {"max_num_tokens": 32, "max_num_reqs": 16, "capture_sizes": (1, 4, 8)}
    config = small_config(**{"splitting_ops": ("faulty::attention",), **limits, **settings})
    layers = {"layer": models.Layer(torch.zeros(32, 4))}
    return BisectCase(model, config, [], layers, models.Padding(BUFFER, 31))


@pytest.mark.parametrize("compiles", [True, False])
def test_a_model_of_separate_rows_is_invariant_in_each_mode(small_config, compiles):
    it = case(models.Tiny(), small_config, compile=compiles, graph_mode="FULL_AND_PIECEWISE")
    it.layers["layer"].cache.fill_(2)
    found = check_invariance(it, compose, 4)
    assert max(row.difference for row in found) < 1e-5
    assert not any(row.wrong for row in found)
    seen = {(row.mode, row.others, row.padded) for row in found}
    for mode in ("eager", "NONE", "PIECEWISE", "FULL"):
        for others in ("alone", "batched", "with other requests", "last in the batch"):
            assert (mode, others) in {each[:2] for each in seen}
    assert ("FULL", "alone, padded", 8) in seen
    assert ("PIECEWISE", "batched, padded", 8) in seen
    assert "FULL, alone, 1 tokens: equal" in [row.line() for row in found]
    assert (it.layers["layer"].cache == 2).all()


def test_rows_that_mix_are_found_and_the_op_is_named(small_config):
    class MixedBefore(models.Tiny):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    found = check_invariance(case(MixedBefore(), small_config, graph_mode="NONE"), compose, 4)
    batched = {row.mode: row for row in found if row.others == "batched"}
    for mode in ("eager", "NONE"):
        assert batched[mode].difference > 0.01
        assert batched[mode].wrong
        assert batched[mode].where == "op attention"
    assert "first at op attention" in batched["NONE"].line()


def test_one_request_is_always_alone(small_config):
    with pytest.raises(InvalidSetting, match="always alone"):
        check_invariance(case(models.Tiny(), small_config), compose, 1)


@pytest.fixture
def scaling(small_config):
    buffer = torch.ones(32)
    config = small_config(splitting_ops=("faulty::scaled",), capture_sizes=(4,))
    metadata = models.StepWeights(3.0, 1.0, buffer)
    step = Step((ROWS,), Batch(4, 4, is_decode=True, query_len=1), metadata)
    capture = lambda descriptor, mode: models.Weights(buffer.fill_(1), 1.0)  # noqa: E731
    return BisectCase(models.Scaling(), config, [step], {}, capture)


@pytest.mark.parametrize("settings", [{}, {"compile": False, "graph_mode": "FULL"}], ids=str)
def test_a_host_value_that_a_graph_froze_is_missing_from_its_key(scaling, settings):
    config = scaling.config.changed(**settings)
    found, changed = check_keys(dataclasses.replace(scaling, config=config))
    assert set(changed) == {"metadata.weights", "metadata.scale"}
    (row,) = found
    assert (row.mode, row.num_tokens, row.fact) == ("FULL", 4, "metadata.scale")
    assert row.line().startswith("FULL 4 depends on metadata.scale: ")


def test_only_the_fields_asked_for_are_changed(scaling):
    assert check_keys(scaling, fields=["weights"]) == ([], ["metadata.weights"])
    buffer = scaling.steps[0].metadata.buffer
    wrong = lambda descriptor, mode: models.Weights(buffer.fill_(1), 9.0)  # noqa: E731
    found, changed = check_keys(scaling, variants={"another": wrong})
    assert (changed, {row.fact for row in found}) == (["another"], {"another"})


def test_captures_that_fail_without_a_change_are_an_error(scaling):
    with pytest.raises(PiecegraphError, match="capture"):
        check_keys(dataclasses.replace(scaling, capture_metadata=lambda descriptor, mode: None))


@pytest.mark.usefixtures("traced_once")
def test_the_commands_check_the_reference_engine(capsys):
    small = ["--model", "layers=1,hidden=16,heads=2,vocab=32", "--requests", "3"]
    options = [*small, "--backend", "eager", "--no-cache", "--capture-sizes", "1,4"]
    assert main(["check", "invariance", *options]) == 0
    out = capsys.readouterr().out
    assert "FULL, alone, padded, 1 tokens padded to 4: " in out
    assert "are bit-equal" in out
    assert main(["check", "keys", *options, "--steps", "4"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("; 0 differences")
    assert "context lengths, slots" in out
