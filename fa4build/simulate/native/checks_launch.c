/* Launches and clusters: memory, and what is made and given back. */
#include <stdlib.h>

#include "checks_order.h"
#include "checks_state.h"

void *chk_take(chk_launch *launch, size_t count, size_t size) {
    if (count == 0 || count > SIZE_MAX / size) return NULL;
    if (launch->max_bytes && (count * size > launch->max_bytes - launch->used_bytes)) return NULL;
    void *memory = calloc(count, size);
    if (memory) launch->used_bytes += count * size;
    return memory;
}

void chk_give(chk_launch *launch, void *memory, size_t count, size_t size) {
    if (!memory) return;
    free(memory);
    launch->used_bytes -= count * size;
}

int chk_grow(chk_launch *launch, void **array, size_t *capacity, size_t wanted, size_t size) {
    if (wanted <= *capacity) return 1;
    size_t larger = *capacity ? 2 * *capacity : 16;
    if (larger < wanted) larger = wanted;
    void *fresh = chk_take(launch, larger, size);
    if (!fresh) return 0;
    if (*capacity) memcpy(fresh, *array, *capacity * size);
    chk_give(launch, *array, *capacity, size);
    *array = fresh;
    *capacity = larger;
    return 1;
}

static int copy_buffers(chk_launch *launch, const chk_buffer *buffers, size_t num_buffers) {
    if (!num_buffers) return 1;
    launch->buffers = chk_take(launch, num_buffers, sizeof *buffers);
    launch->visited = chk_take(launch, num_buffers, sizeof *launch->visited);
    if (!launch->buffers || !launch->visited) return 0;
    memcpy(launch->buffers, buffers, num_buffers * sizeof *buffers);
    launch->num_buffers = num_buffers;
    for (size_t i = 0; i < num_buffers; i++) launch->has_unwritten |= buffers[i].written != NULL;
    return 1;
}

chk_launch *chk_launch_create(const chk_buffer *buffers, size_t num_buffers, size_t max_bytes) {
    chk_launch *launch = calloc(1, sizeof *launch);
    if (!launch) return NULL;
    launch->max_bytes = max_bytes;
    launch->findings = chk_take(launch, CHK_MAX_FINDINGS, sizeof *launch->findings);
    launch->seen = chk_take(launch, 2 * CHK_MAX_FINDINGS, sizeof *launch->seen);
    if (!launch->findings || !launch->seen || !copy_buffers(launch, buffers, num_buffers)) {
        chk_launch_destroy(launch);
        return NULL;
    }
    return launch;
}

void chk_launch_destroy(chk_launch *launch) {
    if (!launch) return;
    chk_order_end(launch);
    free(launch->buffers);
    free(launch->visited);
    free(launch->findings);
    free(launch->seen);
    free(launch);
}

int chk_has_unwritten(const chk_launch *launch) { return launch->has_unwritten; }

/* ---- clusters ---------------------------------------------------------------------------------------------------- */

static int create_clocks(chk_cluster *cluster) {
    chk_launch *launch = cluster->launch;
    if (!chk_rows_create(cluster)) return 0;
    for (int kind = 0; kind < CHK_SLOT_KINDS; kind++) {
        cluster->slot_component[kind] = chk_take(launch, cluster->num_slots, sizeof(int16_t));
        if (!cluster->slot_component[kind]) return 0;
    }
    cluster->synced = chk_take(launch, cluster->num_slots, 1);
    return cluster->synced != NULL;
}

static int create_cta(chk_cluster *cluster, chk_cta *cta) {
    for (int i = 0; i < 16; i++) cta->named[i].clock = -1;
    cta->barrier_component = chk_take(cluster->launch, cluster->shared_limit / 8 + 1, sizeof(int16_t));
    return cta->barrier_component &&
           chk_shadow_create(cluster->launch, &cta->shared, cluster->shared_limit / 16 + 1, chk_has_rule(cluster, CHK_RULES_LANES));
}

static chk_status start_warps(chk_cluster *cluster) {
    for (uint32_t slot = 0; slot < cluster->num_slots; slot++) {
        int32_t component = chk_component(cluster, CHK_WARP, slot, 0);
        if (component < 0) return cluster->failed;
        cluster->now[component] = chk_row(cluster->g, slot)[component] = 1;
        chk_row(cluster->e, slot)[component] = 1;
        if (chk_has_rule(cluster, CHK_RULES_LANES)) cluster->now[component]++; /* nothing of it was met yet */
    }
    return CHK_OK;
}

