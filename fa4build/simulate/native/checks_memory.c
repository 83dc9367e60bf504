/* R1 to R3, R5, R9 and R10 of shared memory: generic accesses. The twin of memory_rules.py. */
#include "checks_state.h"

/* Neighbouring lanes of one warp that touch one granule. `first`: index of the first of them among all active lanes. */
typedef struct {
    uint32_t cell;
    uint16_t bits, first;
    uint8_t count, first_lane, last_lane;
} run;

/* The runs of one warp: those from `first` on to `end`. */
typedef struct {
    uint32_t slot, mask, first, end;
} part;

typedef struct {
    const uint32_t *offsets; /* of the active lanes */
    uint32_t size, num_runs, num_lanes, num_parts;
    part parts[CHK_MAX_WARPS];
    run runs[CHK_MAX_WARPS * CHK_WARP_LANES];
} access_list;

/* What one access does wrong, the first of each kind in order of the lanes. */
typedef struct {
    const run *at; /* NULL: nothing of that kind */
    uint32_t slot;
} fault;
typedef struct {
    fault barrier, write, race, read, missing;
    int race_lane;
} faults;

/* The bytes of its granule that a lane touches. */
static inline uint32_t bits_of(uint32_t offset, uint32_t size) {
    return (uint32_t)((((uint64_t)1 << size) - 1) << (offset & 15)) & CHK_FULL;
}

/* Lanes of a warp, one after the other: neighbours in one granule are one run. */
static void list_lanes(access_list *list, uint32_t mask) {
    run *last = NULL;
    for (uint32_t left = mask; left; left &= left - 1) {
        uint32_t lane = (uint32_t)__builtin_ctz(left), offset = list->offsets[list->num_lanes];
        uint32_t cell = offset >> 4, bits = bits_of(offset, list->size);
        if (last && last->cell == cell) {
            last->bits |= (uint16_t)bits;
            last->count++;
        } else {
            last = &list->runs[list->num_runs++];
            *last = (run){cell, (uint16_t)bits, (uint16_t)list->num_lanes, 1, (uint8_t)lane, 0};
        }
        last->last_lane = (uint8_t)lane;
        list->num_lanes++;
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
        list->runs[list->num_runs++] = (run){offset >> 4, (uint16_t)bits, (uint16_t)(list->num_lanes + lane),
                                             (uint8_t)lanes, (uint8_t)lane, (uint8_t)(lane + lanes - 1)};
        lane += lanes;
        offset += lanes << shift;
    }
    list->num_lanes += CHK_WARP_LANES;
}

/* Lists an access by granules; 0 when a lane is out of bounds. */
static int list_access(const chk_cluster *cluster, const chk_gang *gang, access_list *list) {
    CHK_EACH_ACTIVE(k, gang) {
        uint32_t mask = chk_mask(gang, k), first = list->num_runs;
        if (mask == 0xFFFFFFFFu && is_stretch(list->offsets + list->num_lanes, list->size))
            list_stretch(list);
        else
            list_lanes(list, mask);
        list->parts[list->num_parts++] = (part){chk_gang_slot(cluster, gang, k), mask, first, list->num_runs};
    }
    uint32_t highest = 0;
    for (uint32_t i = 0; i < list->num_runs; i++) highest = highest > list->runs[i].cell ? highest : list->runs[i].cell;
    return highest <= cluster->shared_limit / 16;
}

/* ---- what is wrong ----------------------------------------------------------------------------------------------- */

/* R10: the first lane of a run whose bytes are exactly what another lane of its warp wrote since the lanes met. */
static int racing_lane(const access_list *list, const run *one, uint32_t mask, const chk_cell *cell) {
    uint32_t left = mask >> one->first_lane << one->first_lane;
    for (uint32_t i = one->first; i < (uint32_t)one->first + one->count; i++, left &= left - 1) {
        int lane = __builtin_ctz(left);
        if (cell->write_mask == bits_of(list->offsets[i], list->size) && cell->write_lane &&
            cell->write_lane - 1 != lane)
            return lane;
    }
    return -1;
}

