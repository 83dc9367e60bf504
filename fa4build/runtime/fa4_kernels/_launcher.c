/* The launcher: loads cubins and launches kernels from launch plans, through the CUDA driver found at run time.
 *
 * Built as one translation unit, with _plan.h, _tensor.h, _cuda.h and _calls.h beside it. Needs Python.h of any CPython
 * from 3.10 on (limited API), no CUDA header, no library but libc and libdl:
 *
 *     cc -std=c11 -O2 -fPIC -shared -fvisibility=hidden -I INCLUDE _launcher.c -ldl -o _launcher.abi3.so
 *
 * Python sees Driver(path), Driver.load(cubin) -> Library, Plan(bytes), and Launch(driver, plan, library, device, ...).
 * A Launch is a plan bound to one device; its run(*arguments) launches. ForwardCalls and RecipeCalls (_calls.h) answer
 * whole calls that were seen before: look up, allocate, launch. Libraries and contexts are never released, because
 * kernels may still run when Python lets go of an object.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include "_cuda.h"
#include "_plan.h"
#include "_tensor.h"

#define MAX_LEAVES (MAX_ARGS * (1 + 2 * MAX_RANK))
#define STACK_BLOCK_BYTES 8192u
#define BLOCK_ALIGN 256u
#define MAP_SLOTS 8u /* 2^3, see write_map */

/* What a Launch keeps from call to call belongs to one call at a time. The interpreter lock sees to that; where there is
 * none, a mutex of the interpreter's does, which lets it stop threads that wait for it. */
#ifdef Py_GIL_DISABLED
#define MUTEX(name) PyMutex name;
#define LOCK(mutex) PyMutex_Lock(&(mutex))
#define UNLOCK(mutex) PyMutex_Unlock(&(mutex))
#else
#define MUTEX(name)
#define LOCK(mutex) (void)0
#define UNLOCK(mutex) (void)0
#endif

typedef struct {
    PyObject_HEAD
    CudaDriver cuda;
    int num_devices;
} DriverObject;

typedef struct {
    PyObject_HEAD
    CUlibrary library;
} LibraryObject;

typedef struct {
    PyObject_HEAD
    Plan plan;
} PlanObject;

/* A tensor map and what it was made from. */
typedef struct {
    CUtensorMap map;
    uint64_t address, dims[5], strides[4];
    int is_made;
} MapSlot;

typedef struct {
    PyObject_HEAD
    DriverObject *driver;
    PlanObject *plan_object;
    LibraryObject *library;
    PyObject *stream_of;
    CUcontext context;
    CUfunction functions[MAX_LAUNCHES];
    /* Of the last call: its leaves, and one word a node; used only under the interpreter lock, or this one. */
    MUTEX(mutex)
    uint64_t *leaves, *values;
    int is_evaluated;         /* values belong to leaves, and the guards hold */
    unsigned char *block;     /* PARAM_BYTES parameters of the last call, at their places */
    uint32_t written_launches; /* bit i: those of launch i are up to date but for pointers */
    void *maps_memory;
    MapSlot *maps; /* MAP_SLOTS for each map of the plan, chosen by address */
    uint64_t device_facts[NUM_DEVICE_LEAVES];
    int ordinal, device_type;
    uint32_t num_call_args;
} LaunchObject;

static PyObject *driver_type, *library_type, *plan_type, *launch_type;
static PyObject *forward_calls_type, *recipe_calls_type, *bound_forward_type, *bound_recipe_type;
/* Exception classes, replaced by those of fa4_kernels.errors (`use_errors`). */
static PyObject *input_error, *layout_error, *driver_error, *plan_error;

/* ---- errors ------------------------------------------------------------------------------------------------------ */

static int raise_driver(const CudaDriver *cuda, const char *call, CUresult result) {
    const char *name = NULL, *text = NULL;
    cuda->error_name(result, &name), cuda->error_string(result, &text);
    PyErr_Format(driver_error, "%s: %s (%d): %s", call, name ? name : "unknown error", result,
                 text ? text : "no description");
    return -1;
}

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void *new_object(PyTypeObject *type) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

/* ---- Driver ------------------------------------------------------------------------------------------------------ */

static PyObject *driver_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", NULL};
    const char *path = "libcuda.so.1", *missing;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|s:Driver", names, &path)) return NULL;
    DriverObject *self = new_object(type);
    if (!self) return NULL;
    missing = cuda_open(&self->cuda, path);
    if (missing == path)
        PyErr_Format(driver_error,
                     "cannot open the CUDA driver %s: %s. An NVIDIA driver for CUDA 12.0 or later is needed.", path,
                     dlerror());
    else if (missing)
        PyErr_Format(driver_error,
                     "the CUDA driver %s has no %s. An NVIDIA driver for CUDA 12.0 or later (R525) is needed.", path,
                     missing);
    else {
        CUresult result = self->cuda.init(0);
        if (result)
            raise_driver(&self->cuda, "cuInit", result);
        else if ((result = self->cuda.device_count(&self->num_devices)))
            raise_driver(&self->cuda, "cuDeviceGetCount", result);
    }
    if (!PyErr_Occurred()) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static int device_of_ordinal(DriverObject *self, long ordinal, CUdevice *device) {
    if (ordinal < 0 || ordinal >= self->num_devices) {
        PyErr_Format(driver_error, "device %ld does not exist; the driver sees %d", ordinal, self->num_devices);
        return -1;
    }
    CUresult result = self->cuda.device_get(device, (int)ordinal);
    return result ? raise_driver(&self->cuda, "cuDeviceGet", result) : 0;
}

