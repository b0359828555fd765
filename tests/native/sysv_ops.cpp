// Random tensors and random messages through every op of sysv_ops.hpp, from two threads: none may
// read or write beyond what it was given, and what is refused must be refused by an exception. The
// tensors lie alone in blocks of their exact size, so that the address sanitizer sees the first
// byte too many.
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cassert>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "sysv_ops.hpp"

using namespace tp;
using namespace tp::sysv;

namespace {

constexpr int rounds = 150;

class Maker {
public:
  explicit Maker(uint32_t seed) : random_(seed) {}

  int64_t number(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  bool one_in(int64_t n) { return number(1, n) == 1; }

  // Values mostly from `least` to `most`; of a shape mostly as asked for.
  template <class T>
  Tensor tensor(std::initializer_list<int64_t> shape, int64_t least, int64_t most) {
    std::vector<int64_t> sizes(shape);
    if (one_in(30))
      sizes[0] = std::max<int64_t>(0, sizes[0] + number(-2, 2));
    if (one_in(60) && sizes.size() > 1)
      sizes[1] = number(0, 30);
    Tensor t;
    t.dtype = one_in(100) ? Dtype::int32 : dtype_of<T>();
    t.set_contiguous(static_cast<int>(sizes.size()), sizes.data());
    const auto count = static_cast<size_t>(num_elements(t));
    auto *values = new T[count];
    kept_.emplace_back(reinterpret_cast<char *>(values),
                       [](char *p) { delete[] reinterpret_cast<T *>(p); });
    for (size_t i = 0; i < count; ++i)
      values[i] =
          static_cast<T>(one_in(2000) ? number(-(1LL << 40), 1LL << 40) : number(least, most));
    t.data = values;
    return t;
  }
  void forget() { kept_.clear(); }

private:
  std::mt19937 random_;
  std::vector<std::unique_ptr<char, void (*)(char *)>> kept_;
};

int64_t refused, done;

template <class Act> void attempt(Act &&act, int64_t &refusals, int64_t &successes) {
  try {
    act();
    ++successes;
  } catch (const OpArgumentError &) {
    ++refusals;
  } catch (const SysvError &) {
    ++refusals;
  }
}

// A message of some length, whose first words are near what they may be.
void send_any(Maker &make, Queue queue, uint64_t longest) {
  static const uint64_t lengths[] = {0,     12,    2052,   2056,   7176,  6000,
                                     88072, 88000, 530444, 530448, 530456};
  const uint64_t length = lengths[make.number(0, 10)];
  if (length > longest)
    return;
  std::vector<int64_t> message(1 + length / 8 + 1, 0);
  message[0] = 1;
  auto *words = reinterpret_cast<int32_t *>(message.data() + 1);
  if (length >= 12) {
    words[0] = static_cast<int32_t>(make.number(-3, 3));
    words[1] = static_cast<int32_t>(
        make.one_in(2) ? make.number(-2, 520) : make.number(0, 23) << 16 | make.number(0, 513));
    if (make.one_in(2))
      words[1] = static_cast<int32_t>(make.number(2, 5) | make.number(0, 23) << 8);
    words[2] = static_cast<int32_t>(make.number(-2, 520));
    for (uint64_t i = 3; i < length / 4; ++i)
      words[i] = static_cast<int32_t>(make.one_in(500) ? make.number(-20, 20) : make.number(-1, 6));
  }
  (void)queue.send(message.data(), length, false);
}

void run(uint32_t seed, const Wire &wire, uint64_t longest) {
  Maker make(seed);
  Queue queue = Queue::open(queue_key(wire.folder, wire.queue_id, wire.generation));
  int64_t refusals = 0, successes = 0;
  for (int round = 0; round < rounds; ++round) {
    Wire at = wire;
    at.generation = static_cast<Generation>(make.number(1, 4));
    // The key must not follow the generation: all share one queue.
    if ((at.generation < Generation::g3) != (wire.generation < Generation::g3))
      at.generation = wire.generation;
    const int64_t n = make.number(0, make.one_in(20) ? 600 : 40), width = make.number(1, 22);
    const int64_t depth = make.number(1, 7), num_tokens = n * depth;
    const Tensor marks = make.tensor<int32_t>({n, 1}, 0, 1),
                 x = make.tensor<int64_t>({n, 1}, -3, 99);
    const Tensor lengths = make.tensor<int32_t>({n}, 0, 9),
                 prompts = make.tensor<int64_t>({n}, 0, 9);
    const Tensor counts = make.tensor<int32_t>({n}, 0, depth);
    const Tensor drafts = make.tensor<int64_t>({n, depth}, 0, 99);
    const SpeculateTopkInputs in{drafts,
                                 make.tensor<int64_t>({num_tokens, width}, 0, 99),
                                 make.tensor<float>({num_tokens, width}, 0, 9),
                                 make.tensor<int64_t>({num_tokens}, 0, 99),
                                 counts,
                                 make.tensor<int32_t>({n}, 0, num_tokens),
                                 lengths,
                                 prompts,
                                 marks};
    const bool has_work = make.one_in(2);
    attempt([&] { save_output(at, x, has_work, marks, 0); }, refusals, successes);
    attempt(
        [&] {
          save_output_topk(at, x, make.tensor<int64_t>({n, width}, 0, 99),
                           make.tensor<float>({n, width}, 0, 9), make.tensor<int64_t>({n}, 0, 99),
                           has_work, marks, 0);
        },
        refusals, successes);
    attempt(
        [&] {
          speculate_save_output(at, drafts, counts, has_work, lengths, prompts, marks, 0, false,
                                has_work);
        },
        refusals, successes);
    attempt(
        [&] {
          mtp_save_first_token(at, drafts, has_work, lengths, prompts,
                               make.tensor<int64_t>({n}, 0, 3), 0, false, has_work);
        },
        refusals, successes);
    attempt([&] { speculate_save_output_topk(at, in, has_work, 3, 0, false); }, refusals,
            successes);
    attempt([&] { mtp_save_first_token_with_topk(at, in, has_work, 4, 0, false); }, refusals,
            successes);
    for (int i = 0; i < 6; ++i) {
      send_any(make, queue, longest);
      const int64_t k = make.number(0, 21);
      switch (make.number(0, 3)) {
      case 0:
        attempt([&] { get_output(at, make.tensor<int64_t>({514, 1}, 2, 2), 0, false, has_work); },
                refusals, successes);
        break;
      case 1:
        attempt(
            [&] {
              get_output_topk(at, make.tensor<int64_t>({10754, 1}, 2, 2),
                              make.tensor<float>({10752, 1}, 2, 2),
                              make.tensor<int64_t>({512}, 2, 2), k, false);
            },
            refusals, successes);
        break;
      case 2:
        attempt(
            [&] { speculate_get_output(at, make.tensor<int64_t>({1794}, 2, 2), 0, false, false); },
            refusals, successes);
        break;
      default:
        attempt(
            [&] {
              speculate_get_output_topk(at, make.tensor<int64_t>({65027, 1}, 2, 2),
                                        make.tensor<float>({64512, 1}, 2, 2),
                                        make.tensor<int64_t>({3072}, 2, 2), k, false);
            },
            refusals, successes);
      }
    }
    make.forget();
  }
  static std::mutex counting;
  const std::lock_guard lock(counting);
  refused += refusals, done += successes;
}

// In a namespace of its own the long messages can be sent too.
bool raise_limits() {
  if (unshare(CLONE_NEWIPC) != 0)
    return false;
  for (const char *path : {"/proc/sys/kernel/msgmax", "/proc/sys/kernel/msgmnb"}) {
    const int file = open(path, O_WRONLY);
    const bool is_set = file >= 0 && write(file, "8000000", 7) == 7;
    close(file);
    if (!is_set)
      return false;
  }
  return true;
}

} // namespace

int main() {
  const bool is_private = raise_limits();
  Wire wire;
  wire.queue_id = static_cast<uint32_t>(getpid()) & 0xfffff;
  wire.folder = "/dev/shm";
  Queue queue(queue_key(wire.folder, wire.queue_id, wire.generation));
  const uint64_t longest = kernel_limit("/proc/sys/kernel/msgmax");
  // A save waits while the queue is full: one thread more takes off what the two leave.
  bool is_over = false;
  std::mutex ending;
  std::thread drain([&] {
    std::vector<int64_t> message(1 + 530456 / 8 + 1);
    for (;;) {
      if (queue.receive(message.data(), 530456, IPC_NOWAIT) != Queue::nothing)
        continue;
      std::this_thread::yield();
      const std::lock_guard lock(ending);
      if (is_over)
        return;
    }
  });
  std::thread other(run, 2, wire, longest);
  run(1, wire, longest);
  other.join();
  {
    const std::lock_guard lock(ending);
    is_over = true;
  }
  drain.join();
  queue.remove();
  assert(refused > rounds && done > rounds);
  std::printf("%lld calls done, %lld refused, long messages %s\n", static_cast<long long>(done),
              static_cast<long long>(refused), is_private ? "sent" : "refused by the kernel");
  return 0;
}
