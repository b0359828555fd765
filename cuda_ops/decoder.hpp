// decoder.hpp: HOT PATH. One turn of decoder k: a slot or a mark in, a frame and new progress out,
// committed by one word.
//
// The order of a turn (each line is one store that others can see; tests kill between any two):
//   1  poll           a slot is published, or a mark waits
//   2  load           admissions and marks, after the slot was seen
//   3  write progress into the older copy: every row changed in this or the previous turn
//   4  write frame
//   5  write commit   slots done, frames, counters, into the older copy
//   6  turn word      makes 3 to 5 valid at once
//   7  release        the slot
// A successor goes on at the committed turn; whatever was half written is written again.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "ring.hpp"

namespace tp {

// Design: `state_` is the current progress of the rows this decoder owns (row % N == k), private;
// the shared copies are written from it. `changed_`/`changed_before_` name the rows that the older
// copy lacks. Only this decoder writes its tp_decoder, its frames and its rows' tp_progress.
class Decoder {
public:
  Decoder(const Core &core, uint32_t k)
      : core_(core), k_(k), shared_(core.decoder(k)), role_(core.role(TP_ROLE_DECODER + k)),
        turn_(observe(shared_.turn)), commit_(shared_.commit[turn_ & 1]),
        consumer_(core, k, commit_.slots_done) {
    const uint32_t n = core.sizes.num_decoders;
    for (uint32_t row = k; row < core.sizes.max_num_seqs; row += n) {
      rows_.push_back(Row{});
      state_.push_back(core.progress(turn_ & 1, row));
      changed_before_.push_back(static_cast<uint32_t>(rows_.size() - 1));
    }
    out_.reserve(rows_.size());
  }

  [[nodiscard]] uint64_t slots_done() const noexcept { return commit_.slots_done; }

  // Does at most `turns` turns; waits for the first one. Returns how many were done, 0 when the
  // time is up or a signal came.
  uint32_t run(uint32_t turns, const Patience &patience) noexcept {
    beat();
    uint32_t done = 0;
    if (wait_for_output(patience) && wait_for_input(patience))
      do {
        turn();
        beat();
      } while (++done < turns && has_output() && has_input());
    beat();
    return done;
  }

private:
  // What this decoder remembers of a row's admission.
  struct Row {
    uint64_t generation = 0;
    uint64_t from_sequence = 0;
    uint64_t arrival_ns = 0;
    uint32_t max_tokens = 0;
    uint32_t num_emitted = 0;
    uint32_t prompt_tokens = 0;
    uint32_t num_eos = 0;
    uint32_t id_bytes = 0;
    uint32_t mark = TP_FINISH_NONE; // that applies in this turn
    uint64_t visited = 0;           // turn in which a slot's row named it
    bool is_changed = false;
  };

  // One row of the frame in hand.
  struct Out {
    uint32_t index; // into rows_ and state_
    uint32_t send_idx;
    uint64_t first; // first token, as an index into the slot's token columns
    uint32_t num_tokens;
    uint32_t reason;
  };

  void beat() noexcept {
    put(role_.heartbeat_ns, now_ns());
    put(role_.turns, get(role_.turns) + 1);
  }

  [[nodiscard]] uint32_t row_number(uint32_t index) const noexcept {
    return k_ + index * core_.sizes.num_decoders;
  }

  [[nodiscard]] bool has_output() const noexcept {
    // SYNC POINT: output released - acquire: the client has done with the frames below it
    return commit_.frames - observe(core_.client().output[k_].released) < core_.sizes.output_slots;
  }

  [[nodiscard]] bool wait_for_output(const Patience &patience) noexcept {
    if (has_output())
      return true;
    const uint64_t begun = now_ns();
    put(role_.bell.wake_at,
        commit_.frames - core_.sizes.output_slots + std::max(1u, core_.sizes.output_slots / 4));
    const bool has =
        wait_for(role_.bell, TP_WAIT_SPACE, patience, [&]() noexcept { return has_output(); });
    put(role_.blocked_ns, get(role_.blocked_ns) + (now_ns() - begun));
    put(role_.blocked_times, get(role_.blocked_times) + 1);
    return has;
  }

