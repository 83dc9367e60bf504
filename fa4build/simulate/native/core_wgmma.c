/* wgmma: fragments, descriptors, groups: wgmma.py.
 *
 * Eager, an instruction computes at issue. In the other schedules it computes when it is waited for, from shared memory
 * as it is then, and its accumulators hold poison in between. */
#include "lanes.h"
#include "operands.h"

#include <stdlib.h>

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define ROWS 64
#define MAX_N 256
#define NAN_BITS 0x7FC00000u
enum { A_REGISTERS = 1, A_MN = 2, B_MN = 4 };

/* One product; `more` of an operation. */
typedef struct {
    Warp *group; /* first of the four */
    const int32_t *places;
    int32_t n, k, size, a_type, b_type;
    bool from_registers, keeps;
    Operand a, b;
    uint8_t a_bits[ROWS * 32];
    Op *source;      /* an earlier pending product on the same registers */
    uint32_t *start; /* else the accumulators as they were */
    uint32_t *result;
} Product;

void free_wgmma(Op *op) {
    Product *p = op->more;
    if (!p) return;
    if (p->source) drop(p->source);
    free(p->start), free(p->result);
}

/* ---- fragments: register 4i+2h+c of lane (w, r, q) is row 16w+8h+r, column 8i+2q+c ------------------------------- */

static void read_fragment(const Product *p, uint32_t *matrix) {
    for (int wi = 0; wi < 4; wi++)
        for (int j = 0; j < p->n / 2; j++) {
            const uint32_t *from = at(p->group + wi, p->places[j]);
            uint32_t *row = matrix + (16 * wi + 8 * (j / 2 % 2)) * p->n + 8 * (j / 4) + j % 2;
            for (int lane = 0; lane < LANES; lane++) row[lane / 4 * p->n + 2 * (lane % 4)] = from[lane];
        }
}

static void write_fragment(const Product *p, const uint32_t *matrix, uint32_t warps) {
    for (int wi = 0; wi < 4; wi++)
        for (int j = 0; warps >> wi & 1 && j < p->n / 2; j++) {
            if (p->places[j] < 0) continue;
            uint32_t *target = to(p->group + wi, p->places[j]);
            const uint32_t *row = matrix + (16 * wi + 8 * (j / 2 % 2)) * p->n + 8 * (j / 4) + j % 2;
            for (int lane = 0; lane < LANES; lane++) target[lane] = row[lane / 4 * p->n + 2 * (lane % 4)];
        }
}

/* Four registers of four warps: 32 bytes of each of 64 rows. */
static void read_a(const Product *p, const int32_t *registers, uint8_t *bits) {
    for (int wi = 0; wi < 4; wi++)
        for (int j = 0; j < 4; j++) {
            const uint32_t *from = at(p->group + wi, registers[j]);
            for (int lane = 0; lane < LANES; lane++)
                memcpy(bits + (16 * wi + 8 * (j % 2) + lane / 4) * 32 + 16 * (j / 2) + 4 * (lane % 4), from + lane, 4);
        }
}

/* ---- computing --------------------------------------------------------------------------------------------------- */

/* The matrix is the accumulator and becomes the result. */
static int compute(Warp *w, const Product *p, bool keeps, uint32_t *matrix) {
    static uint8_t a_bits[ROWS * 32], b_bits[MAX_N * 32];
    const uint8_t *a = p->a_bits;
    if (!p->from_registers) {
        if (load_operand(w, &p->a, w->cta, a_bits)) return FAULTED;
        a = a_bits;
    }
    if (load_operand(w, &p->b, w->cta, b_bits)) return FAULTED;
    units_mma(ROWS, p->n, p->k, (units_type)p->a_type, a, (units_type)p->b_type, b_bits, matrix, p->n, keeps, NULL);
    return NEXT;
}

int perform_wgmma(Op *op) {
    Product *p = op->more;
    const Product *before = p->source ? p->source->more : NULL;
    const uint32_t *c = !p->keeps ? NULL : before ? before->result : p->start;
    size_t size = sizeof *p->result * (size_t)(ROWS * p->n);
    p->result = malloc(size);
    if (c) memcpy(p->result, c, size);
    return compute(op->warp, p, c != NULL, p->result);
}

