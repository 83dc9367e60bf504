/* Hazard checks: the contract between the machine and its observer (rules R1 to R15).
 *
 * The twin of fa4build/simulate/checks/: equal events give equal findings, in the same order. The machine calls one
 * function for each thing it does, at the moment named with the function; nothing here moves data or wakes a warp.
 *
 * Words. `slot`: a warp of a cluster, counted over its CTAs by rank. `site`: index of the instruction in the function.
 * `granule`: 16 bytes of shared memory, or a column of a quarter (32 lanes) of tensor memory. `component`: anything
 * whose events are ordered by a plain count (a warp's program, an mbarrier's phases, a warp's bulk copies, ...).
 *
 * Every function takes any input without undefined behaviour: what is outside the machine (a rank, a warp, a granule,
 * a handle that does not exist) is CHK_BAD_INPUT, and nothing is recorded. Pointers must hold what their counts say.
 * One launch is used by one thread at a time.
 *
 * Room for what comes later, without a change to these signatures:
 *   - clocks per lane: events carry the mask of each warp's active lanes already; a component is (kind, a, b), so a
 *     lane becomes a component of its own (CHK_LANE) and `slot` stays the row of the warp.
 *   - order between clusters: `chk_sync` carries order, scope and state space; clocks hang off the launch, so the
 *     words of global memory (`chk_atomic`, `chk_acquire`) can move from the cluster to the launch.
 *   - proxy fences by state space: `chk_fence.spaces`.
 *   - order between kernels (programmatic dependent launch): CHK_FENCE_GRID_WAIT and CHK_FENCE_GRID_LAUNCH are
 *     reported already and do nothing; a chk_launch may be handed to the next one.
 *   - notes as errors: a switch of whoever turns records into texts; a record's kind says which of both it is.
 */
#ifndef FA4BUILD_NATIVE_CHECKS_H
#define FA4BUILD_NATIVE_CHECKS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What Python calls: seen from outside the library. */
#define CHK_API __attribute__((visibility("default")))

#define CHK_COMPONENTS 1024    /* clock components of one cluster; more is CHK_TOO_MANY_COMPONENTS */
#define CHK_MAX_WARPS 32      /* of one CTA */
#define CHK_MAX_CTAS 16       /* of one cluster */
#define CHK_MAX_FINDINGS 8192 /* records kept; more are counted only */

typedef enum {
    CHK_OK = 0,
    CHK_BAD_INPUT = 1,           /* outside the machine; see above */
    CHK_NO_MEMORY = 2,           /* malloc failed, or the launch's max_bytes are used up */
    CHK_TOO_MANY_COMPONENTS = 3, /* more than CHK_COMPONENTS in one cluster */
} chk_status;

typedef struct chk_launch chk_launch;   /* findings, global memory: one for each launch */
typedef struct chk_cluster chk_cluster; /* clocks and shadows of one cluster, while it runs */

/* ---- what the machine is ----------------------------------------------------------------------------------------- */

/* A buffer that held nothing at launch. `written`, of the owner, one word for each 4 bytes (rounded up): 0 never
 * written, -1 in an earlier launch, else 1 + number of the CTA that wrote it. NULL: a buffer that is not followed; it
 * must be told all the same, because an access that leaves all buffers is not looked at. */
typedef struct {
    uint64_t base, size; /* bytes */
    int32_t *written;
} chk_buffer;

