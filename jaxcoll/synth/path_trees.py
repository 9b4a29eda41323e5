"""What pricing gives and takes: trees as sparse arc loads, and the noise that tells equal paths apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxcoll.synth.alltoall_net import FloatArray, IntArray

Int32Array = NDArray[np.int32]

SPARE = 4096
"""Entries of a noise table beyond one an arc: as many shifts of it can be told apart."""


@dataclass(frozen=True)
class Noise:
    """Arc a costs tree i `scale[a] * table[offset[i] + a]` more: `scale` float64 [arcs], `table` float64
    [arcs + SPARE], in 0..1, `offset` int64 [trees], in 0..SPARE."""

    scale: FloatArray
    table: FloatArray
    offset: IntArray

    def cost(self, trees: slice) -> FloatArray:
        """The surcharges, float64 [arcs, trees]."""
        at = self.offset[trees][None, :] + np.arange(len(self.scale))[:, None]
        return self.scale[:, None] * self.table[at]


@dataclass(frozen=True)
class Trees:
    """Sparse arc loads of k trees: tree i is rooted at rank `source[i]` and puts `units[j]` on arc `arc[j]`, start[i]
    <= j < start[i + 1]."""

    source: IntArray
    start: IntArray
    arc: IntArray
    units: FloatArray

    @staticmethod
    def from_keys(source: IntArray, arcs: int, key: IntArray, units: FloatArray) -> Trees:
        """From entries with key = tree * arcs + arc; equal keys add up."""
        key, inverse = np.unique(key, return_inverse=True)
        tree = key // max(arcs, 1)
        start = np.searchsorted(tree, np.arange(len(source) + 1))
        return Trees(source, start, key - tree * arcs, np.asarray(np.bincount(inverse, units, len(key)), np.float64))

    @staticmethod
    def join(parts: Sequence[Trees]) -> Trees:
        """All trees of `parts`, in order."""
        shift = np.cumsum([0, *(len(p.arc) for p in parts)])
        starts = [p.start[:-1] + s for p, s in zip(parts, shift, strict=False)]
        return Trees(
            np.concatenate([p.source for p in parts]),
            np.concatenate([*starts, shift[-1:]]),
            np.concatenate([p.arc for p in parts]),
            np.concatenate([p.units for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def tree(self) -> IntArray:
        """The tree of every entry, int64 [entries]."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    def take(self, keep: IntArray) -> Trees:
        """The trees with the numbers `keep`."""
        size = np.diff(self.start)[keep]
        start = np.concatenate([[0], np.cumsum(size)])
        entry = np.arange(start[-1]) - np.repeat(start[:-1], size) + np.repeat(self.start[keep], size)
        return Trees(self.source[keep], start, self.arc[entry], self.units[entry])

    def cost(self, weight: FloatArray) -> FloatArray:
        """Sum of units times weight of every tree, float64 [k]."""
        return np.asarray(np.bincount(self.tree, self.units * weight[self.arc], len(self)), np.float64)
