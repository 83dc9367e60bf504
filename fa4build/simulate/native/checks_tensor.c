/* Tensor memory: R1 to R3, R6-free, R7w, R9 and R15. The twin of tensor_rules.py, which has the model in words. */
#include "checks_state.h"

/* One access: its granules (columns of quarters), and what the accessing warp knows. */
typedef struct {
    chk_cluster *cluster;
    const chk_gang *gang;
    chk_tensor *tensor;
    uint32_t slot;
    const int32_t *clock, *t, *x; /* what is complete for who accesses, fenced, and published to it */
    int32_t site;
    int32_t chained; /* component of products that come first by the manual where `tag` is the same; -1: none */
    uint32_t tag;
    int32_t of_warp[3][CHK_COMPONENTS]; /* room for clock, t and x of a whole warp */
    uint32_t quarter, num_quarters, column, num_cols;
} access;

/* Every granule of an access, quarter by quarter: `cell`. */
#define EACH_CELL(cell, one) \
    for (uint32_t quarter_ = (one)->quarter; quarter_ < (one)->quarter + (one)->num_quarters; quarter_++) \
        for (uint32_t cell = quarter_ * CHK_COLUMNS + (one)->column; \
             cell < quarter_ * CHK_COLUMNS + (one)->column + (one)->num_cols; cell++)

/* ---- the shadow -------------------------------------------------------------------------------------------------- */

static int fill_tensor(chk_cluster *cluster, chk_tensor *tensor) {
    chk_launch *launch = cluster->launch;
    tensor->words = (cluster->num_slots + 63) / 64;
    tensor->loads = chk_take(launch, (size_t)CHK_TENSOR_CELLS * cluster->num_slots, sizeof(int32_t));
    tensor->load_slots = chk_take(launch, (size_t)CHK_TENSOR_CELLS * tensor->words, sizeof(uint64_t));
    tensor->load_site = chk_take(launch, CHK_TENSOR_CELLS, sizeof(int32_t));
    tensor->tags = chk_take(launch, CHK_TENSOR_CELLS, sizeof(uint32_t));
    return tensor->tags && tensor->loads && tensor->load_slots && tensor->load_site &&
           chk_shadow_create(launch, &tensor->shadow, CHK_TENSOR_CELLS, 0);
}

void chk_tensor_destroy(chk_cluster *cluster, chk_tensor *tensor) {
    chk_launch *launch = cluster->launch;
    chk_shadow_destroy(launch, &tensor->shadow);
    chk_give(launch, tensor->loads, (size_t)CHK_TENSOR_CELLS * cluster->num_slots, sizeof(int32_t));
    chk_give(launch, tensor->load_slots, (size_t)CHK_TENSOR_CELLS * tensor->words, sizeof(uint64_t));
    chk_give(launch, tensor->load_site, CHK_TENSOR_CELLS, sizeof(int32_t));
    chk_give(launch, tensor->tags, CHK_TENSOR_CELLS, sizeof(uint32_t));
    chk_give(launch, tensor, 1, sizeof *tensor);
}

/* The shadow of a CTA's tensor memory, NULL when there is no memory for it. */
static chk_tensor *tensor_of(chk_cluster *cluster, uint32_t cta) {
    chk_cta *owner = &cluster->ctas[cta];
    if (owner->tensor) return owner->tensor;
    chk_tensor *tensor = chk_take(cluster->launch, 1, sizeof *tensor);
    if (!tensor) return NULL;
    if (!fill_tensor(cluster, tensor)) {
        chk_tensor_destroy(cluster, tensor);
        return NULL;
    }
    return owner->tensor = tensor;
}

static void forget_loads(chk_cluster *cluster, chk_tensor *tensor, uint32_t cell) {
    for (uint32_t word = 0; word < tensor->words; word++) {
        uint64_t *left = &tensor->load_slots[(size_t)cell * tensor->words + word];
        for (; *left; *left &= *left - 1)
            tensor->loads[(size_t)cell * cluster->num_slots + 64 * word + (uint32_t)__builtin_ctzll(*left)] = 0;
    }
}

/* ---- what a warp's tcgen05 instructions are ordered behind ------------------------------------------------------- */

/* Components of the warp's own tcgen05 instructions; 0 when there are none left. */
static int own_components(chk_cluster *cluster, uint32_t slot, int32_t own[3]) {
    own[0] = chk_component(cluster, CHK_TMEM_LD, slot, 0);
    own[1] = own[0] < 0 ? -1 : chk_component(cluster, CHK_TMEM_ST, slot, 0);
    own[2] = own[1] < 0 ? -1 : chk_component(cluster, CHK_MMA, slot, 0);
    return own[2] >= 0;
}

