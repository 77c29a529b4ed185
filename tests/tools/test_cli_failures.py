"""The command line when something outside it fails: one line, the correct status, no traceback."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from piecegraph import Config, Delayed, Events
from piecegraph.cache import Cache, Key
from piecegraph.tools.cli.app import main
from piecegraph.tools.serve.run import _saying_what_is_kept
from piecegraph.tools.serve.trace import EXCERPT
from piecegraph.tools.start_lines import Interrupted
from tests.tables import tables_of

PROGRAM = [sys.executable, "-m", "piecegraph"]


def run_alone(*command, **options):
    """What a process of its own did; its standard output may go elsewhere."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*map(str, command)], text=True, **streams)


def interruptible():
    """A shell ignores Ctrl-C in what it starts in the background, such as a run of these tests."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


SMALL = ["run", "--requests", "6", "--model", "layers=2,hidden=32,vocab=64"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["sizes", "fit", EXCERPT]])
def test_a_full_disk_behind_standard_output_is_a_bad_value(arguments):
    with open("/dev/full", "w") as full:
        done = run_alone(*PROGRAM, *arguments, stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: standard output cannot be written: No space left on device"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["sizes", "fit", EXCERPT]])
def test_a_reader_that_has_gone_is_no_wrong_number(arguments):
    read, write = os.pipe()
    os.close(read)
    done = run_alone(*PROGRAM, *arguments, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["sizes", "fit", EXCERPT]])
def test_closed_streams_are_a_bad_value_and_no_traceback(arguments):
    closed = run_alone("sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *arguments)
    assert closed.returncode == 2
    assert closed.stderr == "error: standard output cannot be written: it is closed\n"
    unlogged = run_alone("sh", "-c", 'exec "$@" 2>&-', "sh", *PROGRAM, "no-such-command")
    assert (unlogged.returncode, unlogged.stdout) == (2, "")


@pytest.mark.slow
def test_a_log_that_cannot_be_written_loses_no_report(library):
    command = f"{sys.executable} -m piecegraph explain --output /no/where 2>/dev/full"
    assert subprocess.run(["sh", "-c", command]).returncode == 2
    program = "import sys; from piecegraph.tools.cli.app import main\n"
    program += "import piecegraph.tools.cli.app as app\n"
    program += "def talk(): print('talk', file=sys.stderr); print('report'); return 0\n"
    program += "app._parser = lambda _: lambda *_, **__: talk()\n"
    program += "sys.exit(main(['x']))"
    command = f'{sys.executable} -c "{program}" 2>/dev/full'
    done = run_alone("sh", "-c", command)
    assert (done.returncode, done.stdout) == (0, "report\n")


def test_a_dump_directory_of_the_environment_is_checked_first(library, capsys, monkeypatch):
    monkeypatch.setenv("PIECEGRAPH_DUMP_DIR", "/proc/x")
    assert main(SMALL) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: invalid setting PIECEGRAPH_DUMP_DIR = '/proc/x'")
    assert error.count("\n") == 1


def test_what_torch_refuses_in_its_environment_is_named(monkeypatch, capsys):
    from torch._logging._internal import _parse_log_settings  # as an import of torch does

    monkeypatch.setenv("TORCH_LOGS", "nope")
    parse = lambda *_, **__: _parse_log_settings("nope")  # noqa: E731
    monkeypatch.setattr("piecegraph.tools.cli.app._parser", lambda _: parse)
    assert main(SMALL) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "invalid setting TORCH_LOGS = 'nope'" in error


ENDED_BY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "piecegraph.tools.cli.app":
            {while_imported}
sys.meta_path.insert(0, Finder())
from piecegraph.__main__ import main
if {signal}:
    sys.meta_path.pop(0)
    from piecegraph.tools.cli import app
    app._parser = lambda _: lambda *_, **__: os.kill(os.getpid(), {signal})
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("while_imported", "number", "status", "error"),
    [
        ("raise KeyboardInterrupt", 0, 130, ""),
        ("raise ZeroDivisionError", 0, 3, "Traceback"),
        ("pass", signal.SIGINT, 130, "interrupted\n"),
        ("pass", signal.SIGTERM, 143, "interrupted\n"),
    ],
)
def test_an_interrupt_and_a_bug_have_their_own_status(while_imported, number, status, error):
    program = ENDED_BY.format(while_imported=while_imported, signal=int(number))
    done = run_alone(sys.executable, "-c", program, preexec_fn=interruptible)
    assert done.returncode == status
    assert done.stderr.startswith(error)
    assert bool(done.stderr) == bool(error)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_line_says_what_to_install(missing):
    program = f"import sys; sys.modules[{missing!r}] = None\n"
    program += "from piecegraph.__main__ import main\n"
    program += "sys.argv = ['piecegraph', 'doctor']\nsys.exit(main())"
    done = run_alone(sys.executable, "-c", program)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {missing} is not installed."
        " Install the command line with `pip install 'piecegraph[cli]'`.\n"
    )


def test_version_and_short_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"piecegraph {version('piecegraph')}\n"
    for arguments in (["-h"], ["run", "-h"], ["cache", "list", "-h"]):
        assert main(arguments) == 0
        assert "Usage" in capsys.readouterr().out


def test_off_may_say_again_what_an_option_says(library):
    assert main([*SMALL, "--off", "graphs", "--mode", "none", "--verify", "none"]) == 0


def test_fitted_sizes_are_those_that_run_takes(library, capsys, tmp_path):
    path = tmp_path / "sizes.json"
    assert main(["sizes", "fit", str(EXCERPT), "--output", str(path)]) == 0
    assert main([*SMALL, "--capture-sizes", str(path), "--verify", "none"]) == 0
    assert "larger than --max-num-tokens 128 are left out" in capsys.readouterr().err
    assert max(library[0].config.capture_sizes) <= 128
    limits = ["--max-num-tokens", "64", "--max-num-reqs", "32"]
    assert main(["sizes", "fit", str(EXCERPT), *limits, "--output", str(path)]) == 0
    assert max(json.loads(path.read_text())["capture_sizes"]) <= 64


@pytest.mark.parametrize(("arguments", "named"), tables_of(__file__)["named"])
def test_what_is_refused_is_named_in_one_line(capsys, monkeypatch, tmp_path, arguments, named):
    """No file is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "TORCH_TRACE", ""
    )  # else `--bug-report` sets it for all tests after this one
    assert main([str(EXCERPT) if each == "EXCERPT" else each for each in arguments]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("error: ") == 1
    assert len(captured.err) < 300
    assert not captured.out
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_set_reaches_every_setting(library):
    settings = ["tracing.guards=check", "strategy.captures_per_step=3", "codegen.ranges=[8,16]"]
    settings.append("steps.padding.x=1")
    arguments = [part for each in settings for part in ("--set", each)]
    assert main([*SMALL, *arguments, "--strategy", "delayed", "--verify", "none"]) == 0
    config = library[0].config
    assert config.tracing.guards.value == "check"
    assert config.strategy == Delayed(captures_per_step=3)
    assert config.codegen.ranges == (8, 16)
    assert config.steps.padding == {"x": 1}


def test_the_report_says_when_where_and_by_what_command(library, capsys):
    assert main([*SMALL, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["created"].endswith("+00:00")
    machine = report["machine"]
    assert machine["cpus"] >= 1
    assert machine["threads"] >= 1
    assert {"cpu", "gpu", "load", "python", "platform"} <= machine.keys()
    assert report["command"][:1] == ["piecegraph"]
    assert "commit" in report["versions"]
    step = report["latency"]["step"]
    assert step["count"] == report["serving"]["steps"]
    assert step["mean"] > 0


def test_an_interrupted_start_says_what_the_cache_keeps(tmp_path):
    def store(kind, number):
        Cache(tmp_path, Events()).publish(kind, Key.of("trace", {"n": number}), {}, {})

    store("artifact", 0)
    config = Config(cache_dir=tmp_path)

    def begin():
        with _saying_what_is_kept(config):
            store("artifact", 1)
            store("bundle", 1)
            raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted) as interrupted:
        begin()
    assert interrupted.value.kept.endswith(" that the cache keeps for the next start: 1")


COMPILER = """#!/bin/sh
case "$*" in *" -o "*) sleep 200 & echo $! > {started}; wait;; *) exec g++ "$@";; esac"""
"""It answers what is asked of g++, and the process that it starts to compile never ends."""


@pytest.mark.compile
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.heavy)],
)
def test_a_signal_ends_a_start_and_its_compiler_with_one_line(tmp_path, number, status):
    started, compiler = tmp_path / "started", tmp_path / "g++"
    compiler.write_text(COMPILER.format(started=started))
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "piecegraph", "run", "--model", "layers=1,hidden=16,heads=2"]
    with subprocess.Popen(
        [*command, "--cache-dir", str(tmp_path / "cache")],
        env={**os.environ, "CXX": str(compiler)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    ) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        *_, before, last = process.communicate(timeout=100)[1].splitlines()
    assert (process.returncode, last.startswith("interrupted: ")) == (status, True)
    assert "compiling piece" in before
    stat = Path("/proc", started.read_text().strip(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_shell_completes_commands(monkeypatch, capsys):
    for name, value in {"": "complete_bash", "WORDS": "piecegraph ca", "CWORD": "1"}.items():
        monkeypatch.setenv(f"COMP_{name}" if name else "_PIECEGRAPH_COMPLETE", value)
    monkeypatch.setattr(sys, "argv", ["piecegraph"])
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["cache"]
