"""`python -m piecegraph` and the `piecegraph` command."""

from __future__ import annotations


def main() -> None:
    from .tools.cli import app

    app()


if __name__ == "__main__":
    main()
