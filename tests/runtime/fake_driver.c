/* A stand-in for libcuda.so.1: records every launch, refuses what the real driver refuses, returns errors on demand.
 *
 * A "cubin" for it is the bytes 7f 45 4c 46 and a text: one line a kernel, `name size size ...`, the sizes of its
 * parameters in bytes; it needs them to copy parameters, as the real driver reads them from the ELF. Read and steered
 * by ctypes. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    INVALID_VALUE = 1,
    INVALID_IMAGE = 200,
    NOT_FOUND = 500,
    MAX_KERNELS = 16,
    MAX_LAUNCHES = 64,
    MAX_BYTES = 4096,
    MAX_CONTEXTS = 16
};

typedef struct {
    char name[64];
    uint32_t num_params, sizes[64];
    int32_t max_dynamic_smem, non_portable_cluster;
} Kernel;

typedef struct {
    char kernel[64];
    uint32_t grid[3], block[3], smem, cluster[3], pdl, cooperative, num_bytes, maps_aligned;
    uint64_t stream, context;
    unsigned char bytes[MAX_BYTES]; /* parameters one after another */
} Launch;

typedef struct {
    unsigned gx, gy, gz, bx, by, bz, smem;
    void *stream;
    void *attributes;
    unsigned num_attributes;
} Config;
typedef struct {
    int id;
    char pad[4];
    union {
        char room[64];
        int number;
        uint32_t cluster[3];
    } value;
} Attribute;

/* What a real map holds is undocumented; this one holds what it was made from. */
typedef struct {
    uint64_t address, dims[5], strides[4];
    uint16_t box[5];
    uint8_t elem_strides[5], dtype, rank, interleave, swizzle, promotion, fill, made;
} Map;
_Static_assert(sizeof(Map) <= 128, "a tensor map has 128 bytes");

static Kernel kernels[MAX_KERNELS];
static Launch launches[MAX_LAUNCHES];
static uint32_t num_kernels, num_loads, num_functions, num_maps;
static atomic_uint num_launches;
static _Thread_local uintptr_t stack[MAX_CONTEXTS];
static _Thread_local int depth;
static int capability[2] = {9, 0}, fail_code;
static char fail_call[64];

static int failing(const char *call) { return strcmp(fail_call, call) == 0 ? fail_code : 0; }
#define CHECK(call)                \
    do {                           \
        int code_ = failing(call); \
        if (code_) return code_;   \
    } while (0)

/* ---- steering ---- */
void fake_reset(void) {
    num_kernels = num_loads = num_functions = num_maps = 0, num_launches = 0, depth = 0, fail_call[0] = 0, capability[0] = 9,
    capability[1] = 0;
}
void fake_reset_launches(void) { num_launches = 0; }
void fake_fail(const char *call, int code) { snprintf(fail_call, sizeof fail_call, "%s", call), fail_code = code; }
void fake_capability(int major, int minor) { capability[0] = major, capability[1] = minor; }
uint32_t fake_num_launches(void) { return num_launches; }
uint32_t fake_num_loads(void) { return num_loads; }
uint32_t fake_num_functions(void) { return num_functions; }
uint32_t fake_num_maps(void) { return num_maps; }
int fake_depth(void) { return depth; }
const Launch *fake_launch(uint32_t i) { return &launches[i]; }
const Kernel *fake_kernel(uint32_t i) { return &kernels[i]; }

/* ---- driver ---- */
int cuInit(unsigned flags) {
    (void)flags;
    CHECK("cuInit");
    return 0;
}
int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_FAKE";
    return 0;
}
int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "asked for by the test";
    return 0;
}
int cuDeviceGetCount(int *count) {
    CHECK("cuDeviceGetCount");
    *count = 2;
    return 0;
}
int cuDeviceGet(int *device, int ordinal) {
    CHECK("cuDeviceGet");
    *device = ordinal;
    return 0;
}
int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "Fake GPU %d", device);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    CHECK("cuDeviceGetAttribute");
    switch (attribute) {
    case 16: *value = 132; return 0;
    case 38: *value = 50 << 20; return 0;
    case 75: *value = capability[0]; return 0;
    case 76: *value = capability[1]; return 0;
    case 97: *value = 232448; return 0;
    default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    CHECK("cuDevicePrimaryCtxRetain");
    *context = (void *)(uintptr_t)(0xC000 + device);
    return 0;
}
int cuCtxGetCurrent(void **context) {
    *context = depth ? (void *)stack[depth - 1] : NULL;
    return 0;
}
int cuCtxPushCurrent_v2(void *context) {
    CHECK("cuCtxPushCurrent");
    stack[depth++] = (uintptr_t)context;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_VALUE;
    *context = (void *)stack[--depth];
    return 0;
}

