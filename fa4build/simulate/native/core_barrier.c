/* mbarriers, named barriers, the cluster barrier, register budgets: barriers.py, fences.py. */
#include "lanes.h"

#include <stdlib.h>

#define RULE(name) int op_##name(Warp *w, const Ins *i)

/* ---- mbarriers --------------------------------------------------------------------------------------------------- */

Mbarrier *find_mbarrier(Warp *w, uint32_t address) {
    uint32_t rank = address >> RANK_SHIFT, offset = address & OFFSET_MASK;
    Cluster *cluster = w->cta->cluster;
    if (address & 7) {
        fault(w, "mbarrier address 0x%x is not a multiple of 8", address);
        return NULL;
    }
    if (rank >= (uint32_t)cluster->num_ctas) {
        fault(w, "mbarrier address 0x%x names CTA rank %u; the cluster has %d CTAs", address, rank, cluster->num_ctas);
        return NULL;
    }
    Cta *cta = cluster->ctas + rank;
    if (cta != w->cta && threads_alive(cta) == 0) {
        fault(w, "mbarrier %s of CTA rank %u, which has exited: its shared memory is gone", name_of(cta, offset), rank);
        return NULL;
    }
    uint32_t index = offset < cta->shared_limit ? cta->barrier_at[offset / 8] : 0;
    if (!index) {
        fault(w, "no initialised mbarrier at %s (address 0x%x)", name_of(cta, offset), address);
        return NULL;
    }
    return cta->barriers[index - 1];
}

static void complete(Warp *w, Mbarrier *b) {
    (void)w;
    if (b->pending == 0 && b->tx == 0) {
        b->phase++;
        b->pending = b->expected;
    }
}

static void note_arrival(Mbarrier *b, Arrival who) {
    who.phase = b->phase;
    b->arrivals[b->num_arrivals++ % KEPT_ARRIVALS] = who;
}

int mbarrier_arrive(Warp *w, Mbarrier *b, int64_t count, Arrival who) {
    note_arrival(b, who);
    if (count > b->pending)
        return fault(w,
                     "%lld arrivals at mbarrier %s, but its phase %d expects only %d more of %d "
                     "(over-arrival: an arrival count is wrong, or a warp arrives twice)",
                     (long long)count, name_of(b->cta, b->offset), b->phase, b->pending, b->expected);
    b->pending -= (int32_t)count;
    complete(w, b);
    return NEXT;
}

static int move_bytes(Warp *w, Mbarrier *b, int64_t amount) {
    b->tx += amount;
    if (b->tx > COUNT_LIMIT || b->tx < -COUNT_LIMIT)
        return fault(w, "mbarrier %s: %lld outstanding bytes exceed the range +-(2^20 - 1)",
                     name_of(b->cta, b->offset), (long long)b->tx);
    return NEXT;
}

int mbarrier_bytes(Warp *w, Mbarrier *b, int64_t size, Arrival who) {
    note_arrival(b, who);
    if (move_bytes(w, b, -size)) return FAULTED;
    complete(w, b);
    return NEXT;
}

void mbarrier_source(Mbarrier *b, const Warp *w, int32_t line) {
    for (int k = 0; k < b->num_sources; k++)
        if (b->sources[k].rank == w->cta->rank && b->sources[k].warp == w->index) {
            b->sources[k].line = line;
            return;
        }
    if (b->num_sources < (int)(sizeof b->sources / sizeof *b->sources))
        b->sources[b->num_sources++] = (Source){w->cta->rank, w->index, line};
}

static int create(Warp *w, const Ins *i, uint32_t offset, uint32_t expected) {
    Cta *cta = w->cta;
    if (offset + 8 > cta->shared_limit)
        return fault(w, "mbarrier address 0x%x is outside the CTA's shared memory", offset);
    if (!(offset & 7) && cta->barrier_at[offset / 8])
        return fault(w, "mbarrier %s is initialised twice", name_of(cta, offset));
    if (expected < 1 || expected > COUNT_LIMIT)
        return fault(w, "mbarrier count %u is outside 1..2^20-1", expected);
    if (offset & 7) return fault(w, "mbarrier address 0x%x is not a multiple of 8", offset);
    if (cta->num_barriers == cta->barrier_capacity) {
        cta->barrier_capacity = cta->barrier_capacity ? 2 * cta->barrier_capacity : 64;
        cta->barriers = realloc(cta->barriers, sizeof *cta->barriers * (size_t)cta->barrier_capacity);
    }
    Mbarrier *b = calloc(1, sizeof *b);
    b->cta = cta, b->offset = offset, b->expected = b->pending = (int32_t)expected, b->handle = -1;
    cta->barriers[cta->num_barriers++] = b;
    cta->barrier_at[offset / 8] = (uint16_t)cta->num_barriers;
    CHECK(w, chk_barrier_created, offset, site_of(w, i), &b->handle);
    return NEXT;
}

