/* R9 of registers: whether any path uses one before it was written. The twin of undefined.py.
 *
 * Sets of registers that may be undefined, forward over the basic blocks to a fixpoint. Moves hand an undefined value
 * on without using it; a write under a guard leaves a register possibly undefined. */
#include "checks_state.h"

typedef struct {
    const chk_code *code;
    size_t words;       /* of a set */
    uint64_t *entering; /* a set for each block and the exit */
    uint64_t *now;      /* the set behind the instruction looked at; also: registers said */
    uint8_t *reached, *is_waiting;
    uint32_t *waiting;
} flow;

static inline int has(const uint64_t *set, uint32_t r) { return set[r / 64] >> (r % 64) & 1; }
static inline void add(uint64_t *set, uint32_t r) { set[r / 64] |= (uint64_t)1 << r % 64; }
static inline void drop(uint64_t *set, uint32_t r) { set[r / 64] &= ~((uint64_t)1 << r % 64); }

static int reads_undefined(const chk_code *code, uint32_t i, const uint64_t *undefined) {
    for (uint32_t k = code->read_start[i]; k < code->read_start[i + 1]; k++)
        if (has(undefined, code->read[k])) return 1;
    return 0;
}

/* What may be undefined behind an instruction. */
static void step(const chk_code *code, uint32_t i, uint64_t *undefined) {
    int spreads = (code->flags[i] & CHK_IS_MOVE) && reads_undefined(code, i, undefined);
    if (!spreads && (code->flags[i] & CHK_IS_GUARDED)) return;
    for (uint32_t k = code->written_start[i]; k < code->written_start[i + 1]; k++)
        (spreads ? add : drop)(undefined, code->written[k]);
}

/* Joins a set into that of a block: whether the block has to be looked at again. */
static int join(flow *f, uint32_t block, const uint64_t *set) {
    uint64_t *known = f->entering + block * f->words, changed = !f->reached[block];
    f->reached[block] = 1;
    for (size_t w = 0; w < f->words; w++) {
        changed |= set[w] & ~known[w];
        known[w] |= set[w];
    }
    return changed != 0;
}

static void spread(flow *f) {
    const chk_code *code = f->code;
    uint32_t num_waiting = 0;
    f->waiting[num_waiting++] = 0;
    while (num_waiting) {
        uint32_t block = f->waiting[--num_waiting];
        f->is_waiting[block] = 0;
        memcpy(f->now, f->entering + block * f->words, f->words * sizeof *f->now);
        for (uint32_t i = code->block_start[block]; i < code->block_stop[block]; i++) step(code, i, f->now);
        for (uint32_t k = code->next_start[block]; k < code->next_start[block + 1]; k++) {
            uint32_t next = code->next[k];
            if (!join(f, next, f->now) || next == code->num_blocks || f->is_waiting[next]) continue;
            f->is_waiting[next] = 1;
            f->waiting[num_waiting++] = next;
        }
    }
}

static void report_uses(chk_launch *launch, const chk_code *code, uint32_t i, const uint64_t *undefined,
                        uint64_t *said) {
    for (uint32_t k = code->used_start[i]; k < code->used_start[i + 1]; k++) {
        uint32_t r = code->used[k];
        if (!has(undefined, r) || has(said, r)) continue;
        add(said, r);
        chk_finding finding = {.kind = CHK_UNDEFINED_REGISTER, .site = (int32_t)i, .other = -1, .cluster = -1,
                               .cta = -1, .first_warp = -1, .last_warp = -1, .agent_kind = -1, .agent_a = -1,
                               .agent_b = -1, .lane = -1, .other_lane = -1, .extra = {(int32_t)r, -1, -1, -1}};
        chk_add(launch, &finding);
    }
}

static void report_all(chk_launch *launch, flow *f) {
    const chk_code *code = f->code;
    memset(f->now, 0, f->words * sizeof *f->now);
    for (uint32_t block = 0; block < code->num_blocks; block++) {
        uint64_t *undefined = f->entering + block * f->words; /* zero where nothing leads to */
        for (uint32_t i = code->block_start[block]; i < code->block_stop[block]; i++) {
            report_uses(launch, code, i, undefined, f->now);
            step(code, i, undefined);
        }
    }
}

/* ---- input ------------------------------------------------------------------------------------------------------- */

/* Whether `count` lists, of numbers below `limit`, follow each other in one array. */
static int lists_ok(const uint32_t *start, const uint32_t *list, uint32_t count, uint32_t limit) {
    if (start[0]) return 0;
    for (uint32_t i = 0; i < count; i++)
        if (start[i + 1] < start[i]) return 0;
    for (uint32_t k = 0; k < start[count]; k++)
        if (list[k] >= limit) return 0;
    return 1;
}

static int code_ok(const chk_code *code) {
    uint32_t n = code->num_instructions;
    if (!code->num_blocks || code->num_blocks > 1u << 24 || code->num_registers > 1u << 24) return 0;
    for (uint32_t i = 0; i < code->num_blocks; i++)
        if (code->block_start[i] > code->block_stop[i] || code->block_stop[i] > n) return 0;
    return lists_ok(code->used_start, code->used, n, code->num_registers) &&
           lists_ok(code->read_start, code->read, n, code->num_registers) &&
           lists_ok(code->written_start, code->written, n, code->num_registers) &&
           lists_ok(code->next_start, code->next, code->num_blocks, code->num_blocks + 1);
}

static void give_flow(chk_launch *launch, flow *f) {
    size_t blocks = f->code->num_blocks + 1;
    chk_give(launch, f->entering, blocks * f->words, sizeof *f->entering);
    chk_give(launch, f->now, f->words, sizeof *f->now);
    chk_give(launch, f->reached, blocks, 1);
    chk_give(launch, f->is_waiting, blocks, 1);
    chk_give(launch, f->waiting, blocks, sizeof *f->waiting);
}

static int take_flow(chk_launch *launch, flow *f) {
    size_t blocks = f->code->num_blocks + 1;
    f->entering = chk_take(launch, blocks * f->words, sizeof *f->entering);
    f->now = chk_take(launch, f->words, sizeof *f->now);
    f->reached = chk_take(launch, blocks, 1);
    f->is_waiting = chk_take(launch, blocks, 1);
    f->waiting = chk_take(launch, blocks, sizeof *f->waiting);
    return f->entering && f->now && f->reached && f->is_waiting && f->waiting;
}

chk_status chk_undefined(chk_launch *launch, const chk_code *code) {
    if (!code_ok(code)) return CHK_BAD_INPUT;
    flow f = {.code = code, .words = code->num_registers / 64 + 1};
    chk_status status = CHK_NO_MEMORY;
    if (take_flow(launch, &f)) {
        for (uint32_t r = 0; r < code->num_registers; r++) add(f.entering, r);
        f.reached[0] = 1;
        spread(&f);
        report_all(launch, &f);
        status = CHK_OK;
    }
    give_flow(launch, &f);
    return status;
}