  [[nodiscard]] bool has_input() noexcept { return consumer_.try_poll() != nullptr || has_mark(); }

  [[nodiscard]] bool wait_for_input(const Patience &patience) noexcept {
    return wait_for(role_.bell, TP_WAIT_INPUT, patience, [&]() noexcept { return has_input(); });
  }

  // A mark that a turn without a slot may turn into a final now.
  [[nodiscard]] bool has_mark() const noexcept {
    for (uint32_t i = 0; i < rows_.size(); ++i)
      if (applicable(i, observe(core_.admitted(row_number(i))), commit_.next_source_sequence))
        return true;
    return false;
  }

  // TP_FINISH_* of the mark that ends generation `generation` of row i at source sequence `at`.
  [[nodiscard]] uint32_t applicable(uint32_t i, uint64_t generation, uint64_t at) const noexcept {
    const tp_mark &mark = core_.mark(row_number(i));
    // SYNC POINT: mark - acquire: its from_sequence is there
    const uint64_t word = observe(mark.word);
    if (word == 0 || word >> 8 != generation || at < get(mark.from_sequence))
      return TP_FINISH_NONE;
    if (state_[i].generation == generation && state_[i].terminal != TP_FINISH_NONE)
      return TP_FINISH_NONE;
    return word & 0xff;
  }

  void turn() noexcept {
    const tp_step *slot = consumer_.try_poll();
    ++turn_;
    next_ = commit_;
    out_.clear();
    num_tokens_ = num_finals_ = 0;
    has_news_ = false;
    load_admissions(slot ? slot->source_sequence : commit_.next_source_sequence);
    if (slot)
      decode(*slot);
    finish_marked();
    begin_rewrite();
    write_progress();
    if (!out_.empty())
      write_frame(slot);
    write_commit();
    // SYNC POINT: turn word - release: progress, frame and commit record of this turn are valid
    publish(shared_.turn, turn_);
    commit_ = next_;
    ring_bell(core_.client().bell); // without a frame too: a client may wait for the whole step
    if (has_news_)
      count_event(core_.role(TP_ROLE_COORDINATOR).bell);
    if (slot)
      consumer_.release(commit_.slots_done);
    put(role_.progress_ns, now_ns());
  }

  void load_admissions(uint64_t at) noexcept {
    for (uint32_t i = 0; i < rows_.size(); ++i) {
      // SYNC POINT: admission - acquire: the fields of this generation are there
      const uint64_t generation = observe(core_.admitted(row_number(i)));
      if (generation != rows_[i].generation)
        load_admission(i, generation);
      rows_[i].mark = generation ? applicable(i, generation, at) : uint32_t{TP_FINISH_NONE};
    }
  }

  void load_admission(uint32_t i, uint64_t generation) noexcept {
    const tp_admission &a = core_.admission(row_number(i));
    Row &row = rows_[i];
    row.generation = generation;
    row.from_sequence = a.from_sequence;
    row.arrival_ns = a.arrival_ns;
    row.max_tokens = a.max_tokens;
    row.num_emitted = a.num_emitted;
    row.prompt_tokens = a.prompt_tokens;
    row.num_eos = std::min(a.num_eos, core_.sizes.max_eos_ids);
    row.id_bytes = std::min(a.id_bytes, core_.sizes.max_request_id_bytes);
    if (state_[i].generation == generation)
      return; // a successor: the request goes on where it was committed
    state_[i] = tp_progress{};
    state_[i].generation = static_cast<uint32_t>(generation);
    state_[i].emitted = row.num_emitted;
    change(i);
  }

  void change(uint32_t i) noexcept {
    if (!rows_[i].is_changed) {
      rows_[i].is_changed = true;
      changed_.push_back(i);
    }
  }

