// paddle_ops.cc: the ops of sysv_ops.hpp as Paddle custom operators, with the names, inputs,
// attributes and in-place maps of FastDeploy's. Compiled against the installed Paddle by
// tokenpipe/ops/build.py, without any header of CUDA: the same for builds of Paddle 3 with and
// without it.
//
// CPU and pinned tensors are used in place. For a save a tensor on a device is copied to the CPU,
// in the device's current stream; a get refuses it, because it writes in place.
#include "paddle/phi/api/ext/op_meta_info.h"
#include "paddle/phi/api/include/context_pool.h"
#include "paddle/phi/core/device_context.h"

#include "sysv_ops.hpp"
#include "tokenpipe_ops.h"

namespace {

using tp::OpArgumentError;
using tp::sysv::SysvError;
using tp::sysv::Wire;
using tp::sysv::wire_from_environment;

constexpr int default_queue_id = 1;

// ---------------------------------------------------------------- errors

// What the calling thread's last failed op says: through Paddle only a text comes out.
struct LastError {
  int code = 0;
  tokenpipe_error told{};
};
thread_local LastError last_error;

[[noreturn]] void fail(int code, const std::string &argument, const char *text) {
  last_error.code = code;
  std::snprintf(last_error.told.argument, sizeof(last_error.told.argument), "%s", argument.c_str());
  std::snprintf(last_error.told.text, sizeof(last_error.told.text), "%s", text);
  PD_THROW(text);
}

// Any other exception than Paddle's own would end the process.
template <class Act> void guarded(Act &&act) {
  try {
    act();
  } catch (const OpArgumentError &e) {
    fail(EINVAL, e.argument, e.what());
  } catch (const SysvError &e) {
    fail(e.code, "", e.what());
  } catch (const std::bad_alloc &e) {
    fail(ENOMEM, "", e.what());
  }
}

// ---------------------------------------------------------------- tensors

bool is_on_host(const paddle::Tensor &t) { return t.is_cpu() || t.is_gpu_pinned(); }

// The tensor, or a copy of one on a device. It is copied in the device's current stream, in which
// the caller's work lies, and waited for there. (What Paddle calls a blocking copy is in the
// default stream, which waits for no stream of another framework's.)
paddle::Tensor on_host(const paddle::Tensor &t) {
  if (is_on_host(t))
    return t;
  paddle::Tensor copy = t.copy_to(paddle::CPUPlace(), false);
  paddle::experimental::DeviceContextPool::Instance().Get(t.place())->Wait();
  return copy;
}

// A tensor that a save reads, for the time of one call.
class Input {
public:
  Input(const char *name, const paddle::Tensor &t) : tensor_(on_host(t)) {
    if (!tensor_.is_contiguous())
      tensor_ = tensor_.copy_to(paddle::CPUPlace(), true);
    view_ = view_of(name, tensor_);
  }
  operator const tp::Tensor &() const noexcept { return view_; }

