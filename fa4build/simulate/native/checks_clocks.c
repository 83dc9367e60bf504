/* Vector clocks of one cluster: the twin of clocks.py. */
#include <stdlib.h>

#include "checks_order.h"
#include "checks_state.h"

/* ---- components -------------------------------------------------------------------------------------------------- */

static int16_t *place_of(chk_cluster *cluster, chk_component_kind kind, uint32_t a, uint32_t b) {
    if (kind == CHK_MBARRIER) return &cluster->ctas[a].barrier_component[b / 8];
    return &cluster->slot_component[kind][a];
}

static void clear_column(chk_cluster *cluster, int32_t component);

static int32_t new_component(chk_cluster *cluster, int16_t *place, chk_component_key key) {
    if (cluster->num_components == CHK_COMPONENTS) {
        cluster->failed = CHK_TOO_MANY_COMPONENTS;
        return -1;
    }
    cluster->keys[cluster->num_components] = key;
    clear_column(cluster, cluster->num_components);
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
    int32_t *counts = chk_take(cluster->launch, CHK_PARTS * (size_t)capacity, sizeof(int32_t));
    if (!counts) {
        cluster->failed = CHK_NO_MEMORY;
        return 0;
    }
    for (int part = 0; part < CHK_PARTS && clock->length; part++)
        memcpy(counts + part * capacity, clock->counts + part * clock->capacity,
               (size_t)clock->length * sizeof(int32_t));
    chk_give(cluster->launch, clock->counts, CHK_PARTS * (size_t)clock->capacity, sizeof(int32_t));
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

/* Makes room up to a length, with zeros. */
static int lengthen(chk_cluster *cluster, int32_t index, int32_t length) {
    chk_clock *clock = &cluster->clocks[index];
    if (!reserve(cluster, clock, length)) return 0;
    for (int part = 0; part < CHK_PARTS && length > clock->length; part++)
        memset(clock->counts + part * clock->capacity + clock->length, 0,
               (size_t)(length - clock->length) * sizeof(int32_t));
    if (length > clock->length) clock->length = length;
    return 1;
}

/* Merges rows of `length` counts; a part that is NULL is left out. */
static int absorb(chk_cluster *cluster, int32_t index, const int32_t *const rows[CHK_PARTS], int32_t length) {
    if (!lengthen(cluster, index, length)) return 0;
    chk_clock *clock = &cluster->clocks[index];
    for (int part = 0; part < CHK_PARTS; part++)
        if (rows[part]) raise_to(clock->counts + part * clock->capacity, rows[part], length);
    return 1;
}

/* Raises one count of one part. */
static int put(chk_cluster *cluster, int32_t index, int part, int32_t component, int32_t count) {
    if (component < 0 || !lengthen(cluster, index, component + 1)) return 0;
    chk_clock *clock = &cluster->clocks[index];
    int32_t *at = &clock->counts[part * clock->capacity + component];
    if (*at < count) *at = count;
    return 1;
}

void chk_clock_tick(chk_cluster *cluster, uint32_t slot) {
    int32_t now = ++cluster->now[slot]; /* warps are the first components */
    if (!chk_has_rule(cluster, CHK_RULES_LANES))
        chk_row(cluster->g, slot)[slot] = chk_row(cluster->e, slot)[slot] = now;
}

/* ---- strands: lanes of a warp that know the same ----------------------------------------------------------------- */

#define EACH_STRAND(row, cluster, slot) \
    for (int32_t row = (int32_t)(slot); row >= 0; row = (cluster)->row_next[row])
#define SPARE_ROWS 64

/* Memory for rows, not set to anything: of a row in use there is a count for each component there is. */
static void *take_rows(chk_launch *launch, size_t counts) {
    size_t bytes = counts * sizeof(int32_t);
    if (launch->max_bytes && bytes > launch->max_bytes - launch->used_bytes) return NULL;
    void *rows = malloc(bytes);
    if (rows) launch->used_bytes += bytes;
    return rows;
}

/* A component is new to every row. */
static void clear_column(chk_cluster *cluster, int32_t component) {
    int32_t *rows[] = {cluster->g, cluster->p, cluster->x, cluster->e, cluster->t};
    for (uint32_t row = 0; row < cluster->num_rows; row++)
        if (row < cluster->num_slots || cluster->row_lanes[row])
            for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) chk_row(rows[i], row)[component] = 0;
}

