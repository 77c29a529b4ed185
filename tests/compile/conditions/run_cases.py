"""Start all cases of a directory on a cache, and print a line: of each hit, right, reason.

python -m tests.compile.conditions.run_cases CACHE [use|force|before|background SOURCES]…

Each of several directories in a fork of its own: torch is imported once. With `force` a miss
compiles nothing, and there is no result that could be wrong. With `before` and `background` no
condition refuses a bundle, but it is verified then; the result is that of the first step after the
verification.
"""

from piecegraph.tests.quick_imports import end, imported

# isort: split
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch

from piecegraph import Batch, Config, prepare
from piecegraph.compile.bundle import bundle as bundles
from piecegraph.compile.ir import registered_compilers as registry
from piecegraph.errors import BundleMissing, BundleStale
from piecegraph.runtime.parts.starts import tracing_thread
from tests.text_compiler import EntryPoint

from ..models import X
from ..starts import start

X_VALUE = torch.arange(24, dtype=torch.float32).reshape(3, 8) / 10


def equal(got, expected):
    return got.dtype == expected.dtype and torch.allclose(got, expected, equal_nan=True)


def verified(model, root, when):
    """A start that uses any bundle of the model's key, whatever its conditions say."""
    settings = {"compiler": "text", "inputs": X, "max_num_tokens": 64, "cache_dir": root}
    settings |= {"graph_mode": "NONE", "bundle": "force", "cache": {"verify_bundle": when}}
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(bundles, "broken_conditions", lambda *_: [])
        patched.setattr(tracing_thread, "PAUSES_S", (0.1,) * len(tracing_thread.PAUSES_S))
        prepared = None
        try:
            prepared = prepare(model, Config(**settings))
            outcome = prepared.parts.starts.wait_until_verified(300)
            got = prepared(X_VALUE, batch=Batch(3, 3))
            expected = model(X_VALUE)  # which may change its state: steps after it would refuse
            return {"hit": True, "verified": outcome, "right": equal(got, expected)}
        except BundleStale as error:
            return {"hit": True, "verified": False, "right": True, "reason": str(error)}
        finally:
            if prepared is not None:
                prepared.close()


def run(name, bundle, folder, root):
    """One start of a case, compared with eager."""
    for module in ("helper", f"case_{name}"):
        sys.modules.pop(module, None)
    sys.path.insert(0, str(folder / name))
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(f"case_{name}")
        getattr(module, "enter", lambda: None)()
        torch.manual_seed(0)
        model = module.build()
        if bundle in ("before", "background"):
            return verified(model, root, bundle)
        made = start(model, root, bundle=bundle)
        with torch.no_grad():
            expected, got = model(X_VALUE), made(X_VALUE)
        kept = made.events.named("bundle.not_kept")
        return {
            "hit": made.hit,
            "right": equal(got, expected),
            "reason": made.reason,
            "not_kept": kept[0].facts["reason"] if kept else None,
        }
    except BundleMissing as error:
        return {"hit": False, "right": True, "reason": error.facts["reason"], "not_kept": None}
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-1500:],
        }
    finally:
        getattr(sys.modules.get(f"case_{name}"), "leave", lambda: None)()
        sys.path.remove(str(folder / name))
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def main():
    imported(freeze=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    registry.entry_points = lambda group: [EntryPoint()]
    root, *starts = sys.argv[1:]
    for bundle, folder in zip(starts[::2], starts[1::2], strict=True):
        child = os.fork()
        if child == 0:
            names = sorted(path.name for path in Path(folder).iterdir())
            found = {name: run(name, bundle, Path(folder), Path(root) / name) for name in names}
            print(json.dumps(found), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
    end()