/* `buffers` is copied, `written` is not. `max_bytes`: 0 for no bound. NULL if there is no memory. */
CHK_API chk_launch *chk_launch_create(const chk_buffer *buffers, size_t num_buffers, size_t max_bytes);
CHK_API void chk_launch_destroy(chk_launch *launch);
/* Rules beyond those of the Python checks, and assumptions that are not made; none to begin with. Before any cluster. */
enum {
    CHK_RULES_LANES = 1,        /* lanes of a warp meet in bar.warp.sync and barriers only; R10, R7-lane */
    CHK_RULES_SCOPES = 2,       /* relaxed, scopes, and what makes an mbarrier or a CTA known to others: R5, R13 */
    CHK_RULES_SPACES = 4,       /* state spaces of proxy fences */
    CHK_RULES_TENSOR_ORDER = 8, /* products of a thread are ordered only as the manual says: R7-order */
    CHK_RULES_ORDER = 32,       /* order of global memory between warps of all clusters; CTAs that others touch: R1 to R4, R12 */
    CHK_RULES_SUMS = 64,        /* floats are added to one address in an order that the program fixes: R16 */
    CHK_RULES_PARENT = 128,     /* launched as a programmatic dependent: R17 */
    CHK_RULES_SHUFFLE_READS = 512, /* shuffles and votes do not end the reads of shared memory before them */
    CHK_RULES_DEFAULT_SCOPE = 16, /* of the machine: an mbarrier instruction that names no scope has the CTA's */
};
CHK_API void chk_launch_rules(chk_launch *launch, uint32_t rules);
/* Whether any buffer is followed: without one, global ranges of asynchronous operations need not be worked out. */
int chk_has_unwritten(const chk_launch *launch);

/* `index`: of the cluster in the grid. `shared_limit`: first byte behind a CTA's shared window (0x400 + its bytes).
 * All CTAs of a cluster are alike. The cluster takes its slots, its shadows grow as it uses memory. */
chk_status chk_cluster_create(chk_launch *launch, uint32_t index, uint32_t num_ctas, uint32_t warps_a_cta,
                              uint32_t shared_limit, chk_cluster **out);
void chk_cluster_destroy(chk_cluster *cluster);
/* The lanes that a warp has, if not all 32. Before it runs. */
chk_status chk_lanes_present(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t lanes);

/* Warps that execute one instruction together; a machine that runs warp by warp passes one. */
typedef struct {
    uint32_t cta;            /* rank in the cluster */
    uint32_t num_warps;      /* 1..CHK_MAX_WARPS */
    const uint16_t *warps;   /* their indexes in the CTA, ascending */
    const uint32_t *masks;   /* active lanes of each; NULL: all of all. A warp without active lanes is only named. */
} chk_gang;

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Lanes read or write `size` bytes each (1..16, a power of two, aligned) of their own CTA's shared memory, by generic
 * instructions. Call before the access, after its alignment was checked. `offsets`: of the active lanes in order, in
 * the CTA's window (without the rank bits). An access with any lane out of bounds is not looked at: the machine
 * reports it. */
chk_status chk_shared_access(chk_cluster *cluster, const chk_gang *gang, const uint32_t *offsets, uint32_t size,
                             int32_t site, int is_write);

/* The same of the shared memory of CTA `owner` of the cluster. */
chk_status chk_remote_access(chk_cluster *cluster, const chk_gang *gang, uint32_t owner, const uint32_t *offsets,
                             uint32_t size, int32_t site, int is_write);
/* Threads touch CTA `cta` in any way, or hand it to an asynchronous operation: R13 where they may not know that it has
 * started. */
chk_status chk_touches(chk_cluster *cluster, const chk_gang *gang, uint32_t cta, int32_t site);

/* Generic access of global memory by the active lanes: after a load, before a store. */
chk_status chk_global_access(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                             uint32_t size, int32_t site, int is_write);

/* tcgen05.ld or st of one warp: `address` as in the instruction (lane << 16 | column), `width` columns. */
chk_status chk_tmem_access(chk_cluster *cluster, const chk_gang *gang, uint32_t warp, uint32_t address,
                           uint32_t width, int is_write, int32_t site);

/* tcgen05.dealloc: `column` is the first. Call after the allocator has taken them back. */
chk_status chk_tmem_freed(chk_cluster *cluster, const chk_gang *gang, uint32_t column, uint32_t num_cols,
                          int32_t site);

/* ---- asynchronous operations ------------------------------------------------------------------------------------- */

