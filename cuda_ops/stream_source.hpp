// stream_source.hpp: the reader's end of FastDeploy's zmq path, without the socket: messages in,
// ring slots out.
//
// The wire has no sequence to resume by. What a reader had received and not published when it was
// killed is lost, so a successor's first step says that there is a gap: every running request ends
// in it, in order with what was published before.
#pragma once

#include "atomics.hpp"
#include "stream_records.hpp"

namespace tp {

// Design: the reader alone stores tp_source.published, released and the count of tokens. A message
// may be several steps; their sequence is the ring's.
class StreamReader {
public:
  StreamReader(const Core &core, const SourceMap &source, uint64_t max_message_bytes)
      : source_(source), records_(core.sizes, max_message_bytes) {
    const uint64_t cursor = observe(core.ring().cursor);
    saved_tokens_ = cursor == 0 ? 0 : core.slot(cursor - 1).saved_tokens;
    received_ns_ = now_ns();
    if (get(core.role(TP_ROLE_READER).epoch) > 1)
      records_.add_gap();
  }

  // Takes a message in, of which nothing is needed afterwards.
  [[nodiscard]] std::optional<pickle::Refused> read(std::span<const uint8_t> message) {
    received_ns_ = now_ns();
    return records_.read(message);
  }
  [[nodiscard]] bool has_step() const noexcept { return records_.has_step(); }

  // Writes the next step into the claimed slot `sequence`.
  void fill(tp_step &slot, uint64_t sequence) noexcept {
    saved_tokens_ += records_.fill(slot);
    slot.source_sequence = sequence;
    slot.barrier = 0;
    slot.saved_ns = received_ns_;
    slot.saved_tokens = saved_tokens_;
    tp_source &source = source_.head();
    put(source.queue.saved_tokens, saved_tokens_);
    put(source.beat_ns, received_ns_);
    fault::point("reader.filled");
    // Before the ring's cursor: what an admission takes for received is never too little.
    publish(source.published, sequence + 1);
    publish(source.released, sequence + 1);
  }

  // For /status: the reader sleeps until a message comes.
  void set_waiting(bool is_waiting) noexcept {
    put(source_.head().reader_bell.since_ns, now_ns());
    put(source_.head().reader_bell.waiting,
        is_waiting ? uint32_t{TP_WAIT_INPUT} : uint32_t{TP_WAIT_NOTHING});
  }

private:
  const SourceMap &source_;
  StreamRecords records_;
  uint64_t received_ns_;
  uint64_t saved_tokens_;
};

} // namespace tp
