/* Reading torch tensors: pointer, extents, strides, dtype and device, without a Python object per number where
 * possible.
 *
 * Two ways. The DLPack C exchange API (DLPack 1.2 and later; torch 2.10 and later), found as a capsule on the tensor's
 * type: one C call fills a struct that borrows the tensor's own arrays. Otherwise attribute calls: data_ptr(), shape,
 * stride(), dtype, get_device(). Struct layouts: dlpack.h of DLPack 1.3, Apache-2.0, restated here. */
#ifndef FA4_TENSOR_H
#define FA4_TENSOR_H

#include "_plan.h"

/* The caches below belong to whoever holds the interpreter lock; without one, each thread has its own. */
#ifdef Py_GIL_DISABLED
#define CACHE static _Thread_local
#else
#define CACHE static
#endif

enum { DEVICE_CPU = 1, DEVICE_CUDA = 2 }; /* DLDeviceType */
#define DLPACK_MAJOR 1u

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct ExchangeApi {
    uint32_t major, minor;
    struct ExchangeApi *previous; /* of an older major version */
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, DLTensor *out);
    int (*current_stream)(int device_type, int32_t device_id, void **stream);
} ExchangeApi;

typedef struct {
    uint64_t pointer;
    int32_t device_type, device_id, rank;
    int32_t dtype; /* DTYPE_, or -1 for one that no kernel takes */
    int64_t shape[MAX_RANK], strides[MAX_RANK];
} TensorView;

/* Type objects whose capsule was looked up; `api` NULL means that the type has none. Types are kept alive. */
enum { NUM_CACHED_TYPES = 8, NUM_CACHED_DTYPES = 32 };
CACHE struct {
    PyObject *type;
    const ExchangeApi *api;
} cached_types[NUM_CACHED_TYPES];
CACHE struct {
    PyObject *object;
    int32_t dtype;
} cached_dtypes[NUM_CACHED_DTYPES];
static PyObject *name_exchange_api, *name_data_ptr, *name_shape, *name_stride, *name_dtype, *name_get_device;
static PyObject *name_requires_grad, *name_fill, *name_current_level;

static int tensor_names_init(void) {
    name_exchange_api = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    name_shape = PyUnicode_InternFromString("shape");
    name_stride = PyUnicode_InternFromString("stride");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_get_device = PyUnicode_InternFromString("get_device");
    name_requires_grad = PyUnicode_InternFromString("requires_grad");
    name_fill = PyUnicode_InternFromString("fill_");
    name_current_level = PyUnicode_InternFromString("_current_level");
    return PyErr_Occurred() ? -1 : 0;
}

/* The exchange API of a type, of the major version known here, or NULL (never an error: the other way remains). */
static const ExchangeApi *find_exchange_api(PyObject *type) {
    const ExchangeApi *api = NULL;
    PyObject *capsule = PyObject_GetAttr(type, name_exchange_api);
    if (capsule) {
        if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
            api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        Py_DECREF(capsule);
    }
    PyErr_Clear();
    while (api && api->major != DLPACK_MAJOR) api = api->previous;
    return api && api->tensor_from_object && api->current_stream ? api : NULL;
}

static const ExchangeApi *exchange_api(PyObject *tensor) {
    CACHE uint32_t next_slot;
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    for (uint32_t i = 0; i < NUM_CACHED_TYPES; i++)
        if (cached_types[i].type == type) return cached_types[i].api;
    const ExchangeApi *api = find_exchange_api(type);
    uint32_t slot = next_slot++ % NUM_CACHED_TYPES;
    PyObject *old = cached_types[slot].type;
    Py_INCREF(type);
    cached_types[slot].type = type, cached_types[slot].api = api;
    Py_XDECREF(old);
    return api;
}

static int32_t dtype_from_dlpack(uint8_t code, uint8_t bits, uint16_t lanes) {
    static const struct {
        uint8_t code, bits;
        int32_t dtype;
    } table[] = {{4, 16, DTYPE_BF16}, {2, 16, DTYPE_F16},  {2, 32, DTYPE_F32}, {2, 64, DTYPE_F64}, {10, 8, DTYPE_E4M3},
                 {12, 8, DTYPE_E5M2}, {14, 8, DTYPE_E8M0}, {0, 8, DTYPE_I8},   {0, 16, DTYPE_I16}, {0, 32, DTYPE_I32},
                 {0, 64, DTYPE_I64},  {1, 8, DTYPE_U8},    {1, 16, DTYPE_U16}, {1, 32, DTYPE_U32}, {1, 64, DTYPE_U64}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].code == code && table[i].bits == bits && lanes == 1) return table[i].dtype;
    return -1;
}

