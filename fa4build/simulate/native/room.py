"""How many clusters of a launch a device has room for at once."""

from __future__ import annotations

from math import prod

SHARED_BYTES = 228 * 1024  # of a multiprocessor of sm_90 and sm_100
RESERVED_BYTES = 1024  # of shared memory, for each CTA
REGISTERS, THREADS, CTAS = 65536, 2048, 32  # of a multiprocessor
WARP, REGISTER_STEP = 32, 8  # registers of a thread come in steps of 8


def ctas_on_a_multiprocessor(*, threads: int, smem: int, registers: int) -> int:
    """CTAs that are resident on one multiprocessor: at least 1.

    Args:
        threads: of a CTA.
        smem: dynamic shared bytes of a CTA.
        registers: registers a thread at launch; 0: not known, no bound.
    """
    warps = -(-threads // WARP)
    rooms = [CTAS, THREADS // (warps * WARP), SHARED_BYTES // (smem + RESERVED_BYTES)]
    if registers:
        rooms.append(REGISTERS // (-(-registers // REGISTER_STEP) * REGISTER_STEP * warps * WARP))
    return max(min(rooms), 1)


def clusters_in_flight(
    block: tuple[int, int, int], cluster: tuple[int, int, int], *, smem: int, registers: int, multiprocessors: int
) -> int:
    """Clusters that are resident at once on a device: at least 1. Arguments as above; extents as of a launch."""
    ctas = multiprocessors * ctas_on_a_multiprocessor(threads=prod(block), smem=smem, registers=registers)
    return max(ctas // prod(cluster), 1)
