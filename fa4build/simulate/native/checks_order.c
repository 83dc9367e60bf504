/* R1 to R4, R16 and R17 of global memory, R12 of CTAs that have left: see checks_order.h. */
#include "checks_order.h"

#include <stdlib.h>

#define UNIT 2
#define PAGE_UNITS 64
#define PAGE (UNIT * PAGE_UNITS)
#define KEPT_GENERATIONS 8

static void *grown(void *memory, size_t count, size_t size) {
    void *larger = realloc(memory, count * size);
    if (!larger) abort();
    return larger;
}

static void *zeros(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) abort();
    return memory;
}

/* ---- clocks ------------------------------------------------------------------------------------------------------ */

/* Two counts a component: what is known, and what the asynchronous proxy knows of that. Further ones are 0. */
typedef struct {
    int32_t *v;
    int32_t n, capacity; /* components */
} clock;

static void reserve(clock *c, int32_t n) {
    if (n <= c->n) return;
    if (n > c->capacity) {
        c->capacity = (n + 31) / 32 * 32;
        c->v = grown(c->v, 2 * (size_t)c->capacity, sizeof *c->v);
    }
    memset(c->v + 2 * c->n, 0, 2 * (size_t)(n - c->n) * sizeof *c->v);
    c->n = n;
}

static void merge(clock *to, const clock *from) {
    reserve(to, from->n);
    for (int32_t i = 0; i < 2 * from->n; i++) to->v[i] = to->v[i] > from->v[i] ? to->v[i] : from->v[i];
}

static void copy(clock *to, const clock *from) {
    to->n = 0;
    merge(to, from);
}

static inline int32_t known(const clock *c, int32_t component, int by_async) {
    return component >= 0 && component < c->n ? c->v[2 * component + by_async] : 0;
}

static void raise_to(clock *c, int32_t component, int by_async, int32_t count) {
    reserve(c, component + 1);
    if (c->v[2 * component + by_async] < count) c->v[2 * component + by_async] = count;
}

static void fence(clock *c) {
    for (int32_t i = 0; i < c->n; i++) c->v[2 * i + 1] = c->v[2 * i];
}

/* ---- words of global memory, for all clusters -------------------------------------------------------------------- */

/* What warps of one cluster knew at a release; never changed once it is there. */
typedef struct {
    uint32_t cluster;
    const clock *clock;
} seen;

typedef struct {
    seen *of;
    uint32_t n;
} snapshot;

typedef struct {
    uint64_t address;
    snapshot *snapshots;
    int32_t n, capacity;
} word;

/* ---- accesses ---------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t units;
    uint32_t cluster;
    int32_t component, count, site, next; /* next: index + 1 */
    uint16_t slot;
    uint8_t touch, is_async, scope; /* scope: + 1, 0 of a weak access */
} access;

/* What a page knows: index + 1 of the first write or sum, and of the first cluster that reads. */
typedef struct {
    int32_t changes, readers;
} page_state;

/* The reads of a page by one cluster. They lie apart, since a read has nothing to do with the reads of others, and one
 * page of lengths may be read by thousands of clusters. */
typedef struct {
    uint64_t page;
    uint32_t buffer, cluster;
    int32_t reads, next; /* index + 1: of the first access, of the next cluster */
} reader;

struct chk_history {
    chk_launch *launch;
    page_state **pages; /* of each buffer */
    reader *readers;
    int32_t num_readers, reader_capacity;
    int32_t *reader_places; /* index + 1 by hash, open addressing; a power of two */
    uint32_t num_places;
    access *accesses;
    int32_t num_accesses, access_capacity, free_access; /* free_access: index + 1 */
    word *words;
    int32_t num_words, word_capacity;
    clock **clocks; /* of snapshots */
    size_t num_clocks, clock_capacity;
    int has_waited; /* somebody has executed griddepcontrol.wait */
};

/* A word as the warps of one cluster see it: what was released for the cluster, and for each CTA. */
typedef struct {
    uint64_t address;
    int32_t word, component;
    clock cluster, *ctas;
} local_word;

typedef struct {
    clock now, done[KEPT_GENERATIONS];
    uint32_t generation[KEPT_GENERATIONS];
} meeting;

#define COMMITTERS 4
typedef struct {
    int32_t slot, number;
} commit;

typedef struct {
    clock phases[2];
    int32_t phase[2], component;
    commit commits[2][COMMITTERS]; /* of each phase: those that have arrived; number 0: none */
} barrier;

typedef struct {
    clock clock;
    commit commit;
    uint32_t cta;
} taken;

/* What may still touch a CTA's shared memory: by component the newest count, and where. */
typedef struct {
    int32_t *counts, *sites, n;
    int32_t *commits, *commit_sites, *commits_seen; /* by slot */
    int has_left;
} door;

typedef struct {
    clock released, pending;
    uint8_t release_scope, has_released;
} fences;

struct chk_ordered {
    chk_history *order;
    clock *slots;
    int32_t *now;          /* of each slot's program */
    int32_t *commits;      /* issued, of each slot */
    int32_t *of_kind[2];   /* component of a slot's bulk and cp.async operations, + 1 */
    int32_t num_components, grid; /* grid: component of griddepcontrol.wait */
    barrier *barriers;
    size_t num_barriers;
    meeting *named;
    clock cluster_now, cluster_done;
    taken *taken;
    size_t num_taken;
    local_word *words;
    int32_t num_words, word_capacity;
    fences *fences;
    door *doors;
};

