// tokenpipe_ops.cpp: the C face of sysv_ops.hpp. No logic.
#include "tokenpipe_ops.h"

#include "sysv_ops.hpp"

#define TOKENPIPE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using tp::Dtype;
using tp::Tensor;
using tp::sysv::Wire;

Tensor view(const tokenpipe_tensor *given) {
  Tensor tensor;
  if (given == nullptr)
    return tensor;
  tensor.data = given->data;
  tensor.dtype = given->dtype == TOKENPIPE_INT32     ? Dtype::int32
                 : given->dtype == TOKENPIPE_INT64   ? Dtype::int64
                 : given->dtype == TOKENPIPE_FLOAT32 ? Dtype::float32
                                                     : Dtype::other;
  tensor.set_contiguous(given->ndim, given->shape);
  return tensor;
}

Wire where(const tokenpipe_wire *given) {
  if (given == nullptr)
    return tp::sysv::wire_from_environment(1);
  Wire wire;
  if (given->generation < 1 || given->generation > 4)
    throw tp::OpArgumentError("generation", "generation is " + std::to_string(given->generation) +
                                                ", must be 1 to 4");
  wire.generation = static_cast<tp::sysv::Generation>(given->generation);
  wire.queue_id = tp::sysv::checked_queue_id("queue_id", given->queue_id, wire.generation);
  tp::sysv::check_message_id("message_id", given->message_id);
  wire.message_id = given->message_id;
  if (given->folder != nullptr)
    wire.folder = given->folder;
  return wire;
}

void tell(tokenpipe_error *error, const char *argument, const char *text) noexcept {
  if (error == nullptr)
    return;
  std::snprintf(error->argument, sizeof(error->argument), "%s", argument);
  std::snprintf(error->text, sizeof(error->text), "%s", text);
}

// No exception leaves this file.
template <class Act> int guarded(tokenpipe_error *error, Act &&act) noexcept {
  try {
    act();
    return 0;
  } catch (const tp::OpArgumentError &e) {
    tell(error, e.argument.c_str(), e.what());
    return EINVAL;
  } catch (const tp::sysv::SysvError &e) {
    tell(error, "", e.what());
    return e.code;
  } catch (const std::exception &e) { // no memory
    tell(error, "", e.what());
    return ENOMEM;
  }
}

tp::sysv::SpeculateTopkInputs
inputs(const tokenpipe_tensor *sampled_token_ids, const tokenpipe_tensor *logprob_token_ids,
       const tokenpipe_tensor *logprob_scores, const tokenpipe_tensor *logprob_ranks,
       const tokenpipe_tensor *token_num_per_batch, const tokenpipe_tensor *cu_batch_token_offset,
       const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
       const tokenpipe_tensor *preempted_idx) {
  return {view(sampled_token_ids), view(logprob_token_ids),   view(logprob_scores),
          view(logprob_ranks),     view(token_num_per_batch), view(cu_batch_token_offset),
          view(seq_lens_decoder),  view(prompt_lens),         view(preempted_idx)};
}

} // namespace

TOKENPIPE_EXPORT int tokenpipe_save_output(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                           bool not_need_stop,
                                           const tokenpipe_tensor *preempted_idx, int64_t rank_id,
                                           tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::save_output(where(wire), view(x), not_need_stop, view(preempted_idx), rank_id);
  });
}

TOKENPIPE_EXPORT int tokenpipe_save_output_topk(
    const tokenpipe_wire *wire, const tokenpipe_tensor *x, const tokenpipe_tensor *topk_ids,
    const tokenpipe_tensor *logprob_scores, const tokenpipe_tensor *ranks, bool not_need_stop,
    const tokenpipe_tensor *preempted_idx, int64_t rank_id, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::save_output_topk(where(wire), view(x), view(topk_ids), view(logprob_scores),
                               view(ranks), not_need_stop, view(preempted_idx), rank_id);
  });
}

TOKENPIPE_EXPORT int
tokenpipe_speculate_save_output(const tokenpipe_wire *wire, const tokenpipe_tensor *accept_tokens,
                                const tokenpipe_tensor *accept_num, bool not_need_stop,
                                const tokenpipe_tensor *seq_lens_decoder,
                                const tokenpipe_tensor *prompt_lens,
                                const tokenpipe_tensor *preempted_idx, int64_t rank_id,
                                bool save_each_rank, bool skip_prefill, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::speculate_save_output(where(wire), view(accept_tokens), view(accept_num),
                                    not_need_stop, view(seq_lens_decoder), view(prompt_lens),
                                    view(preempted_idx), rank_id, save_each_rank, skip_prefill);
  });
}

