"""Phase 3: spanning trees out of every rank, packed into the logical links.

Tree packing by Edmonds' theorem: with `pending` trees still to come from every rank, an edge may be taken as long as
every cut X keeps capacity >= the pending trees that have not entered X. The textbook way asks for a maximum flow per
edge. Here trees grow breadth first against the *known* cuts, a few machine words of bit mask per edge. Only when a
tree gets stuck, which by the theorem means that some unknown cut is overdrawn, do flows tell which; it joins the
pool, and the trees from the one that overdrew it onwards are grown again. Each such round adds a cut, so it ends. A
packing that is complete needs no proof: it fits the capacities.

History (MCCL 4.3): an order may carry the edges of an earlier tree. They are tried first, so what is still valid stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth import native
from jaxcoll.synth.cuts import CutPool, pack_masks
from jaxcoll.synth.packer import Packer, stuck_message
from jaxcoll.synth.rate import Tick

Edges = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Tree:
    """`count` equal spanning trees out of `root`. edges: int32[ranks - 1, 2] (parent, child), parents first."""

    root: int
    count: int
    edges: Edges


def depths(trees: Sequence[Tree], ranks: int) -> NDArray[np.int64]:
    """Hops from the root, int64 [trees, ranks].

    Every rank points to its parent; pointers are doubled until all have arrived at their roots.
    """
    roots = np.array([tree.root for tree in trees], np.int64)
    base = (np.arange(len(trees)) * ranks)[:, None]
    parent = np.repeat(base + roots[:, None], ranks, axis=1)
    if ranks > 1:
        edges = np.stack([tree.edges for tree in trees]).astype(np.int64)
        np.put(parent, base + edges[:, :, 1], base + edges[:, :, 0])
    depth = np.ones((len(trees), ranks), np.int64)
    np.put(depth, base + roots[:, None], 0)
    further = np.take(depth, parent)
    while further.any():
        depth += further
        parent = np.take(parent, parent)
        further = np.take(depth, parent)
    return depth


@dataclass(frozen=True, eq=False)
class Order:
    """A wish: `count` trees out of `root`, along `hint` (edges of an earlier tree) where that is still possible."""

    root: int
    count: int
    hint: Edges = field(default_factory=lambda: np.zeros((0, 2), np.int32))


@dataclass(frozen=True)
class Packed:
    """Trees in the sequence of the orders, and what it took."""

    trees: list[Tree]
    checks: int
    rollbacks: int
    regrown: int


def pack(
    ranks: int,
    out: Sequence[dict[int, int]],
    pool: CutPool,
    orders: Sequence[Order],
    tick: Tick,
    max_depth: int | None = None,
) -> Packed:
    """Packs all orders into the links `out[tail][head]` = trees carried. Cuts learnt are added to `pool` (of ranks).

    Raises:
        SynthesisError: the orders don't fit; with `max_depth`, no tree of that depth is left.
    """
    capacity = np.zeros((ranks, ranks), np.int64)
    for tail, heads in enumerate(out[:ranks]):
        for head, amount in heads.items():
            capacity[tail, head] = amount
    library = native.load()
    if library is None:
        packer = Packer(ranks, capacity, pool, tick, max_depth)
        grown = packer.run([(order.root, order.count, order.hint.tolist()) for order in orders])
        trees = [Tree(root, count, np.array(edges, np.int32).reshape(-1, 2)) for root, count, edges in grown]
        return Packed(trees, packer.checks, packer.rollbacks, packer.regrown)
    tails, heads_ = np.nonzero(capacity)
    hints = np.concatenate([order.hint for order in orders]) if orders else np.zeros((0, 2), np.int32)
    result = native.pack(
        library,
        ranks,
        (tails.astype(np.int32), heads_.astype(np.int32), capacity[tails, heads_]),
        pack_masks(pool.masks, ranks),
        -1 if max_depth is None else max_depth,
        (
            np.array([order.root for order in orders], np.int32),
            np.array([order.count for order in orders], np.int64),
            np.cumsum([0, *(len(order.hint) for order in orders)], dtype=np.int32),
            hints[:, 0],
            hints[:, 1],
        ),
        tick,
    )
    for row in result.cuts[len(pool.masks) :]:
        pool.add(int.from_bytes(row.tobytes(), "little"))
    if result.stuck >= 0:
        raise SynthesisError(stuck_message(max_depth))
    made = zip(result.root.tolist(), result.count.tolist(), result.edges, strict=True)
    return Packed([Tree(*tree) for tree in made], result.checks, result.rollbacks, result.regrown)
