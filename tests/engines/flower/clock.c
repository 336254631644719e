// A clock that is ahead by TEST_CLOCK_AHEAD seconds, for a program that is started with this library in LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long ahead(void) { const char *text = getenv("TEST_CLOCK_AHEAD"); return text ? atol(text) : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (!code && clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return code;
}
time_t time(time_t *out) { struct timespec now; clock_gettime(CLOCK_REALTIME, &now); if (out) *out = now.tv_sec; return now.tv_sec; }
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise; clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec; now->tv_usec = precise.tv_nsec / 1000; return 0;
}
