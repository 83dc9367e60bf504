/* R3 and R9 of global memory: buffers that held nothing at launch. The twin of the end of memory_rules.py. */
#include "checks_state.h"

static inline int holds(const chk_buffer *buffer, uint64_t address, uint64_t size) {
    return address >= buffer->base && buffer->size >= size && address - buffer->base <= buffer->size - size;
}

/* Index of the buffer that holds an access, num_buffers outside all of them. */
static size_t buffer_of(chk_launch *launch, uint64_t address, uint64_t size) {
    if (holds(&launch->buffers[launch->last_buffer], address, size)) return launch->last_buffer;
    for (size_t i = 0; i < launch->num_buffers; i++)
        if (holds(&launch->buffers[i], address, size)) return launch->last_buffer = i;
    return launch->num_buffers;
}

/* Addresses of one access: `count` of them, listed, or `step` bytes apart. */
typedef struct {
    const uint64_t *list;
    uint64_t first, step, count;
    uint32_t size;
} places;

static inline uint64_t address_at(const places *all, uint64_t i) {
    return all->list ? all->list[i] : all->first + all->step * i;
}

static int all_inside(chk_launch *launch, const places *all) {
    for (uint64_t i = 0; i < all->count; i++)
        if (buffer_of(launch, address_at(all, i), all->size) == launch->num_buffers) return 0;
    return 1;
}

typedef struct {
    chk_cluster *cluster;
    const chk_gang *gang;
    int32_t site, me;
    int is_write;
} visit;

static void report(const visit *how, const chk_buffer *buffer, uint64_t word) {
    chk_kind kind = how->is_write ? CHK_GLOBAL_TWICE : CHK_GLOBAL_UNWRITTEN;
    chk_finding finding = chk_finding_at(how->cluster, how->gang, kind, how->site);
    finding.address = 4 * (int64_t)word;
    finding.extra[0] = (int32_t)(buffer - how->cluster->launch->buffers);
    chk_add(how->cluster->launch, &finding);
}

/* The first wrong word of an access, if any; writes are noted. */
static int mark(const visit *how, const chk_buffer *buffer, uint64_t offset, uint32_t size, uint64_t *wrong) {
    uint64_t first = offset / 4, count = size / 4 ? size / 4 : 1;
    int is_wrong = 0;
    for (uint64_t word = first; word < first + count; word++) {
        int32_t owner = buffer->written[word];
        if (!is_wrong && (how->is_write ? owner > 0 && owner != how->me : !owner)) is_wrong = 1, *wrong = word;
        if (how->is_write) buffer->written[word] = how->me;
    }
    return is_wrong;
}

/* All accesses that fall into one buffer; the first wrong one is said. */
static void mark_buffer(const visit *how, const chk_buffer *buffer, const places *all, uint64_t from) {
    int is_said = 0;
    for (uint64_t i = from; i < all->count; i++) {
        uint64_t address = address_at(all, i), wrong = 0;
        if (!holds(buffer, address, all->size)) continue;
        if (mark(how, buffer, address - buffer->base, all->size, &wrong) && !is_said) {
            report(how, buffer, wrong);
            is_said = 1;
        }
    }
}

/* Buffers in the order in which the addresses name them, each once. */
static void mark_all(const visit *how, const places *all) {
    chk_launch *launch = how->cluster->launch;
    launch->visit++;
    for (uint64_t i = 0; i < all->count; i++) {
        size_t index = buffer_of(launch, address_at(all, i), all->size);
        if (launch->visited[index] == launch->visit) continue;
        launch->visited[index] = launch->visit;
        if (launch->buffers[index].written) mark_buffer(how, &launch->buffers[index], all, i);
    }
}

static void visit_places(chk_cluster *cluster, const chk_gang *gang, const places *all, int32_t site, int is_write) {
    if (!cluster->launch->has_unwritten || !all->count || !all_inside(cluster->launch, all)) return;
    visit how = {cluster, gang, site, (int32_t)(1 + cluster->index * cluster->num_ctas + gang->cta), is_write};
    mark_all(&how, all);
}

chk_status chk_global_access(chk_cluster *cluster, const chk_gang *gang, const uint64_t *addresses, size_t count,
                             uint32_t size, int32_t site, int is_write) {
    if (!chk_gang_ok(cluster, gang) || !size || size > 64) return CHK_BAD_INPUT;
    visit_places(cluster, gang, &(places){addresses, 0, 0, count, size}, site, is_write);
    return CHK_OK;
}

chk_status chk_global_operand(chk_cluster *cluster, const chk_gang *gang, const chk_operand *operand, int32_t site,
                              int is_write) {
    if (operand->kind == CHK_GLOBAL_UNITS && !operand->unit_bytes) return CHK_BAD_INPUT;
    places all = {operand->addresses, 0, 0, operand->count, operand->unit_bytes};
    if (operand->kind == CHK_GLOBAL_RANGE)
        all = (places){NULL, operand->address, 4, operand->count / 4 + (operand->count % 4 != 0), 4};
    visit_places(cluster, gang, &all, site, is_write);
    return CHK_OK;
}
