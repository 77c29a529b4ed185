"""Forks the ranks of `piecegraph run`: `run_ranks.py COMMANDS FOLDER WRONG`.

COMMANDS is a list of scenes in JSON; a scene has a command for each rank. Rank r of scene s writes
what it prints into FOLDER/s-r. In scene WRONG the eager results of rank 1 are wrong.
"""

from piecegraph.tests.quick_imports import end, imported_by_starts

# isort: split
import json
import os
import sys
from pathlib import Path
from socket import socket

import torch

from piecegraph.tools.cli.app import main
from piecegraph.tools.serve import run as _run  # noqa: F401 - so that each fork has it
from piecegraph.tools.serve import verify


def run_rank(command, output, environment, wrong):
    os.environ |= environment
    torch.set_num_threads(1)
    right = verify.run_eagerly

    def off_by_rank(*args):
        return right(*args) + int(environment["RANK"])

    if wrong:
        verify.run_eagerly = off_by_rank
    with output.open("w", buffering=1) as stream:
        sys.stdout = sys.stderr = stream
        return main(command)


def run_scene(number, commands, folder, wrong):
    """The statuses of all ranks of a scene."""
    with socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    of_all = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "1"}
    of_all |= {"WORLD_SIZE": str(len(commands))}
    children = []
    for rank, command in enumerate(commands):
        if (child := os.fork()) == 0:
            output = folder / f"{number}-{rank}"
            os._exit(run_rank(command, output, of_all | {"RANK": str(rank)}, wrong))
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    imported_by_starts()
    scenes, place, chosen = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    found = [run_scene(n, scene, place, n == chosen) for n, scene in enumerate(scenes)]
    print(json.dumps(found))
    end()
