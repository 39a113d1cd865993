// The stand-in's devices, contexts and logs, fault injection, and what tests steer and ask.
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Device fake_devices[MAX_DEVICES];
int fake_device_count = 1, fake_strict_capture = 0, fake_capturing = 0;
int fake_blocking_captures = 0;
long fake_capture_violations;
long fake_live[8];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised, version = 13000, init_code, sticky, forked, configured;
static __thread Context* context_stack[64];
static __thread int context_depth, capture_mode;

typedef struct {
    char name[64];
    long calls, latency_us;
    int code;
    long after, count;  // `count` failures once `after` calls went through; count < 0: for ever
} Call;
static Call table[160];
static int table_size;
static char* log_lines[4096];
static unsigned log_size;

static int find_call(const char* name) {
    for (int i = 0; i < table_size; ++i)
        if (!strcmp(table[i].name, name)) return i;
    snprintf(table[table_size].name, sizeof table[0].name, "%s", name);
    return table_size++;
}

void fake_log(const char* line) {
    if (log_size < 4096) log_lines[log_size++] = strdup(line);
}

static void in_child(void) {
    // The parent's other threads are gone: the lock may never be released by them.
    pthread_mutex_init(&lock, NULL);
    forked = initialised;
}

static void set_capability(int device, int major, int minor) {
    int* a = fake_devices[device].attributes;
    int hopper = major >= 9;
    a[75] = major, a[76] = minor;
    a[16] = hopper ? 132 : minor == 9 ? 142 : 108;
    a[97] = hopper ? 232448 : minor == 0 ? 166912 : 101376;
    a[81] = a[97] + 1024;
    a[38] = hopper ? 62914560 : 41943040;
    a[120] = a[127] = hopper;
}

static char fatal_call[64], fatal_end[16];

static void configure(void) {
    // The figures are an H200's.
    static const int values[][2] = {
        {1, 1024},     {2, 1024},   {3, 1024},  {4, 64},  {5, 2147483647}, {6, 65535},
        {7, 65535},    {8, 49152},  {9, 65536}, {10, 32}, {12, 65536},     {13, 1980000},
        {36, 3201000}, {37, 6144},  {39, 2048}, {41, 1},  {82, 65536},     {95, 1},
        {106, 32},     {111, 1024}, {115, 1}};
    if (configured) return;
    configured = 1;
    pthread_atfork(NULL, NULL, in_child);
    const char* text = getenv("FAKECUDA_DEVICES");
    if (text) fake_device_count = atoi(text);
    if (fake_device_count > MAX_DEVICES) fake_device_count = MAX_DEVICES;
    if ((text = getenv("FAKECUDA_DRIVER_VERSION"))) version = atoi(text);
    if ((text = getenv("FAKECUDA_INIT_CODE"))) init_code = atoi(text);
    if ((text = getenv("FAKECUDA_AT"))) sscanf(text, "%63[^=]=%15s", fatal_call, fatal_end);
    const char* capability = getenv("FAKECUDA_CC");
    for (int d = 0; d < MAX_DEVICES; ++d) {
        for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i)
            fake_devices[d].attributes[values[i][0]] = values[i][1];
        int major = 9, minor = 0;
        if (capability) sscanf(capability, "%d.%d", &major, &minor);
        set_capability(d, major, minor);
        fake_devices[d].total_memory = 150000000000ull;
        fake_devices[d].context = (Context){KIND_CONTEXT, d, 0};
    }
}

// FAKECUDA_AT=cuLibraryLoadData=abort: what this process comes to there (abort, kill, int, hang, code).
static CUresult come_to_an_end(void) {
    if (!strcmp(fatal_end, "abort")) abort();
    if (!strcmp(fatal_end, "kill")) raise(SIGKILL);
    if (!strcmp(fatal_end, "int")) raise(SIGINT);
    while (!strcmp(fatal_end, "hang")) pause();
    return (CUresult)atoi(fatal_end);
}

CUresult fake_enter(const char* name, int* slot, int needs_context) {
    if (forked) return NOT_INITIALIZED;
    if (!strcmp(name, fatal_call)) return come_to_an_end();
    pthread_mutex_lock(&lock);
    if (*slot < 0) *slot = find_call(name);
    Call* call = &table[*slot];
    ++call->calls;
    if (call->latency_us) {
        long latency = call->latency_us;
        pthread_mutex_unlock(&lock);
        usleep((useconds_t)latency);
        pthread_mutex_lock(&lock);
    }
    CUresult code = OK;
    if (call->count) {
        if (call->after > 0) {
            --call->after;
        } else {
            if (call->count > 0) --call->count;
            code = call->code;
        }
    }
    if (!code && !initialised && strcmp(name, "cuInit") && strcmp(name, "cuDriverGetVersion"))
        code = NOT_INITIALIZED;
    if (!code && needs_context) code = sticky;
    if (code) {
        char line[160];
        snprintf(line, sizeof line, "[fakecuda] %s gave %d", name, code);
        fake_log(line);
        pthread_mutex_unlock(&lock);
    }
    return code;
}

