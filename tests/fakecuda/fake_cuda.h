// State shared by the files of the stand-in for libcuda: handles, devices, fault injection.
// It computes nothing on a GPU: "device" memory is malloc'd, work is done at once, launches are
// recorded.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 16

typedef int CUresult;
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_IMPLICIT = 906,
    INVALID_CLUSTER_SIZE = 912,
};

// Every handle begins with its kind, so that a wrong or dead handle gives INVALID_HANDLE.
enum {
    KIND_CONTEXT = 0xC0,
    KIND_STREAM,
    KIND_EVENT,
    KIND_POOL,
    KIND_LIBRARY,
    KIND_KERNEL,
    KIND_FUNCTION,
    KIND_LINK
};

typedef struct {
    int kind, device, retained;
} Context;
typedef struct {
    int kind, device, capture, non_blocking;
} Stream;
typedef struct {
    int kind, device;
} Event;
typedef struct Pool {
    int kind, device;
    uint64_t threshold, reserved, reserved_high, used, used_high;
    struct Pool* next;
} Pool;
typedef struct Library {
    int kind;
    const unsigned char* image;
    size_t size;
    struct Kernel* kernels;
    struct Global* globals;
} Library;
typedef struct Kernel {
    int kind;
    char name[256];
    Library* library;
    struct Kernel* next;
    int num_params;  // -1: unknown
    size_t offsets[128], sizes[128];
    int max_dynamic[MAX_DEVICES], carveout[MAX_DEVICES];
    struct Function* functions[MAX_DEVICES];
} Kernel;
typedef struct Function {
    int kind, device;
    Kernel* kernel;
} Function;
typedef struct Global {
    char name[256];
    void* address[MAX_DEVICES];
    size_t size;
    struct Global* next;
} Global;
typedef struct Allocation {
    char* address;
    size_t size;
    int device;
    Pool* pool;
    struct Allocation* next;
} Allocation;

typedef struct {
    int attributes[256];
    uint64_t total_memory, used_memory;
    Context context;
} Device;

extern Device fake_devices[MAX_DEVICES];
extern int fake_device_count;
extern int fake_strict_capture;
extern int fake_capturing;          // streams that are recording a graph
extern int fake_blocking_captures;  // those of them that wait for the legacy stream
extern long fake_capture_violations;
extern long fake_live[8];  // live handles by kind, KIND_CONTEXT = index 0
extern Allocation* fake_allocations;
extern long fake_live_allocations;
extern uint64_t fake_live_bytes;

// Takes the lock and gives the code that a fault, a fork or a lost context puts first.
CUresult fake_enter(const char* name, int* slot, int needs_context);
void fake_leave(void);
Context* fake_current(void);
int fake_capture_mode(void);  // of this thread: 0 global, 1 thread-local, 2 relaxed
// 900 where the real driver gives it and invalidates the captures: counted as a violation.
CUresult fake_unsafe(int even_relaxed);
int fake_kind(const void* handle);
// The device whose work `stream` takes (0, 1, 2 are the default streams), or a code below zero.
CUresult fake_stream_device(void* stream, int* device);
int fake_stream_captures(void* stream);
void fake_release_pools(void);  // what a synchronisation does for them
void fake_log(const char* line);
void fake_free_launches(void);
int fake_is_elf(const Library* lib);
size_t fake_image_size(const unsigned char* image);
Kernel* fake_add_kernel(Library* lib, const char* name);
void fake_read_symbols(Library* lib);  // fills the library's kernels and globals

#define ENTER_AS(name, needs)                            \
    static int slot_ = -1;                               \
    CUresult entered_ = fake_enter(name, &slot_, needs); \
    if (entered_) return entered_
#define ENTER(name) ENTER_AS(name, 0)
#define ENTER_WORK(name) ENTER_AS(name, 1)
#define LEAVE(code)              \
    do {                         \
        CUresult code_ = (code); \
        fake_leave();            \
        return code_;            \
    } while (0)
