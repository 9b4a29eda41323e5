"""Why this schedule: the cost model's table for one collective and size, as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxcoll import config
from jaxcoll.errors import UsageError
from jaxcoll.runtime import choice, gpu, sets
from jaxcoll.schedule import Kind, check

OPERATIONS = {
    "psum": Kind.ALL_REDUCE,
    "pmean": Kind.ALL_REDUCE,
    "pmax": Kind.ALL_REDUCE,
    "pmin": Kind.ALL_REDUCE,
    "all_gather": Kind.ALL_GATHER,
    "psum_scatter": Kind.REDUCE_SCATTER,
    "all_to_all": Kind.ALL_TO_ALL,
    "pbroadcast": Kind.BROADCAST,
}


def explain(operation: str, nbytes: int | str, devices: Sequence[Any] | None = None) -> str:
    """The schedules that jaxcoll considers for an operation, with predicted times, and which it takes.

    operation: "psum", "all_gather" and so on. nbytes: the larger of a rank's whole input and output, in bytes, or text
    such as "4M". devices: of the communicator, JAX devices or their ids, in the order of ranks; None: all devices.
    Starts jaxcoll in this process (and needs the other processes of the job to do so too). Raises UsageError for an
    unknown operation, a size that is none, and a JAXCOLL_SCHEDULE that can't do this.
    """
    from jaxcoll import runtime

    if operation not in OPERATIONS:
        raise UsageError(f"unknown operation {operation!r}; there are {', '.join(OPERATIONS)}")
    kind = OPERATIONS[operation]
    size = _size(nbytes)
    world = runtime.get_sets().world
    ids = [d for p in world.job.devices for d in p] if devices is None else [int(getattr(d, "id", d)) for d in devices]
    known = {d for p in world.job.devices for d in p}
    if not ids or not known.issuperset(ids) or len(set(ids)) < len(ids):
        raise UsageError(f"devices={ids}: name different devices of this job; their ids are {sorted(known)}")
    size_class = choice.size_class(size)
    low = choice.class_top(size_class - 1) + 1 if size_class else 0
    root, hosts = 0 if kind.rooted else None, world.hosts_of(ids)
    rows = choice.estimates(kind, len(ids), choice.class_bytes(size_class), world.speed, root, None, hosts)
    chosen = choice.best(rows)
    s = world.speed
    links = f"{_rate(s.beta)} between processes" if s.beta else "one process"
    lines = [
        f"{operation} of {config.format_size(size)} over {len(ids)} ranks: collective {kind.label}, "
        f"size class {size_class} ({low} to {choice.class_top(size_class)} bytes)",
        f"measured: {s.alpha * 1e6:.1f} us an exchange, {links}, "
        f"{_rate(s.copy_beta)} copied by one core; {s.local_ranks} ranks on the fullest host, {s.cores} cores",
        "reached by: " + ", ".join(_links(world, ids)),
    ]
    for row in rows:
        mark = "->" if row is chosen else "  "
        says = f"  not usable: {row.reason}" if row.seconds is None else f"{row.seconds * 1e6:>12.1f} us"
        lines.append(f"{mark} {row.name:<20}{says}")
    want = sets.wanted(kind, size, "none", root, None, None, False)
    forced = want.schedule if len(ids) > 1 else None  # one rank alone runs none
    if forced:
        with sets.naming_the_setting(want):
            if kind.rooted and (held := sets.root_in(forced)) is not None:
                want = dataclasses.replace(want, root=held)  # a call with that root is meant
            check(sets.override(want, len(ids), hosts))
    if gpu.present():
        lines += _on_gpus(world.settings, hosts, forced or chosen.name)
    lines.append(
        f"JAXCOLL_SCHEDULE asks for {forced}, which is used instead."
        if forced
        else "schedule= in the call, or JAXCOLL_SCHEDULE, takes another one."
    )
    return "\n".join(lines)


def _size(nbytes: int | str) -> int:
    try:
        size = config.parse_size(nbytes) if isinstance(nbytes, str) else int(nbytes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if size < 0:
        raise UsageError(f"{nbytes} bytes: a size can't be negative")
    return size


def _on_gpus(settings: config.Config, hosts: Sequence[int], schedule: str) -> list[str]:
    lines = [
        "on GPUs: these times are of the hosts' own links and cores, not of NCCL's; they rank the schedules, no more",
        f"layout {gpu.layout(settings)}",
    ]
    if schedule == "hierarchical":
        lines.append(f"inside a host: {gpu.inside(settings, hosts)}")
    return lines


def _rate(beta: float) -> str:
    return f"{1e-9 / beta:.2f} GB/s"


def _links(world: Any, ids: Sequence[int]) -> list[str]:
    names: dict[str, int] = {}
    for p, devices in enumerate(world.job.devices):
        n = len([d for d in devices if d in ids])
        if n:
            name = world.link_name(p)
            names[name] = names.get(name, 0) + n
    return [f"{name} ({n} ranks)" for name, n in names.items()]
