/* Matrix descriptors and the bytes they name: smem_descriptor.py, swizzle.py. */
#include "operands.h"

#define UNIT 16

static uint64_t bits(uint64_t word, int low, int width) { return word >> low & ((1ull << width) - 1); }

static int decode(Warp *w, uint64_t word, int span, uint64_t code, const char *codes, uint64_t reserved,
                  const char *what, SmemDescriptor *d) {
    if (word & reserved)
        return fault(w, "%s descriptor %#018llx sets bits %#llx, which must be zero", what, (unsigned long long)word,
                     (unsigned long long)(word & reserved));
    if (bits(word, 49, 3))
        return fault(w,
                     "%s descriptor %#018llx has base offset %llu; only 0 is simulated: "
                     "start the swizzle pattern at a multiple of its size",
                     what, (unsigned long long)word, (unsigned long long)bits(word, 49, 3));
    if (span < 0)
        return fault(w, "%s descriptor %#018llx has swizzle code %llu; simulated: %s", what, (unsigned long long)word,
                     (unsigned long long)code, codes);
    *d = (SmemDescriptor){.start = (uint32_t)bits(word, 0, 14) << 4, .leading = (uint32_t)bits(word, 16, 14) << 4,
                          .stride = (uint32_t)bits(word, 32, 14) << 4, .span = (uint32_t)span};
    return NEXT;
}

int decode_wgmma(Warp *w, uint64_t word, SmemDescriptor *d) {
    static const int SPANS[4] = {0, 128, 64, 32};
    uint64_t reserved = 3ull << 14 | 3ull << 30 | 7ull << 46 | 1023ull << 52;
    return decode(w, word, SPANS[bits(word, 62, 2)], bits(word, 62, 2), "0, 1, 2, 3", reserved, "wgmma", d);
}

int decode_tcgen05(Warp *w, uint64_t word, SmemDescriptor *d) {
    static const int SPANS[8] = {0, -1, 128, -1, 64, -1, 32, -1};
    if (bits(word, 46, 3) != 1)
        return fault(w, "tcgen05 descriptor %#018llx has %llu in bits 46-48, not 1", (unsigned long long)word,
                     (unsigned long long)bits(word, 46, 3));
    if (bits(word, 52, 1))
        return fault(w, "tcgen05 descriptor %#018llx asks for the absolute LBO mode; not simulated",
                     (unsigned long long)word);
    uint64_t reserved = 3ull << 14 | 3ull << 30 | 255ull << 53;
    return decode(w, word, SPANS[bits(word, 61, 3)], bits(word, 61, 3), "0, 2, 4, 6", reserved, "tcgen05", d);
}

/* ---- addresses --------------------------------------------------------------------------------------------------- */

static inline uint32_t swizzled(uint32_t address, uint32_t span) {
    uint32_t mask = span ? span / 16 - 1 : 0;
    return address ^ ((address >> 7 & mask) << 4);
}

/* Byte offset of element (i, k) from the start, before the swizzle; the table in smem_descriptor.element_offsets. */
static inline uint32_t offset_of(const Operand *o, uint32_t i, uint32_t k) {
    const SmemDescriptor *d = &o->d;
    uint32_t size = (uint32_t)o->size, unit = UNIT / size;
    if (!o->mn) {
        if (d->span) return i / 8 * d->stride + i % 8 * d->span + k * size;
        return i / 8 * d->stride + i % 8 * 16 + k / unit * d->leading + k % unit * size;
    }
    if (d->span) {
        uint32_t per = d->span / size;
        return i / per * d->leading + i % per * size + k / 8 * d->stride + k % 8 * d->span;
    }
    return i / unit * d->stride + i % unit * size + k / 8 * d->leading + k % 8 * 16;
}

static inline uint32_t unit_address(const Operand *o, uint32_t i, uint32_t k) {
    return swizzled(o->d.start + offset_of(o, i, k), o->d.span);
}

/* Calls for every 16-byte unit: neighbours along k, or along rows where the operand is MN-major. */
#define EACH_UNIT(o, i, k)                                                                     \
    for (uint32_t i = 0; i < (uint32_t)(o)->rows; i += (o)->mn ? UNIT / (uint32_t)(o)->size : 1) \
        for (uint32_t k = 0; k < (uint32_t)(o)->k; k += (o)->mn ? 1 : UNIT / (uint32_t)(o)->size)

int check_operand(Warp *w, const Operand *o, const Cta *cta) {
    if (!o->mn && o->d.span && (uint32_t)(o->k * o->size) > o->d.span)
        return fault(w,
                     "K-major operand of %d bytes per row exceeds its swizzle span of %u; "
                     "advance the start address per K step",
                     o->k * o->size, o->d.span);
    uint32_t last = 0;
    EACH_UNIT(o, i, k) {
        uint32_t a = unit_address(o, i, k) & ~(UNIT - 1u);
        if (a > last) last = a;
    }
    if (last + UNIT > cta->shared_limit)
        return fault(w, "matrix operand reads shared byte %#x, outside the window of %#x", last, cta->shared_limit);
    return NEXT;
}

/* ---- gathering --------------------------------------------------------------------------------------------------- */

static int past(Warp *w, const Operand *o, const Cta *cta) { return check_operand(w, o, cta); }

