// sysv_source.hpp: the reader's end of FastDeploy's System V queue. msgrcv writes straight into the
// claimed ring slot, behind its columns; the columns are then made from it there.
//
// What a SIGKILL must not lose or repeat is the message in hand:
//   1  clear    the slot's message-type word
//   2  claim    = sequence + 1
//   3  msgrcv   the kernel copies whole or not at all, the type word first; pages are resident
//   4  columns, `published`, then the ring's cursor
// A successor finds a message in hand if claim is the cursor's and the word is set: it goes on
// at 4.
#pragma once

#include <csignal>
#include <ctime>

#include "ring.hpp"
#include "sysv_wire.hpp"

namespace tp::sysv {

// A message as received. `guard` marks the ends: a successor, which does not know the length that
// msgrcv has returned, tells by them whether a message of another length has come.
[[nodiscard]] constexpr uint32_t raw_message_bytes(Variant v) noexcept {
  return static_cast<uint32_t>(sizeof(int64_t) + align_up(payload_bytes(v), 8) +
                               2 * sizeof(int64_t));
}

// Interrupts a blocking msgrcv, which knows no time limit, at every heartbeat: a timer of this
// thread, whose signal does nothing. No message is lost by it: a receive that was interrupted has
// taken none.
class Ticker {
public:
  explicit Ticker(uint64_t interval_ns) {
    struct sigaction act{};
    act.sa_handler = [](int) {};
    sigemptyset(&act.sa_mask); // and no SA_RESTART
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = signal_number();
    event._sigev_un._tid = static_cast<pid_t>(syscall(SYS_gettid));
    if (sigaction(signal_number(), &act, &before_) != 0 ||
        timer_create(CLOCK_MONOTONIC, &event, &timer_) != 0)
      throw SysvError("timer of the queue's reader", errno);
    itimerspec every{};
    every.it_interval.tv_sec = static_cast<time_t>(interval_ns / 1'000'000'000u);
    every.it_interval.tv_nsec = static_cast<long>(interval_ns % 1'000'000'000u);
    every.it_value = every.it_interval;
    timer_settime(timer_, 0, &every, nullptr);
  }
  ~Ticker() {
    timer_delete(timer_);
    sigaction(signal_number(), &before_, nullptr);
  }
  Ticker(const Ticker &) = delete;
  Ticker &operator=(const Ticker &) = delete;

private:
  [[nodiscard]] static int signal_number() noexcept { return SIGRTMIN + 4; }

  struct sigaction before_{};
  timer_t timer_{};
};

// Design: the reader alone receives, and alone writes tp_queue's claim and barrier words and
// tp_source.published. One message is one step; its sequence is the ring's.
class SysvReader {
public:
  SysvReader(const Core &core, const SourceMap &source, Variant variant, Generation generation,
             Queue queue)
      : core_(core), source_(source), variant_(variant), generation_(generation), queue_(queue),
        raw_at_(raw_offset(core.sizes)) {
    const uint64_t cursor = observe(core.ring().cursor);
    saved_tokens_ = cursor == 0 ? 0 : core.slot(cursor - 1).saved_tokens;
    tp_queue &shared = source_.head().queue;
    if (get(shared.id) != queue_.id())
      note_loss(cursor);
    put(shared.id, queue_.id());
    if (queue_.is_created())
      put(shared.is_created, 1u);
  }

  // Fills the claimed slot `sequence` with the next message, waiting until one comes, the ticker
  // ticks or a signal arrives; false then, and after a barrier. Throws SysvError.
  [[nodiscard]] bool get_output(tp_step &slot, uint64_t sequence, bool wait) {
    tp_queue &shared = source_.head().queue;
    if (get(shared.gap_at) == sequence + 1)
      return tell_of_loss(slot, sequence);
    int64_t *raw = raw_of(slot);
    if (get(shared.claim) == sequence + 1 && observe(raw[0]) != 0)
      return take(slot, sequence, length_in_hand(raw)); // a predecessor's, or after a fault
    touch(raw);
    publish(raw[0], int64_t{0});
    fault::point("reader.word_cleared");
    publish(shared.claim, sequence + 1);
    fault::point("reader.claim_stored");
    set_waiting(TP_WAIT_INPUT);
    if (wait)
      fault::point("sleep");
    int64_t got = queue_.receive(raw, room(), wait ? 0 : IPC_NOWAIT);
    if (got == Queue::too_long)
      got = queue_.receive(raw, room(), MSG_NOERROR | IPC_NOWAIT); // off the head, to be refused
    set_waiting(TP_WAIT_NOTHING);
    if (got == Queue::nothing || got == Queue::too_long)
      return false;
    fault::point("reader.received");
    return take(slot, sequence, static_cast<uint64_t>(got));
  }

  // Messages of another length than this variant's: another op than the configured one sends them.
  [[nodiscard]] uint64_t num_misfits() const noexcept { return num_misfits_; }

  // Pid of whoever sent last, as this pid namespace knows it; 0: unknown.
  [[nodiscard]] uint32_t last_sender() const {
    return static_cast<uint32_t>(queue_.facts().msg_lspid);
  }

private:
  // In no message: its last byte is the high one of an int32 that is small, -1 to -9 included.
  static constexpr uint8_t guard = 0xa5;

  [[nodiscard]] int64_t *raw_of(tp_step &slot) const noexcept {
    return column<int64_t>(slot, raw_at_);
  }
  template <class Message> [[nodiscard]] static const Message &message_in(const int64_t *raw) {
    return *reinterpret_cast<const Message *>(raw + 1);
  }
  // More than the message has, so that a longer one is seen to be so.
  static constexpr uint64_t num_spare = sizeof(int64_t);
  [[nodiscard]] uint64_t room() const noexcept { return payload_bytes(variant_) + num_spare; }

  // Guards the ends and makes every page resident: a page fault in the kernel's copy could end it
  // halfway when the process is killed.
  void touch(int64_t *raw) const noexcept {
    const uint64_t words = 1 + room() / sizeof(int64_t);
    for (uint64_t i = 0; i < words; i += TP_PAGE_BYTES / sizeof(int64_t))
      put(raw[i], get(raw[i]));
    bytes_of(raw)[shortest_payload(variant_) - 1] = guard;
    std::memset(bytes_of(raw) + payload_bytes(variant_), guard, num_spare);
  }
  [[nodiscard]] static uint8_t *bytes_of(int64_t *raw) noexcept {
    return reinterpret_cast<uint8_t *>(raw + 1);
  }
  [[nodiscard]] uint64_t length_in_hand(int64_t *raw) const noexcept {
    if (is_barrier(raw[0]))
      return 0;
    const bool is_short = bytes_of(raw)[shortest_payload(variant_) - 1] == guard;
    const uint8_t *spare = bytes_of(raw) + payload_bytes(variant_);
    const bool is_long =
        std::any_of(spare, spare + num_spare, [](uint8_t b) { return b != guard; });
    return is_short ? 0 : is_long ? room() : shortest_payload(variant_);
  }

  void set_waiting(uint32_t reason) noexcept {
    put(source_.head().reader_bell.since_ns, now_ns());
    put(source_.head().reader_bell.waiting, reason);
  }

  // The queue that there was is gone, with whatever was in it: running requests have a hole, and
  // barriers that were on their way will not come. Every one of them is behind us now.
  void note_loss(uint64_t cursor) noexcept {
    tp_queue &shared = source_.head().queue;
    publish(shared.barrier_cursor, cursor);
    publish(shared.barrier_seen, observe(shared.barrier_sent));
    publish(shared.gap_at, cursor + 1);
  }

  // A step of its own: those who run end with an error, before anything else is received.
  [[nodiscard]] bool tell_of_loss(tp_step &slot, uint64_t sequence) noexcept {
    begin_step(slot, sequence);
    slot.flags |= TP_STEP_GAP;
    slot.bad = TP_BAD_NONE;
    finish(slot, sequence);
    return true;
  }

  [[nodiscard]] bool take(tp_step &slot, uint64_t sequence, uint64_t length) {
    int64_t *raw = raw_of(slot);
    if (is_barrier(raw[0]) && length == 0) {
      meet_barrier(barrier_number(raw[0]), sequence);
      publish(raw[0], int64_t{0}); // it is not in hand any more
      return false;
    }
    begin_step(slot, sequence);
    const bool fits = length >= shortest_payload(variant_) && length <= payload_bytes(variant_);
    num_misfits_ += !fits;
    slot.bad = !fits         ? uint32_t{TP_BAD_BYTES}
               : raw[0] != 1 ? uint32_t{TP_BAD_FLAGS}
                             : make_columns(slot, raw);
    if (slot.bad != TP_BAD_NONE)
      slot.num_rows = slot.num_tokens = slot.width = slot.flags = slot.body_bytes = 0;
    if (slot.bad == TP_BAD_NONE && slot.message_flag == TP_MESSAGE_TARGET) {
      saved_tokens_ += num_tokens_;
      slot.flags |= TP_STEP_MESSAGE_END;
    }
    finish(slot, sequence);
    return true;
  }

  void finish(tp_step &slot, uint64_t sequence) noexcept {
    tp_source &source = source_.head();
    slot.saved_tokens = saved_tokens_;
    put(source.queue.saved_tokens, saved_tokens_);
    put(source.beat_ns, slot.saved_ns);
    fault::point("reader.filled");
    // Before the ring's cursor: what a mark or a drain takes for received is never too little.
    publish(source.published, sequence + 1);
    publish(source.released, sequence + 1);
  }

  // Its cursor, then its number: a coordinator that sees the number sees a cursor at least as late.
  void meet_barrier(uint64_t number, uint64_t cursor) noexcept {
    tp_queue &shared = source_.head().queue;
    // A number that nobody has sent is not ours.
    if (number > get(shared.barrier_seen) && number <= observe(shared.barrier_sent)) {
      publish(shared.barrier_cursor, cursor);
      fault::point("reader.barrier_cursor_stored");
      publish(shared.barrier_seen, number);
      fault::point("reader.barrier_met");
    }
    count_event(core_.role(TP_ROLE_COORDINATOR).bell);
  }

  void begin_step(tp_step &slot, uint64_t sequence) const noexcept {
    slot.source_sequence = sequence;
    slot.saved_ns = now_ns();
    slot.message_flag = TP_MESSAGE_TARGET;
    slot.barrier = get(source_.head().queue.barrier_seen);
    slot.num_rows = slot.num_tokens = slot.width = slot.body_bytes = 0;
    slot.flags = TP_STEP_UNSTAMPED;
  }

  // Returns TP_BAD_*.
  [[nodiscard]] uint32_t make_columns(tp_step &slot, const int64_t *raw) {
    switch (variant_) {
    case Variant::plain:
      return from_plain(slot, message_in<PlainMessage>(raw));
    case Variant::topk:
      return from_topk(slot, message_in<TopkMessage>(raw));
    case Variant::speculate:
      return from_speculate(slot, message_in<SpeculateMessage>(raw));
    case Variant::speculate_topk:
      break;
    }
    return from_speculate_topk(slot, message_in<SpeculateTopkMessage>(raw));
  }

  [[nodiscard]] bool is_row_count(int32_t rows) const noexcept {
    return rows >= 0 && rows <= row_limit(variant_) &&
           static_cast<uint32_t>(rows) <= core_.sizes.max_num_seqs;
  }

  // Header word 0 is positive while the engine has more work. The columns that do not depend on the
  // tokens are the same in every variant.
  StepColumns start(tp_step &slot, int32_t first_word, int32_t rows, uint64_t tokens,
                    uint64_t width, uint32_t flags) const noexcept {
    slot.flags |= flags | (first_word > 0 ? TP_STEP_NOT_NEED_STOP : 0);
    slot.num_rows = static_cast<uint32_t>(rows);
    slot.num_tokens = static_cast<uint32_t>(tokens);
    slot.width = static_cast<uint32_t>(width);
    const StepColumns at(slot.num_rows, tokens, width, slot.flags);
    slot.body_bytes = static_cast<uint32_t>(at.end - sizeof(tp_step));
    for (uint32_t i = 0; i < slot.num_rows; ++i)
      column<uint32_t>(slot, at.rows)[i] = i;
    std::memset(column<uint8_t>(slot, at.generations), 0, 4 * uint64_t{slot.num_rows});
    return at;
  }

  // A negative token or accept count is a state; every one but these two says "nothing here".
  [[nodiscard]] static uint8_t state_of(int32_t value) noexcept {
    return value == preempted  ? TP_ROW_ACKNOWLEDGED
           : value == recovery ? TP_ROW_RECOVERY
                               : TP_ROW_NONE;
  }

  [[nodiscard]] uint32_t from_plain(tp_step &slot, const PlainMessage &m) {
    const int32_t n = m.words[1];
    if (!is_row_count(n))
      return TP_BAD_ROWS;
    const StepColumns at = start(slot, m.words[0], n, static_cast<uint64_t>(n), 0, 0);
    std::memcpy(column<int32_t>(slot, at.tokens), m.words + 2, 4 * static_cast<uint64_t>(n));
    set_states(slot, at);
    return TP_BAD_NONE;
  }

  void set_states(tp_step &slot, const StepColumns &at) noexcept {
    const auto *tokens = column<int32_t>(slot, at.tokens);
    auto *states = column<uint8_t>(slot, at.states);
    num_tokens_ = 0;
    for (uint32_t i = 0; i < slot.num_rows; ++i) {
      states[i] = tokens[i] >= 0 ? uint8_t{TP_ROW_TOKEN} : state_of(tokens[i]);
      num_tokens_ += tokens[i] >= 0;
    }
  }

  // Columns that a packed header word announces, 0 where it contradicts the generation.
  [[nodiscard]] uint32_t columns_in(int32_t high_half) const noexcept {
    if (generation_ < Generation::g4)
      return high_half == 0 ? wire_columns : 0;
    return high_half >= 1 && high_half <= wire_columns ? static_cast<uint32_t>(high_half) : 0;
  }
  [[nodiscard]] uint32_t delivered(uint32_t columns) const noexcept {
    return std::min(columns, core_.sizes.top_logprobs + 1);
  }

  [[nodiscard]] uint32_t from_topk(tp_step &slot, const TopkMessage &m) {
    const auto head = static_cast<uint32_t>(m.words[1]);
    const auto n = static_cast<int32_t>(head & 0xffff);
    const uint32_t stride = columns_in(static_cast<int32_t>(head >> 16));
    if (stride == 0)
      return TP_BAD_FLAGS;
    if (!is_row_count(n))
      return TP_BAD_ROWS;
    const uint32_t width = delivered(stride);
    const StepColumns at = start(slot, m.words[0], n, static_cast<uint64_t>(n), width, 0);
    auto *tokens = column<int32_t>(slot, at.tokens), *ids = column<int32_t>(slot, at.topk_ids);
    auto *logprobs = column<float>(slot, at.logprobs);
    for (uint32_t i = 0; i < slot.num_rows; ++i) {
      tokens[i] = m.words[2 + i * stride];
      std::memcpy(ids + uint64_t{i} * width, m.words + 2 + uint64_t{i} * stride, 4 * width);
      std::memcpy(logprobs + uint64_t{i} * width, m.scores + uint64_t{i} * stride, 4 * width);
    }
    std::memcpy(column<int32_t>(slot, at.ranks), m.ranks, 4 * static_cast<uint64_t>(n));
    set_states(slot, at);
    return TP_BAD_NONE;
  }

  // Accept counts and states. A count that cannot be is kept as it is, without tokens: the decoder
  // ends that row alone.
  [[nodiscard]] uint64_t set_accepted(tp_step &slot, const int32_t *counts) noexcept {
    const StepColumns at(slot.num_rows, 0, 0, slot.flags | TP_STEP_ACCEPT);
    auto *states = column<uint8_t>(slot, at.states);
    auto *accept = column<int32_t>(slot, at.accept_num);
    num_tokens_ = 0;
    for (uint32_t i = 0; i < slot.num_rows; ++i) {
      states[i] = counts[i] > 0 ? uint8_t{TP_ROW_TOKEN} : state_of(counts[i]);
      accept[i] = std::max(counts[i], 0);
      num_tokens_ += is_accepted(accept[i]) ? static_cast<uint32_t>(accept[i]) : 0;
    }
    return num_tokens_;
  }
  [[nodiscard]] bool is_accepted(int32_t count) const noexcept {
    return count > 0 && count <= wire_draft_tokens &&
           static_cast<uint32_t>(count) <= core_.sizes.max_draft_tokens;
  }

  [[nodiscard]] uint32_t from_speculate(tp_step &slot, const SpeculateMessage &m) {
    const int32_t n = m.words[1];
    if (!is_row_count(n))
      return TP_BAD_ROWS;
    slot.num_rows = static_cast<uint32_t>(n);
    const uint64_t tokens = set_accepted(slot, m.words + 2);
    const StepColumns at = start(slot, m.words[0], n, tokens, 0, TP_STEP_ACCEPT);
    const auto *accept = column<int32_t>(slot, at.accept_num);
    auto *to = column<int32_t>(slot, at.tokens);
    for (int32_t i = 0; i < n; ++i)
      if (is_accepted(accept[i])) {
        const int32_t *from = m.words + 2 + most_speculate_rows + i * wire_draft_tokens;
        to = std::copy(from, from + accept[i], to);
      }
    return TP_BAD_NONE;
  }

  [[nodiscard]] uint32_t from_speculate_topk(tp_step &slot, const SpeculateTopkMessage &m) {
    const auto head = static_cast<uint32_t>(m.words[1]);
    const uint32_t columns = columns_in(static_cast<int32_t>(head >> 8));
    slot.message_flag = head & 0xff;
    const int32_t n = m.words[2];
    if (columns == 0 ||
        (slot.message_flag != TP_MESSAGE_TARGET && slot.message_flag != TP_MESSAGE_DRAFT))
      return TP_BAD_FLAGS;
    if (!is_row_count(n))
      return TP_BAD_ROWS;
    slot.num_rows = static_cast<uint32_t>(n);
    const uint64_t tokens = set_accepted(slot, m.words + 3);
    const uint32_t width = delivered(columns);
    const StepColumns at = start(slot, m.words[0], n, tokens, width, TP_STEP_ACCEPT);
    const auto *accept = column<int32_t>(slot, at.accept_num);
    auto *token = column<int32_t>(slot, at.tokens), *ids = column<int32_t>(slot, at.topk_ids),
         *rank = column<int32_t>(slot, at.ranks);
    auto *logprobs = column<float>(slot, at.logprobs);
    for (int32_t i = 0; i < n; ++i) {
      if (!is_accepted(accept[i]))
        continue;
      const SpeculateTopkRow &row = m.rows[i];
      for (int32_t j = 0; j < accept[i]; ++j) { // the record's stride is 21 in every generation
        *token++ = row.tokens[j * wire_columns];
        std::memcpy(ids, row.tokens + j * wire_columns, 4 * width);
        std::memcpy(logprobs, row.scores + j * wire_columns, 4 * width);
        ids += width;
        logprobs += width;
      }
      rank = std::copy(row.ranks, row.ranks + accept[i], rank);
    }
    return TP_BAD_NONE;
  }

  const Core &core_;
  const SourceMap &source_;
  const Variant variant_;
  const Generation generation_;
  Queue queue_;
  const uint64_t raw_at_;
  uint64_t saved_tokens_;
  uint64_t num_tokens_ = 0; // of the message in hand
  uint64_t num_misfits_ = 0;
};

} // namespace tp::sysv