/* Writes results of late products; a later pending one on the same registers leaves poison. */
int deliver_wgmma(Warp *w, Op **ops, int n) {
    for (int k = 0; k < n; k++) {
        const Product *p = ops[k]->more;
        write_fragment(p, p->result, 1u << (w->index & 3));
    }
    return NEXT;
}

/* ---- instructions ------------------------------------------------------------------------------------------------ */

static int uniform_in_group(Warp *w, Warp *g, int32_t o, const char *what, uint64_t *value) {
    *value = lane64(g, o, 0);
    for (int wi = 0; wi < 4; wi++)
        for (int l = 0; l < LANES; l++)
            if (lane64(g + wi, o, l) != *value)
                return fault(w, "%s must be the same in all lanes; it takes more than one value", what);
    return NEXT;
}

static int read_operands(Warp *w, const Ins *i, Product *p) {
    uint64_t word;
    if (uniform_in_group(w, p->group, i->o[1], "B descriptor", &word)) return FAULTED;
    p->b = (Operand){.rows = p->n, .k = p->k, .size = p->size, .mn = i->flags & B_MN};
    if (decode_wgmma(w, word, &p->b.d)) return FAULTED;
    if (p->from_registers) {
        read_a(p, w->run->launch->lists + i->list2, p->a_bits);
    } else {
        if (uniform_in_group(w, p->group, i->o[0], "A descriptor", &word)) return FAULTED;
        p->a = (Operand){.rows = ROWS, .k = p->k, .size = p->size, .mn = i->flags & A_MN};
        if (decode_wgmma(w, word, &p->a.d)) return FAULTED;
    }
    uint32_t first = predicate(p->group, i->o[2]) & 1 ? FULL : 0;
    for (int wi = 0; wi < 4; wi++)
        if (predicate(p->group + wi, i->o[2]) != first)
            return fault(w, "scale-d must be the same in all lanes; it takes 2 values");
    p->keeps = first != 0;
    return NEXT;
}

static void observe(Warp *w, Op *op, const Product *p) {
    if (!w->run->checks) return;
    static uint32_t a_granules[MAX_OPERAND_UNITS], b_granules[MAX_OPERAND_UNITS];
    chk_operand reads[2] = {operand_granules(&p->b, w->cta, b_granules)};
    if (!p->from_registers) reads[1] = operand_granules(&p->a, w->cta, a_granules);
    observe_issue(p->group, op, CHK_WGMMA, NULL, reads, p->from_registers ? 1 : 2, NULL, 0);
}

/* The accumulator input: the newest pending product on the same registers, or the registers themselves. */
static void find_source(Product *p, const Op *self) {
    const GroupList *list = &p->group->products;
    for (int k = list->n - 1; k >= 0; k--) {
        Op *other = list->e[k].op;
        if (other != self && ((Product *)other->more)->places == p->places) {
            p->source = other;
            keep(other);
            return;
        }
    }
    if (!p->keeps) return;
    p->start = malloc(sizeof *p->start * (size_t)(ROWS * p->n));
    read_fragment(p, p->start);
}

static void write_poison(const Product *p) {
    for (int wi = 0; wi < 4; wi++)
        for (int j = 0; j < p->n / 2; j++) {
            if (p->places[j] < 0) continue;
            uint32_t *target = to(p->group + wi, p->places[j]);
            for (int lane = 0; lane < LANES; lane++) target[lane] = NAN_BITS;
        }
}

static int start_late(Warp *w, Op *op, Product *p) {
    find_source(p, op);
    for (int wi = 0; wi < 4; wi++) group_add(&p->group[wi].products, op, 0);
    int status = submit(&w->cta->cluster->engine, op, queue_key(QUEUE_WGMMA, p->group));
    write_poison(p);
    return status;
}

static int compute_now(Warp *w, Op *op, Product *p) {
    static uint32_t matrix[ROWS * MAX_N];
    if (p->keeps) read_fragment(p, matrix);
    op->stage = 1;
    int status = compute(w, p, p->keeps, matrix);
    if (!status) write_fragment(p, matrix, 15);
    for (int wi = 0; wi < 4; wi++) group_add(&p->group[wi].products, op, 0);
    drop(op);
    return status;
}

