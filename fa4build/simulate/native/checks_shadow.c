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

int chk_shadow_create(chk_launch *launch, chk_shadow *shadow, uint32_t num_cells) {
    shadow->num_cells = num_cells;
    shadow->cells = chk_take(launch, num_cells, sizeof *shadow->cells);
    return shadow->cells && widen(launch, shadow, 1);
}

void chk_shadow_destroy(chk_launch *launch, chk_shadow *shadow) {
    for (uint32_t cell = 0; shadow->num_columns && cell < shadow->num_cells; cell++) chk_forget_reads(shadow, cell);
    chk_give(launch, shadow->cells, shadow->num_cells, sizeof *shadow->cells);
    chk_give(launch, shadow->columns, (size_t)shadow->num_cells * shadow->words, sizeof *shadow->columns);
    for (uint32_t column = 0; column < shadow->num_columns; column++)
        give_column(launch, shadow->reads[column], shadow->num_cells);
}

int chk_shadow_add_reader(chk_launch *launch, chk_shadow *shadow, int32_t component) {
    uint32_t column = shadow->num_columns;
    if (column == 64 * shadow->words && !widen(launch, shadow, 2 * shadow->words)) return 0;
    shadow->reads[column] = take_column(launch, shadow->num_cells);
    if (!shadow->reads[column]) return 0;
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

void chk_forget_reads(chk_shadow *shadow, uint32_t cell) {
    if (!shadow->cells[cell].read_mask) return;
    EACH_READ(shadow, cell, {
        (void)component;
        *read = (chk_read){0};
    })
    memset(shadow->columns + (size_t)cell * shadow->words, 0, shadow->words * sizeof *shadow->columns);
    shadow->cells[cell].read_mask = 0;
}
