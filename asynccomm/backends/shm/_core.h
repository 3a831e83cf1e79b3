/* The objects that the C files of the native executor share. */
#ifndef ASYNCCOMM_CORE_H
#define ASYNCCOMM_CORE_H

#include "../../core/_clock.h"
#include "../../core/_work.h"
#include "../_kernels.h"

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield" ::: "memory")
#else
#define RELAX() ((void)0)
#endif

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

static inline int64_t nanoseconds(void) { return core_nanoseconds(); }

/* ---- the segment, programs and runs: _core.c ---------------------------------------------------------------------- */

typedef _Atomic uint64_t Word;

/* A place in an arena: an extent, and an offset in it; or for IN_PROCESS an address. No bytes: there is no place. */
typedef struct {
    int64_t start, nbytes, offset;
} Lent;

#define IN_PROCESS INT64_MAX /* in place of the start of an extent */

/* The extents of a rank that are mapped here. */
typedef struct {
    char *address;
    int64_t start, nbytes;
} Mapped;
typedef struct {
    int count;
    Mapped *extents;
} Borrowed;

/* A rank's process, for single copy. */
typedef struct {
    int pid, liveness; /* liveness: a descriptor that is readable once the rank is lost; -1 for this rank */
} Process;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    char *base;
    int rank, size, banks;
    int64_t chunk, piece;
    int64_t ring; /* bytes of a message ring */
    Word *blocks, *records;
    char *slots, *results, *rings;
    int (*bells)[2];
    uint64_t free_below;     /* the slots of all steps below are known to be free */
    _Atomic int interrupted; /* a call without the GIL returns soon */
    _Atomic int asleep;      /* a call without the GIL sleeps, or is about to */
    unsigned spins;          /* before a waiting run offers its core */
    int64_t contended_until; /* nanoseconds: other threads keep the cores that they are offered */
    int64_t settled_until;   /* nanoseconds: the thread that calls stays on its core */
    int cpu;                 /* that the rank has last called on; -1: none */
    uint64_t moves;          /* to another core */
    struct LinkState **links; /* by rank */
    PyObject *peers;          /* a PeerMemory, or NULL */
    struct RankPosition *position; /* of the comm, or NULL */
    Borrowed *borrowed;       /* by rank */
    Process *processes;       /* by rank, or NULL */
    char *copies;             /* of what a reduction has read in other processes: a chunk; or NULL */
    uint64_t secret, single_copy; /* single_copy: 0 until all ranks have said whether they can read the others */
} Segment;

/* words of a rank's block and of a record, as in layout.py */
enum { REDUCED = 0, FINISHED = 16, SLEEPING_LOOP = 32, SLEEPING_THREAD = 33, WITHDRAWN = 50 };
enum { PROCESS = 51, SECRET = 52, SECRET_AT = 53, READS = 54, CALLER = 55, BLOCK_WORDS = 64 };
enum { SEQ = 0, CODE = 1, NUMEL = 2, HISTORY = 3, INLINE = 4, RECORD_WORDS = 16 };
enum { HEAD = 0, BODY = 1, STEPS = 2, ADDRESS = 3, HEADER_WORDS = 4 }; /* ADDRESS: of data that are lent, or 0 */

static inline Word *block_of(const Segment *s, int rank) { return s->blocks + rank * BLOCK_WORDS; }
static inline Word *record_of(const Segment *s, int rank, uint64_t step)
{
    return s->records + ((step % (uint64_t)s->banks) * (uint64_t)s->size + (uint64_t)rank) * RECORD_WORDS;
}
static inline Word *header_of(const Segment *s, int rank, uint64_t step, int part)
{
    Word *headers = s->records + (size_t)s->banks * (size_t)s->size * RECORD_WORDS;
    return headers + (((step % (uint64_t)s->banks) * (uint64_t)s->size + (uint64_t)rank) * (uint64_t)s->size + (uint64_t)part) * HEADER_WORDS;
}
static inline uint64_t acquired(Word *word) { return atomic_load_explicit(word, memory_order_acquire); }
static inline void released(Word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }

/* The position of a rank in the sequence of collectives, and its messages: board.RankPosition */
typedef struct RankPosition {
    PyObject_HEAD
    uint64_t step, code, numel, history, number;
    uint64_t messages, kept, alone;
    double collective_wait, message_wait; /* seconds */
    PyObject *op, *posted; /* posted: a list of HeldCalls */
    char dead, adopting, arming, calls_ahead;
} RankPosition;

