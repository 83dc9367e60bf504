/* What orders warps: groups, mbarriers, named and cluster barriers, fences, words of global memory. The twin of
 * observer.py. */
#include "checks_order.h"
#include "checks_state.h"

/* A lane's wait for its own operations. Copies of cp.async stay what each lane has waited for, until the lanes meet. */
static void reach_own(chk_cluster *cluster, uint32_t slot, uint32_t mask, const chk_token *token) {
    int has_lanes = chk_has_rule(cluster, CHK_RULES_LANES);
    if (has_lanes && cluster->keys[token->component].kind == CHK_CP_ASYNC) {
        int32_t *seen = &cluster->seen[CHK_SEEN_CP_ASYNC][slot];
        if (*seen < token->count) *seen = token->count;
        return;
    }
    uint32_t lanes = token->lanes ? token->lanes & mask : mask;
    if (lanes) chk_clock_reach(cluster, slot, lanes, token->component, token->count, 1);
}

chk_status chk_ops_waited(chk_cluster *cluster, const chk_gang *gang, const chk_token *tokens, size_t count) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    for (size_t i = 0; i < count; i++)
        if (tokens[i].component >= cluster->num_components) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang)
    for (size_t i = 0; i < count; i++)
        if (tokens[i].component >= 0)
            reach_own(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), &tokens[i]);
    return CHK_OK;
}

/* Merges the clocks of a gang's active lanes into one that others will take (a release). */
static chk_status collect(chk_cluster *cluster, const chk_gang *gang, int32_t *clock, int is_memory) {
    CHK_EACH_ACTIVE(k, gang)
    if (!chk_clock_collect(cluster, clock, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), is_memory))
        return cluster->failed;
    return CHK_OK;
}

static void join(chk_cluster *cluster, const chk_gang *gang, int32_t clock, int is_memory) {
    CHK_EACH_ACTIVE(k, gang)
    chk_clock_join(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), clock, is_memory);
}

/* ---- mbarriers --------------------------------------------------------------------------------------------------- */

/* The barrier of a handle, if it is one and the phase is possible. */
static chk_barrier *barrier_of(chk_cluster *cluster, int32_t barrier, int32_t phase) {
    if (barrier < 0 || (size_t)barrier >= cluster->num_barriers || phase < 0 || phase == INT32_MAX) return NULL;
    return &cluster->barriers[barrier];
}

/* The clock of a phase: a later phase drops the one it takes the place of. */
static int32_t *phase_clock(chk_cluster *cluster, chk_barrier *barrier, int32_t phase, int is_remote) {
    int place = phase % 2;
    if (barrier->phase[place] != phase) {
        chk_clock_drop(cluster, barrier->clock[place]);
        chk_clock_drop(cluster, barrier->remote[place]);
        barrier->clock[place] = barrier->remote[place] = -1;
        barrier->phase[place] = phase;
    }
    return is_remote ? &barrier->remote[place] : &barrier->clock[place];
}

static chk_unfenced *unfenced_at(const chk_cluster *cluster, uint32_t cta, uint32_t offset) {
    for (size_t i = 0; i < cluster->num_unfenced; i++)
        if (cluster->unfenced[i].cta == cta && cluster->unfenced[i].offset == offset) return &cluster->unfenced[i];
    return NULL;
}

static void remove_unfenced(chk_cluster *cluster, chk_unfenced *entry) {
    *entry = cluster->unfenced[--cluster->num_unfenced];
}

static void report_unfenced(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t site) {
    chk_finding finding = gang ? chk_finding_at(cluster, gang, CHK_NOTE_UNFENCED_INIT, site)
                               : chk_finding_of_cta(cluster, barrier->cta, CHK_NOTE_UNFENCED_INIT);
    finding.other = barrier->site;
    finding.address = barrier->offset;
    finding.extra[0] = (int32_t)barrier->cta;
    chk_add(cluster->launch, &finding);
}

