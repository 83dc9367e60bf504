/* Shuffles, votes, elections, warp reductions, matrix fragments: warp_ops.py. */
#include "core.h"
#include "lanes.h"
#include "memory.h"

#include <stdio.h>

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define D i->o[0]

int not_converged(Warp *w, const char *what) {
    return fault(w,
                 "%s needs all 32 lanes of warp %d, but only lanes %s execute it; "
                 "the others are elsewhere, so the hardware waits for ever or does something undefined",
                 what, w->index, lane_ranges(w->mask));
}

int check_members(Warp *w, uint32_t members, const char *what) {
    if (w->mask & ~members)
        return fault(w, "%s with member mask 0x%08x is executed by lanes %s of warp %d, which are not among its members: "
                     "undefined", what, members, lane_ranges(w->mask & ~members), w->index);
    if (!(members & ~w->mask & ~w->exited)) return NEXT;
    return fault(w,
                 "%s with member mask 0x%08x is executed by lanes %s of warp %d only; the hardware waits "
                 "for the others for ever. A TMA load, TMA reduce or tcgen05 MMA elects its own thread: put "
                 "it under a whole-warp "
                 "branch (`if warp_idx == 0`), never under `if tid == 0` or elect_one()",
                 what, members, lane_ranges(w->mask), w->index);
}

static int distinct32(const Warp *w, int32_t o, uint32_t mask) {
    int n = 0;
    EACH_LANE(l, mask) {
        bool seen = false;
        for (uint32_t k = 0; k < l; k++) seen |= (mask >> k & 1) && lane32(w, o, (int)k) == lane32(w, o, (int)l);
        n += !seen;
    }
    return n;
}

int uniform32(Warp *w, int32_t o, const char *what, uint32_t *value) {
    if (same32(w, o, w->mask, value)) return NEXT;
    return fault(w, "%s must be the same in all lanes; it takes %d values", what, distinct32(w, o, w->mask));
}

/* The member mask, which all that execute the instruction must give alike. */
static int take_members(Warp *w, int32_t o, const char *what, uint32_t *members) {
    return same32(w, o, w->mask, members) ? check_members(w, *members, what)
                                          : fault(w, "%s: lanes %s of warp %d give different member masks", what,
                                                  lane_ranges(w->mask), w->index);
}

RULE(elect) {
    uint32_t members;
    if (take_members(w, i->o[2], "elect.sync", &members)) return FAULTED;
    if (!members) return fault(w, "elect.sync with an empty member mask");
    /* The manual leaves open which one, but it is the same each time. */
    uint32_t later = members & FULL << (w->run->launch->order.elected & 31);
    uint32_t leader = (uint32_t)first_lane(later ? later : members);
    put32(w, D, (u32x)(leader));
    put_predicate(w, i->o[1], 1u << leader);
    return NEXT;
}

/* Lane that a lane reads; -1 where out of range. */
static int source_lane(int lane, int mode, uint32_t b, uint32_t c) {
    int segment = c >> 8 & 31, clamp = c & 31;
    int highest = (lane & segment) | (clamp & ~segment), by = (int)(b & 31), source;
    if (mode == 0) {
        source = lane - by;
        return source >= highest ? source : -1;
    }
    if (mode == 1) source = lane + by;
    else if (mode == 2) source = lane ^ by;
    else source = (lane & segment) | ((int)b & ~segment & 31);
    return source <= highest ? source : -1;
}

static const char *const SHUFFLE[] = {"shfl.sync.up", "shfl.sync.down", "shfl.sync.bfly", "shfl.sync.idx"};

RULE(shfl) {
    int mode = i->flags & 3;
    uint32_t members;
    if (take_members(w, i->o[5], SHUFFLE[mode], &members)) return FAULTED;
    CHECK(w, chk_warp_shuffle);
    const uint32_t *a = at(w, i->o[2]), *b = at(w, i->o[3]), *c = at(w, i->o[4]);
    u32x r = (u32x)(0);
    uint32_t inside = 0;
    for (int l = 0; l < LANES; l++) {
        int source = source_lane(l, mode, b[l], c[l]);
        r[l] = a[source < 0 ? l : source];
        inside |= (uint32_t)(source >= 0) << l;
    }
    put32(w, D, r);
    put_predicate(w, i->o[1], inside);
    return NEXT;
}

