/* tanh, sin and cos, correctly rounded (mufu.py), without the C library: its last places differ between hosts.
 *
 * float64 decides nearly always; where its error could change the f32, 113 bits decide. Both use the same reductions:
 * tanh by exp(-2|x|) or its continued fraction, sin and cos by the 128 bits of x * 2/pi behind its multiples of 4.
 */
#include "units_inner.h"

#ifdef __SIZEOF_FLOAT128__
typedef __float128 quad;
#else
typedef long double quad; /* 113 bits where there is no other */
#endif

typedef __int128 s128;
typedef unsigned __int128 u128;

/* Sums of three float64, 160 bits. */
#define LN2_0 0x1.62e42fefa39efp-1
#define LN2_1 0x1.abc9e3b39803fp-56
#define LN2_2 0x1.7b57a079a1934p-111
#define HALF_PI_0 0x1.921fb54442d18p+0
#define HALF_PI_1 0x1.1a62633145c07p-54
#define HALF_PI_2 -0x1.f1976b7ed8fbcp-110
/* ln 2 in 32 bits, whose products with small integers are exact, and the rest. */
#define LN2_SHORT 0x1.62e42fee00000p-1
#define LN2_REST 0x1.a39ef35793c76p-33

/* Twice the error of float64 here is far below this part of the value. */
#ifndef DOUBT
#define DOUBT 0x1p-44
#endif

ALWAYS_INLINE int is_decided(double v) { return (float)(v - v * DOUBT) == (float)(v + v * DOUBT); }
ALWAYS_INLINE double power_of_two(int e) { return as_f64((uint64_t)(e + 1023) << 52); }

/* ---- tanh of x in (0, 10) ---------------------------------------------------------------------------------------- */

#define EXP_SERIES(type, r, terms)                                     \
    type sum = 1;                                                      \
    for (int i = (terms); i > 0; i--) sum = 1 + (r) * sum / (type)i;
/* x / (1 + x^2 / (3 + x^2 / (5 + ...))) */
#define TANH_FRACTION(type, x, last)                                                 \
    type square = (x) * (x), below = (last);                                         \
    for (int i = (last)-2; i > 0; i -= 2) below = (type)i + square / below;

static double exp_f64(double y) {
    int n = (int)(y * 0x1.71547652b82fep+0 - 0.5);
    double r = (y - n * LN2_SHORT) - n * LN2_REST;
    EXP_SERIES(double, r, 14)
    return sum * power_of_two(n);
}
static quad exp_quad(quad y) {
    int n = (int)((double)y * 0x1.71547652b82fep+0 - 0.5);
    quad r = y - (quad)n * ((quad)LN2_0 + (quad)LN2_1 + (quad)LN2_2);
    EXP_SERIES(quad, r, 30)
    return sum * (quad)power_of_two(n);
}
static double tanh_f64(double x) {
    if (x < 0.5) {
        TANH_FRACTION(double, x, 17)
        return x / below;
    }
    double e = exp_f64(-2 * x);
    return (1 - e) / (1 + e);
}
static quad tanh_quad(quad x) {
    if (x < 0.5) {
        TANH_FRACTION(quad, x, 41)
        return x / below;
    }
    quad e = exp_quad(-2 * x);
    return (1 - e) / (1 + e);
}

static uint32_t tanh_f32(uint32_t a) {
    uint32_t magnitude = a & MAGNITUDE_F32, sign = a & SIGN_F32;
    if (magnitude > INFINITY_F32) return UNITS_NAN_F32;
    if (magnitude >= 0x41200000u) return 0x3F800000u | sign; /* 10: 1 - tanh is below 2^-27 */
    if (magnitude == 0) return a;
    double x = as_f32(magnitude), v = tanh_f64(x);
    float r = is_decided(v) ? (float)v : (float)tanh_quad(x);
    return bits_f32(r) | sign;
}

/* ---- sin and cos ------------------------------------------------------------------------------------------------- */

