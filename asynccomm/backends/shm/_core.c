/* The native executor of collectives in shared memory.
 *
 * A program (programs.py) is data: a few stages, each taken through its iterations in order. An iteration waits for
 * flags of other ranks, copies or reduces, and raises a flag of its own. This file knows no algorithm. reference.py runs
 * the same programs in Python and is the specification of this file; ranks with either executor share one segment.
 *
 * All state between two iterations is one counter per stage, so a run may be continued by any thread, one at a time.
 * The memory that other ranks write is not trusted: an offset or a length is never read from it.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ __volatile__("yield" ::: "memory")
#else
#define RELAX() ((void)0)
#endif

/* one binary for old and new processors; the loader picks the version */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) \
    && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_UNDEFINED__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

#define HOLD_BYTES (32 << 10) /* a pass over fewer bytes keeps the GIL: it takes a few microseconds */
#define STREAM_BYTES (16 << 20) /* results of larger runs are stored past the caches, which they would flush */

/* ---- copying ------------------------------------------------------------------------------------------------------ */

/* glibc's memcpy may be `rep movsb`, which is slow where another core holds the lines. */
static void copy(char *restrict to, const char *restrict from, size_t n)
{
#if defined(__x86_64__)
    for (; n >= 64; n -= 64, to += 64, from += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_storeu_si128((__m128i *)to, a), _mm_storeu_si128((__m128i *)(to + 16), b);
        _mm_storeu_si128((__m128i *)(to + 32), c), _mm_storeu_si128((__m128i *)(to + 48), d);
    }
#endif
    memcpy(to, from, n);
}

static void copy_past_caches(char *restrict to, const char *restrict from, size_t n)
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
    copy(to, from, n);
}

/* ---- reducing ----------------------------------------------------------------------------------------------------- */

/* in the order of programs.DTYPES and programs.OPERATORS */
enum { F32, F64, F16, BF16, I8, U8, I32, I64, DTYPES };
enum { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, OPERATORS };

#define BLOCK 1024 /* elements that are combined before they are stored: they stay in the first cache */

/* Integers wrap around, hence unsigned. The first operand wins where two are equal, and a NaN always. */
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LESS(a, b) ((b) < (a) ? (b) : (a))
#define MORE(a, b) ((b) > (a) ? (b) : (a))
#define LESS_OR_NAN(a, b) ((b) < (a) || ((b) != (b) && (a) == (a)) ? (b) : (a))
#define MORE_OR_NAN(a, b) ((b) > (a) || ((b) != (b) && (a) == (a)) ? (b) : (a))
#define AND(a, b) ((a) & (b))
#define OR(a, b) ((a) | (b))
#define XOR(a, b) ((a) ^ (b))

/* Combine n elements of `count` sources, in their order, into `out`, which may be one of the first two; divide by
 * `divisor` if it is not 0. */
typedef void Kernel(void *out, void *const *sources, int count, size_t n, int divisor);

/* W: the type that values are combined in */
#define KERNEL(NAME, T, W, COMBINE)                                                                                    \
    CLONES static void NAME(void *out_, void *const *sources, int count, size_t n, int divisor)                        \
    {                                                                                                                  \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                     \
            size_t m = n - at < BLOCK ? n - at : BLOCK;                                                                \
            T *out = (T *)out_ + at;                                                                                   \
            const T *a = (const T *)sources[0] + at, *b = (const T *)sources[count > 1] + at;                          \
            if (count == 2 && !divisor) {                                                                              \
                for (size_t i = 0; i < m; i++) out[i] = (T)COMBINE((W)a[i], (W)b[i]);                                  \
                continue;                                                                                              \
            }                                                                                                          \
            T total[BLOCK];                                                                                            \
            if (count == 1) memcpy(total, a, m * sizeof(T));                                                           \
            else for (size_t i = 0; i < m; i++) total[i] = (T)COMBINE((W)a[i], (W)b[i]);                               \
            for (int k = 2; k < count; k++) {                                                                          \
                const T *c = (const T *)sources[k] + at;                                                               \
                for (size_t i = 0; i < m; i++) total[i] = (T)COMBINE((W)total[i], (W)c[i]);                            \
            }                                                                                                          \
            if (divisor) for (size_t i = 0; i < m; i++) total[i] = (T)(total[i] / (T)divisor);                         \
            memcpy(out, total, m * sizeof(T));                                                                         \
        }                                                                                                              \
    }