void fake_leave(void) {
    pthread_mutex_unlock(&lock);
}
Context* fake_current(void) {
    return context_depth ? context_stack[context_depth - 1] : NULL;
}
int fake_capture_mode(void) {
    return capture_mode;
}
CUresult fake_unsafe(int even_relaxed) {
    if (!fake_capturing || (capture_mode == 2 && !even_relaxed)) return OK;
    ++fake_capture_violations;
    return CAPTURE_UNSUPPORTED;
}
int fake_kind(const void* handle) {
    return (uintptr_t)handle > 4096 ? *(const int*)handle : 0;
}

CUresult fake_stream_device(void* stream, int* device) {
    if ((uintptr_t)stream <= 2) {
        if (!fake_current()) return INVALID_CONTEXT;
        *device = fake_current()->device;
        return OK;
    }
    if (fake_kind(stream) != KIND_STREAM) return INVALID_HANDLE;
    *device = ((Stream*)stream)->device;
    return OK;
}

int fake_stream_captures(void* stream) {
    return (uintptr_t)stream > 2 && ((Stream*)stream)->capture != 0;
}

// ---- driver calls ----
EXPORT CUresult cuInit(unsigned flags) {
    (void)flags;
    configure();
    ENTER("cuInit");
    if (init_code) LEAVE(init_code);
    if (fake_device_count <= 0) LEAVE(NO_DEVICE);
    initialised = 1;
    LEAVE(OK);
}
EXPORT CUresult cuDriverGetVersion(int* out) {
    configure();
    ENTER("cuDriverGetVersion");
    *out = version;
    LEAVE(OK);
}
EXPORT CUresult cuDeviceGetCount(int* out) {
    ENTER("cuDeviceGetCount");
    *out = fake_device_count;
    LEAVE(OK);
}
static CUresult check_device(int device) {
    return device < 0 || device >= fake_device_count ? INVALID_DEVICE : OK;
}
EXPORT CUresult cuDeviceGet(int* out, int ordinal) {
    ENTER("cuDeviceGet");
    *out = ordinal;
    LEAVE(check_device(ordinal));
}
EXPORT CUresult cuDeviceGetName(char* out, int size, int device) {
    ENTER("cuDeviceGetName");
    if (check_device(device)) LEAVE(INVALID_DEVICE);
    snprintf(out, (size_t)size, "Fake GPU %d", device);
    LEAVE(OK);
}
EXPORT CUresult cuDeviceGetAttribute(int* out, int attribute, int device) {
    ENTER("cuDeviceGetAttribute");
    if (check_device(device)) LEAVE(INVALID_DEVICE);
    if (attribute < 1 || attribute > 255) LEAVE(INVALID_VALUE);
    *out = fake_devices[device].attributes[attribute];
    LEAVE(OK);
}
EXPORT CUresult cuDeviceTotalMem_v2(size_t* out, int device) {
    ENTER("cuDeviceTotalMem_v2");
    if (check_device(device)) LEAVE(INVALID_DEVICE);
    *out = fake_devices[device].total_memory;
    LEAVE(OK);
}
EXPORT CUresult cuDevicePrimaryCtxRetain(void** out, int device) {
    ENTER_WORK("cuDevicePrimaryCtxRetain");
    if (check_device(device)) LEAVE(INVALID_DEVICE);
    if (!fake_devices[device].context.retained++) ++fake_live[0];
    *out = &fake_devices[device].context;
    LEAVE(OK);
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER("cuDevicePrimaryCtxRelease_v2");
    if (check_device(device)) LEAVE(INVALID_DEVICE);
    if (!fake_devices[device].context.retained) LEAVE(INVALID_CONTEXT);
    if (!--fake_devices[device].context.retained) --fake_live[0];
    LEAVE(OK);
}
static CUresult check_context(void* context) {
    if (fake_kind(context) != KIND_CONTEXT) return INVALID_CONTEXT;
    return ((Context*)context)->retained ? OK : INVALID_CONTEXT;
}
EXPORT CUresult cuCtxGetCurrent(void** out) {
    ENTER("cuCtxGetCurrent");
    *out = fake_current();
    LEAVE(OK);
}
EXPORT CUresult cuCtxSetCurrent(void* context) {
    ENTER("cuCtxSetCurrent");
    if (!context) {
        if (context_depth) --context_depth;
        LEAVE(OK);
    }
    if (check_context(context)) LEAVE(INVALID_CONTEXT);
    if (!context_depth) context_depth = 1;
    context_stack[context_depth - 1] = context;
    LEAVE(OK);
}
EXPORT CUresult cuCtxPushCurrent_v2(void* context) {
    ENTER("cuCtxPushCurrent_v2");
    if (check_context(context)) LEAVE(INVALID_CONTEXT);
    if (context_depth >= 64) LEAVE(INVALID_VALUE);
    context_stack[context_depth++] = context;
    LEAVE(OK);
}
EXPORT CUresult cuCtxPopCurrent_v2(void** out) {
    ENTER("cuCtxPopCurrent_v2");
    if (!context_depth) LEAVE(INVALID_CONTEXT);
    *out = context_stack[--context_depth];
    LEAVE(OK);
}
EXPORT CUresult cuCtxGetDevice(int* out) {
    ENTER("cuCtxGetDevice");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    *out = fake_current()->device;
    LEAVE(OK);
}
EXPORT CUresult cuCtxSynchronize(void) {
    ENTER_WORK("cuCtxSynchronize");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    CUresult code = fake_unsafe(1);
    if (!code) fake_release_pools();
    LEAVE(code);
}

