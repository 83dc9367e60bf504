/* State of the hazard checks: what checks.h hides. Included by the checks_*.c files only. */
#ifndef FA4BUILD_NATIVE_CHECKS_STATE_H
#define FA4BUILD_NATIVE_CHECKS_STATE_H

#include <string.h>

#include "checks.h"

#define CHK_WARP_LANES 32
#define CHK_QUARTERS 4
#define CHK_COLUMNS 512
#define CHK_TENSOR_CELLS (CHK_QUARTERS * CHK_COLUMNS)
#define CHK_FULL 0xFFFFu
#define CHK_SLOT_KINDS CHK_MBARRIER /* component kinds that belong to a warp */

/* ---- launch ------------------------------------------------------------------------------------------------------ */

typedef struct chk_history chk_history;     /* checks_order.c: of a launch */
typedef struct chk_ordered chk_ordered; /* of a cluster */

struct chk_launch {
    chk_history *order; /* NULL: not asked for */
    size_t used_bytes, max_bytes;
    chk_buffer *buffers;
    size_t num_buffers, last_buffer;
    uint64_t *visited, visit; /* of each buffer: the access that saw it last */
    int has_unwritten;
    uint32_t rules; /* CHK_RULES_* */
    chk_finding *findings;
    size_t num_findings, lost;
    int32_t *seen; /* hash table of 2 * CHK_MAX_FINDINGS: index of a finding + 1 */
};

/* Zeroed memory that counts against the launch's bound; NULL when there is none. Sizes that overflow have none. */
void *chk_take(chk_launch *launch, size_t count, size_t size);
void chk_give(chk_launch *launch, void *memory, size_t count, size_t size);
/* Grows an array of `size`-byte elements to at least `wanted`; new elements are zero. 0 when there is no memory. */
int chk_grow(chk_launch *launch, void **array, size_t *capacity, size_t wanted, size_t size);

/* ---- clocks ------------------------------------------------------------------------------------------------------ */

/* What a synchronisation object carries: g, p and x (see clocks.py) and e, `length` counts of each; further ones are 0.
 * e is what came first in execution; g, what of that is also visible in memory: what was released and acquired. */
typedef struct {
    int32_t *counts; /* g, p, x, e, each `capacity` long */
    int32_t length, capacity;
    int32_t next_free; /* while nobody holds it */
    uint8_t is_held;   /* CHK_FREE, _HELD_INSIDE (a barrier, a word), _HELD_OUTSIDE (a handle of the machine) */
} chk_clock;
enum { CHK_FREE = 0, CHK_HELD_INSIDE, CHK_HELD_OUTSIDE };
enum { CHK_PART_G = 0, CHK_PART_P, CHK_PART_X, CHK_PART_E, CHK_PARTS };

typedef struct {
    int32_t kind, a, b;
} chk_component_key;

/* ---- shadows ----------------------------------------------------------------------------------------------------- */

/* Who wrote a granule last, and what is known of its bytes. All zero: untouched. */
typedef struct {
    int32_t writer; /* component + 1 */
    int32_t written, write_site, read_site;
    int32_t unused_count;
    uint16_t write_mask, read_mask, initialised, barrier_bytes;
    uint8_t by_async;
    uint8_t unused_byte;
    uint16_t unused;
} chk_cell;

/* Newest read of a granule by one component since the last whole write. */
typedef struct {
    int32_t count;
    uint16_t bits, unused;
} chk_read;

/* Which lane of its warp touched each byte of a granule, since the lanes of that warp met last. */
typedef chk_lane_map chk_lanes;
#define CHK_NO_LANE 0xFF    /* none, or before the lanes met */
#define CHK_MANY_LANES 0xFE /* several have read it */
#define CHK_CHUNK 256 /* cells whose lanes are kept together, once one of them was touched */
#define CHK_EVERY(lane) ((chk_lanes){0} + (uint8_t)(lane))

