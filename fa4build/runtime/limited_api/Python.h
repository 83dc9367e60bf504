/* Declarations of CPython's limited API, version 3.10, as far as _launcher.c uses it.
 *
 * Why not the interpreter's own headers: a machine with Python often has none, a cross build would take those of the
 * wrong platform, and inline functions in them differ between releases, so the launcher's bytes would follow the Python
 * that happened to build it. The limited API is stable by definition (PEP 384), so a declaration written once stays
 * right. tests/shipping/test_launcher_build.py compiles this file against the real headers: types, constants and prototypes.
 *
 * Reference counts go through functions, never through the object's fields: their meaning changed in 3.12 and 3.14.
 *
 * With Py_GIL_DISABLED: the same subset for free-threaded CPython 3.13, 3.14 and 3.15. They do not share the stable ABI,
 * so such a launcher is for these releases alone, whose object head, constants and functions used here are the same
 * (Include/object.h, Include/moduleobject.h, Include/cpython/lock.h of each). It needs functions that only
 * free-threaded interpreters export, so that no other one can load it.
 */
#ifndef FA4_LIMITED_API_PYTHON_H
#define FA4_LIMITED_API_PYTHON_H

#if !defined(Py_LIMITED_API) || Py_LIMITED_API != 0x030A0000
#error "compile with -DPy_LIMITED_API=0x030A0000"
#endif

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

typedef ssize_t Py_ssize_t;
typedef Py_ssize_t Py_hash_t;
#define PY_SSIZE_T_MAX ((Py_ssize_t)(((size_t)-1) >> 1))
#define PY_SSIZE_T_MIN (-PY_SSIZE_T_MAX - 1)

typedef struct _typeobject PyTypeObject;
#ifdef Py_GIL_DISABLED
typedef struct {
    uint8_t bits;
} PyMutex;
typedef struct _object {
    uintptr_t ob_tid;
    uint16_t ob_flags; /* padding in 3.13 */
    PyMutex ob_mutex;
    uint8_t ob_gc_bits;
    uint32_t ob_ref_local;
    Py_ssize_t ob_ref_shared;
    PyTypeObject *ob_type;
} PyObject;
#else
typedef struct _object {
    Py_ssize_t ob_refcnt;
    PyTypeObject *ob_type;
} PyObject;
#endif
struct _longobject;
typedef struct _ts PyThreadState;
typedef struct _is PyInterpreterState;

#define PyObject_HEAD PyObject ob_base;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*PyCFunctionWithKeywords)(PyObject *, PyObject *, PyObject *);
typedef PyObject *(*unaryfunc)(PyObject *);
typedef PyObject *(*binaryfunc)(PyObject *, PyObject *);
typedef PyObject *(*ternaryfunc)(PyObject *, PyObject *, PyObject *);
typedef PyObject *(*reprfunc)(PyObject *);
typedef PyObject *(*allocfunc)(PyTypeObject *, Py_ssize_t);
typedef PyObject *(*newfunc)(PyTypeObject *, PyObject *, PyObject *);
typedef PyObject *(*getter)(PyObject *, void *);
typedef int (*setter)(PyObject *, PyObject *, void *);
typedef int (*inquiry)(PyObject *);
typedef int (*initproc)(PyObject *, PyObject *, PyObject *);
typedef int (*visitproc)(PyObject *, void *);
typedef int (*traverseproc)(PyObject *, visitproc, void *);
typedef void (*destructor)(PyObject *);
typedef void (*freefunc)(void *);
typedef void (*PyCapsule_Destructor)(PyObject *);

