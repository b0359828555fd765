// traffic.hpp: one producer and N consumers over one ring, each slot's bytes a function of its
// sequence. Used by ring.cpp with the orders as they are, by weakened_*.cpp with one of them
// spoilt.
#pragma once

#include <sched.h>

#include <thread>
#include <vector>

#include "arena.hpp"
#include "ring.hpp"

namespace test {

struct Traffic {
  uint32_t consumers;
  uint32_t slots;    // of the ring
  uint64_t total;    // sequences that are sent
  uint64_t pause_in; // one in so many turns of each side yields for a while; 0: never
  bool sleeps;       // wait on the bells; false: yield until there is something
};

// Nothing but a lost wake-up makes a wait last so long: the threads are in one process and busy.
constexpr tp::Patience patience{1000, 30'000'000'000u};

template <class Wait> inline void expect_a_wake_up(const char *who, Wait &&wait) {
  const uint64_t begun = tp::now_ns();
  CHECK(wait() && tp::now_ns() - begun < patience.timeout_ns, "%s was not woken", who);
}

inline void pause_at_times(Random &random, const Traffic &t) noexcept {
  if (t.pause_in != 0 && random.one_in(t.pause_in))
    for (uint64_t left = random.below(100); left > 0; --left)
      sched_yield();
}

// The body differs in length too, so that a consumer that reads an old slot reads a wrong one.
[[nodiscard]] inline uint64_t words_of(uint64_t sequence) noexcept {
  return 1 + mix(sequence) % 16;
}

inline void fill(tp_step &slot, uint64_t sequence) noexcept {
  slot.source_sequence = ~sequence;
  slot.num_tokens = static_cast<uint32_t>(words_of(sequence));
  auto *words = tp::column<uint64_t>(slot, sizeof(tp_step));
  for (uint64_t i = 0; i < words_of(sequence); ++i)
    words[i] = mix(sequence * 31 + i);
}

inline void check(const tp_step &slot, uint64_t sequence) {
  CHECK(slot.sequence == sequence, "slot %llu where %llu was due",
        static_cast<unsigned long long>(slot.sequence), static_cast<unsigned long long>(sequence));
  CHECK(slot.source_sequence == ~sequence, "in slot %llu",
        static_cast<unsigned long long>(sequence));
  CHECK(slot.num_tokens == words_of(sequence), "in slot %llu",
        static_cast<unsigned long long>(sequence));
  const auto *words = tp::column<uint64_t>(slot, sizeof(tp_step));
  for (uint64_t i = 0; i < words_of(sequence); ++i)
    CHECK(words[i] == mix(sequence * 31 + i), "word %llu of slot %llu",
          static_cast<unsigned long long>(i), static_cast<unsigned long long>(sequence));
}

inline void produce(const tp::Core &core, const Traffic &t) {
  tp::Producer producer(core);
  Random random(1);
  while (producer.cursor() < t.total) {
    tp_step *slot = nullptr;
    if (t.sleeps) {
      expect_a_wake_up("the producer",
                       [&] { return (slot = producer.claim(patience)) != nullptr; });
    } else {
      while ((slot = producer.try_claim()) == nullptr)
        sched_yield();
    }
    fill(*slot, producer.cursor());
    pause_at_times(random, t);
    producer.publish();
  }
}

inline void consume(const tp::Core &core, uint32_t k, const Traffic &t) {
  tp::Consumer consumer(core, k, 0);
  tp_bell &bell = core.role(TP_ROLE_DECODER + k).bell;
  Random random(2 + k);
  for (uint64_t sequence = 0; sequence < t.total; ++sequence) {
    const tp_step *slot = nullptr;
    if (t.sleeps) {
      expect_a_wake_up("a consumer", [&] {
        return tp::wait_for(bell, TP_WAIT_INPUT, patience,
                            [&]() noexcept { return (slot = consumer.try_poll()) != nullptr; });
      });
    } else {
      while ((slot = consumer.try_poll()) == nullptr)
        sched_yield();
    }
    check(*slot, sequence);
    pause_at_times(random, t);
    check(*slot, sequence); // still there: the producer may not write over it before the release
    consumer.release(sequence + 1);
  }
  CHECK(consumer.try_poll() == nullptr, "consumer %u found a slot more than were sent", k);
}

inline void run(const tp::Core &core, const Traffic &t) {
  std::vector<std::thread> threads;
  for (uint32_t k = 0; k < t.consumers; ++k)
    threads.emplace_back([&core, k, t] { consume(core, k, t); });
  threads.emplace_back([&core, t] { produce(core, t); });
  for (std::thread &thread : threads)
    thread.join();
}

[[nodiscard]] inline tp_sizes sizes_of(const Traffic &t) noexcept {
  tp_sizes sizes = small_sizes();
  sizes.num_decoders = t.consumers;
  sizes.ring_slots = t.slots;
  return sizes;
}

} // namespace test
