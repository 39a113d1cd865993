// The quick path of a launch in plain C: values -> CUlaunchConfig and parameters on this stack ->
// cuLaunchKernelEx.
//
// An optional twin of the launcher that kernel_hub/_launch.py generates in Python. It takes the
// common case only and hands anything else, every error included, to the Python launcher, which
// knows the messages: so nothing here raises. Built by native/build.sh without any header or
// library: it names a few functions of Python's stable ABI, which the process that loads it
// (through ctypes) already has. One file therefore serves CPython 3.10 and all later ones.

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;
typedef long ssize;

// Python's stable ABI, as much as is used. An object begins with its reference count and its type.
typedef struct Object {
    ssize count;
    void* type;
} Object;
typedef struct {
    const char* name;
    void* function;
    int flags;
    const char* text;
} MethodDef;

extern char PyLong_Type[], PyFloat_Type[], PyTuple_Type[], PyList_Type[];
extern Object _Py_NoneStruct, _Py_TrueStruct;
extern Object* PyObject_GetAttr(Object*, Object*);
extern Object* PyObject_CallMethodObjArgs(Object*, Object*, ...);
extern Object* PyObject_CallFunctionObjArgs(Object*, ...);
extern Object* PyObject_Call(Object*, Object*, Object*);
extern Object* PyTuple_New(ssize);
extern int PyTuple_SetItem(Object*, ssize, Object*);
extern Object* PyTuple_GetItem(Object*, ssize);
extern ssize PyTuple_Size(Object*);
extern Object* PyList_GetItem(Object*, ssize);
extern ssize PyList_Size(Object*);
extern Object* PyDict_New(void);
extern int PyDict_SetItem(Object*, Object*, Object*);
extern uint64 PyLong_AsUnsignedLongLong(Object*);
extern int64 PyLong_AsLongLongAndOverflow(Object*, int*);
extern double PyFloat_AsDouble(Object*);
extern Object* PyErr_Occurred(void);
extern void PyErr_Clear(void);
extern void Py_IncRef(Object*);
extern void Py_DecRef(Object*);
extern void* PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void*);
extern Object* PyCFunction_NewEx(MethodDef*, Object*, Object*);
extern Object* PyCapsule_New(void*, const char*, void*);
extern void* PyCapsule_GetPointer(Object*, const char*);

#define NONE (&_Py_NoneStruct)
#define IS(object, kind) ((object)->type == (void*)(kind))
#define METH_FASTCALL_KEYWORDS 0x0082
#define MAX_PARAMS 64
#define CAPSULE "kernel_hub.launcher"

typedef int (*current_context_fn)(void** context);
typedef int (*launch_ex_fn)(const void* config, void* function, void** params, void** extra);

// Kinds of parameter; kernel_hub/_native.py has the same list.
enum { POINTER, INT, FLOAT, DOUBLE };

typedef struct {
    uint32 kind;
    uint32 size_bytes;
    int64 least;
    int64 most;
    Object* dtype;        // the torch dtype a POINTER's tensor must have; null: any
    uint32 dlpack_dtype;  // the same as DLPack's code, bits and lanes; 0: any
    uint32 pad;
} Param;

// DLPack's C exchange API (DLPack 1.3), as torch offers it from 2.11 on.
typedef struct {
    void* data;
    int device_type, device_id;
    int ndim;
    uint32 dtype;  // code, bits, lanes: 8, 8 and 16 bits
    int64 *shape, *strides;
    uint64 byte_offset;
} DLTensor;
typedef int (*dltensor_fn)(void* object, DLTensor* out);
typedef int (*work_stream_fn)(int device_type, int device_id, void** stream);
#define DLPACK_CUDA 2

// The device of a launcher. A NULL stream means the current context, which is asked for where there
// are several GPUs.
typedef struct {
    int device;
    int pad;
    void* context;
    current_context_fn current_context;  // null: one GPU
} Place;

