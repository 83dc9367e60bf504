/* The few driver types and functions the launcher uses, declared here so that no CUDA header is needed to build it.
 * Names, numbers and layouts are those of the public CUDA driver API (cuda.h, 12.0 and later; all are ABI-stable). */
#ifndef FA4_CUDA_H
#define FA4_CUDA_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;

enum {
    CU_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_ATTRIBUTE_L2_CACHE_SIZE = 38,
    CU_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};
enum { CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8, CU_FUNC_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14 };
enum { CU_LAUNCH_COOPERATIVE = 2, CU_LAUNCH_CLUSTER_DIMENSION = 4, CU_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef struct {
    int id;
    char pad[4];
    union {
        char room[64];
        int number;
        uint32_t cluster[3];
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned num_attributes;
} CUlaunchConfig;

_Static_assert(sizeof(CUlaunchAttribute) == 72, "CUlaunchAttribute is 8 bytes of id and 64 of value");
_Static_assert(sizeof(CUlaunchConfig) == 56, "CUlaunchConfig is 56 bytes on 64-bit platforms");

typedef struct {
    _Alignas(64) unsigned char bytes[128];
} CUtensorMap;

#define DRIVER_FUNCTIONS(X)                                                                                         \
    X(init, "cuInit", (unsigned flags))                                                                             \
    X(error_name, "cuGetErrorName", (CUresult error, const char **text))                                            \
    X(error_string, "cuGetErrorString", (CUresult error, const char **text))                                        \
    X(driver_version, "cuDriverGetVersion", (int *version))                                                         \
    X(device_count, "cuDeviceGetCount", (int *count))                                                               \
    X(device_get, "cuDeviceGet", (CUdevice * device, int ordinal))                                                  \
    X(device_name, "cuDeviceGetName", (char *name, int size, CUdevice device))                                      \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice device))                       \
    X(primary_context, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device))                          \
    X(context_current, "cuCtxGetCurrent", (CUcontext * context))                                                    \
    X(context_push, "cuCtxPushCurrent_v2", (CUcontext context))                                                     \
    X(context_pop, "cuCtxPopCurrent_v2", (CUcontext * context))                                                     \
    X(library_load, "cuLibraryLoadData",                                                                            \
      (CUlibrary * library, const void *code, int *jit_options, void **jit_values, unsigned num_jit,                \
       int *library_options, void **library_values, unsigned num_library))                                          \
    X(library_kernel, "cuLibraryGetKernel", (CUkernel * kernel, CUlibrary library, const char *name))               \
    X(kernel_function, "cuKernelGetFunction", (CUfunction * function, CUkernel kernel))                             \
    X(function_set_attribute, "cuFuncSetAttribute", (CUfunction function, int attribute, int value))                \
    X(map_encode, "cuTensorMapEncodeTiled",                                                                         \
      (CUtensorMap * map, int dtype, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,   \
       const uint32_t *box, const uint32_t *elem_strides, int interleave, int swizzle, int l2_promotion, int fill)) \
    X(launch, "cuLaunchKernelEx", (const CUlaunchConfig *config, CUfunction function, void **params, void **extra))

#define DECLARE_MEMBER(member, symbol, parameters) CUresult(*member) parameters;
typedef struct {
    void *handle;
    DRIVER_FUNCTIONS(DECLARE_MEMBER)
} CudaDriver;
#undef DECLARE_MEMBER

/* Open the driver at `path` and find its functions. NULL, or the name of what is missing (`path` itself or a symbol).
 */
static const char *cuda_open(CudaDriver *driver, const char *path) {
    driver->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!driver->handle) return path;
#define FIND(member, symbol, parameters)                       \
    *(void **)&driver->member = dlsym(driver->handle, symbol); \
    if (!driver->member) return symbol;
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    return NULL;
}

#endif
