// More than 4 KiB of parameters: another record for them.
struct Huge {
    char bytes[4100];
};

extern "C" __global__ void huge(const __grid_constant__ Huge bytes, int* out, int i) {
    out[i] = bytes.bytes[i];
}