/* Through what an operation's completion is seen. */
typedef enum {
    CHK_WARP = 0,    /* (slot, 0): the program of a warp; no channel */
    CHK_BULK,        /* (slot, 0): bulk groups */
    CHK_CP_ASYNC,    /* (slot, 0): cp.async groups; generic proxy */
    CHK_WGMMA,       /* (slot, 0): wgmma groups */
    CHK_MMA,         /* (slot, 0): the tcgen05 queue of a warp; seen by commits */
    CHK_TMEM_LD,     /* (slot, 0): tcgen05.ld; no channel */
    CHK_TMEM_ST,     /* (slot, 0): tcgen05.st; no channel */
    CHK_MBARRIER,    /* (rank, offset): transaction bytes of an mbarrier */
    CHK_LANE,        /* (slot, lane): the program of a lane that has released without the others; no channel */
    CHK_NUM_COMPONENT_KINDS,
} chk_component_kind;

typedef struct {
    int32_t component; /* -1: the operation was not told */
    int32_t count;
    uint32_t lanes;    /* for chk_ops_waited: whose operation it is; 0: of all that wait */
} chk_token;

typedef uint8_t chk_lane_map __attribute__((vector_size(16)));
typedef enum {
    CHK_SHARED_SPAN = 0, /* `count` granules of CTA `cta` from `first` on */
    CHK_SHARED_UNITS,    /* `count` granules of CTA `cta`, listed in `granules`, all different */
    CHK_TENSOR_BLOCK,    /* `lanes` lanes from `first` on, columns `column` .. + `count`, of CTA `cta` */
    CHK_GLOBAL_RANGE,    /* `count` bytes from `address` on */
    CHK_GLOBAL_UNITS,    /* `count` units of `unit_bytes`, at `addresses` (those inside the tensor) */
} chk_operand_kind;

typedef struct {
    chk_operand_kind kind;
    uint32_t cta;
    uint32_t first, lanes, column;
    uint32_t unit_bytes;
    uint64_t count, address;
    const uint32_t *granules;
    const uint64_t *addresses;
    const chk_lane_map *owners; /* shared granules written by several lanes: which lane writes which byte (0xFF: none) */
} chk_operand;

/* Call when the operation is issued, before anything of it is performed (and before `chk_deferred_arrive`).
 * `channel`: CHK_BULK, CHK_CP_ASYNC, CHK_WGMMA or CHK_MMA of `warp`, or CHK_MBARRIER with `barrier`, the handle of
 * chk_barrier_created, in its phase `phase`. A reduction in global memory counts as a read of it.
 * `token`: what chk_ops_waited and chk_warp_exit take. */
#define CHK_TAG_COPY 1
typedef struct {
    uint32_t warp; /* index in the CTA */
    chk_component_kind channel;
    int32_t barrier;
    int32_t phase;
    int32_t site;
    uint32_t tag; /* CHK_MMA: equal for equal accumulator and shape; CHK_TAG_COPY of tcgen05.cp */
    const chk_operand *reads, *writes;
    size_t num_reads, num_writes;
} chk_operation;
chk_status chk_issue(chk_cluster *cluster, const chk_gang *gang, const chk_operation *operation, chk_token *token);

/* cp.async, bulk and wgmma groups were waited for, by the active warps. Call when the wait is over. */
chk_status chk_ops_waited(chk_cluster *cluster, const chk_gang *gang, const chk_token *tokens, size_t count);

typedef enum { CHK_WAIT_LD, CHK_WAIT_ST, CHK_TCGEN05_BEFORE, CHK_TCGEN05_AFTER } chk_tmem_order;
/* tcgen05.wait::ld, ::st, tcgen05.fence::before_thread_sync, ::after_thread_sync of the active warps. */
chk_status chk_tmem_wait(chk_cluster *cluster, const chk_gang *gang, chk_tmem_order order);

/* tcgen05.commit by a lane: it covers that thread's products only (R7-lane). */
chk_status chk_commit(chk_cluster *cluster, const chk_gang *gang, uint32_t lane, int32_t site);

