// The stand-in's libraries, kernels and launches. Each launch is recorded with copies of its
// parameters, whose sizes come from the cubin (fake_image.c) or from the test.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

#define MAX_ATTRIBUTES 8
#define MAX_RECORDED (1 << 18)

typedef struct {
    unsigned gridDim[3], blockDim[3], sharedMemBytes, pad;
    void* stream;
    unsigned char (*attributes)[72];
    unsigned numAttributes;
} LaunchConfig;

typedef struct {
    char name[256];
    unsigned gridDim[3], blockDim[3], sharedMemBytes, numAttributes;
    uint64_t stream, thread, total_bytes;
    int device, num_params;
    unsigned char attributes[MAX_ATTRIBUTES][72];
} Launch;
typedef struct {
    Launch launch;
    unsigned char* data;
    size_t offsets[128], sizes[128];
} Record;
typedef void (*Callback)(const Launch*, void** params);
typedef struct Rule {
    char name[256];
    int num_params;
    size_t sizes[128];
    int attributes[16], has[16];
    Callback callback;
    struct Rule* next;
} Rule;

static Record** records;
static long launch_count, recorded, capacity;
static int recording = 1;
static Rule* rules;

static Rule* rule_of(const char* name, int make) {
    for (Rule* r = rules; r; r = r->next)
        if (!strcmp(r->name, name)) return r;
    if (!make) return NULL;
    Rule* r = calloc(1, sizeof *r);
    strncpy(r->name, name, 255);
    r->num_params = -1;
    r->next = rules;
    return rules = r;
}

static uint64_t read_uint(const unsigned char* at, int bytes) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}

// ---- driver calls ----
#ifndef FAKECUDA_OLD  // a driver before 12.0 has no libraries
EXPORT CUresult cuLibraryLoadData(Library** out, const void* image, int* options, void** values,
                                  unsigned num_options, int* library_options, void** library_values,
                                  unsigned num_library_options) {
    ENTER_WORK("cuLibraryLoadData");
    (void)options, (void)values, (void)num_options;
    (void)library_options, (void)library_values, (void)num_library_options;
    if (!image) LEAVE(INVALID_VALUE);
    if (fake_strict_capture && fake_capturing && fake_capture_mode() != 2)
        LEAVE(CAPTURE_UNSUPPORTED);
    Library* lib = calloc(1, sizeof *lib);
    *lib = (Library){KIND_LIBRARY, image, fake_image_size(image), NULL, NULL};
    if (fake_is_elf(lib)) fake_read_symbols(lib);
    ++fake_live[KIND_LIBRARY - KIND_CONTEXT];
    *out = lib;
    LEAVE(OK);
}
EXPORT CUresult cuLibraryUnload(Library* lib) {
    ENTER("cuLibraryUnload");
    if (fake_kind(lib) != KIND_LIBRARY) LEAVE(INVALID_HANDLE);
    if (fake_strict_capture && fake_capturing) LEAVE(CAPTURE_UNSUPPORTED);
    lib->kind = 0;
    for (Kernel* k = lib->kernels; k; k = k->next) k->kind = 0;
    for (Global *g = lib->globals, *next; g; g = next) {
        next = g->next;
        for (int d = 0; d < MAX_DEVICES; ++d) free(g->address[d]);
        free(g);
    }
    --fake_live[KIND_LIBRARY - KIND_CONTEXT];
    LEAVE(OK);
}
EXPORT CUresult cuLibraryGetKernel(Kernel** out, Library* lib, const char* name) {
    ENTER_WORK("cuLibraryGetKernel");
    if (fake_kind(lib) != KIND_LIBRARY) LEAVE(INVALID_HANDLE);
    for (Kernel* k = lib->kernels; k; k = k->next)
        if (!strcmp(k->name, name)) {
            *out = k;
            LEAVE(OK);
        }
    if (fake_is_elf(lib) || !memmem(lib->image, lib->size, name, strlen(name))) LEAVE(NOT_FOUND);
    *out = fake_add_kernel(lib, name);
    LEAVE(OK);
}
EXPORT CUresult cuLibraryGetGlobal(void** out, size_t* bytes, Library* lib, const char* name) {
    ENTER_WORK("cuLibraryGetGlobal");
    if (fake_kind(lib) != KIND_LIBRARY) LEAVE(INVALID_HANDLE);
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    for (Global* g = lib->globals; g; g = g->next)
        if (!strcmp(g->name, name)) {
            void** address = &g->address[fake_current()->device];
            if (!*address) *address = calloc(1, g->size ? g->size : 1);
            if (out) *out = *address;
            if (bytes) *bytes = g->size;
            LEAVE(OK);
        }
    LEAVE(NOT_FOUND);
}
#endif

