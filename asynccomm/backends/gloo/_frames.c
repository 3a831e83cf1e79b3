/* Frames to and from their sockets, by a thread that waits for them without the GIL: frame_exchange.py. So come messages that a
 * task waits for: p2p.py. */
#include "../../core/_work.h"
#include "../_kernels.h"
#include "_streams.h"

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { HEADER = 32, KIND_FRAME = 8, FIRST = 16 }; /* of messages.Header: its bytes, Kind.FRAME, the offset of `first` */
enum { ROOM = 4096 }; /* bytes of the first read, at most */
enum { STRETCHES = 10 };
enum { EQUAL = 48, BEGINNING = 64 }; /* bytes of a frame that are equal on all ranks, and ahead of the contribution: frames.py */
enum { LATE, ALL, OTHER, CARRIED }; /* as in frame_exchange.py */

typedef struct {
    int fd, sink;       /* the descriptors to read from and to write to; a negative one is not used */
    const char *give;   /* the contribution at the end of this rank's frame for the peer */
    size_t given;       /* its bytes */
    size_t unsent;      /* bytes of the frame, with its header, that `sink` has not taken */
    char *take;         /* the place of the peer's contribution; NULL: it has none */
    size_t guess;       /* bytes to read at first, probably a frame with its header */
    size_t start, end;  /* of the bytes in `room` that are not used yet */
    PyObject *frame;    /* a bytearray, or NULL until the header has come */
    char *data;         /* of the frame */
    size_t nbytes, got; /* of the frame; all of it has come if they are equal */
    char head[HEADER + BEGINNING]; /* of this rank's frame */
    char room[ROOM];
} Source;

typedef struct {
    PyObject_HEAD
    int count;
    int64_t longest;
    Source *sources;
} FrameReader;

/* A wait in which nothing has moved for `seconds`, without the time that other threads had the core, is over, and so is one of
 * STRETCHES times as long. */
typedef struct {
    double seconds, until, end;
} Wait;

static Wait begin_wait(double seconds)
{
    double now = monotonic();
    return (Wait){seconds, now + seconds, now + STRETCHES * seconds};
}

/* Whether the wait goes on, after a look at the sockets in which data has `moved` or not. */
static int goes_on(Wait *wait, int moved)
{
    double now = monotonic();
    if (moved && now < wait->end) wait->until = now + wait->seconds;
    else if (now >= wait->until) return 0;
    if (!moved && (wait->until += offer_core()) > wait->end) wait->until = wait->end;
    return 1;
}

/* Write as much of `head` and `data` as the descriptor takes, behind the first `sent` bytes; returns the number of bytes. An error
 * is left to Python, which finds it, too. */
static size_t write_parts(int fd, const char *head, size_t length, const char *data, size_t nbytes, size_t sent)
{
    size_t left = sent < length ? length - sent : 0, offset = left ? 0 : sent - length;
    struct iovec parts[2] = {{(void *)(uintptr_t)(head + sent), left}, {(void *)(uintptr_t)(data + offset), nbytes - offset}};
    struct msghdr message = {.msg_iov = left ? parts : parts + 1, .msg_iovlen = left ? 2 : 1};
    ssize_t count = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return count > 0 ? (size_t)count : 0;
}

static int is_whole(const Source *s) { return s->frame && s->got == s->nbytes; }

/* FrameReader(count, longest): of `count` sources, frames of at most `longest` bytes */
static PyObject *new_reader(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    int count;
    long long longest;
    if (!PyArg_ParseTuple(args, "iL", &count, &longest)) return NULL;
    if (count < 0 || longest < 1) return PyErr_Format(PyExc_ValueError, "%d sources, %lld bytes", count, longest);
    FrameReader *reader = (FrameReader *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!reader) return NULL;
    reader->longest = longest;
    reader->sources = PyMem_Calloc((size_t)count + 1, sizeof *reader->sources);
    if (reader->sources) {
        reader->count = count;
        return (PyObject *)reader;
    }
    Py_DECREF(reader);
    return PyErr_NoMemory();
}