int chk_rows_create(chk_cluster *cluster) {
    chk_launch *launch = cluster->launch;
    cluster->num_rows = 2 * cluster->num_slots + SPARE_ROWS;
    size_t counts = (size_t)cluster->num_rows * CHK_COMPONENTS;
    int32_t **rows[] = {&cluster->g, &cluster->p, &cluster->x, &cluster->e, &cluster->t};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!(*rows[i] = take_rows(launch, counts))) return 0;
    cluster->row_lanes = chk_take(launch, cluster->num_rows, sizeof(uint32_t));
    cluster->row_next = chk_take(launch, cluster->num_rows, sizeof(int32_t));
    cluster->present = chk_take(launch, cluster->num_slots, sizeof(uint32_t));
    cluster->lane_component = chk_take(launch, (size_t)cluster->num_slots * CHK_WARP_LANES, sizeof(int16_t));
    cluster->has_lanes = chk_take(launch, cluster->num_slots, 1);
    cluster->read_until = chk_take(launch, cluster->num_slots, sizeof(int32_t));
    cluster->read_component = chk_take(launch, cluster->num_slots, sizeof(int16_t));
    cluster->copying = chk_take(launch, cluster->num_slots, sizeof(uint32_t));
    cluster->tensor_lane = chk_take(launch, cluster->num_slots, 1);
    cluster->space_fence = chk_take(launch, cluster->num_slots, sizeof(int32_t));
    cluster->held = chk_take(launch, cluster->num_slots, sizeof(chk_held));
    for (int k = 0; k < CHK_NUM_SEEN; k++)
        if (!(cluster->seen[k] = chk_take(launch, cluster->num_slots, sizeof(int32_t)))) return 0;
    if (!cluster->row_lanes || !cluster->row_next || !cluster->present || !cluster->lane_component ||
        !cluster->has_lanes || !cluster->copying || !cluster->read_until || !cluster->read_component || !cluster->tensor_lane || !cluster->space_fence || !cluster->held)
        return 0;
    for (uint32_t slot = 0; slot < cluster->num_slots; slot++) {
        cluster->present[slot] = cluster->row_lanes[slot] = UINT32_MAX;
        cluster->row_next[slot] = -1;
        cluster->held[slot] = (chk_held){-1, -1, 0, 0};
    }
    return 1;
}

void chk_rows_destroy(chk_cluster *cluster) {
    chk_launch *launch = cluster->launch;
    size_t counts = (size_t)cluster->num_rows * CHK_COMPONENTS;
    int32_t *rows[] = {cluster->g, cluster->p, cluster->x, cluster->e, cluster->t};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) chk_give(launch, rows[i], counts, sizeof(int32_t));
    chk_give(launch, cluster->row_lanes, cluster->num_rows, sizeof(uint32_t));
    chk_give(launch, cluster->row_next, cluster->num_rows, sizeof(int32_t));
    chk_give(launch, cluster->present, cluster->num_slots, sizeof(uint32_t));
    chk_give(launch, cluster->lane_component, (size_t)cluster->num_slots * CHK_WARP_LANES, sizeof(int16_t));
    chk_give(launch, cluster->has_lanes, cluster->num_slots, 1);
    chk_give(launch, cluster->read_until, cluster->num_slots, sizeof(int32_t));
    chk_give(launch, cluster->read_component, cluster->num_slots, sizeof(int16_t));
    chk_give(launch, cluster->copying, cluster->num_slots, sizeof(uint32_t));
    chk_give(launch, cluster->tensor_lane, cluster->num_slots, 1);
    chk_give(launch, cluster->space_fence, cluster->num_slots, sizeof(int32_t));
    chk_give(launch, cluster->held, cluster->num_slots, sizeof(chk_held));
    for (int k = 0; k < CHK_NUM_SEEN; k++) chk_give(launch, cluster->seen[k], cluster->num_slots, sizeof(int32_t));
}

uint32_t chk_row_of(const chk_cluster *cluster, uint32_t slot, uint32_t lane) {
    EACH_STRAND(row, cluster, slot)
    if (cluster->row_lanes[row] >> lane & 1) return (uint32_t)row;
    return slot;
}