int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    CHECK("cuLibraryLoadData");
    char line[1024], *word, *text = malloc(strlen((const char *)code + 4) + 1), *rest = text, *end;
    strcpy(text, (const char *)code + 4);
    uint32_t first = num_kernels;
    for (; (end = strchr(rest, '\n')); rest = end + 1) {
        snprintf(line, sizeof line, "%.*s", (int)(end - rest), rest);
        if (num_kernels == MAX_KERNELS) break;
        Kernel *kernel = &kernels[num_kernels++];
        memset(kernel, 0, sizeof *kernel);
        snprintf(kernel->name, sizeof kernel->name, "%s", strtok(line, " "));
        while ((word = strtok(NULL, " "))) kernel->sizes[kernel->num_params++] = (uint32_t)atoi(word);
    }
    int is_read = !*rest && num_kernels > first;
    free(text);
    num_loads++;
    *library = (void *)(uintptr_t)(first + 1);
    return is_read ? 0 : INVALID_IMAGE;
}

int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    CHECK("cuLibraryGetKernel");
    for (uint32_t i = (uint32_t)(uintptr_t)library - 1; i < num_kernels; i++)
        if (strcmp(kernels[i].name, name) == 0) return *kernel = &kernels[i], 0;
    return NOT_FOUND;
}

int cuKernelGetFunction(void **function, void *kernel) {
    CHECK("cuKernelGetFunction");
    if (!depth) return INVALID_VALUE;
    num_functions++;
    *function = kernel;
    return 0;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
    CHECK("cuFuncSetAttribute");
    if (attribute == 8)
        ((Kernel *)function)->max_dynamic_smem = value;
    else if (attribute == 14)
        ((Kernel *)function)->non_portable_cluster = value;
    else
        return INVALID_VALUE;
    return 0;
}

int cuTensorMapEncodeTiled(void *out, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *elem_strides, int interleave,
                           int swizzle, int promotion, int fill) {
    Map map = {0};
    CHECK("cuTensorMapEncodeTiled");
    if ((uintptr_t)out % 64 || (uintptr_t)address % 16 || rank < 1 || rank > 5 || !depth) return INVALID_VALUE;
    for (uint32_t i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > (1ull << 32)) return INVALID_VALUE;
        if (i && (strides[i - 1] % 16 || strides[i - 1] >= (1ull << 40))) return INVALID_VALUE;
        map.dims[i] = dims[i], map.box[i] = (uint16_t)box[i], map.elem_strides[i] = (uint8_t)elem_strides[i];
        if (i) map.strides[i - 1] = strides[i - 1];
    }
    map.address = (uintptr_t)address, map.dtype = (uint8_t)dtype, map.rank = (uint8_t)rank,
    map.interleave = (uint8_t)interleave;
    map.swizzle = (uint8_t)swizzle, map.promotion = (uint8_t)promotion, map.fill = (uint8_t)fill, map.made = 0xA5;
    memset(out, 0, 128);
    memcpy(out, &map, sizeof map);
    num_maps++;
    return 0;
}

int cuLaunchKernelEx(const Config *config, void *function, void **params, void **extra) {
    CHECK("cuLaunchKernelEx");
    const Kernel *kernel = function;
    const Attribute *attributes = config->attributes;
    if (!depth || extra || num_launches == MAX_LAUNCHES || config->smem > (uint32_t)kernel->max_dynamic_smem)
        return INVALID_VALUE;
    Launch *launch = &launches[num_launches++];
    memset(launch, 0, sizeof *launch);
    memcpy(launch->kernel, kernel->name, sizeof launch->kernel);
    memcpy(launch->grid, &config->gx, 12), memcpy(launch->block, &config->bx, 12);
    launch->smem = config->smem, launch->stream = (uintptr_t)config->stream, launch->context = stack[depth - 1];
    launch->cluster[0] = launch->cluster[1] = launch->cluster[2] = 1;
    for (unsigned i = 0; i < config->num_attributes; i++) {
        if (attributes[i].id == 4)
            memcpy(launch->cluster, attributes[i].value.cluster, 12);
        else if (attributes[i].id == 6)
            launch->pdl = (uint32_t)attributes[i].value.number;
        else if (attributes[i].id == 2)
            launch->cooperative = (uint32_t)attributes[i].value.number;
        else
            return INVALID_VALUE;
    }
    launch->maps_aligned = 1;
    for (uint32_t i = 0; i < kernel->num_params; i++) {
        if (launch->num_bytes + kernel->sizes[i] > MAX_BYTES) return INVALID_VALUE;
        if (kernel->sizes[i] == 128 && (uintptr_t)params[i] % 64) launch->maps_aligned = 0;
        memcpy(launch->bytes + launch->num_bytes, params[i], kernel->sizes[i]);
        launch->num_bytes += kernel->sizes[i];
    }
    return 0;
}
