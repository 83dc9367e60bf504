/* Replays a recorded stream of events into the checks: for comparing them with their Python twin, for fuzzing and for
 * benchmarks. Words of 64 bits; an event is its number (chk_event), how many words follow, and those words in the order
 * of the fields named there. `gang` is: cta, number of warps, the warps, their masks. Clusters, operations, barriers
 * and clocks have numbers that the recorder gives, from 0 on. */
#ifndef FA4BUILD_NATIVE_CHECKS_REPLAY_H
#define FA4BUILD_NATIVE_CHECKS_REPLAY_H

#include "checks.h"

typedef enum {
    CHK_EV_CLUSTER_BEGIN = 0, /* cluster, index, CTAs, warps a CTA, shared limit */
    CHK_EV_CLUSTER_END,       /* cluster */
    CHK_EV_SHARED,            /* cluster, gang, size, site, is write, count, offsets */
    CHK_EV_GLOBAL,            /* cluster, gang, size, site, is write, count, addresses */
    CHK_EV_TMEM,              /* cluster, gang, warp, address, width, is write, site */
    CHK_EV_TMEM_FREED,        /* cluster, gang, column, columns, site */
    CHK_EV_ISSUE,             /* cluster, gang, operation, warp, channel, barrier, phase, site, reads, writes,
                                 operands: kind, cta, first, lanes, column, unit bytes, address, count, list */
    CHK_EV_WAITED,            /* cluster, gang, count, operations */
    CHK_EV_TMEM_WAIT,         /* cluster, gang, order */
    CHK_EV_CLOCK_TAKE,        /* cluster, cta, warp, channel, clock */
    CHK_EV_CLOCK_RELEASE,     /* cluster, clock */
    CHK_EV_DEFERRED,          /* cluster, barrier, phase, clock */
    CHK_EV_CREATED,           /* cluster, gang, offset, site, barrier */
    CHK_EV_ARRIVE,            /* cluster, gang, barrier, phase, pending, expected, order, scope, site */
    CHK_EV_PASSED,            /* cluster, gang, barrier, phase, order, scope, site */
    CHK_EV_NAMED_ARRIVE,      /* cluster, gang, index, generation, is sync */
    CHK_EV_NAMED_COMPLETED,   /* cluster, cta, index, generation */
    CHK_EV_NAMED_PASSED,      /* cluster, gang, index, generation */
    CHK_EV_CLUSTER_ARRIVE,    /* cluster, gang, order, scope */
    CHK_EV_CLUSTER_COMPLETED, /* cluster */
    CHK_EV_CLUSTER_PASSED,    /* cluster, gang */
    CHK_EV_FENCE,             /* cluster, gang, kind, spaces, order, scope */
    CHK_EV_WARP_BARRIER,      /* cluster, gang */
    CHK_EV_ATOMIC,            /* cluster, gang, order, scope, site, count, addresses */
    CHK_EV_ACQUIRE,           /* cluster, gang, order, scope, count, addresses */
    CHK_EV_WARP_EXIT,         /* cluster, cta, warp, leaving, wgmma pending, grouped, open,
                                 operations: lane, name, operation (-1: not told), has read, committed */
    CHK_EV_CTA_EXIT,          /* cluster, cta, tensor memory blocks, 16 x (arrived, required), barriers,
                                 barriers: offset, phase, pending, expected, bytes; budgets of each warp: count, list */
    CHK_EV_REPORT,            /* kind, site, extra[0..3], size */
    CHK_NUM_EVENTS,
} chk_event;

typedef struct {
    size_t events, refused; /* refused: CHK_BAD_INPUT, or an event cut short */
} chk_replayed;

/* Replays all events, or those up to one that fails for want of memory or components (whose status is returned). */
CHK_API chk_status chk_replay(chk_launch *launch, const int64_t *words, size_t count, chk_replayed *replayed);

#endif
