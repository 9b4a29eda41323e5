"""What `jaxcoll doctor` and `jaxcoll.explain` say of GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcoll
from jaxcoll import config, doctor, runtime
from jaxcoll.runtime import gpu

from .test_libraries import CU12, DRIVER, make

pytestmark = pytest.mark.timeout(290)

# A process of its own: what it opens would be found again. argv: folders to search, first of all.
DOCTOR = """
import json, sys
from jaxcoll import doctor
from jaxcoll.runtime import gpu
doctor.has_nvidia_device = lambda: True
found = gpu.folders()
gpu.folders = lambda: [*found, *sys.argv[1:]]
print(json.dumps([(f.level, f.text, f.cure) for f in doctor.check_gpu()]))
"""

# A program of eight ranks on the stand-in, which says how its calls went and what `explain` says.
PROGRAM = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from gpu.loop_program import Job, gpu, jaxcoll, standin
gpu.opened(str(standin().path))
gpu.present = lambda: True
job = Job()
job.run()
print(json.dumps([standin().calls(), standin().breaches(), jaxcoll.explain("psum", "64K").splitlines()]))
"""


def said(tmp_path: Path, layout: dict[str, str], plugin: bool = True, **env: str) -> list[doctor.Finding]:
    make(tmp_path, layout)
    if plugin:
        (tmp_path / "jax_cuda12_plugin").mkdir(exist_ok=True)
    command = [sys.executable, "-c", DOCTOR, str(tmp_path / "driver")]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return [doctor.Finding(*row) for row in json.loads(done.stdout)]


def test_doctor_names_versions_and_paths_and_what_is_in_use(tmp_path: Path):
    findings = said(tmp_path, {**CU12, **DRIVER})
    assert [f.level for f in findings] == ["ok"] * 4 + ["info"] * 2
    assert not any(f.cure for f in findings)
    assert [f.text for f in findings] == [
        f"CUDA runtime 12.9  {tmp_path}/nvidia/cuda_runtime/lib/libcudart.so.12",
        f"CUDA driver 13.0  {tmp_path}/driver/libcuda.so.1",
        f"NVRTC 12.9  {tmp_path}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        f"NCCL 2.29.7  {tmp_path}/nvidia/nccl/lib/libnccl.so.2",
        "GPU layout pairs: a NCCL communicator for each pair of ranks, every edge timed by itself (JAXCOLL_GPU_LAYOUT)",
        "hierarchical schedules inside a host of GPUs: NCCL's own ReduceScatter and AllGather "
        "(JAXCOLL_GPU_INSIDE=edges: edge by edge)",
    ]


def test_doctor_says_what_the_environment_chose(tmp_path: Path):
    findings = said(tmp_path, {**CU12, **DRIVER}, JAXCOLL_GPU_LAYOUT="groups", JAXCOLL_GPU_INSIDE="edges")
    layout, inside = findings[-2:]
    assert layout.text.startswith("GPU layout groups: one NCCL communicator, one launch a step")
    assert inside.text.endswith(": edge by edge (JAXCOLL_GPU_INSIDE=edges)")


def test_doctor_has_a_cure_for_each_library(tmp_path: Path):
    wheels = {folder: name for folder, name in CU12.items() if "nccl" not in name}
    findings = said(tmp_path, wheels)
    driver, nccl, found = findings[:3]
    assert (driver.level, nccl.level, found.level) == ("bad", "bad", "info")
    assert driver.text.startswith("the CUDA driver was not found; looked for ")
    assert driver.cure == "install NVIDIA's driver; in a container: docker run --gpus all"
    assert nccl.text.startswith("NCCL was not found; looked for ")
    assert nccl.cure == "pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13), 2.18 or newer"
    assert found.text.startswith(f"found: the CUDA runtime {tmp_path}/nvidia/cuda_runtime/lib/libcudart.so.12, NVRTC ")


