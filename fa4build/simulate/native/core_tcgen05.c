/* tcgen05: tensor memory, products, commits: tcgen05.py, tmem.py.
 *
 * Loads and stores of tensor memory happen at issue; products and commits are one queue in order per warp. */
#include "lanes.h"
#include "memory.h"
#include "operands.h"

#include <stdio.h>
#include <stdlib.h>

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define COLUMNS 512
#define ROWS 128
#define POISON 0x7FC17FC1u

/* ---- allocation -------------------------------------------------------------------------------------------------- */

TensorMemory *tensor_memory(Cta *cta) {
    if (cta->tensor) return cta->tensor;
    TensorMemory *t = cta->tensor = malloc(sizeof *t);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) t->cells[r][c] = POISON;
    t->paired_op = 0, t->pair_is_complete = false;
    t->num_blocks = t->group = 0, t->last_size = COLUMNS, t->may_allocate = true;
    return t;
}

static TensorMemory *join_group(Warp *w, Cta *cta, int group) {
    TensorMemory *t = tensor_memory(cta);
    if (t->group && t->group != group) {
        fault(w, "cta_group::%d after cta_group::%d: all tcgen05 instructions of a kernel must use one", group,
              t->group);
        return NULL;
    }
    t->group = group;
    return t;
}

static bool owns(const TensorMemory *t, int column, int count) {
    for (int k = 0; k < t->num_blocks; k++)
        if (t->blocks[k][0] <= column && column + count <= t->blocks[k][0] + t->blocks[k][1]) return true;
    for (int c = column; c < column + count; c++) {
        bool in = false;
        for (int k = 0; k < t->num_blocks; k++) in |= c >= t->blocks[k][0] && c < t->blocks[k][0] + t->blocks[k][1];
        if (!in) return false;
    }
    return true;
}

static int require_columns(Warp *w, const TensorMemory *t, int column, int count) {
    if (owns(t, column, count)) return NEXT;
    char blocks[320] = "none";
    size_t n = 0;
    for (int k = 0; k < t->num_blocks; k++)
        n += (size_t)snprintf(blocks + n, sizeof blocks - n, "%s%d..%d", k ? ", " : "", t->blocks[k][0],
                              t->blocks[k][0] + t->blocks[k][1] - 1);
    return fault(w, "tensor memory columns %d..%d are not allocated (allocated: %s)", column, column + count - 1,
                 blocks);
}

/* First column of a new block, -1: no room. */
static int allocate(TensorMemory *t, int count) {
    for (int first = 0; first + count <= COLUMNS; first += count) {
        bool free_here = true;
        for (int k = 0; k < t->num_blocks; k++)
            free_here &= first + count <= t->blocks[k][0] || t->blocks[k][0] + t->blocks[k][1] <= first;
        if (!free_here) continue;
        t->blocks[t->num_blocks][0] = first, t->blocks[t->num_blocks++][1] = count;
        t->last_size = count;
        return first;
    }
    return -1;
}

static int check_allocation(Warp *w, const TensorMemory *t, int count) {
    if (count < 32 || count > 512 || count & (count - 1))
        return fault(w, "tcgen05.alloc of %d columns; allowed: 32, 64, 128, 256, 512", count);
    if (!t->may_allocate)
        return fault(w, "tcgen05.alloc after tcgen05.relinquish_alloc_permit; allocate before it");
    if (count > t->last_size)
        return fault(w, "tcgen05.alloc of %d columns after one of %d: sizes must not grow", count, t->last_size);
    return NEXT;
}

/* One warp of each CTA of a pair executes an instruction of cta_group::2; the first one waits for the other. */
static int meet_peer(Warp *w, const Ins *i, TensorMemory *t, int count) {
    if (i->count == 1) return NEXT;
    int rank = w->cta->rank ^ 1;
    if (rank >= num_ctas(w))
        return fault(w, "%s in a cluster of %d CTA: launch with a cluster of pairs", opcode_text(w, i), num_ctas(w));
    Cta *other = w->cta->cluster->ctas + rank;
    TensorMemory *peer = tensor_memory(other);
    if (t->pair_is_complete) {
        t->pair_is_complete = false;
        return NEXT;
    }
    if (!peer->paired_op || peer->pair_is_complete) {
        if (threads_alive(other) == 0)
            return fault(w, "%s: CTA rank %d, the peer, has exited without it", opcode_text(w, i), rank);
        t->paired_op = i->op, t->paired_count = count;
        w->wait = (Wait){.kind = WAIT_PAIR, .mask = w->mask, .ins = i, .again = true};
        return BLOCKED;
    }
    if (peer->paired_op != i->op || peer->paired_count != count)
        return fault(w, "%s of %d columns while its peer CTA executes another instruction or one of %d columns; the "
                     "CTAs of a pair do it together", opcode_text(w, i), count, peer->paired_count);
    peer->paired_op = 0, peer->pair_is_complete = true;
    return NEXT;
}