static int gather_k_major(Warp *w, const Operand *o, const Cta *cta, uint8_t *out) {
    uint32_t row_bytes = (uint32_t)(o->k * o->size), step = UNIT / (uint32_t)o->size;
    for (uint32_t i = 0; i < (uint32_t)o->rows; i++)
        for (uint32_t u = 0; u * UNIT < row_bytes; u++) {
            uint32_t a = unit_address(o, i, u * step) & ~(UNIT - 1u);
            if (a + UNIT > cta->shared_limit) return past(w, o, cta);
            memcpy(out + i * row_bytes + u * UNIT, cta->shared + a, UNIT);
        }
    return NEXT;
}

#define SHUFFLE __builtin_shufflevector
typedef uint16_t half8 __attribute__((ext_vector_type(8)));
typedef uint32_t word4 __attribute__((ext_vector_type(4)));
typedef uint64_t wide2 __attribute__((ext_vector_type(2)));

/* Eight rows of eight 16-bit elements become columns: three rounds of pairing. */
static void transpose8(half8 m[8]) {
    half8 a[8];
    for (int k = 0; k < 4; k++) {
        a[2 * k] = SHUFFLE(m[2 * k], m[2 * k + 1], 0, 8, 1, 9, 2, 10, 3, 11);
        a[2 * k + 1] = SHUFFLE(m[2 * k], m[2 * k + 1], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    word4 b[8];
    for (int h = 0; h < 2; h++)
        for (int k = 0; k < 2; k++) {
            word4 x = (word4)a[4 * h + k], y = (word4)a[4 * h + 2 + k];
            b[4 * h + 2 * k] = SHUFFLE(x, y, 0, 4, 1, 5);
            b[4 * h + 2 * k + 1] = SHUFFLE(x, y, 2, 6, 3, 7);
        }
    for (int k = 0; k < 4; k++) {
        wide2 x = (wide2)b[k], y = (wide2)b[4 + k];
        m[2 * k] = (half8)SHUFFLE(x, y, 0, 2);
        m[2 * k + 1] = (half8)SHUFFLE(x, y, 1, 3);
    }
}

/* Elements of 16 bits, rows and k whole multiples of 8: squares of 8 by 8. */
static int gather_squares(Warp *w, const Operand *o, const Cta *cta, uint8_t *out) {
    uint16_t *target = (uint16_t *)out;
    for (uint32_t i = 0; i < (uint32_t)o->rows; i += 8)
        for (uint32_t k = 0; k < (uint32_t)o->k; k += 8) {
            half8 m[8];
            for (uint32_t e = 0; e < 8; e++) {
                uint32_t a = unit_address(o, i, k + e) & ~(UNIT - 1u);
                if (a + UNIT > cta->shared_limit) return past(w, o, cta);
                memcpy(m + e, cta->shared + a, UNIT);
            }
            transpose8(m);
            for (uint32_t e = 0; e < 8; e++) memcpy(target + (i + e) * (uint32_t)o->k + k, m + e, UNIT);
        }
    return NEXT;
}

/* The rows of one k that a unit holds, spread over the rows of the result. */
#define SPREAD(type)                                                                                        \
    do {                                                                                                    \
        const type *from = (const type *)(cta->shared + a);                                                 \
        type *target = (type *)out;                                                                         \
        uint32_t left = (uint32_t)o->rows - i, per = UNIT / sizeof(type), n = left < per ? left : per;      \
        for (uint32_t e = 0; e < n; e++) target[(i + e) * (uint32_t)o->k + k] = from[e];                    \
    } while (0)

static int gather_mn_major(Warp *w, const Operand *o, const Cta *cta, uint8_t *out) {
    if (o->size == 2 && o->rows % 8 == 0 && o->k % 8 == 0) return gather_squares(w, o, cta, out);
    EACH_UNIT(o, i, k) {
        uint32_t a = unit_address(o, i, k) & ~(UNIT - 1u);
        if (a + UNIT > cta->shared_limit) return past(w, o, cta);
        if (o->size == 2) SPREAD(uint16_t);
        else if (o->size == 1) SPREAD(uint8_t);
        else SPREAD(uint32_t);
    }
    return NEXT;
}

int load_operand(Warp *w, const Operand *o, const Cta *cta, uint8_t *out) {
    if (!o->mn && o->d.span && (uint32_t)(o->k * o->size) > o->d.span) return check_operand(w, o, cta);
    return o->mn ? gather_mn_major(w, o, cta, out) : gather_k_major(w, o, cta, out);
}

/* ---- for the checks ---------------------------------------------------------------------------------------------- */

size_t list_granules(const GranuleSet *set, uint32_t *out) {
    size_t n = 0;
    for (uint32_t k = 0; k < sizeof set->words / sizeof *set->words; k++)
        for (uint64_t rest = set->words[k]; rest; rest &= rest - 1) out[n++] = 64 * k + (uint32_t)__builtin_ctzll(rest);
    return n;
}

chk_operand operand_granules(const Operand *o, const Cta *cta, uint32_t *granules) {
    GranuleSet set = {{0}};
    EACH_UNIT(o, i, k) add_granule(&set, unit_address(o, i, k) / UNIT);
    return (chk_operand){.kind = CHK_SHARED_UNITS, .cta = (uint32_t)cta->rank, .granules = granules,
                         .count = list_granules(&set, granules)};
}
