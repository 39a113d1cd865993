// The quick path of a launch in plain C: values -> CUlaunchConfig and parameters on this stack ->
// cuLaunchKernelEx.
//
// An optional twin of the launcher that kernel_hub/launch/generated.py generates in Python. It
// takes the common case only and hands anything else, every error included, to the Python launcher,
// which knows the messages: so nothing here raises, and only what is no error (Ctrl-C) passes
// through. Built by native/build.sh without any header or library: it names a few functions of
// Python's stable ABI, which the process that loads it (through ctypes) already has. One file
// therefore serves CPython 3.10 and all later ones.

#include "launcher.h"
#include "read.h"

// Launch without holding the GIL: the driver may block. Nonzero where nothing was launched.
static inline int call_driver(const Place* place, launch_ex_fn launch_ex, const Config* config,
                              void* function, void** addresses, uint32* noted) {
    if (noted && config->stream) *noted = 1;  // the legacy stream is never captured
    if (place->current_context && !config->stream) {
        void* current = 0;
        if (place->current_context(&current) || current != place->context) return -1;
    }
    void* thread = PyEval_SaveThread();
    const int code = launch_ex(config, function, addresses, 0);
    PyEval_RestoreThread(thread);
    return code;
}

// SHARED_MEM is another name of SHARED_MEM_BYTES.
enum {
    GRID,
    BLOCK,
    SHARED_MEM_BYTES,
    STREAM,
    PARAMS,
    SHARED_MEM,
    PROGRAMMATIC,
    CLUSTER,
    NUM_NAMES
};

// Arguments by position or name into `given`; 0 where the Python launcher has to look.
static inline int read_arguments(const State* s, Object* const* args, ssize count, Object* names,
                                 Object** given) {
    if (count > 5) return 0;
    for (ssize i = 0; i < count; ++i) given[i] = args[i];
    const ssize named = names ? PyTuple_Size(names) : 0;
    for (ssize i = 0; i < named; ++i) {
        Object* name = PyTuple_GetItem(names, i);
        int at = 0;
        while (at < NUM_NAMES && s->names[at] != name) ++at;
        if (at == SHARED_MEM) at = SHARED_MEM_BYTES;
        if (at == NUM_NAMES || given[at]) return 0;
        given[at] = args[count + i];
    }
    return given[GRID] && given[PARAMS];
}

// Block and shared memory, given or fixed; 0 where the Python launcher has to look.
static inline int read_block(const State* s, Object* block, Object* shared, Config* config) {
    if (s->fixed_block[0]) {
        if ((block && block != NONE) || (shared && shared != NONE)) return 0;
        __builtin_memcpy(config->block, s->fixed_block, sizeof config->block);
        config->shared_bytes = s->fixed_shared;
        return 1;
    }
    if (!block || !read_dims(block, s->max_block, config->block)) return 0;
    int64 shared_bytes = 0;
    if (shared && !read_int(shared, 0, (int64)s->shared_ready, &shared_bytes)) return 0;
    if (shared_bytes < s->least_shared) return 0;
    config->shared_bytes = (uint32)shared_bytes;
    return 1;
}

// The launch attributes that are asked for; 0 where the Python launcher has to look.
static inline int read_attributes(const State* s, Object* cluster, Object* programmatic,
                                  Attribute* attributes, Config* config) {
    Attribute* end = attributes;
    // Where a launch is partly given these are too, and asked for again they are looked at.
    if ((cluster || programmatic) && s->fixed_block[0]) return 0;
    if (cluster) {
        const uint32 most = s->max_cluster;
        uint32* size = end->value;
        if (!read_dims(cluster, (const uint32[]){most, most, most}, size)) return 0;
        if (size[0] * size[1] * size[2] > most) return 0;
        for (int axis = 0; axis < 3; ++axis) {
            if (config->grid[axis] % size[axis]) return 0;
        }
        end++->id = CLUSTER_DIMENSION;
    }
    if (programmatic) {
        if (programmatic != &_Py_TrueStruct) return 0;
        end->value[0] = 1;
        end++->id = PROGRAMMATIC_STREAM_SERIALIZATION;
    }
    config->num_attributes = (uint32)(end - attributes);
    config->attributes = end == attributes ? 0 : attributes;
    return 1;
}

// The shape is what the function was compiled for; 0 where it is not.
static inline int fits(const State* s, const Config* config) {
    if (config->block[0] * config->block[1] * config->block[2] > s->max_threads) return 0;
    for (int axis = 0; axis < 3; ++axis) {
        if (s->required_block[axis] && config->block[axis] != s->required_block[axis]) return 0;
        if (config->grid[axis] % s->cluster[axis]) return 0;
    }
    return 1;
}

// The values of a launch, as the driver takes them. `count` is that of a moment when the launcher
// was armed: another thread may disarm it meanwhile.
typedef struct {
    uint32 count;
    int num_tensors;
    uint64 null;
    uint64 values[MAX_PARAMS];
    void* addresses[MAX_PARAMS];
} Values;

