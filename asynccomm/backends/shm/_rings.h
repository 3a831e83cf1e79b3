/* Frames in the rings of messages, as rings.py has them. */
#ifndef ASYNCCOMM_RINGS_H
#define ASYNCCOMM_RINGS_H

#include "_core.h"

#include <string.h>

enum { LINE = 64, FRAME_HEADER = 32 };
enum { PADDING = 1, SHORT = 2, OFFER = 3, CLEAR = 4, DATA = 5, LOAN = 6 }; /* kinds of frames, as in rings.py and endpoint.py */
enum { HAS_READ = 1 }; /* `extra` of a CLEAR: the receiver has read the message at the address in the OFFER */

/* The head counts the bytes written, the tail the bytes read. `begun` counts those of a frame that is being written, too:
 * a reader in C may copy its payload meanwhile, other readers wait for the head. */
typedef struct {
    _Atomic uint64_t head, begun;
    char rest_of_line[LINE - 16];
    _Atomic uint64_t tail, matched;
    _Atomic uint64_t wants_loans; /* whether the reader prefers LOANs to SHORTs */
    char rest_of_line_too[LINE - 24];
    char frames[];
} Ring;

typedef struct {
    uint32_t nbytes, kind, tag, extra, ident, unused;
    uint64_t length;
} Frame;

/* The payload of a LOAN: the address of a short message that the sender keeps for a moment. The receiver claims it and reads it;
 * the sender withdraws one that is not claimed, and sends a SHORT behind it. */
enum { OPEN = 0, CLAIMED = 1, WITHDRAWN_LOAN = 2 };
typedef struct {
    uint64_t address;
    _Atomic uint64_t claim;
} Loan;

/* A part of a long message that is in one piece of memory here. */
typedef struct {
    LinkState *link;
    Ring *ring;
    int peer, sending;
    uint32_t ident;
    char *address;
    uint64_t left;
    int64_t moved;
} Transfer;

/* Write a frame of at most `most` bytes of a transfer: STUCK: the ring has no room; DONE: it was the last. */
int core_write_frame(Segment *s, Transfer *t, uint64_t most);

/* Read the frames of the link of `any` that are there, as long as they belong to one of `transfers`; DONE if a transfer is
 * done or a frame belongs to none. Frames that arrive meanwhile are for the next pass: a fast sender would keep this link the
 * only one. */
int core_read_frames(Segment *s, Transfer *transfers, Py_ssize_t count, const Transfer *any);

static inline Ring *ring_of(const Segment *s, int source, int destination)
{
    return (Ring *)(s->rings + ((int64_t)source * s->size + destination) * (2 * LINE + s->ring));
}

static inline uint64_t framed(uint64_t nbytes) { return (FRAME_HEADER + nbytes + LINE - 1) & ~(uint64_t)(LINE - 1); }

/* The place of the next frame, to be filled, and the head after it; NULL if the ring has no room. */
static inline Frame *reserve_frame(const Segment *s, LinkState *link, Ring *ring, uint64_t nbytes, uint64_t *end)
{
    uint64_t room = (uint64_t)s->ring, size = framed(nbytes), at = link->head % room;
    *end = size <= room - at ? link->head + size : link->head + room - at + size;
    if (*end - link->taken > room) {
        link->taken = atomic_load_explicit(&ring->tail, memory_order_acquire);
        if (*end - link->taken > room) return NULL;
    }
    if (size > room - at) {
        Frame padding = {(uint32_t)(room - at - FRAME_HEADER), PADDING, 0, 0, 0, 0, 0};
        memcpy(ring->frames + at, &padding, sizeof padding);
        at = 0;
    }
    return (Frame *)(ring->frames + at);
}

static inline void publish_frame(Segment *s, LinkState *link, Ring *ring, int peer, uint64_t end)
{
    link->head = end;
    atomic_store_explicit(&ring->head, end, memory_order_release);
    core_ring(s, peer);
}

/* The header and the payload of the next frame; NULL if there is none: its kind is 0 then; or if the ring is corrupt. Padding and
 * withdrawn loans before the frame are taken. The peer may change its memory at any time: only the copy of the header is checked and used. */
static inline const char *next_frame(const Segment *s, LinkState *link, Ring *ring, Frame *frame)
{
    uint64_t room = (uint64_t)s->ring, head = atomic_load_explicit(&ring->head, memory_order_acquire), tail = link->tail;
    frame->kind = PADDING; /* of no frame that is returned */
    if (head - tail > room || head % LINE) return NULL;
    for (; tail != head; tail += framed(frame->nbytes)) {
        memcpy(frame, ring->frames + tail % room, sizeof *frame);
        if (framed(frame->nbytes) > head - tail || framed(frame->nbytes) > room - tail % room) {
            frame->kind = PADDING;
            return NULL;
        }
        const char *payload = ring->frames + tail % room + FRAME_HEADER;
        int taken = frame->kind == PADDING || (frame->kind == LOAN && frame->nbytes == sizeof(Loan)
                     && atomic_load_explicit(&((Loan *)payload)->claim, memory_order_acquire) == WITHDRAWN_LOAN);
        if (!taken) {
            link->tail = tail;
            return payload;
        }
    }
    link->tail = tail, frame->kind = 0;
    return NULL;
}

/* Finish the frame that next_frame has returned; the writer is woken for every quarter of the ring, in case it waits. */
static inline void free_frame(Segment *s, LinkState *link, Ring *ring, int peer, uint64_t nbytes)
{
    link->tail += framed(nbytes);
    atomic_store_explicit(&ring->tail, link->tail, memory_order_release);
    if (link->tail - link->told >= (uint64_t)s->ring / 4) {
        link->told = link->tail;
        core_ring(s, peer);
    }
}

#endif
