/* A launch from beginning to end: CTAs and clusters, what their registers hold at first, what must be over at last:
 * launch.py, machine.py. The two functions that Python calls are `sim_run` and `sim_release`. */
#include "core.h"

#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

Handler handler_of(int op);
int run_tracked(Warp *w, const Ins *i);

/* ---- clusters not yet started ------------------------------------------------------------------------------------ */

bool take_origin(Run *run, int32_t origin[3]) {
    if (run->next_origin == run->num_origins) return false;
    const Launch *l = run->launch;
    int64_t n = run->next_origin++;
    int64_t across = l->grid[0] / l->cluster[0], down = l->grid[1] / l->cluster[1];
    origin[0] = (int32_t)(n % across) * l->cluster[0];
    origin[1] = (int32_t)(n / across % down) * l->cluster[1];
    origin[2] = (int32_t)(n / (across * down)) * l->cluster[2];
    return true;
}

/* ---- special registers ------------------------------------------------------------------------------------------- */

/* Numbers of SPECIALS in coder.py. */
enum {
    TID = 0, LANEID = 3, WARPID, LANEMASK_EQ, LANEMASK_LT, LANEMASK_LE, LANEMASK_GE, LANEMASK_GT, NTID = 10,
    CTAID = 13, NCTAID = 16, CLUSTERID = 19, NCLUSTERID = 22, CLUSTER_CTAID = 25, CLUSTER_NCTAID = 28,
    CLUSTER_CTARANK = 31, CLUSTER_NCTARANK, NWARPID, DYNAMIC_SMEM, SMID, GRIDID, SHARED_WINDOW,
};

static uint64_t of_lane(const Warp *w, int number, uint32_t lane) {
    const Launch *l = w->run->launch;
    uint32_t tid = (uint32_t)w->index * LANES + lane, x = (uint32_t)l->block[0], y = (uint32_t)l->block[1];
    switch (number) {
    case TID: return tid % x;
    case TID + 1: return tid / x % y;
    case TID + 2: return tid / (x * y);
    case LANEID: return lane;
    case WARPID: return (uint64_t)w->index;
    case LANEMASK_EQ: return 1u << lane;
    case LANEMASK_LT: return (1u << lane) - 1;
    case LANEMASK_LE: return (uint32_t)((2ull << lane) - 1);
    case LANEMASK_GE: return (uint32_t) ~((1u << lane) - 1);
    default: return (uint32_t) ~((2ull << lane) - 1);
    }
}

static uint64_t of_cta(const Cta *cta, int number) {
    const Launch *l = cta->run->launch;
    if (number >= NTID && number < CTAID) return (uint64_t)l->block[number - NTID];
    if (number < NCTAID) return (uint64_t)cta->ctaid[number - CTAID];
    if (number < CLUSTERID) return (uint64_t)l->grid[number - NCTAID];
    if (number < NCLUSTERID) return (uint64_t)(cta->ctaid[number - CLUSTERID] / l->cluster[number - CLUSTERID]);
    if (number < CLUSTER_CTAID) return (uint64_t)(l->grid[number - NCLUSTERID] / l->cluster[number - NCLUSTERID]);
    if (number < CLUSTER_NCTAID)
        return (uint64_t)(cta->ctaid[number - CLUSTER_CTAID] % l->cluster[number - CLUSTER_CTAID]);
    if (number < CLUSTER_CTARANK) return (uint64_t)l->cluster[number - CLUSTER_NCTAID];
    switch (number) {
    case CLUSTER_CTARANK: return (uint64_t)cta->rank;
    case CLUSTER_NCTARANK: return (uint64_t)cta->cluster->num_ctas;
    case NWARPID: return (uint64_t)cta->num_warps;
    case DYNAMIC_SMEM: return (uint64_t)l->smem;
    case SMID: return (uint64_t)(cta->cluster->index * 3 + cta->rank);
    case GRIDID: return 1;
    default: return SHARED_BASE | cta->rank_bits;
    }
}