RULE(vote) {
    uint32_t members;
    if (take_members(w, i->o[2], "vote.sync", &members)) return FAULTED;
    CHECK(w, chk_warp_shuffle);
    uint32_t p = predicate(w, i->o[1]) & w->mask;
    bool some = p != 0, every = p == w->mask;
    if (i->flags == 0) put32(w, D, (u32x)(p));
    else put_predicate(w, D, (i->flags == 1 ? some : i->flags == 2 ? every : every || !some) ? FULL : 0);
    return NEXT;
}

RULE(activemask) {
    put32(w, D, (u32x)(w->mask));
    return NEXT;
}

static uint32_t reduced(uint32_t a, uint32_t b, int operation, bool is_signed) {
    bool less = is_signed ? (int32_t)a < (int32_t)b : a < b;
    switch (operation) {
    case 0: return a + b;
    case 1: return less ? a : b;
    case 2: return less ? b : a;
    case 3: return a & b;
    case 4: return a | b;
    default: return a ^ b;
    }
}

RULE(redux) {
    uint32_t members;
    if (take_members(w, i->o[2], "redux.sync", &members)) return FAULTED;
    uint32_t total = 0;
    bool first = true;
    EACH_LANE(l, w->mask) {
        uint32_t value = lane32(w, i->o[1], (int)l);
        total = first ? value : reduced(total, value, i->flags & 7, i->flags & 256);
        first = false;
    }
    put32(w, D, (u32x)(total));
    return NEXT;
}

RULE(bar_warp) {
    uint32_t members;
    if (take_members(w, D, "bar.warp.sync", &members)) return FAULTED;
    CHECK(w, chk_warp_barrier);
    return NEXT;
}

/* ---- matrix fragments -------------------------------------------------------------------------------------------- */

/* Lane t holds row t/4, columns 2(t%4) and +1 of an 8x8 matrix of 16-bit elements; the same of the transposed one. */
static void transpose_fragment(uint32_t *value) {
    uint16_t in[64], out[64];
    memcpy(in, value, sizeof in);
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++) out[c * 8 + r] = in[r * 8 + c];
    memcpy(value, out, sizeof out);
}

/* Addresses of every lane's pair of elements in matrix j. */
static void fragment_addresses(const Warp *w, const Ins *i, int j, uint32_t *address) {
    for (int l = 0; l < LANES; l++)
        address[l] = lane32(w, D, 8 * j + l / 4) + (uint32_t)i->imm[0] + 4u * (uint32_t)(l % 4);
}

RULE(stmatrix) {
    if (require_converged(w, "stmatrix.sync.aligned")) return FAULTED;
    const int32_t *list = w->run->launch->lists + i->list;
    for (int j = 0; j < i->count; j++) {
        uint32_t address[LANES], value[LANES];
        fragment_addresses(w, i, j, address);
        memcpy(value, at(w, list[j]), sizeof value);
        if (i->flags) transpose_fragment(value);
        if (store_words(w, i, address, value)) return FAULTED;
    }
    return NEXT;
}

RULE(ldmatrix) {
    if (require_converged(w, "ldmatrix.sync.aligned")) return FAULTED;
    const int32_t *list = w->run->launch->lists + i->list;
    uint32_t values[4][LANES];
    for (int j = 0; j < i->count; j++) {
        uint32_t address[LANES];
        fragment_addresses(w, i, j, address);
        memset(values[j], 0, sizeof values[j]);
        if (load_words(w, i, address, values[j])) return FAULTED;
        if (i->flags) transpose_fragment(values[j]);
    }
    for (int j = 0; j < i->count; j++) {
        u32x v;
        memcpy(&v, values[j], sizeof v);
        put32(w, list[j], v);
    }
    return NEXT;
}
