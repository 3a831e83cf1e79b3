/* The fast path of a call: arguments, program, run, Work and bookkeeping of a small operation, without Python code.
 *
 * A call is known by its method and its arguments: of a tensor the dtype, the shape, and whether it is the memory of
 * another argument. The first call of its kind is taken by Python, which makes a recipe of it (fast_path.py); later
 * calls run the recipe here, if nothing else is going on in the comm. Everything unusual falls back to Python:
 *
 * - arguments that are no plain contiguous CPU tensors, and anything that a check could refuse;
 * - a comm that is closed, orders its calls by agreement, is inside a scope with limits, or has operations in flight;
 * - a run that is not done after a short spin: Python adopts it as it is.
 *
 * Python code may run, and other threads with it, until the addresses of the tensors are taken; from then on to the end of
 * the run nothing releases the GIL, so no other thread can begin to submit or drive, or give a tensor other memory.
 */
#include "_fast_path.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

PyTypeObject *Core_FastPath;
static PyTypeObject *Streak_Type, *Counts_Type, *State_of_Work, *Log_Type, *Lock_Type;
static int (*frame_lasti)(PyFrameObject *frame); /* PyFrame_GetLasti, which is not in the limited API; NULL without */
static PyObject *get_running_loop, *get_frame, *one, *two;
static PyObject *name_running, *name_append, *name_filename, *name_lasti, *name_dtype, *name_profiling, *name_back;

static void release_arguments(Arguments *arguments)
{
    for (int k = 0; k < arguments->count; k++) Py_DECREF(arguments->items[k]);
}

/* Hold the arguments of a call. 1: done; 0: the call is unusual; -1: an exception. */
static int hold_arguments(Arguments *arguments, PyObject *const *args, Py_ssize_t n)
{
    arguments->count = 0;
    if (n > MOST_ARGS) return 0;
    for (Py_ssize_t k = 0; k < n; k++) {
        PyObject *item = PyList_CheckExact(args[k]) ? PyList_AsTuple(args[k]) : args[k];
        if (!item) {
            release_arguments(arguments);
            return -1;
        }
        if (item == args[k]) Py_INCREF(item);
        arguments->items[arguments->count++] = item;
    }
    return 1;
}

int core_is_tensor(const FastPath *f, PyObject *object) { return Py_TYPE(object) == f->tensor || Py_TYPE(object) == f->parameter; }

int core_is_sizes(PyObject *argument)
{
    return PyTuple_CheckExact(argument) && PyTuple_Size(argument) && PyLong_CheckExact(PyTuple_GetItem(argument, 0));
}

Py_ssize_t core_tensors_in(const FastPath *f, PyObject *argument)
{
    if (PyTuple_CheckExact(argument)) return core_is_sizes(argument) ? 0 : PyTuple_Size(argument);
    return core_is_tensor(f, argument);
}

PyObject *core_tensor_in(PyObject *argument, Py_ssize_t k)
{
    return PyTuple_CheckExact(argument) ? PyTuple_GetItem(argument, k) : argument;
}

/* The dtypes of the tensors among the arguments, a tuple; NULL with an exception. */
static PyObject *dtypes_of(const FastPath *f, const Arguments *arguments, int count)
{
    PyObject *dtypes = PyTuple_New(count);
    int number = 0;
    for (int k = 1; dtypes && k < arguments->count; k++) {
        Py_ssize_t n = core_tensors_in(f, arguments->items[k]);
        for (Py_ssize_t j = 0; dtypes && j < n; j++) {
            PyObject *dtype = PyObject_GetAttr(core_tensor_in(arguments->items[k], j), name_dtype);
            if (!dtype || PyTuple_SetItem(dtypes, number++, dtype)) Py_CLEAR(dtypes);
        }
    }
    return dtypes;
}

int core_is_at(const FastPath *f, PyObject *tensor, const Held *held)
{
    const Questions *ask = &f->questions;
    void *handle = (char *)tensor + ask->place;
    int64_t bytes;
    char *data;
    return !ask->storage_bytes(handle, &bytes) && bytes >= held->reach && !ask->data(handle, &data) && data == held->data;
}

/* The bytes of one element of a tensor on the CPU that has its values in its storage; 0 for others. */
static int64_t item_bytes_of(const Questions *ask, void *handle, int32_t *dtype)
{
    int32_t device, layout;
    if (ask->device_type(handle, &device) || device != ask->cpu || ask->layout(handle, &layout) || layout != ask->strided
        || ask->is_negated(handle) || ask->dtype(handle, dtype) || *dtype < 0 || *dtype >= MOST_DTYPES)
        return 0;
    return ask->item_bytes[*dtype];
}

