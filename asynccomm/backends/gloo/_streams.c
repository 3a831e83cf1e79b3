/* The data of one collective between this rank and others, over sockets to and from each, by a thread without the GIL: streams.py.
 *
 * `move`: each rank has a share of the data: it gets the contributions of the others to its share, or the share itself, and passes
 * the result on. So a socket carries up to two segments each way: the first, and behind it the second, of which no more is sent
 * than this rank has of its share.
 *
 * `ring`: each rank gets data from the one before, and sends to the one behind it. */
#include "../../core/_work.h"
#include "../_kernels.h"
#include "_streams.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

enum { PIECE = 64 << 10 };     /* bytes of one `recv`, which stay in the caches until they are reduced */
enum { SENT = 1 << 20 };         /* bytes of one `send` */
static const double SPIN = 5e-5; /* seconds without data until the thread sleeps: some wake-ups */

/* The bytes of `nbytes` at `data` that have moved. */
typedef struct {
    char *data;
    uint64_t nbytes, moved;
} Segment;

typedef struct {
    int to, from; /* descriptors */
    Segment sends[2], receives[2];
    char *piece;    /* of the contribution that comes, if it is reduced */
    size_t arrived; /* bytes in `piece` */
} Stream;

/* The share of this rank. */
typedef struct {
    Kernel *kernel; /* NULL: the share arrives as it is, or is there */
    int rank;       /* the place of its own contribution among the others */
    char *data;     /* its own contribution, and the result */
    uint64_t nbytes, done; /* bytes of the result that may be passed on */
    size_t item;
    int giver; /* the stream on which the share arrives as it is; negative: none */
} Share;

static uint64_t left(const Segment *s) { return s->nbytes - s->moved; }

static size_t at_most(uint64_t nbytes, size_t limit) { return nbytes < limit ? (size_t)nbytes : limit; }

/* The result of a system call: the bytes moved, 0 if there is nothing to move now, or a negative errno. */
static ssize_t outcome(ssize_t count, ssize_t at_end)
{
    if (count > 0) return count;
    if (!count) return at_end;
    return errno == EAGAIN || errno == EINTR ? 0 : -errno;
}

/* The segment to send next, with the bytes of it that may be sent now; NULL: all are sent. */
static Segment *next_to_send(Stream *s, const Share *share, uint64_t *nbytes)
{
    Segment *next = left(&s->sends[0]) ? &s->sends[0] : left(&s->sends[1]) ? &s->sends[1] : NULL;
    if (!next) return NULL;
    *nbytes = left(next);
    if (next == &s->sends[1] && next->moved + *nbytes > share->done) *nbytes = share->done > next->moved ? share->done - next->moved : 0;
    return next;
}

static ssize_t send_some(Stream *s, const Share *share)
{
    uint64_t nbytes = 0;
    Segment *next = next_to_send(s, share, &nbytes);
    if (!next || !nbytes) return 0;
    ssize_t count = outcome(send(s->to, next->data + next->moved, at_most(nbytes, SENT), MSG_DONTWAIT | MSG_NOSIGNAL), 0);
    if (count > 0) next->moved += (uint64_t)count;
    return count;
}

/* Where the next data of a stream goes, and how much of it; 0: none comes, or there is no room yet. */
static size_t room(const Stream *s, char **to)
{
    const Segment *first = &s->receives[0], *second = &s->receives[1];
    if (left(first) && s->piece) {
        *to = s->piece + s->arrived;
        return at_most(left(first), PIECE) - s->arrived;
    }
    const Segment *next = left(first) ? first : second;
    *to = next->data + next->moved;
    return at_most(left(next), PIECE);
}

static ssize_t receive_some(Stream *s)
{
    char *to;
    size_t most = room(s, &to);
    if (!most) return 0;
    ssize_t count = outcome(recv(s->from, to, most, MSG_DONTWAIT), -ECONNRESET);
    if (count <= 0) return count;
    if (left(&s->receives[0]) && s->piece) s->arrived += (size_t)count;
    else s->receives[left(&s->receives[0]) ? 0 : 1].moved += (uint64_t)count;
    return count;
}

