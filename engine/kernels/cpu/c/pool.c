/* The threads of pool.h. After a call they spin for a while, waiting for the next one, then sleep. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "pool.h"

enum { MAX_THREADS = 1024 };
static int num_wanted = 1;

enum { SPINS = 4000 }; /* polls for the next call before a thread sleeps: about 0.1 ms, longer than between calls */

typedef struct {
    _Alignas(64) atomic_llong next;
    int64_t end;
} Range;

/* The state holds the number of the call, whether threads may still enter it, and how many are inside. */
enum { IS_OPEN = 1 << 16, INSIDE = IS_OPEN - 1, NUMBER_SHIFT = 32 };

static struct {
    _Alignas(64) _Atomic uint64_t state;
    Body *body; /* this field and the next two change only while no thread is inside and the call is not open */
    void *context;
    int num_threads, num_ranges;
    Range ranges[MAX_THREADS];
    int num_started;
    pthread_t threads[MAX_THREADS];
    int caller_core; /* the core that the other threads avoid; -1 if they do not know it */
    atomic_int num_sleeping;
    pthread_mutex_t mutex;
    pthread_cond_t is_published;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .is_published = PTHREAD_COND_INITIALIZER, .num_started = 1, .caller_core = -1};

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void weft_set_num_threads(int64_t number) { num_wanted = number < MAX_THREADS ? (int)number : MAX_THREADS; }

int num_threads(void) { return num_wanted; }

static bool is_new(uint64_t state, uint64_t last) { return (state & IS_OPEN) && state >> NUMBER_SHIFT != last; }

/* Wait for an open call that is not the last one of this thread. */
static uint64_t await_call(uint64_t last) {
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++, pause_briefly()) {
            const uint64_t state = atomic_load(&pool.state);
            if (is_new(state, last)) return state;
        }
        pthread_mutex_lock(&pool.mutex);
        atomic_fetch_add(&pool.num_sleeping, 1);
        if (!is_new(atomic_load(&pool.state), last)) pthread_cond_wait(&pool.is_published, &pool.mutex);
        atomic_fetch_sub(&pool.num_sleeping, 1);
        pthread_mutex_unlock(&pool.mutex); /* the call that woke it may be over: poll for the next */
    }
}

static void *serve(void *argument) {
    const int thread = (int)(intptr_t)argument;
    for (uint64_t last = 0;;) {
        uint64_t state = await_call(last);
        if (!atomic_compare_exchange_strong(&pool.state, &state, state + 1)) continue; /* another entered, or it closed */
        last = state >> NUMBER_SHIFT;
        if (thread < pool.num_threads) pool.body(pool.context, thread);
        atomic_fetch_sub(&pool.state, 1);
    }
    return NULL;
}

/* A forked child has no threads but the caller. */
static void forget_threads(void) {
    pool.num_started = 1;
    pool.caller_core = -1;
    atomic_store(&pool.num_sleeping, 0);
    atomic_fetch_and(&pool.state, ~(uint64_t)(IS_OPEN | INSIDE));
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.is_published, NULL);
}

/* New threads inherit the signal mask. They block all signals but those that a fault raises. */
static void start_threads(void) {
    static bool is_prepared;
    if (!is_prepared) pthread_atfork(NULL, NULL, forget_threads);
    is_prepared = true;
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; pool.num_started < pool.num_threads; pool.num_started++) {
        pthread_t *id = &pool.threads[pool.num_started];
        if (pthread_create(id, NULL, serve, (void *)(intptr_t)pool.num_started)) break; /* go on with fewer */
        pthread_detach(*id);
        pool.caller_core = -1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Keep the other threads off the caller's core. In a virtual machine Linux may take a sleeping core for a busy one and
 * wake a thread on the caller's core. Caller and thread would then wait for each other. */
static void leave_core_to_caller(void) {
    const int core = sched_getcpu();
    if (core == pool.caller_core || core < 0) return;
    pool.caller_core = core;
    cpu_set_t others;
    if (sched_getaffinity(0, sizeof others, &others)) return; /* more cores than the type holds */
    CPU_CLR((size_t)core, &others);
    if (!CPU_COUNT(&others)) return;
    for (int thread = 1; thread < pool.num_started; thread++)
        pthread_setaffinity_np(pool.threads[thread], sizeof others, &others);
}

void run_on_all(Body *body, void *context) {
    pool.body = body;
    pool.context = context;
    pool.num_threads = num_threads();
    if (pool.num_threads > pool.num_started) start_threads();
    const uint64_t number = (atomic_load(&pool.state) >> NUMBER_SHIFT) + 1;
    atomic_store(&pool.state, number << NUMBER_SHIFT | IS_OPEN);
    if (pool.num_threads > 1) leave_core_to_caller();
    if (atomic_load(&pool.num_sleeping) && pool.num_threads > 1) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.is_published);
        pthread_mutex_unlock(&pool.mutex);
    }
    body(context, 0);
    atomic_fetch_and(&pool.state, ~(uint64_t)IS_OPEN);
    while (atomic_load(&pool.state) & INSIDE) pause_briefly();
}

void deal_pieces(int64_t num_pieces) {
    const int num_ranges = pool.num_ranges = num_threads();
    for (int64_t index = 0; index < num_ranges; index++) {
        atomic_store(&pool.ranges[index].next, num_pieces * index / num_ranges);
        pool.ranges[index].end = num_pieces * (index + 1) / num_ranges;
    }
}

int64_t take_piece(int thread) {
    for (int turn = 0; turn < pool.num_ranges; turn++) {
        Range *range = &pool.ranges[(thread + turn) % pool.num_ranges];
        if (atomic_load(&range->next) >= range->end) continue;
        const int64_t piece = atomic_fetch_add(&range->next, 1);
        if (piece < range->end) return piece;
    }
    return -1;
}

typedef struct {
    Loop *loop;
    const void *context;
    int64_t num_pieces, grain;
} LoopCall;

static void run_share(void *context, int thread) {
    const LoopCall *call = context;
    for (int64_t share = take_piece(thread); share >= 0; share = take_piece(thread)) {
        const int64_t first = share * call->grain, end = first + call->grain;
        call->loop(call->context, first, end < call->num_pieces ? end : call->num_pieces);
    }
}

void run_loop(int64_t num_pieces, int64_t grain, Loop *loop, const void *context) {
    if (num_pieces <= grain) {
        loop(context, 0, num_pieces);
        return;
    }
    LoopCall call = {loop, context, num_pieces, grain};
    deal_pieces((num_pieces + grain - 1) / grain);
    run_on_all(run_share, &call);
}