int core_add_tensor(const FastPath *f, PyObject *tensor, Key *key, Tensors *tensors)
{
    if (!core_is_tensor(f, tensor) || tensors->count == MOST_TENSORS || key->count + 2 + MOST_DIMS > MOST_WORDS) return 0;
    const Questions *ask = &f->questions;
    void *handle = (char *)tensor + ask->place;
    int number = tensors->count;
    int32_t dtype;
    int64_t item = item_bytes_of(ask, handle, &dtype), ndim, *shape, *strides, bytes, numel = 1, *offset = &tensors->offset[number];
    if (!item || ask->ndim(handle, &ndim) || ndim > MOST_DIMS || ask->shape(handle, &shape) || ask->strides(handle, &strides)) return 0;
    for (int64_t k = ndim - 1; k >= 0; k--) {
        if (shape[k] != 1 && strides[k] != numel) return 0;
        numel *= shape[k];
    }
    int64_t nbytes = numel * item;
    char *data; /* a storage may have been resized, or freed */
    if (!nbytes || ask->storage_offset(handle, offset) || ask->storage_bytes(handle, &bytes) || *offset * item + nbytes > bytes
        || ask->data(handle, &data) || !data)
        return 0;
    tensors->reach[number] = *offset * item + nbytes;
    int same = 0; /* the number of a tensor before in the same memory, from 1 on */
    for (int k = 0; k < number; k++) {
        if (data == tensors->data[k] && nbytes == tensors->nbytes[k]) same = k + 1;
        else if (data < tensors->data[k] + tensors->nbytes[k] && tensors->data[k] < data + nbytes) return 0;
    }
    uint64_t *words = key->words + key->count;
    words[0] = OF_TENSOR | (uint64_t)ndim << 24 | (uint64_t)same << 32;
    words[1] = (uint64_t)dtype;
    for (int64_t k = 0; k < ndim; k++) words[2 + k] = (uint64_t)shape[k];
    key->count += 2 + (int)ndim;
    tensors->count++;
    tensors->data[number] = data, tensors->nbytes[number] = nbytes;
    return 1;
}

/* Whether a value is one of the constants that a key may name. */
static int is_constant(const FastPath *f, PyObject *value)
{
    for (int k = 0; k < f->constant_count; k++)
        if (f->constants[k] == value) return 1;
    return 0;
}

/* Append an integer to the key; as core_add_tensor. */
static int add_integer(PyObject *integer, Key *key)
{
    long long value = PyLong_CheckExact(integer) ? PyLong_AsLongLong(integer) : -1;
    if (key->count == MOST_WORDS || (value == -1 && (PyErr_Occurred() || !PyLong_CheckExact(integer)))) {
        PyErr_Clear();
        return 0;
    }
    key->words[key->count++] = (uint64_t)value;
    return 1;
}

/* Append an argument to the key; as core_add_tensor. */
static int add_argument(const FastPath *f, PyObject *argument, Key *key, Tensors *tensors)
{
    if (core_is_tensor(f, argument)) return core_add_tensor(f, argument, key, tensors);
    if (key->count + 2 > MOST_WORDS) return 0;
    if (PyTuple_CheckExact(argument)) {
        Py_ssize_t count = PyTuple_Size(argument);
        int sizes = core_is_sizes(argument);
        key->lists = 1;
        key->words[key->count++] = (sizes ? OF_SIZES : OF_LIST) | (uint64_t)count << 8;
        for (Py_ssize_t k = 0; k < count; k++) {
            PyObject *item = PyTuple_GetItem(argument, k);
            if (!(sizes ? add_integer(item, key) : core_add_tensor(f, item, key, tensors))) return 0;
        }
        return 1;
    }
    if (PyLong_CheckExact(argument)) {
        key->words[key->count++] = OF_INTEGER;
        return add_integer(argument, key);
    }
    if (!is_constant(f, argument)) return 0;
    key->words[key->count++] = OF_CONSTANT;
    key->words[key->count++] = (uint64_t)(uintptr_t)argument;
    return 1;
}

/* The key of a call, and the addresses of its tensors; as core_add_tensor. Runs no Python code. */
static int key_of(const FastPath *f, const Arguments *arguments, Key *key, Tensors *tensors)
{
    key->words[0] = (uint64_t)(uintptr_t)arguments->items[0], key->count = 1, key->lists = 0, tensors->count = 0;
    for (int k = 1; k < arguments->count; k++)
        if (!add_argument(f, arguments->items[k], key, tensors)) return 0;
    return 1;
}

static uint64_t hash_of(const uint64_t *words, int count)
{
    uint64_t hash = 0;
    for (int k = 0; k < count; k++) hash = (hash ^ words[k]) * MIX, hash ^= hash >> 32;
    return hash;
}

/* Whether a kind of call is worth a recipe. Sizes in lists may differ with every call: a call with lists must come twice. */
static int is_worth(FastPath *f, const Key *key)
{
    if (!key->lists) return 1;
    uint64_t hash = hash_of(key->words, key->count), *seen = f->seen[hash % SEEN];
    for (int k = 0; k < SEEN_WAYS; k++)
        if (seen[k] == hash) return 1;
    memmove(seen + 1, seen, (SEEN_WAYS - 1) * sizeof *seen);
    seen[0] = hash;
    return 0;
}

Entry **core_entry_of(FastPath *f, const uint64_t *words, int count)
{
    for (uint64_t at = hash_of(words, count);; at++) {
        Entry **entry = &f->entries[at % ENTRIES];
        if (!*entry || ((*entry)->word_count == count && !memcmp((*entry)->words, words, 8 * (size_t)count)))
            return entry;
    }
}

void core_release_entry(Entry *entry)
{
    if (--entry->holds > 0) return;
    Py_XDECREF(entry->make), Py_XDECREF(entry->dtypes), Py_XDECREF(entry->op), Py_XDECREF(entry->kernels);
    Py_XDECREF(entry->nbytes), Py_XDECREF(entry->owners), Py_XDECREF((PyObject *)entry->program), Py_XDECREF((PyObject *)entry->run);
    for (int k = 0; entry->places && k < entry->vectors; k++)
        free(entry->places[k].tensors), free(entry->places[k].offsets), free(entry->places[k].starts);
    free(entry->places), free(entry->words), free(entry);
}

static void forget(FastPath *f)
{
    for (int k = 0; k < ENTRIES; k++) {
        Entry *entry = f->entries[k];
        f->entries[k] = NULL;
        if (entry) core_release_entry(entry);
    }
    f->known = 0;
}

