/* Integer arithmetic, logic, shifts, compares and selects: integer_alu.py. */
#include "lanes.h"

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define A i->o[1]
#define B i->o[2]
#define C i->o[3]
#define D i->o[0]
/* One result from two or three sources, all read by the same function. */
#define BINARY(name, put, get, expression)              \
    RULE(name) {                                        \
        __auto_type a = get(w, A), b = get(w, B);       \
        put(w, D, expression);                          \
        return NEXT;                                    \
    }

BINARY(add_b32, put32, u32_at, a + b)
BINARY(add_b64, put64, u64_at, a + b)
BINARY(add_b16, put16, u32_at, a + b)
BINARY(sub_b32, put32, u32_at, a - b)
BINARY(sub_b64, put64, u64_at, a - b)
BINARY(sub_b16, put16, u32_at, a - b)
BINARY(mul_b32, put32, u32_at, a * b)
BINARY(mul_b64, put64, u64_at, a * b)
BINARY(mul_b16, put16, u32_at, a * b)
BINARY(mad_b32, put32, u32_at, a * b + u32_at(w, C))
BINARY(mad_b64, put64, u64_at, a * b + u64_at(w, C))
BINARY(mad_b16, put16, u32_at, a * b + u32_at(w, C))
BINARY(mulw_u16, put32, u32_at, a * b)
BINARY(madw_u16, put32, u32_at, a * b + u32_at(w, C))
BINARY(mulw_s16, put32, s16_at, (u32x)(a * b))
BINARY(madw_s16, put32, s16_at, (u32x)(a * b) + u32_at(w, C))
BINARY(mulw_u32, put64, u32_at, CONVERT(a, u64x) * CONVERT(b, u64x))
BINARY(madw_u32, put64, u32_at, CONVERT(a, u64x) * CONVERT(b, u64x) + u64_at(w, C))
BINARY(mulw_s32, put64, s32_at, (u64x)(CONVERT(a, s64x) * CONVERT(b, s64x)))
BINARY(madw_s32, put64, s32_at, (u64x)(CONVERT(a, s64x) * CONVERT(b, s64x)) + u64_at(w, C))
BINARY(mulhi_u32, put32, u32_at, CONVERT(CONVERT(a, u64x) * CONVERT(b, u64x) >> 32, u32x))
BINARY(mulhi_s32, put32, s32_at, CONVERT((u64x)(CONVERT(a, s64x) * CONVERT(b, s64x)) >> 32, u32x))

RULE(mulhi_u64) {
    u64x r = {0};
    for (int l = 0; l < LANES; l++)
        r[l] = (uint64_t)((unsigned __int128)lane64(w, A, l) * lane64(w, B, l) >> 64);
    put64(w, D, r);
    return NEXT;
}

/* ---- division ---------------------------------------------------------------------------------------------------- */

#define LANE_u32(o, l) lane32(w, o, l)
#define LANE_s32(o, l) (int32_t) lane32(w, o, l)
#define LANE_u64(o, l) lane64(w, o, l)
#define LANE_s64(o, l) (int64_t) lane64(w, o, l)
#define LANE_u16(o, l) (uint16_t) lane32(w, o, l)
#define LANE_s16(o, l) (int16_t) lane32(w, o, l)

static int divided_by_zero(Warp *w, uint32_t zero) {
    return fault(w, "integer division by zero in %d lanes", count_lanes(zero));
}

/* Quotients are cut toward zero; the remainder has the dividend's sign; MIN / -1 wraps. */
#define DIVISION(kind, type, vector, put, narrow)                                                    \
    RULE(div_##kind) {                                                                               \
        uint32_t zero = 0;                                                                           \
        vector r = {0};                                                                              \
        EACH_LANE(l, w->mask) {                                                                      \
            type a = LANE_##kind(A, l), b = LANE_##kind(B, l);                                       \
            if (b == 0) zero |= 1u << l;                                                             \
            else r[l] = narrow((type)-1 < 0 && b == (type)-1 ? (type)(0 - (uint64_t)a) : (type)(a / b)); \
        }                                                                                            \
        if (zero) return divided_by_zero(w, zero);                                                   \
        put(w, D, r);                                                                                \
        return NEXT;                                                                                 \
    }                                                                                                \
    RULE(rem_##kind) {                                                                               \
        uint32_t zero = 0;                                                                           \
        vector r = {0};                                                                              \
        EACH_LANE(l, w->mask) {                                                                      \
            type a = LANE_##kind(A, l), b = LANE_##kind(B, l);                                       \
            if (b == 0) zero |= 1u << l;                                                             \
            else r[l] = narrow((type)-1 < 0 && b == (type)-1 ? (type)0 : (type)(a % b));             \
        }                                                                                            \
        if (zero) return divided_by_zero(w, zero);                                                   \
        put(w, D, r);                                                                                \
        return NEXT;                                                                                 \
    }

