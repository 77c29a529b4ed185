"""The factors of a codegen key that come from the machine."""

import pytest

from piecegraph.compile.bundle.key_factors import toolchain


@pytest.mark.parametrize(
    ("program", "said"),
    [("echo 'other c++ 7.1'; echo more", {"cxx": "other c++ 7.1"}), ("exit 1", {})],
)
def test_compiler_is_the_one_that_inductor_runs(tmp_path, program, said):
    import torch._inductor.config as inductor_config

    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{program}\n")
    compiler.chmod(0o700)
    with inductor_config.patch({"cpp.cxx": (None, str(compiler))}):
        assert toolchain() == said
