"""Operations are killed at random; the next start removes their files and works."""

import pytest

from piecegraph.tools.cache_verify import verify
from tests.processes import PYTHON, output_of

pytestmark = [pytest.mark.compile, pytest.mark.slow]

PROGRAM = """
from piecegraph.tests.quick_imports import end, imported
import os, random, signal, sys, tempfile, time
from collections import Counter
from pathlib import Path
import torch
from piecegraph import Batch, Config, compile_ahead, prepare
from piecegraph.cache import Cache
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.evict import Limits, evict
from piecegraph.tools.cache_image import export_image
from piecegraph.tools.cache_import import import_image
from piecegraph.cache.inspection import manifests
from piecegraph.cache.signing import trust_all
from piecegraph.compile.backends import aoti, inductor
from piecegraph.events import Events

root, temporary, exports, wanted = *map(Path, sys.argv[1:4]), int(sys.argv[4])
toolchain = inductor.toolchain_directory("")  # its headers take half a minute to build
for module in (aoti, inductor):
    module.toolchain_directory = lambda scratch: toolchain
tempfile.tempdir = str(temporary)
torch.set_num_threads(1)
chance = random.Random(0)


def start(directory, size, function):
    inputs = {"input": f"float32[num_tokens, {size}]"}
    config = Config(cache_dir=directory, inputs=inputs, max_num_tokens=32, graph_mode="NONE")
    with torch.no_grad():
        return function(torch.nn.Linear(size, 8), config)


def cold(function):
    return lambda directory: start(directory, chance.randrange(9, 4000), function)


def prune(directory):
    evict(directory, Limits(size=chance.choice((0, 1 << 20)), grace=0), Events())


def export(directory):
    chosen = [manifest for manifest, _ in manifests(directory)]
    export_image(chosen, DirectoryLayer(directory), exports / "all.tar")


def import_(directory):
    cache = Cache(directory, Events())
    for entry in import_image(exports / "given.tar", trust_all):
        cache.store(entry)


def leftovers():
    scratch = [*exports.glob(".*"), *root.glob("*/tmp/*")]
    return {*temporary.glob("piecegraph-*"), *scratch}


def die_at_a_file(number):
    # on a busy machine another process would come too late to kill so short a work
    left = iter(range(number))

    def see(event, args):
        if (event == "open" or event.startswith("os.")) and next(left, None) is None:
            signal.raise_signal(signal.SIGKILL)

    sys.addaudithook(see)


def killed_at_random(work, directory):
    chance.seed(chance.random())
    before, child = leftovers(), os.fork()
    if not child:
        if work not in starts:
            die_at_a_file(chance.randrange(60))
        work(directory)
        os._exit(0)
    end = time.monotonic() + 60
    while work in starts and leftovers() <= before and time.monotonic() < end:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    if work in starts:
        time.sleep(min(chance.expovariate(2), 6))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0, status
    return os.WIFSIGNALED(status)


starts = [cold(prepare), cold(compile_ahead)]
works = [*starts, prune, export, import_]
start(root / "given", 8, prepare).close()
imported(freeze=True)
export_image(
    [manifest for manifest, _ in manifests(root / "given")],
    DirectoryLayer(root / "given"),
    exports / "given.tar",
)
kills, left = Counter(), 0
for number in range(20 * wanted):
    work = number % len(works)
    directory = root / str(number % 3)
    if kills[work] < wanted / len(works) and killed_at_random(works[work], directory):
        kills[work] += 1
        left += len(leftovers())
    if kills.total() >= wanted:
        break
print(f"{kills.total()} kills, left by them:", left > 0)
for number in range(3):
    Cache(root / str(number), Events())
    export(root / str(number))
prepared = start(root / "0", 8, prepare)
assert prepared(torch.ones(3, 8), batch=Batch(3, 3)).shape == (3, 8)
prepared.close()
print("left after a start:", leftovers())
end()
"""


@pytest.mark.parametrize("wanted", [5, pytest.param(500, marks=pytest.mark.heavy)])
def test_killed_operations_leave_nothing(wanted, tmp_path):
    """Kills of prepare, compile_ahead, prune, export and import, on three caches.

    One process imports everything and forks: an import takes longer than a start.
    """
    folders = [tmp_path / name for name in ("caches", "temporary", "exports")]
    for folder in folders[1:]:
        folder.mkdir()
    command = PYTHON, "-W", "ignore", "-c", PROGRAM, *folders, wanted
    out = output_of(*command, timeout=3 * wanted + 200)
    assert out == f"{wanted} kills, left by them: True\nleft after a start: set()\n"
    for number in range(3):
        assert verify(folders[0] / str(number)) == []