/* The clock of an arrival that happens later: cp.async.mbarrier.arrive (`channel` CHK_CP_ASYNC) or tcgen05.commit
 * (CHK_MMA). Call at the instruction; the handle serves any number of arrivals and is then given back. */
chk_status chk_clock_take(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t lanes,
                          chk_component_kind channel, int32_t *clock);
chk_status chk_clock_release(chk_cluster *cluster, int32_t clock);
/* The arrival happens: before the barrier counts it. `phase`: the barrier's, now. */
chk_status chk_deferred_arrive(chk_cluster *cluster, int32_t barrier, int32_t phase, int32_t clock);

/* ---- barriers and fences ----------------------------------------------------------------------------------------- */

/* How strong a synchronising instruction is. */
typedef enum { CHK_RELAXED = 0, CHK_ACQUIRE = 1, CHK_RELEASE = 2, CHK_ACQ_REL = 3 } chk_order;
typedef enum { CHK_SCOPE_CTA = 0, CHK_SCOPE_CLUSTER, CHK_SCOPE_GPU, CHK_SCOPE_SYS } chk_scope;
typedef struct {
    uint8_t order; /* chk_order */
    uint8_t scope; /* chk_scope */
} chk_sync;

/* mbarrier.init. `barrier`: the handle of this barrier for as long as the cluster lives; a second init at the same
 * place, after mbarrier.inval, gives a new one. */
chk_status chk_barrier_created(chk_cluster *cluster, const chk_gang *gang, uint32_t offset, int32_t site,
                               int32_t *barrier);
/* mbarrier.arrive of the active lanes, before the barrier counts them. The barrier's state as it is then. */
chk_status chk_arrive(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase, uint32_t pending,
                      uint32_t expected, chk_sync sync, int32_t site);
/* Threads hand a barrier to an asynchronous operation that will signal it; CTA and initialisation must be known. */
chk_status chk_signals(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t site);
/* A wait saw the end of phase `phase` - 1: `phase` is the barrier's now. */
chk_status chk_wait_passed(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase,
                           chk_sync sync, int32_t site);

/* bar.sync, bar.arrive. Arrive: after the warps were counted, before the generation may end. Completed: the generation
 * is over. Passed: the warps of a `sync` go on; each call of chk_named_arrive with is_sync has one. */
chk_status chk_named_arrive(chk_cluster *cluster, const chk_gang *gang, uint32_t index, uint32_t generation,
                            int is_sync);
chk_status chk_named_completed(chk_cluster *cluster, uint32_t cta, uint32_t index, uint32_t generation);
chk_status chk_named_passed(chk_cluster *cluster, const chk_gang *gang, uint32_t index, uint32_t generation);

/* barrier.cluster. Completed: also when an exit completes it. */
chk_status chk_cluster_arrive(chk_cluster *cluster, const chk_gang *gang, chk_sync sync);
chk_status chk_cluster_completed(chk_cluster *cluster);
chk_status chk_cluster_passed(chk_cluster *cluster, const chk_gang *gang);

typedef enum {
    CHK_FENCE_OTHER = 0,     /* orders nothing that is followed */
    CHK_FENCE_PROXY_ASYNC,   /* fence.proxy.async, with or without a state space */
    CHK_FENCE_MBARRIER_INIT, /* fence.mbarrier_init.release.cluster */
    CHK_FENCE_MEMORY,        /* fence.acq_rel and its kin */
    CHK_FENCE_GRID_WAIT,     /* griddepcontrol.wait: does nothing today */
    CHK_FENCE_GRID_LAUNCH,   /* griddepcontrol.launch_dependents: does nothing today */
} chk_fence_kind;
enum { CHK_SPACE_SHARED_CTA = 1, CHK_SPACE_SHARED_CLUSTER = 2, CHK_SPACE_GLOBAL = 4, CHK_SPACE_ALL = 7 };
chk_status chk_fence(chk_cluster *cluster, const chk_gang *gang, chk_fence_kind kind, uint32_t spaces, chk_sync sync);