/* Reduce the next piece of the share, if all contributions to it are there. */
static int reduce_piece(Share *share, Stream *streams, int count, void **rows)
{
    size_t nbytes = at_most(share->nbytes - share->done, PIECE);
    for (int k = 0; k < count; k++)
        if (streams[k].arrived < nbytes) return 0;
    for (int k = 0, row = 0; k < count; k++, row++) {
        if (row == share->rank) row++;
        rows[row] = streams[k].piece;
        streams[k].receives[0].moved += nbytes, streams[k].arrived = 0;
    }
    char *data = rows[share->rank] = share->data + share->done;
    share->kernel(data, rows, count + 1, nbytes / share->item, 0);
    share->done += nbytes;
    return 1;
}

/* A wait in which nothing has moved: for how long, in seconds of monotonic(). */
typedef struct {
    double since;
} Idle;

/* Pass a little time; whether the thread shall sleep instead. */
static int sleeps(Idle *idle, int moved)
{
    double now = moved ? 0 : monotonic();
    if (moved || !idle->since) {
        idle->since = now;
        return 0;
    }
    if (now - idle->since >= SPIN) return 1;
    if (offer_core() > 0) idle->since = -SPIN; /* some thread needs it */
    return 0;
}

static int sleep_until_ready(Stream *streams, struct pollfd *polled, const Share *share, int count)
{
    for (int k = 0; k < count; k++) {
        uint64_t nbytes = 0;
        char *to;
        int sends = next_to_send(&streams[k], share, &nbytes) && nbytes, receives = room(&streams[k], &to) > 0;
        polled[2 * k] = (struct pollfd){sends ? streams[k].to : -1, POLLOUT, 0};
        polled[2 * k + 1] = (struct pollfd){receives ? streams[k].from : -1, POLLIN, 0};
    }
    return poll(polled, 2 * (nfds_t)count, -1) < 0 && errno != EINTR ? -errno : 0;
}

/* Move everything. Returns 0, or a negative errno, with the number of the stream in *failed. */
static int move_all(Stream *streams, int count, Share *share, struct pollfd *polled, void **rows, int *failed)
{
    Idle idle = {0};
    for (;;) {
        int moved = 0, missing = 0;
        for (int k = 0; k < count; k++) {
            Stream *s = &streams[k];
            ssize_t sent = send_some(s, share), received = sent < 0 ? sent : receive_some(s);
            if (received < 0) {
                *failed = k;
                return (int)received;
            }
            moved |= sent > 0 || received > 0;
            if (k == share->giver) share->done = s->receives[0].moved;
            missing |= left(&s->sends[0]) || left(&s->sends[1]) || left(&s->receives[0]) || left(&s->receives[1]);
        }
        if (share->kernel && share->done < share->nbytes) moved |= reduce_piece(share, streams, count, rows), missing = 1;
        if (!missing) return 0;
        if (sleeps(&idle, moved)) {
            int result = sleep_until_ready(streams, polled, share, count);
            if (result) return result;
            idle.since = 0;
        }
    }
}

/* move(sinks, sources, segments, rank, address, nbytes, done, giver, dtype, operator): the data of a collective.
 *
 * `segments` has four pairs of address and length for each other rank, in the order of the descriptors: what is sent first and
 * second, and received first and second. With a `dtype` of 0 or more, what is received first are contributions to this rank's share: they are reduced in the
 * order of the ranks, with the `nbytes` at `address` as that of `rank`, and there. Otherwise the share has `done` bytes, or
 * arrives on stream `giver`.
 *
 * Returns (0, -1), or an errno with the number of the stream that has failed. The caller keeps all memory. */