void chk_order_begin(chk_launch *launch) {
    chk_history *order = zeros(1, sizeof *order);
    order->launch = launch;
    order->pages = zeros(launch->num_buffers, sizeof *order->pages);
    launch->order = order;
}

static void free_word(word *w) {
    for (int32_t k = 0; k < w->n; k++) free(w->snapshots[k].of);
    free(w->snapshots);
}

void chk_order_end(chk_launch *launch) {
    chk_history *order = launch->order;
    if (!order) return;
    for (size_t k = 0; k < launch->num_buffers; k++) free(order->pages[k]);
    for (int32_t k = 0; k < order->num_words; k++) free_word(&order->words[k]);
    for (size_t k = 0; k < order->num_clocks; k++) free(order->clocks[k]->v), free(order->clocks[k]);
    free(order->pages), free(order->readers), free(order->reader_places);
    free(order->accesses), free(order->words), free(order->clocks), free(order);
    launch->order = NULL;
}

chk_ordered *chk_order_cluster(chk_cluster *cluster) {
    chk_ordered *at = zeros(1, sizeof *at);
    uint32_t slots = cluster->num_slots, ctas = cluster->num_ctas;
    at->order = cluster->launch->order;
    at->slots = zeros(slots, sizeof *at->slots);
    at->now = zeros(slots, sizeof *at->now);
    at->commits = zeros(slots, sizeof *at->commits);
    at->of_kind[0] = zeros(slots, sizeof(int32_t)), at->of_kind[1] = zeros(slots, sizeof(int32_t));
    at->named = zeros(16 * ctas, sizeof *at->named);
    at->fences = zeros(slots, sizeof *at->fences);
    at->doors = zeros(ctas, sizeof *at->doors);
    at->num_components = (int32_t)slots + 1, at->grid = (int32_t)slots;
    for (uint32_t s = 0; s < slots; s++) {
        at->now[s] = 1;
        raise_to(&at->slots[s], (int32_t)s, 0, 1);
    }
    for (uint32_t c = 0; c < ctas; c++) {
        door *d = &at->doors[c];
        d->commits = zeros(slots, sizeof(int32_t)), d->commit_sites = zeros(slots, sizeof(int32_t));
        d->commits_seen = zeros(slots, sizeof(int32_t));
    }
    return at;
}

static void free_meeting(meeting *m) {
    free(m->now.v);
    for (int k = 0; k < KEPT_GENERATIONS; k++) free(m->done[k].v);
}

static void free_door(door *d) {
    free(d->counts), free(d->sites), free(d->commits), free(d->commit_sites), free(d->commits_seen);
}

void chk_order_forget(chk_cluster *cluster) {
    chk_ordered *at = cluster->order;
    if (!at) return;
    for (uint32_t s = 0; s < cluster->num_slots; s++)
        free(at->slots[s].v), free(at->fences[s].released.v), free(at->fences[s].pending.v);
    for (uint32_t k = 0; k < 16 * cluster->num_ctas; k++) free_meeting(&at->named[k]);
    for (uint32_t c = 0; c < cluster->num_ctas; c++) free_door(&at->doors[c]);
    for (size_t k = 0; k < at->num_barriers; k++) free(at->barriers[k].phases[0].v), free(at->barriers[k].phases[1].v);
    for (size_t k = 0; k < at->num_taken; k++) free(at->taken[k].clock.v);
    for (int32_t k = 0; k < at->num_words; k++) {
        free(at->words[k].cluster.v);
        for (uint32_t c = 0; c < cluster->num_ctas; c++) free(at->words[k].ctas[c].v);
        free(at->words[k].ctas);
    }
    free(at->slots), free(at->now), free(at->commits), free(at->of_kind[0]), free(at->of_kind[1]), free(at->named);
    free(at->fences), free(at->doors), free(at->barriers), free(at->taken), free(at->words);
    free(at->cluster_now.v), free(at->cluster_done.v), free(at);
    cluster->order = NULL;
}

/* ---- components -------------------------------------------------------------------------------------------------- */

static barrier *barrier_at(chk_ordered *at, int32_t handle) {
    if ((size_t)handle >= at->num_barriers) {
        size_t larger = (size_t)handle + 32;
        at->barriers = grown(at->barriers, larger, sizeof *at->barriers);
        memset(at->barriers + at->num_barriers, 0, (larger - at->num_barriers) * sizeof *at->barriers);
        for (size_t k = at->num_barriers; k < larger; k++)
            at->barriers[k].component = at->barriers[k].phase[0] = at->barriers[k].phase[1] = -1;
        at->num_barriers = larger;
    }
    barrier *b = &at->barriers[handle];
    if (b->component < 0) b->component = at->num_components++;
    return b;
}

/* The newest barrier at a place of shared memory; -1: none. */
static int32_t handle_at(const chk_cluster *cluster, uint32_t cta, uint32_t offset) {
    for (size_t k = cluster->num_barriers; k-- > 0;)
        if (cluster->barriers[k].cta == cta && cluster->barriers[k].offset == offset) return (int32_t)k;
    return -1;
}

