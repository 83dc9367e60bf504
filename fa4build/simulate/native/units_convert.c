/* Conversions between formats: float_formats.py, moves.py. */
#include "units_inner.h"

/* ---- 16 bits ----------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE uint32_t bf16_rn(uint32_t a) { return is_nan_f32(a) ? 0x7FFFu : (a + 0x7FFFu + (a >> 16 & 1)) >> 16; }
ALWAYS_INLINE uint32_t bf16_rz(uint32_t a) { return is_nan_f32(a) ? 0x7FFFu : a >> 16; }

#define F16_FROM 0x38800000u  /* 2^-14, the smallest normal f16 */
#define F16_ABOVE 0x47800000u /* 2^16, behind the largest */

ALWAYS_INLINE uint32_t f16_rn(uint32_t a) {
    uint32_t magnitude = a & MAGNITUDE_F32, sign = a >> 16 & 0x8000u;
    uint32_t normal = ((magnitude + 0xFFFu + (magnitude >> 13 & 1)) >> 13) - (112u << 10);
    /* The last place of 0.5 + x is 2^-24, that of a subnormal f16. */
    uint32_t subnormal = bits_f32(as_f32(magnitude < F16_FROM ? magnitude : 0) + 0.5f) - 0x3F000000u;
    uint32_t code = magnitude < F16_FROM ? subnormal : magnitude < F16_ABOVE ? normal : 0x7C00u;
    return is_nan_f32(a) ? 0x7FFFu : code | sign;
}

ALWAYS_INLINE uint32_t f16_rz(uint32_t a) {
    uint32_t magnitude = a & MAGNITUDE_F32, sign = a >> 16 & 0x8000u;
    uint32_t normal = (magnitude >> 13) - (112u << 10);
    uint32_t subnormal = (uint32_t)(as_f32(magnitude < F16_FROM ? magnitude : 0) * 0x1p24f);
    uint32_t code = magnitude < F16_FROM ? subnormal : magnitude < F16_ABOVE ? normal : 0x7BFFu;
    return is_nan_f32(a) ? 0x7FFFu : (magnitude == INFINITY_F32 ? 0x7C00u : code) | sign;
}

ALWAYS_INLINE uint32_t f16_value(uint32_t a) {
    uint32_t magnitude = a & 0x7FFFu;
    uint32_t value = bits_f32(as_f32(magnitude << 13) * 0x1p112f); /* exact, also for subnormals */
    value = magnitude >= 0x7C00u ? INFINITY_F32 : value;
    return magnitude > 0x7C00u ? UNITS_NAN_F32 : value | (a & 0x8000u) << 16;
}

static uint16_t saturated(uint32_t a, uint32_t max_finite) {
    return (uint16_t)((a & 0x7FFFu) == max_finite + 1 ? (a & 0x8000u) | max_finite : a);
}

uint16_t units_f32_to_bf16(uint32_t a, int rounding, int saturate) {
    uint32_t r = rounding == UNITS_RZ ? bf16_rz(a) : bf16_rn(a);
    return saturate ? saturated(r, 0x7F7Fu) : (uint16_t)r;
}
uint16_t units_f32_to_f16(uint32_t a, int rounding, int saturate) {
    uint32_t r = rounding == UNITS_RZ ? f16_rz(a) : f16_rn(a);
    return saturate ? saturated(r, 0x7BFFu) : (uint16_t)r;
}
uint32_t units_bf16_to_f32(uint16_t a) { return (uint32_t)a << 16; }
uint32_t units_f16_to_f32(uint16_t a) { return f16_value(a); }

#define UNARY(name, expression)                                                  \
    void units_cvt_##name##_lanes(uint32_t *d, const uint32_t *a, uint32_t mask) { \
        uint32_t r[UNITS_LANES];                                                 \
        EACH(UNITS_LANES, r[l] = expression)                                     \
        keep_lanes(d, r, mask);                                                  \
    }
UNARY(bf16, bf16_rn(a[l]))
UNARY(f16, f16_rn(a[l]))
UNARY(f32_bf16, a[l] << 16)
UNARY(f32_f16, f16_value(a[l] & 0xFFFFu))

#define PACKED(name, convert, width)                                                                          \
    void units_cvt_##name##_lanes(uint32_t *d, const uint32_t *high, const uint32_t *low, uint32_t mask) {    \
        uint32_t r[UNITS_LANES];                                                                              \
        EACH(UNITS_LANES, r[l] = convert(low[l]) | convert(high[l]) << width)                                 \
        keep_lanes(d, r, mask);                                                                               \
    }
PACKED(bf16x2, bf16_rn, 16)
PACKED(f16x2, f16_rn, 16)

/* ---- 8 bits ------------------------------------------------------------------------------------------------------ */

