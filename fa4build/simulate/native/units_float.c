/* f32 arithmetic, scalar and by lanes: float_formats.py, float_alu.py. */
#include "units_inner.h"

/* ---- one value --------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE uint32_t sum_rounded(double x, double y, int rounding) {
    double total = odd_sum(x, y);
    uint32_t result = round_f64(total, rounding);
    if (rounding != UNITS_RM) return result;
    /* Rounding down, an exact zero sum is -0 unless both addends are +0. */
    int both_plus_zero = (bits_f64(x) | bits_f64(y)) == 0;
    return total == 0 && !both_plus_zero ? SIGN_F32 : result;
}

ALWAYS_INLINE uint32_t add(uint32_t a, uint32_t b, int rounding, int ftz) {
    a = flushed(a, ftz), b = flushed(b, ftz);
    uint32_t r = rounding == UNITS_RN ? canonical(bits_f32(as_f32(a) + as_f32(b)))
                                      : sum_rounded(as_f32(a), as_f32(b), rounding);
    return flushed(r, ftz);
}

ALWAYS_INLINE uint32_t sub(uint32_t a, uint32_t b, int rounding, int ftz) { return add(a, b ^ SIGN_F32, rounding, ftz); }

ALWAYS_INLINE uint32_t mul(uint32_t a, uint32_t b, int rounding, int ftz) {
    a = flushed(a, ftz), b = flushed(b, ftz);
    uint32_t r = rounding == UNITS_RN ? canonical(bits_f32(as_f32(a) * as_f32(b)))
                                      : round_f64((double)as_f32(a) * as_f32(b), rounding);
    return flushed(r, ftz);
}

/* The product of two f32 is exact in float64. */
ALWAYS_INLINE uint32_t fused(uint32_t a, uint32_t b, uint32_t c, int rounding, int ftz) {
    a = flushed(a, ftz), b = flushed(b, ftz), c = flushed(c, ftz);
#if defined(__FMA__) || defined(__aarch64__)
    if (rounding == UNITS_RN) return flushed(canonical(bits_f32(__builtin_fmaf(as_f32(a), as_f32(b), as_f32(c)))), ftz);
#endif
    return flushed(sum_rounded((double)as_f32(a) * as_f32(b), as_f32(c), rounding), ftz);
}

ALWAYS_INLINE uint32_t div(uint32_t a, uint32_t b, int ftz) {
    return flushed(canonical(bits_f32(as_f32(flushed(a, ftz)) / as_f32(flushed(b, ftz)))), ftz);
}

ALWAYS_INLINE uint32_t root(uint32_t a, int ftz) {
    return flushed(canonical(bits_f32(__builtin_sqrtf(as_f32(flushed(a, ftz))))), ftz);
}

/* Integers in the order of the values, -0 below +0. */
ALWAYS_INLINE int32_t ordered(uint32_t a) { return (int32_t)(a ^ (uint32_t)((int32_t)a >> 31 & 0x7FFFFFFF)); }

ALWAYS_INLINE uint32_t choose(uint32_t a, uint32_t b, int larger, int propagate_nan, int ftz) {
    a = flushed(a, ftz), b = flushed(b, ftz);
    int a_nan = is_nan_f32(a), b_nan = is_nan_f32(b);
    int a_wins = (ordered(a) >= ordered(b)) == larger;
    uint32_t r = (a_wins && !a_nan) || b_nan ? a : b;
    int none = propagate_nan ? a_nan | b_nan : a_nan & b_nan;
    return none ? UNITS_NAN_F32 : r;
}

#define BY_ROUNDING(function, ...)                                   \
    switch (rounding) {                                              \
    case UNITS_RZ: return function(__VA_ARGS__, UNITS_RZ, ftz);      \
    case UNITS_RM: return function(__VA_ARGS__, UNITS_RM, ftz);      \
    case UNITS_RP: return function(__VA_ARGS__, UNITS_RP, ftz);      \
    default: return function(__VA_ARGS__, UNITS_RN, ftz);            \
    }

uint32_t units_add_f32(uint32_t a, uint32_t b, int rounding, int ftz) { BY_ROUNDING(add, a, b) }
uint32_t units_sub_f32(uint32_t a, uint32_t b, int rounding, int ftz) { BY_ROUNDING(sub, a, b) }
uint32_t units_mul_f32(uint32_t a, uint32_t b, int rounding, int ftz) { BY_ROUNDING(mul, a, b) }
uint32_t units_fma_f32(uint32_t a, uint32_t b, uint32_t c, int rounding, int ftz) { BY_ROUNDING(fused, a, b, c) }
uint32_t units_div_f32(uint32_t a, uint32_t b, int ftz) { return div(a, b, ftz); }
uint32_t units_sqrt_f32(uint32_t a, int ftz) { return root(a, ftz); }
uint32_t units_max_f32(uint32_t a, uint32_t b, int propagate_nan, int ftz) { return choose(a, b, 1, propagate_nan, ftz); }
uint32_t units_min_f32(uint32_t a, uint32_t b, int propagate_nan, int ftz) { return choose(a, b, 0, propagate_nan, ftz); }

/* ---- lanes and pairs --------------------------------------------------------------------------------------------- */

/* One loop for each rounding and ftz, so that each of them is straight-line code over vectors. */
#define LOOP(count, call, round, flush) \
    case (round) * 2 + (flush):         \
        EACH(count, r[l] = call(round, flush)) break;
