/* The data of one collective between this rank and others, over a socket to each, by a thread without the GIL: stream_group.py.
 *
 * Each rank has a share of the data: it gets the contributions of the others to its share, or the share itself, and passes the
 * result on. So a socket carries up to two segments each way: the first, and behind it the second, of which no more is sent than
 * this rank has of its share. */
#include "../../core/_work.h"
#include "../_kernels.h"
#include "_streams.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

enum { PIECE = 64 << 10 };      /* bytes of one system call, which stay in the caches until they are reduced */
static const double SPIN = 5e-5;   /* seconds without data until the thread sleeps: some wake-ups */
static const double SWITCH = 5e-6; /* seconds of a yield in which another thread had the core */

/* The bytes of `nbytes` at `data` that have moved. */
typedef struct {
    char *data;
    uint64_t nbytes, moved;
} Segment;

typedef struct {
    int fd;
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
    ssize_t count = outcome(send(s->fd, next->data + next->moved, at_most(nbytes, PIECE), MSG_DONTWAIT | MSG_NOSIGNAL), 0);
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
    ssize_t count = outcome(recv(s->fd, to, most, MSG_DONTWAIT), -ECONNRESET);
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

static int sleep_until_ready(Stream *streams, struct pollfd *polled, const Share *share, int count)
{
    for (int k = 0; k < count; k++) {
        uint64_t nbytes = 0;
        char *to;
        short events = 0;
        if (next_to_send(&streams[k], share, &nbytes) && nbytes) events |= POLLOUT;
        if (room(&streams[k], &to)) events |= POLLIN;
        polled[k] = (struct pollfd){.fd = events ? streams[k].fd : -1, .events = events};
    }
    return poll(polled, (nfds_t)count, -1) < 0 && errno != EINTR ? -errno : 0;
}

/* Move everything. Returns 0, or a negative errno, with the number of the stream in *failed. */
static int move_all(Stream *streams, int count, Share *share, struct pollfd *polled, void **rows, int *failed)
{
    double since = 0;
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
        double now = moved ? 0 : monotonic();
        if (!since || moved) {
            since = now;
        } else if (now - since < SPIN) {
            sched_yield(); /* the other rank may need this core */
            if (monotonic() - now > SWITCH) since = -1; /* so does some thread */
        } else {
            int result = sleep_until_ready(streams, polled, share, count);
            if (result) return result;
            since = 0;
        }
    }
}

/* move(descriptors, segments, rank, address, nbytes, done, giver, dtype, operator): the data of a collective.
 *
 * `segments` has four pairs of address and length for each descriptor: what is sent first and second, and received first and
 * second. With a `dtype` of 0 or more, what is received first are contributions to this rank's share: they are reduced in the
 * order of the ranks, with the `nbytes` at `address` as that of `rank`, and there. Otherwise the share has `done` bytes, or
 * arrives on stream `giver`.
 *
 * Returns (0, -1), or an errno with the number of the stream that has failed. The caller keeps all memory. */
PyObject *core_move(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *descriptors, *result = NULL;
    const char *packed;
    Py_ssize_t length;
    unsigned long long address, nbytes, done;
    int giver, dtype, operator, failed = -1;
    Share share = {NULL, 0, NULL, 0, 0, 1, -1};
    if (!PyArg_ParseTuple(args, "O!y#iKKKiii", &PyList_Type, &descriptors, &packed, &length, &share.rank, &address, &nbytes, &done, &giver,
                          &dtype, &operator))
        return NULL;
    int count = (int)PyList_Size(descriptors);
    if (length != (Py_ssize_t)sizeof(uint64_t[8]) * count || share.rank < 0 || share.rank > count || giver >= count || dtype >= DTYPES
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
    struct pollfd *polled = PyMem_Calloc(several, sizeof *polled);
    void **rows = PyMem_Calloc(several, sizeof *rows);
    char *memory = PyMem_Malloc(pieces + 1);
    if (!streams || !polled || !rows || !memory) {
        PyErr_NoMemory();
        goto end;
    }
    for (int k = 0; k < count; k++) {
        long fd = PyLong_AsLong(PyList_GetItem(descriptors, k));
        if (fd == -1 && PyErr_Occurred()) goto end;
        uint64_t each[8];
        memcpy(each, packed + sizeof each * (size_t)k, sizeof each);
        Segment of[4];
        for (int i = 0; i < 4; i++) of[i] = (Segment){(char *)(uintptr_t)each[2 * i], each[2 * i + 1], 0};
        streams[k] = (Stream){(int)fd, {of[0], of[1]}, {of[2], of[3]}, share.kernel ? memory + (size_t)k * PIECE : NULL, 0};
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