#define FLOATS(NAME, T)                                                                                                \
    KERNEL(NAME##_sum, T, T, ADD) KERNEL(NAME##_product, T, T, MULTIPLY)                                               \
    KERNEL(NAME##_min, T, T, LESS_OR_NAN) KERNEL(NAME##_max, T, T, MORE_OR_NAN)
#define INTEGERS(NAME, T, UNSIGNED)                                                                                    \
    KERNEL(NAME##_sum, T, UNSIGNED, ADD) KERNEL(NAME##_product, T, UNSIGNED, MULTIPLY)                                 \
    KERNEL(NAME##_min, T, T, LESS) KERNEL(NAME##_max, T, T, MORE)                                                      \
    KERNEL(NAME##_and, T, T, AND) KERNEL(NAME##_or, T, T, OR) KERNEL(NAME##_xor, T, T, XOR)

FLOATS(f32, float)
FLOATS(f64, double)
INTEGERS(i8, int8_t, uint8_t)
INTEGERS(u8, uint8_t, uint8_t)
INTEGERS(i32, int32_t, uint32_t)
INTEGERS(i64, int64_t, uint64_t)

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float from_bf16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }
static inline uint16_t to_bf16(float value) /* to the nearest, ties to even */
{
    uint32_t bits = bits_of_float(value);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    /* exponents of half and float differ by 112; the product also normalises what is subnormal */
    return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
}
static inline uint16_t to_f16(float value)
{
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more */
    if (rest < 0x38800000) /* subnormal: the addition rounds to multiples of 2**-24 */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13));
}

/* Halves are widened, combined in float, divided, and rounded once. */
#define HALVES(NAME, FROM, TO, COMBINE)                                                                                \
    CLONES static void NAME(void *out_, void *const *sources, int count, size_t n, int divisor)                        \
    {                                                                                                                  \
        for (size_t at = 0; at < n; at += BLOCK) {                                                                     \
            size_t m = n - at < BLOCK ? n - at : BLOCK;                                                                \
            uint16_t *out = (uint16_t *)out_ + at;                                                                     \
            float total[BLOCK];                                                                                        \
            for (size_t i = 0; i < m; i++) total[i] = FROM(((const uint16_t *)sources[0] + at)[i]);                    \
            for (int k = 1; k < count; k++) {                                                                          \
                const uint16_t *c = (const uint16_t *)sources[k] + at;                                                 \
                for (size_t i = 0; i < m; i++) {                                                                       \
                    float value = FROM(c[i]);                                                                          \
                    total[i] = COMBINE(total[i], value);                                                               \
                }                                                                                                      \
            }                                                                                                          \
            if (divisor) for (size_t i = 0; i < m; i++) total[i] /= (float)divisor;                                    \
            for (size_t i = 0; i < m; i++) out[i] = TO(total[i]);                                                      \
        }                                                                                                              \
    }
#define BY_FLOAT(FROM, RELATION, a, b) (FROM(b) RELATION FROM(a) || (FROM(b) != FROM(b) && FROM(a) == FROM(a)) ? (b) : (a))
#define F16_LESS(a, b) BY_FLOAT(from_f16, <, a, b)
#define F16_MORE(a, b) BY_FLOAT(from_f16, >, a, b)
#define BF16_LESS(a, b) BY_FLOAT(from_bf16, <, a, b)
#define BF16_MORE(a, b) BY_FLOAT(from_bf16, >, a, b)

HALVES(f16_sum, from_f16, to_f16, ADD)
HALVES(f16_product, from_f16, to_f16, MULTIPLY)
KERNEL(f16_min, uint16_t, uint16_t, F16_LESS)
KERNEL(f16_max, uint16_t, uint16_t, F16_MORE)
HALVES(bf16_sum, from_bf16, to_bf16, ADD)
HALVES(bf16_product, from_bf16, to_bf16, MULTIPLY)
KERNEL(bf16_min, uint16_t, uint16_t, BF16_LESS)
KERNEL(bf16_max, uint16_t, uint16_t, BF16_MORE)

static Kernel *const kernels[DTYPES][OPERATORS] = {
    [F32] = {f32_sum, f32_product, f32_min, f32_max, NULL, NULL, NULL},
    [F64] = {f64_sum, f64_product, f64_min, f64_max, NULL, NULL, NULL},
    [F16] = {f16_sum, f16_product, f16_min, f16_max, NULL, NULL, NULL},
    [BF16] = {bf16_sum, bf16_product, bf16_min, bf16_max, NULL, NULL, NULL},
    [I8] = {i8_sum, i8_product, i8_min, i8_max, i8_and, i8_or, i8_xor},
    [U8] = {u8_sum, u8_product, u8_min, u8_max, u8_and, u8_or, u8_xor},
    [I32] = {i32_sum, i32_product, i32_min, i32_max, i32_and, i32_or, i32_xor},
    [I64] = {i64_sum, i64_product, i64_min, i64_max, i64_and, i64_or, i64_xor},
};
static const int64_t item_bytes[DTYPES] = {[F32] = 4, [F64] = 8, [F16] = 2, [BF16] = 2, [I8] = 1, [U8] = 1, [I32] = 4, [I64] = 8};

/* ---- the segment -------------------------------------------------------------------------------------------------- */

/* words of a rank's block and of a record, as in layout.py */
enum { REDUCED = 0, FINISHED = 16, SLEEPING_LOOP = 32, SLEEPING_THREAD = 33, BLOCK_WORDS = 64 };
enum { SEQ = 0, CODE = 1, NUMEL = 2, MARK = 3, INLINE = 4, RECORD_WORDS = 16 };
enum { HEADER_WORDS = 4 };

typedef _Atomic uint64_t Word;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    char *base;
    int rank, size, banks;
    int64_t chunk, piece;
    Word *blocks, *records, *headers;
    char *slots, *results;
    int (*bells)[2];
    uint64_t free_below;     /* the slots of all steps below are known to be free */
    _Atomic int interrupted; /* `drive` returns soon */
    unsigned spins;          /* before a waiting run offers its core */
} Segment;

static PyTypeObject *Segment_Type, *Program_Type, *Run_Type;

static inline Word *block_of(const Segment *s, int rank) { return s->blocks + rank * BLOCK_WORDS; }
static inline Word *record_of(const Segment *s, int rank, uint64_t step)
{
    return s->records + ((step % (uint64_t)s->banks) * (uint64_t)s->size + (uint64_t)rank) * RECORD_WORDS;
}
static inline uint64_t acquired(Word *word) { return atomic_load_explicit(word, memory_order_acquire); }
static inline void released(Word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_release); }