/* As far as fences go: the warp's own need none. */
static int fenced_clock(const access *one, int32_t *fenced) {
    int32_t own[3];
    if (!own_components(one->cluster, one->slot, own)) return 0;
    memcpy(fenced, one->t, (size_t)one->cluster->num_components * sizeof *fenced);
    for (int i = 0; i < 3; i++) fenced[own[i]] = INT32_MAX;
    return 1;
}

/* ---- reports ----------------------------------------------------------------------------------------------------- */

static void report(const access *one, chk_kind kind, uint32_t cell, int32_t component, int32_t other, int verb) {
    if (one->chained >= 0 && component == one->chained) kind = CHK_TENSOR_ORDER;
    chk_finding finding = chk_finding_at(one->cluster, one->gang, kind, one->site);
    finding.address = cell;
    finding.other = other;
    finding.extra[0] = verb;
    if (component >= 0) chk_name_agent(one->cluster, &finding, component);
    chk_add(one->cluster->launch, &finding);
}

/* R15: a barrier orders the event of another warp first, but a tcgen05.fence is missing on one of its sides. */
static void report_fence(const access *one, uint32_t cell, int32_t component, int32_t count, int32_t other, int verb) {
    int is_published = one->x[component] >= count;
    report(one, is_published ? CHK_TENSOR_FENCE_AFTER : CHK_TENSOR_FENCE_BEFORE, cell, component, other, verb);
}

/* ---- rules ------------------------------------------------------------------------------------------------------- */

/* Whether the last write is of a product that the manual orders before this one: the same accumulator and shape, or a
 * copy into tensor memory, of the same thread. */
static int is_chained(const access *one, uint32_t cell) {
    uint32_t tag = one->tensor->tags[cell];
    return one->chained >= 0 && one->tensor->shadow.cells[cell].writer == one->chained + 1 &&
           (tag == one->tag || tag == CHK_TAG_COPY);
}

/* First granule whose last write is not in a clock; -1: none. */
static int64_t first_write(const access *one, const int32_t *clock) {
    EACH_CELL(cell, one)
    if (chk_write_unordered(&one->tensor->shadow.cells[cell], CHK_FULL, clock) && !is_chained(one, cell)) return cell;
    return -1;
}

static int64_t first_read(const access *one, const int32_t *clock) {
    EACH_CELL(cell, one) if (chk_reads_unordered(&one->tensor->shadow, cell, CHK_FULL, clock)) return cell;
    return -1;
}

/* The last write comes first: complete (R1, R3), and fenced (R15). */
static chk_status check_writes(const access *one, int verb) {
    const chk_cell *cells = one->tensor->shadow.cells;
    int64_t at = first_write(one, one->clock);
    if (at >= 0) {
        report(one, verb == CHK_READS ? CHK_TENSOR_RACE_READ : CHK_TENSOR_RACE_WRITE, (uint32_t)at,
               cells[at].writer - 1, cells[at].write_site, verb);
        return CHK_OK;
    }
    int32_t fenced[CHK_COMPONENTS];
    if (!fenced_clock(one, fenced)) return one->cluster->failed;
    at = first_write(one, fenced);
    if (at >= 0)
        report_fence(one, (uint32_t)at, cells[at].writer - 1, cells[at].written, cells[at].write_site, verb);
    return CHK_OK;
}

/* The first warp whose newest tcgen05.ld of a granule is not in a clock; -1: none. */
static int32_t late_loader(const access *one, uint32_t cell, const int32_t *clock) {
    const chk_cluster *cluster = one->cluster;
    const int32_t *loads = one->tensor->loads + (size_t)cell * cluster->num_slots;
    const uint64_t *slots = one->tensor->load_slots + (size_t)cell * one->tensor->words;
    for (uint32_t word = 0; word < one->tensor->words; word++)
        for (uint64_t left = slots[word]; left; left &= left - 1) {
            uint32_t loader = 64 * word + (uint32_t)__builtin_ctzll(left);
            if (loads[loader] > clock[cluster->slot_component[CHK_TMEM_LD][loader] - 1]) return (int32_t)loader;
        }
    return -1;
}

/* First granule with such a warp, and the warp; -1: none. */
static int64_t first_load(const access *one, const int32_t *clock, int32_t *loader) {
    EACH_CELL(cell, one) if ((*loader = late_loader(one, cell, clock)) >= 0) return cell;
    return -1;
}

