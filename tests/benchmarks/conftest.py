"""The small engine of the tests of the tools."""

from ..tools.conftest import make_requests, make_world  # noqa: F401
