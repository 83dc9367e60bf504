/* Tensor-core sums, bit for bit: tensor_core.py, whose docstring gives the arithmetic.
 *
 * One instruction step at a time: B is turned to f32 values and exponents by K (`Staged`), then every row of A meets 32
 * columns at once. Where all products and scales stay in f32's range, which is nearly always, f32 and int32 hold them
 * exactly; elsewhere one output at a time is summed in float64.
 */
#include "units_inner.h"

#define COLUMNS 256
#define BLOCK 32
#define MAX_STEP 32
#define FRACTION_BITS 25
#define ZERO_EXPONENT (-2000) /* of zero; the sum of two still fits in int16 */
#define LOWEST_ALIGNMENT (-133)
#define NO_EXPONENT 1000 /* lowest of none */

#define VECTOR(type, n) type __attribute__((ext_vector_type(n)))
typedef VECTOR(float, 16) f32v;
typedef VECTOR(uint32_t, 16) u32v;
typedef VECTOR(int32_t, 16) s32v;
typedef VECTOR(double, 16) f64v;
typedef VECTOR(uint64_t, 16) u64v;
typedef VECTOR(int16_t, 16) s16v;
typedef VECTOR(int16_t, 32) s16w;
#define CONVERT(value, type) __builtin_convertvector(value, type)

/* ---- operands ---------------------------------------------------------------------------------------------------- */

static const struct {
    int8_t bytes, k_step;
    int16_t min_exponent;
} TYPES[5] = {{2, 16, -126}, {2, 16, -14}, {4, 8, -126}, {1, 32, -6}, {1, 32, -14}};

/* f16 with the payload of a NaN; only whether it is one matters here. */
ALWAYS_INLINE uint32_t f16_to_f32(uint32_t a) {
    uint32_t magnitude = a & 0x7FFFu;
    uint32_t value = bits_f32(as_f32(magnitude << 13) * 0x1p112f);
    value = magnitude >= 0x7C00u ? INFINITY_F32 | magnitude << 13 : value;
    return value | (a & 0x8000u) << 16;
}

/* Element `i` as f32 bits. */
ALWAYS_INLINE uint32_t element(units_type type, const void *bits, size_t i) {
    switch (type) {
    case UNITS_BF16: return (uint32_t)((const uint16_t *)bits)[i] << 16;
    case UNITS_F16: return f16_to_f32(((const uint16_t *)bits)[i]);
    case UNITS_TF32: return ((const uint32_t *)bits)[i] & 0xFFFFE000u;
    case UNITS_E4M3: return units_e4m3_to_f32(((const uint8_t *)bits)[i]);
    default: return units_e5m2_to_f32(((const uint8_t *)bits)[i]);
    }
}

/* Exponent as stored in the operand type; subnormals have the type's minimum. */
ALWAYS_INLINE int exponent_of(uint32_t f32, int min_exponent) {
    int e = (int)(f32 >> 23 & 0xFF) - 127;
    e = e > min_exponent ? e : min_exponent;
    return (f32 & MAGNITUDE_F32) == 0 ? ZERO_EXPONENT : e;
}

ALWAYS_INLINE int is_finite(uint32_t f32) { return (f32 & INFINITY_F32) != INFINITY_F32; }

/* What is not finite: bits. */
enum { HAS_INFINITY = 1, HAS_NAN = 2 };
ALWAYS_INLINE int kind_of(uint32_t f32) {
    uint32_t magnitude = f32 & MAGNITUDE_F32;
    return (magnitude == INFINITY_F32 ? HAS_INFINITY : 0) | (magnitude > INFINITY_F32 ? HAS_NAN : 0);
}

/* `count` elements, `stride` apart, as values and exponents; infinities and NaN count as zero. Returns which there are
 * (HAS_*); *lowest falls to the smallest exponent of a nonzero element. */
ALWAYS_INLINE int spread(units_type type, const void *bits, size_t first, size_t stride, int count, float *values,
                         int16_t *exponents, int *lowest) {
    int odd = 0, low = *lowest, least = TYPES[type].min_exponent;
    for (int i = 0; i < count; i++) {
        uint32_t f32 = element(type, bits, first + (size_t)i * stride);
        int finite = is_finite(f32);
        odd |= kind_of(f32);
        f32 = finite ? f32 : 0;
        int e = exponent_of(f32, least);
        values[i] = as_f32(f32);
        exponents[i] = (int16_t)e;
        int counted = e == ZERO_EXPONENT ? NO_EXPONENT : e;
        low = counted < low ? counted : low;
    }
    *lowest = low;
    return odd;
}
static int spread_any(units_type type, const void *bits, size_t first, size_t stride, int count, float *values,
                      int16_t *exponents, int *lowest) {
    switch (type) {
#define CASE(t) \
    case t: return spread(t, bits, first, stride, count, values, exponents, lowest);
        CASE(UNITS_BF16)
        CASE(UNITS_F16)
        CASE(UNITS_TF32)
        CASE(UNITS_E4M3)
        CASE(UNITS_E5M2)
    }
    return 0;
}