/* Reads are kept by component, in columns that are given out as components come to read this memory. */
typedef struct {
    chk_cell *cells;
    uint32_t num_cells;
    uint32_t num_columns, words;           /* columns given out; words of 64 columns that a granule has */
    chk_read *reads[CHK_COMPONENTS];       /* [column][cell] */
    uint64_t *columns;                     /* [cell][words]: which of them hold a read */
    int16_t column_of[CHK_COMPONENTS];     /* + 1 */
    int16_t reader_of[CHK_COMPONENTS];     /* of a column */
    /* Kept only with CHK_RULES_LANES, and of generic accesses to shared memory: by cell, and by column and cell. */
    chk_lanes **write_lanes, **read_lanes[CHK_COMPONENTS];
} chk_shadow;

typedef struct {
    chk_shadow shadow;
    int32_t *loads;       /* [cell][slot]: newest tcgen05.ld since the last write, as wait::ld counts; 0: none */
    uint64_t *load_slots; /* [cell][words]: which slots have one */
    int32_t *load_site;
    uint32_t words;
    uint32_t *tags; /* [cell]: of the product that wrote it last; see chk_operation */
} chk_tensor;

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t cta, offset;
    int32_t observed;  /* newest phase whose end a wait has seen; -1: none */
    int32_t clock[2];  /* of the newest phase and the one before, at phase % 2; -1: none */
    int32_t phase[2];
    int32_t remote[2];    /* as clock: what threads of other CTAs have released to the cluster */
    int32_t slot, made;   /* who has initialised it, and when */
    int32_t fenced, here; /* when that was published by a fence: to all, and in its CTA; -1: not yet */
    int32_t site;
} chk_barrier;

typedef struct {
    uint32_t cta, offset;
    int32_t slot, site;
} chk_unfenced;

/* A generation of a named barrier that warps still have to pass. */
typedef struct {
    uint32_t cta, index, generation, waiting;
    int32_t clock;
} chk_generation;

typedef struct {
    uint64_t address;
    int32_t clock; /* + 1; 0: a free place of the table */
} chk_semaphore;

/* ---- cluster ----------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t clock;    /* of the current generation; -1: none */
    uint32_t waiting; /* its warps that wait */
} chk_named;

typedef struct {
    chk_shadow shared;
    chk_tensor *tensor;         /* made on first use */
    int16_t *barrier_component; /* by offset / 8: component + 1 */
    chk_named named[16];
} chk_cta;

enum { CHK_SEEN_CP_ASYNC = 0, CHK_SEEN_LD, CHK_SEEN_ST, CHK_NUM_SEEN };

/* What fences make of weaker synchronisation: `released` goes with later relaxed arrivals, `pending` came with relaxed
 * waits and is taken by an acquiring fence. */
typedef struct {
    int32_t released, pending; /* clocks; -1: none */
    uint32_t lanes;            /* that have executed the fence of `released` */
    uint8_t scope;             /* of that fence */
} chk_held;

struct chk_cluster {
    chk_launch *launch;
    chk_ordered *order; /* NULL: not asked for */
    uint32_t index, num_ctas, warps_a_cta, num_slots, shared_limit;
    chk_status failed; /* why a component or a clock could not be had */

    /* [row][CHK_COMPONENTS]. The first row of a slot has its number; others hold lanes that know more than the rest
     * (a strand: lanes of a warp that know the same). The count of the warp itself is how far all lanes have met. */
    int32_t *g, *p, *x, *e, *t;
    uint32_t num_rows;
    uint32_t *row_lanes; /* of a row; 0: a free one */
    int32_t *row_next;   /* the next strand of the slot; -1: none */
    uint32_t *present;   /* of a slot: lanes that there are */
    int16_t *lane_component; /* [slot * 32 + lane]: component + 1 */
    uint8_t *has_lanes;      /* of a slot: some lane has a component */
    int32_t *seen[3];        /* [CHK_SEEN_*][slot]: what each lane has waited for of its own */
    int32_t *read_until;     /* of a slot: how far its lanes' reads were over when they met in a shuffle */
    int16_t *read_component; /* of a slot: component + 1 by which others know of that */
    uint32_t *copying;       /* of a slot: lanes that issued cp.async since the lanes met */
    int8_t *tensor_lane;     /* of a slot: the lane that issued its newest tcgen05.mma or cp, + 1 */
    int32_t *space_fence;    /* of a slot: its newest proxy fence that holds for the whole cluster's memory */
    chk_held *held;          /* of a slot */
    int32_t now[CHK_COMPONENTS];
    uint8_t *synced; /* slot has passed a cluster barrier */
    chk_component_key keys[CHK_COMPONENTS];
    int32_t num_components;
    int16_t *slot_component[CHK_SLOT_KINDS]; /* [kind][slot]: component + 1 */