static void fill_specials(Warp *w) {
    const Launch *l = w->run->launch;
    for (int64_t k = 0; k < l->num_specials; k++) {
        int number = l->specials[3 * k], bits = l->specials[3 * k + 1];
        uint8_t *place = w->base[0] + l->specials[3 * k + 2];
        for (uint32_t lane = 0; lane < LANES; lane++) {
            uint64_t value = number < NTID ? of_lane(w, number, lane) : of_cta(w->cta, number);
            memcpy(place + lane * (uint32_t)bits / 8, &value, (size_t)bits / 8);
        }
    }
}

/* ---- CTAs and warps ---------------------------------------------------------------------------------------------- */

static void start_warp(Warp *w, Cta *cta, int index) {
    const Launch *l = cta->run->launch;
    w->run = cta->run, w->cta = cta, w->code = cta->run->code;
    take_registers(w);
    w->base[1] = (uint8_t *)l->constants;
    w->index = index, w->slot = cta->rank * cta->num_warps + index;
    w->reconverge = -1, w->poll_site = -1, w->cluster_generation = -1, w->role = -1;
    w->registers = l->registers >= 0 ? l->registers : 0;
    int beyond = (index + 1) * LANES - cta->threads;
    w->exited = beyond > 0 ? FULL << (LANES - beyond) : 0;
    w->active = ~w->exited;
    bool tracks = w->run->checks && l->product_start[l->num_code - 1] > 0;
    if (tracks) w->stamps = calloc((size_t)l->num_registers * 2 + 1, sizeof *w->stamps);
    fill_specials(w);
}

static void start_cta(Cta *cta, Cluster *cluster, int rank, const int32_t first[3]) {
    const Launch *l = cluster->run->launch;
    const int32_t *c = l->cluster;
    int32_t place[3] = {rank % c[0], rank / c[0] % c[1], rank / (c[0] * c[1])};
    cta->cluster = cluster, cta->run = cluster->run, cta->rank = rank, cta->rank_bits = (uint32_t)rank << RANK_SHIFT;
    for (int k = 0; k < 3; k++) cta->ctaid[k] = first[k] + place[k];
    cta->shared_limit = SHARED_BASE + ((uint32_t)l->smem + 15) / 16 * 16;
    cta->shared = aligned_alloc(1024, ((size_t)cta->shared_limit + 64 + 1023) / 1024 * 1024);
    fill_poison(cta->shared, cta->shared_limit);
    cta->barrier_at = calloc(cta->shared_limit / 8 + 1, sizeof *cta->barrier_at);
    for (int k = 0; k < 16; k++) cta->named[k].required = -1;
    cta->threads = l->block[0] * l->block[1] * l->block[2];
    cta->num_warps = (cta->threads + LANES - 1) / LANES;
    size_t local = (size_t)cta->num_warps * LANES * (size_t)l->local_bytes;
    cta->local = malloc(local);
    memset(cta->local, 0xC1, local);
    cta->registers_total = l->registers >= 0 ? (int64_t)l->registers * cta->threads : 0;
    cta->warps = calloc((size_t)cta->num_warps, sizeof *cta->warps);
    for (int k = 0; k < cta->num_warps; k++) start_warp(cta->warps + k, cta, k);
}

static void free_list(GroupList *list) {
    for (int k = 0; k < list->n; k++) drop(list->e[k].op);
    free(list->e);
}

static void end_cta(Cta *cta) {
    for (int k = 0; k < cta->num_warps; k++) {
        Warp *w = cta->warps + k;
        if (w->wait.kind == WAIT_OPS) {
            for (int n = 0; n < w->wait.num_ops; n++) drop(w->wait.ops[n]);
            free(w->wait.ops);
        }
        free_list(&w->copies), free_list(&w->bulk), free_list(&w->products);
        give_registers(w);
        free(w->history), free(w->stamps);
    }
    for (int k = 0; k < cta->num_barriers; k++) free(cta->barriers[k]);
    free(cta->barriers), free(cta->barrier_at), free(cta->shared), free(cta->local), free(cta->tensor), free(cta->warps);
}

