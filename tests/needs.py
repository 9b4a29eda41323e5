"""The one way for a test to be skipped: it names what it lacks, and the switch that turns the lack into a failure."""

from __future__ import annotations

import os

import pytest


def need(present: bool, what: str, switch: str) -> None:
    """Skip the test unless `present`; fail it where JAXCOLL_REQUIRE_<switch>=1 says that this lane must have it."""
    if present:
        return
    if os.environ.get(f"JAXCOLL_REQUIRE_{switch}") == "1":
        pytest.fail(f"JAXCOLL_REQUIRE_{switch}=1, but there is no {what}")
    pytest.skip(f"no {what} (JAXCOLL_REQUIRE_{switch}=1 makes this a failure)", allow_module_level=True)
