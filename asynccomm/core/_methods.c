/* Methods of a comm whose usual calls begin in C, without a frame of Python code.
 *
 * Such a method is in its class in place of the Python function that it wraps. Looked up, on the class or on an object, it is
 * that function; and an object that is taken from the dict of the class, as torch.compile and unittest.mock do, has the class and
 * the attributes of a function. Only a call `object.method(...)`, which looks nothing up, comes here: with positional arguments
 * alone it goes to the object's path, and if that is not for it, or else, to the function.
 */
#include "_work.h"

#include <stddef.h>
#include <structmember.h>

#define MOST_ITEMS 8

PyTypeObject *Core_DirectPath;
static PyTypeObject *Caller_Type, *known_caller, *known_path;

/* The base of objects that have such methods. */
typedef struct {
    PyObject_HEAD
    PyObject *fast; /* their path */
} DirectCaller;

typedef struct {
    PyObject_HEAD
    PyObject *function, *check, *defaults; /* defaults: of the arguments of `check` behind the `required` ones */
    PyObject *weak;                        /* weak references */
    Py_ssize_t required, positional;       /* positional: arguments of `check` that a call may have */
} DirectMethod;

/* Whether a call was taken: `work` is its Work, or NULL with an exception. */
static int taken(const DirectMethod *method, PyObject *args, Py_ssize_t n, PyObject **work)
{
    *work = NULL;
    PyObject *object = PyTuple_GetItem(args, 0), *items[MOST_ITEMS];
    PyObject *path = core_is_kind(Py_TYPE(object), Caller_Type, &known_caller) ? ((DirectCaller *)object)->fast : NULL;
    if (!path || !core_is_kind(Py_TYPE(path), Core_DirectPath, &known_path)) return 0;
    Py_ssize_t count = 0, defaults = PyTuple_Size(method->defaults);
    items[count++] = method->check;
    for (Py_ssize_t k = 1; k <= n; k++) items[count++] = PyTuple_GetItem(args, k);
    for (Py_ssize_t k = n - method->required; k < defaults; k++) items[count++] = PyTuple_GetItem(method->defaults, k);
    Py_INCREF(path);
    int result = ((DirectPath *)path)->submit(path, items, count, work);
    Py_DECREF(path);
    return result;
}

static PyObject *DirectMethod_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    const DirectMethod *method = (DirectMethod *)self;
    Py_ssize_t n = PyTuple_Size(args) - 1; /* the first one is the object */
    PyObject *work;
    if (n >= method->required && n <= method->positional && !(keywords && PyDict_Size(keywords)) && taken(method, args, n, &work))
        return work;
    return PyObject_Call(method->function, args, keywords);
}

static PyObject *DirectMethod_get(PyObject *self, PyObject *object, PyObject *type)
{
    PyObject *function = ((DirectMethod *)self)->function;
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(Py_TYPE(function), Py_tp_descr_get);
    return get(function, object, type);
}

/* DirectMethod(function, check, defaults, required, positional) */
static PyObject *DirectMethod_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *function, *check, *defaults;
    Py_ssize_t required, positional;
    if (!PyArg_ParseTuple(args, "OOO!nn", &function, &check, &PyTuple_Type, &defaults, &required, &positional)) return NULL;
    Py_ssize_t all = required + PyTuple_Size(defaults);
    if (!PyType_GetSlot(Py_TYPE(function), Py_tp_descr_get) || required < 0 || positional < required || positional > all || all >= MOST_ITEMS)
        return PyErr_Format(PyExc_ValueError, "no method of %zd to %zd arguments of %zd: %R", required, positional, all, function);
    DirectMethod *method = (DirectMethod *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!method) return NULL;
    method->function = function, method->check = check, method->defaults = defaults;
    Py_INCREF(function), Py_INCREF(check), Py_INCREF(defaults);
    method->required = required, method->positional = positional;
    return (PyObject *)method;
}

static int DirectMethod_traverse(PyObject *self, visitproc visit, void *arg)
{
    DirectMethod *method = (DirectMethod *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(method->function);
    Py_VISIT(method->check);
    Py_VISIT(method->defaults);
    return 0;
}

static int DirectMethod_clear(PyObject *self)
{
    DirectMethod *method = (DirectMethod *)self;
    Py_CLEAR(method->function);
    Py_CLEAR(method->check);
    Py_CLEAR(method->defaults);
    return 0;
}

static void DirectMethod_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    if (((DirectMethod *)self)->weak) PyObject_ClearWeakRefs(self);
    DirectMethod_clear(self);
    core_free(self);
}

static PyObject *DirectMethod_getattro(PyObject *self, PyObject *name) { return PyObject_GetAttr(((DirectMethod *)self)->function, name); }

static PyMemberDef method_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(DirectMethod, weak), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot method_slots[] = {
    {Py_tp_new, (void *)DirectMethod_new}, {Py_tp_dealloc, (void *)DirectMethod_dealloc}, {Py_tp_traverse, (void *)DirectMethod_traverse},
    {Py_tp_clear, (void *)DirectMethod_clear}, {Py_tp_call, (void *)DirectMethod_call}, {Py_tp_descr_get, (void *)DirectMethod_get},
    {Py_tp_members, method_members}, {Py_tp_getattro, (void *)DirectMethod_getattro}, {0, NULL}};
static PyType_Spec method_spec = {"_work.DirectMethod", sizeof(DirectMethod), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR, method_slots};

static int DirectCaller_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((DirectCaller *)self)->fast);
    return 0;
}

static int DirectCaller_clear(PyObject *self)
{
    Py_CLEAR(((DirectCaller *)self)->fast);
    return 0;
}

static void DirectCaller_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    DirectCaller_clear(self);
    core_free(self);
}

static PyMemberDef caller_members[] = {{"_fast", T_OBJECT, offsetof(DirectCaller, fast), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot caller_slots[] = {
    {Py_tp_dealloc, (void *)DirectCaller_dealloc}, {Py_tp_traverse, (void *)DirectCaller_traverse}, {Py_tp_clear, (void *)DirectCaller_clear},
    {Py_tp_members, caller_members}, {0, NULL}};
static PyType_Spec caller_spec = {
    "_work.DirectCaller", sizeof(DirectCaller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, caller_slots};

static PyType_Slot path_slots[] = {{0, NULL}};
static PyType_Spec path_spec = {
    "_work.DirectPath", sizeof(DirectPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, path_slots};

int core_add_methods(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&method_spec);
    Core_DirectPath = (PyTypeObject *)PyType_FromSpec(&path_spec);
    Caller_Type = (PyTypeObject *)PyType_FromSpec(&caller_spec);
    int failed = !type || !Core_DirectPath || !Caller_Type || PyModule_AddObjectRef(module, "DirectCaller", (PyObject *)Caller_Type) || PyModule_AddObjectRef(module, "DirectMethod", type)
                 || PyModule_AddObjectRef(module, "DirectPath", (PyObject *)Core_DirectPath);
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