/* Wake the ranks that are asleep. The fence stands between the flag just raised and the look at the sleepers, as the
 * sleepers have one between their word and their last look at the flags. */
static void ring_all(Segment *s)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = 0; rank < s->size; rank++) {
        if (rank == s->rank) continue;
        for (int bell = 0; bell < 2; bell++) {
            Word *asleep = block_of(s, rank) + SLEEPING_LOOP + bell;
            uint64_t one = 1;
            if (atomic_load_explicit(asleep, memory_order_relaxed) && atomic_exchange(asleep, 0)
                && write(s->bells[rank][bell], &one, sizeof one) < 0) {} /* full: it rings already */
        }
    }
}

/* ---- programs ----------------------------------------------------------------------------------------------------- */

/* in the order of the enumerations of programs.py */
enum { IN_VECTOR, IN_SLOT, IN_RESULT, IN_RECORD, IN_HEADER, SPACES };
enum { WAIT_NOTHING, WAIT_FREE, WAIT_POSTED, WAIT_REDUCED, WAITS };
enum { SIGNAL_NOTHING, SIGNAL_POST, SIGNAL_RESULT, SIGNAL_FINISH, SIGNALS };

typedef struct {
    int space, index; /* index: of a vector, or a rank */
    int64_t offset, stride;
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
} Program;