static void dealloc(PyObject *self)
{
    FrameReader *reader = (FrameReader *)self;
    for (int k = 0; k < reader->count; k++) Py_XDECREF(reader->sources[k].frame);
    PyMem_Free(reader->sources);
    core_free(self);
}

/* Read once. 1: bytes have come; 0: none are there; -1: Python has to look. */
static int read_some(Source *s)
{
    char *to = s->frame ? s->data + s->got : s->room + s->end;
    size_t most = s->frame ? s->nbytes - s->got : s->guess > s->end ? s->guess - s->end : 0; /* 0: as after an error */
    ssize_t count = recv(s->fd, to, most, MSG_DONTWAIT);
    if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
    if (s->frame) s->got += (size_t)count;
    else s->end += (size_t)count;
    return 1;
}

/* Begin the frame whose header is in `room`. Under the GIL. 1: begun; 0: the header is not there; -1: it is not of a frame, or
 * there is no memory. */
static int begin_frame(const FrameReader *reader, Source *s)
{
    int64_t nbytes;
    if (s->end - s->start < HEADER) return 0;
    const char *header = s->room + s->start;
    memcpy(&nbytes, header + FIRST, sizeof nbytes);
    if (header[0] != KIND_FRAME || nbytes < 1 || nbytes > reader->longest) return -1;
    s->frame = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    if (!s->frame) {
        PyErr_Clear(); /* Python reads the frame, and reports its own error */
        return -1;
    }
    s->data = PyByteArray_AsString(s->frame), s->nbytes = (size_t)nbytes;
    s->start += HEADER;
    s->got = s->end - s->start < s->nbytes ? s->end - s->start : s->nbytes;
    memcpy(s->data, s->room + s->start, s->got);
    s->start += s->got;
    if (s->start == s->end) s->start = s->end = 0;
    return 1;
}

/* Read for one source: as `read_some`; 2: a header has come. */
static int advance(Source *s)
{
    int result = read_some(s);
    return result == 1 && !s->frame && s->end - s->start >= HEADER ? 2 : result;
}

/* Take the descriptors of a list; -1 with an exception. */
static int take_descriptors(FrameReader *reader, PyObject *list, int sinks)
{
    if (PyList_Size(list) != reader->count) {
        PyErr_Format(PyExc_ValueError, "%zd descriptors", PyList_Size(list));
        return -1;
    }
    for (int k = 0; k < reader->count; k++) {
        long fd = PyLong_AsLong(PyList_GetItem(list, k));
        if (fd == -1 && PyErr_Occurred()) return -1;
        if (sinks) reader->sources[k].sink = (int)fd;
        else reader->sources[k].fd = (int)fd;
    }
    return 0;
}

/* Write as much of a frame as the sink takes; whether it took any. */
static int write_some(Source *s)
{
    size_t count = write_parts(s->sink, s->head, sizeof s->head, s->give, s->given, sizeof s->head + s->given - s->unsent);
    s->unsent -= count;
    return count > 0;
}

/* Write this rank's frames, as far as they are unsent, and read until all sources have one, but for those without a descriptor. */
static int move_frames(FrameReader *reader, double seconds)
{
    Wait wait = begin_wait(seconds);
    int result = LATE, begins;
    do {
        begins = 0;
        Py_BEGIN_ALLOW_THREADS
        for (;;) {
            int moved = 0, missing = 0;
            for (int k = 0; k < reader->count && result != OTHER; k++) {
                Source *s = &reader->sources[k];
                if (s->unsent) moved |= write_some(s), missing += s->unsent > 0;
                if (s->fd < 0 || is_whole(s)) continue;
                int found = advance(s);
                if (found < 0) result = OTHER;
                else if (found == 2) begins = 1;
                moved |= found > 0, missing += !is_whole(s);
            }
            if (!missing && result != OTHER) result = ALL;
            if (result != LATE || begins || !goes_on(&wait, moved)) break;
        }
        Py_END_ALLOW_THREADS
        for (int k = 0; begins && k < reader->count; k++) {
            Source *s = &reader->sources[k];
            if (s->fd >= 0 && !s->frame && begin_frame(reader, s) < 0) result = OTHER;
        }
    } while (begins && result == LATE);
    /* No event tells of data behind a frame, nor of the frames once all of them have been read. */
    int comes = 0;
    for (int k = 0; k < reader->count; k++) {
        Source *s = &reader->sources[k];
        if (result == LATE && is_whole(s) && s->start != s->end) result = OTHER;
        comes |= s->fd >= 0 && !is_whole(s);
    }
    return result == LATE && !comes ? OTHER : result;
}

