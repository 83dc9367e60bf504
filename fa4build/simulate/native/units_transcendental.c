/* tanh, sin and cos, correctly rounded (mufu.py), without the C library: its last places differ between hosts.
 *
 * float64 decides nearly always; where its error could change the f32, 113 bits decide. Reductions:
 * tanh by exp(-2|x|), sin and cos by the 128 bits of x * 2/pi behind its multiples of 4.
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
#define TANH_IS_ONE 0x41200000u /* from 10 on: 1 - tanh is below 2^-27 */

ALWAYS_INLINE int is_decided(double v) { return (float)(v - v * DOUBT) == (float)(v + v * DOUBT); }
ALWAYS_INLINE double power_of_two(int e) { return as_f64((uint64_t)(e + 1023) << 52); }

/* ---- tanh of x in (0, 10) ---------------------------------------------------------------------------------------- */

/* 1/(k+1)! */
static const double EXPM1[14] = {
    1.0,          1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,        1.0 / 720,         1.0 / 5040,
    1.0 / 40320,  1.0 / 362880,  1.0 / 3628800,  1.0 / 39916800,  1.0 / 479001600,  1.0 / 6227020800,  1.0 / 87178291200,
};

/* By t = exp(-2x) - 1 = 2^n (exp(r) - 1) + (2^n - 1): accurate also for small x, where n is 0. */
ALWAYS_INLINE double tanh_f64(double x) {
    double y = -2 * x;
    int n = (int)(y * 0x1.71547652b82fep+0 - 0.5);
    double r = (y - n * LN2_SHORT) - n * LN2_REST, sum = EXPM1[13];
    for (int i = 12; i >= 0; i--) sum = sum * r + EXPM1[i];
    double power = power_of_two(n), t = power * (r * sum) + (power - 1);
    return -t / (2 + t);
}

static quad exp_quad(quad y) {
    int n = (int)((double)y * 0x1.71547652b82fep+0 - 0.5);
    quad r = y - (quad)n * ((quad)LN2_0 + (quad)LN2_1 + (quad)LN2_2);
    quad sum = 1;
    for (int i = 30; i > 0; i--) sum = 1 + r * sum / (quad)i;
    return sum * (quad)power_of_two(n);
}
/* By exp(-2x), or for small x by x / (1 + x^2 / (3 + x^2 / (5 + ...))). */
static quad tanh_quad(quad x) {
    if (x < 0.5) {
        quad square = x * x, below = 41;
        for (int i = 39; i > 0; i -= 2) below = (quad)i + square / below;
        return x / below;
    }
    quad e = exp_quad(-2 * x);
    return (1 - e) / (1 + e);
}

/* `v`: tanh_f64 of the magnitude, where that is in the range. */
ALWAYS_INLINE uint32_t tanh_from(uint32_t a, double v) {
    uint32_t magnitude = a & MAGNITUDE_F32, sign = a & SIGN_F32;
    if (magnitude > INFINITY_F32) return UNITS_NAN_F32;
    if (magnitude >= TANH_IS_ONE) return 0x3F800000u | sign;
    if (magnitude == 0) return a;
    float r = is_decided(v) ? (float)v : (float)tanh_quad((quad)as_f32(magnitude));
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
ALWAYS_INLINE double series_f64(double r, int first, int last) {
    double square = r * r, sum = 1;
    for (int i = last; i >= first; i -= 2) sum = 1 - square * sum * (1.0 / (i * (i + 1)));
    return sum;
}
static quad series_quad(quad r, int first, int last) {
    quad square = r * r, sum = 1;
    for (int i = last; i >= first; i -= 2) sum = 1 - square * sum / (quad)(i * (i + 1));
    return sum;
}
static double sine_f64(double r) { return r * series_f64(r, 2, 20); }
static double cosine_f64(double r) { return series_f64(r, 1, 19); }
static quad sine_quad(quad r) { return r * series_quad(r, 2, 34); }
static quad cosine_quad(quad r) { return series_quad(r, 1, 33); }

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
    double v[UNITS_LANES];
    EACH(UNITS_LANES, uint32_t x = a[l] & MAGNITUDE_F32; v[l] = tanh_f64((double)as_f32(x < TANH_IS_ONE ? x : 0)))
    for (int l = 0; l < UNITS_LANES; l++) r[l] = tanh_from(a[l], v[l]);
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
