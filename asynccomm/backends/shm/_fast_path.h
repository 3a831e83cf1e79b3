/* The objects that _fast_path.c, _scopes.c and _windows.c share. */
#ifndef ASYNCCOMM_FAST_PATH_H
#define ASYNCCOMM_FAST_PATH_H

#include "_rings.h"

#define MIX 0x9E3779B97F4A7C15u /* as in board.py */
#define MOST_ARGS 8
#define MOST_TENSORS 256
#define MOST_DIMS 8
#define MOST_WORDS 1024
#define MOST_CONSTANTS 24
#define STALL_NS 1000000 /* the longest wait inside a call, and the longest part of an exchange that others make longer */
#define SWITCH_NS 1000  /* an offered core that comes back sooner has run no other thread */
#define ENTRIES 1024    /* a power of two */
#define CODES 16        /* places of a table */
#define SEEN 128        /* the same */
#define SEEN_WAYS 8     /* hashes in one place: calls in turns do not push out each other */
#define MOST_POSTED 64  /* messages */
#define MOST_PASSED 32  /* frames between the user's and the call */

/* ---- tensors, by torch's functions in C and C++: torch_functions.py ------------------------------------------------ */

enum { MOST_DTYPES = 64 };

/* torch_functions.TorchFunctions; all take the address of an at::Tensor, and those that give a value return 0, or an error */
typedef struct {
    int64_t place;
    int32_t cpu, strided;            /* what a tensor's device_type and layout must be */
    uint8_t item_bytes[MOST_DTYPES]; /* by dtype; 0: it is not for this path */
    _Bool (*is_negated)(void *tensor);
    int32_t (*device_type)(void *tensor, int32_t *type), (*layout)(void *tensor, int32_t *layout), (*dtype)(void *tensor, int32_t *dtype),
        (*ndim)(void *tensor, int64_t *ndim), (*shape)(void *tensor, int64_t **shape), (*strides)(void *tensor, int64_t **strides),
        (*storage_offset)(void *tensor, int64_t *offset), (*storage_bytes)(void *tensor, int64_t *bytes), (*data)(void *tensor, char **data);
} Questions;

/* The lowest byte of the first word of an argument in a key; the first word of all is the address of the method's check, or
 * SEVERAL for a key of the serial numbers of calls. */
enum { OF_TENSOR = 1, OF_LIST, OF_SIZES, OF_INTEGER, OF_CONSTANT, SEVERAL };

/* Numbers that are equal if two calls need the same program. */
typedef struct {
    uint64_t words[MOST_WORDS];
    int count, lists; /* lists: whether one is among the arguments */
} Key;

/* The pieces of a program's vector: where each lies, and where it starts in the vector. */
typedef struct {
    int count;
    int *tensors;                /* -1: `offsets` has an address */
    int64_t *offsets, *starts; /* starts: one more, the bytes of the vector */
} Places;

typedef struct {
    char *data[MOST_TENSORS];
    int64_t nbytes[MOST_TENSORS];
    int64_t offset[MOST_TENSORS], reach[MOST_TENSORS]; /* in the storage, in elements; the end, in bytes */
    int count;
} Tensors;

/* The arguments of a call, with tuples in place of lists, which other threads may change. */
typedef struct {
    PyObject *items[MOST_ARGS];
    int count;
} Arguments;

/* What a kind of call comes to. */
typedef struct {
    uint64_t *words; /* the key */
    int word_count;
    PyObject *make; /* that the key names by its address; kept alive; NULL for calls that a scope has held */
    PyObject *dtypes; /* a tuple, by tensor; NULL as `make` */
    PyObject *op, *kernels, *owners; /* owners: of memory that is part of the recipe */
    PyObject *nbytes;                /* an int, for the statistics */
    long long size;                  /* the same */
    uint64_t serial;                 /* names the entry in keys of several calls */
    int64_t weight; /* bytes that count for the limit of a kind */
    int kind; /* calls of one kind that a scope holds travel as one; 0: this one travels alone; -1: Python holds it */
    Program *program; /* NULL: a message, or this kind is not for the fast path */
    uint64_t code, numel;
    int large;       /* nothing of it is done in the call */
    int peer, sends; /* of a message; -1 otherwise */
    uint32_t tag;
    int result, vectors; /* number of the argument that is the result, -1: None */
    Places *places; /* by vector */
    Run *run; /* for the next call */
    int holds; /* of the table, and of calls: a destructor may make further calls, which empty the table */
} Entry;