/* Have the next frame of a source be read as one of `nbytes`. */
static void expect(Source *s, size_t nbytes) { s->guess = nbytes > ROOM - HEADER ? ROOM : nbytes + HEADER; }

/* receive(descriptors, guess, seconds): read until all sources have a frame, but for those whose descriptor is -1.
 *
 * `guess` is the probable length of a frame: no more bytes are read where one begins. */
static PyObject *receive(PyObject *self, PyObject *args)
{
    FrameReader *reader = (FrameReader *)self;
    PyObject *descriptors;
    Py_ssize_t guess;
    double seconds;
    if (!PyArg_ParseTuple(args, "O!nd", &PyList_Type, &descriptors, &guess, &seconds)) return NULL;
    if (take_descriptors(reader, descriptors, 0)) return NULL;
    for (int k = 0; k < reader->count; k++) reader->sources[k].unsent = 0, expect(&reader->sources[k], guess < 0 ? ROOM : (size_t)guess);
    return PyLong_FromLong(move_frames(reader, seconds));
}

/* Whether one of n bytes of floats is NaN. */
CLONES static int has_nan(const void *data, size_t nbytes, int dtype)
{
    int found = 0;
    if (dtype == F32)
        for (size_t i = 0; i < nbytes / 4; i++) found |= ((const float *)data)[i] != ((const float *)data)[i];
    if (dtype == F64)
        for (size_t i = 0; i < nbytes / 8; i++) found |= ((const double *)data)[i] != ((const double *)data)[i];
    return found;
}

/* Fill in the beginning of a frame behind the bytes that are equal on all ranks: as frames._OWN, a balance, the bytes of the
 * contribution, and a flag. */
static void fill_own(char *beginning, size_t nbytes)
{
    uint32_t own[4] = {0, 0, (uint32_t)nbytes, 1};
    memcpy(beginning + EQUAL, own, sizeof own);
}

/* Whether the frame of a source is as it has to be; `equal` are the bytes that this rank's frame begins with. */
static int is_expected(const Source *s, const char *equal, size_t nbytes)
{
    char beginning[BEGINNING];
    size_t length = s->take ? nbytes : 0;
    memcpy(beginning, equal, EQUAL);
    fill_own(beginning, length);
    return is_whole(s) && s->nbytes == BEGINNING + length && !memcmp(s->data, beginning, BEGINNING);
}

/* Reduce the contributions into `target`. No (0) where there is a NaN: the bits of the sum of two NaNs depend on the compiler,
 * and other ranks may use torch. */
static int reduce(FrameReader *reader, Kernel *kernel, int dtype, int rank, char *source, char *target, size_t nbytes)
{
    int usual = 1;
    void *rows[reader->count + 1];
    rows[rank] = source;
    for (int k = 0; k < reader->count; k++) /* in the order of frame_exchange.py: from the next rank on */
        rows[(rank + 1 + k) % (reader->count + 1)] = reader->sources[k].data + BEGINNING;
    Py_BEGIN_ALLOW_THREADS
    for (int k = 0; usual && k <= reader->count; k++) usual = !has_nan(rows[k], nbytes, dtype);
    if (usual) kernel(target, rows, reader->count + 1, nbytes / (size_t)core_item_bytes[dtype], 0);
    Py_END_ALLOW_THREADS
    return usual;
}

