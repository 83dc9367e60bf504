/* Tensor (TMA) loads, stores and reductions, tile mode: tensor_copies.py, tma.py, tensor_map.py. */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define MAP_BYTES 128
#define UNIT 16
#define POISON 0xC1

typedef struct {
    uint64_t address;
    int32_t rank, element, dtype, swizzle, interleave, fill, odd_steps;
    int64_t dims[5], strides[5]; /* strides[d]: bytes between neighbours of dim d; of dim 0 the element */
    int32_t box[5], steps[5];
    uint32_t box_bytes;
} Map;
enum { TYPE_F32 = 7 };

/* One box: where it lies on both sides. Units are the largest pieces that are contiguous on both. */
typedef struct {
    Map map;
    int64_t coordinates[5];
    uint32_t shared, unit;
    int64_t count[5], low[5], high[5]; /* per dim: units (dim 0) or elements, and the part inside the tensor */
    uint64_t first;                    /* address of the first unit, inside the tensor or not */
    bool whole, empty, reduces;
    Buffer *buffer;
} Box;

/* ---- maps -------------------------------------------------------------------------------------------------------- */

static uint64_t bits(uint64_t word, int low, int width) { return word >> low & ((1ull << width) - 1); }

/* Python has checked the values when a map is first met; here they are only read. */
static void unpack(const uint8_t *data, Map *m) {
    static const int SIZES[16] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2};
    static const int SPANS[4] = {0, 32, 64, 128};
    uint64_t w[8];
    memcpy(w, data, sizeof w);
    *m = (Map){.address = w[0], .rank = (int32_t)bits(w[1], 4, 3) + 1, .dtype = (int32_t)bits(w[1], 7, 4)};
    m->element = SIZES[m->dtype];
    m->interleave = (int32_t)bits(w[1], 11, 2), m->swizzle = SPANS[bits(w[1], 13, 2)];
    m->fill = (int32_t)bits(w[1], 15, 1);
    m->dtype |= (int32_t)bits(w[1], 16, 1) << 8;
    uint64_t low[4] = {w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF};
    m->box_bytes = (uint32_t)m->element;
    for (int d = 0; d < 5; d++) {
        bool used = d < m->rank;
        m->dims[d] = used ? (int64_t)bits(w[4 + d / 2], 32 * (d % 2), 32) + 1 : 1;
        m->box[d] = used ? (int32_t)(d ? bits(w[7], 8 * (d - 1), 8) : bits(w[6], 56, 8)) + 1 : 1;
        m->steps[d] = used ? (int32_t)bits(w[6], 32 + 3 * d, 3) + 1 : 1;
        if (used && d) m->strides[d] = (int64_t)((low[d - 1] | bits(w[3], 32 + 4 * (d - 1), 4) << 32) << 4);
        m->odd_steps |= m->steps[d] != 1;
        m->box_bytes *= (uint32_t)m->box[d];
    }
}

static const uint8_t *map_bytes(Warp *w, uint64_t address) {
    const Launch *l = w->run->launch;
    if (address >= PARAMETER_WINDOW && address - PARAMETER_WINDOW <= (uint64_t)l->parameter_bytes - MAP_BYTES &&
        l->parameter_bytes >= MAP_BYTES)
        return l->parameters + (address - PARAMETER_WINDOW);
    Buffer *b = find_buffer(w->run, address, MAP_BYTES);
    if (b) return b->data + (address - b->base);
    out_of_bounds(w, "read", address, MAP_BYTES);
    return NULL;
}

/* The map at a parameter or global address; read once per launch. */
static const Map *resolve(Warp *w, uint64_t address) {
    Run *run = w->run;
    for (int k = 0; k < run->num_maps; k++)
        if (run->maps[k].address == address) return run->maps[k].map;
    const uint8_t *data = map_bytes(w, address);
    if (!data) return NULL;
    if (address % 64 && address < PARAMETER_WINDOW) {
        fault(w, "tensor map address 0x%llx is not a multiple of 64", (unsigned long long)address);
        return NULL;
    }
    if (!run->launch->map_is_legal(data)) {
        fault(w, "tensor map at 0x%llx is not legal", (unsigned long long)address);
        run->launch->status = RUN_BAD_MAP, run->launch->map_address = (uint64_t)(uintptr_t)data;
        return NULL;
    }
    if (run->num_maps == run->map_capacity) {
        run->map_capacity = run->map_capacity ? 2 * run->map_capacity : 16;
        run->maps = realloc(run->maps, sizeof *run->maps * (size_t)run->map_capacity);
    }
    Map *m = malloc(sizeof *m);
    unpack(data, m);
    run->maps[run->num_maps++] = (KnownMap){address, m};
    return m;
}

