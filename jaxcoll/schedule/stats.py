"""How much a schedule sends: bytes per edge, and what each rank sends and receives in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import IntArray, Schedule
from jaxcoll.schedule.table import Table


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """int64 arrays: per edge (in the order of `Schedule.edges`) and [step][rank]. Empty edges count in no degree."""

    edge_bytes: IntArray
    edge_src: IntArray  # ranks
    edge_dst: IntArray
    send_degree: IntArray
    recv_degree: IntArray
    send_bytes: IntArray
    recv_bytes: IntArray
    edge_degree: IntArray  # the larger of the sender's out-degree and the receiver's in-degree (REACT 5.2)


def stats(schedule: Schedule, table: Table | None, nbytes: int, itemsize: int = 4) -> Stats:
    """Sizes and degrees for blocks of `nbytes` bytes (the whole input for all_reduce, one rank's part for all_gather).

    `itemsize`: bytes of one element, between which chunks are cut. `table`: None is the identity.
    """
    if itemsize < 1 or nbytes < 0 or nbytes % itemsize:
        raise ScheduleError(f"{nbytes} bytes don't make whole elements of {itemsize} bytes")
    table = table or Table.identity(schedule)
    flows, nedges = schedule.flows, len(schedule.edges)
    lengths = np.diff(schedule.ranges(nbytes // itemsize), axis=1)[:, 0] * itemsize
    edge_bytes = np.zeros(nedges, dtype=np.int64)
    np.add.at(edge_bytes, flows.edge, lengths[flows.chunk])

    ends = np.array([(e.step, e.src, e.dst) for e in schedule.edges], dtype=np.int64).reshape(-1, 3)
    step, graph = ends[:, 0], schedule.edge_graph
    src = table.vertex[graph, step, ends[:, 1]].astype(np.int64)
    dst = table.vertex[graph, step + 1, ends[:, 2]].astype(np.int64)

    def spread(rank: IntArray, value: IntArray) -> IntArray:
        out = np.zeros((schedule.steps, schedule.nranks), dtype=np.int64)
        np.add.at(out, (step, rank), value)
        return out

    some = (edge_bytes > 0).astype(np.int64)
    send_degree, recv_degree = spread(src, some), spread(dst, some)
    degree = np.maximum(send_degree[step, src], recv_degree[step, dst])
    sent, received = spread(src, edge_bytes), spread(dst, edge_bytes)
    return Stats(edge_bytes, src, dst, send_degree, recv_degree, sent, received, degree)
