/* Whole calls that were seen before, answered in C: look up, allocate, launch. Part of _launcher.c.
 *
 * ForwardCalls answers `flash_attn_func`, by dtype, head dims, device and mask (and by extents, where a kernel is for
 * some alone). RecipeCalls answers `call` and packed attention, by the dtypes, shapes and devices of all tensors and
 * the values of all scalars. `run` returns None for everything it was not told, or that asks for a check, a copy, a
 * gradient or an error: the Python code beside it then does the whole call, so nothing is decided here. `add` passes
 * over launches that are not this launcher's, which stand for it in tests.
 *
 * Both are tables of SLOTS places, WAYS of them for a hash: a call too many takes the place of another, which Python
 * then answers. What a call uses is held by a reference until it ends, since allocating can run Python code that clears
 * the table, and where there is no interpreter lock, other threads can.
 */
#ifndef FA4_CALLS_H
#define FA4_CALLS_H

#define SLOTS 256u
#define WAYS 4u
#define MAX_VALUES 64u
#define WINDOW_UNBOUNDED (1ll << 30) /* abi.py */
#define FLT_MIN __FLT_MIN__
#define FLT_MAX __FLT_MAX__

typedef struct {
    uint64_t hash;
    PyObject *bound; /* BoundForward or BoundRecipe, or NULL */
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *tensor_type, *is_grad_enabled;
    PyObject *observers; /* ((count, allows or None), ...), see _launcher.pyi */
    PyObject *levels;    /* has `_current_level`: at least 0 while tensors may have tangents; or None */
    MUTEX(mutex) /* of the slots */
    Slot slots[SLOTS];
} CallsObject;

static PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tensor_type", "is_grad_enabled", "observers", "levels", NULL};
    PyObject *tensor_type, *is_grad_enabled, *observers = NULL, *levels = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O!O:Calls", names, &tensor_type, &is_grad_enabled,
                                     &PyTuple_Type, &observers, &levels))
        return NULL;
    for (Py_ssize_t i = 0; observers && i < PyTuple_Size(observers); i++) {
        PyObject *pair = PyTuple_GetItem(observers, i);
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2)
            return PyErr_SetString(PyExc_TypeError, "an observer is a pair"), NULL;
    }
    CallsObject *self = new_object(type);
    if (!self) return NULL;
    Py_INCREF(tensor_type), Py_INCREF(is_grad_enabled), Py_XINCREF(observers), Py_INCREF(levels);
    self->tensor_type = tensor_type, self->is_grad_enabled = is_grad_enabled;
    self->observers = observers, self->levels = levels;
    return (PyObject *)self;
}

/* Takes the reference to `bound`. */
static void calls_keep(CallsObject *self, uint64_t hash, PyObject *bound) {
    Slot *slot = NULL;
    LOCK(self->mutex);
    for (uint64_t i = 0; i < WAYS && (!slot || slot->hash != hash); i++) {
        Slot *candidate = &self->slots[(hash + i) % SLOTS];
        if ((!slot && !candidate->bound) || (candidate->bound && candidate->hash == hash)) slot = candidate;
    }
    if (!slot) slot = &self->slots[(hash + (hash >> 32) % WAYS) % SLOTS];
    PyObject *old = slot->bound;
    slot->hash = hash, slot->bound = bound;
    UNLOCK(self->mutex);
    Py_XDECREF(old);
}

/* What is kept under a hash (a new reference), or NULL; the caller compares the key itself. */
static PyObject *calls_find(CallsObject *self, uint64_t hash) {
    PyObject *bound = NULL;
    LOCK(self->mutex);
    for (uint64_t i = 0; i < WAYS && !bound; i++) {
        const Slot *slot = &self->slots[(hash + i) % SLOTS];
        if (slot->hash == hash) bound = slot->bound;
    }
    Py_XINCREF(bound);
    UNLOCK(self->mutex);
    return bound;
}

static PyObject *calls_clear(PyObject *object, PyObject *unused) {
    CallsObject *self = (CallsObject *)object;
    (void)unused;
    for (uint64_t i = 0; i < SLOTS; i++) {
        LOCK(self->mutex);
        PyObject *old = self->slots[i].bound;
        self->slots[i].bound = NULL;
        UNLOCK(self->mutex);
        Py_XDECREF(old);
    }
    Py_RETURN_NONE;
}

static void calls_dealloc(PyObject *object) {
    CallsObject *self = (CallsObject *)object;
    for (uint32_t i = 0; i < SLOTS; i++) Py_XDECREF(self->slots[i].bound);
    Py_XDECREF(self->tensor_type), Py_XDECREF(self->is_grad_enabled);
    Py_XDECREF(self->observers), Py_XDECREF(self->levels);
    free_object(object);
}

static uint64_t hash_word(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32; /* the low bits, which choose the slot, depend on all of the word */
}

/* 1 if the object is a plain torch tensor that could be read, else 0 without an exception. */
static int view_of_plain(const CallsObject *self, PyObject *object, TensorView *view, const ExchangeApi **api) {
    if ((PyObject *)Py_TYPE(object) != self->tensor_type) return 0;
    *api = exchange_api(object);
    if (*api && view_from_exchange(object, *api, view) == 0) return view->rank >= 0 && view->rank <= (int32_t)MAX_RANK;
    PyErr_Clear();
    return 0;
}

/* ---- allocating -------------------------------------------------------------------------------------------------- */

