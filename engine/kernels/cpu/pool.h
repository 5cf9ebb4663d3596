/* Threads that share the work of a call.
 *
 * A call is over when its work is done, not when every thread has come: the HTTP process, clients and strangers run on
 * the same cores, and a thread that they keep from running keeps nobody waiting unless it holds a piece of the work. At
 * a barrier, as OpenMP has it, everybody would wait for it, some 200 times a step.
 */
#ifndef WEFT_POOL_H
#define WEFT_POOL_H

#include <stdint.h>

#pragma GCC visibility push(hidden) /* each shared object has threads of its own */

/* What a thread does in a call: takes pieces until there are none. Threads count from 0, which is the caller. */
typedef void Body(void *context, int thread);

/* What is done with the pieces [first, end). */
typedef void Loop(const void *context, int64_t first, int64_t end);

/* Threads that take part at most; `weft_set_num_threads` says how many. */
int num_threads(void);

/* Run body on every thread that comes before the caller's own is through. One call at a time. */
void run_on_all(Body *body, void *context);

/* Before `run_on_all`: pieces to take, a range of them for every thread. */
void deal_pieces(int64_t num_pieces);

/* The next piece of a thread's range, or of another's once that is empty; -1 when all are taken. */
int64_t take_piece(int thread);

/* Share pieces out, `grain` at a time. */
void run_loop(int64_t num_pieces, int64_t grain, Loop *loop, const void *context);

#pragma GCC visibility pop

#endif