// Filled in by kernel_hub/_native.py, which keeps every object alive as long as the function.
typedef struct {
    launch_ex_fn launch_ex;
    void* function;
    Object* fallback;        // the Python launcher, same arguments
    Object* current_stream;  // device -> handle of torch's current stream
    Object* device;          // the device's number as an int
    Object* names[5];        // gridDim, blockDim, sharedMemBytes, stream, params, interned
    Object *name_dtype, *name_is_cuda, *name_data_ptr;
    void* tensor_types[2];       // torch.Tensor and Parameter, whose objects `as_dltensor` takes
    dltensor_fn as_dltensor;     // null where torch has none
    work_stream_fn work_stream;  // null where torch has none
    Place place;
    uint32 max_grid[3];
    uint32 max_block[3];
    uint32 required_block[3];  // zeros: any
    uint32 cluster[3];         // compiled-in cluster, at least 1 each
    uint32 max_threads;
    uint32 num_params;
    uint64 shared_ready;  // bytes of dynamic shared memory that need no further opt-in
    Param params[MAX_PARAMS];
} State;

typedef struct {
    uint32 grid[3];
    uint32 block[3];
    uint32 shared_bytes;
    uint32 pad;
    void* stream;
    void* attributes;
    uint32 num_attributes;
    uint32 tail;
} Config;

// Filled in by kernel_hub/_native.py too.
typedef struct {
    launch_ex_fn launch_ex;
    void* function;
    void** addresses;
    Object* fallback;
    Object* current_stream;  // null: the stream in `config` stays
    Object* device;
    work_stream_fn work_stream;
    Place place;
    Config config;
} Bound;

_Static_assert(sizeof(Config) == 56, "CUlaunchConfig has 56 bytes");

// An exact int within [least, most]; 0 where it is not one.
static inline int read_int(Object* value, int64 least, int64 most, int64* result) {
    int overflow;
    if (!IS(value, PyLong_Type)) return 0;
    *result = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && *result >= least && *result <= most;
}

