/* Loads and stores of shared and local memory: memory.py. */
#include "lanes.h"
#include "memory.h"

#define RULE(name) int op_##name(Warp *w, const Ins *i)

static int misaligned(Warp *w, const char *what, uint64_t address, uint32_t size) {
    return fault(w, "%s of %u bytes at misaligned address 0x%llx; it must be a multiple of %u", what, size,
                 (unsigned long long)address, size);
}

static int outside(Warp *w, const char *what, uint32_t address, uint32_t size) {
    const Cta *cta = w->cta;
    return fault(w, "%s of %u bytes at 0x%x is outside the shared memory of CTA rank %d (0x%x to 0x%x)", what, size,
                 address, cta->rank, cta->rank_bits + SHARED_BASE, cta->rank_bits + cta->shared_limit);
}

/* Offsets of the active lanes in the CTA's window, one after the other; checks alignment and, last, bounds. */
static int offsets_of(Warp *w, const Ins *i, const uint32_t *address, uint32_t size, uint32_t lowest, bool is_write,
                      uint32_t *offsets) {
    const char *what = is_write ? "shared store" : "shared load";
    const Cta *cta = w->cta;
    int n = 0;
    bool inside = true;
    uint32_t bad = 0;
    EACH_LANE(l, w->mask) {
        uint32_t offset = address[l] - cta->rank_bits;
        if (offset & (size - 1)) return misaligned(w, what, address[l], size);
        if (inside && (offset < lowest || offset > cta->shared_limit - size)) inside = false, bad = address[l];
        offsets[n++] = offset;
    }
    if (!inside && lowest) return outside(w, what, bad, size);
    CHECK(w, chk_shared_access, offsets, size, site_of(w, i), is_write);
    return inside ? NEXT : outside(w, what, bad, size);
}

static void addresses_of(const Warp *w, int32_t o, uint32_t plus, uint32_t *address) {
    u32x a = u32_at(w, o) + plus;
    memcpy(address, &a, sizeof a);
}

/* ---- elements and registers -------------------------------------------------------------------------------------- */

#define COPY(type, to, from) memcpy(to, from, sizeof(type))

uint64_t read_element(const uint8_t *from, int size) {
    uint64_t value = 0;
    switch (size) {
    case 4: COPY(uint32_t, &value, from); break;
    case 8: COPY(uint64_t, &value, from); break;
    case 2: COPY(uint16_t, &value, from); break;
    default: value = *from;
    }
    return value;
}

void write_element(uint8_t *to, int size, uint64_t value) {
    switch (size) {
    case 4: COPY(uint32_t, to, &value); break;
    case 8: COPY(uint64_t, to, &value); break;
    case 2: COPY(uint16_t, to, &value); break;
    default: *to = (uint8_t)value;
    }
}

bool is_plain_list(const Ins *i, const int32_t *list) {
    bool plain = i->size == 4;
    for (int k = 0; k < i->count; k++) plain &= list[k] >= 0 && !(list[k] & 2);
    return plain;
}

/* An element of `size` bytes to a register of any width: cut, or widened with zeros or the sign. */
void put_element(Warp *w, const Ins *i, int32_t d, int lane, uint64_t value) {
    if (d < 0) return;
    int spare = 64 - 8 * i->size;
    if (i->flags & 256) value = (uint64_t)((int64_t)(value << spare) >> spare);
    if (d & 2) ((uint64_t *)to(w, d))[lane] = value;
    else ((uint32_t *)to(w, d))[lane] = (uint32_t)(d & 1 ? value & 0xFFFF : value);
}

/* ---- shared ------------------------------------------------------------------------------------------------------ */

/* The common case: words of 32 bits to registers of 32 bits. */
static void load_vector32(Warp *w, const int32_t *list, int count, const uint32_t *offsets) {
    int n = 0;
    EACH_LANE(l, w->mask) {
        const uint32_t *from = (const uint32_t *)(w->cta->shared + offsets[n++]);
        for (int k = 0; k < count; k++)
            if (list[k] >= 0) ((uint32_t *)to(w, list[k]))[l] = from[k];
    }
}

static void store_vector32(Warp *w, const int32_t *list, int count, const uint32_t *offsets) {
    int n = 0;
    EACH_LANE(l, w->mask) {
        uint32_t *target = (uint32_t *)(w->cta->shared + offsets[n++]);
        for (int k = 0; k < count; k++) target[k] = lane32(w, list[k], (int)l);
    }
}

RULE(ld_shared) {
    uint32_t address[LANES], offsets[LANES];
    addresses_of(w, i->o[0], (uint32_t)i->imm[0], address);
    if (offsets_of(w, i, address, i->size * i->count, 0, false, offsets)) return FAULTED;
    const int32_t *list = w->run->launch->lists + i->list;
    bool plain = i->size == 4;
    for (int k = 0; k < i->count; k++) plain &= list[k] < 0 || !(list[k] & 3);
    if (plain) {
        load_vector32(w, list, i->count, offsets);
        return NEXT;
    }
    int n = 0;
    EACH_LANE(l, w->mask) {
        const uint8_t *from = w->cta->shared + offsets[n++];
        for (int k = 0; k < i->count; k++)
            put_element(w, i, list[k], (int)l, read_element(from + k * i->size, i->size));
    }
    return NEXT;
}

