"""Benchmarks that compare report ratios and rows, on the terminal and as JSON."""

import io
import json
import sys

import pytest
from rich.console import Console

from piecegraph.benchmarks import prepare, serving, step
from piecegraph.benchmarks.__main__ import main
from piecegraph.benchmarks.ratios import ratios_section
from piecegraph.tools.report.sections import as_terminal


def test_only_the_wanted_ways_to_start_are_measured_with_what_fills_their_caches(monkeypatch):
    started = []

    def start(way, layers, *_):
        started.append((way, layers))
        return dict.fromkeys(prepare.MEASURED) | {"ready": 1.0 + layers}

    monkeypatch.setattr(prepare, "_start", start)
    monkeypatch.setattr(prepare, "_warm_up_toolchain", lambda ways: None)
    result = prepare.run(True, ["warm_ahead"])
    assert started == [("ahead", 32), ("warm_ahead", 32)]
    assert result["ratios"] == {}
    result = prepare.run(True, ["cold", "warm_ahead"])
    assert result["ratios"] == {"warm_ahead_over_cold": 1.0, "ahead_over_cold": 1.0}
    result = prepare.run(True, ["cold", "compile_cold"])
    assert result["ratios"].keys() == {"cold_over_torch_compile", "slope_over_torch_compile"}


def test_starts_with_and_without_verification_take_turns(monkeypatch):
    verified = []

    def once(cache, arguments):
        verified.append(arguments[4:])
        return {"ready": 1.5 if arguments[4:] == ["background"] else 1.0, "phases": {}}

    monkeypatch.setattr(prepare, "_once", once)
    monkeypatch.setattr(prepare, "_warm_up_toolchain", lambda ways: None)
    result = prepare.run(True, ["verified"])
    assert verified == [[], *[["off"], ["background"]] * prepare.PAIRS]
    assert result["ratios"] == {"verified_over_unverified": 1.5}
    assert result["quartiles"] == {"verified_over_unverified": [1.5, 1.5]}


def test_an_unknown_way_to_start_names_those_there_are(capsys):
    assert main(["prepare", "--ways", "colt"]) == 2
    assert "one of served, cold, warm" in capsys.readouterr().err


@pytest.mark.compile
def test_a_step_is_compared_with_a_bare_loop_and_with_a_wrapper_per_piece(monkeypatch):
    monkeypatch.setattr(step, "LAYERS", 4)
    monkeypatch.setattr(step, "QUICK", (3, 10))
    result = step.run(True)
    assert set(result["ratios"]) == {
        "piecewise_over_floor",
        "wrapper_over_piecewise",
        "none_over_stitched",
    }
    for figure in ("full_us", "served_us", "served_metadata_us", "served_buffers_us"):
        assert result[figure] > 0
    steps = [row["step"] for row in result["rows"]]
    assert steps == [
        "PIECEWISE", "wrapper per piece", "NONE", "FULL", "FULL, the engine's buffer",
        "FULL, served", "FULL, served, padded", "FULL, served, the engine's buffers",
        "least step, by hand", "FULL, served, the engine's buffers, padded",
        "FULL, served, metadata of 20 fields",
    ]  # fmt: skip
    assert all(row["us"] > 0 and row["other_us"] > 0 for row in result["rows"])


def test_an_unknown_benchmark_lists_those_there_are(capsys):
    assert main(["nonsense"]) == 2
    assert "Choose one of dispatch, strategies" in capsys.readouterr().err


def test_a_benchmark_prints_a_table_and_writes_json(capsys, monkeypatch, tmp_path):
    result = {"ratios": {"a_over_b": 1.25}, "rows": [{"name": "a", "us": 2.5, "n": 3}]}
    monkeypatch.setattr(step, "run", lambda quick: result)
    path = tmp_path / "result.json"
    assert main(["step", "--quick", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["ratios"] == {"a_over_b": 1.25}
    out = capsys.readouterr().out
    assert "a_over_b" in out
    assert "2.5" in out
    assert main(["step", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]


def test_a_plot_that_cannot_be_is_refused_before_the_benchmark_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(serving, "measure_engine", lambda *_: pytest.fail("it ran"))
    assert main(["serve", "--plot", "-"]) == 2
    assert "no file can be written there" in capsys.readouterr().err
    assert main(["serve", "--json", f"{tmp_path}/x.png", "--plot", f"{tmp_path}/x.png"]) == 2
    assert "asks for goes there already" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["serve", "--plot", str(tmp_path / "x.png")]) == 2
    assert not list(tmp_path.iterdir())


def tables(result):
    return as_terminal(ratios_section("b", {"ratios": {}, **result}))


def shown(result):
    stream = io.StringIO()
    Console(file=stream, width=80).print(next(tables(result)))
    return stream.getvalue()


def test_a_benchmark_shows_its_ratios_and_what_it_measured():
    (ratios,) = tables({"rows": [], "ratios": {"a_over_b": 2.0}})
    assert ratios.title == "Ratios"
    rows = [{"way": way, "ready": n, "store": None} for way, n in (("a", 12.3456), ("b", 0.5))]
    text = shown({"rows": rows, "note": "modeled"})
    assert "12.3 " in text  # three digits
    assert "store" not in text
    assert "modeled" in text
    assert "ready" not in shown({"rows": rows, "columns": ["way"]})
    many = {f"measure {n}": n for n in range(12)}  # more than fit stand below each other
    text = shown({"rows": [{"way": "a", **many}]})
    assert all(name in text for name in many)
