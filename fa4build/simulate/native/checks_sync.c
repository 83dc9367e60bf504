/* What orders warps: groups, mbarriers, named and cluster barriers, fences, words of global memory. The twin of
 * observer.py. */
#include "checks_state.h"

chk_status chk_ops_waited(chk_cluster *cluster, const chk_gang *gang, const chk_token *tokens, size_t count) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    for (size_t i = 0; i < count; i++)
        if (tokens[i].component >= cluster->num_components) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang)
    for (size_t i = 0; i < count; i++)
        if (tokens[i].component >= 0)
            chk_clock_reach(cluster, chk_gang_slot(cluster, gang, k), tokens[i].component, tokens[i].count);
    return CHK_OK;
}

/* Merges the clocks of a gang's active warps into one that others will take (a release). */
static chk_status collect(chk_cluster *cluster, const chk_gang *gang, int32_t *clock) {
    CHK_EACH_ACTIVE(k, gang)
    if (!chk_clock_collect(cluster, clock, chk_gang_slot(cluster, gang, k))) return cluster->failed;
    return CHK_OK;
}

static void join(chk_cluster *cluster, const chk_gang *gang, int32_t clock) {
    CHK_EACH_ACTIVE(k, gang) chk_clock_join(cluster, chk_gang_slot(cluster, gang, k), clock);
}

/* ---- mbarriers --------------------------------------------------------------------------------------------------- */

/* The barrier of a handle, if it is one and the phase is possible. */
static chk_barrier *barrier_of(chk_cluster *cluster, int32_t barrier, int32_t phase) {
    if (barrier < 0 || (size_t)barrier >= cluster->num_barriers || phase < 0 || phase == INT32_MAX) return NULL;
    return &cluster->barriers[barrier];
}

/* The clock of a phase: a later phase drops the one it takes the place of. */
static int32_t *phase_clock(chk_cluster *cluster, chk_barrier *barrier, int32_t phase) {
    int place = phase % 2;
    if (barrier->phase[place] != phase) {
        chk_clock_drop(cluster, barrier->clock[place]);
        barrier->clock[place] = -1;
        barrier->phase[place] = phase;
    }
    return &barrier->clock[place];
}

static chk_unfenced *unfenced_at(const chk_cluster *cluster, uint32_t cta, uint32_t offset) {
    for (size_t i = 0; i < cluster->num_unfenced; i++)
        if (cluster->unfenced[i].cta == cta && cluster->unfenced[i].offset == offset) return &cluster->unfenced[i];
    return NULL;
}

static void remove_unfenced(chk_cluster *cluster, chk_unfenced *entry) {
    *entry = cluster->unfenced[--cluster->num_unfenced];
}

void chk_note_unfenced(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t site) {
    chk_unfenced *entry = unfenced_at(cluster, barrier->cta, barrier->offset);
    if (!entry) return;
    chk_finding finding = gang ? chk_finding_at(cluster, gang, CHK_NOTE_UNFENCED_INIT, site)
                               : chk_finding_of_cta(cluster, barrier->cta, CHK_NOTE_UNFENCED_INIT);
    finding.other = entry->site;
    finding.address = barrier->offset;
    finding.extra[0] = (int32_t)barrier->cta;
    remove_unfenced(cluster, entry);
    chk_add(cluster->launch, &finding);
}

static chk_status note_init(chk_cluster *cluster, const chk_gang *gang, uint32_t slot, uint32_t offset, int32_t site) {
    chk_unfenced *entry = unfenced_at(cluster, gang->cta, offset);
    if (!entry) {
        if (!chk_grow(cluster->launch, (void **)&cluster->unfenced, &cluster->unfenced_capacity,
                      cluster->num_unfenced + 1, sizeof *cluster->unfenced))
            return CHK_NO_MEMORY;
        entry = &cluster->unfenced[cluster->num_unfenced++];
    }
    *entry = (chk_unfenced){gang->cta, offset, (int32_t)slot, site};
    return CHK_OK;
}