/* tcgen05.ld before a write: completed by wait::ld (R7w), and fenced (R15; not asked for where NULL). */
static void check_loads(const access *one, const int32_t *fenced, int verb) {
    int32_t loader = 0;
    int64_t at = first_load(one, one->clock, &loader);
    int is_weak = at >= 0;
    if (!is_weak && fenced) at = first_load(one, fenced, &loader);
    if (at < 0) return;
    int32_t component = one->cluster->slot_component[CHK_TMEM_LD][loader] - 1, site = one->tensor->load_site[at];
    int32_t count = one->tensor->loads[(size_t)at * one->cluster->num_slots + (uint32_t)loader];
    if (is_weak)
        report(one, CHK_TENSOR_LOAD, (uint32_t)at, component, site, verb);
    else
        report_fence(one, (uint32_t)at, component, count, site, verb);
}

/* Reads since the last write come first: over (R2), complete (R7w), and fenced (R15). */
static chk_status check_reads(const access *one) {
    const chk_shadow *shadow = &one->tensor->shadow;
    int32_t count = 0, fenced[CHK_COMPONENTS];
    int64_t at = first_read(one, one->clock);
    if (at >= 0) {
        int32_t reader = chk_first_reader(shadow, (uint32_t)at, one->clock, &count);
        report(one, CHK_TENSOR_RACE_OVERWRITE, (uint32_t)at, reader, shadow->cells[at].read_site, CHK_OVERWRITES);
        return CHK_OK;
    }
    if (!fenced_clock(one, fenced)) return one->cluster->failed;
    check_loads(one, fenced, CHK_OVERWRITES);
    /* How far a warp's program has come: R2 has seen to it. */
    for (uint32_t slot = 0; slot < one->cluster->num_slots; slot++) fenced[slot] = INT32_MAX;
    at = first_read(one, fenced);
    if (at < 0) return CHK_OK;
    int32_t reader = chk_first_reader(shadow, (uint32_t)at, fenced, &count);
    report_fence(one, (uint32_t)at, reader, count, shadow->cells[at].read_site, CHK_OVERWRITES);
    return CHK_OK;
}

static void check_written(const access *one) {
    EACH_CELL(cell, one)
    if (one->tensor->shadow.cells[cell].initialised != CHK_FULL) {
        report(one, CHK_TENSOR_UNWRITTEN, cell, -1, -1, -1);
        return;
    }
}

static void note_writes(const access *one, chk_token token, int by_async) {
    EACH_CELL(cell, one) {
        chk_note_write(&one->tensor->shadow.cells[cell], CHK_FULL, token.component, token.count, one->site, by_async);
        chk_forget_reads(&one->tensor->shadow, cell);
        forget_loads(one->cluster, one->tensor, cell);
        one->tensor->tags[cell] = one->tag;
    }
}

static chk_status note_reads(const access *one, chk_token token) {
    chk_shadow *shadow = &one->tensor->shadow;
    int column = chk_reader_column(one->cluster->launch, shadow, token.component);
    if (column < 0) return CHK_NO_MEMORY;
    EACH_CELL(cell, one) chk_note_read(shadow, cell, CHK_FULL, (uint32_t)column, token.count, one->site);
    return CHK_OK;
}

/* ---- the usual case: nothing to tell ----------------------------------------------------------------------------- */

/* What is complete for the warp and, where that is asked for, fenced: the smaller of both counts. 0 when the warp has
 * not had components of its own yet: they are made in the order in which the rules come to need them. */
static int strictest_clock(const access *one, int32_t *both) {
    chk_cluster *cluster = one->cluster;
    const int32_t *t = one->t;
    static const int kinds[] = {CHK_TMEM_LD, CHK_TMEM_ST, CHK_MMA};
    for (int i = 0; i < 3; i++)
        if (!cluster->slot_component[kinds[i]][one->slot]) return 0;
    uint32_t num_slots = cluster->num_slots;
    memcpy(both, one->clock, num_slots * sizeof *both); /* warps come first, and need no fence */
    for (int32_t c = (int32_t)num_slots; c < cluster->num_components; c++)
        both[c] = one->clock[c] < t[c] ? one->clock[c] : t[c];
    for (int i = 0; i < 3; i++) {
        int32_t own = cluster->slot_component[kinds[i]][one->slot] - 1;
        both[own] = one->clock[own];
    }
    return 1;
}

