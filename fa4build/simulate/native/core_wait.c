/* What warps wait for: whether it is there, and what happens then: system.py, scheduler.py. */
#include "core.h"

#include <string.h>

static bool mbarrier_over(Warp *w, int *status) {
    const Wait *wait = &w->wait;
    const Mbarrier *b = wait->mbarrier;
    if (b->phase >= wait->phase + 2)
        *status = fault(w,
                        "waits for the end of phase %d of mbarrier %s, which is in phase %d by now: a waiter two phases "
                        "late sees the parity it waits for as not reached",
                        wait->phase, name_of(b->cta, b->offset), b->phase);
    return b->phase > wait->phase;
}

static bool word_changed(Warp *w) {
    const Wait *wait = &w->wait;
    EACH_LANE(l, wait->mask) {
        Buffer *b = find_buffer(w->run, wait->address[l], wait->ins->size);
        uint64_t value = 0;
        if (!b) return true;
        memcpy(&value, b->data + (wait->address[l] - b->base), wait->ins->size);
        if (value != wait->value[l]) return true;
    }
    return false;
}

bool wait_ready(Warp *w, int *status) {
    const Wait *wait = &w->wait;
    switch (wait->kind) {
    case WAIT_MBARRIER: return mbarrier_over(w, status);
    case WAIT_NAMED: return w->cta->named[wait->named].generation > wait->phase;
    case WAIT_CLUSTER: return w->cta->cluster->generation > wait->phase;
    case WAIT_OPS: return ops_over(wait);
    case WAIT_ALLOC: return w->cta->tensor->num_blocks == 0;
    case WAIT_REGISTERS: return w->cta->registers_free >= wait->need;
    case WAIT_POLL: return word_changed(w);
    case WAIT_WARPGROUP: return wait->phase != 0;
    case WAIT_PAIR: return w->cta->tensor->pair_is_complete;
    case WAIT_NONE: break;
    }
    return true;
}

static int pass_mbarrier(Warp *w, const Wait *wait) {
    chk_sync sync = strength(w, wait->ins);
    CHECK(w, chk_wait_passed, wait->mbarrier->handle, wait->mbarrier->phase, sync, site_of(w, wait->ins));
    put_predicate(w, wait->ins->o[0], FULL);
    return NEXT;
}

/* The wait is over: its effects, and the place to go on at. */
int wait_finish(Warp *w) {
    const Wait *wait = &w->wait;
    int status = NEXT;
    w->mask = wait->mask;
    switch (wait->kind) {
    case WAIT_MBARRIER: status = pass_mbarrier(w, wait); break;
    case WAIT_NAMED: CHECK(w, chk_named_passed, (uint32_t)wait->named, (uint32_t)wait->phase); break;
    case WAIT_CLUSTER:
        w->synced_cluster = true;
        CHECK(w, chk_cluster_passed);
        break;
    case WAIT_OPS: status = finish_ops(w, wait); break;
    default: break;
    }
    if (!wait->again) w->pc++;
    w->blocked = false;
    w->wait.kind = WAIT_NONE;
    return status;
}
