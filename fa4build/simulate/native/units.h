/* Numeric units of the native engine: bit-exact twins of the Python simulator's arithmetic.
 *
 * Everything is a pure function of its arguments: no global state, no allocation, safe from any thread. Values are bit
 * patterns, as in float_formats.py; NaN results are canonical (0x7FFFFFFF for f32, 0x7FFF for 16 bits, 0x7F for 8 bits)
 * unless a line says "bits". Results are equal on every host: only IEEE operations that round once are used, and nothing
 * of the C library's mathematics.
 *
 * `_lanes` functions work on a warp: arrays of 32 words, one a lane. Lanes outside `mask` keep what `d` holds; `d` may be
 * one of the sources. `_pairs` functions take 32 words of 64 bits, two packed f32 each, low half first.
 *
 * The caller's thread must be in IEEE mode (nearest even, subnormals kept), as every thread starts.
 */
#ifndef FA4BUILD_NATIVE_UNITS_H
#define FA4BUILD_NATIVE_UNITS_H

#include <stddef.h>
#include <stdint.h>

#define UNITS_LANES 32
#define UNITS_NAN_F32 0x7FFFFFFFu

enum { UNITS_RN = 0, UNITS_RZ = 1, UNITS_RM = 2, UNITS_RP = 3 };

/* ---- f32 arithmetic: float_formats.py ---------------------------------------------------------------------------- */

/* add_f32, sub_f32, mul_f32, fma_f32 (rounding, ftz); div_f32_rn; sqrt_rn of mufu.py. ftz: operands and result. */
uint32_t units_add_f32(uint32_t a, uint32_t b, int rounding, int ftz);
uint32_t units_sub_f32(uint32_t a, uint32_t b, int rounding, int ftz);
uint32_t units_mul_f32(uint32_t a, uint32_t b, int rounding, int ftz);
uint32_t units_fma_f32(uint32_t a, uint32_t b, uint32_t c, int rounding, int ftz);
uint32_t units_div_f32(uint32_t a, uint32_t b, int ftz);
uint32_t units_sqrt_f32(uint32_t a, int ftz);
/* max_f32, min_f32: NaN loses, or wins with propagate_nan; +0 > -0. */
uint32_t units_max_f32(uint32_t a, uint32_t b, int propagate_nan, int ftz);
uint32_t units_min_f32(uint32_t a, uint32_t b, int propagate_nan, int ftz);

void units_add_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int rounding, int ftz, uint32_t mask);
void units_sub_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int rounding, int ftz, uint32_t mask);
void units_mul_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int rounding, int ftz, uint32_t mask);
void units_fma_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c, int rounding, int ftz,
                         uint32_t mask);
void units_add_f32_pairs(uint64_t *d, const uint64_t *a, const uint64_t *b, int rounding, int ftz, uint32_t mask);
void units_sub_f32_pairs(uint64_t *d, const uint64_t *a, const uint64_t *b, int rounding, int ftz, uint32_t mask);
void units_mul_f32_pairs(uint64_t *d, const uint64_t *a, const uint64_t *b, int rounding, int ftz, uint32_t mask);
void units_fma_f32_pairs(uint64_t *d, const uint64_t *a, const uint64_t *b, const uint64_t *c, int rounding, int ftz,
                         uint32_t mask);
/* fma.rn.f32.bf16: a, b are the bf16 in the low 16 bits of each word, c and d f32. */
void units_fma_f32_bf16_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t mask);
void units_max_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int propagate_nan, int ftz, uint32_t mask);
void units_min_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int propagate_nan, int ftz, uint32_t mask);
/* Bits: neg, abs and copysign (magnitude of b, sign of a, PTX's order) keep a NaN's payload, as float_alu.py. */
void units_neg_f32_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);
void units_abs_f32_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);
void units_copysign_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, uint32_t mask);
void units_div_f32_lanes(uint32_t *d, const uint32_t *a, const uint32_t *b, int ftz, uint32_t mask);
void units_rcp_rn_f32_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);
void units_sqrt_f32_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);

/* setp.*.f32 as float_alu.py: bit l is the comparison of lane l, of all 32 lanes. */
enum {
    UNITS_EQ = 0, UNITS_NE, UNITS_LT, UNITS_LE, UNITS_GT, UNITS_GE, UNITS_EQU, UNITS_NEU, UNITS_LTU, UNITS_LEU, UNITS_GTU,
    UNITS_GEU, UNITS_ISNAN, UNITS_NUM,
};
uint32_t units_compare_f32_lanes(const uint32_t *a, const uint32_t *b, int comparison, int ftz);

/* ---- conversions: float_formats.py and moves.py ------------------------------------------------------------------ */

