/* R1 to R5, R9 and R10 of shared memory: generic accesses. The twin of memory_rules.py. */
#include "checks_state.h"

/* Neighbouring lanes of one warp that touch one granule. `first`: the first of them among all active lanes. */
typedef struct {
    uint32_t cell, bits, slot;
    uint16_t first, count;
} run;

typedef struct {
    run runs[CHK_MAX_WARPS * CHK_WARP_LANES];
    uint8_t lanes[CHK_MAX_WARPS * CHK_WARP_LANES]; /* lane in its warp of each active lane */
    uint32_t num_runs, num_lanes;
} access_list;

/* What one access does wrong; -1: nothing of that kind. Indexes of runs, in order of the lanes. */
typedef struct {
    int32_t barrier, write, race, read, missing;
    uint8_t race_lane;
} faults;

static uint32_t bits_of(uint32_t offset, uint32_t size) {
    return (uint32_t)((((uint64_t)1 << size) - 1) << (offset & 15)) & CHK_FULL;
}

/* Adds a lane to the list: 0 when it is out of bounds. */
static inline int add_lane(const chk_cluster *cluster, access_list *list, uint32_t slot, uint32_t lane,
                           uint32_t offset, uint32_t size) {
    uint32_t cell = offset >> 4, bits = bits_of(offset, size);
    if (cell > cluster->shared_limit / 16) return 0;
    run *last = list->num_runs ? &list->runs[list->num_runs - 1] : NULL;
    if (last && last->cell == cell && last->slot == slot) {
        last->bits |= bits;
        last->count++;
    } else {
        list->runs[list->num_runs++] = (run){cell, bits, slot, (uint16_t)list->num_lanes, 1};
    }
    list->lanes[list->num_lanes++] = (uint8_t)lane;
    return 1;
}

static int list_access(const chk_cluster *cluster, const chk_gang *gang, const uint32_t *offsets, uint32_t size,
                       access_list *list) {
    list->num_runs = list->num_lanes = 0;
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        for (uint32_t left = chk_mask(gang, k); left; left &= left - 1)
            if (!add_lane(cluster, list, slot, (uint32_t)__builtin_ctz(left), offsets[list->num_lanes], size))
                return 0;
    }
    return 1;
}

/* R10: the first lane of a run whose bytes are exactly what another lane of its warp wrote since the lanes met. */
static int racing_lane(const access_list *list, const run *one, const chk_cell *cell, const uint32_t *offsets,
                       uint32_t size) {
    for (uint32_t i = one->first; i < (uint32_t)one->first + one->count; i++)
        if (cell->write_mask == bits_of(offsets[i], size) && cell->write_lane && cell->write_lane - 1 != list->lanes[i])
            return list->lanes[i];
    return -1;
}

static inline void look_at(const chk_cluster *cluster, const chk_shadow *shadow, const access_list *list, int32_t i,
                           const uint32_t *offsets, uint32_t size, int is_write, faults *found) {
    const run *one = &list->runs[i];
    const chk_cell *cell = &shadow->cells[one->cell];
    const int32_t *clock = chk_row(cluster->g, one->slot);
    if ((cell->barrier_bytes & one->bits) && found->barrier < 0) found->barrier = i;
    if (found->write < 0 && chk_write_unordered(cell, one->bits, clock)) found->write = i;
    if (found->race < 0 && cell->writer == (int32_t)one->slot + 1 && (cell->write_mask & one->bits) &&
        cell->write_epoch == cluster->lane_epochs[one->slot]) {
        int lane = racing_lane(list, one, cell, offsets, size);
        if (lane >= 0) found->race = i, found->race_lane = (uint8_t)lane;
    }
    if (is_write) {
        if (found->read < 0 && chk_reads_unordered(shadow, one->cell, one->bits, clock)) found->read = i;
    } else if (found->missing < 0 && (one->bits & ~(uint32_t)cell->initialised)) {
        found->missing = i;
    }
}

/* ---- reports -------------------------------------------------------------------------------------------------------- */

static void report_plain(chk_cluster *cluster, const chk_gang *gang, chk_kind kind, uint32_t cell, int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, kind, site);
    finding.address = 16 * (int64_t)cell;
    chk_add(cluster->launch, &finding);
}

static void report_write(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, chk_kind kind,
                         uint32_t cell, int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, kind, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].write_site;
    chk_name_agent(cluster, &finding, shadow->cells[cell].writer - 1);
    chk_add(cluster->launch, &finding);
}

static void report_read(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, uint32_t cell,
                        const int32_t *clock, int32_t site) {
    int32_t count = 0;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_SHARED_RACE_OVERWRITE, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].read_site;
    chk_name_agent(cluster, &finding, chk_first_reader(shadow, cell, clock, &count));
    chk_add(cluster->launch, &finding);
}

static void report_race(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, uint32_t cell,
                        int32_t lane, int32_t site, int is_write) {
    chk_finding finding = chk_finding_at(cluster, gang, CHK_NOTE_LANE_RACE, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].write_site;
    finding.lane = lane;
    finding.other_lane = shadow->cells[cell].write_lane - 1;
    finding.extra[0] = is_write ? CHK_OVERWRITES : CHK_READS;
    chk_add(cluster->launch, &finding);
}