#define LOOPS(count, call)                   \
    switch (rounding * 2 + (ftz != 0)) {     \
        LOOP(count, call, UNITS_RN, 0)       \
        LOOP(count, call, UNITS_RN, 1)       \
        LOOP(count, call, UNITS_RZ, 0)       \
        LOOP(count, call, UNITS_RZ, 1)       \
        LOOP(count, call, UNITS_RM, 0)       \
        LOOP(count, call, UNITS_RM, 1)       \
        LOOP(count, call, UNITS_RP, 0)       \
        LOOP(count, call, UNITS_RP, 1)       \
    default: break;                          \
    }

#define BINARY(name)                                                                                                  \
    void units_##name##_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int rounding, int ftz,           \
                                  uint32_t mask) {                                                                    \
        uint32_t r[UNITS_LANES] = {0};                                                                                \
        LOOPS(UNITS_LANES, name##_at)                                                                                 \
        keep_lanes(d, r, mask);                                                                                       \
    }                                                                                                                 \
    void units_##name##_f32_pairs(uint64_t *d, const uint64_t *a64, const uint64_t *b64, int rounding, int ftz,       \
                                  uint32_t mask) {                                                                    \
        uint32_t r[2 * UNITS_LANES] = {0}, a[2 * UNITS_LANES], b[2 * UNITS_LANES];                                    \
        memcpy(a, a64, sizeof a), memcpy(b, b64, sizeof b);                                                           \
        LOOPS(2 * UNITS_LANES, name##_at)                                                                             \
        keep_pairs(d, r, mask);                                                                                       \
    }
#define add_at(round, flush) add(a[l], b[l], round, flush)
#define sub_at(round, flush) sub(a[l], b[l], round, flush)
#define mul_at(round, flush) mul(a[l], b[l], round, flush)
#define fma_at(round, flush) fused(a[l], b[l], c[l], round, flush)
BINARY(add)
BINARY(sub)
BINARY(mul)

void units_fma_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c, int rounding, int ftz,
                         uint32_t mask) {
    uint32_t r[UNITS_LANES] = {0};
    LOOPS(UNITS_LANES, fma_at)
    keep_lanes(d, r, mask);
}

void units_fma_f32_pairs(uint64_t *d, const uint64_t *a64, const uint64_t *b64, const uint64_t *c64, int rounding,
                         int ftz, uint32_t mask) {
    uint32_t r[2 * UNITS_LANES] = {0}, a[2 * UNITS_LANES], b[2 * UNITS_LANES], c[2 * UNITS_LANES];
    memcpy(a, a64, sizeof a), memcpy(b, b64, sizeof b), memcpy(c, c64, sizeof c);
    LOOPS(2 * UNITS_LANES, fma_at)
    keep_pairs(d, r, mask);
}

void units_fma_f32_bf16_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    EACH(UNITS_LANES, r[l] = fused(a[l] << 16, b[l] << 16, c[l], UNITS_RN, 0))
    keep_lanes(d, r, mask);
}

#define CHOICE(name, larger)                                                                                           \
    void units_##name##_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int propagate_nan, int ftz,      \
                                  uint32_t mask) {                                                                    \
        uint32_t r[UNITS_LANES];                                                                                      \
        EACH(UNITS_LANES, r[l] = choose(a[l], b[l], larger, propagate_nan, ftz))                                      \
        keep_lanes(d, r, mask);                                                                                       \
    }
CHOICE(max, 1)
CHOICE(min, 0)

#define UNARY(name, parameters, expression)                                 \
    void units_##name##_lanes(uint32_t *d, const uint32_t *a, parameters) { \
        uint32_t r[UNITS_LANES];                                            \
        EACH(UNITS_LANES, r[l] = expression)                                \
        keep_lanes(d, r, mask);                                             \
    }
#define FTZ_MASK int ftz, uint32_t mask
UNARY(neg_f32, FTZ_MASK, flushed(a[l], ftz) ^ SIGN_F32)
UNARY(abs_f32, FTZ_MASK, flushed(a[l], ftz) & MAGNITUDE_F32)
UNARY(rcp_rn_f32, FTZ_MASK, div(0x3F800000u, a[l], ftz))
UNARY(sqrt_f32, FTZ_MASK, root(a[l], ftz))

void units_copysign_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    EACH(UNITS_LANES, r[l] = (b[l] & MAGNITUDE_F32) | (a[l] & SIGN_F32))
    keep_lanes(d, r, mask);
}

void units_div_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int ftz, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    EACH(UNITS_LANES, r[l] = div(a[l], b[l], ftz))
    keep_lanes(d, r, mask);
}

/* ---- comparisons ------------------------------------------------------------------------------------------------- */

/* `less`, `equal`, `greater`, `unordered`: which of the four outcomes make the comparison true. */
static const uint8_t TRUE_FOR[14] = {
    [UNITS_EQ] = 2,  [UNITS_NE] = 5,   [UNITS_LT] = 1,   [UNITS_LE] = 3,  [UNITS_GT] = 4,  [UNITS_GE] = 6,
    [UNITS_EQU] = 10, [UNITS_NEU] = 13, [UNITS_LTU] = 9, [UNITS_LEU] = 11, [UNITS_GTU] = 12, [UNITS_GEU] = 14,
    [UNITS_ISNAN] = 8, [UNITS_NUM] = 7,
};

uint32_t units_compare_f32_lanes(const uint32_t *a, const uint32_t *b, int comparison, int ftz) {
    uint32_t hit[UNITS_LANES], wanted = TRUE_FOR[comparison], mask = 0;
    EACH(UNITS_LANES, float x = as_f32(flushed(a[l], ftz)); float y = as_f32(flushed(b[l], ftz));
         uint32_t outcome = x < y ? 1u : x == y ? 2u : x > y ? 4u : 8u; hit[l] = (outcome & wanted) != 0)
    for (int l = 0; l < UNITS_LANES; l++) mask |= hit[l] << l;
    return mask;
}