/* ---- boxes ------------------------------------------------------------------------------------------------------- */

static const char *listed(const int64_t *values, int n) {
    static char kept[4][160];
    static int next;
    char *text = kept[next++ & 3];
    size_t length = 1;
    text[0] = '(';
    for (int k = 0; k < n; k++)
        length += (size_t)snprintf(text + length, 160 - length, "%s%lld", k ? ", " : "", (long long)values[k]);
    snprintf(text + length, 160 - length, n == 1 ? ",)" : ")");
    return text;
}

static const char *type_name(const Map *m) {
    static const char *const NAMES[16] = {"u8",  "u16",     "u32", "i32", "u64", "i64", "f16",
                                          "f32", "f32_ftz", "f64", "bf16"};
    if (m->dtype >> 8) return m->dtype == 0x107 ? "tf32" : "tf32_ftz";
    return NAMES[m->dtype & 15];
}

static int check_supported(Warp *w, const Box *b, int given, bool outgoing) {
    const Map *m = &b->map;
    if (given != m->rank)
        return fault(w, "tensor copy gives %d coordinates %s to a map of rank %d; both must agree", given,
                     listed(b->coordinates, given), m->rank);
    if (b->shared % 128) return fault(w, "tensor copy: shared address 0x%x is not a multiple of 128", b->shared);
    if (b->coordinates[0] * m->element % UNIT)
        return fault(w,
                     "tensor copy: first coordinate %lld of %s is not a multiple of 16 bytes; "
                     "hardware ends the kernel with an illegal instruction",
                     (long long)b->coordinates[0], type_name(m));
    for (int d = 0; d < given && outgoing; d++)
        if (b->coordinates[d] < 0)
            return fault(w,
                         "tensor copy: a store or reduction at %s; coordinates must not be negative there "
                         "(hardware ends the kernel with an illegal instruction; only loads may begin before the tensor)",
                         listed(b->coordinates, given));
    if (m->interleave) return fault(w, "tensor copy: interleave %d is not simulated; only 0 is", 16 * m->interleave);
    if (m->odd_steps) {
        int64_t steps[5];
        for (int d = 0; d < 5; d++) steps[d] = m->steps[d];
        return fault(w, "tensor copy: element strides %s are not simulated; only 1 is", listed(steps, m->rank));
    }
    if (m->fill) return fault(w, "tensor copy: NaN fill is not simulated; only zero fill is");
    return NEXT;
}

static int64_t rounded_up(int64_t a, int64_t by) { return a >= 0 ? (a + by - 1) / by : -(-a / by); }

/* The part of each dim that lies inside the tensor. */
static void clip(Box *b, int64_t inner_extent) {
    const Map *m = &b->map;
    b->whole = true;
    for (int d = 0; d < m->rank; d++) {
        int64_t per = d ? 1 : b->unit / m->element, extent = d ? m->dims[d] : inner_extent, c = b->coordinates[d];
        b->count[d] = m->box[d] / per;
        int64_t low = rounded_up(-c, per), high = rounded_up(extent - c, per);
        b->low[d] = low > 0 ? low : 0;
        b->high[d] = high < b->count[d] ? high : b->count[d];
        b->empty |= b->low[d] >= b->high[d];
        b->whole &= b->low[d] == 0 && b->high[d] == b->count[d];
    }
    for (int d = m->rank; d < 5; d++) b->count[d] = 1, b->low[d] = 0, b->high[d] = 1;
}

static inline uint32_t swizzled(const Map *m, uint32_t address) {
    uint32_t mask = m->swizzle ? (uint32_t)m->swizzle / 16 - 1 : 0;
    return address ^ ((address >> 7 & mask) << 4);
}

