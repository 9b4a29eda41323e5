"""Bytes are never trusted: what the native reader accepts is what the Python verifier accepts, whatever the bytes."""

from __future__ import annotations

import random
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxcoll.errors import ScheduleError
from jaxcoll.runtime.native import load
from jaxcoll.schedule import (
    Chunk,
    ChunkGraph,
    Collective,
    Edge,
    Kind,
    Op,
    Schedule,
    Table,
    build,
    decode,
    encode,
    valid,
)

from . import cases
from .harness import Cluster, within

NATIVE = load()
MOST_RANKS = 64  # beyond it the Python verifier's arrays are huge; such mutations are valid only as empty permutations
MOST_STEPS = 500  # the Python verifier takes long for each


def native_accepts(program: bytes, table: bytes = b"") -> bool:
    """jc_program_check; a refusal must say why."""
    buffer = NATIVE.buffer
    if NATIVE.lib.jc_program_check(buffer(program), len(program), buffer(table), len(table)) == 0:
        return True
    assert NATIVE.text(NATIVE.lib.jc_last_error())
    return False


def python_accepts(program: bytes, table: bytes = b"") -> bool | None:
    """The Python verifier's verdict; None if it would take long."""
    try:
        schedule = decode(program)
        if schedule.nranks > MOST_RANKS:
            return schedule.kind is Kind.PERMUTE and not schedule.chunks and not table
        if schedule.steps > MOST_STEPS:
            return None
        return valid(schedule, Table.from_bytes(table) if table else None)
    except ScheduleError:
        return False


def verdict(program: bytes, table: bytes = b"") -> bool:
    """What both say."""
    ours, theirs = native_accepts(program, table), python_accepts(program, table)
    assert theirs in (ours, None), f"native says {ours}, Python says {theirs}: {program.hex()} {table.hex()}"
    return ours


def sealed(data: bytes) -> bytes:
    """The bytes with a length and checksum that fit, so that a mutation gets past the frame."""
    if len(data) < 16:
        return data
    return data[:8] + struct.pack("<II", len(data), zlib.crc32(data[16:])) + data[16:]


def samples() -> list[bytes]:
    made = [encode(s) for n in (1, 2, 3, 4) for s in cases.schedules(n, pipeline=1 + n % 2)]
    weightless = Schedule(
        "weightless",
        Collective(Kind.BROADCAST, 2, 0),
        1,
        (Chunk(None, None), Chunk(None, None, 0)),
        (ChunkGraph((Edge(0, 0, 1, Op.COPY, (0,)),)), ChunkGraph((Edge(0, 0, 1, Op.COPY, (1,)),))),
    )
    return [*made, encode(weightless)]


SAMPLES = samples()
NAMES = [b"", b"ring", b"\xff", b"\xed\xa0\x80", "ü€𝄞".encode(), b"\xc0\x80", b"\xf4\x90\x80\x80"]  # UTF-8, or not


def test_samples_are_valid():
    assert all(native_accepts(s) and python_accepts(s) for s in SAMPLES)


def mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(out))
        how = rng.randrange(5) if len(out) >= 8 else 0
        if how == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            out[at] = rng.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFF))
        elif how == 2:  # two 4-byte words change places: edges in another order, other chunks
            a, b = (4 * rng.randrange(len(out) // 4) for _ in range(2))
            out[a : a + 4], out[b : b + 4] = out[b : b + 4], out[a : a + 4]
        elif how == 3 and len(out) > 40:
            a = 4 * rng.randrange(len(out) // 4)
            out[a : a + 4] = struct.pack("<I", rng.choice((0, 1, 2**16, 2**31, 2**32 - 1)))
        else:
            out = out[: rng.randrange(1, len(out) + 1)] if rng.random() < 0.3 else out + bytes(rng.randrange(1, 9))
    return bytes(out)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(4))
def test_mutated_programs(seed: int):
    rng, accepted = random.Random(seed), 0
    for _ in range(500):
        accepted += verdict(sealed(mutate(rng.choice(SAMPLES), rng)))
    assert accepted > 20  # some mutations are harmless (a weight, the name): both answers occur


@pytest.mark.parametrize("seed", range(2))
def test_unsealed_mutations_are_refused(seed: int):
    rng = random.Random(seed)
    for _ in range(300):
        data = rng.choice(SAMPLES)
        damaged = bytearray(data)
        damaged[rng.randrange(16, len(data))] ^= 1 << rng.randrange(8)
        assert not native_accepts(bytes(damaged))
        assert not native_accepts(data[: rng.randrange(len(data))])


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(data: bytes, framed: bool):
    blob = sealed(b"JXCP\x01\x00\x00\x00" + bytes(8) + data) if framed else data
    verdict(blob)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_headers(data: st.DataObject):
    word = st.sampled_from([0, 1, 2, 3, 4, 7, 255, 4097, 32767, 32768, 65535])
    count = st.sampled_from([0, 1, 2, 3, 6, 2**20, 2**31, 2**32 - 1])
    kind, flags = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 3))
    nranks, steps, graphs, pipeline = (data.draw(word) for _ in range(4))
    root = data.draw(st.sampled_from([-2, -1, 0, 1, 5]))
    counts = [data.draw(count) for _ in range(3)]
    name = data.draw(
        st.sampled_from([b"", b"ring", b"\xff", b"\xed\xa0\x80", "ü€𝄞".encode(), b"\xc0\x80", b"\xf4\x90\x80\x80"])
    )
    head = b"JXCP" + struct.pack("<HHII", 1, flags, 0, 0)
    head += struct.pack("<BBHhHHHIIIH", kind, 0, nranks, root, steps, graphs, pipeline, *counts, len(name)) + name
    blob = sealed(head + bytes(-len(head) % 4) + data.draw(st.binary(max_size=120)))
    verdict(blob)


