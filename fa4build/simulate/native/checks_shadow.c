/* Shadow state: who last wrote a granule and who has read it since. The twin of shadow.py. */
#include "checks_state.h"

#define FIRST_COLUMNS 16

static uint32_t words_of(uint32_t columns) { return (columns + 63) / 64; }

static void give_table(chk_launch *launch, const chk_shadow *shadow) {
    chk_give(launch, shadow->reads, (size_t)shadow->num_cells * shadow->capacity, sizeof *shadow->reads);
    chk_give(launch, shadow->columns, (size_t)shadow->num_cells * shadow->words, sizeof *shadow->columns);
}

/* A table of reads of that many columns, with what the old one held. */
static int widen(chk_launch *launch, chk_shadow *shadow, uint32_t capacity) {
    chk_shadow wide = *shadow;
    wide.capacity = capacity;
    wide.words = words_of(capacity);
    wide.reads = chk_take(launch, (size_t)wide.num_cells * wide.capacity, sizeof *wide.reads);
    wide.columns = chk_take(launch, (size_t)wide.num_cells * wide.words, sizeof *wide.columns);
    if (!wide.reads || !wide.columns) {
        give_table(launch, &wide);
        return 0;
    }
    for (uint32_t cell = 0; cell < shadow->num_cells && shadow->capacity; cell++) {
        if (!shadow->cells[cell].read_mask) continue;
        memcpy(wide.reads + (size_t)cell * wide.capacity, shadow->reads + (size_t)cell * shadow->capacity,
               shadow->capacity * sizeof *wide.reads);
        memcpy(wide.columns + (size_t)cell * wide.words, shadow->columns + (size_t)cell * shadow->words,
               shadow->words * sizeof *wide.columns);
    }
    give_table(launch, shadow);
    *shadow = wide;
    return 1;
}

int chk_shadow_create(chk_launch *launch, chk_shadow *shadow, uint32_t num_cells) {
    shadow->num_cells = num_cells;
    shadow->cells = chk_take(launch, num_cells, sizeof *shadow->cells);
    return shadow->cells && widen(launch, shadow, FIRST_COLUMNS);
}

void chk_shadow_destroy(chk_launch *launch, chk_shadow *shadow) {
    chk_give(launch, shadow->cells, shadow->num_cells, sizeof *shadow->cells);
    give_table(launch, shadow);
}

int chk_shadow_add_reader(chk_launch *launch, chk_shadow *shadow, int32_t component) {
    if (shadow->num_columns == shadow->capacity && !widen(launch, shadow, 2 * shadow->capacity)) return 0;
    shadow->reader_of[shadow->num_columns] = (int16_t)component;
    shadow->column_of[component] = (int16_t)++shadow->num_columns;
    return 1;
}

/* Every column that holds a read of the granule: `read` and `component` of it. */
#define EACH_READ(shadow, cell, body) \
    for (uint32_t word = 0; word < (shadow)->words; word++) { \
        uint64_t left = (shadow)->columns[(size_t)(cell) * (shadow)->words + word]; \
        for (; left; left &= left - 1) { \
            uint32_t column = 64 * word + (uint32_t)__builtin_ctzll(left); \
            const chk_read *read = &(shadow)->reads[(size_t)(cell) * (shadow)->capacity + column]; \
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
        shadow->reads[read - shadow->reads] = (chk_read){0};
    })
    memset(shadow->columns + (size_t)cell * shadow->words, 0, shadow->words * sizeof *shadow->columns);
    shadow->cells[cell].read_mask = 0;
}
