"""Load is made as asked for, latencies are counted right, and a verdict needs a difference."""

import json
import math
import statistics
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from types import SimpleNamespace

import pytest

from piecegraph.benchmarks.__main__ import main
from piecegraph.benchmarks.compare import compare, summed_up
from piecegraph.benchmarks.load import (
    Arrivals,
    TimedRequest,
    parse_objectives,
    summary,
    synthetic_rows,
)
from piecegraph.benchmarks.serving import check_plot, check_url, measure_url, serve_load
from piecegraph.errors import InvalidSetting
from piecegraph.tools.report.output import Output


def gaps(arrivals, count=4000):
    times = arrivals.times(count, seed=1)
    assert times == arrivals.times(count, seed=1)
    assert times[0] == 0
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness, variation):
    found = gaps(Arrivals(8, burstiness))
    assert statistics.mean(found) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.1)


def test_a_rate_of_inf_lets_all_arrive_at_once():
    assert set(gaps(Arrivals(math.inf), 9)) == {0}


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 10.5), ("exponential", math.sqrt(20))])
def test_a_ramp_goes_from_one_rate_to_the_other(ramp, middle):
    found = gaps(Arrivals(1, 500.0, ramp, 20))
    for place, rate in ((0, 1), (len(found) // 2, middle), (len(found) - 50, 20)):
        assert 1 / statistics.mean(found[place : place + 50]) == pytest.approx(rate, rel=0.2)


def test_synthetic_lengths_are_within_the_spread():
    rows = synthetic_rows(500, 100, 10, spread=0.5, seed=3)
    assert {50 <= row.num_prompt <= 150 for row in rows} == {True}
    assert len({row.num_prompt for row in rows}) > 50
    assert {row.num_generate for row in synthetic_rows(9, 5, 7, spread=0, seed=3)} == {7}


def test_latencies_and_goodput_of_known_requests():
    requests = [
        TimedRequest(10, 0.0, 0.0, [0.1, 0.2, 0.3]),
        TimedRequest(10, 1.0, 1.5, [1.6, 2.6]),
        TimedRequest(10, 1.0, 1.5, [], "HTTP 500"),
    ]
    found = summary(requests, parse_objectives(["ttft:150", "tpot:200"]))
    assert (found["requests"], found["failed"], found["errors"]) == (3, 1, ["HTTP 500"])
    assert found["seconds"] == 2.6
    assert found["output_tokens_per_second"] == pytest.approx(5 / 2.6)
    assert found["tokens_per_second"] == pytest.approx(25 / 2.6)
    assert found["ttft_ms"]["p50"] == pytest.approx(100)
    assert found["tpot_ms"]["p99"] == pytest.approx(100 + 0.99 * 900)
    assert found["itl_ms"]["count"] == 3
    assert found["e2e_ms"]["mean"] == pytest.approx((300 + 1100) / 2)
    assert found["goodput"] == pytest.approx(1 / 2.6)
    assert found["good_share"] == pytest.approx(1 / 3)
    empty = summary([TimedRequest(1, 0.0, error="gone")], {})
    assert (empty["requests_per_second"], empty["ttft_ms"]["p50"]) == (0, None)


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "speed:3", "ttft:x", ""])
def test_an_objective_that_is_none_is_refused(text):
    with pytest.raises(InvalidSetting, match="goodput"):
        parse_objectives([text])


def test_the_engine_serves_no_more_than_the_limit(make_world, make_requests):
    world = make_world()
    requests = make_requests((3, 4), (2, 3), (4, 2), (2, 2))
    most = 0
    step = world.engine.step

    def counted():
        nonlocal most
        most = max(most, len(world.scheduler.running) + len(world.scheduler.waiting))
        return step()

    world.engine.step = counted
    served = serve_load(SimpleNamespace(engine=world.engine), requests, concurrency=2)
    assert most == 2
    assert [len(each.tokens) for each in served] == [4, 3, 2, 2]
    assert served[0].sent == served[1].sent == 0
    assert 0 < served[2].sent <= served[2].tokens[0]
    again = serve_load(SimpleNamespace(engine=world.engine), requests, concurrency=None)
    assert [len(each.tokens) for each in again] == [4, 3, 2, 2]
    assert [len(each.tokens) for each in requests] == [3, 2, 4, 2]


@pytest.mark.parametrize(
    "url",
    ["http://example.com/v1", "https://127.0.0.1:1", "http://10.0.0.1:80", "127.0.0.1:8000", ""],
)
def test_requests_never_leave_the_machine(url):
    with pytest.raises(InvalidSetting, match="not an address of this machine"):
        check_url(url)


def test_an_address_of_this_machine_is_taken():
    assert check_url("http://127.0.0.1:8000/v1/") == "http://127.0.0.1:8000/v1"
    assert check_url("http://localhost:8000/v1") == "http://localhost:8000/v1"
    assert check_url("http://[::1]:8000/v1") == "http://[::1]:8000/v1"


