/* Messages from call to result, as endpoint.py has them: a short one in one frame, a long one by OFFER, CLEAR and DATA.
 *
 * They take this path while no other message of the comm is pending in Python. Every wait is a spin; when it is over, Python
 * adopts a long message as it is, and a short one has not begun; a receive may be posted (_posted.c).
 *
 * A rank that sends and receives long messages at once, as in a ring, reads the memory of the sender where it can (single
 * copy); the CLEAR says so. The OFFER has the address. A rank that only receives does what was faster so far: on cores that share
 * a cache, DATA are, which both ranks copy; on others, reading is. For the same reason a short message may go as a LOAN.
 */
#include "_fast_path.h"

enum { LEAST_FRAME = 32 << 10, FRAMES = 16 }; /* bytes of a DATA frame, if the ring allows, and how many make a message */
enum { PIECE = 8 << 10 };                     /* bytes of a short message after which its reader may go on */
enum { TRIAL = 64 };                          /* messages after which a receiver tries the slower way again */
enum { SHORTS = 2 };                          /* short messages for that: the sender may have begun the next one */
enum { LEAST_LOAN = 32 << 10, MOST_PAUSE = 128 };
enum { LOAN_NS = 20000, BYTES_NS = 4 };       /* before an unclaimed loan is withdrawn: the receiver may be sending as many bytes */

/* ---- two ways to receive ------------------------------------------------------------------------------------------- */

static int is_reading_faster(Ways *ways, uint32_t trials)
{
    ways->count++;
    if (!ways->read || !ways->copied) return ways->copied != 0;
    return (ways->read < ways->copied) == (ways->count % TRIAL >= trials);
}

/* Count a time in a running mean; a rank that loses its core for a moment does not count as slow as that. */
static void note_each(float *known, int64_t took, uint64_t nbytes)
{
    float each = (float)took / (float)nbytes;
    if (*known && each > 4 * *known) each = 4 * *known;
    *known += (each - *known) / (*known ? 4 : 1);
}

static void note_time(Ways *ways, int read, int64_t took, uint64_t nbytes)
{
    note_each(read ? &ways->read : &ways->copied, took, nbytes);
}

void core_received_short(FastPath *f, LinkState *link, Ring *ring, int read, int whole, int64_t took, uint64_t nbytes)
{
    if (nbytes <= LEAST_LOAN) return;
    if (whole && f->sends_too) took += (int64_t)(f->making * (float)nbytes); /* in an exchange, a rank makes as many as it receives */
    f->sends_too = 0;
    note_time(&link->short_ones, read, took, nbytes);
    uint64_t wants = is_reading_faster(&link->short_ones, SHORTS) && core_reads_all(f->segment);
    if (wants != atomic_load_explicit(&ring->wants_loans, memory_order_relaxed))
        atomic_store_explicit(&ring->wants_loans, wants, memory_order_relaxed);
}

/* ---- short ones --------------------------------------------------------------------------------------------------- */

static int send_short(FastPath *f, const Entry *entry, LinkState *link, Ring *ring, const char *data, uint64_t nbytes)
{
    uint64_t end, size = framed(nbytes), room = (uint64_t)f->segment->ring;
    int64_t began = nbytes > LEAST_LOAN ? nanoseconds() : 0;
    if (link->sent + size - link->seen_matched > room) {
        link->seen_matched = atomic_load_explicit(&ring->matched, memory_order_acquire);
        if (link->sent + size - link->seen_matched > room) return STUCK;
    }
    Frame *frame = reserve_frame(f->segment, link, ring, nbytes, &end);
    if (!frame) return STUCK;
    *frame = (Frame){(uint32_t)nbytes, SHORT, entry->tag, (uint32_t)entry->code, 0, 0, entry->numel};
    for (uint64_t at = 0, n; at < nbytes; at += n) {
        n = nbytes - at < PIECE ? nbytes - at : PIECE;
        core_copy((char *)(frame + 1) + at, data + at, n);
        if (nbytes > PIECE) atomic_store_explicit(&ring->begun, end - size + FRAME_HEADER + at + n, memory_order_release);
    }
    if (began) note_each(&f->making, nanoseconds() - began, nbytes), f->sends_too = 1;
    link->sent += size;
    publish_frame(f->segment, link, ring, entry->peer, end);
    return DONE;
}

