// The stand-in's PTX compiler: "links" an image to what the test gave, or to the image itself.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

typedef struct {
    int kind;
    unsigned char* image;
    size_t size;
    char *info, *error;
    size_t info_size, error_size;
} Link;

static unsigned char* result;
static size_t result_size;
static char info_log[4096], error_log[4096];
static CUresult result_code;

static void say(char* to, size_t size, const char* text) {
    if (to && size) snprintf(to, size, "%s", text);
}

// ---- what tests set ----
// The machine code of every link from now on (NULL: the image itself), and what the compiler says.
EXPORT void fakecuda_set_jit(const void* image, size_t size, const char* info) {
    free(result);
    result = image ? memcpy(malloc(size), image, size) : NULL;
    result_size = size;
    snprintf(info_log, sizeof info_log, "%s", info);
    result_code = OK;
}
// Every compilation gives `code` and says `error`.
EXPORT void fakecuda_fail_jit(CUresult code, const char* error) {
    result_code = code;
    snprintf(error_log, sizeof error_log, "%s", error);
}

// ---- driver calls ----
EXPORT CUresult cuLinkCreate_v2(unsigned count, const int* options, void** values, Link** out) {
    ENTER_WORK("cuLinkCreate_v2");
    if (!fake_current()) LEAVE(INVALID_CONTEXT);
    Link* link = calloc(1, sizeof *link);
    link->kind = KIND_LINK;
    for (unsigned i = 0; i < count; ++i) {
        if (options[i] == 3) link->info = values[i];
        if (options[i] == 4) link->info_size = (size_t)values[i];
        if (options[i] == 5) link->error = values[i];
        if (options[i] == 6) link->error_size = (size_t)values[i];
    }
    *out = link;
    LEAVE(OK);
}
EXPORT CUresult cuLinkAddData_v2(Link* link, int type, const void* data, size_t size,
                                 const char* name, unsigned count, int* options, void** values) {
    ENTER_WORK("cuLinkAddData_v2");
    (void)name, (void)count, (void)options, (void)values;
    if (fake_kind(link) != KIND_LINK) LEAVE(INVALID_HANDLE);
    // A text must end in NUL; a fatbin says its own size.
    const unsigned char* bytes = data;
    int sound = type == 1 ? size && !bytes[size - 1] : type == 2 && size == fake_image_size(bytes);
    if (!sound) LEAVE(INVALID_VALUE);
    if (result_code) {
        say(link->error, link->error_size, error_log);
        LEAVE(result_code);
    }
    link->size = size;
    link->image = memcpy(malloc(size), data, size);
    LEAVE(OK);
}
EXPORT CUresult cuLinkComplete(Link* link, void** image, size_t* size) {
    ENTER_WORK("cuLinkComplete");
    if (fake_kind(link) != KIND_LINK || !link->image) LEAVE(INVALID_HANDLE);
    say(link->info, link->info_size, info_log);
    *image = result ? result : link->image;
    *size = result ? result_size : link->size;
    LEAVE(OK);
}
EXPORT CUresult cuLinkDestroy(Link* link) {
    ENTER("cuLinkDestroy");
    if (fake_kind(link) != KIND_LINK) LEAVE(INVALID_HANDLE);
    link->kind = 0;
    free(link->image);
    free(link);
    LEAVE(OK);
}
