"""Probe of a two-CTA cluster: addresses of the peer's shared memory, remote arrivals, bulk copies into the peer."""

from __future__ import annotations

import numpy as np

from tests.simulate.probes.probe import (
    INPUT,
    OUTPUT,
    SHARED,
    SHARED_BASE,
    THREAD,
    Probe,
    by_first_thread,
    fill_shared,
    kernel_text,
    new_barrier,
    unwritten,
    wait_for,
)

_THREADS = 64
_CTAS = 2
_WORDS = 256  # of each CTA's input
_PUSHED_BYTES = 512  # copied into the peer, behind the barriers and the own data
_OWN, _ARRIVED = 1024, 4096  # shared offsets: own words, words of the peer
_PUSH = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


def _exchange_probe() -> Probe:
    """Each CTA keeps 256 words in shared memory and pushes the first 128 into its peer; one mbarrier counts the bytes
    that arrive, another the remote arrivals of the peer's 64 threads; both are awaited.

    Output per CTA: rank, cluster size, own shared address, the peer's by mapa, and the 128 words from the peer.
    """
    name = "cluster_exchange"
    bytes_barrier, arrivals_barrier = 0, 8
    setup = "\n".join([
        new_barrier(bytes_barrier, 1),
        new_barrier(arrivals_barrier, _THREADS),
        "\tfence.mbarrier_init.release.cluster;",
        f"\tmbarrier.arrive.expect_tx.shared.b64 \t%rd20, [{SHARED}+{bytes_barrier}], {_PUSHED_BYTES};",
    ])  # fmt: skip
    push = f"""
\tadd.s32 \t%r30, {SHARED}, {_OWN};
\tadd.s32 \t%r31, {SHARED}, {_ARRIVED};
\tmapa.shared::cluster.u32 \t%r32, %r31, %r11;
\tmapa.shared::cluster.u32 \t%r33, {SHARED}, %r11;
\tmov.b32 \t%r34, {_PUSHED_BYTES};
\t{_PUSH} \t[%r32], [%r30], %r34, [%r33];"""
    body = f"""
\tmov.u32 \t%r10, %cluster_ctarank;
\txor.b32 \t%r11, %r10, 1;
\tmul.wide.u32 \t%rd20, %r10, {4 * _WORDS};
\tadd.s64 \t%rd21, {INPUT}, %rd20;
{fill_shared(_THREADS, (_OWN + 4 * _WORDS) // 4, None).replace("$L__fill", "$L__clear")}
\tmov.b32 \t%r3, {THREAD};
$L__fill:
\tshl.b32 \t%r4, %r3, 2;
\tadd.s32 \t%r4, %r4, {SHARED};
\tmul.wide.u32 \t%rd5, %r3, 4;
\tadd.s64 \t%rd6, %rd21, %rd5;
\tld.global.b32 \t%r5, [%rd6];
\tst.shared.b32 \t[%r4+{_OWN}], %r5;
\tadd.s32 \t%r3, %r3, {_THREADS};
\tsetp.lt.s32 \t%p2, %r3, {_WORDS};
\t@%p2 bra \t$L__fill;
\tfence.proxy.async.shared::cta;
{by_first_thread(setup, "made")}
\tbar.sync \t0;
\tbarrier.cluster.arrive;
\tbarrier.cluster.wait;
{by_first_thread(push, "pushed").replace("%p61", "%p59")}
\tadd.s32 \t%r35, {SHARED}, {arrivals_barrier};
\tmapa.shared::cluster.u32 \t%r36, %r35, %r11;
\tmov.b32 \t%r37, 1;
\tmbarrier.arrive.shared::cluster.b64 \t_, [%r36], %r37;
{wait_for(bytes_barrier, 0, "bytes")}
{wait_for(arrivals_barrier, 0, "arrivals")}
\tmul.wide.u32 \t%rd22, %r10, {4 * (4 + _PUSHED_BYTES // 4)};
\tadd.s64 \t%rd22, {OUTPUT}, %rd22;
\tmov.u32 \t%r20, %nctaid.x;
\tmapa.shared::cluster.u32 \t%r21, {SHARED}, %r11;
\tst.global.b32 \t[%rd22], %r10;
\tst.global.b32 \t[%rd22+4], %r20;
\tst.global.b32 \t[%rd22+8], {SHARED};
\tst.global.b32 \t[%rd22+12], %r21;
\tshl.b32 \t%r4, {THREAD}, 2;
\tadd.s32 \t%r4, %r4, {SHARED};
\tmul.wide.u32 \t%rd5, {THREAD}, 4;
\tadd.s64 \t%rd6, %rd22, %rd5;
\tld.shared.b32 \t%r5, [%r4+{_ARRIVED}];
\tst.global.b32 \t[%rd6+16], %r5;
\tld.shared.b32 \t%r5, [%r4+{_ARRIVED + 4 * _THREADS}];
\tst.global.b32 \t[%rd6+{16 + 4 * _THREADS}], %r5;
\tbarrier.cluster.arrive;
\tbarrier.cluster.wait;"""

    def expected(words: np.ndarray) -> np.ndarray:
        rows = []
        for rank in range(_CTAS):
            peer = 1 - rank
            own_address, peer_address = (SHARED_BASE | r << 24 for r in (rank, peer))
            pushed = words[_WORDS * peer : _WORDS * peer + _PUSHED_BYTES // 4]
            rows.append(np.concatenate([np.array([rank, _CTAS, own_address, peer_address], dtype=np.uint32), pushed]))
        return np.concatenate(rows)

    return Probe(
        name=name,
        ptx=kernel_text(name, _THREADS, body),
        threads=_THREADS,
        shared_bytes=_ARRIVED + _PUSHED_BYTES,
        ctas=_CTAS,
        input=np.random.default_rng(71).integers(0, 2**32, _CTAS * _WORDS, dtype=np.uint64).astype(np.uint32),
        output=unwritten(_CTAS * (4 + _PUSHED_BYTES // 4)),
        expected=expected,
    )


PROBES = (_exchange_probe(),)