/* Whether no rule has anything to tell; when it says no, the rules themselves find out. */
static int is_quiet(const access *one, int is_write) {
    int32_t both[CHK_COMPONENTS];
    const chk_shadow *shadow = &one->tensor->shadow;
    if (!strictest_clock(one, both)) return 0;
    EACH_CELL(at, one) {
        const chk_cell *cell = &shadow->cells[at];
        if (both[cell->writer - (cell->writer != 0)] < cell->written) return 0;
        if (!is_write && cell->initialised != CHK_FULL) return 0;
        if (is_write && cell->read_mask && chk_reads_unordered(shadow, at, CHK_FULL, both)) return 0;
        if (is_write && late_loader(one, at, both) >= 0) return 0;
    }
    return 1;
}

static chk_status check_load(const access *one) {
    if (is_quiet(one, 0)) return CHK_OK;
    chk_status status = check_writes(one, CHK_READS);
    if (status == CHK_OK) check_written(one);
    return status;
}

static chk_status check_store(const access *one) {
    if (is_quiet(one, 1)) return CHK_OK;
    chk_status status = check_writes(one, CHK_OVERWRITES);
    return status == CHK_OK ? check_reads(one) : status;
}

/* ---- tcgen05.ld and st ------------------------------------------------------------------------------------------- */

static void note_loads(const access *one, int32_t count) {
    EACH_CELL(cell, one) {
        one->tensor->loads[(size_t)cell * one->cluster->num_slots + one->slot] = count;
        one->tensor->load_slots[(size_t)cell * one->tensor->words + one->slot / 64] |= (uint64_t)1 << one->slot % 64;
        one->tensor->load_site[cell] = one->site;
    }
}

static chk_status load(const access *one) {
    chk_cluster *cluster = one->cluster;
    chk_status status = check_load(one);
    if (status != CHK_OK) return status;
    int32_t component = chk_component(cluster, CHK_TMEM_LD, one->slot, 0);
    if (component < 0) return cluster->failed;
    note_loads(one, ++cluster->now[component]);
    return note_reads(one, (chk_token){(int32_t)one->slot, cluster->now[one->slot], 0});
}

/* The component of its stores is made between the two checks, as the Python twin makes it. */
static chk_status check_store_of_warp(const access *one) {
    if (is_quiet(one, 1)) return CHK_OK;
    chk_status status = check_writes(one, CHK_OVERWRITES);
    if (status != CHK_OK) return status;
    if (chk_component(one->cluster, CHK_TMEM_ST, one->slot, 0) < 0) return one->cluster->failed;
    return check_reads(one);
}

static chk_status store(const access *one) {
    chk_cluster *cluster = one->cluster;
    chk_status status = check_store_of_warp(one);
    if (status != CHK_OK) return status;
    int32_t component = chk_component(cluster, CHK_TMEM_ST, one->slot, 0), count = ++cluster->now[component];
    note_writes(one, (chk_token){component, count, 0}, 0);
    return CHK_OK;
}

/* The access of a warp's quarter or of a block; its tensor is NULL when there is no memory for the shadow. */
static void access_of(access *one, chk_cluster *cluster, const chk_gang *gang, uint32_t owner, uint32_t slot,
                      uint32_t row, int32_t site) {
    one->cluster = cluster, one->gang = gang, one->tensor = tensor_of(cluster, owner), one->slot = slot;
    one->clock = chk_row(cluster->e, row), one->t = chk_row(cluster->t, row), one->x = chk_row(cluster->x, row);
    one->site = site, one->num_quarters = 1, one->quarter = 0, one->chained = -1, one->tag = 0;
}

static void lower_to(int32_t *to, const int32_t *from, int32_t count) {
    for (int32_t i = 0; i < count; i++) to[i] = to[i] < from[i] ? to[i] : from[i];
}

