/* f32 arithmetic, packed f32x2, compares, the approximate functions, conversions: float_alu.py, moves.py, mufu.py.
 *
 * What a kernel does all the time (nearest even, subnormals kept) is written out here; the rest calls the units. */
#include "lanes.h"

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define D i->o[0]
#define A i->o[1]
#define B i->o[2]
#define C i->o[3]
enum { FTZ = 16, PROPAGATE_NAN = 32, NEGATE_A = 64, NEGATE_C = 128, SIGNED = 256 };
#define ROUNDING (int)(i->flags & 3)
#define IS_FTZ ((i->flags & FTZ) != 0)

static inline uint32_t *words(Warp *w, int32_t o) {
    static uint32_t sink[LANES];
    return o < 0 ? sink : to(w, o);
}
static inline uint64_t *wide(Warp *w, int32_t o) {
    static uint64_t sink[LANES];
    return o < 0 ? sink : to(w, o);
}

/* NaN results are canonical. */
static inline u32x canonical(f32x r) {
    u32x is_nan = (u32x)(r != r);
    return ((u32x)r & ~is_nan) | (is_nan & UNITS_NAN_F32);
}
static inline f32x half_of(const Warp *w, int32_t o, int half) { return ((const f32x *)at(w, o))[half]; }
/* 32 packed pairs are 64 floats; halves here are lanes 0..15 and 16..31. */
static inline void put_pairs(Warp *w, int32_t o, u32x low, u32x high) {
    u32x both[2] = {low, high};
    u64x value;
    memcpy(&value, both, sizeof value);
    put64(w, o, value);
}

#define PLAIN(name, expression)                             \
    RULE(name##_f32) {                                      \
        f32x a = f32_at(w, A), b = f32_at(w, B);            \
        put32(w, D, canonical(expression));                 \
        return NEXT;                                        \
    }                                                       \
    RULE(name##_f32x2) {                                    \
        u32x r[2];                                          \
        for (int h = 0; h < 2; h++) {                       \
            f32x a = half_of(w, A, h), b = half_of(w, B, h); \
            r[h] = canonical(expression);                   \
        }                                                   \
        put_pairs(w, D, r[0], r[1]);                        \
        return NEXT;                                        \
    }                                                       \
    RULE(name##r_f32) {                                     \
        units_##name##_f32_lanes(words(w, D), at(w, A), at(w, B), ROUNDING, IS_FTZ, w->mask); \
        return NEXT;                                        \
    }                                                       \
    RULE(name##r_f32x2) {                                   \
        units_##name##_f32_pairs(wide(w, D), at(w, A), at(w, B), ROUNDING, IS_FTZ, w->mask); \
        return NEXT;                                        \
    }

PLAIN(add, a + b)
PLAIN(sub, a - b)
PLAIN(mul, a *b)

static inline u32x fused(f32x a, f32x b, f32x c) { return canonical(__builtin_elementwise_fma(a, b, c)); }
static inline f32x negated(f32x a) { return (f32x)((u32x)a ^ 0x80000000u); }

RULE(fma_f32) {
    put32(w, D, fused(f32_at(w, A), f32_at(w, B), f32_at(w, C)));
    return NEXT;
}
/* A product and a subtraction that ptxas makes one instruction of. */
RULE(fman_f32) {
    f32x a = f32_at(w, A), c = f32_at(w, C);
    if (i->flags & NEGATE_A) a = negated(a);
    if (i->flags & NEGATE_C) c = negated(c);
    put32(w, D, fused(a, f32_at(w, B), c));
    return NEXT;
}
RULE(fma_f32x2) {
    u32x r[2];
    for (int h = 0; h < 2; h++) r[h] = fused(half_of(w, A, h), half_of(w, B, h), half_of(w, C, h));
    put_pairs(w, D, r[0], r[1]);
    return NEXT;
}
RULE(fmar_f32) {
    units_fma_f32_lanes(words(w, D), at(w, A), at(w, B), at(w, C), ROUNDING, IS_FTZ, w->mask);
    return NEXT;
}
RULE(fmar_f32x2) {
    units_fma_f32_pairs(wide(w, D), at(w, A), at(w, B), at(w, C), ROUNDING, IS_FTZ, w->mask);
    return NEXT;
}
RULE(fma_f32_bf16) {
    units_fma_f32_bf16_lanes(words(w, D), at(w, A), at(w, B), at(w, C), w->mask);
    return NEXT;
}

