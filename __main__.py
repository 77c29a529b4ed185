"""`python -m piecegraph` and the `piecegraph` command."""

from __future__ import annotations

import sys


def main() -> int:
    from .tools.cli.app import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
