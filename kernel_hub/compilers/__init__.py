"""C++ to machine code: nvcc, NVRTC, what the source declares. Launches nothing."""