static int device_attribute(DriverObject *self, CUdevice device, int attribute, int *value) {
    CUresult result = self->cuda.device_attribute(value, attribute, device);
    return result ? raise_driver(&self->cuda, "cuDeviceGetAttribute", result) : 0;
}

static PyObject *driver_device(PyObject *object, PyObject *argument) {
    static const int attributes[5] = {CU_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                                      CU_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                                      CU_ATTRIBUTE_L2_CACHE_SIZE};
    DriverObject *self = (DriverObject *)object;
    int values[5];
    char name[256] = "";
    CUdevice device;
    long ordinal = PyLong_AsLong(argument);
    if (PyErr_Occurred() || device_of_ordinal(self, ordinal, &device)) return NULL;
    for (int i = 0; i < 5; i++)
        if (device_attribute(self, device, attributes[i], &values[i])) return NULL;
    CUresult result = self->cuda.device_name(name, sizeof name - 1, device);
    if (result) return raise_driver(&self->cuda, "cuDeviceGetName", result), NULL;
    return Py_BuildValue("{s:s,s:(ii),s:i,s:i,s:i}", "name", name, "compute_capability", values[0], values[1],
                         "sm_count", values[2], "smem_optin_bytes", values[3], "l2_bytes", values[4]);
}

static PyObject *driver_version(PyObject *object, PyObject *unused) {
    DriverObject *self = (DriverObject *)object;
    int version = 0;
    CUresult result = self->cuda.driver_version(&version);
    (void)unused;
    if (result) return raise_driver(&self->cuda, "cuDriverGetVersion", result), NULL;
    return Py_BuildValue("(ii)", version / 1000, version % 1000 / 10);
}

static PyObject *driver_device_count(PyObject *object, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(((DriverObject *)object)->num_devices);
}

static PyObject *driver_load(PyObject *object, PyObject *cubin) {
    DriverObject *self = (DriverObject *)object;
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(cubin, &data, &size)) return NULL;
    if (size < 4 || memcmp(data, "\177ELF", 4) != 0)
        return PyErr_Format(driver_error, "%zd bytes that are no cubin (ELF)", size), NULL;
    LibraryObject *library = new_object((PyTypeObject *)library_type);
    if (!library) return NULL;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS
    result = self->cuda.library_load(&library->library, data, NULL, NULL, 0, NULL, NULL, 0);
    Py_END_ALLOW_THREADS
    if (!result) return (PyObject *)library;
    Py_DECREF(library);
    return raise_driver(&self->cuda, "cuLibraryLoadData", result), NULL;
}

static PyMethodDef driver_methods[] = {
    {"device", driver_device, METH_O,
     "device(ordinal) -> dict of name, compute_capability, sm_count, smem_optin_bytes, l2_bytes"},
    {"device_count", driver_device_count, METH_NOARGS, "device_count() -> int"},
    {"version", driver_version, METH_NOARGS, "version() -> (major, minor) of the CUDA the driver supports"},
    {"load", driver_load, METH_O, "load(cubin: bytes) -> Library"},
    {NULL, NULL, 0, NULL}};

/* ---- Plan -------------------------------------------------------------------------------------------------------- */

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"encoded", NULL};
    const char *data;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#:Plan", names, &data, &size)) return NULL;
    PlanObject *self = new_object(type);
    if (!self) return NULL;
    if (plan_decode(&self->plan, (const uint8_t *)data, (size_t)size) == 0) return (PyObject *)self;
    PyErr_Format(plan_error, "launch plan refused: %s. The pack was made by another version or is damaged.",
                 self->plan.error);
    Py_DECREF(self);
    return NULL;
}

static void plan_dealloc(PyObject *object) {
    plan_clear(&((PlanObject *)object)->plan);
    free_object(object);
}

/* A Python number as a word of the type, or -1 with an exception that names the argument. */
static int scalar_word(PyObject *value, uint32_t type, const char *name, uint64_t *word) {
    if (!PyLong_Check(value) && !(PyFloat_Check(value) && !is_integer(type))) {
        PyErr_Format(input_error, "%s: %R is no number that fits; %s expected", name, value,
                     is_integer(type) ? "an int is" : "a float is");
        return -1;
    }
    if (!is_integer(type)) {
        double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred()) return -1;
        *word = type == TYPE_F32 ? from_f32((float)number) : from_f64(number);
        return 0;
    }
    int overflow;
    uint32_t bits = TYPE_BITS[type];
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    uint64_t low = PyLong_AsUnsignedLongLongMask(value);
    int fits = overflow == 0 && (bits == 64 || (number >= -(1ll << (bits - 1)) && number < (1ll << bits)));
    if (overflow > 0 && bits == 64) { /* up to 2^64 - 1 as its bits, as pointers are */
        PyErr_Clear();
        fits = PyLong_AsUnsignedLongLong(value) == low && !PyErr_Occurred();
        PyErr_Clear();
    }
    if (!fits) {
        PyErr_Format(input_error, "%s: %R does not fit in %u bits", name, value, bits);
        return -1;
    }
    *word = low_bits(low, bits);
    return 0;
}

