// The stand-in's memory: pools with the driver's statistics, copies checked against live
// allocations.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

Allocation* fake_allocations;
long fake_live_allocations;
uint64_t fake_live_bytes;
static void* last_free_stream;
static Pool* pools;
static const uint64_t kChunk = 32ull << 20;  // pools grow by this much

typedef struct {
    int allocType, handleTypes, locationType, device;
    void* security;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} PoolProps;
_Static_assert(sizeof(PoolProps) == 88, "CUmemPoolProps is 88 bytes");

static uint64_t round_up(uint64_t value, uint64_t unit) {
    return (value + unit - 1) / unit * unit;
}

EXPORT CUresult cuMemPoolCreate(void** out, const PoolProps* props) {
    ENTER_WORK("cuMemPoolCreate");
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    if (props->allocType != 1 || props->locationType != 1) LEAVE(INVALID_VALUE);
    if (props->device < 0 || props->device >= fake_device_count) LEAVE(INVALID_DEVICE);
    if (!fake_devices[props->device].attributes[115]) LEAVE(NOT_SUPPORTED);
    for (int i = 0; i < 54; ++i)
        if (props->reserved[i]) LEAVE(INVALID_VALUE);
    Pool* pool = calloc(1, sizeof *pool);
    pool->kind = KIND_POOL;
    pool->device = props->device;
    pool->next = pools;
    pools = pool;
    ++fake_live[KIND_POOL - KIND_CONTEXT];
    *out = pool;
    LEAVE(OK);
}
EXPORT CUresult cuMemPoolDestroy(Pool* pool) {
    ENTER_WORK("cuMemPoolDestroy");
    if (fake_kind(pool) != KIND_POOL) LEAVE(INVALID_HANDLE);
    --fake_live[KIND_POOL - KIND_CONTEXT];
    fake_devices[pool->device].used_memory -= pool->reserved;
    pool->kind = 0;
    LEAVE(OK);
}
static void release(Pool* pool, uint64_t keep) {
    uint64_t needed = round_up(pool->used, kChunk);
    if (needed < keep) needed = round_up(keep, kChunk);
    if (needed >= pool->reserved) return;
    fake_devices[pool->device].used_memory -= pool->reserved - needed;
    pool->reserved = needed;
}
// "When more than the release threshold bytes of memory are held by the memory pool, the allocator
// will try to release memory back to the OS on the next call to stream, event or context
// synchronize."
void fake_release_pools(void) {
    for (Pool* pool = pools; pool; pool = pool->next)
        if (pool->kind == KIND_POOL && pool->threshold < pool->reserved)
            release(pool, pool->threshold);
}
EXPORT CUresult cuMemPoolTrimTo(Pool* pool, size_t keep) {
    ENTER_WORK("cuMemPoolTrimTo");
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    if (fake_kind(pool) != KIND_POOL) LEAVE(INVALID_HANDLE);
    release(pool, keep);
    LEAVE(OK);
}
EXPORT CUresult cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) {
    ENTER_WORK("cuMemPoolSetAttribute");
    if (fake_kind(pool) != KIND_POOL) LEAVE(INVALID_HANDLE);
    uint64_t number = attribute >= 4 ? *(uint64_t*)value : 0;
    if (attribute == 4)
        pool->threshold = number;
    else if (attribute == 6 && number == 0)
        pool->reserved_high = pool->reserved;
    else if (attribute == 8 && number == 0)
        pool->used_high = pool->used;
    else if (attribute > 3)
        LEAVE(INVALID_VALUE);
    LEAVE(OK);
}
EXPORT CUresult cuMemPoolGetAttribute(Pool* pool, int attribute, uint64_t* value) {
    ENTER_WORK("cuMemPoolGetAttribute");
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    if (fake_kind(pool) != KIND_POOL) LEAVE(INVALID_HANDLE);
    uint64_t values[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used,
                         pool->used_high};
    if (attribute < 4 || attribute > 8) LEAVE(INVALID_VALUE);
    *value = values[attribute - 4];
    LEAVE(OK);
}
EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    ENTER_WORK("cuMemGetInfo_v2");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    Device* device = &fake_devices[fake_current()->device];
    *free_bytes = device->total_memory - device->used_memory;
    *total_bytes = device->total_memory;
    LEAVE(OK);
}

