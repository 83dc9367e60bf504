/* See checks_replay.h. */
#include <stdlib.h>
#include <string.h>

#include "checks_replay.h"

#define MAX_NUMBERS ((int64_t)1 << 22) /* of operations, barriers and clocks in one stream */

/* Handles by the recorder's numbers; -1: none. */
typedef struct {
    void *items;
    size_t capacity, size;
} table;

typedef struct {
    chk_launch *launch;
    const int64_t *at, *end; /* of the event */
    int is_short;            /* the event wanted more words than it has */
    table clusters, tokens, barriers, clocks;
    chk_cluster *cluster;
    chk_gang gang;
    uint16_t warps[CHK_MAX_WARPS];
    uint32_t masks[CHK_MAX_WARPS];
    void *scratch; /* lists of one event */
    size_t scratch_bytes, scratch_used;
} replay;

static int64_t next(replay *r) {
    if (r->at < r->end) return *r->at++;
    r->is_short = 1;
    return 0;
}

static uint32_t next_u(replay *r) { return (uint32_t)next(r); }
static int32_t next_i(replay *r) { return (int32_t)next(r); }

/* How many items of at least one word follow: never more than there are. */
static size_t next_count(replay *r) {
    int64_t count = next(r);
    if (count >= 0 && count <= r->end - r->at) return (size_t)count;
    r->is_short = 1;
    return 0;
}

/* Room that lasts for one event: an event of n words never needs more than 8 n + 64 bytes a list item times 10. */
static void *room(replay *r, size_t bytes) {
    bytes = (bytes + 15) / 16 * 16;
    if (bytes > r->scratch_bytes - r->scratch_used) {
        r->is_short = 1;
        return NULL;
    }
    void *place = (char *)r->scratch + r->scratch_used;
    r->scratch_used += bytes;
    return place;
}

/* Steps over the words of a list, which then end at `at`. */
static int take(replay *r, size_t count) {
    if (count > (size_t)(r->end - r->at)) r->is_short = 1;
    else r->at += count;
    return !r->is_short;
}

static uint64_t *next_addresses(replay *r, size_t count) {
    uint64_t *list = room(r, count * sizeof *list);
    if (list && take(r, count))
        for (size_t i = 0; i < count; i++) list[i] = (uint64_t)(r->at - count)[i];
    return list;
}

static uint32_t *next_list(replay *r, size_t count) {
    uint32_t *list = room(r, count * sizeof *list);
    if (list && take(r, count))
        for (size_t i = 0; i < count; i++) list[i] = (uint32_t)(r->at - count)[i];
    return list;
}

/* ---- handles ----------------------------------------------------------------------------------------------------- */

static void *item(const table *t, int64_t number) {
    return number >= 0 && (size_t)number < t->capacity ? (char *)t->items + (size_t)number * t->size : NULL;
}

/* The place of a number, made if need be; bytes of new places are 0xFF. */
static void *make(table *t, int64_t number) {
    if (number < 0 || number >= MAX_NUMBERS) return NULL;
    if ((size_t)number >= t->capacity) {
        size_t capacity = 2 * (size_t)number + 64;
        void *items = realloc(t->items, capacity * t->size);
        if (!items) return NULL;
        memset((char *)items + t->capacity * t->size, 0xFF, (capacity - t->capacity) * t->size);
        t->items = items;
        t->capacity = capacity;
    }
    return item(t, number);
}

static int32_t handle(const table *t, int64_t number) {
    const int32_t *place = item(t, number);
    return place ? *place : -1;
}

static chk_token token_of(const replay *r, int64_t number) {
    const chk_token *token = item(&r->tokens, number);
    return token ? *token : (chk_token){-1, 0, 0};
}

static chk_status keep(table *t, int64_t number, int32_t value) {
    int32_t *place = make(t, number);
    if (place) *place = value;
    return place ? CHK_OK : CHK_BAD_INPUT;
}

static int read_cluster(replay *r) {
    chk_cluster **place = item(&r->clusters, next(r));
    r->cluster = place && *place != (chk_cluster *)UINTPTR_MAX ? *place : NULL;
    return r->cluster != NULL;
}

static int read_gang(replay *r) {
    r->gang = (chk_gang){next_u(r), next_u(r), r->warps, r->masks};
    if (r->gang.num_warps > CHK_MAX_WARPS) return 0;
    for (uint32_t k = 0; k < r->gang.num_warps; k++) r->warps[k] = (uint16_t)next(r);
    for (uint32_t k = 0; k < r->gang.num_warps; k++) r->masks[k] = next_u(r);
    return !r->is_short;
}

