"""The commands of docs/starts.md that take a bundle to another machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "starts.md"


@pytest.mark.compile
@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_commands_of_the_page_start_another_machine_warm(tmp_path):
    """A server with the image and the public key serves; with another key it refuses."""
    section = PAGE.read_text().split("### From zero to a warm start")[1].split("\n### ")[0]
    build, copy, serve = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if "PIECEGRAPH" not in name}

    def run(*blocks):
        script = "set -e\n" + "".join(blocks)
        return subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path, env={**environ, "PATH": path}, capture_output=True, text=True,
        )  # fmt: skip

    built = run(build, copy)
    assert built.returncode == 0, built.stderr
    served = run(serve)
    assert served.returncode == 0, served.stderr
    assert "hit" in served.stdout
    assert sorted(each.name for each in (tmp_path / "server").iterdir()) == [
        "builder.key.pub", "bundle.tar", "cache",
    ]  # fmt: skip
    (tmp_path / "builder.key").unlink()
    other = run(
        "piecegraph cache keygen other.key; cp other.key.pub server/builder.key.pub\n", serve
    )
    assert other.returncode == 2
    assert "is not trusted here" in other.stderr
