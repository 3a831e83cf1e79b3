/* Both ends of a queue's ring, as ring.py has them in Python; layout.py has the memory. */
#include "../core/_work.h"

#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64, FRAME_HEADER = 32, SLOTS = 64, DATA = 16384 };
enum { HEAD = 0, FLOOR = 8, WAITING = 16, FIRST_SLOT = 24, SLOT_WORDS = 16, TAIL = 0, SLEEPING = 8 }; /* words */
enum { PADDING = 1, BYTES = 2, OBJECT = 3 };
enum { FULL = 0, PUBLISHED = 1, WAKE = 2 };
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* since Linux 5.14 */
#endif
#define MADE_AHEAD 65536 /* bytes of the ring, at least, whose pages are made before they are written */
#define WITHOUT_GIL 65536 /* bytes; giving it up and taking it again costs more than a shorter copy */

typedef _Atomic uint64_t Word;

typedef struct {
    uint32_t nbytes, kind, first, head;
    uint64_t total, number;
} Frame;

typedef struct {
    Py_buffer memory;
    Word *words;
    char *data;
    uint64_t ring;
    int drops;
} Ring;

typedef struct {
    PyObject_HEAD
    Ring ring;
    uint64_t taken;
    unsigned long long head, number; /* bytes written; number of the next item */
    int held; /* items wait, or the end has failed: put_short puts nothing */
    ReentrantLock *lock; /* of the end */
    uint64_t made; /* bytes of the ring that have pages */
    int count, slots[SLOTS];
    int bells[SLOTS]; /* sockets by slot; -1: Python wakes the reader */
} Writer;

typedef struct {
    PyObject_HEAD
    Ring ring;
    Word *slot;
    unsigned long long tail, dropped;
    long long expected;
    Frame frame;
} Reader;

static PyObject *corrupt; /* BackendError */
static PyTypeObject *Lock_Type;

static uint64_t framed(uint64_t nbytes) { return (FRAME_HEADER + nbytes + LINE - 1) & ~(uint64_t)(LINE - 1); }
static Word *slot_of(Word *words, int slot) { return words + FIRST_SLOT + slot * SLOT_WORDS; }
static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void copy(char *to, const char *from, size_t nbytes)
{
    if (nbytes < WITHOUT_GIL) {
        if (nbytes) memcpy(to, from, nbytes); /* no bytes may come from no address */
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, nbytes);
    Py_END_ALLOW_THREADS
}

static int open_ring(Ring *r, PyObject *memory, unsigned long long ring, int drops)
{
    if (PyObject_GetBuffer(memory, &r->memory, PyBUF_WRITABLE)) return -1;
    if (!ring || ring % LINE || r->memory.len < DATA || ring > (uint64_t)r->memory.len - DATA) {
        PyErr_Format(PyExc_ValueError, "a ring of %llu bytes in %zd", ring, r->memory.len);
        return -1;
    }
    r->words = r->memory.buf, r->data = (char *)r->memory.buf + DATA, r->ring = ring, r->drops = drops;
    return 0;
}

static void dealloc(PyObject *self)
{
    PyBuffer_Release(&((Writer *)self)->ring.memory); /* a ring is the first member of both types */
    core_free(self);
}

static void *new_object(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

/* ---- the writer --------------------------------------------------------------------------------------------------- */

static PyObject *Writer_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *memory;
    unsigned long long address, ring;
    int drops;
    if (!PyArg_ParseTuple(args, "OKKp", &memory, &address, &ring, &drops)) return NULL;
    Writer *w = new_object(type);
    for (int slot = 0; w && slot < SLOTS; slot++) w->bells[slot] = -1;
    if (w && !open_ring(&w->ring, memory, ring, drops)) w->lock = (ReentrantLock *)PyObject_CallNoArgs((PyObject *)Lock_Type);
    if (w && !w->lock) Py_CLEAR(w);
    return (PyObject *)w;
}

/* set_bell(slot, socket) */
static PyObject *Writer_set_bell(PyObject *self, PyObject *args)
{
    int slot, bell;
    if (!PyArg_ParseTuple(args, "ii", &slot, &bell)) return NULL;
    if (slot < 0 || slot >= SLOTS) return PyErr_Format(PyExc_ValueError, "slot %d", slot);
    ((Writer *)self)->bells[slot] = bell;
    Py_RETURN_NONE;
}