static void report_faults(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, const run *runs,
                          const faults *found, int32_t site, int is_write) {
    if (found->barrier >= 0)
        report_plain(cluster, gang, is_write ? CHK_BARRIER_BYTES_WRITE : CHK_BARRIER_BYTES_READ,
                     runs[found->barrier].cell, site);
    if (found->write >= 0)
        report_write(cluster, gang, shadow, is_write ? CHK_SHARED_RACE_WRITE : CHK_SHARED_RACE_READ,
                     runs[found->write].cell, site);
    if (found->race >= 0)
        report_race(cluster, gang, shadow, runs[found->race].cell, found->race_lane, site, is_write);
    if (found->read >= 0)
        report_read(cluster, gang, shadow, runs[found->read].cell, chk_row(cluster->g, runs[found->read].slot), site);
    if (found->missing >= 0) report_plain(cluster, gang, CHK_SHARED_UNWRITTEN, runs[found->missing].cell, site);
}

/* ---- records -------------------------------------------------------------------------------------------------------- */

static void record_writes(chk_cluster *cluster, chk_shadow *shadow, const access_list *list, int32_t site) {
    for (uint32_t i = 0; i < list->num_runs; i++) {
        const run *one = &list->runs[i];
        chk_cell *cell = &shadow->cells[one->cell];
        chk_note_write(cell, one->bits, (int32_t)one->slot, cluster->now[one->slot], site, 0);
        cell->write_lane = (uint8_t)(list->lanes[one->first + one->count - 1] + 1);
        cell->write_epoch = cluster->lane_epochs[one->slot];
    }
}

static chk_status record_reads(chk_cluster *cluster, chk_shadow *shadow, const access_list *list, int32_t site) {
    for (uint32_t i = 0; i < list->num_runs; i++) {
        const run *one = &list->runs[i];
        int column = chk_reader_column(cluster->launch, shadow, (int32_t)one->slot);
        if (column < 0) return CHK_NO_MEMORY;
        chk_note_read(shadow, one->cell, one->bits, (uint32_t)column, cluster->now[one->slot], site);
    }
    return CHK_OK;
}

chk_status chk_shared_access(chk_cluster *cluster, const chk_gang *gang, const uint32_t *offsets, uint32_t size,
                             int32_t site, int is_write) {
    if (!chk_gang_ok(cluster, gang) || !size || size > 32) return CHK_BAD_INPUT;
    access_list list;
    if (!list_access(cluster, gang, offsets, size, &list)) return CHK_OK;
    chk_shadow *shadow = &cluster->ctas[gang->cta].shared;
    faults found = {-1, -1, -1, -1, -1, 0};
    for (uint32_t i = 0; i < list.num_runs; i++)
        look_at(cluster, shadow, &list, (int32_t)i, offsets, size, is_write, &found);
    if ((found.barrier & found.write & found.race & found.read & found.missing) != -1)
        report_faults(cluster, gang, shadow, list.runs, &found, site, is_write);
    if (!is_write) return record_reads(cluster, shadow, &list, site);
    record_writes(cluster, shadow, &list, site);
    return CHK_OK;
}

/* ---- the shared memory of asynchronous operations --------------------------------------------------------------------- */

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

static void report_async(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow,
                         const async_faults *found, const issue *how, int is_write) {
    int32_t site = how->site;
    if (found->barrier >= 0)
        report_plain(cluster, gang, CHK_BARRIER_BYTES_ASYNC, (uint32_t)found->barrier, site);
    if (found->write >= 0)
        report_write(cluster, gang, shadow, is_write ? CHK_SHARED_RACE_WRITE : CHK_SHARED_RACE_READ,
                     (uint32_t)found->write, site);
    if (found->hidden >= 0)
        report_write(cluster, gang, shadow, is_write ? CHK_PROXY_WRITE : CHK_PROXY_READ, (uint32_t)found->hidden, site);
    if (found->read >= 0) report_read(cluster, gang, shadow, (uint32_t)found->read, how->g, site);
    if (found->missing >= 0) report_plain(cluster, gang, CHK_SHARED_UNWRITTEN_ASYNC, (uint32_t)found->missing, site);
}

static chk_status shared_operand(chk_cluster *cluster, const chk_gang *gang, const chk_operand *operand,
                                 const issue *how, int is_write, int asks_proxy) {
    if (!operand_ok(cluster, operand)) return CHK_BAD_INPUT;
    chk_shadow *shadow = &cluster->ctas[operand->cta].shared;
    /* As in the Python twin: the barriers of the issuing CTA, whoever owns the granules. */
    const chk_cell *barriers = cluster->ctas[gang->cta].shared.cells;
    async_faults found = {-1, -1, -1, -1, -1};
    look_at_async(shadow, barriers, operand, how, is_write, asks_proxy, &found);
    report_async(cluster, gang, shadow, &found, how, is_write);
    int column = is_write ? 0 : chk_reader_column(cluster->launch, shadow, how->token.component);
    if (column < 0) return CHK_NO_MEMORY;
    for (uint64_t i = 0; i < operand->count; i++) {
        uint32_t at = cell_at(operand, i);
        if (!is_write) {
            chk_note_read(shadow, at, CHK_FULL, (uint32_t)column, how->token.count, how->site);
            continue;
        }
        chk_note_write(&shadow->cells[at], CHK_FULL, how->token.component, how->token.count, how->site, asks_proxy);
        chk_forget_reads(shadow, at);
    }
    return CHK_OK;
}

/* ---- asynchronous operations ------------------------------------------------------------------------------------------ */

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