/* Byte behind the last that the box touches in shared memory. */
static uint32_t last_shared(const Box *b) {
    uint32_t end = b->shared + b->map.box_bytes, last = 0;
    uint32_t from = (end - b->unit) & ~127u;
    for (uint32_t a = from < b->shared ? b->shared : from; a < end; a += b->unit) {
        uint32_t s = swizzled(&b->map, a);
        if (s > last) last = s;
    }
    return last + b->unit;
}

static int64_t step_of(const Box *b, int d) { return d ? b->map.strides[d] : b->unit; }

/* The buffer that holds all units inside the tensor. */
static int find_side(Warp *w, Box *b, bool writes) {
    uint64_t first = b->first, last = b->first;
    b->buffer = NULL;
    if (b->empty) return NEXT;
    for (int d = 0; d < b->map.rank; d++) {
        first += (uint64_t)(b->low[d] * step_of(b, d));
        last += (uint64_t)((b->high[d] - 1) * step_of(b, d));
    }
    b->buffer = find_buffer(w->run, first, b->unit);
    if (!b->buffer) return out_of_bounds(w, "tensor copy", first, b->unit);
    if (writes && b->buffer->read_only) return fault(w, "tensor store to read-only buffer %s", b->buffer->name);
    if (!find_buffer(w->run, last, b->unit)) return out_of_bounds(w, "tensor copy", last, b->unit);
    if (last < b->buffer->base || last - b->buffer->base > b->buffer->size - b->unit)
        return fault(w, "tensor copy touches global byte 0x%llx, outside 0x%llx..0x%llx", (unsigned long long)last,
                     (unsigned long long)b->buffer->base, (unsigned long long)(b->buffer->base + b->buffer->size));
    return NEXT;
}

/* (CTA, box) of one lane. */
static Cta *plan(Warp *w, const Ins *i, int lane, bool outgoing, bool per_element, Box *b) {
    const Map *m = resolve(w, lane64(w, i->o[0], lane));
    if (!m) return NULL;
    const int32_t *list = w->run->launch->lists + i->list;
    *b = (Box){.map = *m};
    Cta *cta = target_cta(w, lane32(w, i->o[1], lane) + (uint32_t)i->imm[0], &b->shared);
    if (!cta) return NULL;
    for (int d = 0; d < i->length; d++) b->coordinates[d] = (int32_t)lane32(w, list[d], lane);
    if (i->length != i->count) {
        fault(w, "%d coordinates for %s", i->length, opcode_text(w, i));
        return NULL;
    }
    if (check_supported(w, b, i->length, outgoing)) return NULL;
    int64_t inner = m->dims[0], bytes = inner * m->element;
    if (outgoing) inner = (bytes + UNIT - 1) / UNIT * UNIT / m->element;
    b->unit = per_element || inner * m->element % UNIT ? (uint32_t)m->element : UNIT;
    clip(b, inner);
    b->first = m->address + (uint64_t)(b->coordinates[0] * m->element);
    for (int d = 1; d < m->rank; d++) b->first += (uint64_t)(b->coordinates[d] * m->strides[d]);
    uint32_t last = last_shared(b);
    if (b->shared < SHARED_BASE || last > cta->shared_limit) {
        fault(w, "tensor copy touches shared bytes 0x%x..0x%x, outside CTA rank %d's shared memory", b->shared, last,
              cta->rank);
        return NULL;
    }
    return cta;
}

void describe_tensor_op(const Op *op, char *text, size_t room) {
    const Box *b = op->more;
    int64_t box[5];
    for (int d = 0; d < 5; d++) box[d] = b->map.box[d];
    const char *what = op->kind == OP_TENSOR_LOAD ? "tensor load" : b->reduces ? "tensor reduction" : "tensor store";
    snprintf(text, room, "%s of box %s at %s, line %d", what, listed(box, b->map.rank),
             listed(b->coordinates, b->map.rank), op->line);
}

/* ---- walking over a box ------------------------------------------------------------------------------------------ */

/* A row of units along dim 0: where it begins on both sides, and whether the outer indexes are inside. */
typedef struct {
    uint64_t address;
    uint32_t shared;
    bool inside;
} Row;

