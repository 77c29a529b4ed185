"""The command line, from arguments to exit status, with the library's part replaced."""

import json
import time
from types import SimpleNamespace

import pytest

from piecegraph import GraphMode, Lazy
from piecegraph.tools.cli.app import main
from piecegraph.tools.engine import serving_log
from piecegraph.tools.engine.engine import ReferenceEngine
from piecegraph.tools.serve import run
from piecegraph.tools.serve.options import declared_options, flag_of
from piecegraph.tools.serve.trace import EXCERPT
from tests.tables import tables_of

from .conftest import LIBRARY_REPORT

BAD = tables_of(__file__)
QUICK = ["run", "--requests", "6", "--model", "layers=2,hidden=32,vocab=64"]


def test_run_ends_with_1_after_a_stale_bundle(library, monkeypatch):
    monkeypatch.setitem(LIBRARY_REPORT["cache"], "verified", False)
    assert main([*QUICK, "--verify", "none"]) == 1


def test_run_serves_verifies_and_reports(library, capsys):
    assert main([*QUICK, "--verify", "all"]) == 0
    out = capsys.readouterr().out
    for text in ("Startup", "trace", "Captures", "Dispatch", "20 to 30", "9.8%", "verified"):
        assert text in out
    assert out.index("trace ") < out.index("prepare in all") < out.index("capture ")
    assert library[0].calls == ["capture", "seal", "close"]