/* The places of a vector: a sequence of (tensor, offset, bytes). */
static int fill_places(Places *places, PyObject *pieces, int tensors)
{
    Py_ssize_t count = PySequence_Size(pieces);
    if (count < 0) return -1;
    places->tensors = core_zeroed(count, sizeof(int)), places->offsets = core_zeroed(count, sizeof(int64_t));
    places->starts = core_zeroed(count + 1, sizeof(int64_t)), places->count = (int)count;
    if (!places->tensors || !places->offsets || !places->starts) return -1;
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *piece = PySequence_GetItem(pieces, k);
        if (!piece) return -1;
        places->tensors[k] = (int)core_number_at(piece, 0, -1, tensors - 1, "tensor");
        places->offsets[k] = core_number_at(piece, 1, 0, INT64_MAX, "offset");
        places->starts[k + 1] = places->starts[k] + core_number_at(piece, 2, 0, INT64_MAX / 4, "bytes");
        Py_DECREF(piece);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Fill an entry from a recipe: (program, (code, numel), kernels, (places by vector), op, result, owners, message, nbytes,
 * kind, weight, large), where a message is (peer, tag, sends) and has no program; or None. */
static int fill_entry(const FastPath *f, Entry *entry, PyObject *recipe, int tensors, Py_ssize_t arguments)
{
    PyObject *program, *vectors, *message;
    unsigned long long code, numel;
    long long weight;
    if (recipe == Py_None) return 0;
    if (!PyArg_ParseTuple(recipe, "O(KK)OOOiOOOiLp", &program, &code, &numel, &entry->kernels, &vectors, &entry->op, &entry->result,
                          &entry->owners, &message, &entry->nbytes, &entry->kind, &weight, &entry->large)) {
        entry->kernels = entry->op = entry->owners = entry->nbytes = NULL;
        return -1;
    }
    Py_INCREF(entry->kernels), Py_INCREF(entry->op), Py_INCREF(entry->owners), Py_INCREF(entry->nbytes);
    entry->code = code, entry->numel = numel, entry->weight = weight;
    entry->size = PyLong_AsLongLong(entry->nbytes);
    if (PyErr_Occurred()) return -1;
    if (entry->result >= arguments || (message == Py_None && Py_TYPE(program) != Core_Program) || (message != Py_None && tensors != 1)) {
        PyErr_Format(PyExc_ValueError, "%R is no recipe of %zd arguments", recipe, arguments);
        return -1;
    }
    if (message != Py_None) {
        entry->tag = (uint32_t)core_number_at(message, 1, 0, UINT32_MAX, "tag");
        entry->sends = (int)core_number_at(message, 2, 0, 1, "sends");
        entry->peer = (int)core_number_at(message, 0, 0, f->segment->size - 1, "peer");
        return PyErr_Occurred() ? -1 : 0;
    }
    entry->vectors = ((Program *)program)->vector_count;
    if (!(entry->places = core_zeroed(entry->vectors, sizeof(Places)))) return -1;
    for (int k = 0; k < entry->vectors; k++) {
        PyObject *pieces = PySequence_GetItem(vectors, k);
        int failed = !pieces || fill_places(&entry->places[k], pieces, tensors);
        Py_XDECREF(pieces);
        if (failed) return -1;
    }
    Py_INCREF(program);
    entry->program = (Program *)program;
    return 0;
}

PyObject *core_tuple_of(PyObject *const *items, Py_ssize_t n)
{
    PyObject *tuple = PyTuple_New(n);
    for (Py_ssize_t k = 0; tuple && k < n; k++) {
        Py_INCREF(items[k]);
        PyTuple_SetItem(tuple, k, items[k]);
    }
    return tuple;
}

Entry *core_learn(FastPath *f, PyObject *learn, PyObject *given, const uint64_t *words, int count, int tensors, Py_ssize_t arguments)
{
    if (f->known >= ENTRIES / 2) forget(f);
    PyObject *recipe = PyObject_CallObject(learn, given);
    Entry *entry = recipe ? core_zeroed(1, sizeof(Entry)) : NULL;
    if (entry) {
        entry->word_count = count, entry->holds = 1, entry->peer = -1, entry->serial = ++f->serials;
        entry->words = core_zeroed(count, sizeof(uint64_t));
        if (entry->words) memcpy(entry->words, words, (size_t)count * sizeof(uint64_t));
        if (!entry->words || fill_entry(f, entry, recipe, tensors, arguments)) {
            core_release_entry(entry);
            entry = NULL;
        }
    }
    Py_XDECREF(recipe);
    if (!entry) return NULL;
    Entry **place = core_entry_of(f, words, count); /* `learn` may have run other calls */
    if (*place) core_release_entry(*place), f->known--;
    f->known++;
    return *place = entry;
}

/* Have Python make a recipe of a call; -1 with an exception. */
static int learn_call(FastPath *f, const Key *key, const Arguments *arguments, const Tensors *tensors)
{
    PyObject *all = core_tuple_of(arguments->items, arguments->count), *dtypes = dtypes_of(f, arguments, tensors->count);
    Entry *entry = all && dtypes ? core_learn(f, f->learn, all, key->words, key->count, tensors->count, arguments->count - 1) : NULL;
    if (entry) {
        entry->make = arguments->items[0], entry->dtypes = dtypes;
        Py_INCREF(entry->make), Py_INCREF(dtypes);
    }
    Py_XDECREF(all), Py_XDECREF(dtypes);
    return entry ? 0 : -1;
}

/* ---- one call ----------------------------------------------------------------------------------------------------- */

int core_goes_on(const FastPath *f, double waited, Spin *spin)
{
    int64_t now;
    if (!spin->until) {
        if (!f->patience || waited > f->short_wait) return 0;
        now = nanoseconds();
        spin->until = now + f->patience, spin->last = now + STALL_NS;
    } else if ((now = nanoseconds()) >= spin->until || now >= spin->last) {
        return 0;
    }
    RELAX();
    if (++spin->waits > f->segment->spins) {
        sched_yield(); /* the late rank may need this core */
        int64_t took = nanoseconds() - now;
        if (took > SWITCH_NS) spin->until += took, core_leave_shared_core(f->segment, now + took);
    }
    return 1;
}

/* Run as far as possible, and a little further. */
static int run_on(FastPath *f, Run *run)
{
    Spin spin = {0, 0, 0};
    int64_t until = 0;
    for (;;) {
        int result = core_pass(run);
        if (result == MOVED) { /* each wait of a longer operation counts by itself */
            spin = (Spin){0, 0, 0};
            if (run->steps == run->program->steps) continue;
            if (!until) until = nanoseconds() + STALL_NS; /* others exchange more, and perhaps far more */
            else if (nanoseconds() > until) return STUCK;
            continue;
        }
        if (result != STUCK || !core_goes_on(f, f->state->collective_wait, &spin)) return result;
    }
}

/* ---- call sites ---------------------------------------------------------------------------------------------------- */

/* Whether the file of a code object is in a set; -1 with an exception. The code objects found are kept in `known`. */
static int is_in(PyObject *files, PyObject **known, PyObject *code)
{
    PyObject **place = &known[(uintptr_t)code / 64 % CODES];
    if (*place == code) return 1;
    PyObject *file = PyObject_GetAttr(code, name_filename);
    int found = file ? PySet_Contains(files, file) : -1;
    Py_XDECREF(file);
    if (found > 0) {
        PyObject *before = *place;
        Py_INCREF(code);
        *place = code;
        Py_XDECREF(before);
    }
    return found;
}

/* The number of the instruction that a frame is at; -1 with an exception, perhaps. */
static long instruction_of(PyObject *frame)
{
    if (frame_lasti) return frame_lasti((PyFrameObject *)frame);
    PyObject *number = PyObject_GetAttr(frame, name_lasti);
    long instruction = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    return instruction;
}

/* The place (code, instruction), which most often is that of a call before; NULL with an exception. */
static PyObject *place_at(FastPath *f, PyObject *code, PyObject *frame)
{
    long instruction = instruction_of(frame);
    if (instruction == -1 && PyErr_Occurred()) return NULL;
    uintptr_t k = ((uintptr_t)code / 64 + (uintptr_t)instruction / 2) % CODES; /* instructions take two bytes */
    PyObject *place = f->sites[k], *before = NULL;
    if (!place || f->site_instructions[k] != instruction || PyTuple_GetItem(place, 0) != code) {
        place = Py_BuildValue("(Ol)", code, instruction);
        if (!place) return NULL;
        before = f->sites[k]; /* now: garbage collection may have run Python code, which may have called here */
        f->sites[k] = place, f->site_instructions[k] = instruction;
    }
    Py_INCREF(place);
    Py_XDECREF(before);
    return place;
}

/* As call_site, from `frame` on, a reference that is taken; None if Python has to look. */
static PyObject *site_from(FastPath *f, PyObject *frame)
{
    PyObject *site = NULL;
    int users = 0, passed = 1;
    for (int k = 0; k < MOST_PASSED && passed > 0 && frame != Py_None; k++) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        users = is_in(f->files, f->codes, code);
        passed = users ? 0 : is_in(f->passed_files, f->passed, code);
        PyObject *next = passed > 0 ? PyObject_GetAttr(frame, name_back) : NULL;
        if (users > 0) site = place_at(f, code, frame);
        if (passed > 0 && next) {
            Py_DECREF(frame);
            frame = next;
        } else {
            passed = 0;
            Py_XDECREF(next);
        }
        Py_DECREF(code);
    }
    Py_DECREF(frame);
    if (site || PyErr_Occurred()) return site;
    Py_RETURN_NONE;
}