/* A long message that is not done: its number, whether the receiver is clear for it, and the bytes that have moved. */
typedef struct {
    uint32_t ident;
    int cleared;
    uint64_t moved;
} BegunMessage;

/* A wait for late ranks inside the call, for a moment. The time for which other threads get the core counts up to STALL_NS. */
typedef struct {
    int64_t until, last; /* until: 0: not begun */
    unsigned waits;
} Spin;

/* Calls that a scope holds: _scopes.c */
typedef struct {
    PyObject *queues;           /* a dict: the DeferredQueue by the task or thread that is in a scope */
    PyObject *works;            /* a dict: the bytes by the Work in flight, without calls that scopes hold */
    PyObject *settled, *overdue; /* of a Work */
    PyObject *note;             /* called with a queue and a Work that has the first deadline of the queue */
    PyObject *learn, *adopt;    /* as those of the FastPath, for several calls */
    PyObject *storage_of;       /* Tensor.untyped_storage */
    long long fused_limit;      /* bytes of the calls that travel as one */
} Scopes;

/* A tensor of a held call. */
typedef struct {
    PyObject *storage; /* owned */
    char *data;
    int64_t nbytes, offset, reach; /* offset, reach: as of Tensors */
} Held;

/* A call that is held: until its scope sends it, or a message until the other rank comes. */
typedef struct {
    PyObject_HEAD
    Entry *entry;
    Arguments arguments; /* owned: the method's check and its arguments */
    WorkState *work;
    int count; /* of tensors */
    Held *tensors, few[2]; /* few: most calls have no more */
    BegunMessage begun;    /* of a send */
} HeldCall;

/* A tensor of a call, and where it lay. */
typedef struct {
    char *start, *end;
} Span;

typedef struct {
    DirectPath base;
    Segment *segment;
    RankPosition *state;
    CallCounts *counts;
    PyTypeObject *work_type;
    PyObject *mailbox, *mismatch, *learn, *submit, *adopt, *broken, *call_site, *files, *passed_files, *notes, *note, *profiler, *driven, *queue, *inbox;
    PyObject *driver, *arm; /* of posted messages: the backend; called when one is posted */
    PyObject *waited;       /* a set: the Works that threads wait for, which Python drives */
    PyObject *waiters;      /* a list: tasks that wait until some operation is done */
    PyObject *deciding;     /* called: whether a thread is about to settle a Work */
    const WorkState *advanced; /* which a task is about to wait for, as it does not come soon; only compared */
    CallLog *recent;
    ReentrantLock *lock;
    Questions questions;
    PyTypeObject *tensor, *parameter;
    PyObject *sites[CODES]; /* the places of calls, by code and instruction */
    long site_instructions[CODES];
    PyObject *codes[CODES], *passed[CODES]; /* of the user, that have called, and between them and the call; by their addresses */
    uint64_t seen[SEEN][SEEN_WAYS]; /* hashes of keys with lists, by themselves; the newest first */
    Scopes scopes;
    uint64_t serials;
    PyObject *values, *constants[MOST_CONSTANTS]; /* the constants are those of the tuple `values` */
    int constant_count;
    int64_t short_bytes;
    HeldCall *unsettled[MOST_POSTED]; /* posted messages that are done */
    int unsettled_count;
    float making;  /* nanoseconds that this rank takes for each byte of a SHORT, 0 if not known */
    int sends_too; /* whether it has sent a message of more than LEAST_LOAN bytes since it last received one */
    Span *apart; /* of the tensors that a scope has sent last, in their order; no two of them share memory */
    int apart_count;
    Entry *entries[ENTRIES];
    int known;
    int refused; /* the last call of a method in C was not for this path: the next one of `submit`, most likely the same, goes on */
    int64_t patience;                  /* nanoseconds */
    double short_wait;                 /* seconds: after a longer wait, the next one is no spin */
} FastPath;