static Cluster *start_cluster(Run *run, int index, const int32_t origin[3]) {
    const Launch *l = run->launch;
    Cluster *cluster = calloc(1, sizeof *cluster);
    cluster->run = run, cluster->index = index;
    cluster->num_ctas = l->cluster[0] * l->cluster[1] * l->cluster[2];
    cluster->engine = (Engine){.order = &l->order, .random = (l->seed + (uint64_t)index) * 0x9E3779B97F4A7C15ull};
    cluster->ctas = calloc((size_t)cluster->num_ctas, sizeof *cluster->ctas);
    for (int k = 0; k < cluster->num_ctas; k++) start_cta(cluster->ctas + k, cluster, k, origin);
    if (run->checks)
        chk_cluster_create(l->findings, (uint32_t)index, (uint32_t)cluster->num_ctas,
                           (uint32_t)cluster->ctas->num_warps, cluster->ctas->shared_limit, &cluster->checks);
    for (int k = 0; run->checks && k < cluster->num_ctas; k++)
        for (int j = 0; j < cluster->ctas[k].num_warps; j++)
            if (cluster->ctas[k].warps[j].exited)
                chk_lanes_present(cluster->checks, (uint32_t)k, (uint32_t)j, ~cluster->ctas[k].warps[j].exited);
    return cluster;
}

static void drop_queues(Engine *e) {
    for (Queue *q = e->oldest; q;) {
        for (Op *op = q->first; op;) {
            Op *next = op->next;
            drop(op);
            op = next;
        }
        Queue *after = q->after;
        free(q);
        q = after;
    }
}

