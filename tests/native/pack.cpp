// pack.cpp: the pack kernel's CPU form with tensors, ticket and slot of exactly the size that they
// need, so that a sanitizer sees a read or a write beside them. Any order of blocks and threads
// must give the same bytes. (Values are compared in tests/test_cuda.py.)
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "arena.hpp"
#include "pack.hpp"

namespace {

using Random = std::mt19937_64;

[[nodiscard]] uint64_t below(Random &random, uint64_t limit) { return random() % limit; }

// A tensor of n x d x t elements, the last one of which is the last of its memory.
struct Made {
  std::unique_ptr<uint8_t[]> memory;
  tp::PackColumn column{};
};

[[nodiscard]] Made make(Random &random, tp::Dtype dtype, uint64_t n, uint64_t d, uint64_t t,
                        uint64_t top) {
  const uint64_t bytes = dtype == tp::Dtype::int64 || dtype == tp::Dtype::uint64       ? 8
                         : dtype == tp::Dtype::uint8                                   ? 1
                         : dtype == tp::Dtype::float16 || dtype == tp::Dtype::bfloat16 ? 2
                                                                                       : 4;
  const uint64_t gap = 1 + below(random, 3); // every so many elements
  const uint64_t last = n * d * t == 0 ? 0 : (n * d * t - 1) * gap + 1;
  Made made{std::make_unique<uint8_t[]>(last * bytes), {}};
  for (uint64_t i = 0; i < last; ++i) {
    const uint64_t value = below(random, top);
    std::memcpy(&made.memory[i * bytes], &value, bytes);
  }
  made.column.data = made.memory.get();
  made.column.dtype = dtype;
  const auto step = static_cast<int64_t>(gap);
  made.column.stride[2] = step;
  made.column.stride[1] = step * static_cast<int64_t>(t);
  made.column.stride[0] = step * static_cast<int64_t>(t * d);
  return made;
}

// The strides of [n, t] where there is no d.
void flatten(tp::PackColumn &column) {
  column.stride[1] = column.stride[2];
  column.stride[2] = 0;
}

void run(Random &random) {
  constexpr uint32_t most = 70;
  const tp::Dtype ints[] = {tp::Dtype::int32, tp::Dtype::int64, tp::Dtype::uint32,
                            tp::Dtype::uint64};
  const tp::Dtype floats[] = {tp::Dtype::float32, tp::Dtype::float16, tp::Dtype::bfloat16};
  const auto int_dtype = [&] { return ints[below(random, 4)]; };
  const uint64_t n = below(random, most + 1), depth = 1 + below(random, 5),
                 width = below(random, 5);
  const bool is_packed = below(random, 2);
  const uint64_t d = is_packed ? depth : 1;
  // Now and then a value that is refused: the step is empty then, and nothing else is touched.
  const uint64_t top = below(random, 8) == 0 ? uint64_t{1} << 31 : 1000;
  Made tokens = make(random, int_dtype(), n, d, 1, top),
       ranks = make(random, int_dtype(), n, d, 1, 9),
       ids = make(random, int_dtype(), n, d, width, 99),
       logprobs = make(random, floats[below(random, 3)], n, d, width, 60'000),
       accept = make(random, int_dtype(), n, 1, 1, depth + (below(random, 8) != 0)),
       states = make(random, tp::Dtype::uint8, n, 1, 1, 4),
       generations = make(random, int_dtype(), n, 1, 1, 3);
  if (!is_packed) {
    flatten(ids.column);
    flatten(logprobs.column);
  }
  tp::PackArguments a{};
  a.tokens = tokens.column;
  a.accept_num = accept.column;
  a.topk_ids = ids.column;
  a.logprobs = logprobs.column;
  a.ranks = ranks.column;
  a.generations = generations.column;
  if (below(random, 2))
    a.states = states.column;
  a.num_rows = static_cast<uint32_t>(n);
  a.depth = static_cast<uint32_t>(d);
  a.width = static_cast<uint32_t>(width);
  a.flags = is_packed ? TP_STEP_ACCEPT : 0;
  a.message_flag = TP_MESSAGE_TARGET;
  a.max_num_seqs = most;
  a.num_tickets = 2;
  const tp::TicketColumns columns(most);
  const tp::StepColumns largest(n, n * d, width, a.flags);
  std::vector<uint8_t> first;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    auto tickets = std::make_unique<uint8_t[]>(2 * columns.end);
    auto slot = std::make_unique<uint8_t[]>(largest.end);
    tp::PackState state{};
    state.error = tp::PACK_NO_ERROR;
    auto &ticket = *reinterpret_cast<tp::PackTicket *>(tickets.get());
    ticket.destination = reinterpret_cast<uint64_t>(slot.get());
    ticket.num_rows = a.num_rows;
    a.state = &state;
    a.tickets = tickets.get();
    tp::pack_on_cpu(a, seed * 29);
    const auto &step = *reinterpret_cast<const tp_step *>(slot.get());
    CHECK(sizeof(tp_step) + step.body_bytes <= largest.end, "body of %u bytes", step.body_bytes);
    CHECK(step.num_rows == (ticket.error == tp::PACK_NO_ERROR ? n : 0), "%u rows", step.num_rows);
    CHECK(state.next_ticket == 1 && state.num_blocks == 0 && state.num_tokens == 0, "state");
    std::vector<uint8_t> bytes(slot.get(), slot.get() + sizeof(tp_step) + step.body_bytes);
    if (seed == 0)
      first = bytes;
    CHECK(bytes == first, "another order gives other bytes: seed %u", seed);
  }
}

} // namespace

int main() {
  Random random(7);
  for (int i = 0; i < 3000; ++i)
    run(random);
}
