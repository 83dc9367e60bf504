/* The multi-function unit: ex2, lg2 and rcp as an H200 computes them (mufu.py, lg2_unit.py), roots correctly rounded. */
#include "units_inner.h"

/* ---- ex2 --------------------------------------------------------------------------------------------------------- */

#define BEYOND 255.9999847412109375f /* 256 - 2^-16: all results from here on are 0 or infinity */

/* x in units of 2^-23 as the unit forms it: cut off; ones' complement for x < 0 unless the fraction is 0. */
ALWAYS_INLINE int32_t ex2_index(uint32_t a) {
    float magnitude = as_f32(a & MAGNITUDE_F32);
    magnitude = magnitude < BEYOND ? magnitude : BEYOND; /* NaN too */
    int32_t fixed = (int32_t)(magnitude * 0x1p23f);
    int32_t negative = -(int32_t)(a >> 31);
    return (fixed ^ negative) - (negative & ((fixed & 0x7FFFFF) == 0 ? -1 : 0));
}

/* `mantissa`: the table's entry at the index. */
ALWAYS_INLINE uint32_t ex2_from(uint32_t a, int32_t index, int32_t mantissa) {
    int32_t octave = index >> 23;
    octave = (octave < -127 ? -127 : octave > 128 ? 128 : octave) - 1;
    int32_t r = mantissa + octave * (1 << 23);
    r = r > (int32_t)INFINITY_F32 ? (int32_t)INFINITY_F32 : r;
    r = r < (int32_t)MIN_NORMAL_F32 ? 0 : r;
    return is_nan_f32(a) ? UNITS_NAN_F32 : (uint32_t)r;
}

/* The look-ups stand alone: vectors before and behind them. */
ALWAYS_INLINE void ex2_ftz(const int32_t *table, const uint32_t *a, uint32_t *r) {
    int32_t index[UNITS_LANES], mantissa[UNITS_LANES];
    EACH(UNITS_LANES, index[l] = ex2_index(a[l]))
    EACH(UNITS_LANES, mantissa[l] = table[index[l] & 0x7FFFFF])
    EACH(UNITS_LANES, r[l] = ex2_from(a[l], index[l], mantissa[l]))
}

void units_ex2_ftz_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    ex2_ftz(t->ex2, a, r);
    keep_lanes(d, r, mask);
}

/* For x < -126 the square of ex2(x / 2): what ptxas makes of it. */
ALWAYS_INLINE int is_small(uint32_t a) { return as_f32(a) < -126.0f; }
void units_ex2_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask) {
    uint32_t x[UNITS_LANES], r[UNITS_LANES];
    EACH(UNITS_LANES, x[l] = is_small(a[l]) ? bits_f32(as_f32(a[l]) * 0.5f) : a[l])
    ex2_ftz(t->ex2, x, r);
    EACH(UNITS_LANES, r[l] = is_small(a[l]) ? bits_f32(as_f32(r[l]) * as_f32(r[l])) : r[l])
    keep_lanes(d, r, mask);
}

/* ---- rcp --------------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE uint32_t rcp_ftz(const int8_t *delta, uint32_t a) {
    a = flushed(a, 1);
    uint32_t magnitude = a & MAGNITUDE_F32, mantissa = magnitude & 0x7FFFFFu;
    int32_t exact = (int32_t)bits_f32((float)(1.0 / (1.0 + (double)mantissa * 0x1p-23)));
    int32_t r = exact + delta[mantissa] - ((int32_t)(magnitude >> 23) - 127) * (1 << 23);
    r = r < (int32_t)MIN_NORMAL_F32 || magnitude == INFINITY_F32 ? 0 : r;
    r = magnitude == 0 ? (int32_t)INFINITY_F32 : r;
    return magnitude > INFINITY_F32 ? UNITS_NAN_F32 : (uint32_t)r | (a & SIGN_F32);
}

void units_rcp_ftz_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    const int8_t *delta = t->rcp_delta;
    EACH(UNITS_LANES, r[l] = rcp_ftz(delta, a[l]))
    keep_lanes(d, r, mask);
}

/* ---- lg2 --------------------------------------------------------------------------------------------------------- */