EXPORT CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
    ENTER("cuThreadExchangeStreamCaptureMode");
    if (*mode < 0 || *mode > 2) LEAVE(INVALID_VALUE);
    int old = capture_mode;
    capture_mode = *mode;
    *mode = old;
    LEAVE(OK);
}
EXPORT CUresult cuGetErrorName(int code, const char** out) {
    *out = code == 1     ? "CUDA_ERROR_INVALID_VALUE"
           : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT"
           : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
           : code == 226 ? "CUDA_ERROR_FAKE_226"  // a code that driver.py's table lacks
                         : NULL;
    return *out ? OK : INVALID_VALUE;
}

#ifndef FAKECUDA_NO_OPTIONAL
EXPORT CUresult cuGetErrorString(int code, const char** out) {
    *out = code == 1     ? "invalid argument"
           : code == 200 ? "device kernel image is invalid"
           : code == 209 ? "no kernel image is available for execution on the device"
           : code == 500 ? "named symbol not found"
                         : NULL;
    return *out ? OK : INVALID_VALUE;
}
EXPORT CUresult cuLogsCurrent(unsigned* iterator, unsigned flags) {
    (void)flags;
    ENTER("cuLogsCurrent");
    *iterator = log_size;
    LEAVE(OK);
}
EXPORT CUresult cuLogsDumpToMemory(unsigned* iterator, char* out, size_t* size, unsigned flags) {
    (void)flags;
    ENTER("cuLogsDumpToMemory");
    size_t used = 0, capacity = *size;
    if (capacity) out[0] = 0;
    for (unsigned i = *iterator; i < log_size && used + 1 < capacity; ++i)
        used += (size_t)snprintf(out + used, capacity - used, "%s\n", log_lines[i]);
    *iterator = log_size;
    *size = used;
    LEAVE(OK);
}
#endif

// ---- what tests steer and ask (never counted, never failing) ----
EXPORT void fakecuda_configure(int devices, int driver_version) {
    configure();
    fake_device_count = devices;
    version = driver_version;
}
EXPORT void fakecuda_set_init_code(int code) {
    configure();
    init_code = code;
}
EXPORT void fakecuda_set_cc(int device, int major, int minor) {
    configure();
    set_capability(device, major, minor);
}
EXPORT void fakecuda_set_device_attribute(int device, int attribute, int value) {
    configure();
    fake_devices[device].attributes[attribute] = value;
}
EXPORT void fakecuda_set_total_memory(int device, uint64_t bytes) {
    configure();
    fake_devices[device].total_memory = bytes;
}
EXPORT void fakecuda_fail(const char* name, int code, long after, long count) {
    pthread_mutex_lock(&lock);
    Call* call = &table[find_call(name)];
    call->code = code, call->after = after, call->count = count;
    pthread_mutex_unlock(&lock);
}
EXPORT void fakecuda_clear_faults(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < table_size; ++i) table[i].count = table[i].latency_us = 0;
    sticky = 0;
    pthread_mutex_unlock(&lock);
}
EXPORT void fakecuda_set_sticky(int code) {
    sticky = code;
}
EXPORT void fakecuda_set_latency(const char* name, long latency_us) {
    pthread_mutex_lock(&lock);
    table[find_call(name)].latency_us = latency_us;
    pthread_mutex_unlock(&lock);
}
EXPORT long fakecuda_calls(const char* name) {
    pthread_mutex_lock(&lock);
    long calls = table[find_call(name)].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}
EXPORT long fakecuda_all_calls(void) {
    long calls = 0;
    for (int i = 0; i < table_size; ++i) calls += table[i].calls;
    return calls;
}
EXPORT void fakecuda_reset_counts(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < table_size; ++i) table[i].calls = 0;
    fake_free_launches();
    pthread_mutex_unlock(&lock);
}
EXPORT void fakecuda_log(const char* line) {
    pthread_mutex_lock(&lock);
    fake_log(line);
    pthread_mutex_unlock(&lock);
}
EXPORT void fakecuda_strict_capture(int strict) {
    fake_strict_capture = strict;
}
EXPORT long fakecuda_live(int index) {
    return fake_live[index];
}
EXPORT int fakecuda_context_depth(void) {
    return context_depth;
}
EXPORT int fakecuda_retained(int device) {
    return fake_devices[device].context.retained;
}
EXPORT long fakecuda_capture_violations(void) {
    return fake_capture_violations;
}