/* The user's frame, or the first one towards it behind `inner` others, a new reference; NULL with an exception if there is none. */
static PyObject *frame_of(int inner)
{
    PyObject *frame = inner ? NULL : (PyObject *)PyEval_GetFrame();
    if (!frame) return PyObject_CallFunctionObjArgs(get_frame, one, NULL);
    Py_INCREF(frame);
    return frame;
}

PyObject *core_site_of(FastPath *f, int inner)
{
    if (f->call_site == Py_None) Py_RETURN_NONE;
    PyObject *frame = frame_of(inner);
    if (!frame) PyErr_Clear(); /* called from C */
    PyObject *site = frame ? site_from(f, frame) : NULL;
    if (frame && site != Py_None) return site;
    Py_XDECREF(site);
    return PyObject_CallFunctionObjArgs(f->call_site, inner ? two : one, NULL); /* 0: call_site itself */
}

int core_is_in_loop(const FastPath *f)
{
    int other;
    return core_in_loop((Streak *)f->mailbox, get_running_loop, name_running, &other);
}

int core_is_open(FastPath *f)
{
    if (f->state->dead || f->state->adopting || f->counts->closed || f->counts->detours) return 0;
    int other, in_loop = core_in_loop((Streak *)f->mailbox, get_running_loop, name_running, &other);
    return in_loop < 0 ? -1 : !other;
}

