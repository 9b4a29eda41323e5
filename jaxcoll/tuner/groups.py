"""Which ranks belong together, told from which pairs of them are slow and which are fast."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Labels = tuple[int, ...]
Pairs = frozenset[tuple[int, int]]


def groupings(n: int, apart: Pairs, together: Pairs) -> list[Labels]:
    """Labels by rank: only what is known to be fast put together; and all put together that isn't known to be apart."""
    parent = list(range(n))

    def find(r: int) -> int:
        while parent[r] != r:
            r = parent[r]
        return r

    for a, b in sorted(together):
        parent[find(a)] = find(b)
    roots = [find(r) for r in range(n)]
    conflicts: dict[int, set[int]] = {root: set() for root in roots}
    for a, b in apart:
        conflicts[roots[a]].add(roots[b])
        conflicts[roots[b]].add(roots[a])
    if len(apart) < 2 or any(root in others for root, others in conflicts.items()):
        return []
    colour: dict[int, int] = {}
    for root in sorted(conflicts, key=lambda r: (-roots.count(r), r)):
        # The largest groups choose first, the others avoid whom they conflict with.
        taken = {colour[other] for other in conflicts[root] if other in colour}
        colour[root] = next(c for c in range(n) if c not in taken)
    fine, coarse = tuple(roots), tuple(colour[root] for root in roots)
    return [_dense(labels) for labels in dict.fromkeys([coarse, fine]) if len(set(labels)) > 1]


def boundary(values: Floats, apart: float) -> float | None:
    """The boundary between the fast and the slow: where two groups are tightest. None if they don't lie `apart`."""
    ordered, n = np.sort(values), len(values)
    if n < 4:
        return None
    # The squares inside two groups are least where those of their sums, over their numbers, are most.
    low, count = np.cumsum(ordered)[:-1], np.arange(1, n)
    split = 1 + int(np.argmax(low**2 / count + (ordered.sum() - low) ** 2 / (n - count)))
    fast, slow = float(np.median(ordered[:split])), float(np.median(ordered[split:]))
    return (fast + slow) / 2 if slow - fast > apart else None


def halves(pull: Floats, directed: bool = False) -> list[Labels]:
    """Two groups with the most pull, by (src, dst), between them, less the rest; `directed`: from group 0 to group 1.

    Each rank in turn begins alone; then the rank whose move helps most changes sides, until none does.
    """
    n, found = len(pull), dict[Labels, float]()
    for first in range(n):
        for alone in (True, False) if directed else (True,):
            out = np.full(n, not alone)
            out[first] = alone
            for _ in range(2 * n):
                gain = _gains(pull, out, directed)
                best = int(np.argmax(gain))
                if gain[best] <= 1e-9:
                    break
                out[best] = not out[best]
            labels = tuple((~out).astype(int).tolist()) if directed else _dense(tuple(out.astype(int).tolist()))
            found[labels] = _between(pull, out, directed)
    most = max(found.values())
    return [labels for labels, value in found.items() if value >= most - 1e-9 and len(set(labels)) > 1][:2]


def _between(pull: Floats, out: Bools, directed: bool) -> float:
    """The pull of flows that leave the ranks `out`, and of those that enter them unless `directed`."""
    return float(pull[out][:, ~out].sum() + (0.0 if directed else pull[~out][:, out].sum()))


def _gains(pull: Floats, out: Bools, directed: bool) -> Floats:
    """What moving each rank to the other side would add to `_between`."""
    leave = np.where(out, -1.0, 1.0) * (pull @ ~out - pull.T @ out)
    enter = np.where(out, 1.0, -1.0) * (pull @ out - pull.T @ ~out)
    return leave if directed else leave + enter


def _dense(labels: Labels) -> Labels:
    names = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return tuple(names[label] for label in labels)
