"""Faults of scopes, state spaces and CTA pairs, planted in the kernels of sm100a that run as pairs."""

from tests.simulate.mutations.edits import both, drop, drop_all, substitute, substitute_all
from tests.simulate.mutations.faults import Planted

FIRST_CLUSTER_BARRIER = both(drop(r"barrier\.cluster\.arrive"), drop(r"barrier\.cluster\.wait"))
OF_ONE_CTA = r"{ .reg .pred z; .reg .b32 k; mov.u32 k, %cluster_ctarank; setp.ne.u32 z, k, 0; @z bra SKIP; \1 SKIP: }"

FORWARD = (
    Planted(
        name="no cluster barrier at the start",
        edit=FIRST_CLUSTER_BARRIER,
        expected=r"R13 .*cp\.async\.bulk\.tensor.*before any cluster barrier",
    ),
    Planted(
        name="barriers are not published",
        edit=drop_all(r"fence\.mbarrier_init"),
        expected=r"R5 .*without a fence\.mbarrier_init behind it",
    ),
    Planted(
        name="barriers are published to their CTA only",
        edit=substitute_all(r"fence\.mbarrier_init\.release\.cluster", "fence.proxy.async.shared::cta"),
        expected=r"R5 .*without a fence\.mbarrier_init behind it",
    ),
    Planted(
        name="barriers are published behind the cluster barrier",
        edit=both(
            drop_all(r"fence\.mbarrier_init"),
            substitute(r"(barrier\.cluster\.wait[^;]*;)", r"\1 fence.mbarrier_init.release.cluster;"),
        ),
        expected=r"R5 .*without a fence\.mbarrier_init behind it",
    ),
    Planted(
        name="one tensor load of the pair as of one CTA",
        edit=substitute(r"(L2::cache_hint)\.cta_group::2", r"\1"),
        expected=r"tensor load into CTA rank 1 signals an mbarrier of CTA rank 0; with \.cta_group::1",
    ),
    Planted(
        name="all tensor loads of the pair as of one CTA",
        edit=substitute_all(r"(L2::cache_hint)\.cta_group::2", r"\1.cta_group::1"),
        expected=r"tensor load into CTA rank 1 signals an mbarrier of CTA rank 0; with \.cta_group::1",
    ),
    Planted(
        name="proxy fences for global memory",
        edit=substitute_all(r"fence\.proxy\.async\.shared::cta", "fence.proxy.async.global"),
        expected=r"R4 .*the asynchronous proxy reads .* without a fence\.proxy\.async",
    ),
    Planted(
        name="relaxed arrivals in the CTA",
        edit=substitute_all(r"mbarrier\.arrive\.shared\.", "mbarrier.arrive.relaxed.cta.shared."),
        expected=r"R1 .*ld\.shared.*while the write by warp",
    ),
    Planted(
        name="only one CTA of the pair allocates",
        edit=substitute(r"(tcgen05\.alloc[^;]*;)", OF_ONE_CTA),
        expected=r"deadlock.*its peer CTA to execute the same tcgen05 instruction|the peer, has exited without it",
    ),
    Planted(
        name="only one CTA of the pair frees",
        edit=substitute(r"(tcgen05\.dealloc[^;]*;)", OF_ONE_CTA),
        expected=r"the peer, has exited without it|deadlock.*its peer CTA",
    ),
    Planted(
        name="a commit as of one CTA",
        edit=substitute(r"tcgen05\.commit\.cta_group::2", "tcgen05.commit.cta_group::1"),
        expected=r"cta_group::1 after cta_group::2",
    ),
)

BACKWARD = (
    Planted(
        name="the peer's barrier is reached in the scope of the CTA",
        edit=substitute_all(r"mbarrier\.arrive\.shared::cluster", "mbarrier.arrive.release.cta.shared::cluster"),
        expected=r"R1 .*tcgen05\.mma.*while the write by asynchronous copies of mbarrier .* of CTA 1",
    ),
    Planted(
        name="the peer's barrier is reached relaxed",
        edit=substitute_all(r"mbarrier\.arrive\.shared::cluster", "mbarrier.arrive.relaxed.cluster.shared::cluster"),
        expected=r"R1 .*tcgen05\.mma.*while the write by",
    ),
    Planted(
        name="waits acquire for the CTA",
        edit=substitute_all(r"(mbarrier\.try_wait\.parity)\.shared", r"\1.acquire.cta.shared"),
        expected=r"R1 .*tcgen05\.mma.*while the write by asynchronous copies of mbarrier .* of CTA 1",
    ),
    Planted(
        name="no warp meets before its lane pushes to the peer",
        edit=drop_all(r"bar\.warp\.sync"),
        expected=r"R1 .*cp\.async\.bulk\.shared::cluster\.shared::cta.*one lane's arrival does not speak",
    ),
    Planted(
        name="proxy fences for global memory",
        edit=substitute_all(r"fence\.proxy\.async\.shared::cta", "fence.proxy.async.global"),
        expected=r"R4 .*the asynchronous proxy reads .* without a fence\.proxy\.async",
    ),
)
