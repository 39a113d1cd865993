// What the stand-in reads of an image: kernels, globals and parameter sizes of an ELF64 cubin.
// Trusts its input (kernel_hub has validated it); other images are only searched for names.
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

static uint64_t read_uint(const unsigned char* at, int bytes) {
    uint64_t value = 0;
    memcpy(&value, at, (size_t)bytes);
    return value;
}
int fake_is_elf(const Library* lib) {
    return !memcmp(lib->image, "\177ELF", 4);
}
static const unsigned char* section_at(const Library* lib, unsigned index) {
    return lib->image + read_uint(lib->image + 40, 8) + index * 64ull;
}
static const char* section_name(const Library* lib, unsigned index) {
    const unsigned char* names = section_at(lib, (unsigned)read_uint(lib->image + 62, 2));
    return (const char*)lib->image + read_uint(names + 24, 8) +
           read_uint(section_at(lib, index), 4);
}
size_t fake_image_size(const unsigned char* image) {
    if (!memcmp(image, "\177ELF", 4))
        return read_uint(image + 40, 8) + 64 * read_uint(image + 60, 2);
    if (read_uint(image, 4) == 0xBA55ED50) return 16 + read_uint(image + 8, 8);
    return strlen((const char*)image);
}

Kernel* fake_add_kernel(Library* lib, const char* name) {
    Kernel* kernel = calloc(1, sizeof *kernel);
    kernel->kind = KIND_KERNEL;
    kernel->library = lib;
    kernel->num_params = -1;
    strncpy(kernel->name, name, 255);
    for (int d = 0; d < MAX_DEVICES; ++d) kernel->max_dynamic[d] = 49152, kernel->carveout[d] = -1;
    kernel->next = lib->kernels;
    return lib->kernels = kernel;
}

static void read_params(Kernel* kernel, const unsigned char* at, const unsigned char* end) {
    kernel->num_params = 0;
    while (at + 4 <= end) {
        unsigned format = at[0], code = at[1],
                 length = format == 4 ? (unsigned)read_uint(at + 2, 2) : 0;
        const unsigned char* p = at + 4;
        if (format == 4 && (code == 0x17 || code == 0x45)) {
            unsigned ordinal = (unsigned)read_uint(p + 4, 2);
            if (ordinal < 128) {
                kernel->offsets[ordinal] = read_uint(p + 6, 2);
                kernel->sizes[ordinal] =
                    code == 0x17 ? (read_uint(p + 8, 4) >> 18) & 0x3fff : read_uint(p + 8, 2);
                if ((int)ordinal >= kernel->num_params) kernel->num_params = (int)ordinal + 1;
            }
        }
        at = p + length;
    }
}

void fake_read_symbols(Library* lib) {
    unsigned count = (unsigned)read_uint(lib->image + 60, 2);
    for (unsigned i = 0; i < count; ++i) {
        const unsigned char* section = section_at(lib, i);
        if (read_uint(section + 4, 4) != 2) continue;  // SHT_SYMTAB
        const unsigned char* strings = section_at(lib, (unsigned)read_uint(section + 40, 4));
        const char* names = (const char*)lib->image + read_uint(strings + 24, 8);
        const unsigned char* symbol = lib->image + read_uint(section + 24, 8);
        const unsigned char* end = symbol + read_uint(section + 32, 8);
        for (; symbol < end; symbol += 24) {
            const char* name = names + read_uint(symbol, 4);
            int type = symbol[4] & 15;
            if (type == 2 && symbol[5] & 0x10) fake_add_kernel(lib, name);
            if (type != 1) continue;
            Global* global = calloc(1, sizeof *global);
            strncpy(global->name, name, 255);
            global->size = read_uint(symbol + 16, 8);
            global->next = lib->globals;
            lib->globals = global;
        }
    }
    for (unsigned i = 0; i < count; ++i)
        for (Kernel* k = lib->kernels; k; k = k->next) {
            const char* name = section_name(lib, i);
            const unsigned char* section = section_at(lib, i);
            const unsigned char* at = lib->image + read_uint(section + 24, 8);
            if (!strncmp(name, ".nv.info.", 9) && !strcmp(name + 9, k->name))
                read_params(k, at, at + read_uint(section + 32, 8));
        }
}
