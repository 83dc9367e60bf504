/* A launch plan in memory: decoded and checked once, evaluated at every launch. Plain C, no Python, no CUDA.
 *
 * The bytes come from plan.py (same tables, same order); what they mean is docs/formats.md, section 2. They are not
 * trusted: every count, index, type and op is checked here, and a plan that passes can be evaluated on any inputs
 * without a further check. Values are held as 64-bit words: integers zero-extended from their type's width, floats as
 * their bits.
 */
#ifndef FA4_PLAN_H
#define FA4_PLAN_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A fused multiply-add would differ from what the plan says. */
#pragma STDC FP_CONTRACT OFF

#define PLAN_MAGIC 0x50344146u /* "FA4P" */
#define PLAN_ENCODING 1u
#define MAX_ARGS 64u
#define MAX_RANK 8u
#define MAX_NODES 65536u
#define MAX_GUARDS 4096u
#define MAX_LAUNCHES 8u
#define MAX_PARAMS 512u
#define MAX_FIELDS 65536u
#define MAX_MAPS 128u
#define MAX_STRING_BYTES (1u << 20)
#define MAX_PARAM_BYTES 32764u /* of one kernel: CUDA's limit since compute capability 7.0 */
#define MAX_SMEM_BYTES (1u << 20)
#define MAP_BYTES 128u

enum { TYPE_I1, TYPE_I8, TYPE_I16, TYPE_I32, TYPE_I64, TYPE_F32, TYPE_F64, NUM_TYPES };
static const uint8_t TYPE_BITS[NUM_TYPES] = {1, 8, 16, 32, 64, 32, 64};
static const uint8_t TYPE_BYTES[NUM_TYPES] = {1, 1, 2, 4, 8, 4, 8};

/* Order of plan.py OPS. */
/* clang-format off */
enum {
    OP_IN, OP_CONST,
    OP_ADD, OP_SUB, OP_MUL, OP_AND, OP_OR, OP_XOR, OP_SHL, OP_LSHR, OP_ASHR,
    OP_UDIV, OP_SDIV, OP_UREM, OP_SREM, OP_SMIN, OP_SMAX, OP_UMIN, OP_UMAX,
    OP_FADD, OP_FSUB, OP_FMUL, OP_FDIV, OP_FMIN, OP_FMAX,
    OP_EQ, OP_NE, OP_SLT, OP_SLE, OP_SGT, OP_SGE, OP_ULT, OP_ULE, OP_UGT, OP_UGE,
    OP_FEQ, OP_FLT, OP_FLE, OP_FGT, OP_FGE,
    OP_SELECT,
    OP_SEXT, OP_ZEXT, OP_TRUNC, OP_FPTRUNC, OP_FPEXT, OP_SITOFP, OP_UITOFP, OP_FPTOSI, OP_BITCAST,
    OP_CLOG2, OP_CTLZ,
    NUM_OPS
};
/* clang-format on */

/* Order of plan.py TENSOR_DTYPES. */
/* clang-format off */
enum {
    DTYPE_I8, DTYPE_U8, DTYPE_E4M3, DTYPE_E5M2, DTYPE_E8M0, DTYPE_BF16, DTYPE_F16, DTYPE_I16, DTYPE_U16,
    DTYPE_F32, DTYPE_I32, DTYPE_U32, DTYPE_F64, DTYPE_I64, DTYPE_U64,
    NUM_DTYPES
};
/* clang-format on */
static const uint8_t DTYPE_BYTES[NUM_DTYPES] = {1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8};
static const char *const DTYPE_NAMES[NUM_DTYPES] = {
    "int8",   "uint8",   "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16", "int16",
    "uint16", "float32", "int32",         "uint32",      "float64",        "int64",    "uint64"};

/* Order of plan.py MAP_DTYPES: the driver's CUtensorMapDataType, bytes of an element. */
enum { NUM_MAP_DTYPES = 11 };
static const uint8_t MAP_DTYPE_ENUM[NUM_MAP_DTYPES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11};
static const uint8_t MAP_DTYPE_BYTES[NUM_MAP_DTYPES] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4};

enum { ARG_TENSOR, ARG_SCALAR, ARG_DEVICE };
enum { DEVICE_SM_COUNT, DEVICE_SMEM_OPTIN, DEVICE_L2_BYTES, NUM_DEVICE_LEAVES };
static const char *const DEVICE_LEAF_NAMES[NUM_DEVICE_LEAVES] = {"dev.sm_count", "dev.smem_optin", "dev.l2_bytes"};
enum { PARAM_BYTES, PARAM_MAP };
enum { FLAG_PDL = 1, FLAG_COOPERATIVE = 2 };

typedef struct {
    const char *name;
    uint32_t kind;
    uint32_t dtype;      /* DTYPE_ of a tensor, TYPE_ of a scalar or device fact */
    uint32_t rank;       /* of a tensor */
    uint32_t align;      /* bytes; of a tensor's pointer and strides */
    uint32_t first_leaf; /* tensor: pointer, then rank extents, then rank strides; else the value */
    uint32_t device_leaf;
} Arg;

/* On what a node's value depends: literals alone; extents, strides and scalars; or a pointer as well. */
enum { DEPENDS_NOTHING, DEPENDS_PROBLEM, DEPENDS_POINTER, NUM_DEPENDS };