static chk_status fill_cluster(chk_cluster *cluster) {
    if (!create_clocks(cluster)) return CHK_NO_MEMORY;
    cluster->ctas = chk_take(cluster->launch, cluster->num_ctas, sizeof *cluster->ctas);
    if (!cluster->ctas) return CHK_NO_MEMORY;
    for (uint32_t i = 0; i < cluster->num_ctas; i++)
        if (!create_cta(cluster, &cluster->ctas[i])) return CHK_NO_MEMORY;
    return start_warps(cluster);
}

chk_status chk_cluster_create(chk_launch *launch, uint32_t index, uint32_t num_ctas, uint32_t warps_a_cta,
                              uint32_t shared_limit, chk_cluster **out) {
    *out = NULL;
    if (!num_ctas || num_ctas > CHK_MAX_CTAS || !warps_a_cta || warps_a_cta > CHK_MAX_WARPS) return CHK_BAD_INPUT;
    if (shared_limit > 1u << 24) return CHK_BAD_INPUT;
    chk_cluster *cluster = chk_take(launch, 1, sizeof *cluster);
    if (!cluster) return CHK_NO_MEMORY;
    cluster->launch = launch;
    cluster->index = index;
    cluster->num_ctas = num_ctas;
    cluster->warps_a_cta = warps_a_cta;
    cluster->num_slots = num_ctas * warps_a_cta;
    cluster->shared_limit = shared_limit;
    cluster->free_clock = cluster->cluster_arrivals = cluster->cluster_done = -1;
    chk_status status = fill_cluster(cluster);
    if (status != CHK_OK) {
        chk_cluster_destroy(cluster);
        return status;
    }
    cluster->order = launch->order ? chk_order_cluster(cluster) : NULL;
    *out = cluster;
    return CHK_OK;
}

void chk_launch_rules(chk_launch *launch, uint32_t rules) {
    launch->rules = rules;
    if (rules & CHK_RULES_ORDER) chk_order_begin(launch);
}

chk_status chk_lanes_present(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t lanes) {
    if (cta >= cluster->num_ctas || warp >= cluster->warps_a_cta || !lanes) return CHK_BAD_INPUT;
    uint32_t slot = chk_slot(cluster, cta, warp);
    cluster->present[slot] = cluster->row_lanes[slot] = lanes;
    return CHK_OK;
}

static void destroy_ctas(chk_cluster *cluster) {
    chk_launch *launch = cluster->launch;
    for (uint32_t i = 0; cluster->ctas && i < cluster->num_ctas; i++) {
        chk_cta *cta = &cluster->ctas[i];
        chk_give(launch, cta->barrier_component, cluster->shared_limit / 8 + 1, sizeof(int16_t));
        chk_shadow_destroy(launch, &cta->shared);
        if (cta->tensor) chk_tensor_destroy(cluster, cta->tensor);
    }
    chk_give(launch, cluster->ctas, cluster->num_ctas, sizeof *cluster->ctas);
}

static void destroy_clocks(chk_cluster *cluster) {
    chk_launch *launch = cluster->launch;
    chk_rows_destroy(cluster);
    for (int kind = 0; kind < CHK_SLOT_KINDS; kind++)
        chk_give(launch, cluster->slot_component[kind], cluster->num_slots, sizeof(int16_t));
    chk_give(launch, cluster->synced, cluster->num_slots, 1);
    for (size_t i = 0; i < cluster->num_clocks; i++)
        chk_give(launch, cluster->clocks[i].counts, CHK_PARTS * (size_t)cluster->clocks[i].capacity, sizeof(int32_t));
    chk_give(launch, cluster->clocks, cluster->clock_capacity, sizeof *cluster->clocks);
}

void chk_cluster_destroy(chk_cluster *cluster) {
    if (!cluster) return;
    chk_launch *launch = cluster->launch;
    chk_order_forget(cluster);
    destroy_ctas(cluster);
    destroy_clocks(cluster);
    chk_give(launch, cluster->barriers, cluster->barrier_capacity, sizeof *cluster->barriers);
    chk_give(launch, cluster->unfenced, cluster->unfenced_capacity, sizeof *cluster->unfenced);
    chk_give(launch, cluster->generations, cluster->generation_capacity, sizeof *cluster->generations);
    chk_give(launch, cluster->semaphores, cluster->semaphore_capacity, sizeof *cluster->semaphores);
    chk_give(launch, cluster, 1, sizeof *cluster);
}
