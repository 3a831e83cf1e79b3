/* The last calls of a comm, as a deque of `Called` has them. C code of this package appends to it without making objects. */
#include "_work.h"

#include <stddef.h>
#include <structmember.h>

static PyObject *CallLog_append(PyObject *self, PyObject *call)
{
    PyObject *op, *site, *end;
    long long seq;
    double started;
    if (!PyTuple_Check(call)) return PyErr_Format(PyExc_TypeError, "a call must be a tuple, got %R", call);
    if (!PyArg_ParseTuple(call, "OOLdO", &op, &site, &seq, &started, &end)) return NULL;
    double finished = end == Py_None ? -1 : PyFloat_AsDouble(end);
    if (PyErr_Occurred()) return NULL;
    core_log_call((CallLog *)self, (LoggedCall){op, site, seq, started, finished});
    Py_RETURN_NONE;
}

static Py_ssize_t CallLog_length(PyObject *self) { return ((CallLog *)self)->count; }

static PyObject *CallLog_item(PyObject *self, Py_ssize_t number)
{
    const CallLog *log = (CallLog *)self;
    if (number < 0 || number >= log->count) return PyErr_Format(PyExc_IndexError, "call %zd of %zd", number, log->count);
    Py_ssize_t place = log->next - log->count + number;
    LoggedCall found = log->calls[place < 0 ? place + log->room : place];
    Py_INCREF(found.op), Py_INCREF(found.site); /* a garbage collection may append calls */
    PyObject *call = core_called(&found);
    Py_DECREF(found.op), Py_DECREF(found.site);
    return call;
}

static PyObject *CallLog_copy(PyObject *self, PyObject *Py_UNUSED(none)) { return PySequence_List(self); }

static int CallLog_traverse(PyObject *self, visitproc visit, void *arg)
{
    const CallLog *log = (CallLog *)self;
    Py_VISIT(Py_TYPE(self));
    for (Py_ssize_t k = 0; k < log->count; k++) {
        Py_VISIT(log->calls[k].op);
        Py_VISIT(log->calls[k].site);
    }
    return 0;
}

static int CallLog_clear(PyObject *self)
{
    CallLog *log = (CallLog *)self;
    Py_ssize_t count = log->count;
    log->room = log->count = log->next = 0; /* takes no more calls */
    for (Py_ssize_t k = 0; k < count; k++) Py_DECREF(log->calls[k].op), Py_DECREF(log->calls[k].site);
    PyMem_Free(log->calls);
    log->calls = NULL;
    return 0;
}

static void CallLog_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    CallLog_clear(self);
    core_free(self);
}

/* CallLog(calls, maxlen) */
static PyObject *CallLog_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *calls;
    Py_ssize_t room;
    if (!PyArg_ParseTuple(args, "On", &calls, &room)) return NULL;
    if (room < 0) return PyErr_Format(PyExc_ValueError, "maxlen must not be negative, got %zd", room);
    CallLog *log = (CallLog *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (log && !(log->calls = PyMem_Calloc(room ? (size_t)room : 1, sizeof *log->calls))) {
        Py_DECREF((PyObject *)log);
        return PyErr_NoMemory();
    }
    if (log) log->room = room;
    PyObject *iterator = log ? PyObject_GetIter(calls) : NULL, *call;
    while (iterator && (call = PyIter_Next(iterator))) {
        PyObject *none = CallLog_append((PyObject *)log, call);
        Py_DECREF(call);
        if (!none) break;
        Py_DECREF(none);
    }
    Py_XDECREF(iterator);
    if (PyErr_Occurred()) Py_CLEAR(log);
    return (PyObject *)log;
}

static PyMethodDef log_methods[] = {
    {"append", CallLog_append, METH_O, "Append a call."},
    {"copy", CallLog_copy, METH_NOARGS, "A list of the calls, the oldest first."},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, "The type in annotations, as deque has it."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef log_members[] = {
    {"maxlen", T_PYSSIZET, offsetof(CallLog, room), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot log_slots[] = {
    {Py_tp_new, (void *)CallLog_new}, {Py_tp_dealloc, (void *)CallLog_dealloc}, {Py_tp_traverse, (void *)CallLog_traverse},
    {Py_tp_clear, (void *)CallLog_clear}, {Py_tp_methods, (void *)log_methods}, {Py_tp_members, (void *)log_members},
    {Py_sq_length, (void *)CallLog_length}, {Py_sq_item, (void *)CallLog_item}, {0, NULL}};
static PyType_Spec log_spec = {"_work.CallLog", sizeof(CallLog), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, log_slots};

int core_add_call_log(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&log_spec);
    int failed = !type || PyModule_AddObjectRef(module, "CallLog", type);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