static inline int is_own(const chk_cluster *cluster, uint32_t slot, const chk_cell *cell) {
    return cell->writer == (int32_t)slot + 1 && cell->write_epoch == cluster->lane_epochs[slot];
}

static void keep_first(fault *first, const run *one, uint32_t slot, int is_wrong) {
    if (is_wrong && !first->at) *first = (fault){one, slot};
}

static void look_at(const chk_cluster *cluster, const chk_shadow *shadow, const access_list *list, const part *of,
                    const run *one, int is_write, faults *found) {
    const chk_cell *cell = &shadow->cells[one->cell];
    const int32_t *clock = chk_row(cluster->g, of->slot);
    uint32_t slot = of->slot;
    keep_first(&found->barrier, one, slot, cell->barrier_bytes & one->bits);
    keep_first(&found->write, one, slot, chk_write_unordered(cell, one->bits, clock));
    if (!found->race.at && is_own(cluster, slot, cell) && (cell->write_mask & one->bits)) {
        found->race_lane = racing_lane(list, one, of->mask, cell);
        keep_first(&found->race, one, slot, found->race_lane >= 0);
    }
    if (is_write) keep_first(&found->read, one, slot, chk_reads_unordered(shadow, one->cell, one->bits, clock));
    else keep_first(&found->missing, one, slot, (one->bits & ~(uint32_t)cell->initialised) != 0);
}

/* Whether some lane of a run may race: the bytes that its warp wrote last are those of one lane, not the same one. */
static inline int may_race(const chk_cell *cell, const run *one, uint32_t size) {
    uint32_t written = cell->write_mask;
    uint32_t lane_bytes = (uint32_t)(((uint64_t)1 << size) - 1);
    return (written & one->bits) && written == (lane_bytes << __builtin_ctz(written) & CHK_FULL) &&
           (one->count > 1 || cell->write_lane != one->first_lane + 1);
}

/* Whether a warp's part may have something to find: quick, and never wrong when it says no. */
static int is_suspect(const chk_cluster *cluster, const chk_shadow *shadow, const access_list *list, const part *of,
                      int is_write) {
    const int32_t *clock = chk_row(cluster->g, of->slot);
    int32_t own = (int32_t)of->slot + 1, epoch = cluster->lane_epochs[of->slot];
    uint32_t size = list->size, wrong = 0;
    for (const run *one = list->runs + of->first, *end = list->runs + of->end; one < end; one++) {
        const chk_cell *cell = &shadow->cells[one->cell];
        uint32_t bits = one->bits;
        wrong |= clock[cell->writer - (cell->writer != 0)] < cell->written;
        wrong |= cell->barrier_bytes & bits;
        if (cell->writer == own && cell->write_epoch == epoch) wrong |= (uint32_t)may_race(cell, one, size);
        if (!is_write) wrong |= bits & ~(uint32_t)cell->initialised;
        else if (cell->read_mask & bits) wrong |= (uint32_t)chk_reads_unordered(shadow, one->cell, bits, clock);
    }
    return wrong != 0;
}

/* ---- reports ----------------------------------------------------------------------------------------------------- */

void chk_report_shared(chk_cluster *cluster, const chk_gang *gang, chk_kind kind, uint32_t cell, int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, kind, site);
    finding.address = 16 * (int64_t)cell;
    chk_add(cluster->launch, &finding);
}

void chk_report_shared_write(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, chk_kind kind,
                         uint32_t cell, int32_t site) {
    chk_finding finding = chk_finding_at(cluster, gang, kind, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].write_site;
    chk_name_agent(cluster, &finding, shadow->cells[cell].writer - 1);
    chk_add(cluster->launch, &finding);
}