/* Nearest even with .satfinite; below the smallest normal value the codes are equally spaced. */
ALWAYS_INLINE uint32_t to_f8(uint32_t a, int mantissa, int bias, uint32_t max_finite) {
    uint32_t magnitude = a & MAGNITUDE_F32;
    int drop = 23 - mantissa;
    uint32_t least = (uint32_t)(127 - bias + 1) << 23;
    uint32_t rounded = magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1);
    uint32_t normal = (rounded >> drop) - ((uint32_t)(127 - bias) << mantissa);
    float scale = as_f32((uint32_t)(127 + bias - 1 + mantissa) << 23);
    uint32_t steps = bits_f32(as_f32(magnitude < least ? magnitude : 0) * scale + 0x1p23f) & 0x7FFFFFu;
    uint32_t code = magnitude < least ? steps : normal;
    code = code < max_finite ? code : max_finite;
    return is_nan_f32(a) ? 0x7Fu : code | (a >> 24 & 0x80u);
}
ALWAYS_INLINE uint32_t to_e4m3(uint32_t a) { return to_f8(a, 3, 7, 0x7E); }
ALWAYS_INLINE uint32_t to_e5m2(uint32_t a) { return to_f8(a, 2, 15, 0x7B); }

ALWAYS_INLINE uint32_t from_f8(uint32_t a, int mantissa, int bias) {
    uint32_t magnitude = a & 0x7Fu;
    float scale = as_f32((uint32_t)(254 - bias) << 23); /* 2^(127 - bias) */
    return bits_f32(as_f32(magnitude << (23 - mantissa)) * scale) | (a & 0x80u) << 24;
}

uint8_t units_f32_to_e4m3(uint32_t a) { return (uint8_t)to_e4m3(a); }
uint8_t units_f32_to_e5m2(uint32_t a) { return (uint8_t)to_e5m2(a); }
uint32_t units_e4m3_to_f32(uint8_t a) { return (a & 0x7F) == 0x7F ? UNITS_NAN_F32 : from_f8(a, 3, 7); }
uint32_t units_e5m2_to_f32(uint8_t a) {
    if ((a & 0x7F) > 0x7C) return UNITS_NAN_F32;
    return (a & 0x7F) == 0x7C ? INFINITY_F32 | (a & 0x80u) << 24 : from_f8(a, 2, 15);
}
PACKED(e4m3x2, to_e4m3, 8)
PACKED(e5m2x2, to_e5m2, 8)

/* ---- integers ---------------------------------------------------------------------------------------------------- */

/* A whole value next to x in a direction. The sign is always that of x. */
ALWAYS_INLINE uint32_t whole(uint32_t a, int rounding) {
    if ((a & MAGNITUDE_F32) >= 0x4B000000u) return canonical(a); /* 2^23 and above, infinity, NaN */
    float x = as_f32(a);
    int32_t t = (int32_t)x;
    float rest = x - (float)t;
    if (rounding == UNITS_RN) t += (rest > 0.5f || (rest == 0.5f && t & 1)) - (rest < -0.5f || (rest == -0.5f && t & 1));
    if (rounding == UNITS_RM) t -= rest < 0;
    if (rounding == UNITS_RP) t += rest > 0;
    return (bits_f32((float)t) & MAGNITUDE_F32) | (a & SIGN_F32);
}

static uint64_t to_unsigned(double v, int bits) {
    if (v <= 0) return 0;
    if (v >= (bits == 64 ? 0x1p64 : (double)(1ull << bits))) return bits == 64 ? ~0ull : (1ull << bits) - 1;
    return (uint64_t)v;
}
static uint64_t to_signed(double v, int bits) {
    uint64_t top = (1ull << (bits - 1)) - 1;
    double limit = (double)(1ull << (bits - 1));
    if (v >= limit) return top;
    return v <= -limit ? ~top : (uint64_t)(int64_t)v;
}
uint64_t units_f32_to_integer(uint32_t a, int rounding, int bits, int is_signed) {
    if (is_nan_f32(a)) return 0;
    double v = (double)as_f32(whole(a, rounding));
    uint64_t r = is_signed ? to_signed(v, bits) : to_unsigned(v, bits);
    return bits == 64 ? r : r & ((1ull << bits) - 1);
}

uint32_t units_s64_to_f32(int64_t a) { return bits_f32((float)a); }
uint32_t units_u64_to_f32(uint64_t a) { return bits_f32((float)a); }

uint32_t units_round_f32(uint32_t a, int rounding, int ftz) { return whole(flushed(a, ftz), rounding); }
void units_round_f32_lanes(uint32_t *d, const uint32_t *a, int rounding, int ftz, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    for (int l = 0; l < UNITS_LANES; l++) r[l] = whole(flushed(a[l], ftz), rounding);
    keep_lanes(d, r, mask);
}