/* The addresses of a list, each for one source; 0 for none. -1 with an exception. */
static int take_addresses(FrameReader *reader, PyObject *list, int gives)
{
    if (PyList_Size(list) != reader->count) {
        PyErr_Format(PyExc_ValueError, "%zd addresses", PyList_Size(list));
        return -1;
    }
    for (int k = 0; k < reader->count; k++) {
        unsigned long long address = PyLong_AsUnsignedLongLong(PyList_GetItem(list, k));
        if (PyErr_Occurred()) return -1;
        if (gives) reader->sources[k].give = (const char *)(uintptr_t)address;
        else reader->sources[k].take = (char *)(uintptr_t)address;
    }
    return 0;
}

/* carry(sinks, sources, equal, gives, takes, source, target, nbytes, rank, dtype, operator, seconds): a collective.
 *
 * Writes a frame to each sink, which begins with `equal` and ends with the contribution at the address in `gives`, if any;
 * reads the frames of the others; then copies their contributions to the addresses in `takes`, and this rank's own from
 * `source` to `target`. With a `dtype` of 0 or more, the contributions of the ranks in `takes` and the own one are reduced into
 * `target` in place of that: those of all ranks, or none. With a `dtype` below -1, Python does the last part. All contributions
 * have `nbytes`.
 *
 * CARRIED: it is done. ALL: Python has to do the last part. unsent() tells how much is left to write, after LATE and OTHER. */
static PyObject *carry(PyObject *self, PyObject *args)
{
    FrameReader *reader = (FrameReader *)self;
    PyObject *sinks, *sources, *gives, *takes;
    const char *equal;
    unsigned long long from, to;
    Py_ssize_t length, nbytes;
    int rank, dtype, operator;
    double seconds;
    if (!PyArg_ParseTuple(args, "O!O!y#O!O!KKniiid", &PyList_Type, &sinks, &PyList_Type, &sources, &equal, &length, &PyList_Type, &gives,
                          &PyList_Type, &takes, &from, &to, &nbytes, &rank, &dtype, &operator, &seconds))
        return NULL;
    if (length != EQUAL || nbytes < 0 || nbytes > reader->longest - BEGINNING || rank < 0 || rank > reader->count || dtype >= DTYPES
        || operator < 0 || operator >= OPERATORS || (dtype >= 0 && !core_kernels[dtype][operator]))
        return PyErr_Format(PyExc_ValueError, "%zd bytes, %zd of data, rank %d, kernel %d %d", length, nbytes, rank, dtype, operator);
    if (take_descriptors(reader, sinks, 1) || take_descriptors(reader, sources, 0) || take_addresses(reader, gives, 1)
        || take_addresses(reader, takes, 0))
        return NULL;
    for (int k = 0; k < reader->count; k++) {
        Source *s = &reader->sources[k];
        s->given = s->give ? (size_t)nbytes : 0;
        s->unsent = sizeof s->head + s->given;
        int64_t bytes = (int64_t)(BEGINNING + s->given);
        memset(s->head, 0, HEADER);
        s->head[0] = KIND_FRAME;
        memcpy(s->head + FIRST, &bytes, sizeof bytes);
        memcpy(s->head + HEADER, equal, EQUAL);
        fill_own(s->head + HEADER, s->given);
        expect(s, BEGINNING + (s->take ? (size_t)nbytes : 0));
    }
    int result = move_frames(reader, seconds), reduces = dtype >= 0 && to;
    char *source = (char *)(uintptr_t)from, *target = (char *)(uintptr_t)to;
    for (int k = 0; result == ALL && k < reader->count; k++)
        if (!is_expected(&reader->sources[k], equal, (size_t)nbytes)) return PyLong_FromLong(ALL);
    if (result != ALL || dtype < -1) return PyLong_FromLong(result);
    if (reduces) {
        if (!reduce(reader, core_kernels[dtype][operator], dtype, rank, source, target, (size_t)nbytes)) return PyLong_FromLong(ALL);
    } else if (target) {
        memmove(target, source, (size_t)nbytes);
    }
    for (int k = 0; k < reader->count; k++) {
        Source *s = &reader->sources[k];
        if (s->take && dtype < 0) memcpy(s->take, s->data + BEGINNING, (size_t)nbytes);
        Py_CLEAR(s->frame);
    }
    return PyLong_FromLong(CARRIED);
}

