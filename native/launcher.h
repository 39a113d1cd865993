// What launcher.c names: Python's stable ABI as much as is used, and the structures that
// kernel_hub/launch/c_launcher.py fills in.
#pragma once

typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;
typedef long ssize;

// Python's stable ABI, as much as is used. An object begins with its reference count and its type:
// the one thing here that the ABI does not promise, so kernel_hub_type_is lets a process see it
// before anything is launched.
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

extern char PyLong_Type[], PyFloat_Type[], PyTuple_Type[], PyList_Type[], PyBytes_Type[];
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
extern ssize PyBytes_Size(Object*);
extern char* PyBytes_AsString(Object*);
extern Object* PyExc_Exception;
extern Object* PyErr_Occurred(void);
extern int PyErr_ExceptionMatches(Object*);
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
// Streams are addresses but for the default ones; kernel_hub/tensors.py has the same limits.
#define LAST_DEFAULT_STREAM 2
#define FIRST_ADDRESS 4096
#define END_OF_ADDRESSES (1ull << 63)
#define CAPSULE "kernel_hub.launcher"

typedef int (*current_context_fn)(void** context);
typedef int (*launch_ex_fn)(const void* config, void* function, void** params, void** extra);

// Kinds of parameter; kernel_hub/launch/c_launcher.py has the same list.
enum { POINTER, INT, FLOAT, DOUBLE, BYTES };

typedef struct {
    uint32 kind;
    uint32 size_bytes;
    int64 least;
    int64 most;
    Object* dtype;        // the torch dtype a POINTER's tensor must have; null: any
    uint32 dlpack_dtype;  // the same as DLPack's code, bits and lanes; 0: any
    uint32 zero_bits;     // of an address or an int, must be zero
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

// Filled in by kernel_hub/launch/c_launcher.py. Everything that it points to is kept by an object
// that the callable itself holds: whoever has that may call it, whatever else is gone.
typedef struct {
    launch_ex_fn launch_ex;
    void* function;
    Object* fallback;        // the Python launcher, same arguments
    Object* current_stream;  // device -> handle of torch's current stream
    Object* device;          // the device's number as an int
    Object* names[8];        // in the order of the enum in launcher.c
    Object *name_dtype, *name_is_cuda, *name_data_ptr;
    void* tensor_types[2];       // torch.Tensor and Parameter, whose objects `as_dltensor` takes
    dltensor_fn as_dltensor;     // null where torch has none
    work_stream_fn work_stream;  // null where torch has none
    uint32* noted;  // set by a launch that a graph capture may have recorded; null: not noted
    Place place;
    uint32 max_grid[3];
    uint32 max_block[3];
    uint32 required_block[3];  // or that it was built for; zeros: any
    uint32 cluster[3];         // compiled-in cluster, at least 1 each
    uint32 max_threads;
    uint32 num_params;
    uint32 fixed_block[3];  // zeros: the caller gives block and shared memory, else these serve
    uint32 fixed_shared;
    uint32 num_hidden;    // null pointers after the parameters that the caller gives
    uint32 least_shared;  // bytes of dynamic shared memory that the kernel was built for
    uint32 max_cluster;   // blocks of a cluster that a launch may ask for
    uint32 pad;
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

// CUlaunchAttribute.
typedef struct {
    uint32 id, pad;
    uint32 value[16];
} Attribute;
enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

// Filled in by kernel_hub/launch/c_launcher.py too.
typedef struct {
    launch_ex_fn launch_ex;
    void* function;
    void** addresses;
    Object* fallback;
    Object* current_stream;  // null: the stream in `config` stays
    Object* device;
    work_stream_fn work_stream;
    uint32* noted;
    Place place;
    Config config;
} Bound;

// A launcher of one grid, its arguments the parameters alone.
typedef struct {
    State* state;
    Object* fallback;
    uint32 grid[3];
    uint32 pad;
} At;

// A launch but for the parameters that a call brings.
typedef struct {
    State* state;
    Object* fallback;        // takes the same arguments
    Object* make;            // makes parameter 0, a new tensor, which a call returns; null: nothing
    Object* make_arguments;  // a tuple
    Config config;           // its attributes are those below
    Attribute attributes[2];
    uint32 num_given;
    uint32 num_params;         // of the function, when it was planned
    uint8 places[MAX_PARAMS];  // of what a call brings, in its order
    uint64 values[MAX_PARAMS];
} Planned;

_Static_assert(sizeof(Config) == 56, "CUlaunchConfig has 56 bytes");
_Static_assert(sizeof(Attribute) == 72, "CUlaunchAttribute has 72 bytes");