/* Values of all nodes for named leaves (new memory, to be freed), or NULL with an exception. */
static uint64_t *values_from_dict(const Plan *plan, PyObject *inputs) {
    uint64_t leaves[MAX_LEAVES] = {0};
    char name[512];
    if (!PyDict_Check(inputs)) return PyErr_SetString(PyExc_TypeError, "a dict of input leaves is expected"), NULL;
    for (uint32_t i = 0; i < plan->num_nodes; i++) {
        const Node *node = &plan->nodes[i];
        if (node->op != OP_IN) continue;
        leaf_name(plan, node->a, name, sizeof name);
        PyObject *value = PyDict_GetItemString(inputs, name);
        if (!value) return PyErr_Format(input_error, "input leaf %s is missing", name), NULL;
        if (scalar_word(value, node->type, name, &leaves[node->a])) return NULL;
    }
    uint64_t *values = PyMem_Malloc(sizeof *values * (plan->num_nodes + 1));
    if (!values) return (uint64_t *)PyErr_NoMemory();
    plan_evaluate(plan, leaves, values);
    return values;
}

static PyObject *plan_evaluate_dict(PyObject *object, PyObject *inputs) {
    const Plan *plan = &((PlanObject *)object)->plan;
    uint64_t *values = values_from_dict(plan, inputs);
    if (!values) return NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)plan_canonical_size(plan));
    if (bytes) plan_write_canonical(plan, values, (uint8_t *)PyBytes_AsString(bytes));
    PyMem_Free(values);
    return bytes;
}

static PyObject *plan_failed_guard_dict(PyObject *object, PyObject *inputs) {
    const Plan *plan = &((PlanObject *)object)->plan;
    uint64_t *values = values_from_dict(plan, inputs);
    if (!values) return NULL;
    int64_t failed = plan_failed_guard(plan, values, DEPENDS_NOTHING);
    PyMem_Free(values);
    if (failed < 0) Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(plan->guards[failed].message, (Py_ssize_t)strlen(plan->guards[failed].message),
                                "replace");
}

static PyMethodDef plan_methods[] = {
    {"evaluate", plan_evaluate_dict, METH_O,
     "evaluate(leaves: dict) -> canonical bytes of all launches (guards are not looked at)"},
    {"failed_guard", plan_failed_guard_dict, METH_O,
     "failed_guard(leaves: dict) -> message of the first guard that is false, or None"},
    {NULL, NULL, 0, NULL}};

/* ---- Launch ------------------------------------------------------------------------------------------------------ */

static void launch_dealloc(PyObject *object) {
    LaunchObject *self = (LaunchObject *)object;
    PyMem_Free(self->leaves), PyMem_Free(self->values), PyMem_Free(self->maps_memory), PyMem_Free(self->block);
    Py_XDECREF((PyObject *)self->driver), Py_XDECREF((PyObject *)self->plan_object);
    Py_XDECREF((PyObject *)self->library), Py_XDECREF(self->stream_of);
    free_object(object);
}

/* Kernel `i` of the plan, allowed its shared memory and cluster, loaded on the device. The context is current. */
static int bind_kernel(LaunchObject *self, uint32_t i) {
    const CudaDriver *cuda = &self->driver->cuda;
    const LaunchSpec *spec = &self->plan_object->plan.launches[i];
    CUkernel kernel;
    CUresult result;
    const char *call = "cuLibraryGetKernel";
    uint32_t smem = 0, ctas = spec->cluster[0] * spec->cluster[1] * spec->cluster[2];
    for (uint32_t k = 0; k < self->plan_object->plan.num_launches; k++) /* a kernel may be launched twice */
        if (strcmp(self->plan_object->plan.launches[k].kernel, spec->kernel) == 0 &&
            self->plan_object->plan.launches[k].smem > smem)
            smem = self->plan_object->plan.launches[k].smem;
    if (smem > self->device_facts[DEVICE_SMEM_OPTIN]) {
        PyErr_Format(driver_error, "%s needs %u bytes of shared memory, the device has %llu", spec->kernel, smem,
                     (unsigned long long)self->device_facts[DEVICE_SMEM_OPTIN]);
        return -1;
    }
    result = cuda->library_kernel(&kernel, self->library->library, spec->kernel);
    if (!result) {
        call = "cuKernelGetFunction";
        Py_BEGIN_ALLOW_THREADS
        result = cuda->kernel_function(&self->functions[i], kernel); /* loads the code onto the device */
        Py_END_ALLOW_THREADS
    }
    if (!result && smem) {
        call = "cuFuncSetAttribute(max dynamic shared memory)";
        result = cuda->function_set_attribute(self->functions[i], CU_FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)smem);
    }
    if (!result && ctas > 8) {
        call = "cuFuncSetAttribute(non-portable cluster size)";
        result = cuda->function_set_attribute(self->functions[i], CU_FUNC_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
    }
    return result ? raise_driver(cuda, call, result) : 0;
}