def test_run_writes_nothing_but_json_to_stdout(library, capsys):
    assert main([*QUICK, "--json", "-"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["schema"] == 2
    assert report["serving"]["requests"] == 6
    assert report["verification"]["ok"] is True
    assert [p["name"] for p in report["startup"]["phases"]] == [
        "import torch",
        "build model",
        "trace",
        "capture",
    ]
    assert "serving requests: 6 of 6" in captured.err


def test_run_writes_json_beside_the_report(library, capsys, tmp_path):
    path = tmp_path / "report.json"
    assert main([*QUICK, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["options"]["requests"] == 6
    assert "Dispatch" in capsys.readouterr().out


def test_run_writes_nothing_but_metrics_to_stdout(library, capsys, monkeypatch):
    monkeypatch.setattr(
        "piecegraph.tools.integrations.prometheus.metrics_text", lambda prepared: "metrics\n"
    )
    assert main([*QUICK, "--metrics", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "metrics\n"
    assert "Dispatch" in captured.err


def test_metrics_without_their_extra_are_refused_before_anything_runs(library, capsys, monkeypatch):
    monkeypatch.setattr("piecegraph.tools.cli.run_commands.find_spec", lambda name: None)
    assert main([*QUICK, "--metrics", "-"]) == 2
    assert "pip install 'piecegraph[metrics]'" in capsys.readouterr().err
    assert library == []


@pytest.mark.parametrize("option", ["--json", "--metrics"])
def test_an_output_that_fills_its_disk_is_an_error_after_the_report(
    library, capsys, monkeypatch, option
):
    monkeypatch.setattr(
        "piecegraph.tools.integrations.prometheus.metrics_text", lambda prepared: "metrics\n"
    )
    assert main([*QUICK, option, "/dev/full"]) == 2
    captured = capsys.readouterr()
    assert "error: cannot write /dev/full: No space left on device" in captured.err
    assert "Dispatch" in captured.out


def test_startup_is_no_requests_waiting_time(library, capsys, monkeypatch):
    prepare, seconds = run.prepare, list[float]()
    now = SimpleNamespace(perf_counter=lambda: sum(seconds) + time.perf_counter())
    monkeypatch.setattr(serving_log, "time", now)

    def slow(*args, **kwargs):
        prepared = prepare(*args, **kwargs)
        prepared.seal = lambda: seconds.append(1000.0)
        return prepared

    monkeypatch.setattr(run, "prepare", slow)
    assert main([*QUICK, "--verify", "none", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["latency"]["time_to_first_token"]["median"] < 1000


def test_a_mismatch_is_exit_status_1_and_is_named(library, capsys, monkeypatch):
    prepare = run.prepare

    def wrong(*args, **kwargs):
        prepared = prepare(*args, **kwargs)
        right = prepared.run
        prepared.run = lambda *args, **kwargs: right(*args, **kwargs) + 1
        return prepared

    monkeypatch.setattr(run, "prepare", wrong)
    assert main([*QUICK, "--json", "-"]) == 1
    captured = capsys.readouterr()
    mismatch = json.loads(captured.out)["verification"]["mismatch"]
    assert mismatch["step"] == 0
    assert mismatch["descriptor"]["num_tokens"] >= 1
    assert "row 0" in mismatch["what"]
    assert "FAILED at step 0" in captured.err


def test_options_reach_the_library(library):
    arguments = "--mode full-decode-only --strategy Lazy --capture-sizes 4,8 --backend eager"
    arguments += " --level 2 --no-cache --max-num-tokens 40 --max-num-reqs 3"
    assert main([*QUICK, *arguments.split()]) == 0
    config = library[0].config
    assert config.graph_mode is GraphMode.FULL_DECODE_ONLY
    assert config.strategy == Lazy()
    assert (config.capture_sizes, config.compiler, config.level) == ((4, 8), "eager", 2)
    assert (config.cache, config.max_num_tokens, config.max_num_reqs) == (False, 40, 3)


def test_what_is_not_chosen_is_left_to_the_library(library):
    assert main(QUICK) == 0
    given = library[0].config.model_fields_set
    assert not {"graph_mode", "level", "capture_sizes", "cache_dir"} & given


def test_the_prepared_model_is_closed_when_serving_fails(library, monkeypatch):
    monkeypatch.setattr(ReferenceEngine, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(QUICK)
    assert library[0].calls[-1] == "close"


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in BAD.items() for value in values]
)
def test_a_bad_value_is_one_line_and_exit_status_2(library, capsys, option, value):
    assert main(["run", option, value]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert captured.err.count("error") == 1
    assert not captured.out
    assert "Traceback" not in captured.err


def test_a_malformed_trace_names_its_line(library, capsys, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([*EXCERPT.read_text().splitlines()[:3], "x,1,1"]))
    assert main(["run", "--trace", str(path), "--requests", "3"]) == 2
    assert "trace.csv cannot be used: line 4: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["cache", "why"], ["cache", "warm"]])
def test_a_model_beyond_the_memory_there_is_is_refused_before_it_is_built(
    command, capsys, monkeypatch
):
    monkeypatch.setattr("piecegraph.tools.serve.host_memory.available_bytes", lambda: 1 << 20)
    monkeypatch.setattr("piecegraph.tools.serve.run.Decoder", lambda *_, **__: pytest.fail("built"))
    assert main(command) == 2
    assert "are needed, 1.0 MiB are available" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("allocates", "command"),
    [
        ("Decoder", ["run"]), ("Decoder", ["cache", "why"]), ("Decoder", ["cache", "warm"]),
        ("allocate_layer_caches", QUICK),
    ],
)  # fmt: skip
def test_what_cannot_be_allocated_is_a_bad_value(library, capsys, monkeypatch, allocates, command):
    def refuse(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nbacktrace")

    monkeypatch.setattr(f"piecegraph.tools.serve.run.{allocates}", refuse)
    assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "do not fit into memory: DefaultCPUAllocator: can't allocate memory" in error
    assert "backtrace" not in error


def test_no_command_is_a_call_for_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("Usage", "run", "cache"))


@pytest.mark.parametrize("command", [["run"], ["explain"], ["cache", "warm"], ["check", "keys"]])
def test_help_is_one_screen_and_help_all_has_every_option(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*command, "--help-all"]) == 0
    everything = capsys.readouterr().out
    assert main([*command, "--help"]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 40
    for name, declared in declared_options():
        assert f"{flag_of(name)} " in everything
        assert (f"{flag_of(name)} " in short) is (declared.panel is None)


@pytest.mark.parametrize("option", ["--against", "--of"])
@pytest.mark.parametrize("text", ["{}", '{"schema": 0}', '{"schema": 2}', "[]", "x", None])
def test_a_file_of_another_command_is_refused(option, text, tmp_path, capsys):
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    assert main(["explain", option, str(file)]) == 2
    error = capsys.readouterr().err
    assert f"invalid setting {option} = " in error
    assert "a file that `piecegraph explain --format json` wrote" in error
