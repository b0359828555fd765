// client.hpp: the handle's half of the protocol: frames in, commands out.
#pragma once

#include <string_view>
#include <vector>

#include "atomics.hpp"
#include "plan.hpp"

namespace tp {

// What decoder k has committed, read by turn word, copy, turn word.
struct Committed {
  uint64_t turn, slots_done, frames, next_source_sequence;
};

[[nodiscard]] inline Committed committed(const tp_decoder &decoder) noexcept {
  for (;;) {
    // SYNC POINT: turn word - acquire: the copy it names is complete
    const uint64_t turn = observe(decoder.turn);
    const tp_commit &copy = decoder.commit[turn & 1];
    const Committed found{turn, get(copy.slots_done), get(copy.frames),
                          get(copy.next_source_sequence)};
    end_read();
    if (get(decoder.turn) == turn)
      return found;
  }
}

// Design: `released` of each decoder's output ring is this client's word; a frame is in hand from
// poll() until release(). `read_` counts frames handed out, so that several may be in hand.
class Client {
public:
  explicit Client(const Core &core) : core_(core), read_(core.sizes.num_decoders) {
    for (uint32_t k = 0; k < read_.size(); ++k)
      read_[k] = observe(core.client().output[k].released);
  }

  struct Head {
    uint32_t decoder = 0;
    uint64_t offset = 0; // of the frame in the core segment
    bool is_there = false;
  };

  // The unread frame of decoder k.
  [[nodiscard]] Head head(uint32_t k) const noexcept {
    if (committed(core_.decoder(k)).frames == read_[k])
      return {};
    return {k, core_.frame_offset(k, read_[k]), true};
  }

  // The unread frame of the lowest sequence.
  [[nodiscard]] Head first() const noexcept {
    Head best;
    uint64_t sequence = 0;
    for (uint32_t k = 0; k < read_.size(); ++k) {
      const Head here = head(k);
      if (!here.is_there)
        continue;
      const uint64_t s = core_.at<tp_frame>(here.offset).sequence;
      if (!best.is_there || s < sequence) {
        best = here;
        sequence = s;
      }
    }
    return best;
  }

  // Waits until first() finds a frame, or the bell rings for another reason (a turn without
  // output).
  [[nodiscard]] bool wait_for_frame(const Patience &patience) noexcept {
    return wait_for(core_.client().bell, TP_WAIT_INPUT, patience,
                    [&]() noexcept { return first().is_there; });
  }

  // Waits until a decoder other than those with an unread frame has decoded past `sequence`.
  [[nodiscard]] bool wait_for_step(uint64_t sequence, const Patience &patience) noexcept {
    return wait_for(core_.client().bell, TP_WAIT_INPUT, patience, [&]() noexcept {
      for (uint32_t k = 0; k < read_.size(); ++k)
        if (!has_passed(k, sequence))
          return false;
      return true;
    });
  }

  // Whether decoder k's part of step `sequence` is known: an unread frame, or a step behind.
  [[nodiscard]] bool has_passed(uint32_t k, uint64_t sequence) const noexcept {
    const Committed c = committed(core_.decoder(k));
    return c.frames != read_[k] || c.slots_done > sequence;
  }

  void take(uint32_t k) noexcept { ++read_[k]; }

  // Gives back the oldest frame in hand of decoder k.
  void release(uint32_t k) noexcept {
    tp_client &client = core_.client();
    const uint64_t released = observe(client.output[k].released) + 1;
    put(client.progress_ns, now_ns());
    fault::point("client.before_release");
    // SYNC POINT: output released - release: the client has read the frames below it
    publish(client.output[k].released, released);
    fault::point("client.released");
    ring_bell_at(core_.role(TP_ROLE_DECODER + k).bell, released);
  }

  [[nodiscard]] uint64_t read(uint32_t k) const noexcept { return read_[k]; }

private:
  const Core &core_;
  std::vector<uint64_t> read_;
};

// What the client puts into a command's slot.
struct CommandFields {
  uint32_t kind = 0;
  uint64_t deadline_ns = 0, arrival_ns = 0, preprocess_end_ns = 0, inference_start_ns = 0,
           argument = 0;
  uint32_t row = UINT32_MAX, generation = 0, max_tokens = 0, num_emitted = 0, prompt_tokens = 0,
           num_blocks = 0, num_chunks = 0, flags = 0;
  std::string_view id;
  std::vector<int32_t> eos;
};

// Fills slot i and posts it. The caller has checked that id and eos fit, and owns the free slot.
inline void post(const Core &core, uint32_t i, const CommandFields &fields) noexcept {
  tp_command &c = core.command(i);
  c.kind = fields.kind;
  c.number = ++core.client().next_number;
  c.choice = 0;
  c.deadline_ns = fields.deadline_ns;
  c.arrival_ns = fields.arrival_ns;
  c.argument = fields.argument;
  c.row = fields.row;
  c.generation = fields.generation;
  c.max_tokens = fields.max_tokens;
  c.num_emitted = fields.num_emitted;
  c.prompt_tokens = fields.prompt_tokens;
  c.num_blocks = fields.num_blocks;
  c.preprocess_end_ns = fields.preprocess_end_ns;
  c.inference_start_ns = fields.inference_start_ns;
  c.num_chunks = fields.num_chunks;
  c.flags = fields.flags;
  c.num_eos = static_cast<uint32_t>(fields.eos.size());
  c.id_bytes = static_cast<uint32_t>(fields.id.size());
  std::memcpy(core.command_id(i), fields.id.data(), fields.id.size());
  std::memcpy(core.command_eos(i), fields.eos.data(), fields.eos.size() * 4);
  fault::point("client.command_filled");
  // SYNC POINT: command - release: the command's fields are there
  publish(c.state, static_cast<uint32_t>(TP_COMMAND_POSTED));
  fault::point("client.command_posted");
  count_event(core.role(TP_ROLE_COORDINATOR).bell);
}

// Waits for the reply in slot i. False when the time is up or a signal came.
[[nodiscard]] inline bool wait_for_reply(const Core &core, uint32_t i,
                                         uint64_t timeout_ns) noexcept {
  tp_command &c = core.command(i);
  const uint64_t begun = now_ns();
  for (;;) {
    // SYNC POINT: reply - acquire: the reply's fields are there
    const uint32_t state = observe(c.state);
    if (state != TP_COMMAND_POSTED)
      return true;
    const uint64_t waited = now_ns() - begun;
    if (waited >= timeout_ns || !futex_wait(c.state, state, timeout_ns - waited))
      return observe(c.state) != TP_COMMAND_POSTED;
  }
}

} // namespace tp
