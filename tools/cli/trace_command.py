"""`piecegraph trace -- COMMAND …`: run a command with torch's structured trace on; render it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...cache.keys.environment import child_environment
from ...errors import InvalidSetting, ToolFailed, ToolMissing
from ..serve.options import writable_folder


def trace_command(
    command: Annotated[list[str], typer.Argument(help="What to run, after `--`.")],
    output: Annotated[Path, typer.Option(help="Folder of the rendered pages.")] = Path("trace"),
) -> int:
    """Run a command with tracing on and render the trace with tlparse; its exit status."""
    tlparse = find_tlparse()
    writable_folder("--output", str(output))
    if any(output.iterdir()) and not (output / "index.html").exists():
        raise InvalidSetting(
            name="--output",
            value=str(output),
            reason="it holds files that are no trace",
            expected="another folder",
        )
    with tempfile.TemporaryDirectory(prefix="piecegraph-trace-") as folder:
        status = _run(command, Path(folder))
        logs = sorted(Path(folder).glob("*.log"))
        if not logs:
            print("error: the command left no trace: it did not import torch", file=sys.stderr)
            return status or 3
        rendered = render(tlparse, logs, output)
    print("\n".join(f"rendered: {page}" for page in rendered))
    return status


def find_tlparse() -> str:
    """Path of the tlparse program beside this Python or on PATH; raises ToolMissing."""
    beside = Path(sys.executable).with_name("tlparse")
    found = str(beside) if beside.exists() else shutil.which("tlparse")
    if found is None:
        raise ToolMissing(name="tlparse", extra="tools")
    return found


def render(tlparse: str, logs: Sequence[Path], output: Path) -> list[Path]:
    """One folder of pages for each process that traced: `output`, or `output/<n>` for several.

    Raises ToolFailed.
    """
    pages = []
    for number, log in enumerate(logs):
        folder = output if len(logs) == 1 else output / str(number)
        arguments = [str(log), "-o", str(folder), "--overwrite", "--no-browser"]
        try:
            subprocess.run([tlparse, *arguments], check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ToolFailed(name="tlparse", reason=error) from error
        pages.append(folder / "index.html")
    return pages


def _run(command: Sequence[str], folder: Path) -> int:
    try:
        done = subprocess.run(command, env=child_environment(TORCH_TRACE=str(folder)))
    except OSError as error:
        raise InvalidSetting(
            name="COMMAND",
            value=command[0],
            reason=(error.strerror or "it cannot be run").casefold(),
            expected="a program, such as `piecegraph trace -- piecegraph run`",
        ) from None
    return done.returncode