    chk_cta *ctas;
    chk_barrier *barriers;
    size_t num_barriers, barrier_capacity;
    chk_unfenced *unfenced;
    size_t num_unfenced, unfenced_capacity;
    chk_generation *generations;
    size_t num_generations, generation_capacity;
    chk_semaphore *semaphores;
    size_t num_semaphores, semaphore_capacity; /* a power of two */
    int32_t cluster_arrivals, cluster_done;    /* clocks; -1: none */

    chk_clock *clocks;
    size_t num_clocks, clock_capacity;
    int32_t free_clock; /* -1: none */
};

/* ---- checks_clocks.c --------------------------------------------------------------------------------------------- */

/* Component of a key, made on first use; -1 with cluster->failed set when there is none left. */
int32_t chk_component(chk_cluster *cluster, chk_component_kind kind, uint32_t a, uint32_t b);
/* A new clock that holds nothing; -1 with cluster->failed set. */
int32_t chk_clock_new(chk_cluster *cluster);
void chk_clock_drop(chk_cluster *cluster, int32_t clock);
/* Merges what lanes of a slot know into `*clock` (made if -1), and ticks the slot: a release. `is_memory` 0: only the
 * order of execution and of tensor memory goes along (a relaxed arrival). 0 on failure. */
int chk_clock_collect(chk_cluster *cluster, int32_t *clock, uint32_t slot, uint32_t mask, int is_memory);
/* Merges another clock into `*clock` (made if -1). 0 on failure. */
int chk_clock_merge(chk_cluster *cluster, int32_t *clock, int32_t other, int is_memory);
/* Lanes of the slot come after everything in the clock (an acquire); -1: nothing. `is_memory` as above. */
void chk_clock_join(chk_cluster *cluster, uint32_t slot, uint32_t mask, int32_t clock, int is_memory);
void chk_clock_reach(chk_cluster *cluster, uint32_t slot, uint32_t mask, int32_t component, int32_t count,
                     int is_memory);
void chk_clock_tick(chk_cluster *cluster, uint32_t slot);
/* Lanes of a slot meet: bar.warp.sync, and what waits for all of them. */
void chk_clock_meet(chk_cluster *cluster, uint32_t slot, uint32_t mask);
/* fence.proxy.async of lanes of a slot for shared memory; `is_cluster`: of other CTAs too. */
void chk_clock_fence(chk_cluster *cluster, uint32_t slot, uint32_t mask, int is_cluster);
/* Component of a lane, made on first use; -1 with cluster->failed set. */
int32_t chk_lane_component(chk_cluster *cluster, uint32_t slot, uint32_t lane);
/* The row of a lane of a slot. */
uint32_t chk_row_of(const chk_cluster *cluster, uint32_t slot, uint32_t lane);
int chk_rows_create(chk_cluster *cluster);
void chk_rows_destroy(chk_cluster *cluster);

/* Whether all lanes of a slot are in a mask. */
static inline int chk_covers(const chk_cluster *cluster, uint32_t slot, uint32_t mask) {
    return !(cluster->present[slot] & ~mask);
}

static inline int chk_has_rule(const chk_cluster *cluster, uint32_t rule) { return (cluster->launch->rules & rule) != 0; }

