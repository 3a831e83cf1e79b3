/* Receives that are posted before their messages come, as by a program whose ranks receive and send at once.
 *
 * A receive of a short message stays here, as a HeldCall in `posted` of the RankPosition, until a task awaits it, and the
 * message is received here, too. Whatever else looks at messages is Python, and takes all that are posted over first: the
 * engine, which the event loop calls soon after a receive was posted. While any are posted, no message is pending in Python.
 */
#include "_fast_path.h"

enum { MOST_POSTED = 64 };

static HeldCall *posted_at(const FastPath *f, Py_ssize_t k) { return (HeldCall *)PyList_GetItem(f->state->posted, k); }

static Py_ssize_t posted_count(const FastPath *f) { return f->state->posted ? PyList_Size(f->state->posted) : 0; }

int core_has_posted(const FastPath *f, int peer)
{
    Py_ssize_t count = posted_count(f);
    if (peer < 0) return count > 0;
    for (Py_ssize_t k = 0; k < count; k++)
        if (posted_at(f, k)->entry->peer == peer) return 1;
    return 0;
}

/* ---- posting ------------------------------------------------------------------------------------------------------ */

/* Whether a receive may wait here. Runs no Python code. */
static int may_wait(const FastPath *f, const Entry *entry)
{
    const RankPosition *state = f->state;
    if (state->dead || state->adopting || state->messages || state->kept || f->segment->links[entry->peer]->gone) return 0;
    if (f->counts->closed || f->counts->detours || f->counts->noted_calls || entry->size > f->short_bytes) return 0;
    return f->driver != Py_None && state->posted && posted_count(f) < MOST_POSTED;
}

/* Number a receive and enter it in the lists; -1 with an exception. */
static int enter(FastPath *f, const Entry *entry, HeldCall *held)
{
    WorkState *work = held->work;
    if (PyDict_SetItem(f->scopes.works, (PyObject *)work, entry->nbytes)) return -1;
    if (PyList_Append(f->state->posted, (PyObject *)held)) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (PyDict_DelItem(f->scopes.works, (PyObject *)work)) PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        return -1;
    }
    work->seq = core_count(f, 1, entry->size);
    core_log_call(f->recent, core_call_of(work));
    return 0;
}

PyObject *core_post_receive(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments, PyObject *result,
                            PyObject *site, double started)
{
    PyObject *work = NULL;
    if (core_is_in_loop(f) <= 0 || !may_wait(f, entry)) return NULL;
    HeldCall *held = core_new_held(f, entry, tensors, arguments);
    if (!held || core_give_work(f, held, (PyObject *)f, result, site, started)) {
        Py_XDECREF((PyObject *)held);
        return NULL;
    }
    if (may_wait(f, entry) && !enter(f, entry, held)) { /* Python code has run meanwhile */
        PyObject *none = PyObject_CallNoArgs(f->arm);
        Py_XDECREF(none);
        if (none) work = (PyObject *)held->work, Py_INCREF(work);
        else core_break_comm(f); /* the event loop would never look for it */
    }
    Py_DECREF((PyObject *)held);
    return work;
}

/* ---- receiving ---------------------------------------------------------------------------------------------------- */

/* Settle a receive, which has left the list; -1 with an exception. */
static int settle(FastPath *f, HeldCall *held)
{
    held->work->source = PyLong_FromLong(held->entry->peer);
    PyObject *settled = held->work->source ? PyObject_CallMethod((PyObject *)held->work, "settle", NULL) : NULL;
    Py_XDECREF(settled);
    int failed = !settled || PySet_Discard(f->waited, (PyObject *)held->work) < 0;
    if (failed) core_break_comm(f);
    return failed ? -1 : 0;
}

/* Receive the next message of a peer: DONE; ASKED: Python has to; -1 with an exception. */
static int receive_from(FastPath *f, int peer)
{
    LinkState *link = f->segment->links[peer];
    Ring *ring = ring_of(f->segment, peer, f->segment->rank);
    Frame frame;
    const char *payload = next_frame(f->segment, link, ring, &frame);
    if (!payload) return ASKED; /* the ring is corrupt */
    for (Py_ssize_t k = 0; k < posted_count(f); k++) {
        HeldCall *held = posted_at(f, k);
        const Held *tensor = &held->tensors[0];
        if (held->entry->peer != peer || held->entry->tag != frame.tag) continue;
        if (held->work->done || !core_has_memory(f, held)) return ASKED;
        if (core_receive_short(f, held->entry, link, ring, &frame, payload, tensor->data, (uint64_t)tensor->nbytes) != DONE)
            return ASKED;
        Py_INCREF((PyObject *)held);
        int failed = PyList_SetSlice(f->state->posted, k, k + 1, NULL);
        if (failed) core_break_comm(f);
        else failed = settle(f, held);
        Py_DECREF((PyObject *)held);
        return failed ? -1 : DONE;
    }
    return ASKED; /* for a receive that is not posted yet */
}

/* Receive one message: DONE; STUCK: none has come; ASKED: Python has to; -1 with an exception. */
static int receive_one(FastPath *f)
{
    if (f->state->messages || f->state->kept || f->state->dead || PySet_Size(f->waited)) return ASKED;
    for (Py_ssize_t k = 0; k < posted_count(f); k++) {
        int peer = posted_at(f, k)->entry->peer;
        Ring *ring = ring_of(f->segment, peer, f->segment->rank);
        if (atomic_load_explicit(&ring->head, memory_order_acquire) != f->segment->links[peer]->tail) return receive_from(f, peer);
    }
    return STUCK;
}

/* Receive until a Work is done: DONE; STUCK: its message does not come soon; ASKED; -1 with an exception. */
static int receive_until(FastPath *f, const WorkState *work)
{
    Spin spin = {0, 0, 0};
    double began = monotonic();
    for (;;) {
        int result = receive_one(f);
        if (work->done && result >= 0) {
            f->state->message_wait = monotonic() - began;
            return DONE;
        }
        if (result == DONE) continue;
        if (result != STUCK || !core_goes_on(f, f->state->message_wait, &spin)) return result;
    }
}

PyObject *FastPath_before_await(PyObject *self, PyObject *object)
{
    FastPath *f = (FastPath *)self;
    const WorkState *work = (const WorkState *)object;
    if (!f->counts || !PyType_IsSubtype(Py_TYPE(object), f->work_type)) Py_RETURN_NONE; /* dropped */
    int result = ASKED, may = core_has_posted(f, -1) ? core_may_send(f) : 0;
    if (may < 0) return NULL;
    if (may) {
        if (work->seq + 1 == f->counts->messages) f->state->receives_ahead = 0;
        result = receive_until(f, work);
        core_unlock(f->lock);
    }
    if (result < 0) return NULL;
    if (result != ASKED) Py_RETURN_NONE; /* the loop goes on with it */
    return PyObject_CallMethod(f->driver, "before_await", "O", object);
}

PyObject *FastPath_before_block(PyObject *self, PyObject *work)
{
    FastPath *f = (FastPath *)self;
    if (!f->counts) Py_RETURN_NONE;
    return PyObject_CallMethod(f->driver, "before_block", "O", work);
}