/* An operand's K step. B: one row of `values` for each k, by column; columns up to the next block are zero. */
typedef struct {
    float values[MAX_STEP][COLUMNS];
    int16_t exponents[MAX_STEP][COLUMNS];
    uint8_t odd_columns[COLUMNS]; /* HAS_* of each; set where `odd` is */
    uint8_t zero_blocks[COLUMNS / BLOCK];
    int odd, lowest;
} Staged;

/* Columns of k beside each other, so that conversion runs over vectors. */
ALWAYS_INLINE void turned(const uint8_t *b, size_t row_bytes, int size, int n, int step, uint8_t *out) {
    for (int j = 0; j < n; j++)
        for (int i = 0; i < step; i++) memcpy(out + ((size_t)i * COLUMNS + (size_t)j) * (size_t)size, b + (size_t)j * row_bytes + (size_t)(i * size), (size_t)size);
}

/* HAS_* of every column. */
static void find_odd(Staged *s, units_type type, const uint8_t *b, size_t row_bytes, int n, int step) {
    for (int j = 0; j < n; j++) {
        int odd = 0;
        for (int i = 0; i < step; i++) odd |= kind_of(element(type, b + (size_t)j * row_bytes, (size_t)i));
        s->odd_columns[j] = (uint8_t)odd;
    }
}

/* Which blocks of columns are zero: rows and columns beyond a tensor, and what a mask has hidden. */
static void find_zeros(Staged *s, int padded, int step) {
    for (int j = 0; j < padded; j += BLOCK) {
        s16w differs = 0;
        for (int i = 0; i < step; i++) differs |= *(const s16w *)&s->exponents[i][j] ^ (int16_t)ZERO_EXPONENT;
        s->zero_blocks[j / BLOCK] = __builtin_reduce_or(differs) == 0;
    }
}

static void stage(Staged *s, units_type type, const uint8_t *b, size_t row_bytes, int n) {
    uint8_t by_k[MAX_STEP * COLUMNS * 2] __attribute__((aligned(64)));
    int size = TYPES[type].bytes, step = TYPES[type].k_step, padded = (n + BLOCK - 1) / BLOCK * BLOCK;
    s->odd = 0, s->lowest = NO_EXPONENT;
    switch (size) {
    case 1: turned(b, row_bytes, 1, n, step, by_k); break;
    case 2: turned(b, row_bytes, 2, n, step, by_k); break;
    default: turned(b, row_bytes, 4, n, step, by_k); break;
    }
    for (int i = 0; i < step; i++) {
        s->odd |= spread_any(type, by_k, (size_t)i * COLUMNS, 1, n, s->values[i], s->exponents[i], &s->lowest);
        for (int j = n; j < padded; j++) s->values[i][j] = 0, s->exponents[i][j] = ZERO_EXPONENT;
    }
    find_zeros(s, padded, step);
    if (s->odd) find_odd(s, type, b, row_bytes, n, step);
}

/* One row of A in a K step. */
typedef struct {
    float values[MAX_STEP];
    int16_t exponents[MAX_STEP];
    int step, odd, lowest;
} Row;

/* ---- one output in float64 --------------------------------------------------------------------------------------- */

static double cut(double v) { return (double)(int64_t)v; }
static double power_of_two(int e) { return as_f64((uint64_t)(e + 1023) << 52); }

static uint32_t sum_in_f64(const Row *a, const Staged *b, int column, uint32_t c) {
    int largest = exponent_of(c, -126);
    for (int i = 0; i < a->step; i++) {
        int e = a->exponents[i] + b->exponents[i][column];
        largest = e > largest ? e : largest;
    }
    largest = largest > LOWEST_ALIGNMENT ? largest : LOWEST_ALIGNMENT;
    double scale = power_of_two(FRACTION_BITS - largest), total = cut((double)as_f32(c) * scale);
    for (int i = 0; i < a->step; i++) total += cut((double)a->values[i] * (double)b->values[i][column] * scale);
    double value = total * power_of_two(largest - FRACTION_BITS);
    if (value >= 0x1p128 || value <= -0x1p128) return value < 0 ? 0xFF800000u : INFINITY_F32;
    return round_f64(value, UNITS_RZ);
}