/* The lanes of a warp meet: bar.warp.sync. Named barriers do it themselves; shfl, vote, elect and the like order no
 * memory. */
chk_status chk_warp_barrier(chk_cluster *cluster, const chk_gang *gang);

/* All lanes of a warp meet in shfl.sync or vote.sync: an assumption is that their reads of shared memory are over. */
chk_status chk_warp_shuffle(chk_cluster *cluster, const chk_gang *gang);

/* atom and red on global words (before the operation); ld.acquire, ld.relaxed and ld.volatile (after the load).
 * Repeated addresses count once; the order of the different ones is the caller's. Atomics on shared memory are not
 * told. */
chk_status chk_atomic(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                      chk_sync sync, int32_t site);
chk_status chk_acquire(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                       chk_sync sync);

/* ---- order between clusters and kernels (checks_order.c) ---------------------------------------------------------- */

/* All clusters have ended: R17 where nobody has waited for the kernel in front. */
void chk_launch_done(chk_launch *launch);

/* What an access of global memory does. Sums are additions of floats, whose order shows in the bits. */
typedef enum { CHK_TOUCH_READ = 0, CHK_TOUCH_WRITE, CHK_TOUCH_UPDATE, CHK_TOUCH_SUM } chk_touch;
/* The active lanes access `size` bytes each. `sync`: how strong a strong access is (ld.relaxed and above, atomics);
 * NULL: a weak one. Acquires and releases of strong ones take effect. Call a load behind it, all others before. */
chk_status chk_order_touch(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                           uint32_t size, chk_touch touch, const chk_sync *sync, int32_t site);
/* An asynchronous operation, issued as `token`, accesses `size` bytes. */
chk_status chk_order_copy(chk_cluster *cluster, const chk_gang *gang, chk_token token, uint64_t address, uint64_t size,
                          chk_touch touch, int32_t site);
/* Groups were waited for until everything of them was performed (not `.read`). */
chk_status chk_order_performed(chk_cluster *cluster, const chk_gang *gang, const chk_token *tokens, size_t count);
/* Threads access the shared memory of another CTA of the cluster. */
chk_status chk_order_remote(chk_cluster *cluster, const chk_gang *gang, uint32_t cta, int32_t site);
/* The last thread of a CTA has exited: R12 where something may still touch its shared memory. */
chk_status chk_cta_left(chk_cluster *cluster, uint32_t cta);

/* ---- the end ----------------------------------------------------------------------------------------------------- */

/* A bulk operation of a lane that is in a group or not yet committed. `name`: the caller's number for its text. */
typedef struct {
    uint32_t lane;
    int32_t name;
    chk_token token;
    uint8_t has_read; /* its source was read; looked at only without a token */
    uint8_t committed;
} chk_bulk_op;

/* Lanes of a warp exit. `grouped`: operations of the lane's groups that were not dropped, `open`: those of open groups;
 * lane by lane, in the order of issue. `wgmma_pending`: the warp has wgmma not waited for. */
chk_status chk_warp_exit(chk_cluster *cluster, uint32_t cta, uint32_t warp, uint32_t leaving,
                         const chk_bulk_op *grouped, size_t num_grouped, const chk_bulk_op *open, size_t num_open,
                         int wgmma_pending);

typedef struct {
    uint32_t offset;
    int32_t phase;
    uint32_t pending, expected;
    int64_t tx; /* outstanding bytes */
} chk_barrier_state;
typedef struct {
    uint32_t arrived;  /* warps */
    uint32_t required; /* threads */
} chk_named_state;

/* What is left of a CTA when all threads of the cluster have exited; call for each rank in order. */
typedef struct {
    const chk_barrier_state *barriers; /* in the order of their init */
    size_t num_barriers;
    chk_named_state named[16];
    uint32_t tmem_blocks;             /* allocations not freed */
    const uint16_t *const *registers; /* of each warp: what its setmaxnreg have asked for, in order */
    const uint32_t *num_registers;    /* how many; NULL: no warp has changed its budget */
} chk_cta_end;
chk_status chk_cta_exit(chk_cluster *cluster, uint32_t cta, const chk_cta_end *end);

