/* Calls that a scope of `coalesce()` holds, and the collectives that they become when the scope sends them.
 *
 * A held call stands in the queue of its scope beside the operations that Python holds there. If all of a queue are held
 * here, and no two of them share memory, they are sent here, too: calls of one kind as one collective on all of their
 * tensors (batching/fusion.py), whose recipe is known by the calls it is made of. Everything else is for Python, which
 * makes the same collectives of the same calls, so ranks may differ in who sends them.
 *
 * The memory of a held tensor stays what it was at the call: a held call owns the storages, and Python restores a tensor
 * that was given other memory meanwhile.
 */
#include "_fast_path.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

static PyTypeObject *HeldCall_Type, *HeldCalls_Type, *known_queue;
static PyObject *current_tasks; /* of Python 3.11, where `current_task` is Python code; NULL in later versions */
static PyObject *current_task, *get_running_loop, *name_running, *name_settle;

/* ---- holding ------------------------------------------------------------------------------------------------------ */

/* The running task of a loop, a new reference; None or NULL without. */
static PyObject *task_of(PyObject *loop)
{
    if (!current_tasks) return PyObject_CallFunctionObjArgs(current_task, loop, NULL);
    PyObject *task = PyDict_GetItemWithError(current_tasks, loop);
    Py_XINCREF(task);
    return task;
}

int core_queue_of(FastPath *f, HeldCalls **queue)
{
    int other, in_loop = core_in_loop((Streak *)f->mailbox, get_running_loop, name_running, &other);
    if (in_loop < 0 || other) return in_loop;
    PyObject *owner = in_loop ? task_of(((Streak *)f->mailbox)->loop) : NULL;
    if (PyErr_Occurred()) return -1;
    if (!owner || owner == Py_None) {
        Py_XDECREF(owner);
        owner = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    }
    PyObject *found = owner ? PyDict_GetItemWithError(f->scopes.queues, owner) : NULL;
    if (found && core_is_kind(Py_TYPE(found), HeldCalls_Type, &known_queue)) {
        *queue = (HeldCalls *)found;
        Py_INCREF(found);
    }
    Py_XDECREF(owner);
    return PyErr_Occurred() ? -1 : !found || *queue;
}

HeldCall *core_new_held(const FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments)
{
    HeldCall *held = (HeldCall *)((allocfunc)PyType_GetSlot(HeldCall_Type, Py_tp_alloc))(HeldCall_Type, 0);
    if (!held) return NULL;
    held->entry = entry, entry->holds++;
    held->tensors = tensors->count <= (int)(sizeof held->few / sizeof(Held)) ? held->few : core_zeroed(tensors->count, sizeof(Held));
    for (int k = 0; k < arguments->count; k++) Py_INCREF(held->arguments.items[k] = arguments->items[k]);
    held->arguments.count = arguments->count;
    for (int k = 1, number = 0; held->tensors && k < arguments->count; k++) {
        Py_ssize_t n = core_tensors_in(f, arguments->items[k]);
        for (Py_ssize_t j = 0; j < n; j++, number++) {
            PyObject *storage = PyObject_CallFunctionObjArgs(f->scopes.storage_of, core_tensor_in(arguments->items[k], j), NULL);
            if (!storage) {
                Py_DECREF((PyObject *)held);
                return NULL;
            }
            held->tensors[number] = (Held){storage, tensors->data[number], tensors->nbytes[number], tensors->offset[number], tensors->reach[number]};
            held->count = number + 1;
        }
    }
    if (held->tensors) return held;
    Py_DECREF((PyObject *)held);
    return NULL;
}

static void replace(PyObject **place, PyObject *object)
{
    PyObject *old = *place;
    Py_XINCREF(object);
    *place = object;
    Py_XDECREF(old);
}

int core_give_work(const FastPath *f, HeldCall *held, PyObject *driver, PyObject *result, PyObject *site, double started)
{
    if (!(held->work = core_new_work(f, held->entry->op, result, site, started))) return -1;
    replace(&held->work->driver, driver);
    replace(&held->work->on_settled, f->scopes.settled);
    replace(&held->work->on_overdue, f->scopes.overdue);
    return 0;
}