/* COEFFICIENTS of lg2_unit.py: (c0, c1, c2) of each interval. */
static const int32_t LG2[64][3] = {
    {230, 47272, -727}, {48034630, 46545, -705}, {95335942, 45840, -685}, {141925702, 45156, -665},
    {187825318, 44492, -646}, {233054790, 43847, -627}, {277633414, 43221, -610}, {321579622, 42612, -592},
    {364911462, 42020, -576}, {407645350, 41444, -559}, {449797894, 40884, -544}, {491384614, 40339, -530},
    {532420486, 39809, -518}, {572919782, 39292, -504}, {612896742, 38788, -491}, {652364422, 38297, -479},
    {691335462, 37818, -466}, {729822566, 37351, -455}, {767837350, 36896, -445}, {805391238, 36451, -433},
    {842495462, 36018, -425}, {879160422, 35594, -414}, {915396646, 35180, -404}, {951214022, 34776, -396},
    {986622022, 34380, -385}, {1021629862, 33994, -377}, {1056246598, 33616, -368}, {1090480806, 33247, -361},
    {1124340806, 32886, -354}, {1157834918, 32532, -346}, {1190970694, 32186, -339}, {1223755718, 31847, -331},
    {1256197542, 31516, -326}, {1288303110, 31191, -319}, {1320079526, 30872, -311}, {1351533286, 30561, -307},
    {1382670854, 30255, -300}, {1413498566, 29955, -293}, {1444022694, 29662, -289}, {1474248806, 29374, -283},
    {1504182918, 29091, -276}, {1533830694, 28814, -271}, {1563197446, 28542, -266}, {1592288262, 28276, -262},
    {1621108646, 28014, -257}, {1649663526, 27757, -253}, {1677957414, 27505, -249}, {1705995270, 27257, -244},
    {1733781638, 27013, -238}, {1761321062, 26774, -234}, {1788617862, 26540, -232}, {1815676102, 26309, -227},
    {1842500294, 26082, -223}, {1869094118, 25859, -219}, {1895461734, 25640, -216}, {1921606694, 25424, -211},
    {1947532774, 25213, -209}, {1973243814, 25004, -204}, {1998743366, 24799, -201}, {2024034566, 24598, -199},
    {2049121190, 24399, -195}, {2074006118, 24204, -192}, {2098692774, 24012, -189}, {2123184262, 23823, -186},
};

/* log2(1 + mantissa / 2^23) in units of 2^-36. */
ALWAYS_INLINE int64_t lg2_of_mantissa(const int64_t *squares, uint32_t mantissa) {
    const int32_t *c = LG2[mantissa >> 17];
    int64_t t = mantissa & 0x1FFFF;
    return 32 * (int64_t)c[0] + ((c[1] * t + 2 * c[2] * squares[t] + 69) >> 2);
}

ALWAYS_INLINE uint32_t lg2_ftz(const int64_t *squares, uint32_t a) {
    a = flushed(a, 1);
    if (a == 0x3F800000u) return 0;
    if (a == INFINITY_F32) return INFINITY_F32;
    if ((a & MAGNITUDE_F32) == 0) return 0xFF800000u;
    if (a > INFINITY_F32) return UNITS_NAN_F32;
    int64_t total = ((int64_t)(a >> 23) - 127) * (1ll << 36) + lg2_of_mantissa(squares, a & 0x7FFFFFu);
    total += total < 0; /* a negative sum's magnitude is its ones' complement */
    return round_f64((double)total * 0x1p-36, UNITS_RZ);
}

void units_lg2_ftz_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    for (int l = 0; l < UNITS_LANES; l++) r[l] = lg2_ftz(t->squares, a[l]);
    keep_lanes(d, r, mask);
}

/* ---- roots ------------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE uint32_t rounded(double v, int ftz) { return flushed(canonical(bits_f32((float)v)), ftz); }

void units_rsqrt_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    EACH(UNITS_LANES, r[l] = rounded(1.0 / __builtin_sqrt((double)as_f32(flushed(a[l], ftz))), ftz))
    keep_lanes(d, r, mask);
}
void units_sqrt_approx_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask) {
    uint32_t r[UNITS_LANES];
    EACH(UNITS_LANES, r[l] = rounded(__builtin_sqrt((double)as_f32(flushed(a[l], ftz))), ftz))
    keep_lanes(d, r, mask);
}
