/* Operations on a window from call to result, without Python code: of plain contiguous tensors and plain integers, while no
 * operation of the window runs on its thread. Everything else is for Python: a method then returns None. A signal that has
 * not come is looked out for as the fast path does for a message. */
#include "_fast_path.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#define HOLD_BYTES (32 << 10) /* a copy of fewer bytes keeps the GIL: it takes a few microseconds */
#define MOST_FIELDS 7

enum { PUT, GET, SIGNAL, WAIT, FENCE, KINDS };
enum { EQ, NE, GT, GE, LT, LE, COMPARISONS }; /* in the order of ops.windows.SignalCmpOp */

/* What one rank gives. */
typedef struct {
    char *memory;
    uint64_t nbytes;
    Word *signals, *asleep[2];
    int bells[2];
} Part;

typedef struct {
    PyObject_HEAD
    FastPath *path;
    Py_buffer memory;
    int rank, size;
    int queued; /* operations that run on the window's thread */
    char ended;
    uint64_t signals;
    long long inline_bytes;
    double waited; /* seconds, for the last signal that had not come when it was waited for */
    PyObject *number, *kinds, *comparisons; /* tuples: the classes of operations, and SignalCmpOp */
    Part *parts;
} FastWindow;

/* One call. */
typedef struct {
    PyObject *tensor, *dtype; /* borrowed */
    int peer, add, comparison; /* peer: -1 for none */
    uint64_t offset, slot, value;
    int64_t numel, nbytes;
} Operation;

static PyTypeObject *FastWindow_Type;
static PyObject *field_names[KINDS][MOST_FIELDS + 1];
enum { DTYPE = 4 }; /* the field of PUT */

/* ---- arguments ---------------------------------------------------------------------------------------------------- */

