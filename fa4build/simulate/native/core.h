/* The machine of the native engine: a launch, its clusters, CTAs, warps, and one function for each kind of instruction.
 *
 * The twin of fa4build/simulate/{machine,gang,scheduler,system,engine}.py, warp by warp instead of gang by gang. A
 * handler runs one instruction for the lanes in `w->mask` and returns what the warp does next. A warp that cannot go
 * on holds a `Wait`; the scheduler asks `wait_ready` and then calls `wait_finish`. Errors are texts: `fault` writes
 * one and ends the run.
 */
#ifndef FA4BUILD_NATIVE_CORE_H
#define FA4BUILD_NATIVE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "checks.h"
#include "units.h"

#define LANES 32
#define FULL 0xFFFFFFFFu
#define SHARED_BASE 0x400u
#define RANK_SHIFT 24
#define OFFSET_MASK 0xFFFFFFu
#define PARAMETER_WINDOW 0x5000000000000000ull
#define SHARED_GRANULES 16384 /* of 16 bytes: more than a CTA can have */
#define MAX_CTAS 16
#define MAX_WARPS 32
#define PART_SHIFT 6 /* PART of program.py is 64 instructions */
#define COUNT_LIMIT ((1 << 20) - 1)
#define UNREACHABLE __builtin_unreachable()

/* ---- what Python hands over -------------------------------------------------------------------------------------- */

typedef struct Warp Warp;
typedef struct Ins Ins;
typedef int (*Handler)(Warp *, const Ins *);

/* One instruction; RECORD of coder.py. */
struct Ins {
    Handler run;
    uint16_t op;
    uint8_t size, count;
    uint32_t flags;
    int32_t guard, target, reconverge, line;
    int32_t o[6];
    int32_t list, length, list2, length2;
    int64_t imm[2];
};

typedef struct {
    uint64_t base, size; /* bytes */
    uint8_t *data;
    int32_t *written; /* see checks.h */
    int32_t read_only;
    int32_t spare;
    const char *name;
} Buffer;

/* A field of shared memory by name, relative to the dynamic base. */
typedef struct {
    const char *name;
    int64_t start, size, stride;
} SharedName;

/* The order in which things happen; Order of orders.py. */
typedef struct {
    int32_t deferred;         /* asynchronous operations are not performed at issue */
    int32_t pick;             /* PICK_*: whose turn it is among queues of operations */
    int32_t warps;            /* WARPS_* */
    int32_t longest_run;      /* a warp runs 1 to so many instructions; 0: until it waits */
    int32_t behind_run;       /* so many operations are performed behind every warp's run */
    int32_t drift_percent;    /* chance that one more is, and then another */
    int32_t miss_percent;     /* chance that a barrier test fails although the phase is over */
    uint32_t starved;         /* warps of each CTA that run only when no other can */
    int32_t reversed_clusters; /* of clusters in flight at once the last starts first */
    int32_t elected;          /* elect.sync takes the first member from this lane on, cyclic */
} Order;
enum { PICK_NEWEST = 0, PICK_OLDEST, PICK_ANY };
enum { WARPS_FORWARD = 0, WARPS_BACKWARD, WARPS_SHUFFLED };

/* Everything a run needs; LAUNCH of run.py. */
typedef struct {
    Ins *code;
    int64_t num_code;
    const uint8_t *constants;
    const int32_t *lists;
    /* With checks: registers of wgmma that instruction k writes are track[track_start[k]..], and accumulators that it
     * reads, as register + num_registers; those that it multiplies with are product[product_start[k]..], accumulators
     * first. */
    const int32_t *track_start, *track, *product_start, *product;
    int64_t num_registers;
    /* Places of registers, as pairs of offset and bytes, that PART instructions write: part[2 * part_start[n]].. for the
     * n-th so many, and special values as one more. */
    const int32_t *part_start, *part;
    int64_t num_parts;
    const int32_t *specials; /* triples: number, bits, offset */
    int64_t num_specials;
    int64_t register_bytes;
    const char *const *texts;      /* of instructions */
    const char *const *faults;     /* texts of faults in the code */
    const uint8_t *parameters;
    int64_t parameter_bytes;
    int64_t local_bytes;
    Buffer *buffers;
    int64_t num_buffers;
    units_tables tables;
    int (*map_is_legal)(const uint8_t *bytes); /* of a tensor map */
    const SharedName *shared_names;
    int64_t num_shared_names;
    int32_t grid[3], block[3], cluster[3];
    int32_t smem;
    int32_t registers; /* -1: budgets are not checked */
    Order order;
    uint64_t seed;
    int32_t concurrent_clusters;
    int32_t checks; /* 0: none; else CHECKS_ON and CHK_RULES_* */
    int64_t instruction_limit;
    /* results */
    int64_t warp_instructions;
    int32_t status;       /* RUN_* */
    int32_t fault_site;   /* of RUN_FAULT; -1: where the warp is */
    int32_t fault_cta[3], fault_rank, fault_warp, fault_pc, fault_role;
    char *report;         /* text of a fault or a deadlock; freed by sim_release */
    uint64_t map_address; /* of RUN_BAD_MAP */
    chk_launch *findings; /* given back by sim_release */
    char **op_names; /* of operations that findings name by number; freed by sim_release */
    int64_t num_op_names;
    /* What texts of findings need: DETAIL_*, length, values; freed by sim_release. */
    int32_t *details;
    int64_t num_details;
    int32_t has_hazards; /* before the run: the code itself has some */
    int32_t keep_going;  /* also behind findings that are errors: some rules are allowed to be broken */
    uint8_t *executed;   /* set to 1 for each instruction that some lane executes; NULL: nobody asks */
} Launch;