typedef struct PyMethodDef {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;
#define METH_VARARGS 0x0001
#define METH_KEYWORDS 0x0002
#define METH_NOARGS 0x0004
#define METH_O 0x0008
#define METH_CLASS 0x0010
#define METH_STATIC 0x0020
#define METH_FASTCALL 0x0080
#define METH_METHOD 0x0200

typedef struct PyGetSetDef {
    const char *name;
    getter get;
    setter set;
    const char *doc;
    void *closure;
} PyGetSetDef;

typedef struct PyModuleDef_Slot {
    int slot;
    void *value;
} PyModuleDef_Slot;
typedef struct PyModuleDef_Base {
    PyObject ob_base;
    PyObject *(*m_init)(void);
    Py_ssize_t m_index;
    PyObject *m_copy;
} PyModuleDef_Base;
typedef struct PyModuleDef {
    PyModuleDef_Base m_base;
    const char *m_name;
    const char *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    PyModuleDef_Slot *m_slots;
    traverseproc m_traverse;
    inquiry m_clear;
    freefunc m_free;
} PyModuleDef;
#ifdef Py_GIL_DISABLED
#define PyObject_HEAD_INIT(type) {0, 0, {0}, 0, UINT32_MAX, 0, type}, /* immortal, owned by no thread */
#else
#define PyObject_HEAD_INIT(type) {1, type},
#endif
#define PyModuleDef_HEAD_INIT {PyObject_HEAD_INIT(NULL) NULL, 0, NULL}
#define Py_mod_create 1
#define Py_mod_exec 2

typedef struct {
    int slot;
    void *pfunc;
} PyType_Slot;
typedef struct {
    const char *name;
    int basicsize;
    int itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;
#define Py_TPFLAGS_DISALLOW_INSTANTIATION (1UL << 7)
#define Py_TPFLAGS_IMMUTABLETYPE (1UL << 8)
#define Py_TPFLAGS_BASETYPE (1UL << 10)
#define Py_TPFLAGS_HAVE_GC (1UL << 14)
#define Py_TPFLAGS_DEFAULT 0UL
#define Py_TPFLAGS_LONG_SUBCLASS (1UL << 24)
#define Py_TPFLAGS_LIST_SUBCLASS (1UL << 25)
#define Py_TPFLAGS_TUPLE_SUBCLASS (1UL << 26)
#define Py_TPFLAGS_BYTES_SUBCLASS (1UL << 27)
#define Py_TPFLAGS_UNICODE_SUBCLASS (1UL << 28)
#define Py_TPFLAGS_DICT_SUBCLASS (1UL << 29)
#define Py_tp_alloc 47
#define Py_tp_call 50
#define Py_tp_clear 51
#define Py_tp_dealloc 52
#define Py_tp_doc 56
#define Py_tp_getattro 58
#define Py_tp_init 60
#define Py_tp_methods 64
#define Py_tp_new 65
#define Py_tp_repr 66
#define Py_tp_traverse 71
#define Py_tp_members 72
#define Py_tp_getset 73
#define Py_tp_free 74

#define PYTHON_API_VERSION 1013
#define PYTHON_ABI_VERSION 3
#define PyBUF_SIMPLE 0
#define Py_EQ 2

#include "limited_functions.h"
#ifdef Py_GIL_DISABLED
void PyMutex_Lock(PyMutex *);
void PyMutex_Unlock(PyMutex *);
int PyUnstable_Module_SetGIL(PyObject *, void *);
#define Py_MOD_GIL_NOT_USED ((void *)1)
#endif

#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *
/* As with PY_SSIZE_T_CLEAN: `#` in a format means Py_ssize_t. */
#define PyArg_ParseTuple _PyArg_ParseTuple_SizeT
#define PyArg_ParseTupleAndKeywords _PyArg_ParseTupleAndKeywords_SizeT
#define Py_BuildValue _Py_BuildValue_SizeT
#define PyModule_Create(module) PyModule_Create2(module, PYTHON_ABI_VERSION)

#define Py_None (&_Py_NoneStruct)
#define Py_False ((PyObject *)&_Py_FalseStruct)
#define Py_True ((PyObject *)&_Py_TrueStruct)
#define Py_INCREF(op) Py_IncRef((PyObject *)(op))
#define Py_DECREF(op) Py_DecRef((PyObject *)(op))
#define Py_XINCREF(op) Py_IncRef((PyObject *)(op))
#define Py_XDECREF(op) Py_DecRef((PyObject *)(op))
#define Py_CLEAR(op)                                                                                                   \
    do {                                                                                                               \
        PyObject *cleared_ = (PyObject *)(op);                                                                         \
        (op) = NULL;                                                                                                   \
        Py_DecRef(cleared_);                                                                                           \
    } while (0)
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)
#define Py_UNUSED(name) _unused_##name __attribute__((unused))

#define Py_TYPE(op) (((PyObject *)(op))->ob_type)
#define Py_IS_TYPE(op, type) (Py_TYPE(op) == (type))
#define PyType_HasFeature(type, feature) ((PyType_GetFlags(type) & (feature)) != 0)
#define PyObject_TypeCheck(op, type) (Py_IS_TYPE(op, type) || PyType_IsSubtype(Py_TYPE(op), (type)))
#define PyLong_Check(op) PyType_HasFeature(Py_TYPE(op), Py_TPFLAGS_LONG_SUBCLASS)
#define PyList_Check(op) PyType_HasFeature(Py_TYPE(op), Py_TPFLAGS_LIST_SUBCLASS)
#define PyTuple_Check(op) PyType_HasFeature(Py_TYPE(op), Py_TPFLAGS_TUPLE_SUBCLASS)
#define PyBytes_Check(op) PyType_HasFeature(Py_TYPE(op), Py_TPFLAGS_BYTES_SUBCLASS)
#define PyUnicode_Check(op) PyType_HasFeature(Py_TYPE(op), Py_TPFLAGS_UNICODE_SUBCLASS)
#define PyDict_Check(op) PyType_HasFeature(Py_TYPE(op), Py_TPFLAGS_DICT_SUBCLASS)
#define PyFloat_Check(op) PyObject_TypeCheck(op, &PyFloat_Type)
#define PyBool_Check(op) Py_IS_TYPE(op, &PyBool_Type)
#define PyCapsule_CheckExact(op) Py_IS_TYPE(op, &PyCapsule_Type)
#define PyFloat_CheckExact(op) Py_IS_TYPE(op, &PyFloat_Type)
#define PyLong_CheckExact(op) Py_IS_TYPE(op, &PyLong_Type)
#define PyTuple_CheckExact(op) Py_IS_TYPE(op, &PyTuple_Type)
#define PyList_CheckExact(op) Py_IS_TYPE(op, &PyList_Type)
#define PyDict_CheckExact(op) Py_IS_TYPE(op, &PyDict_Type)
#define PyBytes_CheckExact(op) Py_IS_TYPE(op, &PyBytes_Type)
#define PyUnicode_CheckExact(op) Py_IS_TYPE(op, &PyUnicode_Type)

#define Py_BEGIN_ALLOW_THREADS                                                                                         \
    {                                                                                                                  \
        PyThreadState *_save = PyEval_SaveThread();
#define Py_BLOCK_THREADS PyEval_RestoreThread(_save);
#define Py_UNBLOCK_THREADS _save = PyEval_SaveThread();
#define Py_END_ALLOW_THREADS                                                                                           \
    PyEval_RestoreThread(_save);                                                                                       \
    }

#endif