/* unsent(): the bytes at the end of the frame that each sink has not taken */
static PyObject *unsent(PyObject *self, PyObject *Py_UNUSED(args))
{
    FrameReader *reader = (FrameReader *)self;
    PyObject *list = PyList_New(reader->count);
    for (int k = 0; list && k < reader->count; k++) {
        PyObject *count = PyLong_FromSize_t(reader->sources[k].unsent);
        if (!count || PyList_SetItem(list, k, count)) Py_CLEAR(list);
    }
    return list;
}

/* frames(): after ALL, a list of a bytearray for each source, or None where there was no descriptor */
static PyObject *frames(PyObject *self, PyObject *Py_UNUSED(args))
{
    FrameReader *reader = (FrameReader *)self;
    PyObject *list = PyList_New(reader->count);
    for (int k = 0; list && k < reader->count; k++) {
        Source *s = &reader->sources[k];
        PyObject *frame = is_whole(s) ? s->frame : NULL;
        if (frame) s->frame = NULL;
        else Py_INCREF(Py_None);
        PyList_SetItem(list, k, frame ? frame : Py_None);
    }
    return list;
}

/* returned(): all bytes that were read and not given out, a bytes object for each source; they are dropped here */
static PyObject *returned(PyObject *self, PyObject *Py_UNUSED(args))
{
    FrameReader *reader = (FrameReader *)self;
    PyObject *list = PyList_New(reader->count);
    for (int k = 0; list && k < reader->count; k++) {
        Source *s = &reader->sources[k];
        size_t header = s->frame ? HEADER : 0, got = s->frame ? s->got : 0, left = s->end - s->start;
        PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(header + got + left));
        if (!data || PyList_SetItem(list, k, data)) {
            Py_CLEAR(list);
            break;
        }
        char *to = PyBytes_AsString(data);
        if (s->frame) {
            int64_t nbytes = (int64_t)s->nbytes;
            memset(to, 0, HEADER);
            to[0] = KIND_FRAME;
            memcpy(to + FIRST, &nbytes, sizeof nbytes);
            memcpy(to + HEADER, s->data, got);
        }
        memcpy(to + header + got, s->room + s->start, left);
    }
    for (int k = 0; list && k < reader->count; k++) {
        Source *s = &reader->sources[k];
        Py_CLEAR(s->frame);
        s->start = s->end = 0;
    }
    return list;
}