/* ---- a row of A with 32 columns ---------------------------------------------------------------------------------- */

ALWAYS_INLINE s32v exponents_v(u32v c) {
    s32v field = (s32v)(c >> 23 & 0xFFu) - 127;
    s32v e = __builtin_elementwise_max(field, (s32v)(-126));
    s32v zero = (c & MAGNITUDE_F32) == 0;
    return (zero & ZERO_EXPONENT) | (~zero & e);
}

/* total * 2^(E - 25), cut to 24 bits toward zero; the result is normal or zero. */
ALWAYS_INLINE u32v cut_to_f32(f64v total, s32v largest) {
    f64v kept = (f64v)((u64v)total & 0xFFFFFFFFE0000000ull);
    f32v scale = (f32v)(largest + (127 - FRACTION_BITS) << 23);
    return (u32v)(CONVERT(kept, f32v) * scale);
}

/* 16 columns in f32: exact, see `_sum_in_f32` of tensor_core.py. At most 16 products lie in one int32. */
ALWAYS_INLINE u32v sum_in_f32(const Row *a, const Staged *b, int step, int column, u32v c, s32v largest) {
    f32v scale = (f32v)((FRACTION_BITS + 127) - largest << 23);
    f64v total = CONVERT(CONVERT((f32v)c * scale, s32v), f64v);
    for (int first = 0; first < step; first += 16) {
        s32v part = 0;
        int end = first + 16 < step ? first + 16 : step;
        for (int i = first; i < end; i++) {
            f32v product = a->values[i] * *(const f32v *)&b->values[i][column];
            part += CONVERT(product * scale, s32v);
        }
        total += CONVERT(part, f64v);
    }
    return cut_to_f32(total, largest);
}

ALWAYS_INLINE s16w largest_exponents(const Row *a, const Staged *b, int step, int column, const uint32_t *c) {
    s16v low = CONVERT(exponents_v(*(const u32v *)c), s16v), high = CONVERT(exponents_v(*(const u32v *)(c + 16)), s16v);
    s16w largest = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
                                           20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < step; i++)
        largest = __builtin_elementwise_max(largest, *(const s16w *)&b->exponents[i][column] + a->exponents[i]);
    return largest;
}

/* Whether f32 holds everything: no product overflows, and one that underflows is cut to zero either way. */
ALWAYS_INLINE int fits_f32(s16w largest, int lowest) {
    int16_t floor = lowest >= -120 ? -98 : -90;
    s16w bad = (largest > (int16_t)120) | ((largest < floor) & (largest > (int16_t)-1000));
    return __builtin_reduce_or(bad) == 0;
}