static int bind_device(LaunchObject *self) {
    const CudaDriver *cuda = &self->driver->cuda;
    static const int attributes[NUM_DEVICE_LEAVES] = {
        CU_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, CU_ATTRIBUTE_L2_CACHE_SIZE};
    CUdevice device;
    CUresult result;
    if (device_of_ordinal(self->driver, self->ordinal, &device)) return -1;
    for (int i = 0; i < NUM_DEVICE_LEAVES; i++) {
        int value;
        if (device_attribute(self->driver, device, attributes[i], &value)) return -1;
        self->device_facts[i] = (uint32_t)value;
    }
    if ((result = cuda->primary_context(&self->context, device)))
        return raise_driver(cuda, "cuDevicePrimaryCtxRetain", result);
    if ((result = cuda->context_push(self->context))) return raise_driver(cuda, "cuCtxPushCurrent", result);
    int failed = 0;
    for (uint32_t i = 0; i < self->plan_object->plan.num_launches && !failed; i++) failed = bind_kernel(self, i);
    CUcontext popped;
    cuda->context_pop(&popped);
    return failed;
}

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"driver", "plan", "library", "device", "stream_of", "device_type", NULL};
    PyObject *driver, *plan, *library, *stream_of;
    int ordinal, device_type = DEVICE_CUDA;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!iO|i:Launch", names, driver_type, &driver, plan_type, &plan,
                                     library_type, &library, &ordinal, &stream_of, &device_type))
        return NULL;
    LaunchObject *self = new_object(type);
    if (!self) return NULL;
    Py_INCREF(driver), Py_INCREF(plan), Py_INCREF(library), Py_INCREF(stream_of);
    self->driver = (DriverObject *)driver, self->plan_object = (PlanObject *)plan,
    self->library = (LibraryObject *)library;
    self->stream_of = stream_of, self->ordinal = ordinal, self->device_type = device_type;
    self->values = PyMem_Malloc(sizeof *self->values * (self->plan_object->plan.num_nodes + 1));
    for (uint32_t i = 0; i < self->plan_object->plan.num_args; i++)
        self->num_call_args += self->plan_object->plan.args[i].kind != ARG_DEVICE;
    self->leaves = PyMem_Malloc(sizeof *self->leaves * (self->plan_object->plan.num_leaves + 1));
    self->maps_memory =
        PyMem_Calloc(1, sizeof *self->maps * MAP_SLOTS * self->plan_object->plan.num_maps + _Alignof(MapSlot));
    self->maps = (MapSlot *)(((uintptr_t)self->maps_memory + _Alignof(MapSlot) - 1) & ~(_Alignof(MapSlot) - 1));
    self->block = PyMem_Calloc(1, self->plan_object->plan.block_bytes + 1);
    if (!self->values || !self->leaves || !self->maps_memory || !self->block)
        PyErr_NoMemory();
    else if (bind_device(self) == 0)
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Lists of integers, such as the used length of each sequence, are left out by passing one without an element. */
static int may_be_empty(const Arg *arg) { return arg->dtype == DTYPE_I32 || arg->dtype == DTYPE_I64; }

static int refuse_tensor(const LaunchObject *self, const Arg *arg, const TensorView *view) {
    if (view->dtype != (int32_t)arg->dtype)
        PyErr_Format(input_error, "%s is a %s tensor; this kernel takes %s", arg->name,
                     view->dtype < 0 ? "(unsupported dtype)" : DTYPE_NAMES[view->dtype], DTYPE_NAMES[arg->dtype]);
    else if (view->rank != (int32_t)arg->rank)
        PyErr_Format(input_error, "%s has %d dimensions, %u expected", arg->name, view->rank, arg->rank);
    else if (view->device_type != self->device_type ||
             (view->device_type == DEVICE_CUDA && view->device_id != self->ordinal))
        PyErr_Format(input_error,
                     "%s is on %s:%d; this kernel was chosen for %s:%d. All tensors must be on one device.", arg->name,
                     view->device_type == DEVICE_CUDA  ? "cuda"
                     : view->device_type == DEVICE_CPU ? "cpu"
                                                       : "another device type",
                     view->device_id, self->device_type == DEVICE_CUDA ? "cuda" : "cpu", self->ordinal);
    else {
        for (int32_t i = 0; i < view->rank; i++)
            if (view->shape[i] < 0 || (view->shape[i] == 0 && !may_be_empty(arg))) {
                PyErr_Format(input_error, "%s.shape[%d] = %lld: an empty tensor has nothing to launch", arg->name, i,
                             (long long)view->shape[i]);
                return -1;
            }
        if (view->pointer || is_empty(view)) return 0;
        PyErr_Format(input_error, "%s has no memory (a fake or meta tensor?)", arg->name);
    }
    return -1;
}

static int refuse_layout(const Arg *arg, uint32_t position) {
    PyObject *text = PyUnicode_FromFormat(
        "%s: the last stride must be 1, its pointer and other strides multiples of %u bytes, no stride 0", arg->name,
        arg->align);
    PyObject *error = text ? PyObject_CallFunction(layout_error, "OI", text, position) : NULL;
    if (error) PyErr_SetObject(layout_error, error);
    Py_XDECREF(text), Py_XDECREF(error);
    return -1;
}

static void write_tensor_leaves(const Arg *arg, const TensorView *view, uint64_t *leaves) {
    leaves += arg->first_leaf;
    leaves[0] = view->pointer;
    for (uint32_t i = 0; i < arg->rank; i++)
        leaves[1 + i] = (uint64_t)view->shape[i], leaves[1 + arg->rank + i] = (uint64_t)view->strides[i];
}