/* dtype objects are told apart by what they print as: `torch.bfloat16`. Each object is looked at once. */
static int32_t dtype_from_object(PyObject *object) {
    CACHE uint32_t next_slot;
    for (uint32_t i = 0; i < NUM_CACHED_DTYPES; i++)
        if (cached_dtypes[i].object == object) return cached_dtypes[i].dtype;
    PyObject *text = PyObject_Str(object);
    const char *name = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    int32_t dtype = -1;
    if (!name) {
        Py_XDECREF(text);
        return -2;
    }
    if (strncmp(name, "torch.", 6) == 0)
        for (int32_t i = 0; i < NUM_DTYPES; i++)
            if (strcmp(name + 6, DTYPE_NAMES[i]) == 0) dtype = i;
    Py_DECREF(text);
    uint32_t slot = next_slot++ % NUM_CACHED_DTYPES;
    PyObject *old = cached_dtypes[slot].object;
    Py_INCREF(object);
    cached_dtypes[slot].object = object, cached_dtypes[slot].dtype = dtype;
    Py_XDECREF(old);
    return dtype;
}

static int view_from_exchange(PyObject *tensor, const ExchangeApi *api, TensorView *view) {
    DLTensor borrowed = {0};
    if (api->tensor_from_object(tensor, &borrowed)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_BufferError, "the tensor cannot be read through DLPack");
        return -1;
    }
    view->pointer = (uint64_t)(uintptr_t)borrowed.data + borrowed.byte_offset;
    view->device_type = borrowed.device_type, view->device_id = borrowed.device_id;
    view->dtype = dtype_from_dlpack(borrowed.code, borrowed.bits, borrowed.lanes);
    view->rank = borrowed.ndim;
    if (borrowed.ndim < 0 || borrowed.ndim > (int32_t)MAX_RANK) return 0; /* the caller refuses the rank */
    int64_t dense = 1;
    for (int32_t i = borrowed.ndim - 1; i >= 0; i--) {
        view->shape[i] = borrowed.shape[i];
        view->strides[i] = borrowed.strides ? borrowed.strides[i] : dense;
        dense = (int64_t)((uint64_t)dense * (uint64_t)borrowed.shape[i]);
    }
    return 0;
}

/* Numbers of a tuple into `out`; the count, or -1 with an exception. More than MAX_RANK are counted, not read. */
static int32_t numbers_from_tuple(PyObject *tuple, int64_t *out) {
    Py_ssize_t count = tuple && PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    if (count < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "shape and stride() must be tuples");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count && i < (Py_ssize_t)MAX_RANK; i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == -1 && PyErr_Occurred()) return -1;
    }
    return count > 1000 ? 1000 : (int32_t)count;
}