/* Whether a frame begins the message that `entry` receives. */
static int is_for(const Entry *entry, const Frame *frame)
{
    return frame->tag == entry->tag && frame->extra == entry->code && frame->length == entry->numel;
}

int core_receive_short(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, const Frame *frame, const char *payload,
                       char *data, uint64_t nbytes, uint64_t copied)
{
    if (frame->kind != SHORT || !is_for(entry, frame) || frame->nbytes != nbytes) return STUCK;
    if (link->came + framed(nbytes) - link->matched > (uint64_t)f->segment->ring) return STUCK;
    core_copy(data + copied, payload + copied, nbytes - copied);
    link->came += framed(nbytes), link->matched += framed(nbytes);
    atomic_store_explicit(&ring->matched, link->matched, memory_order_release);
    free_frame(f->segment, link, ring, entry->peer, nbytes);
    return DONE;
}

/* ---- long ones ---------------------------------------------------------------------------------------------------- */

/* Write or read the DATA of a message, with the GIL; MOVED if it is not done. */
static int stream(const FastPath *f, Transfer *t)
{
    Spin spin = {0, 0, 0};
    uint64_t frame = t->left / FRAMES, most = (uint64_t)f->segment->ring / 4 & ~(uint64_t)(LINE - 1);
    int64_t until = nanoseconds() + STALL_NS;
    if (frame < LEAST_FRAME) frame = LEAST_FRAME;
    frame = (framed(frame) > most ? most : framed(frame)) - FRAME_HEADER;
    for (;;) {
        int result = t->sending ? core_write_frame(f->segment, t, frame) : core_read_frames(f->segment, t, 1, t);
        if (!t->left) return DONE;
        if (result == DONE) return MOVED; /* a frame of something else */
        if (result == MOVED) {
            if (nanoseconds() > until) return MOVED;
            spin = (Spin){0, 0, 0};
        } else if (!core_goes_on(f, 0.0, &spin)) {
            return MOVED;
        }
    }
}

int core_send_cleared(const FastPath *f, const Entry *entry, char *data, uint64_t nbytes, BegunMessage *begun)
{
    Ring *ring = ring_of(f->segment, f->segment->rank, entry->peer);
    Transfer t = {f->segment->links[entry->peer], ring, entry->peer, 1, begun->ident, data, nbytes, 0};
    int result = stream(f, &t);
    begun->cleared = 1, begun->moved = (uint64_t)t.moved;
    return result;
}

/* Wait for the CLEAR of an offered message, or of a loan, and take the frames of posted ones meanwhile: DONE with it; LATE; or
 * ASKED. */
static int cleared(FastPath *f, LinkState *link, Ring *back, uint32_t ident, Loan *loan, uint64_t nbytes, Frame *clear)
{
    Spin spin = {0, 0, 0};
    int64_t until = loan ? nanoseconds() + LOAN_NS + (int64_t)nbytes / BYTES_NS : 0;
    if (f->state->calls_ahead && !core_has_posted(f, -1)) return LATE; /* the other rank sends first, too: waiting would be in vain */
    for (;;) {
        int result = STUCK, posted = core_has_posted(f, -1);
        if (atomic_load_explicit(&back->head, memory_order_acquire) != link->tail) {
            if (!next_frame(f->segment, link, back, clear)) {
                if (clear->kind) return ASKED; /* corrupt */
                continue;
            }
            if (clear->kind == CLEAR && clear->ident == ident) return DONE;
            if (!posted) return ASKED;
        }
        if (posted) result = core_progress_posted(f);
        if (result == DONE) spin = (Spin){0, 0, 0};
        else if (result != STUCK) return result;
        else if (!core_goes_on(f, f->state->message_wait, &spin)) return LATE;
        if (loan && atomic_load_explicit(&loan->claim, memory_order_relaxed) == OPEN && nanoseconds() > until) return LATE;
    }
}