#define CHECKS_ON 0x100

enum { DETAIL_CTA = 1, DETAIL_TENSOR_MEMORY, DETAIL_REGISTERS };

enum { RUN_DONE = 0, RUN_FAULT = 1, RUN_DEADLOCK = 2, RUN_BAD_MAP = 3, RUN_NO_MEMORY = 4, RUN_HAZARDS = 5 };

/* What a handler returns. */
enum {
    NEXT = 0, /* the following instruction */
    JUMP,     /* `w->pc` was set */
    BLOCKED,  /* `w->wait` was set */
    LEFT,     /* the warp has exited */
    FAULTED,  /* `launch->report` was set */
};

/* ---- the machine ------------------------------------------------------------------------------------------------- */

typedef struct Cta Cta;
typedef struct Cluster Cluster;
typedef struct Run Run;
typedef struct Op Op;

typedef struct {
    uint8_t kind; /* ARRIVED_* */
    int32_t warp, rank, line, phase;
    int64_t bytes;
} Arrival;
enum { ARRIVED_WARP = 0, ARRIVED_BYTES, ARRIVED_WARP_BYTES, ARRIVED_CP_ASYNC, ARRIVED_COMMIT };
#define KEPT_ARRIVALS 6

typedef struct {
    int32_t rank, warp, line;
} Source;

/* Phase, pending arrivals and outstanding bytes of one mbarrier. */
typedef struct {
    Cta *cta;
    uint32_t offset;
    int32_t expected, pending, phase;
    int64_t tx;
    int32_t handle; /* of the checks */
    uint32_t num_arrivals;
    Arrival arrivals[KEPT_ARRIVALS];
    int32_t num_sources;
    Source sources[64];
} Mbarrier;

typedef struct {
    int32_t generation;
    int32_t required; /* -1: nobody is here */
    int32_t num_arrived;
    uint8_t arrived[MAX_WARPS * 2];
    int32_t where[MAX_WARPS * 2]; /* lines */
    uint32_t members;             /* warps that ever arrived */
} NamedBarrier;

typedef struct {
    uint32_t cells[128][512];
    int32_t blocks[16][2]; /* first column, columns; in the order of allocation */
    int32_t num_blocks, last_size, group;
    bool may_allocate;
    /* An instruction that the CTAs of a pair execute together: who has come here first, and that the other did too. */
    int32_t paired_op, paired_count;
    bool pair_is_complete;
} TensorMemory;

/* Operations of a warp in groups. `group` -1: not committed. */
typedef struct {
    Op *op;
    int32_t group;
    int32_t lane;
} Grouped;
typedef struct {
    Grouped *e;
    int32_t n, capacity;
} GroupList;

typedef struct {
    int32_t pc;
    uint32_t mask; /* FULL also stands for "all that have not exited" */
    int32_t reconverge;
} Pending;
#define MAX_DEPTH 64

typedef enum {
    WAIT_NONE = 0,
    WAIT_MBARRIER,
    WAIT_NAMED,
    WAIT_CLUSTER,
    WAIT_OPS,
    WAIT_ALLOC,
    WAIT_REGISTERS,
    WAIT_POLL,
    WAIT_WARPGROUP,
    WAIT_PAIR,
} WaitKind;