int core_may_send(FastPath *f)
{
    if (PyObject_Size(f->queue) || PyObject_Size(f->inbox)) return 0;
    int open = core_is_open(f);
    if (open <= 0) return open;
    PyObject *driven = PyObject_CallNoArgs(f->driven);
    if (!driven) return -1;
    Py_DECREF(driven);
    if (driven != Py_False) return 0;
    int cpu = sched_getcpu();
    if (cpu != f->segment->cpu) core_publish_cpu(f->segment, cpu);
    return core_try_lock(f->lock);
}

WorkState *core_new_work(const FastPath *f, PyObject *op, PyObject *result, PyObject *site, double started)
{
    WorkState *work = (WorkState *)((allocfunc)PyType_GetSlot(f->work_type, Py_tp_alloc))(f->work_type, 0);
    if (!work) return NULL;
    work->op = op, work->mailbox = f->mailbox, work->value = result, work->site = site;
    Py_INCREF(work->op), Py_INCREF(work->mailbox), Py_INCREF(work->value), Py_INCREF(work->site);
    work->seq = work->finished = -1;
    work->started = started, work->timeout = f->counts->limit;
    return work;
}

void core_note(const FastPath *f, const WorkState *work)
{
    if (!f->counts->noted_calls) return;
    LoggedCall logged = core_call_of(work);
    PyObject *call = core_called(&logged), *none = call ? PyObject_CallMethodObjArgs(f->notes, name_append, call, NULL) : NULL;
    int failed = !none;
    Py_XDECREF(call), Py_XDECREF(none);
    if (!failed && PyObject_Size(f->notes) >= f->counts->noted_calls) {
        failed = !(none = PyObject_CallNoArgs(f->note));
        Py_XDECREF(none);
    }
    if (failed) PyErr_WriteUnraisable(f->note);
}

long long core_count(const FastPath *f, int p2p, long long nbytes)
{
    f->counts->submitted++, f->counts->nbytes += nbytes;
    return (*(p2p ? &f->counts->messages : &f->counts->collectives))++;
}

WorkState *core_finished_work(const FastPath *f, PyObject *op, long long seq, PyObject *result, PyObject *site, double started)
{
    double finished = core_seconds();
    if (finished < started) finished = started; /* the clock may step back a little */
    core_log_call(f->recent, (LoggedCall){op, site, seq, started, finished});
    WorkState *work = core_new_work(f, op, result, site, started);
    if (work) work->seq = seq, work->finished = finished, work->done = 1;
    return work;
}

/* Take note of a call that is done; its Work. */
static PyObject *finish(FastPath *f, const Entry *entry, PyObject *result, PyObject *site, double started)
{
    long long seq = core_count(f, entry->peer >= 0, entry->size); /* before Python code can run */
    WorkState *work = core_finished_work(f, entry->op, seq, result, site, started);
    if (work && entry->peer >= 0 && !entry->sends && !(work->source = PyLong_FromLong(entry->peer))) Py_CLEAR(work);
    if (work) core_note(f, work);
    return (PyObject *)work;
}

/* As Board.begin. */
static void begin(const FastPath *f, const Entry *entry, long long number)
{
    RankPosition *s = f->state;
    PyObject *before = s->op;
    uint64_t first = s->step;
    s->step += entry->program->steps;
    s->number = (uint64_t)number;
    s->history = (s->history + s->code * 31 + s->numel) * MIX;
    s->code = entry->code, s->numel = entry->numel;
    s->op = entry->op;
    Py_INCREF(s->op);
    core_begin(entry->run, first, s->code, s->numel, s->history);
    Py_XDECREF(before);
}

int core_prepare(const FastPath *f, Entry *entry)
{
    if (entry->run) return 0;
    Run *run = core_new_run(f->segment, entry->program, entry->kernels, f->mismatch);
    if (!run) return -1;
    run->owners = entry->owners;
    Py_INCREF(run->owners);
    for (int k = 0; k < entry->vectors; k++) {
        const Places *places = &entry->places[k];
        Vector *vector = &run->vectors[k];
        if (places->count == 1) continue;
        vector->count = places->count, vector->nbytes = places->starts[places->count];
        if (!(vector->pieces = core_zeroed(places->count + 1, sizeof(Piece)))) {
            Py_DECREF((PyObject *)run);
            return -1;
        }
        for (int j = 0; j <= places->count; j++) vector->pieces[j].start = places->starts[j];
    }
    if (core_check_vectors(run)) {
        Py_DECREF((PyObject *)run);
        return -1;
    }
    entry->run = run;
    return 0;
}

void core_break_comm(FastPath *f)
{
    PyObject *type, *value, *traceback;
    f->state->dead = 1;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *none = PyObject_CallFunctionObjArgs(f->broken, value ? value : Py_None, NULL);
    if (none) Py_DECREF(none);
    else PyErr_WriteUnraisable(f->broken);
    PyErr_Restore(type, value, traceback);
}

void core_place(const Entry *entry, char *const *data)
{
    Run *run = entry->run;
    for (int k = 0; k < entry->vectors; k++) {
        const Places *places = &entry->places[k];
        for (int j = 0; j < places->count; j++) {
            char *address = (places->tensors[j] < 0 ? NULL : data[places->tensors[j]]) + places->offsets[j];
            if (places->count == 1) run->vectors[k].address = address;
            else run->vectors[k].pieces[j].address = address;
        }
    }
}

int core_start(FastPath *f, Entry *entry, char *const *data, long long number)
{
    begin(f, entry, number);
    core_place(entry, data);
    core_lend(entry->run);
    return entry->large ? STUCK : run_on(f, entry->run);
}