static size_t lanes_of(const chk_gang *gang) {
    size_t count = 0;
    for (uint32_t k = 0; k < gang->num_warps; k++) count += (size_t)__builtin_popcount(gang->masks[k]);
    return count;
}

static chk_sync read_sync(replay *r) {
    chk_sync sync;
    sync.order = (uint8_t)next(r);
    sync.scope = (uint8_t)next(r);
    return sync;
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

static chk_status begin(replay *r) {
    int64_t number = next(r);
    uint32_t index = next_u(r), ctas = next_u(r), warps = next_u(r), limit = next_u(r);
    chk_cluster **place = number < 4096 ? make(&r->clusters, number) : NULL;
    if (!place || r->is_short || *place != (chk_cluster *)UINTPTR_MAX) return CHK_BAD_INPUT;
    chk_cluster *cluster;
    chk_status status = chk_cluster_create(r->launch, index, ctas, warps, limit, &cluster);
    if (status == CHK_OK) *place = cluster;
    return status;
}

static chk_status end_cluster(replay *r) {
    int64_t number = next(r);
    chk_cluster **place = item(&r->clusters, number);
    if (!place || *place == (chk_cluster *)UINTPTR_MAX) return CHK_BAD_INPUT;
    chk_cluster_destroy(*place);
    *place = (chk_cluster *)UINTPTR_MAX;
    return CHK_OK;
}

static chk_status shared(replay *r) {
    uint32_t size = next_u(r);
    int32_t site = next_i(r), is_write = next_i(r);
    size_t count = next_count(r);
    uint32_t *offsets = next_list(r, count);
    if (r->is_short || count != lanes_of(&r->gang)) return CHK_BAD_INPUT;
    return chk_shared_access(r->cluster, &r->gang, offsets, size, site, is_write);
}

static chk_status global(replay *r) {
    uint32_t size = next_u(r);
    int32_t site = next_i(r), is_write = next_i(r);
    size_t count = next_count(r);
    uint64_t *addresses = next_addresses(r, count);
    return r->is_short ? CHK_BAD_INPUT
                       : chk_global_access(r->cluster, &r->gang, addresses, count, size, site, is_write);
}

static chk_status tmem(replay *r) {
    uint32_t warp = next_u(r), address = next_u(r), width = next_u(r);
    int32_t is_write = next_i(r), site = next_i(r);
    return r->is_short ? CHK_BAD_INPUT : chk_tmem_access(r->cluster, &r->gang, warp, address, width, is_write, site);
}

static chk_status tmem_freed(replay *r) {
    uint32_t column = next_u(r), columns = next_u(r);
    int32_t site = next_i(r);
    return r->is_short ? CHK_BAD_INPUT : chk_tmem_freed(r->cluster, &r->gang, column, columns, site);
}

static void read_operand(replay *r, chk_operand *operand) {
    *operand = (chk_operand){.kind = (chk_operand_kind)(next(r) & 0xFF)};
    operand->cta = next_u(r);
    operand->first = next_u(r);
    operand->lanes = next_u(r);
    operand->column = next_u(r);
    operand->unit_bytes = next_u(r);
    operand->address = (uint64_t)next(r);
    int is_listed = operand->kind == CHK_SHARED_UNITS || operand->kind == CHK_GLOBAL_UNITS;
    operand->count = is_listed ? next_count(r) : (uint64_t)next(r);
    if (operand->kind == CHK_SHARED_UNITS) operand->granules = next_list(r, (size_t)operand->count);
    if (operand->kind == CHK_GLOBAL_UNITS) operand->addresses = next_addresses(r, (size_t)operand->count);
}

static chk_status issue(replay *r) {
    int64_t number = next(r);
    chk_operation operation = {.warp = next_u(r)};
    operation.channel = (chk_component_kind)(next(r) & 0xFF);
    operation.barrier = handle(&r->barriers, next(r));
    operation.phase = next_i(r);
    operation.site = next_i(r);
    operation.num_reads = next_count(r);
    operation.num_writes = next_count(r);
    size_t count = operation.num_reads + operation.num_writes;
    chk_operand *operands = room(r, count * sizeof *operands);
    for (size_t i = 0; operands && i < count; i++) read_operand(r, &operands[i]);
    chk_token *token = make(&r->tokens, number);
    if (r->is_short || !token) return CHK_BAD_INPUT;
    operation.reads = operands;
    operation.writes = operands + operation.num_reads;
    return chk_issue(r->cluster, &r->gang, &operation, token);
}

static chk_status waited(replay *r) {
    size_t count = next_count(r);
    chk_token *tokens = room(r, count * sizeof *tokens);
    for (size_t i = 0; tokens && i < count; i++) tokens[i] = token_of(r, next(r));
    return r->is_short ? CHK_BAD_INPUT : chk_ops_waited(r->cluster, &r->gang, tokens, count);
}

static chk_status tmem_wait(replay *r) {
    chk_tmem_order order = (chk_tmem_order)(next(r) & 0xFF);
    return r->is_short ? CHK_BAD_INPUT : chk_tmem_wait(r->cluster, &r->gang, order);
}

static chk_status clock_take(replay *r) {
    uint32_t cta = next_u(r), warp = next_u(r);
    chk_component_kind channel = (chk_component_kind)(next(r) & 0xFF);
    int64_t number = next(r);
    int32_t clock;
    if (r->is_short) return CHK_BAD_INPUT;
    chk_status status = chk_clock_take(r->cluster, cta, warp, UINT32_MAX, channel, &clock);
    return status == CHK_OK ? keep(&r->clocks, number, clock) : status;
}

static chk_status clock_release(replay *r) { return chk_clock_release(r->cluster, handle(&r->clocks, next(r))); }

static chk_status deferred(replay *r) {
    int32_t barrier = handle(&r->barriers, next(r)), phase = next_i(r), clock = handle(&r->clocks, next(r));
    return r->is_short ? CHK_BAD_INPUT : chk_deferred_arrive(r->cluster, barrier, phase, clock);
}

static chk_status created(replay *r) {
    uint32_t offset = next_u(r);
    int32_t site = next_i(r), barrier;
    int64_t number = next(r);
    if (r->is_short) return CHK_BAD_INPUT;
    chk_status status = chk_barrier_created(r->cluster, &r->gang, offset, site, &barrier);
    return status == CHK_OK ? keep(&r->barriers, number, barrier) : status;
}

static chk_status arrive(replay *r) {
    int32_t barrier = handle(&r->barriers, next(r)), phase = next_i(r);
    uint32_t pending = next_u(r), expected = next_u(r);
    chk_sync sync = read_sync(r);
    int32_t site = next_i(r);
    if (r->is_short) return CHK_BAD_INPUT;
    return chk_arrive(r->cluster, &r->gang, barrier, phase, pending, expected, sync, site);
}

static chk_status passed(replay *r) {
    int32_t barrier = handle(&r->barriers, next(r)), phase = next_i(r);
    chk_sync sync = read_sync(r);
    int32_t site = next_i(r);
    return r->is_short ? CHK_BAD_INPUT : chk_wait_passed(r->cluster, &r->gang, barrier, phase, sync, site);
}

static chk_status named_arrive(replay *r) {
    uint32_t index = next_u(r), generation = next_u(r);
    int32_t is_sync = next_i(r);
    return r->is_short ? CHK_BAD_INPUT : chk_named_arrive(r->cluster, &r->gang, index, generation, is_sync);
}

static chk_status named_completed(replay *r) {
    uint32_t cta = next_u(r), index = next_u(r), generation = next_u(r);
    return r->is_short ? CHK_BAD_INPUT : chk_named_completed(r->cluster, cta, index, generation);
}

static chk_status named_passed(replay *r) {
    uint32_t index = next_u(r), generation = next_u(r);
    return r->is_short ? CHK_BAD_INPUT : chk_named_passed(r->cluster, &r->gang, index, generation);
}

static chk_status cluster_arrive(replay *r) {
    chk_sync sync = read_sync(r);
    return r->is_short ? CHK_BAD_INPUT : chk_cluster_arrive(r->cluster, &r->gang, sync);
}

static chk_status cluster_completed(replay *r) { return chk_cluster_completed(r->cluster); }
static chk_status cluster_passed(replay *r) { return chk_cluster_passed(r->cluster, &r->gang); }

static chk_status fence(replay *r) {
    chk_fence_kind kind = (chk_fence_kind)(next(r) & 0xFF);
    uint32_t spaces = next_u(r);
    chk_sync sync = read_sync(r);
    return r->is_short ? CHK_BAD_INPUT : chk_fence(r->cluster, &r->gang, kind, spaces, sync);
}

static chk_status warp_barrier(replay *r) { return chk_warp_barrier(r->cluster, &r->gang); }

static chk_status atomic(replay *r) {
    chk_sync sync = read_sync(r);
    int32_t site = next_i(r);
    size_t count = next_count(r);
    uint64_t *addresses = next_addresses(r, count);
    return r->is_short ? CHK_BAD_INPUT : chk_atomic(r->cluster, &r->gang, addresses, count, sync, site);
}

static chk_status acquire(replay *r) {
    chk_sync sync = read_sync(r);
    size_t count = next_count(r);
    uint64_t *addresses = next_addresses(r, count);
    return r->is_short ? CHK_BAD_INPUT : chk_acquire(r->cluster, &r->gang, addresses, count, sync);
}

static chk_status warp_exit(replay *r) {
    uint32_t cta = next_u(r), warp = next_u(r), leaving = next_u(r);
    int32_t wgmma = next_i(r);
    size_t grouped = next_count(r), open = next_count(r);
    chk_bulk_op *ops = room(r, (grouped + open) * sizeof *ops);
    for (size_t i = 0; ops && i < grouped + open; i++) {
        ops[i] = (chk_bulk_op){.lane = next_u(r), .name = next_i(r)};
        ops[i].token = token_of(r, next(r));
        ops[i].has_read = next(r) != 0;
        ops[i].committed = next(r) != 0;
    }
    if (r->is_short) return CHK_BAD_INPUT;
    return chk_warp_exit(r->cluster, cta, warp, leaving, ops, grouped, ops + grouped, open, wgmma);
}

static void read_barriers(replay *r, chk_cta_end *end) {
    end->num_barriers = next_count(r);
    chk_barrier_state *states = room(r, end->num_barriers * sizeof *states);
    for (size_t i = 0; states && i < end->num_barriers; i++) {
        states[i] = (chk_barrier_state){.offset = next_u(r), .phase = next_i(r), .pending = next_u(r)};
        states[i].expected = next_u(r);
        states[i].tx = next(r);
    }
    end->barriers = states;
}

static chk_status cta_exit(replay *r) {
    chk_cta_end end = {0};
    const uint16_t *registers[CHK_MAX_WARPS] = {NULL};
    uint32_t counts[CHK_MAX_WARPS] = {0};
    uint32_t cta = next_u(r);
    end.tmem_blocks = next_u(r);
    for (int i = 0; i < 16; i++) {
        end.named[i].arrived = next_u(r);
        end.named[i].required = next_u(r);
    }
    read_barriers(r, &end);
    for (int warp = 0; warp < CHK_MAX_WARPS && r->at < r->end; warp++) {
        counts[warp] = (uint32_t)next_count(r);
        uint16_t *list = room(r, counts[warp] * sizeof *list);
        for (uint32_t i = 0; list && i < counts[warp]; i++) list[i] = (uint16_t)next(r);
        registers[warp] = list;
    }
    end.registers = registers;
    end.num_registers = counts;
    return r->is_short ? CHK_BAD_INPUT : chk_cta_exit(r->cluster, cta, &end);
}

static chk_status report(replay *r) {
    chk_finding finding = {.other = -1, .cluster = -1, .cta = -1, .first_warp = -1, .last_warp = -1,
                           .agent_kind = -1, .agent_a = -1, .agent_b = -1, .lane = -1, .other_lane = -1};
    finding.kind = next_i(r);
    finding.site = next_i(r);
    for (int i = 0; i < 4; i++) finding.extra[i] = next_i(r);
    finding.size = next_i(r);
    return r->is_short ? CHK_BAD_INPUT : chk_report(r->launch, &finding);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

enum { NOTHING = 0, CLUSTER = 1, GANG = 3 };

static const struct {
    chk_status (*run)(replay *);
    int reads; /* what the event starts with */
} EVENTS[CHK_NUM_EVENTS] = {
    [CHK_EV_CLUSTER_BEGIN] = {begin, NOTHING},
    [CHK_EV_CLUSTER_END] = {end_cluster, NOTHING},
    [CHK_EV_SHARED] = {shared, GANG},
    [CHK_EV_GLOBAL] = {global, GANG},
    [CHK_EV_TMEM] = {tmem, GANG},
    [CHK_EV_TMEM_FREED] = {tmem_freed, GANG},
    [CHK_EV_ISSUE] = {issue, GANG},
    [CHK_EV_WAITED] = {waited, GANG},
    [CHK_EV_TMEM_WAIT] = {tmem_wait, GANG},
    [CHK_EV_CLOCK_TAKE] = {clock_take, CLUSTER},
    [CHK_EV_CLOCK_RELEASE] = {clock_release, CLUSTER},
    [CHK_EV_DEFERRED] = {deferred, CLUSTER},
    [CHK_EV_CREATED] = {created, GANG},
    [CHK_EV_ARRIVE] = {arrive, GANG},
    [CHK_EV_PASSED] = {passed, GANG},
    [CHK_EV_NAMED_ARRIVE] = {named_arrive, GANG},
    [CHK_EV_NAMED_COMPLETED] = {named_completed, CLUSTER},
    [CHK_EV_NAMED_PASSED] = {named_passed, GANG},
    [CHK_EV_CLUSTER_ARRIVE] = {cluster_arrive, GANG},
    [CHK_EV_CLUSTER_COMPLETED] = {cluster_completed, CLUSTER},
    [CHK_EV_CLUSTER_PASSED] = {cluster_passed, GANG},
    [CHK_EV_FENCE] = {fence, GANG},
    [CHK_EV_WARP_BARRIER] = {warp_barrier, GANG},
    [CHK_EV_ATOMIC] = {atomic, GANG},
    [CHK_EV_ACQUIRE] = {acquire, GANG},
    [CHK_EV_WARP_EXIT] = {warp_exit, CLUSTER},
    [CHK_EV_CTA_EXIT] = {cta_exit, CLUSTER},
    [CHK_EV_REPORT] = {report, NOTHING},
};

/* Room for the lists of an event: an operand, the largest item, takes 8 words at least. */
static int reserve(replay *r, size_t words) {
    size_t bytes = 16 * words + 64 * sizeof(chk_operand);
    r->scratch_used = 0;
    if (bytes <= r->scratch_bytes) return 1;
    free(r->scratch);
    r->scratch = malloc(2 * bytes);
    r->scratch_bytes = r->scratch ? 2 * bytes : 0;
    return r->scratch != NULL;
}

static chk_status run_event(replay *r, int64_t event) {
    if (event < 0 || event >= CHK_NUM_EVENTS) return CHK_BAD_INPUT;
    if ((EVENTS[event].reads & 1) && !read_cluster(r)) return CHK_BAD_INPUT;
    if ((EVENTS[event].reads & 2) && !read_gang(r)) return CHK_BAD_INPUT;
    return EVENTS[event].run(r);
}

static chk_status run_stream(replay *r, const int64_t *words, size_t count, chk_replayed *replayed) {
    const int64_t *end = words + count;
    while (end - words >= 2) {
        int64_t event = words[0], length = words[1];
        words += 2;
        if (length < 0 || length > end - words) length = end - words;
        if (!reserve(r, (size_t)length)) return CHK_NO_MEMORY;
        r->at = words;
        r->end = words += length;
        r->is_short = 0;
        chk_status status = run_event(r, event);
        replayed->events++;
        if (status == CHK_BAD_INPUT) replayed->refused++;
        else if (status != CHK_OK) return status;
    }
    return CHK_OK;
}

static void give_all(replay *r) {
    chk_cluster **clusters = r->clusters.items;
    for (size_t i = 0; i < r->clusters.capacity; i++)
        if (clusters[i] != (chk_cluster *)UINTPTR_MAX) chk_cluster_destroy(clusters[i]);
    free(r->clusters.items);
    free(r->tokens.items);
    free(r->barriers.items);
    free(r->clocks.items);
    free(r->scratch);
}

chk_status chk_replay(chk_launch *launch, const int64_t *words, size_t count, chk_replayed *replayed) {
    replay r = {.launch = launch, .clusters = {.size = sizeof(chk_cluster *)}, .tokens = {.size = sizeof(chk_token)},
                .barriers = {.size = sizeof(int32_t)}, .clocks = {.size = sizeof(int32_t)}};
    *replayed = (chk_replayed){0, 0};
    chk_status status = run_stream(&r, words, count, replayed);
    give_all(&r);
    return status;
}
