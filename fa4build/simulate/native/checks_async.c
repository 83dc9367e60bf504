/* R1 to R5 and R9 of asynchronous operations: what one may touch from its issue until its completion is seen. The twin
 * of memory_rules.py. */
#include "checks_state.h"

/* ---- the shared memory of asynchronous operations ---------------------------------------------------------------- */

/* The granules of an operand: a span or a list. */
static inline uint32_t cell_at(const chk_operand *operand, uint64_t i) {
    return operand->kind == CHK_SHARED_SPAN ? operand->first + (uint32_t)i : operand->granules[i];
}

/* Whether all granules of an operand are in the shared memory of a CTA of the cluster. */
static int operand_ok(const chk_cluster *cluster, const chk_operand *operand) {
    uint32_t num_cells = cluster->shared_limit / 16 + 1;
    if (operand->cta >= cluster->num_ctas || operand->count > num_cells) return 0;
    if (operand->kind == CHK_SHARED_SPAN) return operand->first <= num_cells - operand->count;
    for (uint64_t i = 0; i < operand->count; i++)
        if (operand->granules[i] >= num_cells) return 0;
    return 1;
}

typedef struct {
    const int32_t *g, *p;
    chk_token token;
    int32_t site;
} issue;

/* First granule of each fault; -1: none. */
typedef struct {
    int64_t barrier, write, hidden, read, missing;
} async_faults;

static void look_at_async(const chk_shadow *shadow, const chk_cell *barriers, const chk_operand *operand,
                          const issue *how, int is_write, int asks_proxy, async_faults *found) {
    for (uint64_t i = 0; i < operand->count; i++) {
        uint32_t at = cell_at(operand, i);
        const chk_cell *cell = &shadow->cells[at];
        int late = chk_write_unordered(cell, CHK_FULL, how->g);
        if (late && found->write < 0) found->write = at;
        if (asks_proxy && found->hidden < 0 && !late && !cell->by_async &&
            chk_write_unordered(cell, CHK_FULL, how->p))
            found->hidden = at;
        if (!is_write) {
            if (found->missing < 0 && cell->initialised != CHK_FULL) found->missing = at;
            continue;
        }
        if (found->barrier < 0 && barriers[at].barrier_bytes) found->barrier = at;
        if (found->read < 0 && chk_reads_unordered(shadow, at, CHK_FULL, how->g)) found->read = at;
    }
}

/* Whether a granule may have something to tell: quick, and never wrong when it says no. */
static inline int is_suspect(const chk_shadow *shadow, const chk_cell *barriers, uint32_t at, const issue *how,
                             int is_write, int asks_proxy) {
    const chk_cell *cell = &shadow->cells[at];
    int32_t writer = cell->writer - (cell->writer != 0);
    int is_hidden = asks_proxy & !cell->by_async & (how->p[writer] < cell->written);
    int wrong = (how->g[writer] < cell->written) | is_hidden;
    if (!is_write) return wrong | (cell->initialised != CHK_FULL);
    return wrong | (barriers[at].barrier_bytes != 0) ||
           (cell->read_mask && chk_reads_unordered(shadow, at, CHK_FULL, how->g));
}

static int any_suspect(const chk_shadow *shadow, const chk_cell *barriers, const chk_operand *operand,
                       const issue *how, int is_write, int asks_proxy) {
    for (uint64_t i = 0; i < operand->count; i++)
        if (is_suspect(shadow, barriers, cell_at(operand, i), how, is_write, asks_proxy)) return 1;
    return 0;
}

static void report_async(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow,
                         const async_faults *found, const issue *how, int is_write) {
    int32_t site = how->site;
    if (found->barrier >= 0)
        chk_report_shared(cluster, gang, CHK_BARRIER_BYTES_ASYNC, (uint32_t)found->barrier, site);
    if (found->write >= 0)
        chk_report_shared_write(cluster, gang, shadow, is_write ? CHK_SHARED_RACE_WRITE : CHK_SHARED_RACE_READ,
                     (uint32_t)found->write, site);
    if (found->hidden >= 0)
        chk_report_shared_write(cluster, gang, shadow, is_write ? CHK_PROXY_WRITE : CHK_PROXY_READ,
                                (uint32_t)found->hidden, site);
    if (found->read >= 0) chk_report_shared_read(cluster, gang, shadow, (uint32_t)found->read, how->g, site);
    if (found->missing >= 0)
        chk_report_shared(cluster, gang, CHK_SHARED_UNWRITTEN_ASYNC, (uint32_t)found->missing, site);
}

static chk_status record_reads(const chk_cluster *cluster, chk_shadow *shadow, const chk_operand *operand,
                               const issue *how) {
    int column = chk_reader_column(cluster->launch, shadow, how->token.component);
    if (column < 0) return CHK_NO_MEMORY;
    for (uint64_t i = 0; i < operand->count; i++)
        chk_note_read(shadow, cell_at(operand, i), CHK_FULL, (uint32_t)column, how->token.count, how->site);
    return CHK_OK;
}

