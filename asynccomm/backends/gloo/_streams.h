/* Collectives over sockets of their own: _streams.c; and a wait that _frames.c has, too. */
#ifndef ASYNCCOMM_STREAMS_H
#define ASYNCCOMM_STREAMS_H

#include "../../core/_work.h"

#include <sched.h>

/* Let another thread have the core, such as that of a late rank; the seconds for which one had it. */
static inline double offer_core(void)
{
    double now = monotonic();
    sched_yield();
    double took = monotonic() - now;
    return took > 5e-6 ? took : 0; /* else there was none */
}

PyObject *core_move(PyObject *module, PyObject *args);
PyObject *core_ring(PyObject *module, PyObject *args);

#endif