/* `clock`: of who uses it, by execution; it must come after the fence behind the initialisation. */
static void check_fenced(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, const int32_t *clock,
                         int is_own, int32_t site) {
    int32_t fenced = gang && gang->cta == barrier->cta ? barrier->here : barrier->fenced;
    if (fenced >= 0 && (is_own || clock[barrier->slot] >= fenced)) return;
    report_unfenced(cluster, gang, barrier, site);
}

/* The slot and row of the first active lane of a gang. */
static uint32_t first_row(const chk_cluster *cluster, const chk_gang *gang, uint32_t *slot) {
    uint32_t k = 0;
    while (k + 1 < gang->num_warps && !chk_mask(gang, k)) k++;
    uint32_t mask = chk_mask(gang, k);
    *slot = chk_gang_slot(cluster, gang, k);
    return chk_row_of(cluster, *slot, mask ? (uint32_t)__builtin_ctz(mask) : 0);
}

void chk_note_unfenced(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t site) {
    if (chk_has_rule(cluster, CHK_RULES_SCOPES)) {
        uint32_t slot, row;
        if (!gang) return;
        row = first_row(cluster, gang, &slot);
        check_fenced(cluster, gang, barrier, chk_row(cluster->e, row), (int32_t)slot == barrier->slot, site);
        return;
    }
    chk_unfenced *entry = unfenced_at(cluster, barrier->cta, barrier->offset);
    if (!entry) return;
    remove_unfenced(cluster, entry);
    report_unfenced(cluster, gang, barrier, site);
}

/* R5: threads use a barrier that is initialised, but not known to be. */
static void check_made(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t site) {
    uint32_t slot, row = first_row(cluster, gang, &slot);
    if (!chk_has_rule(cluster, CHK_RULES_SCOPES) || barrier->slot == (int32_t)slot) return;
    int is_here = barrier->cta == gang->cta;
    if (chk_row(is_here ? cluster->g : cluster->e, row)[barrier->slot] >= barrier->made) return;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_BARRIER_EARLY, site);
    finding.other = barrier->site;
    finding.address = barrier->offset;
    finding.extra[0] = (int32_t)barrier->cta;
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
    uint32_t slot = chk_gang_slot(cluster, gang, k);
    cluster->barriers[*barrier] = (chk_barrier){gang->cta, offset, -1, {-1, -1}, {-1, -1}, {-1, -1}, (int32_t)slot,
                                                cluster->now[slot], -1, -1, site};
    return CHK_OK;
}

/* Whether a thread has heard of any warp of a CTA. */
static int knows_cta(const chk_cluster *cluster, const int32_t *clock, uint32_t cta) {
    for (uint32_t warp = 0; warp < cluster->warps_a_cta; warp++) {
        uint32_t slot = chk_slot(cluster, cta, warp);
        if (clock[slot]) return 1;
        for (uint32_t lane = 0; cluster->has_lanes[slot] && lane < CHK_WARP_LANES; lane++) {
            int32_t component = cluster->lane_component[slot * CHK_WARP_LANES + lane] - 1;
            if (component >= 0 && clock[component]) return 1;
        }
    }
    return 0;
}

static int is_synced(const chk_cluster *cluster, const chk_gang *gang, uint32_t cta) {
    if (chk_has_rule(cluster, CHK_RULES_SCOPES)) {
        uint32_t slot, row = first_row(cluster, gang, &slot);
        return knows_cta(cluster, chk_row(cluster->e, row), cta);
    }
    int all = 1;
    CHK_EACH_ACTIVE(k, gang) all &= cluster->synced[chk_gang_slot(cluster, gang, k)];
    return all;
}

chk_status chk_touches(chk_cluster *cluster, const chk_gang *gang, uint32_t cta, int32_t site) {
    if (!chk_gang_ok(cluster, gang) || cta >= cluster->num_ctas) return CHK_BAD_INPUT;
    if (cta == gang->cta || is_synced(cluster, gang, cta)) return CHK_OK;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_NOTE_EARLY_REMOTE, site);
    finding.extra[0] = (int32_t)cta;
    chk_add(cluster->launch, &finding);
    return CHK_OK;
}

static void note_unobserved(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t phase,
                            int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, CHK_NOTE_UNOBSERVED, site);
    finding.address = barrier->offset;
    finding.extra[0] = phase;
    finding.extra[1] = (int32_t)barrier->cta;
    chk_add(cluster->launch, &finding);
}

