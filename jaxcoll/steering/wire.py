"""How the leader and the brain's process speak: messages of plain data as JSON, with byte strings behind it.

A message: u32 length of the JSON, the JSON, then all byte strings one after the other; where one stood, the JSON has
{"$bytes": its length}. Tuples arrive as lists. Nothing that arrives can be anything but data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

_LENGTH = struct.Struct("<I")
_MARK = "$bytes"


def pack(message: Sequence[Any]) -> bytes:
    """The message as bytes. TypeError for what is no plain data (None, bool, numbers, text, bytes, lists, dicts)."""
    parts: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            parts.append(value)
            return {_MARK: len(value)}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} is no plain data")

    text = json.dumps(message, default=plain, separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def unpack(data: bytes) -> list[Any]:
    """The message of these bytes. ValueError if they are none."""
    if len(data) < _LENGTH.size or len(data) < (at := _LENGTH.size + _LENGTH.unpack_from(data)[0]):
        raise ValueError(f"a message of {len(data)} bytes is cut off")

    def restore(value: Any) -> Any:  # dicts and lists keep the order in which `pack` went through them
        nonlocal at
        if isinstance(value, dict):
            fields = cast(Mapping[str, Any], value)
            if list(fields) == [_MARK]:
                begin, at = at, at + int(fields[_MARK])
                return data[begin:at]
            return {key: restore(item) for key, item in fields.items()}
        if isinstance(value, list):
            return [restore(item) for item in cast(Sequence[Any], value)]
        return value

    message = restore(json.loads(data[_LENGTH.size : at]))
    if at != len(data) or not isinstance(message, list):
        raise ValueError(f"a message of {len(data)} bytes holds {at} of them, or is no list")
    return cast("list[Any]", message)