typedef struct {
    uint8_t op, type, source; /* source: type of the first operand */
    uint8_t depends;          /* DEPENDS_ */
    uint32_t a, b, c;
    uint32_t shift; /* 64 - bits of the type */
    uint64_t mask;  /* the type's bits */
} Node;

typedef struct {
    uint32_t node;
    uint32_t depends; /* DEPENDS_ of the node */
    const char *message;
} Guard;

typedef struct {
    uint32_t offset, node;
} Field;

typedef struct {
    uint32_t dtype, rank, addr;
    uint32_t dims[5], strides[4], box[5], elem_strides[5];
    uint32_t swizzle, interleave, l2_promotion, oob_nan;
} Map;

typedef struct {
    uint32_t kind, size, align;
    uint32_t first, count; /* fields of PARAM_BYTES; first = map of PARAM_MAP */
    uint32_t place;        /* offset in the block of all parameters of all launches */
    uint32_t depends;      /* the largest DEPENDS_ of its fields */
} Param;

typedef struct {
    const char *kernel;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t smem, flags;
    uint32_t first_param, num_params;
} LaunchSpec;

typedef struct {
    uint32_t num_args, num_leaves, num_nodes, num_guards, num_launches, num_params, num_fields, num_maps;
    uint32_t num_of[NUM_DEPENDS];
    Arg *args;
    Node *nodes;
    uint32_t *nodes_of[NUM_DEPENDS]; /* the nodes of each DEPENDS_, in order */
    Guard *guards;
    LaunchSpec *launches;
    Param *params;
    Field *fields;
    Map *maps;
    char *strings;
    uint32_t block_bytes; /* room for all parameters, each at its place */
    char error[256];
} Plan;

static void plan_clear(Plan *plan) {
    for (int k = 0; k < NUM_DEPENDS; k++) free(plan->nodes_of[k]);
    free(plan->args), free(plan->nodes), free(plan->guards), free(plan->launches);
    free(plan->params), free(plan->fields), free(plan->maps), free(plan->strings);
    memset(plan, 0, offsetof(Plan, error));
}

/* ---- decoding ---------------------------------------------------------------------------------------------------- */

static int plan_refuse(Plan *plan, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(plan->error, sizeof plan->error, format, values);
    va_end(values);
    return -1;
}