/* How to make one dense tensor. `empty_strided` (sizes, strides, dtype) -> tensor on the current device skips torch's
 * dispatcher, or is None; `new_empty` (sizes) is the documented way. */
typedef struct {
    PyObject *empty_strided, *new_empty, *dtype;
    MUTEX(mutex)
    PyObject *sizes, *arguments; /* of the last tensor: sizes, and (sizes, strides, dtype) */
    int64_t shape[MAX_RANK];
    int32_t rank;
} Maker;

static void maker_clear(Maker *maker) {
    Py_XDECREF(maker->empty_strided), Py_XDECREF(maker->new_empty), Py_XDECREF(maker->dtype);
    Py_XDECREF(maker->sizes), Py_XDECREF(maker->arguments);
}

/* From (empty_strided, new_empty, dtype). */
static int maker_from_tuple(Maker *maker, PyObject *tuple) {
    PyObject *parts[3];
    if (!PyArg_ParseTuple(tuple, "OOO:maker", &parts[0], &parts[1], &parts[2])) return -1;
    for (int i = 0; i < 3; i++) Py_INCREF(parts[i]);
    maker->empty_strided = parts[0], maker->new_empty = parts[1], maker->dtype = parts[2], maker->rank = -1;
    return 0;
}

static PyObject *tuple_of_numbers(const int64_t *numbers, int32_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (int32_t i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (!number || PyTuple_SetItem(tuple, i, number)) Py_CLEAR(tuple);
    }
    return tuple;
}

/* New references to the sizes and to all arguments of a shape; those of the last one serve again if it is the same. */
static int maker_arguments(Maker *maker, const int64_t *shape, int32_t rank, PyObject **sizes, PyObject **arguments) {
    int64_t strides[MAX_RANK], step = 1;
    LOCK(maker->mutex);
    int is_same = maker->rank == rank && memcmp(maker->shape, shape, sizeof *shape * (size_t)rank) == 0;
    *sizes = is_same ? maker->sizes : NULL, *arguments = is_same ? maker->arguments : NULL;
    Py_XINCREF(*sizes), Py_XINCREF(*arguments);
    UNLOCK(maker->mutex);
    if (is_same) return 0;
    for (int32_t i = rank - 1; i >= 0; i--) {
        strides[i] = step;
        step = (int64_t)((uint64_t)step * (uint64_t)(shape[i] > 1 ? shape[i] : 1));
    }
    PyObject *steps = tuple_of_numbers(strides, rank);
    *sizes = tuple_of_numbers(shape, rank);
    *arguments = *sizes && steps ? PyTuple_Pack(3, *sizes, steps, maker->dtype) : NULL;
    Py_XDECREF(steps);
    if (!*arguments) {
        Py_CLEAR(*sizes);
        return -1;
    }
    Py_INCREF(*sizes), Py_INCREF(*arguments);
    LOCK(maker->mutex);
    PyObject *old[2] = {maker->sizes, maker->arguments};
    maker->sizes = *sizes, maker->arguments = *arguments, maker->rank = rank;
    memcpy(maker->shape, shape, sizeof *shape * (size_t)rank);
    UNLOCK(maker->mutex);
    Py_XDECREF(old[0]), Py_XDECREF(old[1]);
    return 0;
}

static int is_on_device(const LaunchObject *launch, const TensorView *view) {
    return view->device_type == launch->device_type &&
           (view->device_type != DEVICE_CUDA || view->device_id == launch->ordinal);
}

/* True where a tensor made on the current device is on that of the launch; it is looked at all the same. */
static int is_current(const LaunchObject *launch) {
    CUcontext current = NULL;
    if (launch->device_type != DEVICE_CUDA) return 1;
    return launch->driver->cuda.context_current(&current) == 0 && current == launch->context;
}

