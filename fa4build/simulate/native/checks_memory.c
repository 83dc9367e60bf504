/* R1 to R3, R5, R9 and R10 of shared memory: generic accesses. The twin of memory_rules.py. */
#include "checks_state.h"

/* Neighbouring lanes of one warp that touch one granule. `first`: index of the first of them among all active lanes. */
typedef struct {
    uint32_t cell;
    uint16_t bits, first;
    uint8_t count, first_lane, last_lane;
    uint8_t shift; /* log2 of a lane's bytes where the lanes lie in order; IRREGULAR */
} run;
#define IRREGULAR 0xFF

/* The runs of lanes of one warp that know the same: those from `first` on to `end`. */
typedef struct {
    uint32_t slot, row, mask, first, end;
} part;

#define MAX_PARTS (2 * CHK_MAX_WARPS)
typedef struct {
    const uint32_t *offsets; /* of the active lanes */
    uint32_t size, num_runs, num_lanes, num_parts;
    part parts[MAX_PARTS];
    run runs[CHK_MAX_WARPS * CHK_WARP_LANES];
} access_list;

/* What one access does wrong, the first of each kind in order of the lanes. */
typedef struct {
    const run *at; /* NULL: nothing of that kind */
    const part *of;
} fault;
typedef struct {
    fault barrier, write, race, read, reread, missing;
} faults;

/* The bytes of its granule that a lane touches. */
static inline uint32_t bits_of(uint32_t offset, uint32_t size) {
    return (uint32_t)((((uint64_t)1 << size) - 1) << (offset & 15)) & CHK_FULL;
}

/* Lanes of a warp, one after the other: neighbours in one granule are one run. `all`: the active lanes, of which those
 * in `mask` are listed; the first of `all` has index `first`. */
static void list_lanes(access_list *list, uint32_t all, uint32_t mask, uint32_t first) {
    run *last = NULL;
    uint32_t index = first;
    for (uint32_t left = all; left; left &= left - 1, index++) {
        uint32_t lane = (uint32_t)__builtin_ctz(left), offset = list->offsets[index];
        if (!(mask >> lane & 1)) {
            last = NULL; /* lanes of a run follow each other */
            continue;
        }
        uint32_t cell = offset >> 4, bits = bits_of(offset, list->size);
        if (last && last->cell == cell) {
            last->bits |= (uint16_t)bits;
            last->count++;
            last->shift = IRREGULAR;
        } else {
            last = &list->runs[list->num_runs++];
            *last = (run){cell, (uint16_t)bits, (uint16_t)index, 1, (uint8_t)lane, 0, 4};
        }
        last->last_lane = (uint8_t)lane;
    }
}

/* Whether all 32 lanes touch one stretch of memory in order: the common case. */
static inline int is_stretch(const uint32_t *offsets, uint32_t size) {
    uint32_t first = offsets[0], differs = first & (size - 1);
    for (uint32_t i = 0; i < CHK_WARP_LANES; i++) differs |= offsets[i] ^ (first + i * size);
    return !differs && size <= 16 && !(size & (size - 1)) && first <= UINT32_MAX - 16 * CHK_WARP_LANES;
}

/* As list_lanes, for a stretch. */
static void list_stretch(access_list *list) {
    uint32_t offset = list->offsets[list->num_lanes], shift = (uint32_t)__builtin_ctz(list->size), lane = 0;
    while (lane < CHK_WARP_LANES) {
        uint32_t within = offset & 15, lanes = (16 - within) >> shift;
        if (lanes > CHK_WARP_LANES - lane) lanes = CHK_WARP_LANES - lane;
        uint32_t bits = (((uint32_t)1 << (lanes << shift)) - 1) << within;
        list->runs[list->num_runs++] =
            (run){offset >> 4, (uint16_t)bits, (uint16_t)(list->num_lanes + lane), (uint8_t)lanes, (uint8_t)lane,
                  (uint8_t)(lane + lanes - 1), (uint8_t)shift};
        lane += lanes;
        offset += lanes << shift;
    }
}

static void add_part(access_list *list, uint32_t slot, uint32_t row, uint32_t all, uint32_t mask) {
    uint32_t first = list->num_runs;
    if (list->num_parts == MAX_PARTS) return;
    if (mask == 0xFFFFFFFFu && is_stretch(list->offsets + list->num_lanes, list->size)) list_stretch(list);
    else list_lanes(list, all, mask, list->num_lanes);
    list->parts[list->num_parts++] = (part){slot, row, mask, first, list->num_runs};
}

