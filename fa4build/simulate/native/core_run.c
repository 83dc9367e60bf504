/* One warp runs: the loop over instructions, branches and where their ways meet again, exits: gang.py. */
#include "core.h"

#include <stdlib.h>

/* Takes one side of a branch on which lanes disagree, keeps the other and the meeting point. */
static int diverge(Warp *w, const Ins *i, uint32_t taken) {
    uint32_t everyone = w->active, rest = everyone & ~taken;
    int32_t following = w->pc + 1, meet = i->reconverge;
    if (w->depth + 2 >= MAX_DEPTH) return fault(w, "branches are nested deeper than %d", MAX_DEPTH);
    w->stack[w->depth++] = (Pending){meet, everyone, w->reconverge};
    w->reconverge = meet;
    if (following != meet) {
        if (i->target != meet) w->stack[w->depth++] = (Pending){i->target, taken, meet};
        w->active = rest, w->pc = following;
    } else {
        w->active = taken, w->pc = i->target;
    }
    return JUMP;
}

/* Which way the warp went at branches whose ways meet far away: a report names roles by them. */
#define FAR 20
static void note_way(Warp *w, const Ins *i, bool taken) {
    if (i->reconverge - w->pc <= FAR) return;
    int n = w->num_ways < (int)(sizeof w->ways / sizeof *w->ways) ? w->num_ways : 0;
    for (int k = 0; k < n; k++)
        if (w->ways[k].pc == w->pc) {
            w->ways[k].taken = taken;
            return;
        }
    if (w->num_ways < (int)(sizeof w->ways / sizeof *w->ways)) {
        w->ways[w->num_ways].pc = w->pc;
        w->ways[w->num_ways++].taken = taken;
    }
}

int op_branch(Warp *w, const Ins *i) {
    uint32_t taken = w->mask;
    if (i->guard >= 0) {
        note_way(w, i, taken != 0);
        if (!taken) return NEXT;
    }
    if (taken == w->active) {
        w->pc = i->target;
        return JUMP;
    }
    if (i->flags) return fault(w, "bra.uni at line %d: lanes of one warp disagree", i->line);
    if (i->target == w->pc + 1) return NEXT;
    return diverge(w, i, taken);
}

/* At a meeting point: the next pending side, or everyone. */
static void reach_stop(Warp *w) {
    while (w->depth && w->pc == w->reconverge) {
        Pending p = w->stack[--w->depth];
        w->reconverge = p.reconverge;
        uint32_t mask = p.mask & ~w->exited;
        if (!mask) {
            w->pc = w->depth ? w->reconverge : p.pc;
            continue;
        }
        w->pc = p.pc, w->active = mask;
    }
    if (!w->depth) w->reconverge = -1;
}

/* Active lanes execute `ret`. */
int op_leave(Warp *w, const Ins *i) {
    (void)i;
    uint32_t leaving = w->active;
    w->mask = leaving;
    w->exited |= leaving;
    w->cta->exited += count_lanes(leaving);
    if (w->run->checks) lanes_exit(w, leaving);
    check_cluster_barrier(w->cta->cluster);
    while (w->depth) {
        Pending p = w->stack[--w->depth];
        w->reconverge = p.reconverge;
        uint32_t mask = p.mask & ~w->exited;
        if (!mask || (w->depth && p.pc == w->reconverge)) continue;
        w->active = mask, w->pc = p.pc;
        if (!w->depth) w->reconverge = -1;
        return JUMP;
    }
    w->dead = true;
    return LEFT;
}

static inline uint32_t guarded(const Warp *w, const Ins *i) {
    uint32_t p = *(const uint32_t *)(w->base[0] + (i->guard & ~3));
    return w->active & (i->guard & 1 ? ~p : p);
}

/* Runs until the warp blocks, leaves, fails, or has executed more than `quantum` instructions. */
int run_warp(Warp *w, int64_t quantum) {
    const Ins *code = w->code;
    int64_t executed = 0, limit = w->run->launch->instruction_limit;
    int status = NEXT;
    while (executed <= quantum) {
        if (w->pc == w->reconverge) {
            reach_stop(w);
            continue;
        }
        const Ins *i = code + w->pc;
        executed++;
        w->seen[w->pc >> PART_SHIFT] = 1;
        w->mask = i->guard < 0 ? w->active : guarded(w, i);
        if (!w->mask && i->target < 0) {
            w->pc++;
            continue;
        }
        status = i->run(w, i);
        if (status == NEXT) w->pc++;
        else if (status != JUMP) break;
        if (executed > limit) {
            status = fault(w, "more than %lld instructions without an end: livelock?", (long long)limit);
            break;
        }
    }
    w->run->steps += executed;
    w->run->warp_instructions += executed;
    return status;
}