/* A new dense tensor on the launch's device, and its address; NULL with an exception. */
static PyObject *make_tensor(Maker *maker, const LaunchObject *launch, const int64_t *shape, int32_t rank, int current,
                             const ExchangeApi *api, uint64_t *address) {
    TensorView view;
    PyObject *tensor = NULL, *arguments, *sizes;
    if (maker_arguments(maker, shape, rank, &sizes, &arguments)) return NULL;
    if (current && maker->empty_strided != Py_None) {
        tensor = PyObject_Call(maker->empty_strided, arguments, NULL);
        if (tensor && (view_from_exchange(tensor, api, &view) || !is_on_device(launch, &view))) Py_CLEAR(tensor);
        if (!tensor) PyErr_Clear(); /* the documented way works, or says why not */
    }
    if (!tensor) {
        tensor = PyObject_CallFunctionObjArgs(maker->new_empty, sizes, NULL);
        if (tensor && view_from_exchange(tensor, api, &view)) Py_CLEAR(tensor);
    }
    Py_DECREF(arguments), Py_DECREF(sizes);
    *address = tensor ? view.pointer : 0;
    return tensor;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

enum { MASK_FULL, MASK_CAUSAL, MASK_LOCAL };
enum { ARG_Q, ARG_K, ARG_V, ARG_OUT, ARG_LSE, ARG_SCALE, ARG_LEFT, ARG_RIGHT, ARG_SMS, NUM_FORWARD_ARGS };
enum { NUM_EXTENTS = 5, NUM_KEY_WORDS = 6 + NUM_EXTENTS };

typedef struct {
    int64_t words[NUM_KEY_WORDS]; /* dtype, device type, device, mask, head_dim, head_dim_v; extents, or zeros */
} ForwardKey;

typedef struct {
    PyObject_HEAD
    ForwardKey key;
    LaunchObject *launch;
    Maker out, lse;
    PyObject *scratch; /* keeps the scratch alive, or None */
    uint64_t scratch_address, scratch_rows;
    double scale; /* unless the call has one */
    int64_t num_sms;
} BoundForward;

static void bound_forward_dealloc(PyObject *object) {
    BoundForward *self = (BoundForward *)object;
    maker_clear(&self->out), maker_clear(&self->lse);
    Py_XDECREF((PyObject *)self->launch), Py_XDECREF(self->scratch);
    free_object(object);
}

static uint64_t hash_key(const ForwardKey *key) {
    uint64_t hash = 0;
    for (int i = 0; i < NUM_KEY_WORDS; i++) hash = hash_word(hash, (uint64_t)key->words[i]);
    return hash;
}

static int is_forward_plan(const Plan *plan) {
    static const uint8_t ranks[5] = {4, 4, 4, 4, 3}, types[4] = {TYPE_F32, TYPE_I32, TYPE_I32, TYPE_I32};
    if (plan->num_args < NUM_FORWARD_ARGS) return 0;
    for (uint32_t i = 0; i < plan->num_args; i++) {
        const Arg *arg = &plan->args[i];
        int fits = i < ARG_SCALE          ? arg->kind == ARG_TENSOR && arg->rank == ranks[i]
                   : i < NUM_FORWARD_ARGS ? arg->kind == ARG_SCALAR && arg->dtype == types[i - ARG_SCALE]
                                          : arg->kind == ARG_DEVICE;
        if (!fits) return 0;
    }
    return plan->args[ARG_K].dtype == plan->args[ARG_Q].dtype && plan->args[ARG_V].dtype == plan->args[ARG_Q].dtype;
}

/* add(launch, mask, head_dim, head_dim_v, extents, scale, num_sms, out, lse, scratch): see _launcher.pyi */
static PyObject *forward_add(PyObject *object, PyObject *args) {
    PyObject *launch, *extents, *out, *lse, *scratch;
    long long mask, head_dim, head_dim_v, num_sms;
    double scale;
    if (!PyArg_ParseTuple(args, "OLLLOdLO!O!O:add", &launch, &mask, &head_dim, &head_dim_v, &extents, &scale, &num_sms,
                          &PyTuple_Type, &out, &PyTuple_Type, &lse, &scratch))
        return NULL;
    if ((PyObject *)Py_TYPE(launch) != launch_type) Py_RETURN_NONE;
    const LaunchObject *on = (LaunchObject *)launch;
    const Plan *plan = &on->plan_object->plan;
    if (!is_forward_plan(plan)) return PyErr_SetString(PyExc_ValueError, "no plan of a forward call"), NULL;
    BoundForward *bound = new_object((PyTypeObject *)bound_forward_type);
    if (!bound) return NULL;
    Py_INCREF(launch), Py_INCREF(scratch);
    bound->launch = (LaunchObject *)launch, bound->scratch = scratch, bound->scale = scale, bound->num_sms = num_sms;
    bound->key = (ForwardKey){{plan->args[ARG_Q].dtype, on->device_type,
                               on->device_type == DEVICE_CUDA ? on->ordinal : 0, mask, head_dim, head_dim_v}};
    TensorView view;
    if (maker_from_tuple(&bound->out, out) || maker_from_tuple(&bound->lse, lse)) goto failed;
    if (extents != Py_None && (!PyTuple_Check(extents) || PyTuple_Size(extents) != NUM_EXTENTS ||
                               numbers_from_tuple(extents, &bound->key.words[6]) != NUM_EXTENTS))
        goto failed;
    if (scratch != Py_None) {
        const ExchangeApi *api = exchange_api(scratch);
        if (!api) { /* as with all tensors of this torch: nothing could be answered */
            Py_DECREF(bound);
            Py_RETURN_NONE;
        }
        if (view_from_exchange(scratch, api, &view)) goto failed;
        bound->scratch_address = view.pointer, bound->scratch_rows = (uint64_t)view.shape[0];
    }
    calls_keep((CallsObject *)object, hash_key(&bound->key), (PyObject *)bound);
    Py_RETURN_NONE;
failed:
    Py_DECREF(bound);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "five extents, and a scratch tensor that can be read");
    return NULL;
}

/* 1 for True, 0 for False (1 and 0 stand for them), -1 for what is left to Python. */
static int flag_of(PyObject *object) {
    if (PyBool_Check(object)) return object == Py_True;
    if (!PyLong_CheckExact(object)) return -1;
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow || (number != 0 && number != 1) ? -1 : (int)number;
}

/* One side of a window: 1 with a number, 0 for None and -1, which are no bound, -1 for what is left to Python. */
static int window_side(PyObject *side, int64_t *number) {
    int overflow = 0;
    *number = WINDOW_UNBOUNDED;
    if (side == Py_None) return 0;
    if (!PyLong_CheckExact(side)) return -1;
    long long given = PyLong_AsLongLongAndOverflow(side, &overflow);
    if (overflow || given < -1) return -1;
    if (given >= 0 && given < WINDOW_UNBOUNDED) *number = given;
    return given >= 0;
}

