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
    PyObject *entered; /* see core_in_loop */
    double since;   /* the first await of the streak */
    int awaits;
} Streak;

typedef struct {
    PyObject_HEAD
    long long collectives, messages, submitted, nbytes;
    double limit; /* seconds */
    int detours, scopes, noted_calls;
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

/* Whether the loop of `streak` runs in this thread: 1, 0, or -1 with an exception; `other` tells whether another loop does.
 *
 * Python 3.11 calls getpid() whenever it is asked for the running loop, which takes longer than all the rest of an
 * await. There, the dict of the thread holds an object that is new whenever a loop begins to run; it is looked at
 * instead, once it is known to be that of this loop. Other versions have no such object, or ask at no cost. */
static inline int core_in_loop(Streak *streak, PyObject *get_running_loop, PyObject *key, int *other)
{
    PyObject *dict = PyThreadState_GetDict(), *entered = dict ? PyDict_GetItemWithError(dict, key) : NULL;
    *other = 0;
    if (entered && entered == streak->entered) return 1;
    PyObject *running = PyObject_CallNoArgs(get_running_loop);
    if (!running) return -1;
    int in_loop = running == streak->loop && running != Py_None;
    *other = !in_loop && running != Py_None;
    Py_DECREF(running); /* the thread that runs it holds it */
    if (in_loop && entered && entered != running) {
        PyObject *old = streak->entered;
        Py_INCREF(entered);
        streak->entered = entered;
        Py_XDECREF(old);
    }
    return in_loop;
}

/* Python's time.monotonic() */
static inline double monotonic(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
