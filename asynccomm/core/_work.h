/* The objects of `_work.c` that other C code of this package reads and writes. */
#ifndef ASYNCCOMM_WORK_H
#define ASYNCCOMM_WORK_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pythread.h>
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

/* A lock that its owner may take several times. The GIL guards the fields, so only a thread that waits needs the system's lock,
 * which none holds while `signalled`: it then wakes a waiting thread, or will wake the next. */
typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    unsigned long owner; /* while depth > 0 */
    int depth, waiting;
    char signalled;
} ReentrantLock;

/* The calls that a scope holds, as DeferredQueue in queue.py has them. */
typedef struct {
    PyObject_HEAD
    PyObject *items, *works; /* lists */
    double due;              /* of the first deadline */
} HeldCalls;

/* A call as `Called` in watchers.py has it; finished: negative while pending. */
typedef struct {
    PyObject *op, *site;
    long long seq;
    double started, finished;
} LoggedCall;

/* The base of objects that take calls of methods in C: _methods.c */
typedef struct {
    PyObject_HEAD
    /* Submit the call of a method's check and its arguments: whether it was taken, with its Work, or NULL and an exception. */
    int (*submit)(PyObject *self, PyObject *const *items, Py_ssize_t n, PyObject **work);
    /* Go on with a Work whose driver this is, before a task of its loop waits for it; -1 with an exception. */
    int (*advance)(PyObject *self, WorkState *work);
} DirectPath;

extern PyTypeObject *Core_DirectPath;

/* The last calls of a comm, at most `room`. */
typedef struct {
    PyObject_HEAD
    LoggedCall *calls;
    Py_ssize_t room, count, next; /* next: the place of the next call, that of the oldest once all places are taken */
} CallLog;

static inline void core_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Whether `type` is `base` or derived from it, which takes a walk over all of its bases. The first type found, most often the
 * only one, is kept in `known`. */
static inline int core_is_kind(PyTypeObject *type, PyTypeObject *base, PyTypeObject **known)
{
    if (type == *known) return 1;
    if (!PyType_IsSubtype(type, base)) return 0;
    if (!*known) Py_INCREF((PyObject *)type), *known = type;
    return 1;
}

/* Take a lock, if that needs no wait; whether it was taken. */
static inline int core_try_lock(ReentrantLock *lock)
{
    unsigned long thread = PyThread_get_thread_ident();
    if (lock->depth && lock->owner == thread) return ++lock->depth;
    if (lock->depth) return 0;
    lock->owner = thread;
    return lock->depth = 1;
}

/* Wake a waiting thread, if there is one, and none is woken already. */
static inline void core_wake(ReentrantLock *lock)
{
    if (!lock->waiting || lock->signalled) return;
    lock->signalled = 1;
    PyThread_release_lock(lock->lock);
}

static inline void core_unlock(ReentrantLock *lock)
{
    if (!--lock->depth) core_wake(lock);
}

static inline LoggedCall core_call_of(const WorkState *work)
{
    return (LoggedCall){work->op, work->site, work->seq, work->started, work->finished};
}

/* Append a call, whose objects are borrowed. */
static inline void core_log_call(CallLog *log, LoggedCall call)
{
    if (!log->room) return;
    LoggedCall *place = &log->calls[log->next], old = *place;
    Py_INCREF(call.op), Py_INCREF(call.site);
    *place = call;
    log->next = log->next + 1 == log->room ? 0 : log->next + 1;
    log->count += log->count < log->room;
    Py_XDECREF(old.op), Py_XDECREF(old.site);
}

/* Note the end of a call that was logged before it was done, if it is still in the log. */
static inline void core_log_end(CallLog *log, const WorkState *work)
{
    Py_ssize_t place = log->next;
    for (Py_ssize_t k = 0; k < log->count; k++) {
        place = place ? place - 1 : log->room - 1;
        LoggedCall *call = &log->calls[place];
        if (call->seq != work->seq || call->op != work->op) continue;
        call->finished = work->finished;
        return;
    }
}

/* A logged call as a tuple; NULL with an exception. */
static inline PyObject *core_called(const LoggedCall *logged)
{
    PyObject *end = logged->finished < 0 ? NULL : PyFloat_FromDouble(logged->finished);
    if (logged->finished >= 0 && !end) return NULL;
    PyObject *call = Py_BuildValue("(OOLdO)", logged->op, logged->site, logged->seq, logged->started, end ? end : Py_None);
    Py_XDECREF(end);
    return call;
}

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

int core_add_lock(PyObject *module);
int core_add_methods(PyObject *module);
int core_add_call_log(PyObject *module);
int core_add_held_calls(PyObject *module, PyTypeObject *work_state);

#endif