int32_t chk_lane_component(chk_cluster *cluster, uint32_t slot, uint32_t lane) {
    int16_t *place = &cluster->lane_component[slot * CHK_WARP_LANES + lane];
    cluster->has_lanes[slot] = 1;
    if (*place) return *place - 1;
    return new_component(cluster, place, (chk_component_key){CHK_LANE, (int32_t)slot, (int32_t)lane});
}

static uint32_t free_row(chk_cluster *cluster) {
    for (uint32_t row = cluster->num_slots; row < cluster->num_rows; row++)
        if (!cluster->row_lanes[row]) return row;
    cluster->failed = CHK_TOO_MANY_COMPONENTS;
    return 0;
}

static void copy_row(const chk_cluster *cluster, uint32_t to, uint32_t from) {
    int32_t *rows[] = {cluster->g, cluster->p, cluster->x, cluster->e, cluster->t};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        memcpy(chk_row(rows[i], to), chk_row(rows[i], from), (size_t)cluster->num_components * sizeof(int32_t));
}

/* Lanes of a strand that are in the mask become one of their own. 0 when there is no room. */
static int split(chk_cluster *cluster, int32_t row, uint32_t mask) {
    uint32_t fresh = free_row(cluster);
    if (!fresh) return 0;
    copy_row(cluster, fresh, (uint32_t)row);
    cluster->row_lanes[fresh] = cluster->row_lanes[row] & mask;
    cluster->row_lanes[row] &= ~mask;
    cluster->row_next[fresh] = cluster->row_next[row];
    cluster->row_next[row] = (int32_t)fresh;
    return 1;
}

/* Afterwards every strand of the slot lies inside the mask or outside. */
static void divide(chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    EACH_STRAND(row, cluster, slot) {
        uint32_t inside = cluster->row_lanes[row] & mask;
        if (inside && inside != cluster->row_lanes[row] && !split(cluster, row, mask)) return;
    }
}

/* How far every lane of the slot has fenced what it did itself. */
static int32_t least_fenced(const chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    int32_t least = INT32_MAX;
    EACH_STRAND(row, cluster, slot) {
        int32_t fenced = chk_row(cluster->p, (uint32_t)row)[slot];
        if ((cluster->row_lanes[row] & mask) && fenced < least) least = fenced;
    }
    return least == INT32_MAX ? 0 : least;
}

/* Kinds of CHK_SEEN_*. */
static const chk_component_kind SEEN_KINDS[CHK_NUM_SEEN] = {CHK_CP_ASYNC, CHK_TMEM_LD, CHK_TMEM_ST};

static int32_t seen_component(const chk_cluster *cluster, uint32_t slot, int k) {
    return cluster->slot_component[SEEN_KINDS[k]][slot] - 1;
}

static int32_t read_component(chk_cluster *cluster, uint32_t slot) {
    int16_t *place = &cluster->read_component[slot];
    if (*place) return *place - 1;
    return new_component(cluster, place, (chk_component_key){CHK_LANE, (int32_t)slot, CHK_WARP_LANES});
}

/* What lanes hand on of the warp's own: all of it together, or each lane its own part. */
static int publish_own(chk_cluster *cluster, int32_t index, uint32_t slot, uint32_t mask, int is_memory) {
    int whole = chk_covers(cluster, slot, mask), ok = 1;
    int32_t now = cluster->now[slot];
    if (whole) {
        ok = put(cluster, index, CHK_PART_E, (int32_t)slot, now);
        if (is_memory) ok = ok && put(cluster, index, CHK_PART_G, (int32_t)slot, now);
    }
    for (uint32_t left = whole ? 0 : mask; left && ok; left &= left - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(left), row = chk_row_of(cluster, slot, lane);
        int32_t component = chk_lane_component(cluster, slot, lane);
        ok = put(cluster, index, CHK_PART_E, component, now);
        if (is_memory)
            ok = ok && put(cluster, index, CHK_PART_G, component, now) &&
                 put(cluster, index, CHK_PART_P, component, chk_row(cluster->p, row)[slot]);
    }
    if (!whole && is_memory && ok && cluster->read_until[slot])
        ok = put(cluster, index, CHK_PART_G, read_component(cluster, slot), cluster->read_until[slot]);
    for (int k = 0; k < CHK_NUM_SEEN && ok; k++) {
        int32_t component = seen_component(cluster, slot, k);
        int speaks_for_all = whole || (k == CHK_SEEN_CP_ASYNC && !(cluster->copying[slot] & ~mask));
        if (component < 0 || !speaks_for_all) continue;
        ok = put(cluster, index, CHK_PART_E, component, cluster->seen[k][slot]);
        if (is_memory) ok = ok && put(cluster, index, CHK_PART_G, component, cluster->seen[k][slot]);
    }
    return ok;
}

