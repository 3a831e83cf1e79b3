/* The objects of `_work.c` that other C code of this package reads and writes. */
#ifndef ASYNCCOMM_WORK_H
#define ASYNCCOMM_WORK_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <time.h>

typedef struct {
    PyObject_HEAD
    PyObject *loop; /* or NULL */
    double since;   /* the first await of the streak */
    int awaits;
} Streak;

typedef struct {
    PyObject_HEAD
    long long collectives, messages, submitted;
    double limit; /* seconds */
    int detours;
    char closed;
} CallCounts;

typedef struct {
    PyObject_HEAD
    PyObject *op, *mailbox, *value, *error, *traceback, *finish, *site, *source, *order, *driver, *on_overdue, *on_settled;
    PyObject *waiters, *listeners, *callbacks; /* lists, made when they are first read */
    long long seq;
    double timeout, started, finished; /* seconds; finished: negative while pending */
    char done, captured;
} WorkState;

/* Python's time.monotonic() */
static inline double monotonic(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