static inline int read_value(const State* s, uint32 index, Object* value, Values* v) {
    const uint32 size = s->params[index].size_bytes;
    if (s->params[index].kind == BYTES) {  // a tensor map, say: the driver reads it where it lies
        if (!IS(value, PyBytes_Type) || PyBytes_Size(value) != (ssize)size) return 0;
        v->addresses[index] = PyBytes_AsString(value);
        return 1;
    }
    if (!read_param(s, &s->params[index], value, &v->values[index])) return 0;
    v->num_tensors += s->params[index].kind == POINTER && v->values[index];
    v->addresses[index] = &v->values[index];
    return 1;
}

// 1: launched. 0: nothing has happened.
static inline int send(const State* s, Config* config, Values* v, Object* stream) {
    v->null = 0;
    for (uint32 i = v->count; i < v->count + s->num_hidden; ++i) v->addresses[i] = &v->null;
    // Without a tensor the current device decides, which Python knows.
    if (s->place.current_context && !v->num_tensors) return 0;
    if (!read_stream(&s->place, s->work_stream, s->current_stream, s->device,
                     stream ? stream : NONE, &config->stream)) {
        return 0;
    }
    // A failed launch is made again by the Python launcher, which recovers or says why it failed.
    return call_driver(&s->place, s->launch_ex, config, s->function, v->addresses, s->noted) == 0;
}

// What of a launch is not its parameters; 0 where the Python launcher has to look.
static inline int read_shape(const State* s, Object** given, Attribute* attributes,
                             Config* config) {
    __builtin_memset(config, 0, sizeof *config);
    return read_dims(given[GRID], s->max_grid, config->grid) &&
           read_block(s, given[BLOCK], given[SHARED_MEM_BYTES], config) && fits(s, config) &&
           read_attributes(s, given[CLUSTER], given[PROGRAMMATIC], attributes, config);
}

// 1: launched. 0: left to the Python launcher; nothing has happened.
static int try_launch(const State* s, Object* const* args, ssize count, Object* names) {
    Object* given[NUM_NAMES] = {0};
    if (!read_arguments(s, args, count, names, given)) return 0;

    Config config;
    Attribute attributes[2] = {{0}};
    if (!read_shape(s, given, attributes, &config)) return 0;

    // A list may be changed by code that a tensor's attribute runs: hold each value while it is
    // read.
    Object* params = given[PARAMS];
    Values v;
    v.count = s->num_params, v.num_tensors = 0;
    const int is_list = IS(params, PyList_Type);
    if (!is_list && !IS(params, PyTuple_Type)) return 0;
    if ((is_list ? PyList_Size(params) : PyTuple_Size(params)) != (ssize)v.count) return 0;
    for (uint32 i = 0; i < v.count; ++i) {
        Object* value = is_list ? PyList_GetItem(params, i) : PyTuple_GetItem(params, i);
        if (!value) return 0;
        Py_IncRef(value);
        // What a list lets go of meanwhile must not be read by the driver.
        const int may_go = is_list && s->params[i].kind == BYTES;
        const int taken = !may_go && read_value(s, i, value, &v);
        Py_DecRef(value);
        if (!taken) return 0;
    }
    return send(s, &config, &v, given[STREAM]);
}

// The same for a launch whose grid is known: its arguments are the parameters and, by name, the
// stream.
static int try_launch_at(const At* at, Object* const* args, ssize count, Object* names) {
    const State* s = at->state;
    Config config;
    __builtin_memset(&config, 0, sizeof config);
    __builtin_memcpy(config.grid, at->grid, sizeof config.grid);
    for (int axis = 0; axis < 3; ++axis) {
        if (config.grid[axis] > s->max_grid[axis]) return 0;
    }
    if (!read_block(s, 0, 0, &config) || !fits(s, &config)) return 0;
    Values v;
    v.count = s->num_params, v.num_tensors = 0;
    if (count != (ssize)v.count) return 0;
    Object* stream = 0;
    if (names) {
        if (PyTuple_Size(names) != 1 || PyTuple_GetItem(names, 0) != s->names[STREAM]) return 0;
        stream = args[count];
    }
    for (uint32 i = 0; i < v.count; ++i) {
        if (!read_value(s, i, args[i], &v)) return 0;
    }
    return send(s, &config, &v, stream);
}