static int tensor_leaves(const LaunchObject *self, const Arg *arg, PyObject *object, uint32_t position,
                         uint32_t ways, uint64_t *leaves, const ExchangeApi **api) {
    TensorView view;
    const ExchangeApi *own = exchange_api(object);
    if (own ? view_from_exchange(object, own, &view) : view_from_attributes(object, &view)) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Format(input_error, "%s: %R is no tensor", arg->name, (PyObject *)Py_TYPE(object));
        return -1;
    }
    apply_view(&view, ways);
    if (refuse_tensor(self, arg, &view)) return -1;
    settle_free_strides(&view, arg->align);
    if (!layout_fits(&view, arg->align)) return refuse_layout(arg, position);
    if (own) *api = own;
    write_tensor_leaves(arg, &view, leaves);
    return 0;
}

/* Every leaf of the plan from the call's arguments (in the plan's order, device facts left out). `ways`: how
 * to see each argument (VIEW_), or NULL. `api`: of the last tensor. */
static int collect_leaves(const LaunchObject *self, PyObject *const *args, Py_ssize_t num_args, const uint8_t *ways,
                          uint64_t *leaves, const ExchangeApi **api) {
    const Plan *plan = &self->plan_object->plan;
    uint32_t position = 0;
    if (num_args != (Py_ssize_t)self->num_call_args) {
        PyErr_Format(input_error, "%zd arguments, the plan takes %u", num_args, self->num_call_args);
        return -1;
    }
    for (uint32_t i = 0; i < plan->num_args; i++) {
        const Arg *arg = &plan->args[i];
        int failed = 0;
        if (arg->kind == ARG_DEVICE)
            leaves[arg->first_leaf] = self->device_facts[arg->device_leaf];
        else if (arg->kind == ARG_TENSOR)
            failed = tensor_leaves(self, arg, args[position], position, ways ? ways[position] : 0, leaves, api),
            position++;
        else
            failed = scalar_word(args[position++], arg->dtype, arg->name, &leaves[arg->first_leaf]);
        if (failed) return -1;
    }
    return 0;
}