static void Program_dealloc(PyObject *self)
{
    Program *p = (Program *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int k = 0; p->stages && k < p->stage_count; k++) {
        Stage *stage = &p->stages[k];
        for (int j = 0; stage->actions && j < stage->action_count; j++) free(stage->actions[j].sources);
        free(stage->actions), free(stage->waited);
    }
    free(p->stages);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Item i of a sequence as a number from `least` to `most`; -1 with an exception otherwise, also if there was one. */
static int64_t number_at(PyObject *sequence, Py_ssize_t i, int64_t least, int64_t most, const char *name)
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

static void *zeroed(Py_ssize_t count, size_t size)
{
    void *memory = calloc(count ? (size_t)count : 1, size);
    if (!memory) PyErr_NoMemory();
    return memory;
}

/* (space, index, offset, stride), checked so that every access of `bytes` bytes lies inside */
static int parse_ref(const Segment *s, Program *p, PyObject *t, const Action *action, Ref *ref)
{
    ref->space = (int)number_at(t, 0, 0, SPACES - 1, "space");
    ref->index = (int)number_at(t, 1, 0, ref->space == IN_VECTOR ? 1 << 20 : s->size - 1, "index");
    ref->offset = number_at(t, 2, 0, INT64_MAX / 4, "offset");
    ref->stride = number_at(t, 3, 0, INT64_MAX / 4, "stride");
    if (PyErr_Occurred()) return -1;
    if (ref->space == IN_VECTOR) {
        if (ref->index >= p->vector_count) p->vector_count = ref->index + 1;
        return 0;
    }
    int64_t room = ref->space == IN_SLOT   ? s->chunk
                   : ref->space == IN_RESULT ? s->piece
                   : ref->space == IN_RECORD ? (RECORD_WORDS - INLINE) * 8
                                             : (int64_t)s->size * HEADER_WORDS * 8;
    int64_t bytes = action->total < action->most ? action->total : action->most;
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
    action->total = number_at(t, 2, 0, INT64_MAX / 4, "total");
    action->stride = number_at(t, 3, 0, INT64_MAX / 4, "stride");
    action->most = number_at(t, 4, 0, INT64_MAX / 4, "most");
    action->reduction = (int)number_at(t, 5, -1, 1 << 20, "reduction");
    if (PyErr_Occurred()) return -1;
    if (action->reduction >= p->kernel_count) p->kernel_count = action->reduction + 1;
    PyObject *to = PySequence_GetItem(t, 0), *sources = PySequence_GetItem(t, 1);
    Py_ssize_t count = to && sources ? PySequence_Size(sources) : -1;
    int failed = count < 0 || parse_ref(s, p, to, action, &action->to);
    if (!failed && (count < 1 || count > (action->reduction < 0 ? 1 : s->size))) {
        PyErr_Format(PyExc_ValueError, "an action of %zd sources", count);
        failed = 1;
    }
    if (!failed) failed = !(action->sources = zeroed(count, sizeof(Ref)));
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
    stage->wait = (int)number_at(t, 0, 0, WAITS - 1, "wait");
    stage->signal = (int)number_at(t, 3, 0, SIGNALS - 1, "signal");
    if (PyErr_Occurred()) return -1;
    PyObject *ranks = PySequence_GetItem(t, 1), *actions = PySequence_GetItem(t, 2);
    Py_ssize_t waited = ranks ? PySequence_Size(ranks) : -1, count = actions ? PySequence_Size(actions) : -1;
    int failed = waited < 0 || count < 0 || waited > s->size || count > 1 << 20;
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many ranks or actions");
    if (!failed) failed = !(stage->waited = zeroed(waited, sizeof(int))) || !(stage->actions = zeroed(count, sizeof(Action)));
    stage->waited_count = failed ? 0 : (int)waited, stage->action_count = failed ? 0 : (int)count;
    for (int k = 0; k < stage->waited_count && !failed; k++) {
        stage->waited[k] = (int)number_at(ranks, k, 0, s->size - 1, "rank");
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

/* program(steps, stages) */
static PyObject *Segment_program(PyObject *self, PyObject *args)
{
    unsigned int steps;
    PyObject *stages;
    if (!PyArg_ParseTuple(args, "IO", &steps, &stages)) return NULL;
    Py_ssize_t count = PySequence_Size(stages);
    if (count < 0) return NULL;
    if (count < 1 || count > 16) return PyErr_Format(PyExc_ValueError, "a program has 1 to 16 stages, not %zd", count);
    Program *p = (Program *)PyType_GenericAlloc(Program_Type, 0);
    if (!p) return NULL;
    p->steps = steps;
    p->stages = zeroed(count, sizeof(Stage));
    int failed = !p->stages;
    p->stage_count = failed ? 0 : (int)count;
    for (int k = 0; k < p->stage_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(stages, k);
        failed = !item || parse_stage((Segment *)self, p, item, &p->stages[k]);
        Py_XDECREF(item);
    }
    if (!failed) return (PyObject *)p;
    Py_DECREF(p);
    return NULL;
}

/* ---- runs --------------------------------------------------------------------------------------------------------- */

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
    uint64_t first, code, numel, mark;
    Reduction *reductions;
    int wrong_rank, running;
    uint64_t wrong_step;
    uint32_t *done; /* iterations, by stage */
    Vector *vectors;
    void **sources; /* of one reduction */
} Run;

enum { STUCK, MOVED, DONE, WRONG };

static inline char *place(const Run *run, const Ref *ref, uint32_t i)
{
    const Segment *s = run->segment;
    uint64_t step = run->first + i, at = (step % (uint64_t)s->banks) * (uint64_t)s->size + (uint64_t)ref->index;
    switch (ref->space) {
    case IN_SLOT: return s->slots + at * (uint64_t)s->chunk + ref->offset;
    case IN_RESULT: return s->results + at * (uint64_t)s->piece + ref->offset;
    case IN_RECORD: return (char *)(s->records + at * RECORD_WORDS + INLINE) + ref->offset;
    case IN_HEADER: return (char *)(s->headers + at * (uint64_t)s->size * HEADER_WORDS) + ref->offset;
    default: return run->vectors[ref->index].address + ref->offset + (int64_t)i * ref->stride;
    }
}

/* Copy n bytes between one piece of memory and a vector in several pieces, from its byte `start` on. */
static void copy_pieces(const Vector *vector, int64_t start, char *memory, int64_t n, int into_vector)
{
    int low = 0, high = vector->count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (vector->pieces[middle].start <= start) low = middle;
        else high = middle;
    }
    for (int k = low; n > 0; k++) {
        const Piece *piece = &vector->pieces[k];
        int64_t end = k + 1 < vector->count ? vector->pieces[k + 1].start : vector->nbytes;
        int64_t here = end - start < n ? end - start : n;
        char *at = piece->address + (start - piece->start);
        if (into_vector) copy(at, memory, (size_t)here);
        else copy(memory, at, (size_t)here);
        start += here, memory += here, n -= here;
    }
}

static void act(const Run *run, const Action *action, uint32_t i)
{
    int64_t n = action->total - (int64_t)i * action->stride;
    if (n > action->most) n = action->most;
    if (n <= 0) return;
    if (action->reduction >= 0) {
        const Reduction *r = &run->reductions[action->reduction];
        for (int k = 0; k < action->count; k++) run->sources[k] = place(run, &action->sources[k], i);
        r->kernel(place(run, &action->to, i), run->sources, action->count, (size_t)(n / r->item), r->divisor);
        return;
    }
    const Ref *to = &action->to, *from = &action->sources[0];
    const Vector *target = to->space == IN_VECTOR ? &run->vectors[to->index] : NULL;
    const Vector *source = from->space == IN_VECTOR ? &run->vectors[from->index] : NULL;
    if (target && target->pieces && source && source->pieces) { /* both in pieces: by the pieces of the source */
        int64_t start = from->offset + (int64_t)i * from->stride, at = to->offset + (int64_t)i * to->stride;
        for (int k = 0; k < source->count && n > 0; k++) {
            int64_t end = k + 1 < source->count ? source->pieces[k + 1].start : source->nbytes;
            if (end <= start) continue;
            int64_t here = end - start < n ? end - start : n;
            char *memory = source->pieces[k].address + (start - source->pieces[k].start);
            copy_pieces(target, at, memory, here, 1);
            start += here, at += here, n -= here;
        }
    } else if (target && target->pieces) {
        copy_pieces(target, to->offset + (int64_t)i * to->stride, place(run, from, i), n, 1);
    } else if (source && source->pieces) {
        copy_pieces(source, from->offset + (int64_t)i * from->stride, place(run, to, i), n, 0);
    } else {
        char *there = place(run, to, i), *here = place(run, from, i);
        if (there == here) return; /* in place */
        if (target && action->total >= STREAM_BYTES) copy_past_caches(there, here, (size_t)n);
        else copy(there, here, (size_t)n);
    }
}

/* Whether the flags are there that a stage waits for in iteration i; -1 if a rank takes part in something else. */
static int ready(Run *run, const Stage *stage, uint32_t i)
{
    Segment *s = run->segment;
    uint64_t step = run->first + i;
    switch (stage->wait) {
    case WAIT_FREE:
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
            if (record[CODE] != run->code || record[NUMEL] != run->numel || record[MARK] != run->mark) {
                run->wrong_rank = stage->waited[k], run->wrong_step = step;
                return -1;
            }
        }
        return 1;
    case WAIT_REDUCED:
        for (int k = 0; k < stage->waited_count; k++)
            if (acquired(block_of(s, stage->waited[k]) + REDUCED) <= step) return 0;
        return 1;
    default: return 1;
    }
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
        atomic_store_explicit(record + MARK, run->mark, memory_order_relaxed);
        released(record + SEQ, step + 1);
        break;
    }
    case SIGNAL_RESULT: released(block_of(s, s->rank) + REDUCED, step + 1); break;
    case SIGNAL_FINISH: released(block_of(s, s->rank) + FINISHED, step + 1); break;
    default: return;
    }
    ring_all(s);
}