static CUresult function_of(Kernel* kernel, int device, Function** out) {
    if (fake_strict_capture && fake_capturing && fake_capture_mode() != 2 &&
        !kernel->functions[device])
        return CAPTURE_UNSUPPORTED;
    if (!kernel->functions[device]) {
        kernel->functions[device] = calloc(1, sizeof(Function));
        *kernel->functions[device] = (Function){KIND_FUNCTION, device, kernel};
    }
    *out = kernel->functions[device];
    return OK;
}
EXPORT CUresult cuKernelGetFunction(Function** out, Kernel* kernel) {
    ENTER_WORK("cuKernelGetFunction");
    if (fake_kind(kernel) != KIND_KERNEL) LEAVE(INVALID_HANDLE);
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    LEAVE(function_of(kernel, fake_current()->device, out));
}
static CUresult get_attribute(int* out, int attribute, Kernel* kernel, int device) {
    if (device < 0 || device >= fake_device_count) return INVALID_DEVICE;
    if (attribute < 0 || attribute > 15) return INVALID_VALUE;
    int values[16] = {
        1024, 0, 0, 0, 32, 90, 90, 0, kernel->max_dynamic[device], kernel->carveout[device]};
    Rule* rule = rule_of(kernel->name, 0);
    *out = rule && rule->has[attribute] ? rule->attributes[attribute] : values[attribute];
    return OK;
}
static CUresult set_attribute(int attribute, int value, Kernel* kernel, int device) {
    if (device < 0 || device >= fake_device_count) return INVALID_DEVICE;
    if (attribute == 8) {
        if (value < 0 || value > fake_devices[device].attributes[97]) return INVALID_VALUE;
        kernel->max_dynamic[device] = value;
    } else if (attribute == 9) {
        if (value < -1 || value > 100) return INVALID_VALUE;
        kernel->carveout[device] = value;
    } else if (attribute != 14) {
        return INVALID_VALUE;
    }
    return OK;
}
EXPORT CUresult cuKernelGetAttribute(int* out, int attribute, Kernel* kernel, int device) {
    ENTER_WORK("cuKernelGetAttribute");
    if (fake_kind(kernel) != KIND_KERNEL) LEAVE(INVALID_HANDLE);
    LEAVE(get_attribute(out, attribute, kernel, device));
}
EXPORT CUresult cuKernelSetAttribute(int attribute, int value, Kernel* kernel, int device) {
    ENTER_WORK("cuKernelSetAttribute");
    if (fake_kind(kernel) != KIND_KERNEL) LEAVE(INVALID_HANDLE);
    LEAVE(set_attribute(attribute, value, kernel, device));
}
static Kernel* kernel_of(void* handle) {
    int kind = fake_kind(handle);
    if (kind == KIND_FUNCTION) handle = ((Function*)handle)->kernel;
    return fake_kind(handle) == KIND_KERNEL ? handle : NULL;
}
static Function* as_function(void* handle) {
    return fake_kind(handle) == KIND_FUNCTION ? handle : NULL;
}
EXPORT CUresult cuFuncGetAttribute(int* out, int attribute, void* handle) {
    Function* function = as_function(handle);
    if (!function) return INVALID_HANDLE;
    ENTER_WORK("cuFuncGetAttribute");
    LEAVE(get_attribute(out, attribute, function->kernel, function->device));
}
EXPORT CUresult cuFuncSetAttribute(void* handle, int attribute, int value) {
    Function* function = as_function(handle);
    if (!function) return INVALID_HANDLE;
    ENTER_WORK("cuFuncSetAttribute");
    LEAVE(set_attribute(attribute, value, function->kernel, function->device));
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* f, int block,
                                                            size_t shared) {
    ENTER_WORK("cuOccupancyMaxActiveBlocksPerMultiprocessor");
    if (!kernel_of(f)) LEAVE(INVALID_HANDLE);
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    if (block < 1) LEAVE(INVALID_VALUE);
    int blocks = 2048 / ((block + 31) / 32 * 32);
    int by_shared = fake_devices[fake_current()->device].attributes[81] / (int)(shared + 1024);
    *out = blocks < by_shared ? blocks : by_shared;
    if (*out > 32) *out = 32;
    LEAVE(OK);
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* out, void* f, const LaunchConfig* config) {
    ENTER_WORK("cuOccupancyMaxActiveClusters");
    if (!kernel_of(f)) LEAVE(INVALID_HANDLE);
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttributes; ++i)
        if (read_uint(config->attributes[i], 4) == 4)
            for (int d = 0; d < 3; ++d)
                cluster *= (unsigned)read_uint(config->attributes[i] + 8 + 4 * d, 4);
    *out = cluster ? (int)(132 / cluster) : 0;
    LEAVE(OK);
}