static int current_stream(const LaunchObject *self, const ExchangeApi *api, CUstream *stream) {
    void *handle = NULL;
    if (api && self->device_type == DEVICE_CUDA) {
        if (api->current_stream(DEVICE_CUDA, self->ordinal, &handle) == 0) return *stream = handle, 0;
        if (!PyErr_Occurred()) PyErr_SetString(driver_error, "the current stream cannot be read");
        return -1;
    }
    PyObject *number = PyObject_CallFunction(self->stream_of, "i", self->ordinal);
    if (!number) return -1;
    *stream = (CUstream)PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Leaves that node `root` depends on, one mark a leaf. */
static void mark_leaves(const Plan *plan, uint32_t root, uint8_t *used_nodes, uint8_t *used_leaves) {
    used_nodes[root] = 1;
    for (uint32_t i = root + 1; i-- > 0;) {
        const Node *node = &plan->nodes[i];
        uint32_t operands[3] = {node->a, node->b, node->c};
        if (!used_nodes[i]) continue;
        if (node->op == OP_IN) used_leaves[node->a] = 1;
        for (uint32_t k = 0; k < operand_count(node->op); k++) used_nodes[operands[k]] = 1;
    }
}

static int raise_guard(const Plan *plan, uint32_t guard, const uint64_t *leaves) {
    uint8_t used_leaves[MAX_LEAVES] = {0}, *used_nodes = PyMem_Calloc(plan->num_nodes + 1, 1);
    char name[200], facts[1024] = "";
    size_t length = 0;
    if (!used_nodes) return PyErr_NoMemory(), -1;
    mark_leaves(plan, plan->guards[guard].node, used_nodes, used_leaves);
    PyMem_Free(used_nodes);
    for (uint32_t i = 0; i < plan->num_leaves && length < sizeof facts - 1; i++) {
        if (!used_leaves[i]) continue;
        uint32_t type = leaf_type(plan, i);
        leaf_name(plan, i, name, sizeof name);
        length += (size_t)(is_integer(type)
                               ? snprintf(facts + length, sizeof facts - length, "%s%s = %lld", length ? ", " : "",
                                          name, (long long)sign_extend(leaves[i], TYPE_BITS[type]))
                               : snprintf(facts + length, sizeof facts - length, "%s%s = %g", length ? ", " : "", name,
                                          type == TYPE_F32 ? (double)as_f32(leaves[i]) : as_f64(leaves[i])));
    }
    PyErr_Format(input_error, "%s (here: %s)", plan->guards[guard].message, facts);
    return -1;
}

static int raise_map(const LaunchObject *self, const LaunchSpec *spec, const Map *map, CUresult result) {
    uint64_t dims[5], strides[4];
    char text[600];
    size_t length = 0;
    plan_map_numbers(map, self->values, dims, strides);
    length += (size_t)snprintf(text, sizeof text, "cuTensorMapEncodeTiled for %.120s: address 0x%llx, extents",
                               spec->kernel, (unsigned long long)self->values[map->addr]);
    for (uint32_t k = 0; k < map->rank; k++)
        length += (size_t)snprintf(text + length, sizeof text - length, " %llu", (unsigned long long)dims[k]);
    length += (size_t)snprintf(text + length, sizeof text - length, ", strides in bytes");
    for (uint32_t k = 0; k + 1 < map->rank; k++)
        length += (size_t)snprintf(text + length, sizeof text - length, " %llu", (unsigned long long)strides[k]);
    return raise_driver(&self->driver->cuda, text, result);
}

/* The tensor map of the node values. Callers come with the same few addresses again, so the last ones are kept. */
static CUresult write_map(LaunchObject *self, uint32_t index, unsigned char *out) {
    const Map *map = &self->plan_object->plan.maps[index];
    uint64_t address = self->values[map->addr], dims[5] = {0}, strides[4] = {0};
    uint64_t place = (address >> 4) * 0x9E3779B97F4A7C15u >> 61; /* of MAP_SLOTS */
    MapSlot *slot = &self->maps[index * MAP_SLOTS + place];
    plan_map_numbers(map, self->values, dims, strides);
    if (!slot->is_made || slot->address != address || memcmp(slot->dims, dims, sizeof dims) ||
        memcmp(slot->strides, strides, sizeof strides)) {
        slot->is_made = 0;
        CUresult result = self->driver->cuda.map_encode(
            &slot->map, MAP_DTYPE_ENUM[map->dtype], map->rank, (void *)(uintptr_t)address, dims, strides, map->box,
            map->elem_strides, (int)map->interleave, (int)map->swizzle, (int)map->l2_promotion, (int)map->oob_nan);
        if (result) return result;
        slot->address = address, slot->is_made = 1;
        memcpy(slot->dims, dims, sizeof dims), memcpy(slot->strides, strides, sizeof strides);
    }
    memcpy(out, &slot->map, sizeof slot->map);
    return 0;
}

/* Write the parameters of launch `i` to their places in `block` and point at them. The context is current. What cannot
 * have changed since the last call is taken from self->block. */
static int write_params(LaunchObject *self, uint32_t i, unsigned char *block, void **pointers) {
    const Plan *plan = &self->plan_object->plan;
    const LaunchSpec *spec = &plan->launches[i];
    uint32_t least = self->written_launches >> i & 1 ? DEPENDS_POINTER : DEPENDS_NOTHING;
    for (uint32_t p = spec->first_param; p < spec->first_param + spec->num_params; p++) {
        const Param *param = &plan->params[p];
        pointers[p] = block + param->place;
        if (param->kind == PARAM_BYTES) {
            unsigned char *kept = self->block + param->place;
            if (param->depends >= least) plan_write_bytes(plan, param, self->values, kept);
            memcpy(pointers[p], kept, param->size);
            continue;
        }
        CUresult result = write_map(self, param->first, pointers[p]);
        if (result) return raise_map(self, spec, &plan->maps[param->first], result);
    }
    self->written_launches |= 1u << i;
    return 0;
}

/* 1 when there is something to launch, 0 for an empty grid, -1 with an exception. */
static int read_grid(const LaunchObject *self, const LaunchSpec *spec, unsigned grid[3]) {
    static const int64_t limits[3] = {2147483647, 65535, 65535};
    int64_t numbers[3];
    for (int k = 0; k < 3; k++) numbers[k] = node_signed(&self->plan_object->plan, self->values, spec->grid[k]);
    if (numbers[0] == 0 || numbers[1] == 0 || numbers[2] == 0) return 0;
    for (int k = 0; k < 3; k++) {
        if (numbers[k] < 0 || numbers[k] > limits[k]) {
            PyErr_Format(input_error,
                         "%s: a grid of (%lld, %lld, %lld) blocks is over the limit of (2147483647, 65535, 65535); "
                         "make the problem smaller",
                         spec->kernel, (long long)numbers[0], (long long)numbers[1], (long long)numbers[2]);
            return -1;
        }
        grid[k] = (unsigned)numbers[k];
    }
    return 1;
}

static unsigned write_attributes(const LaunchSpec *spec, CUlaunchAttribute *attributes) {
    unsigned count = 0;
    memset(attributes, 0, 3 * sizeof *attributes);
    if (spec->cluster[0] * spec->cluster[1] * spec->cluster[2] > 1) {
        attributes[count].id = CU_LAUNCH_CLUSTER_DIMENSION;
        memcpy(attributes[count++].value.cluster, spec->cluster, sizeof spec->cluster);
    }
    if (spec->flags & FLAG_PDL)
        attributes[count].id = CU_LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION, attributes[count++].value.number = 1;
    if (spec->flags & FLAG_COOPERATIVE)
        attributes[count].id = CU_LAUNCH_COOPERATIVE, attributes[count++].value.number = 1;
    return count;
}

typedef struct {
    CUlaunchConfig config;
    CUlaunchAttribute attributes[3];
    uint32_t launch;
} Prepared;

/* Build and launch everything; the device's context is current and the interpreter lock is held. */
static int launch_all(LaunchObject *self, CUstream stream, unsigned char *block) {
    const Plan *plan = &self->plan_object->plan;
    Prepared prepared[MAX_LAUNCHES];
    void *pointers[MAX_PARAMS + 1];
    uint32_t count = 0;
    CUresult result = 0;
    for (uint32_t i = 0; i < plan->num_launches; i++) {
        const LaunchSpec *spec = &plan->launches[i];
        Prepared *next = &prepared[count];
        unsigned grid[3];
        int any = read_grid(self, spec, grid);
        if (any < 0 || (any && write_params(self, i, block, pointers))) return -1;
        if (!any) continue;
        next->launch = i;
        next->config = (CUlaunchConfig){
            grid[0],        grid[1],    grid[2], spec->block[0],   spec->block[1],
            spec->block[2], spec->smem, stream,  next->attributes, write_attributes(spec, next->attributes)};
        count++;
    }
    uint32_t i = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; i < count; i++) {
        uint32_t launch = prepared[i].launch;
        result = self->driver->cuda.launch(&prepared[i].config, self->functions[launch],
                                           pointers + plan->launches[launch].first_param, NULL);
        if (result) break;
    }
    Py_END_ALLOW_THREADS
    if (!result) return 0;
    char call[200];
    snprintf(call, sizeof call, "cuLaunchKernelEx of %.150s", plan->launches[prepared[i].launch].kernel);
    return raise_driver(&self->driver->cuda, call, result);
}