/* Component of an operation, and who issued it as far as its token says. */
static int32_t component_of(chk_cluster *cluster, chk_token token, int32_t *slot) {
    chk_ordered *at = cluster->order;
    const chk_component_key *key = &cluster->keys[token.component];
    if (key->kind == CHK_MBARRIER) {
        int32_t handle = handle_at(cluster, (uint32_t)key->a, (uint32_t)key->b);
        return handle < 0 ? -1 : barrier_at(at, handle)->component;
    }
    if (key->kind != CHK_BULK && key->kind != CHK_CP_ASYNC) return -1;
    if (slot) *slot = key->a;
    int32_t *place = &at->of_kind[key->kind == CHK_CP_ASYNC][key->a];
    if (!*place) *place = ++at->num_components;
    return *place - 1;
}

static void tick(chk_ordered *at, uint32_t slot) { raise_to(&at->slots[slot], (int32_t)slot, 0, ++at->now[slot]); }

static void collect(chk_cluster *cluster, const chk_gang *gang, clock *to) {
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        merge(to, &cluster->order->slots[slot]);
        tick(cluster->order, slot);
    }
}

static void join(chk_cluster *cluster, const chk_gang *gang, const clock *from) {
    CHK_EACH_ACTIVE(k, gang) merge(&cluster->order->slots[chk_gang_slot(cluster, gang, k)], from);
}

/* ---- what is left behind a CTA ----------------------------------------------------------------------------------- */

static void leave_mark(chk_ordered *at, uint32_t cta, int32_t component, int32_t count, int32_t site) {
    door *d = &at->doors[cta];
    if (component >= d->n) {
        int32_t larger = component + 64;
        d->counts = grown(d->counts, (size_t)larger, sizeof(int32_t));
        d->sites = grown(d->sites, (size_t)larger, sizeof(int32_t));
        memset(d->counts + d->n, 0, (size_t)(larger - d->n) * sizeof(int32_t));
        d->n = larger;
    }
    if (d->counts[component] >= count) return;
    d->counts[component] = count;
    d->sites[component] = site;
}

chk_status chk_order_remote(chk_cluster *cluster, const chk_gang *gang, uint32_t cta, int32_t site) {
    if (!cluster->order || cta == gang->cta) return CHK_OK;
    if (cta >= cluster->num_ctas || !chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        leave_mark(cluster->order, cta, (int32_t)slot, cluster->order->now[slot], site);
    }
    return CHK_OK;
}

void chk_order_issued(chk_cluster *cluster, const chk_operation *operation) {
    chk_ordered *at = cluster->order;
    if (!at || operation->channel != CHK_MBARRIER) return;
    int32_t component = barrier_at(at, operation->barrier)->component, count = operation->phase + 1;
    leave_mark(at, cluster->barriers[operation->barrier].cta, component, count, operation->site);
    for (size_t k = 0; k < operation->num_writes; k++) {
        const chk_operand *to = &operation->writes[k];
        if (to->kind == CHK_SHARED_SPAN || to->kind == CHK_SHARED_UNITS)
            leave_mark(at, to->cta, component, count, operation->site);
    }
}

static void report_left(chk_cluster *cluster, uint32_t cta, int what, uint32_t slot, int32_t site) {
    chk_finding finding = chk_finding_of_cta(cluster, cta, what == 3 ? CHK_LEFT_LATE : CHK_LEFT_TOUCHED);
    finding.site = site;
    finding.extra[0] = what;
    finding.extra[1] = (int32_t)slot;
    chk_add(cluster->launch, &finding);
}

chk_status chk_cta_left(chk_cluster *cluster, uint32_t cta) {
    chk_ordered *at = cluster->order;
    if (!at) return CHK_OK;
    if (cta >= cluster->num_ctas) return CHK_BAD_INPUT;
    door *d = &at->doors[cta];
    clock all = {0};
    d->has_left = 1;
    for (uint32_t w = 0; w < cluster->warps_a_cta; w++) merge(&all, &at->slots[chk_slot(cluster, cta, w)]);
    for (int32_t c = 0; c < d->n; c++)
        if (d->counts[c] && known(&all, c, 0) < d->counts[c])
            report_left(cluster, cta, c >= (int32_t)cluster->num_slots, (uint32_t)c, d->sites[c]);
    for (uint32_t s = 0; s < cluster->num_slots; s++)
        if (d->commits[s] > d->commits_seen[s]) report_left(cluster, cta, 2, s, d->commit_sites[s]);
    free(all.v);
    return CHK_OK;
}

/* ---- what orders warps of a cluster ------------------------------------------------------------------------------ */

static clock *phase_of(barrier *b, int32_t phase) {
    int place = phase % 2;
    if (b->phase[place] != phase) {
        b->phase[place] = phase;
        b->phases[place].n = 0;
        memset(b->commits[place], 0, sizeof b->commits[place]);
    }
    return &b->phases[place];
}

void chk_order_arrive(chk_cluster *cluster, const chk_gang *gang, int32_t handle, int32_t phase) {
    if (!cluster->order) return;
    collect(cluster, gang, phase_of(barrier_at(cluster->order, handle), phase));
}