extern PyTypeObject *Core_FastPath;

/* ---- _fast_path.c ------------------------------------------------------------------------------------------------- */

int core_is_tensor(const FastPath *f, PyObject *object);

/* Whether an argument is a tuple of integers, as far as its first item shows. */
int core_is_sizes(PyObject *argument);

/* The number of tensors in an argument, and one of them, borrowed. */
Py_ssize_t core_tensors_in(const FastPath *f, PyObject *argument);
PyObject *core_tensor_in(PyObject *argument, Py_ssize_t k);

/* Append a tensor to the key, and take its address. 1: done; 0: it is unusual. Runs no Python code. */
int core_add_tensor(const FastPath *f, PyObject *tensor, Key *key, Tensors *tensors);

/* Whether a tensor has the memory that it had at a call. Runs no Python code. */
int core_is_at(const FastPath *f, PyObject *tensor, const Held *held);

/* Pass a little time; 0 if there was enough of it, or if the last wait, of `waited` seconds, was too long for another spin. */
int core_goes_on(const FastPath *f, double waited, Spin *spin);

/* The user's place of the call: (code, instruction); None if it is not recorded. `inner`: frames of Python code between the user's
 * and C, 0 or 1. */
PyObject *core_site_of(FastPath *f, int inner);

/* Whether the comm takes calls of this thread without more ado; -1 with an exception. */
int core_is_open(FastPath *f);

/* Whether the comm's loop runs in this thread; -1 with an exception. */
int core_is_in_loop(const FastPath *f);

/* Count a call that is done; its number. */
long long core_count(const FastPath *f, int p2p, long long nbytes);

/* The Work of a call that is done, which is kept for diagnoses; NULL with an exception. */
WorkState *core_finished_work(const FastPath *f, PyObject *op, long long seq, PyObject *result, PyObject *site, double started);


PyObject *core_tuple_of(PyObject *const *items, Py_ssize_t n);

/* The place of the entry of a key. */
Entry **core_entry_of(FastPath *f, const uint64_t *words, int count);

/* Have Python make a recipe: learn(given). Returns the entry, NULL with an exception. */
Entry *core_learn(FastPath *f, PyObject *learn, PyObject *given, const uint64_t *words, int count, int tensors, Py_ssize_t arguments);

void core_release_entry(Entry *entry);

/* Give an entry a run, if it has none; -1 with an exception. */
int core_prepare(const FastPath *f, Entry *entry);

/* Whether a call may be sent from here now, -1 with an exception; if so, the comm's lock is taken. */
int core_may_send(FastPath *f);

/* Give the run of an entry the memory of tensors at these addresses. */
void core_place(const Entry *entry, char *const *data);

/* Begin the collective of an entry as number `number`, on tensors at these addresses, and run it as far as possible; one that is
 * large not at all. */
int core_start(FastPath *f, Entry *entry, char *const *data, long long number);

/* Note a call that is done for the watchers of the comm, if there are any, and let them have the notes when there are
 * enough. May run Python code; raises nothing. */
void core_note(const FastPath *f, const WorkState *work);

/* A Work of a call, not settled, or NULL with an exception. */
WorkState *core_new_work(const FastPath *f, PyObject *op, PyObject *result, PyObject *site, double started);

/* A message that has begun, as Python adopts it; NULL with an exception. */
PyObject *core_begun_message(const BegunMessage *message);

/* Break the comm because of the current exception: a run has begun that nobody goes on with. */
void core_break_comm(FastPath *f);

/* ---- _messages.c -------------------------------------------------------------------------------------------------- */

