"""How CUDA and NCCL are found: in the wheels of cu12 and cu13, in system folders, and in words where they are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxcoll.runtime import gpu
from jaxcoll.runtime.native import load

from .harness import standin

# A process of its own: what it has opened would be found again. argv: the library, then folders. The library stays
# loaded, as it does with `native.load`: at the end of Python it would go from under the stand-in's threads.
OPEN = """
import json, os, sys, cffi
ffi = cffi.FFI()
ffi.cdef("void* jc_gpu_open(const char*, const char* const*, int); const char* jc_gpu_versions(void*);"
         "const char* jc_last_error(void);")
lib = ffi.dlopen(sys.argv[1], os.RTLD_NOW | os.RTLD_NODELETE)
folders = [ffi.new("char[]", f.encode()) for f in sys.argv[2:]]
handle = lib.jc_gpu_open(b"", ffi.new("char*[]", folders), len(folders))
text = lib.jc_last_error() if handle == ffi.NULL else lib.jc_gpu_versions(handle)
print(json.dumps([handle != ffi.NULL, ffi.string(text).decode()]))
"""
CU12 = {
    "nvidia/cuda_runtime/lib": "libcudart.so.12", "nvidia/cuda_nvrtc/lib": "libnvrtc.so.12",
    "nvidia/nccl/lib": "libnccl.so.2",
}  # fmt: skip
CU13 = {"nvidia/cu13/lib": "libcudart.so.13 libnvrtc.so.13", "nvidia/nccl/lib": "libnccl.so.2"}
DRIVER = {"driver": "libcuda.so.1"}


def make(root: Path, layout: dict[str, str]) -> None:
    for folder, names in layout.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in names.split():
            shutil.copy(standin().path, root / folder / name)  # a link would be one and the same library


def wheels(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are searched where `root` is on the path of imports."""
    monkeypatch.syspath_prepend(str(root))
    return [f for f in gpu.folders() if f.startswith(str(root))]


def opened(folders: list[str], cuda: int = 12090) -> tuple[bool, str]:
    """Whether all was found, and the versions and paths, or the message."""
    command = [sys.executable, "-c", OPEN, str(load().path), *folders]
    env = {**os.environ, "JAXCOLL_STANDIN_CUDA": str(cuda)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    found, text = json.loads(done.stdout)
    return found, text


@pytest.mark.parametrize(("layout", "cuda"), [(CU12, 12090), (CU13, 13000)], ids=["cu12", "cu13"])
def test_wheels(layout: dict[str, str], cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, {**layout, **DRIVER})
    found, text = opened([*wheels(tmp_path, monkeypatch), str(tmp_path / "driver")], cuda)
    assert found, text
    major = cuda // 1000
    for what, name in (
        ("CUDA runtime", f"libcudart.so.{major}"), ("CUDA driver", "libcuda.so.1"), ("NVRTC", f"libnvrtc.so.{major}"),
        ("NCCL", "libnccl.so.2"),
    ):  # fmt: skip
        line = next(line for line in text.splitlines() if line.startswith(what))
        folder = next(f for f, names in {**layout, **DRIVER}.items() if name in names.split())
        assert line.endswith(str(tmp_path / folder / name))


def test_nvrtc_is_of_the_runtimes_major_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, {**CU12, **DRIVER, "nvidia/cu13/lib": "libnvrtc.so.13"})
    found, text = opened([*wheels(tmp_path, monkeypatch), str(tmp_path / "driver")])
    assert found, text
    assert "libnvrtc.so.12" in text
    assert "libnvrtc.so.13" not in text


def test_what_is_missing_is_named_with_the_cure(tmp_path: Path):
    make(tmp_path, {"one": "libcudart.so.12 libcuda.so.1 libnvrtc.so.12"})
    found, text = opened([str(tmp_path / "one")])
    assert not found
    missing, there = text.splitlines()
    assert missing.startswith(
        f"NCCL was not found; looked for {tmp_path}/one/libnccl.so.2, libnccl.so.2, /usr/local/cuda"
    )
    assert missing.endswith("Cure: pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13), 2.18 or newer")
    one = tmp_path / "one"
    assert there == (
        f"found: the CUDA runtime {one}/libcudart.so.12, the CUDA driver {one}/libcuda.so.1, NVRTC {one}/libnvrtc.so.12"
    )


def test_all_that_is_missing_is_named_at_once(tmp_path: Path):
    make(tmp_path, {"one": "libcudart.so.12 libnvrtc.so.12"})
    found, text = opened([str(tmp_path / "one")])
    assert not found
    driver, nccl, _ = text.splitlines()
    assert driver.startswith("the CUDA driver was not found")
    assert driver.endswith("Cure: install NVIDIA's driver; in a container: docker run --gpus all")
    assert nccl.startswith("NCCL was not found")


def test_a_library_that_does_not_load_is_told_apart_from_one_that_is_missing(tmp_path: Path):
    make(tmp_path, {"one": "libcudart.so.12 libcuda.so.1 libnvrtc.so.12"})
    broken = tmp_path / "one" / "libnccl.so.2"
    broken.write_text("half a download")
    found, text = opened([str(tmp_path / "one")])
    assert not found
    assert f"{broken} (it is there, but: {broken}: file too short)" in text


def test_a_driver_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, {"one": "libcudart.so.13 libcuda.so.1 libnvrtc.so.13 libnccl.so.2"})
    monkeypatch.setenv("JAXCOLL_STANDIN_DRIVER", "12080")
    found, text = opened([str(tmp_path / "one")], 13000)
    assert not found
    assert "libcuda.so.1 is a driver for CUDA 12.8, too old for the CUDA runtime 13.0 of " in text
    assert text.endswith("Cure: install a newer NVIDIA driver, or pip install 'jaxcoll[cuda12]'")
    monkeypatch.setenv("JAXCOLL_STANDIN_DRIVER", "13000")  # older than 13.9, but of its major version
    assert opened([str(tmp_path / "one")], 13090)[0]


@pytest.mark.parametrize(("layout", "cuda"), [(CU12, 12090), (CU13, 13000)], ids=["cu12", "cu13"])
def test_an_nccl_that_is_too_old(layout: dict[str, str], cuda: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, {**layout, **DRIVER})
    monkeypatch.setenv("JAXCOLL_STANDIN_NCCL", "21703")
    found, text = opened([*wheels(tmp_path, monkeypatch), str(tmp_path / "driver")], cuda)
    assert not found
    assert "libnccl.so.2 is NCCL 2.17.3; jaxcoll needs 2.18 or newer" in text
    assert text.endswith(f"Cure: pip install --upgrade nvidia-nccl-cu{cuda // 1000}")


def test_a_library_that_is_too_old_lacks_functions(tmp_path: Path):
    make(tmp_path, {"one": "libcudart.so.12 libcuda.so.1 libnvrtc.so.12"})
    shutil.copy(load().path, tmp_path / "one" / "libnccl.so.2")  # has none of them
    found, text = opened([str(tmp_path / "one")])
    assert not found
    assert "they lack ncclGetVersion, " in text
    assert "ncclReduceScatter, ncclAllGather" in text
    assert "Cure: pip install --upgrade 'jaxcoll[cuda12]'" in text
    assert f"NCCL {tmp_path}/one/libnccl.so.2" in text.splitlines()[-1]