void chk_order_passed(chk_cluster *cluster, const chk_gang *gang, int32_t handle, int32_t phase) {
    chk_ordered *at = cluster->order;
    if (!at || phase < 1) return;
    barrier *b = barrier_at(at, handle);
    int place = (phase - 1) % 2;
    CHK_EACH_ACTIVE(k, gang) {
        clock *own = &at->slots[chk_gang_slot(cluster, gang, k)];
        raise_to(own, b->component, 0, phase);
        raise_to(own, b->component, 1, phase);
    }
    if (b->phase[place] != phase - 1) return;
    join(cluster, gang, &b->phases[place]);
    door *d = &at->doors[cluster->barriers[handle].cta];
    for (int k = 0; k < COMMITTERS; k++) {
        commit c = b->commits[place][k];
        if (c.number > d->commits_seen[c.slot]) d->commits_seen[c.slot] = c.number;
    }
}

void chk_order_take(chk_cluster *cluster, uint32_t slot, chk_component_kind channel, int32_t handle) {
    chk_ordered *at = cluster->order;
    if (!at) return;
    if ((size_t)handle >= at->num_taken) {
        size_t larger = (size_t)handle + 32;
        at->taken = grown(at->taken, larger, sizeof *at->taken);
        memset(at->taken + at->num_taken, 0, (larger - at->num_taken) * sizeof *at->taken);
        at->num_taken = larger;
    }
    taken *t = &at->taken[handle];
    copy(&t->clock, &at->slots[slot]);
    tick(at, slot);
    t->cta = slot / cluster->warps_a_cta;
    t->commit = (commit){(int32_t)slot, 0};
    if (channel == CHK_MMA) t->commit.number = ++at->commits[slot];
    int32_t copies = at->of_kind[1][slot], key = cluster->slot_component[CHK_CP_ASYNC][slot];
    if (channel != CHK_CP_ASYNC || !copies || !key) return;
    raise_to(&t->clock, copies - 1, 0, cluster->now[key - 1]);
}

/* A commit that arrives in another CTA must have been seen there before that CTA leaves. */
static void mark_commit(chk_cluster *cluster, int32_t handle, int32_t phase, const taken *t) {
    chk_ordered *at = cluster->order;
    uint32_t cta = cluster->barriers[handle].cta;
    commit *places = at->barriers[handle].commits[phase % 2];
    int k = 0;
    while (k < COMMITTERS - 1 && places[k].number && places[k].slot != t->commit.slot) k++;
    places[k] = t->commit;
    if (cta == t->cta) return;
    door *d = &at->doors[cta];
    if (d->has_left) report_left(cluster, cta, 3, (uint32_t)t->commit.slot, -1);
    if (d->commits[t->commit.slot] < t->commit.number) d->commits[t->commit.slot] = t->commit.number;
    d->commit_sites[t->commit.slot] = -1;
}

void chk_order_deferred(chk_cluster *cluster, int32_t handle, int32_t phase, int32_t taken_clock) {
    chk_ordered *at = cluster->order;
    if (!at || (size_t)taken_clock >= at->num_taken) return;
    taken *t = &at->taken[taken_clock];
    merge(phase_of(barrier_at(at, handle), phase), &t->clock);
    if (t->commit.number) mark_commit(cluster, handle, phase, t);
}

void chk_order_named_arrive(chk_cluster *cluster, const chk_gang *gang, uint32_t index) {
    if (cluster->order) collect(cluster, gang, &cluster->order->named[16 * gang->cta + index].now);
}

void chk_order_named_completed(chk_cluster *cluster, uint32_t cta, uint32_t index, uint32_t generation) {
    if (!cluster->order) return;
    meeting *m = &cluster->order->named[16 * cta + index];
    uint32_t place = generation % KEPT_GENERATIONS;
    clock spare = m->done[place];
    m->done[place] = m->now, m->generation[place] = generation;
    spare.n = 0;
    m->now = spare;
}

void chk_order_named_passed(chk_cluster *cluster, const chk_gang *gang, uint32_t index, uint32_t generation) {
    if (!cluster->order) return;
    meeting *m = &cluster->order->named[16 * gang->cta + index];
    uint32_t place = generation % KEPT_GENERATIONS;
    if (m->generation[place] == generation) join(cluster, gang, &m->done[place]);
}

void chk_order_cluster_arrive(chk_cluster *cluster, const chk_gang *gang) {
    if (cluster->order) collect(cluster, gang, &cluster->order->cluster_now);
}

void chk_order_cluster_completed(chk_cluster *cluster) {
    chk_ordered *at = cluster->order;
    if (!at) return;
    clock spare = at->cluster_done;
    at->cluster_done = at->cluster_now;
    spare.n = 0;
    at->cluster_now = spare;
}

void chk_order_cluster_passed(chk_cluster *cluster, const chk_gang *gang) {
    if (cluster->order) join(cluster, gang, &cluster->order->cluster_done);
}

chk_status chk_order_performed(chk_cluster *cluster, const chk_gang *gang, const chk_token *tokens, size_t count) {
    if (!cluster->order) return CHK_OK;
    if (!chk_gang_ok(cluster, gang)) return CHK_BAD_INPUT;
    for (size_t i = 0; i < count; i++) {
        if (tokens[i].component < 0 || tokens[i].component >= cluster->num_components) continue;
        int32_t component = component_of(cluster, tokens[i], NULL);
        if (component < 0) continue;
        CHK_EACH_ACTIVE(k, gang)
        raise_to(&cluster->order->slots[chk_gang_slot(cluster, gang, k)], component, 0, tokens[i].count);
    }
    return CHK_OK;
}

/* ---- releases and acquires --------------------------------------------------------------------------------------- */

