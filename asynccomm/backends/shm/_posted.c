/* Messages that are posted before the other rank comes, as by a program whose ranks receive and send at once.
 *
 * A receive of a short message, or of one that can be read by single copy, and a send of such a one, stay here, as HeldCalls in
 * `posted` of the RankPosition, until a task awaits one of them. Their frames are taken here, too, also while a long message is
 * being sent. Anything else that looks at messages is Python, and takes all that are posted over first: the engine, which the
 * event loop calls soon after a message was posted. While any are posted, no message is pending in Python.
 */
#include "_fast_path.h"

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

int core_has_posted_sends(const FastPath *f)
{
    Py_ssize_t count = posted_count(f);
    for (Py_ssize_t k = 0; k < count; k++)
        if (posted_at(f, k)->entry->sends) return 1;
    return 0;
}

/* ---- posting ------------------------------------------------------------------------------------------------------ */

/* Whether a message may wait here. Runs no Python code. */
static int may_wait(const FastPath *f, const Entry *entry)
{
    const RankPosition *state = f->state;
    if (state->dead || (state->adopting && !entry->sends) || state->messages || state->kept || f->segment->links[entry->peer]->gone) return 0;
    if (f->counts->closed || f->counts->detours || f->counts->noted_calls) return 0;
    if (entry->size > f->short_bytes && !core_reads_all(f->segment)) return 0;
    return f->driver != Py_None && state->posted && posted_count(f) < MOST_POSTED;
}

/* Number a message and enter it in the lists; -1 with an exception. */
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

PyObject *core_post_message(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments, PyObject *result,
                            PyObject *site, double started, const BegunMessage *begun)
{
    PyObject *work = NULL;
    if (core_is_in_loop(f) <= 0 || !may_wait(f, entry)) return NULL;
    HeldCall *held = core_new_held(f, entry, tensors, arguments);
    if (!held || core_give_work(f, held, (PyObject *)f, result, site, started)) {
        Py_XDECREF((PyObject *)held);
        return NULL;
    }
    if (entry->sends) held->begun = *begun;
    if (may_wait(f, entry) && !enter(f, entry, held)) { /* Python code has run meanwhile */
        int armed = f->state->arming;
        if (!armed) {
            PyObject *none = PyObject_CallNoArgs(f->arm);
            armed = none != NULL;
            Py_XDECREF(none);
        }
        if (armed) work = (PyObject *)held->work, Py_INCREF(work);
        else core_break_comm(f); /* the event loop would never look for it */
    }
    Py_DECREF((PyObject *)held);
    return work;
}

/* ---- frames ---------------------------------------------------------------------------------------------------- */

/* Settle a message that is done, and take it out of the lists; -1 with an exception. */
static int settle(FastPath *f, WorkState *work)
{
    if (PyList_Size(f->waiters)) { /* as long as tasks wait for any operation, Python settles all */
        PyObject *settled = PyObject_CallMethod((PyObject *)work, "settle", NULL);
        Py_XDECREF(settled);
        return settled ? 0 : -1;
    }
    int deciding = -1, result = core_settle(f, work, core_seconds(), &deciding);
    if (result <= 0) return result;
    core_log_end(f->recent, work);
    if (PyDict_DelItem(f->scopes.works, (PyObject *)work)) PyErr_Clear(); /* the comm has been dropped */
    return 0;
}

int core_settle_posted(FastPath *f)
{
    int failed = 0, count = f->unsettled_count;
    HeldCall *done[MOST_POSTED];
    memcpy(done, f->unsettled, (size_t)count * sizeof *done);
    f->unsettled_count = 0; /* the program may call again meanwhile */
    for (int k = 0; k < count; k++) {
        WorkState *work = done[k]->work;
        if (!failed && !work->done) { /* else the comm has failed */
            if (!done[k]->entry->sends) work->source = PyLong_FromLong(done[k]->entry->peer);
            failed = PyErr_Occurred() || settle(f, work) || PySet_Discard(f->waited, (PyObject *)work) < 0;
            if (failed) core_break_comm(f);
        }
        Py_DECREF((PyObject *)done[k]);
    }
    return failed ? -1 : 0;
}