// Everything of a launch but the parameters at `places`, read once into `p`; names: those of the
// last arguments. 0: each call has to be looked at.
int kernel_hub_plan(Planned* p, Object* arguments, Object* names) {
    const State* s = p->state;
    Object *given[NUM_NAMES] = {0}, *args[NUM_NAMES];
    const ssize count = PyTuple_Size(arguments);
    if (count > NUM_NAMES || s->num_params > MAX_PARAMS || s->fixed_block[0]) return 0;
    for (ssize i = 0; i < count; ++i) args[i] = PyTuple_GetItem(arguments, i);
    if (!read_arguments(s, args, count - PyTuple_Size(names), names, given)) return 0;
    if (!read_shape(s, given, p->attributes, &p->config)) return 0;
    Object* params = given[PARAMS];
    if (!IS(params, PyTuple_Type) || PyTuple_Size(params) != (ssize)s->num_params) return 0;
    if (given[STREAM] && given[STREAM] != NONE) return 0;
    p->num_params = s->num_params;
    uint32 at = 0;
    for (uint32 i = p->make != 0; i < p->num_params; ++i) {  // the tensor that is made comes first
        const Param* param = &s->params[i];
        const int is_brought = at < p->num_given && i == p->places[at];
        at += (uint32)is_brought;
        if (param->kind == BYTES) return 0;
        if (is_brought) continue;
        Object* value = PyTuple_GetItem(params, i);
        if (param->kind == POINTER && value != NONE) return 0;
        if (!read_param(s, param, value, &p->values[i])) return 0;
    }
    return at == p->num_given;
}

// 1: launched, and `made` is the tensor that was made for it, if one was. 0: nothing has happened.
static int try_planned(const Planned* p, Object* const* args, ssize count, Object** made) {
    const State* s = p->state;
    Values v;
    v.count = s->num_params, v.num_tensors = 0;
    if (v.count != p->num_params || count != (ssize)p->num_given) return 0;
    if (p->config.shared_bytes > s->shared_ready) return 0;
    for (uint32 i = 0; i < v.count; ++i) {
        v.values[i] = p->values[i];
        v.addresses[i] = &v.values[i];
    }
    if (p->make) {
        *made = PyObject_Call(p->make, p->make_arguments, (Object*)0);
        if (!*made || s->num_params != v.count) return 0;  // an unload, by whatever that ran
        if (!read_value(s, 0, *made, &v) || !v.num_tensors) return 0;
    }
    for (ssize i = 0; i < count; ++i) {
        if (!read_value(s, p->places[i], args[i], &v)) return 0;
    }
    Config config = p->config;
    return send(s, &config, &v, 0);
}

// The same call on the Python launcher, which meets again whatever error there was; but what is
// none (KeyboardInterrupt, SystemExit) came to the caller, and nothing is launched after it.
static Object* fall_back(Object* fallback, Object* const* args, ssize count, Object* names) {
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return 0;
        PyErr_Clear();
    }
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
    if (count == 0 && !names && b->launch_ex) {
        Config config = b->config;
        const int known =
            !b->current_stream || read_stream(&b->place, b->work_stream, b->current_stream,
                                              b->device, NONE, &config.stream);
        if (known &&
            !call_driver(&b->place, b->launch_ex, &config, b->function, b->addresses, b->noted)) {
            return none();
        }
    }
    return fall_back(b->fallback, args, count, names);
}

static Object* launch_at(Object* self, Object* const* args, ssize count, Object* names) {
    const At* at = PyCapsule_GetPointer(self, CAPSULE);
    if (!at) return 0;
    return try_launch_at(at, args, count, names) ? none()
                                                 : fall_back(at->fallback, args, count, names);
}

static Object* launch_planned(Object* self, Object* const* args, ssize count, Object* names) {
    const Planned* p = PyCapsule_GetPointer(self, CAPSULE);
    if (!p) return 0;
    Object* made = 0;
    if (!names && try_planned(p, args, count, &made)) return made ? made : none();
    if (made) Py_DecRef(made);
    return fall_back(p->fallback, args, count, names);
}

static MethodDef methods[] = {
    {"launch", launch, METH_FASTCALL_KEYWORDS, "A launch; see KernelFunction."},
    {"launch_bound", launch_bound, METH_FASTCALL_KEYWORDS, "A bound launch; see BoundLaunch."},
    {"launch_at", launch_at, METH_FASTCALL_KEYWORDS, "A launch of one grid; its parameters."},
    {"launch_planned", launch_planned, METH_FASTCALL_KEYWORDS, "A planned launch; what is new."},
};

// The Python callable of `method` for a State, a Bound, an At or a Planned, which lies in `keep` or
// is kept by it: held as the callable's module, at no cost to a call.
Object* kernel_hub_make(uint32 method, void* state, Object* keep) {
    Object* capsule = PyCapsule_New(state, CAPSULE, 0);
    if (!capsule) return 0;
    Object* made = PyCFunction_NewEx(&methods[method], capsule, keep);
    Py_DecRef(capsule);
    return made;
}

// What c_launcher.py compares with its own idea of the layouts before it uses anything here.
uint64 kernel_hub_state_bytes(void) {
    return sizeof(State) << 48 | sizeof(Planned) << 32 | sizeof(Bound) << 16 | sizeof(At);
}

// Whether `object` is of exactly that type: 0 to 4 for int, float, tuple, list and bytes.
int kernel_hub_type_is(const Object* object, uint32 kind) {
    const void* const types[] = {PyLong_Type, PyFloat_Type, PyTuple_Type, PyList_Type,
                                 PyBytes_Type};
    return IS(object, types[kind]);
}
