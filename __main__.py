"""`python -m piecegraph` and the `piecegraph` command."""

from __future__ import annotations

import sys
import traceback

CLI_EXTRA = ("typer", "click", "rich", "jinja2", "numpy")
"""What only the command line imports; the library is installed without it."""


def main() -> int:
    """Run the command line and return its status; see `tools.cli.app.main`.

    It is 2 without the extra `cli` and 3, below a traceback, after an error that is a bug.
    """
    try:
        from .tools.cli.app import main as run_command

        return run_command()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in CLI_EXTRA:
            traceback.print_exc()
            return 3
        print(
            f"error: {missing} is not installed."
            " Install the command line with `pip install 'piecegraph[cli]'`.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        return 3


if __name__ == "__main__":
    sys.exit(main())
