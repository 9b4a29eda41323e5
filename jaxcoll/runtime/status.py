"""`jaxcoll.tune()` and `jaxcoll.status()`."""

from __future__ import annotations

from typing import Any

import jaxcoll.runtime as runtime
from jaxcoll import config
from jaxcoll.runtime import gpu, loop, world
from jaxcoll.steering import policy as policies
from jaxcoll.version import __version__


def tune(policy: str = "jaxcoll", **params: Any) -> None:
    """Tunes this job from now on, while it runs: nothing is compiled again, nothing pauses.

    Every process of the job must call it, with the same arguments; JAXCOLL_TUNER=on does the same from outside.

    Args:
        policy: "jaxcoll" (the default: ranks and schedules move), "react-paper" (ranks only, by the rules of the REACT
            paper), or "shuffle" (at random every `every` epochs, to test a program against swaps).
        params: `seed`; `free=False` keeps the schedule and moves ranks only; parameters of Table 3 of the REACT paper
            (`B`, `delta1`, ...) and of the default policy (`jaxcoll.tuner.ChoiceParams`) by their names.

    Raises UsageError for an unknown policy or parameter, or if the tuner runs already.
    """
    # A wrong policy is refused before the other processes are waited for.
    policies.make(policy, **params)
    sets = runtime.get_sets()
    runtime.register()
    loop.start(world.get(), sets, policy, **params)


def status() -> dict[str, Any]:
    """What jaxcoll does in this process, as plain data (numbers, texts, lists, dicts).

    "gpu" names the communicators whose GPU side has failed ("devices", "failed": why) as soon as that is known: XLA
    hears of it at the next call, since a GPU handler returns long before its work is done.

    "tuner" holds its `policy`, `state`, and how many `swaps` and `reverts` are done; in process 0, which leads, also
    "sets" (one a communicator, collective and size class, with its times) and the last "decisions" with their reasons,
    "expected" (the time after over the time before) and, once a batch has judged them, "measured" and "kept".
    """
    out: dict[str, Any] = {"version": __version__, "process": None, "processes": None, "links": {}, "sets": []}
    out["gpu"] = []
    out["tuner"] = {"policy": None, "state": "off", "leads": False, "swaps": 0, "reverts": 0}
    w = world.running()
    if w is None:
        return out
    out |= {"process": w.job.me, "processes": w.job.processes}
    out["links"] = {str(p): w.link_name(p) for p in range(w.job.processes)}
    out["sets"] = [
        {
            "kind": info.want.kind.label,
            "size_class": info.want.size_class,
            "ranks": len(info.devices),
            "schedules": [s.name for s in info.schedules],
            "chosen": info.schedules[info.chosen].name,
        }
        for info in runtime.known_sets()
    ]
    if gpu.running() is not None:
        out["gpu"] = gpu.failures(w, dict.fromkeys(info.devices for info in runtime.known_sets()))
    running = loop.current()
    if running is not None:
        out["tuner"] = running.status()
    elif config.current().tuner != "off":
        out["tuner"]["state"] = "stopped"
    return out