TOKENPIPE_EXPORT int tokenpipe_mtp_save_first_token(
    const tokenpipe_wire *wire, const tokenpipe_tensor *x, bool not_need_stop,
    const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
    const tokenpipe_tensor *step_idx, int64_t rank_id, bool save_each_rank, bool skip_chunk_prefill,
    tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::mtp_save_first_token(where(wire), view(x), not_need_stop, view(seq_lens_decoder),
                                   view(prompt_lens), view(step_idx), rank_id, save_each_rank,
                                   skip_chunk_prefill);
  });
}

TOKENPIPE_EXPORT int tokenpipe_speculate_save_output_topk(
    const tokenpipe_wire *wire, const tokenpipe_tensor *sampled_token_ids,
    const tokenpipe_tensor *logprob_token_ids, const tokenpipe_tensor *logprob_scores,
    const tokenpipe_tensor *logprob_ranks, const tokenpipe_tensor *token_num_per_batch,
    const tokenpipe_tensor *cu_batch_token_offset, bool not_need_stop,
    const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
    const tokenpipe_tensor *preempted_idx, int32_t message_flag, int64_t rank_id,
    bool save_each_rank, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::speculate_save_output_topk(where(wire),
                                         inputs(sampled_token_ids, logprob_token_ids,
                                                logprob_scores, logprob_ranks, token_num_per_batch,
                                                cu_batch_token_offset, seq_lens_decoder,
                                                prompt_lens, preempted_idx),
                                         not_need_stop, message_flag, rank_id, save_each_rank);
  });
}

TOKENPIPE_EXPORT int tokenpipe_mtp_save_first_token_with_topk(
    const tokenpipe_wire *wire, const tokenpipe_tensor *sampled_token_ids,
    const tokenpipe_tensor *logprob_token_ids, const tokenpipe_tensor *logprob_scores,
    const tokenpipe_tensor *logprob_ranks, const tokenpipe_tensor *token_num_per_batch,
    const tokenpipe_tensor *cu_batch_token_offset, bool not_need_stop,
    const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
    const tokenpipe_tensor *preempted_idx, int32_t message_flag, int64_t rank_id,
    bool save_each_rank, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::mtp_save_first_token_with_topk(where(wire),
                                             inputs(sampled_token_ids, logprob_token_ids,
                                                    logprob_scores, logprob_ranks,
                                                    token_num_per_batch, cu_batch_token_offset,
                                                    seq_lens_decoder, prompt_lens, preempted_idx),
                                             not_need_stop, message_flag, rank_id, save_each_rank);
  });
}

TOKENPIPE_EXPORT int tokenpipe_get_output(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                          int64_t rank_id, bool wait_flag, tokenpipe_error *error) {
  return guarded(error,
                 [&] { tp::sysv::get_output(where(wire), view(x), rank_id, wait_flag, false); });
}

TOKENPIPE_EXPORT int tokenpipe_get_output_ep(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                             int64_t rank_id, bool wait_flag,
                                             tokenpipe_error *error) {
  return guarded(error,
                 [&] { tp::sysv::get_output(where(wire), view(x), rank_id, wait_flag, true); });
}

TOKENPIPE_EXPORT int tokenpipe_get_output_topk(const tokenpipe_wire *wire,
                                               const tokenpipe_tensor *x,
                                               const tokenpipe_tensor *scores,
                                               const tokenpipe_tensor *ranks, int32_t k, int64_t,
                                               bool wait_flag, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::get_output_topk(where(wire), view(x), view(scores), view(ranks), k, wait_flag);
  });
}

TOKENPIPE_EXPORT int tokenpipe_speculate_get_output(const tokenpipe_wire *wire,
                                                    const tokenpipe_tensor *x, int64_t rank_id,
                                                    bool wait_flag, bool get_each_rank,
                                                    tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::speculate_get_output(where(wire), view(x), rank_id, wait_flag, get_each_rank);
  });
}

TOKENPIPE_EXPORT int tokenpipe_speculate_get_output_topk(const tokenpipe_wire *wire,
                                                         const tokenpipe_tensor *output_tokens,
                                                         const tokenpipe_tensor *output_scores,
                                                         const tokenpipe_tensor *output_ranks,
                                                         int32_t real_k, int64_t, bool wait_flag,
                                                         tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::speculate_get_output_topk(where(wire), view(output_tokens), view(output_scores),
                                        view(output_ranks), real_k, wait_flag);
  });
}
