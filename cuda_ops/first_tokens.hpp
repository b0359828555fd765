// first_tokens.hpp: the first tokens of a prefill step and the drafts behind them, as the
// speculative step that Writer::save() takes.
#pragma once

#include "output_ops.hpp"

namespace tp {

// Design: holds the columns that the caller does not have; arguments() points into them.
class FirstTokens {
public:
  // `a.tokens` [n, 2 or more]; a row has its first token and its first draft where `step_idx` [n]
  // is 1, none elsewhere.
  FirstTokens(const SaveArguments &a, const Tensor &step_idx) : arguments_(a) {
    const int64_t n = a.tokens.shape[0];
    read_counts("step_idx", step_idx, n);
    for (int32_t &count : counts_)
      count = count == 1 ? 2 : 0;
    arguments_.tokens.shape[1] = std::min<int64_t>(a.tokens.shape[1], 2);
    arguments_.counts = Counts::accepted;
  }

  // `a.tokens` [n, D], of which `token_num` [n] stand in front of the last draft; 0: the row has no
  // token yet. The candidates, `a.topk_ids` and `a.logprobs` [n, T], `a.ranks` [n], are the first
  // tokens'; drafts have none (ids -1, logprob 0.0, rank 0).
  FirstTokens(const SaveArguments &a, const Tensor &token_num, const tp_sizes &sizes)
      : arguments_(a) {
    const int64_t n = a.tokens.shape[0], depth = a.tokens.shape[1], width = a.topk_ids.shape[1];
    read_counts("token_num", token_num, n);
    for (int32_t &count : counts_)
      count += count > 0 && count < INT32_MAX; // save() refuses what is beyond D
    arguments_.topk_ids = arguments_.logprobs = arguments_.ranks = {};
    arguments_.counts = Counts::accepted;
    (void)Writer::check(arguments_, sizes); // what follows from n and D fits
    Writer::expect("topk_ids", a.topk_ids, false, 2, {n, width, 0}, "int32 or int64");
    Writer::expect("logprobs", a.logprobs, true, 2, {n, width, 0}, "float32 or float16");
    Writer::expect("ranks", a.ranks, false, 1, {n, 0, 0}, "int32 or int64");
    const auto num_tokens = static_cast<size_t>(n * depth), of_each = static_cast<size_t>(width);
    ids_.assign(num_tokens * of_each, -1);
    logprobs_.assign(num_tokens * of_each, 0.0f);
    ranks_.assign(num_tokens, 0);
    for (int64_t i = 0; depth != 0 && width != 0 && i < n; ++i)
      fill_row(a, i, depth, width);
    const int64_t shape[3] = {n, depth, width};
    point(arguments_.topk_ids, Dtype::int32, ids_.data(), 3, shape);
    point(arguments_.logprobs, Dtype::float32, logprobs_.data(), 3, shape);
    point(arguments_.ranks, Dtype::int32, ranks_.data(), 2, shape);
  }

  FirstTokens(const FirstTokens &) = delete;
  FirstTokens &operator=(const FirstTokens &) = delete;

  [[nodiscard]] const SaveArguments &arguments() const noexcept { return arguments_; }

private:
  void read_counts(const char *name, const Tensor &t, int64_t n) {
    const Tensor &tokens = arguments_.tokens;
    Writer::expect("tokens", tokens, false, 2, {n, tokens.shape[1], 0}, "int32 or int64");
    Writer::expect(name, t, false, 1, {n, 0, 0}, "int32 or int64");
    counts_.resize(static_cast<size_t>(n));
    Writer::copy_column(name, counts_.data(), t, counts_.size());
    point(arguments_.accept_num, Dtype::int32, counts_.data(), 1, &n);
  }

  void fill_row(const SaveArguments &a, int64_t i, int64_t depth, int64_t width) {
    int32_t *ids = ids_.data() + i * depth * width;
    for (int64_t j = 1; j < depth; ++j)
      copy("tokens", ids + j * width, a.tokens, i * a.tokens.stride[0] + j * a.tokens.stride[1], 1,
           1);
    copy("topk_ids", ids, a.topk_ids, i * a.topk_ids.stride[0], width, a.topk_ids.stride[1]);
    copy_as_float(logprobs_.data() + i * depth * width, a.logprobs, i * a.logprobs.stride[0], width,
                  a.logprobs.stride[1]);
    copy("ranks", ranks_.data() + i * depth, a.ranks, i * a.ranks.stride[0], 1, 1);
  }

  static void copy(const char *name, int32_t *to, const Tensor &t, int64_t at, int64_t count,
                   int64_t stride) {
    if (!copy_ints(to, t, at, count, stride))
      Writer::refuse_outside_int32(name, t);
  }

  static void point(Tensor &t, Dtype dtype, const void *data, int ndim, const int64_t *shape) {
    t.data = data;
    t.dtype = dtype;
    t.set_contiguous(ndim, shape);
  }

  SaveArguments arguments_;
  std::vector<int32_t> counts_, ids_, ranks_;
  std::vector<float> logprobs_;
};

} // namespace tp
