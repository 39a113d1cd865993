// What Python gives a launch, read into C: numbers, sizes, tensors' addresses, streams. 0 where a
// value is not what a launch takes at once.
#pragma once

#include "launcher.h"

// An exact int within [least, most]; 0 where it is not one.
static inline int read_int(Object* value, int64 least, int64 most, int64* result) {
    int overflow;
    if (!IS(value, PyLong_Type)) return 0;
    *result = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && *result >= least && *result <= most;
}

// An int or a tuple of 1 to 3 ints, each from 1 to its limit.
static inline int read_dims(Object* value, const uint32* most, uint32* result) {
    int64 number;
    result[0] = result[1] = result[2] = 1;
    if (IS(value, PyLong_Type)) {
        if (!read_int(value, 1, most[0], &number)) return 0;
        result[0] = (uint32)number;
        return 1;
    }
    const ssize size = IS(value, PyTuple_Type) ? PyTuple_Size(value) : 0;
    if (size < 1 || size > 3) return 0;
    for (ssize axis = 0; axis < size; ++axis) {
        if (!read_int(PyTuple_GetItem(value, axis), 1, most[axis], &number)) return 0;
        result[axis] = (uint32)number;
    }
    return 1;
}

static inline int attribute_is(Object* value, Object* name, Object* expected) {
    Object* found = PyObject_GetAttr(value, name);
    if (!found) return 0;
    Py_DecRef(found);  // only the identity is of interest, and `expected` is alive
    return found == expected;
}

// The address of a CUDA tensor of the right dtype; 0 where it is none, or empty, or freed.
static inline uint64 read_tensor(const State* s, const Param* param, Object* value) {
    if (s->as_dltensor && (IS(value, s->tensor_types[0]) || IS(value, s->tensor_types[1]))) {
        DLTensor tensor;
        if (s->as_dltensor(value, &tensor)) return 0;
        if (tensor.device_type != DLPACK_CUDA || tensor.device_id != s->place.device) return 0;
        if (param->dlpack_dtype && tensor.dtype != param->dlpack_dtype) return 0;
        return tensor.data ? (uint64)tensor.data + tensor.byte_offset : 0;
    }
    if (s->place.current_context) return 0;  // of several GPUs Python finds out whose it is
    if (param->dtype && !attribute_is(value, s->name_dtype, param->dtype)) return 0;
    if (!attribute_is(value, s->name_is_cuda, &_Py_TrueStruct)) return 0;
    Object* address = PyObject_CallMethodObjArgs(value, s->name_data_ptr, (Object*)0);
    if (!address) return 0;
    uint64 result = IS(address, PyLong_Type) ? PyLong_AsUnsignedLongLong(address) : 0;
    Py_DecRef(address);
    return result == ~0ull ? 0 : result;
}

static inline int read_param(const State* s, const Param* param, Object* value, uint64* slot) {
    int64 number;
    switch (param->kind) {
        case POINTER:
            if (value == NONE) {
                *slot = 0;
                return param->most != 0;
            }
            return (*slot = read_tensor(s, param, value)) != 0 && !(*slot & param->zero_bits);
        case INT:
            if (!read_int(value, param->least, param->most, &number)) return 0;
            *slot = (uint64)number;
            return !(*slot & param->zero_bits);
        default: {
            if (!IS(value, PyFloat_Type)) return 0;
            const double wide = PyFloat_AsDouble(value);
            if (param->kind == DOUBLE) {
                __builtin_memcpy(slot, &wide, 8);
                return 1;
            }
            const float narrow = (float)wide;
            __builtin_memcpy(slot, &narrow, 4);
            return !__builtin_isinf(narrow) || __builtin_isinf(wide);
        }
    }
}

// A stream handle; None asks torch for its current stream.
static inline int read_stream(const Place* place, work_stream_fn work_stream,
                              Object* current_stream, Object* device, Object* stream,
                              void** result) {
    Object* handle = stream;
    if (stream == NONE && work_stream) return work_stream(DLPACK_CUDA, place->device, result) == 0;
    if (stream == NONE) {
        handle = PyObject_CallFunctionObjArgs(current_stream, device, (Object*)0);
        if (!handle) return 0;
    }
    const int is_int = IS(handle, PyLong_Type);
    const uint64 number = is_int ? PyLong_AsUnsignedLongLong(handle) : 0;
    if (stream == NONE) Py_DecRef(handle);
    *result = (void*)number;
    if (!is_int || number >= END_OF_ADDRESSES) return 0;
    return number <= LAST_DEFAULT_STREAM || number >= FIRST_ADDRESS;
}
