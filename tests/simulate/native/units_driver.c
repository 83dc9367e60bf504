/* Runs every numeric unit on fixed inputs and prints a digest of each one's results: equal on every host, and a program
 * that the sanitizers can watch. The tables are made up; only their use is compared. */
#include "units.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;
static uint64_t next(void) {
    uint64_t x = (state += 0x9E3779B97F4A7C15ull);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
/* All kinds of patterns: wild ones, short mantissas near each other, ends of the format. */
static uint32_t pattern(void) {
    static const uint32_t ENDS[] = {0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x3F800000,
                                    0x33000000, 0x38800000, 0x477FF000, 0x43E80000, 0x47680000, 0x4F000000, 0xFFFFFFFF};
    uint64_t r = next();
    switch (r & 3) {
    case 0: return (uint32_t)(r >> 32);
    case 1: return ENDS[r >> 8 & 15] ^ (uint32_t)(r & 1u << 31);
    default: return (uint32_t)(r >> 32 & 0x80000000u) | (100 + (uint32_t)(r >> 8) % 54) << 23 |
                    ((uint32_t)(r >> 20 & 0x3FF) << (r >> 40) % 14 & 0x7FFFFF);
    }
}

static uint64_t digest;
static void note(const void *data, size_t size) {
    for (size_t i = 0; i < size; i++) digest = (digest ^ ((const uint8_t *)data)[i]) * 0x100000001B3ull;
}
static void begin(void) { state = 1, digest = 0xCBF29CE484222325ull; }
static void end(const char *name) { printf("%s %016" PRIx64 "\n", name, digest); }

#define ROUNDS 2000
static uint32_t a[64], b[64], c[64], d[64];
static uint64_t wa[32], wb[32], wc[32], wd[32];
static void fill(void) {
    for (int i = 0; i < 64; i++) a[i] = pattern(), b[i] = pattern(), c[i] = pattern(), d[i] = 0;
    memcpy(wa, a, sizeof wa), memcpy(wb, b, sizeof wb), memcpy(wc, c, sizeof wc), memset(wd, 0, sizeof wd);
}
#define UNIT(name, ...)                                                                \
    begin();                                                                           \
    for (int round = 0; round < ROUNDS; round++) {                                     \
        int rounding = round & 3, ftz = round >> 2 & 1;                                \
        uint32_t mask = round & 8 ? 0xFFFFFFFFu : (uint32_t)next();                    \
        (void)rounding, (void)ftz, (void)mask;                                         \
        fill();                                                                        \
        __VA_ARGS__;                                                                   \
        note(d, sizeof d), note(wd, sizeof wd);                                        \
    }                                                                                  \
    end(name);

static void arithmetic(void) {
    UNIT("add", units_add_f32_lanes(d, a, b, rounding, ftz, mask))
    UNIT("sub", units_sub_f32_lanes(d, a, b, rounding, ftz, mask))
    UNIT("mul", units_mul_f32_lanes(d, a, b, rounding, ftz, mask))
    UNIT("fma", units_fma_f32_lanes(d, a, b, c, rounding, ftz, mask))
    UNIT("add pairs", units_add_f32_pairs(wd, wa, wb, rounding, ftz, mask))
    UNIT("sub pairs", units_sub_f32_pairs(wd, wa, wb, rounding, ftz, mask))
    UNIT("mul pairs", units_mul_f32_pairs(wd, wa, wb, rounding, ftz, mask))
    UNIT("fma pairs", units_fma_f32_pairs(wd, wa, wb, wc, rounding, ftz, mask))
    UNIT("fma bf16", units_fma_f32_bf16_lanes(d, a, b, c, mask))
    UNIT("max", units_max_f32_lanes(d, a, b, rounding & 1, ftz, mask))
    UNIT("min", units_min_f32_lanes(d, a, b, rounding & 1, ftz, mask))
    UNIT("neg", units_neg_f32_lanes(d, a, ftz, mask))
    UNIT("abs", units_abs_f32_lanes(d, a, ftz, mask))
    UNIT("copysign", units_copysign_f32_lanes(d, a, b, mask))
    UNIT("div", units_div_f32_lanes(d, a, b, ftz, mask))
    UNIT("rcp rn", units_rcp_rn_f32_lanes(d, a, ftz, mask))
    UNIT("sqrt rn", units_sqrt_f32_lanes(d, a, ftz, mask))
    UNIT("compare", d[0] = units_compare_f32_lanes(a, b, round % 14, ftz))
    UNIT("scalars", d[0] = units_add_f32(a[0], b[0], rounding, ftz); d[1] = units_sub_f32(a[1], b[1], rounding, ftz);
         d[2] = units_mul_f32(a[2], b[2], rounding, ftz); d[3] = units_fma_f32(a[3], b[3], c[3], rounding, ftz);
         d[4] = units_div_f32(a[4], b[4], ftz); d[5] = units_sqrt_f32(a[5], ftz);
         d[6] = units_max_f32(a[6], b[6], rounding & 1, ftz); d[7] = units_min_f32(a[7], b[7], rounding & 1, ftz))
}

static void conversions(void) {
    UNIT("bf16", units_cvt_bf16_lanes(d, a, mask))
    UNIT("f16", units_cvt_f16_lanes(d, a, mask))
    UNIT("bf16x2", units_cvt_bf16x2_lanes(d, a, b, mask))
    UNIT("f16x2", units_cvt_f16x2_lanes(d, a, b, mask))
    UNIT("f32 of bf16", units_cvt_f32_bf16_lanes(d, a, mask))
    UNIT("f32 of f16", units_cvt_f32_f16_lanes(d, a, mask))
    UNIT("e4m3x2", units_cvt_e4m3x2_lanes(d, a, b, mask))
    UNIT("e5m2x2", units_cvt_e5m2x2_lanes(d, a, b, mask))
    UNIT("round", units_round_f32_lanes(d, a, rounding, ftz, mask))
    UNIT("integers", for (int i = 0; i < 32; i++)
         wd[i] = units_f32_to_integer(a[i], rounding, 16 << round % 3, ftz))
    UNIT("from integers", d[0] = units_s64_to_f32((int64_t)next() >> round % 60);
         d[1] = units_u64_to_f32(next() >> round % 60))
    UNIT("scalar formats", d[0] = units_f32_to_bf16(a[0], rounding & 1, ftz); d[1] = units_f32_to_f16(a[1], rounding & 1, ftz);
         d[2] = units_bf16_to_f32((uint16_t)a[2]); d[3] = units_f16_to_f32((uint16_t)a[3]); d[4] = units_f32_to_e4m3(a[4]);
         d[5] = units_f32_to_e5m2(a[5]); d[6] = units_e4m3_to_f32((uint8_t)round); d[7] = units_e5m2_to_f32((uint8_t)round))
}

static void special(void) {
    int32_t *ex2 = malloc(4u << 23);
    int8_t *rcp = malloc(1u << 23);
    int64_t *squares = malloc(8u << 17);
    if (!ex2 || !rcp || !squares) exit(3);
    for (int i = 0; i < 1 << 23; i++) ex2[i] = 0x40000000 + i, rcp[i] = (int8_t)(i % 3 - 1);
    for (int i = 0; i < 1 << 17; i++) squares[i] = (int64_t)i * i >> 19;
    units_tables t = {ex2, rcp, squares};
    UNIT("ex2 ftz", units_ex2_ftz_lanes(&t, d, a, mask))
    UNIT("ex2", units_ex2_lanes(&t, d, a, mask))
    UNIT("lg2", units_lg2_ftz_lanes(&t, d, a, mask))
    UNIT("rcp", units_rcp_ftz_lanes(&t, d, a, mask))
    UNIT("rsqrt", units_rsqrt_lanes(d, a, ftz, mask))
    UNIT("sqrt", units_sqrt_approx_lanes(d, a, ftz, mask))
    UNIT("tanh", units_tanh_lanes(d, a, mask))
    UNIT("sin", units_sin_lanes(d, a, ftz, mask))
    UNIT("cos", units_cos_lanes(d, a, ftz, mask))
    free(ex2), free(rcp), free(squares);
}

/* Every fourth product has wild operands; arrays have no spare room, so that a sanitizer sees a step beyond them. */
static void products(units_type type, size_t size, int step, const char *name) {
    begin();
    for (int round = 0; round < 24; round++) {
        int m = 1 + (int)(next() % 40), n = round == 5 ? 256 : 1 + (int)(next() % 130), k = step * (1 + round % 2), stride = n + round % 3;
        size_t ka = (size_t)k * size, na = (size_t)m * ka, nb = (size_t)n * ka, nd = (size_t)(m * stride - (stride - n));
        uint8_t *x = malloc(na), *y = malloc(nb);
        uint32_t *z = malloc(4 * nd), rows[2] = {(uint32_t)next(), (uint32_t)next()};
        if (!x || !y || !z) exit(3);
        for (size_t i = 0; i < na; i++) x[i] = round % 4 == 3 || i % size != size - 1 ? (uint8_t)next() : (next() & 0x80) | 0x3F;
        for (size_t i = 0; i < nb; i++) y[i] = round % 4 == 3 || i % size != size - 1 ? (uint8_t)next() : (next() & 0x80) | 0x3F;
        for (size_t i = 0; i < nd; i++) z[i] = pattern();
        units_mma(m, n, k, type, x, type, y, z, stride, round & 1, round % 5 ? NULL : rows);
        note(z, 4 * nd);
        free(x), free(y), free(z);
    }
    end(name);
}

int main(void) {
    arithmetic();
    conversions();
    special();
    products(UNITS_BF16, 2, 16, "mma bf16");
    products(UNITS_F16, 2, 16, "mma f16");
    products(UNITS_TF32, 4, 8, "mma tf32");
    products(UNITS_E4M3, 1, 32, "mma e4m3");
    products(UNITS_E5M2, 1, 32, "mma e5m2");
    return 0;
}
