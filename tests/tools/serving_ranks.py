"""Forks data-parallel ranks that serve parts of the trace: `serving_ranks.py FOLDER SIZE FEATURES`.

FEATURES are more options of `piecegraph run`, as JSON.

Each rank writes its steps and the tokens of its requests into FOLDER. The last one has one request
and is idle afterwards. The parent serves all requests alone and forks then: Dynamo is imported and
has traced once.
"""

import io
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from piecegraph import Ranks
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.requests import read_requests
from piecegraph.tools.serve.run import serve, start_service

OPTIONS = {
    "model": "layers=1,hidden=16,heads=2,kv_heads=1,intermediate=32,vocab=64", "requests": 10,
    "max_num_reqs": 4, "max_num_tokens": 64, "capture_sizes": "2,4,16,64", "backend": "eager",
    "no_cache": True, "verify": "none",
}  # fmt: skip


def served(features, chosen, ranks=None):
    """Mode, padded size and tokens of each step, and the tokens of each request."""
    options = read_run_options(**OPTIONS, **features)
    console, steps = Console(file=io.StringIO()), []
    requests = [each for each in read_requests(options) if chosen(each.id)]
    with start_service(options, requests, [], console, ranks=ranks) as service:
        run = service.engine.run

        def recorded(decision, *inputs, metadata):
            steps.append((decision.mode.name, decision.descriptor.num_tokens, len(inputs[0])))
            return run(decision, *inputs, metadata=metadata)

        service.engine.run = recorded
        serve(service, requests, console)
    return steps, {request.id: request.tokens for request in requests}


def play(folder, rank, size, features):
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), size, rank)
    owner = {i: size - 1 if i == 0 else i % (size - 1) for i in range(OPTIONS["requests"])}
    steps, tokens = served(features, lambda i: owner[i] == rank, Ranks(timeout_s=60.0))
    (folder / f"rank-{rank}.json").write_text(json.dumps({"steps": steps, "tokens": tokens}))


def main():
    folder, size, features = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)  # threads do not survive a fork
    _, alone = served(features, lambda i: True)
    (folder / "alone.json").write_text(json.dumps(alone))
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            play(folder, rank, size, features)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
