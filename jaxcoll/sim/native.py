"""The native half of the fluid model (ffi/src/flow/fluid.h), bound with cffi."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxcoll import flowlib

CDEF = """
typedef struct jc_fluid {
  int32_t jobs, hops, timed;
  const int64_t *edge_start, *dep_start, *stranger_start, *resource_start;
  const int64_t* path;
  const double *capacity, *lag, *size, *alpha, *gate;
  const int64_t *connection, *child, *parent;
  const double *stranger_weight, *stranger_cap;
  double *ready, *start, *end, *busy;
} jc_fluid;
int32_t jc_fluid_run(const jc_fluid* jobs);
"""

_SIZES = ("jobs", "hops", "timed")
_DOUBLES = (
    "capacity", "lag", "size", "alpha", "gate", "stranger_weight", "stranger_cap", "ready", "start", "end", "busy",
)  # fmt: skip


def run(**fields: Any) -> int | None:
    """Fills the arrays ready, start, end and busy [edges], seconds, which must be float64 and contiguous.

    Fields, their shapes and units are those of jc_fluid (ffi/src/flow/fluid.h). Returns jc_fluid_run's status, or None
    where there is no library.
    """
    for name in ("ready", "start", "end", "busy"):  # of any other array a copy would be filled, and lost
        assert fields[name].dtype == np.float64, name
        assert fields[name].flags.c_contiguous, name
    found = flowlib.load(CDEF)
    if found is None:
        return None
    views = {
        name: value if name in _SIZES else (flowlib.as_double if name in _DOUBLES else flowlib.as_int64)(found, value)
        for name, value in fields.items()
    }
    return found.lib.jc_fluid_run(found.ffi.new("jc_fluid*", views))
