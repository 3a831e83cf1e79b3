/* Single copy: a tensor that a rank lends in the memory of its process, which the others read by process_vm_readv.
 *
 * Each rank publishes its process and the place of a random number in it, reads those of the others, and publishes whether
 * that worked: containers, namespaces and security modules may forbid it. Once all have said so, ranks may lend.
 */
#include "_core.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <sys/uio.h>

static ssize_t read_memory(int pid, void *to, const void *from, size_t n)
{
    struct iovec here = {to, n}, there = {(void *)(uintptr_t)from, n};
    return process_vm_readv(pid, &here, 1, &there, 1, 0);
}
/* getrandom(), which glibc has from 2.25 on; wheels are for 2.17 */
static int random_number(uint64_t *number) { return syscall(SYS_getrandom, number, sizeof *number, 0) == sizeof *number ? 0 : -1; }
#else
static ssize_t read_memory(int pid, void *to, const void *from, size_t n) { return errno = ENOSYS, -1; }
static int random_number(uint64_t *number) { return -1; }
#endif

enum { UNKNOWN, READS_ALL, READS_SOME }; /* of the word READS */

/* single_copy(liveness): descriptors by rank that are readable once the rank is lost, -1 for this rank */
PyObject *core_single_copy(PyObject *self, PyObject *liveness)
{
    Segment *s = (Segment *)self;
    Word *block = block_of(s, s->rank);
    if (s->processes) return PyErr_Format(PyExc_RuntimeError, "single copy has begun");
    Process *processes = core_zeroed(s->size, sizeof *processes);
    if (!processes) return NULL;
    for (int rank = 0; rank < s->size; rank++) {
        processes[rank].liveness = (int)core_number_at(liveness, rank, -1, INT32_MAX, "liveness");
        if (PyErr_Occurred()) {
            free(processes);
            return NULL;
        }
    }
    if (!(s->copies = malloc((size_t)s->chunk))) {
        free(processes);
        return PyErr_NoMemory();
    }
    s->processes = processes;
    if (random_number(&s->secret)) Py_RETURN_NONE; /* nothing is published: no rank lends */
    atomic_store_explicit(block + PROCESS, (uint64_t)getpid(), memory_order_relaxed);
    atomic_store_explicit(block + SECRET, s->secret, memory_order_relaxed);
    released(block + SECRET_AT, (uint64_t)(uintptr_t)&s->secret);
    Py_RETURN_NONE;
}

/* Find the processes of all ranks, and publish whether their memory can be read; 0: some have not published theirs yet. */
static int probe(Segment *s)
{
    uint64_t reads = READS_ALL;
    for (int rank = 0; rank < s->size; rank++)
        if (!acquired(block_of(s, rank) + SECRET_AT)) return 0;
    for (int rank = 0; rank < s->size; rank++) {
        Word *block = block_of(s, rank);
        int pid = (int)block[PROCESS];
        uint64_t found = ~block[SECRET];
        if (rank != s->rank
            && (read_memory(pid, &found, (void *)(uintptr_t)block[SECRET_AT], sizeof found) != sizeof found || found != block[SECRET]))
            reads = READS_SOME;
        s->processes[rank].pid = pid;
    }
    released(block_of(s, s->rank) + READS, reads);
    return 1;
}

int core_reads_all(Segment *s)
{
    if (!s->processes || s->single_copy == READS_SOME) return 0;
    if (s->single_copy == READS_ALL) return 1;
    if (!s->processes[s->rank].pid && !probe(s)) return 0;
    for (int rank = 0; rank < s->size; rank++) {
        uint64_t reads = acquired(block_of(s, rank) + READS);
        if (reads != READS_ALL) {
            if (reads != UNKNOWN) s->single_copy = READS_SOME;
            return 0;
        }
    }
    s->single_copy = READS_ALL;
    return 1;
}

int core_is_readable(const char *address)
{
    char byte;
    return read_memory(getpid(), &byte, address, 1) == 1;
}

int core_read(const Segment *s, int rank, char *to, const char *from, size_t n)
{
    const Process *process = &s->processes[rank];
    while (n) {
        ssize_t got = read_memory(process->pid, to, from, n);
        if (got <= 0) return got < 0 && errno == ESRCH ? STUCK : WRONG;
        to += got, from += got, n -= (size_t)got;
    }
    /* a number of a process is given to another one only after the end of its descriptors */
    struct pollfd liveness = {process->liveness, POLLIN, 0};
    return poll(&liveness, 1, 0) > 0 ? STUCK : MOVED;
}

PyObject *core_reads_all_now(PyObject *self, PyObject *Py_UNUSED(none)) { return PyBool_FromLong(core_reads_all((Segment *)self)); }

/* read(rank, to, from, nbytes) -> True; False: the rank is lost, or has failed; None: its memory cannot be read */
PyObject *core_read_memory(PyObject *self, PyObject *args)
{
    Segment *s = (Segment *)self;
    int rank, result;
    unsigned long long to, from, nbytes;
    if (!PyArg_ParseTuple(args, "iKKK", &rank, &to, &from, &nbytes)) return NULL;
    if (rank < 0 || rank >= s->size || !core_reads_all(s)) return PyErr_Format(PyExc_ValueError, "the memory of rank %d is not to be read", rank);
    Py_BEGIN_ALLOW_THREADS
    result = core_read(s, rank, (char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    atomic_thread_fence(memory_order_seq_cst); /* behind the last read */
    if (result == MOVED && acquired(block_of(s, rank) + WITHDRAWN)) result = STUCK;
    if (result == WRONG) Py_RETURN_NONE;
    return PyBool_FromLong(result == MOVED);
}