static word *word_at(chk_history *order, uint64_t address, int32_t *index) {
    for (*index = 0; *index < order->num_words; ++*index)
        if (order->words[*index].address == address) return &order->words[*index];
    if (order->num_words == order->word_capacity) {
        order->word_capacity = order->word_capacity ? 2 * order->word_capacity : 64;
        order->words = grown(order->words, (size_t)order->word_capacity, sizeof *order->words);
    }
    order->words[order->num_words] = (word){.address = address};
    return &order->words[order->num_words++];
}

static local_word *local_at(chk_cluster *cluster, uint64_t address) {
    chk_ordered *at = cluster->order;
    for (int32_t k = 0; k < at->num_words; k++)
        if (at->words[k].address == address) return &at->words[k];
    if (at->num_words == at->word_capacity) {
        at->word_capacity = at->word_capacity ? 2 * at->word_capacity : 16;
        at->words = grown(at->words, (size_t)at->word_capacity, sizeof *at->words);
    }
    local_word *l = &at->words[at->num_words++];
    *l = (local_word){.address = address, .component = at->num_components++};
    l->ctas = zeros(cluster->num_ctas, sizeof *l->ctas);
    word_at(at->order, address, &l->word);
    return l;
}

static clock *new_clock(chk_history *order) {
    if (order->num_clocks == order->clock_capacity) {
        order->clock_capacity = order->clock_capacity ? 2 * order->clock_capacity : 256;
        order->clocks = grown(order->clocks, order->clock_capacity, sizeof *order->clocks);
    }
    return order->clocks[order->num_clocks++] = zeros(1, sizeof(clock));
}

static const clock *seen_of(const snapshot *s, uint32_t cluster) {
    for (uint32_t k = 0; k < s->n; k++)
        if (s->of[k].cluster == cluster) return s->of[k].clock;
    return NULL;
}

static int covers(const clock *a, const clock *b) {
    for (int32_t i = 0; i < 2 * b->n; i++)
        if (b->v[i] > (i < 2 * a->n ? a->v[i] : 0)) return 0;
    return 1;
}

static void add_seen(chk_history *order, snapshot *s, uint32_t cluster, const clock *more, int is_copy) {
    for (uint32_t k = 0; k < s->n; k++) {
        if (s->of[k].cluster != cluster) continue;
        if (covers(s->of[k].clock, more)) return;
        clock *both = new_clock(order);
        copy(both, s->of[k].clock);
        merge(both, more);
        s->of[k].clock = both;
        return;
    }
    s->of = grown(s->of, s->n + 1, sizeof *s->of);
    clock *own = NULL;
    if (is_copy) copy(own = new_clock(order), more);
    s->of[s->n++] = (seen){cluster, own ? own : more};
}

/* What a warp of the cluster knows goes into a new snapshot of the word, and what it knows of other clusters too. */
static void publish(chk_cluster *cluster, local_word *l, const clock *what) {
    chk_ordered *at = cluster->order;
    chk_history *order = at->order;
    word *w = &order->words[l->word];
    snapshot fresh = {0};
    if (w->n) {
        const snapshot *last = &w->snapshots[w->n - 1];
        fresh.n = last->n;
        fresh.of = grown(NULL, last->n + 1, sizeof *fresh.of);
        memcpy(fresh.of, last->of, last->n * sizeof *fresh.of);
    }
    add_seen(order, &fresh, cluster->index, what, 1);
    for (int32_t k = 0; k < at->num_words; k++) {
        int32_t count = known(what, at->words[k].component, 0);
        if (!count) continue;
        const snapshot *known_there = &order->words[at->words[k].word].snapshots[count - 1];
        for (uint32_t j = 0; j < known_there->n; j++)
            if (known_there->of[j].cluster != cluster->index)
                add_seen(order, &fresh, known_there->of[j].cluster, known_there->of[j].clock, 0);
    }
    if (w->n == w->capacity) {
        w->capacity = w->capacity ? 2 * w->capacity : 8;
        w->snapshots = grown(w->snapshots, (size_t)w->capacity, sizeof *w->snapshots);
    }
    w->snapshots[w->n++] = fresh;
}

static void release(chk_cluster *cluster, uint32_t cta, uint64_t address, const clock *what, int scope) {
    local_word *l = local_at(cluster, address);
    merge(&l->ctas[cta], what);
    if (scope >= CHK_SCOPE_CLUSTER) merge(&l->cluster, what);
    if (scope >= CHK_SCOPE_GPU) publish(cluster, l, what);
}

/* What releases at the word have made known to those of a scope. */
static void acquire(chk_cluster *cluster, uint32_t cta, uint64_t address, clock *to, int scope) {
    local_word *l = local_at(cluster, address);
    merge(to, &l->ctas[cta]);
    if (scope >= CHK_SCOPE_CLUSTER) merge(to, &l->cluster);
    int32_t count = cluster->order->order->words[l->word].n;
    if (scope >= CHK_SCOPE_GPU && count) raise_to(to, l->component, 0, count);
}

