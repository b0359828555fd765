// tokenpipe_ops.cpp: the C face of sysv_ops.hpp and attached_writer.hpp. No logic but the checks
// that C's types leave open.
#include "tokenpipe_ops.h"

#include "attached_writer.hpp"
#include "sysv_ops.hpp"

struct tokenpipe_writer {
  tp::AttachedWriter writer;
};

#define TOKENPIPE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using tp::Dtype;
using tp::Tensor;
using tp::sysv::Wire;

struct Kind {
  int32_t code;
  Dtype dtype;
  const char *name;
};
constexpr Kind kinds[] = {
    {TOKENPIPE_INT32, Dtype::int32, "int32"},
    {TOKENPIPE_INT64, Dtype::int64, "int64"},
    {TOKENPIPE_FLOAT32, Dtype::float32, "float32"},
    {TOKENPIPE_FLOAT16, Dtype::float16, "float16"},
    {TOKENPIPE_BFLOAT16, Dtype::bfloat16, "bfloat16"},
    {TOKENPIPE_UINT8, Dtype::uint8, "uint8"},
};

[[noreturn]] void refuse(const char *name, const std::string &what) {
  throw tp::OpArgumentError(name, std::string(name) + " " + what);
}

// NULL: the tensor is not there.
Tensor view(const char *name, const tokenpipe_tensor *given) {
  Tensor tensor;
  if (given == nullptr)
    return tensor;
  if (given->ndim < 1 || given->ndim > 3)
    refuse(name, "has " + std::to_string(given->ndim) + " dimensions, must have 1 to 3");
  constexpr int64_t most = INT64_MAX / 16; // elements: neither they nor their bytes overflow
  int64_t count = 1;
  for (int i = 0; i < given->ndim; ++i) {
    const int64_t size = given->shape[i];
    if (size < 0 || (count != 0 && size > most / count))
      refuse(name, "has " + std::to_string(size) + " as shape[" + std::to_string(i) + "]");
    count *= size;
  }
  if (given->data == nullptr && count != 0)
    refuse(name, "has " + std::to_string(count) + " elements and no data");
  tensor.data = given->data;
  tensor.dtype_name = "dtype " + std::to_string(given->dtype);
  for (const Kind &kind : kinds)
    if (kind.code == given->dtype) {
      tensor.dtype = kind.dtype;
      tensor.dtype_name = kind.name;
    }
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
  } catch (const tp::PipelineError &e) {
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
  return {view("sampled_token_ids", sampled_token_ids),
          view("logprob_token_ids", logprob_token_ids),
          view("logprob_scores", logprob_scores),
          view("logprob_ranks", logprob_ranks),
          view("token_num_per_batch", token_num_per_batch),
          view("cu_batch_token_offset", cu_batch_token_offset),
          view("seq_lens_decoder", seq_lens_decoder),
          view("prompt_lens", prompt_lens),
          view("preempted_idx", preempted_idx)};
}

} // namespace

TOKENPIPE_EXPORT int tokenpipe_save_output(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                           bool not_need_stop,
                                           const tokenpipe_tensor *preempted_idx, int64_t rank_id,
                                           tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::save_output(where(wire), view("x", x), not_need_stop,
                          view("preempted_idx", preempted_idx), rank_id);
  });
}

TOKENPIPE_EXPORT int tokenpipe_save_output_topk(
    const tokenpipe_wire *wire, const tokenpipe_tensor *x, const tokenpipe_tensor *topk_ids,
    const tokenpipe_tensor *logprob_scores, const tokenpipe_tensor *ranks, bool not_need_stop,
    const tokenpipe_tensor *preempted_idx, int64_t rank_id, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::save_output_topk(where(wire), view("x", x), view("topk_ids", topk_ids),
                               view("logprob_scores", logprob_scores), view("ranks", ranks),
                               not_need_stop, view("preempted_idx", preempted_idx), rank_id);
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
    tp::sysv::speculate_save_output(
        where(wire), view("accept_tokens", accept_tokens), view("accept_num", accept_num),
        not_need_stop, view("seq_lens_decoder", seq_lens_decoder), view("prompt_lens", prompt_lens),
        view("preempted_idx", preempted_idx), rank_id, save_each_rank, skip_prefill);
  });
}

TOKENPIPE_EXPORT int tokenpipe_mtp_save_first_token(
    const tokenpipe_wire *wire, const tokenpipe_tensor *x, bool not_need_stop,
    const tokenpipe_tensor *seq_lens_decoder, const tokenpipe_tensor *prompt_lens,
    const tokenpipe_tensor *step_idx, int64_t rank_id, bool save_each_rank, bool skip_chunk_prefill,
    tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::mtp_save_first_token(where(wire), view("x", x), not_need_stop,
                                   view("seq_lens_decoder", seq_lens_decoder),
                                   view("prompt_lens", prompt_lens), view("step_idx", step_idx),
                                   rank_id, save_each_rank, skip_chunk_prefill);
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
  return guarded(
      error, [&] { tp::sysv::get_output(where(wire), view("x", x), rank_id, wait_flag, false); });
}

