"""Private names of torch are used in torch_compat only, and each of its functions is tested."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

PRIVATE_ATTRIBUTES = frozenset(
    {
        *("_schema", "_overloadname", "_qualified_op_name", "_version", "_cdata", "_expr"),
        *("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks", "_dynamo_source"),
        *("maybe_user_loc", "real_stack", "alias_info", "deferred_runtime_asserts"),
        *("var_to_range", "var_to_range_sloc", "replacements", "replacements_slocs"),
    }
)
"""Attributes of torch's objects that are private or differ between versions."""


def chain(node):
    """`torch.a.b` as names; empty if it does not start with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_private_path(names):
    """Whether names from `torch` on lead into something private; names of ops are public."""
    return names[:1] == ["torch"] and names[1:2] != ["ops"] and any(map(is_private, names))


def private_paths(source):
    """Private names of torch that `source` imports, or reaches from what it imports."""
    tree = ast.parse(source)
    paths, local = set[str](), {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths |= {alias.name for alias in node.names}
            local |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            local |= {mine: f"{node.module}.{name}" for mine, name in names.items()}
    reached = (chain(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    paths |= {
        ".".join([local[names[0]], *names[1:]]) for names in reached if local.keys() & names[:1]
    }
    return {path for path in paths | set(local.values()) if is_private_path(path.split("."))}


def private_uses(source):
    """Private names of torch that `source` uses, and private attributes of its objects."""
    chains = [
        chain(node) or [node.attr]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
    ]
    of_objects = [names for names in chains if names[-1] in PRIVATE_ATTRIBUTES]
    of_objects += [
        names for names in chains if names[-2:] in (["node", "expr"], ["node", "shape_env"])
    ]
    return private_paths(source) | {".".join(names) for names in of_objects}


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_leaves",
        "torch._check(x)",
        "torch.utils._pytree.tree_leaves(x)",
        "op._schema",
        "size.node.expr",
    ],
)
def test_private_names_are_found(code):
    assert private_uses(code)


@pytest.mark.parametrize(
    "code",
    ["torch.__version__", "torch.ops.aten._softmax", "self._expression", "from .torch import _x"],
)
def test_public_names_are_not(code):
    assert not private_uses(code)


def test_private_names_of_torch_are_used_in_torch_compat_only(package_sources):
    found = [
        f"{name}: {used}"
        for name, path in sorted(package_sources.items())
        if not name.startswith("torch_compat/")
        for used in private_uses(path.read_text())
    ]
    assert not found


def test_each_public_function_of_torch_compat_has_a_test(package_sources):
    missing = []
    for name, path in package_sources.items():
        if not name.startswith("torch_compat/") or path.stem == "__init__":
            continue
        public = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        ]
        # the modules of equal layers are parts of one mechanism
        tests = "test_*.py" if "equal_layers" in name else f"test_{path.stem}.py"
        text = "".join(file.read_text() for file in Path(__file__).parent.glob(tests))
        missing += [f"{path.stem}.{function}" for function in public if function not in text]
    assert not missing


def exists(path):
    """Whether torch has the name; what is below an object that is neither module nor class is not
    looked at."""
    value, names = torch, path.split(".")
    for depth, name in enumerate(names[1:], 2):
        if not isinstance(value, ModuleType | type):
            return True
        if not hasattr(value, name):
            try:
                importlib.import_module(".".join(names[:depth]))
            except ImportError:
                return False
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def used_paths():
    files = (Path(__file__).parents[2] / "torch_compat").rglob("*.py")
    return {path for file in files for path in private_paths(file.read_text())}


OF_CUDA_BUILDS = {
    "torch._C._aoti.AOTIModelContainerRunnerCuda",
    "torch._C._cuda_clearCublasWorkspaces",
    "torch._C._host_emptyCache",
}


def test_this_torch_has_each_private_name_that_is_used():
    absent = set() if torch.version.cuda else OF_CUDA_BUILDS
    missing = [path for path in sorted(used_paths() - absent) if not exists(path)]
    assert missing == [], f"torch {torch.__version__} does not have them"


def test_a_name_that_went_is_noticed():
    source = "import torch\nfrom torch._inductor import ir\nir.Gone.create, torch._C._gone(1)"
    went = [path for path in sorted(private_paths(source)) if not exists(path)]
    assert went == ["torch._C._gone", "torch._inductor.ir.Gone", "torch._inductor.ir.Gone.create"]
