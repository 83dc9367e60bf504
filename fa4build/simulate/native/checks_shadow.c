/* Shadow state: who last wrote a granule and who has read it since. The twin of shadow.py. */
#include "checks_state.h"

#include <stdlib.h>

/* ---- columns of reads, which go on to the next shadow with every read forgotten ---------------------------------- */

typedef struct column column;
struct column {
    column *next;
};
#define SIZES 8
#define KEPT_BYTES ((size_t)256 << 20)
static struct {
    size_t bytes;
    column *first;
} unused[SIZES];
static size_t kept;

static size_t column_bytes(uint32_t num_cells) { return (num_cells + 1) * sizeof(chk_read); }

/* A column without reads. */
static chk_read *take_column(chk_launch *launch, uint32_t num_cells) {
    size_t bytes = column_bytes(num_cells);
    for (int k = 0; k < SIZES; k++) {
        column *found = unused[k].first;
        if (!found || unused[k].bytes != bytes) continue;
        if (launch->max_bytes && bytes > launch->max_bytes - launch->used_bytes) return NULL;
        unused[k].first = found->next;
        found->next = NULL;
        launch->used_bytes += bytes, kept -= bytes;
        return (chk_read *)found;
    }
    return chk_take(launch, num_cells + 1, sizeof(chk_read));
}

static void give_column(chk_launch *launch, chk_read *reads, uint32_t num_cells) {
    size_t bytes = column_bytes(num_cells);
    int k = 0;
    while (k < SIZES && unused[k].first && unused[k].bytes != bytes) k++;
    if (!reads || k == SIZES || kept + bytes > KEPT_BYTES) {
        chk_give(launch, reads, num_cells + 1, sizeof(chk_read));
        return;
    }
    column *given = (column *)reads;
    unused[k].bytes = bytes, given->next = unused[k].first, unused[k].first = given;
    launch->used_bytes -= bytes, kept += bytes;
}

/* ---- shadows ----------------------------------------------------------------------------------------------------- */

/* Room for which columns of a granule hold a read: that many words of 64. */
static int widen(chk_launch *launch, chk_shadow *shadow, uint32_t words) {
    uint64_t *wide = chk_take(launch, (size_t)shadow->num_cells * words, sizeof *wide);
    if (!wide) return 0;
    for (uint32_t cell = 0; cell < shadow->num_cells && shadow->words; cell++)
        if (shadow->cells[cell].read_mask)
            memcpy(wide + (size_t)cell * words, shadow->columns + (size_t)cell * shadow->words,
                   shadow->words * sizeof *wide);
    chk_give(launch, shadow->columns, (size_t)shadow->num_cells * shadow->words, sizeof *wide);
    shadow->columns = wide;
    shadow->words = words;
    return 1;
}

/* Chunks of lanes of each cell: none yet. */
static chk_lanes **take_lanes(chk_launch *launch, uint32_t num_cells) {
    return chk_take(launch, num_cells / CHK_CHUNK + 1, sizeof(chk_lanes *));
}

static void give_lanes(chk_launch *launch, chk_lanes **chunks, uint32_t num_cells) {
    for (uint32_t k = 0; chunks && k < num_cells / CHK_CHUNK + 1; k++)
        chk_give(launch, chunks[k], CHK_CHUNK, sizeof(chk_lanes));
    chk_give(launch, chunks, num_cells / CHK_CHUNK + 1, sizeof *chunks);
}

/* Where the lanes of a cell are kept; NULL when there is no memory. */
static inline chk_lanes *place_lanes(chk_launch *launch, chk_lanes **chunks, uint32_t cell) {
    chk_lanes **chunk = &chunks[cell / CHK_CHUNK];
    if (!*chunk && (*chunk = chk_take(launch, CHK_CHUNK, sizeof(chk_lanes))))
        memset(*chunk, CHK_NO_LANE, CHK_CHUNK * sizeof(chk_lanes));
    return *chunk ? &(*chunk)[cell % CHK_CHUNK] : NULL;
}

int chk_shadow_create(chk_launch *launch, chk_shadow *shadow, uint32_t num_cells, int keeps_lanes) {
    shadow->num_cells = num_cells;
    shadow->cells = chk_take(launch, num_cells, sizeof *shadow->cells);
    if (keeps_lanes && !(shadow->write_lanes = take_lanes(launch, num_cells))) return 0;
    return shadow->cells && widen(launch, shadow, 1);
}

void chk_shadow_destroy(chk_launch *launch, chk_shadow *shadow) {
    for (uint32_t cell = 0; shadow->num_columns && cell < shadow->num_cells; cell++) chk_forget_reads(shadow, cell);
    chk_give(launch, shadow->cells, shadow->num_cells, sizeof *shadow->cells);
    chk_give(launch, shadow->columns, (size_t)shadow->num_cells * shadow->words, sizeof *shadow->columns);
    give_lanes(launch, shadow->write_lanes, shadow->num_cells);
    for (uint32_t column = 0; column < shadow->num_columns; column++) {
        give_column(launch, shadow->reads[column], shadow->num_cells);
        give_lanes(launch, shadow->read_lanes[column], shadow->num_cells);
    }
}