/* Copy more of a short message that is being written at the tail, if it is the one that `entry` is for: the bytes copied then. */
static uint64_t copy_begun(const FastPath *f, const Entry *entry, const LinkState *link, Ring *ring, char *data, uint64_t nbytes,
                           uint64_t copied)
{
    uint64_t room = (uint64_t)f->segment->ring, run = room - link->tail % room;
    uint64_t first = framed(nbytes) > run ? link->tail + run : link->tail; /* behind the padding */
    uint64_t there = atomic_load_explicit(&ring->begun, memory_order_acquire) - first - FRAME_HEADER; /* if the peer is right */
    const char *place = ring->frames + first % room;
    Frame frame;
    memcpy(&frame, place, sizeof frame);
    if (there <= copied || there > nbytes || frame.kind != SHORT || frame.nbytes != nbytes || !is_for(entry, &frame)) return copied;
    core_copy(data + copied, place + FRAME_HEADER + copied, there - copied);
    return there;
}

/* The next frame from a peer, after a spin if `waits`; NULL if it is corrupt, or if none has come: its kind is 0 then. The first
 * `copied` bytes of a short message may have been copied to `data` meanwhile, from the time `since` on. */
static const char *awaited(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, int waits, Frame *frame, char *data,
                           uint64_t nbytes, uint64_t *copied, int64_t *since)
{
    Spin spin = {0, 0, 0};
    const char *payload;
    do {
        frame->kind = 0;
        while (atomic_load_explicit(&ring->head, memory_order_acquire) == link->tail) {
            uint64_t before = *copied;
            int64_t now = before || nbytes <= LEAST_LOAN ? 0 : nanoseconds();
            if (waits && nbytes > PIECE && (int64_t)nbytes <= f->short_bytes) *copied = copy_begun(f, entry, link, ring, data, nbytes, before);
            if (*copied > before) spin = (Spin){0, 0, 0}, *since = before ? *since : now;
            else if (!waits || !core_goes_on(f, f->state->message_wait, &spin)) return NULL;
            PREFETCH(ring->frames + link->tail % (uint64_t)f->segment->ring); /* not only when the head has come */
        }
        if (!*copied && nbytes > LEAST_LOAN) *since = nanoseconds();
        payload = next_frame(f->segment, link, ring, frame);
    } while (!payload && !frame->kind); /* a withdrawn loan, and a SHORT follows */
    return payload;
}

static int send_long(FastPath *f, const Entry *entry, LinkState *link, Ring *ring, char *data, uint64_t nbytes, BegunMessage *begun)
{
    f->sends_too = 1;
    uint64_t end, address = core_reads_all(f->segment) ? (uint64_t)(uintptr_t)data : 0, room = address ? sizeof address : 0;
    if (!address && core_has_posted(f, -1)) return STUCK;
    Frame frame, *offer = reserve_frame(f->segment, link, ring, room, &end);
    Ring *back = ring_of(f->segment, entry->peer, f->segment->rank);
    if (!offer) return STUCK;
    *begun = (BegunMessage){(uint32_t)link->next_ident++, 0, 0};
    *offer = (Frame){(uint32_t)room, OFFER, entry->tag, (uint32_t)entry->code, begun->ident, 0, entry->numel};
    memcpy(offer + 1, &address, room);
    publish_frame(f->segment, link, ring, entry->peer, end);
    int result = cleared(f, link, back, begun->ident, NULL, nbytes, &frame);
    if (result != DONE) return result == LATE && address ? LATE : MOVED;
    free_frame(f->segment, link, back, entry->peer, frame.nbytes);
    return frame.extra == HAS_READ ? DONE : core_send_cleared(f, entry, data, nbytes, begun);
}

/* Whether the ring has room for a loan, a SHORT behind it, and the CLEARs of posted receives in between. */
static int has_room(const FastPath *f, LinkState *link, Ring *ring, uint64_t nbytes)
{
    uint64_t size = framed(nbytes), room = (uint64_t)f->segment->ring;
    uint64_t needs = 2 * size + (MOST_POSTED + 2) * framed(sizeof(Loan)); /* with padding in front of the SHORT */
    link->seen_matched = atomic_load_explicit(&ring->matched, memory_order_acquire);
    link->taken = atomic_load_explicit(&ring->tail, memory_order_acquire);
    return link->sent + size - link->seen_matched <= room && link->head + needs - link->taken <= room;
}

/* Whether to try a loan: the receiver prefers that, and is likely to be there. A withdrawn loan must be followed by its SHORT: so
 * there is room for that, and no other send may begin to write here. */