static void synchronise(chk_cluster *cluster, uint32_t cta, uint32_t slot, uint64_t address, chk_touch touch,
                        chk_sync sync) {
    chk_ordered *at = cluster->order;
    fences *f = &at->fences[slot];
    if (touch != CHK_TOUCH_WRITE) {
        if (sync.order & CHK_ACQUIRE) acquire(cluster, cta, address, &at->slots[slot], sync.scope);
        else acquire(cluster, cta, address, &f->pending, sync.scope);
    }
    if (touch == CHK_TOUCH_READ) return;
    if (sync.order & CHK_RELEASE) {
        release(cluster, cta, address, &at->slots[slot], sync.scope);
        tick(at, slot);
    } else if (f->has_released) {
        int scope = f->release_scope < sync.scope ? f->release_scope : sync.scope;
        release(cluster, cta, address, &f->released, scope);
    }
}

/* A fence takes what relaxed reads have seen, and gives what came before it to relaxed writes behind it. A fence of the
 * CTA or the cluster takes nothing here: what relaxed reads of a wider scope have seen is not its. */
static void fence_memory(chk_cluster *cluster, uint32_t slot, chk_sync sync) {
    chk_ordered *at = cluster->order;
    fences *f = &at->fences[slot];
    if ((sync.order & CHK_ACQUIRE) && sync.scope >= CHK_SCOPE_GPU) {
        merge(&at->slots[slot], &f->pending);
        f->pending.n = 0;
    }
    if (!(sync.order & CHK_RELEASE)) return;
    copy(&f->released, &at->slots[slot]);
    f->release_scope = sync.scope, f->has_released = 1;
    tick(at, slot);
}

void chk_order_fence(chk_cluster *cluster, const chk_gang *gang, chk_fence_kind kind, uint32_t spaces, chk_sync sync) {
    chk_ordered *at = cluster->order;
    if (!at) return;
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t slot = chk_gang_slot(cluster, gang, k);
        if (kind == CHK_FENCE_PROXY_ASYNC && (spaces & CHK_SPACE_GLOBAL)) fence(&at->slots[slot]), tick(at, slot);
        if (kind == CHK_FENCE_MEMORY) fence_memory(cluster, slot, sync);
        if (kind == CHK_FENCE_GRID_WAIT) {
            raise_to(&at->slots[slot], at->grid, 0, 1);
            at->order->has_waited = 1;
        }
    }
}

/* ---- accesses of global memory ----------------------------------------------------------------------------------- */

typedef struct {
    chk_cluster *cluster;
    const chk_gang *gang;
    const clock *clock; /* of the warp that accesses */
    access mine;
    size_t buffer;
} looker;

enum { IN_ORDER, NOT_ORDERED, NOT_FENCED };

/* Whether a snapshot says that an access of another cluster is over. */
static int told(const chk_history *order, const local_word *l, int32_t count, const access *other, int by_async) {
    if (count <= 0) return 0;
    const clock *c = seen_of(&order->words[l->word].snapshots[count - 1], other->cluster);
    return c && known(c, other->component, by_async) >= other->count;
}

/* Behind an asynchronous access of another cluster an asynchronous one needs a proxy fence on both sides. */
static int order_of_others(const looker *how, const access *other) {
    const chk_ordered *at = how->cluster->order;
    int state = NOT_ORDERED;
    for (int32_t k = 0; k < at->num_words; k++) {
        const local_word *l = &at->words[k];
        int32_t count = known(how->clock, l->component, 0), fenced = known(how->clock, l->component, 1);
        if (!told(at->order, l, count, other, 0)) continue;
        state = NOT_FENCED;
        int here = told(at->order, l, fenced, other, other->is_async);
        if (!how->mine.is_async || here) return IN_ORDER;
        if (!other->is_async && told(at->order, l, count, other, 1)) return IN_ORDER;
    }
    return state;
}

static int order_of(const looker *how, const access *other) {
    if (other->cluster != how->cluster->index) return order_of_others(how, other);
    if (known(how->clock, other->component, 0) < other->count) return NOT_ORDERED;
    if (how->mine.is_async && !other->is_async && known(how->clock, other->component, 1) < other->count)
        return NOT_FENCED;
    return IN_ORDER;
}

/* The narrowest scope that both threads are in. */
static int scope_between(const looker *how, const access *other) {
    uint32_t warps = how->cluster->warps_a_cta;
    if (other->cluster != how->cluster->index) return CHK_SCOPE_GPU;
    return other->slot / warps == how->mine.slot / warps ? CHK_SCOPE_CTA : CHK_SCOPE_CLUSTER;
}

/* Whether the two may meet in any order: strong accesses of a scope that holds both. */
static int may_meet(const looker *how, const access *other) {
    int least = scope_between(how, other) + 1;
    return how->mine.scope >= least && other->scope >= least;
}

static chk_kind kind_of(const looker *how, const access *other, int state) {
    if (state == NOT_FENCED) return CHK_ORDER_PROXY;
    if (how->mine.touch == CHK_TOUCH_READ) return CHK_ORDER_READ;
    return other->touch == CHK_TOUCH_READ ? CHK_ORDER_OVERWRITE : CHK_ORDER_WRITE;
}

static void report(const looker *how, const access *other, chk_kind kind, uint64_t page) {
    uint64_t both = other->units & how->mine.units;
    chk_finding finding = chk_finding_at(how->cluster, how->gang, kind, how->mine.site);
    finding.other = other->site;
    finding.address = (int64_t)(page * PAGE + UNIT * (uint64_t)__builtin_ctzll(both));
    finding.size = how->mine.touch != CHK_TOUCH_READ;
    finding.extra[0] = (int32_t)how->buffer;
    finding.extra[1] = (int32_t)other->cluster;
    finding.extra[2] = other->slot;
    finding.extra[3] = other->is_async | (other->scope ? 2 : 0);
    chk_add(how->cluster->launch, &finding);
}

