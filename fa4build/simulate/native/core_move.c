/* Moves, packings, integer conversions, parameters: moves.py. */
#include "lanes.h"

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define D i->o[0]
#define A i->o[1]
#define B i->o[2]

RULE(nop) {
    (void)w, (void)i;
    return NEXT;
}
RULE(fault) { return fault(w, "%s", w->run->launch->faults[i->imm[0]]); }
RULE(mov_b32) {
    put32(w, D, u32_at(w, A));
    return NEXT;
}
RULE(mov_b64) {
    put64(w, D, u64_at(w, A));
    return NEXT;
}
RULE(mov_pred) {
    put_predicate(w, D, predicate(w, A));
    return NEXT;
}
/* The halves of 128 bits: all low words, then all high words. */
static inline u64x half_at(const Warp *w, int32_t o, int half) { return ((const u64x *)at(w, o))[half]; }
static inline void put_half(Warp *w, int32_t o, int half, u64x value) {
    if (o >= 0) put64(w, o + half * 256, value);
}
RULE(mov_b128) {
    u64x low = half_at(w, A, 0), high = half_at(w, A, 1);
    put_half(w, D, 0, low);
    put_half(w, D, 1, high);
    return NEXT;
}
RULE(clock) {
    uint64_t steps = (uint64_t)w->run->steps;
    if (D & 2) put64(w, D, (u64x)(steps));
    else put32(w, D, (u32x)((uint32_t)steps));
    return NEXT;
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

RULE(pack32x2) {
    put64(w, D, CONVERT(u32_at(w, A), u64x) | CONVERT(u32_at(w, B), u64x) << 32);
    return NEXT;
}
RULE(unpack32x2) {
    u64x value = u64_at(w, i->o[4]);
    put32(w, i->o[0], CONVERT(value, u32x));
    put32(w, i->o[1], CONVERT(value >> 32, u32x));
    return NEXT;
}
RULE(pack16x2) {
    put32(w, D, u32_at(w, A) | u32_at(w, B) << 16);
    return NEXT;
}
RULE(unpack16x2) {
    u32x value = u32_at(w, i->o[4]);
    put32(w, i->o[0], value & 0xFFFFu);
    put32(w, i->o[1], value >> 16);
    return NEXT;
}
RULE(pack16x4) {
    u64x r = (u64x)(0);
    for (int k = 0; k < 4; k++) r |= CONVERT(u32_at(w, i->o[1 + k]), u64x) << (uint64_t)(16 * k);
    put64(w, D, r);
    return NEXT;
}
RULE(unpack16x4) {
    u64x value = u64_at(w, i->o[4]);
    for (int k = 0; k < 4; k++) put32(w, i->o[k], CONVERT(value >> (uint64_t)(16 * k), u32x) & 0xFFFFu);
    return NEXT;
}
RULE(pack64x2) {
    u64x low = u64_at(w, A), high = u64_at(w, B);
    put_half(w, D, 0, low);
    put_half(w, D, 1, high);
    return NEXT;
}
RULE(unpack64x2) {
    u64x low = half_at(w, i->o[4], 0), high = half_at(w, i->o[4], 1);
    put64(w, i->o[0], low);
    put64(w, i->o[1], high);
    return NEXT;
}

/* The answer of clusterlaunchcontrol: claimed, then x, y, z, of 32 bits each. */
RULE(is_canceled) {
    put_predicate(w, D, bits64((half_at(w, A, 0) & 1ull) != 0ull));
    return NEXT;
}
RULE(first_ctaid) {
    int word = (int)i->imm[0];
    put32(w, D, CONVERT(half_at(w, A, word / 2) >> (uint64_t)(word % 2 * 32), u32x));
    return NEXT;
}
RULE(mapa) {
    put32(w, D, (u32_at(w, A) & OFFSET_MASK) | u32_at(w, B) << RANK_SHIFT);
    return NEXT;
}

/* ---- parameters -------------------------------------------------------------------------------------------------- */

static uint64_t parameter(const Launch *launch, int64_t offset, int size, bool is_signed) {
    uint64_t value = 0;
    memcpy(&value, launch->parameters + offset, (size_t)size);
    int spare = 64 - 8 * size;
    return is_signed ? (uint64_t)((int64_t)(value << spare) >> spare) : value;
}
RULE(ld_param) {
    for (int k = 0; k < i->length; k++) {
        int32_t d = w->run->launch->lists[i->list + k];
        uint64_t value = parameter(w->run->launch, i->imm[0] + k * i->size, i->size, i->flags & 256);
        if (d & 2) put64(w, d, (u64x)(value));
        else if (d & 1) put16(w, d, (u32x)((uint32_t)value));
        else put32(w, d, (u32x)((uint32_t)value));
    }
    return NEXT;
}

/* ---- integer conversions ----------------------------------------------------------------------------------------- */

RULE(cvt_u64_u32) {
    put64(w, D, CONVERT(u32_at(w, A), u64x));
    return NEXT;
}
RULE(cvt_s64_s32) {
    put64(w, D, (u64x)CONVERT(s32_at(w, A), s64x));
    return NEXT;
}
RULE(cvt_u32_u64) {
    put32(w, D, CONVERT(u64_at(w, A), u32x));
    return NEXT;
}
static inline u64x extended(u64x value, uint32_t how) {
    uint64_t spare = how & 127;
    return how & 128 ? (u64x)((s64x)(value << spare) >> spare) : value << spare >> spare;
}
/* Two steps: how to read the source, how to read that as the destination's type. */
RULE(cvt_int) {
    u64x value = A & 2 ? u64_at(w, A) : CONVERT(u32_at(w, A), u64x);
    value = extended(extended(value, i->flags & 255), i->flags >> 8 & 255);
    if (i->size == 64) put64(w, D, value);
    else if (i->size == 32) put32(w, D, CONVERT(value, u32x));
    else put16(w, D, CONVERT(value, u32x));
    return NEXT;
}
