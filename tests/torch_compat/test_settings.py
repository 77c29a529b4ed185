"""Settings of torch that change generated code."""

import pytest
import torch

from piecegraph.torch_compat.basics import settings


def test_changed_settings_are_those_that_shape_code():
    import torch._inductor.config as inductor_config

    before = settings.changed_settings()
    with inductor_config.patch({"cpp.simdlen": 8, "trace.enabled": True, "compile_threads": 3}):
        changed = settings.changed_settings()
    assert {k: v for k, v in changed.items() if before.get(k) != v} == {
        "torch._inductor.config.cpp.simdlen": 8
    }


def test_switches_of_the_process_are_stated():
    before = settings.global_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert settings.global_state()["autocast.cpu"] == "torch.bfloat16"
    torch.set_default_dtype(torch.float64)
    try:
        assert settings.global_state()["default_dtype"] == "torch.float64"
    finally:
        torch.set_default_dtype(torch.float32)
    assert settings.global_state() == before


def test_f2_switches_of_kernels_are_stated():
    before = settings.global_state()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        after = settings.global_state()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.mha.set_fastpath_enabled(True)
    assert {name for name in before if before[name] != after[name]} == {"flash_sdp", "mha_fastpath"}


@pytest.mark.parametrize(
    "flag",
    ["cudnn.benchmark", "cudnn.deterministic", "mkldnn.enabled", "opt_einsum.enabled"],
)
def test_f2_backend_flags_are_stated(flag):
    owner, _, name = flag.partition(".")
    backend = getattr(torch.backends, owner)
    before, stated = getattr(backend, name), settings.global_state()
    setattr(backend, name, not before)
    try:
        assert settings.global_state() != stated
    finally:
        setattr(backend, name, before)
    assert settings.global_state() == stated


@pytest.mark.parametrize(
    ("name", "value"),
    [("epilogue_fusion", False), ("prologue_fusion", False), ("_pre_fusion_custom_pass", len)],
)
def test_f6_what_torch_leaves_out_for_reasons_of_its_own_is_stated(name, value):
    """Torch's own keys know passes by other means."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch({name: value}):
        assert f"torch._inductor.config.{name}" in settings.changed_settings()


def test_is_settings_of_torch():
    import torch._inductor.config as inductor_config

    assert settings.is_settings(inductor_config)
    assert not settings.is_settings(torch)


def test_the_state_of_a_process_can_be_set_in_another_for_a_while():
    import torch._inductor.config as inductor_config

    before = settings.process_state()
    threads = before.num_threads
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.set_num_threads(threads + 1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with inductor_config.patch({"cpp.simdlen": 8}):
            state = settings.process_state()
        with before.installed():
            assert settings.process_state() == before
        here = settings.process_state()
        with state.installed():
            assert settings.process_state() == state
            assert inductor_config.cpp.simdlen == 8
        assert settings.process_state() == here
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(before.dtype)
        torch.set_float32_matmul_precision(before.precision)
        torch.use_deterministic_algorithms(False)


def test_the_names_of_inductors_options_are_those_of_its_module():
    import torch._inductor.config as inductor_config

    names = settings.inductor_option_names()
    assert {*inductor_config.get_config_copy()} - names == {"TYPE_CHECKING"}
    # aliases among them
    assert [name for name in names if not hasattr(inductor_config, name)] == []