// An int or a tuple of three ints, each from 1 to its limit.
static inline int read_dims(Object* value, const uint32* most, uint32* result) {
    int64 number;
    result[0] = result[1] = result[2] = 1;
    if (IS(value, PyLong_Type)) {
        if (!read_int(value, 1, most[0], &number)) return 0;
        result[0] = (uint32)number;
        return 1;
    }
    if (!IS(value, PyTuple_Type) || PyTuple_Size(value) != 3) return 0;
    for (int axis = 0; axis < 3; ++axis) {
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
            return (*slot = read_tensor(s, param, value)) != 0;
        case INT:
            if (!read_int(value, param->least, param->most, &number)) return 0;
            *slot = (uint64)number;
            return 1;
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
    return is_int && number != ~0ull;
}

// Launch without holding the GIL: the driver may block. Nonzero where nothing was launched.
static inline int call_driver(const Place* place, launch_ex_fn launch_ex, const Config* config,
                              void* function, void** addresses) {
    if (place->current_context && !config->stream) {
        void* current = 0;
        if (place->current_context(&current) || current != place->context) return -1;
    }
    void* thread = PyEval_SaveThread();
    const int code = launch_ex(config, function, addresses, 0);
    PyEval_RestoreThread(thread);
    return code;
}

// Arguments by position or name into `given`; 0 where the Python launcher has to look.
static inline int read_arguments(const State* s, Object* const* args, ssize count, Object* names,
                                 Object** given) {
    if (count > 5) return 0;
    for (ssize i = 0; i < count; ++i) given[i] = args[i];
    const ssize named = names ? PyTuple_Size(names) : 0;
    for (ssize i = 0; i < named; ++i) {
        Object* name = PyTuple_GetItem(names, i);
        int at = 0;
        while (at < 5 && s->names[at] != name) ++at;
        if (at == 5 || given[at]) return 0;
        given[at] = args[count + i];
    }
    return given[0] && given[1] && given[4];
}

// 1: launched. 0: left to the Python launcher; nothing has happened.
static int try_launch(const State* s, Object* const* args, ssize count, Object* names) {
    Object* given[5] = {0, 0, 0, 0, 0};
    if (!read_arguments(s, args, count, names, given)) return 0;

    Config config;
    __builtin_memset(&config, 0, sizeof config);
    if (!read_dims(given[0], s->max_grid, config.grid)) return 0;
    if (!read_dims(given[1], s->max_block, config.block)) return 0;
    if (config.block[0] * config.block[1] * config.block[2] > s->max_threads) return 0;
    for (int axis = 0; axis < 3; ++axis) {
        if (s->required_block[axis] && config.block[axis] != s->required_block[axis]) return 0;
        if (config.grid[axis] % s->cluster[axis]) return 0;
    }
    int64 shared_bytes = 0;
    if (given[2] && !read_int(given[2], 0, (int64)s->shared_ready, &shared_bytes)) return 0;
    config.shared_bytes = (uint32)shared_bytes;

    // A list may be changed by code that a tensor's attribute runs: hold each value while it is
    // read.
    Object* params = given[4];
    const uint32 num_params = s->num_params;  // another thread may disarm this launcher meanwhile
    const int is_list = IS(params, PyList_Type);
    if (!is_list && !IS(params, PyTuple_Type)) return 0;
    if ((is_list ? PyList_Size(params) : PyTuple_Size(params)) != (ssize)num_params) return 0;
    uint64 values[MAX_PARAMS];
    void* addresses[MAX_PARAMS];
    int num_tensors = 0;
    for (uint32 i = 0; i < num_params; ++i) {
        Object* value = is_list ? PyList_GetItem(params, i) : PyTuple_GetItem(params, i);
        if (!value) return 0;
        Py_IncRef(value);
        const int fits = read_param(s, &s->params[i], value, &values[i]);
        Py_DecRef(value);
        if (!fits) return 0;
        num_tensors += s->params[i].kind == POINTER && values[i];
        addresses[i] = &values[i];
    }
    // Without a tensor the current device decides, which Python knows.
    if (s->place.current_context && !num_tensors) return 0;
    Object* stream = given[3] ? given[3] : NONE;
    if (!read_stream(&s->place, s->work_stream, s->current_stream, s->device, stream,
                     &config.stream)) {
        return 0;
    }
    // A failed launch is made again by the Python launcher, which recovers or says why it failed.
    return call_driver(&s->place, s->launch_ex, &config, s->function, addresses) == 0;
}

// The same call on the Python launcher.
static Object* fall_back(Object* fallback, Object* const* args, ssize count, Object* names) {
    if (PyErr_Occurred()) PyErr_Clear();
    Object* positional = PyTuple_New(count);
    Object* named = names ? PyDict_New() : 0;
    Object* result = 0;
    if (!positional || (names && !named)) goto done;
    for (ssize i = 0; i < count; ++i) {
        Py_IncRef(args[i]);
        PyTuple_SetItem(positional, i, args[i]);
    }
    for (ssize i = 0; names && i < PyTuple_Size(names); ++i) {
        if (PyDict_SetItem(named, PyTuple_GetItem(names, i), args[count + i])) goto done;
    }
    result = PyObject_Call(fallback, positional, named);
done:
    if (positional) Py_DecRef(positional);
    if (named) Py_DecRef(named);
    return result;
}

static Object* none(void) {
    Py_IncRef(NONE);
    return NONE;
}

static Object* launch(Object* self, Object* const* args, ssize count, Object* names) {
    const State* s = PyCapsule_GetPointer(self, CAPSULE);
    if (!s) return 0;
    return try_launch(s, args, count, names) ? none() : fall_back(s->fallback, args, count, names);
}

// A bound launch without arguments; with any, the Python twin takes over.
static Object* launch_bound(Object* self, Object* const* args, ssize count, Object* names) {
    const Bound* b = PyCapsule_GetPointer(self, CAPSULE);
    if (!b) return 0;
    if (count == 0 && !names) {
        Config config = b->config;
        const int known =
            !b->current_stream || read_stream(&b->place, b->work_stream, b->current_stream,
                                              b->device, NONE, &config.stream);
        if (known && !call_driver(&b->place, b->launch_ex, &config, b->function, b->addresses)) {
            return none();
        }
    }
    return fall_back(b->fallback, args, count, names);
}

static MethodDef methods[] = {
    {"launch", launch, METH_FASTCALL_KEYWORDS, "A launch; see KernelFunction."},
    {"launch_bound", launch_bound, METH_FASTCALL_KEYWORDS, "A bound launch; see BoundLaunch."},
};

static Object* make(MethodDef* method, void* state) {
    Object* capsule = PyCapsule_New(state, CAPSULE, 0);
    if (!capsule) return 0;
    Object* made = PyCFunction_NewEx(method, capsule, 0);
    Py_DecRef(capsule);
    return made;
}

// The Python callables for a State and a Bound, which must outlive them.
Object* kernel_hub_make_launcher(State* state) {
    return make(&methods[0], state);
}
Object* kernel_hub_make_bound(Bound* bound) {
    return make(&methods[1], bound);
}

// What _native.py compares with its own idea of the layouts before it uses anything here.
uint64 kernel_hub_state_bytes(void) {
    return sizeof(State) << 32 | sizeof(Bound);
}