static CUresult check_launch(const LaunchConfig* c, Kernel* kernel, int device) {
    const int* limits = fake_devices[device].attributes;
    unsigned cluster[3] = {1, 1, 1};
    for (unsigned i = 0; i < c->numAttributes; ++i)
        if (read_uint(c->attributes[i], 4) == 4)
            for (int d = 0; d < 3; ++d)
                cluster[d] = (unsigned)read_uint(c->attributes[i] + 8 + 4 * d, 4);
    uint64_t threads = 1;
    for (int d = 0; d < 3; ++d) {
        if (!c->gridDim[d] || c->gridDim[d] > (unsigned)limits[5 + d]) return INVALID_VALUE;
        if (!c->blockDim[d] || c->blockDim[d] > (unsigned)limits[2 + d]) return INVALID_VALUE;
        if (!cluster[d] || c->gridDim[d] % cluster[d]) return INVALID_VALUE;
        threads *= c->blockDim[d];
    }
    if (cluster[0] * cluster[1] * cluster[2] > 16) return INVALID_CLUSTER_SIZE;
    Rule* rule = rule_of(kernel->name, 0);
    if (threads > (uint64_t)(rule && rule->has[0] ? rule->attributes[0] : 1024))
        return INVALID_VALUE;
    return c->sharedMemBytes > (unsigned)kernel->max_dynamic[device] ? INVALID_VALUE : OK;
}

EXPORT CUresult cuLaunchKernelEx(const LaunchConfig* config, void* f, void** params, void** extra) {
    ENTER_WORK("cuLaunchKernelEx");
    (void)extra;
    Kernel* kernel = kernel_of(f);
    if (!kernel) LEAVE(INVALID_HANDLE);
    int device;
    CUresult code = fake_stream_device(config->stream, &device);
    if (code) LEAVE(code);
    if (fake_kind(f) == KIND_FUNCTION && ((Function*)f)->device != device) LEAVE(INVALID_HANDLE);
    if ((uintptr_t)config->stream <= 1 && fake_blocking_captures) LEAVE(CAPTURE_IMPLICIT);
    Function* function;
    if ((code = function_of(kernel, device, &function))) LEAVE(code);
    if ((code = check_launch(config, kernel, device))) LEAVE(code);
    Rule* rule = rule_of(kernel->name, 0);
    const size_t* sizes = rule && rule->num_params >= 0 ? rule->sizes : kernel->sizes;
    int count = rule && rule->num_params >= 0 ? rule->num_params : kernel->num_params;
    if (count > 0 && !params) LEAVE(INVALID_VALUE);
    ++launch_count;
    Callback callback = rule ? rule->callback : NULL;
    Record* record = calloc(1, sizeof *record);
    Launch* launch = &record->launch;
    strcpy(launch->name, kernel->name);
    memcpy(launch->gridDim, config->gridDim, 12);
    memcpy(launch->blockDim, config->blockDim, 12);
    launch->sharedMemBytes = config->sharedMemBytes;
    launch->numAttributes = config->numAttributes;
    for (unsigned i = 0; i < config->numAttributes && i < MAX_ATTRIBUTES; ++i)
        memcpy(launch->attributes[i], config->attributes[i], 72);
    launch->stream = (uint64_t)(uintptr_t)config->stream;
    launch->thread = (uint64_t)pthread_self();
    launch->device = device;
    launch->num_params = count;
    for (int i = 0; i < count; ++i) launch->total_bytes += sizes[i];
    record->data = malloc(launch->total_bytes + 1);
    size_t at = 0;
    for (int i = 0; i < count; ++i) {
        memcpy(record->data + at, params[i], sizes[i]);
        record->offsets[i] = at;
        record->sizes[i] = sizes[i];
        at += sizes[i];
    }
    Launch seen = *launch;
    if (recording && recorded < MAX_RECORDED) {
        if (recorded == capacity) {
            capacity = capacity ? 2 * capacity : 256;
            records = realloc(records, (size_t)capacity * sizeof *records);
        }
        records[recorded++] = record;
    } else {
        free(record->data);
        free(record);
    }
    fake_leave();
    if (callback) callback(&seen, params);  // a test's kernel: may call back into Python
    return OK;
}

