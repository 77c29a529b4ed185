"""Download what `make gpu` installs besides torch, on a machine with a network: `make gpu-wheels`.

Wheels for the Python of the machine with the GPU (`device.toml`), or for others, go to one folder,
with what builds the package itself. torch and triton are those of that machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICE = tomllib.loads((ROOT / "benchmarks" / "device.toml").read_text())
GLIBC = ("manylinux2014", "manylinux_2_27", "manylinux_2_28")
ON_THE_MACHINE = ("torch", "triton")


def requirements() -> list[str]:
    """Of the build, the package and its extras `cli` and `gpu`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    every = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(each for extra in ("cli", "gpu") for each in extras[extra]),
    ]
    every.append("setuptools<82")  # torch 2.11
    return [each for each in every if name(each) not in (*ON_THE_MACHINE, "piecegraph")]


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="x86_64", help="x86_64 or aarch64")
    parser.add_argument("--python", nargs="+", default=[DEVICE["python"]], help="versions")
    options = parser.parse_args()
    platforms = [f"--platform={glibc}_{options.arch}" for glibc in GLIBC]
    for version in options.python:
        subprocess.check_call([
            sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:",
            f"--python-version={version}", *platforms, f"--dest={options.folder}", *requirements(),
        ])  # fmt: skip
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    print(
        f"{len(list(options.folder.iterdir()))} wheels, {size / 2**20:.0f} MiB in {options.folder}"
    )


if __name__ == "__main__":
    main()
