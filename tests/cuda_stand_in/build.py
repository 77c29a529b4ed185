"""Build the stand-in for the CUDA runtime: `python build.py` in an environment with a CUDA torch.

The headers come with the triton wheel that torch requires. The libraries are put into the folder
`built` beside this file: libcudart.so.13 (the runtime, and the driver's functions), libcuda.so.1
(an empty library whose functions are those of the first) and libnvidia-ml.so.1.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE / "built"


EXPORTS = """
libcudart.so.13 { global: cuda*; __cuda*; cu[A-Z]*; stand_in_*; local: *; };
libcublas.so.13 { global: cublas[A-KM-Z]*; };
libcublasLt.so.13 { global: cublasLt*; };
"""
"""The versions that torch's libraries look for: a symbol of another version is not found."""


def headers() -> Path:
    """The folder of CUDA headers that the triton wheel ships."""
    found = _package("triton") / "backends" / "nvidia" / "include"
    if not (found / "cuda_runtime_api.h").exists():
        sys.exit(f"no CUDA headers in {found}: install a CUDA build of torch")
    return found


def toolkit_headers() -> Path:
    """The folder of headers of cuBLAS and of nvidia-cuda-cccl, which CUDA's own headers include."""
    return _package("nvidia") / "cu13" / "include"


def _package(name: str) -> Path:
    spec = find_spec(name)
    return Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path(name)


def build() -> None:
    BUILT.mkdir(exist_ok=True)
    (BUILT / "exports").write_text(EXPORTS)
    runtime, driver = BUILT / "libcudart.so.13", BUILT / "libcuda.so.1"
    shared = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-Wall"]
    shared += [f"-isystem{toolkit_headers()}", f"-isystem{headers()}"]
    sources = [str(path) for path in sorted((HERE / "src").glob("*.cpp"))]
    names = [f"-Wl,-soname,{runtime.name}", f"-Wl,--version-script={BUILT / 'exports'}"]
    subprocess.check_call([*shared, *sources, "-o", str(runtime), *names, "-ldl", "-pthread"])
    link = [f"-L{BUILT}", "-Wl,--no-as-needed", "-l:libcudart.so.13"]
    empty = ["-x", "c++", "/dev/null", "-x", "none"]
    subprocess.check_call([*shared, *empty, "-o", str(driver), f"-Wl,-soname,{driver.name}", *link])
    nvml = BUILT / "libnvidia-ml.so.1"
    subprocess.check_call([*shared, str(HERE / "src" / "nvml" / "nvml.cpp"), "-o", str(nvml)])
    (BUILT / "libcuda.so").unlink(missing_ok=True)
    (BUILT / "libcuda.so").symlink_to(driver.name)


if __name__ == "__main__":
    build()
