/* The calls that a scope holds, and the values of their Works once all are done. */
#include "_work.h"

#include <stddef.h>
#include <structmember.h>

static PyTypeObject *State_of_Work, *known_work;

static int HeldCalls_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((HeldCalls *)self)->items);
    Py_VISIT(((HeldCalls *)self)->works);
    return 0;
}

static int HeldCalls_clear(PyObject *self)
{
    Py_CLEAR(((HeldCalls *)self)->items);
    Py_CLEAR(((HeldCalls *)self)->works);
    return 0;
}

static void HeldCalls_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    HeldCalls_clear(self);
    core_free(self);
}

static PyMemberDef held_members[] = {
    {"items", T_OBJECT, offsetof(HeldCalls, items), 0, NULL}, {"works", T_OBJECT, offsetof(HeldCalls, works), 0, NULL},
    {"due", T_DOUBLE, offsetof(HeldCalls, due), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot held_slots[] = {
    {Py_tp_dealloc, (void *)HeldCalls_dealloc}, {Py_tp_traverse, (void *)HeldCalls_traverse}, {Py_tp_clear, (void *)HeldCalls_clear},
    {Py_tp_members, held_members}, {0, NULL}};
static PyType_Spec held_spec = {
    "_work.HeldCalls", sizeof(HeldCalls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, held_slots};

/* Whether a Work can give its value without more ado. */
static int has_value(PyObject *object)
{
    const WorkState *work = (WorkState *)object;
    return core_is_kind(Py_TYPE(object), State_of_Work, &known_work) && work->done && !work->captured && (!work->error || work->error == Py_None)
           && (!work->finish || work->finish == Py_None);
}

/* values_of(works) -> list, or None if one of the Works is not done, has failed, or has to make its value first */
static PyObject *values_of(PyObject *Py_UNUSED(module), PyObject *works)
{
    if (!PyList_CheckExact(works)) return PyErr_Format(PyExc_TypeError, "works must be a list, got %R", works);
    Py_ssize_t count = PyList_Size(works);
    PyObject *values = PyList_New(count); /* may run finalizers, and these anything */
    for (Py_ssize_t k = 0; values && k < count; k++) {
        PyObject *work = k < PyList_Size(works) ? PyList_GetItem(works, k) : NULL;
        if (!work || !has_value(work)) {
            Py_DECREF(values);
            Py_RETURN_NONE;
        }
        PyObject *value = ((WorkState *)work)->value ? ((WorkState *)work)->value : Py_None;
        Py_INCREF(value);
        PyList_SetItem(values, k, value);
    }
    return values;
}

static PyMethodDef functions[] = {
    {"values_of", values_of, METH_O, "The values of Works, or None unless all of them have one."}, {NULL, NULL, 0, NULL}};

int core_add_held_calls(PyObject *module, PyTypeObject *work_state)
{
    State_of_Work = work_state;
    Py_INCREF((PyObject *)work_state);
    PyObject *type = PyType_FromSpec(&held_spec);
    int failed = !type || PyModule_AddObjectRef(module, "HeldCalls", type) || PyModule_AddFunctions(module, functions);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
