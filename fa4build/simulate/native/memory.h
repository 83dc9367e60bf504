/* Elements of memory, and words of own shared memory for rules that make their addresses. */
#ifndef FA4BUILD_NATIVE_MEMORY_H
#define FA4BUILD_NATIVE_MEMORY_H

#include "core.h"

uint64_t read_element(const uint8_t *from, int size);
void write_element(uint8_t *to, int size, uint64_t value);
/* An element of `i->size` bytes to a register of any width: cut, or widened with zeros or the sign. */
void put_element(Warp *w, const Ins *i, int32_t d, int lane, uint64_t value);
int store_words(Warp *w, const Ins *i, const uint32_t *address, const uint32_t *value);
int load_words(Warp *w, const Ins *i, const uint32_t *address, uint32_t *value);

#endif