PyObject *core_move(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *sinks, *sources, *result = NULL;
    const char *packed;
    Py_ssize_t length;
    unsigned long long address, nbytes, done;
    int giver, dtype, operator, failed = -1;
    Share share = {NULL, 0, NULL, 0, 0, 1, -1};
    if (!PyArg_ParseTuple(args, "O!O!y#iKKKiii", &PyList_Type, &sinks, &PyList_Type, &sources, &packed, &length, &share.rank, &address,
                          &nbytes, &done, &giver, &dtype, &operator))
        return NULL;
    int count = (int)PyList_Size(sinks);
    if (PyList_Size(sources) != count || length != (Py_ssize_t)sizeof(uint64_t[8]) * count || share.rank < 0 || share.rank > count
        || giver >= count || dtype >= DTYPES
        || (dtype >= 0 && (operator < 0 || operator >= OPERATORS || !core_kernels[dtype][operator] || nbytes % (size_t)core_item_bytes[dtype])))
        return PyErr_Format(PyExc_ValueError, "%d streams, %zd bytes, rank %d, giver %d, kernel %d %d", count, length, share.rank, giver, dtype,
                            operator);
    share.giver = giver, share.done = done;
    if (dtype >= 0) {
        share.kernel = core_kernels[dtype][operator], share.item = (size_t)core_item_bytes[dtype];
        share.data = (char *)(uintptr_t)address, share.nbytes = nbytes, share.done = 0;
    }
    size_t pieces = share.kernel ? (size_t)count * PIECE : 0, several = (size_t)count + 1;
    Stream *streams = PyMem_Calloc(several, sizeof *streams);
    struct pollfd *polled = PyMem_Calloc(2 * several, sizeof *polled);
    void **rows = PyMem_Calloc(several, sizeof *rows);
    char *memory = PyMem_Malloc(pieces + 1);
    if (!streams || !polled || !rows || !memory) {
        PyErr_NoMemory();
        goto end;
    }
    for (int k = 0; k < count; k++) {
        long to = PyLong_AsLong(PyList_GetItem(sinks, k)), from = PyLong_AsLong(PyList_GetItem(sources, k));
        if (PyErr_Occurred()) goto end;
        uint64_t each[8];
        memcpy(each, packed + sizeof each * (size_t)k, sizeof each);
        Segment of[4];
        for (int i = 0; i < 4; i++) of[i] = (Segment){(char *)(uintptr_t)each[2 * i], each[2 * i + 1], 0};
        streams[k] = (Stream){(int)to, (int)from, {of[0], of[1]}, {of[2], of[3]}, share.kernel ? memory + (size_t)k * PIECE : NULL, 0};
        if (share.kernel && of[2].nbytes != nbytes) {
            PyErr_Format(PyExc_ValueError, "a contribution of %llu bytes to %llu", (unsigned long long)of[2].nbytes, nbytes);
            goto end;
        }
    }
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = move_all(streams, count, &share, polled, rows, &failed);
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("ii", -error, failed);
end:
    PyMem_Free(streams), PyMem_Free(polled), PyMem_Free(rows), PyMem_Free(memory);
    return result;
}

/* One rank in a ring. In step k it receives the k-th chunk before its own, and in step k + 1 it sends it on; it begins with its
 * own. The first steps reduce: as many as there are other ranks. */
typedef struct {
    int from, to, rank, size;
    char *data;
    const uint64_t *ends; /* of the chunks, in bytes */
    Kernel *kernel;
    size_t item, arrived; /* bytes of an element; bytes in `piece` */
    int in, out;          /* steps */
    uint64_t came, sent;  /* bytes of their chunks */
    char piece[PIECE];
} Ring;

static int chunk_of(const Ring *r, int back) { return (r->rank - back % r->size + r->size) % r->size; }
static uint64_t start_of(const Ring *r, int chunk) { return chunk ? r->ends[chunk - 1] : 0; }
static uint64_t length_of(const Ring *r, int chunk) { return r->ends[chunk] - start_of(r, chunk); }
static int steps_of(const Ring *r) { return 2 * (r->size - 1); }

/* The bytes that may be sent of the chunk under way. */
static uint64_t sendable(Ring *r)
{
    while (r->out < steps_of(r) && r->sent == length_of(r, chunk_of(r, r->out))) r->out++, r->sent = 0;
    if (r->out == steps_of(r) || r->in < r->out - 1) return 0;
    return (r->in == r->out - 1 ? r->came : length_of(r, chunk_of(r, r->out))) - r->sent;
}

