/* The state of a Work and its `await`, the counts of a comm's calls, and the streak of awaits, as python_state.py has
 * them in Python. A finished Work is awaited without any Python code. */
#include "_clock.h"
#include "_work.h"

#include <stddef.h>
#include <structmember.h>

#define STREAK_AWAITS 64
#define STREAK_SECONDS 1e-3

static PyTypeObject *Streak_Type, *Finished_Type, *known_streak;
static PyObject *get_running_loop, *name_running, *name_wait, *name_report;

/* ---- Streak ------------------------------------------------------------------------------------------------------- */

/* Count one await that does not suspend, unless other tasks have to run: then it is not counted. */
static int goes_on(Streak *streak)
{
    double now = core_seconds();
    if (!streak->awaits) streak->since = now;
    if (streak->awaits + 1 >= STREAK_AWAITS || now - streak->since >= STREAK_SECONDS) return 0;
    streak->awaits++;
    return 1;
}

static PyObject *Streak_should_yield(PyObject *self, PyObject *Py_UNUSED(none))
{
    if (goes_on((Streak *)self)) Py_RETURN_FALSE;
    ((Streak *)self)->awaits = 0;
    Py_RETURN_TRUE;
}

static PyObject *Streak_reset_streak(PyObject *self, PyObject *Py_UNUSED(none))
{
    ((Streak *)self)->awaits = 0;
    Py_RETURN_NONE;
}

static int Streak_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Streak *)self)->loop);
    Py_VISIT(((Streak *)self)->entered);
    return 0;
}

static int Streak_clear(PyObject *self)
{
    Py_CLEAR(((Streak *)self)->loop);
    Py_CLEAR(((Streak *)self)->entered);
    return 0;
}

static void Streak_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Streak_clear(self);
    core_free(self);
}