/* ---- findings ---------------------------------------------------------------------------------------------------- */

/* What was found; native/check_texts.py has the words. All are errors; CHK_NOTE_* are notes of the Python checks. */
typedef enum {
    CHK_SHARED_RACE_READ = 0,   /* R1: reads while the write by `agent` at `other` is not known to be complete */
    CHK_SHARED_RACE_WRITE,      /* R3: writes while the write by `agent` at `other` ... */
    CHK_SHARED_RACE_OVERWRITE,  /* R2: overwrites while the read by `agent` at `other` ... */
    CHK_SHARED_UNWRITTEN,       /* R9: generic read */
    CHK_SHARED_UNWRITTEN_ASYNC, /* R9: asynchronous read */
    CHK_PROXY_READ,             /* R4 */
    CHK_PROXY_WRITE,            /* R4 */
    CHK_BARRIER_BYTES_READ,     /* R5 */
    CHK_BARRIER_BYTES_WRITE,    /* R5 */
    CHK_BARRIER_BYTES_ASYNC,    /* R5 */
    CHK_GLOBAL_TWICE,           /* R3: `address` is a byte of buffer `extra[0]` */
    CHK_GLOBAL_UNWRITTEN,       /* R9: as above */
    CHK_TENSOR_RACE_READ,       /* R1 */
    CHK_TENSOR_RACE_WRITE,      /* R3 */
    CHK_TENSOR_RACE_OVERWRITE,  /* R2 */
    CHK_TENSOR_UNWRITTEN,       /* R9 */
    CHK_TENSOR_LOAD,            /* R7w: verb in extra[0] */
    CHK_TENSOR_FENCE_BEFORE,    /* R15-before: verb in extra[0] */
    CHK_TENSOR_FENCE_AFTER,     /* R15-after: verb in extra[0] */
    CHK_TENSOR_FREE_WRITE,      /* R6-free */
    CHK_TENSOR_FREE_READ,       /* R6-free */
    CHK_EXIT_BULK_READ,         /* R12: operation `extra[0]` may still read */
    CHK_EXIT_BULK_OPEN,         /* R12: operation `extra[0]` uncommitted */
    CHK_EXIT_WGMMA,             /* R8 */
    CHK_EXIT_BARRIER_BYTES,     /* R5-exit: `address` offset; extra: phase, pending, expected; `size` bytes */
    CHK_EXIT_BARRIER_HALF,      /* R5-exit: as above */
    CHK_EXIT_TMEM,              /* R6 */
    CHK_EXIT_BUDGETS,           /* R14: unequal from warp `first_warp` on */
    CHK_EXIT_REGISTER_FILE,     /* R14: extra[0] registers in all */
    CHK_UNDEFINED_REGISTER,     /* R9-register: extra[0] */
    CHK_WGMMA_NO_FENCE,         /* R8: of the machine, by chk_report */
    CHK_WGMMA_WRITTEN,          /* R8: of the machine: extra[0..3] registers (-1: none), `size` 1: accumulators, 0: A,
                                 * `lane` 1: read, else written */
    CHK_TENSOR_LANES,           /* R7-lane: thread `lane` issues after thread `other_lane` */
    CHK_TENSOR_ORDER,           /* R7-order: verb in extra[0] */
    CHK_LANE_RACE,              /* R10: `lane` after `other_lane`; verb in extra[0]; extra[1]: that one has read */
    CHK_BARRIER_EARLY,          /* R5: barrier of CTA extra[0] at `address`, init at `other` */
    CHK_ORDER_READ,             /* R1: of global memory: byte `address` of buffer extra[0]; the other side: cluster
                                 * extra[1], slot extra[2], extra[3]: 1 asynchronous, 2 strong */
    CHK_ORDER_WRITE,            /* R3: as above */
    CHK_ORDER_OVERWRITE,        /* R2: as above */
    CHK_ORDER_PROXY,            /* R4: as above; verb in `size` */
    CHK_ORDER_SUMS,             /* R16: as above */
    CHK_PARENT_EARLY,           /* R17: byte `address` of buffer extra[0]; verb in `size` */
    CHK_PARENT_NEVER,           /* R17: of the launch */
    CHK_LEFT_TOUCHED,           /* R12: CTA `cta`; extra[0]: 0 access, 1 copy, 2 commit, of slot extra[1], at `site` */
    CHK_LEFT_LATE,              /* R12: a commit of slot extra[1] arrives at CTA `cta`, which has left */
    CHK_NOTE_UNFENCED_INIT,     /* R5: barrier of CTA extra[0] at `address`, init at `other`; site -1: deferred */
    CHK_NOTE_EARLY_REMOTE,      /* R13: CTA extra[0] */
    CHK_NOTE_UNOBSERVED,        /* R5: first arrival of phase extra[0] at barrier `address` of CTA extra[1] */
    CHK_NOTE_NAMED_LEFT,        /* R14: barrier extra[0], extra[1] warps arrived, extra[2] threads required */
    CHK_NOTE_NAMED_TWICE,       /* R14: of the machine: barrier extra[0] */
    CHK_NOTE_WGMMA_PART,        /* R14: of the machine */
    CHK_OUT_OF_ROOM,            /* R0: of the checks; status extra[0] */
    CHK_NUM_KINDS,
} chk_kind;
typedef enum { CHK_READS = 0, CHK_OVERWRITES = 1, CHK_FREES = 2 } chk_verb;

