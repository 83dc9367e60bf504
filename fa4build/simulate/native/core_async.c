/* Asynchronous operations in queues, cp.async, bulk copies and their groups: engine.py, async_copies.py. */
#include "lanes.h"

#include <stdio.h>
#include <stdlib.h>

#define RULE(name) int op_##name(Warp *w, const Ins *i)
#define POISON 0xC1

/* ---- operations -------------------------------------------------------------------------------------------------- */

Op *new_op(Warp *w, const Ins *i, OpKind kind, int stages) {
    Op *op = calloc(1, sizeof(Op));
    if (!op) abort();
    op->kind = kind, op->stages = stages, op->refs = 1;
    op->line = i->line, op->site = site_of(w, i);
    op->token.component = -1, op->clock = -1;
    op->warp = w, op->cta = w->cta;
    return op;
}

void keep(Op *op) { op->refs++; }

void drop(Op *op) {
    if (--op->refs) return;
    switch (op->kind) {
    case OP_WGMMA: free_wgmma(op); break;
    default: break;
    }
    free(op->staged);
    free(op->more);
    free(op);
}

static Arrival bytes_of(const Op *op, int64_t size) {
    return (Arrival){.kind = ARRIVED_BYTES, .warp = op->kind, .rank = op->cta->rank, .line = op->line, .bytes = size};
}

static int signal_bytes(Op *op, int64_t size) {
    return mbarrier_bytes(op->warp, op->barrier[0], size, bytes_of(op, size));
}

/* cp.async: per lane, `size` bytes of which only some are read and the rest is zero. */
typedef struct {
    uint32_t lanes;
    uint32_t to[LANES], real[LANES];
    uint64_t from[LANES];
} LaneCopies;

static int perform_lane_copies(Op *op) {
    const LaneCopies *c = op->more;
    uint8_t data[LANES][16];
    memset(data, 0, sizeof data);
    EACH_LANE(l, c->lanes) {
        if (!c->real[l]) continue;
        Buffer *b = find_buffer(op->warp->run, c->from[l], c->real[l]);
        if (!b) return out_of_bounds(op->warp, "read", c->from[l], c->real[l]);
        memcpy(data[l], b->data + (c->from[l] - b->base), c->real[l] < 16 ? c->real[l] : 16);
    }
    EACH_LANE(l, c->lanes) memcpy(op->cta->shared + c->to[l], data[l], op->size);
    return NEXT;
}

static int perform_copy_arrive(Op *op) {
    Mbarrier *b = op->barrier[0];
    if (op->warp->run->checks) {
        chk_deferred_arrive(op->cta->cluster->checks, b->handle, b->phase, op->clock);
        chk_clock_release(op->cta->cluster->checks, op->clock);
    }
    Arrival who = {.kind = ARRIVED_CP_ASYNC, .warp = op->warp->index, .rank = op->cta->rank, .line = op->line};
    return mbarrier_arrive(op->warp, b, op->size, who);
}

static int perform_to_shared(Op *op) {
    Buffer *b = find_buffer(op->warp->run, op->address, op->size);
    if (!b) return out_of_bounds(op->warp, "read", op->address, op->size);
    memcpy(op->cta->shared + op->offset, b->data + (op->address - b->base), op->size);
    return signal_bytes(op, op->size);
}

static int perform_push(Op *op) {
    memmove(op->cta->shared + op->offset, op->warp->cta->shared + op->address, op->size);
    return signal_bytes(op, op->size);
}

static int perform_bytes(Op *op) {
    memcpy(op->cta->shared + op->offset, op->staged, op->size);
    return signal_bytes(op, op->size);
}

static int perform_out(Op *op) {
    if (op->stage == 1) {
        op->staged = malloc(op->size);
        memcpy(op->staged, op->cta->shared + op->offset, op->size);
        return NEXT;
    }
    uint8_t *target = op->buffer->data + (op->address - op->buffer->base);
    if (!op->reduces) {
        memcpy(target, op->staged, op->size);
        return NEXT;
    }
    for (uint32_t k = 0; k < op->size; k += 4) {
        uint32_t old, add;
        memcpy(&old, target + k, 4), memcpy(&add, op->staged + k, 4);
        old = units_add_f32(old, add, UNITS_RN, 0);
        memcpy(target + k, &old, 4);
    }
    return NEXT;
}

