/* R1 to R5 and R9 of asynchronous operations: what one may touch from its issue until its completion is seen. The twin
 * of memory_rules.py. */
#include "checks_order.h"
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
    const int32_t *g, *p, *e;
    chk_token token;
    int32_t site, slot;
    uint32_t cta;                 /* of the thread that issues */
    chk_view view, visible;       /* by g and p */
    const chk_lanes *owners;      /* of each granule: lanes that write (cp.async); NULL: one for all */
} issue;

/* First granule of each fault; -1: none. */
typedef struct {
    int64_t barrier, write, hidden, read, missing;
} async_faults;

/* Whether the last write is a generic one that no proxy fence has made visible where the granule is. */
static int is_hidden(const chk_cluster *cluster, const chk_shadow *shadow, uint32_t at, uint32_t owner,
                     const issue *how) {
    const chk_cell *cell = &shadow->cells[at];
    if (cell->by_async || !cell->writer) return 0;
    if (chk_write_late(&how->visible, shadow, at, CHK_FULL)) return 1;
    const chk_component_key *key = &cluster->keys[cell->writer - 1];
    uint32_t home = (uint32_t)key->a / cluster->warps_a_cta;
    if (!chk_has_rule(cluster, CHK_RULES_SPACES) || key->kind == CHK_MBARRIER || home == owner) return 0;
    /* Written from another CTA: only a fence of all shared memory of the cluster counts. */
    return cluster->space_fence[key->a] < cell->written && !cluster->space_fence[how->slot];
}

static void look_at_async(const chk_cluster *cluster, const chk_shadow *shadow, const chk_cell *barriers,
                          const chk_operand *operand, issue *how, int is_write, int asks_proxy, async_faults *found) {
    for (uint64_t i = 0; i < operand->count; i++) {
        uint32_t at = cell_at(operand, i);
        const chk_cell *cell = &shadow->cells[at];
        if (how->owners) how->view.lanes = how->owners[i];
        int late = chk_write_late(&how->view, shadow, at, CHK_FULL);
        if (late && found->write < 0) found->write = at;
        if (asks_proxy && found->hidden < 0 && !late && is_hidden(cluster, shadow, at, operand->cta, how))
            found->hidden = at;
        if (!is_write) {
            if (found->missing < 0 && cell->initialised != CHK_FULL) found->missing = at;
            continue;
        }
        if (found->barrier < 0 && barriers[at].barrier_bytes) found->barrier = at;
        if (found->read < 0 && chk_reads_late(&how->view, shadow, at, CHK_FULL)) found->read = at;
    }
}

/* Whether a granule may have something to tell: quick, and never wrong when it says no. */
static inline int is_suspect(const chk_shadow *shadow, const chk_cell *barriers, uint32_t at, const issue *how,
                             int is_write, int asks_proxy, int is_away) {
    const chk_cell *cell = &shadow->cells[at];
    int32_t writer = cell->writer - (cell->writer != 0);
    int is_unseen = asks_proxy & !cell->by_async & ((how->p[writer] < cell->written) | is_away);
    int wrong = (how->g[writer] < cell->written) | is_unseen;
    if (!is_write) return wrong | (cell->initialised != CHK_FULL);
    return wrong | (barriers[at].barrier_bytes != 0) ||
           (cell->read_mask && chk_reads_late(&how->view, shadow, at, CHK_FULL));
}

static int any_suspect(const chk_cluster *cluster, const chk_shadow *shadow, const chk_cell *barriers,
                       const chk_operand *operand, issue *how, int is_write, int asks_proxy) {
    for (uint64_t i = 0; i < operand->count; i++) {
        uint32_t at = cell_at(operand, i);
        int32_t writer = shadow->cells[at].writer - 1;
        int is_away = writer >= 0 && cluster->num_ctas > 1 && cluster->keys[writer].kind == CHK_WARP &&
                      (uint32_t)cluster->keys[writer].a / cluster->warps_a_cta != operand->cta;
        if (how->owners) how->view.lanes = how->owners[i];
        if (is_suspect(shadow, barriers, at, how, is_write, asks_proxy, is_away)) return 1;
    }
    return 0;
}