/* Lanes that write the same count to the same barrier in one instruction do it once. */
RULE(mbar_init) {
    uint32_t done = 0;
    EACH_LANE(l, w->mask) {
        uint32_t address = lane32(w, i->o[0], (int)l), count = lane32(w, i->o[1], (int)l);
        bool repeated = false;
        EACH_LANE(k, done) repeated |= lane32(w, i->o[0], (int)k) == address && lane32(w, i->o[1], (int)k) == count;
        done |= 1u << l;
        if (!repeated && create(w, i, address + (uint32_t)i->imm[0] - w->cta->rank_bits, count)) return FAULTED;
    }
    return NEXT;
}

/* Lanes of the mask that name the address of the first of them. */
static uint32_t lanes_of_address(const Warp *w, int32_t o, uint32_t mask) {
    const uint32_t *a = at(w, o);
    uint32_t first = a[first_lane(mask)], same = 0;
    EACH_LANE(l, mask) same |= (uint32_t)(a[l] == first) << l;
    return same;
}

RULE(mbar_inval) {
    for (uint32_t rest = w->mask; rest;) {
        uint32_t lanes = lanes_of_address(w, i->o[0], rest);
        Mbarrier *b = find_mbarrier(w, lane32(w, i->o[0], first_lane(lanes)) + (uint32_t)i->imm[0]);
        if (!b) return FAULTED;
        w->cta->barrier_at[b->offset / 8] = 0;
        rest &= ~lanes;
    }
    return NEXT;
}

/* The strength of an mbarrier instruction. Where none is written the scope is the CTA by the manual; that it is the
 * cluster is an assumption (CHK_RULES_DEFAULT_SCOPE). */
chk_sync strength(const Warp *w, const Ins *i) {
    bool is_written = !(i->flags & 256), narrow = w->run->launch->checks & CHK_RULES_DEFAULT_SCOPE;
    uint8_t scope = i->flags >> 6 & 3;
    return (chk_sync){.order = i->flags >> 4 & 3, .scope = is_written || narrow ? scope : CHK_SCOPE_CLUSTER};
}

static int arrive_at(Warp *w, const Ins *i, uint32_t address, uint32_t operand, int lanes) {
    Mbarrier *b = find_mbarrier(w, address);
    if (!b) return FAULTED;
    chk_sync sync = strength(w, i);
    CHECK(w, chk_order_remote, (uint32_t)b->cta->rank, site_of(w, i));
    CHECK(w, chk_arrive, b->handle, b->phase, (uint32_t)b->pending, (uint32_t)b->expected, sync, site_of(w, i));
    mbarrier_source(b, w, i->line);
    bool expects = i->flags & 1;
    if (expects && move_bytes(w, b, (int64_t)operand * lanes)) return FAULTED;
    Arrival who = {.kind = ARRIVED_WARP, .warp = w->index, .rank = w->cta->rank, .line = i->line};
    return mbarrier_arrive(w, b, expects ? lanes : (int64_t)operand * lanes, who);
}

/* Every active lane arrives. With expect_tx the operand is bytes and the count is 1. */
RULE(mbar_arrive) {
    uint32_t value = 1;
    bool same = i->o[2] < 0 || same32(w, i->o[2], w->mask, &value);
    for (uint32_t rest = w->mask; rest;) {
        uint32_t lanes = same ? lanes_of_address(w, i->o[1], rest) : rest & -rest;
        int first = first_lane(lanes);
        uint32_t operand = same ? value : lane32(w, i->o[2], first);
        if (arrive_at(w, i, lane32(w, i->o[1], first) + (uint32_t)i->imm[0], operand, count_lanes(lanes)))
            return FAULTED;
        rest &= ~lanes;
    }
    put64(w, i->o[0], (u64x)(0ull));
    return NEXT;
}