/* 2/pi in units of 2^-320, lowest word first. */
static const uint64_t TWO_OVER_PI[5] = {0xB7246E3A424DD2E0u, 0xFE5163ABDEBBC561u, 0xDB6295993C439041u,
                                        0xFC2757D1F534DDC0u, 0xA2F9836E4E441529u};

/* x = (quadrant + fraction / 2^126) * pi/2, |fraction| <= 2^125; x is positive, at least 2^-1. */
static s128 reduce(uint32_t a, int *quadrant) {
    uint64_t words[7] = {0}, mantissa = (a & 0x7FFFFFu) | 0x800000u;
    int exponent = (int)(a >> 23) - 150, low = 194 - exponent; /* the bit of the product that is worth 2^-126 */
    u128 carry = 0;
    for (int i = 0; i < 5; i++) {
        carry += (u128)TWO_OVER_PI[i] * mantissa;
        words[i] = (uint64_t)carry;
        carry >>= 64;
    }
    words[5] = (uint64_t)carry;
    int word = low / 64, shift = low % 64;
    u128 bits = (u128)words[word + 1] << 64 | words[word];
    if (shift) bits = bits >> shift | (u128)words[word + 2] << (128 - shift);
    u128 fraction = bits << 2 >> 2;
    int up = (int)(fraction >> 125) & 1;
    *quadrant = ((int)(bits >> 126) + up) & 3;
    return (s128)fraction - ((s128)up << 126);
}

/* Taylor series about 0, |r| < 0.79: from the innermost factor of 1 - r^2/(k(k+1)) * (...). */
#define SERIES(type, r, first, last)                                                                    \
    type square = (r) * (r), sum = 1;                                                                   \
    for (int i = (last); i >= (first); i -= 2) sum = 1 - square * sum / (type)(i * (i + 1));

static double sine_f64(double r) {
    SERIES(double, r, 2, 20)
    return r * sum;
}
static double cosine_f64(double r) {
    SERIES(double, r, 1, 19)
    return sum;
}
static quad sine_quad(quad r) {
    SERIES(quad, r, 2, 34)
    return r * sum;
}
static quad cosine_quad(quad r) {
    SERIES(quad, r, 1, 33)
    return sum;
}

/* sin(x + turns * pi/2) */
static uint32_t sine_f32(uint32_t a, int turns) {
    uint32_t magnitude = a & MAGNITUDE_F32;
    if (magnitude >= INFINITY_F32) return UNITS_NAN_F32;
    if (magnitude == 0) return turns ? 0x3F800000u : a;
    int quadrant = 0;
    double r = as_f32(magnitude);
    quad exact = r;
    if (magnitude > 0x3F400000u) { /* 0.75 */
        s128 fraction = reduce(magnitude, &quadrant);
        r = (double)fraction * 0x1p-126 * HALF_PI_0;
        exact = (quad)fraction * (quad)0x1p-126 * ((quad)HALF_PI_0 + (quad)HALF_PI_1 + (quad)HALF_PI_2);
    }
    quadrant = (quadrant + turns) & 3;
    double v = quadrant & 1 ? cosine_f64(r) : sine_f64(r);
    float f = is_decided(v) ? (float)v : (float)(quadrant & 1 ? cosine_quad(exact) : sine_quad(exact));
    uint32_t sign = (quadrant & 2 ? SIGN_F32 : 0) ^ (turns ? 0 : a & SIGN_F32);
    return bits_f32(f) ^ sign;
}

/* ---- lanes ------------------------------------------------------------------------------------------------------- */

void units_tanh_lanes(uint32_t *d, const uint32_t *a, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    for (int l = 0; l < UNITS_LANES; l++) r[l] = tanh_f32(a[l]);
    keep_lanes(d, r, mask);
}
void units_sin_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    for (int l = 0; l < UNITS_LANES; l++) r[l] = flushed(sine_f32(flushed(a[l], ftz), 0), ftz);
    keep_lanes(d, r, mask);
}
void units_cos_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    for (int l = 0; l < UNITS_LANES; l++) r[l] = flushed(sine_f32(flushed(a[l], ftz), 1), ftz);
    keep_lanes(d, r, mask);
}
