/* Loaded by LD_PRELOAD into the processes of a drill: their wall clock is off by the seconds in $CLOCK_OFFSETS/PID.
   The monotonic clock is left alone, as it is where NTP sets a clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real_clock_gettime)(clockid_t, struct timespec *);
static long offset;
static time_t looked;

static void look(void) {
    struct timespec now;
    const char *folder = getenv("CLOCK_OFFSETS");
    if (!real_clock_gettime)
        real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_clock_gettime(CLOCK_MONOTONIC, &now);
    if (!folder || now.tv_sec == looked)
        return;
    looked = now.tv_sec;
    char path[512];
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%ld", &offset) != 1)
            offset = 0;
        fclose(file);
    } else
        offset = 0;
}

int clock_gettime(clockid_t clock, struct timespec *into) {
    look();
    int found = real_clock_gettime(clock, into);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        into->tv_sec += offset;
    return found;
}

int gettimeofday(struct timeval *into, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    into->tv_sec = now.tv_sec;
    into->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}