/* f32_to_bf16_rn/_rz, f32_to_f16_rn/_rz (rounding UNITS_RN or UNITS_RZ); saturate: saturate_finite_16. */
uint16_t units_f32_to_bf16(uint32_t a, int rounding, int saturate);
uint16_t units_f32_to_f16(uint32_t a, int rounding, int saturate);
uint32_t units_bf16_to_f32(uint16_t a); /* bits: a shift */
uint32_t units_f16_to_f32(uint16_t a);
/* f32_to_e4m3_rn_satfinite, f32_to_e5m2_rn_satfinite and back. */
uint8_t units_f32_to_e4m3(uint32_t a);
uint8_t units_f32_to_e5m2(uint32_t a);
uint32_t units_e4m3_to_f32(uint8_t a);
uint32_t units_e5m2_to_f32(uint8_t a);

/* cvt.rn.bf16/.f16.f32 to the low 16 bits of each word, the upper ones zero; .x2: `high` to the upper half. */
void units_cvt_bf16_lanes(uint32_t *d, const uint32_t *a, uint32_t mask);
void units_cvt_f16_lanes(uint32_t *d, const uint32_t *a, uint32_t mask);
void units_cvt_bf16x2_lanes(uint32_t *d, const uint32_t *high, const uint32_t *low, uint32_t mask);
void units_cvt_f16x2_lanes(uint32_t *d, const uint32_t *high, const uint32_t *low, uint32_t mask);
void units_cvt_f32_bf16_lanes(uint32_t *d, const uint32_t *a, uint32_t mask); /* bits */
void units_cvt_f32_f16_lanes(uint32_t *d, const uint32_t *a, uint32_t mask);
/* cvt.rn.satfinite.e4m3x2/e5m2x2.f32 to the low 16 bits, `high` to the upper byte. */
void units_cvt_e4m3x2_lanes(uint32_t *d, const uint32_t *high, const uint32_t *low, uint32_t mask);
void units_cvt_e5m2x2_lanes(uint32_t *d, const uint32_t *high, const uint32_t *low, uint32_t mask);

/* cvt.rzi/rni/rmi/rpi: to_integer of moves.py. Result of `bits` (16, 32, 64) as the low bits of the return; NaN gives 0,
 * too large values the limit. UNITS_RN is rni. */
uint64_t units_f32_to_integer(uint32_t a, int rounding, int bits, int is_signed);
/* cvt.rn.f32.{s16,u16,s32,u32,s64,u64}: the value extended to 64 bits by its own sign. */
uint32_t units_s64_to_f32(int64_t a);
uint32_t units_u64_to_f32(uint64_t a);
/* cvt.rzi/rni/rmi/rpi.f32.f32. */
uint32_t units_round_f32(uint32_t a, int rounding, int ftz);
void units_round_f32_lanes(uint32_t *d, const uint32_t *a, int rounding, int ftz, uint32_t mask);

/* ---- the multi-function unit: mufu.py ---------------------------------------------------------------------------- */

/* Tables measured on an H200, by mantissa (2^23 entries); Python owns them: ex2_table() (f32 bits of ex2 on [1, 2)),
 * _rcp_delta() (last places, int8) and lg2_unit.squares() (2^17 entries, int64). They outlive every call. */
typedef struct {
    const int32_t *ex2;
    const int8_t *rcp_delta;
    const int64_t *squares;
} units_tables;

/* ex2_ftz, ex2, lg2_ftz, rcp_ftz: exactly an H200's. */
void units_ex2_ftz_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask);
void units_ex2_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask);
void units_lg2_ftz_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask);
void units_rcp_ftz_lanes(const units_tables *t, uint32_t *d, const uint32_t *a, uint32_t mask);
/* rsqrt_approx, sqrt_approx, tanh_approx, sin_approx, cos_approx: correctly rounded; ftz as in the Python function. */
void units_rsqrt_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);
void units_sqrt_approx_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);
void units_tanh_lanes(uint32_t *d, const uint32_t *a, uint32_t mask);
void units_sin_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);
void units_cos_lanes(uint32_t *d, const uint32_t *a, int ftz, uint32_t mask);

/* ---- tensor cores: tensor_core.py -------------------------------------------------------------------------------- */

/* Elements of K in one instruction step: 16, 16, 8, 32, 32. */
typedef enum { UNITS_BF16 = 0, UNITS_F16, UNITS_TF32, UNITS_E4M3, UNITS_E5M2 } units_type;

/* Rows of the result that are computed and written: bit i % 32 of word i / 32 is row i; NULL: all. */
typedef const uint32_t *units_rows;

/* mma_tile: D = A * B^T + D for a (m, n) rectangle of f32 bits whose rows lie `d_stride` words apart.
 * a: (m, k) and b: (n, k) bit patterns, row-major without gaps. accumulate 0: D counts as zero.
 * m >= 1, n in 1..256, k a multiple of the step; the types have equal bytes. Uses about 64 KiB of stack.
 * Returns 0, or -1 for arguments that do not fit (nothing is written then). */
int units_mma(int m, int n, int k, units_type a_type, const void *a, units_type b_type, const void *b, uint32_t *d,
              ptrdiff_t d_stride, int accumulate, units_rows rows);

#endif