/* What a release of some strength hands on to the clock of those who wait in CTA `cta`. */
static chk_status release_to(chk_cluster *cluster, const chk_gang *gang, int32_t *clock, chk_sync sync,
                             int is_remote) {
    int asks = chk_has_rule(cluster, CHK_RULES_SCOPES);
    int is_wide = !is_remote || sync.scope >= CHK_SCOPE_CLUSTER;
    int is_memory = !asks || ((sync.order & CHK_RELEASE) && is_wide);
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k), mask = chk_mask(gang, k);
        const chk_held *held = &cluster->held[slot];
        int is_fenced = held->released >= 0 && !(mask & ~held->lanes) &&
                        (!is_remote || held->scope >= CHK_SCOPE_CLUSTER) && is_wide;
        if (!is_memory && is_fenced && !chk_clock_merge(cluster, clock, held->released, 1)) return cluster->failed;
    }
    return collect(cluster, gang, clock, is_memory);
}

chk_status chk_arrive(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase, uint32_t pending,
                      uint32_t expected, chk_sync sync, int32_t site) {
    chk_barrier *at = barrier_of(cluster, barrier, phase);
    if (!at || !chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    int is_remote = at->cta != gang->cta;
    if (is_remote) {
        chk_note_unfenced(cluster, gang, at, site);
        chk_touches(cluster, gang, at->cta, site);
    } else {
        check_made(cluster, gang, at, site);
    }
    if (phase > 0 && at->observed < phase - 1 && pending == expected) note_unobserved(cluster, gang, at, phase, site);
    if (sync.order & CHK_RELEASE) chk_order_arrive(cluster, gang, barrier, phase);
    int apart = is_remote && chk_has_rule(cluster, CHK_RULES_SCOPES);
    return release_to(cluster, gang, phase_clock(cluster, at, phase, apart), sync, is_remote);
}

chk_status chk_deferred_arrive(chk_cluster *cluster, int32_t barrier, int32_t phase, int32_t clock) {
    chk_barrier *at = barrier_of(cluster, barrier, phase);
    if (!at || !chk_is_taken(cluster, clock)) return CHK_BAD_INPUT;
    chk_note_unfenced(cluster, NULL, at, -1);
    chk_order_deferred(cluster, barrier, phase, clock);
    return chk_clock_merge(cluster, phase_clock(cluster, at, phase, 0), clock, 1) ? CHK_OK : cluster->failed;
}

chk_status chk_signals(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t site) {
    if (barrier < 0 || (size_t)barrier >= cluster->num_barriers || !chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    if (!chk_has_rule(cluster, CHK_RULES_SCOPES)) return CHK_OK;
    chk_note_unfenced(cluster, gang, &cluster->barriers[barrier], site);
    return chk_touches(cluster, gang, cluster->barriers[barrier].cta, site);
}

/* Lanes have waited for something that others released: at once, or once they execute a fence. */
static chk_status acquire_from(chk_cluster *cluster, const chk_gang *gang, int32_t clock, int is_memory) {
    if (clock < 0) return CHK_OK;
    join(cluster, gang, clock, is_memory);
    CHK_EACH_ACTIVE(k, gang) {
        int32_t *pending = &cluster->held[chk_gang_slot(cluster, gang, k)].pending;
        if (!is_memory && !chk_clock_merge(cluster, pending, clock, 1)) return cluster->failed;
    }
    return CHK_OK;
}

chk_status chk_wait_passed(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase,
                           chk_sync sync, int32_t site) {
    chk_barrier *at = barrier_of(cluster, barrier, phase);
    if (!at || !chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    int32_t ended = phase - 1, component = chk_component(cluster, CHK_MBARRIER, at->cta, at->offset);
    if (component < 0) return cluster->failed;
    if (at->observed < ended) at->observed = ended;
    chk_order_passed(cluster, gang, barrier, phase);
    check_made(cluster, gang, at, site);
    int is_known = ended >= 0 && at->phase[ended % 2] == ended, asks = chk_has_rule(cluster, CHK_RULES_SCOPES);
    int is_memory = !asks || (sync.order & CHK_ACQUIRE) != 0;
    chk_status status = acquire_from(cluster, gang, is_known ? at->clock[ended % 2] : -1, is_memory);
    if (status == CHK_OK)
        status = acquire_from(cluster, gang, is_known ? at->remote[ended % 2] : -1,
                              is_memory && sync.scope >= CHK_SCOPE_CLUSTER);
    CHK_EACH_ACTIVE(k, gang)
    chk_clock_reach(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), component, phase, is_memory);
    return status;
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
    chk_order_named_arrive(cluster, gang, index);
    chk_named *named = &cluster->ctas[gang->cta].named[index];
    if (is_sync) named->waiting += num_active(gang);
    return collect(cluster, gang, &named->clock, 1);
}

chk_status chk_named_completed(chk_cluster *cluster, uint32_t cta, uint32_t index, uint32_t generation) {
    if (cta >= cluster->num_ctas || index >= 16) return CHK_BAD_INPUT;
    chk_order_named_completed(cluster, cta, index, generation);
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
    chk_order_named_passed(cluster, gang, index, generation);
    for (size_t i = 0; i < cluster->num_generations; i++) {
        chk_generation *over = &cluster->generations[i];
        if (over->cta != gang->cta || over->index != index || over->generation != generation) continue;
        join(cluster, gang, over->clock, 1);
        leave_generation(cluster, over, num_active(gang));
        /* Nothing lies between the arrival of a `sync` and its end. */
        CHK_EACH_ACTIVE(k, gang) chk_clock_meet(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k));
        break;
    }
    return CHK_OK;
}

/* ---- cluster barrier --------------------------------------------------------------------------------------------- */

chk_status chk_cluster_arrive(chk_cluster *cluster, const chk_gang *gang, chk_sync sync) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    if (sync.order != CHK_RELAXED) chk_order_cluster_arrive(cluster, gang);
    if (sync.order == CHK_RELAXED && !chk_has_rule(cluster, CHK_RULES_SCOPES)) return CHK_OK;
    return release_to(cluster, gang, &cluster->cluster_arrivals, sync, 1);
}

