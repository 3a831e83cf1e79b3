/* Long messages: the DATA frames of any number of them, written and read without the GIL.
 *
 * endpoint.py has the protocol. It hands over the parts of messages that are in one piece of memory here and whose frames
 * are due; a frame of any other kind or message is left to it.
 */
#include "_rings.h"

#include <stdlib.h>

static void advance(Transfer *t, uint64_t nbytes) { t->address += nbytes, t->left -= nbytes, t->moved += (int64_t)nbytes; }

int core_write_frame(Segment *s, Transfer *t, uint64_t most)
{
    uint64_t end, run = (uint64_t)s->ring - t->link->head % (uint64_t)s->ring - FRAME_HEADER; /* needs no padding */
    uint64_t nbytes = t->left < most ? t->left : most;
    if (nbytes > run) nbytes = run;
    Frame *frame = reserve_frame(s, t->link, t->ring, nbytes, &end);
    if (!frame) return STUCK;
    *frame = (Frame){(uint32_t)nbytes, DATA, 0, 0, t->ident, 0, 0};
    core_copy((char *)(frame + 1), t->address, nbytes);
    publish_frame(s, t->link, t->ring, t->peer, end);
    advance(t, nbytes);
    return t->left ? MOVED : DONE;
}

int core_read_frames(Segment *s, Transfer *transfers, Py_ssize_t count, const Transfer *any)
{
    int result = STUCK;
    Frame frame;
    const char *payload;
    uint64_t head = atomic_load_explicit(&any->ring->head, memory_order_relaxed);
    while ((int64_t)(head - any->link->tail) > 0 && (payload = next_frame(s, any->link, any->ring, &frame))) {
        Transfer *t = transfers;
        while (t < transfers + count && (t->sending || t->link != any->link || t->ident != frame.ident)) t++;
        if (t == transfers + count || frame.kind != DATA || !frame.nbytes || frame.nbytes > t->left) return DONE;
        core_copy(t->address, payload, frame.nbytes);
        free_frame(s, any->link, any->ring, any->peer, frame.nbytes);
        advance(t, frame.nbytes);
        if (!t->left) return DONE;
        result = MOVED;
    }
    return result;
}

/* Whether a rank without a transfer from it has sent a frame. */
static int others_sent(const Segment *s, const Transfer *transfers, Py_ssize_t count)
{
    for (int rank = 0; rank < s->size; rank++) {
        Py_ssize_t k = 0;
        while (k < count && (transfers[k].sending || transfers[k].peer != rank)) k++;
        if (k == count && rank != s->rank
            && atomic_load_explicit(&ring_of(s, rank, s->rank)->head, memory_order_relaxed) != s->links[rank]->tail)
            return 1;
    }
    return 0;
}

static void transfer(Segment *s, Transfer *transfers, Py_ssize_t count, uint64_t frame, Pace *pace)
{
    Py_ssize_t first = 0;
    for (;;) {
        int result = STUCK;
        Py_ssize_t without_room = -1; /* it is the first in the next pass */
        for (Py_ssize_t n = 0; n < count; n++) {
            Py_ssize_t k = (first + n) % count;
            Transfer *t = &transfers[k];
            int moved = t->sending ? core_write_frame(s, t, frame) : core_read_frames(s, transfers, count, t);
            if (moved == DONE) result = DONE;
            else if (moved == MOVED && result == STUCK) result = MOVED;
            if (t->sending && moved == STUCK && without_room < 0) without_room = k;
        }
        if (without_room >= 0) first = without_room;
        if (result == DONE || others_sent(s, transfers, count) || !core_continues(s, pace, result == MOVED)) return;
    }
}

/* (peer, sending, ident, address, nbytes) */
static int parse_transfer(const Segment *s, PyObject *t, Transfer *transfer)
{
    unsigned long long address, nbytes;
    if (!PyArg_ParseTuple(t, "ipIKK", &transfer->peer, &transfer->sending, &transfer->ident, &address, &nbytes))
        return -1;
    if (transfer->peer < 0 || transfer->peer >= s->size || transfer->peer == s->rank || !nbytes || nbytes > INT64_MAX) {
        PyErr_Format(PyExc_ValueError, "a transfer of %llu bytes with rank %d", nbytes, transfer->peer);
        return -1;
    }
    transfer->link = s->links[transfer->peer];
    transfer->ring = transfer->sending ? ring_of(s, s->rank, transfer->peer) : ring_of(s, transfer->peer, s->rank);
    transfer->address = (char *)(uintptr_t)address;
    transfer->left = nbytes;
    return 0;
}

PyObject *core_transfer(PyObject *self, PyObject *args)
{
    Segment *s = (Segment *)self;
    PyObject *items;
    unsigned long long frame;
    double patience, stretch;
    int events;
    if (!PyArg_ParseTuple(args, "O!Kddi", &PyTuple_Type, &items, &frame, &patience, &stretch, &events)) return NULL;
    if (!frame || framed(frame) > (uint64_t)s->ring / 4) return PyErr_Format(PyExc_ValueError, "a frame of %llu bytes", frame);
    Py_ssize_t count = PyTuple_Size(items);
    Transfer *transfers = core_zeroed(count, sizeof(Transfer));
    if (!transfers) return NULL;
    for (Py_ssize_t k = 0; k < count; k++)
        if (parse_transfer(s, PyTuple_GetItem(items, k), &transfers[k])) {
            free(transfers);
            return NULL;
        }
    Pace pace = core_pace(patience, stretch, events);
    Py_BEGIN_ALLOW_THREADS
    transfer(s, transfers, count, frame, &pace);
    Py_END_ALLOW_THREADS
    PyObject *moved = PyList_New(count);
    for (Py_ssize_t k = 0; moved && k < count; k++) {
        PyObject *number = PyLong_FromLongLong(transfers[k].moved);
        if (!number || PyList_SetItem(moved, k, number)) Py_CLEAR(moved);
    }
    free(transfers);
    return moved;
}