static int view_from_attributes(PyObject *tensor, TensorView *view) {
    PyObject *pointer = PyObject_CallMethodObjArgs(tensor, name_data_ptr, NULL);
    PyObject *shape = pointer ? PyObject_GetAttr(tensor, name_shape) : NULL;
    PyObject *strides = shape ? PyObject_CallMethodObjArgs(tensor, name_stride, NULL) : NULL;
    PyObject *dtype = strides ? PyObject_GetAttr(tensor, name_dtype) : NULL;
    PyObject *device = dtype ? PyObject_CallMethodObjArgs(tensor, name_get_device, NULL) : NULL;
    int result = -1;
    if (device) {
        long ordinal = PyLong_AsLong(device);
        int32_t num_strides = numbers_from_tuple(strides, view->strides);
        view->rank = num_strides < 0 ? -1 : numbers_from_tuple(shape, view->shape);
        view->pointer = PyLong_AsUnsignedLongLongMask(pointer);
        view->device_type = ordinal < 0 ? DEVICE_CPU : DEVICE_CUDA;
        view->device_id = ordinal < 0 ? 0 : (int32_t)ordinal;
        view->dtype = PyErr_Occurred() ? -2 : dtype_from_object(dtype);
        if (!PyErr_Occurred() && view->rank != num_strides)
            PyErr_SetString(PyExc_TypeError, "shape and stride() differ in length");
        result = PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(pointer), Py_XDECREF(shape), Py_XDECREF(strides), Py_XDECREF(dtype), Py_XDECREF(device);
    return result;
}

static int is_empty(const TensorView *view) {
    for (int32_t i = 0; i < view->rank; i++)
        if (view->shape[i] == 0) return 1;
    return 0;
}

/* Swap the last two modes, as `.transpose(-1, -2)` does. */
static void transpose_view(TensorView *view) {
    int32_t last = view->rank - 1;
    if (last < 1 || last >= (int32_t)MAX_RANK) return;
    int64_t extent = view->shape[last], stride = view->strides[last];
    view->shape[last] = view->shape[last - 1], view->strides[last] = view->strides[last - 1];
    view->shape[last - 1] = extent, view->strides[last - 1] = stride;
}

/* Other ways to see a tensor, in the order in which they are applied. */
enum {
    VIEW_MERGED = 2,    /* the first two modes as one, as `.flatten(0, 1)` */
    VIEW_LED = 4,       /* a mode of extent 1 before all, as `.unsqueeze(0)` */
    VIEW_TRANSPOSED = 1 /* the last two modes swapped */
};

/* True where the first two modes can be seen as one. */
static int can_merge(const TensorView *view) {
    return view->rank >= 2 && view->rank <= (int32_t)MAX_RANK &&
           (view->shape[0] == 1 || view->shape[1] == 1 || view->strides[0] == view->shape[1] * view->strides[1]);
}

static void merge_view(TensorView *view) {
    if (view->shape[1] == 1) view->strides[1] = view->strides[0];
    view->shape[1] *= view->shape[0];
    view->rank--;
    memmove(view->shape, view->shape + 1, sizeof *view->shape * (size_t)view->rank);
    memmove(view->strides, view->strides + 1, sizeof *view->strides * (size_t)view->rank);
}

static void lead_view(TensorView *view) {
    memmove(view->shape + 1, view->shape, sizeof *view->shape * (size_t)view->rank);
    memmove(view->strides + 1, view->strides, sizeof *view->strides * (size_t)view->rank);
    view->shape[0] = 1, view->strides[0] = view->shape[1] * view->strides[1], view->rank++;
}

/* See the tensor as `ways` (VIEW_) say, which fit it. */
static void apply_view(TensorView *view, uint32_t ways) {
    if (ways & VIEW_MERGED && can_merge(view)) merge_view(view);
    if (ways & VIEW_LED && view->rank >= 1 && view->rank < (int32_t)MAX_RANK) lead_view(view);
    if (ways & VIEW_TRANSPOSED) transpose_view(view);
}

/* A mode of extent 1 may carry any stride: give it the one of a dense tensor, rounded up to the argument's alignment,
 * so that neither guards nor the driver see a number that no kernel uses. */
static void settle_free_strides(TensorView *view, uint32_t align) {
    uint32_t item = DTYPE_BYTES[view->dtype];
    int64_t unit = align > item ? align / item : 1;
    for (int32_t i = view->rank - 1; i >= 0; i--) {
        if (view->shape[i] != 1) continue;
        int64_t dense = 1;
        if (i + 1 < view->rank && __builtin_mul_overflow(view->shape[i + 1], view->strides[i + 1], &dense))
            dense = unit;
        if (i + 1 < view->rank && dense % unit) dense += unit - dense % unit;
        view->strides[i] = dense > 0 ? dense : unit;
    }
}

/* True when the kernel can read the tensor where it lies: last stride 1; pointer and other strides aligned, none 0. Of
 * a tensor without an element nothing is read. */
static int layout_fits(const TensorView *view, uint32_t align) {
    uint64_t item = DTYPE_BYTES[view->dtype];
    if (is_empty(view)) return 1;
    int fits = view->pointer % align == 0 && view->strides[view->rank - 1] == 1;
    for (int32_t i = 0; i + 1 < view->rank; i++)
        fits &= view->shape[i] == 1 || (view->strides[i] > 0 && ((uint64_t)view->strides[i] * item) % align == 0);
    return fits;
}

#endif
