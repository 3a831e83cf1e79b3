/* The native executor of collectives in shared memory.
 *
 * A program (programs.py) is data: a few stages, each taken through its iterations in order. An iteration waits for
 * flags of other ranks, copies or reduces, and raises a flag of its own. This file knows no algorithm. reference.py runs
 * the same programs in Python and is the specification of this file; ranks with either executor share one segment.
 *
 * All state between two iterations is one counter per stage, so a run may be continued by any thread, one at a time.
 * The memory that other ranks write is not trusted: an offset or a length is never read from it.
 */
#include "_core.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#define HOLD_BYTES (32 << 10)   /* a pass over fewer bytes keeps the GIL: it takes a few microseconds */
#define READ_BEHIND (2 << 20)   /* bytes of results; the size of the larger caches that belong to one core */
#define STREAM_BYTES (16 << 20) /* results of larger runs are stored past the caches, which they would flush */

/* ---- copying ------------------------------------------------------------------------------------------------------ */

/* glibc's memcpy may be `rep movsb`, which is slow where another core holds the lines; GCC must not call it for a loop. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-loop-distribute-patterns")
#endif
CLONES void core_copy(char *restrict to, const char *restrict from, size_t n)
{
#if defined(__x86_64__)
    typedef char Wide __attribute__((vector_size(32), aligned(1), may_alias));
    for (; n >= 128; n -= 128, to += 128, from += 128) {
        Wide a = *(const Wide *)from, b = *(const Wide *)(from + 32), c = *(const Wide *)(from + 64), d = *(const Wide *)(from + 96);
        *(Wide *)to = a, *(Wide *)(to + 32) = b, *(Wide *)(to + 64) = c, *(Wide *)(to + 96) = d;
    }
#endif
    memcpy(to, from, n);
}

void core_copy_past_caches(char *restrict to, const char *restrict from, size_t n)
{
#if defined(__x86_64__)
    size_t head = (-(uintptr_t)to) & 15;
    if (n >= 4096) {
        memcpy(to, from, head);
        to += head, from += head, n -= head;
        for (; n >= 64; n -= 64, to += 64, from += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
            _mm_stream_si128((__m128i *)to, a), _mm_stream_si128((__m128i *)(to + 16), b);
            _mm_stream_si128((__m128i *)(to + 32), c), _mm_stream_si128((__m128i *)(to + 48), d);
        }
        _mm_sfence();
    }
#endif
    core_copy(to, from, n);
}

/* ---- the segment -------------------------------------------------------------------------------------------------- */

PyTypeObject *Core_Segment, *Core_Program, *Core_RankPosition, *Core_LinkState;
static PyTypeObject *Run_Type;

/* Wake a rank that is asleep, after a fence that stands between the flag just raised and the look at the sleepers, as the
 * sleepers have one between their word and their last look at the flags. */
static void ring(Segment *s, int rank)
{
    for (int bell = 0; bell < 2; bell++) {
        Word *asleep = block_of(s, rank) + SLEEPING_LOOP + bell;
        uint64_t one = 1;
        if (atomic_load_explicit(asleep, memory_order_relaxed) && atomic_exchange(asleep, 0)
            && write(s->bells[rank][bell], &one, sizeof one) < 0) {} /* full: it rings already */
    }
}

void core_ring(Segment *s, int rank)
{
    atomic_thread_fence(memory_order_seq_cst);
    ring(s, rank);
}

static void ring_all(Segment *s)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < s->size; rank++)
        if (rank != s->rank) ring(s, rank);
}

/* ---- programs ----------------------------------------------------------------------------------------------------- */

/* in the order of the enumerations of programs.py */
enum { IN_VECTOR, IN_SLOT, IN_RESULT, IN_RECORD, SPACES };
enum { WAIT_NOTHING, WAIT_FREE, WAIT_POSTED, WAIT_REDUCED, WAIT_READ, WAITS };
enum { SIGNAL_NOTHING, SIGNAL_POST, SIGNAL_RESULT, SIGNAL_FINISH, SIGNALS };

static void Program_dealloc(PyObject *self)
{
    Program *p = (Program *)self;
    for (int k = 0; p->stages && k < p->stage_count; k++) {
        Stage *stage = &p->stages[k];
        for (int j = 0; stage->actions && j < stage->action_count; j++) free(stage->actions[j].sources);
        free(stage->actions), free(stage->waited);
    }
    free(p->stages), free(p->reach), free(p->sends), free(p->receives);
    core_free(self);
}

int64_t core_number_at(PyObject *sequence, Py_ssize_t i, int64_t least, int64_t most, const char *name)
{
    PyObject *item = PyErr_Occurred() ? NULL : PySequence_GetItem(sequence, i);
    if (!item) return -1;
    long long value = PyLong_AsLongLong(item);
    Py_DECREF(item);
    if (value == -1 && PyErr_Occurred()) return -1;
    if (value < least || value > most) {
        PyErr_Format(PyExc_ValueError, "%s must be from %lld to %lld, got %lld", name, (long long)least, (long long)most, value);
        return -1;
    }
    return value;
}

void *core_zeroed(Py_ssize_t count, size_t size)
{
    void *memory = calloc(count ? (size_t)count : 1, size);
    if (!memory) PyErr_NoMemory();
    return memory;
}

