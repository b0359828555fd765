// The multicast ring: every consumer sees every slot once, in order and whole, whatever the sizes
// and the pauses, and no wake-up is lost.
#include "traffic.hpp"

using test::Traffic;

namespace {

void slots_arrive_whole_and_in_order() {
  for (const uint32_t consumers : {1u, 2u, 4u})
    for (const uint32_t slots : {2u, 8u, 64u}) {
      const Traffic t{consumers, slots, 6'000, 50, false};
      const test::Arena arena(sizes_of(t));
      run(arena.core, t);
      CHECK(tp::get(arena.core.ring().cursor) == t.total, "the producer ended early");
      for (uint32_t k = 0; k < consumers; ++k) {
        const tp_consumer &line = arena.core.consumer(k);
        CHECK(tp::get(line.released) == t.total, "consumer %u ended early", k);
        CHECK(tp::get(line.high_water) >= 1 && tp::get(line.high_water) <= slots,
              "high water %llu of %u slots", static_cast<unsigned long long>(line.high_water),
              slots);
      }
    }
}

void no_wake_up_is_lost() {
  for (const uint32_t consumers : {1u, 2u, 4u})
    for (const uint32_t slots : {2u, 8u}) {
      const Traffic t{consumers, slots, 8'000, 20, true};
      const test::Arena arena(sizes_of(t));
      run(arena.core, t);
      // A bell is rung for a sleeper only: both sides have slept, or nothing was shown.
      const tp_role &reader = arena.core.role(TP_ROLE_READER);
      CHECK(tp::get(reader.bell.bell) > 0, "the producer has never slept");
      CHECK(tp::get(reader.blocked_times) > 0 && tp::get(reader.blocked_ns) > 0,
            "the producer's waits are not counted");
      CHECK(tp::get(reader.bell.waiting) == TP_WAIT_NOTHING, "the producer still waits");
      for (uint32_t k = 0; k < consumers; ++k) {
        const tp_bell &bell = arena.core.role(TP_ROLE_DECODER + k).bell;
        CHECK(tp::get(bell.bell) > 0, "consumer %u has never slept", k);
        CHECK(tp::get(bell.waiting) == TP_WAIT_NOTHING, "consumer %u still waits", k);
      }
    }
}

// One side at a time sleeps at once and the other makes it wait: the shortest way to a lost
// wake-up.
void two_slots_and_no_pause() {
  const Traffic t{2, 2, 20'000, 0, true};
  const test::Arena arena(sizes_of(t));
  run(arena.core, t);
}

// The event comes while the sleeper looks for the n-th time and that look just misses it: awake, or
// after it has said that it waits.
void an_event_between_look_and_sleep_is_seen() {
  for (int moment = 1; moment <= 40; ++moment) {
    tp_bell bell{};
    uint32_t word = 0;
    int looks = 0, looks_while_waiting = 0;
    test::expect_a_wake_up("the sleeper", [&] {
      return tp::wait_for(bell, TP_WAIT_INPUT, test::patience, [&]() noexcept {
        if (tp::observe(word) == 1)
          return true;
        looks_while_waiting += tp::observe(bell.waiting) != TP_WAIT_NOTHING;
        // Whatever the number of looks, the event comes before the first sleep can end.
        if (++looks == moment || looks_while_waiting == 1) {
          tp::publish(word, 1u);
          tp::ring_bell(bell);
        }
        return false;
      });
    });
    CHECK(tp::get(bell.waiting) == TP_WAIT_NOTHING, "it still waits");
  }
}

void a_full_ring_is_a_value() {
  Traffic t{2, 4, 0, 0, false};
  const test::Arena arena(sizes_of(t));
  tp::Producer producer(arena.core);
  tp::Consumer fast(arena.core, 0, 0), slow(arena.core, 1, 0);
  for (uint64_t sequence = 0; sequence < t.slots; ++sequence) {
    tp_step *slot = producer.try_claim();
    CHECK(slot != nullptr, "slot %llu of 4", static_cast<unsigned long long>(sequence));
    test::fill(*slot, sequence);
    producer.publish();
  }
  CHECK(producer.try_claim() == nullptr, "a fifth slot of four");
  CHECK(producer.claim({0, 1000}) == nullptr, "a fifth slot of four");
  fast.release(4);
  CHECK(producer.try_claim() == nullptr, "the slowest consumer has released nothing");
  slow.release(1);
  CHECK(producer.try_claim() != nullptr, "one slot is free");
  test::check(*slow.try_poll(), 1);
}

// A successor begins where its predecessor has published or released, and not anywhere else.
void a_successor_goes_on() {
  const Traffic t{1, 4, 0, 0, false};
  const test::Arena arena(sizes_of(t));
  for (uint64_t sequence = 0; sequence < 100; ++sequence) {
    tp::Producer producer(arena.core);
    CHECK(producer.cursor() == sequence, "the producer's successor begins elsewhere");
    tp_step *slot = producer.try_claim();
    CHECK(slot != nullptr, "the ring has room");
    test::fill(*slot, sequence);
    producer.publish();
    tp::Consumer consumer(arena.core, 0, tp::get(arena.core.consumer(0).released));
    CHECK(consumer.next() == sequence, "the consumer's successor begins elsewhere");
    test::check(*consumer.try_poll(), sequence);
    consumer.release(sequence + 1);
  }
}

} // namespace

int main() {
  slots_arrive_whole_and_in_order();
  no_wake_up_is_lost();
  two_slots_and_no_pause();
  an_event_between_look_and_sleep_is_seen();
  a_full_ring_is_a_value();
  a_successor_goes_on();
  std::puts("ring: ok");
}