/* Take a frame for a posted message: DONE if the message is done, else ASKED. */
static int take(FastPath *f, HeldCall *held, LinkState *link, Ring *ring, const Frame *frame, const char *payload)
{
    const Entry *entry = held->entry;
    const Held *tensor = &held->tensors[0];
    if (held->work->done || f->unsettled_count == MOST_POSTED || !core_has_memory(f, held)) return ASKED;
    if (frame->kind == CLEAR) {
        free_frame(f->segment, link, ring, entry->peer, frame->nbytes);
        if (frame->extra == HAS_READ) return DONE;
        return core_send_cleared(f, entry, tensor->data, (uint64_t)tensor->nbytes, &held->begun) == DONE ? DONE : ASKED;
    }
    uint64_t nbytes = (uint64_t)tensor->nbytes;
    int64_t since = nanoseconds();
    int reads = frame->kind == OFFER || frame->kind == LOAN;
    int received = reads ? core_read_offered(f, entry, link, ring, frame, payload, tensor->data, nbytes)
                         : core_receive_short(f, entry, link, ring, frame, payload, tensor->data, nbytes, 0);
    if (received != DONE) return ASKED;
    if (frame->kind == OFFER) f->sends_too = 0;
    else core_received_short(f, link, ring, reads, !reads, nanoseconds() - since, nbytes);
    return DONE;
}

/* Take the next frame of a peer; as core_progress_posted. */
static int take_from(FastPath *f, int peer)
{
    LinkState *link = f->segment->links[peer];
    Ring *ring = ring_of(f->segment, peer, f->segment->rank);
    Frame frame;
    const char *payload = next_frame(f->segment, link, ring, &frame);
    if (!payload) return frame.kind ? ASKED : DONE; /* the ring is corrupt, or had a withdrawn loan */
    for (Py_ssize_t k = 0; k < posted_count(f); k++) {
        HeldCall *held = posted_at(f, k);
        int sends = held->entry->sends;
        if (held->entry->peer != peer || sends != (frame.kind == CLEAR)) continue;
        if (sends ? held->begun.ident != frame.ident : held->entry->tag != frame.tag) continue;
        if (!core_claim(&frame, payload)) return DONE; /* it has been withdrawn, and a SHORT follows */
        if (take(f, held, link, ring, &frame, payload) != DONE) return ASKED;
        Py_INCREF((PyObject *)held);
        f->unsettled[f->unsettled_count++] = held;
        if (!PyList_SetSlice(f->state->posted, k, k + 1, NULL)) return DONE;
        core_break_comm(f);
        PyErr_Clear();
        return ASKED;
    }
    return ASKED; /* for a message that is not posted yet */
}

int core_progress_posted(FastPath *f)
{
    if (f->state->messages || f->state->kept || f->state->dead || PySet_Size(f->waited)) return ASKED;
    for (Py_ssize_t k = 0; k < posted_count(f); k++) {
        int peer = posted_at(f, k)->entry->peer;
        Ring *ring = ring_of(f->segment, peer, f->segment->rank);
        if (atomic_load_explicit(&ring->head, memory_order_acquire) != f->segment->links[peer]->tail) return take_from(f, peer);
    }
    return STUCK;
}

/* Take frames until a Work is done: DONE; STUCK: the other rank does not come soon; ASKED; -1 with an exception. */
static int go_on_until(FastPath *f, const WorkState *work)
{
    Spin spin = {0, 0, 0};
    double began = 0; /* 0: there was no wait yet */
    for (;;) {
        int result = core_progress_posted(f);
        if (core_settle_posted(f)) return -1;
        if (work->done) {
            f->state->message_wait = began ? work->finished - began : 0;
            return DONE;
        }
        if (!began) began = core_seconds();
        if (result == DONE) continue;
        if (result != STUCK || !core_goes_on(f, f->state->message_wait, &spin)) return result;
    }
}

/* Go on before a task waits for a Work; as go_on_until. */
static int go_on(FastPath *f, const WorkState *work)
{
    int may = core_has_posted(f, -1) ? core_may_send(f) : 0;
    if (may <= 0) return may < 0 ? may : ASKED;
    if (work->seq + 1 == f->counts->messages && work->seq == (long long)f->state->alone) f->state->calls_ahead = 0;
    int result = go_on_until(f, work);
    core_unlock(f->lock);
    return result;
}

int core_advance(PyObject *self, WorkState *work)
{
    FastPath *f = (FastPath *)self;
    if (!f->counts) return 0; /* dropped */
    int result = go_on(f, work);
    f->advanced = result == STUCK ? work : NULL;
    return result < 0 ? -1 : 0;
}

PyObject *FastPath_before_await(PyObject *self, PyObject *object)
{
    FastPath *f = (FastPath *)self;
    if (!f->counts || !PyType_IsSubtype(Py_TYPE(object), f->work_type)) Py_RETURN_NONE; /* dropped */
    int result = f->advanced == (const WorkState *)object ? STUCK : go_on(f, (const WorkState *)object);
    f->advanced = NULL;
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
