"""`piecegraph run` as data-parallel ranks, as torchrun starts them; most are forks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.errors import InvalidSetting
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.ranks import of_rank

SMALL = [
    "run", "--model", "layers=1,hidden=16,heads=2,kv_heads=1,vocab=64", "--requests", "5",
    "--max-num-reqs", "4", "--off", "compile", "--mode", "piecewise", "--no-cache",
    "--verify", "all", "--length-scale", "0.02",
]  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """The statuses of both ranks, and what each printed: serving; with a rank of another strategy;
    with a rank whose eager results are wrong. The report of the first is in the last text."""
    folder = tmp_path_factory.mktemp("ranks")
    reporting = [*SMALL, "--json", str(folder / "report.json")]
    commands = [[reporting, reporting], [SMALL, [*SMALL, "--strategy", "lazy"]], [SMALL, SMALL]]
    program = [sys.executable, Path(__file__).with_name("run_ranks.py")]
    done = subprocess.run(
        [*program, json.dumps(commands), folder, "2"], stdout=subprocess.PIPE, check=True
    )
    found = [
        (statuses, [(folder / f"{scene}-{rank}").read_text() for rank in range(2)])
        for scene, statuses in enumerate(json.loads(done.stdout))
    ]
    found[0][1].append((folder / "report.json").read_text())
    return found


pytestmark = [pytest.mark.compile]


def test_each_rank_serves_its_part_and_the_first_one_reports(scenes):
    statuses, (first, second, written) = scenes[0]
    assert statuses == [0, 0], (first, second)
    report = json.loads(written)
    assert [rank["requests"] for rank in report["ranks"]] == [3, 2]
    assert len({rank["steps"] for rank in report["ranks"]}) == 1
    for rank in report["ranks"]:
        assert rank["verification"]["ok"]
        assert rank["verification"]["steps"] == rank["steps"]
    assert "verified" in first
    assert second == ""


def test_ranks_that_differ_end_with_an_error_that_names_them(scenes):
    statuses, printed = scenes[1]
    assert statuses == [3, 3]
    for rank, text in enumerate(printed):
        assert f"error on rank {rank}: rank 1 disagrees at 'start'" in text


def test_a_rank_whose_steps_are_wrong_says_so(scenes):
    statuses, printed = scenes[2]
    assert statuses == [1, 1]
    assert "verified" in printed[0]
    assert "FAILED" in printed[0]  # in the line of rank 1
    assert "verification FAILED at step 0" in printed[1]


def test_a_rank_has_its_device_and_no_buckets(monkeypatch):
    assert of_rank(read_run_options(device="cuda")).device == "cuda"
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert of_rank(read_run_options(device="cuda")).device == "cuda:1"
    assert of_rank(read_run_options(device="cpu")).device == "cpu"
    with pytest.raises(InvalidSetting, match="--buckets"):
        of_rank(read_run_options(buckets="linear"))


@pytest.mark.heavy
def test_torchrun_ends_all_ranks_if_one_fails(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\n"
        "from piecegraph.tools.cli.app import main\n"
        "if os.environ['RANK'] == '1': sys.argv += ['--strategy', 'lazy']\n"
        "sys.exit(main())\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, script, *SMALL], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "rank 1 disagrees at 'start'" in done.stderr