chk_status chk_barrier_created(chk_cluster *cluster, const chk_gang *gang, uint32_t offset, int32_t site,
                               int32_t *barrier) {
    *barrier = -1;
    if (!chk_gang_ok(cluster, gang) || offset % 8 || offset >= cluster->shared_limit) return CHK_BAD_INPUT;
    uint32_t k = 0;
    while (k < gang->num_warps && !chk_mask(gang, k)) k++;
    if (k == gang->num_warps) return CHK_BAD_INPUT;
    if (!chk_grow(cluster->launch, (void **)&cluster->barriers, &cluster->barrier_capacity, cluster->num_barriers + 1,
                  sizeof *cluster->barriers))
        return CHK_NO_MEMORY;
    chk_status status = note_init(cluster, gang, chk_gang_slot(cluster, gang, k), offset, site);
    if (status != CHK_OK) return status;
    chk_cell *cell = &cluster->ctas[gang->cta].shared.cells[offset / 16];
    uint16_t bits = (uint16_t)(0xFFu << offset % 16);
    cell->barrier_bytes |= bits;
    cell->initialised |= bits;
    *barrier = (int32_t)cluster->num_barriers++;
    cluster->barriers[*barrier] = (chk_barrier){gang->cta, offset, -1, {-1, -1}, {-1, -1}};
    return CHK_OK;
}

static void note_remote(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t site) {
    int is_synced = 1;
    CHK_EACH_ACTIVE(k, gang) is_synced &= cluster->synced[chk_gang_slot(cluster, gang, k)];
    if (is_synced) return;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_NOTE_EARLY_REMOTE, site);
    finding.extra[0] = (int32_t)barrier->cta;
    chk_add(cluster->launch, &finding);
}

static void note_unobserved(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t phase,
                            int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, CHK_NOTE_UNOBSERVED, site);
    finding.address = barrier->offset;
    finding.extra[0] = phase;
    finding.extra[1] = (int32_t)barrier->cta;
    chk_add(cluster->launch, &finding);
}