/* Whether another thread is about to settle a Work; -1 with an exception. */
static int is_deciding(const FastPath *f)
{
    PyObject *locked = PyObject_CallNoArgs(f->deciding);
    Py_XDECREF(locked);
    return locked ? locked != Py_False : -1;
}

int core_settle(FastPath *f, WorkState *work, double now, int *deciding)
{
    if (work->done) return 0; /* another thread has aborted the comm */
    if (*deciding < 0 && (*deciding = is_deciding(f)) < 0) return -1;
    int plain = !*deciding && (!work->waiters || !PyObject_Size(work->waiters))
                && (!work->listeners || !PyObject_Size(work->listeners)) && (!work->callbacks || !PyObject_Size(work->callbacks));
    if (!plain) {
        *deciding = -1;
        PyObject *none = PyObject_CallMethodObjArgs((PyObject *)work, name_settle, NULL);
        Py_XDECREF(none);
        return none ? 0 : -1;
    }
    work->finished = now, work->done = 1;
    replace(&work->driver, NULL), replace(&work->on_overdue, NULL), replace(&work->on_settled, NULL);
    return 1;
}

/* Enter a call in its queue; -1 with an exception. */
static int enter(FastPath *f, HeldCall *held, HeldCalls *queue)
{
    WorkState *work = held->work;
    if (PyList_Append(queue->items, (PyObject *)held)) return -1;
    if (PyList_Append(queue->works, (PyObject *)work)) {
        Py_ssize_t count = PyList_Size(queue->items);
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyList_SetSlice(queue->items, count - 1, count, NULL);
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    f->counts->submitted++;
    if (queue->due <= work->started + work->timeout) return 0; /* another call has the first deadline */
    PyObject *none = PyObject_CallFunctionObjArgs(f->scopes.note, (PyObject *)queue, (PyObject *)work, NULL);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

int core_hold(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments, PyObject *result, PyObject *site,
              double started, HeldCalls *queue, PyObject **work)
{
    if (!entry->program || entry->kind < 0) return 0;
    HeldCall *held = core_new_held(f, entry, tensors, arguments);
    if (!held || core_give_work(f, held, (PyObject *)queue, result, site, started)) {
        Py_XDECREF((PyObject *)held);
        return 1;
    }
    int may = !f->state->dead && !f->counts->closed && !f->counts->detours; /* Python code has run meanwhile */
    if (may && !enter(f, held, queue)) {
        *work = (PyObject *)held->work;
        Py_INCREF(*work);
    }
    Py_DECREF((PyObject *)held);
    return may;
}

/* ---- sending ------------------------------------------------------------------------------------------------------ */

/* The calls that become one collective. */
typedef struct {
    Entry *entry;  /* held */
    int first, last, members, tensors; /* first, last: numbers of calls; the others are linked by `next` */
    int64_t weight;
    char **data; /* of the collective's tensors */
} Group;

typedef struct {
    FastPath *f;
    HeldCall **calls; /* held */
    int *next;        /* by call: the next one in its group; -1: none */
    Group *groups;
    int count, group_count, started; /* started: groups that were begun */
    char **data;
} Flush;

static void free_flush(Flush *flush)
{
    for (int k = 0; k < flush->group_count; k++)
        if (flush->groups[k].entry) core_release_entry(flush->groups[k].entry);
    for (int k = 0; k < flush->count; k++) Py_DECREF((PyObject *)flush->calls[k]);
    free(flush->calls), free(flush->next), free(flush->groups), free(flush->data);
}

/* Take the calls of a list: 1; 0: one of them is Python's; -1 with an exception. */
static int take_calls(Flush *flush, PyObject *items)
{
    Py_ssize_t count = PyList_Size(items);
    if (count < 0) return -1;
    if (!(flush->calls = core_zeroed(count, sizeof *flush->calls)) || !(flush->next = core_zeroed(count, sizeof *flush->next))
        || !(flush->groups = core_zeroed(count, sizeof *flush->groups)))
        return -1;
    for (; flush->count < count; flush->count++) {
        PyObject *item = PyList_GetItem(items, flush->count);
        if (!item || Py_TYPE(item) != HeldCall_Type || !((HeldCall *)item)->work) return item ? 0 : -1;
        Py_INCREF(item);
        flush->calls[flush->count] = (HeldCall *)item;
    }
    return 1;
}

/* Group the calls, as batching/plan.py does: those of one kind, in their order, at the place of the first, up to a number
 * of bytes. -1 with an exception. */
static int group_calls(Flush *flush)
{
    int kinds = 0, tensors = 0;
    for (int k = 0; k < flush->count; k++) {
        if (flush->calls[k]->entry->kind > kinds) kinds = flush->calls[k]->entry->kind;
        tensors += flush->calls[k]->count;
    }
    int *group_of = core_zeroed(kinds + 1, sizeof(int)); /* by kind; from 1 on */
    if (!group_of || !(flush->data = core_zeroed(tensors, sizeof(char *)))) {
        free(group_of);
        return -1;
    }
    for (int k = 0; k < flush->count; k++) {
        int kind = flush->calls[k]->entry->kind;
        int64_t weight = flush->calls[k]->entry->weight;
        Group *group = kind && group_of[kind] ? &flush->groups[group_of[kind] - 1] : NULL;
        flush->next[k] = -1;
        if (group && group->weight + weight <= flush->f->scopes.fused_limit) {
            flush->next[group->last] = k;
        } else {
            group = &flush->groups[flush->group_count++];
            group->first = k;
            group_of[kind] = flush->group_count;
        }
        group->last = k, group->members++, group->weight += weight, group->tensors += flush->calls[k]->count;
    }
    free(group_of);
    char **data = flush->data;
    for (int g = 0; g < flush->group_count; g++) {
        flush->groups[g].data = data;
        data += flush->groups[g].tensors;
    }
    return 0;
}

/* The calls of a group, for Python. */
static PyObject *calls_of(const Flush *flush, const Group *group)
{
    PyObject *calls = PyList_New(0);
    for (int k = group->first; calls && k >= 0; k = flush->next[k])
        if (PyList_Append(calls, (PyObject *)flush->calls[k])) Py_CLEAR(calls);
    return calls;
}

/* Find, or make, the entry of a group: 1; 0: it has no program; -1 with an exception. */
static int find_entry(Flush *flush, Group *group)
{
    FastPath *f = flush->f;
    Entry *entry = flush->calls[group->first]->entry;
    if (group->members > 1) {
        uint64_t *words = core_zeroed(group->members + 1, sizeof(uint64_t));
        if (!words) return -1;
        int count = 0;
        words[count++] = SEVERAL;
        for (int k = group->first; k >= 0; k = flush->next[k]) words[count++] = flush->calls[k]->entry->serial;
        entry = *core_entry_of(f, words, count);
        if (!entry) {
            PyObject *calls = calls_of(flush, group), *given = calls ? PyTuple_Pack(1, calls) : NULL;
            entry = given ? core_learn(f, f->scopes.learn, given, words, count, group->tensors, 0) : NULL;
            Py_XDECREF(calls), Py_XDECREF(given);
        }
        free(words);
        if (!entry) return -1;
    }
    entry->holds++;
    group->entry = entry;
    if (!entry->program) return 0;
    return core_prepare(f, entry) ? -1 : 1;
}

static int in_order(const void *one, const void *other)
{
    const char *a = ((const Span *)one)->start, *b = ((const Span *)other)->start;
    return (a > b) - (a < b);
}

/* Whether no two of some spans share memory, which they often have shown before; -1 with an exception. `spans` is taken. */
static int are_spans_apart(FastPath *f, Span *spans, int count)
{
    size_t nbytes = (size_t)count * sizeof(Span);
    Span *sorted = NULL;
    int apart = count == f->apart_count && !memcmp(spans, f->apart, nbytes);
    if (!apart && (sorted = core_zeroed(count, sizeof(Span)))) {
        memcpy(sorted, spans, nbytes);
        qsort(sorted, (size_t)count, sizeof(Span), in_order);
        apart = 1;
        for (int k = 1; k < count; k++) apart &= sorted[k - 1].end <= sorted[k].start;
        free(sorted);
        if (apart) {
            free(f->apart);
            f->apart = spans, f->apart_count = count;
            return 1;
        }
    } else if (!apart) {
        apart = -1;
    }
    free(spans);
    return apart;
}

/* Whether no two calls share memory; -1 with an exception. */
static int are_apart(const Flush *flush)
{
    int count = 0;
    for (int k = 0; k < flush->count; k++) count += flush->calls[k]->count;
    Span *spans = core_zeroed(count, sizeof(Span));
    if (!spans) return -1;
    count = 0;
    for (int k = 0; k < flush->count; k++) {
        const HeldCall *call = flush->calls[k];
        for (int j = 0; j < call->count; j++) {
            int same = 0; /* tensors of one call are apart, or the same memory */
            const Held *tensor = &call->tensors[j];
            for (int i = 0; i < j; i++) same |= call->tensors[i].data == tensor->data;
            if (!same) spans[count++] = (Span){tensor->data, tensor->data + tensor->nbytes};
        }
    }
    return are_spans_apart(flush->f, spans, count);
}

int core_has_memory(const FastPath *f, const HeldCall *call)
{
    int number = 0;
    for (int k = 1; k < call->arguments.count; k++) {
        PyObject *argument = call->arguments.items[k];
        Py_ssize_t n = core_tensors_in(f, argument);
        for (Py_ssize_t j = 0; j < n; j++)
            if (!core_is_at(f, core_tensor_in(argument, j), &call->tensors[number++])) return 0;
    }
    return 1;
}

/* The addresses of the tensors of a group, in their order. */
static char **addresses_of(const Flush *flush, const Group *group)
{
    char **data = group->data;
    for (int k = group->first; k >= 0; k = flush->next[k])
        for (int j = 0; j < flush->calls[k]->count; j++) *data++ = flush->calls[k]->tensors[j].data;
    return group->data;
}

/* Number the calls, and run the groups one after the other, as far as that goes without waiting for long. Nothing of
 * this runs Python code or releases the GIL. */
static void start_groups(Flush *flush)
{
    FastPath *f = flush->f;
    long long number = f->counts->collectives;
    for (int k = 0; k < flush->count; k++) flush->calls[k]->work->seq = number++;
    f->counts->collectives = number;
    for (int g = 0; g < flush->group_count; g++) {
        Group *group = &flush->groups[g];
        flush->started++;
        if (core_start(f, group->entry, addresses_of(flush, group), flush->calls[group->first]->work->seq) != DONE) {
            flush->started = -flush->started; /* the last one is not done */
            return;
        }
    }
}

/* A group for Python: (run, op, [call, ...]). Its entry loses the run. */
static PyObject *handed_over(const Flush *flush, const Group *group, int begun)
{
    Entry *entry = group->entry;
    if (!begun) {
        if (core_prepare(flush->f, entry)) return NULL;
        entry->run->begun = 0;
        core_place(entry, addresses_of(flush, group));
    }
    PyObject *run = (PyObject *)entry->run, *calls = calls_of(flush, group);
    entry->run = NULL;
    PyObject *handed = calls ? PyTuple_Pack(3, run, entry->op, calls) : NULL;
    Py_DECREF(run), Py_XDECREF(calls);
    return handed;
}

/* The groups from number `first` on, which has begun, for Python; NULL with an exception. */
static PyObject *groups_from(const Flush *flush, int first)
{
    PyObject *left = PyList_New(0);
    for (int g = first; left && g < flush->group_count; g++) {
        PyObject *handed = handed_over(flush, &flush->groups[g], g == first);
        if (!handed || PyList_Append(left, handed)) Py_CLEAR(left);
        Py_XDECREF(handed);
    }
    return left;
}

/* Have Python go on with the calls that are not done, take note of what was sent, and settle the calls that are done; -1
 * with an exception. `gc`: whether to enable the garbage collector, whose finalizers may make calls. */
static int conclude(Flush *flush, int gc)
{
    FastPath *f = flush->f;
    int done = flush->started < 0 ? -flush->started - 1 : flush->started, failed = 0, deciding = -1;
    PyObject *left = NULL;
    if (done < flush->group_count) failed = !(left = groups_from(flush, done));
    if (left && !failed) { /* before any other code of Python can make calls, which come after these */
        PyObject *none = PyObject_CallFunctionObjArgs(f->scopes.adopt, left, NULL);
        Py_XDECREF(none);
        failed = !none;
    }
    Py_XDECREF(left);
    if (gc) PyGC_Enable();
    double now = core_seconds();
    for (int g = 0; g < done; g++) /* the others are Python's to settle */
        for (int k = flush->groups[g].first; k >= 0; k = flush->next[k]) flush->calls[k]->work->finished = now;
    for (int k = 0; k < flush->count; k++) f->counts->nbytes += flush->calls[k]->entry->size;
    for (int k = 0; k < flush->count && !failed; k++) {
        core_log_call(f->recent, core_call_of(flush->calls[k]->work));
    }
    for (int g = 0; g < done && !failed; g++)
        for (int k = flush->groups[g].first; k >= 0 && !failed; k = flush->next[k]) {
            WorkState *work = flush->calls[k]->work;
            failed = core_settle(f, work, now, &deciding) < 0;
            if (!failed) core_note(f, work);
            if (f->counts->noted_calls) deciding = -1; /* Python code has run, and other threads perhaps */
        }
    if (failed) core_break_comm(f);
    return failed ? -1 : 0;
}

/* Send calls that no Python code stands in the way of: 1; 0: they are for Python; -1 with an exception. */
static int send_calls(Flush *flush)
{
    FastPath *f = flush->f;
    int may = core_may_send(f);
    if (may <= 0) return may;
    for (int k = 0; k < flush->count && may; k++) may = core_has_memory(f, flush->calls[k]) && !flush->calls[k]->work->done;
    for (int g = 0; g < flush->group_count && may; g++) may = flush->groups[g].entry->run != NULL; /* no call has taken it */
    if (may) {
        int gc = PyGC_Disable();
        start_groups(flush);
        if (conclude(flush, gc)) may = -1;
    }
    core_unlock(f->lock);
    return may;
}

PyObject *FastPath_flush(PyObject *self, PyObject *items)
{
    Flush flush = {.f = (FastPath *)self};
    int may = flush.f->counts && PyList_CheckExact(items) ? take_calls(&flush, items) : 0;
    if (may > 0) may = are_apart(&flush);
    if (may > 0 && group_calls(&flush)) may = -1;
    for (int g = 0; g < flush.group_count && may > 0; g++) may = find_entry(&flush, &flush.groups[g]);
    if (may > 0) may = send_calls(&flush);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    free_flush(&flush);
    PyErr_Restore(type, value, traceback);
    if (may < 0) return NULL;
    if (may) Py_RETURN_TRUE;
    Py_RETURN_NONE;
}

/* ---- HeldCall ----------------------------------------------------------------------------------------------------- */

static PyObject *shape_of(const uint64_t *dims, int ndim)
{
    PyObject *shape = PyTuple_New(ndim);
    for (int k = 0; shape && k < ndim; k++) {
        PyObject *dim = PyLong_FromUnsignedLongLong(dims[k]);
        if (!dim || PyTuple_SetItem(shape, k, dim)) Py_CLEAR(shape);
    }
    return shape;
}

/* places: [(storage, offset in elements, address, shape, dtype), ...] by tensor, as at the call; the key has the shapes */
static PyObject *HeldCall_places(PyObject *self, void *Py_UNUSED(closure))
{
    HeldCall *held = (HeldCall *)self;
    PyObject *places = PyList_New(0);
    int at = 1;
    for (int k = 0; places && k < held->count;) {
        const uint64_t *words = held->entry->words + at;
        int sort = words[0] & 0xff, ndim = sort == OF_TENSOR ? (int)(words[0] >> 24 & 0xff) : 0;
        at += sort == OF_LIST ? 1 : sort == OF_SIZES ? 1 + (int)(words[0] >> 8) : 2 + ndim;
        if (sort != OF_TENSOR) continue;
        PyObject *shape = shape_of(words + 2, ndim);
        PyObject *place = shape ? Py_BuildValue("(OLKOO)", held->tensors[k].storage, (long long)held->tensors[k].offset,
                                                (unsigned long long)(uintptr_t)held->tensors[k].data, shape,
                                                PyTuple_GetItem(held->entry->dtypes, k)) : NULL;
        if (!place || PyList_Append(places, place)) Py_CLEAR(places);
        Py_XDECREF(shape), Py_XDECREF(place);
        k++;
    }
    return places;
}

/* run: (ident, cleared, moved) of a send, which has begun */
static PyObject *HeldCall_run(PyObject *self, void *Py_UNUSED(closure))
{
    const HeldCall *held = (HeldCall *)self;
    if (held->entry->peer < 0 || !held->entry->sends) Py_RETURN_NONE;
    return core_begun_message(&held->begun);
}

static PyObject *HeldCall_op(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *op = ((HeldCall *)self)->entry->op;
    Py_INCREF(op);
    return op;
}

static int HeldCall_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    const HeldCall *held = (HeldCall *)self;
    for (int k = 0; k < held->arguments.count; k++) Py_VISIT(held->arguments.items[k]);
    for (int k = 0; k < held->count; k++) Py_VISIT(held->tensors[k].storage);
    Py_VISIT((PyObject *)held->work);
    return 0;
}

static int HeldCall_clear(PyObject *self)
{
    HeldCall *held = (HeldCall *)self;
    WorkState *work = held->work;
    int arguments = held->arguments.count, tensors = held->count;
    held->work = NULL;
    held->arguments.count = held->count = 0;
    for (int k = 0; k < arguments; k++) Py_DECREF(held->arguments.items[k]);
    for (int k = 0; k < tensors; k++) Py_DECREF(held->tensors[k].storage);
    Py_XDECREF((PyObject *)work);
    return 0;
}

static void HeldCall_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    HeldCall *held = (HeldCall *)self;
    HeldCall_clear(self);
    if (held->entry) core_release_entry(held->entry);
    if (held->tensors != held->few) free(held->tensors);
    core_free(self);
}