static uint32_t take_u32(const uint8_t **cursor) {
    const uint8_t *p = *cursor;
    *cursor += 4;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int is_integer(uint32_t type) { return type <= TYPE_I64; }

/* Type of a node's value: comparisons give i1. */
static uint8_t result_type(const Node *node) { return node->op >= OP_EQ && node->op <= OP_FGE ? TYPE_I1 : node->type; }

/* A string of the pool; strings are stored with a 0 byte after each. */
static int plan_string(Plan *plan, uint32_t string_bytes, uint32_t offset, const char **out) {
    if (offset >= string_bytes || plan->strings[offset] == 0)
        return plan_refuse(plan, "string at %u of %u", offset, string_bytes);
    if (offset > 0 && plan->strings[offset - 1] != 0)
        return plan_refuse(plan, "string at %u starts inside another", offset);
    *out = plan->strings + offset;
    return 0;
}

static int decode_args(Plan *plan, const uint8_t *cursor, uint32_t string_bytes) {
    uint32_t leaf = 0;
    for (uint32_t i = 0; i < plan->num_args; i++) {
        Arg *arg = &plan->args[i];
        arg->kind = take_u32(&cursor), arg->dtype = take_u32(&cursor), arg->rank = take_u32(&cursor);
        arg->align = take_u32(&cursor), arg->device_leaf = take_u32(&cursor);
        if (plan_string(plan, string_bytes, take_u32(&cursor), &arg->name)) return -1;
        if (arg->kind > ARG_DEVICE) return plan_refuse(plan, "argument %u: kind %u", i, arg->kind);
        if (arg->dtype >= (arg->kind == ARG_TENSOR ? (uint32_t)NUM_DTYPES : (uint32_t)NUM_TYPES))
            return plan_refuse(plan, "argument %u: dtype %u", i, arg->dtype);
        if (arg->kind == ARG_TENSOR) {
            if (arg->rank < 1 || arg->rank > MAX_RANK) return plan_refuse(plan, "argument %u: rank %u", i, arg->rank);
            if (arg->align < 1 || arg->align > 256 || (arg->align & (arg->align - 1)))
                return plan_refuse(plan, "argument %u: alignment %u", i, arg->align);
        } else if (arg->rank != 0 || arg->align != 0) {
            return plan_refuse(plan, "argument %u: a scalar with rank or alignment", i);
        }
        if (arg->kind == ARG_DEVICE &&
            (arg->device_leaf >= NUM_DEVICE_LEAVES || (arg->dtype != TYPE_I32 && arg->dtype != TYPE_I64)))
            return plan_refuse(plan, "argument %u: device fact %u of type %u", i, arg->device_leaf, arg->dtype);
        arg->first_leaf = leaf;
        leaf += arg->kind == ARG_TENSOR ? 1 + 2 * arg->rank : 1;
    }
    plan->num_leaves = leaf;
    return 0;
}

/* The argument a leaf belongs to. */
static const Arg *leaf_arg(const Plan *plan, uint32_t leaf) {
    uint32_t i = plan->num_args - 1;
    while (plan->args[i].first_leaf > leaf) i--;
    return &plan->args[i];
}

/* `q.ptr`, `q.shape[1]`, `q.stride[0]`, `softmax_scale`: as the plan's `in` nodes spell it. */
static void leaf_name(const Plan *plan, uint32_t leaf, char *out, size_t size) {
    const Arg *arg = leaf_arg(plan, leaf);
    uint32_t place = leaf - arg->first_leaf;
    if (arg->kind != ARG_TENSOR)
        snprintf(out, size, "%s", arg->name);
    else if (place == 0)
        snprintf(out, size, "%s.ptr", arg->name);
    else if (place <= arg->rank)
        snprintf(out, size, "%s.shape[%u]", arg->name, place - 1);
    else
        snprintf(out, size, "%s.stride[%u]", arg->name, place - 1 - arg->rank);
}

static uint32_t leaf_type(const Plan *plan, uint32_t leaf) {
    const Arg *arg = leaf_arg(plan, leaf);
    return arg->kind == ARG_TENSOR ? (uint32_t)TYPE_I64 : arg->dtype;
}

/* A conversion's source and result types fit each other. */
static int conversion_fits(uint8_t op, uint8_t from, uint8_t to) {
    int integers = is_integer(from) && is_integer(to);
    switch (op) {
    case OP_SEXT:
    case OP_ZEXT: return integers && TYPE_BITS[from] < TYPE_BITS[to];
    case OP_TRUNC: return integers && TYPE_BITS[from] > TYPE_BITS[to];
    case OP_FPTRUNC: return from == TYPE_F64 && to == TYPE_F32;
    case OP_FPEXT: return from == TYPE_F32 && to == TYPE_F64;
    case OP_SITOFP:
    case OP_UITOFP: return is_integer(from) && !is_integer(to);
    case OP_FPTOSI: return !is_integer(from) && is_integer(to);
    default: return TYPE_BITS[from] == TYPE_BITS[to]; /* OP_BITCAST */
    }
}

/* Number of operands; their indices are checked before their types. */
static uint32_t operand_count(uint8_t op) { return op <= OP_CONST ? 0 : op == OP_SELECT ? 3 : op >= OP_SEXT ? 1 : 2; }

static int decode_node(Plan *plan, uint32_t i) {
    Node *node = &plan->nodes[i];
    uint32_t operands[3] = {node->a, node->b, node->c}, count;
    uint8_t types[3] = {0, 0, 0};
    int fits;
    if (node->op >= NUM_OPS || node->type >= NUM_TYPES)
        return plan_refuse(plan, "node %u: op %u, type %u", i, node->op, node->type);
    if (node->op == OP_IN) {
        if (node->a >= plan->num_leaves || node->b || node->c)
            return plan_refuse(plan, "node %u: input leaf %u", i, node->a);
        if (node->type != leaf_type(plan, node->a))
            return plan_refuse(plan, "node %u: type %u for input leaf %u", i, node->type, node->a);
        return 0;
    }
    if (node->op == OP_CONST) {
        uint64_t value = (uint64_t)node->b << 32 | node->a;
        if ((TYPE_BITS[node->type] < 64 && value >> TYPE_BITS[node->type]) || node->c)
            return plan_refuse(plan, "node %u: the constant is wider than its type", i);
        return 0;
    }
    count = operand_count(node->op);
    for (uint32_t k = 0; k < 3; k++) {
        if (k >= count) {
            if (operands[k]) return plan_refuse(plan, "node %u: op %u has %u operands", i, node->op, count);
            continue;
        }
        if (operands[k] >= i) return plan_refuse(plan, "node %u: operand %u is not an earlier node", i, operands[k]);
        types[k] = result_type(&plan->nodes[operands[k]]);
    }
    node->source = types[0];
    if (node->op == OP_SELECT)
        fits = types[0] == TYPE_I1 && types[1] == node->type && types[2] == node->type;
    else if (node->op == OP_CLOG2)
        fits = node->type == TYPE_I32 && is_integer(types[0]);
    else if (node->op == OP_CTLZ)
        fits = is_integer(node->type) && types[0] == node->type;
    else if (count == 1)
        fits = conversion_fits(node->op, types[0], node->type);
    else {
        int wants_float = (node->op >= OP_FADD && node->op <= OP_FMAX) || (node->op >= OP_FEQ && node->op <= OP_FGE);
        fits = types[0] == node->type && types[1] == node->type && wants_float == !is_integer(node->type);
    }
    return fits ? 0 : plan_refuse(plan, "node %u: op %u does not take its operands' types", i, node->op);
}

static int is_pointer_leaf(const Plan *plan, uint32_t leaf) {
    const Arg *arg = leaf_arg(plan, leaf);
    return arg->kind == ARG_TENSOR && arg->first_leaf == leaf;
}

static uint8_t node_depends(const Plan *plan, const Node *node) {
    uint32_t operands[3] = {node->a, node->b, node->c};
    uint8_t depends = DEPENDS_NOTHING;
    if (node->op == OP_IN) return is_pointer_leaf(plan, node->a) ? DEPENDS_POINTER : DEPENDS_PROBLEM;
    for (uint32_t k = 0; k < operand_count(node->op); k++)
        if (plan->nodes[operands[k]].depends > depends) depends = plan->nodes[operands[k]].depends;
    return depends;
}

static int decode_nodes(Plan *plan, const uint8_t *cursor) {
    for (uint32_t i = 0; i < plan->num_nodes; i++) {
        Node *node = &plan->nodes[i];
        uint32_t head = take_u32(&cursor);
        if (head >> 16) return plan_refuse(plan, "node %u: reserved bytes are set", i);
        node->op = (uint8_t)head, node->type = (uint8_t)(head >> 8);
        node->a = take_u32(&cursor), node->b = take_u32(&cursor), node->c = take_u32(&cursor);
        if (decode_node(plan, i)) return -1;
        node->shift = 64u - TYPE_BITS[node->type];
        node->mask = ~(uint64_t)0 >> node->shift;
        node->depends = node_depends(plan, node);
        plan->nodes_of[node->depends][plan->num_of[node->depends]++] = i;
    }
    return 0;
}

static int decode_guards(Plan *plan, const uint8_t *cursor, uint32_t string_bytes) {
    for (uint32_t i = 0; i < plan->num_guards; i++) {
        Guard *guard = &plan->guards[i];
        guard->node = take_u32(&cursor);
        if (guard->node >= plan->num_nodes || result_type(&plan->nodes[guard->node]) != TYPE_I1)
            return plan_refuse(plan, "guard %u: node %u is no i1", i, guard->node);
        if (plan_string(plan, string_bytes, take_u32(&cursor), &guard->message)) return -1;
    }
    return 0;
}

static int is_integer_node(const Plan *plan, uint32_t node) {
    return node < plan->num_nodes && is_integer(result_type(&plan->nodes[node]));
}

static int decode_map(Plan *plan, const uint8_t **cursor, uint32_t i) {
    Map *map = &plan->maps[i];
    map->dtype = take_u32(cursor), map->rank = take_u32(cursor), map->addr = take_u32(cursor);
    for (int k = 0; k < 5; k++) map->dims[k] = take_u32(cursor);
    for (int k = 0; k < 4; k++) map->strides[k] = take_u32(cursor);
    for (int k = 0; k < 5; k++) map->box[k] = take_u32(cursor);
    for (int k = 0; k < 5; k++) map->elem_strides[k] = take_u32(cursor);
    map->swizzle = take_u32(cursor), map->interleave = take_u32(cursor);
    map->l2_promotion = take_u32(cursor), map->oob_nan = take_u32(cursor);
    if (map->dtype >= NUM_MAP_DTYPES || map->rank < 1 || map->rank > 5)
        return plan_refuse(plan, "map %u: dtype or rank", i);
    if (map->swizzle > 3 || map->interleave > 2 || map->l2_promotion > 3 || map->oob_nan > 1)
        return plan_refuse(plan, "map %u: swizzle, interleave, promotion or fill", i);
    int bad = !is_integer_node(plan, map->addr) || result_type(&plan->nodes[map->addr]) != TYPE_I64;
    for (uint32_t k = 0; k < map->rank; k++) {
        bad |= !is_integer_node(plan, map->dims[k]) || result_type(&plan->nodes[map->dims[k]]) != TYPE_I64;
        bad |= map->box[k] < 1 || map->box[k] > 256 || map->elem_strides[k] < 1 || map->elem_strides[k] > 8;
    }
    for (uint32_t k = 0; k + 1 < map->rank; k++)
        bad |= !is_integer_node(plan, map->strides[k]) || result_type(&plan->nodes[map->strides[k]]) != TYPE_I64;
    return bad ? plan_refuse(plan, "map %u: address, dims or strides are no i64 nodes, or box out of range", i) : 0;
}

static int decode_param(Plan *plan, uint32_t i, uint64_t *place) {
    Param *param = &plan->params[i];
    uint32_t align = param->align;
    if (align < 1 || align > 256 || (align & (align - 1)))
        return plan_refuse(plan, "parameter %u: alignment %u", i, align);
    if (param->kind == PARAM_MAP) {
        if (param->size != MAP_BYTES || align < 64 || param->first >= plan->num_maps || param->count)
            return plan_refuse(plan, "parameter %u: no tensor map", i);
    } else if (param->kind == PARAM_BYTES) {
        if (param->size < 1 || param->size > MAX_PARAM_BYTES)
            return plan_refuse(plan, "parameter %u: %u bytes", i, param->size);
        if ((uint64_t)param->first + param->count > plan->num_fields)
            return plan_refuse(plan, "parameter %u: fields", i);
        for (uint32_t f = param->first; f < param->first + param->count; f++) {
            const Field *field = &plan->fields[f];
            if (field->node >= plan->num_nodes) return plan_refuse(plan, "field %u: node %u", f, field->node);
            if ((uint64_t)field->offset + TYPE_BYTES[result_type(&plan->nodes[field->node])] > param->size)
                return plan_refuse(plan, "field %u: past the end of its parameter", f);
        }
    } else {
        return plan_refuse(plan, "parameter %u: kind %u", i, param->kind);
    }
    *place = (*place + align - 1) & ~(uint64_t)(align - 1);
    param->place = (uint32_t)*place;
    *place += param->size;
    return 0;
}

static int decode_launch(Plan *plan, const uint8_t **cursor, uint32_t string_bytes, uint32_t i, uint32_t *next_param) {
    LaunchSpec *launch = &plan->launches[i];
    uint64_t threads = 1, ctas = 1, bytes = 0;
    if (plan_string(plan, string_bytes, take_u32(cursor), &launch->kernel)) return -1;
    for (int k = 0; k < 3; k++) launch->grid[k] = take_u32(cursor);
    for (int k = 0; k < 3; k++) launch->block[k] = take_u32(cursor);
    for (int k = 0; k < 3; k++) launch->cluster[k] = take_u32(cursor);
    launch->smem = take_u32(cursor), launch->flags = take_u32(cursor);
    launch->first_param = take_u32(cursor), launch->num_params = take_u32(cursor);
    for (int k = 0; k < 3; k++) {
        if (!is_integer_node(plan, launch->grid[k]))
            return plan_refuse(plan, "launch %u: grid node %u", i, launch->grid[k]);
        if (launch->block[k] > 1024 || launch->cluster[k] > 16)
            return plan_refuse(plan, "launch %u: block or cluster", i);
        threads *= launch->block[k], ctas *= launch->cluster[k];
    }
    if (threads < 1 || threads > 1024 || ctas < 1 || ctas > 16)
        return plan_refuse(plan, "launch %u: block or cluster", i);
    if (launch->smem > MAX_SMEM_BYTES || launch->flags > (FLAG_PDL | FLAG_COOPERATIVE))
        return plan_refuse(plan, "launch %u: shared memory or flags", i);
    if (launch->first_param != *next_param || (uint64_t)launch->first_param + launch->num_params > plan->num_params)
        return plan_refuse(plan, "launch %u: parameters", i);
    *next_param += launch->num_params;
    for (uint32_t p = 0; p < launch->num_params; p++) bytes += plan->params[launch->first_param + p].size;
    return bytes > MAX_PARAM_BYTES
               ? plan_refuse(plan, "launch %u: %llu bytes of parameters", i, (unsigned long long)bytes)
               : 0;
}

static int decode_launches(Plan *plan, const uint8_t *cursor, uint32_t string_bytes) {
    uint32_t next_param = 0;
    for (uint32_t i = 0; i < plan->num_launches; i++)
        if (decode_launch(plan, &cursor, string_bytes, i, &next_param)) return -1;
    return next_param == plan->num_params
               ? 0
               : plan_refuse(plan, "%u parameters belong to no launch", plan->num_params - next_param);
}

static int decode_params(Plan *plan, const uint8_t *params, const uint8_t *fields) {
    uint64_t place = 0;
    for (uint32_t i = 0; i < plan->num_fields; i++) {
        plan->fields[i].offset = take_u32(&fields);
        plan->fields[i].node = take_u32(&fields);
    }
    for (uint32_t i = 0; i < plan->num_params; i++) {
        Param *param = &plan->params[i];
        param->kind = take_u32(&params), param->size = take_u32(&params), param->align = take_u32(&params);
        param->first = take_u32(&params), param->count = take_u32(&params);
        if (decode_param(plan, i, &place)) return -1;
    }
    if (place > MAX_LAUNCHES * 2ull * MAX_PARAM_BYTES) return plan_refuse(plan, "parameters are too large");
    plan->block_bytes = (uint32_t)place;
    return 0;
}

static int plan_allocate(Plan *plan, uint32_t string_bytes) {
    plan->args = calloc(plan->num_args + 1, sizeof *plan->args);
    plan->nodes = calloc(plan->num_nodes + 1, sizeof *plan->nodes);
    for (int k = 0; k < NUM_DEPENDS; k++) plan->nodes_of[k] = calloc(plan->num_nodes + 1, sizeof **plan->nodes_of);
    plan->guards = calloc(plan->num_guards + 1, sizeof *plan->guards);
    plan->launches = calloc(plan->num_launches + 1, sizeof *plan->launches);
    plan->params = calloc(plan->num_params + 1, sizeof *plan->params);
    plan->fields = calloc(plan->num_fields + 1, sizeof *plan->fields);
    plan->maps = calloc(plan->num_maps + 1, sizeof *plan->maps);
    plan->strings = calloc((size_t)string_bytes + 1, 1);
    int ok = plan->nodes_of[0] && plan->nodes_of[1] && plan->nodes_of[2] && plan->args && plan->nodes && plan->guards &&
             plan->launches && plan->params && plan->fields && plan->maps && plan->strings;
    return ok ? 0 : plan_refuse(plan, "out of memory");
}

static void note_dependence(Plan *plan) {
    for (uint32_t i = 0; i < plan->num_guards; i++)
        plan->guards[i].depends = plan->nodes[plan->guards[i].node].depends;
    for (uint32_t i = 0; i < plan->num_params; i++) {
        Param *param = &plan->params[i];
        for (uint32_t f = param->first; param->kind == PARAM_BYTES && f < param->first + param->count; f++) {
            uint32_t depends = plan->nodes[plan->fields[f].node].depends;
            if (depends > param->depends) param->depends = depends;
        }
    }
}

/* Decode `size` bytes. 0, or -1 with the reason in plan->error and nothing left allocated. */
static int plan_decode(Plan *plan, const uint8_t *data, size_t size) {
    enum { HEADER = 40, ARG = 24, NODE = 16, GUARD = 8, LAUNCH = 56, PARAM = 20, FIELD = 8, MAP = 104 };
    const uint8_t *cursor = data;
    uint32_t string_bytes;
    memset(plan, 0, sizeof *plan);
    if (size < HEADER)
        return plan_refuse(plan, "%llu bytes, the header alone has %d", (unsigned long long)size, HEADER);
    if (take_u32(&cursor) != PLAN_MAGIC) return plan_refuse(plan, "not an encoded launch plan");
    if (take_u32(&cursor) != PLAN_ENCODING) return plan_refuse(plan, "encoding of another version");
    plan->num_args = take_u32(&cursor), plan->num_nodes = take_u32(&cursor), plan->num_guards = take_u32(&cursor);
    plan->num_launches = take_u32(&cursor), plan->num_params = take_u32(&cursor), plan->num_fields = take_u32(&cursor);
    plan->num_maps = take_u32(&cursor), string_bytes = take_u32(&cursor);
    if (plan->num_args > MAX_ARGS || plan->num_nodes > MAX_NODES || plan->num_guards > MAX_GUARDS ||
        plan->num_launches > MAX_LAUNCHES || plan->num_params > MAX_PARAMS || plan->num_fields > MAX_FIELDS ||
        plan->num_maps > MAX_MAPS || string_bytes > MAX_STRING_BYTES)
        return plan_refuse(plan, "a count is over its limit");
    const uint8_t *args = cursor, *nodes = args + ARG * plan->num_args, *guards = nodes + NODE * plan->num_nodes;
    const uint8_t *launches = guards + GUARD * plan->num_guards, *params = launches + LAUNCH * plan->num_launches;
    const uint8_t *fields = params + PARAM * plan->num_params, *maps = fields + FIELD * plan->num_fields;
    const uint8_t *strings = maps + MAP * plan->num_maps;
    if ((size_t)(strings - data) + string_bytes != size)
        return plan_refuse(plan, "%llu bytes do not match the counts", (unsigned long long)size);
    if (plan_allocate(plan, string_bytes)) goto refused;
    memcpy(plan->strings, strings, string_bytes);
    if (string_bytes && plan->strings[string_bytes - 1]) {
        plan_refuse(plan, "the last string has no end");
        goto refused;
    }
    if (decode_args(plan, args, string_bytes) || decode_nodes(plan, nodes) || decode_guards(plan, guards, string_bytes))
        goto refused;
    for (uint32_t i = 0; i < plan->num_maps; i++)
        if (decode_map(plan, &maps, i)) goto refused;
    if (decode_params(plan, params, fields) || decode_launches(plan, launches, string_bytes)) goto refused;
    note_dependence(plan);
    return 0;
refused:
    plan_clear(plan);
    return -1;
}

/* ---- evaluation -------------------------------------------------------------------------------------------------- */

static uint64_t low_bits(uint64_t value, uint32_t bits) {
    return bits == 64 ? value : value & (((uint64_t)1 << bits) - 1);
}

static int64_t sign_extend(uint64_t value, uint32_t bits) {
    uint64_t sign = (uint64_t)1 << (bits - 1);
    return (int64_t)((low_bits(value, bits) ^ sign) - sign);
}

static float as_f32(uint64_t value) {
    uint32_t bits = (uint32_t)value;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static double as_f64(uint64_t value) {
    double number;
    memcpy(&number, &value, 8);
    return number;
}

static uint64_t from_f32(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

static uint64_t from_f64(double number) {
    uint64_t bits;
    memcpy(&bits, &number, 8);
    return bits;
}

static uint32_t bit_length(uint64_t value) { return value ? 64u - (uint32_t)__builtin_clzll(value) : 0u; }

/* fmin and fmax: a number beats NaN, the second operand wins a tie. */
#define FLOAT_BINARY(type, as, from)                                    \
    static uint64_t binary_##type(uint8_t op, uint64_t x, uint64_t y) { \
        type a = as(x), b = as(y);                                      \
        switch (op) {                                                   \
        case OP_FADD: return from(a + b);                               \
        case OP_FSUB: return from(a - b);                               \
        case OP_FMUL: return from(a * b);                               \
        case OP_FDIV: return from(a / b);                               \
        case OP_FMIN: return b != b || a < b ? x : y;                   \
        default: return b != b || a > b ? x : y; /* OP_FMAX */          \
        }                                                               \
    }                                                                   \
    static int compare_##type(uint8_t op, uint64_t x, uint64_t y) {     \
        type a = as(x), b = as(y);                                      \
        switch (op) {                                                   \
        case OP_FEQ: return a == b;                                     \
        case OP_FLT: return a < b;                                      \
        case OP_FLE: return a <= b;                                     \
        case OP_FGT: return a > b;                                      \
        default: return a >= b; /* OP_FGE */                            \
        }                                                               \
    }
FLOAT_BINARY(float, as_f32, from_f32)
FLOAT_BINARY(double, as_f64, from_f64)

/* Towards zero; 0 if the type cannot hold it. The bounds are exact doubles. */
static uint64_t float_to_int(double number, uint32_t bits) {
    double half = (double)((uint64_t)1 << (bits - 1));
    int fits = number > -half - 1.0 && number < half;
    if (bits == 64) fits = number >= -half && number < half; /* -half - 1 is no double there */
    return fits ? low_bits((uint64_t)(int64_t)number, bits) : 0;
}

static uint64_t convert(const Node *node, uint64_t x) {
    uint32_t from = TYPE_BITS[node->source], to = TYPE_BITS[node->type];
    switch (node->op) {
    case OP_SEXT: return low_bits((uint64_t)sign_extend(x, from), to);
    case OP_TRUNC: return low_bits(x, to);
    case OP_FPTRUNC: return from_f32((float)as_f64(x));
    case OP_FPEXT: return from_f64((double)as_f32(x));
    case OP_SITOFP:
        return node->type == TYPE_F32 ? from_f32((float)sign_extend(x, from)) : from_f64((double)sign_extend(x, from));
    case OP_UITOFP: return node->type == TYPE_F32 ? from_f32((float)x) : from_f64((double)x);
    case OP_FPTOSI: return float_to_int(node->source == TYPE_F32 ? (double)as_f32(x) : as_f64(x), to);
    case OP_CLOG2: return x > 1 ? bit_length(x - 1) : 0;
    case OP_CTLZ: return low_bits(to - bit_length(x), to);
    default: return x; /* OP_ZEXT, OP_BITCAST */
    }
}

static uint64_t float_op(const Node *node, uint64_t x, uint64_t y) {
    int is_comparison = node->op >= OP_FEQ;
    if (node->type == TYPE_F32)
        return is_comparison ? (uint64_t)compare_float(node->op, x, y) : binary_float(node->op, x, y);
    return is_comparison ? (uint64_t)compare_double(node->op, x, y) : binary_double(node->op, x, y);
}

/* Value of one node. Integer results are cut to their type; `A` and `B` are the operands as signed numbers. */
static uint64_t node_value(const Node *node, const uint64_t *leaves, const uint64_t *values) {
#define X values[node->a]
#define Y values[node->b]
#define A ((int64_t)(X << node->shift) >> node->shift)
#define B ((int64_t)(Y << node->shift) >> node->shift)
    uint32_t bits = 64u - node->shift;
    switch (node->op) {
    case OP_IN: return leaves[node->a];
    case OP_CONST: return (uint64_t)node->b << 32 | node->a;
    case OP_ADD: return (X + Y) & node->mask;
    case OP_SUB: return (X - Y) & node->mask;
    case OP_MUL: return (X * Y) & node->mask;
    case OP_AND: return X & Y;
    case OP_OR: return X | Y;
    case OP_XOR: return X ^ Y;
    case OP_SHL: return Y < bits ? X << Y & node->mask : 0;
    case OP_LSHR: return Y < bits ? X >> Y : 0;
    case OP_ASHR: return (uint64_t)(A >> (Y < bits ? Y : bits - 1)) & node->mask;
    case OP_UDIV: return Y ? X / Y : 0;
    case OP_UREM: return Y ? X % Y : 0;
    case OP_SDIV: return (B == 0 ? 0 : B == -1 ? 0 - X : (uint64_t)(A / B)) & node->mask; /* minimum / -1 wraps */
    case OP_SREM: return (B == 0 || B == -1 ? 0 : (uint64_t)(A % B)) & node->mask;
    case OP_SMIN: return A < B ? X : Y;
    case OP_SMAX: return A > B ? X : Y;
    case OP_UMIN: return X < Y ? X : Y;
    case OP_UMAX: return X > Y ? X : Y;
    case OP_EQ: return X == Y;
    case OP_NE: return X != Y;
    case OP_SLT: return A < B;
    case OP_SLE: return A <= B;
    case OP_SGT: return A > B;
    case OP_SGE: return A >= B;
    case OP_ULT: return X < Y;
    case OP_ULE: return X <= Y;
    case OP_UGT: return X > Y;
    case OP_UGE: return X >= Y;
    case OP_SELECT: return X ? Y : values[node->c];
    default: return node->op >= OP_SEXT ? convert(node, X) : float_op(node, X, Y);
    }
#undef X
#undef Y
#undef A
#undef B
}

/* Compute the nodes of one DEPENDS_. Lower ones come first; `values` has room for num_nodes and may be kept: constants
 * hold for ever, DEPENDS_PROBLEM as long as only pointers change. `leaves` holds num_leaves words. */
static void plan_evaluate_part(const Plan *plan, int depends, const uint64_t *leaves, uint64_t *values) {
    for (uint32_t k = 0; k < plan->num_of[depends]; k++) {
        uint32_t i = plan->nodes_of[depends][k];
        values[i] = node_value(&plan->nodes[i], leaves, values);
    }
}

/* Compute every node. */
static void plan_evaluate(const Plan *plan, const uint64_t *leaves, uint64_t *values) {
    for (int depends = 0; depends < NUM_DEPENDS; depends++) plan_evaluate_part(plan, depends, leaves, values);
}

/* True when two sets of leaves differ in pointers at most. */
static int same_problem(const Plan *plan, const uint64_t *a, const uint64_t *b) {
    for (uint32_t i = 0; i < plan->num_args; i++) {
        const Arg *arg = &plan->args[i];
        uint32_t skip = arg->kind == ARG_TENSOR, count = skip ? 2 * arg->rank : 1;
        if (memcmp(a + arg->first_leaf + skip, b + arg->first_leaf + skip, count * sizeof *a)) return 0;
    }
    return 1;
}

/* Index of the first guard that is false, or -1; those that depend on less than `least` are known to hold. */
static int64_t plan_failed_guard(const Plan *plan, const uint64_t *values, uint32_t least) {
    for (uint32_t i = 0; i < plan->num_guards; i++)
        if (plan->guards[i].depends >= least && !values[plan->guards[i].node]) return i;
    return -1;
}

static int64_t node_signed(const Plan *plan, const uint64_t *values, uint32_t node) {
    uint32_t bits = TYPE_BITS[result_type(&plan->nodes[node])];
    return bits == 1 ? (int64_t)values[node] : sign_extend(values[node], bits);
}

static void write_word(uint8_t *out, uint64_t value, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i++) out[i] = (uint8_t)(value >> (8 * i));
}

