/* tokenpipe_ops.h: the output ops for C and everything that calls C, on FastDeploy's System V queue
 * and into a pipeline's shared memory.
 *
 * A library of its own, tokenpipe/_ops.*.so, which needs neither Python nor Paddle. Tensors lie on
 * the CPU, contiguous. Each call returns 0, or the errno of what went wrong with `error` filled in
 * (which may be NULL): EINVAL with `argument` set is a tensor or a value that cannot be. After a
 * failed save nothing was sent.
 */
#ifndef TOKENPIPE_OPS_H
#define TOKENPIPE_OPS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  TOKENPIPE_INT32 = 1,
  TOKENPIPE_INT64 = 2,
  TOKENPIPE_FLOAT32 = 3,
  TOKENPIPE_FLOAT16 = 4,
  TOKENPIPE_BFLOAT16 = 5,
  TOKENPIPE_UINT8 = 6
};

typedef struct {
  void *data; /* NULL only without elements */
  int32_t dtype;
  int32_t ndim; /* 1 to 3 */
  int64_t shape[3];
} tokenpipe_tensor;

typedef struct {
  char argument[32]; /* empty: no argument is at fault */
  char text[480];
} tokenpipe_error;

/* ---- FastDeploy's System V queue
 *
 * Dtypes and shapes are those of FastDeploy's ops; a get writes in place. EMSGSIZE: the kernel's
 * limits are too small; EBADMSG: a message is not what the op expects (it is taken off the queue);
 * EINTR: a signal came while a save waited for room; else what the kernel said. A get that found
 * nothing returns 0 with -2 and 0 in its words 0 and 1, and so does one that a signal has
 * interrupted.
 *
 * Any thread may call at any time. Saves wait while the queue is full, gets if `wait_flag` is set.
 */

/* Where the messages go. NULL in its place: what the environment says at the moment of the call,
 * INFERENCE_MSG_QUEUE_ID (1), INFERENCE_MSG_ID (1), TOKENPIPE_SYSV_GENERATION (g3),
 * TOKENPIPE_SYSV_FOLDER (the op's own: /dev/shm or the working folder). */
typedef struct {
  int32_t queue_id;   /* FastDeploy's engine worker queue port */
  int32_t message_id; /* magnitude of header word 0; not 2 */
  int32_t generation; /* 1 to 4 */
  const char *folder; /* whose inode is in the key; NULL: the op's own */
} tokenpipe_wire;

/* preempted_idx may be NULL in every op: nobody is preempted. */
int tokenpipe_save_output(const tokenpipe_wire *wire, const tokenpipe_tensor *x, bool not_need_stop,
                          const tokenpipe_tensor *preempted_idx, int64_t rank_id,
                          tokenpipe_error *error);
int tokenpipe_save_output_topk(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                               const tokenpipe_tensor *topk_ids,
                               const tokenpipe_tensor *logprob_scores,
                               const tokenpipe_tensor *ranks, bool not_need_stop,
                               const tokenpipe_tensor *preempted_idx, int64_t rank_id,
                               tokenpipe_error *error);
int tokenpipe_speculate_save_output(const tokenpipe_wire *wire,
                                    const tokenpipe_tensor *accept_tokens,
                                    const tokenpipe_tensor *accept_num, bool not_need_stop,
                                    const tokenpipe_tensor *seq_lens_decoder,
                                    const tokenpipe_tensor *prompt_lens,
                                    const tokenpipe_tensor *preempted_idx, int64_t rank_id,
                                    bool save_each_rank, bool skip_prefill, tokenpipe_error *error);
int tokenpipe_mtp_save_first_token(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                   bool not_need_stop, const tokenpipe_tensor *seq_lens_decoder,
                                   const tokenpipe_tensor *prompt_lens,
                                   const tokenpipe_tensor *step_idx, int64_t rank_id,
                                   bool save_each_rank, bool skip_chunk_prefill,
                                   tokenpipe_error *error);
int tokenpipe_speculate_save_output_topk(
    const tokenpipe_wire *wire, const tokenpipe_tensor *sampled_token_ids,
    const tokenpipe_tensor *logprob_token_ids, const tokenpipe_tensor *logprob_scores,
    const tokenpipe_tensor *logprob_ranks, const tokenpipe_tensor *token_num_per_batch,
    const tokenpipe_tensor *cu_batch_token_offset, bool not_need_stop,
    const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
    const tokenpipe_tensor *preempted_idx, int32_t message_flag, int64_t rank_id,
    bool save_each_rank, tokenpipe_error *error);
