/* Matrix operands of wgmma and tcgen05.mma in shared memory, and the products themselves. */
#ifndef FA4BUILD_NATIVE_OPERANDS_H
#define FA4BUILD_NATIVE_OPERANDS_H

#include "core.h"

typedef struct {
    uint32_t start, leading, stride, span; /* bytes; span 0: no swizzle */
} SmemDescriptor;

/* Reads a 64-bit descriptor; a wrong one is a fault of the warp. */
int decode_wgmma(Warp *w, uint64_t word, SmemDescriptor *d);
int decode_tcgen05(Warp *w, uint64_t word, SmemDescriptor *d);

/* An operand of `rows` x `k` elements of `size` bytes; `mn`: contiguous along rows. */
typedef struct {
    SmemDescriptor d;
    int32_t rows, k, size;
    bool mn;
} Operand;

/* Whether the operand fits its layout and the window. */
int check_operand(Warp *w, const Operand *o, const Cta *cta);
/* Its bits, row after row, k elements each. Raises as check_operand. */
int load_operand(Warp *w, const Operand *o, const Cta *cta, uint8_t *out);
/* The granules it reads, each once and in order; `granules` has room for MAX_OPERAND_UNITS. */
#define MAX_OPERAND_UNITS 1024
chk_operand operand_granules(const Operand *o, const Cta *cta, uint32_t *granules);

#endif
