/* A lock that its owner may take several times, as threading.RLock, which C code of this package takes without a call. */
#include "_work.h"

/* Wait for the lock: 1; 0: `wait` is 0 and another thread holds it; -1 with the exception of a signal's handler. */
static int take(ReentrantLock *lock, int wait)
{
    while (!core_try_lock(lock)) {
        PyLockStatus status;
        if (!wait) return 0;
        lock->waiting++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock->lock, -1, 1);
        Py_END_ALLOW_THREADS
        lock->waiting--;
        if (status == PY_LOCK_ACQUIRED) lock->signalled = 0; /* another thread may have been faster */
        if (!PyErr_CheckSignals()) continue;
        if (!lock->depth) core_wake(lock); /* the thread that was woken does not take it */
        return -1;
    }
    return 1;
}

static PyObject *Lock_acquire(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"blocking", NULL};
    int blocking = 1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|p", names, &blocking)) return NULL;
    int taken = take((ReentrantLock *)self, blocking);
    return taken < 0 ? NULL : PyBool_FromLong(taken);
}

static PyObject *Lock_enter(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (take((ReentrantLock *)self, 1) < 0) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *release(PyObject *self)
{
    ReentrantLock *lock = (ReentrantLock *)self;
    if (!lock->depth || lock->owner != PyThread_get_thread_ident()) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release a lock that this thread does not hold");
        return NULL;
    }
    core_unlock(lock);
    Py_RETURN_NONE;
}

static PyObject *Lock_release(PyObject *self, PyObject *Py_UNUSED(none)) { return release(self); }

static PyObject *Lock_exit(PyObject *self, PyObject *Py_UNUSED(error)) { return release(self); }

static PyObject *Lock_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    ReentrantLock *lock = (ReentrantLock *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!lock) return NULL;
    lock->lock = PyThread_allocate_lock();
    if (lock->lock && PyThread_acquire_lock(lock->lock, NOWAIT_LOCK)) return (PyObject *)lock;
    Py_DECREF((PyObject *)lock);
    return PyErr_NoMemory();
}

static void Lock_dealloc(PyObject *self)
{
    ReentrantLock *lock = (ReentrantLock *)self;
    if (lock->lock) {
        if (!lock->signalled) PyThread_release_lock(lock->lock);
        PyThread_free_lock(lock->lock);
    }
    core_free(self);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))Lock_acquire, METH_VARARGS | METH_KEYWORDS, "Take the lock; False if that would wait, and `blocking` is false."},
    {"release", Lock_release, METH_NOARGS, "Release the lock as often as it was taken."},
    {"__enter__", Lock_enter, METH_NOARGS, "Take the lock."},
    {"__exit__", Lock_exit, METH_VARARGS, "Release the lock."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot lock_slots[] = {
    {Py_tp_new, (void *)Lock_new}, {Py_tp_dealloc, (void *)Lock_dealloc}, {Py_tp_methods, (void *)lock_methods}, {0, NULL}};
static PyType_Spec lock_spec = {"_work.ReentrantLock", sizeof(ReentrantLock), 0, Py_TPFLAGS_DEFAULT, lock_slots};

int core_add_lock(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&lock_spec);
    int failed = !type || PyModule_AddObjectRef(module, "ReentrantLock", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
