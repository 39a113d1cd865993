"""CUresult codes: their names, and what each means for somebody launching kernels."""

from __future__ import annotations

# CUresult -> (name, what it means for somebody launching kernels, and what to do).
RESULTS: dict[int, tuple[str, str]] = {
    1: ("CUDA_ERROR_INVALID_VALUE", "an argument is outside what the driver takes"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "memory is exhausted"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "the driver is not initialised in this process"),
    4: ("CUDA_ERROR_DEINITIALIZED", "the driver is shutting down with the process"),
    34: (
        "CUDA_ERROR_STUB_LIBRARY",
        "the library is the toolkit's link-time stub, not a driver: take its folder (…/stubs) "
        "off LD_LIBRARY_PATH",
    ),
    36: ("CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "update the NVIDIA driver"),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "the GPU is held by another process or mode"),
    100: (
        "CUDA_ERROR_NO_DEVICE",
        "the driver sees no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    101: ("CUDA_ERROR_INVALID_DEVICE", "no device of that number"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "the driver does not take this image"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "this thread has no context of the device"),
    209: (
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "the image holds no code for this GPU's compute capability",
    ),
    218: ("CUDA_ERROR_INVALID_PTX", "the PTX does not compile; the JIT log says where"),
    221: ("CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "libnvidia-ptxjitcompiler is not installed"),
    222: (
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "the PTX is newer than the driver: update the driver or build with an older toolkit",
    ),
    400: ("CUDA_ERROR_INVALID_HANDLE", "a stream, function or library handle is not valid here"),
    500: ("CUDA_ERROR_NOT_FOUND", "no symbol of that name in the image"),
    600: ("CUDA_ERROR_NOT_READY", "the work has not finished"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel accessed memory it may not"),
    701: (
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
        "registers x blockDim or shared memory exceed what an SM has: use fewer threads",
    ),
    702: ("CUDA_ERROR_LAUNCH_TIMEOUT", "a kernel ran past the display watchdog"),
    709: ("CUDA_ERROR_CONTEXT_IS_DESTROYED", "the device's context was destroyed"),
    710: ("CUDA_ERROR_ASSERT", "a device-side assert fired"),
    714: ("CUDA_ERROR_HARDWARE_STACK_ERROR", "a kernel corrupted its call stack"),
    715: ("CUDA_ERROR_ILLEGAL_INSTRUCTION", "a kernel ran an instruction the GPU lacks"),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", "a kernel used an address not aligned to its access"),
    717: ("CUDA_ERROR_INVALID_ADDRESS_SPACE", "a kernel used an address of the wrong space"),
    718: ("CUDA_ERROR_INVALID_PC", "a kernel jumped outside its code"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "a kernel died while running"),
    720: (
        "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
        "a cooperative grid must fit on the GPU at once: see .occupancy()",
    ),
    801: ("CUDA_ERROR_NOT_SUPPORTED", "this device or driver does not support it"),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not allowed while a stream is capturing"),
    901: ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier error ended the graph capture"),
    906: (
        "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "the legacy default stream was used while another stream is capturing: pass that stream",
    ),
    912: ("CUDA_ERROR_INVALID_CLUSTER_SIZE", "the cluster does not fit on this GPU"),
    999: ("CUDA_ERROR_UNKNOWN", "the driver does not say"),
}
NO_DEVICE, STUB_LIBRARY = 100, 34
# After one of these nothing works in the process any more: the context is lost.
STICKY = frozenset({700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