RULE(mbar_expect) {
    EACH_LANE(l, w->mask) {
        Mbarrier *b = find_mbarrier(w, lane32(w, i->o[0], (int)l) + (uint32_t)i->imm[0]);
        if (!b) return FAULTED;
        int64_t size = lane32(w, i->o[1], (int)l);
        Arrival who = {.kind = ARRIVED_WARP_BYTES, .warp = w->index, .rank = w->cta->rank, .line = i->line,
                       .bytes = size};
        if (i->flags ? mbarrier_bytes(w, b, size, who) : move_bytes(w, b, size)) return FAULTED;
    }
    return NEXT;
}

/* With a time hint it blocks until the phase is over. Without, it reports the truth; a repeated miss becomes a wait. */
RULE(mbar_wait) {
    uint32_t address, parity;
    if (uniform32(w, i->o[1], "operand of a converged instruction", &address)) return FAULTED;
    if (uniform32(w, i->o[2], "operand of a converged instruction", &parity)) return FAULTED;
    Mbarrier *b = find_mbarrier(w, address + (uint32_t)i->imm[0]);
    if (!b) return FAULTED;
    bool blocks = i->flags & 1, is_over = (uint32_t)(b->phase & 1) != (parity & 1), passed = is_over;
    if (is_over && !blocks && may_miss(w->run)) {
        passed = false;
    } else if (passed) {
        chk_sync sync = strength(w, i);
        CHECK(w, chk_wait_passed, b->handle, b->phase, sync, site_of(w, i));
    }
    bool repeated = w->poll_site == site_of(w, i) && w->poll_barrier == b && w->poll_phase == b->phase;
    if (is_over || (!blocks && !repeated)) {
        w->poll_site = is_over ? -1 : site_of(w, i);
        w->poll_barrier = b, w->poll_phase = b->phase;
        put_predicate(w, i->o[0], passed ? FULL : 0);
        return NEXT;
    }
    w->poll_site = -1;
    w->wait = (Wait){.kind = WAIT_MBARRIER, .mask = w->mask, .ins = i, .mbarrier = b, .phase = b->phase,
                     .parity = (int32_t)(parity & 1)};
    return BLOCKED;
}

/* ---- named barriers ---------------------------------------------------------------------------------------------- */

static int enter(Warp *w, const Ins *i, NamedBarrier *b, int index, int required) {
    if (b->required < 0) b->required = required;
    if (required != b->required)
        return fault(w, "barrier %d: warp %d gives thread count %d, warps %s gave %d", index, w->index, required,
                     lane_ranges(b->members), b->required);
    for (int k = 0; k < b->num_arrived; k++)
        if (b->arrived[k] == w->index && w->run->checks) {
            chk_finding twice = {.kind = CHK_NOTE_NAMED_TWICE, .site = site_of(w, i), .other = -1,
                                 .cluster = w->cta->cluster->index, .cta = w->cta->rank, .first_warp = w->index,
                                 .last_warp = w->index, .num_warps = 1, .agent_kind = -1, .extra = {index}};
            chk_report(w->run->launch->findings, &twice);
            break;
        }
    if (b->num_arrived * LANES >= required || b->num_arrived >= (int)sizeof b->arrived)
        return fault(w, "barrier %d: more than %d threads arrive", index, required);
    b->where[b->num_arrived] = i->line;
    b->arrived[b->num_arrived++] = (uint8_t)w->index;
    b->members |= 1u << w->index;
    return NEXT;
}

