/* Loaded by LD_PRELOAD into the processes of a drill: where $ALLOCATION_LIMITS/PID.allocation exists, allocations of
   more bytes than it says fail, as where memory runs out. PyTorch's CPU allocator calls posix_memalign. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int (*real_posix_memalign)(void **, size_t, size_t);
static size_t limit;
static time_t looked;

static void look(void) {
    struct timespec now;
    const char *folder = getenv("ALLOCATION_LIMITS");
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!folder || now.tv_sec == looked)
        return;
    looked = now.tv_sec;
    char path[512];
    snprintf(path, sizeof path, "%s/%d.allocation", folder, (int)getpid());
    FILE *file = fopen(path, "r");
    limit = 0;
    if (file) {
        if (fscanf(file, "%zu", &limit) != 1)
            limit = 0;
        fclose(file);
    }
}

int posix_memalign(void **into, size_t alignment, size_t size) {
    if (!real_posix_memalign)
        real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    look();
    if (limit && size > limit)
        return ENOMEM;
    return real_posix_memalign(into, alignment, size);
}
