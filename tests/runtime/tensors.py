"""Tensors for the launcher without a GPU: one read by attribute calls, one through a DLPack C exchange API."""

import ctypes

DLPACK_INT, DLPACK_FLOAT, DLPACK_BFLOAT = 0, 2, 4


class DtypeObject:
    """Prints as torch's dtypes do."""

    def __init__(self, name):
        self._name = name

    def __str__(self):
        return self._name


BFLOAT16 = DtypeObject("torch.bfloat16")
FLOAT32 = DtypeObject("torch.float32")
INT32 = DtypeObject("torch.int32")
BOOL = DtypeObject("torch.bool")


def dense_strides(shape):
    strides, step = [], 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    return tuple(strides)


class AttributeTensor:
    """What torch before 2.10 offers: data_ptr(), shape, stride(), dtype, get_device()."""

    def __init__(self, shape, *, strides=None, dtype=BFLOAT16, pointer=0x7F0000000000, device=0):
        self.shape = tuple(shape)
        self._strides = dense_strides(shape) if strides is None else tuple(strides)
        self.dtype = dtype
        self._pointer, self._device = pointer, device

    def data_ptr(self):
        return self._pointer

    def stride(self):
        return self._strides

    def get_device(self):
        return self._device


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_TENSOR_FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))
_CURRENT_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class _ExchangeApi(ctypes.Structure):
    pass


_ExchangeApi._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("previous", ctypes.POINTER(_ExchangeApi)),
    ("allocate", ctypes.c_void_p),
    ("managed_from_object", ctypes.c_void_p),
    ("managed_to_object", ctypes.c_void_p),
    ("tensor_from_object", _TENSOR_FROM_OBJECT),
    ("current_stream", _CURRENT_STREAM),
)

STREAM_OF_DEVICE = {0: 0x5000, 1: 0x5001}


@_TENSOR_FROM_OBJECT
def _tensor_from_object(tensor, out):
    if tensor.broken:
        return -1
    out[0] = tensor.borrowed
    return 0


@_CURRENT_STREAM
def _current_stream(device_type, device, out):
    if device_type != 2 or device not in STREAM_OF_DEVICE:
        return -1
    out[0] = STREAM_OF_DEVICE[device]
    return 0


def _api(major, previous=None):
    chained = ctypes.pointer(previous) if previous is not None else None
    return _ExchangeApi(major, 0, chained, None, None, None, _tensor_from_object, _current_stream)


_API_1 = _api(1)
_API_2 = _api(2, _API_1)  # a newer major version, which offers the older one
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _capsule(api):
    return _new_capsule(ctypes.addressof(api), b"dlpack_exchange_api", None)


class ExchangeTensor:
    """What torch 2.10 and later offer: a capsule on the type with C functions."""

    __dlpack_c_exchange_api__ = _capsule(_API_1)
    broken = False

    def __init__(self, shape, *, strides=None, code=DLPACK_BFLOAT, bits=16, pointer=0x7F0000000000, device=0):
        rank = len(shape)
        self._shape = (ctypes.c_int64 * rank)(*shape)
        self._strides = (ctypes.c_int64 * rank)(*(dense_strides(shape) if strides is None else strides))
        self.borrowed = _DLTensor(pointer, 2, device, rank, code, bits, 1, self._shape, self._strides, 0)


class NewerExchangeTensor(ExchangeTensor):
    """Of a producer whose newest API has another major version."""

    __dlpack_c_exchange_api__ = _capsule(_API_2)