  [[nodiscard]] static tp::Tensor view_of(const char *name, const paddle::Tensor &t) {
    tp::Tensor view;
    view.data = t.data();
    view.dtype = t.dtype() == paddle::DataType::INT32     ? tp::Dtype::int32
                 : t.dtype() == paddle::DataType::INT64   ? tp::Dtype::int64
                 : t.dtype() == paddle::DataType::FLOAT32 ? tp::Dtype::float32
                                                          : tp::Dtype::other;
    view.dtype_name = phi::DataTypeToString(t.dtype());
    const std::vector<int64_t> shape = t.shape();
    if (shape.empty() || shape.size() > 3)
      throw OpArgumentError(name, std::string(name) + " has " + std::to_string(shape.size()) +
                                      " dimensions, must have 1 to 3");
    view.set_contiguous(static_cast<int>(shape.size()), shape.data());
    return view;
  }

private:
  paddle::Tensor tensor_;
  tp::Tensor view_;
};

// A tensor that a get writes.
tp::Tensor output(const char *name, const paddle::Tensor &t) {
  if (!is_on_host(t) || !t.is_contiguous())
    throw OpArgumentError(name, std::string(name) +
                                    " is written in place: must be contiguous and on the CPU");
  return Input::view_of(name, t);
}

bool flag(const char *name, const paddle::Tensor &t) {
  if (t.dtype() != paddle::DataType::BOOL || t.numel() < 1)
    throw OpArgumentError(name, std::string(name) + " is " + phi::DataTypeToString(t.dtype()) +
                                    " with " + std::to_string(t.numel()) +
                                    " elements, must be bool [1]");
  return *on_host(t).data<bool>();
}

// ---------------------------------------------------------------- the ops

void SaveOutputDynamic(const paddle::Tensor &x, const paddle::Tensor &not_need_stop,
                       const paddle::Tensor &preempted_idx, int64_t rank_id, int msg_queue_id,
                       [[maybe_unused]] bool save_each_rank) { // as in FastDeploy
  guarded([&] {
    if (rank_id > 0) // before any copy from a device
      return;
    tp::sysv::save_output(wire_from_environment(msg_queue_id), Input("x", x),
                          flag("not_need_stop", not_need_stop),
                          Input("preempted_idx", preempted_idx), rank_id);
  });
}

void SaveOutput(const paddle::Tensor &x, const paddle::Tensor &not_need_stop,
                const paddle::Tensor &preempted_idx, int64_t rank_id, bool save_each_rank) {
  SaveOutputDynamic(x, not_need_stop, preempted_idx, rank_id, default_queue_id, save_each_rank);
}

void GetOutputDynamic(const paddle::Tensor &x, int64_t rank_id, bool wait_flag, int msg_queue_id) {
  guarded([&] {
    tp::sysv::get_output(wire_from_environment(msg_queue_id), output("x", x), rank_id, wait_flag,
                         false);
  });
}

void GetOutput(const paddle::Tensor &x, int64_t rank_id, bool wait_flag) {
  GetOutputDynamic(x, rank_id, wait_flag, default_queue_id);
}

void GetOutputEpDynamic(const paddle::Tensor &x, int64_t rank_id, bool wait_flag,
                        int msg_queue_id) {
  guarded([&] {
    tp::sysv::get_output(wire_from_environment(msg_queue_id), output("x", x), rank_id, wait_flag,
                         true);
  });
}

void GetOutputEp(const paddle::Tensor &x, int64_t rank_id, bool wait_flag) {
  GetOutputEpDynamic(x, rank_id, wait_flag, default_queue_id);
}

void SaveOutputTopk(const paddle::Tensor &x, const paddle::Tensor &topk_ids,
                    const paddle::Tensor &logprob_scores, const paddle::Tensor &ranks,
                    const paddle::Tensor &not_need_stop, const paddle::Tensor &preempted_idx,
                    int64_t rank_id) {
  guarded([&] {
    if (rank_id > 0)
      return;
    tp::sysv::save_output_topk(wire_from_environment(default_queue_id), Input("x", x),
                               Input("topk_ids", topk_ids), Input("logprob_scores", logprob_scores),
                               Input("ranks", ranks), flag("not_need_stop", not_need_stop),
                               Input("preempted_idx", preempted_idx), rank_id);
  });
}

void GetOutputTopk(const paddle::Tensor &x, const paddle::Tensor &scores,
                   const paddle::Tensor &ranks, int k, [[maybe_unused]] int64_t rank_id,
                   bool wait_flag) {
  guarded([&] {
    tp::sysv::get_output_topk(wire_from_environment(default_queue_id), output("x", x),
                              output("scores", scores), output("ranks", ranks), k, wait_flag);
  });
}

void SpeculateSaveOutputDynamic(const paddle::Tensor &accept_tokens,
                                const paddle::Tensor &accept_num,
                                const paddle::Tensor &not_need_stop,
                                const paddle::Tensor &seq_lens_decoder,
                                const paddle::Tensor &prompt_lens,
                                const paddle::Tensor &preempted_idx, int64_t rank_id,
                                int msg_queue_id, bool save_each_rank, bool skip_prefill) {
  guarded([&] {
    const Wire wire = wire_from_environment(msg_queue_id);
    if (tp::sysv::saves_nothing(wire, rank_id, save_each_rank))
      return;
    tp::sysv::speculate_save_output(
        wire, Input("accept_tokens", accept_tokens), Input("accept_num", accept_num),
        flag("not_need_stop", not_need_stop), Input("seq_lens_decoder", seq_lens_decoder),
        Input("prompt_lens", prompt_lens), Input("preempted_idx", preempted_idx), rank_id,
        save_each_rank, skip_prefill);
  });
}

void SpeculateSaveOutput(const paddle::Tensor &accept_tokens, const paddle::Tensor &accept_num,
                         const paddle::Tensor &not_need_stop,
                         const paddle::Tensor &seq_lens_decoder, const paddle::Tensor &prompt_lens,
                         const paddle::Tensor &preempted_idx, int64_t rank_id, bool save_each_rank,
                         bool skip_prefill) {
  SpeculateSaveOutputDynamic(accept_tokens, accept_num, not_need_stop, seq_lens_decoder,
                             prompt_lens, preempted_idx, rank_id, default_queue_id, save_each_rank,
                             skip_prefill);
}

void MtpSaveFirstTokenDynamic(const paddle::Tensor &x, const paddle::Tensor &not_need_stop,
                              const paddle::Tensor &seq_lens_decoder,
                              const paddle::Tensor &prompt_lens, const paddle::Tensor &step_idx,
                              int64_t rank_id, int msg_queue_id, bool save_each_rank,
                              bool skip_chunk_prefill) {
  guarded([&] {
    if (rank_id > 0 && !save_each_rank)
      return;
    tp::sysv::mtp_save_first_token(
        wire_from_environment(msg_queue_id), Input("x", x), flag("not_need_stop", not_need_stop),
        Input("seq_lens_decoder", seq_lens_decoder), Input("prompt_lens", prompt_lens),
        Input("step_idx", step_idx), rank_id, save_each_rank, skip_chunk_prefill);
  });
}

void MtpSaveFirstToken(const paddle::Tensor &x, const paddle::Tensor &not_need_stop,
                       const paddle::Tensor &seq_lens_decoder, const paddle::Tensor &prompt_lens,
                       const paddle::Tensor &step_idx, int64_t rank_id, bool save_each_rank,
                       bool skip_chunk_prefill) {
  MtpSaveFirstTokenDynamic(x, not_need_stop, seq_lens_decoder, prompt_lens, step_idx, rank_id,
                           default_queue_id, save_each_rank, skip_chunk_prefill);
}

void SpeculateGetOutputDynamic(const paddle::Tensor &x, int64_t rank_id, bool wait_flag,
                               int msg_queue_id, bool get_each_rank) {
  guarded([&] {
    tp::sysv::speculate_get_output(wire_from_environment(msg_queue_id), output("x", x), rank_id,
                                   wait_flag, get_each_rank);
  });
}

void SpeculateGetOutput(const paddle::Tensor &x, int64_t rank_id, bool wait_flag,
                        bool get_each_rank) {
  SpeculateGetOutputDynamic(x, rank_id, wait_flag, default_queue_id, get_each_rank);
}

// Whichever of the two savers: their inputs are the same.
template <bool is_first_token>
void SaveSpeculateTopk(const paddle::Tensor &sampled_token_ids,
                       const paddle::Tensor &logprob_token_ids,
                       const paddle::Tensor &logprob_scores, const paddle::Tensor &logprob_ranks,
                       const paddle::Tensor &token_num_per_batch,
                       const paddle::Tensor &cu_batch_token_offset,
                       const paddle::Tensor &not_need_stop, const paddle::Tensor &seq_lens_decoder,
                       const paddle::Tensor &prompt_lens, const paddle::Tensor &preempted_idx,
                       int message_flag, int64_t rank_id, bool save_each_rank) {
  guarded([&] {
    const Wire wire = wire_from_environment(default_queue_id);
    if (is_first_token ? rank_id > 0 && !save_each_rank
                       : tp::sysv::saves_nothing(wire, rank_id, save_each_rank))
      return;
    const Input sampled("sampled_token_ids", sampled_token_ids),
        ids("logprob_token_ids", logprob_token_ids), scores("logprob_scores", logprob_scores),
        ranks("logprob_ranks", logprob_ranks), counts("token_num_per_batch", token_num_per_batch),
        offsets("cu_batch_token_offset", cu_batch_token_offset),
        lengths("seq_lens_decoder", seq_lens_decoder), prompts("prompt_lens", prompt_lens),
        marks("preempted_idx", preempted_idx);
    const tp::sysv::SpeculateTopkInputs in{sampled, ids,     scores,  ranks, counts,
                                           offsets, lengths, prompts, marks};
    const bool has_work = flag("not_need_stop", not_need_stop);
    if (is_first_token)
      tp::sysv::mtp_save_first_token_with_topk(wire, in, has_work, message_flag, rank_id,
                                               save_each_rank);
    else
      tp::sysv::speculate_save_output_topk(wire, in, has_work, message_flag, rank_id,
                                           save_each_rank);
  });
}

void SpeculateGetOutputTopk(const paddle::Tensor &output_tokens,
                            const paddle::Tensor &output_scores, const paddle::Tensor &output_ranks,
                            int real_k, [[maybe_unused]] int64_t rank_id, bool wait_flag) {
  guarded([&] {
    tp::sysv::speculate_get_output_topk(wire_from_environment(default_queue_id),
                                        output("output_tokens", output_tokens),
                                        output("output_scores", output_scores),
                                        output("output_ranks", output_ranks), real_k, wait_flag);
  });
}

} // namespace

