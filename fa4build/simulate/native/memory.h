/* Loads and stores of words of own shared memory by all active lanes, for rules that make their addresses. */
#ifndef FA4BUILD_NATIVE_MEMORY_H
#define FA4BUILD_NATIVE_MEMORY_H

#include "core.h"

int store_words(Warp *w, const Ins *i, const uint32_t *address, const uint32_t *value);
int load_words(Warp *w, const Ins *i, const uint32_t *address, uint32_t *value);

#endif