RULE(tc_alloc) {
    uint32_t count, address[LANES];
    if (require_whole(w, "tcgen05.alloc")) return FAULTED;
    TensorMemory *t = join_group(w, w->cta, i->count);
    if (!t || uniform32(w, i->o[1], "columns", &count) || check_allocation(w, t, (int)count)) return FAULTED;
    int met = meet_peer(w, i, t, (int)count);
    if (met) return met;
    int first = allocate(t, (int)count);
    if (first < 0) {
        w->wait = (Wait){.kind = WAIT_ALLOC, .mask = w->mask, .ins = i, .need = count, .again = true};
        return BLOCKED;
    }
    uint32_t value[LANES] = {(uint32_t)first}, mask = w->mask;
    address[0] = lane32(w, i->o[0], 0) + (uint32_t)i->imm[0];
    w->mask = 1;
    int status = store_words(w, i, address, value);
    w->mask = mask;
    CHECK(w, chk_warp_barrier); /* every lane of the warp has the address */
    return status;
}

static int check_place(Warp *w, uint32_t address) {
    if (address >> 16 < ROWS && (address & 0xFFFF) < COLUMNS) return NEXT;
    return fault(w, "tensor memory address %#x (lane %u, column %u) is out of range", address, address >> 16,
                 address & 0xFFFF);
}

static int release(Warp *w, TensorMemory *t, uint32_t address, int count) {
    if (check_place(w, address)) return FAULTED;
    int column = (int)(address & 0xFFFF), at = -1;
    for (int k = 0; k < t->num_blocks; k++)
        if (t->blocks[k][0] == column && t->blocks[k][1] == count) at = k;
    if (at < 0) {
        char blocks[320] = "";
        size_t n = 0;
        for (int k = 0; k < t->num_blocks; k++)
            n += (size_t)snprintf(blocks + n, sizeof blocks - n, "%s%d: %d", k ? ", " : "", t->blocks[k][0],
                                  t->blocks[k][1]);
        return fault(w, "tcgen05.dealloc of %d columns at %d; allocated blocks (column: size): {%s}", count, column,
                     blocks);
    }
    t->num_blocks--;
    memmove(t->blocks + at, t->blocks + at + 1, sizeof *t->blocks * (size_t)(t->num_blocks - at));
    return NEXT;
}

RULE(tc_dealloc) {
    uint32_t address, count;
    if (require_whole(w, "tcgen05.dealloc")) return FAULTED;
    TensorMemory *t = join_group(w, w->cta, i->count);
    if (!t || uniform32(w, i->o[0], "address", &address) || uniform32(w, i->o[1], "columns", &count)) return FAULTED;
    int met = meet_peer(w, i, t, (int)count);
    if (met) return met;
    if (release(w, t, address, (int)count)) return FAULTED;
    CHECK(w, chk_tmem_freed, address & 0xFFFF, count, site_of(w, i));
    return NEXT;
}

RULE(tc_relinquish) {
    if (require_whole(w, "tcgen05.relinquish_alloc_permit")) return FAULTED;
    TensorMemory *t = join_group(w, w->cta, i->count);
    if (!t) return FAULTED;
    int met = meet_peer(w, i, t, 0);
    if (met) return met;
    t->may_allocate = false;
    return NEXT;
}

/* ---- loads and stores -------------------------------------------------------------------------------------------- */