/* An integer from 0 to `most`; 0 if the argument is anything else. */
static int parse_number(PyObject *argument, uint64_t most, uint64_t *number)
{
    if (!PyLong_CheckExact(argument)) return 0;
    *number = PyLong_AsUnsignedLongLong(argument);
    if (*number == UINT64_MAX && PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    return *number <= most;
}

static int parse_rank(const FastWindow *w, PyObject *argument, int *rank)
{
    uint64_t number;
    if (!parse_number(argument, (uint64_t)w->size - 1, &number)) return 0;
    *rank = (int)number;
    return 1;
}

static int parse_slot(const FastWindow *w, PyObject *argument, uint64_t *slot)
{
    return w->signals && parse_number(argument, w->signals - 1, slot);
}

static int parse_comparison(const FastWindow *w, PyObject *argument, int *comparison)
{
    for (*comparison = 0; *comparison < COMPARISONS; ++*comparison)
        if (PyTuple_GetItem(w->comparisons, *comparison) == argument) return 1;
    return 0;
}

/* Whether C may check and carry out a call: 1, or 0 for Python; -1 with an exception. */
static int parse(const FastWindow *w, int kind, PyObject *const *args, Operation *op)
{
    op->peer = -1;
    switch (kind) {
    case PUT:
    case GET:
        op->tensor = args[0];
        if (!core_is_tensor(w->path, args[0]) || !parse_rank(w, args[1], &op->peer)
            || !parse_number(args[2], w->parts[op->peer].nbytes, &op->offset))
            return 0;
        if (!(op->dtype = PyObject_GetAttr(args[0], field_names[PUT][DTYPE]))) return -1;
        Py_DECREF(op->dtype); /* dtypes live for ever */
        return 1;
    case SIGNAL:
        op->add = args[3] == Py_True;
        return parse_rank(w, args[0], &op->peer) && op->peer != w->rank /* whose own waits are to be looked at */
            && parse_slot(w, args[1], &op->slot) && parse_number(args[2], UINT64_MAX, &op->value)
            && (op->add || args[3] == Py_False);
    case WAIT:
        return parse_slot(w, args[0], &op->slot) && parse_number(args[1], UINT64_MAX, &op->value)
            && parse_comparison(w, args[2], &op->comparison);
    default:
        return args[0] == Py_None || parse_rank(w, args[0], &op->peer);
    }
}

/* ---- effects ------------------------------------------------------------------------------------------------------ */

static void copy(char *to, const char *from, size_t n)
{
    if (to < from + n && from < to + n) memmove(to, from, n);
    else core_copy(to, from, n);
}

/* Copy between a tensor, whose address is taken now, and the memory of a rank; as parse. */
static int transfer(const FastWindow *w, int kind, Operation *op, Tensors *tensors)
{
    const Part *part = &w->parts[op->peer];
    Key key;
    key.count = tensors->count = 0;
    if (!core_add_tensor(w->path, op->tensor, &key, tensors)) return 0;
    op->nbytes = tensors->nbytes[0];
    op->numel = 1;
    for (int k = 2; k < key.count; k++) op->numel *= (int64_t)key.words[k];
    uint64_t nbytes = (uint64_t)op->nbytes, item = nbytes / (uint64_t)op->numel;
    if (op->nbytes > w->inline_bytes || nbytes > part->nbytes || op->offset > (part->nbytes - nbytes) / item) return 0;
    char *here = tensors->data[0], *there = part->memory + op->offset * item;
    char *to = kind == PUT ? there : here, *from = kind == PUT ? here : there;
    if (op->nbytes <= HOLD_BYTES) {
        copy(to, from, (size_t)nbytes);
        return 1;
    }
    Py_BEGIN_ALLOW_THREADS
    copy(to, from, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    return 1;
}

/* As ShmPart.signal: a full fence stands on both sides of the change. */
static void signal_peer(const FastWindow *w, const Operation *op)
{
    const Part *part = &w->parts[op->peer];
    atomic_thread_fence(memory_order_seq_cst);
    if (op->add) atomic_fetch_add(part->signals + op->slot, op->value);
    else atomic_store(part->signals + op->slot, op->value);
    atomic_thread_fence(memory_order_seq_cst);
    for (int bell = 0; bell < 2; bell++) {
        uint64_t one = 1;
        if (atomic_load_explicit(part->asleep[bell], memory_order_relaxed) && atomic_exchange(part->asleep[bell], 0)
            && write(part->bells[bell], &one, sizeof one) < 0) {} /* full: it rings already */
    }
}

static int holds(int comparison, uint64_t signal, uint64_t value)
{
    switch (comparison) {
    case EQ: return signal == value;
    case NE: return signal != value;
    case GT: return signal > value;
    case GE: return signal >= value;
    case LT: return signal < value;
    default: return signal <= value;
    }
}

/* Look out for a signal; as parse. */
static int wait_for(FastWindow *w, const Operation *op)
{
    Word *signal = w->parts[w->rank].signals + op->slot;
    Spin spin = {0, 0, 0};
    while (!holds(op->comparison, acquired(signal), op->value))
        if (!core_goes_on(w->path, w->waited, &spin)) return 0;
    return 1;
}

/* ---- calls -------------------------------------------------------------------------------------------------------- */

/* Set the next field of an operation to `value`, a new reference; -1 with an exception. */
static int set_field(PyObject *op, PyObject *name, PyObject *value)
{
    int failed = !value || PyObject_GenericSetAttr(op, name, value); /* the class is frozen */
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static PyObject *new_reference(PyObject *object)
{
    Py_INCREF(object);
    return object;
}

/* The operation as Python has it. */
static PyObject *described(const FastWindow *w, int kind, const Operation *op)
{
    PyTypeObject *type = (PyTypeObject *)PyTuple_GetItem(w->kinds, kind);
    PyObject *made = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0), **name = field_names[kind];
    if (!made || set_field(made, *name++, PyUnicode_FromStringAndSize("", 0)) /* label */
        || set_field(made, *name++, PyUnicode_FromStringAndSize("", 0)) /* method */
        || set_field(made, *name++, new_reference(w->number))
        || set_field(made, *name++, op->peer < 0 ? new_reference(Py_None) : PyLong_FromLong(op->peer)))
        goto fail;
    if (kind == PUT || kind == GET) {
        if (set_field(made, *name++, new_reference(op->dtype)) || set_field(made, *name++, PyLong_FromLongLong(op->numel))
            || set_field(made, *name++, PyLong_FromUnsignedLongLong(op->offset)))
            goto fail;
    } else if (kind != FENCE) {
        if (set_field(made, *name++, PyLong_FromUnsignedLongLong(op->slot))
            || set_field(made, *name++, PyLong_FromUnsignedLongLong(op->value))
            || set_field(made, *name++, kind == SIGNAL ? PyBool_FromLong(op->add)
                                                       : new_reference(PyTuple_GetItem(w->comparisons, op->comparison))))
            goto fail;
    }
    return made;
fail:
    Py_XDECREF(made);
    return NULL;
}

/* Carry out an operation under the comm's lock: 1: `work` is its Work, or NULL with an exception; 0 for Python. */
static int apply(FastWindow *w, int kind, Operation *op, Tensors *tensors, PyObject *site, double started, PyObject **work)
{
    if (w->ended || (w->queued && kind != WAIT)) return 0;
    if ((kind == PUT || kind == GET) && !transfer(w, kind, op, tensors)) return 0;
    if (kind == SIGNAL) signal_peer(w, op);
    long long seq = core_count(w->path, 1, op->nbytes); /* before Python code can run */
    PyObject *description = described(w, kind, op), *result = op->tensor ? op->tensor : Py_None;
    WorkState *done = description ? core_finished_work(w->path, description, seq, result, site, started) : NULL;
    if (done) core_note(w->path, done);
    *work = (PyObject *)done;
    Py_XDECREF(description);
    return 1;
}

static PyObject *submit(PyObject *self, int kind, PyObject *const *args, Py_ssize_t given, Py_ssize_t expected)
{
    FastWindow *w = (FastWindow *)self;
    double started = core_seconds();
    Operation op = {0};
    Tensors tensors;
    if (given != expected) {
        PyErr_Format(PyExc_TypeError, "%zd arguments in place of %zd", given, expected);
        return NULL;
    }
    if (!w->path || !w->path->counts) Py_RETURN_NONE; /* the garbage collector has cleared it */
    PyObject *site = NULL, *work = NULL;
    int usual = parse(w, kind, args, &op);
    if (usual > 0 && !(site = core_site_of(w->path, 1))) usual = -1;
    if (usual > 0) usual = core_is_open(w->path);
    if (usual > 0 && kind == WAIT) usual = wait_for(w, &op);
    if (usual > 0) usual = core_try_lock(w->path->lock);
    if (usual > 0) {
        usual = apply(w, kind, &op, &tensors, site, started, &work);
        core_unlock(w->path->lock);
    }
    Py_XDECREF(site);
    if (!usual && !PyErr_Occurred()) Py_RETURN_NONE;
    return work;
}

#define METHOD(name, kind, arguments)                                                                                  \
    static PyObject *FastWindow_##name(PyObject *self, PyObject *const *args, Py_ssize_t n)                             \
    {                                                                                                                  \
        return submit(self, kind, args, n, arguments);                                                                 \
    }
METHOD(put, PUT, 3)
METHOD(get, GET, 3)
METHOD(signal, SIGNAL, 4)
METHOD(wait_signal, WAIT, 3)
METHOD(fence, FENCE, 1)

/* ---- FastWindow --------------------------------------------------------------------------------------------------- */

static int FastWindow_traverse(PyObject *self, visitproc visit, void *arg)
{
    FastWindow *w = (FastWindow *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)w->path);
    Py_VISIT(w->kinds);
    Py_VISIT(w->comparisons);
    return 0;
}

static int FastWindow_clear(PyObject *self)
{
    FastWindow *w = (FastWindow *)self;
    Py_CLEAR(w->path); /* without it, nothing else is used */
    return 0;
}

static void FastWindow_dealloc(PyObject *self)
{
    FastWindow *w = (FastWindow *)self;
    PyObject_GC_UnTrack(self);
    FastWindow_clear(self);
    Py_XDECREF(w->number), Py_XDECREF(w->kinds), Py_XDECREF(w->comparisons);
    free(w->parts);
    PyBuffer_Release(&w->memory);
    core_free(self);
}

/* A word of the window's memory, the first of `count`; NULL with an exception. */
static Word *word_at(const FastWindow *w, PyObject *item, Py_ssize_t place, uint64_t count)
{
    int64_t words = w->memory.len / (Py_ssize_t)sizeof(Word) - (int64_t)count;
    int64_t index = core_number_at(item, place, 0, words, "word");
    return PyErr_Occurred() ? NULL : (Word *)w->memory.buf + index;
}

/* (start, nbytes, signals, (asleep, asleep), (bell, bell)): bytes, and indices of words */
static int fill_part(const FastWindow *w, PyObject *item, Part *part)
{
    int64_t start = core_number_at(item, 0, 0, w->memory.len, "start");
    part->memory = (char *)w->memory.buf + start;
    part->nbytes = (uint64_t)core_number_at(item, 1, 0, w->memory.len - start, "nbytes");
    if (!(part->signals = word_at(w, item, 2, w->signals))) return -1;
    PyObject *asleep = PySequence_GetItem(item, 3), *bells = PySequence_GetItem(item, 4);
    for (int bell = 0; asleep && bells && bell < 2; bell++) {
        part->asleep[bell] = word_at(w, asleep, bell, 1);
        part->bells[bell] = (int)core_number_at(bells, bell, 0, INT32_MAX, "bell");
    }
    Py_XDECREF(asleep), Py_XDECREF(bells);
    return PyErr_Occurred() ? -1 : 0;
}

/* FastWindow(path, memory, rank, number, signals, inline_bytes, parts, kinds, comparisons) */
static PyObject *FastWindow_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *path, *memory, *parts, *number, *kinds, *comparisons;
    int rank;
    unsigned long long signals;
    long long inline_bytes;
    if (!PyArg_ParseTuple(args, "O!OiOKLOO!O!", Core_FastPath, &path, &memory, &rank, &number, &signals, &inline_bytes, &parts,
                          &PyTuple_Type, &kinds, &PyTuple_Type, &comparisons))
        return NULL;
    Py_ssize_t size = PySequence_Size(parts);
    if (size < 0) return NULL;
    if (rank < 0 || rank >= size || signals > INT32_MAX || PyTuple_Size(kinds) != KINDS
        || PyTuple_Size(comparisons) != COMPARISONS) {
        PyErr_SetString(PyExc_ValueError, "this is no window");
        return NULL;
    }
    FastWindow *w = (FastWindow *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!w) return NULL;
    w->path = (FastPath *)new_reference(path);
    w->number = new_reference(number), w->kinds = new_reference(kinds), w->comparisons = new_reference(comparisons);
    w->rank = rank, w->size = (int)size, w->signals = signals, w->inline_bytes = inline_bytes;
    int failed = PyObject_GetBuffer(memory, &w->memory, PyBUF_WRITABLE) || !(w->parts = core_zeroed(size, sizeof *w->parts));
    for (Py_ssize_t k = 0; !failed && k < size; k++) {
        PyObject *item = PySequence_GetItem(parts, k);
        failed = !item || fill_part(w, item, &w->parts[k]);
        Py_XDECREF(item);
    }
    if (failed) Py_CLEAR(w);
    return (PyObject *)w;
}