/* The lanes of a warp, by what they know. */
static void list_warp(const chk_cluster *cluster, access_list *list, uint32_t slot, uint32_t mask) {
    for (int32_t row = (int32_t)slot; row >= 0; row = cluster->row_next[row]) {
        uint32_t inside = cluster->row_next[slot] < 0 ? mask : mask & cluster->row_lanes[row];
        if (inside) add_part(list, slot, (uint32_t)row, mask, inside);
    }
    list->num_lanes += (uint32_t)__builtin_popcount(mask);
}

/* Lists an access by granules; 0 when a lane is out of bounds. */
static int list_access(const chk_cluster *cluster, const chk_gang *gang, access_list *list) {
    CHK_EACH_ACTIVE(k, gang) list_warp(cluster, list, chk_gang_slot(cluster, gang, k), chk_mask(gang, k));
    uint32_t highest = 0;
    for (uint32_t i = 0; i < list->num_runs; i++) highest = highest > list->runs[i].cell ? highest : list->runs[i].cell;
    return highest <= cluster->shared_limit / 16;
}

/* ---- which lane touches which byte ------------------------------------------------------------------------------- */

static chk_lanes irregular_lanes(const access_list *list, const part *of, const run *one) {
    chk_lanes lanes = CHK_EVERY(CHK_NO_LANE);
    uint32_t index = one->first;
    uint32_t all = of->mask >> one->first_lane << one->first_lane;
    for (uint32_t left = all, n = 0; left && n < one->count; left &= left - 1, index++, n++) {
        uint8_t lane = (uint8_t)__builtin_ctz(left);
        uint32_t from = list->offsets[index] & 15;
        for (uint32_t b = from; b < from + list->size && b < 16; b++)
            lanes[b] = lanes[b] == CHK_NO_LANE || lanes[b] == lane ? lane : CHK_MANY_LANES;
    }
    return lanes;
}

static inline chk_lanes lanes_of(const access_list *list, const part *of, const run *one) {
    static const chk_lanes BY_SHIFT[5] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7},
        {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3},
        {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
        {0},
    };
    if (one->bits != CHK_FULL || one->shift == IRREGULAR) return irregular_lanes(list, of, one);
    return BY_SHIFT[one->shift] + one->first_lane;
}

/* ---- what is wrong ----------------------------------------------------------------------------------------------- */

static chk_view view_of(const chk_cluster *cluster, const access_list *list, const part *of, const run *one) {
    chk_view view = {.cluster = cluster, .clock = chk_row(cluster->g, of->row), .slot = -1, .knows_own = 1};
    if (!chk_has_rule(cluster, CHK_RULES_LANES)) return view;
    view.slot = (int32_t)of->slot;
    view.lanes = lanes_of(list, of, one);
    return view;
}

static void keep_first(fault *first, const part *of, const run *one, int is_wrong) {
    if (is_wrong && !first->at) *first = (fault){one, of};
}

static int is_of(const chk_cluster *cluster, int32_t component, uint32_t slot) {
    return component >= 0 && cluster->keys[component].kind == CHK_WARP && cluster->keys[component].a == (int32_t)slot;
}

static void look_at(const chk_cluster *cluster, const chk_shadow *shadow, const access_list *list, const part *of,
                    const run *one, int is_write, faults *found) {
    const chk_cell *cell = &shadow->cells[one->cell];
    chk_view view = view_of(cluster, list, of, one);
    int32_t count = 0;
    keep_first(&found->barrier, of, one, cell->barrier_bytes & one->bits);
    int is_late = chk_write_late(&view, shadow, one->cell, one->bits);
    int is_race = is_late && is_of(cluster, cell->writer - 1, of->slot);
    keep_first(is_race ? &found->race : &found->write, of, one, is_late);
    if (!is_write) {
        keep_first(&found->missing, of, one, (one->bits & ~(uint32_t)cell->initialised) != 0);
        return;
    }
    int32_t reader = cell->read_mask & one->bits
                         ? chk_first_late_reader(&view, shadow, one->cell, one->bits, &count)
                         : -1;
    keep_first(is_of(cluster, reader, of->slot) ? &found->reread : &found->read, of, one, reader >= 0);
}