/* Whether the machine holds this clock. */
static inline int chk_is_taken(const chk_cluster *cluster, int32_t clock) {
    return clock >= 0 && (size_t)clock < cluster->num_clocks && cluster->clocks[clock].is_held == CHK_HELD_OUTSIDE;
}

static inline int32_t *chk_row(int32_t *clocks, uint32_t slot) { return clocks + (size_t)slot * CHK_COMPONENTS; }

/* ---- checks_shadow.c --------------------------------------------------------------------------------------------- */

int chk_shadow_create(chk_launch *launch, chk_shadow *shadow, uint32_t num_cells, int keeps_lanes);
void chk_shadow_destroy(chk_launch *launch, chk_shadow *shadow);
/* A column for a component that has not read this memory yet; 0 on failure. */
int chk_shadow_add_reader(chk_launch *launch, chk_shadow *shadow, int32_t component);

/* Who looks at a granule. `slot` -1: nobody's lanes are asked for. */
typedef struct {
    const chk_cluster *cluster;
    const int32_t *clock;
    int32_t slot;
    chk_lanes lanes; /* of the bytes looked at */
    int knows_own;   /* what a lane did itself came first (not so for what a fence must have made visible) */
} chk_view;
/* Whether an access of `component` at `count`, by these lanes, is not in the view's clock. */
int chk_is_late(const chk_view *view, int32_t component, int32_t count, const chk_lanes *lanes, uint32_t bits);
/* The same of the last write to these bytes, and of any read of them since the last whole write. */
int chk_write_late(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t bits);
int chk_reads_late(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t bits);
/* The smallest component with such a read, and its count; -1: none. */
int32_t chk_first_late_reader(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t bits,
                              int32_t *count);
/* Whether some lanes of the component's warp are known to have come so far, but not all that matter. */
int chk_is_lane_fault(const chk_view *view, int32_t component, int32_t count);

/* Whether a read of these bytes since the last whole write is not in the clock. */
int chk_reads_unordered(const chk_shadow *shadow, uint32_t cell, uint32_t bits, const int32_t *clock);
/* The smallest component with an unordered read of the granule, and its count; -1: none. */
int32_t chk_first_reader(const chk_shadow *shadow, uint32_t cell, const int32_t *clock, int32_t *count);
void chk_forget_reads(chk_shadow *shadow, uint32_t cell);
/* Lanes of a write or read that is noted next; `met`: how far the lanes of the warp have met. 0 without memory. */
int chk_note_write_lanes(chk_launch *launch, chk_shadow *shadow, uint32_t cell, int32_t component, int32_t met,
                         chk_lanes lanes);
int chk_note_read_lanes(chk_launch *launch, chk_shadow *shadow, uint32_t cell, uint32_t column, int32_t met,
                        chk_lanes lanes);
/* The lanes of a cell in `write_lanes` or a row of `read_lanes`; NULL: none. */
static inline const chk_lanes *chk_lanes_at(chk_lanes *const *chunks, uint32_t cell) {
    return chunks && chunks[cell / CHK_CHUNK] ? &chunks[cell / CHK_CHUNK][cell % CHK_CHUNK] : NULL;
}

/* Whether the last write to these bytes is not in the clock. */
static inline int chk_write_unordered(const chk_cell *cell, uint32_t bits, const int32_t *clock) {
    return cell->writer && clock[cell->writer - 1] < cell->written && (cell->write_mask & bits);
}

/* Column of a component in a shadow, -1 when there is no memory for one. */
static inline int chk_reader_column(chk_launch *launch, chk_shadow *shadow, int32_t component) {
    if (!shadow->column_of[component] && !chk_shadow_add_reader(launch, shadow, component)) return -1;
    return shadow->column_of[component] - 1;
}

static inline void chk_note_read(chk_shadow *shadow, uint32_t cell, uint32_t bits, uint32_t column, int32_t count,
                                 int32_t site) {
    chk_read *read = &shadow->reads[column][cell];
    read->count = count;
    if (!read->bits) shadow->columns[(size_t)cell * shadow->words + column / 64] |= (uint64_t)1 << column % 64;
    read->bits |= (uint16_t)bits;
    shadow->cells[cell].read_mask |= (uint16_t)bits;
    shadow->cells[cell].read_site = site;
}