/* Merges the strands of some lanes into a clock. */
static int absorb_strands(chk_cluster *cluster, int32_t index, uint32_t slot, uint32_t mask, int is_memory) {
    if (!lengthen(cluster, index, (int32_t)slot + 1)) return 0;
    int32_t place = CHK_PART_P * cluster->clocks[index].capacity + (int32_t)slot;
    int32_t fenced = cluster->clocks[index].counts[place];
    EACH_STRAND(row, cluster, slot) {
        if (!(cluster->row_lanes[row] & mask)) continue;
        uint32_t r = (uint32_t)row;
        const int32_t *const rows[CHK_PARTS] = {is_memory ? chk_row(cluster->g, r) : NULL,
                                                is_memory ? chk_row(cluster->p, r) : NULL, chk_row(cluster->x, r),
                                                chk_row(cluster->e, r)};
        if (!absorb(cluster, index, rows, cluster->num_components)) return 0;
    }
    if (cluster->row_next[slot] < 0) return 1;
    /* A fence of some lanes is no fence of the others. */
    int32_t least = least_fenced(cluster, slot, UINT32_MAX);
    chk_clock *clock = &cluster->clocks[index];
    clock->counts[CHK_PART_P * clock->capacity + (int32_t)slot] = fenced > least ? fenced : least;
    return 1;
}

int chk_clock_collect(chk_cluster *cluster, int32_t *clock, uint32_t slot, uint32_t mask, int is_memory) {
    if (*clock < 0 && (*clock = chk_clock_new(cluster)) < 0) return 0;
    if (!absorb_strands(cluster, *clock, slot, mask, is_memory)) return 0;
    if (chk_has_rule(cluster, CHK_RULES_LANES) && !publish_own(cluster, *clock, slot, mask, is_memory)) return 0;
    chk_clock_tick(cluster, slot);
    return 1;
}

int chk_clock_merge(chk_cluster *cluster, int32_t *clock, int32_t other, int is_memory) {
    if (*clock < 0 && (*clock = chk_clock_new(cluster)) < 0) return 0;
    if (*clock == other) return 1;
    const chk_clock *from = &cluster->clocks[other];
    if (!from->length) return 1;
    const int32_t *const rows[CHK_PARTS] = {is_memory ? from->counts : NULL,
                                            is_memory ? from->counts + from->capacity : NULL,
                                            from->counts + CHK_PART_X * from->capacity,
                                            from->counts + CHK_PART_E * from->capacity};
    return absorb(cluster, *clock, rows, from->length);
}

static int exceeds(const int32_t *counts, const int32_t *row, int32_t length) {
    int32_t more = 0;
    for (int32_t i = 0; i < length; i++) more |= counts[i] > row[i];
    return more != 0;
}

/* Whether a strand would learn something from a clock. */
static int is_news(const chk_cluster *cluster, const chk_clock *clock, uint32_t row, int is_memory) {
    int32_t *rows[CHK_PARTS] = {cluster->g, cluster->p, cluster->x, cluster->e};
    for (int part = is_memory ? 0 : CHK_PART_X; part < CHK_PARTS; part++)
        if (exceeds(clock->counts + part * clock->capacity, chk_row(rows[part], row), clock->length)) return 1;
    return 0;
}

void chk_clock_join(chk_cluster *cluster, uint32_t slot, uint32_t mask, int32_t clock, int is_memory) {
    if (clock < 0 || !cluster->clocks[clock].length) return;
    int32_t *rows[CHK_PARTS] = {cluster->g, cluster->p, cluster->x, cluster->e};
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) mask = UINT32_MAX;
    EACH_STRAND(row, cluster, slot) {
        uint32_t inside = cluster->row_lanes[row] & mask, r = (uint32_t)row;
        const chk_clock *from = &cluster->clocks[clock];
        if (!inside) continue;
        if (inside != cluster->row_lanes[row]) {
            /* The rest goes its own way; the strand behind this one holds these lanes. */
            if (is_news(cluster, from, r, is_memory) && !split(cluster, row, mask)) return;
            continue;
        }
        for (int part = is_memory ? 0 : CHK_PART_X; part < CHK_PARTS; part++)
            raise_to(chk_row(rows[part], r), from->counts + part * from->capacity, from->length);
    }
}