static int64_t num_rows(const Box *b) { return b->count[1] * b->count[2] * b->count[3] * b->count[4]; }

static Row row_of(const Box *b, int64_t number) {
    Row row = {.address = b->first, .shared = b->shared + (uint32_t)(number * b->count[0] * b->unit), .inside = true};
    for (int d = 1; d < 5; d++) {
        int64_t index = number % b->count[d];
        number /= b->count[d];
        row.address += (uint64_t)(index * b->map.strides[d]);
        row.inside &= index >= b->low[d] && index < b->high[d];
    }
    return row;
}

static void load_row(const Box *b, Row row, uint8_t *shared) {
    /* A number: the row may begin before the buffer. */
    uintptr_t source = b->buffer ? (uintptr_t)b->buffer->data + (uintptr_t)(row.address - b->buffer->base) : 0;
    int64_t low = row.inside && b->buffer ? b->low[0] : b->count[0], high = row.inside && b->buffer ? b->high[0] : 0;
    for (int64_t k = 0; k < b->count[0]; k++) {
        uint8_t *target = shared + swizzled(&b->map, row.shared + (uint32_t)k * b->unit);
        bool inside = k >= low && k < high;
        if (b->unit == UNIT && inside) memcpy(target, (const void *)(source + (uintptr_t)k * UNIT), UNIT);
        else if (inside) memcpy(target, (const void *)(source + (uintptr_t)k * b->unit), b->unit);
        else memset(target, 0, b->unit);
    }
}

int perform_tensor_load(Op *op) {
    Box *b = op->more;
    if (find_side(op->warp, b, false)) return FAULTED;
    for (int64_t r = 0; r < num_rows(b); r++) load_row(b, row_of(b, r), op->cta->shared);
    Arrival who = {.kind = ARRIVED_BYTES, .warp = op->kind, .rank = op->cta->rank, .line = op->line,
                   .bytes = b->map.box_bytes};
    return mbarrier_bytes(op->warp, op->barrier[0], b->map.box_bytes, who);
}

/* Units inside the tensor, row after row, to one piece of memory. */
static void read_box(Op *op, const Box *b) {
    op->staged = malloc(b->map.box_bytes);
    uint8_t *target = op->staged;
    for (int64_t r = 0; r < num_rows(b); r++) {
        Row row = row_of(b, r);
        for (int64_t k = b->low[0]; row.inside && k < b->high[0]; k++, target += b->unit)
            memcpy(target, op->cta->shared + swizzled(&b->map, row.shared + (uint32_t)k * b->unit), b->unit);
    }
}

static void add_floats(uint8_t *target, const uint8_t *source, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        uint32_t old, more;
        memcpy(&old, target + 4 * k, 4), memcpy(&more, source + 4 * k, 4);
        old = units_add_f32(old, more, UNITS_RN, 0);
        memcpy(target + 4 * k, &old, 4);
    }
}

static void write_box(Op *op, const Box *b) {
    const uint8_t *source = op->staged;
    size_t bytes = (size_t)(b->high[0] - b->low[0]) * b->unit;
    for (int64_t r = 0; r < num_rows(b); r++) {
        Row row = row_of(b, r);
        if (!row.inside) continue;
        uint8_t *target = b->buffer->data + (row.address + (uint64_t)b->low[0] * b->unit - b->buffer->base);
        if (b->reduces) add_floats(target, source, (int64_t)bytes / 4);
        else memcpy(target, source, bytes);
        source += bytes;
    }
}

int perform_tensor_out(Op *op) {
    const Box *b = op->more;
    if (!b->buffer) return NEXT;
    if (op->stage == 1) read_box(op, b);
    else write_box(op, b);
    return NEXT;
}

/* ---- what the checks are told ------------------------------------------------------------------------------------ */