static PyObject *Writer_set_slots(PyObject *self, PyObject *slots)
{
    Writer *w = (Writer *)self;
    Py_ssize_t count = PyTuple_Size(slots);
    if (count < 0 || count > SLOTS) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%zd slots", count);
    for (Py_ssize_t k = 0; k < count; k++) {
        long slot = PyLong_AsLong(PyTuple_GetItem(slots, k));
        if (slot < 0 || slot >= SLOTS) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "slot %ld", slot);
        w->slots[k] = (int)slot;
    }
    w->count = (int)count;
    Py_RETURN_NONE;
}

/* 1 if the ring has room up to `end`, 0 if it has not, -1 with an exception */
static int make_room(Writer *w, uint64_t end)
{
    Ring *r = &w->ring;
    if (r->drops) {
        while (end - w->taken > r->ring) {
            uint64_t at = w->taken % r->ring, size = framed(((const Frame *)(r->data + at))->nbytes);
            if (size > least(r->ring - at, w->head - w->taken)) {
                PyErr_SetString(corrupt, "the ring of a queue is corrupt");
                return -1;
            }
            w->taken += size;
        }
        atomic_store(r->words + FLOOR, w->taken);
        atomic_thread_fence(memory_order_seq_cst);
        return 1;
    }
    uint64_t behind = 0; /* of the slowest reader */
    for (int k = 0; k < w->count; k++) {
        uint64_t tail = atomic_load_explicit(slot_of(r->words, w->slots[k]) + TAIL, memory_order_acquire);
        if (w->head - tail > r->ring) {
            PyErr_Format(corrupt, "a reader's counter in the ring of a queue is corrupt: %llu", (unsigned long long)tail);
            return -1;
        }
        if (w->head - tail > behind) behind = w->head - tail;
    }
    w->taken = w->head - behind;
    return end - w->taken <= r->ring;
}

/* Wake the readers that sleep, as doorbell.py does; whether Python has to wake one. Under the GIL, under which a bell is
 * forgotten before it is closed. */
