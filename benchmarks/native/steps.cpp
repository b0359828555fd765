// steps.cpp: the four hot paths of one step, turn by turn in one thread, for instruction counts:
// the engine's save, the reader's get, the decoder's turn, the client's read.
//
//   steps plain|topk|spec|spec_topk rows steps
//
// Each is a function that is not inlined, so that a profiler counts it by its name.
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "arena.hpp"
#include "client.hpp"
#include "decoder.hpp"
#include "output_ops.hpp"

namespace {

constexpr tp::Patience kNoWait{0, 0};
constexpr int64_t kWidth = 21, kDepth = 6;

struct Mode {
  bool has_candidates, is_speculative;
};

[[nodiscard]] tp_sizes sizes_of(const Mode &mode, uint32_t rows) {
  tp_sizes s = test::small_sizes();
  s.max_num_seqs = rows;
  s.top_logprobs = mode.has_candidates ? kWidth - 1 : 0;
  s.max_draft_tokens = mode.is_speculative ? kDepth : 1;
  s.max_request_id_bytes = 128;
  return s;
}

template <class T>
[[nodiscard]] tp::Tensor view(const std::vector<T> &of, tp::Dtype dtype,
                              const std::vector<int64_t> &shape) {
  tp::Tensor t;
  t.data = of.data();
  t.dtype = dtype;
  t.ndim = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return t;
}

// What an engine hands over: int64 tokens and candidates, as its sampler makes them.
struct Step {
  Step(const Mode &mode, int64_t rows)
      : generations(rows, 1), accept(rows), tokens(rows * kDepth, 100), ranks(rows * kDepth, 1),
        ids(rows * kDepth * kWidth, 7), logprobs(rows * kDepth * kWidth, -1.0F) {
    for (int64_t i = 0; i < rows; ++i)
      accept[i] = static_cast<int32_t>(1 + i % kDepth);
    arguments.generations = view(generations, tp::Dtype::int32, {rows});
    std::vector<int64_t> lead{rows};
    if (mode.is_speculative) {
      lead.push_back(kDepth);
      arguments.accept_num = view(accept, tp::Dtype::int32, {rows});
    }
    arguments.tokens = view(tokens, tp::Dtype::int64, lead);
    if (!mode.has_candidates)
      return;
    arguments.ranks = view(ranks, tp::Dtype::int64, lead);
    lead.push_back(kWidth);
    arguments.topk_ids = view(ids, tp::Dtype::int64, lead);
    arguments.logprobs = view(logprobs, tp::Dtype::float32, lead);
  }

  std::vector<int32_t> generations, accept;
  std::vector<int64_t> tokens, ranks, ids;
  std::vector<float> logprobs;
  tp::SaveArguments arguments;
};

// What the coordinator stores of a request that runs on.
void admit(const tp::Core &core, uint32_t row) {
  tp_admission &a = core.admission(row);
  a.first_block = UINT32_MAX;
  a.phase = TP_PHASE_RUNNING;
  tp::publish(core.admitted(row), uint64_t{1});
}

} // namespace

extern "C" {

[[gnu::noinline]] void save_step(tp::Writer &writer, const tp::SaveArguments &arguments) {
  CHECK(writer.wait_for_space(kNoWait), "the source ring is full");
  writer.save(arguments);
}

[[gnu::noinline]] void get_step(tp::Producer &producer, tp::SourceReader &reader) {
  tp_step *slot = producer.try_claim();
  CHECK(slot != nullptr && reader.wait_for_step(kNoWait), "there is no room or no step");
  reader.get_any(*slot);
  producer.publish();
  reader.release();
}

[[gnu::noinline]] void decode_step(tp::Decoder &decoder) {
  CHECK(decoder.run(1, kNoWait) == 1, "there is no slot");
}

[[gnu::noinline]] uint32_t read_step(const tp::Core &core, tp::Client &client) {
  const tp::Client::Head head = client.first();
  CHECK(head.is_there, "there is no frame");
  const uint32_t tokens = core.at<tp_frame>(head.offset).num_tokens;
  client.take(head.decoder);
  client.release(head.decoder);
  return tokens;
}
}

int main(int argc, char **argv) {
  CHECK(argc == 4, "steps plain|topk|spec|spec_topk rows steps");
  const std::string name = argv[1];
  const Mode mode{name == "topk" || name == "spec_topk", name == "spec" || name == "spec_topk"};
  CHECK(mode.has_candidates || mode.is_speculative || name == "plain", "%s", argv[1]);
  const auto rows = static_cast<uint32_t>(std::atoi(argv[2]));
  const uint64_t steps = std::strtoull(argv[3], nullptr, 10);
  const test::Arena arena(sizes_of(mode, rows));
  for (uint32_t row = 0; row < rows; ++row)
    admit(arena.core, row);
  const Step step(mode, rows);
  tp::Writer writer(arena.source);
  tp::Producer producer(arena.core);
  tp::SourceReader reader(arena.source, arena.core);
  tp::Decoder decoder(arena.core, 0);
  tp::Client client(arena.core);
  uint64_t tokens = 0;
  for (uint64_t i = 0; i < steps; ++i) {
    save_step(writer, step.arguments);
    get_step(producer, reader);
    decode_step(decoder);
    tokens += read_step(arena.core, client);
  }
  CHECK(tokens == writer.saved_tokens(), "%llu tokens came",
        static_cast<unsigned long long>(tokens));
}