/* Granules of shared memory, in order; `inside`: only of units inside the tensor. Frees: the caller, `*memory`. */
static chk_operand shared_side(const Cta *cta, const Box *b, bool inside, uint32_t **memory) {
    chk_operand o = {.kind = CHK_SHARED_SPAN, .cta = (uint32_t)cta->rank, .first = b->shared / 16,
                     .count = b->map.box_bytes / 16};
    *memory = NULL;
    if ((!inside || b->whole) && b->map.box_bytes % 128 == 0) return o;
    GranuleSet set = {{0}};
    for (int64_t r = 0; r < num_rows(b); r++) {
        Row row = row_of(b, r);
        for (int64_t k = 0; k < b->count[0]; k++)
            if (!inside || (row.inside && k >= b->low[0] && k < b->high[0] && !b->empty))
                add_granule(&set, swizzled(&b->map, row.shared + (uint32_t)k * b->unit) / 16);
    }
    *memory = malloc(sizeof **memory * (b->map.box_bytes / 16 + 1));
    o.kind = CHK_SHARED_UNITS, o.granules = *memory, o.count = list_granules(&set, *memory);
    return o;
}

/* Units of global memory inside the tensor, in box order. */
static chk_operand global_side(const Box *b, uint64_t **memory) {
    uint64_t *a = *memory = malloc(sizeof *a * (b->map.box_bytes / b->unit + 1));
    size_t n = 0;
    for (int64_t r = 0; r < num_rows(b); r++) {
        Row row = row_of(b, r);
        for (int64_t k = b->low[0]; row.inside && k < b->high[0]; k++) a[n++] = row.address + (uint64_t)(k * b->unit);
    }
    return (chk_operand){.kind = CHK_GLOBAL_UNITS, .unit_bytes = b->unit, .addresses = a, .count = n};
}

/* The rows of a box inside the tensor, as ranges of global memory. */
static void observe_rows(Warp *w, const Op *op, const Box *b, chk_touch touch) {
    if (!(w->run->launch->checks & CHK_RULES_ORDER) || b->empty || !b->buffer) return;
    uint64_t low = (uint64_t)b->low[0] * b->unit, size = (uint64_t)(b->high[0] - b->low[0]) * b->unit;
    for (int64_t r = 0; r < num_rows(b); r++) {
        Row row = row_of(b, r);
        if (row.inside) CHECK(w, chk_order_copy, op->token, row.address + low, size, touch, op->site);
    }
}

/* ---- instructions ------------------------------------------------------------------------------------------------ */

static void poison_box(const Box *b, uint8_t *shared) {
    for (uint32_t k = 0; k < b->map.box_bytes; k += b->unit)
        memset(shared + swizzled(&b->map, b->shared + k), POISON, b->unit);
}

static int submit_tensor_load(Warp *w, const Ins *i, Cta *cta, Mbarrier *barrier, const Box *plan) {
    Op *op = new_op(w, i, OP_TENSOR_LOAD, 1);
    Box *b = op->more = malloc(sizeof *b);
    *b = *plan;
    op->cta = cta, op->barrier[0] = barrier;
    if (w->run->launch->order.deferred) poison_box(b, cta->shared);
    if (find_side(w, b, false)) {
        drop(op);
        return FAULTED;
    }
    mbarrier_source(barrier, w, i->line);
    touch_both(w, cta, barrier, site_of(w, i));
    if (w->run->checks) {
        uint32_t *granules;
        uint64_t *addresses = NULL;
        bool followed = chk_has_unwritten(w->run->launch->findings) && !b->empty;
        chk_operand to = shared_side(cta, b, false, &granules), from = {0};
        if (followed) from = global_side(b, &addresses);
        observe_issue(w, op, CHK_MBARRIER, barrier, &from, followed, &to, 1);
        observe_rows(w, op, b, CHK_TOUCH_READ);
        free(granules), free(addresses);
    }
    return submit(&cta->cluster->engine, op, 0);
}

static int load_to_all(Warp *w, const Ins *i, int lane, const Box *b, uint32_t barrier) {
    uint32_t members = lane32(w, i->o[3], lane) & 0xFFFF;
    if (members >> num_ctas(w))
        return fault(w, "multicast mask 0x%x names CTAs outside the cluster of %d", members, num_ctas(w));
    for (int k = 0; k < num_ctas(w); k++) {
        if (!(members >> k & 1)) continue;
        Cta *cta = w->cta->cluster->ctas + k;
        /* With cta_group::2 the signal goes to the destination or its peer, as the given barrier's CTA is odd or even. */
        uint32_t target = i->flags & 4 ? ((uint32_t)k & ~1u) | (barrier >> RANK_SHIFT & 1) : (uint32_t)k;
        Mbarrier *m = find_mbarrier(w, target << RANK_SHIFT | (barrier & OFFSET_MASK));
        if (!m || submit_tensor_load(w, i, cta, m, b)) return FAULTED;
    }
    return NEXT;
}