typedef struct {
    WaitKind kind;
    uint32_t mask;       /* lanes that wait */
    const Ins *ins;
    Mbarrier *mbarrier;  /* MBARRIER */
    int32_t phase;       /* MBARRIER: when it blocked. NAMED, CLUSTER: generation */
    int32_t parity;      /* MBARRIER. OPS: 1 if reads are enough. */
    int32_t named;       /* NAMED: its number. OPS: index of what. */
    int64_t need;        /* REGISTERS, ALLOC */
    uint64_t address[LANES], value[LANES]; /* POLL */
    Op **ops;            /* OPS */
    uint32_t *op_lanes;  /* whose each of them is; NULL: of all that wait */
    int32_t num_ops;
    bool again;          /* executes the instruction again instead of going on */
} Wait;

struct Warp {
    uint8_t *base[2]; /* registers, constants */
    Run *run;
    Cta *cta;
    const Ins *code;
    int32_t pc, reconverge;
    uint32_t active, mask; /* of the warp; of the instruction */
    uint32_t exited;       /* lanes, those beyond the block's threads included */
    int32_t index, slot;   /* in the CTA, in the cluster */
    int32_t depth;
    bool dead, blocked;
    int64_t executed;
    Pending stack[MAX_DEPTH];
    Wait wait;
    /* the newest unsuccessful poll: site, and what was seen */
    int32_t poll_site;
    const void *poll_barrier;
    int32_t poll_phase;
    uint64_t poll_address[LANES], poll_value[LANES];
    uint32_t poll_mask;
    int32_t cluster_generation; /* -1: never arrived */
    bool synced_cluster;
    int32_t registers;
    uint8_t *seen; /* parts of the code in which an instruction was executed */
    uint16_t *history;
    int32_t num_history;
    GroupList copies, bulk, products; /* cp.async; bulk operations by lane; wgmma */
    int32_t copy_groups, product_groups;
    int32_t bulk_groups[LANES];
    uint32_t bulk_known; /* lanes that ever had a bulk operation */
    bool fenced;         /* there was a wgmma.fence */
    uint32_t now, fence; /* writes to registers of wgmma so far, and before the last wgmma.fence */
    uint32_t *stamps;    /* of each register: the newest such write, and behind these the newest such read */
    int32_t role;
    int32_t num_ways;
    struct {
        int32_t pc, taken;
    } ways[64]; /* newest way at branches that lead far apart, for reports */
};

struct Cta {
    Cluster *cluster;
    Run *run;
    int32_t rank, ctaid[3];
    uint32_t rank_bits;
    uint8_t *shared;
    uint32_t shared_limit;
    uint16_t *barrier_at; /* by offset / 8: 1 + index of the live mbarrier */
    Mbarrier **barriers;  /* in the order of init; NULL when invalidated */
    int32_t num_barriers, barrier_capacity;
    NamedBarrier named[16];
    TensorMemory *tensor;
    uint8_t *local;
    Warp *warps;
    int32_t num_warps;
    int32_t threads, exited;
    int64_t registers_total, registers_free;
};

/* ---- asynchronous operations ------------------------------------------------------------------------------------- */

typedef enum {
    OP_COPY_ASYNC,  /* cp.async of one warp */
    OP_COPY_ARRIVE, /* cp.async.mbarrier.arrive */
    OP_TO_SHARED,   /* bytes from global memory to shared memory */
    OP_PUSH,        /* from shared memory to another CTA's */
    OP_BYTES,       /* bytes that the operation holds: st.async, clusterlaunchcontrol */
    OP_OUT,         /* from shared memory to global memory, added or not */
    OP_TENSOR_LOAD,
    OP_TENSOR_OUT,
    OP_WGMMA,
    OP_MMA,
    OP_TENSOR_COPY, /* tcgen05.cp */
    OP_COMMIT,
} OpKind;

#define UNITS_OF_BOX 64

struct Op {
    OpKind kind;
    int32_t refs, stage, stages;
    bool committed;
    int32_t line, site;
    chk_token token;
    Op *next; /* in its queue */
    Warp *warp;
    Cta *cta; /* whose shared memory it touches */
    Mbarrier *barrier[MAX_CTAS];
    int32_t num_barriers;
    int32_t clock; /* of the checks; -1: none */
    bool reduces;  /* OUT */
    uint32_t offset, size;
    uint64_t address;
    Buffer *buffer;
    uint8_t *staged;
    void *more; /* of the kind: freed with the operation */
};

typedef struct Queue Queue;
struct Queue {
    uint64_t key; /* 0: of one operation */
    Op *first, *last;
    Queue *before, *after; /* in the order in which they came */
};

typedef struct {
    const Order *order;
    uint64_t random;
    Queue *oldest, *newest;
    int32_t num_queues;
} Engine;

