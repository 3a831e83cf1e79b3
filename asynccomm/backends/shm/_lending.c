/* Tensors that ranks lend each other in place of slots and results: arena.py, peer_memory.py, programs.py. */
#include "_core.h"

#include <stdlib.h>
#include <string.h>

#define MOST_EXTENTS 1024 /* of a rank that are known, as in peer_memory.py */

/* The extents of this process's arena, sorted by address. Under the GIL. */
typedef struct {
    char *address;
    int64_t nbytes, start; /* start: in the arena's file */
} Extent;
static Extent *extents;
static Py_ssize_t extent_count, extent_room;

/* The number of extents that begin at `address` or before it. */
static Py_ssize_t extents_to(const char *address)
{
    Py_ssize_t low = 0, high = extent_count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (extents[middle].address <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* add_extent(address, nbytes, start) */
static PyObject *add_extent(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_ssize_t address;
    long long nbytes, start;
    if (!PyArg_ParseTuple(args, "nLL", &address, &nbytes, &start)) return NULL;
    if (extent_count == extent_room) {
        Py_ssize_t room = 2 * extent_room + 16;
        Extent *more = realloc(extents, (size_t)room * sizeof *more);
        if (!more) return PyErr_NoMemory();
        extents = more, extent_room = room;
    }
    Py_ssize_t at = extents_to((char *)address);
    memmove(extents + at + 1, extents + at, (size_t)(extent_count - at) * sizeof *extents);
    extents[at] = (Extent){(char *)address, nbytes, start};
    extent_count++;
    Py_RETURN_NONE;
}

/* remove_extent(address) */
static PyObject *remove_extent(PyObject *Py_UNUSED(module), PyObject *argument)
{
    char *address = PyLong_AsVoidPtr(argument);
    if (!address && PyErr_Occurred()) return NULL;
    Py_ssize_t at = extents_to(address) - 1;
    if (at < 0 || extents[at].address != address) return PyErr_Format(PyExc_KeyError, "no extent at %R", argument);
    extent_count--;
    memmove(extents + at, extents + at + 1, (size_t)(extent_count - at) * sizeof *extents);
    Py_RETURN_NONE;
}

/* forget_extents() */
static PyObject *forget_extents(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    extent_count = 0;
    Py_RETURN_NONE;
}

static const Extent *extent_of(const char *address)
{
    Py_ssize_t at = extents_to(address) - 1;
    return at >= 0 && address < extents[at].address + extents[at].nbytes ? &extents[at] : NULL;
}

/* ---- of one run --------------------------------------------------------------------------------------------------- */

void core_lend(Run *run)
{
    const Program *p = run->program;
    int rank = run->segment->rank;
    if (!run->places) return;
    memset(run->places, 0, (size_t)run->segment->size * sizeof *run->places);
    memset(run->known, 0, (size_t)run->segment->size);
    memset(run->in_process, 0, (size_t)run->segment->size * sizeof *run->in_process);
    memset(run->lent, 0, sizeof run->lent);
    run->lends = run->borrows = 0;
    int single_copy = p->single_copy && core_reads_all(run->segment);
    if (p->sends) {
        run->lends = single_copy; /* all of its data, which are in one piece each */
        for (int part = 0; part < run->segment->size && run->lends; part++)
            run->lends = !p->sends[part] || core_is_readable(run->vectors[part].address);
        return;
    }
    for (int side = 0; side < 2; side++) {
        const Vector *vector = p->lending[side] < 0 ? NULL : &run->vectors[p->lending[side]];
        if (!vector || vector->pieces) continue;
        const Extent *extent = extent_of(vector->address);
        if (extent) run->lent[side] = (Lent){extent->start, extent->nbytes, vector->address - extent->address};
        else if (single_copy && core_is_readable(vector->address)) run->lent[side] = (Lent){IN_PROCESS, 1, (int64_t)(intptr_t)vector->address};
        else continue;
        run->places[rank][side] = vector->address, run->lends = 1;
    }
}

/* Where an extent of a rank is mapped; NULL: not yet. */
static char *mapped(const Segment *s, int rank, int64_t start, int64_t nbytes)
{
    const Borrowed *known = &s->borrowed[rank];
    for (int k = known->count - 1; k >= 0; k--)
        if (known->extents[k].start == start && known->extents[k].nbytes == nbytes) return known->extents[k].address;
    return NULL;
}

static Lent published(Word *record, int side)
{
    Word *words = record + INLINE + 3 * side;
    return (Lent){(int64_t)words[0], (int64_t)words[1], (int64_t)words[2]};
}

/* Whether a rank lends a tensor in the memory of its process, which this rank can read. */
static int is_in_process(const Run *run, int rank, const Lent *lent)
{
    return lent->start == IN_PROCESS && run->program->reads && run->segment->processes && run->segment->processes[rank].pid;
}

int core_borrow(Run *run, int rank)
{
    Word *record = record_of(run->segment, rank, run->first);
    char *places[2] = {NULL, NULL};
    if (run->known[rank]) return MOVED;
    for (int side = 0; side < 2; side++) {
        Lent lent = published(record, side);
        if (!lent.nbytes) continue;
        if (is_in_process(run, rank, &lent)) {
            places[side] = (char *)(intptr_t)lent.offset;
            run->in_process[rank][side] = 1;
            continue;
        }
        if (lent.start < 0 || lent.nbytes < 0 || lent.offset < 0 || lent.offset > lent.nbytes
            || lent.nbytes - lent.offset < run->program->reach[rank][side]) {
            run->wrong_rank = rank, run->wrong_step = IMPOSSIBLE;
            return WRONG;
        }
        char *address = mapped(run->segment, rank, lent.start, lent.nbytes);
        if (!address) {
            run->asked = rank;
            return ASKED;
        }
        places[side] = address + lent.offset;
    }
    memcpy(run->places[rank], places, sizeof places);
    run->known[rank] = 1;
    if (places[0] || places[1]) run->borrows = 1;
    return MOVED;
}

void core_borrow_part(Run *run, int rank, uint64_t address)
{
    if (!address || !run->places || !run->segment->processes || !run->segment->processes[rank].pid) return;
    run->places[rank][0] = (char *)(uintptr_t)address;
    run->in_process[rank][0] = 1, run->borrows = 1;
}

/* Have Python map an extent of a rank; -1 with an exception. */
static int map_one(const Run *run, int rank, const Lent *lent)
{
    Segment *s = run->segment;
    Borrowed *known = &s->borrowed[rank];
    if (!lent->nbytes || is_in_process(run, rank, lent) || mapped(s, rank, lent->start, lent->nbytes)) return 0;
    PyObject *answer = PyObject_CallMethod(s->peers, "address", "iLL", rank, (long long)lent->start, (long long)lent->nbytes);
    char *address = answer ? PyLong_AsVoidPtr(answer) : NULL;
    Py_XDECREF(answer);
    if (PyErr_Occurred()) return -1;
    known->extents[known->count++] = (Mapped){address, lent->start, lent->nbytes};
    return 0;
}

int core_map(Run *run)
{
    Segment *s = run->segment;
    int rank = run->asked;
    Borrowed *known = &s->borrowed[rank];
    Word *record = record_of(s, rank, run->first);
    Lent lent[2] = {published(record, 0), published(record, 1)};
    if (!s->peers) {
        PyErr_SetString(PyExc_RuntimeError, "nothing maps the tensors of other ranks");
        return -1;
    }
    if (!known->extents && !(known->extents = core_zeroed(MOST_EXTENTS + 2, sizeof *known->extents))) return -1;
    PyObject *answer = PyObject_CallMethod(s->peers, "make_room", "i", rank);
    if (!answer) return -1;
    if (answer == Py_True || known->count >= MOST_EXTENTS) known->count = 0;
    Py_DECREF(answer);
    return map_one(run, rank, &lent[0]) || map_one(run, rank, &lent[1]) ? -1 : 0;
}

int core_withdrawn(Run *run)
{
    Segment *s = run->segment;
    atomic_thread_fence(memory_order_seq_cst); /* behind the last read */
    for (int rank = 0; rank < s->size; rank++) {
        if (rank == s->rank || !acquired(block_of(s, rank) + WITHDRAWN)) continue;
        run->wrong_rank = rank, run->wrong_step = HAS_WITHDRAWN;
        return 1;
    }
    return 0;
}

/* map_by(peers): a PeerMemory */
PyObject *core_map_by(PyObject *self, PyObject *peers)
{
    Segment *s = (Segment *)self;
    PyObject *before = s->peers;
    Py_INCREF(peers);
    s->peers = peers;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"add_extent", add_extent, METH_VARARGS, "Note an extent of this process's arena."},
    {"remove_extent", remove_extent, METH_O, "Forget an extent."},
    {"forget_extents", forget_extents, METH_NOARGS, "Forget all extents."},
    {NULL, NULL, 0, NULL},
};

int core_add_lending(PyObject *module) { return PyModule_AddFunctions(module, functions); }