static int launch_in_context(LaunchObject *self, CUstream stream) {
    const CudaDriver *cuda = &self->driver->cuda;
    const Plan *plan = &self->plan_object->plan;
    _Alignas(BLOCK_ALIGN) unsigned char stack_block[STACK_BLOCK_BYTES];
    unsigned char *heap_block = NULL, *block = stack_block;
    CUcontext current = NULL, popped;
    if (plan->block_bytes > STACK_BLOCK_BYTES) {
        heap_block = PyMem_Malloc((size_t)plan->block_bytes + BLOCK_ALIGN);
        if (!heap_block) return PyErr_NoMemory(), -1;
        block = (unsigned char *)(((uintptr_t)heap_block + BLOCK_ALIGN - 1) & ~(uintptr_t)(BLOCK_ALIGN - 1));
    }
    CUresult result = cuda->context_current(&current);
    int pushed = !result && current != self->context;
    if (pushed) result = cuda->context_push(self->context);
    int failed = result ? raise_driver(cuda, "cuCtxPushCurrent", result) : launch_all(self, stream, block);
    if (pushed && !result) cuda->context_pop(&popped);
    PyMem_Free(heap_block);
    return failed;
}

/* Bring `values` up to date for these leaves: -1, or the first guard that is false. Calls often repeat a problem with
 * other pointers: then little is computed. */
static int64_t evaluate_leaves(LaunchObject *self, const uint64_t *leaves) {
    const Plan *plan = &self->plan_object->plan;
    int is_same = self->is_evaluated && same_problem(plan, leaves, self->leaves);
    if (is_same)
        plan_evaluate_part(plan, DEPENDS_POINTER, leaves, self->values);
    else
        plan_evaluate(plan, leaves, self->values), self->written_launches = 0;
    memcpy(self->leaves, leaves, sizeof *leaves * plan->num_leaves);
    int64_t failed = plan_failed_guard(plan, self->values, is_same ? DEPENDS_POINTER : DEPENDS_NOTHING);
    self->is_evaluated = failed < 0;
    return failed;
}

/* Evaluate, check, launch. From here to the launch no Python code runs, so `values` is ours. */
static int launch_evaluated(LaunchObject *self, const uint64_t *leaves, CUstream stream) {
    LOCK(self->mutex);
    int64_t failed = evaluate_leaves(self, leaves);
    int result = failed >= 0 ? raise_guard(&self->plan_object->plan, (uint32_t)failed, leaves)
                             : launch_in_context(self, stream);
    UNLOCK(self->mutex);
    return result;
}

static int launch_arguments(LaunchObject *self, PyObject *const *args, Py_ssize_t num_args, const uint8_t *ways) {
    uint64_t leaves[MAX_LEAVES];
    const ExchangeApi *api = NULL;
    CUstream stream;
    if (collect_leaves(self, args, num_args, ways, leaves, &api) || current_stream(self, api, &stream)) return -1;
    return launch_evaluated(self, leaves, stream);
}

