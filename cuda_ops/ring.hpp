// ring.hpp: the multicast ring. One producer, N consumers, every consumer sees every slot.
//
//   claim -> fill -> publish          poll -> read in place -> release
//
// A sequence only grows; slot `sequence & (ring_slots - 1)` is computed where it is used. The
// producer may not overtake the slowest consumer (the gating sequence). Nothing here allocates,
// throws, locks or logs; full and empty are values.
#pragma once

#include <algorithm>

#include "atomics.hpp"
#include "plan.hpp"

namespace tp {

// Design: `cursor` is this process's own; `gate_` caches the slowest consumer's released sequence,
// so that the consumers' lines are read only when the ring looks full.
class Producer {
public:
  explicit Producer(const Core &core) noexcept
      : core_(core), cursor_(observe(core.ring().cursor)), gate_(slowest()) {}

  [[nodiscard]] uint64_t cursor() const noexcept { return cursor_; }

  // The next slot, or nullptr while the ring is full.
  [[nodiscard]] tp_step *try_claim() noexcept {
    if (cursor_ - gate_ >= core_.sizes.ring_slots)
      gate_ = slowest();
    return cursor_ - gate_ < core_.sizes.ring_slots ? &core_.slot(cursor_) : nullptr;
  }

  // As try_claim, but sleeps on the reader's bell while the ring is full. A sleeper asks to be
  // woken when a quarter of the ring is free: woken at every slot it would pay a system call a
  // slot.
  [[nodiscard]] tp_step *claim(const Patience &patience) noexcept {
    if (tp_step *slot = try_claim())
      return slot;
    tp_role &role = core_.role(TP_ROLE_READER);
    const uint64_t begun = now_ns();
    put(role.bell.wake_at,
        cursor_ - core_.sizes.ring_slots + std::max(1u, core_.sizes.ring_slots / 4));
    tp_step *slot = nullptr;
    wait_for(role.bell, TP_WAIT_SPACE, patience,
             [&]() noexcept { return (slot = try_claim()) != nullptr; });
    put(role.blocked_ns, get(role.blocked_ns) + (now_ns() - begun));
    put(role.blocked_times, get(role.blocked_times) + 1);
    return slot;
  }

  // Makes the claimed slot visible to every consumer.
  void publish() noexcept {
    tp_step &slot = core_.slot(cursor_);
    fault::point("reader.before_publish");
    slot.sequence = cursor_;
    slot.published_ns = now_ns();
    ++cursor_;
    // SYNC POINT: ring cursor - release: the slot's bytes are visible to whoever sees the cursor
    tp::publish(core_.ring().cursor, cursor_);
    fault::point("reader.published");
    for (uint32_t k = 0; k < core_.sizes.num_decoders; ++k)
      ring_bell(core_.role(TP_ROLE_DECODER + k).bell);
  }

private:
  [[nodiscard]] uint64_t slowest() const noexcept {
    // SYNC POINT: released - acquire: the consumer has finished reading the slots below it
    uint64_t gate = observe(core_.consumer(0).released);
    for (uint32_t k = 1; k < core_.sizes.num_decoders; ++k)
      gate = std::min(gate, observe(core_.consumer(k).released));
    return gate;
  }

  const Core &core_;
  uint64_t cursor_;
  uint64_t gate_;
};

// Design: `next_` is this process's own; what it has released is in its tp_consumer line.
class Consumer {
public:
  Consumer(const Core &core, uint32_t k, uint64_t next) noexcept : core_(core), k_(k), next_(next) {
    release(next); // a successor repairs its predecessor's release cursor
  }

  [[nodiscard]] uint64_t next() const noexcept { return next_; }

  // The next slot, in place, or nullptr while nothing is published.
  [[nodiscard]] const tp_step *try_poll() noexcept {
    // SYNC POINT: ring cursor - acquire: slots below the cursor may be read
    const uint64_t cursor = observe(core_.ring().cursor);
    if (cursor == next_)
      return nullptr;
    tp_consumer &line = core_.consumer(k_);
    if (cursor - next_ > get(line.high_water))
      put(line.high_water, cursor - next_);
    return &core_.slot(next_);
  }

  // Hands back every slot below `sequence` and goes on there.
  void release(uint64_t sequence) noexcept {
    next_ = sequence;
    // SYNC POINT: released - release: all reads of the slots below it are done
    tp::publish(core_.consumer(k_).released, sequence);
    ring_bell_at(core_.role(TP_ROLE_READER).bell, sequence);
  }

private:
  const Core &core_;
  const uint32_t k_;
  uint64_t next_;
};

} // namespace tp
