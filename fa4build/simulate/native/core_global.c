/* Global memory: guarded buffers, loads, stores, polling loads, atomics: global_memory.py, memory.py, atomics.py. */
#include "lanes.h"

#define RULE(name) int op_##name(Warp *w, const Ins *i)

#include "memory.h"

Buffer *find_buffer(Run *run, uint64_t address, uint64_t size) {
    Buffer *last = run->last_buffer;
    if (last && address - last->base <= last->size - size && last->size >= size) return last;
    Launch *launch = run->launch;
    for (int64_t k = 0; k < launch->num_buffers; k++) {
        Buffer *b = launch->buffers + k;
        if (b->size >= size && address >= b->base && address - b->base <= b->size - size) return run->last_buffer = b;
    }
    return NULL;
}

static uint64_t distance_to(const Buffer *b, uint64_t address) {
    if (address < b->base) return b->base - address;
    return address >= b->base + b->size ? address - (b->base + b->size) + 1 : 0;
}

int out_of_bounds(Warp *w, const char *what, uint64_t address, uint64_t size) {
    const Launch *launch = w->run->launch;
    const Buffer *nearest = NULL;
    for (int64_t k = 0; k < launch->num_buffers; k++)
        if (!nearest || distance_to(launch->buffers + k, address) < distance_to(nearest, address))
            nearest = launch->buffers + k;
    if (!nearest)
        return fault(w, "%s of %llu bytes at global address 0x%llx is out of bounds: no buffer is registered", what,
                     (unsigned long long)size, (unsigned long long)address);
    return fault(w,
                 "%s of %llu bytes at global address 0x%llx is out of bounds: nearest buffer is %s (%llu bytes), "
                 "byte offset %lld",
                 what, (unsigned long long)size, (unsigned long long)address, nearest->name,
                 (unsigned long long)nearest->size, (long long)(address - nearest->base));
}

static int misaligned(Warp *w, const char *what, uint64_t address, uint32_t size) {
    return fault(w, "%s of %u bytes at misaligned address 0x%llx; it must be a multiple of %u", what, size,
                 (unsigned long long)address, size);
}

/* Addresses of the active lanes in order; returns how many, or -1 after a fault. */
static int addresses_of(Warp *w, const Ins *i, int32_t o, const char *what, uint64_t *address) {
    uint32_t size = i->size * i->count;
    int n = 0;
    EACH_LANE(l, w->mask) {
        uint64_t a = lane64(w, o, (int)l) + (uint64_t)i->imm[0];
        if (a & (size - 1)) return misaligned(w, what, a, size), -1;
        address[n++] = a;
    }
    return n;
}

RULE(ld_global) {
    uint64_t address[LANES];
    int n = addresses_of(w, i, i->o[0], "global load", address);
    if (n < 0) return FAULTED;
    uint32_t size = i->size * i->count;
    const int32_t *list = w->run->launch->lists + i->list;
    int k = 0;
    EACH_LANE(l, w->mask) {
        uint64_t a = address[k++];
        Buffer *b = find_buffer(w->run, a, size);
        if (!b) return out_of_bounds(w, "load", a, size);
        const uint8_t *from = b->data + (a - b->base);
        for (int e = 0; e < i->count; e++)
            put_element(w, i, list[e], (int)l, read_element(from + e * i->size, i->size));
    }
    CHECK(w, chk_global_access, address, (size_t)n, size, site_of(w, i), 0);
    CHECK(w, chk_order_touch, address, (size_t)n, size, CHK_TOUCH_READ, NULL, site_of(w, i));
    return NEXT;
}

RULE(st_global) {
    uint64_t address[LANES];
    int n = addresses_of(w, i, i->o[0], "global store", address);
    if (n < 0) return FAULTED;
    uint32_t size = i->size * i->count;
    const int32_t *list = w->run->launch->lists + i->list;
    CHECK(w, chk_global_access, address, (size_t)n, size, site_of(w, i), 1);
    chk_sync sync = {.order = i->flags >> 1 & 3, .scope = i->flags >> 4 & 3};
    CHECK(w, chk_order_touch, address, (size_t)n, size, CHK_TOUCH_WRITE, i->flags & 1 ? &sync : NULL, site_of(w, i));
    int k = 0;
    EACH_LANE(l, w->mask) {
        uint64_t a = address[k++];
        Buffer *b = find_buffer(w->run, a, size);
        if (!b) return out_of_bounds(w, "store", a, size);
        if (b->read_only)
            return fault(w, "store to read-only buffer %s at byte offset %llu", b->name,
                         (unsigned long long)(a - b->base));
        uint8_t *target = b->data + (a - b->base);
        for (int e = 0; e < i->count; e++)
            write_element(target + e * i->size, i->size, lane_any(w, list[e], (int)l));
    }
    return NEXT;
}

/* ---- polling ----------------------------------------------------------------------------------------------------- */

static bool same_poll(const Warp *w, int site, const uint64_t *address, const uint64_t *value) {
    if (w->poll_site != site || w->poll_barrier || w->poll_mask != w->mask) return false;
    EACH_LANE(l, w->mask) {
        if (w->poll_address[l] != address[l] || w->poll_value[l] != value[l]) return false;
    }
    return true;
}

static void remember_poll(Warp *w, int site, const uint64_t *address, const uint64_t *value) {
    w->poll_site = site, w->poll_barrier = NULL, w->poll_mask = w->mask;
    memcpy(w->poll_address, address, sizeof w->poll_address);
    memcpy(w->poll_value, value, sizeof w->poll_value);
}

