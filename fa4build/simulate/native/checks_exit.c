/* What must be over, freed or balanced when threads exit: R5, R6, R8, R12, R14. The twin of exit_rules.py. */
#include "checks_state.h"

#define REGISTER_FILE 65536 /* registers of one multiprocessor */

static int source_is_free(const chk_cluster *cluster, uint32_t slot, const chk_bulk_op *op) {
    if (op->token.component < 0) return op->has_read;
    return chk_row(cluster->g, chk_row_of(cluster, slot, op->lane))[op->token.component] >= op->token.count;
}

static chk_finding of_warp(const chk_cluster *cluster, uint32_t cta, uint32_t warp, chk_kind kind) {
    chk_finding finding = chk_finding_of_cta(cluster, cta, kind);
    finding.first_warp = finding.last_warp = (int32_t)warp;
    finding.num_warps = 1;
    return finding;
}

/* The first operation of each leaving lane that is not over. */
static void check_lanes(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t leaving, const chk_bulk_op *ops,
                        size_t count, chk_kind kind) {
    uint32_t said = 0, slot = chk_slot(cluster, cta, warp);
    for (size_t i = 0; i < count; i++) {
        uint32_t lane = (uint32_t)1 << ops[i].lane;
        int is_over = kind == CHK_EXIT_BULK_READ ? source_is_free(cluster, slot, &ops[i]) : ops[i].committed;
        if (is_over || !(leaving & lane) || (said & lane)) continue;
        said |= lane;
        chk_finding finding = of_warp(cluster, cta, warp, kind);
        finding.extra[0] = ops[i].name;
        chk_add(cluster->launch, &finding);
    }
}

static int ops_ok(const chk_cluster *cluster, const chk_bulk_op *ops, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (ops[i].lane >= CHK_WARP_LANES || ops[i].token.component >= cluster->num_components) return 0;
    return 1;
}

chk_status chk_warp_exit(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t leaving,
                         const chk_bulk_op *grouped, size_t num_grouped, const chk_bulk_op *open, size_t num_open,
                         int wgmma_pending) {
    if (cta >= cluster->num_ctas || warp >= cluster->warps_a_cta) return CHK_BAD_INPUT;
    if (!ops_ok(cluster, grouped, num_grouped) || !ops_ok(cluster, open, num_open)) return CHK_BAD_INPUT;
    if (!leaving) return CHK_OK;
    check_lanes(cluster, cta, warp, leaving, grouped, num_grouped, CHK_EXIT_BULK_READ);
    check_lanes(cluster, cta, warp, leaving, open, num_open, CHK_EXIT_BULK_OPEN);
    if (!wgmma_pending) return CHK_OK;
    chk_finding finding = of_warp(cluster, cta, warp, CHK_EXIT_WGMMA);
    chk_add(cluster->launch, &finding);
    return CHK_OK;
}

/* ---- CTAs -------------------------------------------------------------------------------------------------------- */

static void check_barrier(chk_cluster *cluster, uint32_t cta, const chk_barrier_state *barrier) {
    if (!barrier->tx && barrier->pending == barrier->expected) return;
    chk_finding finding =
        chk_finding_of_cta(cluster, cta, barrier->tx ? CHK_EXIT_BARRIER_BYTES : CHK_EXIT_BARRIER_HALF);
    finding.address = barrier->offset;
    finding.extra[0] = barrier->phase;
    finding.extra[1] = (int32_t)barrier->pending;
    finding.extra[2] = (int32_t)barrier->expected;
    finding.size = (int32_t)barrier->tx;
    chk_add(cluster->launch, &finding);
}

static void check_named(chk_cluster *cluster, uint32_t cta, uint32_t index, const chk_named_state *named) {
    if (!named->arrived) return;
    chk_finding finding = chk_finding_of_cta(cluster, cta, CHK_NOTE_NAMED_LEFT);
    finding.extra[0] = (int32_t)index;
    finding.extra[1] = (int32_t)named->arrived;
    finding.extra[2] = (int32_t)named->required;
    chk_add(cluster->launch, &finding);
}

static int is_like(const chk_cta_end *end, uint32_t a, uint32_t b) {
    return end->num_registers[a] == end->num_registers[b] &&
           (!end->num_registers[a] ||
            !memcmp(end->registers[a], end->registers[b], end->num_registers[a] * sizeof(uint16_t)));
}

/* Budgets are equal within warpgroups. */
static void check_budgets(chk_cluster *cluster, uint32_t cta, const chk_cta_end *end) {
    for (uint32_t first = 0; first < cluster->warps_a_cta; first += 4) {
        uint32_t warp = first + 1;
        while (warp < first + 4 && warp < cluster->warps_a_cta && is_like(end, first, warp)) warp++;
        if (warp == first + 4 || warp >= cluster->warps_a_cta) continue;
        chk_finding finding = chk_finding_of_cta(cluster, cta, CHK_EXIT_BUDGETS);
        finding.first_warp = (int32_t)first;
        chk_add(cluster->launch, &finding);
    }
}

/* All budgets together fit the multiprocessor, where every warp has set one. */
static void check_register_file(chk_cluster *cluster, uint32_t cta, const chk_cta_end *end) {
    int64_t total = 0;
    for (uint32_t warp = 0; warp < cluster->warps_a_cta; warp++) {
        if (!end->num_registers[warp]) return;
        total += CHK_WARP_LANES * end->registers[warp][end->num_registers[warp] - 1];
    }
    if (total <= REGISTER_FILE) return;
    chk_finding finding = chk_finding_of_cta(cluster, cta, CHK_EXIT_REGISTER_FILE);
    finding.extra[0] = (int32_t)total;
    chk_add(cluster->launch, &finding);
}

chk_status chk_cta_exit(chk_cluster *cluster, uint32_t cta, const chk_cta_end *end) {
    if (cta >= cluster->num_ctas) return CHK_BAD_INPUT;
    if (cluster->failed != CHK_OK && cluster->launch->rules) {
        chk_finding finding = chk_finding_of_cta(cluster, cta, CHK_OUT_OF_ROOM);
        finding.extra[0] = (int32_t)cluster->failed;
        chk_add(cluster->launch, &finding);
    }
    for (size_t i = 0; i < end->num_barriers; i++) check_barrier(cluster, cta, &end->barriers[i]);
    for (uint32_t i = 0; i < 16; i++) check_named(cluster, cta, i, &end->named[i]);
    if (end->tmem_blocks) {
        chk_finding finding = chk_finding_of_cta(cluster, cta, CHK_EXIT_TMEM);
        chk_add(cluster->launch, &finding);
    }
    if (!end->num_registers) return CHK_OK;
    check_budgets(cluster, cta, end);
    check_register_file(cluster, cta, end);
    return CHK_OK;
}
