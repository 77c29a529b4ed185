"""`piecegraph run` as data-parallel ranks, as torchrun starts them; most are forks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx.experimental.symbolic_shapes  # so that each fork has it

from piecegraph.errors import InvalidSetting
from piecegraph.tools.cli.app import main
from piecegraph.tools.serve import run as _run  # noqa: F401 - so that each fork has it
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.ranks import of_rank

SMALL = [
    "run", "--model", "layers=1,hidden=16,heads=2,kv_heads=1,vocab=64", "--requests", "5",
    "--max-num-reqs", "4", "--off", "compile", "--mode", "none", "--no-cache", "--verify", "all",
]  # fmt: skip


@pytest.fixture
def run_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run one command for each rank; returns their statuses and what each printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def run(*commands: Sequence[str]) -> tuple[list[int], list[str]]:
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": 1}
        environment |= {"WORLD_SIZE": len(commands)}
        children = []
        for rank, command in enumerate(commands):
            if (child := os.fork()) == 0:
                os.environ |= {k: str(v) for k, v in (environment | {"RANK": rank}).items()}
                torch.set_num_threads(1)
                with (tmp_path / f"{rank}.txt").open("w", buffering=1) as output:
                    sys.stdout = sys.stderr = output
                    os._exit(main(command))
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return statuses, [(tmp_path / f"{rank}.txt").read_text() for rank in range(len(commands))]

    return run


pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of forks
]


def test_each_rank_serves_its_part_and_the_first_one_reports(
    run_ranks: Any, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    statuses, printed = run_ranks(*[[*SMALL, "--json", str(path)]] * 2)
    assert statuses == [0, 0], printed
    report = json.loads(path.read_text())
    assert [rank["requests"] for rank in report["ranks"]] == [3, 2]
    assert len({rank["steps"] for rank in report["ranks"]}) == 1
    for rank in report["ranks"]:
        assert rank["verification"]["ok"]
        assert rank["verification"]["steps"] == rank["steps"]
    assert "verified" in printed[0]
    assert printed[1] == ""


def test_ranks_that_differ_end_with_an_error_that_names_them(run_ranks: Any) -> None:
    statuses, printed = run_ranks(SMALL, [*SMALL, "--strategy", "lazy"])
    assert statuses == [3, 3]
    for rank, text in enumerate(printed):
        assert f"error on rank {rank}: rank 1 disagrees at 'start'" in text


def test_a_rank_whose_steps_are_wrong_says_so(
    run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from piecegraph.tools.serve import verify

    right = verify.run_eagerly

    def wrong(*args: Any) -> torch.Tensor:
        return right(*args) + int(os.environ["RANK"])

    monkeypatch.setattr(verify, "run_eagerly", wrong)
    statuses, printed = run_ranks(SMALL, SMALL)
    assert statuses == [1, 1]
    assert "verified" in printed[0]
    assert "FAILED" in printed[0]  # in the line of rank 1
    assert "verification FAILED at step 0" in printed[1]


def test_a_rank_has_its_device_and_no_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_rank(read_run_options(device="cuda")).device == "cuda"
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    assert of_rank(read_run_options(device="cuda")).device == "cuda:1"
    assert of_rank(read_run_options(device="cpu")).device == "cpu"
    with pytest.raises(InvalidSetting, match="--buckets"):
        of_rank(read_run_options(buckets="exponential"))


@pytest.mark.heavy
def test_torchrun_ends_all_ranks_if_one_fails(tmp_path: Path) -> None:
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
