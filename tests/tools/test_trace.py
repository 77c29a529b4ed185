"""What a trace holds: found by the real tlparse, on a cold and on a warm start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run_programs import forking

SMALL = (
    "--model layers=2,hidden=16,heads=2,vocab=32 --requests 2 --capture-sizes 1,2 --json /dev/null"
)
MAIN_JOB = f"""
from piecegraph.tools.cli.app import main
raise SystemExit(main("run {SMALL} --backend eager --no-cache".split()))
"""
PROGRAM = """
import torch
import piecegraph as pg


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


config = pg.Config(
    inputs={"x": "float32[num_tokens, 8]"},
    max_num_tokens=64,
    capture_sizes=(4,),
    compiler="eager",
    cache=False,
)
prepared = pg.prepare(Model(), config)
prepared.capture()
prepared(torch.ones(3, 8), batch=pg.Batch(num_tokens=3, num_reqs=3, is_decode=True, query_len=1))
prepared.close()
"""

ALWAYS = {
    "piecegraph_config",
    "piecegraph_bundle",
    "piecegraph_split_graph",
    "piecegraph_piece",
    "piecegraph_piece_0",
    "piecegraph_piece_2",
    "piecegraph_stitched",
    "piecegraph_guards",
    "piecegraph_capture",
    "piecegraph_capture_recorded",
    "piecegraph_memory",
    "piecegraph_dispatch",
}
COLD = {
    "piecegraph_graph",
    "piecegraph_split",
    "piecegraph_compile_start",
    "piecegraph_compile_end",
}
CACHED = {"piecegraph_cache_lookup", "piecegraph_cache_hit"}


def pages_of(trace, pages):
    """The folder of the pages that tlparse makes of the one log there is."""
    (log,) = trace.glob("*.log")
    tlparse = Path(sys.executable).with_name("tlparse")
    parsed = [tlparse, log, "-o", pages, "--strict", "--no-browser"]
    subprocess.run(parsed, check=True, capture_output=True)
    log.unlink()
    return pages


def artifacts(pages):
    """Those of the library by name, as tlparse renders them."""
    found = {}
    for page in sorted(
        pages.glob("*/piecegraph_*"), key=lambda page: int(page.stem.rpartition("_")[2])
    ):
        found.setdefault(page.stem.rpartition("_")[0], []).append(page.read_text())
    return found


def traced_run(arguments, folder):
    """Artifacts of the main job in a process of its own; both are kept in a new folder."""
    folder.mkdir()
    command = [sys.executable, "-m", "piecegraph", "run", *arguments.split()]
    subprocess.run(command, env={**os.environ, "TORCH_TRACE": str(folder / "trace")}, check=True)
    return artifacts(pages_of(folder / "trace", folder / "pages"))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The pages of the main job, and those of a program, by name."""
    folder, pages = tmp_path_factory.mktemp("traced"), {}
    with forking(TORCH_TRACE=str(folder / "trace")) as run:
        for name, program in {"main job": MAIN_JOB, "program": PROGRAM}.items():
            (folder / "program.py").write_text(program)
            run(folder / "program.py", folder / f"output of {name}")
            pages[name] = pages_of(folder / "trace", folder / name)
    return pages


@pytest.mark.compile
def test_tlparse_finds_an_artifact_of_every_stage(traced):
    found = artifacts(traced["main job"])
    assert set(found) >= ALWAYS | COLD
    config = json.loads(found["piecegraph_config"][0])
    assert config["graph_mode"] == "FULL_AND_PIECEWISE"
    assert config["reasons"]
    assert config["settings"]["capture_sizes"] == [1, 2]
    (pieces,) = map(json.loads, found["piecegraph_piece"])  # one table for each phase
    assert [piece["used_by"] for piece in pieces] == [[0], [1], [2]]
    assert "torch.nn.functional.embedding" in found["piecegraph_piece_0"][0]
    assert "paged_attention" in found["piecegraph_graph"][0]
    assert "def step(" in found["piecegraph_stitched"][0]
    start = json.loads(found["piecegraph_compile_start"][0])
    assert (start["piece"], start["range"]) == (0, [1, 128])
    (captures,) = map(json.loads, found["piecegraph_capture"])
    assert {(c["mode"], c["num_tokens"], c["segments"]) for c in captures} == {
        ("PIECEWISE", 2, 5),
        ("PIECEWISE", 1, 5),
        ("FULL", 2, 1),
        ("FULL", 1, 1),
    }
    assert all(capture["descriptor"]["num_tokens"] for capture in captures)
    dispatch = json.loads(found["piecegraph_dispatch"][0])
    assert {row["mode"] for row in dispatch["rows"]} == {"FULL", "NONE"}
    assert {"NONE", "FULL"} == {row["mode"] for row in dispatch["reasons"]}


@pytest.mark.compile
@pytest.mark.heavy
def test_a_warm_start_leaves_the_same_and_says_what_a_miss_differs_in(tmp_path):
    arguments = f"{SMALL} --cache-dir {tmp_path / 'cache'}"
    cold = traced_run(arguments, tmp_path / "cold")
    assert set(cold) >= ALWAYS | COLD
    warm = traced_run(arguments, tmp_path / "warm")
    assert set(warm) >= ALWAYS | CACHED
    assert not COLD & set(warm)
    for name in ("piecegraph_piece_0", "piecegraph_stitched", "piecegraph_split_graph"):
        assert warm[name] == cold[name]
    for start in ("cold", "warm"):  # in both Inductor's code is below its piece
        code = (tmp_path / start).glob("pages/*/inductor_output_code*")
        assert {page.parent.name for page in code} == {f"-_1001_{n}_0" for n in range(3)}
    changed = traced_run(f"{arguments} --max-num-tokens 64", tmp_path / "changed")
    tables = map(json.loads, changed["piecegraph_cache_lookup"])  # pieces are looked up together
    (lookup,) = (table for table in tables if isinstance(table, dict))
    assert lookup["differs"] == ["config.max_num_tokens: 128 -> 64"]
    assert lookup["factors"]["config"]["max_num_tokens"] == 64


@pytest.mark.compile
def test_any_program_is_traced_and_each_piece_has_a_compile_id(traced):
    pages = traced["program"]
    timeline = json.loads((pages / "chromium_events.json").read_text())
    phases = {each["name"]: each for each in timeline if each["cat"] == "piecegraph"}
    assert {"trace of Model", "split of Model", "compile of Model", "capture of Model"} <= {*phases}
    inner, outer = phases["split of Model"], phases["prepare of Model"]
    assert outer["ts"] < inner["ts"] < inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"]
    nested = {
        (page.parent.name, page.stem.rpartition("_")[0]) for page in pages.glob("*/piecegraph_*")
    }
    assert {folder for folder, _ in nested} == {"-_1000_0_0", "-_1001_0_0"}
    assert ("-_1000_0_0", "piecegraph_stitched") in nested
    assert ("-_1000_0_0", "piecegraph_capture") in nested
    assert ("-_1001_0_0", "piecegraph_compile_start") in nested  # of piece 0
    assert ("-_1001_0_0", "piecegraph_compile_end") in nested
    index = (pages / "index.html").read_text()
    assert "in piece 0, tokens 1 to 64" in index
    assert "in Model" in index