chk_status chk_cluster_completed(chk_cluster *cluster) {
    chk_order_cluster_completed(cluster);
    chk_clock_drop(cluster, cluster->cluster_done);
    cluster->cluster_done = cluster->cluster_arrivals;
    cluster->cluster_arrivals = -1;
    return CHK_OK;
}

chk_status chk_cluster_passed(chk_cluster *cluster, const chk_gang *gang) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang) cluster->synced[chk_gang_slot(cluster, gang, k)] = 1;
    chk_order_cluster_passed(cluster, gang);
    join(cluster, gang, cluster->cluster_done, 1);
    return CHK_OK;
}

/* ---- fences and lanes -------------------------------------------------------------------------------------------- */

/* The barriers that these warps have initialised are visible to others; `to_all` 0: of their CTA. */
static void publish_barriers(chk_cluster *cluster, const chk_gang *gang, int to_all) {
    for (size_t i = cluster->num_unfenced; i-- > 0;)
        CHK_EACH_ACTIVE(k, gang)
        if (cluster->unfenced[i].slot == (int32_t)chk_gang_slot(cluster, gang, k)) {
            remove_unfenced(cluster, &cluster->unfenced[i]);
            break;
        }
    for (size_t i = cluster->num_barriers; i-- > 0;) {
        chk_barrier *barrier = &cluster->barriers[i];
        CHK_EACH_ACTIVE(k, gang)
        if (barrier->slot == (int32_t)chk_gang_slot(cluster, gang, k)) {
            if (barrier->here < 0) barrier->here = cluster->now[barrier->slot];
            if (to_all && barrier->fenced < 0) barrier->fenced = cluster->now[barrier->slot];
        }
    }
}

/* fence.acq_rel and its kin: what came before goes with later relaxed arrivals, and what relaxed waits have seen is
 * taken. */