/* What is wrong between this access and an earlier one; 0 where this one takes the other's place. */
static int judge(const looker *how, const access *other, uint64_t page) {
    int reads = how->mine.touch == CHK_TOUCH_READ;
    if (reads && other->touch == CHK_TOUCH_READ) return 1;
    int state = order_of(how, other);
    if (state == IN_ORDER) return reads;
    if (how->mine.touch == CHK_TOUCH_SUM && other->touch == CHK_TOUCH_SUM && may_meet(how, other)) {
        int asks = how->cluster->launch->rules & CHK_RULES_SUMS;
        if (asks) report(how, other, state == NOT_FENCED ? CHK_ORDER_PROXY : CHK_ORDER_SUMS, page);
        return 1;
    }
    if (may_meet(how, other)) return 1;
    report(how, other, kind_of(how, other, state), page);
    return reads;
}

static int32_t new_access(chk_history *order) {
    int32_t index = order->free_access;
    if (index) {
        order->free_access = order->accesses[index - 1].next;
        return index;
    }
    if (order->num_accesses == order->access_capacity) {
        order->access_capacity = order->access_capacity ? 2 * order->access_capacity : 4096;
        order->accesses = grown(order->accesses, (size_t)order->access_capacity, sizeof *order->accesses);
    }
    return ++order->num_accesses;
}

static int is_same(const access *a, const access *b) {
    return a->component == b->component && a->cluster == b->cluster && a->touch == b->touch && a->slot == b->slot &&
           a->scope == b->scope && a->is_async == b->is_async;
}

/* Judges the accesses of a list, and unlinks those that this one makes needless. Whether it is in the list then. */
static int scan(const looker *how, int32_t *link, uint64_t page) {
    chk_history *order = how->cluster->order->order;
    int is_kept = 0;
    while (*link) {
        access *other = &order->accesses[*link - 1];
        if (how->mine.touch == CHK_TOUCH_READ && is_same(other, &how->mine)) {
            int is_now = other->count == how->mine.count && other->site == how->mine.site;
            if (is_now) other->units |= how->mine.units, is_kept = 1;
            else if (!(other->units & ~how->mine.units)) other->units = 0;
        }
        if (other->units & how->mine.units && !is_kept && !judge(how, other, page)) other->units &= ~how->mine.units;
        if (other->units) {
            link = &other->next;
            continue;
        }
        int32_t gone = *link;
        *link = other->next;
        other->next = order->free_access;
        order->free_access = gone;
    }
    return is_kept;
}