static void report_async(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow,
                         const async_faults *found, const issue *how, int is_write) {
    int32_t site = how->site;
    if (found->barrier >= 0)
        chk_report_shared(cluster, gang, CHK_BARRIER_BYTES_ASYNC, (uint32_t)found->barrier, site);
    if (found->write >= 0)
        chk_report_shared_write(cluster, gang, shadow, is_write ? CHK_SHARED_RACE_WRITE : CHK_SHARED_RACE_READ,
                                (uint32_t)found->write, &how->view, site);
    if (found->hidden >= 0)
        chk_report_shared_write(cluster, gang, shadow, is_write ? CHK_PROXY_WRITE : CHK_PROXY_READ,
                                (uint32_t)found->hidden, &how->visible, site);
    if (found->read >= 0)
        chk_report_shared_read(cluster, gang, shadow, (uint32_t)found->read, CHK_FULL, &how->view, site);
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

static chk_status record_writes(chk_launch *launch, chk_shadow *shadow, const chk_operand *operand, const issue *how,
                                int by_async) {
    for (uint64_t i = 0; i < operand->count; i++) {
        uint32_t at = cell_at(operand, i);
        chk_cell *cell = &shadow->cells[at];
        if (shadow->write_lanes && how->owners &&
            !chk_note_write_lanes(launch, shadow, at, how->token.component, INT32_MAX, how->owners[i]))
            return CHK_NO_MEMORY;
        chk_note_write(cell, CHK_FULL, how->token.component, how->token.count, how->site, by_async);
        if (cell->read_mask) chk_forget_reads(shadow, at);
    }
    return CHK_OK;
}

static chk_status shared_operand(chk_cluster *cluster, const chk_gang *gang, const chk_operand *operand, issue *how,
                                 int is_write, int asks_proxy) {
    if (!operand_ok(cluster, operand)) return CHK_BAD_INPUT;
    chk_shadow *shadow = &cluster->ctas[operand->cta].shared;
    /* As in the Python twin: the barriers of the issuing CTA, whoever owns the granules. */
    const chk_cell *barriers = cluster->ctas[gang->cta].shared.cells;
    how->owners = chk_has_rule(cluster, CHK_RULES_LANES) ? operand->owners : NULL;
    if (any_suspect(cluster, shadow, barriers, operand, how, is_write, asks_proxy)) {
        async_faults found = {-1, -1, -1, -1, -1};
        look_at_async(cluster, shadow, barriers, operand, how, is_write, asks_proxy, &found);
        report_async(cluster, gang, shadow, &found, how, is_write);
    }
    if (!is_write) return record_reads(cluster, shadow, operand, how);
    return record_writes(cluster->launch, shadow, operand, how, asks_proxy);
}

/* ---- asynchronous operations ------------------------------------------------------------------------------------- */

static chk_status operand_of(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                             const chk_operand *operand, issue *how, int is_write) {
    switch (operand->kind) {
    case CHK_SHARED_SPAN:
    case CHK_SHARED_UNITS:
        /* cp.async is of the generic proxy, but its reads of shared memory are none. */
        return shared_operand(cluster, gang, operand, how, is_write, !is_write || operation->channel != CHK_CP_ASYNC);
    case CHK_TENSOR_BLOCK:
        return (is_write ? chk_product_writes : chk_product_reads)(cluster, gang, operation, operand, how->e,
                                                                   how->token);
    case CHK_GLOBAL_RANGE:
    case CHK_GLOBAL_UNITS: return chk_global_operand(cluster, gang, operand, how->site, is_write);
    default: return CHK_BAD_INPUT;
    }
}

static chk_status all_operands(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                               issue *how) {
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

/* The lane that issues: the first of the gang. */
static uint32_t issuing_lane(const chk_gang *gang) {
    uint32_t mask = chk_mask(gang, 0);
    return mask ? (uint32_t)__builtin_ctz(mask) : 0;
}

static issue issue_of(const chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                      chk_token token) {
    uint32_t slot = chk_slot(cluster, gang->cta, operation->warp), lane = issuing_lane(gang);
    uint32_t row = chk_row_of(cluster, slot, lane);
    issue how = {chk_row(cluster->g, row), chk_row(cluster->p, row), chk_row(cluster->e, row), token,
                 operation->site, (int32_t)slot, gang->cta, {0}, {0}, NULL};
    int asks_lanes = chk_has_rule(cluster, CHK_RULES_LANES);
    how.view = (chk_view){cluster, how.g, asks_lanes ? (int32_t)slot : -1, CHK_EVERY(lane), 1};
    how.visible = (chk_view){cluster, how.p, asks_lanes ? (int32_t)slot : -1, CHK_EVERY(lane), 0};
    return how;
}

/* R7-lane: a thread's products are ordered, and its commits cover them; those of two threads of a warp are not. `e`: of
 * the thread, `count`: of products before. */
static void check_tensor_lane(chk_cluster *cluster, const chk_gang *gang, uint32_t slot, uint32_t lane,
                              const int32_t *e, int32_t component, int32_t count, int32_t site) {
    int8_t before = cluster->tensor_lane[slot];
    if (!chk_has_rule(cluster, CHK_RULES_LANES) || !before || before == (int8_t)(lane + 1)) return;
    if (e[component] >= count) return;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_TENSOR_LANES, site);
    finding.lane = (int32_t)lane;
    finding.other_lane = before - 1;
    chk_add(cluster->launch, &finding);
}

chk_status chk_commit(chk_cluster *cluster, const chk_gang *gang, uint32_t lane, int32_t site) {
    if (!chk_gang_ok(cluster, gang) || lane >= CHK_WARP_LANES) return CHK_BAD_INPUT;
    uint32_t slot = chk_gang_slot(cluster, gang, 0);
    int32_t component = cluster->slot_component[CHK_MMA][slot] - 1;
    if (component < 0) return CHK_OK;
    const int32_t *e = chk_row(cluster->e, chk_row_of(cluster, slot, lane));
    check_tensor_lane(cluster, gang, slot, lane, e, component, cluster->now[component], site);
    return CHK_OK;
}

chk_status chk_issue(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation, chk_token *token) {
    *token = (chk_token){-1, 0, 0};
    if (!operation_ok(cluster, gang, operation)) return CHK_BAD_INPUT;
    chk_token stamped = {0};
    chk_status status = stamp(cluster, gang, operation, &stamped);
    if (status != CHK_OK) return status;
    *token = stamped;
    chk_order_issued(cluster, operation);
    issue how = issue_of(cluster, gang, operation, stamped);
    if (operation->channel == CHK_CP_ASYNC) cluster->copying[how.slot] |= chk_mask(gang, 0);
    if (operation->channel != CHK_MMA) return all_operands(cluster, gang, operation, &how);
    uint32_t lane = issuing_lane(gang);
    check_tensor_lane(cluster, gang, (uint32_t)how.slot, lane, how.e, stamped.component, stamped.count - 1,
                      operation->site);
    cluster->tensor_lane[how.slot] = (int8_t)(lane + 1);
    /* Products of one thread run in order: each sees the accumulators of the ones before. */
    int32_t own[3][CHK_COMPONENTS];
    size_t size = (size_t)cluster->num_components * sizeof(int32_t);
    memcpy(own[0], how.g, size);
    memcpy(own[1], how.p, size);
    memcpy(own[2], how.e, size);
    own[0][stamped.component] = own[1][stamped.component] = stamped.count;
    if (!chk_has_rule(cluster, CHK_RULES_TENSOR_ORDER)) own[2][stamped.component] = stamped.count;
    how.g = how.view.clock = own[0];
    how.p = how.visible.clock = own[1];
    how.e = own[2];
    return all_operands(cluster, gang, operation, &how);
}