struct Cluster {
    Run *run;
    int32_t index;
    Engine engine;
    Cta *ctas;
    int32_t num_ctas;
    int32_t generation; /* of the cluster barrier */
    int64_t arrived;
    bool claim_failed;
    chk_cluster *checks;
};

/* ---- a run ------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint64_t address;
    void *map;
} KnownMap;

struct Run {
    Launch *launch;
    Ins *code;
    int32_t num_code;
    Cluster **clusters;
    int32_t num_clusters;
    int64_t next_origin, num_origins;
    uint64_t random;
    int64_t steps, warp_instructions;
    Buffer *last_buffer;
    KnownMap *maps;
    int32_t num_maps, map_capacity;
    bool in_engine; /* a fault belongs to no warp */
    bool hazards;   /* findings that are errors */
    bool checks;
};

/* ---- shared by the files of the engine --------------------------------------------------------------------------- */

/* Ends the run with a text at an instruction (site -1: where the warp is). Returns FAULTED. */
int fault(Warp *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Place of an offset of shared memory in words; uses one of a few buffers of its own. */
const char *name_of(const Cta *cta, uint32_t offset);
/* `0-3,7`. */
const char *lane_ranges(uint32_t mask);

static inline int site_of(const Warp *w, const Ins *i) { return (int)(i - w->code); }
static inline const void *at(const Warp *w, int32_t o) { return w->base[o & 1] + (o & ~3); }
static inline void *to(Warp *w, int32_t o) { return w->base[0] + (o & ~3); }
static inline uint32_t lane32(const Warp *w, int32_t o, int lane) { return ((const uint32_t *)at(w, o))[lane]; }
static inline uint64_t lane64(const Warp *w, int32_t o, int lane) { return ((const uint64_t *)at(w, o))[lane]; }
static inline uint64_t lane_any(const Warp *w, int32_t o, int lane) {
    return o & 2 ? lane64(w, o, lane) : lane32(w, o, lane);
}
static inline uint32_t predicate(const Warp *w, int32_t o) { return *(const uint32_t *)at(w, o); }
static inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }
static inline int count_lanes(uint32_t mask) { return __builtin_popcount(mask); }
#define EACH_LANE(l, m) for (uint32_t l##_rest = (m), l = 0; l##_rest && (l = (uint32_t)__builtin_ctz(l##_rest), 1); l##_rest &= l##_rest - 1)

/* A predicate result: lanes outside the mask keep theirs. */
static inline void put_predicate(Warp *w, int32_t o, uint32_t bits) {
    if (o < 0) return;
    uint32_t *p = to(w, o);
    *p = (*p & ~w->mask) | (bits & w->mask);
}

