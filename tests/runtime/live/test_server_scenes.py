"""What happens to a server while its model is traced in a thread and compiled.

Every result is compared with the uncompiled model.
"""

import asyncio
import errno
import random
import shutil

import pytest

from piecegraph.cache.directory import DirectoryLayer
from tests.processes import PYTHON, output_of

from .conftest import LENGTHS, Model

pytestmark = pytest.mark.compile


def state(served):
    return str(served.prepared.report()["background"]["state"])


def not_stored(served):
    """Why what was compiled is not in the cache."""
    (*_, why) = served.prepared.records.compile.failed_writes
    return why


def serve_until_over(*all_served):
    """Random steps until no model is compiled any more, and some after that."""
    while any(state(served) == "compiling" for served in all_served):
        for served in all_served:
            served.step(*random.choice(LENGTHS))
            served.prepared.parts.strategies.idle(0)
    for served in all_served:
        for lengths in LENGTHS:
            served.step(*lengths)


def test_two_models_are_compiled_at_once(serve_cold):
    both = serve_cold(), serve_cold(Model())
    serve_until_over(*both)
    assert [state(served) for served in both] == ["compiled", "compiled"]


def test_the_cache_directory_is_removed_meanwhile(serve_cold, before_code, tmp_path):
    before_code(lambda: shutil.rmtree(tmp_path / "cache", ignore_errors=True))
    served = serve_cold()
    serve_until_over(served)
    assert state(served) == "compiled"
    assert "No such file" in not_stored(served)  # it may be a disk that was unmounted
    assert not (tmp_path / "cache").exists()


def test_the_disk_is_full_meanwhile(serve_cold, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DirectoryLayer, "_put", full)
    served = serve_cold()
    serve_until_over(served)
    assert state(served) == "compiled"
    assert "No space left" in not_stored(served)


def test_another_thread_is_importing_inductor_meanwhile():
    """The first step is served meanwhile, and the thread that traces waits for it."""
    assert output_of(PYTHON, "-c", IMPORTS).split() == ["importing", "served", "compiled"]


IMPORTS = """
from piecegraph.tests.quick_imports import end
import builtins, tempfile, threading, torch
from piecegraph import Batch, Config, prepare
torch.set_num_threads(1)
begun, stepped, plainly = threading.Event(), threading.Event(), builtins.__import__

def halfway(name, *rest):
    if name == "standalone_compile":
        builtins.__import__ = plainly
        begun.set()
        assert stepped.wait(60)
    return plainly(name, *rest)

def imports():
    import torch._inductor

builtins.__import__ = halfway
thread = threading.Thread(target=imports)
thread.start()
begun.wait()
print("importing")
model = torch.nn.Linear(4, 4)

inputs = {"input": "float32[num_tokens, 4]"}
config = Config(inputs=inputs, max_num_tokens=8, graph_mode="NONE", bundle="serve",
                cache_dir=tempfile.mkdtemp())
prepared = prepare(model, config)
prepared(torch.ones(3, 4), batch=Batch(3, 3))
print("served")
stepped.set()
assert prepared.parts.starts.wait_until_compiled(120)
assert torch.allclose(prepared(torch.ones(3, 4), batch=Batch(3, 3)), model(torch.ones(3, 4)))
print("compiled")
prepared.close()
end()
"""


def test_an_asyncio_server_answers_all_its_clients_meanwhile(serve_cold):
    served = serve_cold()
    answered = 0

    async def client(requests):
        nonlocal answered
        while state(served) == "compiling" or answered < 200:
            answer = asyncio.get_running_loop().create_future()
            await requests.put((random.choice(LENGTHS), answer))
            await answer
            answered += 1

    async def engine(requests):
        while True:
            lengths, answer = await requests.get()
            answer.set_result(await asyncio.to_thread(served.step, *lengths))

    async def server():
        requests = asyncio.Queue()
        steps = asyncio.create_task(engine(requests))
        clients = asyncio.gather(*(client(requests) for _ in range(8)))
        await asyncio.wait({steps, clients}, return_when=asyncio.FIRST_COMPLETED)
        if steps.done():
            steps.result()
        steps.cancel()

    asyncio.run(server())
    assert state(served) == "compiled"
    assert answered >= 200
