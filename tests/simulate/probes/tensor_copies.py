"""Probes of TMA tile copies: loads, stores and reductions with every swizzle, across the edges of the tensor.

Stores and reductions that begin before the tensor are not among them: on an H200 each of nine stores and three
reductions, with a negative coordinate in the first or another dimension, ended its kernel with an illegal instruction.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fa4build.simulate.hardware import tma
from fa4build.simulate.hardware.tensor_map import TensorMap
from tests.simulate.probes.probe import (
    SHARED,
    SHARED_BASE,
    UNWRITTEN,
    BufferMap,
    Probe,
    by_first_thread,
    dump_shared,
    fill_shared,
    kernel_text,
    map_address,
    new_barrier,
    unwritten,
    wait_for,
)

THREADS = 128
DATA = 1024  # shared offset of the first copy; the mbarrier lies at 0

# One map per swizzle and element type; rows are 16 bytes longer than needed so that a wrong stride shows.
_PLANE = TensorMap(
    address=0, dtype="bf16", dims=(72, 40), strides=(160,), box=(64, 16), element_strides=(1, 1), swizzle=128
)
_MAPS = (
    _PLANE,
    TensorMap(address=0, dtype="bf16", dims=(72, 40), strides=(160,), box=(32, 16), element_strides=(1, 1), swizzle=64),
    TensorMap(address=0, dtype="bf16", dims=(72, 40), strides=(160,), box=(16, 16), element_strides=(1, 1), swizzle=32),
    TensorMap(address=0, dtype="bf16", dims=(75, 40), strides=(160,), box=(8, 16), element_strides=(1, 1), swizzle=0),
    TensorMap(
        address=16, dtype="u8", dims=(131, 40), strides=(160,), box=(128, 8), element_strides=(1, 1), swizzle=128
    ),
    TensorMap(address=0, dtype="f32", dims=(13, 3, 40), strides=(48, 160), box=(8, 2, 4), element_strides=(1, 1, 1)),
    TensorMap(
        address=0,
        dtype="bf16",
        dims=(64, 5, 2, 4),
        strides=(160, 800, 1600),
        box=(64, 4, 1, 2),
        element_strides=(1, 1, 1, 1),
        swizzle=128,
    ),
)
# (map, coordinates, shared offset from DATA): inside, negative start, ragged end, start inside a swizzle pattern. The
# first coordinate is a multiple of 16 bytes: an H200 ends a kernel with an illegal instruction if it is not.
_LOADS = (
    (0, (0, 0), 0),
    (0, (-8, -3), 2048),
    (0, (40, 30), 4096 + 384),
    (1, (8, 5), 6656),
    (1, (-8, 33), 7680 + 128),
    (2, (64, -1), 8960),
    (2, (16, 12), 9472 + 128),
    (3, (72, 8), 10240),
    (4, (16, 36), 10496),
    (4, (-16, 0), 11520 + 256),
    (5, (4, 1, -1), 12800),
    (6, (0, 2, 0, 1), 13056),
    (6, (8, -1, 1, 3), 14080 + 512),
    (5, (8, 2, 38), 15744),
)
_IMAGE_BYTES = 16384
_WORDS = 1600 + 16  # the tensors lie in 40 rows of 160 bytes, and a little behind


def _copy(text: str, coords: tuple[int, ...], map_index: int, offset: int) -> str:
    coordinates = ", ".join(f"%r{40 + d}" for d in range(len(coords)))
    moves = "".join(f"\tmov.b32 \t%r{40 + d}, {c};\n" for d, c in enumerate(coords))
    shared = f"\tadd.s32 \t%r50, {SHARED}, {DATA + offset};\n"
    box = f"[{map_address(map_index)}, {{{coordinates}}}]"
    return moves + shared + text.format(rank=len(coords), box=box, shared="[%r50]", barrier=f"[{SHARED}]")


_LOAD = (
    "\tcp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes \t{shared}, {box}, {barrier};"
)
_STORE = "\tcp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group \t{box}, {shared};"
_REDUCE = "\tcp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.tile.bulk_group \t{box}, {shared};"


def _load_probe() -> Probe:
    name = "tensor_loads"
    total = sum(_MAPS[index].box_bytes for index, _, _ in _LOADS)
    copies = "\n".join(_copy(_LOAD, coords, index, offset) for index, coords, offset in _LOADS)
    issue = f"\tmbarrier.arrive.expect_tx.shared.b64 \t%rd20, [{SHARED}], {total};\n{copies}"
    words = (DATA + _IMAGE_BYTES) // 4
    body = "".join(
        [
            fill_shared(THREADS, words, None),
            by_first_thread(f"{new_barrier(0, 1)}\n\tfence.mbarrier_init.release.cluster;", "made"),
            "\n\tbar.sync \t0;",
            by_first_thread(issue, "issued"),
            wait_for(0, 0, "arrived"),
            dump_shared(THREADS, DATA // 4, _IMAGE_BYTES // 4),
        ]
    )

    def expected(words: np.ndarray) -> np.ndarray:
        memory = np.ascontiguousarray(words).view(np.uint8)
        window = np.full(SHARED_BASE + DATA + _IMAGE_BYTES, UNWRITTEN & 0xFF, dtype=np.uint8)
        for index, coords, offset in _LOADS:
            tma.load_box(tma.plan_box(_MAPS[index], coords, SHARED_BASE + DATA + offset), memory, 0, window)
        return window[SHARED_BASE + DATA :].view(np.uint32)

    return Probe(
        name=name,
        ptx=kernel_text(name, THREADS, body, len(_MAPS)),
        threads=THREADS,
        shared_bytes=DATA + _IMAGE_BYTES,
        input=np.random.default_rng(11).integers(0, 2**32, _WORDS, dtype=np.uint64).astype(np.uint32),
        output=unwritten(_IMAGE_BYTES // 4),
        expected=expected,
        maps=tuple(BufferMap(buffer="input", tmap=tmap) for tmap in _MAPS),
    )


_COPY_BYTES = 6464
_STORE_IMAGE = 8192


def _placed(index: int, place: int) -> TensorMap:
    tmap = _MAPS[index]
    return dataclasses.replace(tmap, address=tmap.address + place * _COPY_BYTES)


def _outgoing_body(copies: str) -> str:
    drain = f"{copies}\n\tcp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group \t0;"
    return fill_shared(THREADS, (DATA + _STORE_IMAGE) // 4, "%rd1") + by_first_thread(drain, "stored")


def _store_probe(name: str, stores: tuple[tuple[int, tuple[int, ...], int], ...]) -> Probe:
    """Stores (map, coordinates, shared offset), each to its own copy of the tensor, so that no two meet."""
    maps = tuple(_placed(index, place) for place, (index, _, _) in enumerate(stores))
    copies = "\n".join(_copy(_STORE, coords, place, offset) for place, (_, coords, offset) in enumerate(stores))
    output = unwritten(_COPY_BYTES * len(stores) // 4)

    def expected(words: np.ndarray) -> np.ndarray:
        memory = output.copy().view(np.uint8)
        window = np.concatenate([np.zeros(SHARED_BASE, np.uint8), np.ascontiguousarray(words).view(np.uint8)])
        for tmap, (_, coords, offset) in zip(maps, stores, strict=True):
            plan = tma.plan_box(tmap, coords, SHARED_BASE + DATA + offset, outgoing=True)
            tma.store_box(plan, window, memory, 0)
        return memory.view(np.uint32)

    return Probe(
        name=name,
        ptx=kernel_text(name, THREADS, _outgoing_body(copies), len(maps)),
        threads=THREADS,
        shared_bytes=DATA + _STORE_IMAGE,
        input=np.random.default_rng(12)
        .integers(0, 2**32, (DATA + _STORE_IMAGE) // 4, dtype=np.uint64)
        .astype(np.uint32),
        output=output,
        expected=expected,
        maps=tuple(BufferMap(buffer="output", tmap=tmap) for tmap in maps),
    )


def _reduce_probe() -> Probe:
    name, coords = "tensor_reduce", (20, 7)
    tmap = TensorMap(
        address=0, dtype="f32", dims=(45, 20), strides=(192,), box=(32, 16), element_strides=(1, 1), swizzle=128
    )
    rng = np.random.default_rng(13)
    output = rng.standard_normal(48 * 20).astype(np.float32)
    output[::7] = 1e-40  # subnormal: the reduction does not flush
    source = rng.standard_normal((DATA + _STORE_IMAGE) // 4).astype(np.float32)
    source[::5] = 1e-40

    def expected(words: np.ndarray) -> np.ndarray:
        memory = output.copy().view(np.uint8)
        window = np.concatenate([np.zeros(SHARED_BASE, np.uint8), np.ascontiguousarray(words).view(np.uint8)])
        plan = tma.plan_box(tmap, coords, SHARED_BASE + DATA, outgoing=True, per_element=True)
        tma.reduce_add_f32_box(plan, window, memory, 0)
        return memory.view(np.uint32)

    return Probe(
        name=name,
        ptx=kernel_text(name, THREADS, _outgoing_body(_copy(_REDUCE, coords, 0, 0)), 1),
        threads=THREADS,
        shared_bytes=DATA + _STORE_IMAGE,
        input=source.view(np.uint32),
        output=output.view(np.uint32),
        expected=expected,
        maps=(BufferMap(buffer="output", tmap=tmap),),
    )


PROBES = (
    _load_probe(),
    _store_probe(
        "tensor_stores", ((0, (40, 30), 384), (1, (8, 3), 2048), (2, (64, 5), 3072), (6, (8, 2, 1, 2), 4096 + 512))
    ),
    # The extent along the first dimension is no multiple of 16 bytes: the last piece of 16 bytes is written whole.
    _store_probe("tensor_stores_ragged", ((3, (72, 8), 3584), (4, (16, 36), 4096), (5, (8, 2, 38), 6144))),
    _reduce_probe(),
)