/* The mask and its numbers, as offsets_of (windows.py) has them; -1 for what is left to Python. */
static int window_mask(int causal, PyObject *window, int64_t *left, int64_t *right) {
    if (!PyTuple_CheckExact(window) || PyTuple_Size(window) != 2) return -1;
    if (window_side(PyTuple_GetItem(window, 0), left) < 0 || window_side(PyTuple_GetItem(window, 1), right) < 0)
        return -1;
    if (causal) *right = 0;
    return *left != WINDOW_UNBOUNDED || (*right != 0 && *right != WINDOW_UNBOUNDED) ? MASK_LOCAL
           : *right == 0                                                            ? MASK_CAUSAL
                                                                                    : MASK_FULL;
}

/* 1 when no gradient is asked for, 0 when one is, -1 with an exception. */
static int needs_no_gradient(const CallsObject *self, PyObject *const *tensors, int count) {
    PyObject *enabled = PyObject_CallNoArgs(self->is_grad_enabled);
    int is_free = enabled == Py_False;
    if (!enabled) return -1;
    Py_DECREF(enabled);
    for (int i = 0; i < count && !is_free; i++) {
        PyObject *requires = PyObject_GetAttr(tensors[i], name_requires_grad);
        if (!requires) return -1;
        Py_DECREF(requires); /* True and False live on */
        if (requires != Py_False) return 0;
    }
    return 1;
}

/* 1 while no tensor can have a tangent, 0 when one can, -1 with an exception. */
static int has_no_level(const CallsObject *self) {
    if (self->levels == Py_None) return 1;
    PyObject *level = PyObject_GetAttr(self->levels, name_current_level);
    if (!level) return -1;
    long number = PyLong_AsLong(level);
    Py_DECREF(level);
    return number == -1 && PyErr_Occurred() ? -1 : number < 0;
}

/* 1 when an observer counts nothing, or allows calls with this tensor all the same; 0; or -1 with an exception. */
static int is_unobserved(PyObject *observer, PyObject *tensor) {
    PyObject *allows = PyTuple_GetItem(observer, 1), *count = PyObject_CallNoArgs(PyTuple_GetItem(observer, 0));
    int number = count ? PyObject_IsTrue(count) : -1;
    Py_XDECREF(count);
    if (number < 0) return -1;
    if (number == 0 || allows == Py_None) return number == 0;
    PyObject *answer = PyObject_CallFunctionObjArgs(allows, tensor, NULL);
    number = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return number;
}

/* 1 when nothing but the result is asked for: no gradient and no tangent, and no mode of torch that wants to see the
 * call or changes what it computes. 0 when it is left to Python, -1 with an exception. */
static int asks_for_nothing_else(const CallsObject *self, PyObject *const *tensors, int count) {
    int is_free = has_no_level(self);
    for (Py_ssize_t i = 0; is_free == 1 && self->observers && i < PyTuple_Size(self->observers); i++)
        is_free = is_unobserved(PyTuple_GetItem(self->observers, i), tensors[0]);
    return is_free == 1 ? needs_no_gradient(self, tensors, count) : is_free;
}

/* The bound call of three tensors (a new reference), or NULL. Shapes must go together and have no 0; the layout must be
 * one that the kernel reads. */
static BoundForward *find_forward(CallsObject *self, int mask, TensorView views[3]) {
    const TensorView *q = &views[0], *k = &views[1], *v = &views[2];
    for (int i = 0; i < 3; i++)
        if (views[i].rank != 4 || views[i].dtype < 0 || views[i].dtype != q->dtype || !views[i].pointer ||
            views[i].device_type != q->device_type || views[i].device_id != q->device_id || is_empty(&views[i]))
            return NULL;
    if (q->shape[0] != k->shape[0] || q->shape[0] != v->shape[0] || k->shape[1] != v->shape[1] ||
        k->shape[2] != v->shape[2] || q->shape[3] != k->shape[3] || q->shape[2] % k->shape[2])
        return NULL;
    ForwardKey key = {{q->dtype, q->device_type, q->device_id, mask, q->shape[3], v->shape[3]}};
    for (int is_exact = 0; is_exact < 2; is_exact++) {
        if (is_exact) {
            const int64_t extents[NUM_EXTENTS] = {q->shape[0], q->shape[1], q->shape[2], k->shape[1], k->shape[2]};
            memcpy(&key.words[6], extents, sizeof extents);
        }
        BoundForward *bound = (BoundForward *)calls_find(self, hash_key(&key));
        int fits = bound && memcmp(&bound->key, &key, sizeof key) == 0, is_found = fits;
        for (int i = 0; i < 3 && fits; i++) {
            uint32_t align = bound->launch->plan_object->plan.args[i].align;
            settle_free_strides(&views[i], align);
            fits = layout_fits(&views[i], align);
        }
        if (fits) return bound;
        Py_XDECREF(bound);
        if (is_found) break;
    }
    return NULL;
}

static void write_dense_leaves(const Arg *arg, uint64_t address, const int64_t *shape, uint64_t *leaves) {
    TensorView view = {.pointer = address, .rank = (int32_t)arg->rank, .dtype = (int32_t)arg->dtype};
    int64_t step = 1;
    for (int32_t i = view.rank - 1; i >= 0; i--) {
        view.shape[i] = shape[i], view.strides[i] = step;
        step = (int64_t)((uint64_t)step * (uint64_t)shape[i]);
    }
    settle_free_strides(&view, arg->align);
    write_tensor_leaves(arg, &view, leaves);
}