/* An access of a whole warp: what each of its lanes knows, and what it did itself. */
static void access_of_warp(access *one, chk_cluster *cluster, const chk_gang *gang, uint32_t slot, int32_t site) {
    access_of(one, cluster, gang, gang->cta, slot, slot, site);
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) return;
    const int32_t *rows[3] = {cluster->e, cluster->t, cluster->x};
    int32_t count = cluster->num_components, first = (int32_t)slot;
    while (!cluster->row_lanes[first] && cluster->row_next[first] >= 0) first = cluster->row_next[first];
    for (int k = 0; k < 3; k++) {
        memcpy(one->of_warp[k], rows[k] + (size_t)first * CHK_COMPONENTS, (size_t)count * sizeof(int32_t));
        for (int32_t row = cluster->row_next[first]; row >= 0; row = cluster->row_next[row])
            lower_to(one->of_warp[k], rows[k] + (size_t)row * CHK_COMPONENTS, count);
    }
    one->of_warp[0][slot] = cluster->now[slot];
    static const int kinds[CHK_NUM_SEEN] = {CHK_CP_ASYNC, CHK_TMEM_LD, CHK_TMEM_ST};
    for (int k = 0; k < CHK_NUM_SEEN; k++) {
        int32_t component = cluster->slot_component[kinds[k]][slot] - 1, seen = cluster->seen[k][slot];
        if (component >= 0 && one->of_warp[0][component] < seen) one->of_warp[0][component] = seen;
    }
    one->clock = one->of_warp[0], one->t = one->of_warp[1], one->x = one->of_warp[2];
}

chk_status chk_tmem_access(chk_cluster *cluster, const chk_gang *gang, uint32_t warp, uint32_t address,
                           uint32_t width, int is_write, int32_t site) {
    uint32_t column = address & 0xFFFF, lane = address >> 16;
    if (!chk_gang_ok(cluster, gang) || warp >= cluster->warps_a_cta) return CHK_BAD_INPUT;
    if (lane >= 128 || column > CHK_COLUMNS || width > CHK_COLUMNS - column) return CHK_BAD_INPUT;
    access one;
    access_of_warp(&one, cluster, gang, chk_slot(cluster, gang->cta, warp), site);
    if (!one.tensor) return CHK_NO_MEMORY;
    one.quarter = lane / 32;
    one.column = column;
    one.num_cols = width;
    return is_write ? store(&one) : load(&one);
}

/* ---- tcgen05.mma and cp ------------------------------------------------------------------------------------------ */

/* The granules of a (lane, lanes, column, columns) block. */
static chk_status block_of(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                           const chk_operand *block, const int32_t *clock, access *one) {
    if (block->cta >= cluster->num_ctas || block->first >= 128 || block->lanes > 128 - block->first)
        return CHK_BAD_INPUT;
    if (block->column > CHK_COLUMNS || block->count > CHK_COLUMNS - block->column) return CHK_BAD_INPUT;
    uint32_t slot = chk_slot(cluster, gang->cta, operation->warp), mask = chk_mask(gang, 0);
    uint32_t row = chk_row_of(cluster, slot, mask ? (uint32_t)__builtin_ctz(mask) : 0);
    access_of(one, cluster, gang, block->cta, slot, row, operation->site);
    one->clock = clock;
    one->tag = operation->tag;
    if (chk_has_rule(cluster, CHK_RULES_TENSOR_ORDER)) one->chained = cluster->slot_component[CHK_MMA][slot] - 1;
    one->quarter = block->first / 32;
    one->num_quarters = (block->first + block->lanes + 31) / 32 - one->quarter;
    one->column = block->column;
    one->num_cols = (uint32_t)block->count;
    return one->tensor ? CHK_OK : CHK_NO_MEMORY;
}

static int is_written(const chk_operation *operation, const chk_operand *block) {
    for (size_t i = 0; i < operation->num_writes; i++) {
        const chk_operand *other = &operation->writes[i];
        if (other->kind == CHK_TENSOR_BLOCK && other->cta == block->cta && other->first == block->first &&
            other->column == block->column && other->count == block->count)
            return 1;
    }
    return 0;
}

chk_status chk_product_reads(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                             const chk_operand *block, const int32_t *clock, chk_token token) {
    access one;
    chk_status status = block_of(cluster, gang, operation, block, clock, &one);
    if (status == CHK_OK) status = check_load(&one);
    /* An accumulator is written by the same product, which stands for the read. */
    if (status != CHK_OK || (one.chained >= 0 && is_written(operation, block))) return status;
    return note_reads(&one, token);
}

chk_status chk_product_writes(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                              const chk_operand *block, const int32_t *clock, chk_token token) {
    access one;
    chk_status status = block_of(cluster, gang, operation, block, clock, &one);
    if (status == CHK_OK) status = check_store(&one);
    if (status != CHK_OK) return status;
    note_writes(&one, token, 1);
    return CHK_OK;
}

/* ---- tcgen05.dealloc, wait and fence ----------------------------------------------------------------------------- */