static chk_status fence_memory(chk_cluster *cluster, uint32_t slot, uint32_t mask, chk_sync sync) {
    chk_held *held = &cluster->held[slot];
    if ((sync.order & CHK_ACQUIRE) && held->pending >= 0) {
        chk_clock_join(cluster, slot, mask, held->pending, 1);
        chk_clock_drop(cluster, held->pending);
        held->pending = -1;
    }
    if (!(sync.order & CHK_RELEASE)) return CHK_OK;
    chk_clock_drop(cluster, held->released);
    *held = (chk_held){-1, held->pending, mask, sync.scope};
    return chk_clock_collect(cluster, &held->released, slot, mask, 1) ? CHK_OK : cluster->failed;
}

static void fence_proxy(chk_cluster *cluster, const chk_gang *gang, uint32_t spaces) {
    int is_cluster = 1, is_shared = 1;
    if (chk_has_rule(cluster, CHK_RULES_SPACES)) {
        is_cluster = (spaces & CHK_SPACE_SHARED_CLUSTER) != 0;
        is_shared = is_cluster || (spaces & CHK_SPACE_SHARED_CTA);
    }
    CHK_EACH_ACTIVE(k, gang)
    if (is_shared) chk_clock_fence(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), is_cluster);
}

chk_status chk_fence(chk_cluster *cluster, const chk_gang *gang, chk_fence_kind kind, uint32_t spaces, chk_sync sync) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    chk_order_fence(cluster, gang, kind, spaces, sync);
    int is_shared = !chk_has_rule(cluster, CHK_RULES_SPACES) || (spaces & ~(uint32_t)CHK_SPACE_GLOBAL);
    if (kind == CHK_FENCE_MBARRIER_INIT) publish_barriers(cluster, gang, 1);
    if (kind == CHK_FENCE_PROXY_ASYNC && is_shared) publish_barriers(cluster, gang, 0);
    if (kind == CHK_FENCE_PROXY_ASYNC) fence_proxy(cluster, gang, spaces);
    if (kind != CHK_FENCE_MEMORY || !chk_has_rule(cluster, CHK_RULES_SCOPES)) return CHK_OK;
    chk_status status = CHK_OK;
    CHK_EACH_ACTIVE(k, gang)
    if (status == CHK_OK) status = fence_memory(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k), sync);
    return status;
}

chk_status chk_warp_barrier(chk_cluster *cluster, const chk_gang *gang) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang) chk_clock_meet(cluster, chk_gang_slot(cluster, gang, k), chk_mask(gang, k));
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

static chk_status release(chk_cluster *cluster, uint64_t address, uint32_t slot, uint32_t mask) {
    if (4 * cluster->num_semaphores >= cluster->semaphore_capacity && !rehash(cluster)) return CHK_NO_MEMORY;
    chk_semaphore *word = &cluster->semaphores[place_of(cluster, address)];
    int32_t clock = word->clock - 1;
    if (clock < 0) {
        if ((clock = chk_clock_new(cluster)) < 0) return cluster->failed;
        *word = (chk_semaphore){address, clock + 1};
        cluster->num_semaphores++;
    }
    return chk_clock_collect(cluster, &clock, slot, mask, 1) ? CHK_OK : cluster->failed;
}

static int is_repeated(const uint64_t *addresses, size_t i) {
    for (size_t k = 0; k < i; k++)
        if (addresses[k] == addresses[i]) return 1;
    return 0;
}

static chk_status touch(chk_cluster *cluster, const chk_gang *gang, uint64_t address, int order) {
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        uint32_t mask = chk_mask(gang, k);
        if (order & CHK_ACQUIRE) chk_clock_join(cluster, slot, mask, semaphore(cluster, address), 1);
        chk_status status = order & CHK_RELEASE ? release(cluster, address, slot, mask) : CHK_OK;
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
    /* The Python checks take ld.relaxed and ld.volatile for acquires. */
    int takes = !chk_has_rule(cluster, CHK_RULES_SCOPES) || (sync.order & CHK_ACQUIRE);
    return touch_all(cluster, gang, addresses, count, takes ? CHK_ACQUIRE : CHK_RELAXED);
}