RULE(st_shared) {
    uint32_t address[LANES], offsets[LANES];
    addresses_of(w, i->o[0], (uint32_t)i->imm[0], address);
    if (offsets_of(w, i, address, i->size * i->count, SHARED_BASE, true, offsets)) return FAULTED;
    const int32_t *list = w->run->launch->lists + i->list;
    if (is_plain_list(i, list)) {
        store_vector32(w, list, i->count, offsets);
        return NEXT;
    }
    int n = 0;
    EACH_LANE(l, w->mask) {
        uint8_t *target = w->cta->shared + offsets[n++];
        for (int k = 0; k < i->count; k++)
            write_element(target + k * i->size, i->size, lane_any(w, list[k], (int)l));
    }
    return NEXT;
}

int store_words(Warp *w, const Ins *i, const uint32_t *address, const uint32_t *value) {
    uint32_t offsets[LANES];
    if (offsets_of(w, i, address, 4, SHARED_BASE, true, offsets)) return FAULTED;
    int n = 0;
    EACH_LANE(l, w->mask) memcpy(w->cta->shared + offsets[n++], value + l, 4);
    return NEXT;
}

int load_words(Warp *w, const Ins *i, const uint32_t *address, uint32_t *value) {
    uint32_t offsets[LANES];
    if (offsets_of(w, i, address, 4, 0, false, offsets)) return FAULTED;
    int n = 0;
    EACH_LANE(l, w->mask) memcpy(value + l, w->cta->shared + offsets[n++], 4);
    return NEXT;
}

/* ---- any CTA of the cluster -------------------------------------------------------------------------------------- */

static int remote_place(Warp *w, const Ins *i, uint32_t address, uint32_t size, bool is_load, uint8_t **place) {
    uint32_t rank = address >> RANK_SHIFT, offset = address & OFFSET_MASK;
    Cluster *cluster = w->cta->cluster;
    if (rank >= (uint32_t)cluster->num_ctas || offset < SHARED_BASE ||
        offset > cluster->ctas[rank].shared_limit - size)
        return fault(w, "shared::cluster access of %u bytes at 0x%x is outside the cluster's shared memory", size,
                     address);
    if (address % size)
        return fault(w, "shared::cluster access of %u bytes at misaligned address 0x%x", size, address);
    Cta *cta = cluster->ctas + rank;
    if (cta != w->cta && threads_alive(cta) == 0)
        return fault(w, "shared::cluster access at 0x%x: CTA rank %u has exited, its shared memory is gone", address,
                     rank);
    CHECK(w, chk_touches, rank, site_of(w, i));
    CHECK(w, chk_remote_access, rank, &offset, size, site_of(w, i), !is_load);
    CHECK(w, chk_order_remote, rank, site_of(w, i));
    *place = cluster->ctas[rank].shared + offset;
    return NEXT;
}

static int remote(Warp *w, const Ins *i, bool is_load) {
    const int32_t *list = w->run->launch->lists + i->list;
    uint32_t mask = w->mask;
    int status = NEXT;
    EACH_LANE(l, mask) {
        uint8_t *place;
        uint32_t address = lane32(w, i->o[0], (int)l) + (uint32_t)i->imm[0];
        w->mask = 1u << l;
        status = remote_place(w, i, address, i->size * i->count, is_load, &place);
        if (status) break;
        for (int k = 0; k < i->count; k++) {
            uint64_t value = is_load ? read_element(place + k * i->size, i->size) : lane_any(w, list[k], (int)l);
            if (is_load) put_element(w, i, list[k], (int)l, value);
            else write_element(place + k * i->size, i->size, value);
        }
    }
    w->mask = mask;
    return status;
}
RULE(ld_cluster) { return remote(w, i, true); }
RULE(st_cluster) { return remote(w, i, false); }

/* ---- local: a row of bytes for each thread ----------------------------------------------------------------------- */

static int local_place(Warp *w, const Ins *i, int lane, uint8_t **place) {
    int64_t offset = (int64_t)(lane64(w, i->o[0], lane) + (uint64_t)i->imm[0]);
    int64_t size = i->size * i->count, limit = w->run->launch->local_bytes;
    if (offset < 0 || offset > limit - size)
        return fault(w, "local access of %lld bytes at offset %lld is outside the %lld local bytes", (long long)size,
                     (long long)offset, (long long)limit);
    *place = w->cta->local + (int64_t)(w->index * LANES + lane) * limit + offset;
    return NEXT;
}

static int local(Warp *w, const Ins *i, bool is_load) {
    const int32_t *list = w->run->launch->lists + i->list;
    EACH_LANE(l, w->mask) {
        uint8_t *place;
        if (local_place(w, i, (int)l, &place)) return FAULTED;
        for (int k = 0; k < i->count; k++) {
            uint64_t value = is_load ? read_element(place + k * i->size, i->size) : lane_any(w, list[k], (int)l);
            if (is_load) put_element(w, i, list[k], (int)l, value);
            else write_element(place + k * i->size, i->size, value);
        }
    }
    return NEXT;
}
RULE(ld_local) { return local(w, i, true); }
RULE(st_local) { return local(w, i, false); }
