// The floor of a launch: a C loop over prebuilt arguments, timed inside the caller's process.

#include <time.h>

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, void *, void **, void **);

// Nanoseconds a launch over `count` calls of cuLaunchKernel, or minus the CUresult.
double floor_launch(void *launch, void *function, unsigned grid, unsigned block, void *stream,
                    void **params, int count) {
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < count; ++i) {
        int code = ((launch_fn)launch)(function, grid, 1, 1, block, 1, 1, 0, stream, params, 0);
        if (code) return -code;
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / count;
}