void chk_report_shared_read(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, uint32_t cell,
                        const int32_t *clock, int32_t site) {
    int32_t count = 0;
    chk_finding finding = chk_finding_at(cluster, gang, CHK_SHARED_RACE_OVERWRITE, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].read_site;
    chk_name_agent(cluster, &finding, chk_first_reader(shadow, cell, clock, &count));
    chk_add(cluster->launch, &finding);
}

static void report_race(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, uint32_t cell,
                        int32_t lane, int32_t site, int is_write) {
    chk_finding finding = chk_finding_at(cluster, gang, CHK_NOTE_LANE_RACE, site);
    finding.address = 16 * (int64_t)cell;
    finding.other = shadow->cells[cell].write_site;
    finding.lane = lane;
    finding.other_lane = shadow->cells[cell].write_lane - 1;
    finding.extra[0] = is_write ? CHK_OVERWRITES : CHK_READS;
    chk_add(cluster->launch, &finding);
}

static void report_faults(chk_cluster *cluster, const chk_gang *gang, const chk_shadow *shadow, const faults *found,
                          int32_t site, int is_write) {
    if (found->barrier.at)
        chk_report_shared(cluster, gang, is_write ? CHK_BARRIER_BYTES_WRITE : CHK_BARRIER_BYTES_READ,
                          found->barrier.at->cell, site);
    if (found->write.at)
        chk_report_shared_write(cluster, gang, shadow, is_write ? CHK_SHARED_RACE_WRITE : CHK_SHARED_RACE_READ,
                                found->write.at->cell, site);
    if (found->race.at) report_race(cluster, gang, shadow, found->race.at->cell, found->race_lane, site, is_write);
    if (found->read.at)
        chk_report_shared_read(cluster, gang, shadow, found->read.at->cell, chk_row(cluster->g, found->read.slot),
                               site);
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
    report_faults(cluster, gang, shadow, &found, site, is_write);
}

/* ---- records ----------------------------------------------------------------------------------------------------- */

static void record_writes(const chk_cluster *cluster, chk_shadow *shadow, const access_list *list, const part *of,
                          int32_t site) {
    int32_t count = cluster->now[of->slot], epoch = cluster->lane_epochs[of->slot];
    chk_cell *cells = shadow->cells;
    for (const run *one = list->runs + of->first, *end = list->runs + of->end; one < end; one++) {
        chk_cell *cell = &cells[one->cell];
        chk_note_write(cell, one->bits, (int32_t)of->slot, count, site, 0);
        cell->write_lane = (uint8_t)(one->last_lane + 1);
        cell->write_epoch = epoch;
    }
}

static chk_status record_reads(const chk_cluster *cluster, chk_shadow *shadow, const access_list *list,
                               const part *of, int32_t site) {
    int column = chk_reader_column(cluster->launch, shadow, (int32_t)of->slot);
    if (column < 0) return CHK_NO_MEMORY;
    int32_t count = cluster->now[of->slot];
    for (const run *one = list->runs + of->first, *end = list->runs + of->end; one < end; one++)
        chk_note_read(shadow, one->cell, one->bits, (uint32_t)column, count, site);
    return CHK_OK;
}

chk_status chk_shared_access(chk_cluster *cluster, const chk_gang *gang, const uint32_t *offsets, uint32_t size,
                             int32_t site, int is_write) {
    if (!chk_gang_ok(cluster, gang) || !size || size > 32) return CHK_BAD_INPUT;
    access_list list;
    list.offsets = offsets;
    list.size = size;
    list.num_runs = list.num_lanes = list.num_parts = 0;
    if (!list_access(cluster, gang, &list)) return CHK_OK;
    chk_shadow *shadow = &cluster->ctas[gang->cta].shared;
    chk_status status = CHK_OK;
    check(cluster, gang, shadow, &list, site, is_write);
    for (uint32_t k = 0; k < list.num_parts && status == CHK_OK; k++)
        if (is_write) record_writes(cluster, shadow, &list, &list.parts[k], site);
        else status = record_reads(cluster, shadow, &list, &list.parts[k], site);
    return status;
}
