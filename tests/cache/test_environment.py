"""Which environment variables are factors, and that none is read without the registry."""

import ast

import pytest

from piecegraph.cache.keys.environment import (
    DECLARED,
    EXEMPT,
    environment_factors,
    observed,
    read,
)
from piecegraph.cache.keys.key import Key
from tests.tables import tables_of

TABLES = tables_of(__file__)


@pytest.mark.parametrize("name", TABLES["factors"])
def test_c1_1cat_536_unregistered_variables_with_a_prefix_are_factors(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert environment_factors()[name] == "1"


@pytest.mark.parametrize("name", TABLES["no_factors"])
def test_failure_W9_variables_that_change_no_code_are_no_factors(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert name not in environment_factors()


@pytest.mark.parametrize("value", ["/opt/lib.so", "/a:/b", "~/x", "C:\\x"])
def test_c1_vllm_47573_a_value_that_is_a_place_is_no_factor(value, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_NEW", value)
    assert "TORCHINDUCTOR_NEW" not in environment_factors()


def test_f9_a_value_that_differs_for_each_run_is_no_factor(monkeypatch):
    monkeypatch.setenv("TORCH_NEW", "123e4567-e89b-12d3-a456-426614174000")
    assert "TORCH_NEW" not in environment_factors()
    Key.of("codegen", {"environment": environment_factors()})


def test_the_secret_is_never_a_factor(monkeypatch):
    for name in DECLARED:
        monkeypatch.setenv(name, "a secret of at least 16 bytes")
    assert not DECLARED.keys() & environment_factors().keys()


def test_factors_of_this_process_fit_into_a_key():
    Key.of("codegen", {"environment": environment_factors()})


def test_every_exemption_has_a_reason():
    assert all(EXEMPT.values())


def test_c1_vllm_14953_reading_an_undeclared_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("PIECEGRAPH_CACHE_DIR", "/x")
    assert read("PIECEGRAPH_CACHE_DIR") == "/x"
    monkeypatch.delenv("PIECEGRAPH_CACHE_DIR")
    assert read("PIECEGRAPH_CACHE_DIR") is None
    monkeypatch.setenv("PIECEGRAPH_SECRET_SWITCH", "1")
    with pytest.raises(AssertionError, match="declare PIECEGRAPH_SECRET_SWITCH"):
        read("PIECEGRAPH_SECRET_SWITCH")


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret_access_key", "PLAIN"])
def test_a_condition_has_a_digest_of_a_secret(name, monkeypatch):
    monkeypatch.setenv(name, "hunter2")
    seen = observed(name)
    assert seen == "hunter2" if name == "PLAIN" else seen.startswith("sha256 ")
    monkeypatch.setenv(name, "hunter3")
    assert observed(name) != seen


@pytest.mark.slow
def test_c1_1cat_536_nothing_reads_the_environment_but_the_registry(package_sources):
    readers = {
        name
        for name, path in package_sources.items()
        if reads_environment(ast.parse(path.read_text()))
    }
    readers_of_torch = (
        "basics/patch",
        "compiling/aoti",
        "compiling/inductor",
        "tracing/inlined",
    )
    compat = {f"torch_compat/{name}.py" for name in readers_of_torch}
    # variables of engines, of torchrun and of torch, not ours
    theirs = {f"tools/{name}.py" for name in ("integrations/vllm", "serve/ranks")}
    # where torch writes its trace
    theirs |= {"tools/cli/run_commands.py"}
    # of torch's allocator, and how many threads may compile
    theirs |= {"runtime/backends/cuda.py", "compile/backends/workers.py"}
    assert readers == {"cache/keys/environment.py", *compat, *theirs}


def reads_environment(tree):
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (isinstance(node, ast.alias) and node.name in ("environ", "environb", "getenv"))
        for node in ast.walk(tree)
    )