@pytest.fixture
def server():
    """An OpenAI-compatible server that streams tokens, and refuses prompts of one token."""
    asked, most, lock = [], [0, 0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append((self.path, body))
                most[0] += 1
                most[1] = max(most)
            good = len(body["prompt"]) > 1
            answer = [b'{"choices": [{"text": "t%d"}]}' % n for n in range(body["max_tokens"])]
            if good:
                self.send_response(200)
                self.end_headers()
                self.wfile.writelines(b"data: %b\n\n" % each for each in answer)
            with lock:  # before the last bytes, after which the next request may come
                most[0] -= 1
            if good:
                self.wfile.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
            else:
                self.send_error(500)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{server.server_port}/v1", asked=asked, most=most
        )
        server.shutdown()
        thread.join()


def test_an_engine_behind_a_url_is_measured(server, make_requests):
    requests = make_requests((3, 4), (1, 3), (4, 2))
    one, two, three = measure_url(server.url, "m", requests, concurrency=1)
    assert server.most[1] == 1
    assert (len(one.tokens), two.error, len(three.tokens)) == (4, "HTTP 500", 2)
    assert one.sent <= one.tokens[0] <= three.sent <= three.tokens[-1]
    path, body = server.asked[0]
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["stream"]) == (requests[0].tokens, 4, True)


def test_an_engine_that_is_not_there_is_an_error_of_each_request(make_requests):
    (one,) = measure_url("http://127.0.0.1:9/v1", "m", make_requests((3, 4)), concurrency=None)
    assert one.error == "ConnectionRefusedError"


def result(ttft, throughput=(10, 10, 10), **machine):
    runs = [
        {
            "mode": "FULL", "rate": "8", "round": n,
            "ttft_ms": {"p50": ms}, "output_tokens_per_second": speed, "goodput": None,
        }
        for n, (ms, speed) in enumerate(zip(ttft, throughput, strict=True))
    ]  # fmt: skip
    about = {"versions": {}, "machine": machine, "load": {}}
    return {**about, "summary": summed_up(runs, ["mode", "rate"])}


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        ((20, 21, 22), "worse"),
        ((5, 6, 7), "better"),
        ((11, 20, 30), "no difference"),
        ((12.1, 12.2, 12.3), "worse"),
        ((11.05, 11.06, 11.07), "no difference"),
    ],
)
def test_a_verdict_needs_rounds_apart_and_a_difference(new, verdict):
    found = compare(result((10, 11, 12)), result(new, (20, 20, 20), cpu="other"))
    speed, ttft = found["rows"]
    assert (speed["figure"], speed["verdict"]) == ("output_tokens_per_second", "better")
    assert (ttft["figure"], ttft["verdict"]) == ("ttft_ms p50", verdict)
    assert found["differs"] == ["machine.cpu: None -> other"]


def test_two_rounds_are_too_few():
    found = compare(result((10, 11), (9, 9)), result((20, 21), (9, 9)))
    assert found["rows"][1]["verdict"] == "worse, fewer than 3 rounds"


@pytest.mark.compile
@pytest.mark.usefixtures("traced_once")
def test_the_commands_measure_plot_and_compare(tmp_path, capsys):
    small = ["--model", "layers=1,hidden=16,heads=2,vocab=32", "--backend", "eager", "--no-cache"]
    small += ["--requests", "3", "--capture-sizes", "1,2", "--input", "4", "--output", "3"]
    json_, image = tmp_path / "a.json", tmp_path / "a.svg"
    load = ["--rate", "50,inf", "--modes", "none,full", "--strategies", "lazy"]
    more = ["--rounds", "2", "--warmup", "1", "--goodput", "ttft:10000", "--plot", str(image)]
    assert main(["serve", *small, *load, *more, "--json", str(json_)]) == 0
    found = json.loads(json_.read_text())
    places = [(row["mode"], row["strategy"], row["rate"]) for row in found["summary"]]
    assert len(places) == len(set(places)) == 4
    assert len(found["runs"]) == 8
    assert {run["failed"] for run in found["runs"]} == {0}
    assert {run["good_share"] for run in found["runs"]} == {1.0}
    assert found["machine"]["threads"] >= 1
    assert "<svg" in image.read_text()
    capsys.readouterr()
    assert main(["compare", str(json_), str(json_), "--json", "-"]) == 0
    compared = json.loads(capsys.readouterr().out)["rows"]
    assert {row["verdict"] for row in compared} == {"no difference"}
    latency = ["--batch", "2", "--input", "3", "--output", "2", "--rounds", "1"]
    assert main(["latency", *small[:5], *latency, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"][0]["batch"] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rate", "0"],
        ["--rate", "x"],
        ["--ramp", "linear"],
        ["--input", "3"],
        ["--replay-arrivals"],
        ["--url", "http://example.com"],
        ["--modes", "fast"],
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(wrong, capsys):
    assert main(["serve", "--requests", "2", *wrong]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("text", ["{}", '{"schema": 0}', '{"schema": 1}', "[]", "x", None])
def test_a_file_of_another_command_is_refused(text, tmp_path, capsys):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert main(["compare", str(path), str(path)]) == 2
    error = capsys.readouterr().err
    assert "invalid setting result = " in error
    assert "a file that `python -m benchmarks serve --json` wrote" in error


def test_a_plot_has_a_known_suffix(tmp_path):
    with pytest.raises(InvalidSetting, match=r"a file that ends in \.pdf, \.png or \.svg"):
        check_plot(Output(tmp_path / "plot.xyz"))
