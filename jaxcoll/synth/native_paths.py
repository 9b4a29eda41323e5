"""The native half of pricing (ffi/src/flow/paths.h): shortest-path trees, the same as those of `pricing` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxcoll.errors import SynthesisError
from jaxcoll.flowlib import Library, as_double, as_int32, as_int64
from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.path_trees import Int32Array, Noise, Trees


class NativeNet:
    """A network as the library keeps it."""

    def __init__(self, library: Library, net: Net):
        self._library, self._net = library, net
        tail, head = as_int32(library, net.tail), as_int32(library, net.head)
        handle = library.lib.jc_paths_new(net.ranks, net.nodes, net.arcs, tail, head)
        self._handle = _owned(library, handle, library.lib.jc_paths_free)

    def grow(
        self,
        steps: int,
        weight: FloatArray,
        sources: IntArray,
        noise: Noise | None = None,
        want: tuple[IntArray, IntArray] | None = None,
    ) -> NativeForest:
        """Trees; `want`: (tree, node) pairs, the only ones whose paths will be asked for, with the trees in order."""
        lib, null = self._library, self._library.ffi.NULL
        jitter, wanted = [null] * 3, [null] * 2
        if noise is not None:
            jitter = [as_double(lib, noise.scale), as_double(lib, noise.table), as_int64(lib, noise.offset)]
        if want is not None:
            start = np.searchsorted(want[0], np.arange(len(sources) + 1))
            wanted = [as_int64(lib, start), as_int32(lib, want[1])]
        handle = lib.lib.jc_paths_grow(
            self._handle, steps, as_double(lib, weight), len(sources), as_int32(lib, sources), *jitter, *wanted
        )
        return NativeForest(lib, self._net, sources, handle)


class NativeForest:
    """`pricing.Forest`, grown by the library."""

    def __init__(self, library: Library, net: Net, sources: IntArray, handle: Any):
        self.net, self.sources = net, sources
        self._library = library
        self._handle = _owned(library, handle, library.lib.jc_paths_trees_free)

    @property
    def dist(self) -> FloatArray:
        out = np.empty((len(self.sources), self.net.nodes))
        self._library.lib.jc_paths_dist(self._handle, as_double(self._library, out))
        return np.ascontiguousarray(out.T)

    def total(self) -> FloatArray:
        return self.dist[: self.net.ranks].sum(axis=0)

    def loads(self) -> Trees:
        lib = self._library
        count = lib.lib.jc_paths_loads(self._handle)
        if count < 0:
            raise SynthesisError("too little memory for the trees' loads")
        start, arc, units = np.empty(len(self.sources) + 1, np.int64), np.empty(count, np.int64), np.empty(count)
        lib.lib.jc_paths_loads_take(self._handle, as_int64(lib, start), as_int64(lib, arc), as_double(lib, units))
        return Trees(self.sources, start, arc, units)

    def paths(self, column: IntArray, dest: IntArray) -> Int32Array:
        lib = self._library
        ends = len(column), as_int64(lib, column), as_int64(lib, dest)
        width = lib.lib.jc_paths_longest(self._handle, *ends)
        if width < 0:
            raise SynthesisError("the native pricer refused its paths: a tree or node out of range")
        path = np.full((len(column), width), -1, np.int32)
        lib.lib.jc_paths_take(self._handle, *ends, width, as_int32(lib, path))
        return path


def _owned(library: Library, handle: Any, free: Any) -> Any:
    if handle == library.ffi.NULL:
        raise SynthesisError("the native pricer refused its arguments (out of range, or too little memory)")
    return library.ffi.gc(handle, free)