/* Performs the next stage. */
int step_op(Op *op) {
    op->stage++;
    switch (op->kind) {
    case OP_COPY_ASYNC: return perform_lane_copies(op);
    case OP_COPY_ARRIVE: return perform_copy_arrive(op);
    case OP_TO_SHARED: return perform_to_shared(op);
    case OP_PUSH: return perform_push(op);
    case OP_BYTES: return perform_bytes(op);
    case OP_OUT: return perform_out(op);
    case OP_TENSOR_LOAD: return perform_tensor_load(op);
    case OP_TENSOR_OUT: return perform_tensor_out(op);
    case OP_WGMMA: return perform_wgmma(op);
    case OP_MMA: return perform_mma(op);
    case OP_TENSOR_COPY: return perform_tensor_copy(op);
    case OP_COMMIT: return perform_commit(op);
    }
    return NEXT;
}

void describe_op(const Op *op, char *text, size_t room) {
    const char *what = op->reduces ? "bulk reduction" : "bulk store";
    switch (op->kind) {
    case OP_TENSOR_OUT: describe_tensor_op(op, text, room); break;
    default:
        snprintf(text, room, "%s of %u bytes to %s at line %d", what, op->size, op->buffer ? op->buffer->name : "?",
                 op->line);
    }
}

/* ---- queues ------------------------------------------------------------------------------------------------------ */

uint64_t queue_key(int kind, const Warp *w) {
    return (uint64_t)kind << 32 | (uint64_t)(w->cta->rank + 1) << 8 | (uint64_t)(w->index & 255);
}

static Queue *queue_of(Engine *e, uint64_t key) {
    if (key)
        for (Queue *q = e->newest; q; q = q->before)
            if (q->key == key) return q;
    return NULL;
}

static Queue *add_queue(Engine *e, uint64_t key) {
    Queue *q = calloc(1, sizeof *q);
    q->key = key, q->before = e->newest;
    if (e->newest) e->newest->after = q;
    else e->oldest = q;
    e->newest = q;
    e->num_queues++;
    return q;
}

static void remove_queue(Engine *e, Queue *q) {
    if (q->before) q->before->after = q->after;
    else e->oldest = q->after;
    if (q->after) q->after->before = q->before;
    else e->newest = q->before;
    e->num_queues--;
    free(q);
}

/* Accepts an operation and the caller's reference to it; eager, it is performed at once. */
int submit(Engine *e, Op *op, uint64_t key) {
    Queue *q = queue_of(e, key);
    if (!e->order->deferred && !q) {
        int status = NEXT;
        while (!is_done(op) && !status) status = step_op(op);
        drop(op);
        return status;
    }
    if (!q) q = add_queue(e, key);
    if (q->last) q->last->next = op;
    else q->first = op;
    q->last = op;
    return NEXT;
}

static Queue *chosen_queue(Engine *e) {
    if (e->order->pick != PICK_ANY) return e->order->pick == PICK_NEWEST ? e->newest : e->oldest;
    Queue *q = e->oldest;
    for (uint64_t k = next_random(&e->random) % (uint64_t)e->num_queues; k; k--) q = q->after;
    return q;
}

/* Performs one stage of one pending operation. */
int advance(Engine *e, bool *did) {
    *did = e->num_queues > 0;
    if (!*did) return NEXT;
    Queue *q = chosen_queue(e);
    Op *op = q->first;
    int status = step_op(op);
    if (is_done(op)) {
        q->first = op->next;
        op->next = NULL;
        if (!q->first) remove_queue(e, q);
        drop(op);
    }
    return status;
}