/* (space, index, offset, stride, lent, lent_stride), checked so that every access of `bytes` bytes lies inside */
static int parse_ref(const Segment *s, Program *p, PyObject *t, const Action *action, Ref *ref)
{
    ref->space = (int)core_number_at(t, 0, 0, SPACES - 1, "space");
    ref->index = (int)core_number_at(t, 1, 0, ref->space == IN_VECTOR ? 1 << 20 : s->size - 1, "index");
    ref->offset = core_number_at(t, 2, 0, INT64_MAX / 4, "offset");
    ref->stride = core_number_at(t, 3, 0, INT64_MAX / 4, "stride");
    ref->lent = core_number_at(t, 4, -1, INT64_MAX / 4, "lent");
    ref->lent_stride = core_number_at(t, 5, 0, INT64_MAX / 4, "lent_stride");
    if (PyErr_Occurred()) return -1;
    int64_t bytes = action->total < action->most ? action->total : action->most;
    if (ref->lent >= 0) {
        if (action->reduction >= 0 && bytes * action->count > s->chunk) p->reads = 0;
        if ((ref->space != IN_SLOT && ref->space != IN_RESULT) || ref->lent_stride != action->stride) {
            PyErr_SetString(PyExc_ValueError, "a tensor is lent for a slot or a result, at the stride of the action");
            return -1;
        }
        int64_t *reach = &p->reach[ref->index][ref->space == IN_RESULT];
        if (ref->lent + action->total > *reach) *reach = ref->lent + action->total;
    }
    if (ref->space == IN_VECTOR) {
        if (ref->index >= p->vector_count) p->vector_count = ref->index + 1;
        return 0;
    }
    int64_t room = ref->space == IN_SLOT   ? s->chunk
                   : ref->space == IN_RESULT ? s->piece
                                             : (RECORD_WORDS - INLINE) * 8;
    if (ref->stride || ref->offset + bytes > room) {
        PyErr_Format(PyExc_ValueError, "%lld bytes at %lld do not fit in %lld", (long long)bytes, (long long)ref->offset,
                     (long long)room);
        return -1;
    }
    return 0;
}

/* (target, sources, total, stride, most, reduction) */
static int parse_action(const Segment *s, Program *p, PyObject *t, Action *action)
{
    action->total = core_number_at(t, 2, 0, INT64_MAX / 4, "total");
    action->stride = core_number_at(t, 3, 0, INT64_MAX / 4, "stride");
    action->most = core_number_at(t, 4, 0, INT64_MAX / 4, "most");
    action->reduction = (int)core_number_at(t, 5, -1, 1 << 20, "reduction");
    if (PyErr_Occurred()) return -1;
    if (action->reduction >= p->kernel_count) p->kernel_count = action->reduction + 1;
    PyObject *to = PySequence_GetItem(t, 0), *sources = PySequence_GetItem(t, 1);
    Py_ssize_t count = to && sources ? PySequence_Size(sources) : -1;
    int failed = count < 0 || parse_ref(s, p, to, action, &action->to);
    if (!failed && (count < 1 || count > (action->reduction < 0 ? 1 : s->size))) {
        PyErr_Format(PyExc_ValueError, "an action of %zd sources", count);
        failed = 1;
    }
    if (!failed) failed = !(action->sources = core_zeroed(count, sizeof(Ref)));
    action->count = failed ? 0 : (int)count;
    if (action->count > p->most_sources) p->most_sources = action->count;
    for (int k = 0; k < action->count && !failed; k++) {
        PyObject *item = PySequence_GetItem(sources, k);
        failed = !item || parse_ref(s, p, item, action, &action->sources[k]);
        Py_XDECREF(item);
    }
    Py_XDECREF(to), Py_XDECREF(sources);
    return failed ? -1 : 0;
}

/* (wait, ranks, actions, signal) */
static int parse_stage(const Segment *s, Program *p, PyObject *t, Stage *stage)
{
    stage->wait = (int)core_number_at(t, 0, 0, WAITS - 1, "wait");
    stage->signal = (int)core_number_at(t, 3, 0, SIGNALS - 1, "signal");
    if (PyErr_Occurred()) return -1;
    PyObject *ranks = PySequence_GetItem(t, 1), *actions = PySequence_GetItem(t, 2);
    Py_ssize_t waited = ranks ? PySequence_Size(ranks) : -1, count = actions ? PySequence_Size(actions) : -1;
    int failed = waited < 0 || count < 0 || waited > s->size || count > 1 << 20;
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many ranks or actions");
    if (!failed) failed = !(stage->waited = core_zeroed(waited, sizeof(int))) || !(stage->actions = core_zeroed(count, sizeof(Action)));
    stage->waited_count = failed ? 0 : (int)waited, stage->action_count = failed ? 0 : (int)count;
    for (int k = 0; k < stage->waited_count && !failed; k++) {
        stage->waited[k] = (int)core_number_at(ranks, k, 0, s->size - 1, "rank");
        failed = stage->waited[k] < 0;
    }
    for (int k = 0; k < stage->action_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(actions, k);
        failed = !item || parse_action(s, p, item, &stage->actions[k]);
        Py_XDECREF(item);
        Action *action = &stage->actions[k];
        p->bytes_per_step += (action->total < action->most ? action->total : action->most) * (1 + action->count);
    }
    Py_XDECREF(ranks), Py_XDECREF(actions);
    return failed ? -1 : 0;
}

