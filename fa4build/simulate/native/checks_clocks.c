/* Vector clocks of one cluster: the twin of clocks.py. */
#include "checks_state.h"

/* ---- components -------------------------------------------------------------------------------------------------- */

static int16_t *place_of(chk_cluster *cluster, chk_component_kind kind, uint32_t a, uint32_t b) {
    if (kind == CHK_MBARRIER) return &cluster->ctas[a].barrier_component[b / 8];
    return &cluster->slot_component[kind][a];
}

static int32_t new_component(chk_cluster *cluster, int16_t *place, chk_component_key key) {
    if (cluster->num_components == CHK_COMPONENTS) {
        cluster->failed = CHK_TOO_MANY_COMPONENTS;
        return -1;
    }
    cluster->keys[cluster->num_components] = key;
    *place = (int16_t)++cluster->num_components;
    return *place - 1;
}

int32_t chk_component(chk_cluster *cluster, chk_component_kind kind, uint32_t a, uint32_t b) {
    int16_t *place = place_of(cluster, kind, a, b);
    if (*place) return *place - 1;
    return new_component(cluster, place, (chk_component_key){(int32_t)kind, (int32_t)a, (int32_t)b});
}

/* ---- clocks that synchronisation objects carry ------------------------------------------------------------------- */

static int reserve(chk_cluster *cluster, chk_clock *clock, int32_t length) {
    if (length <= clock->capacity) return 1;
    int32_t capacity = (length + 63) / 64 * 64;
    int32_t *counts = chk_take(cluster->launch, 3 * (size_t)capacity, sizeof(int32_t));
    if (!counts) {
        cluster->failed = CHK_NO_MEMORY;
        return 0;
    }
    for (int part = 0; part < 3 && clock->length; part++)
        memcpy(counts + part * capacity, clock->counts + part * clock->capacity,
               (size_t)clock->length * sizeof(int32_t));
    chk_give(cluster->launch, clock->counts, 3 * (size_t)clock->capacity, sizeof(int32_t));
    clock->counts = counts;
    clock->capacity = capacity;
    return 1;
}

int32_t chk_clock_new(chk_cluster *cluster) {
    int32_t index = cluster->free_clock;
    if (index >= 0) {
        cluster->free_clock = cluster->clocks[index].next_free;
    } else {
        if (!chk_grow(cluster->launch, (void **)&cluster->clocks, &cluster->clock_capacity, cluster->num_clocks + 1,
                      sizeof *cluster->clocks)) {
            cluster->failed = CHK_NO_MEMORY;
            return -1;
        }
        index = (int32_t)cluster->num_clocks++;
    }
    cluster->clocks[index].length = 0;
    cluster->clocks[index].is_held = CHK_HELD_INSIDE;
    return index;
}

void chk_clock_drop(chk_cluster *cluster, int32_t clock) {
    if (clock < 0 || !cluster->clocks[clock].is_held) return;
    cluster->clocks[clock].is_held = CHK_FREE;
    cluster->clocks[clock].next_free = cluster->free_clock;
    cluster->free_clock = clock;
}

static inline void raise_to(int32_t *restrict to, const int32_t *restrict from, int32_t count) {
    for (int32_t i = 0; i < count; i++) to[i] = to[i] > from[i] ? to[i] : from[i];
}

/* Merges three rows of `length` counts. */
static int absorb(chk_cluster *cluster, int32_t index, const int32_t *const rows[3], int32_t length) {
    chk_clock *clock = &cluster->clocks[index];
    if (!reserve(cluster, clock, length)) return 0;
    int32_t common = clock->length < length ? clock->length : length;
    for (int part = 0; part < 3; part++) {
        int32_t *to = clock->counts + part * clock->capacity;
        if (common) raise_to(to, rows[part], common);
        if (length > common) memcpy(to + common, rows[part] + common, (size_t)(length - common) * sizeof *to);
    }
    if (length > clock->length) clock->length = length;
    return 1;
}

void chk_clock_tick(chk_cluster *cluster, uint32_t slot) {
    chk_row(cluster->g, slot)[slot] = ++cluster->now[slot]; /* warps are the first components */
}