int tokenpipe_mtp_save_first_token_with_topk(
    const tokenpipe_wire *wire, const tokenpipe_tensor *sampled_token_ids,
    const tokenpipe_tensor *logprob_token_ids, const tokenpipe_tensor *logprob_scores,
    const tokenpipe_tensor *logprob_ranks, const tokenpipe_tensor *token_num_per_batch,
    const tokenpipe_tensor *cu_batch_token_offset, bool not_need_stop,
    const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
    const tokenpipe_tensor *preempted_idx, int32_t message_flag, int64_t rank_id,
    bool save_each_rank, tokenpipe_error *error);

/* x: int64, 514 elements. Rank 0 alone receives; get_output_ep does not ask. */
int tokenpipe_get_output(const tokenpipe_wire *wire, const tokenpipe_tensor *x, int64_t rank_id,
                         bool wait_flag, tokenpipe_error *error);
int tokenpipe_get_output_ep(const tokenpipe_wire *wire, const tokenpipe_tensor *x, int64_t rank_id,
                            bool wait_flag, tokenpipe_error *error);
/* x: int64, 10754; scores: float32, 10752; ranks: int64, 512. k: candidates a token, 0 to 20. */
int tokenpipe_get_output_topk(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                              const tokenpipe_tensor *scores, const tokenpipe_tensor *ranks,
                              int32_t k, int64_t rank_id, bool wait_flag, tokenpipe_error *error);
/* x: int64, 1794. */
int tokenpipe_speculate_get_output(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                   int64_t rank_id, bool wait_flag, bool get_each_rank,
                                   tokenpipe_error *error);
/* output_tokens: int64, 65027; output_scores: float32, 64512; output_ranks: int64, 3072. */
int tokenpipe_speculate_get_output_topk(const tokenpipe_wire *wire,
                                        const tokenpipe_tensor *output_tokens,
                                        const tokenpipe_tensor *output_scores,
                                        const tokenpipe_tensor *output_ranks, int32_t real_k,
                                        int64_t rank_id, bool wait_flag, tokenpipe_error *error);

/* ---- a pipeline's shared memory
 *
 * The engine's end of `tokenpipe serve` or tp.Pipeline, as EngineWriter is in Python; there is no
 * get, since the pipeline's reader is the only one. A pipeline has one writer at a time.
 *
 *   EACCES     attach: the file of that name is not ours
 *   EBUSY      attach: the pipeline has a writer, or had one whose requests have not been ended
 *              yet; any other call: another thread is inside one
 *   EMFILE     attach: this process has attached 64 writers
 *   ENOENT     attach: no live pipeline of that name within the time
 *   ENOTSUP    save: the pipeline takes its steps from FastDeploy's queue or socket
 *   EPERM      the writer is a forked copy: it is its parent's
 *   EPIPE      the pipeline is gone
 *   EPROTO     attach: a pipeline of another version
 *   ETIMEDOUT  save: no room within wait_s
 *
 * One thread at a time is inside a call of a writer, which else returns EBUSY at once; beat and
 * limits may be called at any time by any thread, close when no other call runs. A signal does not
 * end a wait. */
typedef struct tokenpipe_writer tokenpipe_writer;

/* What this pipeline takes at most. */
typedef struct {
  int32_t max_num_seqs;
  int32_t max_draft_tokens; /* columns of accept_tokens */
  int32_t max_candidates;   /* columns T */
  int32_t max_pooling_floats;
  int32_t max_prompt_tokens; /* tokens of one save of prompt logprobs */
} tokenpipe_limits;

enum { /* states of a row */
       TOKENPIPE_ROW_TOKEN = 0,
       TOKENPIPE_ROW_NONE = 1,
       TOKENPIPE_ROW_RECOVERY = 2,
       TOKENPIPE_ROW_ACKNOWLEDGED = 3 /* its abort or preemption */
};

/* One composed batch of n rows. Integers are int32 or int64. */
typedef struct {
  /* [n]: of the Admission in each row when the batch was composed, 0 for a padded row */
  const tokenpipe_tensor *generations;
  const tokenpipe_tensor *rows;      /* [n]: the pipeline's row of each, once; NULL: 0 to n-1 */
  const tokenpipe_tensor *states;    /* [n], uint8 too: TOKENPIPE_ROW_*; NULL: all have a token */
  const tokenpipe_tensor *positions; /* [n]: of the token in its request, -1 unknown; NULL: all */
  bool not_need_stop;                /* the engine has more work: told to the client */
  double wait_s; /* for room in the ring; 0: none, below 0: while the pipeline lives */
} tokenpipe_step;

enum { TOKENPIPE_MESSAGE_TARGET = 3, TOKENPIPE_MESSAGE_DRAFT = 4 };

/* What has been decided about a row: stop it and save it once as ACKNOWLEDGED (ABORT; PREEMPT: it
 * will be resumed); or run it no more (FINISHED). */
