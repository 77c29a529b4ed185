"""Keys of Inductor's own caches."""

import pytest

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.compiling import inductor
from piecegraph.torch_compat.faster.cache_keys import short_cache_keys

from .test_inductor import SQUARED, applied_to_itself


@pytest.mark.compile
def test_sources_of_torch_and_triton_are_not_read(tmp_path, monkeypatch):
    from torch._inductor import codecache

    before = codecache.CacheBase.get_system
    with (
        inductor.inductor_cache_directory(str(tmp_path)),
        inductor.inductor_options(toolchain_directory("")),
    ):
        with monkeypatch.context() as within:
            within.setattr(codecache, "torch_key", None)
            within.setattr(codecache.CacheBase, "get_system", None)
            with short_cache_keys():
                artifact, _ = inductor.inductor_compile(*applied_to_itself(*SQUARED), {})
        assert inductor.inductor_serialize(artifact) is not None
    assert codecache.CacheBase.get_system is before