def test_doctor_with_a_gpu_that_jax_does_not_use(tmp_path: Path):
    first = said(tmp_path, {**CU12, **DRIVER}, plugin=False)[0]
    assert (first.level, first.cure) == ("slow", "pip install 'jaxcoll[cuda12]', or 'jaxcoll[cuda13]'")
    assert "programs run on the CPU" in first.text


def test_doctor_with_a_plugin_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "has_nvidia_device", lambda: False)
    assert [f.text for f in doctor.check_gpu()] == ["no NVIDIA GPU here: CUDA and NCCL are not looked for"]
    (tmp_path / "jax_cuda13_plugin").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    _, finding = doctor.check_gpu()
    assert finding.level == "slow"
    assert "docker run --gpus all" in finding.cure


def test_doctor_leaves_a_malformed_setting_to_its_own_check(tmp_path: Path):
    findings = said(tmp_path, {**CU12, **DRIVER}, JAXCOLL_GPU_LAYOUT="triples")
    assert [(f.level, f.text) for f in findings] == [
        ("info", "CUDA and NCCL are not looked for before the settings are right")
    ]


def program(layout: str) -> tuple[dict[str, int], list[str]]:
    env = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16",
        "JAXCOLL_GPU_LAYOUT": layout,
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1])]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=280, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls, breaches, lines = json.loads(done.stdout.splitlines()[-1])
    assert not breaches
    return calls, lines


def test_the_layout_that_is_asked_for_runs_and_is_told():
    pairs, says = program("pairs")
    assert sum(line.startswith("layout pairs: ") for line in says) == 1
    assert "ncclGroupStart" not in pairs
    groups, says = program("groups")
    assert sum(line.startswith("layout groups: ") for line in says) == 1
    assert groups["ncclGroupStart"] == groups["ncclGroupEnd"] > 0
    assert groups["ncclCommSplit"] == 8 < pairs["ncclCommSplit"]


def explained(monkeypatch: pytest.MonkeyPatch, hosts: list[int], inside: str = "nccl") -> list[str]:
    """What is said of GPUs where the ranks are on these hosts."""
    monkeypatch.setattr(gpu, "present", lambda: True)
    world = runtime.get_sets().world
    monkeypatch.setattr(world, "hosts_of", lambda ids: tuple(hosts[d] for d in ids))
    monkeypatch.setattr(world, "settings", dataclasses.replace(world.settings, gpu_inside=inside))
    with config.override(schedule={"*": "hierarchical"}):
        lines = jaxcoll.explain("psum", "4M").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("on GPUs: "))
    assert "not of NCCL's" in lines[begin]
    assert lines[begin + 1].startswith("layout pairs: ")
    return lines[begin + 2 : -1]


@pytest.mark.parametrize(
    ("hosts", "inside", "says"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], "nccl", "NCCL's own ReduceScatter and AllGather (JAXCOLL_GPU_INSIDE=edges: edge"),
        ([0, 0, 0, 0, 1, 1, 1, 1], "edges", "edge by edge (JAXCOLL_GPU_INSIDE=edges)"),
        ([0] * 8, "nccl", "edge by edge (all ranks are on one host)"),
        (list(range(8)), "nccl", "nothing (no two ranks share a host)"),
    ],
    ids=["hosts", "edges", "one", "alone"],
)
def test_explain_says_what_runs_inside_a_host(
    hosts: list[int], inside: str, says: str, monkeypatch: pytest.MonkeyPatch
):
    (line,) = explained(monkeypatch, hosts, inside)
    assert line.startswith(f"inside a host: {says}")


def test_explain_of_another_schedule_says_nothing_of_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "present", lambda: True)
    with config.override(schedule={"*": "ring"}):
        text = jaxcoll.explain("psum", "4M")
    assert "layout pairs: " in text
    assert "inside a host" not in text


def test_explain_on_cpus_says_nothing_of_gpus():
    text = jaxcoll.explain("psum", "4M")
    assert "GPU" not in text