EXPORT CUresult cuMemAllocFromPoolAsync(void** out, size_t bytes, Pool* pool, void* stream) {
    ENTER_WORK("cuMemAllocFromPoolAsync");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (code) LEAVE(code);
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    if (fake_kind(pool) != KIND_POOL) LEAVE(INVALID_HANDLE);
    if (!bytes || pool->device != device) LEAVE(INVALID_VALUE);
    if ((uintptr_t)stream <= 1 && fake_blocking_captures) LEAVE(CAPTURE_IMPLICIT);
    uint64_t size = round_up(bytes, 512);
    Device* owner = &fake_devices[device];
    if (pool->used + size > pool->reserved) {
        uint64_t more = round_up(pool->used + size - pool->reserved, kChunk);
        if (more > owner->total_memory - owner->used_memory) LEAVE(OUT_OF_MEMORY);
        owner->used_memory += more;
        pool->reserved += more;
        if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    }
    void* address;
    if (posix_memalign(&address, 512, size)) LEAVE(OUT_OF_MEMORY);
    if (size < kChunk) memset(address, 0xCD, size);  // what is not written shows
    pool->used += size;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    Allocation* allocation = calloc(1, sizeof *allocation);
    *allocation = (Allocation){address, size, device, pool, fake_allocations};
    fake_allocations = allocation;
    ++fake_live_allocations;
    fake_live_bytes += size;
    *out = address;
    LEAVE(OK);
}
// From the device's own pool, of which there is one without a handle.
EXPORT CUresult cuMemAllocAsync(void** out, size_t bytes, void* stream) {
    static Pool pools[MAX_DEVICES];
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (code) return code;
    pools[device].kind = KIND_POOL;
    pools[device].device = device;
    return cuMemAllocFromPoolAsync(out, bytes, &pools[device], stream);
}
EXPORT CUresult cuMemFreeAsync(char* address, void* stream) {
    ENTER_WORK("cuMemFreeAsync");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (code) LEAVE(code);
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    if (fake_stream_captures(stream)) LEAVE(CAPTURE_UNSUPPORTED);
    if ((uintptr_t)stream <= 1 && fake_blocking_captures) LEAVE(CAPTURE_IMPLICIT);
    for (Allocation** link = &fake_allocations; *link; link = &(*link)->next) {
        Allocation* found = *link;
        if (found->address != address) continue;
        if (found->device != device) LEAVE(INVALID_VALUE);
        *link = found->next;
        found->pool->used -= found->size;
        --fake_live_allocations;
        fake_live_bytes -= found->size;
        if (found->size < kChunk) memset(address, 0xDD, found->size);
        free(address);
        free(found);
        last_free_stream = stream;
        LEAVE(OK);
    }
    LEAVE(INVALID_VALUE);
}

// ---- page-locked host memory ----
static Allocation* host_allocations;

EXPORT CUresult cuMemHostAlloc(void** out, size_t bytes, unsigned flags) {
    ENTER_WORK("cuMemHostAlloc");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    if (!bytes || flags > 7) LEAVE(INVALID_VALUE);
    void* address;
    if (bytes >> 46 || posix_memalign(&address, 4096, bytes)) LEAVE(OUT_OF_MEMORY);
    Allocation* made = calloc(1, sizeof *made);
    *made = (Allocation){address, bytes, fake_current()->device, NULL, host_allocations};
    host_allocations = made;
    *out = address;
    LEAVE(OK);
}
EXPORT CUresult cuMemFreeHost(char* address) {
    ENTER_WORK("cuMemFreeHost");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    if (fake_unsafe(0)) LEAVE(CAPTURE_UNSUPPORTED);
    for (Allocation** link = &host_allocations; *link; link = &(*link)->next) {
        Allocation* found = *link;
        if (found->address != address) continue;
        *link = found->next;
        free(address);
        free(found);
        LEAVE(OK);
    }
    LEAVE(INVALID_VALUE);
}

