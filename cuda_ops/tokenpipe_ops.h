/* tokenpipe_ops.h: the output ops on FastDeploy's System V queue, for C and everything that calls
 * C.
 *
 * A library of its own, tokenpipe/_ops.*.so, which needs neither Python nor Paddle. Tensors lie on
 * the CPU, contiguous; dtypes and shapes are those of FastDeploy's ops, and a get writes in place.
 *
 * Each op returns 0, or the errno of what went wrong with `error` filled in (which may be NULL):
 * EINVAL with `argument` set for a tensor or a value that cannot be; EMSGSIZE where the kernel's
 * limits are too small; EBADMSG where a message is not what the op expects (it is taken off the
 * queue); EINTR where a signal came while a save waited for room; else what the kernel said. After
 * a failed save nothing was sent. A get that found nothing returns 0 with -2 and 0 in its words 0
 * and 1, and so does one that a signal has interrupted.
 *
 * Any thread may call at any time. Saves wait while the queue is full, gets if `wait_flag` is set.
 */
#ifndef TOKENPIPE_OPS_H
#define TOKENPIPE_OPS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKENPIPE_INT32 = 1, TOKENPIPE_INT64 = 2, TOKENPIPE_FLOAT32 = 3 };

typedef struct {
  void *data;
  int32_t dtype;
  int32_t ndim; /* 1 to 3 */
  int64_t shape[3];
} tokenpipe_tensor;

/* Where the messages go. NULL in its place: what the environment says at the moment of the call,
 * INFERENCE_MSG_QUEUE_ID (1), INFERENCE_MSG_ID (1), TOKENPIPE_SYSV_GENERATION (g3),
 * TOKENPIPE_SYSV_FOLDER (the op's own: /dev/shm or the working folder). */
typedef struct {
  int32_t queue_id;   /* FastDeploy's engine worker queue port */
  int32_t message_id; /* magnitude of header word 0; not 2 */
  int32_t generation; /* 1 to 4 */
  const char *folder; /* whose inode is in the key; NULL: the op's own */
} tokenpipe_wire;

typedef struct {
  char argument[32]; /* empty: no argument is at fault */
  char text[480];
} tokenpipe_error;

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

#ifdef __cplusplus
}
#endif

#endif