  void decode(const tp_step &slot) noexcept {
    tp_counters &count = next_.counters;
    next_.slots_done += 1;
    next_.next_source_sequence = slot.source_sequence + 1;
    count.steps += 1;
    if (slot.bad != TP_BAD_NONE) {
      if (k_ == 0 && slot.bad < TP_BAD_REASONS)
        (&count.bad_rows)[slot.bad - 1] += 1;
      return;
    }
    const uint32_t n = slot.num_rows, decoders = core_.sizes.num_decoders;
    const StepColumns at(n, slot.num_tokens, slot.width, slot.flags);
    const auto *rows = column<uint32_t>(slot, at.rows);
    const auto *accept =
        slot.flags & TP_STEP_ACCEPT ? column<int32_t>(slot, at.accept_num) : nullptr;
    if (accept && !adds_up(slot, accept)) {
      if (k_ == 0) {
        count.bad_tokens += 1;
        count.tokens_seen += slot.num_tokens;
        count.dropped_bad_row += slot.num_tokens;
      }
      return;
    }
    uint64_t first = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const auto num = accept ? static_cast<uint32_t>(accept[i]) : 1u;
      if (decoders == 1 || rows[i] % decoders == k_)
        decode_row(slot, at, i, rows[i], first, num);
      first += num;
    }
  }