int chk_shadow_add_reader(chk_launch *launch, chk_shadow *shadow, int32_t component) {
    uint32_t column = shadow->num_columns;
    if (column == 64 * shadow->words && !widen(launch, shadow, 2 * shadow->words)) return 0;
    shadow->reads[column] = take_column(launch, shadow->num_cells);
    if (!shadow->reads[column]) return 0;
    if (shadow->write_lanes && !(shadow->read_lanes[column] = take_lanes(launch, shadow->num_cells))) return 0;
    shadow->reader_of[column] = (int16_t)component;
    shadow->column_of[component] = (int16_t)++shadow->num_columns;
    return 1;
}

/* Every column that holds a read of the granule: `read` and `component` of it. */
#define EACH_READ(shadow, cell, body) \
    for (uint32_t word = 0; word < (shadow)->words; word++) { \
        uint64_t left = (shadow)->columns[(size_t)(cell) * (shadow)->words + word]; \
        for (; left; left &= left - 1) { \
            uint32_t column = 64 * word + (uint32_t)__builtin_ctzll(left); \
            chk_read *read = &(shadow)->reads[column][cell]; \
            int32_t component = (shadow)->reader_of[column]; \
            body \
        } \
    }

int chk_reads_unordered(const chk_shadow *shadow, uint32_t cell, uint32_t bits, const int32_t *clock) {
    if (!(shadow->cells[cell].read_mask & bits)) return 0;
    EACH_READ(shadow, cell, { if (read->count > clock[component] && (read->bits & bits)) return 1; })
    return 0;
}

int32_t chk_first_reader(const chk_shadow *shadow, uint32_t cell, const int32_t *clock, int32_t *count) {
    int32_t first = -1;
    EACH_READ(shadow, cell, {
        if (read->count > clock[component] && (first < 0 || component < first)) {
            first = component;
            *count = read->count;
        }
    })
    return first;
}

/* ---- lanes ------------------------------------------------------------------------------------------------------- */

int chk_note_write_lanes(chk_launch *launch, chk_shadow *shadow, uint32_t cell, int32_t component, int32_t met,
                         chk_lanes lanes) {
    const chk_cell *before = &shadow->cells[cell];
    chk_lanes *kept = place_lanes(launch, shadow->write_lanes, cell), untouched = (chk_lanes)(lanes == CHK_NO_LANE);
    int is_fresh = before->writer != component + 1 || before->written <= met;
    if (kept) *kept = is_fresh ? lanes : (lanes & ~untouched) | (*kept & untouched);
    return kept != NULL;
}

int chk_note_read_lanes(chk_launch *launch, chk_shadow *shadow, uint32_t cell, uint32_t column, int32_t met,
                        chk_lanes lanes) {
    chk_lanes *kept = place_lanes(launch, shadow->read_lanes[column], cell);
    if (!kept) return 0;
    if (shadow->reads[column][cell].count <= met) {
        *kept = lanes;
        return 1;
    }
    chk_lanes untouched = (chk_lanes)(lanes == CHK_NO_LANE), alone = (chk_lanes)(*kept == CHK_NO_LANE);
    chk_lanes same = (chk_lanes)(*kept == lanes) | alone;
    chk_lanes both = (lanes & same) | (CHK_EVERY(CHK_MANY_LANES) & ~same);
    *kept = (*kept & untouched) | (both & ~untouched);
    return 1;
}

/* Whether every byte was touched by the lane that looks at it, if by any since the lanes met. */
static inline int are_same_lanes(const chk_view *view, const chk_lanes *lanes, uint32_t bits) {
    chk_lanes other = (chk_lanes)((*lanes != view->lanes) & (*lanes != CHK_NO_LANE));
    uint64_t halves[2];
    memcpy(halves, &other, sizeof halves);
    if (!(halves[0] | halves[1])) return 1;
    for (uint32_t left = bits; left; left &= left - 1)
        if (other[__builtin_ctz(left)]) return 0;
    return 1;
}

/* Whether one byte's access, by a lane of a slot, is not in the view's clock. */
static int is_lane_late(const chk_view *view, uint32_t slot, uint8_t lane, uint8_t looking, int32_t count) {
    if (lane == CHK_NO_LANE) return 0;
    if (view->slot == (int32_t)slot && view->knows_own && lane == looking) return 0;
    if (lane == CHK_MANY_LANES) return 1;
    int32_t component = view->cluster->lane_component[slot * CHK_WARP_LANES + lane] - 1;
    return component < 0 || view->clock[component] < count;
}

/* Whether the view has come after any single lane of a slot at a count. */
static int has_some_lane(const chk_view *view, uint32_t slot, int32_t count) {
    const int16_t *components = view->cluster->lane_component + slot * CHK_WARP_LANES;
    for (int lane = 0; lane < CHK_WARP_LANES; lane++)
        if (components[lane] && view->clock[components[lane] - 1] >= count) return 1;
    return 0;
}