chk_status chk_arrive(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase, uint32_t pending,
                      uint32_t expected, chk_sync sync, int32_t site) {
    (void)sync;
    chk_barrier *at = barrier_of(cluster, barrier, phase);
    if (!at || !chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    if (at->cta != gang->cta) {
        chk_note_unfenced(cluster, gang, at, site);
        note_remote(cluster, gang, at, site);
    }
    if (phase > 0 && at->observed < phase - 1 && pending == expected) note_unobserved(cluster, gang, at, phase, site);
    return collect(cluster, gang, phase_clock(cluster, at, phase));
}

chk_status chk_deferred_arrive(chk_cluster *cluster, int32_t barrier, int32_t phase, int32_t clock) {
    chk_barrier *at = barrier_of(cluster, barrier, phase);
    if (!at || !chk_is_taken(cluster, clock)) return CHK_BAD_INPUT;
    chk_note_unfenced(cluster, NULL, at, -1);
    return chk_clock_merge(cluster, phase_clock(cluster, at, phase), clock) ? CHK_OK : cluster->failed;
}

chk_status chk_wait_passed(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase,
                           chk_sync sync, int32_t site) {
    (void)sync, (void)site;
    chk_barrier *at = barrier_of(cluster, barrier, phase);
    if (!at || !chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    int32_t ended = phase - 1, component = chk_component(cluster, CHK_MBARRIER, at->cta, at->offset);
    if (component < 0) return cluster->failed;
    if (at->observed < ended) at->observed = ended;
    int32_t clock = ended >= 0 && at->phase[ended % 2] == ended ? at->clock[ended % 2] : -1;
    join(cluster, gang, clock);
    CHK_EACH_ACTIVE(k, gang) chk_clock_reach(cluster, chk_gang_slot(cluster, gang, k), component, phase);
    return CHK_OK;
}

/* ---- named barriers ---------------------------------------------------------------------------------------------- */

static uint32_t num_active(const chk_gang *gang) {
    uint32_t count = 0;
    CHK_EACH_ACTIVE(k, gang) count++;
    return count;
}

chk_status chk_named_arrive(chk_cluster *cluster, const chk_gang *gang, uint32_t index, uint32_t generation,
                            int is_sync) {
    (void)generation;
    if (!chk_gang_ok(cluster, gang) || index >= 16) return CHK_BAD_INPUT;
    chk_warp_barrier(cluster, gang);
    chk_named *named = &cluster->ctas[gang->cta].named[index];
    if (is_sync) named->waiting += num_active(gang);
    return collect(cluster, gang, &named->clock);
}

chk_status chk_named_completed(chk_cluster *cluster, uint32_t cta, uint32_t index, uint32_t generation) {
    if (cta >= cluster->num_ctas || index >= 16) return CHK_BAD_INPUT;
    chk_named *named = &cluster->ctas[cta].named[index];
    chk_named over = *named;
    *named = (chk_named){-1, 0};
    if (!over.waiting) { /* nobody will ask for it */
        chk_clock_drop(cluster, over.clock);
        return CHK_OK;
    }
    if (!chk_grow(cluster->launch, (void **)&cluster->generations, &cluster->generation_capacity,
                  cluster->num_generations + 1, sizeof *cluster->generations))
        return CHK_NO_MEMORY;
    chk_generation ended = {cta, index, generation, over.waiting, over.clock};
    cluster->generations[cluster->num_generations++] = ended;
    return CHK_OK;
}

static void leave_generation(chk_cluster *cluster, chk_generation *over, uint32_t warps) {
    over->waiting -= warps < over->waiting ? warps : over->waiting;
    if (over->waiting) return;
    chk_clock_drop(cluster, over->clock);
    *over = cluster->generations[--cluster->num_generations];
}

chk_status chk_named_passed(chk_cluster *cluster, const chk_gang *gang, uint32_t index, uint32_t generation) {
    if (!chk_gang_ok(cluster, gang) || index >= 16) return CHK_BAD_INPUT;
    for (size_t i = 0; i < cluster->num_generations; i++) {
        chk_generation *over = &cluster->generations[i];
        if (over->cta != gang->cta || over->index != index || over->generation != generation) continue;
        join(cluster, gang, over->clock);
        leave_generation(cluster, over, num_active(gang));
        break;
    }
    return CHK_OK;
}

/* ---- cluster barrier --------------------------------------------------------------------------------------------- */

chk_status chk_cluster_arrive(chk_cluster *cluster, const chk_gang *gang, chk_sync sync) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    chk_warp_barrier(cluster, gang);
    return sync.order == CHK_RELAXED ? CHK_OK : collect(cluster, gang, &cluster->cluster_arrivals);
}

chk_status chk_cluster_completed(chk_cluster *cluster) {
    chk_clock_drop(cluster, cluster->cluster_done);
    cluster->cluster_done = cluster->cluster_arrivals;
    cluster->cluster_arrivals = -1;
    return CHK_OK;
}

chk_status chk_cluster_passed(chk_cluster *cluster, const chk_gang *gang) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang) cluster->synced[chk_gang_slot(cluster, gang, k)] = 1;
    join(cluster, gang, cluster->cluster_done);
    return CHK_OK;
}

/* ---- fences and lanes -------------------------------------------------------------------------------------------- */

/* The barriers that these warps have initialised are visible to others. */
static void publish_barriers(chk_cluster *cluster, const chk_gang *gang) {
    for (size_t i = cluster->num_unfenced; i-- > 0;)
        CHK_EACH_ACTIVE(k, gang)
        if (cluster->unfenced[i].slot == (int32_t)chk_gang_slot(cluster, gang, k)) {
            remove_unfenced(cluster, &cluster->unfenced[i]);
            break;
        }
}

