/* What the files of the numeric units share: bits of floats, flushing, rounding of float64, lanes of a mask. */
#ifndef FA4BUILD_NATIVE_UNITS_INNER_H
#define FA4BUILD_NATIVE_UNITS_INNER_H

#include <string.h>

#include "units.h"

#define SIGN_F32 0x80000000u
#define MAGNITUDE_F32 0x7FFFFFFFu
#define INFINITY_F32 0x7F800000u
#define MIN_NORMAL_F32 0x00800000u
#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE float as_f32(uint32_t a) {
    float f;
    memcpy(&f, &a, 4);
    return f;
}
ALWAYS_INLINE uint32_t bits_f32(float f) {
    uint32_t a;
    memcpy(&a, &f, 4);
    return a;
}
ALWAYS_INLINE double as_f64(uint64_t a) {
    double f;
    memcpy(&f, &a, 8);
    return f;
}
ALWAYS_INLINE uint64_t bits_f64(double f) {
    uint64_t a;
    memcpy(&a, &f, 8);
    return a;
}

ALWAYS_INLINE int is_nan_f32(uint32_t a) { return (a & MAGNITUDE_F32) > INFINITY_F32; }
ALWAYS_INLINE uint32_t canonical(uint32_t a) { return is_nan_f32(a) ? UNITS_NAN_F32 : a; }
ALWAYS_INLINE uint32_t flushed(uint32_t a, int ftz) { return ftz && (a & INFINITY_F32) == 0 ? a & SIGN_F32 : a; }

/* round_f64_to_f32: correct for the exact value if `v` is exact or rounded to odd. */
ALWAYS_INLINE uint32_t round_f64(double v, int rounding) {
    float nearest = (float)v;
    uint32_t bits = bits_f32(nearest);
    if (rounding == UNITS_RN) return canonical(bits);
    double back = (double)nearest;
    int high = back > v, low = back < v;
    if (rounding == UNITS_RM) low = 0;
    if (rounding == UNITS_RP) high = 0;
    if (rounding == UNITS_RZ) high &= v > 0, low &= v < 0;
    uint32_t outward = bits >> 31; /* one place down is away from zero for a negative value, up for a positive one */
    uint32_t down = outward ? bits + 1 : bits - 1, up = outward ? bits - 1 : bits + 1;
    bits = high ? down : low ? up : bits;
    return canonical(bits);
}

/* x + y rounded to odd: exact, or a neighbour of the exact sum whose last bit is 1. Infinities and NaN as they come. */
ALWAYS_INLINE double odd_sum(double x, double y) {
    double total = x + y, y_part = total - x;
    double error = (x - (total - y_part)) + (y - y_part);
    uint64_t bits = bits_f64(total);
    int finite = (bits & 0x7FF0000000000000ull) != 0x7FF0000000000000ull;
    int inexact_even = finite && error != 0 && (bits & 1) == 0;
    int away = (error > 0) == (total > 0);
    return as_f64(inexact_even ? (away ? bits + 1 : bits - 1) : bits);
}

/* The lanes of `mask` take the results; the others keep what they hold. */
ALWAYS_INLINE void keep_lanes(uint32_t *d, const uint32_t *r, uint32_t mask) {
    if (mask == 0xFFFFFFFFu) {
        memcpy(d, r, 4 * UNITS_LANES);
        return;
    }
    for (int l = 0; l < UNITS_LANES; l++) d[l] = mask >> l & 1 ? r[l] : d[l];
}
ALWAYS_INLINE void keep_pairs(uint64_t *d, const uint32_t *r, uint32_t mask) {
    if (mask == 0xFFFFFFFFu) {
        memcpy(d, r, 8 * UNITS_LANES);
        return;
    }
    for (int l = 0; l < UNITS_LANES; l++)
        if (mask >> l & 1) memcpy(d + l, r + 2 * l, 8);
}

/* Statements for each lane `l`; straight-line code, so that compilers make vectors of it. */
#define EACH(count, ...)                                \
    for (int l = 0; l < (count); l++) {                 \
        __VA_ARGS__;                                    \
    }

#endif
