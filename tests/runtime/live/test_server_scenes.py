"""What happens to a server while its model is traced in a thread and compiled.

Every result is compared with the uncompiled model.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecegraph.compile.backends import registry

from .conftest import LENGTHS, LiveServed, Model, Texts

Prepare = Callable[..., LiveServed]

pytestmark = pytest.mark.compile


@pytest.fixture
def before_code(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """`before_code(function)`: called in the thread before each piece is compiled."""

    def set_it(function: Callable[[], object]) -> None:
        monkeypatch.setattr(registry, "entry_points", lambda group: [Texts(before=function)])

    return set_it


def state(served: LiveServed) -> str:
    return str(served.prepared.report()["background"]["state"])


def serve_until_over(*all_served: LiveServed) -> None:
    """Random steps until no model is compiled any more, and some after that."""
    while any(state(served) == "compiling" for served in all_served):
        for served in all_served:
            served.step(*random.choice(LENGTHS))
            served.prepared.capture_idle(0)
    for served in all_served:
        for lengths in LENGTHS:
            served.step(*lengths)


def test_two_models_are_compiled_at_once(serve_cold: Prepare) -> None:
    both = serve_cold(), serve_cold(Model())
    serve_until_over(*both)
    assert [state(served) for served in both] == ["compiled", "compiled"]


def test_the_cache_directory_is_removed_meanwhile(
    serve_cold: Prepare, before_code: Any, tmp_path: Path
) -> None:
    before_code(lambda: shutil.rmtree(tmp_path / "cache", ignore_errors=True))
    served = serve_cold()
    serve_until_over(served)
    assert state(served) == "failed"  # it may be a disk that was unmounted: nothing is made anew
    (failure,) = served.prepared.report()["background"]["failures"]
    assert "No such file" in failure["reason"]


def test_an_asyncio_server_answers_all_its_clients_meanwhile(serve_cold: Prepare) -> None:
    served = serve_cold()
    answered = 0

    async def client(requests: asyncio.Queue[Any]) -> None:
        nonlocal answered
        while state(served) == "compiling" or answered < 200:
            answer = asyncio.get_running_loop().create_future()
            await requests.put((random.choice(LENGTHS), answer))
            await answer
            answered += 1

    async def engine(requests: asyncio.Queue[Any]) -> None:
        while True:
            lengths, answer = await requests.get()
            answer.set_result(await asyncio.to_thread(served.step, *lengths))

    async def server() -> None:
        requests: asyncio.Queue[Any] = asyncio.Queue()
        steps = asyncio.create_task(engine(requests))
        clients = asyncio.gather(*(client(requests) for _ in range(8)))
        await asyncio.wait({steps, clients}, return_when=asyncio.FIRST_COMPLETED)
        if steps.done():
            steps.result()
        steps.cancel()

    asyncio.run(server())
    assert state(served) == "compiled"
    assert answered >= 200