static void write_forward_leaves(const BoundForward *bound, const TensorView views[3], const uint64_t addresses[2],
                                 float scale, const int64_t window[2], uint64_t *leaves) {
    const LaunchObject *launch = bound->launch;
    const Plan *plan = &launch->plan_object->plan;
    const int64_t *q = views[0].shape;
    for (int i = 0; i < 3; i++) write_tensor_leaves(&plan->args[i], &views[i], leaves);
    write_dense_leaves(&plan->args[ARG_OUT], addresses[0], (int64_t[]){q[0], q[1], q[2], views[2].shape[3]}, leaves);
    write_dense_leaves(&plan->args[ARG_LSE], addresses[1], (int64_t[]){q[0], q[2], q[1]}, leaves);
    leaves[plan->args[ARG_SCALE].first_leaf] = from_f32(scale);
    leaves[plan->args[ARG_LEFT].first_leaf] = low_bits((uint64_t)window[0], 32);
    leaves[plan->args[ARG_RIGHT].first_leaf] = low_bits((uint64_t)window[1], 32);
    leaves[plan->args[ARG_SMS].first_leaf] = low_bits((uint64_t)bound->num_sms, 32);
    for (uint32_t i = NUM_FORWARD_ARGS; i < plan->num_args; i++)
        leaves[plan->args[i].first_leaf] = launch->device_facts[plan->args[i].device_leaf];
}

/* Allocate and launch: (out, lse or None), or NULL with an exception. */
static PyObject *answer_forward(BoundForward *bound, const TensorView views[3], double scale, const int64_t window[2],
                                int return_lse, const ExchangeApi *api) {
    const int64_t *q = views[0].shape;
    const int64_t out_shape[4] = {q[0], q[1], q[2], views[2].shape[3]}, lse_shape[3] = {q[0], q[2], q[1]};
    uint64_t leaves[MAX_LEAVES], addresses[2], rows = (uint64_t)q[0] * (uint64_t)q[1] * (uint64_t)q[2];
    LaunchObject *launch = bound->launch;
    int current = is_current(launch);
    PyObject *out, *lse = NULL, *result = NULL;
    CUstream stream;
    if (!(out = make_tensor(&bound->out, launch, out_shape, 4, current, api, &addresses[0]))) return NULL;
    if (!return_lse && rows <= bound->scratch_rows)
        addresses[1] = bound->scratch_address;
    else if (!(lse = make_tensor(&bound->lse, launch, lse_shape, 3, current, api, &addresses[1])))
        goto done;
    write_forward_leaves(bound, views, addresses, (float)scale, window, leaves);
    if (current_stream(launch, api, &stream) || launch_evaluated(launch, leaves, stream)) goto done;
    result = PyTuple_Pack(2, out, return_lse ? lse : Py_None);
done:
    Py_XDECREF(out), Py_XDECREF(lse);
    return result;
}

/* run(q, k, v, softmax_scale, causal, window_size, return_lse) -> (out, lse or None), or None for Python to answer */
static PyObject *forward_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    CallsObject *self = (CallsObject *)object;
    TensorView views[3];
    const ExchangeApi *api = NULL;
    int64_t window[2];
    if (num_args != 7) return PyErr_SetString(PyExc_TypeError, "run takes 7 arguments"), NULL;
    for (int i = 0; i < 3; i++)
        if (!view_of_plain(self, args[i], &views[i], &api)) Py_RETURN_NONE;
    int causal = flag_of(args[4]), return_lse = flag_of(args[6]);
    if (causal < 0 || return_lse < 0) Py_RETURN_NONE;
    int mask = window_mask(causal, args[5], &window[0], &window[1]);
    if (mask < 0 || window[0] + window[1] < 0) Py_RETURN_NONE;
    double scale = args[3] == Py_None ? 0 : PyFloat_CheckExact(args[3]) ? PyFloat_AsDouble(args[3]) : -1;
    if (args[3] != Py_None && !(scale >= FLT_MIN && scale <= FLT_MAX)) Py_RETURN_NONE;
    int is_free = asks_for_nothing_else(self, args, 3);
    if (is_free < 0) return NULL;
    BoundForward *bound = is_free ? find_forward(self, mask, views) : NULL;
    if (!bound) Py_RETURN_NONE;
    PyObject *result = answer_forward(bound, views, args[3] == Py_None ? bound->scale : scale, window, return_lse, api);
    Py_DECREF(bound);
    return result;
}

static PyMethodDef forward_methods[] = {
    {"add", forward_add, METH_VARARGS,
     "add(launch, mask, head_dim, head_dim_v, extents, scale, num_sms, out, lse, scratch): answer such calls"},
    {"run", (PyCFunction)(void (*)(void))forward_run, METH_FASTCALL,
     "run(q, k, v, softmax_scale, causal, window_size, return_lse) -> (out, lse or None), or None: not answered"},
    {"clear", calls_clear, METH_NOARGS, "clear(): forget all calls"},
    {NULL, NULL, 0, NULL}};

/* ---- recipes ----------------------------------------------------------------------------------------------------- */

#define MAX_CALL_WORDS (MAX_VALUES * (2 + MAX_RANK))
#define SCALAR_MARK (~(uint64_t)0) /* no tensor's first word */