/* ---- minimum and maximum of two or three; signs ------------------------------------------------------------------ */

/* The one that is a number; +0 is larger than -0. */
static inline u32x larger(u32x a, u32x b) {
    u32x a_nan = (u32x)((f32x)a != (f32x)a), b_nan = (u32x)((f32x)b != (f32x)b);
    u32x equal = (u32x)((f32x)a == (f32x)b), first = (u32x)((f32x)a > (f32x)b) | b_nan;
    u32x r = choose32(equal, a & b, choose32(first, a, b));
    return choose32(a_nan & b_nan, (u32x)(UNITS_NAN_F32), r);
}
static inline u32x smaller(u32x a, u32x b) {
    u32x a_nan = (u32x)((f32x)a != (f32x)a), b_nan = (u32x)((f32x)b != (f32x)b);
    u32x equal = (u32x)((f32x)a == (f32x)b), first = (u32x)((f32x)a < (f32x)b) | b_nan;
    u32x r = choose32(equal, a | b, choose32(first, a, b));
    return choose32(a_nan & b_nan, (u32x)(UNITS_NAN_F32), r);
}
#define EXTREME(name, choose)                                                                                    \
    RULE(name##_f32) {                                                                                           \
        u32x r = choose(u32_at(w, A), u32_at(w, B));                                                             \
        put32(w, D, C < 0 ? r : choose(r, u32_at(w, C)));                                                        \
        return NEXT;                                                                                             \
    }                                                                                                            \
    RULE(name##x_f32) {                                                                                          \
        uint32_t r[LANES];                                                                                       \
        int nan = (i->flags & PROPAGATE_NAN) != 0;                                                               \
        units_##name##_f32_lanes(r, at(w, A), at(w, B), nan, IS_FTZ, FULL);                                      \
        if (C >= 0) units_##name##_f32_lanes(r, r, at(w, C), nan, IS_FTZ, FULL);                                 \
        u32x value;                                                                                              \
        memcpy(&value, r, sizeof value);                                                                         \
        put32(w, D, value);                                                                                      \
        return NEXT;                                                                                             \
    }
EXTREME(max, larger)
EXTREME(min, smaller)

#define UNIT1(name, call)                                  \
    RULE(name) {                                           \
        uint32_t *d = words(w, D);                         \
        const uint32_t *a = at(w, A);                      \
        call;                                              \
        return NEXT;                                       \
    }
#define UNIT2(name, call)                                  \
    RULE(name) {                                           \
        uint32_t *d = words(w, D);                         \
        const uint32_t *a = at(w, A), *b = at(w, B);       \
        call;                                              \
        return NEXT;                                       \
    }

UNIT1(neg_f32, units_neg_f32_lanes(d, a, IS_FTZ, w->mask))
UNIT1(abs_f32, units_abs_f32_lanes(d, a, IS_FTZ, w->mask))
UNIT2(copysign, units_copysign_f32_lanes(d, a, b, w->mask))
UNIT2(div_rn, units_div_f32_lanes(d, a, b, IS_FTZ, w->mask))
UNIT1(rcp_rn, units_rcp_rn_f32_lanes(d, a, IS_FTZ, w->mask))
UNIT1(sqrt_rn, units_sqrt_f32_lanes(d, a, IS_FTZ, w->mask))

/* ---- the multi-function unit ------------------------------------------------------------------------------------- */

#define TABLES (&w->run->launch->tables)
UNIT1(ex2_ftz, units_ex2_ftz_lanes(TABLES, d, a, w->mask))
UNIT1(ex2, units_ex2_lanes(TABLES, d, a, w->mask))
UNIT1(lg2_ftz, units_lg2_ftz_lanes(TABLES, d, a, w->mask))
UNIT1(rcp_ftz, units_rcp_ftz_lanes(TABLES, d, a, w->mask))
UNIT1(rsqrt_approx, units_rsqrt_lanes(d, a, 1, w->mask))
UNIT1(sqrt_approx, units_sqrt_approx_lanes(d, a, 1, w->mask))
UNIT1(tanh_approx, units_tanh_lanes(d, a, w->mask))
UNIT1(sin_approx, units_sin_lanes(d, a, 1, w->mask))
UNIT1(cos_approx, units_cos_lanes(d, a, 1, w->mask))

