/* The lanes of a warp as vectors, and how results are written for the lanes of a mask. */
#ifndef FA4BUILD_NATIVE_LANES_H
#define FA4BUILD_NATIVE_LANES_H

#include "core.h"

/* Registers lie at multiples of 128 bytes, constants too. */
#define VECTOR(type, n) type __attribute__((ext_vector_type(n), aligned(64)))
typedef VECTOR(uint32_t, 32) u32x;
typedef VECTOR(int32_t, 32) s32x;
typedef VECTOR(uint64_t, 32) u64x;
typedef VECTOR(int64_t, 32) s64x;
typedef VECTOR(float, 32) f32x;
typedef VECTOR(double, 32) f64x;
typedef VECTOR(_Bool, 32) boolx;
#define CONVERT(value, type) __builtin_convertvector(value, type)

static inline u32x u32_at(const Warp *w, int32_t o) { return *(const u32x *)at(w, o); }
static inline s32x s32_at(const Warp *w, int32_t o) { return *(const s32x *)at(w, o); }
static inline u64x u64_at(const Warp *w, int32_t o) { return *(const u64x *)at(w, o); }
static inline s64x s64_at(const Warp *w, int32_t o) { return *(const s64x *)at(w, o); }
static inline f32x f32_at(const Warp *w, int32_t o) { return *(const f32x *)at(w, o); }

/* Bit l to all bits of lane l, and back from a comparison. */
static inline u32x mask32(uint32_t mask) {
    boolx b;
    memcpy(&b, &mask, 4);
    return -CONVERT(b, u32x);
}
static inline u64x mask64(uint32_t mask) {
    boolx b;
    memcpy(&b, &mask, 4);
    return -CONVERT(b, u64x);
}
static inline uint32_t bits32(s32x compared) {
    boolx b = CONVERT(compared, boolx);
    uint32_t mask;
    memcpy(&mask, &b, 4);
    return mask;
}
static inline uint32_t bits64(s64x compared) {
    boolx b = CONVERT(compared, boolx);
    uint32_t mask;
    memcpy(&mask, &b, 4);
    return mask;
}
static inline u32x choose32(u32x where, u32x yes, u32x no) { return (where & yes) | (~where & no); }
static inline u64x choose64(u64x where, u64x yes, u64x no) { return (where & yes) | (~where & no); }

/* Results; lanes outside the instruction's mask keep what they hold. */
static inline void put32(Warp *w, int32_t o, u32x value) {
    if (o < 0) return;
    u32x *d = to(w, o);
    *d = w->mask == FULL ? value : choose32(mask32(w->mask), value, *d);
}
static inline void put64(Warp *w, int32_t o, u64x value) {
    if (o < 0) return;
    u64x *d = to(w, o);
    *d = w->mask == FULL ? value : choose64(mask64(w->mask), value, *d);
}
static inline void putf(Warp *w, int32_t o, f32x value) { put32(w, o, (u32x)value); }
static inline void put16(Warp *w, int32_t o, u32x value) { put32(w, o, value & 0xFFFFu); }
/* A register of 16 bits with its sign. */
static inline s32x s16_at(const Warp *w, int32_t o) { return s32_at(w, o) << 16 >> 16; }

#endif
