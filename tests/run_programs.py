"""Runs programs as `python program.py` does, without the seconds that importing torch takes.

Imports torch, its compilers and the package once, and forks for each line of standard input: a
program, a file for its output, its environment. Answers each with the exit status.
"""

from piecegraph.tests.quick_imports import end, imported

# isort: split
import json
import os
import runpy
import subprocess
import sys
import traceback
from contextlib import contextmanager

import piecegraph
from piecegraph.torch_compat.compiling.inductor import import_inductor
from piecegraph.torch_compat.tracing.dynamo import import_dynamo


@contextmanager
def forking(**variables):
    """`run(script, output, **variables)`: what a program writes, which must succeed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, **variables}
    with subprocess.Popen(
        [sys.executable, __file__], text=True, env=environment, **pipes
    ) as process:

        def run(script, output, **variables):
            request = [str(script), str(output), {**environment, **variables}]
            print(json.dumps(request), file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n", output.read_text()
            return output.read_text()

        yield run
        process.stdin.close()


def run_here(script, output, environment):
    """The exit status of a program that runs in its folder. Changes this process."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    opened = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    folder = os.path.dirname(script)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [script], folder
    try:
        runpy.run_path(script, run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    import_dynamo()
    import_inductor()
    _ = piecegraph.prepare  # imported on first use
    imported(freeze=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(run_here(*json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    end()