static inline uint64_t next_random(uint64_t *state) {
    uint64_t x = (*state += 0x9E3779B97F4A7C15ull);
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
/* Whether a chance of `percent` in a hundred came true. */
static inline bool chance(uint64_t *state, uint32_t percent) { return next_random(state) % 100 < percent; }

/* The common value of active lanes, or false. */
static inline bool same32(const Warp *w, int32_t o, uint32_t mask, uint32_t *value) {
    const uint32_t *a = at(w, o);
    *value = a[first_lane(mask)];
    uint32_t differ = 0;
    EACH_LANE(l, mask) differ |= a[l] ^ *value;
    return differ == 0;
}

static inline int threads_alive(const Cta *cta) { return cta->threads - cta->exited; }
static inline int num_ctas(const Warp *w) { return w->cta->cluster->num_ctas; }
static inline chk_gang gang_of(const Warp *w, const uint16_t *index, const uint32_t *mask) {
    return (chk_gang){.cta = (uint32_t)w->cta->rank, .num_warps = 1, .warps = index, .masks = mask};
}
/* Calls a function of the checks with (cluster, gang, ...) for the lanes of the current instruction. */
#define CHECK(w, function, ...)                                                          \
    do {                                                                                 \
        if ((w)->run->checks) {                                                          \
            uint16_t check_index = (uint16_t)(w)->index;                                 \
            uint32_t check_mask = (w)->mask;                                             \
            chk_gang check_gang = gang_of((w), &check_index, &check_mask);               \
            function((w)->cta->cluster->checks, &check_gang __VA_OPT__(, ) __VA_ARGS__); \
        }                                                                                \
    } while (0)

/* core_global.c */
Buffer *find_buffer(Run *run, uint64_t address, uint64_t size);
int out_of_bounds(Warp *w, const char *what, uint64_t address, uint64_t size);

/* core_warp.c: every lane that has not exited is here. `what` is worked out only where one is not. */
int not_converged(Warp *w, const char *what);
#define require_converged(w, what) (((w)->mask | (w)->exited) == FULL ? NEXT : not_converged(w, what))
int check_members(Warp *w, uint32_t members, const char *what);
/* Every lane of the warp is here and none has exited. */
#define require_whole(w, what) ((w)->mask == FULL ? NEXT : not_converged(w, what))
/* The value that all active lanes must share. */
int uniform32(Warp *w, int32_t o, const char *what, uint32_t *value);

/* core_barrier.c */
Mbarrier *find_mbarrier(Warp *w, uint32_t address);
int mbarrier_arrive(Warp *w, Mbarrier *b, int64_t count, Arrival who);
int mbarrier_bytes(Warp *w, Mbarrier *b, int64_t size, Arrival who);
chk_sync strength(const Warp *w, const Ins *i);
void mbarrier_source(Mbarrier *b, const Warp *w, int32_t line);
void check_cluster_barrier(Cluster *cluster);

/* core_async.c */
Op *new_op(Warp *w, const Ins *i, OpKind kind, int stages);
void keep(Op *op);
void drop(Op *op);
int submit(Engine *engine, Op *op, uint64_t key);
int advance(Engine *engine, bool *did);
int drift(Engine *engine);
uint64_t queue_key(int kind, const Warp *w);
enum { QUEUE_COPIES = 1, QUEUE_TENSOR, QUEUE_WGMMA };
void group_add(GroupList *list, Op *op, int lane);
int step_op(Op *op);
static inline bool has_read(const Op *op) { return op->stage >= 1; }
static inline bool is_done(const Op *op) { return op->stage == op->stages; }
int wait_for_ops(Warp *w, const Ins *i, Op **ops, uint32_t *lanes, int n, bool reads, int what);
Cta *target_cta(Warp *w, uint32_t address, uint32_t *offset);
uint8_t *shared_span(Warp *w, Cta *cta, uint32_t offset, uint32_t size, const char *what);
int one_thread(Warp *w, const Ins *i, int *lane);
void touch_both(Warp *w, const Cta *cta, const Mbarrier *b, int32_t site);
const char *opcode_text(const Warp *w, const Ins *i);
/* `tag`: see chk_operation. */
void observe_product(Warp *w, Op *op, uint32_t tag, const chk_operand *reads, size_t num_reads,
                     const chk_operand *writes, size_t num_writes);
void observe_issue(Warp *w, Op *op, chk_component_kind channel, Mbarrier *barrier, const chk_operand *reads,
                   size_t num_reads, const chk_operand *writes, size_t num_writes);

/* What an operation is, in words. */
void describe_op(const Op *op, char *text, size_t room);
void describe_tensor_op(const Op *op, char *text, size_t room);
bool ops_over(const Wait *wait);
int finish_ops(Warp *w, const Wait *wait);
Op **take_groups(GroupList *list, int32_t groups, int64_t newest, int *n);

/* Granules of a CTA's shared memory as a set. */
typedef struct {
    uint64_t words[(SHARED_GRANULES + 63) / 64];
} GranuleSet;
static inline void add_granule(GranuleSet *set, uint32_t granule) {
    if (granule < SHARED_GRANULES) set->words[granule / 64] |= 1ull << granule % 64;
}
/* Those in the set, in order; returns how many. */
size_t list_granules(const GranuleSet *set, uint32_t *out);

/* core_wait.c */
bool wait_ready(Warp *w, int *status);
int wait_finish(Warp *w);

/* kinds of operations performed elsewhere */
int perform_tensor_load(Op *op);
int perform_tensor_out(Op *op);
int perform_wgmma(Op *op);
int perform_mma(Op *op);
int perform_tensor_copy(Op *op);
int perform_commit(Op *op);
void free_wgmma(Op *op);
int deliver_wgmma(Warp *w, Op **ops, int n);
int wgmma_rendezvous(Warp *w);
TensorMemory *tensor_memory(Cta *cta);

/* core_launch.c */
bool take_origin(Run *run, int32_t origin[3]);
bool cluster_is_over(const Cluster *cluster);
/* core_memory.c */
/* What is freed stays with the process, so that clusters do not ask the system for the same pages again and again. */
void keep_memory(void);
void fill_poison(uint8_t *bytes, size_t size);
void take_registers(Warp *w);
void give_registers(Warp *w);
/* core_schedule.c */
int schedule(Run *run);
bool may_miss(Run *run);
/* core_run.c */
int run_warp(Warp *w, int64_t quantum);
void lanes_exit(Warp *w, uint32_t mask);

#define DECLARE(name) int op_##name(Warp *w, const Ins *i);

#endif