/* Two ways to receive messages, reading them in the memory of the sender or copying them out of the ring: nanoseconds for each
 * byte, 0 if not known, and the messages so far. */
typedef struct {
    float read, copied;
    uint32_t count;
} Ways;

/* The counters of the two rings between this rank and a peer: rings.LinkState */
typedef struct LinkState {
    PyObject_HEAD
    uint64_t head, taken, sent, tail, told, came, matched, next_ident;
    uint64_t seen_matched; /* of `sent`, the bytes that the peer has matched, as last seen */
    PyObject *waiting;
    char gone;
    Ways short_ones, long_ones;
    unsigned pause, next_pause; /* short messages to send before the next loan, and after it if it is withdrawn */
} LinkState;

typedef struct {
    int space, index; /* index: of a vector, or a rank */
    int64_t offset, stride;
    int64_t lent, lent_stride; /* the place in a tensor that is lent; lent: -1 for none */
} Ref;

typedef struct {
    int64_t total, stride, most; /* bytes in iteration i: total - i * stride, at least 0, at most `most` */
    Ref to, *sources;
    int count, reduction; /* of sources; the number of a kernel, -1: a copy of the one source */
} Action;

typedef struct {
    int wait, signal, waited_count, action_count;
    int *waited; /* ranks */
    Action *actions;
} Stage;

typedef struct {
    PyObject_HEAD
    uint32_t steps;
    int stage_count, vector_count, kernel_count, most_sources;
    int64_t bytes_per_step;
    Stage *stages;
    int may_lend, lending[2]; /* lending: the vectors that stand in for slots, and for results; -1: none */
    int single_copy, reads;   /* whether a vector in any memory is lent; whether this rank may read one of another */
    int64_t (*reach)[2];      /* by rank: bytes of such a tensor of that rank that are used */
    int64_t *sends, *receives, room; /* programs.Announced; sends: NULL without */
} Program;

typedef struct {
    int64_t start; /* in the vector */
    char *address;
} Piece;

typedef struct {
    char *address; /* of a vector in one piece */
    int count;     /* of pieces otherwise */
    int64_t nbytes;
    Piece *pieces;
} Vector;

typedef struct {
    Kernel *kernel;
    int64_t item; /* bytes of an element */
    int divisor;
} Reduction;

typedef struct {
    PyObject_HEAD
    Segment *segment;
    Program *program;
    PyObject *mismatch; /* called with (rank, step); returns the exception to raise */
    PyObject *owners;   /* of memory that the run uses, or NULL */
    uint64_t first, code, numel, history;
    Reduction *reductions;
    int wrong_rank, running;
    char begun, agreed; /* begun: it has its steps; agreed: those of all ranks are known */
    uint32_t steps; /* those of the program, and once the sizes of all ranks are known, those of the collective */
    uint64_t wrong_step;
    uint32_t *done; /* iterations, by stage */
    Vector *vectors;
    void **sources, **at; /* of one reduction, and of a part of it */
    /* of a program that may lend; `places` is NULL otherwise */
    char *(*places)[2]; /* by rank: tensors in place of slots and of results, or NULL */
    char *known;        /* by rank: whether the tensors that it lends are known */
    char (*in_process)[2]; /* by rank: whether such a tensor is in the memory of its process, and is read by core_read */
    Lent lent[2];
    int lends, borrows; /* whether this rank lends; whether another one does */
    int asked;          /* the rank whose tensors are to be mapped */
} Run;

/* Begin a run at step `first`, with the words of its records. */
static inline void core_begin(Run *run, uint64_t first, uint64_t code, uint64_t numel, uint64_t history)
{
    run->first = first, run->code = code, run->numel = numel, run->history = history;
    run->begun = 1, run->agreed = 0, run->steps = run->program->steps;
    memset(run->done, 0, (size_t)run->program->stage_count * sizeof *run->done);
}

/* WRONG: see `wrong_rank`; ASKED: Python has to go on (of a run, by core_map); LATE: a message has not come */
enum { STUCK, MOVED, DONE, WRONG, ASKED, LATE };

/* in place of `wrong_step`: board.Fault */
#define UNREADABLE (UINT64_MAX - 2)
#define IMPOSSIBLE (UINT64_MAX - 1)
#define HAS_WITHDRAWN UINT64_MAX
#define OTHER_SIZES ((uint64_t)1 << 62) /* more than the first step of the collective */