static void check_free(const access *one) {
    const chk_shadow *shadow = &one->tensor->shadow;
    int32_t count = 0;
    int64_t written = first_write(one, one->clock), read = written >= 0 ? -1 : first_read(one, one->clock);
    if (written >= 0)
        report(one, CHK_TENSOR_FREE_WRITE, (uint32_t)written, shadow->cells[written].writer - 1,
               shadow->cells[written].write_site, CHK_FREES);
    else if (read >= 0)
        report(one, CHK_TENSOR_FREE_READ, (uint32_t)read, chk_first_reader(shadow, (uint32_t)read, one->clock, &count),
               shadow->cells[read].read_site, CHK_FREES);
    else
        check_loads(one, NULL, CHK_FREES);
}

/* Position of the first warp of a gang with an active lane; num_warps if it has none. */
static uint32_t first_active(const chk_gang *gang) {
    uint32_t k = 0;
    while (k < gang->num_warps && !chk_mask(gang, k)) k++;
    return k;
}

chk_status chk_tmem_freed(chk_cluster *cluster, const chk_gang *gang, uint32_t column, uint32_t num_cols,
                          int32_t site) {
    if (!chk_gang_ok(cluster, gang) || column > CHK_COLUMNS || num_cols > CHK_COLUMNS - column) return CHK_BAD_INPUT;
    uint32_t k = first_active(gang);
    if (k == gang->num_warps) return CHK_BAD_INPUT;
    access one;
    access_of_warp(&one, cluster, gang, chk_gang_slot(cluster, gang, k), site);
    if (!one.tensor) return CHK_NO_MEMORY;
    one.num_quarters = CHK_QUARTERS;
    one.column = column;
    one.num_cols = num_cols;
    check_free(&one);
    EACH_CELL(cell, &one) {
        chk_cell *freed = &one.tensor->shadow.cells[cell];
        freed->initialised = 0;
        freed->writer = freed->written = 0;
        chk_forget_reads(&one.tensor->shadow, cell);
        forget_loads(cluster, one.tensor, cell);
    }
    return CHK_OK;
}

#define EACH_STRAND(row, cluster, slot, mask) \
    for (int32_t row = (int32_t)(slot); row >= 0; row = (cluster)->row_next[row]) \
        if (!(cluster)->row_lanes[row] || ((cluster)->row_lanes[row] & (mask)))

/* tcgen05.fence::before_thread_sync: the warp's accesses so far go with its next arrivals. */
static chk_status publish(chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    int32_t own[3];
    if (!own_components(cluster, slot, own)) return cluster->failed;
    EACH_STRAND(row, cluster, slot, mask)
    for (int i = 0; i < 3; i++) chk_row(cluster->x, (uint32_t)row)[own[i]] = cluster->now[own[i]];
    return CHK_OK;
}

/* tcgen05.fence::after_thread_sync: the warp's next instructions come after all it was handed. */
static void accept(chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    EACH_STRAND(row, cluster, slot, mask) {
        int32_t *t = chk_row(cluster->t, (uint32_t)row);
        const int32_t *x = chk_row(cluster->x, (uint32_t)row);
        for (int32_t i = 0; i < cluster->num_components; i++) t[i] = t[i] > x[i] ? t[i] : x[i];
    }
}

/* tcgen05.wait::ld, ::st: of what the warp's lanes have done together. */
static chk_status wait_own(chk_cluster *cluster, uint32_t slot, uint32_t mask, chk_tmem_order order) {
    int32_t component = chk_component(cluster, order == CHK_WAIT_LD ? CHK_TMEM_LD : CHK_TMEM_ST, slot, 0);
    if (component < 0) return cluster->failed;
    int32_t count = cluster->now[component];
    cluster->seen[order == CHK_WAIT_LD ? CHK_SEEN_LD : CHK_SEEN_ST][slot] = count;
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) chk_clock_reach(cluster, slot, mask, component, count, 1);
    return CHK_OK;
}

static chk_status order_warp(chk_cluster *cluster, uint32_t slot, uint32_t mask, chk_tmem_order order) {
    if (order == CHK_TCGEN05_BEFORE) return publish(cluster, slot, mask);
    if (order != CHK_TCGEN05_AFTER) return wait_own(cluster, slot, mask, order);
    accept(cluster, slot, mask);
    return CHK_OK;
}

chk_status chk_tmem_wait(chk_cluster *cluster, const chk_gang *gang, chk_tmem_order order) {
    if (!chk_gang_ok(cluster, gang) || order > CHK_TCGEN05_AFTER) return CHK_BAD_INPUT;
    chk_status status = CHK_OK;
    CHK_EACH_ACTIVE(k, gang) {
        if (status != CHK_OK) return status;
        status = order_warp(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), order);
    }
    return status;
}