RULE(tensor_load) {
    int lane;
    Box b;
    if (one_thread(w, i, &lane)) return FAULTED;
    Cta *cta = plan(w, i, lane, false, false, &b);
    if (!cta) return FAULTED;
    uint32_t barrier = lane32(w, i->o[2], lane) + (uint32_t)i->imm[1];
    Mbarrier *m = find_mbarrier(w, barrier);
    if (!m) return FAULTED;
    if (i->flags & 2) return load_to_all(w, i, lane, &b, barrier);
    if (cta != w->cta && i->flags & 1)
        return fault(w, "destination of a shared::cta tensor load is in another CTA");
    if (i->flags & 4 ? (m->cta->rank ^ cta->rank) & ~1 : m->cta != cta)
        return fault(w,
                     "tensor load into CTA rank %d signals an mbarrier of CTA rank %d; with .cta_group::%d the barrier "
                     "must be in %s",
                     cta->rank, m->cta->rank, i->flags & 4 ? 2 : 1,
                     i->flags & 4 ? "the destination's CTA or its peer" : "the destination's CTA");
    return submit_tensor_load(w, i, cta, m, &b);
}

static bool same_copy(const Warp *w, const Ins *i) {
    const int32_t *list = w->run->launch->lists + i->list;
    int first = first_lane(w->mask);
    bool same = true;
    EACH_LANE(l, w->mask) {
        same &= lane64(w, i->o[0], (int)l) == lane64(w, i->o[0], first);
        same &= lane32(w, i->o[1], (int)l) == lane32(w, i->o[1], first);
        for (int d = 0; d < i->length; d++) same &= lane32(w, list[d], (int)l) == lane32(w, list[d], first);
    }
    return same;
}

static void observe_out(Warp *w, Op *op, const Box *b) {
    uint32_t *granules;
    uint64_t *addresses = NULL;
    chk_operand sides[2] = {shared_side(w->cta, b, true, &granules)};
    bool followed = chk_has_unwritten(w->run->launch->findings) && b->buffer;
    if (followed) sides[1] = global_side(b, &addresses);
    size_t reads = b->reduces && followed ? 2 : 1;
    observe_issue(w, op, CHK_BULK, NULL, sides, reads, sides + 1, followed && !b->reduces);
    observe_rows(w, op, b, b->reduces ? CHK_TOUCH_SUM : CHK_TOUCH_WRITE);
    free(granules), free(addresses);
}

RULE(tensor_out) {
    bool reduces = i->flags & 1;
    int n = count_lanes(w->mask);
    if (n > 1 && (reduces || !same_copy(w, i)))
        return fault(w, "%s is executed by %d lanes of warp %d (%s); elect one thread", opcode_text(w, i), n, w->index,
                     reduces ? "each lane adds again" : "with different operands");
    Op *op = new_op(w, i, OP_TENSOR_OUT, 2);
    Box *b = op->more = malloc(sizeof *b);
    Cta *cta = plan(w, i, first_lane(w->mask), true, reduces, b);
    int status = cta ? NEXT : FAULTED;
    if (!status && cta != w->cta) status = fault(w, "source of a tensor store is in another CTA");
    if (!status && reduces && b->map.dtype != TYPE_F32)
        status = fault(w, "tensor reduction of %s is not modelled; f32 is", type_name(&b->map));
    if (!status) status = find_side(w, b, true);
    if (status) {
        drop(op);
        return FAULTED;
    }
    b->reduces = reduces;
    if (w->run->checks) observe_out(w, op, b);
    EACH_LANE(l, w->mask) group_add(&w->bulk, op, (int)l);
    w->bulk_known |= w->mask;
    return submit(&w->cta->cluster->engine, op, 0);
}