static PyObject *HeldCall_nbytes(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(((HeldCall *)self)->entry->size);
}

static PyObject *HeldCall_arguments(PyObject *self, void *Py_UNUSED(closure))
{
    return core_tuple_of(((HeldCall *)self)->arguments.items, ((HeldCall *)self)->arguments.count);
}

static PyMemberDef held_members[] = {
    {"work", T_OBJECT, offsetof(HeldCall, work), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyGetSetDef held_properties[] = {
    {"places", HeldCall_places, NULL, NULL, NULL}, {"run", HeldCall_run, NULL, NULL, NULL}, {"op", HeldCall_op, NULL, NULL, NULL},
    {"nbytes", HeldCall_nbytes, NULL, NULL, NULL}, {"arguments", HeldCall_arguments, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot held_slots[] = {
    {Py_tp_dealloc, (void *)HeldCall_dealloc}, {Py_tp_traverse, (void *)HeldCall_traverse}, {Py_tp_clear, (void *)HeldCall_clear},
    {Py_tp_members, held_members}, {Py_tp_getset, held_properties}, {0, NULL}};
static PyType_Spec held_spec = {"_core.HeldCall", sizeof(HeldCall), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, held_slots};

int core_add_scopes(PyObject *module)
{
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    current_task = asyncio ? PyObject_GetAttrString(asyncio, "current_task") : NULL;
    get_running_loop = current_task ? PyObject_GetAttrString(asyncio, "_get_running_loop") : NULL;
    Py_XDECREF(asyncio);
    if (Py_Version < 0x030C0000) {
        PyObject *tasks = PyImport_ImportModule("asyncio.tasks");
        if (!(current_tasks = tasks ? PyObject_GetAttrString(tasks, "_current_tasks") : NULL)) return -1;
        Py_DECREF(tasks);
        if (!PyDict_CheckExact(current_tasks)) Py_CLEAR(current_tasks);
    }
    PyObject *states = PyImport_ImportModule("asynccomm.core._work");
    HeldCalls_Type = states ? (PyTypeObject *)PyObject_GetAttrString(states, "HeldCalls") : NULL;
    Py_XDECREF(states);
    if (!HeldCalls_Type || !get_running_loop || !(name_running = PyUnicode_InternFromString("__asyncio_running_event_loop__"))
        || !(name_settle = PyUnicode_InternFromString("settle")) || !(HeldCall_Type = (PyTypeObject *)PyType_FromSpec(&held_spec)))
        return -1;
    return PyModule_AddObjectRef(module, "HeldCall", (PyObject *)HeldCall_Type);
}