/* Take each stage on by one iteration, if it is ready and the stage before it is ahead. */
static int pass(Run *run)
{
    const Program *p = run->program;
    int moved = STUCK;
    uint32_t limit = p->steps;
    for (int k = 0; k < p->stage_count; k++) {
        const Stage *stage = &p->stages[k];
        uint32_t i = run->done[k];
        if (i < limit) {
            int is_ready = ready(run, stage, i);
            if (is_ready < 0) return WRONG;
            if (is_ready) {
                for (int a = 0; a < stage->action_count; a++) act(run, &stage->actions[a], i);
                raise_flag(run, stage, i);
                run->done[k] = ++i;
                moved = MOVED;
            }
        }
        limit = i;
    }
    if (limit == p->steps) return DONE;
    return p->steps == 1 ? STUCK : moved; /* of one step, all that is ready has been done */
}

static int64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Go on until the run is done, has waited for `patience` in vain, or the segment is interrupted. The core is offered to
 * other threads every `stretch` nanoseconds, and while the run waits. */
static int drive(Run *run, int64_t patience, int64_t stretch)
{
    int64_t until = 0, offered = nanoseconds();
    unsigned waits = 0;
    for (;;) {
        int result = pass(run);
        if (result == DONE || result == WRONG) return result;
        if (atomic_load_explicit(&run->segment->interrupted, memory_order_relaxed)) return result;
        int64_t now = nanoseconds();
        if (result == MOVED) {
            until = 0, waits = 0;
            if (now - offered > stretch) {
                sched_yield();
                offered = nanoseconds();
            }
            continue;
        }
        if (!until) until = now + patience;
        else if (now >= until) return STUCK;
        for (int k = 0; k < 16; k++) RELAX();
        if (++waits > run->segment->spins) { /* the late rank may need this core */
            sched_yield();
            offered = now;
        }
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
        result = pass(run);
    } else {
        Py_BEGIN_ALLOW_THREADS
        result = pass(run);
        Py_END_ALLOW_THREADS
    }
    run->running = 0;
    if (result == DONE) return NULL;
    if (result == WRONG) return wrong(run);
    return PyBool_FromLong(result == MOVED);
}