/* A call: words of its tensors, and the operator, every name and the value of each scalar as objects. */
typedef struct {
    uint64_t hash, words[MAX_CALL_WORDS];
    uint64_t mergeable; /* bit i: tensor i may be seen as VIEW_MERGED; the key itself knows no strides */
    uint32_t num_words, num_objects, num_tensors;
    PyObject *objects[1 + 2 * MAX_VALUES], *tensors[MAX_VALUES]; /* borrowed */
    const ExchangeApi *api;
} CallKey;

typedef struct {
    Maker maker;
    PyObject *fill; /* a number, or None */
    int64_t shape[MAX_RANK];
    int32_t rank;
} Buffer;

typedef struct {
    LaunchObject *launch;
    uint32_t num_args;
    uint8_t ways[MAX_ARGS];      /* how to see each tensor (VIEW_) */
    int32_t values[MAX_ARGS];    /* index of a tensor (inputs, then buffers), or -1 */
    PyObject *numbers[MAX_ARGS]; /* where the index is -1 */
} Step;

typedef struct {
    PyObject_HEAD
    uint64_t *words;
    PyObject **objects;
    uint32_t num_words, num_objects, num_inputs, num_buffers, num_steps, num_results;
    Buffer *buffers;
    Step *steps;
    int32_t results[MAX_VALUES]; /* index of a tensor, or -1 for None */
    uint64_t merged;             /* inputs that a step sees as VIEW_MERGED */
    int is_differentiable;       /* in Python: a call that wants gradients, or is looked at, is not answered here */
} BoundRecipe;

static void bound_recipe_dealloc(PyObject *object) {
    BoundRecipe *self = (BoundRecipe *)object;
    for (uint32_t i = 0; i < self->num_objects; i++) Py_XDECREF(self->objects[i]);
    for (uint32_t i = 0; i < self->num_buffers; i++) {
        maker_clear(&self->buffers[i].maker);
        Py_XDECREF(self->buffers[i].fill);
    }
    for (uint32_t i = 0; i < self->num_steps; i++) {
        Py_XDECREF((PyObject *)self->steps[i].launch);
        for (uint32_t k = 0; k < self->steps[i].num_args; k++) Py_XDECREF(self->steps[i].numbers[k]);
    }
    PyMem_Free(self->words), PyMem_Free(self->objects), PyMem_Free(self->buffers), PyMem_Free(self->steps);
    free_object(object);
}

static void key_word(CallKey *key, uint64_t word) {
    key->words[key->num_words++] = word;
    key->hash = hash_word(key->hash, word);
}

static int key_object(CallKey *key, PyObject *object) {
    Py_hash_t hash = PyObject_Hash(object);
    if (hash == -1) return PyErr_Clear(), 0;
    key->hash = hash_word(key->hash, (uint64_t)hash);
    key->objects[key->num_objects++] = object;
    return 1;
}

/* A number, a text, or a pair of such; others may compare in ways of their own, or be tensors of another type. */
static int is_simple(PyObject *value, int depth) {
    if (depth == 0 && PyTuple_CheckExact(value) && PyTuple_Size(value) == 2)
        return is_simple(PyTuple_GetItem(value, 0), 1) && is_simple(PyTuple_GetItem(value, 1), 1);
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
           PyUnicode_CheckExact(value);
}

/* Add an argument to the key: 1, or 0 when the call is left to Python. */
static int key_argument(const CallsObject *self, PyObject *value, CallKey *key) {
    TensorView view;
    if (!view_of_plain(self, value, &view, &key->api)) {
        if (!is_simple(value, 0) || !key_object(key, value)) return 0;
        key_word(key, SCALAR_MARK);
        return 1;
    }
    if (view.dtype < 0) return 0;
    key->mergeable |= (uint64_t)can_merge(&view) << key->num_tensors;
    key->tensors[key->num_tensors++] = value;
    key_word(key, (uint64_t)view.dtype << 32 | (uint64_t)view.rank);
    key_word(key, (uint64_t)view.device_type << 32 | (uint32_t)view.device_id);
    for (int32_t i = 0; i < view.rank; i++) key_word(key, (uint64_t)view.shape[i]);
    return 1;
}

/* 1 and the key of a call, or 0 when it is left to Python (no exception). Arguments: a dict, or a tuple of values. */
static int read_call(const CallsObject *self, PyObject *op, PyObject *arguments, CallKey *key) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    int is_tuple = PyTuple_CheckExact(arguments);
    key->hash = key->mergeable = key->num_words = key->num_objects = key->num_tensors = 0;
    if (!is_tuple && !PyDict_Check(arguments)) return 0;
    if ((is_tuple ? PyTuple_Size(arguments) : PyDict_Size(arguments)) > (Py_ssize_t)MAX_VALUES) return 0;
    if (!key_object(key, op)) return 0;
    for (Py_ssize_t i = 0; is_tuple && i < PyTuple_Size(arguments); i++)
        if (!key_argument(self, PyTuple_GetItem(arguments, i), key)) return 0;
    while (!is_tuple && PyDict_Next(arguments, &position, &name, &value))
        if (!key_object(key, name) || !key_argument(self, value, key)) return 0;
    return key->num_tensors > 0;
}