/* The bytes of one PARAM_BYTES parameter; bytes under no field are 0. */
static void plan_write_bytes(const Plan *plan, const Param *param, const uint64_t *values, uint8_t *out) {
    memset(out, 0, param->size);
    for (uint32_t f = param->first; f < param->first + param->count; f++) {
        const Field *field = &plan->fields[f];
        write_word(out + field->offset, values[field->node], TYPE_BYTES[result_type(&plan->nodes[field->node])]);
    }
}

/* Numbers for cuTensorMapEncodeTiled. A dim of extent 1 gets a stride that the driver accepts: its own is never used.
 */
static void plan_map_numbers(const Map *map, const uint64_t *values, uint64_t dims[5], uint64_t strides[4]) {
    uint64_t inner_bytes = MAP_DTYPE_BYTES[map->dtype];
    for (uint32_t k = 0; k < map->rank; k++) {
        dims[k] = values[map->dims[k]];
        if (k > 0) strides[k - 1] = dims[k] == 1 ? (inner_bytes + 15) & ~(uint64_t)15 : values[map->strides[k - 1]];
        if (dims[k] && inner_bytes < ((uint64_t)1 << 40) / dims[k])
            inner_bytes *= dims[k];
        else
            inner_bytes = 16; /* past what a stride can hold (2^40): any legal one does */
    }
}