/* Whether a warp's part may have something to find: quick, and never wrong when it says no. */
static int is_suspect(const chk_cluster *cluster, const chk_shadow *shadow, const access_list *list, const part *of,
                      int is_write) {
    const int32_t *clock = chk_row(cluster->g, of->row);
    for (const run *one = list->runs + of->first, *end = list->runs + of->end; one < end; one++) {
        const chk_cell *cell = &shadow->cells[one->cell];
        uint32_t bits = one->bits, wrong = cell->barrier_bytes & bits;
        int is_open = clock[cell->writer - (cell->writer != 0)] < cell->written;
        if (!is_write) wrong |= bits & ~(uint32_t)cell->initialised;
        if (wrong) return 1;
        if (!is_open && !(is_write && (cell->read_mask & bits))) continue;
        chk_view view = view_of(cluster, list, of, one);
        if (is_open && chk_write_late(&view, shadow, one->cell, bits)) return 1;
        if (is_write && chk_reads_late(&view, shadow, one->cell, bits)) return 1;
    }
    return 0;
}

/* ---- reports ----------------------------------------------------------------------------------------------------- */

void chk_report_shared(chk_cluster *cluster, const chk_gang *gang, chk_kind kind, uint32_t cell, int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, kind, site);
    finding.address = 16 * (int64_t)cell;
    chk_add(cluster->launch, &finding);
}

/* The other side, and whether it is one of several lanes. */
static void name_other(const chk_view *view, chk_finding *finding, int32_t component, int32_t count) {
    chk_name_agent(view->cluster, finding, component);
    if (chk_is_lane_fault(view, component, count)) finding->extra[1] = 1;
}

void chk_report_shared_write(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, chk_kind kind,
                             uint32_t cell, const chk_view *view, int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, kind, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].write_site;
    name_other(view, &finding, shadow->cells[cell].writer - 1, shadow->cells[cell].written);
    chk_add(cluster->launch, &finding);
}

void chk_report_shared_read(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, uint32_t cell,
                            uint32_t bits, const chk_view *view, int32_t site) {
    if (view->slot < 0) bits = CHK_FULL; /* as the Python checks: the first of all readers */
    int32_t count = 0, reader = chk_first_late_reader(view, shadow, cell, bits, &count);
    chk_finding finding = chk_finding_at(cluster, gang, CHK_SHARED_RACE_OVERWRITE, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].read_site;
    name_other(view, &finding, reader, count);
    chk_add(cluster->launch, &finding);
}

/* R10: two lanes of one warp; `is_read`: the earlier access was a read. */
static void report_race(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, const access_list *list,
                        const fault *race, int32_t site, int is_write, int is_read) {
    const run *one = race->at;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_LANE_RACE, site);
    int column = is_read ? shadow->column_of[race->of->slot] - 1 : -1;
    const chk_lanes *theirs = chk_lanes_at(is_read ? shadow->read_lanes[column] : shadow->write_lanes, one->cell);
    chk_lanes ours = lanes_of(list, race->of, one);
    finding.address = 16 * (int64_t)one->cell;
    finding.other = is_read ? shadow->cells[one->cell].read_site : shadow->cells[one->cell].write_site;
    for (int b = 15; theirs && b >= 0; b--)
        if (ours[b] != CHK_NO_LANE && (*theirs)[b] != CHK_NO_LANE && ours[b] != (*theirs)[b])
            finding.lane = ours[b], finding.other_lane = (*theirs)[b], finding.address = 16 * (int64_t)one->cell + b;
    finding.extra[0] = is_write ? CHK_OVERWRITES : CHK_READS;
    finding.extra[1] = is_read;
    chk_add(cluster->launch, &finding);
}