static int may_lend(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, uint64_t nbytes)
{
    if (link->pause) return link->pause--, 0; /* also while the receiver prefers SHORTs: it may try a loan only once in a while */
    if (f->state->messages || !atomic_load_explicit(&ring->wants_loans, memory_order_relaxed)) return 0;
    if (core_has_posted_sends(f) || (f->state->calls_ahead && !core_has_posted(f, -1))) return 0;
    const Word *block = block_of(f->segment, entry->peer);
    for (int bell = SLEEPING_LOOP; bell <= SLEEPING_THREAD; bell++)
        if (atomic_load_explicit(&block[bell], memory_order_relaxed)) return 0;
    return core_reads_all(f->segment) && has_room(f, link, ring, nbytes);
}

/* Send a short message as a loan, or as a SHORT after all: LATE and MOVED are as of a long message that is cleared. */
static int lend(FastPath *f, const Entry *entry, LinkState *link, Ring *ring, char *data, uint64_t nbytes, BegunMessage *begun)
{
    uint64_t end, open = OPEN;
    Frame frame, *header = reserve_frame(f->segment, link, ring, sizeof(Loan), &end);
    Ring *back = ring_of(f->segment, entry->peer, f->segment->rank);
    if (!header) return STUCK;
    Loan *loan = (Loan *)(header + 1);
    *begun = (BegunMessage){(uint32_t)link->next_ident++, 0, 0};
    *header = (Frame){sizeof(Loan), LOAN, entry->tag, (uint32_t)entry->code, begun->ident, 0, entry->numel};
    loan->address = (uint64_t)(uintptr_t)data;
    atomic_store_explicit(&loan->claim, OPEN, memory_order_relaxed);
    publish_frame(f->segment, link, ring, entry->peer, end);
    int result = cleared(f, link, back, begun->ident, loan, nbytes, &frame);
    if (result == DONE) {
        link->next_pause = 0, f->sends_too = 1;
        free_frame(f->segment, link, back, entry->peer, frame.nbytes);
        return frame.extra == HAS_READ ? DONE : core_send_cleared(f, entry, data, nbytes, begun);
    }
    if (!atomic_compare_exchange_strong(&loan->claim, &open, WITHDRAWN_LOAN)) return result == LATE ? LATE : MOVED;
    link->pause = link->next_pause = link->next_pause < MOST_PAUSE ? 2 * link->next_pause + 16 : MOST_PAUSE;
    result = send_short(f, entry, link, ring, data, nbytes);
    if (result == STUCK) core_ring(f->segment, entry->peer); /* for frames behind the loan; only a corrupt peer has no room */
    return result;
}

static int receive_long(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, const Frame *offer, char *data,
                        uint64_t nbytes, BegunMessage *begun)
{
    uint64_t end;
    Ring *back = ring_of(f->segment, f->segment->rank, entry->peer);
    Frame *clear = reserve_frame(f->segment, link, back, 0, &end);
    if (!clear) return STUCK;
    free_frame(f->segment, link, ring, entry->peer, offer->nbytes);
    *clear = (Frame){0, CLEAR, 0, 0, offer->ident, 0, 0};
    publish_frame(f->segment, link, back, entry->peer, end);
    Transfer t = {link, ring, entry->peer, 0, offer->ident, data, nbytes, 0};
    int result = stream(f, &t);
    *begun = (BegunMessage){offer->ident, 1, (uint64_t)t.moved};
    return result;
}

int core_claim(const Frame *frame, const char *payload)
{
    uint64_t claim = OPEN;
    if (frame->kind != LOAN || frame->nbytes != sizeof(Loan)) return 1;
    return atomic_compare_exchange_strong(&((Loan *)payload)->claim, &claim, CLAIMED) || claim != WITHDRAWN_LOAN; /* or claimed before */
}

int core_read_offered(const FastPath *f, const Entry *entry, LinkState *link, Ring *ring, const Frame *offer, const char *payload,
                      char *data, uint64_t nbytes)
{
    uint64_t end, address;
    if (offer->nbytes != (offer->kind == LOAN ? sizeof(Loan) : sizeof address)) return STUCK;
    if (!is_for(entry, offer) || !nbytes || !core_reads_all(f->segment)) return STUCK;
    Frame *clear = reserve_frame(f->segment, link, ring_of(f->segment, f->segment->rank, entry->peer), 0, &end);
    memcpy(&address, payload, sizeof address);
    if (!clear || core_read(f->segment, entry->peer, data, (const char *)(uintptr_t)address, nbytes) != MOVED) return STUCK;
    atomic_thread_fence(memory_order_seq_cst); /* behind the last read */
    if (acquired(block_of(f->segment, entry->peer) + WITHDRAWN)) return STUCK;
    free_frame(f->segment, link, ring, entry->peer, offer->nbytes);
    *clear = (Frame){0, CLEAR, 0, HAS_READ, offer->ident, 0, 0};
    publish_frame(f->segment, link, ring_of(f->segment, f->segment->rank, entry->peer), entry->peer, end);
    return DONE;
}