DIVISION(u32, uint32_t, u32x, put32, (uint32_t))
DIVISION(s32, int32_t, u32x, put32, (uint32_t))
DIVISION(u64, uint64_t, u64x, put64, (uint64_t))
DIVISION(s64, int64_t, u64x, put64, (uint64_t))
DIVISION(u16, uint16_t, u32x, put16, (uint32_t))
DIVISION(s16, int16_t, u32x, put16, (uint32_t))

/* ---- minimum, maximum, signs ------------------------------------------------------------------------------------- */

#define MIN __builtin_elementwise_min
#define MAX __builtin_elementwise_max
#define EXTREMES(kind, put, get, type)                       \
    BINARY(min_##kind, put, get, (type)MIN(a, b))            \
    BINARY(max_##kind, put, get, (type)MAX(a, b))

EXTREMES(u32, put32, u32_at, u32x)
EXTREMES(s32, put32, s32_at, u32x)
EXTREMES(u64, put64, u64_at, u64x)
EXTREMES(s64, put64, s64_at, u64x)
EXTREMES(u16, put16, u32_at, u32x)
EXTREMES(s16, put16, s16_at, u32x)
BINARY(minrelu_s32, put32, s32_at, (u32x)MAX(MIN(a, b), (s32x)(0)))
BINARY(maxrelu_s32, put32, s32_at, (u32x)MAX(MAX(a, b), (s32x)(0)))

#define UNARY(name, put, get, expression) \
    RULE(name) {                          \
        __auto_type a = get(w, A);        \
        put(w, D, expression);            \
        return NEXT;                      \
    }

UNARY(neg_s16, put16, u32_at, 0u - a)
UNARY(neg_s32, put32, u32_at, 0u - a)
UNARY(neg_s64, put64, u64_at, 0ull - a)
UNARY(abs_s16, put16, s16_at, choose32((u32x)(a >> 31), 0u - (u32x)a, (u32x)a))
UNARY(abs_s32, put32, s32_at, choose32((u32x)(a >> 31), 0u - (u32x)a, (u32x)a))
UNARY(abs_s64, put64, s64_at, choose64((u64x)(a >> 63), 0ull - (u64x)a, (u64x)a))

/* ---- logic ------------------------------------------------------------------------------------------------------- */

UNARY(not_b16, put16, u32_at, ~a)
UNARY(not_b32, put32, u32_at, ~a)
UNARY(not_b64, put64, u64_at, ~a)
UNARY(not_pred, put_predicate, predicate, ~a)
BINARY(and_b32, put32, u32_at, a & b)
BINARY(or_b32, put32, u32_at, a | b)
BINARY(xor_b32, put32, u32_at, a ^ b)
BINARY(and_b64, put64, u64_at, a & b)
BINARY(or_b64, put64, u64_at, a | b)
BINARY(xor_b64, put64, u64_at, a ^ b)
BINARY(and_pred, put_predicate, predicate, a & b)
BINARY(or_pred, put_predicate, predicate, a | b)
BINARY(xor_pred, put_predicate, predicate, a ^ b)

RULE(lop3) {
    u32x a = u32_at(w, A), b = u32_at(w, B), c = u32_at(w, C), r = (u32x)(0);
    for (int k = 0; k < 8; k++)
        if (i->imm[0] >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    put32(w, D, r);
    return NEXT;
}

/* ---- shifts: amounts are clamped to the width -------------------------------------------------------------------- */

static inline u64x amounts(const Warp *w, int32_t o) { return CONVERT(u32_at(w, o), u64x); }
#define OVER32(n, bits) ((u32x)((n) >= (uint32_t)(bits)))

RULE(shl_u32) {
    u32x n = u32_at(w, B);
    put32(w, D, ~OVER32(n, 32) & u32_at(w, A) << (n & 31u));
    return NEXT;
}
RULE(shr_u32) {
    u32x n = u32_at(w, B);
    put32(w, D, ~OVER32(n, 32) & u32_at(w, A) >> (n & 31u));
    return NEXT;
}
RULE(shr_s32) {
    put32(w, D, (u32x)(s32_at(w, A) >> (s32x)MIN(u32_at(w, B), (u32x)(31u))));
    return NEXT;
}
RULE(shl_u16) {
    u32x n = u32_at(w, B);
    put16(w, D, ~OVER32(n, 16) & u32_at(w, A) << (n & 31u));
    return NEXT;
}
RULE(shr_u16) {
    u32x n = u32_at(w, B);
    put16(w, D, ~OVER32(n, 16) & u32_at(w, A) >> (n & 31u));
    return NEXT;
}
RULE(shr_s16) {
    put16(w, D, (u32x)(s16_at(w, A) >> (s32x)MIN(u32_at(w, B), (u32x)(15u))));
    return NEXT;
}
RULE(shl_u64) {
    u64x n = amounts(w, B);
    put64(w, D, ~(u64x)(n >= 64ull) & u64_at(w, A) << (n & 63ull));
    return NEXT;
}
RULE(shr_u64) {
    u64x n = amounts(w, B);
    put64(w, D, ~(u64x)(n >= 64ull) & u64_at(w, A) >> (n & 63ull));
    return NEXT;
}
RULE(shr_s64) {
    put64(w, D, (u64x)(s64_at(w, A) >> (s64x)MIN(amounts(w, B), (u64x)(63ull))));
    return NEXT;
}

/* {b,a} shifted; the high (left) or low word. flags: 1 left, 2 clamp. */
RULE(shf) {
    u32x n = u32_at(w, C);
    n = i->flags & 2 ? MIN(n, (u32x)(32u)) : n & 31u;
    u64x pool = CONVERT(u32_at(w, B), u64x) << 32 | CONVERT(u32_at(w, A), u64x), by = CONVERT(n, u64x);
    put32(w, D, CONVERT(i->flags & 1 ? pool << by >> 32 : pool >> by, u32x));
    return NEXT;
}

/* ---- bits -------------------------------------------------------------------------------------------------------- */

#define BY_LANE(name, expression)                                  \
    RULE(name) {                                                   \
        u32x r = (u32x)(0);                                        \
        for (int l = 0; l < LANES; l++) r[l] = (expression);       \
        put32(w, D, r);                                            \
        return NEXT;                                               \
    }

UNARY(popc, put32, u32_at, __builtin_elementwise_popcount(a))
UNARY(brev, put32, u32_at, __builtin_elementwise_bitreverse(a))
BY_LANE(clz, lane32(w, A, l) ? (uint32_t)__builtin_clz(lane32(w, A, l)) : 32u)

static uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t pool = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int k = 0; k < 4; k++) {
        uint32_t nibble = selector >> 4 * k & 15, byte = (uint32_t)(pool >> 8 * (nibble & 7)) & 255;
        r |= (nibble & 8 ? (byte >> 7 ? 255u : 0u) : byte) << 8 * k;
    }
    return r;
}
BY_LANE(prmt, permuted(lane32(w, A, l), lane32(w, B, l), lane32(w, C, l)))

static uint32_t extracted(uint32_t value, uint32_t p, uint32_t n, bool is_signed) {
    p &= 255, n &= 255;
    if (n > 32) n = 32;
    uint64_t field = (p < 64 ? (uint64_t)value >> p : 0) & (((uint64_t)1 << n) - 1);
    if (is_signed && n) {
        uint32_t top = p + n - 1 < 31 ? p + n - 1 : 31;
        if (value >> top & 1) field |= top >= p ? ~(uint64_t)0 << (top - p + 1) : ~(uint64_t)0;
    }
    return (uint32_t)field;
}
BY_LANE(bfe_u32, extracted(lane32(w, A, l), lane32(w, B, l), lane32(w, C, l), false))
BY_LANE(bfe_s32, extracted(lane32(w, A, l), lane32(w, B, l), lane32(w, C, l), true))

static uint32_t inserted(uint32_t x, uint32_t y, uint32_t p, uint32_t n) {
    p &= 255, n &= 255;
    if (p >= 32) return y;
    uint32_t ones = n >= 32 ? FULL : (1u << n) - 1;
    uint32_t field = ones << p;
    return (y & ~field) | (x << p & field);
}
BY_LANE(bfi, inserted(lane32(w, A, l), lane32(w, B, l), lane32(w, C, l), lane32(w, i->o[4], l)))

/* ---- compares and selects ---------------------------------------------------------------------------------------- */

#define COMPARE(name, kind, get, bits, sign) BINARY(setp_##name##_##kind, put_predicate, get, bits(a sign b))
#define COMPARES(kind, get, bits)            \
    COMPARE(lt, kind, get, bits, <)          \
    COMPARE(le, kind, get, bits, <=)         \
    COMPARE(gt, kind, get, bits, >)          \
    COMPARE(ge, kind, get, bits, >=)
#define EQUALITIES(kind, get, bits)          \
    COMPARE(eq, kind, get, bits, ==)         \
    COMPARE(ne, kind, get, bits, !=)

COMPARES(u32, u32_at, bits32)
COMPARES(s32, s32_at, bits32)
COMPARES(u64, u64_at, bits64)
COMPARES(s64, s64_at, bits64)
COMPARES(u16, u32_at, bits32)
COMPARES(s16, s16_at, bits32)
EQUALITIES(u32, u32_at, bits32)
EQUALITIES(u64, u64_at, bits64)
EQUALITIES(u16, u32_at, bits32)
BINARY(selp_b32, put32, u32_at, choose32(mask32(predicate(w, C)), a, b))
BINARY(selp_b64, put64, u64_at, choose64(mask64(predicate(w, C)), a, b))