enum { TOKENPIPE_ABORT = 1, TOKENPIPE_PREEMPT = 2, TOKENPIPE_FINISHED = 4 };
typedef struct {
  int32_t row;
  int32_t generation;
  int32_t kind;
} tokenpipe_event;

/* Waits for the pipeline, timeout_s at most. */
int tokenpipe_shm_attach(const char *name, double timeout_s, tokenpipe_writer **writer,
                         tokenpipe_error *error);
/* What runs goes on with the next writer; what runs when an engine dies ends with an error. NULL is
 * no writer, and is closed. In a forked copy it only gives the copy's memory back. */
void tokenpipe_shm_close(tokenpipe_writer *writer);
int tokenpipe_shm_limits(const tokenpipe_writer *writer, tokenpipe_limits *limits,
                         tokenpipe_error *error);

/* tokens: [n]. */
int tokenpipe_shm_save_output(tokenpipe_writer *writer, const tokenpipe_step *step,
                              const tokenpipe_tensor *tokens, tokenpipe_error *error);
/* topk_ids: [n, T]; logprobs: float32, float16 or bfloat16 [n, T]; ranks: [n]. Column 0 is the
 * sampled token; T is 1 to max_candidates. */
int tokenpipe_shm_save_output_topk(tokenpipe_writer *writer, const tokenpipe_step *step,
                                   const tokenpipe_tensor *tokens, const tokenpipe_tensor *topk_ids,
                                   const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks,
                                   tokenpipe_error *error);
/* accept_tokens: [n, D]; accept_num: [n], how many of a row's D count. */
int tokenpipe_shm_speculate_save_output(tokenpipe_writer *writer, const tokenpipe_step *step,
                                        const tokenpipe_tensor *accept_tokens,
                                        const tokenpipe_tensor *accept_num, tokenpipe_error *error);
/* topk_ids and logprobs: [n, D, T]; ranks: [n, D]. Drafts follow the target of the same step. */
int tokenpipe_shm_speculate_save_output_topk(tokenpipe_writer *writer, const tokenpipe_step *step,
                                             const tokenpipe_tensor *accept_tokens,
                                             const tokenpipe_tensor *accept_num,
                                             const tokenpipe_tensor *topk_ids,
                                             const tokenpipe_tensor *logprobs,
                                             const tokenpipe_tensor *ranks, int32_t message_flag,
                                             tokenpipe_error *error);
/* tokens: [n, 2 or more]; step_idx: [n], 1 where the row has just made its first token. */
int tokenpipe_shm_mtp_save_first_token(tokenpipe_writer *writer, const tokenpipe_step *step,
                                       const tokenpipe_tensor *tokens,
                                       const tokenpipe_tensor *step_idx, tokenpipe_error *error);
/* tokens: [n, D]; token_num: [n], the tokens in front of the last draft, 0 for none yet. The
 * candidates are the first token's: topk_ids and logprobs [n, T], ranks [n]. */
int tokenpipe_shm_mtp_save_first_token_with_topk(
    tokenpipe_writer *writer, const tokenpipe_step *step, const tokenpipe_tensor *tokens,
    const tokenpipe_tensor *token_num, const tokenpipe_tensor *topk_ids,
    const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks, int32_t message_flag,
    tokenpipe_error *error);
/* vectors: float32, float16 or bfloat16 [n, V]. A vector ends its request. */
int tokenpipe_shm_save_pooling(tokenpipe_writer *writer, const tokenpipe_step *step,
                               const tokenpipe_tensor *vectors, tokenpipe_error *error);
/* Candidates of one request's prompt tokens: the step has one row, whose position is the place of
 * the first of them in the prompt. tokens and ranks: [P]; topk_ids and logprobs: [P, T]. They come
 * with the request's next output. */
int tokenpipe_shm_save_prompt_logprobs(tokenpipe_writer *writer, const tokenpipe_step *step,
                                       const tokenpipe_tensor *tokens,
                                       const tokenpipe_tensor *topk_ids,
                                       const tokenpipe_tensor *logprobs,
                                       const tokenpipe_tensor *ranks, tokenpipe_error *error);

/* Fills in up to `room` events and says how many in `count`. Each comes once; those without room
 * come at the next call. */
int tokenpipe_shm_poll_control(tokenpipe_writer *writer, tokenpipe_event *events, int64_t room,
                               int64_t *count, tokenpipe_error *error);
/* The engine works without saving (a long prefill): busy until the next save. */
int tokenpipe_shm_beat(tokenpipe_writer *writer, bool busy, tokenpipe_error *error);

#ifdef __cplusplus
}
#endif

#endif
