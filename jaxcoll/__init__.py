"""jaxcoll: a collective backend for JAX that notices slow links and moves out of their way.

    jaxcoll.psum(x, "i")        # instead of jax.lax.psum, inside of jax.shard_map
    jaxcoll.enable()            # or: the jax.lax collectives of the whole program

Importing this package imports neither JAX nor the native library; the first use of an operation does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxcoll import config as config
    from jaxcoll import errors as errors
    from jaxcoll import launch as launch
    from jaxcoll import schedule as schedule
    from jaxcoll.ops import all_gather as all_gather
    from jaxcoll.ops import all_to_all as all_to_all
    from jaxcoll.ops import pbroadcast as pbroadcast
    from jaxcoll.ops import pmax as pmax
    from jaxcoll.ops import pmean as pmean
    from jaxcoll.ops import pmin as pmin
    from jaxcoll.ops import ppermute as ppermute
    from jaxcoll.ops import psum as psum
    from jaxcoll.ops import psum_scatter as psum_scatter
    from jaxcoll.routing import disable as disable
    from jaxcoll.routing import enable as enable
    from jaxcoll.routing import is_enabled as is_enabled
    from jaxcoll.runtime import init as init
    from jaxcoll.runtime.advice import explain as explain
    from jaxcoll.runtime.status import status as status
    from jaxcoll.runtime.status import tune as tune

_MODULES = ("config", "errors", "launch", "schedule")
_OPS = ("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast")
_HOME = {
    **{name: "jaxcoll.ops" for name in _OPS},
    **{name: "jaxcoll.routing" for name in ("enable", "disable", "is_enabled")},
    **{name: "jaxcoll.runtime.status" for name in ("tune", "status")},
    "init": "jaxcoll.runtime",
    "explain": "jaxcoll.runtime.advice",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"jaxcoll.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxcoll' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