TOKENPIPE_EXPORT int tokenpipe_get_output_ep(const tokenpipe_wire *wire, const tokenpipe_tensor *x,
                                             int64_t rank_id, bool wait_flag,
                                             tokenpipe_error *error) {
  return guarded(
      error, [&] { tp::sysv::get_output(where(wire), view("x", x), rank_id, wait_flag, true); });
}

TOKENPIPE_EXPORT int tokenpipe_get_output_topk(const tokenpipe_wire *wire,
                                               const tokenpipe_tensor *x,
                                               const tokenpipe_tensor *scores,
                                               const tokenpipe_tensor *ranks, int32_t k, int64_t,
                                               bool wait_flag, tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::get_output_topk(where(wire), view("x", x), view("scores", scores),
                              view("ranks", ranks), k, wait_flag);
  });
}

TOKENPIPE_EXPORT int tokenpipe_speculate_get_output(const tokenpipe_wire *wire,
                                                    const tokenpipe_tensor *x, int64_t rank_id,
                                                    bool wait_flag, bool get_each_rank,
                                                    tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::speculate_get_output(where(wire), view("x", x), rank_id, wait_flag, get_each_rank);
  });
}

TOKENPIPE_EXPORT int tokenpipe_speculate_get_output_topk(const tokenpipe_wire *wire,
                                                         const tokenpipe_tensor *output_tokens,
                                                         const tokenpipe_tensor *output_scores,
                                                         const tokenpipe_tensor *output_ranks,
                                                         int32_t real_k, int64_t, bool wait_flag,
                                                         tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::sysv::speculate_get_output_topk(where(wire), view("output_tokens", output_tokens),
                                        view("output_scores", output_scores),
                                        view("output_ranks", output_ranks), real_k, wait_flag);
  });
}

// ---------------------------------------------------------------- a pipeline's shared memory

namespace {

tp::AttachedWriter &opened(tokenpipe_writer *writer) {
  if (writer == nullptr)
    refuse("writer", "is NULL");
  return writer->writer;
}

// What every save says of its rows.
tp::SaveArguments about(const tokenpipe_step *step) {
  if (step == nullptr)
    refuse("step", "is NULL");
  tp::SaveArguments a;
  a.generations = view("generations", step->generations);
  a.rows = view("rows", step->rows);
  a.states = view("states", step->states);
  a.positions = view("positions", step->positions);
  a.not_need_stop = step->not_need_stop;
  return a;
}

void add_candidates(tp::SaveArguments &a, const tokenpipe_tensor *topk_ids,
                    const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks,
                    int32_t message_flag) {
  if (topk_ids == nullptr)
    refuse("topk_ids", "is NULL");
  a.topk_ids = view("topk_ids", topk_ids);
  a.logprobs = view("logprobs", logprobs);
  a.ranks = view("ranks", ranks);
  a.message_flag = static_cast<uint32_t>(message_flag);
}

// Without it a speculative step would be a plain one.
Tensor required(const char *name, const tokenpipe_tensor *given) {
  if (given == nullptr)
    refuse(name, "is NULL");
  return view(name, given);
}

} // namespace

TOKENPIPE_EXPORT int tokenpipe_shm_attach(const char *name, double timeout_s,
                                          tokenpipe_writer **writer, tokenpipe_error *error) {
  return guarded(error, [&] {
    if (writer == nullptr)
      refuse("writer", "is NULL");
    *writer = nullptr;
    *writer = new tokenpipe_writer{{name, timeout_s}};
  });
}

TOKENPIPE_EXPORT void tokenpipe_shm_close(tokenpipe_writer *writer) { delete writer; }