static void end_cluster(Cluster *cluster) {
    drop_queues(&cluster->engine);
    for (int k = 0; k < cluster->num_ctas; k++) end_cta(cluster->ctas + k);
    if (cluster->checks) chk_cluster_destroy(cluster->checks);
    free(cluster->ctas);
    free(cluster);
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

static int32_t name_number(Launch *l, const Op *op) {
    char text[512];
    describe_op(op, text, sizeof text);
    l->op_names = realloc(l->op_names, sizeof *l->op_names * (size_t)(l->num_op_names + 1));
    l->op_names[l->num_op_names] = strdup(text);
    return (int32_t)l->num_op_names++;
}

/* Bulk operations of the leaving lanes, lane by lane; `open` chooses those not committed. */
static size_t list_bulk(Warp *w, uint32_t mask, bool open, chk_bulk_op *out) {
    size_t n = 0;
    EACH_LANE(l, mask) {
        for (int k = 0; k < w->bulk.n; k++) {
            const Grouped *g = w->bulk.e + k;
            if (g->lane != (int)l || (g->group < 0) != open) continue;
            out[n++] = (chk_bulk_op){.lane = l, .name = name_number(w->run->launch, g->op), .token = g->op->token,
                                     .has_read = has_read(g->op), .committed = g->op->committed};
        }
    }
    return n;
}

void lanes_exit(Warp *w, uint32_t mask) {
    chk_bulk_op *ops = malloc(sizeof *ops * (size_t)(2 * w->bulk.n + 2));
    size_t grouped = list_bulk(w, mask, false, ops), open = list_bulk(w, mask, true, ops + grouped);
    chk_warp_exit(w->cta->cluster->checks, (uint32_t)w->cta->rank, (uint32_t)w->index, mask, ops, grouped,
                  ops + grouped, open, w->products.n > 0);
    free(ops);
    if (!threads_alive(w->cta)) chk_cta_left(w->cta->cluster->checks, (uint32_t)w->cta->rank);
}

static void add_detail(Launch *l, int kind, const int32_t *values, int n) {
    l->details = realloc(l->details, sizeof *l->details * (size_t)(l->num_details + n + 2));
    l->details[l->num_details++] = kind;
    l->details[l->num_details++] = n;
    memcpy(l->details + l->num_details, values, sizeof *values * (size_t)n);
    l->num_details += n;
}

/* Who is who, and what is left, in the words of the launch: cluster and rank first. */
static void add_details(const Cta *cta) {
    Launch *l = cta->run->launch;
    int32_t v[64] = {cta->cluster->index, cta->rank, cta->ctaid[0], cta->ctaid[1], cta->ctaid[2]};
    add_detail(l, DETAIL_CTA, v, 5);
    for (int k = 0; cta->tensor && k < cta->tensor->num_blocks; k++) {
        v[2] = cta->tensor->blocks[k][0], v[3] = cta->tensor->blocks[k][1];
        add_detail(l, DETAIL_TENSOR_MEMORY, v, 4);
    }
    for (int k = 0; k < cta->num_warps; k++) {
        const Warp *w = cta->warps + k;
        v[2] = k;
        for (int n = 0; n < w->num_history && n < 61; n++) v[3 + n] = w->history[n];
        add_detail(l, DETAIL_REGISTERS, v, 3 + (w->num_history < 61 ? w->num_history : 61));
    }
}

static bool any_error(const Launch *l) {
    const chk_finding *found;
    size_t lost;
    return chk_findings(l->findings, &found, &lost) > 0;
}

static void check_cta_end(Cta *cta) {
    chk_barrier_state *states = malloc(sizeof *states * (size_t)(cta->num_barriers + 1));
    const uint16_t *registers[MAX_WARPS];
    uint32_t counts[MAX_WARPS];
    chk_cta_end end = {.barriers = states, .registers = registers, .num_registers = counts};
    for (int k = 0; k < cta->num_barriers; k++) {
        const Mbarrier *b = cta->barriers[k];
        if (cta->barrier_at[b->offset / 8] != k + 1) continue;
        states[end.num_barriers++] = (chk_barrier_state){.offset = b->offset, .phase = b->phase,
            .pending = (uint32_t)b->pending, .expected = (uint32_t)b->expected, .tx = b->tx};
    }
    for (int k = 0; k < 16; k++)
        end.named[k] = (chk_named_state){.arrived = (uint32_t)cta->named[k].num_arrived,
                                         .required = (uint32_t)(cta->named[k].required < 0 ? 0 : cta->named[k].required)};
    end.tmem_blocks = cta->tensor ? (uint32_t)cta->tensor->num_blocks : 0;
    for (int k = 0; k < cta->num_warps; k++)
        registers[k] = cta->warps[k].history, counts[k] = (uint32_t)cta->warps[k].num_history;
    chk_cta_exit(cta->cluster->checks, (uint32_t)cta->rank, &end);
    free(states);
}

/* Performs what is left of writes to global memory, and checks what must be over. */
static int finish_cluster(Run *run, Cluster *cluster) {
    bool did = true;
    run->in_engine = true;
    while (did)
        if (advance(&cluster->engine, &did)) return FAULTED;
    run->in_engine = false;
    for (int k = 0; run->checks && k < cluster->num_ctas; k++) check_cta_end(cluster->ctas + k);
    run->hazards |= run->checks && any_error(run->launch);
    for (int k = 0; run->hazards && k < cluster->num_ctas; k++) add_details(cluster->ctas + k);
    return NEXT;
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

static bool stops(const Run *run) { return run->hazards && !run->launch->keep_going; }

bool cluster_is_over(const Cluster *cluster) {
    for (int k = 0; k < cluster->num_ctas; k++)
        if (threads_alive(cluster->ctas + k)) return false;
    return true;
}

/* Starts clusters, in the order of the grid, while there is room; reversed, the newest is asked first from then on.
 * Returns how many are in flight. */
static int start_some(Run *run, int *index) {
    int32_t origin[3];
    while (run->num_clusters < run->launch->concurrent_clusters && take_origin(run, origin)) {
        int place = run->num_clusters++;
        if (run->launch->order.reversed_clusters) {
            memmove(run->clusters + 1, run->clusters, sizeof *run->clusters * (size_t)place);
            place = 0;
        }
        run->clusters[place] = start_cluster(run, (*index)++, origin);
        run->random = (run->launch->seed + (uint64_t)*index) ^ 0x5EED;
        run->last_buffer = NULL;
    }
    return run->num_clusters;
}

/* Ends the clusters that are over, or all. */
static int end_some(Run *run, int status, bool all) {
    int kept = 0;
    for (int k = 0; k < run->num_clusters; k++) {
        Cluster *cluster = run->clusters[k];
        if (!all && !cluster_is_over(cluster)) {
            run->clusters[kept++] = cluster;
            continue;
        }
        if (!status && !stops(run)) status = finish_cluster(run, cluster);
        end_cluster(cluster);
    }
    run->num_clusters = kept;
    return status;
}

static int run_clusters(Run *run) {
    int index = 0, status = NEXT;
    while (!status && !stops(run) && start_some(run, &index)) {
        status = end_some(run, schedule(run), false);
        run->hazards |= run->launch->has_hazards != 0;
        run->launch->warp_instructions += run->warp_instructions;
        run->warp_instructions = run->steps = 0;
    }
    end_some(run, FAULTED, true);
    return status;
}

static void follow_buffers(Launch *l) {
    chk_buffer *told = calloc((size_t)l->num_buffers + 1, sizeof *told);
    for (int64_t k = 0; k < l->num_buffers; k++)
        told[k] = (chk_buffer){l->buffers[k].base, l->buffers[k].size, l->buffers[k].written};
    l->findings = chk_launch_create(told, (size_t)l->num_buffers, 0);
    chk_launch_rules(l->findings, (uint32_t)l->checks & ~(uint32_t)CHECKS_ON);
    free(told);
}

static Handler own_handler(const Launch *l, int64_t k) {
    bool tracked = l->checks && l->track_start[k] < l->track_start[k + 1];
    return tracked ? run_tracked : handler_of(l->code[k].op);
}

/* In the place of an instruction's handler until some lane executes it (of a branch: comes to it): a note costs nothing
 * from then on. */
static int run_first(Warp *w, const Ins *i) {
    Launch *l = w->run->launch;
    l->executed[i - l->code] = 1;
    l->code[i - l->code].run = own_handler(l, i - l->code);
    return i->run(w, i);
}

/* Runs a launch. Returns its status (RUN_*); the texts and findings live until sim_release. */
EXPORT int sim_run(Launch *launch) {
    Run run = {.launch = launch, .code = launch->code, .num_code = (int32_t)launch->num_code};
    run.checks = launch->checks != 0;
    run.num_origins = (int64_t)(launch->grid[0] / launch->cluster[0]) * (launch->grid[1] / launch->cluster[1]) *
                      (launch->grid[2] / launch->cluster[2]);
    for (int64_t k = 0; k < launch->num_code; k++)
        launch->code[k].run = launch->executed ? run_first : own_handler(launch, k);
    keep_memory();
    if (run.checks) follow_buffers(launch);
    run.clusters = calloc((size_t)launch->concurrent_clusters + 1, sizeof *run.clusters);
    if (!run_clusters(&run) && !stops(&run) && run.checks) {
        chk_launch_done(launch->findings);
        run.hazards |= any_error(launch);
    }
    free(run.clusters);
    for (int k = 0; k < run.num_maps; k++) free(run.maps[k].map);
    free(run.maps);
    if (run.hazards && launch->status == RUN_DONE) launch->status = RUN_HAZARDS;
    return launch->status;
}

EXPORT void sim_release(Launch *launch) {
    free(launch->report);
    for (int64_t k = 0; k < launch->num_op_names; k++) free(launch->op_names[k]);
    free(launch->op_names), free(launch->details);
    if (launch->findings) chk_launch_destroy(launch->findings);
    launch->report = NULL, launch->op_names = NULL, launch->findings = NULL, launch->details = NULL;
    launch->num_op_names = launch->num_details = 0;
}
