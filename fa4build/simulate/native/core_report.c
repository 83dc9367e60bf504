/* Texts: faults with their place, the report of a deadlock: deadlock.py, scheduler.py. */
#include "report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    char *text;
    size_t length, room;
} Text;

static void add(Text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add(Text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int needed = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (needed < 0) return;
    if (t->length + (size_t)needed + 1 > t->room) {
        t->room = 2 * (t->length + (size_t)needed + 1);
        t->text = realloc(t->text, t->room);
    }
    va_start(arguments, format);
    vsnprintf(t->text + t->length, (size_t)needed + 1, format, arguments);
    va_end(arguments);
    t->length += (size_t)needed;
}

const char *name_of(const Cta *cta, uint32_t offset) {
    static char kept[8][160];
    static int next;
    char *text = kept[next++ & 7];
    const Launch *launch = cta->run->launch;
    int64_t relative = (int64_t)offset - SHARED_BASE;
    for (int64_t k = 0; k < launch->num_shared_names; k++) {
        const SharedName *n = launch->shared_names + k;
        if (relative < n->start || relative >= n->start + n->size) continue;
        if (n->size > n->stride) snprintf(text, 160, "%s[%lld]", n->name, (long long)((relative - n->start) / n->stride));
        else snprintf(text, 160, "%s", n->name);
        return text;
    }
    snprintf(text, 160, "smem+%lld", (long long)relative);
    return text;
}

const char *lane_ranges(uint32_t mask) {
    static char kept[4][128];
    static int next;
    char *text = kept[next++ & 3];
    size_t length = 0;
    text[0] = 0;
    for (int l = 0; l < LANES;) {
        int end = l;
        if (!(mask >> l & 1) && ++l) continue;
        while (end + 1 < LANES && mask >> (end + 1) & 1) end++;
        const char *comma = length ? "," : "";
        length += (size_t)(end == l ? snprintf(text + length, 128 - length, "%s%d", comma, l)
                                    : snprintf(text + length, 128 - length, "%s%d-%d", comma, l, end));
        l = end + 1;
    }
    return text;
}

const char *opcode_text(const Warp *w, const Ins *i) {
    static char kept[4][256];
    static int next;
    char *text = kept[next++ & 3];
    const char *whole = w->run->launch->texts[site_of(w, i)];
    if (*whole == '@') {
        while (*whole && *whole != ' ') whole++;
        while (*whole == ' ') whole++;
    }
    size_t n = strcspn(whole, " ;");
    snprintf(text, 256, "%.*s", (int)(n < 255 ? n : 255), whole);
    return text;
}

/* The way of this warp at a far branch where another warp of its CTA went the other one; -1: none. */
static int role_of(const Warp *w) {
    int role = -1;
    for (int k = 0; k < w->num_ways; k++)
        for (int j = 0; j < w->cta->num_warps; j++) {
            const Warp *o = w->cta->warps + j;
            for (int m = 0; m < o->num_ways; m++)
                if (o->ways[m].pc == w->ways[k].pc && o->ways[m].taken != w->ways[k].taken) {
                    const Ins *branch = w->code + w->ways[k].pc;
                    role = (int)(w->ways[k].taken ? branch->target : w->ways[k].pc + 1);
                }
        }
    return role < 0 || role >= w->run->num_code - 1 ? role < 0 ? -1 : 0 : w->code[role].line;
}

/* `CTA (0, 0, 0), role of line 118, warp 3`. */
static void add_place(Text *t, const Warp *w) {
    const Cta *cta = w->cta;
    int role = role_of(w);
    add(t, "CTA (%d, %d, %d), ", cta->ctaid[0], cta->ctaid[1], cta->ctaid[2]);
    if (role >= 0) add(t, "role of line %d, ", role);
    add(t, "warp %d", w->index);
}

int fault(Warp *w, const char *format, ...) {
    Launch *launch = w->run->launch;
    if (launch->status != RUN_DONE) return FAULTED;
    Text t = {0};
    va_list arguments;
    va_start(arguments, format);
    char message[2048];
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    if (!w->run->in_engine) {
        int last = w->run->num_code - 2, pc = w->pc > last ? last : w->pc;
        add_place(&t, w);
        add(&t, ", PTX line %d `%.200s`: ", w->code[pc].line, launch->texts[pc]);
    }
    add(&t, "%s", message);
    launch->report = t.text, launch->status = RUN_FAULT;
    return FAULTED;
}

/* ---- waits in words ---------------------------------------------------------------------------------------------- */

static const char *const WAITED[] = {"cp.async copies", "bulk operations", "bulk reads", "wgmma operations"};

static void add_arrival(Text *t, const Arrival *a) {
    static const char *const OPERATIONS[] = {"", "", "bulk copy", "bulk copy", "bulk copy", "", "tensor load"};
    switch (a->kind) {
    case ARRIVED_WARP: add(t, "warp %d of CTA %d at line %d", a->warp, a->rank, a->line); break;
    case ARRIVED_WARP_BYTES:
        add(t, "warp %d of CTA %d at line %d: %lld bytes", a->warp, a->rank, a->line, (long long)a->bytes);
        break;
    case ARRIVED_BYTES:
        add(t, "%s at line %d: %lld bytes", OPERATIONS[a->warp], a->line, (long long)a->bytes);
        break;
    case ARRIVED_CP_ASYNC: add(t, "cp.async of warp %d at line %d", a->warp, a->line); break;
    default: add(t, "tcgen05.commit of warp %d, CTA %d at line %d", a->warp, a->rank, a->line);
    }
    add(t, " (phase %d)", a->phase);
}

static void add_sources(Text *t, const Mbarrier *b) {
    bool any = false;
    int32_t below = -1;
    for (int n = 0; n < b->num_sources; n++) { /* lines in order, each once; as texts they sort like `line 1000` */
        char best[24] = "", text[24];
        int32_t line = -1;
        for (int k = 0; k < b->num_sources; k++) {
            char last[24];
            snprintf(text, sizeof text, "line %d", b->sources[k].line);
            snprintf(last, sizeof last, "line %d", below);
            if (below >= 0 && strcmp(text, last) <= 0) continue;
            if (line < 0 || strcmp(text, best) < 0) {
                line = b->sources[k].line;
                memcpy(best, text, sizeof best);
            }
        }
        if (line < 0) break;
        add(t, any ? ", %s" : "; arrivals so far came from %s", best);
        any = true, below = line;
    }
}

static void add_mbarrier(Text *t, const Wait *wait) {
    const Mbarrier *b = wait->mbarrier;
    add(t, "mbarrier %s of CTA %d, parity %d: phase %d, %d of %d arrivals pending, %lld bytes outstanding",
        name_of(b->cta, b->offset), b->cta->rank, wait->parity, b->phase, b->pending, b->expected, (long long)b->tx);
    uint32_t first = b->num_arrivals > KEPT_ARRIVALS ? b->num_arrivals - KEPT_ARRIVALS : 0;
    add(t, b->num_arrivals ? "; last arrivals: " : "; nobody has arrived");
    for (uint32_t k = first; k < b->num_arrivals; k++) {
        if (k > first) add(t, "; ");
        add_arrival(t, b->arrivals + k % KEPT_ARRIVALS);
    }
    add_sources(t, b);
}

static void add_named(Text *t, const Warp *w) {
    const NamedBarrier *b = w->cta->named + w->wait.named;
    add(t, "named barrier %d: %d of ", w->wait.named, b->num_arrived * LANES);
    if (b->required < 0) add(t, "None");
    else add(t, "%d", b->required);
    add(t, " threads arrived (");
    for (int k = 0; k < b->num_arrived; k++) add(t, "%swarp %d at line %d", k ? ", " : "", b->arrived[k], b->where[k]);
    add(t, ")");
}

static void add_warpgroup(Text *t, const Warp *w) {
    int first = w->index & ~3;
    bool any = false;
    add(t, "warps [");
    for (int k = first; k < first + 4; k++) {
        const Warp *o = k < w->cta->num_warps ? w->cta->warps + k : NULL;
        if (k == w->index || (o && o->blocked && o->wait.kind == WAIT_WARPGROUP && o->wait.ins == w->wait.ins)) continue;
        add(t, any ? ", %d" : "%d", k);
        any = true;
    }
    add(t, "] of its warpgroup to reach wgmma at line %d as well", w->wait.ins->line);
}

static void add_wait(Text *t, const Warp *w) {
    const Wait *wait = &w->wait;
    int64_t alive = 0;
    int open = 0;
    switch (wait->kind) {
    case WAIT_MBARRIER: add_mbarrier(t, wait); break;
    case WAIT_NAMED: add_named(t, w); break;
    case WAIT_CLUSTER:
        for (int k = 0; k < num_ctas(w); k++) alive += threads_alive(w->cta->cluster->ctas + k);
        add(t, "cluster barrier: %lld of %lld threads arrived", (long long)w->cta->cluster->arrived, (long long)alive);
        break;
    case WAIT_OPS:
        for (int k = 0; k < wait->num_ops; k++) open += !(wait->parity ? has_read(wait->ops[k]) : is_done(wait->ops[k]));
        add(t, "%d %s", open, WAITED[wait->named]);
        break;
    case WAIT_ALLOC:
        add(t, "%lld free tensor memory columns ({", (long long)wait->need);
        for (int k = 0; k < w->cta->tensor->num_blocks; k++)
            add(t, "%s%d: %d", k ? ", " : "", w->cta->tensor->blocks[k][0], w->cta->tensor->blocks[k][1]);
        add(t, "} are taken)");
        break;
    case WAIT_PAIR: add(t, "its peer CTA to execute the same tcgen05 instruction for the pair"); break;
    case WAIT_REGISTERS:
        add(t, "%lld registers for setmaxnreg.inc; the CTA's pool has %lld free of %lld", (long long)wait->need,
            (long long)w->cta->registers_free, (long long)w->cta->registers_total);
        break;
    case WAIT_POLL:
        add(t, "global word at 0x%llx, last read %llu, to change", (unsigned long long)wait->address[first_lane(wait->mask)],
            (unsigned long long)wait->value[first_lane(wait->mask)]);
        break;
    case WAIT_WARPGROUP: add_warpgroup(t, w); break;
    case WAIT_NONE: break;
    }
}

/* ---- deadlocks --------------------------------------------------------------------------------------------------- */

/* Whether `other` released such a wait before, so that this one may wait for it. */
static bool blocks(const Warp *w, const Warp *other) {
    const Wait *wait = &w->wait;
    if (wait->kind == WAIT_MBARRIER) {
        for (int k = 0; k < wait->mbarrier->num_sources; k++)
            if (wait->mbarrier->sources[k].rank == other->cta->rank && wait->mbarrier->sources[k].warp == other->index)
                return true;
        return false;
    }
    if (wait->kind == WAIT_NAMED) {
        const NamedBarrier *b = w->cta->named + wait->named;
        uint32_t waiting = 0;
        for (int k = 0; k < b->num_arrived; k++) waiting |= 1u << b->arrived[k];
        return other->cta == w->cta && (b->members & ~waiting) >> other->index & 1;
    }
    return wait->kind == WAIT_CLUSTER && other->cluster_generation != w->cta->cluster->generation;
}

typedef struct {
    Warp *path[MAX_CTAS * MAX_WARPS];
    int length, start;
    bool done[MAX_CTAS * MAX_WARPS];
} Walk;

static bool walk(Walk *walked, Warp *w) {
    for (int k = 0; k < walked->length; k++)
        if (walked->path[k] == w) {
            walked->start = k;
            return true;
        }
    if (walked->done[w->slot]) return false;
    walked->path[walked->length++] = w;
    for (int c = 0; c < num_ctas(w); c++)
        for (int j = 0; j < w->cta->cluster->ctas[c].num_warps; j++) {
            Warp *other = w->cta->cluster->ctas[c].warps + j;
            if (other != w && !other->dead && blocks(w, other) && walk(walked, other)) return true;
        }
    walked->length--;
    walked->done[w->slot] = true;
    return false;
}

static void add_cycle(Text *t, Cluster *cluster) {
    Walk *walked = calloc(1, sizeof *walked);
    for (int c = 0; c < cluster->num_ctas; c++)
        for (int j = 0; j < cluster->ctas[c].num_warps; j++) {
            Warp *w = cluster->ctas[c].warps + j;
            if (w->dead || !walk(walked, w)) continue;
            add(t, "\n  cycle: ");
            for (int k = walked->start; k < walked->length; k++) {
                add_place(t, walked->path[k]);
                add(t, " -> ");
            }
            add_place(t, walked->path[walked->start]);
            free(walked);
            return;
        }
    free(walked);
}

static void add_exited(Text *t, const Cta *cta) {
    int gone = 0;
    for (int j = 0; j < cta->num_warps; j++) gone += cta->warps[j].dead;
    if (!gone || gone == cta->num_warps) return;
    add(t, "\n  CTA (%d, %d, %d): warps [", cta->ctaid[0], cta->ctaid[1], cta->ctaid[2]);
    bool any = false;
    for (int j = 0; j < cta->num_warps; j++)
        if (cta->warps[j].dead) {
            add(t, any ? ", %d" : "%d", j);
            any = true;
        }
    add(t, "] have exited");
}

void report_deadlock(Run *run) {
    Text t = {0};
    add(&t, "deadlock: no warp can go on and no asynchronous operation is pending");
    for (int c = 0; c < run->num_clusters; c++) {
        Cluster *cluster = run->clusters[c];
        for (int k = 0; k < cluster->num_ctas; k++) {
            Cta *cta = cluster->ctas + k;
            for (int j = 0; j < cta->num_warps; j++) {
                Warp *w = cta->warps + j;
                if (w->dead) continue;
                add(&t, "\n  ");
                add_place(&t, w);
                if (w->active != FULL) add(&t, ", %d of %d lanes", count_lanes(w->active), LANES);
                add(&t, ", PTX line %d `%.120s` waits for ", w->code[w->pc].line, run->launch->texts[w->pc]);
                add_wait(&t, w);
            }
            add_exited(&t, cta);
        }
        add_cycle(&t, cluster);
    }
    run->launch->report = t.text, run->launch->status = RUN_DEADLOCK;
}