void chk_clock_reach(chk_cluster *cluster, uint32_t slot, uint32_t mask, int32_t component, int32_t count,
                     int is_memory) {
    int32_t *rows[] = {cluster->e, cluster->g, cluster->p};
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) mask = UINT32_MAX;
    EACH_STRAND(row, cluster, slot) {
        uint32_t inside = cluster->row_lanes[row] & mask;
        if (!inside) continue;
        int is_known = chk_row(cluster->e, (uint32_t)row)[component] >= count &&
                       (!is_memory || chk_row(cluster->g, (uint32_t)row)[component] >= count);
        if (inside != cluster->row_lanes[row]) {
            if (!is_known && !split(cluster, row, mask)) return;
            continue;
        }
        for (int k = 0; k < (is_memory ? 3 : 1); k++) {
            int32_t *at = &chk_row(rows[k], (uint32_t)row)[component];
            if (*at < count) *at = count;
        }
    }
}

/* ---- lanes that meet --------------------------------------------------------------------------------------------- */

/* Lanes that have fenced what they did themselves, where others of the mask have not, keep that for themselves. */
static void keep_fences(chk_cluster *cluster, uint32_t slot, uint32_t mask, int32_t least, uint32_t into) {
    EACH_STRAND(row, cluster, slot) {
        int32_t fenced = chk_row(cluster->p, (uint32_t)row)[slot];
        if (fenced <= least) continue;
        for (uint32_t left = cluster->row_lanes[row] & mask; left; left &= left - 1) {
            int32_t component = chk_lane_component(cluster, slot, (uint32_t)__builtin_ctz(left));
            int32_t *at = component < 0 ? NULL : &chk_row(cluster->p, into)[component];
            if (at && *at < fenced) *at = fenced;
        }
    }
}

/* Makes one strand of those that lie inside the mask, in the row of the first of them; returns it, -1: none. */
static int32_t unite(chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    int32_t first = -1, before = -1, least = least_fenced(cluster, slot, mask);
    int32_t *rows[] = {cluster->g, cluster->p, cluster->x, cluster->e, cluster->t};
    EACH_STRAND(row, cluster, slot) {
        if (!(cluster->row_lanes[row] & mask) && !(chk_covers(cluster, slot, mask) && row == (int32_t)slot)) {
            before = row;
            continue;
        }
        if (first < 0) {
            first = before = row;
            keep_fences(cluster, slot, mask, least, (uint32_t)row);
            continue;
        }
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            raise_to(chk_row(rows[i], (uint32_t)first), chk_row(rows[i], (uint32_t)row), cluster->num_components);
        cluster->row_lanes[first] |= cluster->row_lanes[row];
        cluster->row_lanes[row] = 0;
        cluster->row_next[before] = cluster->row_next[row];
        row = before;
    }
    if (first >= 0) chk_row(cluster->p, (uint32_t)first)[slot] = least;
    return first;
}

/* All lanes of a slot: each knows what any of them did. */
static void meet_all(chk_cluster *cluster, uint32_t slot) {
    if (cluster->row_next[slot] >= 0) unite(cluster, slot, UINT32_MAX);
    cluster->row_lanes[slot] = cluster->present[slot];
    int32_t *g = chk_row(cluster->g, slot), *e = chk_row(cluster->e, slot);
    g[slot] = e[slot] = cluster->now[slot];
    for (int k = 0; k < CHK_NUM_SEEN; k++) {
        int32_t component = seen_component(cluster, slot, k), count = cluster->seen[k][slot];
        if (component < 0) continue;
        if (g[component] < count) g[component] = count;
        if (e[component] < count) e[component] = count;
    }
    cluster->copying[slot] = 0;
}

static void meet_some(chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    divide(cluster, slot, mask);
    int32_t row = unite(cluster, slot, mask);
    if (row < 0) return;
    for (uint32_t left = mask; left; left &= left - 1) {
        int32_t component = chk_lane_component(cluster, slot, (uint32_t)__builtin_ctz(left));
        if (component < 0) return;
        chk_row(cluster->g, (uint32_t)row)[component] = cluster->now[slot];
        chk_row(cluster->e, (uint32_t)row)[component] = cluster->now[slot];
    }
}