typedef struct {
    int32_t kind;        /* chk_kind */
    int32_t site, other; /* instructions; -1: none */
    int32_t cluster;     /* index in the grid */
    int32_t cta;         /* rank of the gang, or of the CTA that exits */
    int32_t first_warp, last_warp, num_warps; /* of the gang */
    int32_t agent_kind, agent_a, agent_b;     /* component on the other side (chk_component_kind); -1: none */
    int32_t lane, other_lane;
    int32_t size;        /* bytes, where it says something */
    int64_t address;     /* shared: byte offset. tensor memory: granule (quarter * 512 + column). global: byte offset */
    int32_t extra[4];
} chk_finding;

/* A finding of a rule that the machine checks itself (CHK_WGMMA_*, CHK_NOTE_NAMED_TWICE, CHK_NOTE_WGMMA_PART). */
CHK_API chk_status chk_report(chk_launch *launch, const chk_finding *finding);
/* Findings so far, each pair of places once, in the order in which they were found. They stay valid, at that address,
 * until the launch is destroyed. `lost`: how many more there were than CHK_MAX_FINDINGS. */
CHK_API size_t chk_findings(const chk_launch *launch, const chk_finding **out, size_t *lost);

/* ---- undefined registers ----------------------------------------------------------------------------------------- */

/* Static: which registers some path may read before anything was written to them. One entry for each instruction; the
 * registers of instruction i are used[used_start[i]] .. used[used_start[i + 1] - 1], and so on. */
enum { CHK_IS_MOVE = 1, CHK_IS_GUARDED = 2 };
typedef struct {
    uint32_t num_registers, num_instructions, num_blocks;
    const uint8_t *flags;                      /* CHK_IS_* */
    const uint32_t *used_start, *used;         /* whose value the instruction does something with */
    const uint32_t *read_start, *read;         /* all it reads: of moves only */
    const uint32_t *written_start, *written;
    const uint32_t *block_start, *block_stop;  /* instructions of each basic block */
    const uint32_t *next_start, *next;         /* successors; num_blocks is the exit */
} chk_code;
/* Reports CHK_UNDEFINED_REGISTER for the first use of each such register. */
CHK_API chk_status chk_undefined(chk_launch *launch, const chk_code *code);

#ifdef __cplusplus
}
#endif
#endif