/* Performs something while warps are running: so much behind each run, and now and then more. */
int drift(Engine *e) {
    bool did;
    for (int k = 0; k < e->order->behind_run && e->num_queues; k++)
        if (advance(e, &did)) return FAULTED;
    while (e->num_queues && e->order->drift_percent && chance(&e->random, (uint32_t)e->order->drift_percent))
        if (advance(e, &did)) return FAULTED;
    return NEXT;
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

void group_add(GroupList *list, Op *op, int lane) {
    if (list->n == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 16;
        list->e = realloc(list->e, sizeof *list->e * (size_t)list->capacity);
    }
    list->e[list->n++] = (Grouped){op, -1, lane};
    keep(op);
}

/* `only_read`: sources were read, but what was written need not be there yet. */
static void wait_over(Warp *w, Op **ops, uint32_t *lanes, int n, bool only_read) {
    if (w->run->checks && n) {
        chk_token *tokens = malloc(sizeof *tokens * (size_t)n);
        size_t told = 0;
        for (int k = 0; k < n; k++) {
            if (ops[k]->token.component < 0) continue;
            tokens[told] = ops[k]->token;
            tokens[told++].lanes = lanes ? lanes[k] : 0;
        }
        CHECK(w, chk_ops_waited, tokens, told);
        if (!only_read) CHECK(w, chk_order_performed, tokens, told);
        free(tokens);
    }
    for (int k = 0; k < n; k++) drop(ops[k]);
    free(ops);
    free(lanes);
}

bool ops_over(const Wait *wait) {
    for (int k = 0; k < wait->num_ops; k++)
        if (!(wait->parity ? has_read(wait->ops[k]) : is_done(wait->ops[k]))) return false;
    return true;
}

int finish_ops(Warp *w, const Wait *wait) {
    if (wait->named == 3 && w->run->launch->order.deferred &&
        deliver_wgmma(w, wait->ops, wait->num_ops))
        return FAULTED;
    wait_over(w, wait->ops, wait->op_lanes, wait->num_ops, wait->parity);
    return NEXT;
}

/* Waits for operations, of which it takes the references and the lists; `what`: number of the words for a report. */
int wait_for_ops(Warp *w, const Ins *i, Op **ops, uint32_t *lanes, int n, bool reads, int what) {
    Wait wait = {.kind = WAIT_OPS, .mask = w->mask, .ins = i, .ops = ops, .op_lanes = lanes, .num_ops = n,
                 .parity = reads, .named = what};
    if (ops_over(&wait)) return finish_ops(w, &wait);
    w->wait = wait;
    return BLOCKED;
}

/* ---- cp.async ---------------------------------------------------------------------------------------------------- */

static int check_lane_copies(Warp *w, const LaneCopies *c, uint32_t size) {
    uint32_t odd = 0, largest = 0;
    EACH_LANE(l, c->lanes) {
        odd |= (c->to[l] | (uint32_t)c->from[l]) % size;
        if (c->to[l] > largest) largest = c->to[l];
    }
    if (odd) return fault(w, "cp.async of %u bytes: addresses must be multiples of %u", size, size);
    if ((uint64_t)largest + size > w->cta->shared_limit)
        return fault(w, "cp.async writes shared offset 0x%x, outside the CTA's shared memory", largest);
    return NEXT;
}

static int compare_units(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static size_t distinct_units(uint32_t *unit, size_t n) {
    qsort(unit, n, sizeof *unit, compare_units);
    size_t kept = 0;
    for (size_t k = 0; k < n; k++)
        if (!kept || unit[kept - 1] != unit[k]) unit[kept++] = unit[k];
    return kept;
}

/* Which lane writes which byte of each granule; `unit`: the granules in order. */
static void list_owners(const LaneCopies *c, const uint32_t *unit, size_t units, uint32_t size, chk_lane_map *owners) {
    memset(owners, 0xFF, units * sizeof *owners);
    EACH_LANE(l, c->lanes) {
        size_t low = 0, high = units;
        while (high - low > 1) {
            size_t middle = (low + high) / 2;
            if (unit[middle] <= c->to[l] / 16) low = middle;
            else high = middle;
        }
        memset((uint8_t *)&owners[low] + c->to[l] % 16, (int)l, size);
    }
}

RULE(cp_async) {
    LaneCopies *c = calloc(1, sizeof *c);
    c->lanes = w->mask;
    uint32_t unit[LANES];
    size_t n = 0;
    EACH_LANE(l, w->mask) {
        c->to[l] = lane32(w, i->o[0], (int)l) + (uint32_t)i->imm[0] - w->cta->rank_bits;
        c->from[l] = lane64(w, i->o[1], (int)l) + (uint64_t)i->imm[1];
        c->real[l] = lane32(w, i->o[2], (int)l);
        unit[n++] = c->to[l] / 16;
    }
    if (check_lane_copies(w, c, i->size)) {
        free(c);
        return FAULTED;
    }
    Op *op = new_op(w, i, OP_COPY_ASYNC, 1);
    op->more = c, op->size = i->size;
    group_add(&w->copies, op, 0);
    if (w->run->checks) {
        size_t units = distinct_units(unit, n);
        chk_lane_map owners[LANES];
        list_owners(c, unit, units, i->size, owners);
        chk_operand to = {.kind = CHK_SHARED_UNITS, .cta = (uint32_t)w->cta->rank, .granules = unit, .count = units,
                          .owners = owners};
        observe_issue(w, op, CHK_CP_ASYNC, NULL, NULL, 0, &to, 1);
        EACH_LANE(l, w->mask) {
            if (c->real[l]) CHECK(w, chk_order_copy, op->token, c->from[l], c->real[l], CHK_TOUCH_READ, op->site);
        }
    }
    return submit(&w->cta->cluster->engine, op, queue_key(QUEUE_COPIES, w));
}

static void close_group(GroupList *list, int32_t *groups) {
    for (int k = 0; k < list->n; k++)
        if (list->e[k].group < 0) list->e[k].group = *groups;
    ++*groups;
}

RULE(cp_commit) {
    (void)i;
    close_group(&w->copies, &w->copy_groups);
    return NEXT;
}

/* Takes the operations of all but the newest groups out of a list; the references go along. */
Op **take_groups(GroupList *list, int32_t groups, int64_t newest, int *n) {
    Op **ops = malloc(sizeof *ops * (size_t)(list->n + 1));
    int kept = 0;
    *n = 0;
    for (int k = 0; k < list->n; k++) {
        Grouped g = list->e[k];
        if (g.group >= 0 && g.group < groups - newest) ops[(*n)++] = g.op;
        else list->e[kept++] = g;
    }
    list->n = kept;
    return ops;
}

RULE(cp_wait) {
    if (i->flags) close_group(&w->copies, &w->copy_groups);
    int n;
    Op **ops = take_groups(&w->copies, w->copy_groups, i->imm[0], &n);
    return wait_for_ops(w, i, ops, NULL, n, false, 0);
}

static int submit_arrival(Warp *w, const Ins *i, uint32_t address, int count) {
    Mbarrier *b = find_mbarrier(w, address);
    if (!b) return FAULTED;
    if (i->flags) b->pending += count;
    Op *op = new_op(w, i, OP_COPY_ARRIVE, 1);
    op->barrier[0] = b, op->size = (uint32_t)count;
    if (w->run->checks)
        chk_clock_take(w->cta->cluster->checks, (uint32_t)w->cta->rank, (uint32_t)w->index, w->mask, CHK_CP_ASYNC,
                       &op->clock);
    return submit(&w->cta->cluster->engine, op, queue_key(QUEUE_COPIES, w));
}

/* When all earlier cp.async of the thread are done: one arrival a lane. */
RULE(cp_arrive) {
    const uint32_t *a = at(w, i->o[0]);
    for (uint32_t rest = w->mask; rest;) {
        uint32_t first = a[first_lane(rest)], lanes = 0;
        EACH_LANE(l, rest) lanes |= (uint32_t)(a[l] == first) << l;
        if (submit_arrival(w, i, first + (uint32_t)i->imm[0], count_lanes(lanes))) return FAULTED;
        rest &= ~lanes;
    }
    return NEXT;
}

/* ---- places of bulk copies --------------------------------------------------------------------------------------- */

Cta *target_cta(Warp *w, uint32_t address, uint32_t *offset) {
    uint32_t rank = address >> RANK_SHIFT;
    *offset = address & OFFSET_MASK;
    if (rank >= (uint32_t)num_ctas(w)) {
        fault(w, "shared address 0x%x names CTA rank %u; the cluster has %d", address, rank, num_ctas(w));
        return NULL;
    }
    Cta *cta = w->cta->cluster->ctas + rank;
    if (cta != w->cta && threads_alive(cta) == 0) {
        fault(w, "shared address 0x%x is in CTA rank %u, which has exited", address, rank);
        return NULL;
    }
    return cta;
}

uint8_t *shared_span(Warp *w, Cta *cta, uint32_t offset, uint32_t size, const char *what) {
    if (offset >= SHARED_BASE && (int64_t)offset <= (int64_t)cta->shared_limit - size) return cta->shared + offset;
    fault(w, "%s: shared bytes 0x%x..0x%x are outside CTA rank %d's %u", what, offset, offset + size, cta->rank,
          cta->shared_limit - SHARED_BASE);
    return NULL;
}

static int require_alignment(Warp *w, uint64_t a, uint64_t b, uint64_t c) {
    uint64_t values[3] = {a, b, c};
    for (int k = 0; k < 3; k++)
        if (values[k] % 16)
            return fault(w, "bulk copy: 0x%llx is not a multiple of 16 (addresses and size must be)",
                         (unsigned long long)values[k]);
    return NEXT;
}

int one_thread(Warp *w, const Ins *i, int *lane) {
    int n = count_lanes(w->mask);
    if (n != 1)
        return fault(w,
                     "%s is executed by %d threads; each repeats the copy and its bytes. "
                     "Elect one thread (elect_one, or a single-lane branch)",
                     opcode_text(w, i), n);
    *lane = first_lane(w->mask);
    return NEXT;
}

void observe_issue(Warp *w, Op *op, chk_component_kind channel, Mbarrier *barrier, const chk_operand *reads,
                   size_t num_reads, const chk_operand *writes, size_t num_writes) {
    if (!w->run->checks) return;
    chk_operation told = {.warp = (uint32_t)w->index, .channel = channel, .barrier = barrier ? barrier->handle : -1,
                          .phase = barrier ? barrier->phase : 0, .site = op->site, .reads = reads, .writes = writes,
                          .num_reads = num_reads, .num_writes = num_writes};
    CHECK(w, chk_issue, &told, &op->token);
}

void observe_product(Warp *w, Op *op, uint32_t tag, const chk_operand *reads, size_t num_reads,
                     const chk_operand *writes, size_t num_writes) {
    if (!w->run->checks) return;
    chk_operation told = {.warp = (uint32_t)w->index, .channel = CHK_MMA, .barrier = -1, .site = op->site, .tag = tag,
                          .reads = reads, .writes = writes, .num_reads = num_reads, .num_writes = num_writes};
    CHECK(w, chk_issue, &told, &op->token);
}

static chk_operand span(const Cta *cta, uint32_t offset, uint32_t size) {
    return (chk_operand){.kind = CHK_SHARED_SPAN, .cta = (uint32_t)cta->rank, .first = offset / 16,
                         .count = (offset + size + 15) / 16 - offset / 16};
}
static chk_operand range(uint64_t address, uint32_t size) {
    return (chk_operand){.kind = CHK_GLOBAL_RANGE, .address = address, .count = size};
}

/* An operation writes to one CTA and signals a barrier, of another one perhaps. */
void touch_both(Warp *w, const Cta *cta, const Mbarrier *b, int32_t site) {
    CHECK(w, chk_touches, (uint32_t)cta->rank, site);
    if (b->cta != cta) CHECK(w, chk_touches, (uint32_t)b->cta->rank, site);
}

/* Hands an operation over that fills bytes of shared memory and signals a barrier. */
static int submit_load(Warp *w, Op *op, Cta *cta, Mbarrier *b, uint32_t offset, uint32_t size,
                       const chk_operand *reads, size_t num_reads) {
    op->cta = cta, op->offset = offset, op->size = size, op->barrier[0] = b;
    Engine *engine = &cta->cluster->engine;
    if (engine->order->deferred && op->kind != OP_BYTES) memset(cta->shared + offset, POISON, size);
    chk_operand to = span(cta, offset, size);
    mbarrier_source(b, w, op->line);
    touch_both(w, cta, b, op->site);
    observe_issue(w, op, CHK_MBARRIER, b, reads, num_reads, &to, 1);
    if (op->kind == OP_TO_SHARED) CHECK(w, chk_order_copy, op->token, op->address, size, CHK_TOUCH_READ, op->site);
    return submit(engine, op, 0);
}

static int load_lane(Warp *w, const Ins *i, int lane) {
    const int32_t *plus = w->run->launch->lists + i->list;
    uint32_t address = lane32(w, i->o[0], lane) + (uint32_t)plus[0], size = lane32(w, i->o[2], lane), offset;
    uint64_t origin = lane64(w, i->o[1], lane) + (uint64_t)(int64_t)plus[1];
    if (require_alignment(w, address, origin, size)) return FAULTED;
    Cta *cta = target_cta(w, address, &offset);
    if (!cta) return FAULTED;
    Mbarrier *b = find_mbarrier(w, lane32(w, i->o[3], lane) + (uint32_t)plus[2]);
    if (!b || !shared_span(w, cta, offset, size, "bulk copy")) return FAULTED;
    if (!find_buffer(w->run, origin, size)) return out_of_bounds(w, "bulk copy", origin, size);
    Op *op = new_op(w, i, OP_TO_SHARED, 1);
    op->address = origin;
    chk_operand from = range(origin, size);
    return submit_load(w, op, cta, b, offset, size, &from, 1);
}

RULE(bulk_load) {
    EACH_LANE(l, w->mask) {
        if (load_lane(w, i, (int)l)) return FAULTED;
    }
    return NEXT;
}

/* Own shared memory to another CTA's; the mbarrier must be the destination's. */
RULE(bulk_push) {
    int lane;
    if (one_thread(w, i, &lane)) return FAULTED;
    const int32_t *plus = w->run->launch->lists + i->list;
    uint32_t address = lane32(w, i->o[0], lane) + (uint32_t)plus[0], origin = lane32(w, i->o[1], lane) + (uint32_t)plus[1];
    uint32_t size = lane32(w, i->o[2], lane), offset, start = origin & OFFSET_MASK;
    if (require_alignment(w, address, origin, size)) return FAULTED;
    Cta *cta = target_cta(w, address, &offset);
    if (!cta) return FAULTED;
    Mbarrier *b = find_mbarrier(w, lane32(w, i->o[3], lane) + (uint32_t)plus[2]);
    if (!b) return FAULTED;
    if (b->cta != cta)
        return fault(w, "bulk push to CTA rank %d signals an mbarrier of CTA rank %d; both must be the same CTA",
                     cta->rank, b->cta->rank);
    if (!shared_span(w, w->cta, start, size, "bulk push source") || !shared_span(w, cta, offset, size, "bulk push"))
        return FAULTED;
    Op *op = new_op(w, i, OP_PUSH, 1);
    op->address = start;
    chk_operand from = span(w->cta, start, size);
    return submit_load(w, op, cta, b, offset, size, &from, 1);
}

static int out_lane(Warp *w, const Ins *i, int lane) {
    uint64_t address = lane64(w, i->o[0], lane) + (uint64_t)i->imm[0];
    uint32_t origin = (lane32(w, i->o[1], lane) + (uint32_t)i->imm[1]) & OFFSET_MASK, size = lane32(w, i->o[2], lane);
    if (require_alignment(w, address, origin, size)) return FAULTED;
    if (!shared_span(w, w->cta, origin, size, "bulk store source")) return FAULTED;
    Buffer *b = find_buffer(w->run, address, size);
    if (!b) return out_of_bounds(w, "bulk store", address, size);
    if (b->read_only) return fault(w, "bulk store to read-only buffer %s", b->name);
    Op *op = new_op(w, i, OP_OUT, 2);
    op->address = address, op->offset = origin, op->size = size, op->buffer = b;
    op->reduces = i->flags;
    chk_operand here[2] = {span(w->cta, origin, size), range(address, size)};
    observe_issue(w, op, CHK_BULK, NULL, here, i->flags ? 2 : 1, here + 1, i->flags ? 0 : 1);
    CHECK(w, chk_order_copy, op->token, address, size, op->reduces ? CHK_TOUCH_SUM : CHK_TOUCH_WRITE, op->site);
    group_add(&w->bulk, op, lane);
    w->bulk_known |= 1u << lane;
    return submit(&w->cta->cluster->engine, op, 0);
}

/* A reduction reads what it adds to; it may meet reductions of other CTAs. */
RULE(bulk_out) {
    EACH_LANE(l, w->mask) {
        if (out_lane(w, i, (int)l)) return FAULTED;
    }
    return NEXT;
}

/* ---- bulk groups: of each thread --------------------------------------------------------------------------------- */

RULE(bulk_commit) {
    (void)i;
    uint32_t lanes = w->mask & w->bulk_known;
    for (int k = 0; k < w->bulk.n; k++) {
        Grouped *g = w->bulk.e + k;
        if (g->group >= 0 || !(lanes >> g->lane & 1)) continue;
        g->group = w->bulk_groups[g->lane];
        g->op->committed = true;
    }
    EACH_LANE(l, lanes) w->bulk_groups[l]++;
    return NEXT;
}

/* Whether all operations of a lane's group are done. */
static bool group_is_done(const GroupList *list, int lane, int group) {
    for (int k = 0; k < list->n; k++)
        if (list->e[k].lane == lane && list->e[k].group == group && !is_done(list->e[k].op)) return false;
    return true;
}

RULE(bulk_wait) {
    GroupList *list = &w->bulk;
    Op **ops = malloc(sizeof *ops * (size_t)(list->n + 1));
    uint32_t *lanes = calloc((size_t)list->n + 1, sizeof *lanes);
    int n = 0, kept = 0;
    for (int k = 0; k < list->n; k++) {
        Grouped g = list->e[k];
        if (!(w->mask >> g.lane & 1) || g.group < 0 || g.group >= w->bulk_groups[g.lane] - i->imm[0]) continue;
        if (!n || ops[n - 1] != g.op) {
            keep(g.op);
            ops[n++] = g.op;
        }
        lanes[n - 1] |= 1u << g.lane;
    }
    uint8_t *done = malloc((size_t)list->n + 1);
    for (int k = 0; k < list->n; k++) {
        Grouped g = list->e[k];
        bool old = (w->mask >> g.lane & 1) && g.group >= 0 && g.group < w->bulk_groups[g.lane] - i->imm[0];
        done[k] = old && group_is_done(list, g.lane, g.group);
    }
    for (int k = 0; k < list->n; k++) {
        if (done[k]) drop(list->e[k].op);
        else list->e[kept++] = list->e[k];
    }
    list->n = kept;
    free(done);
    return wait_for_ops(w, i, ops, lanes, n, i->flags, i->flags ? 2 : 1);
}

/* ---- operations that carry their bytes --------------------------------------------------------------------------- */

RULE(st_async) {
    const int32_t *list = w->run->launch->lists + i->list;
    uint32_t size = i->size * i->count;
    EACH_LANE(l, w->mask) {
        uint32_t offset;
        Cta *cta = target_cta(w, lane32(w, i->o[0], (int)l) + (uint32_t)i->imm[0], &offset);
        if (!cta || !shared_span(w, cta, offset, size, "st.async")) return FAULTED;
        Mbarrier *b = find_mbarrier(w, lane32(w, i->o[1], (int)l) + (uint32_t)i->imm[1]);
        if (!b) return FAULTED;
        Op *op = new_op(w, i, OP_BYTES, 1);
        op->staged = malloc(size);
        for (int k = 0; k < i->count; k++) {
            uint64_t value = lane_any(w, list[k], (int)l);
            memcpy(op->staged + k * i->size, &value, i->size);
        }
        if (w->run->launch->order.deferred) memset(cta->shared + offset, POISON, size);
        if (submit_load(w, op, cta, b, offset, size, NULL, 0)) return FAULTED;
    }
    return NEXT;
}

static int respond(Warp *w, const Ins *i, Cta *cta, uint32_t offset, uint32_t barrier, const uint32_t *answer) {
    if (!shared_span(w, cta, offset, 16, "clusterlaunchcontrol response")) return FAULTED;
    Mbarrier *b = find_mbarrier(w, (uint32_t)cta->rank << RANK_SHIFT | barrier);
    if (!b) return FAULTED;
    Op *op = new_op(w, i, OP_BYTES, 1);
    op->staged = malloc(16);
    memcpy(op->staged, answer, 16);
    return submit_load(w, op, cta, b, offset, 16, NULL, 0);
}

/* Writes the response to every CTA of the cluster and completes 16 bytes on each one's mbarrier. */
RULE(try_cancel) {
    int lane;
    if (one_thread(w, i, &lane)) return FAULTED;
    uint32_t offset = (lane32(w, i->o[0], lane) + (uint32_t)i->imm[0]) & OFFSET_MASK;
    uint32_t barrier = (lane32(w, i->o[1], lane) + (uint32_t)i->imm[1]) & OFFSET_MASK;
    Cluster *cluster = w->cta->cluster;
    if (cluster->claim_failed)
        return fault(w, "clusterlaunchcontrol.try_cancel after a response that said there is no more work: undefined");
    int32_t origin[3] = {0, 0, 0};
    bool claimed = take_origin(w->run, origin);
    cluster->claim_failed = !claimed;
    uint32_t answer[4] = {claimed, (uint32_t)origin[0], (uint32_t)origin[1], (uint32_t)origin[2]};
    for (int k = 0; k < cluster->num_ctas; k++)
        if ((i->flags || cluster->ctas + k == w->cta) &&
            respond(w, i, cluster->ctas + k, offset, barrier, answer))
            return FAULTED;
    return NEXT;
}