PyObject *core_begun_message(const BegunMessage *message)
{
    return Py_BuildValue("(IOK)", message->ident, message->cleared ? Py_True : Py_False, (unsigned long long)message->moved);
}

/* Have Python go on with a call that has begun as `run`, or else as `message`: its Work, or NULL with an exception. */
static PyObject *adopted(FastPath *f, Run *run, const BegunMessage *message, const Arguments *arguments, PyObject *result,
                         PyObject *site, double started)
{
    int gc = PyGC_Disable(); /* a finalizer may make a call, which comes after this one */
    PyObject *begun = run ? (PyObject *)run : core_begun_message(message);
    PyObject *call = begun ? core_tuple_of(arguments->items, arguments->count) : NULL, *work = NULL;
    if (call) work = PyObject_CallFunction(f->adopt, "OOOOd", begun, call, result, site, started);
    if (gc) PyGC_Enable();
    if (!work) core_break_comm(f);
    Py_XDECREF(call);
    Py_XDECREF(begun);
    return work;
}

/* Submit a known collective: its Work, or NULL with an exception. The comm's lock is held. */
static PyObject *send(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments, PyObject *result,
                      PyObject *site, double started)
{
    if (core_start(f, entry, tensors->data, f->counts->collectives) == DONE) return finish(f, entry, result, site, started);
    Run *run = entry->run;
    entry->run = NULL; /* which goes on without this entry */
    return adopted(f, run, NULL, arguments, result, site, started);
}

/* Post a send that has begun, if it is LATE; else have Python adopt the message: its Work, or NULL with an exception. */
static PyObject *hand_over(FastPath *f, Entry *entry, int moved, const BegunMessage *begun, const Tensors *tensors,
                           const Arguments *arguments, PyObject *result, PyObject *site, double started)
{
    f->state->adopting = 1; /* no thread looks at frames until Python knows of the message, or it is posted */
    if (moved == LATE) {
        int gc = PyGC_Disable(); /* as for `adopted` */
        PyObject *work = core_post_message(f, entry, tensors, arguments, result, site, started, begun);
        if (gc) PyGC_Enable();
        if (work) f->state->adopting = 0;
        else if (PyErr_Occurred()) core_break_comm(f);
        if (work || PyErr_Occurred()) return work;
    }
    return adopted(f, NULL, begun, arguments, result, site, started);
}

/* The same for a message; NULL without an exception: it is not for this path. */
static PyObject *send_or_receive(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments,
                                 PyObject *result, PyObject *site, double started)
{
    BegunMessage begun;
    PyObject *work = NULL, *type, *value, *traceback;
    int moved = (entry->sends ? core_send_message : core_receive_message)(f, entry, tensors->data[0], (uint64_t)tensors->nbytes[0], &begun);
    if (moved == DONE) work = finish(f, entry, result, site, started);
    else if (moved == LATE && !entry->sends) work = core_post_message(f, entry, tensors, arguments, result, site, started, NULL);
    else if (moved != STUCK) work = hand_over(f, entry, moved, &begun, tensors, arguments, result, site, started);
    if (!f->unsettled_count) return work;
    PyErr_Fetch(&type, &value, &traceback);
    if (core_settle_posted(f)) PyErr_Clear(); /* the comm has the error */
    PyErr_Restore(type, value, traceback);
    return work;
}

/* Submit a call of which all Python code has run: 1: `work` is its Work, or NULL with an exception; 0: it is not for this
 * path; 2: its kind is known by now, and its addresses are to be taken again. */
static int try_known(FastPath *f, const Arguments *arguments, Tensors *tensors, PyObject *const *args, PyObject *site,
                     double started, HeldCalls *queue, PyObject **work)
{
    Key key;
    if (!key_of(f, arguments, &key, tensors)) return 0;
    Entry *entry = *core_entry_of(f, key.words, key.count);
    if (!entry && !is_worth(f, &key)) return 0;
    if (!entry) return learn_call(f, &key, arguments, tensors) ? 1 : 2;
    if (!entry->program && entry->peer < 0) return 0;
    PyObject *result = entry->result < 0 ? Py_None : args[1 + entry->result];
    entry->holds++;
    int may;
    if (queue) may = core_hold(f, entry, tensors, arguments, result, site, started, queue, work);
    else may = !entry->program || !core_prepare(f, entry) ? core_may_send(f) : -1;
    if (may > 0 && !queue) {
        if (entry->program) *work = send(f, entry, tensors, arguments, result, site, started);
        else if (!(*work = send_or_receive(f, entry, tensors, arguments, result, site, started)) && !PyErr_Occurred()) may = 0;
        core_unlock(f->lock);
    }
    core_release_entry(entry);
    return may != 0;
}

/* Submit a call by the fast path; as try_known, without 2, and `inner` as of core_site_of. */
static int try_fast(FastPath *f, PyObject *const *args, Py_ssize_t n, int inner, PyObject **work)
{
    double started = core_seconds();
    Arguments arguments;
    Tensors tensors;
    int result = hold_arguments(&arguments, args, n);
    if (result <= 0) return result < 0;
    PyObject *site = NULL;
    HeldCalls *queue = NULL;
    if (!(site = core_site_of(f, inner))) result = -1;
    else if (f->counts->scopes) result = core_queue_of(f, &queue);
    if (result < 0) result = 1; /* with the exception */
    else if (result) {
        result = try_known(f, &arguments, &tensors, args, site, started, queue, work);
        if (result == 2) result = try_known(f, &arguments, &tensors, args, site, started, queue, work);
        if (result == 2) result = 0; /* forgotten already */
    }
    Py_XDECREF(site), Py_XDECREF((PyObject *)queue);
    release_arguments(&arguments);
    return result;
}