static void report_faults(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow,
                          const access_list *list, const faults *found, int32_t site, int is_write) {
    if (found->barrier.at)
        chk_report_shared(cluster, gang, is_write ? CHK_BARRIER_BYTES_WRITE : CHK_BARRIER_BYTES_READ,
                          found->barrier.at->cell, site);
    if (found->write.at) {
        chk_view view = view_of(cluster, list, found->write.of, found->write.at);
        chk_report_shared_write(cluster, gang, shadow, is_write ? CHK_SHARED_RACE_WRITE : CHK_SHARED_RACE_READ,
                                found->write.at->cell, &view, site);
    }
    if (found->race.at) report_race(cluster, gang, shadow, list, &found->race, site, is_write, 0);
    if (found->reread.at) report_race(cluster, gang, shadow, list, &found->reread, site, is_write, 1);
    if (found->read.at) {
        chk_view view = view_of(cluster, list, found->read.of, found->read.at);
        chk_report_shared_read(cluster, gang, shadow, found->read.at->cell, found->read.at->bits, &view, site);
    }
    if (found->missing.at) chk_report_shared(cluster, gang, CHK_SHARED_UNWRITTEN, found->missing.at->cell, site);
}

static void check(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, const access_list *list,
                  int32_t site, int is_write) {
    int wrong = 0;
    for (uint32_t k = 0; k < list->num_parts && !wrong; k++)
        wrong = is_suspect(cluster, shadow, list, &list->parts[k], is_write);
    if (!wrong) return;
    faults found = {0};
    for (uint32_t k = 0; k < list->num_parts; k++)
        for (uint32_t i = list->parts[k].first; i < list->parts[k].end; i++)
            look_at(cluster, shadow, list, &list->parts[k], &list->runs[i], is_write, &found);
    report_faults(cluster, gang, shadow, list, &found, site, is_write);
}

/* ---- records ----------------------------------------------------------------------------------------------------- */

static chk_status record_writes(const chk_cluster *cluster, chk_shadow *shadow, const access_list *list, const part *of,
                          int32_t site) {
    int32_t count = cluster->now[of->slot], met = chk_row(cluster->g, of->row)[of->slot];
    chk_cell *cells = shadow->cells;
    for (const run *one = list->runs + of->first, *end = list->runs + of->end; one < end; one++) {
        chk_cell *cell = &cells[one->cell];
        if (shadow->write_lanes &&
            !chk_note_write_lanes(cluster->launch, shadow, one->cell, (int32_t)of->slot, met, lanes_of(list, of, one)))
            return CHK_NO_MEMORY;
        chk_note_write(cell, one->bits, (int32_t)of->slot, count, site, 0);
    }
    return CHK_OK;
}

static chk_status record_reads(const chk_cluster *cluster, chk_shadow *shadow, const access_list *list,
                               const part *of, int32_t site) {
    int column = chk_reader_column(cluster->launch, shadow, (int32_t)of->slot);
    if (column < 0) return CHK_NO_MEMORY;
    int32_t count = cluster->now[of->slot], met = chk_row(cluster->g, of->row)[of->slot];
    for (const run *one = list->runs + of->first, *end = list->runs + of->end; one < end; one++) {
        if (shadow->write_lanes && !chk_note_read_lanes(cluster->launch, shadow, one->cell, (uint32_t)column, met,
                                                        lanes_of(list, of, one)))
            return CHK_NO_MEMORY;
        chk_note_read(shadow, one->cell, one->bits, (uint32_t)column, count, site);
    }
    return CHK_OK;
}

chk_status chk_shared_access(chk_cluster *cluster, const chk_gang *gang, const uint32_t *offsets, uint32_t size,
                             int32_t site, int is_write) {
    return chk_remote_access(cluster, gang, gang->cta, offsets, size, site, is_write);
}

chk_status chk_remote_access(chk_cluster *cluster, const chk_gang *gang, uint32_t owner, const uint32_t *offsets,
                             uint32_t size, int32_t site, int is_write) {
    if (!chk_gang_ok(cluster, gang) || owner >= cluster->num_ctas || !size || size > 32) return CHK_BAD_INPUT;
    access_list list;
    list.offsets = offsets;
    list.size = size;
    list.num_runs = list.num_lanes = list.num_parts = 0;
    if (!list_access(cluster, gang, &list)) return CHK_OK;
    chk_shadow *shadow = &cluster->ctas[owner].shared;
    chk_status status = CHK_OK;
    check(cluster, gang, shadow, &list, site, is_write);
    for (uint32_t k = 0; k < list.num_parts && status == CHK_OK; k++)
        if (is_write) status = record_writes(cluster, shadow, &list, &list.parts[k], site);
        else status = record_reads(cluster, shadow, &list, &list.parts[k], site);
    return status;
}