static int multiply(Warp *w, const Ins *i) {
    Op *op = new_op(w, i, OP_WGMMA, 1);
    Product *p = op->more = calloc(1, sizeof *p);
    p->group = w->cta->warps + (w->index & ~3);
    op->warp = p->group;
    p->places = w->run->launch->lists + i->list;
    p->n = (int32_t)i->imm[0], p->k = i->count, p->size = i->size;
    p->a_type = i->flags >> 4 & 15, p->b_type = i->flags >> 8 & 15;
    p->from_registers = i->flags & A_REGISTERS;
    if (read_operands(w, i, p)) {
        drop(op);
        return FAULTED;
    }
    observe(w, op, p);
    return w->run->launch->order.deferred ? start_late(w, op, p) : compute_now(w, op, p);
}

/* ---- R8: a fence comes first, and no register of the product is written behind it -------------------------------- */

Handler handler_of(int op);

/* Runs an instruction that writes registers of wgmma or reads accumulators, and notes that it did. */
int run_tracked(Warp *w, const Ins *i) {
    const Launch *l = w->run->launch;
    int site = site_of(w, i), status = handler_of(i->op)(w, i);
    w->now++;
    for (int k = l->track_start[site]; k < l->track_start[site + 1]; k++) w->stamps[l->track[k]] = w->now;
    return status;
}

/* Registers of a product that were written since the last fence, or, `of` num_registers, accumulators that were read. */
static void report_used(Warp *w, const Ins *i, chk_finding *f, int64_t of) {
    const Launch *l = w->run->launch;
    int site = site_of(w, i), n = 0;
    for (int k = l->product_start[site]; k < l->product_start[site + 1]; k++) {
        if (w->stamps[of + l->product[k]] <= w->fence) continue;
        if (!n) f->size = k - l->product_start[site] < i->length;
        if (n < 4) f->extra[n] = l->product[k];
        n++;
    }
    f->kind = CHK_WGMMA_WRITTEN, f->lane = of > 0;
    if (n) chk_report(l->findings, f);
}

static void check_fence(Warp *w, const Ins *i) {
    if (!w->run->checks) return;
    chk_finding f = {.kind = CHK_WGMMA_NO_FENCE, .site = site_of(w, i), .other = -1, .cluster = w->cta->cluster->index,
                     .cta = w->cta->rank, .first_warp = w->index, .last_warp = w->index, .num_warps = 1,
                     .agent_kind = -1, .extra = {-1, -1, -1, -1}};
    if (!w->fenced) chk_report(w->run->launch->findings, &f);
    for (int reads = 0; w->fenced && reads < 2; reads++) report_used(w, i, &f, reads * w->run->launch->num_registers);
}

/* ---- the instructions -------------------------------------------------------------------------------------------- */

RULE(wgmma) {
    if (require_converged(w, opcode_text(w, i))) return FAULTED;
    Warp *g = w->cta->warps + (w->index & ~3);
    int here = 1;
    for (int wi = 0; wi < 4; wi++) {
        if ((w->index & ~3) + wi >= w->cta->num_warps) break;
        const Warp *o = g + wi;
        here += o != w && !o->dead && o->blocked && o->wait.kind == WAIT_WARPGROUP && o->wait.ins == i && !o->wait.phase;
    }
    if (here < 4) {
        w->wait = (Wait){.kind = WAIT_WARPGROUP, .mask = w->mask, .ins = i};
        return BLOCKED;
    }
    for (int wi = 0; wi < 4; wi++) {
        check_fence(g + wi, i);
        if (g + wi != w) g[wi].wait.phase = 1;
    }
    return multiply(w, i);
}

RULE(wgmma_fence) {
    if (require_converged(w, opcode_text(w, i))) return FAULTED;
    w->fenced = true, w->fence = w->now;
    return NEXT;
}

RULE(wgmma_commit) {
    if (require_converged(w, opcode_text(w, i))) return FAULTED;
    for (int k = 0; k < w->products.n; k++)
        if (w->products.e[k].group < 0) w->products.e[k].group = w->product_groups;
    w->product_groups++;
    return NEXT;
}

RULE(wgmma_wait) {
    if (require_converged(w, opcode_text(w, i))) return FAULTED;
    int n;
    Op **ops = take_groups(&w->products, w->product_groups, i->imm[0], &n);
    return wait_for_ops(w, i, ops, NULL, n, false, 3);
}