static uint32_t hash_of(uint64_t page, uint32_t buffer, uint32_t cluster) {
    uint64_t mixed = (page * 0x9e3779b97f4a7c15ull) ^ ((uint64_t)buffer << 40) ^ (cluster * 0xc2b2ae3d27d4eb4full);
    return (uint32_t)((mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9ull >> 32);
}

static void more_places(chk_history *order) {
    free(order->reader_places);
    order->num_places = order->num_places ? 2 * order->num_places : 1024;
    order->reader_places = zeros(order->num_places, sizeof *order->reader_places);
    for (int32_t k = 0; k < order->num_readers; k++) {
        const reader *r = &order->readers[k];
        uint32_t place = hash_of(r->page, r->buffer, r->cluster) & (order->num_places - 1);
        while (order->reader_places[place]) place = (place + 1) & (order->num_places - 1);
        order->reader_places[place] = k + 1;
    }
}

/* Index of the reads of a page by a cluster, made by the first one. */
static int32_t reader_at(chk_history *order, page_state *state, uint64_t page, uint32_t buffer, uint32_t cluster) {
    if (2 * (uint32_t)(order->num_readers + 1) > order->num_places) more_places(order);
    uint32_t place = hash_of(page, buffer, cluster) & (order->num_places - 1);
    for (int32_t k; (k = order->reader_places[place]); place = (place + 1) & (order->num_places - 1)) {
        const reader *r = &order->readers[k - 1];
        if (r->page == page && r->buffer == buffer && r->cluster == cluster) return k - 1;
    }
    if (order->num_readers == order->reader_capacity) {
        order->reader_capacity = order->reader_capacity ? 2 * order->reader_capacity : 512;
        order->readers = grown(order->readers, (size_t)order->reader_capacity, sizeof *order->readers);
    }
    order->readers[order->num_readers] = (reader){page, buffer, cluster, 0, state->readers};
    state->readers = order->reader_places[place] = ++order->num_readers;
    return order->num_readers - 1;
}

static void visit(const looker *how, uint64_t page) {
    chk_history *order = how->cluster->order->order;
    chk_launch *launch = order->launch;
    if (!order->pages[how->buffer])
        order->pages[how->buffer] = zeros(launch->buffers[how->buffer].size / PAGE + 1, sizeof(page_state));
    page_state *state = &order->pages[how->buffer][page];
    int32_t *list = &state->changes;
    scan(how, list, page);
    if (how->mine.touch == CHK_TOUCH_READ) {
        int32_t own = reader_at(order, state, page, (uint32_t)how->buffer, how->mine.cluster);
        list = &order->readers[own].reads;
        if (scan(how, list, page)) return;
    } else {
        for (int32_t k = state->readers; k; k = order->readers[k - 1].next)
            scan(how, &order->readers[k - 1].reads, page);
    }
    int32_t index = new_access(order);
    access *fresh = &order->accesses[index - 1];
    *fresh = how->mine;
    fresh->next = *list;
    *list = index;
}

static int find_buffer(chk_launch *launch, uint64_t address, uint64_t size, size_t *index) {
    for (size_t k = 0, i = launch->last_buffer; k < launch->num_buffers; k++, i = i + 1 == launch->num_buffers ? 0 : i + 1) {
        const chk_buffer *b = &launch->buffers[i];
        if (address < b->base || b->size < size || address - b->base > b->size - size) continue;
        *index = launch->last_buffer = i;
        return 1;
    }
    return 0;
}

/* Nothing of global memory is touched before the kernel in front is known to be over. */
static void check_parent(const looker *how, uint64_t offset) {
    chk_cluster *cluster = how->cluster;
    if (!(cluster->launch->rules & CHK_RULES_PARENT) || known(how->clock, cluster->order->grid, 0)) return;
    chk_finding finding = chk_finding_at(cluster, how->gang, CHK_PARENT_EARLY, how->mine.site);
    finding.address = (int64_t)offset;
    finding.size = how->mine.touch != CHK_TOUCH_READ;
    finding.extra[0] = (int32_t)how->buffer;
    chk_add(cluster->launch, &finding);
}

static void visit_range(looker *how, uint64_t address, uint64_t size) {
    chk_launch *launch = how->cluster->launch;
    if (!size || !find_buffer(launch, address, size, &how->buffer)) return;
    uint64_t from = (address - launch->buffers[how->buffer].base) / UNIT;
    uint64_t to = (address - launch->buffers[how->buffer].base + size + UNIT - 1) / UNIT;
    check_parent(how, from * UNIT);
    while (from < to) {
        uint64_t page = from / PAGE_UNITS, end = (page + 1) * PAGE_UNITS < to ? (page + 1) * PAGE_UNITS : to;
        uint64_t low = ~0ull << from % PAGE_UNITS, high = end % PAGE_UNITS ? ~(~0ull << end % PAGE_UNITS) : ~0ull;
        how->mine.units = low & high;
        visit(how, page);
        from = end;
    }
}

/* Lanes side by side are one range. */
static void visit_lanes(looker *how, const uint64_t *addresses, size_t count, uint32_t size) {
    for (size_t i = 0; i < count;) {
        size_t next = i + 1;
        while (next < count && addresses[next] == addresses[next - 1] + size) next++;
        visit_range(how, addresses[i], size * (uint64_t)(next - i));
        i = next;
    }
}

static looker looker_of(chk_cluster *cluster, const chk_gang *gang, uint32_t slot, chk_touch touch, int32_t site) {
    looker how = {.cluster = cluster, .gang = gang, .clock = &cluster->order->slots[slot]};
    how.mine.cluster = cluster->index, how.mine.site = site, how.mine.slot = (uint16_t)slot;
    how.mine.touch = (uint8_t)touch;
    return how;
}

chk_status chk_order_touch(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                           uint32_t size, chk_touch touch, const chk_sync *sync, int32_t site) {
    if (!cluster->order || !count) return CHK_OK;
    if (!chk_gang_ok(cluster, gang) || gang->num_warps != 1) return CHK_BAD_INPUT;
    uint32_t slot = chk_gang_slot(cluster, gang, 0);
    for (size_t i = 0; sync && touch != CHK_TOUCH_WRITE && i < count; i++)
        if (sync->order & CHK_ACQUIRE) synchronise(cluster, gang->cta, slot, addresses[i], CHK_TOUCH_READ, *sync);
    looker how = looker_of(cluster, gang, slot, touch, site);
    how.mine.component = (int32_t)slot, how.mine.count = cluster->order->now[slot];
    how.mine.scope = sync ? (uint8_t)(sync->scope + 1) : 0;
    visit_lanes(&how, addresses, count, size);
    for (size_t i = 0; sync && i < count; i++) synchronise(cluster, gang->cta, slot, addresses[i], touch, *sync);
    return CHK_OK;
}

chk_status chk_order_copy(chk_cluster *cluster, const chk_gang *gang, chk_token token, uint64_t address, uint64_t size,
                          chk_touch touch, int32_t site) {
    if (!cluster->order || token.component < 0) return CHK_OK;
    if (!chk_gang_ok(cluster, gang) || token.component >= cluster->num_components) return CHK_BAD_INPUT;
    uint32_t slot = chk_gang_slot(cluster, gang, 0);
    looker how = looker_of(cluster, gang, slot, touch, site);
    how.mine.component = component_of(cluster, token, NULL);
    if (how.mine.component < 0) return CHK_OK;
    how.mine.count = token.count;
    how.mine.is_async = cluster->keys[token.component].kind != CHK_CP_ASYNC;
    how.mine.scope = touch == CHK_TOUCH_SUM ? CHK_SCOPE_GPU + 1 : 0;
    visit_range(&how, address, size);
    return CHK_OK;
}

void chk_launch_done(chk_launch *launch) {
    if (!launch->order || !(launch->rules & CHK_RULES_PARENT) || launch->order->has_waited) return;
    chk_finding finding = {.kind = CHK_PARENT_NEVER, .site = -1, .other = -1, .agent_kind = -1, .lane = -1};
    chk_add(launch, &finding);
}