/* Receive a short message, of which `copied` bytes are here already, if it is the one that `entry` is for: DONE or STUCK. */
int core_receive_short(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, const Frame *frame, const char *payload,
                       char *data, uint64_t nbytes, uint64_t copied);

/* Note how long it took to receive a short message and which way, for the sender to choose the faster one. `whole`: whether it
 * was a SHORT that was there when the time began. */
void core_received_short(FastPath *f, LinkState *link, Ring *ring, int read, int whole, int64_t took, uint64_t nbytes);

/* Claim what a frame has, if it is a LOAN: false if the sender has withdrawn that. */
int core_claim(const Frame *frame, const char *payload);

/* Send a long message, for which the receiver is clear: DONE, or MOVED as core_send_message. */
int core_send_cleared(const FastPath *f, const Entry *entry, char *data, uint64_t nbytes, BegunMessage *begun);

/* Receive an offered message, or a claimed one, by single copy, if it is the one that `entry` is for: DONE; STUCK: it is left as it is. */
int core_read_offered(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, const Frame *offer, const char *payload,
                      char *data, uint64_t nbytes);

/* Send or receive a message: DONE; STUCK: it is not for this path; MOVED: it has begun as `begun`, and Python adopts it;
 * LATE: it may be posted, a send as `begun`. */
int core_send_message(FastPath *f, const Entry *entry, char *data, uint64_t nbytes, BegunMessage *begun);
int core_receive_message(FastPath *f, const Entry *entry, char *data, uint64_t nbytes, BegunMessage *begun);

/* ---- _posted.c ---------------------------------------------------------------------------------------------------- */

/* Whether messages from or to a peer are posted here; or any peer, for -1. */
int core_has_posted(const FastPath *f, int peer);
int core_has_posted_sends(const FastPath *f);

/* Take the next frame for a message that is posted: DONE, and the message is to be settled; STUCK: none has come; ASKED:
 * Python has to. Runs no Python code. */
int core_progress_posted(FastPath *f);

/* Settle the posted messages that are done; -1 with an exception. */
int core_settle_posted(FastPath *f);

/* Post a receive, or a send that has begun: its Work; NULL: it is not for this path, or an exception. The comm's lock is held. */
PyObject *core_post_message(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments, PyObject *result,
                            PyObject *site, double started, const BegunMessage *begun);

/* As of DirectPath. */
int core_advance(PyObject *self, WorkState *work);

/* before_await(work), before_block(work): a Driver of Works */
PyObject *FastPath_before_await(PyObject *self, PyObject *work);
PyObject *FastPath_before_block(PyObject *self, PyObject *work);

/* ---- _scopes.c ---------------------------------------------------------------------------------------------------- */

HeldCall *core_new_held(const FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments);

/* Give a held call a Work, which is not settled and not in flight yet; -1 with an exception. */
int core_give_work(const FastPath *f, HeldCall *held, PyObject *driver, PyObject *result, PyObject *site, double started);

/* Whether all tensors of a call still have their memory. Runs no Python code. */
int core_has_memory(const FastPath *f, const HeldCall *call);

/* The queue of the scope that the caller is in, or NULL; as hold_arguments. */
int core_queue_of(FastPath *f, HeldCalls **queue);

/* Settle a call that was held, and is done: 1; 0: Python has done so, as something waits for it; -1 with an exception.
 * `deciding`: whether another thread is about to settle a Work; -1: not known, as Python code has run. */
int core_settle(FastPath *f, WorkState *work, double now, int *deciding);

/* Hold a call in `queue`: 1 with its Work or an exception, 0: Python holds it. */
int core_hold(FastPath *f, Entry *entry, const Tensors *tensors, const Arguments *arguments, PyObject *result, PyObject *site,
              double started, HeldCalls *queue, PyObject **work);

/* flush(items) -> True, or None: Python sends them */
PyObject *FastPath_flush(PyObject *self, PyObject *items);

int core_add_scopes(PyObject *module);

/* ---- _windows.c ---------------------------------------------------------------------------------------------------- */

int core_add_windows(PyObject *module);

#endif