static PyMemberDef streak_members[] = {{"loop", T_OBJECT, offsetof(Streak, loop), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyMethodDef streak_methods[] = {
    {"should_yield", Streak_should_yield, METH_NOARGS, "Count one await that did not suspend."},
    {"reset_streak", Streak_reset_streak, METH_NOARGS, "End the streak: an await did suspend."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot streak_slots[] = {
    {Py_tp_dealloc, (void *)Streak_dealloc}, {Py_tp_traverse, (void *)Streak_traverse}, {Py_tp_clear, (void *)Streak_clear},
    {Py_tp_members, streak_members}, {Py_tp_methods, streak_methods}, {0, NULL}};
static PyType_Spec streak_spec = {
    "_work.Streak", sizeof(Streak), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, streak_slots};

/* ---- CallCounts --------------------------------------------------------------------------------------------------- */

static PyMemberDef counts_members[] = {
    {"collectives", T_LONGLONG, offsetof(CallCounts, collectives), 0, NULL},
    {"messages", T_LONGLONG, offsetof(CallCounts, messages), 0, NULL},
    {"submitted", T_LONGLONG, offsetof(CallCounts, submitted), 0, NULL},
    {"nbytes", T_LONGLONG, offsetof(CallCounts, nbytes), 0, NULL},
    {"limit", T_DOUBLE, offsetof(CallCounts, limit), 0, NULL},
    {"detours", T_INT, offsetof(CallCounts, detours), 0, NULL},
    {"scopes", T_INT, offsetof(CallCounts, scopes), 0, NULL},
    {"noted_calls", T_INT, offsetof(CallCounts, noted_calls), 0, NULL},
    {"closed", T_BOOL, offsetof(CallCounts, closed), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot counts_slots[] = {{Py_tp_dealloc, (void *)core_free}, {Py_tp_members, counts_members}, {0, NULL}};
static PyType_Spec counts_spec = {"_work.CallCounts", sizeof(CallCounts), 0, Py_TPFLAGS_DEFAULT, counts_slots};

/* ---- WorkState ---------------------------------------------------------------------------------------------------- */

/* The iterator of an await that does not suspend. */
typedef struct {
    PyObject_HEAD
    PyObject *value; /* NULL once returned */
} Finished;

static PyObject *spare; /* memory of the last one, for the next one */

static void Finished_dealloc(PyObject *self)
{
    Py_CLEAR(((Finished *)self)->value); /* which may make others */
    if (spare) {
        core_free(self);
        return;
    }
    spare = self;
    Py_DECREF((PyObject *)Finished_Type);
}

static PyObject *Finished_next(PyObject *self)
{
    PyObject *value = ((Finished *)self)->value;
    ((Finished *)self)->value = NULL;
    if (value && value != Py_None) {
        if (PyTuple_Check(value) || PyExceptionInstance_Check(value)) { /* would be taken for the arguments */
            PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, value, NULL);
            if (stop) PyErr_SetObject(PyExc_StopIteration, stop);
            Py_XDECREF(stop);
        } else {
            PyErr_SetObject(PyExc_StopIteration, value);
        }
    }
    Py_XDECREF(value);
    return NULL;
}

static PySendResult Finished_send(PyObject *self, PyObject *Py_UNUSED(argument), PyObject **result)
{
    *result = ((Finished *)self)->value;
    ((Finished *)self)->value = NULL;
    if (!*result) *result = Py_None, Py_INCREF(Py_None);
    return PYGEN_RETURN;
}

static PyObject *itself(PyObject *self)
{
    Py_INCREF(self);
    return self;
}

static PyType_Slot finished_slots[] = {
    {Py_tp_dealloc, (void *)Finished_dealloc}, {Py_tp_iter, (void *)itself}, {Py_tp_iternext, (void *)Finished_next},
    {Py_am_send, (void *)Finished_send}, {0, NULL}};
static PyType_Spec finished_spec = {
    "_work.Finished", sizeof(Finished), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, finished_slots};

static PyObject *new_finished(PyObject *value)
{
    Finished *finished = (Finished *)(spare ? PyObject_Init(spare, Finished_Type) : PyType_GenericAlloc(Finished_Type, 0));
    if (!finished) return NULL;
    spare = (PyObject *)finished == spare ? NULL : spare;
    finished->value = value;
    Py_INCREF(value);
    return (PyObject *)finished;
}

/* Have the driver of a Work go on with it, if it does so in C; -1 with an exception. */
static int advance(WorkState *work)
{
    PyObject *driver = work->driver;
    int other;
    if (work->done || !driver || !PyType_IsSubtype(Py_TYPE(driver), Core_DirectPath) || !work->mailbox || !core_is_kind(Py_TYPE(work->mailbox), Streak_Type, &known_streak))
        return 0;
    int in_loop = core_in_loop((Streak *)work->mailbox, get_running_loop, name_running, &other);
    if (in_loop <= 0) return in_loop;
    Py_INCREF(driver);
    int result = ((DirectPath *)driver)->advance(driver, work);
    Py_DECREF(driver);
    return result;
}

/* Whether an await returns the value at once: all other cases are for the method `_wait`. */
static int returns_at_once(WorkState *work)
{
    if (!work->done || work->captured || (work->error && work->error != Py_None) || (work->finish && work->finish != Py_None)
        || !work->mailbox || !core_is_kind(Py_TYPE(work->mailbox), Streak_Type, &known_streak))
        return 0;
    int other, in_loop = core_in_loop((Streak *)work->mailbox, get_running_loop, name_running, &other);
    return in_loop > 0 ? goes_on((Streak *)work->mailbox) : in_loop;
}

static PyObject *WorkState_await(PyObject *self)
{
    WorkState *work = (WorkState *)self;
    if (advance(work)) return NULL;
    int at_once = returns_at_once(work);
    if (at_once < 0) return NULL;
    if (!at_once) return PyObject_CallMethodObjArgs(self, name_wait, NULL);
    return new_finished(work->value ? work->value : Py_None);
}

/* An error that was never retrieved is reported. */
static void WorkState_finalize(PyObject *self)
{
    PyObject *error = ((WorkState *)self)->error, *type, *value, *traceback;
    if (!error || error == Py_None) return;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallMethodObjArgs(self, name_report, NULL);
    if (result) Py_DECREF(result);
    else PyErr_WriteUnraisable(self);
    PyErr_Restore(type, value, traceback);
}

#define OBJECTS(DO)                                                                                                    \
    DO(op) DO(mailbox) DO(value) DO(error) DO(traceback) DO(finish) DO(site) DO(source) DO(order) DO(driver)           \
    DO(on_overdue) DO(on_settled) DO(waiters) DO(listeners) DO(callbacks)

static int WorkState_traverse(PyObject *self, visitproc visit, void *arg)
{
    WorkState *work = (WorkState *)self;
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT(work->name);
    OBJECTS(VISIT)
    return 0;
}

static int WorkState_clear(PyObject *self)
{
    WorkState *work = (WorkState *)self;
#define CLEAR(name) Py_CLEAR(work->name);
    OBJECTS(CLEAR)
    return 0;
}

static void WorkState_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    WorkState_clear(self);
    core_free(self);
}

static PyObject *WorkState_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    WorkState *work = (WorkState *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (work) work->seq = -1, work->finished = -1;
    return (PyObject *)work;
}

/* the list at `offset` of the state */
static PyObject *list_of(PyObject *self, void *offset)
{
    PyObject **place = (PyObject **)((char *)self + (size_t)offset);
    if (!*place && !(*place = PyList_New(0))) return NULL;
    Py_INCREF(*place);
    return *place;
}

static int set_list(PyObject *self, PyObject *value, void *offset)
{
    PyObject **place = (PyObject **)((char *)self + (size_t)offset), *old = *place;
    Py_XINCREF(value);
    *place = value;
    Py_XDECREF(old);
    return 0;
}

static PyObject *finished_of(PyObject *self, void *Py_UNUSED(closure))
{
    double finished = ((WorkState *)self)->finished;
    if (finished < 0) Py_RETURN_NONE;
    return PyFloat_FromDouble(finished);
}

static int set_finished(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    double finished = !value || value == Py_None ? -1 : PyFloat_AsDouble(value);
    if (PyErr_Occurred()) return -1;
    ((WorkState *)self)->finished = finished;
    return 0;
}

#define OBJECT(name, field) {name, T_OBJECT, offsetof(WorkState, field), 0, NULL}
static PyMemberDef state_members[] = {
    OBJECT("op", op), OBJECT("_mailbox", mailbox), OBJECT("_value", value), OBJECT("_error", error),
    OBJECT("_traceback", traceback), OBJECT("_finish", finish), OBJECT("site", site), OBJECT("source", source),
    OBJECT("order", order), OBJECT("driver", driver), OBJECT("_on_overdue", on_overdue), OBJECT("_on_settled", on_settled),
    {"seq", T_LONGLONG, offsetof(WorkState, seq), 0, NULL},
    {"timeout", T_DOUBLE, offsetof(WorkState, timeout), 0, NULL},
    {"started", T_DOUBLE, offsetof(WorkState, started), 0, NULL},
    {"_done", T_BOOL, offsetof(WorkState, done), 0, NULL},
    {"captured", T_BOOL, offsetof(WorkState, captured), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
#define LIST(name, field) {name, list_of, set_list, NULL, (void *)offsetof(WorkState, field)}
static PyGetSetDef state_properties[] = {
    LIST("_waiters", waiters), LIST("_listeners", listeners), LIST("_callbacks", callbacks),
    {"finished", finished_of, set_finished, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot state_slots[] = {
    {Py_tp_new, (void *)WorkState_new}, {Py_tp_dealloc, (void *)WorkState_dealloc}, {Py_tp_traverse, (void *)WorkState_traverse},
    {Py_tp_clear, (void *)WorkState_clear}, {Py_tp_finalize, (void *)WorkState_finalize}, {Py_tp_members, state_members},
    {Py_tp_getset, state_properties}, {Py_am_await, (void *)WorkState_await}, {0, NULL}};
static PyType_Spec state_spec = {
    "_work.WorkState", sizeof(WorkState), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, state_slots};

/* ---- the module --------------------------------------------------------------------------------------------------- */

static PyObject *finished(PyObject *Py_UNUSED(module), PyObject *value) { return new_finished(value); }

static PyObject *seconds(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return PyFloat_FromDouble(core_seconds()); }

static PyMethodDef functions[] = {
    {"seconds", seconds, METH_NOARGS, "The time of time.monotonic(), as C takes it."},
    {"finished", finished, METH_O, "The iterator of an await that returns a value and does not suspend."}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_work", "The state of a Work.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__work(void)
{
    core_start_clock();
    PyObject *asyncio = PyImport_ImportModule("asyncio"), *m = asyncio ? PyModule_Create(&module) : NULL;
    if (!m) return NULL;
    get_running_loop = PyObject_GetAttrString(asyncio, "_get_running_loop");
    Py_DECREF(asyncio);
    name_running = PyUnicode_InternFromString("__asyncio_running_event_loop__");
    name_wait = PyUnicode_InternFromString("_wait"), name_report = PyUnicode_InternFromString("_report_unretrieved");
    PyObject *state = PyType_FromSpec(&state_spec), *counts = PyType_FromSpec(&counts_spec);
    Streak_Type = (PyTypeObject *)PyType_FromSpec(&streak_spec), Finished_Type = (PyTypeObject *)PyType_FromSpec(&finished_spec);
    if (!get_running_loop || !name_running || !name_wait || !name_report || !Streak_Type || !Finished_Type || !state || !counts
        || PyModule_AddObjectRef(m, "Streak", (PyObject *)Streak_Type) || PyModule_AddObjectRef(m, "CallCounts", counts)
        || PyModule_AddObjectRef(m, "WorkState", state) || core_add_lock(m) || core_add_call_log(m) || core_add_methods(m)
        || core_add_held_calls(m, (PyTypeObject *)state))
        Py_CLEAR(m);
    Py_XDECREF(state), Py_XDECREF(counts);
    return m;
}
