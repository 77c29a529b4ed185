"""Faults planted in a running engine are found by its shadow steps, or refused before them."""

from pathlib import Path

import pytest

from . import engine_faults
from . import shadow_scenes as scenes

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("scene", scenes.SCENES, ids=lambda scene: scene.what)
def test_what_a_fault_takes_out_of_service_and_what_its_file_shows(scene, tmp_path):
    seen = scenes.see(scene, tmp_path)
    if scene.refused:
        assert seen.status == 3
        assert scene.refused in seen.out
        assert seen.wrong is None
        return
    assert seen.status == 1
    assert seen.wrong["out_of_service"] == scene.out_of_service, seen.wrong
    assert Path(seen.wrong["file"]).exists()
    assert scene.bisect in seen.bisect


@pytest.mark.parametrize("fault", engine_faults.FAULTS, ids=lambda fault: fault.what)
def test_what_the_tools_say_of_a_fault_of_an_engine(fault):
    seen = engine_faults.look(fault)
    assert seen.found != "nothing"
    assert seen.names(fault) == bool(fault.names), seen
    assert not seen.false(fault), seen


def test_right_steps_under_inductor():
    status, out = scenes.said(["run", *scenes.MODEL, *scenes.SHADOW, "--no-cache"])
    assert status == 0, out
    assert "steps proved while serving: 9," in out