static int is_same_call(const BoundRecipe *bound, const CallKey *key) {
    if (bound->num_words != key->num_words || bound->num_objects != key->num_objects ||
        bound->num_inputs != key->num_tensors || memcmp(bound->words, key->words, sizeof *key->words * key->num_words))
        return 0;
    for (uint32_t i = 0; i < key->num_objects; i++) {
        PyObject *a = bound->objects[i], *b = key->objects[i];
        if (a == b) continue;
        if (Py_TYPE(a) != Py_TYPE(b) || PyObject_RichCompareBool(a, b, Py_EQ) != 1) return PyErr_Clear(), 0;
    }
    return 1;
}

static int step_from_tuple(Step *step, PyObject *tuple, uint32_t num_values) {
    PyObject *launch, *args;
    if (!PyArg_ParseTuple(tuple, "O!O!:step", launch_type, &launch, &PyTuple_Type, &args)) return -1;
    Py_INCREF(launch);
    step->launch = (LaunchObject *)launch;
    if (PyTuple_Size(args) > (Py_ssize_t)MAX_ARGS) return PyErr_SetString(PyExc_ValueError, "too many arguments"), -1;
    for (; step->num_args < (uint32_t)PyTuple_Size(args); step->num_args++) {
        uint32_t i = step->num_args;
        PyObject *item = PyTuple_GetItem(args, i);
        int index = 0, ways = 0;
        step->values[i] = -1;
        if (!PyTuple_Check(item)) {
            Py_INCREF(item);
            step->numbers[i] = item;
            continue;
        }
        if (!PyArg_ParseTuple(item, "ii:argument", &index, &ways)) return -1;
        if (index < 0 || (uint32_t)index >= num_values) return PyErr_SetString(PyExc_ValueError, "no such tensor"), -1;
        step->values[i] = index;
        step->ways[i] = (uint8_t)ways;
    }
    return 0;
}

static int buffer_from_tuple(Buffer *buffer, PyObject *tuple) {
    PyObject *maker, *shape, *fill;
    if (!PyTuple_Check(tuple)) return PyErr_SetString(PyExc_TypeError, "a buffer is a tuple"), -1;
    if (!PyArg_ParseTuple(tuple, "O!O!O:buffer", &PyTuple_Type, &maker, &PyTuple_Type, &shape, &fill)) return -1;
    if (PyTuple_Size(shape) > (Py_ssize_t)MAX_RANK) return PyErr_SetString(PyExc_ValueError, "too many dimensions"), -1;
    Py_INCREF(fill);
    buffer->fill = fill;
    if (maker_from_tuple(&buffer->maker, maker)) return -1;
    buffer->rank = numbers_from_tuple(shape, buffer->shape);
    return buffer->rank < 0 ? -1 : 0;
}

static int fill_recipe(BoundRecipe *bound, const CallKey *key, PyObject *buffers, PyObject *steps, PyObject *results) {
    Py_ssize_t num_buffers = PyTuple_Size(buffers), num_steps = PyTuple_Size(steps);
    Py_ssize_t num_results = PyTuple_Size(results);
    uint32_t num_values = key->num_tensors + (uint32_t)num_buffers;
    bound->words = PyMem_Malloc(sizeof *bound->words * (key->num_words + 1));
    bound->objects = PyMem_Malloc(sizeof *bound->objects * key->num_objects);
    bound->buffers = PyMem_Calloc((size_t)num_buffers + 1, sizeof *bound->buffers);
    bound->steps = PyMem_Calloc((size_t)num_steps + 1, sizeof *bound->steps);
    if (!bound->words || !bound->objects || !bound->buffers || !bound->steps) return PyErr_NoMemory(), -1;
    memcpy(bound->words, key->words, sizeof *key->words * key->num_words);
    memcpy(bound->objects, key->objects, sizeof *key->objects * key->num_objects);
    bound->num_words = key->num_words, bound->num_objects = key->num_objects, bound->num_inputs = key->num_tensors;
    for (uint32_t i = 0; i < key->num_objects; i++) Py_INCREF(bound->objects[i]);
    if (num_buffers + (Py_ssize_t)key->num_tensors > (Py_ssize_t)MAX_VALUES || num_results > (Py_ssize_t)MAX_VALUES ||
        num_results < 1 || num_steps < 1)
        return PyErr_SetString(PyExc_ValueError, "too many tensors, or no step or result"), -1;
    bound->num_buffers = (uint32_t)num_buffers, bound->num_steps = (uint32_t)num_steps;
    bound->num_results = (uint32_t)num_results;
    for (Py_ssize_t i = 0; i < num_buffers; i++)
        if (buffer_from_tuple(&bound->buffers[i], PyTuple_GetItem(buffers, i))) return -1;
    for (Py_ssize_t i = 0; i < num_steps; i++)
        if (step_from_tuple(&bound->steps[i], PyTuple_GetItem(steps, i), num_values)) return -1;
    for (Py_ssize_t i = 0; i < num_steps; i++)
        for (uint32_t k = 0; k < bound->steps[i].num_args; k++)
            if (bound->steps[i].ways[k] & VIEW_MERGED && bound->steps[i].values[k] < (int32_t)key->num_tensors)
                bound->merged |= (uint64_t)1 << bound->steps[i].values[k];
    for (Py_ssize_t i = 0; i < num_results; i++) {
        PyObject *item = PyTuple_GetItem(results, i);
        long index = item == Py_None ? -1 : PyLong_AsLong(item);
        if ((index < 0 && item != Py_None) || index >= (long)num_values)
            return PyErr_SetString(PyExc_ValueError, "no such result"), -1;
        bound->results[i] = (int32_t)index;
    }
    return 0;
}