static int wake_readers(Writer *w)
{
    int left = 0;
    for (int k = 0; k < w->count; k++) {
        int bell = w->bells[w->slots[k]];
        Word *sleeping = slot_of(w->ring.words, w->slots[k]) + SLEEPING;
        if (!atomic_load(sleeping)) continue;
        if (bell < 0) {
            left = 1;
            continue;
        }
        atomic_store(sleeping, 0);
        if (send(bell, "w", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {} /* lost, or full of rings that have not been read */
    }
    return left;
}

/* In the first lap, make the pages for as much as the last frame, behind its publication: no reader waits for them then. */
static void make_pages(Writer *w, uint64_t size)
{
    Ring *r = &w->ring;
    uint64_t ahead = size > MADE_AHEAD ? size : MADE_AHEAD, page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (w->head > w->made) w->made = w->head & ~(page - 1);
    if (w->made >= r->ring || w->made >= w->head + ahead / 2) return;
    uint64_t nbytes = least(ahead, r->ring - w->made);
    char *start = r->data + w->made;
    w->made += nbytes;
    Py_BEGIN_ALLOW_THREADS
    if (madvise(start, nbytes, MADV_POPULATE_WRITE)) {} /* no memory, or an older kernel: a write makes them */
    Py_END_ALLOW_THREADS
}

/* Whether a frame of so many bytes may be written; 0 with an exception. */
static int may_write(const Ring *r, uint64_t nbytes)
{
    if (r->ring / 4 >= FRAME_HEADER && nbytes <= r->ring / 4 - FRAME_HEADER) return 1;
    PyErr_Format(PyExc_ValueError, "a frame of %llu bytes", (unsigned long long)nbytes);
    return 0;
}

/* Write and publish a frame of `nbytes` bytes at `from`, and `items` items with it. */
static PyObject *put_frame(Writer *w, const Frame *frame, const char *from, unsigned items)
{
    Ring *r = &w->ring;
    uint64_t nbytes = frame->nbytes;
    uint64_t at = w->head % r->ring, size = framed(nbytes), end = w->head + (size <= r->ring - at ? size : r->ring - at + size);
    if (end - w->taken > r->ring) {
        int room = make_room(w, end);
        if (room <= 0) return room ? NULL : PyLong_FromLong(FULL);
    }
    if (size > r->ring - at) {
        Frame padding = {(uint32_t)(r->ring - at - FRAME_HEADER), PADDING, 0, 0, 0, 0};
        memcpy(r->data + at, &padding, sizeof padding);
        at = 0;
    }
    memcpy(r->data + at, frame, sizeof *frame);
    copy(r->data + at + FRAME_HEADER, from, nbytes);
    w->head = end, w->number += items;
    atomic_store(r->words + HEAD, end);
    int result = wake_readers(w) ? WAKE : PUBLISHED;
    if (w->made < r->ring) make_pages(w, size);
    return PyLong_FromLong(result);
}

static PyObject *put_item(Writer *w, PyObject *item)
{
    uint64_t nbytes = (uint64_t)PyBytes_Size(item);
    Frame frame = {(uint32_t)nbytes, BYTES, 1, 0, nbytes, w->number};
    return put_frame(w, &frame, PyBytes_AsString(item), 1);
}

/* put_bytes(item): an item of bytes in one frame */
static PyObject *Writer_put_bytes(PyObject *self, PyObject *item)
{
    if (!PyBytes_Check(item)) return PyErr_Format(PyExc_TypeError, "item must be bytes");
    if (!may_write(&((Writer *)self)->ring, (uint64_t)PyBytes_Size(item))) return NULL;
    return put_item((Writer *)self, item);
}

/* put_short(item): as put_bytes, if the lock is free; the GIL is kept, so no thread takes it meanwhile; whether it was done */
static PyObject *Writer_put_short(PyObject *self, PyObject *item)
{
    Writer *w = (Writer *)self;
    if (w->held || w->lock->depth || !PyBytes_CheckExact(item) || PyBytes_Size(item) >= WITHOUT_GIL) Py_RETURN_FALSE;
    if ((uint64_t)PyBytes_Size(item) + FRAME_HEADER > w->ring.ring / 4) Py_RETURN_FALSE;
    for (int k = 0; k < w->count; k++) {
        if (w->bells[w->slots[k]] < 0) Py_RETURN_FALSE; /* Python wakes this reader */
    }
    PyObject *result = put_item(w, item);
    if (!result) return NULL;
    int done = PyLong_AsLong(result) != FULL;
    Py_DECREF(result);
    return PyBool_FromLong(done);
}

static PyObject *Writer_put(PyObject *self, PyObject *args)
{
    Writer *w = (Writer *)self;
    unsigned int kind, first, head;
    unsigned long long total, number, nbytes;
    PyObject *source;
    if (!PyArg_ParseTuple(args, "IIIKKOK", &kind, &first, &head, &total, &number, &source, &nbytes)) return NULL;
    char *from = NULL;
    if (PyBytes_Check(source)) {
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(source, &from, &length)) return NULL;
        if (nbytes > (uint64_t)length) return PyErr_Format(PyExc_ValueError, "%llu bytes of %zd", nbytes, length);
    } else {
        from = (char *)(uintptr_t)PyLong_AsUnsignedLongLong(source);
        if (PyErr_Occurred()) return NULL;
    }
    if (!may_write(&w->ring, nbytes)) return NULL;
    Frame frame = {(uint32_t)nbytes, kind, first, head, total, number};
    return put_frame(w, &frame, from, 0);
}

static PyMethodDef writer_methods[] = {
    {"put", Writer_put, METH_VARARGS, "Write and publish a frame."},
    {"put_bytes", Writer_put_bytes, METH_O, "Write and publish an item of bytes."},
    {"put_short", Writer_put_short, METH_O, "Write and publish a short item of bytes, if nothing waits."},
    {"set_bell", Writer_set_bell, METH_VARARGS, "Wake the reader of a slot by a socket."},
    {"set_slots", Writer_set_slots, METH_O, "Wait for these readers, and wake them."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef writer_members[] = {{"head", T_ULONGLONG, offsetof(Writer, head), READONLY, NULL},
    {"number", T_ULONGLONG, offsetof(Writer, number), 0, NULL}, {"held", T_INT, offsetof(Writer, held), 0, NULL},
    {"lock", T_OBJECT, offsetof(Writer, lock), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static void Writer_dealloc(PyObject *self)
{
    Py_XDECREF((PyObject *)((Writer *)self)->lock);
    dealloc(self);
}

static PyType_Slot writer_slots[] = {{Py_tp_new, (void *)Writer_new}, {Py_tp_dealloc, (void *)Writer_dealloc},
    {Py_tp_methods, (void *)writer_methods}, {Py_tp_members, (void *)writer_members}, {0, NULL}};
static PyType_Spec writer_spec = {"_ring.Writer", sizeof(Writer), 0, Py_TPFLAGS_DEFAULT, writer_slots};

/* ---- the reader --------------------------------------------------------------------------------------------------- */

static PyObject *Reader_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *memory;
    unsigned long long address, ring;
    int slot, drops;
    if (!PyArg_ParseTuple(args, "OKKip", &memory, &address, &ring, &slot, &drops)) return NULL;
    if (slot < 0 || slot >= SLOTS) return PyErr_Format(PyExc_ValueError, "slot %d", slot);
    Reader *d = new_object(type);
    if (d && open_ring(&d->ring, memory, ring, drops)) Py_CLEAR(d);
    if (d) {
        d->slot = slot_of(d->ring.words, slot);
        d->tail = atomic_load(d->slot + TAIL), d->expected = -1;
    }
    return (PyObject *)d;
}

static int valid(const Reader *d)
{
    if (!d->ring.drops) return 1;
    atomic_thread_fence(memory_order_acquire);
    return atomic_load(d->ring.words + FLOOR) <= d->tail;
}

/* The payload of the next frame, whose header is in d->frame; NULL if there is none, or with an exception. The other
 * process may change its memory at any time: only the copy of the header is checked and used. */
static const char *next_frame(Reader *d)
{
    Ring *r = &d->ring;
    for (;;) {
        uint64_t floor = r->drops ? atomic_load(r->words + FLOOR) : 0;
        if (floor > d->tail) d->tail = floor;
        uint64_t head = atomic_load_explicit(r->words + HEAD, memory_order_acquire), left = head - d->tail, at = d->tail % r->ring;
        if (!left) return NULL;
        if (head < d->tail || (left > r->ring && !r->drops) || head % LINE || d->tail % LINE) {
            PyErr_Format(corrupt, "the ring of a queue is corrupt: %lld bytes", (long long)left);
            return NULL;
        }
        memcpy(&d->frame, r->data + at, sizeof d->frame);
        if (!valid(d)) continue;
        uint64_t size = framed(d->frame.nbytes);
        if (size > least(left, r->ring - at) || d->frame.kind < PADDING || d->frame.kind > OBJECT) {
            PyErr_Format(corrupt, "the ring of a queue is corrupt: a frame with %u bytes of payload", d->frame.nbytes);
            return NULL;
        }
        if (d->frame.kind != PADDING) return r->data + at + FRAME_HEADER;
        d->tail += size;
    }
}

/* Count the frame of next_frame as read; -1 with an exception */
static int count_frame(Reader *d)
{
    d->tail += framed(d->frame.nbytes);
    if (!d->frame.first) return 0;
    long long number = (long long)d->frame.number, missed = d->expected >= 0 ? number - d->expected : 0;
    if (number < 0 || missed < 0 || (missed && !d->ring.drops)) {
        PyErr_Format(corrupt, "the ring of a queue is corrupt: item %lld in place of %lld", number, d->expected);
        return -1;
    }
    d->dropped += (unsigned long long)missed;
    d->expected = number + 1;
    return 0;
}

static PyObject *Reader_peek(PyObject *self, PyObject *Py_UNUSED(none))
{
    Reader *d = (Reader *)self;
    const char *payload = next_frame(d);
    if (!payload) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(IIIIKKK)", d->frame.nbytes, d->frame.kind, d->frame.first, d->frame.head,
        (unsigned long long)d->frame.total, (unsigned long long)d->frame.number, (unsigned long long)(uintptr_t)payload);
}

static PyObject *Reader_valid(PyObject *self, PyObject *Py_UNUSED(none)) { return PyBool_FromLong(valid((Reader *)self)); }

static PyObject *Reader_publish(PyObject *self, PyObject *Py_UNUSED(none))
{
    Reader *d = (Reader *)self;
    atomic_store(d->slot + TAIL, d->tail);
    return PyLong_FromLong(atomic_load(d->ring.words + WAITING) != 0);
}

static PyObject *Reader_free(PyObject *self, PyObject *none)
{
    if (count_frame((Reader *)self)) return NULL;
    return Reader_publish(self, none);
}

static PyObject *Reader_take(PyObject *self, PyObject *args)
{
    Reader *d = (Reader *)self;
    PyObject *source;
    Py_ssize_t items;
    long long nbytes;
    if (!PyArg_ParseTuple(args, "OnL", &source, &items, &nbytes)) return NULL;
    PyObject *taken = PyList_New(0);
    const char *payload;
    while (taken && PyList_Size(taken) < items && nbytes > 0 && (payload = next_frame(d))) {
        Frame *f = &d->frame;
        if (!f->first || f->nbytes != f->total || (f->kind == OBJECT && f->head != f->total)) break;
        PyObject *data = PyBytes_FromStringAndSize(NULL, f->nbytes), *item = data;
        if (!data) break;
        copy(PyBytes_AsString(data), payload, f->nbytes);
        if (!valid(d)) {
            Py_DECREF(data);
            continue;
        }
        nbytes -= f->nbytes;
        if (f->kind == OBJECT) {
            item = PyTuple_Pack(2, source, data);
            Py_DECREF(data);
        }
        if (!item || PyList_Append(taken, item) || count_frame(d)) {
            Py_XDECREF(item);
            break;
        }
        Py_DECREF(item);
    }
    if (PyErr_Occurred()) Py_CLEAR(taken);
    return taken;
}

static int64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static PyObject *Reader_poll(PyObject *self, PyObject *arg)
{
    Reader *d = (Reader *)self;
    double seconds = PyFloat_AsDouble(arg);
    if (PyErr_Occurred()) return NULL;
    int found;
    Py_BEGIN_ALLOW_THREADS
    int64_t end = nanoseconds() + (int64_t)(seconds * 1e9);
    /* the writer may need this core: it is offered in each round */
    while (!(found = atomic_load(d->ring.words + HEAD) != d->tail) && nanoseconds() < end) sched_yield();
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
}

static PyMethodDef reader_methods[] = {
    {"peek", Reader_peek, METH_NOARGS, "The next frame, or None."},
    {"valid", Reader_valid, METH_NOARGS, "Whether the frame of peek was intact while its payload was copied."},
    {"free", Reader_free, METH_NOARGS, "Finish the frame of peek."},
    {"poll", Reader_poll, METH_O, "Look for a frame for so many seconds, without the GIL."},
    {"publish", Reader_publish, METH_NOARGS, "Publish the tail."},
    {"take", Reader_take, METH_VARARGS, "Read items of one frame without tensors."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef reader_members[] = {{"tail", T_ULONGLONG, offsetof(Reader, tail), READONLY, NULL},
    {"dropped", T_ULONGLONG, offsetof(Reader, dropped), READONLY, NULL},
    {"expected", T_LONGLONG, offsetof(Reader, expected), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot reader_slots[] = {{Py_tp_new, (void *)Reader_new}, {Py_tp_dealloc, (void *)dealloc},
    {Py_tp_methods, (void *)reader_methods}, {Py_tp_members, (void *)reader_members}, {0, NULL}};
static PyType_Spec reader_spec = {"_ring.Reader", sizeof(Reader), 0, Py_TPFLAGS_DEFAULT, reader_slots};

/* ---- the next item ------------------------------------------------------------------------------------------------ */

/* A call gives an awaitable, whose await takes the next item of those that were read ahead. It needs no coroutine for an item
 * of bytes that need no more checks; the coroutine function `wait` has the other cases. The argument of the call, the queue,
 * is alive as long as the awaitable and the coroutine. */
typedef struct {
    PyObject_HEAD
    PyObject *found, *should_yield, *finished, *wait, *end;
    Py_ssize_t longest; /* bytes that need no more checks */
} Next;

static PyObject *name_popleft, *name_appendleft, *name_await;

static PyObject *Next_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *found, *should_yield, *finished, *wait, *end;
    Py_ssize_t longest;
    if (!PyArg_ParseTuple(args, "OOOOOn", &found, &should_yield, &finished, &wait, &end, &longest)) return NULL;
    Next *next = new_object(type);
    if (!next) return NULL;
    next->found = found, next->should_yield = should_yield, next->finished = finished, next->wait = wait, next->end = end;
    next->longest = longest;
    Py_INCREF(found), Py_INCREF(should_yield), Py_INCREF(finished), Py_INCREF(wait), Py_INCREF(end);
    return (PyObject *)next;
}

static int Next_traverse(PyObject *self, visitproc visit, void *arg) /* the end has it, too */
{
    Next *next = (Next *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(next->found);
    Py_VISIT(next->should_yield);
    Py_VISIT(next->wait);
    Py_VISIT(next->end);
    return 0;
}

static int Next_clear(PyObject *self)
{
    Next *next = (Next *)self;
    Py_CLEAR(next->found);
    Py_CLEAR(next->should_yield);
    Py_CLEAR(next->finished);
    Py_CLEAR(next->wait);
    Py_CLEAR(next->end);
    return 0;
}

static void Next_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Next_clear(self);
    core_free(self);
}

/* The next item, if it was read ahead and needs no more checks; NULL, perhaps with an exception */
static PyObject *plain_item(Next *next)
{
    Py_ssize_t count = PyObject_Size(next->found);
    if (count <= 0) return NULL;
    PyObject *item = PyObject_CallMethodObjArgs(next->found, name_popleft, NULL);
    if (!item || (PyBytes_CheckExact(item) && PyBytes_Size(item) <= next->longest)) return item;
    PyObject *none = PyObject_CallMethodObjArgs(next->found, name_appendleft, item, NULL);
    Py_DECREF(item);
    Py_XDECREF(none);
    return NULL;
}

typedef struct {
    PyObject_HEAD
    PyObject *next, *queue;
} NextItem;

static PyTypeObject *NextItem_Type;

static PyObject *Next_call(PyObject *self, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *queue;
    if (!PyArg_UnpackTuple(args, "Next", 1, 1, &queue)) return NULL;
    NextItem *item = new_object(NextItem_Type);
    if (item) item->next = self, item->queue = queue, Py_INCREF(self), Py_INCREF(queue);
    return (PyObject *)item;
}

static void NextItem_dealloc(PyObject *self)
{
    Py_XDECREF(((NextItem *)self)->next);
    Py_XDECREF(((NextItem *)self)->queue);
    core_free(self);
}

static PyObject *NextItem_await(PyObject *self)
{
    PyObject *queue = ((NextItem *)self)->queue;
    Next *next = (Next *)((NextItem *)self)->next;
    if (!next->end) return PyErr_Format(PyExc_RuntimeError, "the queue was destroyed");
    PyObject *yields = PyObject_CallFunctionObjArgs(next->should_yield, NULL), *iterator = NULL;
    if (!yields) return NULL;
    PyObject *item = yields == Py_False ? plain_item(next) : NULL;
    if (item) {
        iterator = PyObject_CallFunctionObjArgs(next->finished, item, NULL);
        Py_DECREF(item);
    } else if (!PyErr_Occurred()) {
        PyObject *coroutine = PyObject_CallFunctionObjArgs(next->wait, next->end, yields, queue, NULL);
        if (coroutine) iterator = PyObject_CallMethodObjArgs(coroutine, name_await, NULL);
        Py_XDECREF(coroutine);
    }
    Py_DECREF(yields);
    return iterator;
}

static PyType_Slot next_slots[] = {
    {Py_tp_new, (void *)Next_new}, {Py_tp_dealloc, (void *)Next_dealloc}, {Py_tp_traverse, (void *)Next_traverse},
    {Py_tp_clear, (void *)Next_clear}, {Py_tp_call, (void *)Next_call}, {0, NULL}};
static PyType_Spec next_spec = {"_ring.Next", sizeof(Next), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, next_slots};
static PyType_Slot next_item_slots[] = {
    {Py_tp_dealloc, (void *)NextItem_dealloc}, {Py_am_await, (void *)NextItem_await}, {0, NULL}};
static PyType_Spec next_item_spec = {
    "_ring.NextItem", sizeof(NextItem), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, next_item_slots};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    int result = type ? PyModule_AddObjectRef(module, name, type) : -1;
    Py_XDECREF(type);
    return result;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_ring", "Both ends of a queue's ring.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__ring(void)
{
    PyObject *errors = PyImport_ImportModule("asynccomm.errors"), *module = NULL;
    if (!errors) return NULL;
    corrupt = PyObject_GetAttrString(errors, "BackendError");
    Py_DECREF(errors);
    PyObject *states = PyImport_ImportModule("asynccomm.core._work");
    if (states) Lock_Type = (PyTypeObject *)PyObject_GetAttrString(states, "ReentrantLock");
    Py_XDECREF(states);
    if (corrupt && Lock_Type) module = PyModule_Create(&definition);
    name_popleft = PyUnicode_InternFromString("popleft"), name_appendleft = PyUnicode_InternFromString("appendleft");
    name_await = PyUnicode_InternFromString("__await__");
    NextItem_Type = (PyTypeObject *)PyType_FromSpec(&next_item_spec);
    if (module && (!NextItem_Type || !name_popleft || !name_appendleft || !name_await || add_type(module, "Writer", &writer_spec)
        || add_type(module, "Reader", &reader_spec) || add_type(module, "Next", &next_spec)))
        Py_CLEAR(module);
    return module;
}