extern PyTypeObject *Core_Segment, *Core_Program, *Core_RankPosition, *Core_LinkState;

/* Item i of a sequence as a number from `least` to `most`; -1 with an exception otherwise, also if there was one. */
int64_t core_number_at(PyObject *sequence, Py_ssize_t i, int64_t least, int64_t most, const char *name);
void *core_zeroed(Py_ssize_t count, size_t size); /* NULL with an exception */
void core_free(PyObject *self);                   /* the end of a deallocator */

/* memcpy, also fast where another core holds the lines */
void core_copy(char *restrict to, const char *restrict from, size_t n);
void core_copy_past_caches(char *restrict to, const char *restrict from, size_t n); /* keeps their content; for large n */

/* A run with empty vectors; NULL with an exception. */
Run *core_new_run(Segment *segment, Program *program, PyObject *reductions, PyObject *mismatch);

/* The vectors of reductions must be in one piece; -1 with an exception otherwise. */
int core_check_vectors(const Run *run);

/* ---- tensors in place of slots: _lending.c ------------------------------------------------------------------------- */

/* Find the tensors that a run lends, once its vectors are known. Under the GIL. */
void core_lend(Run *run);

/* Find the tensors that a rank lends, which has posted the first step: MOVED, WRONG or ASKED. */
int core_borrow(Run *run, int rank);

/* The same for the part of a rank's data that is for this rank, of which the address is known. */
void core_borrow_part(Run *run, int rank, uint64_t address);

/* Have Python map the tensors of `asked`; -1 with an exception. */
int core_map(Run *run);

/* Whether a rank has withdrawn its tensors, behind the last read: the run is WRONG then. */
int core_withdrawn(Run *run);

PyObject *core_map_by(PyObject *segment, PyObject *peers);
int core_add_lending(PyObject *module);

/* ---- tensors in the memory of another process: _single_copy.c ------------------------------------------------------ */

/* Whether each rank can read the memory of the others, as far as this is known. */
int core_reads_all(Segment *s);

/* Whether memory of this process can be read in this way: that of devices cannot. */
int core_is_readable(const char *address);

/* Copy memory of a rank's process: MOVED; STUCK: the rank is lost; WRONG: it cannot be read. */
int core_read(const Segment *s, int rank, char *to, const char *from, size_t n);

PyObject *core_single_copy(PyObject *segment, PyObject *liveness);
PyObject *core_reads_all_now(PyObject *segment, PyObject *none);
PyObject *core_read_memory(PyObject *segment, PyObject *args);

/* ---- passes -------------------------------------------------------------------------------------------------------- */

/* Take each stage on by one iteration, if it is ready and the stage before it is ahead. */
int core_pass(Run *run);

/* ---- driving without the GIL: _pace.c ------------------------------------------------------------------------------ */

/* in nanoseconds */
typedef struct {
    int64_t patience; /* of a wait in vain */
    int64_t stretch;  /* of driving, after which the core is offered to other threads */
    int events;       /* a descriptor to sleep on after `patience`; -1: the call returns, and lasts no longer than a turn */
    int64_t began, until, offered;
    unsigned waits;
    int armed; /* the peers ring from now on */
} Pace;

/* Publish the CPU that this rank calls on. */
void core_publish_cpu(Segment *segment, int cpu);

/* Leave a core that another thread has run on, if another rank calls there, and another core is idle. */
void core_leave_shared_core(Segment *segment, int64_t now);

Pace core_pace(double patience, double stretch, int events);

/* After a pass: whether there is another. It sleeps when another pass after arming the bell has found nothing. It ends when
 * it is interrupted, and when there is something to do in Python: a message has come, or something else woke it. */
int core_continues(Segment *segment, Pace *pace, int moved);

/* Go on until the run is done, or as long as core_continues says. */
int core_drive(Run *run, Pace *pace);

/* Wake a rank if it is asleep, after a publication for it. */
void core_ring(Segment *segment, int rank);

/* ---- long messages: _rings.c -------------------------------------------------------------------------------------- */

/* transfer(transfers, frame, patience, stretch): a method of the segment */
PyObject *core_transfer(PyObject *segment, PyObject *args);

/* ---- calls: _fast_path.c ------------------------------------------------------------------------------------------ */

int core_add_fast_path(PyObject *module);

#endif