/* add(op, arguments, buffers, steps, results, is_differentiable): see _launcher.pyi */
static PyObject *recipe_add(PyObject *object, PyObject *args) {
    PyObject *op, *arguments, *buffers, *steps, *results;
    CallKey key;
    int is_differentiable = 0;
    if (!PyArg_ParseTuple(args, "OOO!O!O!|p:add", &op, &arguments, &PyTuple_Type, &buffers, &PyTuple_Type, &steps,
                          &PyTuple_Type, &results, &is_differentiable))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_Size(steps); i++) {
        PyObject *step = PyTuple_GetItem(steps, i);
        if (!PyTuple_Check(step) || PyTuple_Size(step) != 2) return PyErr_SetString(PyExc_TypeError, "a pair"), NULL;
        if ((PyObject *)Py_TYPE(PyTuple_GetItem(step, 0)) != launch_type) Py_RETURN_NONE;
    }
    if (!read_call((CallsObject *)object, op, arguments, &key)) Py_RETURN_NONE;
    BoundRecipe *bound = new_object((PyTypeObject *)bound_recipe_type);
    if (!bound) return NULL;
    bound->is_differentiable = is_differentiable;
    if (fill_recipe(bound, &key, buffers, steps, results)) {
        Py_DECREF(bound);
        return NULL;
    }
    calls_keep((CallsObject *)object, key.hash, (PyObject *)bound);
    Py_RETURN_NONE;
}

static int run_step(const Step *step, PyObject *const *values) {
    PyObject *arguments[MAX_ARGS];
    for (uint32_t i = 0; i < step->num_args; i++)
        arguments[i] = step->values[i] < 0 ? step->numbers[i] : values[step->values[i]];
    return launch_arguments(step->launch, arguments, (Py_ssize_t)step->num_args, step->ways);
}

static int make_buffer(Buffer *buffer, const LaunchObject *launch, int current, const ExchangeApi *api,
                       PyObject **out) {
    uint64_t address;
    *out = make_tensor(&buffer->maker, launch, buffer->shape, buffer->rank, current, api, &address);
    if (!*out) return -1;
    if (buffer->fill == Py_None) return 0;
    PyObject *filled = PyObject_CallMethodObjArgs(*out, name_fill, buffer->fill, NULL);
    Py_XDECREF(filled);
    return filled ? 0 : -1;
}

static PyObject *recipe_result(const BoundRecipe *bound, PyObject *const *values, uint32_t i) {
    return bound->results[i] < 0 ? Py_None : values[bound->results[i]];
}

/* Allocate, launch, return the results. The inputs are held by the caller's caller. */
static PyObject *answer_recipe(BoundRecipe *bound, const CallKey *key) {
    PyObject *values[MAX_VALUES] = {NULL}, *result = NULL;
    const LaunchObject *launch = bound->steps[0].launch;
    uint32_t num_values = bound->num_inputs + bound->num_buffers;
    int current = is_current(launch), failed = 0;
    memcpy(values, key->tensors, sizeof *values * key->num_tensors);
    for (uint32_t i = 0; i < bound->num_buffers && !failed; i++)
        failed = make_buffer(&bound->buffers[i], launch, current, key->api, &values[bound->num_inputs + i]);
    for (uint32_t i = 0; i < bound->num_steps && !failed; i++) failed = run_step(&bound->steps[i], values);
    if (!failed && bound->num_results == 1)
        result = Py_NewRef(recipe_result(bound, values, 0));
    else if (!failed && (result = PyTuple_New(bound->num_results)))
        for (uint32_t i = 0; i < bound->num_results; i++)
            PyTuple_SetItem(result, i, Py_NewRef(recipe_result(bound, values, i)));
    for (uint32_t i = bound->num_inputs; i < num_values; i++) Py_XDECREF(values[i]);
    return result;
}

/* run(op, arguments) -> results, or None for Python to answer */
static PyObject *recipe_run(PyObject *object, PyObject *const *args, Py_ssize_t num_args) {
    CallKey key;
    if (num_args != 2) return PyErr_SetString(PyExc_TypeError, "run takes 2 arguments"), NULL;
    if (!read_call((CallsObject *)object, args[0], args[1], &key)) Py_RETURN_NONE;
    BoundRecipe *bound = (BoundRecipe *)calls_find((CallsObject *)object, key.hash);
    int is_ours = bound && is_same_call(bound, &key) && !(bound->merged & ~key.mergeable);
    if (is_ours && bound->is_differentiable)
        is_ours = asks_for_nothing_else((CallsObject *)object, key.tensors, (int)key.num_tensors);
    PyObject *result = is_ours < 0 ? NULL : is_ours ? answer_recipe(bound, &key) : Py_NewRef(Py_None);
    Py_XDECREF(bound);
    return result;
}

static PyMethodDef recipe_methods[] = {
    {"add", recipe_add, METH_VARARGS,
     "add(op, arguments, buffers, steps, results, is_differentiable=False): answer such calls"},
    {"run", (PyCFunction)(void (*)(void))recipe_run, METH_FASTCALL,
     "run(op, arguments) -> results, or None: not answered"},
    {"clear", calls_clear, METH_NOARGS, "clear(): forget all calls"},
    {NULL, NULL, 0, NULL}};

#endif