/* Arrival counts 32 per warp; `sync` then waits for the generation to be over. flags: 1 sync, 2 aligned. */
RULE(bar_named) {
    uint32_t index, required = (uint32_t)threads_alive(w->cta);
    if (uniform32(w, i->o[0], "operand of a converged instruction", &index)) return FAULTED;
    if (i->flags & 2 && require_converged(w, opcode_text(w, i))) return FAULTED;
    if (i->o[1] >= 0 && uniform32(w, i->o[1], "thread count", &required)) return FAULTED;
    if (index > 15) return fault(w, "barrier number %u is outside 0..15", index);
    if (required % LANES || !required)
        return fault(w, "thread count %u is not a positive multiple of 32", required);
    NamedBarrier *b = w->cta->named + index;
    int generation = b->generation;
    bool is_sync = i->flags & 1;
    if (enter(w, i, b, (int)index, (int)required)) return FAULTED;
    CHECK(w, chk_named_arrive, index, (uint32_t)generation, is_sync);
    if (b->num_arrived * LANES == b->required) {
        b->generation++;
        b->num_arrived = 0, b->required = -1;
        if (w->run->checks)
            chk_named_completed(w->cta->cluster->checks, (uint32_t)w->cta->rank, index, (uint32_t)generation);
    }
    if (!is_sync) return NEXT;
    if (b->generation > generation) {
        CHECK(w, chk_named_passed, index, (uint32_t)generation);
        return NEXT;
    }
    w->wait = (Wait){.kind = WAIT_NAMED, .mask = w->mask, .ins = i, .phase = generation, .named = (int32_t)index};
    return BLOCKED;
}

/* ---- the cluster barrier ----------------------------------------------------------------------------------------- */

static int64_t alive_in(const Cluster *cluster) {
    int64_t n = 0;
    for (int k = 0; k < cluster->num_ctas; k++) n += threads_alive(cluster->ctas + k);
    return n;
}

void check_cluster_barrier(Cluster *cluster) {
    if (!cluster->arrived || cluster->arrived < alive_in(cluster)) return;
    cluster->generation++;
    cluster->arrived = 0;
    if (cluster->run->checks) chk_cluster_completed(cluster->checks);
}

RULE(cluster_arrive) {
    if (i->flags & 2 && require_converged(w, opcode_text(w, i))) return FAULTED;
    Cluster *cluster = w->cta->cluster;
    if (w->cluster_generation == cluster->generation)
        return fault(w, "warp %d arrives twice at the cluster barrier in one phase", w->index);
    w->cluster_generation = cluster->generation;
    chk_sync sync = {.order = i->flags & 1 ? CHK_RELAXED : CHK_RELEASE, .scope = CHK_SCOPE_CLUSTER};
    CHECK(w, chk_cluster_arrive, sync);
    cluster->arrived += count_lanes(w->mask);
    check_cluster_barrier(cluster);
    return NEXT;
}

RULE(cluster_wait) {
    if (i->flags & 2 && require_converged(w, opcode_text(w, i))) return FAULTED;
    if (w->cluster_generation < 0) return fault(w, "barrier.cluster.wait without an arrive before it");
    if (w->cta->cluster->generation > w->cluster_generation) {
        w->synced_cluster = true;
        CHECK(w, chk_cluster_passed);
        return NEXT;
    }
    w->wait = (Wait){.kind = WAIT_CLUSTER, .mask = w->mask, .ins = i, .phase = w->cluster_generation};
    return BLOCKED;
}

/* ---- fences and budgets ------------------------------------------------------------------------------------------ */

RULE(fence) {
    chk_sync sync = {.order = i->flags >> 8 & 3, .scope = i->flags >> 10 & 3};
    CHECK(w, chk_fence, (chk_fence_kind)(i->flags & 15), i->flags >> 4 & 15, sync);
    return NEXT;
}

RULE(setmaxnreg) {
    int wanted = (int)i->imm[0];
    bool increases = i->flags & 1;
    Cta *cta = w->cta;
    if (require_converged(w, opcode_text(w, i))) return FAULTED;
    if (wanted % 8 || wanted < 24 || wanted > 256)
        return fault(w, "setmaxnreg %d: allowed are multiples of 8 from 24 to 256", wanted);
    if (w->run->launch->registers >= 0) {
        int64_t need = (int64_t)LANES * (wanted - w->registers);
        if (increases && cta->registers_free < need) {
            w->wait = (Wait){.kind = WAIT_REGISTERS, .mask = w->mask, .ins = i, .need = need, .again = true};
            return BLOCKED;
        }
        if (increases != (wanted >= w->registers))
            return fault(w, "setmaxnreg.%s %d: warp %d has %d registers a thread", increases ? "inc" : "dec", wanted,
                         w->index, w->registers);
        cta->registers_free -= need;
    }
    w->registers = wanted;
    w->history = realloc(w->history, sizeof *w->history * (size_t)(w->num_history + 1));
    w->history[w->num_history++] = (uint16_t)wanted;
    return NEXT;
}