TOKENPIPE_EXPORT int tokenpipe_shm_limits(const tokenpipe_writer *writer, tokenpipe_limits *limits,
                                          tokenpipe_error *error) {
  return guarded(error, [&] {
    if (writer == nullptr || limits == nullptr)
      refuse(writer == nullptr ? "writer" : "limits", "is NULL");
    const tp_sizes &sizes = writer->writer.sizes();
    *limits = {static_cast<int32_t>(sizes.max_num_seqs),
               static_cast<int32_t>(sizes.max_draft_tokens),
               static_cast<int32_t>(sizes.top_logprobs + 1),
               static_cast<int32_t>(sizes.max_pooling_floats),
               static_cast<int32_t>(tp::max_prompt_tokens(sizes))};
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_save_output(tokenpipe_writer *writer, const tokenpipe_step *step,
                                               const tokenpipe_tensor *tokens,
                                               tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = view("tokens", tokens);
    opened(writer).save(a, step->wait_s);
  });
}

TOKENPIPE_EXPORT int
tokenpipe_shm_save_output_topk(tokenpipe_writer *writer, const tokenpipe_step *step,
                               const tokenpipe_tensor *tokens, const tokenpipe_tensor *topk_ids,
                               const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks,
                               tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = view("tokens", tokens);
    add_candidates(a, topk_ids, logprobs, ranks, TOKENPIPE_MESSAGE_TARGET);
    opened(writer).save(a, step->wait_s);
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_speculate_save_output(tokenpipe_writer *writer,
                                                         const tokenpipe_step *step,
                                                         const tokenpipe_tensor *accept_tokens,
                                                         const tokenpipe_tensor *accept_num,
                                                         tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = view("accept_tokens", accept_tokens);
    a.accept_num = required("accept_num", accept_num);
    opened(writer).save(a, step->wait_s);
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_speculate_save_output_topk(
    tokenpipe_writer *writer, const tokenpipe_step *step, const tokenpipe_tensor *accept_tokens,
    const tokenpipe_tensor *accept_num, const tokenpipe_tensor *topk_ids,
    const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks, int32_t message_flag,
    tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = view("accept_tokens", accept_tokens);
    a.accept_num = required("accept_num", accept_num);
    add_candidates(a, topk_ids, logprobs, ranks, message_flag);
    opened(writer).save(a, step->wait_s);
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_mtp_save_first_token(tokenpipe_writer *writer,
                                                        const tokenpipe_step *step,
                                                        const tokenpipe_tensor *tokens,
                                                        const tokenpipe_tensor *step_idx,
                                                        tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = view("tokens", tokens);
    opened(writer).save(tp::FirstTokens(a, view("step_idx", step_idx)).arguments(), step->wait_s);
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_mtp_save_first_token_with_topk(
    tokenpipe_writer *writer, const tokenpipe_step *step, const tokenpipe_tensor *tokens,
    const tokenpipe_tensor *token_num, const tokenpipe_tensor *topk_ids,
    const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks, int32_t message_flag,
    tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = view("tokens", tokens);
    add_candidates(a, topk_ids, logprobs, ranks, message_flag);
    tp::AttachedWriter &to = opened(writer);
    to.save(tp::FirstTokens(a, view("token_num", token_num), to.sizes()).arguments(), step->wait_s);
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_save_pooling(tokenpipe_writer *writer,
                                                const tokenpipe_step *step,
                                                const tokenpipe_tensor *vectors,
                                                tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.vectors = required("vectors", vectors);
    opened(writer).save(a, step->wait_s);
  });
}

TOKENPIPE_EXPORT int
tokenpipe_shm_save_prompt_logprobs(tokenpipe_writer *writer, const tokenpipe_step *step,
                                   const tokenpipe_tensor *tokens, const tokenpipe_tensor *topk_ids,
                                   const tokenpipe_tensor *logprobs, const tokenpipe_tensor *ranks,
                                   tokenpipe_error *error) {
  return guarded(error, [&] {
    tp::SaveArguments a = about(step);
    a.tokens = required("tokens", tokens);
    const int64_t one = 1, count = a.tokens.shape[0];
    a.accept_num.data = &count;
    a.accept_num.dtype = Dtype::int64;
    a.accept_num.set_contiguous(1, &one);
    a.is_prompt = true;
    add_candidates(a, topk_ids, logprobs, ranks, TOKENPIPE_MESSAGE_TARGET);
    opened(writer).save(a, step->wait_s);
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_poll_control(tokenpipe_writer *writer, tokenpipe_event *events,
                                                int64_t room, int64_t *count,
                                                tokenpipe_error *error) {
  return guarded(error, [&] {
    if (count == nullptr)
      refuse("count", "is NULL");
    *count = 0;
    if (room < 0 || (room > 0 && events == nullptr))
      refuse("room", "is " + std::to_string(room) + ", must be that of events");
    opened(writer).poll_control(static_cast<uint64_t>(room), [&](const tp::ControlEvent &event) {
      events[(*count)++] = {static_cast<int32_t>(event.row), static_cast<int32_t>(event.generation),
                            static_cast<int32_t>(event.bit)};
    });
  });
}

TOKENPIPE_EXPORT int tokenpipe_shm_beat(tokenpipe_writer *writer, bool busy,
                                        tokenpipe_error *error) {
  return guarded(error, [&] { opened(writer).beat(busy); });
}