static PyMemberDef members[] = {
    {"queued", T_INT, offsetof(FastWindow, queued), 0, NULL}, {"waited", T_DOUBLE, offsetof(FastWindow, waited), 0, NULL},
    {"ended", T_BOOL, offsetof(FastWindow, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL}};
#define NAMED(name, doc) {#name, (PyCFunction)(void (*)(void))FastWindow_##name, METH_FASTCALL, doc}
static PyMethodDef methods[] = {
    NAMED(put, "Write a tensor to the memory of a rank."), NAMED(get, "Read a tensor from the memory of a rank."),
    NAMED(signal, "Change a signal of another rank."), NAMED(wait_signal, "Wait for a signal of this rank."),
    NAMED(fence, "Wait for earlier operations."), {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)FastWindow_new}, {Py_tp_dealloc, (void *)FastWindow_dealloc}, {Py_tp_traverse, (void *)FastWindow_traverse},
    {Py_tp_clear, (void *)FastWindow_clear}, {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL}};
static PyType_Spec spec = {"_core.FastWindow", sizeof(FastWindow), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

/* signal(words, index, value, add): change a 64-bit word atomically, with a full fence */
static PyObject *change_word(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer words;
    Py_ssize_t index;
    unsigned long long value;
    int add;
    if (!PyArg_ParseTuple(args, "w*nKp", &words, &index, &value, &add)) return NULL;
    if (index < 0 || index >= words.len / (Py_ssize_t)sizeof(Word)) {
        PyBuffer_Release(&words);
        return PyErr_Format(PyExc_ValueError, "index must be in the memory, got %zd", index);
    }
    Word *word = (Word *)words.buf + index;
    if (add) atomic_fetch_add(word, value);
    else atomic_store(word, value);
    PyBuffer_Release(&words);
    Py_RETURN_NONE;
}

/* copy(to, from, nbytes): between addresses */
static PyObject *copy_large(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long to, from, nbytes;
    if (!PyArg_ParseTuple(args, "KKK", &to, &from, &nbytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (to < from + nbytes && from < to + nbytes) memmove((char *)(uintptr_t)to, (char *)(uintptr_t)from, nbytes);
    else core_copy_past_caches((char *)(uintptr_t)to, (char *)(uintptr_t)from, nbytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"copy", copy_large, METH_VARARGS, "Copy past the caches, without the GIL."},
    {"signal", change_word, METH_VARARGS, "Change a word atomically."},
    {NULL, NULL, 0, NULL},
};

int core_add_windows(PyObject *module)
{
    static const char *const names[KINDS][MOST_FIELDS] = {
        [PUT] = {"label", "method", "window", "peer", "dtype", "numel", "offset"},
        [GET] = {"label", "method", "window", "peer", "dtype", "numel", "offset"},
        [SIGNAL] = {"label", "method", "window", "peer", "slot", "value", "add"},
        [WAIT] = {"label", "method", "window", "peer", "slot", "value", "cmp"},
        [FENCE] = {"label", "method", "window", "peer"}};
    for (int kind = 0; kind < KINDS; kind++)
        for (int k = 0; k < MOST_FIELDS && names[kind][k]; k++)
            if (!(field_names[kind][k] = PyUnicode_InternFromString(names[kind][k]))) return -1;
    if (!(FastWindow_Type = (PyTypeObject *)PyType_FromSpec(&spec))) return -1;
    return PyModule_AddFunctions(module, functions) || PyModule_AddObjectRef(module, "FastWindow", (PyObject *)FastWindow_Type);
}