/* c: 32 finite f32 bits, aligned; replaced by the step's result. */
ALWAYS_INLINE void step_block(const Row *a, const Staged *b, int step, int column, uint32_t *c) {
    s16w largest = largest_exponents(a, b, step, column, c);
    if (!fits_f32(largest, a->lowest + b->lowest)) {
        for (int j = 0; j < BLOCK; j++) c[j] = sum_in_f64(a, b, column + j, c[j]);
        return;
    }
    for (int half = 0; half < BLOCK; half += 16) {
        s16v part = half ? __builtin_shufflevector(largest, largest, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
                         : __builtin_shufflevector(largest, largest, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        s32v e = __builtin_elementwise_max(CONVERT(part, s32v), (s32v)(-98));
        u32v r = sum_in_f32(a, b, step, column + half, *(const u32v *)(c + half), e);
        *(u32v *)(c + half) = r;
    }
}

/* ---- infinities and NaN ------------------------------------------------------------------------------------------ */

/* The IEEE sum of c and the products where it is not finite, else `d`. */
static uint32_t with_infinities(int step, units_type a_type, const void *a, units_type b_type, const void *b, uint32_t c,
                                uint32_t d) {
    double total = as_f32(c);
    for (int i = 0; i < step; i++)
        total += (double)as_f32(element(a_type, a, (size_t)i)) * (double)as_f32(element(b_type, b, (size_t)i));
    uint32_t r = bits_f32((float)(total - total == 0 ? 0.0 : total));
    return is_finite(r) ? d : canonical(r);
}

/* ---- the whole product ------------------------------------------------------------------------------------------- */

typedef struct {
    units_type a_type, b_type;
    const uint8_t *a, *b; /* of the step */
    size_t row_bytes;
    int n, step, accumulate;
} Step;

/* `kinds`: HAS_* of the operands and of c together. */
ALWAYS_INLINE uint32_t not_finite(const Step *s, int kinds, const uint8_t *a_bits, int column, uint32_t c, uint32_t d) {
    if (kinds & HAS_NAN) return canonical(0x7FC00000u);
    return with_infinities(s->step, s->a_type, a_bits, s->b_type, s->b + (size_t)column * s->row_bytes, c, d);
}

/* Products that are all zero leave c as it is, but for -0 and the payload of a NaN. */
ALWAYS_INLINE void keep_sum(const Step *s, int count, uint32_t *d) {
    for (int j = 0; j < count; j++) {
        uint32_t c = canonical(d[j]);
        d[j] = s->accumulate && c != 0x80000000u ? c : 0;
    }
}

/* One row of D, `count` columns from `column`. */
ALWAYS_INLINE void row_block(const Step *s, const Row *a, const Staged *b, int step, const uint8_t *a_bits, int column,
                             int count, uint32_t *d) {
    int odd = a->odd | b->odd;
    if (!odd && (a->lowest == NO_EXPONENT || b->zero_blocks[column / BLOCK])) {
        keep_sum(s, count, d);
        return;
    }
    uint32_t c[BLOCK] __attribute__((aligned(128))) = {0}, before[BLOCK] = {0};
    if (s->accumulate) memcpy(c, d, 4 * (size_t)count);
    for (int j = 0; j < BLOCK; j++) odd |= !is_finite(c[j]);
    if (odd) {
        memcpy(before, c, sizeof c);
        for (int j = 0; j < BLOCK; j++) c[j] = is_finite(c[j]) ? c[j] : 0;
    }
    step_block(a, b, step, column, c);
    for (int j = 0; odd && j < count; j++) {
        int kinds = a->odd | kind_of(before[j]) | (b->odd ? b->odd_columns[column + j] : 0);
        if (kinds) c[j] = not_finite(s, kinds, a_bits, column + j, before[j], c[j]);
    }
    memcpy(d, c, 4 * (size_t)count);
}

/* `step` is a constant wherever this is called, so that loops over K are unrolled. */
ALWAYS_INLINE void step_rows(const Step *s, const Staged *b, int step, int m, uint32_t *d, ptrdiff_t d_stride,
                             units_rows rows) {
    Row a = {.step = step};
    for (int i = 0; i < m; i++, d += d_stride) {
        if (rows && !(rows[i / 32] >> (i % 32) & 1)) continue;
        const uint8_t *bits = s->a + (size_t)i * s->row_bytes;
        a.lowest = NO_EXPONENT;
        a.odd = spread_any(s->a_type, bits, 0, 1, step, a.values, a.exponents, &a.lowest);
        if (a.odd & HAS_NAN) {
            for (int j = 0; j < s->n; j++) d[j] = canonical(0x7FC00000u);
            continue;
        }
        int column = 0;
        for (; column + BLOCK <= s->n; column += BLOCK) row_block(s, &a, b, step, bits, column, BLOCK, d + column);
        if (column < s->n) row_block(s, &a, b, step, bits, column, s->n - column, d + column);
    }
}

int units_mma(int m, int n, int k, units_type a_type, const void *a, units_type b_type, const void *b, uint32_t *d,
              ptrdiff_t d_stride, int accumulate, units_rows rows) {
    int step = TYPES[a_type].k_step, size = TYPES[a_type].bytes;
    if (m < 1 || n < 1 || n > COLUMNS || k < 0 || k % step || TYPES[b_type].k_step != step) return -1;
    Staged staged __attribute__((aligned(64)));
    Step s = {.a_type = a_type, .b_type = b_type, .row_bytes = (size_t)(k * size), .n = n, .step = step};
    for (int first = 0; first < k; first += step) {
        s.a = (const uint8_t *)a + (size_t)(first * size), s.b = (const uint8_t *)b + (size_t)(first * size);
        s.accumulate = accumulate || first > 0;
        stage(&staged, b_type, s.b, s.row_bytes, n);
        if (step == 16) step_rows(&s, &staged, 16, m, d, d_stride, rows);
        else if (step == 8) step_rows(&s, &staged, 8, m, d, d_stride, rows);
        else step_rows(&s, &staged, 32, m, d, d_stride, rows);
    }
    return 0;
}