static void record_writes(chk_shadow *shadow, const chk_operand *operand, const issue *how, int by_async) {
    for (uint64_t i = 0; i < operand->count; i++) {
        uint32_t at = cell_at(operand, i);
        chk_cell *cell = &shadow->cells[at];
        chk_note_write(cell, CHK_FULL, how->token.component, how->token.count, how->site, by_async);
        if (cell->read_mask) chk_forget_reads(shadow, at);
    }
}

static chk_status shared_operand(chk_cluster *cluster, const chk_gang *gang, const chk_operand *operand,
                                 const issue *how, int is_write, int asks_proxy) {
    if (!operand_ok(cluster, operand)) return CHK_BAD_INPUT;
    chk_shadow *shadow = &cluster->ctas[operand->cta].shared;
    /* As in the Python twin: the barriers of the issuing CTA, whoever owns the granules. */
    const chk_cell *barriers = cluster->ctas[gang->cta].shared.cells;
    if (any_suspect(shadow, barriers, operand, how, is_write, asks_proxy)) {
        async_faults found = {-1, -1, -1, -1, -1};
        look_at_async(shadow, barriers, operand, how, is_write, asks_proxy, &found);
        report_async(cluster, gang, shadow, &found, how, is_write);
    }
    if (!is_write) return record_reads(cluster, shadow, operand, how);
    record_writes(shadow, operand, how, asks_proxy);
    return CHK_OK;
}

/* ---- asynchronous operations ------------------------------------------------------------------------------------- */

static chk_status operand_of(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                             const chk_operand *operand, const issue *how, int is_write) {
    switch (operand->kind) {
    case CHK_SHARED_SPAN:
    case CHK_SHARED_UNITS:
        /* cp.async is of the generic proxy, but its reads of shared memory are none. */
        return shared_operand(cluster, gang, operand, how, is_write, !is_write || operation->channel != CHK_CP_ASYNC);
    case CHK_TENSOR_BLOCK:
        return (is_write ? chk_product_writes : chk_product_reads)(cluster, gang, operation, operand, how->g,
                                                                   how->token);
    case CHK_GLOBAL_RANGE:
    case CHK_GLOBAL_UNITS: return chk_global_operand(cluster, gang, operand, how->site, is_write);
    default: return CHK_BAD_INPUT;
    }
}

static chk_status all_operands(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                               const issue *how) {
    chk_status status = CHK_OK;
    for (size_t i = 0; i < operation->num_reads && status == CHK_OK; i++)
        status = operand_of(cluster, gang, operation, &operation->reads[i], how, 0);
    for (size_t i = 0; i < operation->num_writes && status == CHK_OK; i++)
        status = operand_of(cluster, gang, operation, &operation->writes[i], how, 1);
    return status;
}

static int operation_ok(const chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation) {
    if (!chk_gang_ok(cluster, gang) || operation->warp >= cluster->warps_a_cta) return 0;
    if (operation->channel != CHK_MBARRIER)
        return operation->channel >= CHK_BULK && operation->channel <= CHK_MMA;
    return operation->barrier >= 0 && (size_t)operation->barrier < cluster->num_barriers && operation->phase >= 0 &&
           operation->phase < INT32_MAX;
}

/* The component and count by which the operation's completion is seen. */
static chk_status stamp(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                        chk_token *token) {
    if (operation->channel != CHK_MBARRIER) {
        token->component = chk_component(cluster, operation->channel, chk_slot(cluster, gang->cta, operation->warp), 0);
        if (token->component < 0) return cluster->failed;
        token->count = ++cluster->now[token->component];
        return CHK_OK;
    }
    const chk_barrier *barrier = &cluster->barriers[operation->barrier];
    chk_note_unfenced(cluster, gang, barrier, operation->site);
    token->component = chk_component(cluster, CHK_MBARRIER, barrier->cta, barrier->offset);
    token->count = operation->phase + 1;
    return token->component < 0 ? cluster->failed : CHK_OK;
}

chk_status chk_issue(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation, chk_token *token) {
    *token = (chk_token){-1, 0};
    if (!operation_ok(cluster, gang, operation)) return CHK_BAD_INPUT;
    chk_token stamped;
    chk_status status = stamp(cluster, gang, operation, &stamped);
    if (status != CHK_OK) return status;
    *token = stamped;
    uint32_t slot = chk_slot(cluster, gang->cta, operation->warp);
    issue how = {chk_row(cluster->g, slot), chk_row(cluster->p, slot), stamped, operation->site};
    if (operation->channel != CHK_MMA) return all_operands(cluster, gang, operation, &how);
    /* Products of one thread run in order: each sees the accumulators of the ones before. */
    int32_t own[2][CHK_COMPONENTS];
    memcpy(own[0], how.g, sizeof own[0]);
    memcpy(own[1], how.p, sizeof own[1]);
    own[0][stamped.component] = own[1][stamped.component] = stamped.count;
    how.g = own[0];
    how.p = own[1];
    return all_operands(cluster, gang, operation, &how);
}