/* ---- both --------------------------------------------------------------------------------------------------------- */

/* A program that calls messages while others are pending does not await each of them next: waiting in the calls is in vain. */
static void note_pending(const FastPath *f)
{
    if (f->state->messages || core_has_posted(f, -1)) f->state->calls_ahead = 1; /* until it awaits one next that is alone */
    else f->state->alone = (uint64_t)f->counts->messages;
}

static int may_be_posted(const FastPath *f)
{
    int in_loop = core_is_in_loop(f);
    if (in_loop < 0) PyErr_Clear();
    return in_loop > 0;
}

int core_send_message(FastPath *f, const Entry *entry, char *data, uint64_t nbytes, BegunMessage *begun)
{
    LinkState *link = f->segment->links[entry->peer];
    Ring *ring = ring_of(f->segment, f->segment->rank, entry->peer);
    note_pending(f);
    if (link->gone || PyObject_Size(link->waiting)) return STUCK;
    if ((int64_t)nbytes <= f->short_bytes) {
        if (nbytes <= LEAST_LOAN || !may_lend(f, entry, link, ring, nbytes)) return send_short(f, entry, link, ring, data, nbytes);
        return lend(f, entry, link, ring, data, nbytes, begun);
    }
    return f->state->messages ? STUCK : send_long(f, entry, link, ring, data, nbytes, begun);
}

int core_receive_message(FastPath *f, const Entry *entry, char *data, uint64_t nbytes, BegunMessage *begun)
{
    LinkState *link = f->segment->links[entry->peer];
    Ring *ring = ring_of(f->segment, entry->peer, f->segment->rank);
    Frame frame;
    uint64_t copied = 0;
    int64_t since = 0;
    note_pending(f);
    if (f->state->messages || f->state->kept || link->gone) return STUCK;
    if (core_has_posted(f, entry->peer)) return LATE; /* its message is behind theirs */
    int waited = atomic_load_explicit(&ring->head, memory_order_acquire) == link->tail;
    const char *payload = awaited(f, entry, link, ring, !f->state->calls_ahead, &frame, data, nbytes, &copied, &since);
    if (!payload) return frame.kind ? STUCK : LATE; /* corrupt: the ordinary path has the error */
    if (frame.kind == SHORT) {
        int result = core_receive_short(f, entry, link, ring, &frame, payload, data, nbytes, copied);
        if (result == DONE && since) core_received_short(f, link, ring, 0, !waited, nanoseconds() - since, nbytes);
        return result;
    }
    if ((frame.kind != OFFER && frame.kind != LOAN) || !is_for(entry, &frame) || !nbytes) return STUCK;
    int posted = core_has_posted(f, -1), readable = frame.nbytes && core_reads_all(f->segment);
    if (readable && (posted || f->state->calls_ahead)) return LATE;
    /* in an exchange, where the other rank has come first, both ranks are to read at once: in this one's next send */
    if (readable && !waited && f->sends_too && may_be_posted(f)) return LATE;
    if (posted) return STUCK;
    if (!core_claim(&frame, payload)) return core_receive_message(f, entry, data, nbytes, begun); /* a SHORT follows */
    if (!since) since = nanoseconds();
    int reads = readable && (frame.kind == LOAN || is_reading_faster(&link->long_ones, 1)), result = STUCK;
    if (reads) result = core_read_offered(f, entry, link, ring, &frame, payload, data, nbytes);
    if (result != DONE) reads = 0, result = receive_long(f, entry, link, ring, &frame, data, nbytes, begun);
    if (result != DONE) return result;
    if (frame.kind == LOAN) core_received_short(f, link, ring, 1, 0, nanoseconds() - since, nbytes);
    else note_time(&link->long_ones, reads, nanoseconds() - since, nbytes), f->sends_too = 0;
    return DONE;
}
