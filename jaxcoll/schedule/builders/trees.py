"""Trees: NCCL's double binary tree, and binomial trees."""

from __future__ import annotations

from dataclasses import dataclass

from jaxcoll.schedule.builders.registry import Builder, Request
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Edge, Kind, Op, Schedule


@dataclass(frozen=True)
class Tree:
    """A rooted tree over positions: `children[p]` in the order in which p combines them."""

    root: int
    children: tuple[tuple[int, ...], ...]

    def heights(self) -> list[int]:
        """For each position the number of edges down to its deepest leaf."""
        heights = [0] * len(self.children)
        for p in reversed(self.preorder()):
            heights[p] = max((heights[c] + 1 for c in self.children[p]), default=0)
        return heights

    def depths(self) -> list[int]:
        """For each position the number of edges up to the root."""
        depths = [0] * len(self.children)
        for p in self.preorder():
            for c in self.children[p]:
                depths[c] = depths[p] + 1
        return depths

    def preorder(self) -> list[int]:
        order = [self.root]
        for p in order:  # grows while it is read: breadth first, parents before children
            order.extend(self.children[p])
        return order


def binary_tree(n: int) -> Tree:
    """NCCL's binary tree (`ncclGetBtree`): a position's level is its lowest set bit; odd positions are the leaves."""
    children: list[list[int]] = [[] for _ in range(n)]
    for p in range(1, n):
        bit = p & -p
        up = (p ^ bit) | (bit << 1)
        children[up if up < n else p ^ bit].append(p)
    return Tree(0, tuple(tuple(c) for c in children))


def double_tree(n: int) -> tuple[Tree, Tree]:
    """NCCL's pair of trees (`ncclGetDtree`): the second mirrors the first if n is even, and is shifted by one if odd.

    Inner positions of one tree are leaves of the other (but for one position when n is odd).
    """
    first = binary_tree(n)

    def moved(p: int) -> int:
        return n - 1 - p if n % 2 == 0 else (p + 1) % n

    children: list[tuple[int, ...]] = [()] * n
    for p in range(n):
        children[moved(p)] = tuple(moved(c) for c in first.children[p])
    return first, Tree(moved(0), tuple(children))


def tree_edges(tree: Tree, chunks: tuple[int, ...], first_step: int = 0) -> tuple[list[Edge], list[Edge]]:
    """Reduce and broadcast edges of a tree, the broadcast starting where the reduce ends.

    All children of a position send in one step, the one in which its deepest child is ready: so its edges lie
    between consecutive steps (REACT, Fig. 2), and its reduction order doesn't depend on timing.
    """
    heights, depths = tree.heights(), tree.depths()
    up: list[Edge] = []
    down: list[Edge] = []
    for p, children in enumerate(tree.children):
        for c in children:
            up.append(Edge(first_step + heights[p] - 1, c, p, Op.REDUCE, chunks))
            down.append(Edge(first_step + heights[tree.root] + depths[p], p, c, Op.COPY, chunks))
    return up, down


def _dual_tree(request: Request) -> Schedule:
    trees = double_tree(request.nranks)
    graphs: list[ChunkGraph] = []
    for t, tree in enumerate(trees):
        up, down = tree_edges(tree, (t,))
        if up:
            graphs.append(ChunkGraph((*up, *down), f"tree{t}"))
    height = max(max(tree.heights()) for tree in trees)
    chunks = (Chunk(None, None), Chunk(None, None))
    return Schedule(request.name, request.collective, 2 * height, chunks, tuple(graphs), request.pipeline)


def _binomial_edges(n: int, root: int, op: Op, first_step: int) -> list[Edge]:
    # One edge a position and step: v meets v ^ bit. Up, the bits go from low to high; down, from high to low.
    bits = [1 << s for s in range((n - 1).bit_length())]
    edges: list[Edge] = []
    for s, bit in enumerate(bits if op is Op.REDUCE else reversed(bits)):
        for v in range(bit, n, 2 * bit):
            child, parent = (v + root) % n, (v - bit + root) % n
            src, dst = (child, parent) if op is Op.REDUCE else (parent, child)
            edges.append(Edge(first_step + s, src, dst, op, (0,)))
    return edges


def _binomial(request: Request) -> Schedule:
    n, kind = request.nranks, request.kind
    rounds = (n - 1).bit_length()
    edges: list[Edge] = []
    if kind.reduces:
        edges += _binomial_edges(n, request.root, Op.REDUCE, 0)
    if kind is not Kind.REDUCE:
        edges += _binomial_edges(n, request.root, Op.COPY, rounds if kind.reduces else 0)
    steps = rounds * (2 if kind is Kind.ALL_REDUCE else 1)
    graphs = (ChunkGraph(tuple(edges), "tree"),) if edges else ()
    return Schedule(request.name, request.collective, steps, (Chunk(None, None),), graphs, request.pipeline)


BUILDERS = (
    Builder(
        "dual_tree",
        (Kind.ALL_REDUCE,),
        _dual_tree,
        "NCCL's double binary tree: two trees, each for half of the data; few steps at full bandwidth when pipelined",
    ),
    Builder(
        "binomial",
        (Kind.BROADCAST, Kind.REDUCE, Kind.ALL_REDUCE),
        _binomial,
        "one binomial tree; fewest steps for a small broadcast or reduce",
    ),
)