/* drive(patience, stretch) -> whether it is done; seconds */
static PyObject *Run_drive(PyObject *self, PyObject *args)
{
    Run *run = (Run *)self;
    double patience, stretch;
    int result;
    if (!PyArg_ParseTuple(args, "dd", &patience, &stretch) || begin(run)) return NULL;
    int64_t ns = stretch < 1e9 ? (int64_t)(stretch * 1e9) : INT64_MAX;
    Py_BEGIN_ALLOW_THREADS
    result = drive(run, (int64_t)(patience * 1e9), ns);
    Py_END_ALLOW_THREADS
    run->running = 0;
    if (result == WRONG) return wrong(run);
    return PyBool_FromLong(result == DONE);
}

static void Run_dealloc(PyObject *self)
{
    Run *run = (Run *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (run->vectors)
        for (int k = 0; k < run->program->vector_count; k++) free(run->vectors[k].pieces);
    free(run->vectors), free(run->reductions), free(run->done), free(run->sources);
    Py_XDECREF((PyObject *)run->segment), Py_XDECREF((PyObject *)run->program), Py_XDECREF(run->mismatch);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
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
    int failed = count < 0 || !(vector->pieces = zeroed(count + 1, sizeof(Piece)));
    vector->count = failed ? 0 : (int)count;
    for (Py_ssize_t k = 0; k <= count && !failed; k++) {
        vector->pieces[k].start = number_at(starts, k, 0, INT64_MAX / 4, "start");
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
    int dtype = (int)number_at(t, 0, 0, DTYPES - 1, "dtype");
    int operator = (int)number_at(t, 1, 0, OPERATORS - 1, "operator");
    reduction->divisor = (int)number_at(t, 2, 0, INT32_MAX, "divisor");
    if (PyErr_Occurred()) return -1;
    reduction->kernel = kernels[dtype][operator], reduction->item = item_bytes[dtype];
    if (reduction->kernel) return 0;
    PyErr_Format(PyExc_ValueError, "no kernel for %R", t);
    return -1;
}

/* The vectors of reductions must be in one piece. */
static int check_vectors(const Run *run)
{
    for (int k = 0; k < run->program->stage_count; k++) {
        const Stage *stage = &run->program->stages[k];
        for (int j = 0; j < stage->action_count; j++) {
            const Action *action = &stage->actions[j];
            for (int i = -1; i < action->count && action->reduction >= 0; i++) {
                const Ref *ref = i < 0 ? &action->to : &action->sources[i];
                if (ref->space != IN_VECTOR || !run->vectors[ref->index].pieces) continue;
                PyErr_Format(PyExc_ValueError, "vector %d is in pieces and cannot be reduced", ref->index);
                return -1;
            }
        }
    }
    return 0;
}

/* run(program, first, (code, numel, mark), vectors, reductions, mismatch) */
static PyObject *Segment_run(PyObject *self, PyObject *args)
{
    PyObject *program, *vectors, *reductions, *mismatch;
    unsigned long long first, code, numel, mark;
    if (!PyArg_ParseTuple(args, "OK(KKK)OOO", &program, &first, &code, &numel, &mark, &vectors, &reductions, &mismatch)) return NULL;
    if (Py_TYPE(program) != Program_Type) return PyErr_Format(PyExc_TypeError, "program must be a Program, got %R", program);
    Program *p = (Program *)program;
    if (PySequence_Size(vectors) < p->vector_count || PySequence_Size(reductions) < p->kernel_count)
        return PyErr_Format(PyExc_ValueError, "the program needs %d vectors and %d reductions, got %zd and %zd", p->vector_count,
                            p->kernel_count, PySequence_Size(vectors), PySequence_Size(reductions));
    Run *run = (Run *)PyType_GenericAlloc(Run_Type, 0);
    if (!run) return NULL;
    Py_INCREF(self), Py_INCREF(program), Py_INCREF(mismatch);
    run->segment = (Segment *)self, run->program = p, run->mismatch = mismatch;
    run->first = first, run->code = code, run->numel = numel, run->mark = mark;
    run->done = zeroed(p->stage_count, sizeof(uint32_t));
    run->vectors = zeroed(p->vector_count, sizeof(Vector));
    run->reductions = zeroed(p->kernel_count, sizeof(Reduction));
    run->sources = zeroed(p->most_sources, sizeof(void *));
    int failed = !run->done || !run->vectors || !run->reductions || !run->sources;
    for (int k = 0; k < p->vector_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(vectors, k);
        failed = !item || parse_vector(item, &run->vectors[k]);
        Py_XDECREF(item);
    }
    for (int k = 0; k < p->kernel_count && !failed; k++) {
        PyObject *item = PySequence_GetItem(reductions, k);
        failed = !item || parse_reduction(item, &run->reductions[k]);
        Py_XDECREF(item);
    }
    if (!failed && !check_vectors(run)) return (PyObject *)run;
    Py_DECREF(run);
    return NULL;
}

/* ---- Segment ------------------------------------------------------------------------------------------------------ */

static void Segment_dealloc(PyObject *self)
{
    Segment *s = (Segment *)self;
    PyTypeObject *type = Py_TYPE(self);
    free(s->bells);
    PyBuffer_Release(&s->memory);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Segment(memory, rank, size, banks, chunk, piece, (records, headers, slots, results), bells) */
static PyObject *Segment_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
    PyObject *memory, *bells;
    int rank, size, banks;
    long long chunk, piece, records, headers, slots, results;
    if (!PyArg_ParseTuple(args, "OiiiLL(LLLL)O", &memory, &rank, &size, &banks, &chunk, &piece, &records, &headers, &slots,
                          &results, &bells))
        return NULL;
    Segment *s = (Segment *)PyType_GenericAlloc(type, 0);
    if (!s) return NULL;
    if (PyObject_GetBuffer(memory, &s->memory, PyBUF_WRITABLE)) goto fail;
    s->base = s->memory.buf;
    s->rank = rank, s->size = size, s->banks = banks, s->chunk = chunk, s->piece = piece;
    if (size < 1 || rank < 0 || rank >= size || banks < 1 || chunk < 1 || piece < 1 || (uintptr_t)s->base % 8 || records % 8
        || records < (long long)size * BLOCK_WORDS * 8
        || headers < records + (long long)banks * size * RECORD_WORDS * 8
        || slots < headers + (long long)banks * size * size * HEADER_WORDS * 8 || results < slots + banks * size * chunk
        || results + banks * size * piece > s->memory.len) {
        PyErr_SetString(PyExc_ValueError, "the layout does not fit the memory");
        goto fail;
    }
    s->blocks = (Word *)s->base;
    s->records = (Word *)(s->base + records), s->headers = (Word *)(s->base + headers);
    s->slots = s->base + slots, s->results = s->base + results;
    s->free_below = (uint64_t)banks;
    s->spins = size <= sysconf(_SC_NPROCESSORS_ONLN) ? 100 : 0;
    if (!(s->bells = zeroed(size, sizeof *s->bells))) goto fail;
    for (int r = 0; r < size; r++) {
        PyObject *pair = PySequence_GetItem(bells, r);
        for (int bell = 0; pair && bell < 2; bell++) s->bells[r][bell] = (int)number_at(pair, bell, -1, INT32_MAX, "bell");
        Py_XDECREF(pair);
        if (PyErr_Occurred()) goto fail;
    }
    return (PyObject *)s;
fail:
    Py_DECREF(s);
    return NULL;
}

static PyObject *Segment_interrupt(PyObject *self, PyObject *Py_UNUSED(none))
{
    atomic_store(&((Segment *)self)->interrupted, 1);
    Py_RETURN_NONE;
}

static PyObject *Segment_resume(PyObject *self, PyObject *Py_UNUSED(none))
{
    atomic_store(&((Segment *)self)->interrupted, 0);
    Py_RETURN_NONE;
}

/* ---- the module --------------------------------------------------------------------------------------------------- */

static PyObject *itself(PyObject *self)
{
    Py_INCREF(self);
    return self;
}

static PyMethodDef segment_methods[] = {
    {"program", Segment_program, METH_VARARGS, "Compile a program for this segment."},
    {"run", Segment_run, METH_VARARGS, "A run of a program: an iterator, and `drive`."},
    {"interrupt", Segment_interrupt, METH_NOARGS, "Make `drive` return soon. From any thread."},
    {"resume", Segment_resume, METH_NOARGS, "End an interruption."},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef run_methods[] = {
    {"drive", Run_drive, METH_VARARGS, "Go on without the GIL; returns whether the run is done."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot segment_slots[] = {
    {Py_tp_new, (void *)Segment_new}, {Py_tp_dealloc, (void *)Segment_dealloc}, {Py_tp_methods, segment_methods}, {0, NULL}};
static PyType_Slot program_slots[] = {{Py_tp_dealloc, (void *)Program_dealloc}, {0, NULL}};
static PyType_Slot run_slots[] = {{Py_tp_dealloc, (void *)Run_dealloc}, {Py_tp_iter, (void *)itself},
    {Py_tp_iternext, (void *)Run_next}, {Py_tp_methods, run_methods}, {0, NULL}};
static PyType_Spec segment_spec = {"_core.Segment", sizeof(Segment), 0, Py_TPFLAGS_DEFAULT, segment_slots};
static PyType_Spec program_spec = {
    "_core.Program", sizeof(Program), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, program_slots};
static PyType_Spec run_spec = {"_core.Run", sizeof(Run), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, run_slots};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The native executor of collectives in shared memory.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *m = PyModule_Create(&module);
    if (!m) return NULL;
    Segment_Type = (PyTypeObject *)PyType_FromSpec(&segment_spec);
    Program_Type = (PyTypeObject *)PyType_FromSpec(&program_spec);
    Run_Type = (PyTypeObject *)PyType_FromSpec(&run_spec);
    if (!Segment_Type || !Program_Type || !Run_Type || PyModule_AddObjectRef(m, "Segment", (PyObject *)Segment_Type)) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
