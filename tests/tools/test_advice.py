"""Each warning has a rule of `piecegraph explain`, and each rule can be shown."""

import ast
import json
import re
from pathlib import Path
from string import Formatter

import pytest
import torch

import piecegraph
from piecegraph.runtime import assemble  # noqa: F401 - which imports all parts, and their records
from piecegraph.runtime.core.records import record_kinds
from piecegraph.tools.explain import explain
from piecegraph.tools.explain.warnings import RULES, advice_of

ROOT = Path(piecegraph.__file__).parent
LAYERS = ("cache", "compile", "runtime", "tools", "torch_compat")
BY_NAME = {
    "compile/backends/workers.py": {"worker.lost", "worker.silent"},
    "runtime/setup/open_cache.py": {"cache.unusable", "cache.read_only"},
    "runtime/core/records.py": set(),
}
"""Where the name of an event is a variable: its values, by file."""


def emitted():
    """Each event whose level is not stated to be lower, and its facts where the code names all."""
    for path in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") not in (
                "emit",
                "_emit",
            ):
                continue
            facts = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if facts.pop("level", "DEBUG").endswith(("DEBUG", "INFO")):
                continue
            name = call.args[0]
            known = None if None in facts else {*facts}
            if isinstance(name, ast.Constant):
                yield name.value, known
            else:
                yield from ((each, known) for each in BY_NAME[str(path.relative_to(ROOT))])


def warnings():
    kinds = [kind for kind in record_kinds() if getattr(kind, "level", 0) >= 30]
    records = {kind.event: {*kind.__dataclass_fields__} for kind in kinds}
    return {**dict(emitted()), **records}


def test_each_warning_has_a_rule_that_can_be_shown_and_each_rule_a_warning():
    found = warnings()
    own = {name for name, facts in found.items() if facts and {"what", "todo"} <= facts}
    assert found.keys() - own == RULES.keys()
    for name, texts in RULES.items():
        fields = {field for text in texts for _, field, _, _ in Formatter().parse(text) if field}
        named = {field.partition("[")[0] for field in fields}
        assert found[name] is None or named <= found[name], name


def test_different_warnings_are_shown_once_each_with_their_number():
    lost = {"event": "worker.lost", "count": 3, "newest": [{"reason": "a"}, {"reason": "a"}]}
    remark = {"event": "sizes", "count": 1, "newest": [{"what": "slow", "todo": "faster"}]}
    other = {"event": "an.engine.s", "count": 1, "newest": [{"n": 1}]}
    shown = [what for what, _ in advice_of([lost, remark, other])]
    assert shown == ["a compiling process ended: a, 3 times", "an.engine.s"]


SLOW = {
    "none": ({}, (4, 8), True, []),
    "decode is never stated": ({}, (4, 8), False, ["does not state that a step decodes"]),
    "no support of attention": (
        {"attention": {"support": None}}, (4, 8), True, ["attention.support is not set"]
    ),
    "a size is missing": (
        {"capture_sizes": (4,)}, (7, 8), True, ["have no graph", "ran as NONE: above largest size"]
    ),
    "padding": ({"capture_sizes": (8,)}, (1,), True, ["88% of the rows of FULL 8 were padding"]),
    "a sampler compiles": ({}, (4, 8), True, ["Dynamo recompile after seal()"]),
}  # fmt: skip
"""Settings, sizes of the steps, whether they say that they decode, and all that is to be said."""


@pytest.mark.compile
def test_each_slow_fault_is_named_and_nothing_else_is():
    guide = (ROOT / "docs" / "guide.md").read_text()
    page = {}
    exec(re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)[0], page)
    slots = torch.zeros(16, dtype=torch.int64)
    sampler = torch.compile(lambda x: x.softmax(-1), backend="eager", dynamic=False)
    for fault, (settings, sizes, decodes, expected) in SLOW.items():
        limits = {"max_num_reqs": 8, "max_num_tokens": 8, "capture_sizes": (4, 8)}
        config = page["config"].changed(**{**limits, **settings})
        prepared = piecegraph.prepare(page["Model"](), config, layers=page["layers"])
        prepared.watch("KV cache", page["kv_cache"])
        prepared.watch("slots", slots)
        prepared.capture(lambda descriptor, mode: slots)
        prepared.seal()
        for number in range(20):
            size = sizes[number % len(sizes)]
            batch = piecegraph.Batch(size, size, decodes, 1 if decodes else None)
            prepared(torch.randn(size, 8), batch=batch, metadata=slots)
            if fault == "a sampler compiles":
                sampler(torch.randn(1 + number % 6, 8))
        said = [row["what"] for row in json.loads(explain(prepared, "json"))["advice"]]
        prepared.close()
        assert len(said) == len(expected), (fault, said)
        assert all(want in what for want, what in zip(expected, said, strict=True)), (fault, said)