chk_status chk_fence(chk_cluster *cluster, const chk_gang *gang, chk_fence_kind kind, uint32_t spaces, chk_sync sync) {
    (void)spaces, (void)sync;
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    if (kind == CHK_FENCE_PROXY_ASYNC || kind == CHK_FENCE_MBARRIER_INIT) publish_barriers(cluster, gang);
    if (kind != CHK_FENCE_PROXY_ASYNC) return CHK_OK;
    CHK_EACH_ACTIVE(k, gang) chk_clock_fence(cluster, chk_gang_slot(cluster, gang, k));
    return CHK_OK;
}

chk_status chk_warp_barrier(chk_cluster *cluster, const chk_gang *gang) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang) cluster->lane_epochs[chk_gang_slot(cluster, gang, k)]++;
    return CHK_OK;
}

/* ---- words of global memory -------------------------------------------------------------------------------------- */

static size_t place_of(const chk_cluster *cluster, uint64_t address) {
    size_t mask = cluster->semaphore_capacity - 1, place = (size_t)((address * 0x9E3779B97F4A7C15u) >> 20) & mask;
    while (cluster->semaphores[place].clock && cluster->semaphores[place].address != address)
        place = (place + 1) & mask;
    return place;
}

static int rehash(chk_cluster *cluster) {
    chk_semaphore *old = cluster->semaphores;
    size_t capacity = cluster->semaphore_capacity, larger = capacity ? 2 * capacity : 64;
    chk_semaphore *fresh = chk_take(cluster->launch, larger, sizeof *fresh);
    if (!fresh) return 0;
    cluster->semaphores = fresh;
    cluster->semaphore_capacity = larger;
    for (size_t i = 0; i < capacity; i++)
        if (old[i].clock) fresh[place_of(cluster, old[i].address)] = old[i];
    chk_give(cluster->launch, old, capacity, sizeof *old);
    return 1;
}

/* What releases on this word have carried; -1: nothing. */
static int32_t semaphore(const chk_cluster *cluster, uint64_t address) {
    return cluster->semaphore_capacity ? cluster->semaphores[place_of(cluster, address)].clock - 1 : -1;
}

static chk_status release(chk_cluster *cluster, uint64_t address, uint32_t slot) {
    if (4 * cluster->num_semaphores >= cluster->semaphore_capacity && !rehash(cluster)) return CHK_NO_MEMORY;
    chk_semaphore *word = &cluster->semaphores[place_of(cluster, address)];
    int32_t clock = word->clock - 1;
    if (clock < 0) {
        if ((clock = chk_clock_new(cluster)) < 0) return cluster->failed;
        *word = (chk_semaphore){address, clock + 1};
        cluster->num_semaphores++;
    }
    return chk_clock_collect(cluster, &clock, slot) ? CHK_OK : cluster->failed;
}

static int is_repeated(const uint64_t *addresses, size_t i) {
    for (size_t k = 0; k < i; k++)
        if (addresses[k] == addresses[i]) return 1;
    return 0;
}

static chk_status touch(chk_cluster *cluster, const chk_gang *gang, uint64_t address, int order) {
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        if (order & CHK_ACQUIRE) chk_clock_join(cluster, slot, semaphore(cluster, address));
        chk_status status = order & CHK_RELEASE ? release(cluster, address, slot) : CHK_OK;
        if (status != CHK_OK) return status;
    }
    return CHK_OK;
}

static chk_status touch_all(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                            int order) {
    if (!chk_gang_ok(cluster, gang) || count > CHK_MAX_WARPS * CHK_WARP_LANES) return CHK_BAD_INPUT;
    chk_status status = CHK_OK;
    for (size_t i = 0; i < count && status == CHK_OK; i++)
        if (!is_repeated(addresses, i)) status = touch(cluster, gang, addresses[i], order);
    return status;
}

chk_status chk_atomic(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                      chk_sync sync, int32_t site) {
    (void)site;
    return touch_all(cluster, gang, addresses, count, sync.order);
}

chk_status chk_acquire(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                       chk_sync sync) {
    (void)sync; /* ld.relaxed and ld.volatile count as acquire today */
    return touch_all(cluster, gang, addresses, count, CHK_ACQUIRE);
}
