"""Sizes fitted to a trace, as the command does it."""

import json
import random

import pytest
from typer.testing import CliRunner

from piecegraph.errors import InvalidSetting
from piecegraph.tools.cli.sizes_commands import sizes_app
from piecegraph.tools.serve.fitted_sizes import fit_trace, read_sizes, step_sizes
from piecegraph.tools.serve.options import parse_sizes
from piecegraph.tools.serve.trace import EXCERPT, TraceRow, read_trace


def decode_steps(requests, rate=1.0):
    return step_sizes(requests, rate)[0]


def one_step_at_a_time(requests, rate, max_num_tokens, max_num_reqs):
    """`step_sizes` as simply as possible."""
    decode, mixed = [0] * (max_num_reqs + 1), [0] * (max_num_tokens + 1)
    coming = [[each.arrival / rate, each.num_prompt, each.num_generate] for each in requests]
    prompts, outputs, now = [], [], 0.0
    while coming or prompts or outputs:
        if not prompts and not outputs:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            prompts.append(coming.pop(0)[1:])
        left, running, started = max_num_tokens - len(outputs), len(outputs), []
        taken = 0
        while prompts and left and running + taken < max_num_reqs:
            chunk = min(left, prompts[0][0])
            prompts[0][0] -= chunk
            left, taken = left - chunk, taken + 1
            if prompts[0][0] == 0:
                started += [output - 1 for _, output in [prompts.pop(0)] if output > 1]
        if taken:
            mixed[max_num_tokens - left] += 1
        else:
            decode[running] += 1
        outputs = [output - 1 for output in outputs if output > 1] + started
        now += 8e-3 + 3e-5 * (max_num_tokens - left)
    return decode, mixed


@pytest.mark.parametrize("rate", [1.0, 30.0, 1000.0])
def test_equal_steps_are_counted_at_once(rate):
    draw_length = random.Random(0).randint
    requests = [TraceRow(k * 0.05, draw_length(1, 300), draw_length(1, 30)) for k in range(60)]
    limits = {"max_num_tokens": 64, "max_num_reqs": 8}
    assert step_sizes(requests, rate, **limits) == one_step_at_a_time(requests, rate, **limits)


def test_huge_lengths_take_no_time():
    decode, mixed = step_sizes([TraceRow(0.0, 10**12, 10**12)] * 2)
    assert sum(decode) > 10**11
    assert sum(mixed) > 10**8


def test_one_request_decodes_alone():
    assert decode_steps([TraceRow(0.0, 5000, 4)])[:3] == [0, 3, 0]
    assert sum(decode_steps([TraceRow(0.0, 10, 1)])) == 0


def test_requests_overlap_by_rate_and_never_pass_the_limit():
    apart = [TraceRow(float(k), 10, 20) for k in range(4)]
    assert decode_steps(apart)[2:] == [0] * 255
    together = decode_steps(apart, rate=1e6)
    assert together[4] > 0
    crowd = decode_steps([TraceRow(0.0, 10, 50)] * 600)
    assert crowd[256] > 0
    assert len(crowd) == 257


def test_every_output_token_is_decoded_once():
    requests = [TraceRow(0.1 * k, 700, 2 + k % 7) for k in range(50)]
    counts = decode_steps(requests, rate=0.001)
    assert sum(n * count for n, count in enumerate(counts)) == sum(
        r.num_generate - 1 for r in requests
    )


RATES = [1.0, 6.0, *(pytest.param(rate, marks=pytest.mark.heavy) for rate in (2.0, 3.0))]


@pytest.mark.parametrize("rate", RATES)
def test_fitted_sizes_waste_less_than_as_many_default_sizes_and_survive_drift(rate):
    """On parts that were not fitted to, and at three times the rate."""
    requests = read_trace(EXCERPT)
    result = fit_trace(requests, rate=rate)
    assert not result["kept_default"]
    assert (len(result["sizes"]), result["sizes"][-1]) == (48, 512)
    for part in ("chosen_on", "held_out"):
        assert result["parts"][part]["fitted"] < result["parts"][part]["default"]
    assert result["drift"]["fitted"] < 0.75 * result["drift"]["default"]
    half = fit_trace(requests, rate=rate, max_graphs=24)  # the default has 51
    assert half["drift"]["fitted"] <= 1.5 * half["drift"]["default"]


def test_fitted_sizes_cut_the_waste_of_the_excerpt_to_a_fifth():
    result = fit_trace(read_trace(EXCERPT))
    for part in ("chosen_on", "held_out"):
        assert result["parts"][part]["fitted"] < result["parts"][part]["default"] / 5
    assert result["waste"]["default"] < result["waste"]["powers_of_two"]


def test_there_are_never_more_sizes_than_asked_for():
    for max_graphs in (4, 8):
        result = fit_trace(read_trace(EXCERPT), max_graphs=max_graphs, rate=3.0)
        assert len(result["sizes"]) <= max_graphs
        assert max(result["sizes"]) >= 256


def test_the_command_prints_and_writes_a_sizes_file(tmp_path):
    figures, output = (tmp_path / name for name in ("f.json", "sizes.json"))
    arguments = ["fit", str(EXCERPT), "--max-graphs", "16", "--rate", "1.5"]
    arguments += ["--json", str(figures), "--output", str(output)]
    done = CliRunner().invoke(sizes_app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "powers of two" in done.output
    assert all(part in done.output for part in ("fitted on", "chosen on", "held out"))
    assert "are kept" in done.output or "the fit is taken" in done.output
    result = json.loads(figures.read_text())
    assert {"default", "fitted", "powers_of_two"} == set(result["waste"])
    assert read_sizes(output) == result["sizes"]
    assert parse_sizes("--capture-sizes", str(output)) == tuple(result["sizes"])


def test_json_to_standard_output_is_all_that_is_printed():
    done = CliRunner().invoke(
        sizes_app, ["fit", str(EXCERPT), "--json", "-"], catch_exceptions=False
    )
    assert json.loads(done.output)["max_graphs"] == 48


@pytest.mark.parametrize("text", ["[1]", "{}", '{"capture_sizes": ["x"]}', "no json"])
def test_a_file_that_holds_no_sizes_is_an_error(tmp_path, text):
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(InvalidSetting, match=r"sizes\.json"):
        read_sizes(path)
