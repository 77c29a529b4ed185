"""SmolLM2-135M serves prompts of 5 to 900 tokens, with arrivals and preemption, beside `generate`.

python -m tests.engines.prompts_served [--mode MODE] [--strategy lazy] [--backend eager]
    [--dtype bfloat16] [--prompts 64] [--without]

`--without` serves without piecegraph. A token that is not that of `generate` is shown with the gap
of the two candidates in float32, beside what rounding does to a logit of the same context. Where
the gap is the smaller one, either token is right.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console

from piecegraph.tools.engine.scheduler import Request
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.run import find_device, own_model, start_service

TOKENS = 12
ROOT = Path(__file__).parents[2]


def requests_of(tokenizer, count):
    """Parts of our own pages as prompts, from short to long and shuffled."""
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs/guide.md").read_text()
    ids, draw = tokenizer(pages)["input_ids"], random.Random(0)
    lengths = [round(5 * 180 ** (i / (count - 1))) for i in range(count)]
    draw.shuffle(lengths)
    arrival, requests = 0.0, []
    for number, length in enumerate(lengths):
        start = draw.randrange(len(ids) - length)
        requests.append(Request(number, ids[start : start + length], TOKENS, arrival=arrival))
        arrival += draw.expovariate(1.0)
    return requests


def generated(model, prompt):
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, **settings)
    return made[0].tolist()


def difference(low, exact, tokens, expected):
    """The first other token of a request: where, the gap in float32, and the rounding."""
    at = next(
        i for i, (one, other) in enumerate(zip(tokens, expected, strict=True)) if one != other
    )
    ids = torch.tensor([expected[:at]])
    logits, true = (model(ids).logits[0, -1].float() for model in (low, exact))
    gap = (true[expected[at]] - true[tokens[at]]).abs()
    return {"at": at, "gap": float(gap), "rounding": float((logits - true).abs().max())}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"mode": "full_and_piecewise", "strategy": "eager"}.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--without", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    settings = {"model": "smollm2", "dtype": given.dtype, "max_num_reqs": 16, "verify": "none"}
    settings |= {"max_num_tokens": 256, "kv_blocks": 75 if given.prompts <= 16 else 130}
    if given.without:
        options = read_run_options(**settings, off=("all",))
    else:
        names = {name: getattr(given, name) for name in ("mode", "strategy", "backend")}
        options = read_run_options(**settings, **names, capture_sizes="1,2,4,8,16,64,256")
    requests = requests_of(options.hf.tokenizer(), given.prompts)
    with start_service(options, requests, [], Console(quiet=True)) as served:
        began = time.process_time()
        for _ in served.engine.serve(requests):
            pass
        seconds, modes = time.process_time() - began, {}
        for row in served.prepared.report()["dispatch"]:
            modes[row["mode"]] = modes.get(row["mode"], 0) + row["count"]
        preempted = sum(step.num_preempted for step in served.engine.log.steps)
    low, exact = (
        own_model(read_run_options(**{**settings, "dtype": dtype}), find_device("cpu"))
        for dtype in (given.dtype, "float32")
    )
    expected = [generated(low, each.tokens[: each.num_prompt]) for each in requests]
    others = [
        difference(low, exact, each.tokens, wanted)
        for each, wanted in zip(requests, expected, strict=True)
        if each.tokens != wanted
    ]
    facts = {"requests": len(requests), "equal": len(requests) - len(others), "modes": modes}
    print(json.dumps({**facts, "preempted": preempted, "cpu_seconds": round(seconds, 1)}))
    for each in others:
        print(json.dumps(each))


if __name__ == "__main__":
    main()