/* The bytes that may be received next, at *to. */
static size_t receivable(Ring *r, char **to)
{
    while (r->in < steps_of(r) && r->came == length_of(r, chunk_of(r, r->in + 1))) r->in++, r->came = 0;
    if (r->in == steps_of(r)) return 0;
    int chunk = chunk_of(r, r->in + 1);
    size_t most = at_most(length_of(r, chunk) - r->came, PIECE);
    int reduces = r->in < r->size - 1;
    *to = reduces ? r->piece + r->arrived : r->data + start_of(r, chunk) + r->came;
    return most - (reduces ? r->arrived : 0);
}

/* Take `count` bytes that were received where `receivable` had them. */
static void take(Ring *r, size_t count)
{
    int chunk = chunk_of(r, r->in + 1);
    if (r->in < r->size - 1) {
        size_t whole = at_most(length_of(r, chunk) - r->came, PIECE);
        r->arrived += count;
        if (r->arrived < whole) return;
        char *own = r->data + start_of(r, chunk) + r->came;
        r->kernel(own, (void *[]){r->piece, own}, 2, whole / r->item, 0);
        r->arrived = 0, count = whole;
    }
    r->came += count;
}

/* Returns 0, or a negative errno, with the number of the socket in *failed: 0 is the one data comes from. */
static int go_round(Ring *r, int *failed)
{
    Idle idle = {0};
    for (;;) {
        char *to = NULL;
        uint64_t nbytes = sendable(r);
        ssize_t sent = 0, received = 0;
        if (nbytes) {
            const char *data = r->data + start_of(r, chunk_of(r, r->out)) + r->sent;
            sent = outcome(send(r->to, data, at_most(nbytes, SENT), MSG_DONTWAIT | MSG_NOSIGNAL), 0);
            if (sent > 0) r->sent += (uint64_t)sent;
        }
        size_t most = receivable(r, &to);
        if (most) {
            received = outcome(recv(r->from, to, most, MSG_DONTWAIT), -ECONNRESET);
            if (received > 0) take(r, (size_t)received);
        }
        *failed = sent < 0;
        if (sent < 0 || received < 0) return (int)(sent < 0 ? sent : received);
        nbytes = sendable(r), most = receivable(r, &to);
        if (r->out == steps_of(r) && r->in == steps_of(r)) return 0;
        if (sleeps(&idle, sent > 0 || received > 0)) {
            struct pollfd polled[2] = {{most ? r->from : -1, POLLIN, 0}, {nbytes ? r->to : -1, POLLOUT, 0}};
            if (poll(polled, 2, -1) < 0 && errno != EINTR) return -errno;
            idle.since = 0;
        }
    }
}

/* ring(from, to, address, ends, rank, dtype, operator): an all_reduce in place; `ends` are those of the chunks of all ranks.
 *
 * Returns (0, -1), or an errno with 0 if the socket `from` has failed, and 1 for `to`. The caller keeps all memory. */
PyObject *core_ring(PyObject *Py_UNUSED(module), PyObject *args)
{
    int from, to, rank, dtype, operator, failed = -1, error;
    unsigned long long address;
    const char *packed;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "iiKy#iii", &from, &to, &address, &packed, &length, &rank, &dtype, &operator)) return NULL;
    int size = (int)(length / (Py_ssize_t)sizeof(uint64_t));
    if (length % (Py_ssize_t)sizeof(uint64_t) || rank < 0 || rank >= size || dtype < 0 || dtype >= DTYPES || operator < 0
        || operator >= OPERATORS || !core_kernels[dtype][operator])
        return PyErr_Format(PyExc_ValueError, "%zd bytes, rank %d, kernel %d %d", length, rank, dtype, operator);
    uint64_t *ends = PyMem_Malloc((size_t)length);
    Ring *ring = PyMem_Calloc(1, sizeof *ring);
    PyObject *result = ends && ring ? NULL : PyErr_NoMemory();
    if (ends && ring) {
        memcpy(ends, packed, (size_t)length);
        *ring = (Ring){.from = from, .to = to, .rank = rank, .size = size, .data = (char *)(uintptr_t)address, .ends = ends,
                       .kernel = core_kernels[dtype][operator], .item = (size_t)core_item_bytes[dtype]};
        Py_BEGIN_ALLOW_THREADS
        error = go_round(ring, &failed);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("ii", -error, error ? failed : -1);
    }
    PyMem_Free(ends), PyMem_Free(ring);
    return result;
}