/* Whether calls may take this path now. */
static int is_direct(const FastPath *f)
{
    return !f->counts->closed && !f->counts->detours
           && PyDict_GetItemWithError(f->profiler, name_profiling) != Py_True; /* torch's profiler gets events of Python code */
}

/* As of DirectPath: the method has no frame. */
static int submit_directly(PyObject *self, PyObject *const *items, Py_ssize_t n, PyObject **work)
{
    FastPath *f = (FastPath *)self;
    int taken = f->counts && is_direct(f) && try_fast(f, items, n, 0, work);
    f->refused = !taken;
    return taken;
}

/* submit(timeout, hints, tag, make, *arguments) -> Work */
static PyObject *FastPath_submit(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    FastPath *f = (FastPath *)self;
    if (!f->counts) { /* the garbage collector has cleared it */
        PyErr_SetString(PyExc_RuntimeError, "the comm was dropped");
        return NULL;
    }
    PyObject *work = NULL;
    int refused = f->refused;
    f->refused = 0;
    if (n >= 4 && !refused && args[0] == Py_None && args[1] == Py_None && args[2] == Py_None && is_direct(f) && try_fast(f, args + 3, n - 3, 1, &work))
        return work;
    PyObject *all = core_tuple_of(args, n);
    work = all ? PyObject_CallObject(f->submit, all) : NULL;
    Py_XDECREF(all);
    return work;
}

/* ---- FastPath ----------------------------------------------------------------------------------------------------- */

#define OBJECTS(DO)                                                                                                    \
    DO(segment) DO(state) DO(counts) DO(work_type) DO(mailbox) DO(mismatch) DO(learn) DO(submit) DO(adopt) DO(broken) DO(call_site)  \
    DO(files) DO(passed_files) DO(recent) DO(notes) DO(note) DO(profiler) DO(lock) DO(driven) DO(driver) DO(arm) DO(waited) DO(waiters) DO(deciding) DO(queue) DO(inbox) DO(tensor) DO(parameter) DO(values) DO(scopes.queues)               \
    DO(scopes.works) DO(scopes.settled) DO(scopes.overdue) DO(scopes.note) DO(scopes.learn) DO(scopes.adopt) DO(scopes.storage_of)

static int FastPath_traverse(PyObject *self, visitproc visit, void *arg)
{
    FastPath *f = (FastPath *)self;
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT((PyObject *)f->name);
    OBJECTS(VISIT)
    for (int k = 0; k < CODES; k++) {
        Py_VISIT(f->sites[k]);
        Py_VISIT(f->codes[k]);
        Py_VISIT(f->passed[k]);
    }
    for (int k = 0; k < ENTRIES; k++) {
        Entry *entry = f->entries[k];
        if (!entry) continue;
        Py_VISIT(entry->make);
        Py_VISIT(entry->op);
        Py_VISIT(entry->kernels);
        Py_VISIT(entry->owners);
    }
    return 0;
}

static int FastPath_clear(PyObject *self)
{
    FastPath *f = (FastPath *)self;
    forget(f);
#define CLEAR(name)                                                                                                    \
    do {                                                                                                               \
        PyObject *old = (PyObject *)f->name;                                                                           \
        f->name = NULL;                                                                                                \
        Py_XDECREF(old);                                                                                               \
    } while (0);
    OBJECTS(CLEAR)
    for (int k = 0; k < CODES; k++) {
        Py_CLEAR(f->sites[k]);
        Py_CLEAR(f->codes[k]);
        Py_CLEAR(f->passed[k]);
    }
    return 0;
}

static void FastPath_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    FastPath_clear(self);
    free(((FastPath *)self)->apart);
    core_free(self);
}

/* Functions of torch, from a TorchFunctions; -1 with an exception. */
static int fill_questions(Questions *ask, PyObject *functions)
{
    PyObject *items = PySequence_GetItem(functions, 3);
    Py_ssize_t count = items ? PySequence_Size(items) : -1;
    for (Py_ssize_t k = 0; k < count && k < MOST_DTYPES; k++) ask->item_bytes[k] = (uint8_t)core_number_at(items, k, 0, 255, "bytes");
    Py_XDECREF(items);
    ask->place = core_number_at(functions, 0, 0, INT64_MAX, "place");
    ask->cpu = (int32_t)core_number_at(functions, 1, 0, INT32_MAX, "cpu"), ask->strided = (int32_t)core_number_at(functions, 2, 0, INT32_MAX, "strided");
    void *addresses[10];
    for (int k = 0; k < 10; k++) addresses[k] = (void *)(uintptr_t)core_number_at(functions, 4 + k, 1, INT64_MAX, "address");
    if (PyErr_Occurred()) return -1;
    void **at = addresses;
    ask->is_negated = *at++, ask->device_type = *at++, ask->layout = *at++, ask->dtype = *at++, ask->ndim = *at++;
    ask->shape = *at++, ask->strides = *at++, ask->storage_offset = *at++, ask->storage_bytes = *at++, ask->data = *at;
    return 0;
}

/* FastPath(segment, state, counts, work_type, mailbox, mismatch, learn, submit, adopt, broken, call_site, files, passed_files, recent, notes, note,
 * profiler, lock, driven, queue, inbox, tensor, parameter, questions, values, short_bytes, (patience, short_wait),
 * (queues, works, settled, overdue, note, learn, adopt, storage_of, fused_limit)) */