/* Size of the canonical bytes that `vectors` digests are over, and the bytes themselves. */
static size_t plan_canonical_size(const Plan *plan) {
    size_t size = 0;
    for (uint32_t i = 0; i < plan->num_launches; i++) {
        const LaunchSpec *launch = &plan->launches[i];
        size += 80;
        for (uint32_t p = launch->first_param; p < launch->first_param + launch->num_params; p++) {
            const Param *param = &plan->params[p];
            size += param->kind == PARAM_BYTES ? param->size : 8 * (size_t)(4 * plan->maps[param->first].rank + 5);
        }
    }
    return size;
}

static uint8_t *write_i64(uint8_t *out, uint64_t value) {
    write_word(out, value, 8);
    return out + 8;
}

static uint8_t *write_canonical_map(const Map *map, const uint64_t *values, uint8_t *out) {
    static const uint8_t swizzles[4] = {0, 32, 64, 128}, interleaves[3] = {0, 16, 32};
    static const uint16_t promotions[4] = {0, 64, 128, 256};
    out = write_i64(write_i64(out, values[map->addr]), map->rank);
    for (uint32_t k = 0; k < map->rank; k++) out = write_i64(out, values[map->dims[k]]);
    for (uint32_t k = 0; k + 1 < map->rank; k++) out = write_i64(out, values[map->strides[k]]);
    for (uint32_t k = 0; k < map->rank; k++) out = write_i64(out, map->box[k]);
    for (uint32_t k = 0; k < map->rank; k++) out = write_i64(out, map->elem_strides[k]);
    out = write_i64(write_i64(out, swizzles[map->swizzle]), interleaves[map->interleave]);
    return write_i64(write_i64(out, promotions[map->l2_promotion]), map->oob_nan);
}

static void plan_write_canonical(const Plan *plan, const uint64_t *values, uint8_t *out) {
    for (uint32_t i = 0; i < plan->num_launches; i++) {
        const LaunchSpec *launch = &plan->launches[i];
        for (int k = 0; k < 3; k++) out = write_i64(out, (uint64_t)node_signed(plan, values, launch->grid[k]));
        for (int k = 0; k < 3; k++) out = write_i64(out, launch->block[k]);
        for (int k = 0; k < 3; k++) out = write_i64(out, launch->cluster[k]);
        out = write_i64(out, launch->smem);
        for (uint32_t p = launch->first_param; p < launch->first_param + launch->num_params; p++) {
            const Param *param = &plan->params[p];
            if (param->kind == PARAM_BYTES) {
                plan_write_bytes(plan, param, values, out);
                out += param->size;
            } else {
                out = write_canonical_map(&plan->maps[param->first], values, out);
            }
        }
    }
}

#endif