enum { S32X32B = 0, S16X64B, S16X128B, S16X256B, S16X32BX2 };
static const char *const SHAPES[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
static const int REGISTERS_PER_REPEAT[] = {1, 1, 2, 4, 1}, MAX_REPEAT[] = {128, 128, 64, 32, 128};

/* Relative (lane, column) of register j in lane t; packed, of the first of its two columns. */
static void cell(int shape, int split, bool packed, int j, int t, int *lane, int *column) {
    switch (shape) {
    case S32X32B: *lane = t, *column = j; break;
    case S16X64B: *lane = t / 4 + 8 * (t % 2), *column = 2 * j + t / 2 % 2; break;
    case S16X128B: *lane = t / 4 + 8 * (j % 2), *column = 4 * (j / 2) + t % 4; break;
    case S16X256B: *lane = t / 4 + 8 * (j / 2 % 2), *column = 8 * (j / 4) + 2 * (t % 4) + j % 2; break;
    default:
        *lane = t % 16, *column = t / 16 * split + (packed ? 2 * j : j);
        return;
    }
    if (packed) *column *= 2;
}

static int columns_of(int shape, int registers, int split, bool packed) {
    int most = 0;
    for (int j = 0; j < registers; j++)
        for (int t = 0; t < LANES; t++) {
            int lane, column;
            cell(shape, split, packed, j, t, &lane, &column);
            column += packed;
            if (column > most) most = column;
        }
    return most + 1;
}

/* Checks everything about an ld or st but its registers; gives the place. */
static int check_transfer(Warp *w, const Ins *i, int32_t o, int width, uint32_t *lane, uint32_t *column) {
    uint32_t address;
    if (!same32(w, o, FULL, &address))
        return fault(w, "tensor memory address must be the same in all lanes; it takes more than one value");
    address += (uint32_t)i->imm[0];
    *lane = address >> 16, *column = address & 0xFFFF;
    if (require_columns(w, tensor_memory(w->cta), (int)*column, width) || check_place(w, address)) return FAULTED;
    uint32_t own = 32u * ((uint32_t)w->index % 4);
    if (*lane != own && (i->size == S32X32B || *lane != own + 16)) {
        if (i->size == S32X32B)
            return fault(w, "tcgen05 ld/st %s at lane %u by warp %d of the CTA; it may start at lane %u",
                         SHAPES[i->size], *lane, w->index, own);
        return fault(w, "tcgen05 ld/st %s at lane %u by warp %d of the CTA; it may start at lane %u or %u",
                     SHAPES[i->size], *lane, w->index, own, own + 16);
    }
    return NEXT;
}

static int check_repeat(Warp *w, const Ins *i, int registers) {
    if (i->count & (i->count - 1) || i->count > MAX_REPEAT[i->size])
        return fault(w, "tcgen05 ld/st %s.x%d: repeat is a power of two up to %d", SHAPES[i->size], i->count,
                     MAX_REPEAT[i->size]);
    if (i->length != registers)
        return fault(w, "tcgen05 ld/st %s.x%d has %d registers, needs %d", SHAPES[i->size], i->count, i->length,
                     registers);
    return NEXT;
}

static int start_transfer(Warp *w, const Ins *i, int32_t o, bool is_write, uint32_t *lane, uint32_t *column) {
    if (require_whole(w, is_write ? "tcgen05.st" : "tcgen05.ld")) return FAULTED;
    int registers = i->count * REGISTERS_PER_REPEAT[i->size];
    if (check_repeat(w, i, registers)) return FAULTED;
    bool packed = i->flags & 1;
    int width = i->size == S32X32B && !packed ? registers : columns_of(i->size, registers, (int)i->imm[1], packed);
    if (check_transfer(w, i, o, width, lane, column)) return FAULTED;
    if (w->run->checks) CHECK(w, chk_tmem_access, (uint32_t)w->index, *lane << 16 | *column, (uint32_t)width, is_write, site_of(w, i));
    return NEXT;
}

#define BLOCK 8
/* 32 lanes by `n` columns, transposed in squares that stay in registers. */
static void load_block(Warp *w, const int32_t *list, int n, const uint32_t *cells) {
    for (int j = 0; j < n; j++) {
        uint32_t *d = list[j] < 0 ? NULL : to(w, list[j]);
        if (!d) continue;
        for (int t = 0; t < LANES; t++) d[t] = cells[t * COLUMNS + j];
    }
}

static void load_shaped(Warp *w, const Ins *i, const int32_t *list, uint32_t lane, uint32_t column) {
    TensorMemory *m = tensor_memory(w->cta);
    bool packed = i->flags & 1;
    for (int j = 0; j < i->length; j++)
        for (int t = 0; t < LANES && list[j] >= 0; t++) {
            int l, c;
            cell(i->size, (int)i->imm[1], packed, j, t, &l, &c);
            const uint32_t *from = &m->cells[lane + (uint32_t)l][column + (uint32_t)c];
            ((uint32_t *)to(w, list[j]))[t] = packed ? (from[0] & 0xFFFF) | from[1] << 16 : from[0];
        }
}

RULE(tc_ld) {
    uint32_t lane, column;
    if (start_transfer(w, i, i->o[0], false, &lane, &column)) return FAULTED;
    const int32_t *list = w->run->launch->lists + i->list;
    if (i->size == S32X32B && !(i->flags & 1))
        load_block(w, list, i->length, &tensor_memory(w->cta)->cells[lane][column]);
    else load_shaped(w, i, list, lane, column);
    return NEXT;
}

RULE(tc_st) {
    uint32_t lane, column;
    if (start_transfer(w, i, i->o[0], true, &lane, &column)) return FAULTED;
    const int32_t *list = w->run->launch->lists + i->list;
    TensorMemory *m = tensor_memory(w->cta);
    bool packed = i->flags & 1, plain = i->size == S32X32B && !packed;
    for (int j = 0; j < i->length; j++) {
        const uint32_t *from = at(w, list[j]);
        for (int t = 0; t < LANES; t++) {
            int l = t, c = j;
            if (!plain) cell(i->size, (int)i->imm[1], packed, j, t, &l, &c);
            uint32_t *target = &m->cells[lane + (uint32_t)l][column + (uint32_t)c];
            target[0] = packed ? from[t] & 0xFFFF : from[t];
            if (packed) target[1] = from[t] >> 16;
        }
    }
    return NEXT;
}

/* flags: 1 max, 2 absolute, 4 NaN. */
RULE(tc_ld_red) {
    uint32_t lane, column;
    Ins plain = *i;
    plain.flags = 0, plain.size = S32X32B;
    if (require_whole(w, "tcgen05.ld.red")) return FAULTED;
    if (check_transfer(w, &plain, i->o[0], i->count, &lane, &column)) return FAULTED;
    CHECK(w, chk_tmem_access, (uint32_t)w->index, lane << 16 | column, i->count, 0, site_of(w, i));
    const int32_t *list = w->run->launch->lists + i->list;
    const uint32_t *cells = &tensor_memory(w->cta)->cells[lane][column];
    load_block(w, list, i->length, cells);
    for (int t = 0; t < LANES; t++) {
        uint32_t best = cells[t * COLUMNS];
        if (i->flags & 2) best &= 0x7FFFFFFF;
        for (int j = 0; j < i->count; j++) {
            uint32_t value = cells[t * COLUMNS + j];
            if (i->flags & 2) value &= 0x7FFFFFFF;
            best = i->flags & 1 ? units_max_f32(best, value, i->flags >> 2 & 1, 0)
                                : units_min_f32(best, value, i->flags >> 2 & 1, 0);
        }
        if (i->o[1] >= 0) ((uint32_t *)to(w, i->o[1]))[t] = best;
    }
    return NEXT;
}

RULE(tc_wait) {
    static const chk_tmem_order ORDERS[] = {CHK_WAIT_LD, CHK_WAIT_ST, CHK_TCGEN05_BEFORE, CHK_TCGEN05_AFTER};
    if (i->flags < 2 && require_whole(w, opcode_text(w, i))) return FAULTED;
    CHECK(w, chk_tmem_wait, ORDERS[i->flags]);
    return NEXT;
}

/* ---- the CTAs of an instruction ---------------------------------------------------------------------------------- */

/* Itself, or the pair of ranks that differ in bit 0, even first. */
static int pair_of(Warp *w, int group, Cta *pair[2]) {
    Cta *ctas = w->cta->cluster->ctas;
    pair[0] = w->cta, pair[1] = NULL;
    if (group == 1) return NEXT;
    int even = w->cta->rank & ~1;
    if (even + 1 >= num_ctas(w))
        return fault(w, "cta_group::2 in a cluster of %d CTA: launch with a cluster of pairs", num_ctas(w));
    pair[0] = ctas + even, pair[1] = ctas + even + 1;
    return NEXT;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t cta, row, n, rows, columns, lane, column;
} Block;

typedef struct {
    Cta *ctas[2];
    int32_t group, m, n, k, size, a_type, b_type;
    bool a_mn, b_mn, negate_a, negate_b, keeps, from_tmem, disables;
    SmemDescriptor a, b;
    uint32_t a_column, disabled[8];
    Block blocks[4];
    int32_t num_blocks;
} Tile;

static uint32_t field(uint32_t word, int low, int width) { return word >> low & ((1u << width) - 1); }

static int decode_types(Warp *w, uint32_t word, int kind, Tile *p) {
    static const char *const KINDS[] = {"f16", "tf32", "f8f6f4"};
    static const char *const TYPES[] = {"{0: 'f16', 1: 'bf16'}", "{2: 'tf32'}", "{0: 'e4m3', 1: 'e5m2'}"};
    static const int8_t TYPE[3][8] = {{UNITS_F16, UNITS_BF16, -1, -1, -1, -1, -1, -1},
                                      {-1, -1, UNITS_TF32, -1, -1, -1, -1, -1},
                                      {UNITS_E4M3, UNITS_E5M2, -1, -1, -1, -1, -1, -1}};
    static const int SIZES[] = {2, 4, 1}, K[] = {16, 8, 32};
    uint32_t a = field(word, 7, 3), b = field(word, 10, 3), d = field(word, 4, 2);
    if (TYPE[kind][a] < 0 || TYPE[kind][b] < 0 || d != 1)
        return fault(w,
                     "tcgen05.mma kind::%s descriptor %#010x: types A %u, B %u, D %u "
                     "are not simulated; A, B: %s, D: {1: 'f32'}",
                     KINDS[kind], word, a, b, d, TYPES[kind]);
    p->a_type = TYPE[kind][a], p->b_type = TYPE[kind][b], p->size = SIZES[kind], p->k = K[kind];
    return NEXT;
}

static int decode_shape(Warp *w, uint32_t word, int kind, Tile *p) {
    uint32_t unsupported = 15u | 1u << 6 | 1u << 23 | 1u << 29 | 3u << 30;
    if (word & unsupported)
        return fault(w,
                     "tcgen05.mma instruction descriptor %#010x sets bits %#x: sparsity, saturation, "
                     "reserved bits and .ws shifts are not simulated",
                     word, word & unsupported);
    if (decode_types(w, word, kind, p)) return FAULTED;
    p->m = (int32_t)field(word, 24, 5) << 4, p->n = (int32_t)field(word, 17, 6) << 3;
    p->negate_a = field(word, 13, 1), p->negate_b = field(word, 14, 1);
    p->a_mn = field(word, 15, 1), p->b_mn = field(word, 16, 1);
    int group = p->group, step = 8 * group * (p->size == 1 && p->b_mn ? 2 : 1);
    if ((p->m != 64 * group && p->m != 128 * group) || p->n % step || p->n < step || p->n > 256)
        return fault(w,
                     "tcgen05.mma cta_group::%d has no shape M %d, N %d; "
                     "M is %d or %d, N a multiple of %d up to 256",
                     group, p->m, p->n, 64 * group, 128 * group, step);
    return NEXT;
}

static void add_block(Tile *p, int cta, int row, int n, int rows, int columns, int lane, int column) {
    p->blocks[p->num_blocks++] = (Block){cta, row, n, rows, columns, lane, column};
}

/* Where D lies; the table in tmem.accumulator_blocks. */
static int place_accumulator(Warp *w, Tile *p, uint32_t address) {
    if (check_place(w, address)) return FAULTED;
    int lane = (int)(address >> 16), column = (int)(address & 0xFFFF);
    bool is_f = p->m == 64 && p->group == 1, is_b = p->m == 128 && p->group == 2;
    if (lane && !(is_f && lane == 16))
        return fault(w, "tcgen05.mma accumulator of M %d, cta_group::%d at lane %d; must be 0", p->m, p->group, lane);
    int width = is_b ? p->n / 2 : p->n;
    if (column + width > COLUMNS)
        return fault(w, "tcgen05.mma accumulator takes columns %d..%d of 512", column, column + width - 1);
    p->num_blocks = 0;
    if (is_f)
        for (int q = 0; q < 4; q++) add_block(p, 0, 16 * q, 0, 16, width, 32 * q + lane, column);
    else if (is_b)
        for (int c = 0; c < 2; c++)
            for (int h = 0; h < 2; h++) add_block(p, c, 64 * c, h * width, 64, width, 64 * h, column);
    else
        for (int c = 0; c < p->group; c++) add_block(p, c, 128 * c, 0, 128, width, 0, column);
    return NEXT;
}

/* A from tensor memory: row i in lane i of its CTA, 8 columns. */
static int read_a(Warp *w, const Tile *p, uint8_t *out) {
    int rows = p->m / p->group;
    for (int c = 0; c < p->group; c++) {
        const TensorMemory *t = tensor_memory(p->ctas[c]);
        for (int r = 0; r < rows; r++) {
            const uint32_t *from = &t->cells[r][p->a_column];
            memcpy(out + (c * rows + r) * 32, from, 32);
            if (rows == 64 && memcmp(from, &t->cells[64 + r][p->a_column], 32))
                return fault(w,
                             "tcgen05.mma A operand of M %d, cta_group::2: lanes 64..127 of CTA %d must repeat lanes "
                             "0..63",
                             p->m, c);
        }
    }
    return NEXT;
}

static Operand operand_of(const Tile *p, bool of_a) {
    return (Operand){.d = of_a ? p->a : p->b, .rows = (of_a ? p->m : p->n) / p->group, .k = p->k, .size = p->size,
                     .mn = of_a ? p->a_mn : p->b_mn};
}

static int load_both(Warp *w, const Tile *p, bool of_a, uint8_t *out) {
    Operand o = operand_of(p, of_a);
    for (int c = 0; c < p->group; c++)
        if (load_operand(w, &o, p->ctas[c], out + c * o.rows * 32)) return FAULTED;
    return NEXT;
}

static void negate(uint8_t *bits, int rows, int size) {
    for (int k = size - 1; k < rows * 32; k += size) bits[k] ^= 0x80;
}

static void read_accumulator(const Tile *p, uint32_t *d) {
    for (int k = 0; k < p->num_blocks; k++) {
        const Block *b = p->blocks + k;
        const TensorMemory *t = tensor_memory(p->ctas[b->cta]);
        for (int r = 0; r < b->rows; r++)
            memcpy(d + (b->row + r) * p->n + b->n, &t->cells[b->lane + r][b->column], 4 * (size_t)b->columns);
    }
}

static void write_accumulator(const Tile *p, const uint32_t *d) {
    for (int k = 0; k < p->num_blocks; k++) {
        const Block *b = p->blocks + k;
        TensorMemory *t = tensor_memory(p->ctas[b->cta]);
        for (int r = 0; r < b->rows; r++) {
            int bit = 128 * b->cta + b->lane + r;
            if (p->disables && p->disabled[bit / 32] >> (bit % 32) & 1) continue;
            memcpy(&t->cells[b->lane + r][b->column], d + (b->row + r) * p->n + b->n, 4 * (size_t)b->columns);
        }
    }
}

/* Block by block where it lies. */
static void multiply_in_place(const Tile *p, const uint8_t *a, const uint8_t *b) {
    for (int k = 0; k < p->num_blocks; k++) {
        const Block *x = p->blocks + k;
        uint32_t *d = &tensor_memory(p->ctas[x->cta])->cells[x->lane][x->column];
        units_mma(x->rows, x->columns, p->k, (units_type)p->a_type, a + x->row * 32, (units_type)p->b_type,
                  b + x->n * 32, d, COLUMNS, p->keeps, NULL);
    }
}

int perform_mma(Op *op) {
    static uint8_t a[256 * 32], b[256 * 32];
    static uint32_t c[256 * 256];
    const Tile *p = op->more;
    Warp *w = op->warp;
    if (p->from_tmem ? read_a(w, p, a) : load_both(w, p, true, a)) return FAULTED;
    if (load_both(w, p, false, b)) return FAULTED;
    if (p->negate_a) negate(a, p->m, p->size);
    if (p->negate_b) negate(b, p->n, p->size);
    if (!p->disables) {
        multiply_in_place(p, a, b);
        return NEXT;
    }
    if (p->keeps) read_accumulator(p, c);
    units_mma(p->m, p->n, p->k, (units_type)p->a_type, a, (units_type)p->b_type, b, c, p->n, p->keeps, NULL);
    write_accumulator(p, c);
    return NEXT;
}

static void observe_mma(Warp *w, Op *op, const Tile *p) {
    static uint32_t granules[4][MAX_OPERAND_UNITS];
    chk_operand reads[8], cells[4];
    size_t n = 0;
    Operand a = operand_of(p, true), b = operand_of(p, false);
    for (int c = 0; c < p->group; c++) {
        reads[n++] = operand_granules(&b, p->ctas[c], granules[2 * c]);
        if (!p->from_tmem) reads[n++] = operand_granules(&a, p->ctas[c], granules[2 * c + 1]);
        else
            reads[n++] = (chk_operand){.kind = CHK_TENSOR_BLOCK, .cta = (uint32_t)p->ctas[c]->rank,
                                       .lanes = (uint32_t)(p->m / p->group), .column = p->a_column, .count = 8};
    }
    for (int k = 0; k < p->num_blocks; k++) {
        const Block *x = p->blocks + k;
        cells[k] = (chk_operand){.kind = CHK_TENSOR_BLOCK, .cta = (uint32_t)p->ctas[x->cta]->rank,
                                 .first = (uint32_t)x->lane, .lanes = (uint32_t)x->rows,
                                 .column = (uint32_t)x->column, .count = (uint64_t)x->columns};
        if (p->keeps) reads[n++] = cells[k];
    }
    uint32_t shape = (uint32_t)p->m >> 4 | (uint32_t)p->n << 5 | (uint32_t)p->group << 14;
    uint32_t tag = 1u << 31 | shape | (uint32_t)p->blocks->column << 16 | (uint32_t)(p->blocks->lane != 0) << 26;
    for (int c = 0; c < p->group; c++) CHECK(w, chk_touches, (uint32_t)p->ctas[c]->rank, op->site);
    observe_product(w, op, tag, reads, n, cells, (size_t)p->num_blocks);
}

static int read_tile(Warp *w, const Ins *i, int lane, Tile *p) {
    const int32_t *list = w->run->launch->lists + i->list;
    p->group = i->count, p->from_tmem = i->flags & 1;
    if (pair_of(w, p->group, p->ctas)) return FAULTED;
    for (int c = 0; c < p->group; c++)
        if (!join_group(w, p->ctas[c], p->group)) return FAULTED;
    if (decode_shape(w, lane32(w, i->o[3], lane), i->size, p)) return FAULTED;
    if (!p->from_tmem && decode_tcgen05(w, lane64(w, i->o[1], lane), &p->a)) return FAULTED;
    if (decode_tcgen05(w, lane64(w, i->o[2], lane), &p->b)) return FAULTED;
    for (int k = 0; k < i->length && k < 8; k++) {
        p->disabled[k] = lane32(w, list[k], lane);
        p->disables |= p->disabled[k] != 0;
    }
    p->keeps = predicate(w, i->o[4]) >> lane & 1;
    return place_accumulator(w, p, lane32(w, i->o[0], lane) + (uint32_t)i->imm[0]);
}

static int check_a_place(Warp *w, const Ins *i, int lane, Tile *p) {
    uint32_t address = lane32(w, i->o[1], lane) + (uint32_t)i->imm[1];
    if (check_place(w, address)) return FAULTED;
    p->a_column = address & 0xFFFF;
    if (address >> 16 || p->a_column + 8 > COLUMNS)
        return fault(w, "tcgen05.mma A operand at lane %u, column %u; lane 0 and 8 columns are needed", address >> 16,
                     p->a_column);
    int rows = p->m / p->group;
    if ((rows != 64 && rows != 128) || (rows == 64 && p->group == 1))
        return fault(w, "tcgen05.mma A operand in tensor memory with M %d, cta_group::%d: not modelled", p->m,
                     p->group);
    return NEXT;
}

static int start_tile(Warp *w, const Ins *i, int lane, Tile *p) {
    if (read_tile(w, i, lane, p)) return FAULTED;
    for (int k = 0; k < p->num_blocks; k++) {
        const Block *b = p->blocks + k;
        if (require_columns(w, tensor_memory(p->ctas[b->cta]), b->column, b->columns)) return FAULTED;
    }
    return p->from_tmem ? check_a_place(w, i, lane, p) : NEXT;
}

RULE(tc_mma) {
    int lane;
    if (one_thread(w, i, &lane)) return FAULTED;
    Op *op = new_op(w, i, OP_MMA, 1);
    Tile *p = op->more = calloc(1, sizeof *p);
    if (start_tile(w, i, lane, p)) {
        drop(op);
        return FAULTED;
    }
    if (w->run->checks) observe_mma(w, op, p);
    return submit(&w->cta->cluster->engine, op, queue_key(QUEUE_TENSOR, w));
}

/* ---- copies and commits ------------------------------------------------------------------------------------------ */

typedef struct {
    Cta *ctas[2];
    int32_t group, column;
    Operand source;
    uint32_t first, second; /* quarters of rows 0-31 and 32-63; none of both: all rows in order */
} CellCopy;

static void copy_quarters(TensorMemory *t, const CellCopy *c, const uint8_t *bytes, int size) {
    for (int part = 0; part < 2; part++)
        for (int q = 0; q < 4; q++)
            for (int r = 0; (part ? c->second : c->first) >> q & 1 && r < 32; r++)
                memcpy(&t->cells[32 * q + r][c->column], bytes + (32 * part + r) * size, (size_t)size);
}

int perform_tensor_copy(Op *op) {
    static uint8_t bytes[ROWS * 32];
    const CellCopy *c = op->more;
    for (int k = 0; k < c->group; k++) {
        TensorMemory *t = tensor_memory(c->ctas[k]);
        if (load_operand(op->warp, &c->source, c->ctas[k], bytes)) return FAULTED;
        if (c->first) copy_quarters(t, c, bytes, c->source.k);
        for (int r = 0; !c->first && r < ROWS; r++)
            memcpy(&t->cells[r][c->column], bytes + r * c->source.k, (size_t)c->source.k);
    }
    return NEXT;
}

static void observe_copy(Warp *w, Op *op, const CellCopy *c) {
    static uint32_t granules[2][MAX_OPERAND_UNITS];
    chk_operand reads[2], cells[2];
    for (int k = 0; k < c->group; k++) {
        reads[k] = operand_granules(&c->source, c->ctas[k], granules[k]);
        cells[k] = (chk_operand){.kind = CHK_TENSOR_BLOCK, .cta = (uint32_t)c->ctas[k]->rank, .lanes = ROWS,
                                 .column = (uint32_t)c->column, .count = (uint64_t)c->source.k / 4};
    }
    for (int k = 0; k < c->group; k++) CHECK(w, chk_touches, (uint32_t)c->ctas[k]->rank, op->site);
    observe_product(w, op, CHK_TAG_COPY, reads, (size_t)c->group, cells, (size_t)c->group);
}

static int start_copy(Warp *w, const Ins *i, int lane, CellCopy *c) {
    c->group = i->count, c->first = i->flags & 15, c->second = i->flags >> 4 & 15;
    c->source = (Operand){.rows = (int32_t)i->imm[1], .k = i->size, .size = 1};
    if (decode_tcgen05(w, lane64(w, i->o[1], lane), &c->source.d)) return FAULTED;
    c->column = (int32_t)((lane32(w, i->o[0], lane) + (uint32_t)i->imm[0]) & 0xFFFF);
    if (pair_of(w, c->group, c->ctas)) return FAULTED;
    for (int k = 0; k < c->group; k++) {
        TensorMemory *t = join_group(w, c->ctas[k], c->group);
        if (!t || require_columns(w, t, c->column, i->size / 4)) return FAULTED;
    }
    return NEXT;
}

RULE(tc_cp) {
    int lane;
    if (one_thread(w, i, &lane)) return FAULTED;
    Op *op = new_op(w, i, OP_TENSOR_COPY, 1);
    CellCopy *c = op->more = calloc(1, sizeof *c);
    if (start_copy(w, i, lane, c)) {
        drop(op);
        return FAULTED;
    }
    if (w->run->checks) observe_copy(w, op, c);
    return submit(&w->cta->cluster->engine, op, queue_key(QUEUE_TENSOR, w));
}

int perform_commit(Op *op) {
    Warp *w = op->warp;
    for (int k = 0; k < op->num_barriers; k++) {
        Mbarrier *b = op->barrier[k];
        if (w->run->checks) chk_deferred_arrive(w->cta->cluster->checks, b->handle, b->phase, op->clock);
        Arrival who = {.kind = ARRIVED_COMMIT, .warp = w->index, .rank = w->cta->rank, .line = op->line};
        if (mbarrier_arrive(w, b, 1, who)) return FAULTED;
    }
    if (w->run->checks) chk_clock_release(w->cta->cluster->checks, op->clock);
    return NEXT;
}

static int find_barriers(Warp *w, const Ins *i, int lane, Op *op) {
    uint32_t target = lane32(w, i->o[0], lane) + (uint32_t)i->imm[0];
    if (i->o[1] < 0) {
        op->barrier[op->num_barriers++] = find_mbarrier(w, target);
        return op->barrier[0] ? NEXT : FAULTED;
    }
    uint32_t chosen = lane32(w, i->o[1], lane) & 0xFFFF;
    if (chosen >> num_ctas(w))
        return fault(w, "commit mask 0x%x names CTAs outside the cluster of %d", chosen, num_ctas(w));
    for (int k = 0; k < num_ctas(w); k++) {
        if (!(chosen >> k & 1)) continue;
        Mbarrier *b = find_mbarrier(w, (uint32_t)k << RANK_SHIFT | (target & OFFSET_MASK));
        if (!b) return FAULTED;
        op->barrier[op->num_barriers++] = b;
    }
    return NEXT;
}

/* One arrival when all earlier asynchronous tcgen05 operations of the thread are done. */
RULE(tc_commit) {
    int lane;
    if (one_thread(w, i, &lane) || !join_group(w, w->cta, i->count)) return FAULTED;
    Op *op = new_op(w, i, OP_COMMIT, 1);
    if (find_barriers(w, i, lane, op)) {
        drop(op);
        return FAULTED;
    }
    for (int k = 0; k < op->num_barriers; k++) CHECK(w, chk_signals, op->barrier[k]->handle, op->site);
    CHECK(w, chk_commit, (uint32_t)lane, op->site);
    if (w->run->checks)
        chk_clock_take(w->cta->cluster->checks, (uint32_t)w->cta->rank, (uint32_t)w->index, w->mask, CHK_MMA,
                       &op->clock);
    for (int k = 0; k < op->num_barriers; k++) mbarrier_source(op->barrier[k], w, i->line);
    return submit(&w->cta->cluster->engine, op, queue_key(QUEUE_TENSOR, w));
}