/* ---- compares ---------------------------------------------------------------------------------------------------- */

#define COMPARE(name, number)                                                                   \
    RULE(setp_##name##_f32) {                                                                   \
        put_predicate(w, D, units_compare_f32_lanes(at(w, A), at(w, B), number, IS_FTZ));       \
        return NEXT;                                                                            \
    }
#define ORDERED(name, number, sign)                                                             \
    RULE(setp_##name##_f32) {                                                                   \
        if (IS_FTZ) put_predicate(w, D, units_compare_f32_lanes(at(w, A), at(w, B), number, 1)); \
        else put_predicate(w, D, bits32(f32_at(w, A) sign f32_at(w, B)));                       \
        return NEXT;                                                                            \
    }
ORDERED(eq, UNITS_EQ, ==)
ORDERED(lt, UNITS_LT, <)
ORDERED(le, UNITS_LE, <=)
ORDERED(gt, UNITS_GT, >)
ORDERED(ge, UNITS_GE, >=)
ORDERED(neu, UNITS_NEU, !=)
COMPARE(ne, UNITS_NE)
COMPARE(equ, UNITS_EQU)
COMPARE(ltu, UNITS_LTU)
COMPARE(leu, UNITS_LEU)
COMPARE(gtu, UNITS_GTU)
COMPARE(geu, UNITS_GEU)
COMPARE(nan, UNITS_ISNAN)
COMPARE(num, UNITS_NUM)

/* ---- conversions ------------------------------------------------------------------------------------------------- */

UNIT1(cvt_bf16, units_cvt_bf16_lanes(d, a, w->mask))
UNIT1(cvt_f16, units_cvt_f16_lanes(d, a, w->mask))
UNIT2(cvt_bf16x2, units_cvt_bf16x2_lanes(d, a, b, w->mask))
UNIT2(cvt_f16x2, units_cvt_f16x2_lanes(d, a, b, w->mask))
UNIT1(cvt_f32_bf16, units_cvt_f32_bf16_lanes(d, a, w->mask))
UNIT1(cvt_f32_f16, units_cvt_f32_f16_lanes(d, a, w->mask))
UNIT2(cvt_e4m3x2, units_cvt_e4m3x2_lanes(d, a, b, w->mask))
UNIT2(cvt_e5m2x2, units_cvt_e5m2x2_lanes(d, a, b, w->mask))

/* rzi, rni, rmi, rpi as numbered in decode_alu.py. */
static const int MODES[4] = {UNITS_RZ, UNITS_RN, UNITS_RM, UNITS_RP};
UNIT1(round_f32, units_round_f32_lanes(d, a, MODES[i->flags & 3], IS_FTZ, w->mask))

RULE(cvt_int_f32) {
    u64x r = (u64x)(0ull);
    EACH_LANE(l, w->mask)
    r[l] = units_f32_to_integer(lane32(w, A, (int)l), MODES[i->flags & 3], i->size, (i->flags & SIGNED) != 0);
    if (i->size == 64) put64(w, D, r);
    else if (i->size == 32) put32(w, D, CONVERT(r, u32x));
    else put16(w, D, CONVERT(r, u32x));
    return NEXT;
}

#define FROM_INTEGER(kind, expression)                                             \
    RULE(cvt_f32_##kind) {                                                         \
        u32x r = (u32x)(0u);                                                       \
        EACH_LANE(l, w->mask) r[l] = (expression);                                 \
        put32(w, D, r);                                                            \
        return NEXT;                                                               \
    }
RULE(cvt_f32_s32) {
    putf(w, D, CONVERT(s32_at(w, A), f32x));
    return NEXT;
}
FROM_INTEGER(u32, units_u64_to_f32(lane32(w, A, (int)l)))
FROM_INTEGER(s64, units_s64_to_f32((int64_t)lane64(w, A, (int)l)))
FROM_INTEGER(u64, units_u64_to_f32(lane64(w, A, (int)l)))
FROM_INTEGER(s16, units_s64_to_f32((int16_t)lane32(w, A, (int)l)))
FROM_INTEGER(u16, units_u64_to_f32((uint16_t)lane32(w, A, (int)l)))