void chk_clock_meet(chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) return;
    if (chk_covers(cluster, slot, mask)) meet_all(cluster, slot);
    else meet_some(cluster, slot, mask);
    chk_clock_tick(cluster, slot);
}

chk_status chk_warp_shuffle(chk_cluster *cluster, const chk_gang *gang) {
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    if (!chk_has_rule(cluster, CHK_RULES_LANES) || chk_has_rule(cluster, CHK_RULES_SHUFFLE_READS)) return CHK_OK;
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        if (!chk_covers(cluster, slot, chk_mask(gang, k))) continue;
        cluster->read_until[slot] = cluster->now[slot];
        chk_clock_tick(cluster, slot);
    }
    return CHK_OK;
}

/* ---- proxy fences ------------------------------------------------------------------------------------------------ */

/* The CTA whose memory a component's generic writes are in; -1: of no thread. */
static int32_t home_of(const chk_cluster *cluster, int32_t component) {
    const chk_component_key *key = &cluster->keys[component];
    return key->kind == CHK_MBARRIER ? key->a : key->a / (int32_t)cluster->warps_a_cta;
}

static void fence_row(chk_cluster *cluster, uint32_t slot, uint32_t row, int is_cluster) {
    const int32_t *g = chk_row(cluster->g, row);
    int32_t *p = chk_row(cluster->p, row), cta = (int32_t)(slot / cluster->warps_a_cta);
    if (is_cluster) raise_to(p, g, cluster->num_components);
    else
        for (int32_t c = 0; c < cluster->num_components; c++)
            if (g[c] > p[c] && home_of(cluster, c) == cta) p[c] = g[c];
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) return;
    p[slot] = cluster->now[slot];
    int32_t copies = seen_component(cluster, slot, CHK_SEEN_CP_ASYNC);
    if (copies >= 0 && p[copies] < cluster->seen[CHK_SEEN_CP_ASYNC][slot])
        p[copies] = cluster->seen[CHK_SEEN_CP_ASYNC][slot];
}

void chk_clock_fence(chk_cluster *cluster, uint32_t slot, uint32_t mask, int is_cluster) {
    if (!chk_has_rule(cluster, CHK_RULES_LANES) || chk_covers(cluster, slot, mask)) mask = UINT32_MAX;
    divide(cluster, slot, mask);
    EACH_STRAND(row, cluster, slot)
    if (cluster->row_lanes[row] & mask) fence_row(cluster, slot, (uint32_t)row, is_cluster);
    if (is_cluster) cluster->space_fence[slot] = cluster->now[slot];
    chk_clock_tick(cluster, slot);
}

/* ---- clocks of later arrivals ------------------------------------------------------------------------------------ */

static void add_channel(chk_cluster *cluster, int32_t index, int32_t component) {
    chk_clock *clock = &cluster->clocks[index];
    for (int part = 0; part < CHK_PARTS; part++)
        clock->counts[part * clock->capacity + component] = cluster->now[component];
}

chk_status chk_clock_take(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t lanes,
                          chk_component_kind channel, int32_t *clock) {
    *clock = -1;
    if (cta >= cluster->num_ctas || warp >= cluster->warps_a_cta) return CHK_BAD_INPUT;
    if (channel != CHK_CP_ASYNC && channel != CHK_MMA) return CHK_BAD_INPUT;
    uint32_t slot = chk_slot(cluster, cta, warp);
    if (!chk_clock_collect(cluster, clock, slot, lanes, 1)) return cluster->failed;
    int32_t component = chk_component(cluster, channel, slot, 0);
    if (component < 0 || !lengthen(cluster, *clock, component + 1)) return cluster->failed;
    add_channel(cluster, *clock, component);
    cluster->clocks[*clock].is_held = CHK_HELD_OUTSIDE;
    chk_order_take(cluster, slot, channel, *clock);
    return CHK_OK;
}

chk_status chk_clock_release(chk_cluster *cluster, int32_t clock) {
    if (!chk_is_taken(cluster, clock)) return CHK_BAD_INPUT;
    chk_clock_drop(cluster, clock);
    return CHK_OK;
}