/* An acquire load. Polling the same value again waits until the memory changes: a spin loop becomes a wait. */
RULE(ld_poll) {
    uint64_t address[LANES] = {0}, value[LANES] = {0}, active[LANES];
    int n = 0;
    EACH_LANE(l, w->mask) {
        uint64_t a = lane64(w, i->o[1], (int)l) + (uint64_t)i->imm[0];
        if (a & (i->size - 1u)) return misaligned(w, "global load", a, i->size);
        Buffer *b = find_buffer(w->run, a, i->size);
        if (!b) return out_of_bounds(w, "load", a, i->size);
        address[l] = active[n++] = a;
        value[l] = read_element(b->data + (a - b->base), i->size);
    }
    CHECK(w, chk_global_access, active, (size_t)n, i->size, site_of(w, i), 0);
    chk_sync sync = {.order = i->flags & 3, .scope = i->flags >> 4 & 3};
    CHECK(w, chk_acquire, active, (size_t)n, sync);
    CHECK(w, chk_order_touch, active, (size_t)n, i->size, CHK_TOUCH_READ, &sync, site_of(w, i));
    EACH_LANE(l, w->mask) put_element(w, i, i->o[0] | (i->size == 2), (int)l, value[l]);
    if (!same_poll(w, site_of(w, i), address, value)) {
        remember_poll(w, site_of(w, i), address, value);
        return NEXT;
    }
    w->poll_site = -1;
    w->wait = (Wait){.kind = WAIT_POLL, .mask = w->mask, .ins = i, .again = true};
    memcpy(w->wait.address, address, sizeof address);
    memcpy(w->wait.value, value, sizeof value);
    return BLOCKED;
}

/* ---- atomics ----------------------------------------------------------------------------------------------------- */

enum { ADD, MINIMUM, MAXIMUM, AND, OR, XOR, EXCHANGE, SWAP, INCREMENT, DECREMENT };

static uint64_t combined(int operation, int kind, int bits, uint64_t old, uint64_t x, uint64_t y) {
    uint64_t wrap = bits == 64 ? ~0ull : 0xFFFFFFFFull;
    bool less = old < x;
    if (kind == 1) less = bits == 64 ? (int64_t)old < (int64_t)x : (int32_t)old < (int32_t)x;
    switch (operation) {
    case ADD: return kind == 2 ? units_add_f32((uint32_t)old, (uint32_t)x, UNITS_RN, 0) : (old + x) & wrap;
    case MINIMUM: return less || old == x ? old : x;
    case MAXIMUM: return less ? x : old;
    case AND: return old & x;
    case OR: return old | x;
    case XOR: return old ^ x;
    case EXCHANGE: return x;
    case SWAP: return old == x ? y : old;
    case INCREMENT: return old >= x ? 0 : old + 1;
    default: return old == 0 || old > x ? x : old - 1;
    }
}

static int atomic_word(Warp *w, uint64_t address, uint32_t size, bool is_global, uint8_t **word) {
    if (address % size)
        return fault(w, "atomic on misaligned address 0x%llx; it must be a multiple of %u",
                     (unsigned long long)address, size);
    if (is_global) {
        Buffer *b = find_buffer(w->run, address, size);
        if (!b) return out_of_bounds(w, "atomic", address, size);
        if (b->read_only) return fault(w, "atomic on read-only buffer %s", b->name);
        *word = b->data + (address - b->base);
        return NEXT;
    }
    int64_t offset = (int64_t)address - w->cta->rank_bits;
    if (offset < SHARED_BASE || offset > (int64_t)w->cta->shared_limit - size)
        return fault(w, "atomic at 0x%llx is outside the CTA's shared memory", (unsigned long long)address);
    *word = w->cta->shared + offset;
    return NEXT;
}

static uint64_t atomic_address(const Warp *w, const Ins *i, int lane, bool is_global) {
    if (is_global) return lane64(w, i->o[1], lane) + (uint64_t)i->imm[0];
    return (uint32_t)(lane32(w, i->o[1], lane) + (uint32_t)i->imm[0]);
}

/* Lanes are served in order; each sees the result of the one before. */
RULE(atomic) {
    bool is_global = i->flags >> 6 & 1;
    uint64_t address[LANES];
    int n = 0;
    EACH_LANE(l, w->mask) address[n++] = atomic_address(w, i, (int)l, is_global);
    if (is_global) {
        chk_sync sync = {.order = i->flags >> 8 & 3, .scope = i->flags >> 10 & 3};
        CHECK(w, chk_atomic, address, (size_t)n, sync, site_of(w, i));
        chk_touch touch = (i->flags >> 4 & 3) == 2 ? CHK_TOUCH_SUM : CHK_TOUCH_UPDATE;
        CHECK(w, chk_order_touch, address, (size_t)n, i->size, touch, &sync, site_of(w, i));
    }
    n = 0;
    EACH_LANE(l, w->mask) {
        uint8_t *word;
        if (atomic_word(w, address[n++], i->size, is_global, &word)) return FAULTED;
        uint64_t old = read_element(word, i->size);
        uint64_t x = lane_any(w, i->o[2], (int)l), y = i->o[3] < 0 ? 0 : lane_any(w, i->o[3], (int)l);
        uint64_t value = combined(i->flags & 15, i->flags >> 4 & 3, 8 * i->size, old, x, y);
        write_element(word, i->size, value);
        put_element(w, i, i->o[0], (int)l, old);
    }
    return NEXT;
}