static PyObject *FastPath_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    FastPath *f = (FastPath *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    long long short_bytes;
    double patience;
    PyObject *functions;
    if (!f) return NULL;
    int parsed = PyArg_ParseTuple(args, "O!O!O!O!O!OOOOOOO!O!O!OOO!O!O(OOO!O!O)OOOOO!O!L(dd)(O!O!OOOOOOL)", Core_Segment, &f->segment, Core_RankPosition, &f->state, Counts_Type,
                                  &f->counts, &PyType_Type, &f->work_type, Streak_Type, &f->mailbox, &f->mismatch, &f->learn, &f->submit,
                                  &f->adopt, &f->broken, &f->call_site, &PySet_Type, &f->files, &PySet_Type, &f->passed_files, Log_Type, &f->recent, &f->notes, &f->note, &PyDict_Type,
                                  &f->profiler, Lock_Type, &f->lock, &f->driven, &f->driver, &f->arm, &PySet_Type, &f->waited, &PyList_Type, &f->waiters, &f->deciding,
                                  &f->queue, &f->inbox, &f->tensor, &f->parameter, &PyTuple_Type, &functions, &PyTuple_Type, &f->values, &short_bytes, &patience, &f->short_wait,
                                  &PyDict_Type, &f->scopes.queues, &PyDict_Type, &f->scopes.works, &f->scopes.settled, &f->scopes.overdue,
                                  &f->scopes.note, &f->scopes.learn, &f->scopes.adopt, &f->scopes.storage_of, &f->scopes.fused_limit);
#define HOLD(name) Py_XINCREF((PyObject *)f->name);
    OBJECTS(HOLD)
    if (parsed && !PyType_IsSubtype(f->work_type, State_of_Work)) {
        PyErr_Format(PyExc_TypeError, "work_type must be a WorkState, got %R", f->work_type);
        parsed = 0;
    }
    f->short_bytes = short_bytes;
    if (parsed && !fill_questions(&f->questions, functions)) {
        f->base.submit = submit_directly, f->base.advance = core_advance;
        f->patience = (int64_t)(patience * 1e9);
        f->constant_count = (int)PyTuple_Size(f->values);
        if (f->constant_count > MOST_CONSTANTS) f->constant_count = MOST_CONSTANTS;
        for (int k = 0; k < f->constant_count; k++) f->constants[k] = PyTuple_GetItem(f->values, k);
        return (PyObject *)f;
    }
    Py_DECREF((PyObject *)f);
    return NULL;
}

static PyMethodDef fast_path_methods[] = {
    {"submit", (PyCFunction)(void (*)(void))FastPath_submit, METH_FASTCALL, "Submit a call; see the submitter's `call`."},
    {"before_await", FastPath_before_await, METH_O, "Go on, before a task waits for a Work of a message that is posted here."},
    {"before_block", FastPath_before_block, METH_O, "Have Python go on, before a thread waits for such a Work."},
    {"flush", FastPath_flush, METH_O, "Send the held calls of a list: True, or None if the submitter has to."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, (void *)FastPath_new}, {Py_tp_dealloc, (void *)FastPath_dealloc}, {Py_tp_traverse, (void *)FastPath_traverse},
    {Py_tp_clear, (void *)FastPath_clear}, {Py_tp_methods, fast_path_methods}, {0, NULL}};
static PyType_Spec fast_path_spec = {
    "_core.FastPath", sizeof(FastPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, fast_path_slots};

static PyObject *attribute_of(const char *module, const char *name)
{
    PyObject *m = PyImport_ImportModule(module), *found = m ? PyObject_GetAttrString(m, name) : NULL;
    Py_XDECREF(m);
    return found;
}

int core_add_fast_path(PyObject *module)
{
    PyObject *base = attribute_of("asynccomm.core._work", "DirectPath");
    if (!base) return -1;
    Core_FastPath = (PyTypeObject *)PyType_FromSpecWithBases(&fast_path_spec, base);
    Py_DECREF(base);
    if (!Core_FastPath) return -1;
    const struct { PyObject **place; const char *text; } names[] = {
        {&name_running, "__asyncio_running_event_loop__"}, {&name_append, "append"}, {&name_filename, "co_filename"},
        {&name_lasti, "f_lasti"}, {&name_dtype, "dtype"}, {&name_back, "f_back"}, {&name_profiling, "_is_profiler_enabled"}};
    for (size_t k = 0; k < sizeof names / sizeof *names; k++)
        if (!(*names[k].place = PyUnicode_InternFromString(names[k].text))) return -1;
    frame_lasti = (int (*)(PyFrameObject *))dlsym(RTLD_DEFAULT, "PyFrame_GetLasti");
    if (!(get_running_loop = attribute_of("asyncio", "_get_running_loop")) || !(get_frame = attribute_of("sys", "_getframe"))
        || !(one = PyLong_FromLong(1)) || !(two = PyLong_FromLong(2))
        || !(Streak_Type = (PyTypeObject *)attribute_of("asynccomm.core._work", "Streak"))
        || !(Counts_Type = (PyTypeObject *)attribute_of("asynccomm.core._work", "CallCounts"))
        || !(State_of_Work = (PyTypeObject *)attribute_of("asynccomm.core._work", "WorkState"))
        || !(Log_Type = (PyTypeObject *)attribute_of("asynccomm.core._work", "CallLog"))
        || !(Lock_Type = (PyTypeObject *)attribute_of("asynccomm.core._work", "ReentrantLock"))
        || core_add_scopes(module) || core_add_windows(module))
        return -1;
    return PyModule_AddObjectRef(module, "FastPath", (PyObject *)Core_FastPath);
}
