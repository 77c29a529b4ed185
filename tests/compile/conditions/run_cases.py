"""Start all cases of one directory on one cache, and print of each: hit, right, reason.

python -m tests.compile.conditions.run_cases use|force SOURCES CACHE [NAME…]

With `force` a miss compiles nothing, and there is no result that could be wrong.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from piecegraph.compile.backends import registry
from piecegraph.errors import BundleMissing

from ..starts import EntryPoint, start


def run(name: str, bundle: str, folder: Path, root: Path) -> dict[str, Any]:
    """One start of a case, compared with eager."""
    sys.modules.pop("helper", None)
    sys.path.insert(0, str(folder / name))
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(f"case_{name}")
        getattr(module, "enter", lambda: None)()
        torch.manual_seed(0)
        model = module.build()
        made = start(model, root, bundle=bundle)
        x = torch.arange(24, dtype=torch.float32).reshape(3, 8) / 10
        with torch.no_grad():
            expected, got = model(x), made(x)
        kept = made.events.named("bundle.not_kept")
        return {
            "hit": made.hit,
            "right": got.dtype == expected.dtype and torch.allclose(got, expected, equal_nan=True),
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


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    registry.entry_points = lambda group: [EntryPoint()]  # type: ignore[assignment]
    bundle, folder, root, *names = sys.argv[1:]
    chosen = names or sorted(path.name for path in Path(folder).iterdir())
    places = Path(folder), Path(root)
    print(json.dumps({name: run(name, bundle, places[0], places[1] / name) for name in chosen}))


if __name__ == "__main__":
    main()