/* Whether bytes were read and not given out. */
static PyObject *holds(PyObject *self, void *Py_UNUSED(closure))
{
    FrameReader *reader = (FrameReader *)self;
    for (int k = 0; k < reader->count; k++)
        if (reader->sources[k].frame || reader->sources[k].end) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* ---- messages ----------------------------------------------------------------------------------------------------- */

/* Read the message with the header `header`, as far as it comes: `room` has the bytes up to `first`, `data` those behind them.
 * Returns the number of bytes read. Stops behind a header that differs. */
static size_t read_message(int fd, const char *header, char *room, size_t first, char *data, size_t nbytes, double seconds)
{
    Wait wait = begin_wait(seconds);
    size_t got = 0, whole = HEADER + nbytes;
    for (;;) {
        char *to = got < first ? room + got : data + (got - HEADER);
        ssize_t count = recv(fd, to, (got < first ? first : whole) - got, MSG_DONTWAIT);
        if (!count || (count < 0 && errno != EAGAIN && errno != EINTR)) return got;
        if (count > 0) got += (size_t)count;
        if (got == whole || (got >= HEADER && memcmp(room, header, HEADER))) return got;
        if (!goes_on(&wait, count > 0) && count < 0) return got; /* else the rest may be there */
    }
}

/* receive_message(descriptor, header, address, nbytes, seconds, outcome): a message with this header and `nbytes` of data.
 *
 * Appends to the list `outcome`, because a signal handler may raise behind this call: None if all of the message has come, with
 * its data at `address`; otherwise the bytes that have come. */
static PyObject *receive_message(PyObject *Py_UNUSED(module), PyObject *args)
{
    int fd;
    const char *header;
    Py_ssize_t length, nbytes;
    unsigned long long address;
    double seconds;
    PyObject *outcome;
    char room[ROOM];
    if (!PyArg_ParseTuple(args, "iy#KndO!", &fd, &header, &length, &address, &nbytes, &seconds, &PyList_Type, &outcome)) return NULL;
    if (length != HEADER || nbytes < 0) return PyErr_Format(PyExc_ValueError, "%zd bytes of a header, %zd of data", length, nbytes);
    char *data = (char *)(uintptr_t)address;
    size_t first = nbytes <= ROOM - HEADER ? HEADER + (size_t)nbytes : HEADER, got;
    Py_BEGIN_ALLOW_THREADS
    got = read_message(fd, header, room, first, data, (size_t)nbytes, seconds);
    Py_END_ALLOW_THREADS
    if (got == HEADER + (size_t)nbytes && !memcmp(room, header, HEADER)) {
        if (first > HEADER) memcpy(data, room + HEADER, (size_t)nbytes);
        return PyList_Append(outcome, Py_None) ? NULL : Py_NewRef(Py_None);
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)got);
    if (!bytes) return NULL;
    size_t begun = got < first ? got : first;
    memcpy(PyBytes_AsString(bytes), room, begun);
    if (got > begun) memcpy(PyBytes_AsString(bytes) + begun, data, got - begun); /* a tensor without elements has no memory */
    int failed = PyList_Append(outcome, bytes);
    Py_DECREF(bytes);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* send_message(descriptor, header, address, nbytes, seconds, outcome): write `header` and `nbytes` at `address`.
 *
 * Waits for room in the socket. Appends the number of bytes written to `outcome`, as `receive_message` does. */
static PyObject *send_message(PyObject *Py_UNUSED(module), PyObject *args)
{
    int fd;
    const char *header;
    Py_ssize_t length, nbytes;
    unsigned long long address;
    double seconds;
    PyObject *outcome;
    if (!PyArg_ParseTuple(args, "iy#KndO!", &fd, &header, &length, &address, &nbytes, &seconds, &PyList_Type, &outcome)) return NULL;
    if (nbytes < 0) return PyErr_Format(PyExc_ValueError, "%zd bytes of data", nbytes);
    const char *data = (const char *)(uintptr_t)address;
    size_t sent = 0, count, whole = (size_t)length + (size_t)nbytes;
    Wait wait = begin_wait(seconds);
    Py_BEGIN_ALLOW_THREADS
    do {
        count = write_parts(fd, header, (size_t)length, data, (size_t)nbytes, sent);
        sent += count;
    } while (sent < whole && (goes_on(&wait, count > 0) || count)); /* else there may be room for the rest */
    Py_END_ALLOW_THREADS
    PyObject *written = PyLong_FromSize_t(sent);
    int failed = !written || PyList_Append(outcome, written);
    Py_XDECREF(written);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* ---- the module --------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"receive", receive, METH_VARARGS, NULL}, {"carry", carry, METH_VARARGS, NULL}, {"unsent", unsent, METH_NOARGS, NULL},
    {"frames", frames, METH_NOARGS, NULL}, {"returned", returned, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyGetSetDef fields[] = {{"holds", holds, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)new_reader}, {Py_tp_dealloc, (void *)dealloc}, {Py_tp_methods, methods}, {Py_tp_getset, fields},
    {0, NULL}};
static PyType_Spec spec = {"_frames.FrameReader", sizeof(FrameReader), 0, Py_TPFLAGS_DEFAULT, slots};

static PyMethodDef functions[] = {
    {"receive_message", receive_message, METH_VARARGS, NULL}, {"send_message", send_message, METH_VARARGS, NULL},
    {"move", core_move, METH_VARARGS, NULL}, {"ring", core_ring, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_frames", "Frames, messages and long data, to and from their sockets.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__frames(void)
{
    PyObject *module = PyModule_Create(&definition), *type = module ? PyType_FromSpec(&spec) : NULL;
    if (module && (!type || PyModule_AddObjectRef(module, "FrameReader", type))) Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
