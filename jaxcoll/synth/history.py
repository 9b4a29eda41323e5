"""The warm-start data of tree packing in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.synth.forest import History
from jaxcoll.synth.trees import Tree

FORMAT = "jaxcoll-trees"
VERSION = 1


def warm_to_json(history: History) -> str:
    """Text that `warm_from_json` reads back. Cuts are hexadecimal bit masks, lowest bit node 0."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "nodes": list(history.nodes),
        "ranks": history.nranks,
        "rate": str(history.rate),
        "cuts": [f"{mask:x}" for mask in history.cuts],
        "splits": [[switch, before, after, amounts.tolist()] for switch, before, after, amounts in history.splits],
        "trees": [[tree.root, tree.count, tree.edges.ravel().tolist()] for tree in history.trees],
    }
    return json.dumps(data, separators=(",", ":"))


def warm_from_json(text: str, source: str = "<string>") -> History:
    """Reads it.

    Raises:
        UsageError: not such a file, or one that contradicts itself; the message names the file and the part.
    """
    return _history(_parsed(text, source), source)


def pair_to_json(pair: Sequence[History | None]) -> str:
    """The two phases of an all_reduce, for `pair_from_json`; null for one that left nothing."""
    return "[" + ",".join("null" if part is None else warm_to_json(part) for part in pair) + "]"


def pair_from_json(text: str, source: str = "<string>") -> tuple[History | None, History | None]:
    """Reads it. Raises UsageError as `warm_from_json` does."""
    parts = _parsed(text, source)
    if not isinstance(parts, list) or len(parts) != 2:
        raise UsageError(f"{source}: warm-start data of all_reduce is a list of two phases")
    first, second = (None if part is None else _history(part, source) for part in parts)
    return first, second


def _parsed(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source}, line {error.lineno}: not JSON: {error.msg}") from None
    except MALFORMED as error:
        raise UsageError(f"{source}: not warm-start data: {error}") from None


def _history(data: Any, source: str) -> History:
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UsageError(f"{source}: not warm-start data of tree packing (format {FORMAT!r}, version {VERSION})")
    try:
        history = History(
            tuple(str(node) for node in data["nodes"]),
            int(data["ranks"]),
            Fraction(data["rate"]),
            [int(mask, 16) for mask in data["cuts"]],
            [
                (
                    int(switch),
                    list(map(int, before)),
                    list(map(int, after)),
                    np.array(amounts, np.int64).reshape(len(before), len(after)),
                )
                for switch, before, after, amounts in data["splits"]
            ],
            [
                Tree(int(root), int(count), np.array(edges, np.int32).reshape(-1, 2))
                for root, count, edges in data["trees"]
            ],
        )
    except MALFORMED as error:
        raise UsageError(f"{source}: malformed warm-start data: {type(error).__name__}: {error}") from None
    _check(history, source)
    return history


def _check(history: History, source: str) -> None:
    ranks, nodes = history.nranks, len(history.nodes)
    if not 1 <= ranks <= nodes:
        raise UsageError(f"{source}: {ranks} ranks among {nodes} nodes")
    if any(mask >> nodes for mask in history.cuts):
        raise UsageError(f"{source}: a cut names nodes beyond the {nodes} that there are")
    for number, tree in enumerate(history.trees):
        seen = {tree.root}
        fine = tree.count > 0 and 0 <= tree.root < ranks and len(tree.edges) == ranks - 1
        for parent, child in tree.edges.tolist():
            fine = fine and parent in seen and child not in seen and 0 <= child < ranks
            seen.add(child)
        if not fine:
            raise UsageError(f"{source}: tree {number} is not a spanning tree out of rank {tree.root}")
    if sum(tree.count for tree in history.trees) > np.iinfo(np.int64).max:
        raise UsageError(f"{source}: more trees than a number of 64 bits can count")
    for number, (switch, before, after, _) in enumerate(history.splits):
        if not all(0 <= node < nodes for node in (switch, *before, *after)):
            raise UsageError(f"{source}: split {number} names nodes beyond the {nodes} that there are")


def load(path: str | Path) -> History:
    """From a file."""
    return warm_from_json(_text(path), str(path))


def load_pair(path: str | Path) -> tuple[History | None, History | None]:
    """The two phases of an all_reduce, from a file."""
    return pair_from_json(_text(path), str(path))


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read as warm-start data: {error}") from None
