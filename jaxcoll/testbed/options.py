"""Options that several commands of the testbed share, and the layout that they ask for."""

from __future__ import annotations

import argparse

from jaxcoll import config
from jaxcoll.errors import UsageError
from jaxcoll.testbed import layout
from jaxcoll.testbed.flows import MOST_CONNECTIONS
from jaxcoll.testbed.net import Direction

_WIDTH = 4


def rate(text: str) -> float:
    """A link's rate in bits per second."""
    try:
        return layout.parse_rate(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """Bytes, as in 4M."""
    try:
        return config.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, comma separated: background flows."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers, comma separated") from None
    if min(found) < 0 or max(found) > layout.MOST_STATIONS // 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be from 0 to {layout.MOST_STATIONS // 2}")
    return found


def from_one(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def from_zero(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 0 or more")
    return int(text)


def connections(text: str) -> int:
    """TCP connections of a background flow."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_CONNECTIONS:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 to {MOST_CONNECTIONS}")
    return int(text)


def network_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `make_layout` reads."""
    add = parser.add_argument
    add("--hosts", type=from_one, default=8, help="hosts for ranks (8)")
    add("--ranks-per-host", type=from_one, default=1, help="rank processes on each host (1)")
    add("--topology", choices=("star", "racks", "spines"), default="star", help="how they are wired (star)")
    add("--link", type=rate, default=200e6, help="rate of each host's link, both ways (200Mbit)")
    add("--spine", type=rate, help="rate of the link between racks (twice --link), or of a leaf to a spine (--link)")
    add("--width", type=from_one, help=f"number of spines ({_WIDTH})")
    add("--fair", choices=("peer", "none"), default="peer", help="peer: equal shares a peer; none: connections compete")
    add("--congestion", default="cubic", help="TCP's congestion control in the data network (cubic)")
    add("--name", help="name of this testbed, part of its namespaces' names (made from the process id)")


def width(args: argparse.Namespace) -> int:
    """The number of spines. UsageError where one is given for a topology without."""
    if args.width is not None and args.topology != "spines":
        raise UsageError(f"--width is the number of spines: it needs --topology spines, not {args.topology}.")
    return args.width or _WIDTH


def make_layout(args: argparse.Namespace, outsiders: int) -> layout.Layout:
    """The layout that the options ask for. UsageError for a link or a number that its topology doesn't have."""
    fair, spines = args.fair == "peer", width(args)
    if args.spine is not None and args.topology == "star":
        raise UsageError("--spine is the rate of links that a star doesn't have: it needs --topology racks or spines.")
    if args.topology == "star":
        return layout.star(args.hosts, outsiders, args.link, fair=fair)
    if args.topology == "racks":
        return layout.racks(args.hosts, outsiders, args.link, args.spine, fair=fair)
    return layout.spines(args.hosts, outsiders, args.link, args.spine, width=spines, fair=fair)


def late(text: str) -> tuple[int, float]:
    """(rank, seconds) in RANK:TIME, such as 3:50ms."""
    rank, _, time = text.partition(":")
    try:
        return int(rank), float(config.parse(config.PREFIX + "TIMEOUT", time))
    except (ValueError, UsageError):
        raise argparse.ArgumentTypeError(f"{text!r} must be a rank and a time of 10 ms or more: 3:50ms") from None


def slow(text: str) -> tuple[str, Direction, float]:
    """(link, direction, bits per second) in LINK:DIRECTION:RATE, such as h3:up:50Mbit."""
    match text.split(":"):
        case [link, ("up" | "down" | "both") as way, bits]:
            return link, way, rate(bits)
        case _:
            raise argparse.ArgumentTypeError(f"{text!r} must be a link, up, down or both, and a rate: h3:up:50Mbit")


def rounds(text: str) -> tuple[float, float, int]:
    """(seconds on, seconds off, times) in ON:OFF:TIMES."""
    try:
        on, off, times = text.split(":")
        return float(on), float(off), int(times)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be seconds on, seconds off, and how often: 60:30:3") from None
