/* How a thread drives and waits without the GIL: it spins, offers its core, and sleeps. */
#include "_rings.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <unistd.h>

/* Another thread that keeps an offered core for HOG_NS is busy, and probably stays so for CONTENDED_NS. The kernel gives the
 * core back at once to a thread that has slept, but not to a thread that has offered it. */
#define HOG_NS 1000000
#define CONTENDED_NS 100000000
#define TURN_NS 200000 /* of a call that others wait for */
#define SETTLED_NS 2000000 /* between two looks for an idle core */
#define MOVE (1ULL << 32) /* in a word CALLER */

Pace core_pace(double patience, double stretch, int events)
{
    int64_t now = nanoseconds();
    return (Pace){(int64_t)(patience * 1e9), stretch < 1e9 ? (int64_t)(stretch * 1e9) : INT64_MAX, events, now, 0, now, 0, 0};
}

/* Sleep until the bell of the thread rings; returns whether nothing else has woken it. */
static int sleep_on(Segment *s, int events)
{
    struct pollfd waiting = {events, POLLIN, 0};
    uint64_t rings;
    atomic_store(&s->asleep, 1);
    if (!atomic_load(&s->interrupted)) poll(&waiting, 1, -1);
    atomic_store(&s->asleep, 0);
    if (read(s->bells[s->rank][1], &rings, sizeof rings) < 0) {} /* something else */
    return poll(&waiting, 1, 0) == 0;
}

/* Let other threads have the core. */
static void offer_core(Segment *s, Pace *pace, int64_t now)
{
    if (now < s->contended_until) {
        nanosleep(&(struct timespec){0, 1000}, NULL);
        pace->offered = nanoseconds();
        return;
    }
    sched_yield();
    pace->offered = nanoseconds();
    if (pace->offered - now > HOG_NS) s->contended_until = pace->offered + CONTENDED_NS;
}

/* Whether the machine has no more runnable threads than cores, so that one is idle if two threads share one. */
static int is_core_idle(int cores)
{
    char text[64] = "";
    int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC), running;
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    return length > 0 && sscanf(text, "%*s %*s %*s %d/", &running) == 1 && running > 0 && running <= cores;
}

void core_publish_cpu(Segment *s, int cpu)
{
    s->cpu = cpu;
    atomic_store_explicit(block_of(s, s->rank) + CALLER, s->moves * MOVE + (uint64_t)(cpu + 1), memory_order_relaxed);
}

static int shares_core(const Segment *s)
{
    for (int rank = 0; rank < s->size; rank++) {
        uint64_t caller = atomic_load_explicit(block_of(s, rank) + CALLER, memory_order_relaxed);
        if (rank != s->rank && caller % MOVE == (uint64_t)s->cpu + 1) return 1;
    }
    return 0;
}

/* The kernel keeps threads that wake each other on one core, and moves one of them only after milliseconds. Until then each
 * message costs two switches of threads. Of two ranks, the first one to look moves: the other one, which runs meanwhile, sees it
 * nowhere. Only where the thread may use all cores: the number of runnable threads is that of the whole machine. */
void core_leave_shared_core(Segment *s, int64_t now)
{
    if (!s->spins) return; /* there are more ranks than cores */
    int cpu = sched_getcpu();
    if (cpu < 0) return;
    if (cpu != s->cpu) core_publish_cpu(s, cpu);
    if (now < s->settled_until || !shares_core(s)) return;
    s->settled_until = now + SETTLED_NS;
    int cores = (int)sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t allowed, others;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < cores) return;
    if (!is_core_idle(cores) || !shares_core(s)) return;
    others = allowed;
    CPU_CLR(cpu, &others);
    core_publish_cpu(s, -1);
    if (!sched_setaffinity(0, sizeof others, &others)) {
        s->moves++;
        if (sched_setaffinity(0, sizeof allowed, &allowed)) {} /* it was allowed a moment ago */
    }
    core_publish_cpu(s, sched_getcpu());
}

static int has_frames(const Segment *s)
{
    for (int rank = 0; rank < s->size; rank++)
        if (rank != s->rank && acquired(&ring_of(s, rank, s->rank)->head) != s->links[rank]->tail) return 1;
    return 0;
}

int core_continues(Segment *s, Pace *pace, int moved)
{
    Word *asleep = block_of(s, s->rank) + SLEEPING_THREAD;
    if (pace->armed && moved) atomic_store(asleep, 0), pace->armed = 0;
    if (atomic_load_explicit(&s->interrupted, memory_order_relaxed)) return 0;
    int64_t now = nanoseconds();
    if (moved) {
        if (pace->events < 0 && now - pace->began > TURN_NS) return 0;
        pace->until = 0, pace->waits = 0;
        if (now - pace->offered > pace->stretch) offer_core(s, pace, now);
        return 1;
    }
    if (pace->armed) {
        int woken = !has_frames(s) && sleep_on(s, pace->events);
        atomic_store(asleep, 0), pace->armed = 0;
        pace->until = 0, pace->waits = 0, pace->offered = nanoseconds();
        return woken;
    }
    if (!pace->until) pace->until = now < s->contended_until && pace->events >= 0 ? now : now + pace->patience;
    else if (now >= pace->until) {
        if (pace->events < 0) return 0;
        atomic_store(asleep, 1), pace->armed = 1;
        atomic_thread_fence(memory_order_seq_cst);
        return 1;
    }
    for (int k = 0; k < 16; k++) RELAX();
    if (++pace->waits > s->spins) offer_core(s, pace, now); /* the late rank may need it */
    return 1;
}
