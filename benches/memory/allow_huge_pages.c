/* Preloaded into a satellite, so that it cannot turn off transparent huge pages for itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/prctl.h>

int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) {
    static int (*next)(int, unsigned long, unsigned long, unsigned long, unsigned long);
    if (option == PR_SET_THP_DISABLE) {
        return 0;
    }
    if (!next) {
        next = dlsym(RTLD_NEXT, "prctl");
    }
    return next(option, a, b, c, d);
}
