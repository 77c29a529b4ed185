"""The small engine of the tests of the tools."""

from ..tools.conftest import (  # noqa: F401
    code_folder,
    configured,
    make_requests,
    make_world,
    text_compiler,
    traced_once,
)