int chk_is_lane_fault(const chk_view *view, int32_t component, int32_t count) {
    const chk_cluster *cluster = view->cluster;
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) return 0;
    int32_t kind = cluster->keys[component].kind;
    if (kind == CHK_MBARRIER) return 0;
    uint32_t slot = (uint32_t)cluster->keys[component].a;
    if ((int32_t)slot == view->slot) return kind != CHK_BULK && kind != CHK_MMA && kind != CHK_WGMMA;
    if (kind != CHK_WARP) return 0;
    return cluster->has_lanes[slot] && has_some_lane(view, slot, count);
}

/* The lanes of a warp: `lanes` is how far the whole warp is not known to have come. */
static int are_lanes_late(const chk_view *view, uint32_t slot, int32_t count, const chk_lanes *lanes, uint32_t bits) {
    int is_own = view->slot == (int32_t)slot;
    if (!is_own && (!view->cluster->has_lanes[slot] || !has_some_lane(view, slot, count))) return 1;
    if (is_own && !view->knows_own && !view->cluster->has_lanes[slot]) return 1;
    if (is_own && view->knows_own && are_same_lanes(view, lanes, bits)) return 0;
    for (uint32_t left = bits; left; left &= left - 1) {
        int byte = __builtin_ctz(left);
        if (is_lane_late(view, slot, (*lanes)[byte], view->lanes[byte], count)) return 1;
    }
    return 0;
}

/* Copies of cp.async: those of the same lane that it has waited for. */
static int are_copies_late(const chk_view *view, uint32_t slot, int32_t count, const chk_lanes *lanes, uint32_t bits) {
    if (view->slot != (int32_t)slot || !view->knows_own) return 1;
    if (view->cluster->seen[CHK_SEEN_CP_ASYNC][slot] < count) return 1;
    return !are_same_lanes(view, lanes, bits);
}

int chk_is_late(const chk_view *view, int32_t component, int32_t count, const chk_lanes *lanes, uint32_t bits) {
    if (view->clock[component] >= count) return 0;
    if (!lanes || view->slot < 0) return 1;
    const chk_component_key *key = &view->cluster->keys[component];
    if (key->kind == CHK_WARP) return are_lanes_late(view, (uint32_t)key->a, count, lanes, bits);
    if (key->kind == CHK_CP_ASYNC) return are_copies_late(view, (uint32_t)key->a, count, lanes, bits);
    return 1;
}

int chk_write_late(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t bits) {
    const chk_cell *at = &shadow->cells[cell];
    if (!at->writer || !(at->write_mask & bits)) return 0;
    const chk_lanes *lanes = chk_lanes_at(shadow->write_lanes, cell);
    return chk_is_late(view, at->writer - 1, at->written, lanes, at->write_mask & bits);
}

/* Whether the lanes of a warp have met in a shuffle behind a read, and the view knows. */
static int is_read_over(const chk_view *view, int32_t component, int32_t count) {
    if (view->slot < 0 || view->cluster->keys[component].kind != CHK_WARP) return 0;
    uint32_t slot = (uint32_t)view->cluster->keys[component].a;
    if ((int32_t)slot == view->slot) return view->cluster->read_until[slot] >= count;
    int32_t known = view->cluster->read_component[slot] - 1;
    return known >= 0 && view->clock[known] >= count;
}

static int is_read_late(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t column,
                        uint32_t bits) {
    const chk_read *read = &shadow->reads[column][cell];
    const chk_lanes *lanes = chk_lanes_at(shadow->read_lanes[column], cell);
    int32_t component = shadow->reader_of[column];
    return (read->bits & bits) && chk_is_late(view, component, read->count, lanes, read->bits & bits) &&
           !is_read_over(view, component, read->count);
}

int chk_reads_late(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t bits) {
    if (!(shadow->cells[cell].read_mask & bits)) return 0;
    EACH_READ(shadow, cell, {
        if (read->count > view->clock[component] && is_read_late(view, shadow, cell, column, bits)) return 1;
    })
    return 0;
}

int32_t chk_first_late_reader(const chk_view *view, const chk_shadow *shadow, uint32_t cell, uint32_t bits,
                              int32_t *count) {
    int32_t first = -1;
    EACH_READ(shadow, cell, {
        if ((first < 0 || component < first) && is_read_late(view, shadow, cell, column, bits)) {
            first = component;
            *count = read->count;
        }
    })
    return first;
}

void chk_forget_reads(chk_shadow *shadow, uint32_t cell) {
    if (!shadow->cells[cell].read_mask) return;
    EACH_READ(shadow, cell, {
        (void)component;
        *read = (chk_read){0};
    })
    memset(shadow->columns + (size_t)cell * shadow->words, 0, shadow->words * sizeof *shadow->columns);
    shadow->cells[cell].read_mask = 0;
}
