"""Backends by name: ours, those that an installed package registers, and unknown ones."""

import pytest
import torch

from piecegraph.errors import BackendUnavailable, UnknownBackend
from piecegraph.runtime.backends.registry import choose_backend
from piecegraph.runtime.backends.replay.backend import ReplayBackend

CPU = torch.device("cpu")


def test_the_replay_backend_ships():
    assert isinstance(choose_backend("replay", CPU), ReplayBackend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_cuda_backend_needs_a_device():
    with pytest.raises(BackendUnavailable, match="no CUDA device"):
        choose_backend("cuda", CPU)


def test_the_cuda_backend_refuses_rocm_by_name(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(BackendUnavailable, match="ROCm"):
        choose_backend("cuda", CPU)


def test_an_installed_package_registers_a_backend(tmp_path, monkeypatch):
    (tmp_path / "abacus_backend.py").write_text(
        "from piecegraph.runtime.backends.replay.backend import ReplayBackend\n"
        "def make(device):\n    return ReplayBackend(name='abacus')\n"
    )
    metadata = tmp_path / "abacus-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[piecegraph.backends]\nabacus=abacus_backend:make")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert choose_backend("abacus", CPU).name == "abacus"
    with pytest.raises(UnknownBackend, match=r"'slide_rule'.*'replay', 'cuda', 'abacus'"):
        choose_backend("slide_rule", CPU)
