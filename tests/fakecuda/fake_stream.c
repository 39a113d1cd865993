// The stand-in's streams and events. All work is done at once; a capture is a flag that a test
// sets.
#include <stdlib.h>

#include "fake_cuda.h"

EXPORT void fakecuda_set_capture(void* stream, int status) {
    Stream* captured = stream;
    int change = (status != 0) - (captured->capture != 0);
    fake_capturing += change;
    if (!captured->non_blocking) fake_blocking_captures += change;
    captured->capture = status;
}
EXPORT CUresult cuStreamCreate(void** out, unsigned flags) {
    ENTER_WORK("cuStreamCreate");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    Stream* stream = calloc(1, sizeof *stream);
    *stream = (Stream){KIND_STREAM, fake_current()->device, 0, flags == 1};
    ++fake_live[KIND_STREAM - KIND_CONTEXT];
    *out = stream;
    LEAVE(OK);
}
EXPORT CUresult cuStreamDestroy_v2(void* stream) {
    ENTER("cuStreamDestroy_v2");
    if (fake_kind(stream) != KIND_STREAM) LEAVE(INVALID_HANDLE);
    fakecuda_set_capture(stream, 0);
    --fake_live[KIND_STREAM - KIND_CONTEXT];
    ((Stream*)stream)->kind = 0;  // kept, so that a use of the dead handle is seen
    LEAVE(OK);
}
EXPORT CUresult cuStreamSynchronize(void* stream) {
    ENTER_WORK("cuStreamSynchronize");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (!code && fake_stream_captures(stream)) code = CAPTURE_UNSUPPORTED;
    if (!code && (uintptr_t)stream <= 1 && fake_blocking_captures) code = CAPTURE_IMPLICIT;
    if (!code) code = fake_unsafe(0);
    if (!code) fake_release_pools();
    LEAVE(code);
}
EXPORT CUresult cuStreamQuery(void* stream) {
    ENTER_WORK("cuStreamQuery");
    int device;
    LEAVE(fake_stream_device(stream, &device));
}
EXPORT CUresult cuStreamIsCapturing(void* stream, int* status) {
    ENTER_WORK("cuStreamIsCapturing");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (code) LEAVE(code);
    if ((uintptr_t)stream <= 1 && fake_blocking_captures) LEAVE(CAPTURE_IMPLICIT);
    *status = (uintptr_t)stream > 2 ? ((Stream*)stream)->capture : 0;
    LEAVE(OK);
}
EXPORT CUresult cuStreamGetCtx(void* stream, void** out) {
    ENTER_WORK("cuStreamGetCtx");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (!code) *out = &fake_devices[device].context;
    LEAVE(code);
}
EXPORT CUresult cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    (void)flags;
    ENTER_WORK("cuStreamWaitEvent");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (!code && fake_kind(event) != KIND_EVENT) code = INVALID_HANDLE;
    LEAVE(code);
}
EXPORT CUresult cuEventCreate(void** out, unsigned flags) {
    (void)flags;
    ENTER_WORK("cuEventCreate");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    Event* event = calloc(1, sizeof *event);
    *event = (Event){KIND_EVENT, fake_current()->device};
    ++fake_live[KIND_EVENT - KIND_CONTEXT];
    *out = event;
    LEAVE(OK);
}
EXPORT CUresult cuEventRecord(void* event, void* stream) {
    ENTER_WORK("cuEventRecord");
    int device;
    CUresult code = fake_stream_device(stream, &device);
    if (!code && fake_kind(event) != KIND_EVENT) code = INVALID_HANDLE;
    if (!code && ((Event*)event)->device != device) code = INVALID_HANDLE;
    LEAVE(code);
}
EXPORT CUresult cuEventQuery(void* event) {
    ENTER_WORK("cuEventQuery");
    LEAVE(fake_kind(event) == KIND_EVENT ? OK : INVALID_HANDLE);
}
EXPORT CUresult cuEventSynchronize(void* event) {
    ENTER_WORK("cuEventSynchronize");
    if (fake_kind(event) == KIND_EVENT) fake_release_pools();
    LEAVE(fake_kind(event) == KIND_EVENT ? OK : INVALID_HANDLE);
}
EXPORT CUresult cuEventElapsedTime(float* out, void* start, void* end) {
    ENTER_WORK("cuEventElapsedTime");
    if (fake_kind(start) != KIND_EVENT || fake_kind(end) != KIND_EVENT) LEAVE(INVALID_HANDLE);
    *out = 1.0f;
    LEAVE(OK);
}
EXPORT CUresult cuEventDestroy_v2(void* event) {
    ENTER("cuEventDestroy_v2");
    if (fake_kind(event) != KIND_EVENT) LEAVE(INVALID_HANDLE);
    --fake_live[KIND_EVENT - KIND_CONTEXT];
    ((Event*)event)->kind = 0;
    LEAVE(OK);
}

#ifndef FAKECUDA_NO_OPTIONAL
EXPORT CUresult cuStreamGetDevice(void* stream, int* device) {
    ENTER_WORK("cuStreamGetDevice");
    LEAVE(fake_stream_device(stream, device));
}
#endif
