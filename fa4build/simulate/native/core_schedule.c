/* Runs the warps of clusters until all have exited: scheduler.py. */
#include "core.h"
#include "report.h"

#include <stdlib.h>

#define NO_QUANTUM ((int64_t)1 << 30)

bool may_miss(Run *run) {
    int percent = run->launch->order.miss_percent;
    return percent && chance(&run->random, (uint32_t)percent);
}

/* Live warps in the order in which a round asks them. */
static int live_warps(Run *run, Warp **order) {
    int n = 0;
    for (int c = 0; c < run->num_clusters; c++)
        for (int k = 0; k < run->clusters[c]->num_ctas; k++) {
            Cta *cta = run->clusters[c]->ctas + k;
            for (int j = 0; j < cta->num_warps; j++)
                if (!cta->warps[j].dead) order[n++] = cta->warps + j;
        }
    return n;
}

/* Whether a cluster has no live warps: it makes room for another. */
static bool any_over(const Run *run) {
    for (int c = 0; c < run->num_clusters; c++)
        if (cluster_is_over(run->clusters[c])) return true;
    return false;
}

static void swap_warps(Warp **order, int a, int b) {
    Warp *w = order[a];
    order[a] = order[b], order[b] = w;
}

static void arrange(Run *run, Warp **order, int n) {
    if (run->launch->order.warps == WARPS_BACKWARD)
        for (int k = 0; k < n / 2; k++) swap_warps(order, k, n - 1 - k);
    if (run->launch->order.warps == WARPS_SHUFFLED)
        for (int k = n - 1; k > 0; k--) swap_warps(order, k, (int)(next_random(&run->random) % (uint64_t)(k + 1)));
}

static int64_t quantum_of(Run *run) {
    int longest = run->launch->order.longest_run;
    return longest ? 1 + (int64_t)(next_random(&run->random) % (uint64_t)longest) : NO_QUANTUM;
}

static int run_one(Run *run, Warp *w) {
    int status = run_warp(w, quantum_of(run));
    if (status == FAULTED) return FAULTED;
    w->blocked = status == BLOCKED;
    if (run->warp_instructions > run->launch->instruction_limit * 64)
        return fault(w, "more than %lld warp instructions in all: livelock?",
                     (long long)run->launch->instruction_limit * 64);
    run->in_engine = true;
    status = drift(&w->cta->cluster->engine);
    run->in_engine = false;
    return status == FAULTED ? FAULTED : NEXT;
}

static bool is_starved(const Run *run, const Warp *w) { return run->launch->order.starved >> w->index & 1; }

/* Every live warp of those that are starved, or of the others, that can go on does, once. */
static int one_round(Run *run, Warp **order, int n, bool starved, bool *progress) {
    for (int k = 0; k < n; k++) {
        Warp *w = order[k];
        int status = NEXT;
        if (w->dead || is_starved(run, w) != starved) continue;
        if (w->blocked) {
            bool ready = wait_ready(w, &status);
            if (status) return FAULTED;
            if (!ready) continue;
            if (wait_finish(w)) return FAULTED;
        }
        if (run_one(run, w) == FAULTED) return FAULTED;
        *progress = true;
    }
    return NEXT;
}

static int advance_all(Run *run, bool *any) {
    *any = false;
    run->in_engine = true;
    for (int c = 0; c < run->num_clusters; c++) {
        bool did;
        if (advance(&run->clusters[c]->engine, &did)) return FAULTED;
        *any |= did;
    }
    run->in_engine = false;
    return NEXT;
}

static int run_rounds(Run *run, Warp **order) {
    for (;;) {
        bool progress, any;
        int n = live_warps(run, order);
        if (!n || any_over(run)) return NEXT;
        progress = false;
        arrange(run, order, n);
        if (one_round(run, order, n, false, &progress)) return FAULTED;
        if (!progress && run->launch->order.starved && one_round(run, order, n, true, &progress)) return FAULTED;
        if (progress) continue;
        if (advance_all(run, &any)) return FAULTED;
        if (any) continue;
        report_deadlock(run);
        return FAULTED;
    }
}

int schedule(Run *run) {
    size_t warps = 0;
    for (int c = 0; c < run->num_clusters; c++)
        for (int k = 0; k < run->clusters[c]->num_ctas; k++) warps += (size_t)run->clusters[c]->ctas[k].num_warps;
    Warp **order = malloc(sizeof *order * (warps + 1));
    int status = run_rounds(run, order);
    free(order);
    return status;
}