static inline void chk_note_write(chk_cell *cell, uint32_t bits, int32_t component, int32_t count, int32_t site,
                                  int by_async) {
    if (cell->writer != component + 1) cell->write_mask = 0;
    cell->write_mask |= (uint16_t)bits;
    cell->initialised |= (uint16_t)bits;
    cell->writer = component + 1;
    cell->written = count;
    cell->by_async = (uint8_t)by_async;
    cell->write_site = site;
}

/* ---- checks_findings.c ------------------------------------------------------------------------------------------- */

/* A finding of a gang at an instruction, everything else unset. */
chk_finding chk_finding_at(const chk_cluster *cluster, const chk_gang *gang, chk_kind kind, int32_t site);
/* A finding of a CTA at its end. */
chk_finding chk_finding_of_cta(const chk_cluster *cluster, uint32_t cta, chk_kind kind);
void chk_name_agent(const chk_cluster *cluster, chk_finding *finding, int32_t component);
void chk_add(chk_launch *launch, const chk_finding *finding);

/* ---- checks_memory.c: findings of a granule of shared memory ----------------------------------------------------- */

void chk_report_shared(chk_cluster *cluster, const chk_gang *gang, chk_kind kind, uint32_t cell, int32_t site);
/* The other side is the last write to the granule. */
void chk_report_shared_write(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, chk_kind kind,
                             uint32_t cell, const chk_view *view, int32_t site);
/* The other side is the first reader that is not in the view's clock. */
void chk_report_shared_read(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, uint32_t cell,
                            uint32_t bits, const chk_view *view, int32_t site);

/* ---- checks_global.c, checks_tensor.c: the parts of an asynchronous operation ------------------------------------ */

chk_status chk_global_operand(chk_cluster *cluster, const chk_gang *gang, const chk_operand *operand, int32_t site,
                              int is_write);
/* `clock`: of the issuing warp, with its own products in it. */
chk_status chk_product_reads(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                             const chk_operand *block, const int32_t *clock, chk_token token);
chk_status chk_product_writes(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation,
                              const chk_operand *block, const int32_t *clock, chk_token token);
void chk_tensor_destroy(chk_cluster *cluster, chk_tensor *tensor);
/* R5: a barrier is used from outside its CTA's threads. `gang` NULL and site -1: by an asynchronous arrival. */
void chk_note_unfenced(chk_cluster *cluster, const chk_gang *gang, const chk_barrier *barrier, int32_t site);

/* ---- gangs ------------------------------------------------------------------------------------------------------- */

static inline uint32_t chk_slot(const chk_cluster *cluster, uint32_t cta, uint32_t warp) {
    return cta * cluster->warps_a_cta + warp;
}

static inline uint32_t chk_mask(const chk_gang *gang, uint32_t k) { return gang->masks ? gang->masks[k] : 0xFFFFFFFFu; }

static inline uint32_t chk_gang_slot(const chk_cluster *cluster, const chk_gang *gang, uint32_t k) {
    return chk_slot(cluster, gang->cta, gang->warps[k]);
}

/* Whether the gang is one of the cluster's. */
static inline int chk_gang_ok(const chk_cluster *cluster, const chk_gang *gang) {
    if (gang->cta >= cluster->num_ctas || !gang->num_warps || gang->num_warps > CHK_MAX_WARPS) return 0;
    for (uint32_t k = 0; k < gang->num_warps; k++)
        if (gang->warps[k] >= cluster->warps_a_cta || (k && gang->warps[k] <= gang->warps[k - 1])) return 0;
    return 1;
}

/* Every position k of a gang whose warp has an active lane. */
#define CHK_EACH_ACTIVE(k, gang) \
    for (uint32_t k = 0; k < (gang)->num_warps; k++) \
        if (chk_mask(gang, k))

#endif
