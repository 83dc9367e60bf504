/* Order of accesses to global memory, between the warps of all clusters of a launch, and what lands in a CTA that leaves.
 *
 * Happens-before by vector clocks, apart from those of a cluster's shared memory: a warp is one component of its cluster,
 * and so are its bulk copies, its cp.async, its commits, and each mbarrier. Clusters know of each other only through
 * words of global memory: a release at such a word keeps a snapshot of what its warp knows, and `word` components of
 * those who acquire say which snapshot they have seen. Every count is kept twice: as the generic proxy knows it, and as
 * the asynchronous proxy does (fence.proxy.async).
 *
 * Global memory is followed in pages of 64 units of 2 bytes, made on first use. A page has a list of accesses: by whom,
 * when, which units. An access that follows all others of a unit takes their place.
 *
 * On only for a launch that asked for it (CHK_RULES_ORDER); every function is quiet otherwise.
 */
#ifndef FA4BUILD_NATIVE_CHECKS_ORDER_H
#define FA4BUILD_NATIVE_CHECKS_ORDER_H

#include "checks_state.h"

void chk_order_begin(chk_launch *launch);
void chk_order_end(chk_launch *launch);
chk_ordered *chk_order_cluster(chk_cluster *cluster);
void chk_order_forget(chk_cluster *cluster);

/* What orders warps; each is called by the function of checks.h of the same name. */
void chk_order_arrive(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase);
void chk_order_passed(chk_cluster *cluster, const chk_gang *gang, int32_t barrier, int32_t phase);
void chk_order_take(chk_cluster *cluster, uint32_t slot, chk_component_kind channel, int32_t clock);
void chk_order_deferred(chk_cluster *cluster, int32_t barrier, int32_t phase, int32_t clock);
void chk_order_issued(chk_cluster *cluster, const chk_operation *operation);
void chk_order_named_arrive(chk_cluster *cluster, const chk_gang *gang, uint32_t index);
void chk_order_named_completed(chk_cluster *cluster, uint32_t cta, uint32_t index, uint32_t generation);
void chk_order_named_passed(chk_cluster *cluster, const chk_gang *gang, uint32_t index, uint32_t generation);
void chk_order_cluster_arrive(chk_cluster *cluster, const chk_gang *gang);
void chk_order_cluster_completed(chk_cluster *cluster);
void chk_order_cluster_passed(chk_cluster *cluster, const chk_gang *gang);
void chk_order_fence(chk_cluster *cluster, const chk_gang *gang, chk_fence_kind kind, uint32_t spaces, chk_sync sync);

#endif
