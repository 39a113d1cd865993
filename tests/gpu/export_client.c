// A C program on the exported launch_probe: a context of its own making, threads with streams of
// their own, unloading and loading again meanwhile, a graph, and the driver's handle.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch_probe.h"

#define CHECK(call)                                                       \
    do {                                                                  \
        CUresult result_ = (call);                                        \
        const char* name_ = "?";                                          \
        if (result_ != CUDA_SUCCESS) {                                    \
            cuGetErrorName(result_, &name_);                              \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, name_); \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

enum { NUM = 1000, NUM_THREADS = 8, ROUNDS = 200 };
static CUcontext context;
static const kernel_hub_dim3 grid = {4, 1, 1}, block = {256, 1, 1};

typedef struct {
    CUdeviceptr out, x, y;
} arrays_t;

static void fill(CUdeviceptr at, float first, float step) {
    float values[NUM];
    for (int i = 0; i < NUM; ++i) values[i] = first + step * (float)i;
    CHECK(cuMemcpyHtoD(at, values, sizeof values));
}

static arrays_t make(void) {
    arrays_t a;
    CHECK(cuMemAlloc(&a.out, NUM * sizeof(float)));
    CHECK(cuMemAlloc(&a.x, NUM * sizeof(float)));
    CHECK(cuMemAlloc(&a.y, NUM * sizeof(float)));
    fill(a.x, 1.0f, 1.0f);
    fill(a.y, 0.5f, 0.25f);
    return a;
}

// out must be x + scale * y.
static void check(const arrays_t* a, float scale, const char* where) {
    float out[NUM];
    CHECK(cuMemcpyDtoH(out, a->out, sizeof out));
    for (int i = 0; i < NUM; ++i) {
        float expected = 1.0f + (float)i + scale * (0.5f + 0.25f * (float)i);
        if (out[i] != expected) {
            fprintf(stderr, "%s: out[%d] = %g, expected %g\n", where, i, out[i], expected);
            exit(1);
        }
    }
    CHECK(cuMemsetD8(a->out, 0xff, NUM * sizeof(float)));
}

static void* work(void* unused) {
    (void)unused;
    CHECK(cuCtxSetCurrent(context));
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    arrays_t a = make();
    for (int i = 0; i < ROUNDS; ++i) {
        float scale = (float)(i % 4);
        CHECK(launch_probe_5(stream, grid, block, 0, a.out, a.x, a.y, NUM, scale));
        CHECK(cuStreamSynchronize(stream));
        if (i % 20 == 0) check(&a, scale, "thread");
    }
    return NULL;
}

static void launch_graph(const arrays_t* a) {
    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK(launch_probe_5(stream, grid, block, 0, a->out, a->x, a->y, NUM, 2.0f));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiate(&exec, graph, 0));
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    check(a, 2.0f, "graph");
    CHECK(cuGraphExecDestroy(exec));
    CHECK(cuGraphDestroy(graph));
}

// A launch with an attribute, through the driver's own call.
static void launch_with_attribute(arrays_t* a) {
    CUkernel kernel;
    CUlaunchAttribute attribute;
    CUlaunchConfig config;
    int num = NUM;
    float scale = 3.0f;
    void* params[] = {&a->out, &a->x, &a->y, &num, &scale};
    CHECK(launch_probe_get("launch_probe_5", &kernel));
    memset(&attribute, 0, sizeof attribute);
    memset(&config, 0, sizeof config);
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    config.gridDimX = grid.x;
    config.blockDimX = block.x;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    CHECK(cuLaunchKernelEx(&config, (CUfunction)kernel, params, NULL));
    check(a, scale, "attribute");
}

int main(void) {
    CUdevice device;
    CUkernel kernel;
    pthread_t threads[NUM_THREADS];
    CHECK(cuInit(0));
    if (launch_probe_load() != CUDA_ERROR_INVALID_CONTEXT) return 2;
    CHECK(cuDeviceGet(&device, 0));
#if CUDA_VERSION >= 13000
    CHECK(cuCtxCreate(&context, NULL, 0, device));
#else
    CHECK(cuCtxCreate(&context, 0, device));
#endif
    arrays_t a = make();
    launch_graph(&a);  // only now loaded, during the capture
    CHECK(launch_probe_unload());
    CHECK(launch_probe_load());
    launch_graph(&a);
    CHECK(launch_probe_5(0, grid, block, 100 * 1024, a.out, a.x, a.y, NUM, 1.0f));
    check(&a, 1.0f, "shared memory");
    kernel_hub_dim3 none = {0, 1, 1};
    if (launch_probe_5(0, none, block, 0, a.out, a.x, a.y, NUM, 1.0f) != CUDA_ERROR_INVALID_VALUE)
        return 3;
    if (launch_probe_5(0, grid, block, 1 << 20, a.out, a.x, a.y, NUM, 1.0f) !=
        CUDA_ERROR_INVALID_VALUE)
        return 4;
    if (launch_probe_get("nothing", &kernel) != CUDA_ERROR_NOT_FOUND) return 5;
    CHECK(launch_probe_unload());
    for (int i = 0; i < NUM_THREADS; ++i) pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < NUM_THREADS; ++i) pthread_join(threads[i], NULL);
    for (int i = 0; i < 20; ++i) {
        CHECK(launch_probe_5(0, grid, block, 0, a.out, a.x, a.y, NUM, 0.5f));
        check(&a, 0.5f, "reload");
        CHECK(launch_probe_unload());
    }
    launch_with_attribute(&a);

    // The same image in a second context of the device, and in its primary one.
    CUcontext primary;
    CHECK(cuDevicePrimaryCtxRetain(&primary, device));
    CHECK(cuCtxSetCurrent(primary));
    arrays_t b = make();
    CHECK(launch_probe_5(0, grid, block, 100 * 1024, b.out, b.x, b.y, NUM, 2.5f));
    check(&b, 2.5f, "primary context");
    CHECK(cuCtxSetCurrent(context));
    CHECK(launch_probe_5(0, grid, block, 100 * 1024, a.out, a.x, a.y, NUM, 1.5f));
    check(&a, 1.5f, "first context again");
    CHECK(launch_probe_unload());
    puts("all right");
    return 0;
}
