/* The time by the processor's counter of ticks, where the kernel's clock is made of it, too; else by the kernel's clock.
 *
 * The counter is read from the last reading of the kernel's clock on, for WINDOW_NS. The length of a tick comes from all readings
 * since the start, and is used once they span LEAST_NS. A machine that was suspended or moved may count otherwise: if a tick seems
 * to have changed, all begins anew. */
#include "_clock.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define WINDOW_NS 100000   /* the kernel may adjust its clock by one part in 2,000 meanwhile: 50 ns */
#define LEAST_NS 20000000
#define MOST_TICKS 1000    /* that a reading of the kernel's clock may take: else the thread has lost its core meanwhile */
#define TRIES 100
#define LEAST_TICK 0.05 /* nanoseconds */
#define MOST_TICK 10.0
#define CLOCK_SOURCE "/sys/devices/system/clocksource/clocksource0/current_clocksource"

static int64_t by_kernel(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#if defined(__x86_64__) && defined(__linux__)
#include <x86intrin.h>

static _Atomic uint64_t turn;               /* odd while a thread changes the following */
static _Atomic int64_t first, last;         /* readings of the kernel's clock; first 0: it is the only clock */
static _Atomic uint64_t first_ticks, last_ticks; /* the counter then */
static _Atomic uint64_t window;             /* ticks; 0: the length of a tick is not known */
static _Atomic uint64_t tick;               /* in 1 / 2**32 of a nanosecond */

static uint64_t get(_Atomic uint64_t *value) { return atomic_load_explicit(value, memory_order_relaxed); }
static void set(_Atomic uint64_t *value, uint64_t to) { atomic_store_explicit(value, to, memory_order_relaxed); }

/* Read both clocks at once: the kernel's, and the counter in *ticks, or 0 there if that was not at once. */
static int64_t read_both(uint64_t *ticks)
{
    uint64_t before = __rdtsc();
    int64_t now = by_kernel();
    uint64_t took = __rdtsc() - before;
    *ticks = took < MOST_TICKS ? before + took / 2 : 0;
    return now;
}

/* The kernel uses the counter only if it runs evenly, and alike on all cores. */
void core_start_clock(void)
{
    char name[8] = "";
    FILE *file = fopen(CLOCK_SOURCE, "r");
    if (!file) return;
    if (!fgets(name, sizeof name, file)) name[0] = 0;
    fclose(file);
    if (strcmp(name, "tsc\n")) return;
    uint64_t ticks = 0;
    int64_t now = 0;
    for (int k = 0; k < TRIES && !ticks; k++) now = read_both(&ticks);
    set(&first_ticks, ticks);
    first = ticks ? now : 0;
}

static int64_t read_anew(void)
{
    uint64_t ticks, even = get(&turn);
    int64_t now = read_both(&ticks), since = first;
    if (!since || !ticks || now - since < LEAST_NS || even & 1) return now;
    if (!atomic_compare_exchange_strong(&turn, &even, even + 1)) return now;
    double each = (double)(now - since) / ((double)ticks - (double)get(&first_ticks));
    double before = get(&window) ? (double)get(&tick) * 0x1p-32 : each;
    if (each > LEAST_TICK && each < MOST_TICK && each > before * 0.99 && each < before * 1.01) {
        set(&tick, (uint64_t)(each * 0x1p32)), set(&window, (uint64_t)(WINDOW_NS / each));
        set(&last_ticks, ticks);
        last = now;
    } else {
        set(&window, 0), set(&first_ticks, ticks);
        first = now;
    }
    atomic_store_explicit(&turn, even + 2, memory_order_release);
    return now;
}

int64_t core_nanoseconds(void)
{
    uint64_t before = atomic_load_explicit(&turn, memory_order_acquire);
    uint64_t ticks = __rdtsc() - get(&last_ticks), each = get(&tick), most = get(&window);
    int64_t since = atomic_load_explicit(&last, memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    if (ticks >= most || before & 1 || before != get(&turn)) return read_anew();
    return since + (int64_t)(ticks * each >> 32);
}
#else
void core_start_clock(void) {}
int64_t core_nanoseconds(void) { return by_kernel(); }
#endif