  // The accept counts are the engine's: their sum must be the token count that the columns have.
  [[nodiscard]] bool adds_up(const tp_step &slot, const int32_t *accept) const noexcept {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < slot.num_rows; ++i) {
      if (accept[i] < 0 || static_cast<uint32_t>(accept[i]) > core_.sizes.max_draft_tokens)
        return false;
      sum += static_cast<uint32_t>(accept[i]);
    }
    return sum == slot.num_tokens;
  }

  void decode_row(const tp_step &slot, const StepColumns &at, uint32_t i, uint32_t number,
                  uint64_t first, uint32_t num) noexcept {
    tp_counters &count = next_.counters;
    const uint32_t state = column<uint8_t>(slot, at.states)[i];
    if (state != TP_ROW_TOKEN)
      num = 0;
    count.rows_seen += 1;
    count.tokens_seen += num;
    if (number >= core_.sizes.max_num_seqs || state > TP_ROW_ACKNOWLEDGED) {
      count.dropped_bad_row += num;
      return;
    }
    const uint32_t index = number / core_.sizes.num_decoders;
    Row &row = rows_[index];
    tp_progress &p = state_[index];
    const uint32_t generation = column<uint32_t>(slot, at.generations)[i];
    if (generation == 0) {
      count.dropped_padded += num;
      return;
    }
    if (generation != row.generation) {
      (generation < row.generation ? count.dropped_stale : count.dropped_unadmitted) += num;
      return;
    }
    if (slot.source_sequence < row.from_sequence) {
      count.dropped_early += num;
      return;
    }
    if (row.visited == turn_) {
      count.dropped_repeated += num;
      return;
    }
    row.visited = turn_;
    if (state == TP_ROW_ACKNOWLEDGED) {
      p.acknowledged = generation;
      p.num_acknowledged += 1;
      count.acknowledgements += 1;
      has_news_ = true;
      change(index);
      return;
    }
    if (p.terminal != TP_FINISH_NONE || row.mark != TP_FINISH_NONE) {
      count.dropped_finished += num;
      return;
    }
    if (state == TP_ROW_RECOVERY) {
      emit(index, first, 0, TP_FINISH_RECOVERY, slot.saved_ns);
      return;
    }
    if (slot.flags & TP_STEP_POSITIONS && num != 0) {
      const int32_t position = column<int32_t>(slot, at.positions)[i];
      if (position >= 0 && static_cast<uint32_t>(position) < p.emitted) {
        const uint32_t again = std::min(num, p.emitted - static_cast<uint32_t>(position));
        count.dropped_repeated += again;
        first += again;
        num -= again;
      } else if (position >= 0 && static_cast<uint32_t>(position) > p.emitted) {
        // Tokens are missing before this one: to go on would hide the hole.
        count.dropped_bad_row += num;
        emit(index, first, 0, TP_FINISH_ERROR, slot.saved_ns);
        return;
      }
    }
    if (num != 0)
      cut(column<int32_t>(slot, at.tokens) + first, index, first, num, slot.saved_ns);
  }

  // The one place where a row's tokens end: ids, logprobs, ranks and counts are all cut here.
  void cut(const int32_t *tokens, uint32_t index, uint64_t first, uint32_t num,
           uint64_t saved_ns) noexcept {
    const Row &row = rows_[index];
    const int32_t *eos = core_.eos(row_number(index));
    tp_counters &count = next_.counters;
    uint32_t reason = TP_FINISH_NONE, taken = 0;
    while (taken < num && reason == TP_FINISH_NONE) {
      const int32_t token = tokens[taken];
      if (token < 0) {
        count.dropped_bad_row += num - taken;
        emit(index, first, taken, TP_FINISH_ERROR, saved_ns);
        return;
      }
      ++taken;
      for (uint32_t e = 0; e < row.num_eos; ++e)
        if (eos[e] == token)
          reason = TP_FINISH_STOP;
      if (reason == TP_FINISH_NONE && row.max_tokens != 0 &&
          state_[index].emitted + taken >= row.max_tokens)
        reason = TP_FINISH_LENGTH;
    }
    count.dropped_finished += num - taken;
    emit(index, first, taken, reason, saved_ns);
  }

  void emit(uint32_t index, uint64_t first, uint32_t num, uint32_t reason,
            uint64_t saved_ns) noexcept {
    tp_progress &p = state_[index];
    tp_counters &count = next_.counters;
    out_.push_back({index, p.emitted, first, num, reason});
    num_tokens_ += num;
    count.tokens_delivered += num;
    if (num != 0) {
      if (p.first_token_ns == 0)
        p.first_token_ns = saved_ns;
      p.last_token_ns = saved_ns;
      p.emitted += num;
    }
    if (reason != TP_FINISH_NONE) {
      p.terminal = reason;
      (&count.finals_stop)[reason - 1] += 1;
      ++num_finals_;
      has_news_ = true;
    }
    change(index);
  }

  void finish_marked() noexcept {
    for (uint32_t i = 0; i < rows_.size(); ++i)
      if (rows_[i].mark != TP_FINISH_NONE)
        emit(i, 0, 0,
             rows_[i].mark <= TP_FINISH_SHUTDOWN ? rows_[i].mark : uint32_t{TP_FINISH_ERROR},
             now_ns());
  }

  void write_progress() noexcept {
    for (const uint32_t i : changed_)
      write_row(i);
    for (const uint32_t i : changed_before_)
      if (!rows_[i].is_changed)
        write_row(i);
    for (const uint32_t i : changed_)
      rows_[i].is_changed = false;
    changed_before_.swap(changed_);
    changed_.clear();
  }

  // Word by word: the coordinator may be reading the copy that this turn retires.
  template <class Record> static void rewrite(Record &to, const Record &from) noexcept {
    static_assert(sizeof(Record) % 8 == 0);
    auto *words = reinterpret_cast<uint64_t *>(&to);
    const auto *source = reinterpret_cast<const uint64_t *>(&from);
    for (size_t i = 0; i < sizeof(Record) / 8; ++i)
      put(words[i], source[i]);
  }

  void write_row(uint32_t i) noexcept {
    rewrite(core_.progress(turn_ & 1, row_number(i)), state_[i]);
  }

  void write_commit() noexcept { rewrite(shared_.commit[turn_ & 1], next_); }

  void write_frame(const tp_step *slot) noexcept {
    tp_frame &frame = core_.frame(k_, commit_.frames);
    const auto n = static_cast<uint32_t>(out_.size());
    const uint32_t width = slot && num_tokens_ != 0 ? slot->width : 0;
    const FrameColumns to(n, num_tokens_, width, num_finals_, core_.sizes.max_request_id_bytes);
    frame.number = commit_.frames;
    frame.sequence = commit_.slots_done;
    frame.source_sequence = slot ? slot->source_sequence : commit_.next_source_sequence;
    frame.saved_ns = slot ? slot->saved_ns : 0;
    frame.published_ns = slot ? slot->published_ns : 0;
    frame.decoder = k_;
    frame.num_rows = n;
    frame.num_tokens = num_tokens_;
    frame.width = width;
    frame.num_finals = num_finals_;
    frame.message_flag = slot ? slot->message_flag : 3;
    frame.has_slot = slot != nullptr;
    frame.flags = slot ? slot->flags & TP_STEP_NOT_NEED_STOP : 0;
    frame.bytes = static_cast<uint32_t>(to.end);
    write_rows(frame, to);
    if (num_tokens_ != 0)
      write_tokens(*slot, frame, to);
    frame.committed_ns = now_ns();
    next_.frames += 1;
    if (slot) {
      observe_latency(shared_.saved_to_published, slot->published_ns - slot->saved_ns);
      observe_latency(shared_.saved_to_committed, frame.committed_ns - slot->saved_ns);
    }
  }

  void write_rows(tp_frame &frame, const FrameColumns &to) noexcept {
    auto *row = column<uint32_t>(frame, to.row),
         *generation = column<uint32_t>(frame, to.generation),
         *send_idx = column<uint32_t>(frame, to.send_idx),
         *offsets = column<uint32_t>(frame, to.token_offsets);
    auto *reasons = column<uint8_t>(frame, to.finish_reason);
    auto *finals = column<tp_final>(frame, to.finals);
    auto *ids = column<char>(frame, to.ids);
    uint32_t offset = 0, f = 0;
    for (uint32_t i = 0; i < out_.size(); ++i) {
      const Out &out = out_[i];
      row[i] = row_number(out.index);
      generation[i] = state_[out.index].generation;
      send_idx[i] = out.send_idx;
      offsets[i] = offset;
      reasons[i] = static_cast<uint8_t>(out.reason);
      offset += out.num_tokens;
      if (out.reason == TP_FINISH_NONE)
        continue;
      const Row &r = rows_[out.index];
      const tp_progress &p = state_[out.index];
      finals[f] = tp_final{i,
                           r.id_bytes,
                           p.emitted,
                           r.prompt_tokens,
                           r.arrival_ns,
                           p.first_token_ns,
                           p.last_token_ns,
                           {}};
      std::memcpy(ids + uint64_t{f} * core_.sizes.max_request_id_bytes, core_.id(row[i]),
                  r.id_bytes);
      ++f;
    }
    offsets[out_.size()] = offset;
  }

  // Neighbouring rows of the slot are neighbours in the frame, so whole runs are copied at once.
  void write_tokens(const tp_step &slot, tp_frame &frame, const FrameColumns &to) const noexcept {
    const StepColumns from(slot.num_rows, slot.num_tokens, slot.width, slot.flags);
    const uint64_t width = frame.width;
    uint64_t put_at = 0;
    for (size_t i = 0; i < out_.size();) {
      const uint64_t first = out_[i].first;
      uint64_t count = out_[i].num_tokens;
      for (++i; i < out_.size() && (out_[i].num_tokens == 0 || out_[i].first == first + count); ++i)
        count += out_[i].num_tokens;
      copy(frame, to.token_ids, slot, from.tokens, put_at, first, count);
      if (width != 0) {
        copy(frame, to.topk_ids, slot, from.topk_ids, put_at * width, first * width, count * width);
        copy(frame, to.topk_logprobs, slot, from.logprobs, put_at * width, first * width,
             count * width);
        copy(frame, to.ranks, slot, from.ranks, put_at, first, count);
      }
      put_at += count;
    }
  }

  static void copy(tp_frame &frame, uint64_t to, const tp_step &slot, uint64_t from,
                   uint64_t to_word, uint64_t from_word, uint64_t words) noexcept {
    std::memcpy(column<uint32_t>(frame, to) + to_word, column<uint32_t>(slot, from) + from_word,
                words * 4);
  }

  static void observe_latency(tp_histogram &h, uint64_t ns) noexcept {
    const auto bucket =
        std::min<uint64_t>(std::bit_width(ns / 1000), uint64_t{TP_LATENCY_BUCKETS} - 1);
    put(h.count[bucket], get(h.count[bucket]) + 1);
    put(h.sum_ns, get(h.sum_ns) + ns);
  }

  const Core &core_;
  const uint32_t k_;
  tp_decoder &shared_;
  tp_role &role_;
  uint64_t turn_;
  tp_commit commit_; // as committed
  tp_commit next_{}; // of the turn in hand
  Consumer consumer_;
  std::vector<Row> rows_;
  std::vector<tp_progress> state_;
  std::vector<uint32_t> changed_, changed_before_;
  std::vector<Out> out_;
  uint32_t num_tokens_ = 0, num_finals_ = 0;
  bool has_news_ = false;
};

} // namespace tp