static Allocation* find(Allocation* among, const char* address, size_t bytes) {
    for (Allocation* a = among; a; a = a->next)
        if (address >= a->address && address + bytes <= a->address + a->size) return a;
    return NULL;
}
// Addresses outside the pools are taken on trust: module globals, and memory that a test lends.
static int inside(const char* address, size_t bytes) {
    for (Allocation* a = fake_allocations; a; a = a->next)
        if (address >= a->address && address < a->address + a->size)
            return address + bytes <= a->address + a->size;
    return 1;
}
static CUresult copy(void* to, const void* from, size_t bytes, void* stream) {
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (code) return code;
    if ((uintptr_t)stream <= 1 && fake_blocking_captures) return CAPTURE_IMPLICIT;
    if (bytes && !fake_stream_captures(stream)) memmove(to, from, bytes);
    return OK;
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(char* to, const void* from, size_t bytes, void* stream) {
    ENTER_WORK("cuMemcpyHtoDAsync_v2");
    LEAVE(inside(to, bytes) ? copy(to, from, bytes, stream) : INVALID_VALUE);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void* to, const char* from, size_t bytes, void* stream) {
    ENTER_WORK("cuMemcpyDtoHAsync_v2");
    LEAVE(inside(from, bytes) ? copy(to, from, bytes, stream) : INVALID_VALUE);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(char* to, const char* from, size_t bytes, void* stream) {
    ENTER_WORK("cuMemcpyDtoDAsync_v2");
    LEAVE(inside(from, bytes) && inside(to, bytes) ? copy(to, from, bytes, stream) : INVALID_VALUE);
}
EXPORT CUresult cuMemsetD8Async(char* to, unsigned char value, size_t bytes, void* stream) {
    ENTER_WORK("cuMemsetD8Async");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (!code && !inside(to, bytes)) code = INVALID_VALUE;
    if (!code) memset(to, value, bytes);
    LEAVE(code);
}
EXPORT CUresult cuPointerGetAttribute(void* out, int attribute, char* address) {
    ENTER_WORK("cuPointerGetAttribute");
    Allocation* host = find(host_allocations, address, 1);
    Allocation* found = host ? host : find(fake_allocations, address, 1);
    if (!found) LEAVE(INVALID_VALUE);
    if (attribute == 1)
        *(void**)out = &fake_devices[found->device].context;
    else if (attribute == 2)
        *(unsigned*)out = host ? 1 : 2;
    else if (attribute == 9)
        *(int*)out = found->device;
    else
        LEAVE(INVALID_VALUE);
    LEAVE(OK);
}

// Writes its arguments where a test can read them; the real one makes an opaque descriptor.
typedef struct {
    uint8_t dtype, rank, interleave, swizzle, l2_promotion, oob_fill, element_strides[5], pad[5];
    uint64_t address, dims[5], strides[4];
    uint16_t box[5];
} TensorMapDigest;
_Static_assert(sizeof(TensorMapDigest) <= 128, "a descriptor is 128 bytes");

EXPORT CUresult cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* address,
                                       const uint64_t* dims, const uint64_t* strides,
                                       const uint32_t* box, const uint32_t* element_strides,
                                       int interleave, int swizzle, int l2_promotion,
                                       int oob_fill) {
    ENTER("cuTensorMapEncodeTiled");
    if ((uintptr_t)map % 64 || rank < 1 || rank > 5) LEAVE(INVALID_VALUE);
    TensorMapDigest digest = {.dtype = (uint8_t)dtype,
                              .rank = (uint8_t)rank,
                              .interleave = (uint8_t)interleave,
                              .swizzle = (uint8_t)swizzle,
                              .l2_promotion = (uint8_t)l2_promotion,
                              .oob_fill = (uint8_t)oob_fill,
                              .address = (uint64_t)(uintptr_t)address};
    for (unsigned i = 0; i < rank; ++i) {
        digest.dims[i] = dims[i];
        digest.box[i] = (uint16_t)box[i];
        digest.element_strides[i] = (uint8_t)element_strides[i];
        if (i + 1 < rank) digest.strides[i] = strides[i];
    }
    memset(map, 0, 128);
    memcpy(map, &digest, sizeof digest);
    LEAVE(OK);
}

EXPORT long fakecuda_live_allocations(void) {
    return fake_live_allocations;
}
EXPORT long fakecuda_live_host_allocations(void) {
    long count = 0;
    for (Allocation* a = host_allocations; a; a = a->next) ++count;
    return count;
}
EXPORT void* fakecuda_last_free_stream(void) {
    return last_free_stream;
}
