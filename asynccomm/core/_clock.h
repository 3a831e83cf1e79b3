/* The time, in less than the 40 ns that the kernel's clock takes: _clock.c. */
#ifndef ASYNCCOMM_CLOCK_H
#define ASYNCCOMM_CLOCK_H

#include <stdint.h>

/* Choose the clock; once, before the others. */
void core_start_clock(void);

/* Nanoseconds of CLOCK_MONOTONIC, to half a microsecond; two calls may differ by as much in the wrong direction. */
int64_t core_nanoseconds(void);

/* The same in seconds, as Python's time.monotonic(). */
static inline double core_seconds(void) { return (double)core_nanoseconds() * 1e-9; }

#endif