// The errno and the text of the calling thread's last failed op, which is forgotten then; 0: none.
extern "C" __attribute__((visibility("default"))) int tokenpipe_last_error(tokenpipe_error *error) {
  *error = last_error.told;
  return std::exchange(last_error, {}).code;
}

#ifndef PD_BUILD_STATIC_OP
#define PD_BUILD_STATIC_OP(name) PD_BUILD_OP(static_op_##name)
#endif

PD_BUILD_STATIC_OP(save_output)
    .Inputs({"x", "not_need_stop", "preempted_idx"})
    .Attrs({"rank_id: int64_t", "save_each_rank: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(SaveOutput));

PD_BUILD_STATIC_OP(save_output_dynamic)
    .Inputs({"x", "not_need_stop", "preempted_idx"})
    .Attrs({"rank_id: int64_t", "msg_queue_id: int", "save_each_rank: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(SaveOutputDynamic));

PD_BUILD_STATIC_OP(get_output)
    .Inputs({"x"})
    .Attrs({"rank_id: int64_t", "wait_flag: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(GetOutput));

PD_BUILD_STATIC_OP(get_output_dynamic)
    .Inputs({"x"})
    .Attrs({"rank_id: int64_t", "wait_flag: bool", "msg_queue_id: int"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(GetOutputDynamic));

PD_BUILD_STATIC_OP(get_output_ep)
    .Inputs({"x"})
    .Attrs({"rank_id: int64_t", "wait_flag: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(GetOutputEp));

PD_BUILD_STATIC_OP(get_output_ep_dynamic)
    .Inputs({"x"})
    .Attrs({"rank_id: int64_t", "wait_flag: bool", "msg_queue_id: int"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(GetOutputEpDynamic));

PD_BUILD_STATIC_OP(save_output_topk)
    .Inputs({"x", "topk_ids", "logprob_scores", "ranks", "not_need_stop", "preempted_idx"})
    .Attrs({"rank_id: int64_t"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(SaveOutputTopk));

PD_BUILD_STATIC_OP(get_output_topk)
    .Inputs({"x", "scores", "ranks"})
    .Attrs({"k: int", "rank_id: int64_t", "wait_flag: bool"})
    .Outputs({"x_out", "scores_out", "ranks_out"})
    .SetInplaceMap({{"x", "x_out"}, {"scores", "scores_out"}, {"ranks", "ranks_out"}})
    .SetKernelFn(PD_KERNEL(GetOutputTopk));

PD_BUILD_STATIC_OP(speculate_save_output)
    .Inputs({"accept_tokens", "accept_num", "not_need_stop", "seq_lens_decoder", "prompt_lens",
             "preempted_idx"})
    .Attrs({"rank_id: int64_t", "save_each_rank: bool", "skip_prefill: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"accept_tokens", "x_out"}})
    .SetKernelFn(PD_KERNEL(SpeculateSaveOutput));

PD_BUILD_STATIC_OP(speculate_save_output_dynamic)
    .Inputs({"accept_tokens", "accept_num", "not_need_stop", "seq_lens_decoder", "prompt_lens",
             "preempted_idx"})
    .Attrs({"rank_id: int64_t", "msg_queue_id: int", "save_each_rank: bool", "skip_prefill: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"accept_tokens", "x_out"}})
    .SetKernelFn(PD_KERNEL(SpeculateSaveOutputDynamic));

PD_BUILD_STATIC_OP(mtp_save_first_token)
    .Inputs({"x", "not_need_stop", "seq_lens_decoder", "prompt_lens", "step_idx"})
    .Attrs({"rank_id: int64_t", "save_each_rank: bool", "skip_chunk_prefill: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(MtpSaveFirstToken));

PD_BUILD_STATIC_OP(mtp_save_first_token_dynamic)
    .Inputs({"x", "not_need_stop", "seq_lens_decoder", "prompt_lens", "step_idx"})
    .Attrs({"rank_id: int64_t", "msg_queue_id: int", "save_each_rank: bool",
            "skip_chunk_prefill: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(MtpSaveFirstTokenDynamic));

PD_BUILD_STATIC_OP(speculate_get_output)
    .Inputs({"x"})
    .Attrs({"rank_id: int64_t", "wait_flag: bool", "get_each_rank: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(SpeculateGetOutput));

PD_BUILD_STATIC_OP(speculate_get_output_dynamic)
    .Inputs({"x"})
    .Attrs({"rank_id: int64_t", "wait_flag: bool", "msg_queue_id: int", "get_each_rank: bool"})
    .Outputs({"x_out"})
    .SetInplaceMap({{"x", "x_out"}})
    .SetKernelFn(PD_KERNEL(SpeculateGetOutputDynamic));

PD_BUILD_STATIC_OP(speculate_save_output_topk)
    .Inputs({"sampled_token_ids", "logprob_token_ids", "logprob_scores", "logprob_ranks",
             "token_num_per_batch", "cu_batch_token_offset", "not_need_stop", "seq_lens_decoder",
             "prompt_lens", "preempted_idx"})
    .Attrs({"message_flag: int", "rank_id: int64_t", "save_each_rank: bool"})
    .SetKernelFn(PD_KERNEL(SaveSpeculateTopk<false>));

PD_BUILD_STATIC_OP(mtp_save_first_token_with_topk)
    .Inputs({"sampled_token_ids", "logprob_token_ids", "logprob_scores", "logprob_ranks",
             "token_num_per_batch", "cu_batch_token_offset", "not_need_stop", "seq_lens_decoder",
             "prompt_lens", "preempted_idx"})
    .Attrs({"message_flag: int", "rank_id: int64_t", "save_each_rank: bool"})
    .SetKernelFn(PD_KERNEL(SaveSpeculateTopk<true>));

PD_BUILD_STATIC_OP(speculate_get_output_topk)
    .Inputs({"output_tokens", "output_scores", "output_ranks"})
    .Attrs({"real_k: int", "rank_id: int64_t", "wait_flag: bool"})
    .Outputs({"output_tokens_out", "output_scores_out", "output_ranks_out"})
    .SetInplaceMap({{"output_tokens", "output_tokens_out"},
                    {"output_scores", "output_scores_out"},
                    {"output_ranks", "output_ranks_out"}})
    .SetKernelFn(PD_KERNEL(SpeculateGetOutputTopk));