int chk_clock_collect(chk_cluster *cluster, int32_t *clock, uint32_t slot) {
    if (*clock < 0 && (*clock = chk_clock_new(cluster)) < 0) return 0;
    const int32_t *const rows[3] = {chk_row(cluster->g, slot), chk_row(cluster->p, slot), chk_row(cluster->x, slot)};
    if (!absorb(cluster, *clock, rows, cluster->num_components)) return 0;
    chk_clock_tick(cluster, slot);
    return 1;
}

int chk_clock_merge(chk_cluster *cluster, int32_t *clock, int32_t other) {
    if (*clock < 0 && (*clock = chk_clock_new(cluster)) < 0) return 0;
    if (*clock == other) return 1;
    const chk_clock *from = &cluster->clocks[other];
    if (!from->length) return 1;
    const int32_t *const rows[3] = {from->counts, from->counts + from->capacity, from->counts + 2 * from->capacity};
    return absorb(cluster, *clock, rows, from->length);
}

void chk_clock_join(chk_cluster *cluster, uint32_t slot, int32_t clock) {
    if (clock < 0 || !cluster->clocks[clock].length) return;
    const chk_clock *from = &cluster->clocks[clock];
    raise_to(chk_row(cluster->g, slot), from->counts, from->length);
    raise_to(chk_row(cluster->p, slot), from->counts + from->capacity, from->length);
    raise_to(chk_row(cluster->x, slot), from->counts + 2 * from->capacity, from->length);
}

void chk_clock_reach(chk_cluster *cluster, uint32_t slot, int32_t component, int32_t count) {
    int32_t *g = &chk_row(cluster->g, slot)[component], *p = &chk_row(cluster->p, slot)[component];
    if (*g < count) *g = count;
    if (*p < count) *p = count;
}

void chk_clock_fence(chk_cluster *cluster, uint32_t slot) {
    raise_to(chk_row(cluster->p, slot), chk_row(cluster->g, slot), cluster->num_components);
    chk_clock_tick(cluster, slot);
}

/* ---- clocks of later arrivals ------------------------------------------------------------------------------------ */

static void add_channel(chk_cluster *cluster, int32_t index, int32_t component) {
    chk_clock *clock = &cluster->clocks[index];
    for (int part = 0; part < 3; part++) clock->counts[part * clock->capacity + component] = cluster->now[component];
}

/* Makes room up to the component, with zeros. */
static int lengthen(chk_cluster *cluster, int32_t index, int32_t length) {
    chk_clock *clock = &cluster->clocks[index];
    if (!reserve(cluster, clock, length)) return 0;
    for (int part = 0; part < 3 && length > clock->length; part++)
        memset(clock->counts + part * clock->capacity + clock->length, 0,
               (size_t)(length - clock->length) * sizeof(int32_t));
    if (length > clock->length) clock->length = length;
    return 1;
}

chk_status chk_clock_take(chk_cluster *cluster, uint32_t cta, uint32_t warp, chk_component_kind channel,
                          int32_t *clock) {
    *clock = -1;
    if (cta >= cluster->num_ctas || warp >= cluster->warps_a_cta) return CHK_BAD_INPUT;
    if (channel != CHK_CP_ASYNC && channel != CHK_MMA) return CHK_BAD_INPUT;
    uint32_t slot = chk_slot(cluster, cta, warp);
    if (!chk_clock_collect(cluster, clock, slot)) return cluster->failed;
    int32_t component = chk_component(cluster, channel, slot, 0);
    if (component < 0 || !lengthen(cluster, *clock, component + 1)) return cluster->failed;
    add_channel(cluster, *clock, component);
    cluster->clocks[*clock].is_held = CHK_HELD_OUTSIDE;
    return CHK_OK;
}

chk_status chk_clock_release(chk_cluster *cluster, int32_t clock) {
    if (!chk_is_taken(cluster, clock)) return CHK_BAD_INPUT;
    chk_clock_drop(cluster, clock);
    return CHK_OK;
}
