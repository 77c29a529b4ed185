"""The walks of docs/architecture.md name the files that a start and a step really use."""

import re
import sys
from pathlib import Path

import pytest
import torch

import piecegraph as pg
from tests.ops import define
from tests.text_compiler import use_text_compiler

ROOT = Path(pg.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def walk(title):
    """Files and functions of a numbered walk, in order."""
    section = PAGE.split(f"### {title}", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. `([\w/.]+)`: `([\w.]+)`", section, re.MULTILINE)


def calls(run):
    """Files and functions of the package in the order of their first call."""
    seen = {}
    prefix = f"{ROOT}/"

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            seen.setdefault((code.co_filename.removeprefix(prefix), code.co_qualname))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(seen)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        query = self.up(x)
        output = torch.empty_like(query)
        torch.ops.architecture_page.attention(query, output)
        return self.down(output)


def copy_into(query, output):
    output.copy_(query)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Calls of a cold start with its captures, and those of a step after it."""
    library = torch.library.Library("architecture_page", "DEF")
    define(library, "attention(Tensor query, Tensor(a!) output) -> ()", copy_into)
    config = pg.Config(
        splitting_ops=("architecture_page::attention",),
        inputs={"x": "float32[num_tokens, 8]"},
        max_num_tokens=8,
        max_num_reqs=8,
        capture_sizes=(4,),
        cache_dir=tmp_path_factory.mktemp("cache"),
        compiler="text",
    )
    made = []

    def start():
        made.append(pg.prepare(Model(), config))
        made[0].capture()

    with pytest.MonkeyPatch.context() as patch:
        use_text_compiler(patch)
        start_calls = calls(start)
    (prepared,) = made
    x, batch = torch.randn(3, 8), pg.Batch(3, 3, is_decode=True, query_len=1)

    def step():
        prepared.run(prepared.dispatch(batch), x)

    step()
    yield start_calls, calls(step)
    library._destroy()


@pytest.mark.compile
@pytest.mark.parametrize(
    ("title", "index", "most"),
    [("Walk 1: a cold start to the first replay", 0, 10), ("Walk 2: a step", 1, 4)],
)
def test_a_walk_is_what_happens(walked, title, index, most):
    called, named = walked[index], walk(title)
    assert 3 <= len(named) <= most
    positions = [called.index(step) for step in named]
    assert positions == sorted(positions)
