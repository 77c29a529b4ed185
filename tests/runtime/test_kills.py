"""Real starts are killed at random; the next start removes their files and works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.cache.inspection import verify

pytestmark = [pytest.mark.compile, pytest.mark.slow]

PROGRAM = """
import os, random, signal, sys, tempfile, time
from pathlib import Path
import torch
from piecegraph import Batch, Config, compile_ahead, prepare
from piecegraph.compile.backends import aoti, inductor

root, temporary, kills = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
toolchain = inductor.toolchain_directory("")  # its headers take half a minute to build
for module in (aoti, inductor):
    module.toolchain_directory = lambda scratch: toolchain
tempfile.tempdir = str(temporary)
torch.set_num_threads(1)


def start(number, function):
    model = torch.nn.Linear(8, 8)
    inputs = {"input": "float32[num_tokens, 8]"}
    config = Config(
        cache_dir=root / str(number), inputs=inputs, max_num_tokens=32, graph_mode="NONE"
    )
    with torch.no_grad():
        return function(model, config)


def leftovers():
    return [*temporary.glob("piecegraph-*"), *root.glob("*/tmp/*")]


chance, left = random.Random(0), 0
for number in range(kills):
    before = set(leftovers())
    child = os.fork()
    if not child:
        start(number % 3, (prepare, compile_ahead)[number % 2])
        os._exit(0)
    end = time.monotonic() + 60
    while set(leftovers()) <= before and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left += len(leftovers())
print("left by kills:", left > 0)
for number in range(3):
    prepared = start(number, prepare)
    assert prepared(torch.ones(3, 8), batch=Batch(3, 3)).shape == (3, 8)
    prepared.close()
print("left after a start:", leftovers())
"""


@pytest.mark.parametrize("wanted", ["6", pytest.param("24", marks=pytest.mark.heavy)])
def test_killed_starts_leave_nothing(wanted: str, tmp_path: Path) -> None:
    """One process imports everything and forks: an import takes longer than a start."""
    root, temporary = tmp_path / "caches", tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(root), str(temporary), wanted],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "left by kills: True\nleft after a start: []\n"
    for number in range(3):
        assert verify(root / str(number)) == []