/* (sends, receives, room) */
static int parse_announced(const Segment *s, Program *p, PyObject *t)
{
    if (!s->position) {
        PyErr_SetString(PyExc_RuntimeError, "the segment follows no position");
        return -1;
    }
    p->sends = core_zeroed(s->size, sizeof(int64_t)), p->receives = core_zeroed(s->size, sizeof(int64_t));
    if (!p->sends || !p->receives) return -1;
    p->room = core_number_at(t, 2, 1, s->chunk, "room");
    for (int side = 0; side < 2 && !PyErr_Occurred(); side++) {
        PyObject *sizes = PySequence_GetItem(t, side);
        for (int rank = 0; sizes && rank < s->size; rank++)
            (side ? p->receives : p->sends)[rank] = core_number_at(sizes, rank, 0, INT64_MAX / 4, "bytes");
        Py_XDECREF(sizes);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* program(steps, stages, lending, announced), where `lending` is (slot, result, single_copy) or None */
static PyObject *Segment_program(PyObject *self, PyObject *args)
{
    long long steps;
    PyObject *stages, *lending, *announced;
    if (!PyArg_ParseTuple(args, "LOOO", &steps, &stages, &lending, &announced)) return NULL;
    Py_ssize_t count = PySequence_Size(stages);
    if (count < 0) return NULL;
    if (steps < 0 || steps > UINT32_MAX) return PyErr_Format(PyExc_ValueError, "a program has up to 2**32 - 1 steps, not %lld", steps);
    if (count < 1 || count > 16) return PyErr_Format(PyExc_ValueError, "a program has 1 to 16 stages, not %zd", count);
    Program *p = (Program *)PyType_GenericAlloc(Core_Program, 0);
    if (!p) return NULL;
    p->steps = (uint32_t)steps;
    p->stages = core_zeroed(count, sizeof(Stage)), p->reach = core_zeroed(((Segment *)self)->size, sizeof *p->reach);
    int failed = !p->stages || !p->reach;
    p->stage_count = failed ? 0 : (int)count;
    p->may_lend = lending != Py_None, p->reads = 1;
    for (int k = 0; k < p->stage_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(stages, k);
        failed = !item || parse_stage((Segment *)self, p, item, &p->stages[k]);
        Py_XDECREF(item);
    }
    for (int side = 0; side < 2 && p->may_lend && !failed; side++)
        p->lending[side] = (int)core_number_at(lending, side, -1, p->vector_count - 1, "lending"), failed = PyErr_Occurred() != NULL;
    if (p->may_lend && !failed) p->single_copy = (int)core_number_at(lending, 2, 0, 1, "single_copy"), failed = PyErr_Occurred() != NULL;
    if (p->single_copy && !p->reads && !failed) {
        PyErr_SetString(PyExc_ValueError, "with single copy, the sources of a reduction fit in a chunk");
        failed = 1;
    }
    if (!failed && announced != Py_None) failed = parse_announced((Segment *)self, p, announced);
    if (!failed) return (PyObject *)p;
    Py_DECREF(p);
    return NULL;
}

/* ---- runs --------------------------------------------------------------------------------------------------------- */

static inline char *place(const Run *run, const Ref *ref, uint32_t i)
{
    const Segment *s = run->segment;
    uint64_t step = run->first + i, at = (step % (uint64_t)s->banks) * (uint64_t)s->size + (uint64_t)ref->index;
    if (ref->lent >= 0 && run->places) {
        char *tensor = run->places[ref->index][ref->space == IN_RESULT];
        if (tensor) return tensor + ref->lent + (int64_t)i * ref->lent_stride;
    }
    switch (ref->space) {
    case IN_SLOT: return s->slots + at * (uint64_t)s->chunk + ref->offset;
    case IN_RESULT: return s->results + at * (uint64_t)s->piece + ref->offset;
    case IN_RECORD: return (char *)(s->records + at * RECORD_WORDS + INLINE) + ref->offset;
    default: return run->vectors[ref->index].address + ref->offset + (int64_t)i * ref->stride;
    }
}

/* Copy from a tensor in the memory of a rank's process: MOVED; STUCK: the rank is lost, which the engine will find; or WRONG. */
static int read_lent(Run *run, int owner, char *to, const char *from, int64_t n)
{
    int result = core_read(run->segment, owner, to, from, (size_t)n);
    if (result == WRONG && !core_withdrawn(run)) run->wrong_rank = owner, run->wrong_step = UNREADABLE;
    return result;
}

/* The number of the piece of a vector that has byte `start`. */
static int piece_at(const Vector *vector, int64_t start)
{
    int low = 0, high = vector->count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (vector->pieces[middle].start <= start) low = middle;
        else high = middle;
    }
    return low;
}

static int64_t end_of(const Vector *vector, int piece)
{
    return piece + 1 < vector->count ? vector->pieces[piece + 1].start : vector->nbytes;
}

/* Copy n bytes between one piece of memory and a vector in several pieces, from its byte `start` on. The memory is this
 * process's, or for reading that of the rank `owner`: MOVED, STUCK or WRONG, as read_lent. */
static int copy_pieces(Run *run, const Vector *vector, int64_t start, char *memory, int64_t n, int into_vector, int owner)
{
    for (int k = piece_at(vector, start); n > 0; k++) {
        const Piece *piece = &vector->pieces[k];
        int64_t end = end_of(vector, k);
        int64_t here = end - start < n ? end - start : n;
        char *at = piece->address + (start - piece->start);
        int moved = MOVED;
        if (owner >= 0) moved = read_lent(run, owner, at, memory, here);
        else if (into_vector) core_copy(at, memory, (size_t)here);
        else core_copy(memory, at, (size_t)here);
        if (moved != MOVED) return moved;
        start += here, memory += here, n -= here;
    }
    return MOVED;
}

/* The rank in whose process a tensor is that stands in for a slot or a result; -1: none. */
static int owner_of(const Run *run, const Ref *ref)
{
    return ref->lent >= 0 && run->places && run->in_process[ref->index][ref->space == IN_RESULT] ? ref->index : -1;
}

/* The vector of a source of an action, if it is in pieces, else NULL. */
static const Vector *pieces_of(const Run *run, const Ref *ref)
{
    return ref->space == IN_VECTOR && run->vectors[ref->index].pieces ? &run->vectors[ref->index] : NULL;
}

/* Reduce n bytes of the sources, of which some are in pieces: piece by piece. */
static void reduce_pieces(Run *run, const Action *action, uint32_t i, char *to, int64_t n)
{
    const Reduction *r = &run->reductions[action->reduction];
    for (int64_t done = 0, here; done < n; done += here) {
        here = n - done;
        for (int k = 0; k < action->count; k++) {
            const Vector *vector = pieces_of(run, &action->sources[k]);
            run->at[k] = (char *)run->sources[k] + done;
            if (!vector) continue;
            int64_t start = action->sources[k].offset + (int64_t)i * action->sources[k].stride + done;
            int piece = piece_at(vector, start);
            run->at[k] = vector->pieces[piece].address + (start - vector->pieces[piece].start);
            if (end_of(vector, piece) - start < here) here = end_of(vector, piece) - start;
        }
        r->kernel(to + done, run->at, action->count, (size_t)(here / r->item), r->divisor);
    }
}

/* Take an action: MOVED, or STUCK or WRONG, as read_lent. */
static int act(Run *run, const Action *action, uint32_t i)
{
    if (i && action->stride > action->total / (int64_t)i) return MOVED; /* nothing is left; i may come from another rank */
    int64_t n = action->total - (int64_t)i * action->stride;
    if (n > action->most) n = action->most;
    if (n <= 0) return MOVED;
    if (action->reduction >= 0) {
        const Reduction *r = &run->reductions[action->reduction];
        int in_pieces = 0;
        for (int k = 0; k < action->count; k++) {
            int owner = owner_of(run, &action->sources[k]);
            in_pieces |= pieces_of(run, &action->sources[k]) != NULL;
            run->sources[k] = place(run, &action->sources[k], i);
            if (owner < 0) continue;
            char *copy = run->segment->copies + k * n;
            int moved = read_lent(run, owner, copy, run->sources[k], n);
            if (moved != MOVED) return moved;
            run->sources[k] = copy;
        }
        if (in_pieces) reduce_pieces(run, action, i, place(run, &action->to, i), n);
        else r->kernel(place(run, &action->to, i), run->sources, action->count, (size_t)(n / r->item), r->divisor);
        return MOVED;
    }
    const Ref *to = &action->to, *from = &action->sources[0];
    if (run->program->sends && run->lends && to->space == IN_SLOT) return MOVED; /* its readers look elsewhere */
    int owner = owner_of(run, from);
    const Vector *target = to->space == IN_VECTOR ? &run->vectors[to->index] : NULL;
    const Vector *source = from->space == IN_VECTOR ? &run->vectors[from->index] : NULL;
    if (target && target->pieces && source && source->pieces) { /* both in pieces: by the pieces of the source */
        int64_t start = from->offset + (int64_t)i * from->stride, at = to->offset + (int64_t)i * to->stride;
        for (int k = 0; k < source->count && n > 0; k++) {
            int64_t end = end_of(source, k);
            if (end <= start) continue;
            int64_t here = end - start < n ? end - start : n;
            char *memory = source->pieces[k].address + (start - source->pieces[k].start);
            copy_pieces(run, target, at, memory, here, 1, -1);
            start += here, at += here, n -= here;
        }
    } else if (target && target->pieces) {
        return copy_pieces(run, target, to->offset + (int64_t)i * to->stride, place(run, from, i), n, 1, owner);
    } else if (source && source->pieces) {
        copy_pieces(run, source, from->offset + (int64_t)i * from->stride, place(run, to, i), n, 0, -1);
    } else {
        char *there = place(run, to, i), *here = place(run, from, i);
        if (owner >= 0) return read_lent(run, owner, there, here, n);
        if (there == here) return MOVED; /* in place */
        if (target && action->total >= STREAM_BYTES) core_copy_past_caches(there, here, (size_t)n);
        else core_copy(there, here, (size_t)n);
    }
    return MOVED;
}

/* Compare the sizes that the ranks have announced, and find the number of steps: MOVED or WRONG. */
static int agree(Run *run, const Stage *stage)
{
    Segment *s = run->segment;
    const Program *p = run->program;
    uint64_t most = p->steps;
    for (int k = 0; k < stage->waited_count; k++) {
        int rank = stage->waited[k];
        Word *header = header_of(s, rank, run->first, s->rank);
        uint64_t body = header[BODY], steps = header[STEPS];
        if (header[HEAD] || body != (uint64_t)p->receives[rank] || steps > UINT32_MAX || body > steps * (uint64_t)p->room) {
            run->wrong_rank = rank, run->wrong_step = OTHER_SIZES + run->first;
            return WRONG;
        }
        if (steps > most) most = steps;
        core_borrow_part(run, rank, header[ADDRESS]);
    }
    run->steps = (uint32_t)most, run->agreed = 1;
    s->position->step += most - p->steps;
    return MOVED;
}

/* Whether tensors stand in for both the slots and the results of a rank. */
static int lends_both(const Run *run, int rank) { return run->places && run->places[rank][0] && run->places[rank][1]; }

/* Whether the flags are there that a stage waits for in iteration i: STUCK, MOVED, WRONG or ASKED. */
static int ready(Run *run, const Stage *stage, uint32_t i)
{
    Segment *s = run->segment;
    uint64_t step = run->first + i;
    switch (stage->wait) {
    case WAIT_FREE:
        if (i >= (uint32_t)s->banks && lends_both(run, s->rank))
            return 1; /* it fills no slot, and all ranks have finished the collective before */
        if (step >= s->free_below) {
            uint64_t least = UINT64_MAX;
            for (int rank = 0; rank < s->size; rank++) {
                uint64_t finished = acquired(block_of(s, rank) + FINISHED);
                if (finished < least) least = finished;
            }
            s->free_below = least + (uint64_t)s->banks;
        }
        return step < s->free_below;
    case WAIT_POSTED:
        for (int k = 0; k < stage->waited_count; k++)
            if (acquired(record_of(s, stage->waited[k], step) + SEQ) <= step) return 0;
        for (int k = 0; k < stage->waited_count; k++) {
            Word *record = record_of(s, stage->waited[k], step);
            if (record[CODE] != run->code || record[NUMEL] != run->numel || record[HISTORY] != run->history) {
                run->wrong_rank = stage->waited[k], run->wrong_step = step;
                return WRONG;
            }
        }
        if (run->program->sends && !i) return run->agreed ? MOVED : agree(run, stage);
        for (int k = 0; k < stage->waited_count && run->places && !i; k++) {
            int found = core_borrow(run, stage->waited[k]);
            if (found != MOVED) return found;
        }
        return 1;
    case WAIT_READ:
        for (int k = 0; k < stage->waited_count && run->lends && i + 1 == run->steps; k++)
            if (acquired(block_of(s, stage->waited[k]) + FINISHED) <= step) return 0;
        return 1;
    case WAIT_REDUCED:
        for (int k = 0; k < stage->waited_count; k++)
            if (acquired(block_of(s, stage->waited[k]) + REDUCED) <= step) return 0;
        return 1;
    default: return 1;
    }
}

/* Whether a stage that reads results, all of them in the memory of other processes, waits until the stage before it is further
 * ahead than `steps`. Results that have just been made are still in the caches of the other cores, from which reading is slow.
 * All ranks must lend both their tensors: any other rank fills slots, and gets no further ahead than there are banks. */
static int is_early(const Run *run, const Stage *stage, uint32_t steps)
{
    if (stage->wait != WAIT_REDUCED || !stage->action_count || !run->in_process || steps * stage->actions[0].most >= READ_BEHIND) return 0;
    for (int k = 0; k < stage->waited_count; k++)
        if (!run->in_process[stage->waited[k]][1]) return 0;
    for (int rank = 0; rank < run->segment->size; rank++)
        if (!lends_both(run, rank)) return 0;
    return 1;
}

static void raise_flag(Run *run, const Stage *stage, uint32_t i)
{
    Segment *s = run->segment;
    uint64_t step = run->first + i;
    switch (stage->signal) {
    case SIGNAL_POST: {
        Word *record = record_of(s, s->rank, step);
        atomic_store_explicit(record + CODE, run->code, memory_order_relaxed);
        atomic_store_explicit(record + NUMEL, run->numel, memory_order_relaxed);
        atomic_store_explicit(record + HISTORY, run->history, memory_order_relaxed);
        for (int side = 0; side < 2 && run->places && !i; side++) {
            Word *words = record + INLINE + 3 * side;
            atomic_store_explicit(words, (uint64_t)run->lent[side].start, memory_order_relaxed);
            atomic_store_explicit(words + 1, (uint64_t)run->lent[side].nbytes, memory_order_relaxed);
            atomic_store_explicit(words + 2, (uint64_t)run->lent[side].offset, memory_order_relaxed);
        }
        for (int part = 0; part < s->size && run->program->sends && !i; part++) {
            Word *header = header_of(s, s->rank, step, part);
            atomic_store_explicit(header + HEAD, 0, memory_order_relaxed);
            atomic_store_explicit(header + BODY, part == s->rank ? 0 : (uint64_t)run->program->sends[part], memory_order_relaxed);
            atomic_store_explicit(header + STEPS, run->program->steps, memory_order_relaxed);
            atomic_store_explicit(header + ADDRESS, run->lends ? (uint64_t)(uintptr_t)run->vectors[part].address : 0, memory_order_relaxed);
        }
        released(record + SEQ, step + 1);
        break;
    }
    case SIGNAL_RESULT: released(block_of(s, s->rank) + REDUCED, step + 1); break;
    case SIGNAL_FINISH: released(block_of(s, s->rank) + FINISHED, step + 1); break;
    default: return;
    }
    ring_all(s);
}

int core_pass(Run *run)
{
    const Program *p = run->program;
    int moved = STUCK;
    uint32_t limit = run->steps;
    for (int k = 0; k < p->stage_count; k++) {
        const Stage *stage = &p->stages[k];
        uint32_t i = run->done[k];
        if (i < limit) {
            int is_ready = limit < run->steps && is_early(run, stage, limit - i) ? STUCK : ready(run, stage, i);
            if (is_ready == WRONG || is_ready == ASKED) return is_ready;
            int acted = is_ready ? MOVED : STUCK;
            for (int a = 0; a < stage->action_count && acted == MOVED; a++) acted = act(run, &stage->actions[a], i);
            if (acted == WRONG) return WRONG;
            if (acted == MOVED) {
                raise_flag(run, stage, i);
                run->done[k] = ++i;
                moved = MOVED;
            }
        }
        limit = i;
    }
    if (limit == run->steps) return run->borrows && core_withdrawn(run) ? WRONG : DONE;
    return run->steps == 1 ? STUCK : moved; /* of one step, all that is ready has been done */
}

int core_drive(Run *run, Pace *pace)
{
    for (;;) {
        int result = core_pass(run);
        if (result == DONE || result == WRONG || result == ASKED || !core_continues(run->segment, pace, result == MOVED)) return result;
    }
}

static PyObject *wrong(Run *run)
{
    PyObject *error = PyObject_CallFunction(run->mismatch, "iK", run->wrong_rank, (unsigned long long)run->wrong_step);
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

/* A run belongs to one thread at a time; the engine's lock sees to that. */
static int begin(Run *run)
{
    if (run->running) {
        PyErr_SetString(PyExc_RuntimeError, "this run is being driven by another thread");
        return -1;
    }
    run->running = 1;
    return 0;
}

static PyObject *Run_next(PyObject *self)
{
    Run *run = (Run *)self;
    int result;
    if (begin(run)) return NULL;
    if (run->program->bytes_per_step <= HOLD_BYTES) {
        result = core_pass(run);
    } else {
        Py_BEGIN_ALLOW_THREADS
        result = core_pass(run);
        Py_END_ALLOW_THREADS
    }
    run->running = 0;
    if (result == DONE) return NULL;
    if (result == WRONG) return wrong(run);
    if (result == ASKED && core_map(run)) return NULL;
    return PyBool_FromLong(result != STUCK);
}

/* drive(patience, stretch, events) -> whether it is done; seconds */
static PyObject *Run_drive(PyObject *self, PyObject *args)
{
    Run *run = (Run *)self;
    double patience, stretch;
    int result, events;
    if (!PyArg_ParseTuple(args, "ddi", &patience, &stretch, &events) || begin(run)) return NULL;
    Pace pace = core_pace(patience, stretch, events);
    Py_BEGIN_ALLOW_THREADS
    result = core_drive(run, &pace);
    Py_END_ALLOW_THREADS
    run->running = 0;
    if (result == WRONG) return wrong(run);
    return PyBool_FromLong(result == DONE);
}

/* begin(first, (code, numel, history)), as for Segment.run */
static PyObject *Run_begin(PyObject *self, PyObject *args)
{
    Run *run = (Run *)self;
    unsigned long long first, code, numel, history;
    if (!PyArg_ParseTuple(args, "K(KKK)", &first, &code, &numel, &history)) return NULL;
    if (run->begun) {
        PyErr_SetString(PyExc_RuntimeError, "this run has begun");
        return NULL;
    }
    core_begin(run, first, code, numel, history);
    core_lend(run);
    Py_RETURN_NONE;
}

static PyObject *Run_steps(PyObject *self, void *Py_UNUSED(closure)) { return PyLong_FromUnsignedLong(((Run *)self)->program->steps); }

static void Run_dealloc(PyObject *self)
{
    Run *run = (Run *)self;
    if (run->vectors)
        for (int k = 0; k < run->program->vector_count; k++) free(run->vectors[k].pieces);
    free(run->vectors), free(run->reductions), free(run->done), free(run->sources), free(run->at), free(run->places), free(run->known), free(run->in_process);
    Py_XDECREF((PyObject *)run->segment), Py_XDECREF((PyObject *)run->program), Py_XDECREF(run->mismatch), Py_XDECREF(run->owners);
    core_free(self);
}

/* an address, or (addresses, starts): `starts` has one number more, the vector's bytes */
static int parse_vector(PyObject *t, Vector *vector)
{
    if (PyLong_Check(t)) {
        vector->address = PyLong_AsVoidPtr(t);
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *addresses = PySequence_GetItem(t, 0), *starts = addresses ? PySequence_GetItem(t, 1) : NULL;
    Py_ssize_t count = starts ? PySequence_Size(addresses) : -1;
    int failed = count < 0 || !(vector->pieces = core_zeroed(count + 1, sizeof(Piece)));
    vector->count = failed ? 0 : (int)count;
    for (Py_ssize_t k = 0; k <= count && !failed; k++) {
        vector->pieces[k].start = core_number_at(starts, k, 0, INT64_MAX / 4, "start");
        failed = vector->pieces[k].start < 0;
        if (k == count || failed) break;
        PyObject *address = PySequence_GetItem(addresses, k);
        vector->pieces[k].address = address ? PyLong_AsVoidPtr(address) : NULL;
        Py_XDECREF(address);
        failed = PyErr_Occurred() != NULL;
    }
    if (!failed) vector->nbytes = vector->pieces[count].start;
    Py_XDECREF(addresses), Py_XDECREF(starts);
    return failed ? -1 : 0;
}

/* (dtype, operator, divisor) */
static int parse_reduction(PyObject *t, Reduction *reduction)
{
    int dtype = (int)core_number_at(t, 0, 0, DTYPES - 1, "dtype");
    int operator = (int)core_number_at(t, 1, 0, OPERATORS - 1, "operator");
    reduction->divisor = (int)core_number_at(t, 2, 0, INT32_MAX, "divisor");
    if (PyErr_Occurred()) return -1;
    reduction->kernel = core_kernels[dtype][operator], reduction->item = core_item_bytes[dtype];
    if (reduction->kernel) return 0;
    PyErr_Format(PyExc_ValueError, "no kernel for %R", t);
    return -1;
}

/* Whether a vector has whole elements in each of its pieces. */
static int is_in_elements(const Vector *vector, int64_t item)
{
    int whole = 1;
    for (int k = 0; k < vector->count; k++) whole &= !(end_of(vector, k) % item);
    return whole;
}

int core_check_vectors(const Run *run)
{
    for (int k = 0; k < run->program->stage_count; k++) {
        const Stage *stage = &run->program->stages[k];
        for (int j = 0; j < stage->action_count; j++) {
            const Action *action = &stage->actions[j];
            for (int i = -1; i < action->count && action->reduction >= 0; i++) {
                const Ref *ref = i < 0 ? &action->to : &action->sources[i];
                const Vector *vector = pieces_of(run, ref);
                if (!vector || (i >= 0 && is_in_elements(vector, run->reductions[action->reduction].item))) continue;
                PyErr_Format(PyExc_ValueError, "vector %d is in pieces %s", ref->index, i < 0 ? "and cannot be the target of a reduction" : "that have no whole elements");
                return -1;
            }
        }
    }
    return 0;
}

Run *core_new_run(Segment *segment, Program *p, PyObject *reductions, PyObject *mismatch)
{
    Run *run = (Run *)PyType_GenericAlloc(Run_Type, 0);
    if (!run) return NULL;
    Py_INCREF((PyObject *)segment), Py_INCREF((PyObject *)p), Py_INCREF(mismatch);
    run->segment = segment, run->program = p, run->mismatch = mismatch;
    run->done = core_zeroed(p->stage_count, sizeof(uint32_t));
    run->vectors = core_zeroed(p->vector_count, sizeof(Vector));
    run->reductions = core_zeroed(p->kernel_count, sizeof(Reduction));
    run->sources = core_zeroed(p->most_sources, sizeof(void *)), run->at = core_zeroed(p->most_sources, sizeof(void *));
    int failed = !run->done || !run->vectors || !run->reductions || !run->sources || !run->at;
    if (p->may_lend && !failed)
        failed = !(run->places = core_zeroed(segment->size, sizeof *run->places)) || !(run->known = core_zeroed(segment->size, 1))
                 || !(run->in_process = core_zeroed(segment->size, sizeof *run->in_process));
    for (int k = 0; k < p->kernel_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(reductions, k);
        failed = !item || parse_reduction(item, &run->reductions[k]);
        Py_XDECREF(item);
    }
    if (failed) Py_CLEAR(run);
    return run;
}

/* run(program, first, (code, numel, history), vectors, reductions, mismatch) */
static PyObject *Segment_run(PyObject *self, PyObject *args)
{
    PyObject *program, *vectors, *reductions, *mismatch;
    unsigned long long first, code, numel, history;
    if (!PyArg_ParseTuple(args, "OK(KKK)OOO", &program, &first, &code, &numel, &history, &vectors, &reductions, &mismatch)) return NULL;
    if (Py_TYPE(program) != Core_Program) return PyErr_Format(PyExc_TypeError, "program must be a Program, got %R", program);
    Program *p = (Program *)program;
    if (PySequence_Size(vectors) < p->vector_count || PySequence_Size(reductions) < p->kernel_count)
        return PyErr_Format(PyExc_ValueError, "the program needs %d vectors and %d reductions, got %zd and %zd", p->vector_count,
                            p->kernel_count, PySequence_Size(vectors), PySequence_Size(reductions));
    Run *run = core_new_run((Segment *)self, p, reductions, mismatch);
    if (!run) return NULL;
    core_begin(run, first, code, numel, history);
    int failed = 0;
    for (int k = 0; k < p->vector_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(vectors, k);
        failed = !item || parse_vector(item, &run->vectors[k]);
        Py_XDECREF(item);
    }
    if (!failed && !core_check_vectors(run)) {
        core_lend(run);
        return (PyObject *)run;
    }
    Py_DECREF((PyObject *)run);
    return NULL;
}

/* ---- Segment ------------------------------------------------------------------------------------------------------ */

static void Segment_dealloc(PyObject *self)
{
    Segment *s = (Segment *)self;
    for (int rank = 0; s->links && rank < s->size; rank++) Py_XDECREF((PyObject *)s->links[rank]);
    for (int rank = 0; s->borrowed && rank < s->size; rank++) free(s->borrowed[rank].extents);
    free(s->links), free(s->bells), free(s->borrowed), free(s->processes), free(s->copies);
    Py_XDECREF(s->peers), Py_XDECREF((PyObject *)s->position);
    PyBuffer_Release(&s->memory);
    core_free(self);
}

/* Segment(memory, rank, size, banks, chunk, piece, ring, (records, slots, results, rings), bells) */
static PyObject *Segment_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *memory, *bells;
    int rank, size, banks;
    long long chunk, piece, ring, records, slots, results, rings;
    if (!PyArg_ParseTuple(args, "OiiiLLL(LLLL)O", &memory, &rank, &size, &banks, &chunk, &piece, &ring, &records,
                          &slots, &results, &rings, &bells))
        return NULL;
    Segment *s = (Segment *)PyType_GenericAlloc(type, 0);
    if (!s) return NULL;
    if (PyObject_GetBuffer(memory, &s->memory, PyBUF_WRITABLE)) goto fail;
    s->base = s->memory.buf;
    s->rank = rank, s->size = size, s->banks = banks, s->chunk = chunk, s->piece = piece, s->ring = ring;
    if (size < 1 || rank < 0 || rank >= size || banks < 1 || chunk < 1 || piece < 1 || (uintptr_t)s->base % 8 || records % 8
        || records < (long long)size * BLOCK_WORDS * 8
        || slots < records + (long long)banks * size * (RECORD_WORDS + size * HEADER_WORDS) * 8 || results < slots + banks * size * chunk
        || rings < results + banks * size * piece || ring < 1024 || ring % 64 || rings % 64
        || rings + (long long)size * size * (2 * 64 + ring) > s->memory.len) {
        PyErr_SetString(PyExc_ValueError, "the layout does not fit the memory");
        goto fail;
    }
    s->blocks = (Word *)s->base;
    s->records = (Word *)(s->base + records);
    s->slots = s->base + slots, s->results = s->base + results, s->rings = s->base + rings;
    s->free_below = (uint64_t)banks, s->cpu = -1;
    s->spins = size <= sysconf(_SC_NPROCESSORS_ONLN) ? 100 : 0;
    if (!(s->bells = core_zeroed(size, sizeof *s->bells))) goto fail;
    for (int r = 0; r < size; r++) {
        PyObject *pair = PySequence_GetItem(bells, r);
        for (int bell = 0; pair && bell < 2; bell++) s->bells[r][bell] = (int)core_number_at(pair, bell, -1, INT32_MAX, "bell");
        Py_XDECREF(pair);
        if (PyErr_Occurred()) goto fail;
    }
    if (!(s->borrowed = core_zeroed(size, sizeof *s->borrowed)) || !(s->links = core_zeroed(size, sizeof *s->links))) goto fail;
    for (int r = 0; r < size; r++)
        if (!(s->links[r] = (LinkState *)PyType_GenericAlloc(Core_LinkState, 0))) goto fail;
    return (PyObject *)s;
fail:
    Py_DECREF(s);
    return NULL;
}

static PyObject *Segment_link(PyObject *self, PyObject *argument)
{
    Segment *s = (Segment *)self;
    long rank = PyLong_AsLong(argument);
    if (rank < 0 || rank >= s->size)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "rank must be from 0 to %d, got %ld", s->size - 1, rank);
    Py_INCREF((PyObject *)s->links[rank]);
    return (PyObject *)s->links[rank];
}

/* follow(position): a RankPosition */
static PyObject *Segment_follow(PyObject *self, PyObject *position)
{
    Segment *s = (Segment *)self;
    if (Py_TYPE(position) != Core_RankPosition) return PyErr_Format(PyExc_TypeError, "position must be a RankPosition, got %R", position);
    PyObject *before = (PyObject *)s->position;
    Py_INCREF(position);
    s->position = (RankPosition *)position;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *Segment_interrupt(PyObject *self, PyObject *Py_UNUSED(none))
{
    Segment *s = (Segment *)self;
    uint64_t one = 1;
    atomic_store(&s->interrupted, 1);
    if (atomic_load(&s->asleep) && write(s->bells[s->rank][1], &one, sizeof one) < 0) {} /* full: it rings already */
    Py_RETURN_NONE;
}

static PyObject *Segment_resume(PyObject *self, PyObject *Py_UNUSED(none))
{
    atomic_store(&((Segment *)self)->interrupted, 0);
    Py_RETURN_NONE;
}

/* ---- RankPosition ---------------------------------------------------------------------------------------------------- */

static PyObject *RankPosition_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords))
{
    RankPosition *position = (RankPosition *)PyType_GenericAlloc(type, 0);
    if (position && !(position->posted = PyList_New(0))) Py_CLEAR(position);
    return (PyObject *)position;
}

