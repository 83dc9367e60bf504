/* The handler of every operation. */
#include "core.h"

#define OP(name) int op_##name(Warp *, const Ins *);
#include "ops.h"
#undef OP

static const Handler HANDLERS[] = {
#define OP(name) op_##name,
#include "ops.h"
#undef OP
};

Handler handler_of(int op) { return HANDLERS[op]; }