def tables(schedule: Schedule, rng: random.Random) -> list[Table]:
    """The identity, swaps of every scope, and finer mixtures of them; valid or not."""
    n, made = schedule.nranks, [Table.identity(schedule)]
    for _ in range(12):
        table = rng.choice(made)
        a, b = rng.randrange(n), rng.randrange(n)
        if schedule.graphs and rng.random() < 0.7:
            g = rng.randrange(len(schedule.graphs))
            step = rng.randrange(schedule.steps + 1)
            table = table.swap_graph(g, a, b) if rng.random() < 0.5 else table.swap_vertex(g, step, a, b)
        else:
            table = table.swap_global(a, b)
        made.append(table)
    return made


@pytest.mark.timeout(120)
def test_tables():
    rng, verdicts = random.Random(7), [0, 0]
    for blob in SAMPLES:
        schedule = decode(blob)
        for table in tables(schedule, rng):
            data = table.to_bytes()
            for form in (data, sealed(mutate(data, rng))):
                verdicts[verdict(blob, form)] += 1
    assert min(verdicts) > 100


def _edges(rng: random.Random, n: int, steps: int, chunks: int, op: Callable[[], Op]) -> tuple[Edge, ...]:
    made: list[Edge] = []
    for step in range(steps):
        for _ in range(rng.randrange(1, n + 1)):
            src, dst = rng.sample(range(n), 2)
            made.append(
                Edge(step, src, dst, op(), tuple(sorted(rng.sample(range(chunks), rng.randrange(1, chunks + 1)))))
            )
    return tuple(made)


def test_random_schedules():
    # Small enough that some random patterns do compute their collective.
    rng, verdicts = random.Random(11), [0, 0]
    for _ in range(2000):
        n, kind = rng.choice((2, 2, 3)), rng.choice((Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE))
        reduces = kind.reduces

        def op(reduces: bool = reduces) -> Op:
            return Op.REDUCE if reduces and rng.random() < 0.7 else Op.COPY

        steps, chunks = rng.choice((1, 2, 3)), rng.choice((1, 1, 2))
        schedule = Schedule(
            "random",
            Collective(kind, n, 0 if kind.rooted else None),
            steps,
            tuple(Chunk(None, None, rng.choice((1, 1, 3, 0))) for _ in range(chunks)),
            (ChunkGraph(_edges(rng, n, steps, chunks, op)),),
        )
        verdicts[verdict(encode(schedule))] += 1
    assert min(verdicts) > 50


def test_many_steps_and_graphs_without_edges_cost_no_time():
    # Steps times graphs are more than anybody can look at.
    most = 65535
    first, last = Edge(0, 0, 1, Op.REDUCE, (0,)), Edge(most - 1, 1, 0, Op.COPY, (0,))
    graphs = (ChunkGraph(()),) * (most - 1) + (ChunkGraph((first, last)),)
    schedule = Schedule("long", Collective(Kind.ALL_REDUCE, 2), most, (Chunk(None, None),), graphs)
    with Cluster("inproc", 2) as cluster, within(5):
        key = cluster.define([schedule])
        assert all((r == 3).all() for r in cluster.run(schedule, [np.ones(9), np.full(9, 2.0)], key=key))


def test_large_claims_cost_no_memory():
    # A few bytes that name 32767 ranks are refused before anything is made for them.
    blob = bytearray(encode(build("ring", Kind.ALL_REDUCE, 3)))
    blob[18:20] = struct.pack("<H", 32767)
    assert not native_accepts(sealed(bytes(blob)))
    assert np.iinfo(np.int16).max == 32767


def test_a_program_that_is_known_is_not_checked_again():
    blob, took = encode(build("ring", Kind.ALL_REDUCE, 192)), []
    with Cluster("inproc", 2) as cluster:
        for _ in range(4):
            begin = time.process_time()
            assert NATIVE.lib.jc_program_load(cluster.worlds[0], NATIVE.buffer(blob), len(blob)) == 0
            took.append(time.process_time() - begin)
        assert cluster.load(0, build("ring", Kind.ALL_REDUCE, 3)) == 1
    assert min(took[1:]) < took[0] / 2
