"""What all tests share. JAX reads its settings when it starts, so they are made here, before any test imports it."""

from __future__ import annotations

import os

import hypothesis
import pytest

DEVICES = 8

# How long one example takes says nothing on a machine that does other things, too.
hypothesis.settings.register_profile("jaxcoll", deadline=None)
hypothesis.settings.load_profile("jaxcoll")

os.environ["XLA_FLAGS"] = " ".join(
    [
        *(f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f),
        f"--xla_force_host_platform_device_count={DEVICES}",
        # jax.lax aborts the process when a rank is this late; on a busy machine the default 40 s are few.
        "--xla_cpu_collective_call_terminate_timeout_seconds=200",
    ]
)
# Up to jax 0.11.1, launches with jax.lax's collectives hang where the thread pool is no larger than the device count.
os.environ.setdefault("PJRT_NPROC", str(4 * DEVICES))
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        default=os.environ.get("JAXCOLL_TEST_FULL", "") == "1",
        help="run whole products of test cases where the default is a covering of all pairs (JAXCOLL_TEST_FULL=1)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of a product that runs only with --full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
