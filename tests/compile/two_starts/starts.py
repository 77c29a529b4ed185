"""One start of each change, in a process of its own: `python -m tests.compile.two_starts.starts …`.

The process imports torch once and forks for each change. It writes what each start did, as JSON.
"""

import argparse
import json
import os
import shutil
import sys
import traceback
from pathlib import Path

import torch

import piecegraph as pg
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.compile.ir import registered_compilers as compilers
from piecegraph.torch_compat.compiling.inductor import import_inductor
from piecegraph.torch_compat.tracing.dynamo import import_dynamo
from tests.text_compiler import EntryPoint

from .changes import CHANGES

X = torch.linspace(-2, 2, 40).view(5, 8)


def equal(got, wanted):
    got, wanted = ([each] if isinstance(each, torch.Tensor) else each for each in (got, wanted))
    return all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(got, wanted, strict=True)
    )


def start(change, number, folder):
    """What a start of a change does: whether it hit, and whether its results are right."""
    files = change.files(number)
    moved = "moved" in files and number == 2
    source = folder / ("elsewhere" if moved else "source")
    shutil.rmtree(source, ignore_errors=True)
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    for line in files.get("environ", "").splitlines():
        name, _, value = line.partition("=")
        os.environ[name] = value
    sys.path.insert(0, str(source))
    torch.manual_seed(0)
    import program

    model = program.model()
    config = pg.Config(
        inputs={"x": "float32[num_tokens, 8]"},
        max_num_tokens=16,
        compiler=files.get("compiler", "text").strip(),
        cache_dir=folder / "cache",
        cache={"verify_bundle": "background" if number == 2 else "off"},
    )
    events = pg.Events()
    batch = pg.Batch(num_tokens=5, num_reqs=5)
    with torch.no_grad():
        prepared = pg.prepare(model, config, events=events)
        facts = prepared.report()["cache"]
        first = prepared(X, batch=batch)
        first = [each.clone() for each in ([first] if isinstance(first, torch.Tensor) else first)]
        verified = prepared.wait_until_verified(120) if number == 2 else None
        second = prepared(X, batch=batch)
        wanted = model(X)
    torch.save(wanted, folder / f"wanted-{number}.pt")
    answer = {key: facts[key] for key in ("hit", "reason", "detail")}
    answer["not_cacheable"] = facts.get("not_cacheable")
    answer |= {"verified": verified, "first": equal(first, wanted), "second": equal(second, wanted)}
    if not answer["second"]:
        with torch.no_grad():
            without = pg.prepare(model, config.changed(cache=False))
            answer["without_a_cache"] = equal(without(X, batch=batch), wanted)
    if number == 2:
        answer["altered"] = not equal(torch.load(folder / "wanted-1.pt"), wanted)
    return answer


def in_a_child(change, number, folder):
    folder.mkdir(parents=True, exist_ok=True)
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    answer = {}
    try:
        output = os.open(folder / f"output-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        answer = start(change, number, folder)
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"[:600]}
    finally:
        (folder / f"start-{number}.json").write_text(json.dumps(answer, default=str))
        sys.stderr.flush()
        os._exit(0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int, choices=(1, 2))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blind", action="store_true", help="no condition refuses a bundle")
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    sys.dont_write_bytecode = True  # a file that is written twice in one second
    torch.set_num_threads(1)
    import_dynamo()
    import_inductor()
    compilers.entry_points = lambda group: [EntryPoint()]
    if options.blind:
        bundles.broken_conditions = lambda *_: []
    for change in CHANGES:
        if change.name in options.names:
            in_a_child(change, options.number, options.folder / change.name)


if __name__ == "__main__":
    main()