static PyObject *launch_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    if (launch_arguments((LaunchObject *)object, args, num_args, NULL)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *launch_leaves(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    LaunchObject *self = (LaunchObject *)object;
    const Plan *plan = &self->plan_object->plan;
    uint64_t leaves[MAX_LEAVES];
    const ExchangeApi *api = NULL;
    char name[512];
    if (collect_leaves(self, args, num_args, NULL, leaves, &api)) return NULL;
    PyObject *named = PyDict_New();
    for (uint32_t i = 0; named && i < plan->num_leaves; i++) {
        uint32_t type = leaf_type(plan, i);
        PyObject *value = type == TYPE_F32   ? PyFloat_FromDouble((double)as_f32(leaves[i]))
                          : type == TYPE_F64 ? PyFloat_FromDouble(as_f64(leaves[i]))
                                             : PyLong_FromLongLong(sign_extend(leaves[i], TYPE_BITS[type]));
        leaf_name(plan, i, name, sizeof name);
        if (!value || PyDict_SetItemString(named, name, value)) Py_CLEAR(named);
        Py_XDECREF(value);
    }
    return named;
}

static PyMethodDef launch_methods[] = {{"run", (PyCFunction)(void (*)(void))launch_run, METH_FASTCALL,
                                        "run(*arguments): check, evaluate, launch on the current stream"},
                                       {"leaves", (PyCFunction)(void (*)(void))launch_leaves, METH_FASTCALL,
                                        "leaves(*arguments) -> dict: what the plan would be evaluated on"},
                                       {NULL, NULL, 0, NULL}};

#include "_calls.h"

/* ---- module ------------------------------------------------------------------------------------------------------ */

static PyObject *use_errors(PyObject *module, PyObject *args) {
    PyObject *classes[4], **places[4] = {&input_error, &layout_error, &driver_error, &plan_error};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOO:use_errors", &classes[0], &classes[1], &classes[2], &classes[3])) return NULL;
    for (int i = 0; i < 4; i++) {
        Py_INCREF(classes[i]);
        Py_XDECREF(__atomic_exchange_n(places[i], classes[i], __ATOMIC_ACQ_REL));
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"use_errors", use_errors, METH_VARARGS, "use_errors(input, layout, driver, plan): exception classes to raise"},
    {NULL, NULL, 0, NULL}};

static PyObject *not_creatable(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)type, (void)args, (void)kwargs;
    return PyErr_SetString(PyExc_TypeError, "made by a method of another type"), NULL;
}

#define TYPE(variable, label, object, create, destroy, methods)                                                  \
    static PyType_Slot variable##_slots[] = {                                                                    \
        {Py_tp_new, (void *)create}, {Py_tp_dealloc, (void *)destroy}, {Py_tp_methods, methods}, {0, NULL}};     \
    static PyType_Spec variable##_spec = {"fa4_kernels._launcher." label, sizeof(object), 0, Py_TPFLAGS_DEFAULT, \
                                          variable##_slots}
static PyMethodDef library_methods[] = {{NULL, NULL, 0, NULL}};
TYPE(driver, "Driver", DriverObject, driver_new, free_object, driver_methods);
TYPE(library, "Library", LibraryObject, not_creatable, free_object, library_methods);
TYPE(plan, "Plan", PlanObject, plan_new, plan_dealloc, plan_methods);
TYPE(launch, "Launch", LaunchObject, launch_new, launch_dealloc, launch_methods);
TYPE(forward_calls, "ForwardCalls", CallsObject, calls_new, calls_dealloc, forward_methods);
TYPE(recipe_calls, "RecipeCalls", CallsObject, calls_new, calls_dealloc, recipe_methods);
TYPE(bound_forward, "BoundForward", BoundForward, not_creatable, bound_forward_dealloc, library_methods);
TYPE(bound_recipe, "BoundRecipe", BoundRecipe, not_creatable, bound_recipe_dealloc, library_methods);

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT,
                                               "_launcher",
                                               "Loads cubins and launches kernels from launch plans.",
                                               -1,
                                               module_methods,
                                               NULL,
                                               NULL,
                                               NULL,
                                               NULL};

/* A launcher for one kind of interpreter in the other: objects lie differently there, so nothing may be touched. The
 * free-threaded launcher needs functions that others lack, which the loader of libraries refuses; this is the reverse,
 * which file names do not exclude: free-threaded Python 3.13 looks for *.abi3.so too. */
static int refuse_interpreter(void) {
#ifndef Py_GIL_DISABLED
    void *process = dlopen(NULL, RTLD_NOW);
    int is_free_threaded = process && dlsym(process, "PyUnstable_Module_SetGIL");
    if (process) dlclose(process);
    if (is_free_threaded) {
        PyErr_SetString(PyExc_ImportError, "it is for Python with an interpreter lock, and this one is free-threaded");
        return -1;
    }
#endif
    return 0;
}

__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit__launcher(void) {
    struct {
        PyObject **place;
        PyType_Spec *spec;
        const char *name;
    } types[] = {{&driver_type, &driver_spec, "Driver"},
                 {&library_type, &library_spec, "Library"},
                 {&plan_type, &plan_spec, "Plan"},
                 {&launch_type, &launch_spec, "Launch"},
                 {&forward_calls_type, &forward_calls_spec, "ForwardCalls"},
                 {&recipe_calls_type, &recipe_calls_spec, "RecipeCalls"},
                 {&bound_forward_type, &bound_forward_spec, "BoundForward"},
                 {&bound_recipe_type, &bound_recipe_spec, "BoundRecipe"}};
    if (refuse_interpreter()) return NULL;
    input_error = layout_error = plan_error = PyExc_ValueError, driver_error = PyExc_RuntimeError;
    Py_INCREF(input_error), Py_INCREF(layout_error), Py_INCREF(driver_error), Py_INCREF(plan_error);
    if (tensor_names_init()) return NULL;
    PyObject *module = PyModule_Create(&module_definition);
#ifdef Py_GIL_DISABLED
    if (module && PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED)) Py_CLEAR(module);
#endif
    for (size_t i = 0; module && i < sizeof types / sizeof *types; i++) {
        *types[i].place = PyType_FromSpec(types[i].spec);
        Py_XINCREF(*types[i].place); /* AddObject takes one, the static variable keeps one */
        if (!*types[i].place || PyModule_AddObject(module, types[i].name, *types[i].place)) Py_CLEAR(module);
    }
    return module;
}
