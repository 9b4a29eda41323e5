"""What the leader and the brain say to each other arrives as it was said."""

from __future__ import annotations

import pytest

from jaxcoll.steering import wire


def test_a_message_arrives_with_its_bytes_in_place():
    message = ["set", [1, 2], {"blobs": [b"abc", b"", b"\x00\xff"], "rate": 1.5, "none": None}, b"tail", "text"]
    assert wire.unpack(wire.pack(message)) == message


def test_what_is_no_plain_data_is_refused_by_the_sender():
    with pytest.raises(TypeError, match="set is no plain data"):
        wire.pack(["x", {1, 2}])


@pytest.mark.parametrize("cut", [0, 3, 5, 20])
def test_a_cut_message_is_refused(cut: int):
    with pytest.raises(ValueError, match="message of"):
        wire.unpack(wire.pack(["records", b"0123456789"])[:cut])