static void RankPosition_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_CLEAR(((RankPosition *)self)->op);
    Py_CLEAR(((RankPosition *)self)->posted);
    core_free(self);
}

static int RankPosition_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((RankPosition *)self)->op);
    Py_VISIT(((RankPosition *)self)->posted);
    return 0;
}

static int RankPosition_clear(PyObject *self)
{
    Py_CLEAR(((RankPosition *)self)->op);
    Py_CLEAR(((RankPosition *)self)->posted);
    return 0;
}

#define NUMBER(name) {#name, T_ULONGLONG, offsetof(RankPosition, name), 0, NULL}
static PyMemberDef state_members[] = {
    NUMBER(step), NUMBER(code), NUMBER(numel), NUMBER(history), NUMBER(number), NUMBER(messages), NUMBER(kept), NUMBER(alone),
    {"collective_wait", T_DOUBLE, offsetof(RankPosition, collective_wait), 0, NULL},
    {"message_wait", T_DOUBLE, offsetof(RankPosition, message_wait), 0, NULL}, {"op", T_OBJECT, offsetof(RankPosition, op), 0, NULL},
    {"posted", T_OBJECT, offsetof(RankPosition, posted), READONLY, NULL},
    {"dead", T_BOOL, offsetof(RankPosition, dead), 0, NULL}, {"adopting", T_BOOL, offsetof(RankPosition, adopting), 0, NULL},
    {"arming", T_BOOL, offsetof(RankPosition, arming), 0, NULL},
    {"calls_ahead", T_BOOL, offsetof(RankPosition, calls_ahead), 0, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot state_slots[] = {
    {Py_tp_new, (void *)RankPosition_new}, {Py_tp_dealloc, (void *)RankPosition_dealloc}, {Py_tp_traverse, (void *)RankPosition_traverse}, {Py_tp_clear, (void *)RankPosition_clear},
    {Py_tp_members, state_members}, {0, NULL}};
static PyType_Spec state_spec = {"_core.RankPosition", sizeof(RankPosition), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, state_slots};

/* ---- LinkState ---------------------------------------------------------------------------------------------------- */

static void LinkState_dealloc(PyObject *self)
{
    Py_CLEAR(((LinkState *)self)->waiting); /* a deque, which never refers to the link */
    core_free(self);
}

#define COUNT(name) {#name, T_ULONGLONG, offsetof(LinkState, name), 0, NULL}
static PyMemberDef link_members[] = {
    COUNT(head), COUNT(taken), COUNT(sent), COUNT(tail), COUNT(told), COUNT(came), COUNT(matched), COUNT(next_ident),
    {"waiting", T_OBJECT, offsetof(LinkState, waiting), 0, NULL}, {"gone", T_BOOL, offsetof(LinkState, gone), 0, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot link_slots[] = {{Py_tp_dealloc, (void *)LinkState_dealloc}, {Py_tp_members, link_members}, {0, NULL}};
static PyType_Spec link_spec = {"_core.LinkState", sizeof(LinkState), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, link_slots};

/* ---- the module --------------------------------------------------------------------------------------------------- */

static PyObject *itself(PyObject *self)
{
    Py_INCREF(self);
    return self;
}

static PyMethodDef segment_methods[] = {
    {"program", Segment_program, METH_VARARGS, "Compile a program for this segment."},
    {"run", Segment_run, METH_VARARGS, "A run of a program: an iterator, and `drive`."},
    {"transfer", core_transfer, METH_VARARGS, "Write and read frames of long messages; the bytes moved of each."},
    {"link", Segment_link, METH_O, "The LinkState of a peer."},
    {"follow", Segment_follow, METH_O, "Extend collectives of unknown length in a RankPosition."},
    {"map_by", core_map_by, METH_O, "Have a PeerMemory map the tensors of other ranks."},
    {"single_copy", core_single_copy, METH_O, "Take part in single copy."},
    {"reads_all", core_reads_all_now, METH_NOARGS, "Whether all ranks can read each other's memory."},
    {"read", core_read_memory, METH_VARARGS, "Read memory of another rank's process."},
    {"interrupt", Segment_interrupt, METH_NOARGS, "Make `drive` return soon. From any thread."},
    {"resume", Segment_resume, METH_NOARGS, "End an interruption."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef run_members[] = {{"begun", T_BOOL, offsetof(Run, begun), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyGetSetDef run_properties[] = {{"steps", Run_steps, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef run_methods[] = {
    {"begin", Run_begin, METH_VARARGS, "Begin a run that the fast path has prepared."},
    {"drive", Run_drive, METH_VARARGS, "Go on without the GIL; returns whether the run is done."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot segment_slots[] = {
    {Py_tp_new, (void *)Segment_new}, {Py_tp_dealloc, (void *)Segment_dealloc}, {Py_tp_methods, segment_methods}, {0, NULL}};
static PyType_Slot program_slots[] = {{Py_tp_dealloc, (void *)Program_dealloc}, {0, NULL}};
static PyType_Slot run_slots[] = {{Py_tp_dealloc, (void *)Run_dealloc}, {Py_tp_iter, (void *)itself},
    {Py_tp_iternext, (void *)Run_next}, {Py_tp_methods, run_methods}, {Py_tp_members, run_members},
    {Py_tp_getset, run_properties}, {0, NULL}};
static PyType_Spec segment_spec = {"_core.Segment", sizeof(Segment), 0, Py_TPFLAGS_DEFAULT, segment_slots};
static PyType_Spec program_spec = {
    "_core.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, program_slots};
static PyType_Spec run_spec = {"_core.Run", sizeof(Run), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, run_slots};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The native executor of collectives in shared memory.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    core_start_clock();
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    Core_Segment = (PyTypeObject *)PyType_FromSpec(&segment_spec);
    Core_Program = (PyTypeObject *)PyType_FromSpec(&program_spec);
    Run_Type = (PyTypeObject *)PyType_FromSpec(&run_spec);
    Core_RankPosition = (PyTypeObject *)PyType_FromSpec(&state_spec);
    Core_LinkState = (PyTypeObject *)PyType_FromSpec(&link_spec);
    if (!Core_Segment || !Core_Program || !Run_Type || !Core_RankPosition || !Core_LinkState
        || PyModule_AddObjectRef(m, "Segment", (PyObject *)Core_Segment)
        || PyModule_AddObjectRef(m, "RankPosition", (PyObject *)Core_RankPosition)
        || core_add_lending(m) || core_add_fast_path(m)) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
