/* Memory of warps that is used again: registers that hold poison, and are made to hold it again when a warp ends.
 *
 * A warp of a specialised kernel runs a small part of the code, and many blocks leave at once. So not all registers are
 * poisoned anew, but those that the executed parts of the code write (`Launch.part_start`). */
#include "core.h"

#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#define CLASS ((size_t)16384) /* sizes are multiples of it */
#define CLASSES 64
#define KEPT_BYTES ((size_t)256 << 20)

typedef struct Free Free;
struct Free {
    Free *next;
};
static Free *unused[CLASSES];
static size_t kept;

void fill_poison(uint8_t *bytes, size_t size) {
    typedef uint16_t half16 __attribute__((ext_vector_type(16), aligned(2)));
    size_t k = 0;
    for (; k + 32 <= size; k += 32) *(half16 *)(bytes + k) = (half16)0x7FC1;
    for (; k + 1 < size; k += 2) bytes[k] = 0xC1, bytes[k + 1] = 0x7F;
}

void keep_memory(void) {
#ifdef __GLIBC__
    static bool done;
    if (!done) mallopt(M_MMAP_THRESHOLD, 32 << 20), mallopt(M_TRIM_THRESHOLD, 512 << 20);
    done = true;
#endif
}

static size_t class_of(size_t size) { return (size + sizeof(Free) + CLASS - 1) / CLASS; }

/* `size` bytes of poison at a multiple of 256. The link to the next lies behind them. */
static Free *link_of(uint8_t *bytes, size_t class) { return (Free *)(bytes + class * CLASS - sizeof(Free)); }

static uint8_t *take_poison(size_t size) {
    size_t class = class_of(size);
    Free *found = class < CLASSES ? unused[class] : NULL;
    if (found) {
        unused[class] = found->next;
        kept -= class * CLASS;
        return (uint8_t *)found + sizeof(Free) - class * CLASS;
    }
    uint8_t *bytes = aligned_alloc(256, class * CLASS);
    if (!bytes) abort();
    fill_poison(bytes, class * CLASS - sizeof(Free));
    return bytes;
}

static void give_poison(uint8_t *bytes, size_t size) {
    size_t class = class_of(size);
    if (class >= CLASSES || kept + class * CLASS > KEPT_BYTES) {
        free(bytes);
        return;
    }
    Free *link = link_of(bytes, class);
    link->next = unused[class], unused[class] = link;
    kept += class * CLASS;
}

void take_registers(Warp *w) {
    const Launch *l = w->run->launch;
    w->base[0] = take_poison((size_t)l->register_bytes);
    w->seen = calloc((size_t)l->num_parts + 1, 1);
    if (!w->seen) abort();
    w->seen[l->num_parts] = 1; /* special values */
}

void give_registers(Warp *w) {
    const Launch *l = w->run->launch;
    for (int64_t part = 0; part <= l->num_parts; part++)
        for (int32_t k = l->part_start[part]; w->seen[part] && k < l->part_start[part + 1]; k++)
            fill_poison(w->base[0] + l->part[2 * k], (size_t)l->part[2 * k + 1]);
    give_poison(w->base[0], (size_t)l->register_bytes);
    free(w->seen);
    w->base[0] = NULL, w->seen = NULL;
}

/* For tests: whether all that is kept holds poison. */
__attribute__((visibility("default"))) int sim_kept_is_poison(void) {
    for (size_t class = 0; class < CLASSES; class++)
        for (const Free *f = unused[class]; f; f = f->next) {
            const uint8_t *bytes = (const uint8_t *)f + sizeof(Free) - class * CLASS;
            for (size_t k = 0; k < class * CLASS - sizeof(Free); k++)
                if (bytes[k] != (k & 1 ? 0x7F : 0xC1)) return 0;
        }
    return 1;
}