#ifndef FAKECUDA_NO_OPTIONAL
EXPORT CUresult cuLibraryGetKernelCount(unsigned* out, Library* lib) {
    ENTER_WORK("cuLibraryGetKernelCount");
    if (fake_kind(lib) != KIND_LIBRARY) LEAVE(INVALID_HANDLE);
    *out = 0;
    for (Kernel* k = lib->kernels; k; k = k->next) ++*out;
    LEAVE(OK);
}
EXPORT CUresult cuLibraryEnumerateKernels(Kernel** out, unsigned count, Library* lib) {
    ENTER_WORK("cuLibraryEnumerateKernels");
    if (fake_kind(lib) != KIND_LIBRARY) LEAVE(INVALID_HANDLE);
    for (Kernel* k = lib->kernels; k && count; k = k->next, --count) *out++ = k;
    LEAVE(OK);
}
EXPORT CUresult cuKernelGetName(const char** out, Kernel* kernel) {
    ENTER_WORK("cuKernelGetName");
    if (fake_kind(kernel) != KIND_KERNEL) LEAVE(INVALID_HANDLE);
    *out = kernel->name;
    LEAVE(OK);
}
EXPORT CUresult cuKernelGetParamInfo(Kernel* kernel, size_t index, size_t* offset, size_t* size) {
    ENTER_WORK("cuKernelGetParamInfo");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);  // as driver 580 does
    if (fake_kind(kernel) != KIND_KERNEL) LEAVE(INVALID_HANDLE);
    Rule* rule = rule_of(kernel->name, 0);
    int ruled = rule && rule->num_params >= 0;
    if ((long)index >= (ruled ? rule->num_params : kernel->num_params)) LEAVE(INVALID_VALUE);
    size_t at = 0;
    for (size_t i = 0; ruled && i <= index; ++i) {
        at = (at + rule->sizes[i] - 1) / rule->sizes[i] * rule->sizes[i];
        if (i < index) at += rule->sizes[i];
    }
    *offset = ruled ? at : kernel->offsets[index];
    if (size) *size = ruled ? rule->sizes[index] : kernel->sizes[index];
    LEAVE(OK);
}
EXPORT CUresult cuFuncLoad(Function* function) {
    ENTER_WORK("cuFuncLoad");
    LEAVE(kernel_of(function) ? OK : INVALID_HANDLE);
}
#endif

// ---- what tests steer and ask ----
EXPORT void fakecuda_set_params(const char* name, int count, const size_t* sizes) {
    Rule* rule = rule_of(name, 1);
    rule->num_params = count;
    for (int i = 0; i < count; ++i) rule->sizes[i] = sizes[i];
}
EXPORT void fakecuda_set_kernel_attribute(const char* name, int attribute, int value) {
    Rule* rule = rule_of(name, 1);
    rule->attributes[attribute] = value;
    rule->has[attribute] = 1;
}
EXPORT void fakecuda_set_callback(const char* name, Callback callback) {
    rule_of(name, 1)->callback = callback;
}
EXPORT void fakecuda_record(int on) {
    recording = on;
}
EXPORT long fakecuda_launch_count(void) {
    return launch_count;
}
EXPORT long fakecuda_recorded(void) {
    return recorded;
}
EXPORT int fakecuda_get_launch(long index, Launch* out) {
    if (index < 0 || index >= recorded) return 0;
    *out = records[index]->launch;
    return 1;
}
EXPORT long fakecuda_get_param(long index, int param, unsigned char* out, size_t size) {
    if (index < 0 || index >= recorded) return -1;
    Record* r = records[index];
    if (param < 0 || param >= r->launch.num_params || r->sizes[param] > size) return -1;
    memcpy(out, r->data + r->offsets[param], r->sizes[param]);
    return (long)r->sizes[param];
}
void fake_free_launches(void) {
    for (long i = 0; i < recorded; ++i) {
        free(records[i]->data);
        free(records[i]);
    }
    recorded = launch_count = 0;
}
